# SPDX-License-Identifier: Apache-2.0
"""The layer on one device against the dense reference.

Shape letters: T tokens, K choices a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_moe_ext.moe.gate import SoftmaxTopK, capacity_of, drop_over_capacity
from ds_moe_ext.testing import dense_experts, relative_error
from tests.gpu.layers import DEVICES, Case, Runner, one_by_one, side_by_side

CASES = {
    "uniform": Case(),
    "one hot expert": Case(hot=50.0),
    "top 1": Case(top_k=1),
    "top 4": Case(top_k=4),
    "dead experts": Case(dead=3),
    "64 experts": Case(num_experts=64),
    "one expert": Case(num_experts=1, top_k=1),
    "one token": Case(num_tokens=1),
    "no tokens": Case(num_tokens=0),
    "two chunks": Case(degrees=(2, 2)),
    "three chunks forward, two backward": Case(degrees=(3, 2)),
    "one chunk forward, four backward": Case(degrees=(1, 4)),
    "four chunks forward, one backward": Case(degrees=(4, 1), hot=3.0),
    "more chunks than tokens": Case(degrees=(4, 3), num_tokens=2),
    "capacity": Case(capacity_factor=1.0, hot=1.0),
    "capacity in chunks": Case(capacity_factor=0.7, degrees=(3, 4), top_k=4),
}
NAMES = ("y", "losses", "x", "gate", "up", "down")


def dense(case: Case, x: Tensor, grad: Tensor) -> list[Tensor]:
    """y, losses and the gradients of x and the weights, the experts in float64."""
    x = x.detach().double().requires_grad_()
    gate, up, down = (w.to(x.device).double().requires_grad_() for w in case.weights())
    # The gate in the layer's own precision, so that it chooses the same experts.
    choice = SoftmaxTopK(top_k=case.top_k)(x.to(case.dtype), (gate.to(case.dtype),))
    expert_TK = choice.expert_TK
    if case.capacity_factor is not None:
        capacity = capacity_of(expert_TK.numel(), case.num_experts, case.capacity_factor)
        expert_TK = drop_over_capacity(expert_TK, case.num_experts, capacity)
    y = dense_experts(x, expert_TK, choice.score_TK.double(), up, down)
    loss = torch.sum(y * grad) + 0.1 * choice.losses[0] + 0.2 * choice.losses[1]
    loss.backward()
    grads = [leaf.grad for leaf in (x, gate, up, down)]
    return [y.detach(), choice.losses.detach(), *(g for g in grads if g is not None)]


def errors(case: Case, ours: list[Tensor], device: torch.device) -> dict[str, float]:
    x, grad = (tensor.to(device) for tensor in case.tokens())
    reference = dense(case, x, grad)
    return {
        name: relative_error(a.double(), b.double()) for name, a, b in zip(NAMES, ours, reference)
    }


@DEVICES
@pytest.mark.parametrize("streams_of", [one_by_one, side_by_side])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense(name: str, device: torch.device, streams_of: type) -> None:
    case = CASES[name]
    x, grad = (tensor.to(device) for tensor in case.tokens())
    ours = Runner.of(case, device, streams_of(device)).step(x, grad)
    found = errors(case, ours, device)
    assert max(found.values()) <= 1e-12, found


BF16 = Case(num_tokens=256, width=64, expert_width=128, dtype=torch.bfloat16)
BF16_CASES = {
    "uniform": BF16,
    "two chunks": Case(256, 64, 128, degrees=(2, 2), dtype=torch.bfloat16),
    "three chunks forward, two backward": Case(256, 64, 128, degrees=(3, 2), dtype=torch.bfloat16),
    "top 8 of 32": Case(256, 64, 128, num_experts=32, top_k=8, dtype=torch.bfloat16),
    "dead experts": Case(256, 64, 128, dead=5, dtype=torch.bfloat16),
}


@DEVICES
@pytest.mark.parametrize("name", BF16_CASES)
def test_bfloat16_by_grouped_gemm(name: str, device: torch.device) -> None:
    case = BF16_CASES[name]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("torch has grouped GEMM kernels from compute capability 9.0 on")
    x, grad = (tensor.to(device) for tensor in case.tokens())
    runner = Runner.of(case, device, one_by_one(device))
    grouped_mm = torch.nn.functional.grouped_mm
    with mock.patch.object(torch.nn.functional, "grouped_mm", wraps=grouped_mm) as used:
        ours = runner.step(x, grad)
    forward, backward = case.degrees
    num_pieces = forward + backward - math.gcd(forward, backward)
    # Two products and two gradients of each; on a CPU experts go one by one, which is faster.
    assert used.call_count == (6 * num_pieces if device.type == "cuda" else 0)
    found = errors(case, ours, device)
    # A bfloat16 has 8 bits: 0.4 % a rounding, of several in a row.
    assert max(found.values()) <= 2e-2, found


@pytest.mark.gpu
@pytest.mark.parametrize("width", [12, 64])
def test_widths_that_grouped_gemm_cannot_take(width: int) -> None:
    """12 bfloat16 are no multiple of 16 bytes: one GEMM an expert instead, the same result."""
    case = Case(width=width, expert_width=24, dtype=torch.bfloat16)
    device = torch.device("cuda", 0)
    x, grad = (tensor.to(device) for tensor in case.tokens())
    ours = Runner.of(case, device, one_by_one(device)).step(x, grad)
    found = errors(case, ours, device)
    assert max(found.values()) <= 2e-2, found
