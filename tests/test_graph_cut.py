# SPDX-License-Identifier: Apache-2.0
"""Backward in parts, beside backward at once: random graphs, float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ds_moe_ext.hosts.zebra.graph_cut import Part, Pending, Root, backward_of_part, next_number

PROPERTY = settings(deadline=None, derandomize=True, max_examples=75)


def seed(x: Tensor) -> Root:
    return get_gradient_edge(x), torch.ones_like(x)


def in_parts(roots: Sequence[Root], firsts: Sequence[int]) -> dict[int, Tensor]:
    """Gradients of leaves by identity; parts in descending order."""
    pending, sums = Pending(), dict[int, Tensor]()
    given_roots = list(roots)
    for first in reversed(firsts):
        for leaf, grad in backward_of_part(given_roots, first, pending):
            sums[id(leaf)] = sums[id(leaf)] + grad if id(leaf) in sums else grad
        given_roots = []
    assert not pending.take(0)
    return sums


def check(leaves: Sequence[Tensor], total: Tensor, firsts: Sequence[int]) -> None:
    expected = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    found = in_parts([seed(total)], firsts)
    for leaf, grad in zip(leaves, expected):
        if grad is None:
            assert id(leaf) not in found or not found[id(leaf)].any()
        else:
            # Single precision in between.
            torch.testing.assert_close(found[id(leaf)], grad, rtol=1e-5, atol=1e-6)


def leaves_of(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    shape = (3,)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(count)
    ]


def test_numbers_grow() -> None:
    x = torch.zeros((), requires_grad=True)
    first = next_number()
    made = x + 1
    assert first <= made.grad_fn._sequence_nr() < next_number() + 1
    later = next_number()
    assert made.grad_fn._sequence_nr() < later <= (x + 1).grad_fn._sequence_nr()


def test_numbers_without_gradients() -> None:
    with torch.no_grad():
        assert next_number() < next_number()


def test_a_part_and_what_it_read() -> None:
    (x, w) = leaves_of(2)
    before = (x * 2).sin()
    first = next_number()
    y = before * w + w
    part = Part.behind([get_gradient_edge(y)], first)
    assert [edge.node.variable is w for edge in part.leaves] == [True]
    assert [edge.node for edge in part.before] == [before.grad_fn]


def test_a_leaf_of_all_parts() -> None:
    """As tied weights; parts see it once each."""
    (w,) = leaves_of(1)
    firsts = [next_number()]
    x = w * w
    firsts.append(next_number())
    y = x.sin() * w
    firsts.append(next_number())
    check([w], (y * w).sum(), firsts)


def test_a_root_that_is_a_leaf() -> None:
    (w,) = leaves_of(1)
    found = backward_of_part([seed(w)], next_number(), Pending())
    assert len(found) == 1
    assert found[0][0] is w
    assert torch.equal(found[0][1], torch.ones(3, dtype=torch.float64))


def test_a_root_of_an_earlier_part() -> None:
    (w,) = leaves_of(1)
    firsts = [next_number()]
    total = (w * w).sum()
    firsts.append(next_number())
    check([w], total, firsts)


def test_outputs_of_one_node() -> None:
    (w,) = leaves_of(1)
    firsts = [next_number()]
    first, *others = w.exp().unbind()
    firsts.append(next_number())
    check([w], first * others[0].sin() + first, firsts)


def test_two_earlier_outputs_of_which_one_leads_to_the_other() -> None:
    (w,) = leaves_of(1)
    firsts = [next_number()]
    x = w * 2
    y = x + 1
    firsts.append(next_number())
    check([w], (x * y).sum(), firsts)


def test_a_leaf_that_an_earlier_output_leads_to() -> None:
    """As tied weights, where the head reads what the embedding gave."""
    (w,) = leaves_of(1)
    firsts = [next_number()]
    x = w + 1
    firsts.append(next_number())
    check([w], (x * w).sum(), firsts)


class _Pair(torch.autograd.Function):
    """Two outputs; backward wants both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * 2 + second * 3


def test_an_output_that_nobody_used() -> None:
    (w,) = leaves_of(1)
    firsts = [next_number()]
    x = w + 1
    firsts.append(next_number())
    check([w], (_Pair.apply(x)[0] * w).sum(), firsts)


def test_hooks_within_a_part() -> None:
    """Those of tensors between nodes run, and change gradients, as ever; those of leaves do not."""
    (w,) = leaves_of(1)
    firsts = [next_number()]
    x = w + 1
    firsts.append(next_number())
    y = x * w
    y.register_hook(lambda grad: grad * 10)
    total = (y * w).sum()
    (expected,) = torch.autograd.grad(total, [w], retain_graph=True)
    w.register_hook(lambda grad: grad * 1000)
    torch.testing.assert_close(in_parts([seed(total)], firsts)[id(w)], expected)


@st.composite
def graphs(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Parts of steps: an operation and two earlier values."""
    num_values, parts = 3, []
    for _ in range(draw(st.integers(1, 4))):
        steps = []
        for _ in range(draw(st.integers(1, 4))):
            value = st.integers(0, num_values - 1)
            steps.append((draw(st.integers(0, 6)), draw(value), draw(value)))
            num_values += 1
        parts.append(steps)
    return parts


OPERATIONS = (
    torch.add,
    torch.mul,
    lambda a, b: (a - b).sin(),
    lambda a, b: a.tanh() + b * 0.5,
    lambda a, b: a[:1] * b + a.mean(),  # gradients that autograd sums to a shape
    lambda a, b: torch.stack([a, b]).unbind()[0] * b,
    lambda a, b: (a.float() * b.float()).to(a.dtype),
)


@given(graphs())
@PROPERTY
def test_any_graph(parts: list[list[tuple[int, int, int]]]) -> None:
    """Steps read any earlier values, of any part."""
    leaves = leaves_of(3)
    values, firsts = list(leaves), []
    for steps in parts:
        firsts.append(next_number())
        for operation, left, right in steps:
            values.append(OPERATIONS[operation](values[left], values[right]))
    total = sum((value * (1 + i)).sum() for i, value in enumerate(values[-3:]))
    check(leaves, total, firsts)
