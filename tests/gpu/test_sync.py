# SPDX-License-Identifier: Apache-2.0
"""Where an EP rank holds all experts and nothing is dropped, the host never waits for the
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.schedule.executor import ScheduleStreams
from tests.gpu.layers import DEVICES, Case, Runner, layer_of, one_by_one, side_by_side

CASE = Case(num_tokens=256, width=64, expert_width=128, dtype=torch.bfloat16)
# On CUDA these make the host wait: what they give, or its size, depends on what is in the tensor.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
}


class NoWaitingOps(TorchDispatchMode):
    """On a CPU nobody waits: name the ops that would on CUDA."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        assert name not in WAITING, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Any wait of the host for the device is an error."""
    if device.type != "cuda":
        with NoWaitingOps():
            yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def skip_without_grouped_gemm(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("without grouped GEMM the token counts of experts must be known on the host")


def test_a_wait_is_noticed() -> None:
    with pytest.raises(AssertionError, match="bincount"), no_waiting(torch.device("cpu")):
        torch.arange(3).bincount()


@pytest.mark.gpu
def test_a_wait_is_noticed_on_cuda() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError), no_waiting(device):
        torch.ones(1, device=device).item()


def check(device: torch.device, step: Callable[[], Tensor]) -> None:
    step()  # warm-up: libraries allocate and choose algorithms once
    with no_waiting(device):
        y = step()
    assert y.isfinite().all()


STREAMS: Mapping[str, Callable[[torch.device], ScheduleStreams]] = {
    "one by one": one_by_one,
    "side by side": side_by_side,
}


@DEVICES
@pytest.mark.parametrize("streams", STREAMS)
def test_after_a_gate_of_the_hosts(device: torch.device, streams: str) -> None:
    skip_without_grouped_gemm(device)
    x, grad = (tensor.to(device) for tensor in CASE.tokens())
    layer = layer_of(CASE, device)
    routed = RoutedExperts(
        CASE.strategy, layer.routed.layer_context, FeedForwardExperts(silu_gated)
    )
    program = replace(routed.program(device), streams=STREAMS[streams](device))
    choice = SoftmaxTopK(top_k=CASE.top_k)(x, tuple(layer.gate_weights))
    score_TK = choice.score_TK.detach().requires_grad_()

    def step() -> Tensor:
        leaf = x.detach().requires_grad_()
        (y,) = program(leaf, choice.expert_TK, score_TK, tuple(layer.expert_weights))
        assert isinstance(y, Tensor)
        y.backward(grad)
        return y

    check(device, step)


@DEVICES
@pytest.mark.parametrize("streams", STREAMS)
def test_with_a_gate_of_ours(device: torch.device, streams: str) -> None:
    skip_without_grouped_gemm(device)
    x, grad = (tensor.to(device) for tensor in CASE.tokens())
    runner = Runner.of(CASE, device, STREAMS[streams](device))
    check(device, lambda: runner.step(x, grad)[0])
