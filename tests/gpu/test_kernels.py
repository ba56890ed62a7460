# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels beside their twins, of torch's operations or of numpy's.

``TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py`` runs them on a CPU, where Triton is
installed; its interpreter cuts off where a device rounds, so that 16 bits differ by one step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_moe_ext.core import kernels
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import Moved, indices_of
from ds_moe_ext.moe.feed_forward import _product, _product_grad
from ds_moe_ext.moe.order import Padding, RankCoordinates
from ds_moe_ext.moe.route import Route, one_rank_route, weighing_grads
from ds_moe_ext.schedule.task import ChunkRange
from tests.gpu.layers import CPU, ON_CUDA

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and kernels.HAS_TRITON
NEEDS_IT = pytest.mark.skipif(not INTERPRETS, reason="needs Triton and TRITON_INTERPRET=1")
DEVICES = pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu", marks=NEEDS_IT), ON_CUDA])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
STEPS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}
"""What one step of a number is, of its own size at most; in 32 bits some of them, for sums."""


@contextmanager
def without_kernels() -> Iterator[None]:
    with mock.patch.object(kernels, "has_kernels", lambda *tensors: False):
        yield


def error(ours: Tensor, twin: Tensor) -> float:
    assert (ours.shape, ours.dtype) == (twin.shape, twin.dtype)
    if not twin.any():  # or has no elements
        return float(ours.any())
    ours, twin = ours.double(), twin.double()
    return float(((ours - twin).abs() / twin.abs().clamp(min=float(twin.abs().max()) / 64)).max())


@DEVICES
@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(5, 7), (3, 1500), (0, 8), (64, 1024)])
def test_silu_product(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    gate_up_RF = torch.randn(rows, 2 * width, device=device, dtype=dtype)
    grad_RF = torch.randn(rows, width, device=device, dtype=dtype)
    ours = kernels.silu_product(gate_up_RF), kernels.silu_product_grad(gate_up_RF, grad_RF)
    with without_kernels():
        twins = _product(gate_up_RF), _product_grad(gate_up_RF, grad_RF)
    assert max(map(error, ours, twins)) <= 2 * STEPS[dtype]


def some_route(num_tokens: int, top_k: int, device: torch.device) -> Route:
    expert_TE = torch.rand(num_tokens, 8, device=device).argsort(dim=1)
    whole = one_rank_route(expert_TE[:, :top_k], Placement.block(8, 1))
    return whole.on(ChunkRange(0, 1))


@DEVICES
@DTYPES
@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("sizes", [(5, 2, 7), (9, 1, 1500), (0, 2, 8), (33, 4, 2050)], ids=str)
def test_sums_by_token(
    device: torch.device, dtype: torch.dtype, is_wide: bool, sizes: tuple[int, int, int]
) -> None:
    check_sums(some_route(sizes[0], sizes[1], device), sizes[2], dtype, is_wide)


@DEVICES
@DTYPES
@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("sizes", [(5, 2, 7), (9, 1, 1500), (0, 2, 8), (33, 4, 70)], ids=str)
def test_sums_of_padded_rows(
    device: torch.device, dtype: torch.dtype, is_wide: bool, sizes: tuple[int, int, int]
) -> None:
    """Some choices have no row, and some rows are no choice's."""
    tokens, top_k, width = sizes
    expert_TE = torch.rand(tokens, 8, device=device).argsort(dim=1)
    whole, _ = Padding(3, Placement.block(8, 1), RankCoordinates(0)).route(expert_TE[:, :top_k])
    route = whole.on(ChunkRange(0, 1))
    assert route.row_of_choices is route.padded_row_N
    check_sums(route, width, dtype, is_wide)


def check_sums(route: Route, width: int, dtype: torch.dtype, is_wide: bool) -> None:
    torch.manual_seed(0)
    device, tokens, top_k = route.choice_N.device, route.num_tokens, route.top_k
    rows_ND = torch.randn(route.choice_N.numel(), width, device=device, dtype=dtype)
    score_TK = torch.rand(tokens, top_k, device=device, dtype=torch.float32 if is_wide else dtype)
    grad_TD = torch.randn(tokens, width, device=device, dtype=dtype)
    for weight_TK in (score_TK, None):
        ours = kernels.sums_by_token(rows_ND, route.row_of_choices, weight_TK, top_k)
        with without_kernels():
            twin = route.sum_by_token(rows_ND, weight_TK)
        # Summands that cancel leave the steps of the larger ones.
        assert error(ours, twin) <= 64 * STEPS[dtype]
        assert (ours.float() - twin.float()).abs().sum() <= STEPS[dtype] * twin.float().abs().sum()
    places = route.token_N, route.choice_N
    grad_ND, grad_TK = kernels.sums_by_token_grads(
        rows_ND, *places, score_TK, grad_TD, is_full=route.is_full
    )
    with without_kernels():
        twin_ND, twin_TK = weighing_grads(route, rows_ND, score_TK, grad_TD)
    assert error(grad_ND, twin_ND) <= 2 * STEPS[dtype]
    assert (grad_TK.shape, grad_TK.dtype) == (twin_TK.shape, twin_TK.dtype)
    scale = STEPS[dtype] * float(width) ** 0.5
    assert (grad_TK.float() - twin_TK.float()).abs().max().item() <= 4 * scale if tokens else True


@pytest.mark.gpu
def test_bits_are_those_of_the_twins() -> None:
    """In the type that models are trained in: a run learns what it learnt before."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    gate_up_RF = torch.randn(512, 3072, device=device, dtype=dtype)
    grad_RF = torch.randn(512, 1536, device=device, dtype=dtype)
    ours = kernels.silu_product(gate_up_RF), kernels.silu_product_grad(gate_up_RF, grad_RF)
    with without_kernels():
        twins = _product(gate_up_RF), _product_grad(gate_up_RF, grad_RF)
    assert twins[0].dtype == dtype
    assert all(map(torch.equal, ours, twins))


@DEVICES
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("longest", [0, 1, 40])
def test_index_of_blocks(device: torch.device, num_blocks: int, longest: int) -> None:
    """Of blocks, some of which are empty."""
    drawn = np.random.default_rng([num_blocks, longest])
    length_X = drawn.integers(0, longest + 1, num_blocks)
    shift_X = drawn.integers(-1000, 1000, num_blocks)
    table = np.concatenate((shift_X, length_X.cumsum(), [5, 6, 7])).astype(np.int32)
    num_rows = int(length_X.sum())
    index_R = kernels.index_of_blocks(torch.from_numpy(table).to(device), num_blocks, num_rows)
    assert index_R.tolist() == (np.repeat(shift_X, length_X) + np.arange(num_rows)).tolist()


@DEVICES
def test_indices_are_those_of_numpy(device: torch.device) -> None:
    shifts_and_lengths = [([3, -2, 0, 9], [4, 0, 2, 5]), ([1], [3])]
    orders = [Moved(*map(np.array, each)) for each in shifts_and_lengths]
    also = np.array([7, 8])
    found = []
    for are_there in (True, False):
        with mock.patch.object(kernels, "are_there", lambda device, answer=are_there: answer):
            found.append(indices_of(orders, (11, 3), device, also))
    (indices, there), (twins, also_there) = found
    assert all(map(torch.equal, indices, twins))
    assert there.tolist() == also_there.tolist() == also.tolist()
