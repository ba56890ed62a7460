# SPDX-License-Identifier: Apache-2.0
"""SwiGLU experts with their own adjoint, against autograd through the same products.

On a CPU they go slot by slot; where a tensor says that it is on none, by grouped GEMM, as on a GPU.
Shape letters: R rows, S slots, D model width, F expert width.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_world import as_on_cuda
from torch import Tensor

from ds_moe_ext.moe.expert import gradients, run_apart
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.testing import relative_error
from tests.gpu.way import nothing_in_new_memory

S, D, F = 4, 8, 12


@dataclass(frozen=True)
class Case:
    rows_S: tuple[int, ...] = (5, 0, 35, 1)
    dtype: torch.dtype = torch.float32
    row_dtype: torch.dtype | None = None  # None: as the weights
    is_transposed: bool = False
    trained: tuple[bool, bool, bool] = (True, True, True)  # rows, up, down
    gap: bool = False  # between the weights of the second slot and the third


def drawn(case: Case, sizes: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Rows, their gradient, and weights: by slot, or in stacks of so many slots."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    rows, grad = (rand(sum(case.rows_S), D).to(case.row_dtype or case.dtype) for _ in range(2))
    num = S + case.gap
    up, down = rand(num, 2 * F, D), rand(num, D, F)
    if case.is_transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    kept = [slot + (case.gap and slot > 1) for slot in range(S)]
    of_rows, of_up, of_down = case.trained
    own = [w for i in kept for w in (up[i].requires_grad_(of_up), down[i].requires_grad_(of_down))]
    if sizes:
        parts = zip(up[kept].split(sizes), down[kept].split(sizes))
        own = [
            stack.clone().requires_grad_(is_trained)
            for both in parts
            for stack, is_trained in zip(both, (of_up, of_down))
        ]
    return rows.requires_grad_(of_rows), grad, tuple(own)


def by_autograd(case: Case, function: FeedForwardExperts, slots: SlotRows) -> list[Any]:
    rows, grad, weights = drawn(case)
    (out,), saved = run_apart(lambda x, w: (function(x, slots, w),), (rows, weights))
    found = gradients(saved, (grad,), (True,))
    return [out, *flat(found)]


def by_hand(
    case: Case, function: FeedForwardExperts, slots: SlotRows, sizes: tuple[int, ...]
) -> list[Any]:
    rows, grad, given = drawn(case, sizes)
    computed = function.by_hand(rows, slots, given, function.arrangement(given).runs)
    assert computed is not None
    out, adjoint, kept = computed
    assert not out.requires_grad
    found = adjoint.gradients(kept, grad)
    if sizes and found:
        each = zip(found[1], (size for size in sizes for _ in range(2)))
        by_stack = [[None] * size if stack is None else [*stack.unbind()] for stack, size in each]
        by_name = [[*chain.from_iterable(by_stack[number::2])] for number in range(2)]
        found = found[0], tuple(weight for slot in zip(*by_name) for weight in slot)
    return [out, *flat(found)]


def flat(found: Any) -> list[Any]:
    """Of what autograd was not asked for it reports nothing."""
    if not found:
        return [None] * (1 + 2 * S)
    rows, weights = found
    return [rows, *weights]


CASES = {
    "plain": Case(),
    "float64": Case(dtype=torch.float64),
    "bfloat16": Case(dtype=torch.bfloat16),
    "rows of another type": Case(row_dtype=torch.bfloat16),
    "transposed": Case(is_transposed=True),
    "no rows": Case(rows_S=(0, 0, 0, 0)),
    "one slot with rows": Case(rows_S=(0, 9, 0, 0)),
    "float64, slots with rows in front": Case(rows_S=(5, 3, 0, 0), dtype=torch.float64),
    "float64, slots with rows behind": Case(rows_S=(0, 0, 7, 2), dtype=torch.float64),
    "two runs": Case(gap=True),
    "frozen experts": Case(trained=(True, False, False)),
    "frozen up": Case(trained=(True, False, True)),
    "frozen down": Case(trained=(True, True, False)),
    "frozen rows": Case(trained=(False, True, True)),
    "down alone": Case(trained=(False, False, True)),
    "transposed, frozen": Case(is_transposed=True, trained=(True, True, False)),
}


@pytest.mark.parametrize("sizes", [(), (S,), (2, 2), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_own_adjoint_is_autograds(name: str, is_gpu: bool, sizes: tuple[int, ...]) -> None:
    """By slot, or in stacks of slots."""
    _compare(CASES[name], sizes, is_gpu=is_gpu)


@pytest.mark.parametrize("has_it", [(True, False), (False, True)], ids=str)
@pytest.mark.parametrize("rows_S", [(5, 0, 35, 1), (5, 3, 0, 0), (0, 0, 5, 3)], ids=str)
def test_stacks_of_which_one_has_a_grouped_gemm(
    rows_S: tuple[int, ...], has_it: tuple[bool, bool]
) -> None:
    """As where one of them begins amid 16 bytes."""
    of_stacks = zip(has_it, (rows_S[:2], rows_S[2:]))
    asked = iter([has for has, own_S in of_stacks if any(own_S) for _ in ("up", "down")])
    with mock.patch("ds_moe_ext.moe.feed_forward.has_grouped_mm", lambda rows, weight: next(asked)):
        _compare(Case(rows_S=rows_S), (2, 2), is_gpu=True)


def _compare(case: Case, sizes: tuple[int, ...], *, is_gpu: bool) -> None:
    function = FeedForwardExperts(silu_gated, is_transposed=case.is_transposed)
    slots = SlotRows.of(np.asarray(case.rows_S), torch.device("cpu"))
    plain = by_autograd(case, function, slots)
    with as_on_cuda() if is_gpu else nullcontext(), nothing_in_new_memory():
        ours = by_hand(case, function, slots, sizes)
    assert len(ours) == len(plain) == 2 + 2 * S
    for one, other in zip(ours, plain):
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if is_gpu:  # other products, of the same numbers
            tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2}
            assert relative_error(one.double(), other.double()) <= tolerance[one.dtype]
        else:
            assert torch.equal(one, other)


def test_silu_is_not_kept() -> None:
    case = Case()
    rows, _, weights = drawn(case)
    function = FeedForwardExperts(silu_gated)
    slots = SlotRows.of(np.asarray(case.rows_S), torch.device("cpu"))
    with as_on_cuda():
        computed = function.by_hand(rows, slots, weights, function.arrangement(weights).runs)
    assert computed is not None
    widths = sorted(kept.shape[1] for kept in computed[2] if kept.dim() == 2)
    assert widths == [D, F, 2 * F]  # rows, the product, gate and up


@pytest.mark.parametrize("other", ["biases", "activation", "autocast", "types", "no weights"])
def test_what_autograd_differentiates(other: str) -> None:
    case = Case()
    rows, _, weights = drawn(case)
    function = FeedForwardExperts(silu_gated)
    if other == "biases":
        function = replace(function, has_bias=True)
    elif other == "activation":
        function = replace(function, activation=torch.nn.functional.gelu)
    elif other == "types":
        weights = tuple(w.double() if n % 2 else w for n, w in enumerate(weights))
    elif other == "no weights":
        weights = ()
    slots = SlotRows.of(np.asarray(case.rows_S), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16, enabled=other == "autocast"):
        assert function.by_hand(rows, slots, weights, ((0, S),)) is None
