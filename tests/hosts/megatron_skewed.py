# SPDX-License-Identifier: Apache-2.0
"""Runs under Megatron-core whose experts are unevenly busy, so that replicas of them are made.

The norm before a router gives rows whose elements sum to 0. With a bias of ones there, a constant
that is added to an expert's row of the router's weights shifts all its logits alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.hosts import megatron_toy
from tests.hosts.copied_runs import Step, Watch, num_copied, watching
from tests.hosts.megatron_jobs import Trained, Training, train
from tests.hosts.megatron_toy import MegatronRun
from tests.ranks import pool_of

NEVER = -40.0
"""Added to the logits of an expert, it gets no rows."""


@dataclass(frozen=True)
class Seen:
    """What a rank has found."""

    trained: Trained
    steps: list[Step]


def train_skewed(
    rank: int,
    world_size: int,
    run: MegatronRun,
    settings: dict[str, Any] | None = None,
    skew: tuple[float, ...] = (),
    *,
    late_s: float = 0.0,
    prepare: Callable[[nn.Module], None] | None = None,
    look: Callable[[Training], Any] | None = None,
) -> Seen:
    """Run all steps on one rank of a pool."""
    watch, drawn = Watch(late_s), megatron_toy.draw

    def draw(chunks: list[nn.Module], is_gated: bool, num_experts: int | None) -> None:
        drawn(chunks, is_gated, num_experts)
        for chunk in chunks:
            _skew(chunk, skew)
            if prepare is not None:
                prepare(chunk)

    with mock.patch.object(megatron_toy, "draw", draw), watching(watch):
        trained = train(rank, world_size, run, settings, keep=True, look=look)
    return Seen(trained, watch.steps)


_STOCK: dict[str, list[Seen]] = {}


def stock(
    world_size: int, run: MegatronRun, skew: tuple[float, ...], **given: Callable[..., Any] | None
) -> list[Seen]:
    """What the ranks of a pool find without us; each run once. ``given`` as of ``train_skewed``."""
    key = repr((world_size, run, skew, given))
    if key not in _STOCK:
        _STOCK[key] = pool_of(world_size).run(train_skewed, run, None, skew, **given)
    return _STOCK[key]


def _skew(chunk: nn.Module, skew: tuple[float, ...]) -> None:
    if not skew:
        return
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for name, layer in chunk.named_modules():
        if isinstance(layer, MoELayer) and layer.router.weight is not None:  # has attention
            block = chunk.get_submodule(name.rpartition(".")[0])
            norm, weight = block.get_submodule("pre_mlp_layernorm"), layer.router.weight
            shift = torch.tensor(skew, dtype=weight.dtype) / weight.shape[1]
            with torch.no_grad():
                norm.get_parameter("bias").fill_(1)
                weight.add_(shift[:, None])


def assert_equal(ours: list[Seen], stock: list[Seen], tolerance: float = 1e-12) -> None:
    """Every rank of two runs of one layout has found the same: gradients of step 0, losses, norms,
    and weights at the end, whose small gradients Adam makes large."""
    for own, its in zip(ours, stock, strict=True):
        assert own.trained.losses == pytest.approx(its.trained.losses, rel=tolerance)
        assert own.trained.norms == pytest.approx(its.trained.norms, rel=10 * tolerance)
        assert worst(own.trained.gradients, its.trained.gradients) <= tolerance
        assert worst(own.trained.weights, its.trained.weights) <= 1000 * tolerance


def worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest error of a tensor over its largest element; of those that should be zero, over a
    small part of the largest of all."""
    assert ours.keys() == theirs.keys()
    sizes = {name: float(tensor.abs().max()) for name, tensor in theirs.items()}
    least = 1e-6 * max(sizes.values(), default=1.0)
    errors = [
        float((ours[name] - tensor).abs().max()) / max(sizes[name], least)
        for name, tensor in theirs.items()
    ]
    return max(errors, default=0.0)


def num_replicas(seen: list[Seen]) -> int:
    """In all plans of all steps, on the rank that had most."""
    return max(sum(num_copied(one.steps)) for one in seen)
