# SPDX-License-Identifier: Apache-2.0
"""What is warned of as a run under Megatron-core starts, once: that which it will not do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_refusals import ONE, block, spoiled
from tests.ranks import pool_of

CLAMP: dict[str, Any] = {"activation_func_clamp_value": 0.05}
CLAMPED = replace(ONE, num_layers=2, swiglu=True, config=tuple(CLAMP.items()))
FUSED = replace(CLAMPED, config=(*CLAMPED.config, ("bias_activation_fusion", True)))
TWO = replace(ONE, num_layers=2)


def hooked(chunk: nn.Module) -> None:
    """Linear modules of experts report of their inputs."""
    for name, module in chunk.named_modules():
        if name.endswith("local_experts.1.linear_fc1"):
            module.register_forward_hook(print)


def hooked_above(chunk: nn.Module) -> None:
    """Experts report as a whole, which goes on."""
    for name, module in chunk.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(print)


def untouched(chunk: nn.Module) -> None:
    """Nothing is done."""


def warned(
    rank: int, world_size: int, run: MegatronRun, spoil: Callable[[nn.Module], None]
) -> list[str]:
    """What is, by us."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with spoiled(spoil), megatron(run, block(megatron={"layer": "program"})):
            Training(run)
    return [text for one in caught if (text := str(one.message)).startswith("ds_moe_ext")]


@pytest.mark.parametrize(
    ("run", "spoil", "expected"),
    [
        (FUSED, untouched, "clamp_value is 0.05, but .* use --no-bias-swiglu-fusion"),
        (TWO, hooked, r"hooks of .*\.local_experts\.1\.linear_fc1 and 1 more are never called"),
    ],
)
def test_what_is_not_done_is_reported_once(run: MegatronRun, spoil: Any, expected: str) -> None:
    with pytest.warns(UserWarning, match=expected):
        (text,) = pool_of(1).run(warned, run, spoil)[0]
        warnings.warn(text, stacklevel=1)


@pytest.mark.parametrize(
    ("run", "spoil"),
    [
        (CLAMPED, untouched),
        (replace(TWO, optimizer="distributed", overlap_param_gather=True), hooked_above),
    ],
)
def test_what_is_done_is_not_reported(run: MegatronRun, spoil: Any) -> None:
    run = replace(run, overlap_grad_reduce=run.overlap_param_gather)
    assert pool_of(1).run(warned, run, spoil)[0] == []


def with_newer(rank: int, world_size: int) -> list[str]:
    """What is, where Megatron's fused SwiGLU takes a clamp, as that of later versions does."""
    from ds_moe_ext.hosts.megatron import layers

    def newer(input: Any, bias: Any, weights: Any, clamp_value: float | None = None) -> Any:
        raise AssertionError("experts run by our program")

    with mock.patch.object(layers, "weighted_bias_swiglu_impl", newer):
        return warned(rank, world_size, FUSED, untouched)


def test_a_fused_activation_that_takes_a_clamp() -> None:
    assert pool_of(1).run(with_newer)[0] == []
