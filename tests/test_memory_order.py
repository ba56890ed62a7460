# SPDX-License-Identifier: Apache-2.0
"""Slots in the order of their weights in memory: fewer GEMMs, same rows and gradients. No ranks.

Shape letters: T tokens, K choices a token, S slots, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import runs_of
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, arranged, silu_gated, stacked, unstacked
from ds_moe_ext.moe.route import one_rank_route
from ds_moe_ext.schedule.task import ChunkRange

S, D, F = 6, 8, 12
SHAPES = ((2 * F, D), (2 * F,), (D, F), (D,))  # of an expert with biases
SIZES = [torch.Size(shape).numel() for shape in SHAPES]


def laid(places: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """Weights of each slot, drawn; where each begins in one piece of memory is given."""
    memory = torch.zeros(2 * S * sum(SIZES), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    by_slot = []
    for own in places:
        weights = [memory[p : p + n].view(s) for p, n, s in zip(own, SIZES, SHAPES)]
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        by_slot.append(tuple(weights))
    return by_slot


def by_weight(slots: Sequence[int]) -> list[list[int]]:
    """One weight of all slots after the other, as DeepSpeed and TEGroupedMLP have them."""
    starts = [S * sum(SIZES[:number]) for number in range(len(SIZES))]
    return [[start + slot * n for start, n in zip(starts, SIZES)] for slot in slots]


def by_expert(slots: Sequence[int]) -> list[list[int]]:
    """All weights of a slot, the last one first, as SequentialMLP's lie in Megatron's buffers."""
    starts = [sum(SIZES[number + 1 :]) for number in range(len(SIZES))]
    return [[slot * sum(SIZES) + start for start in starts] for slot in slots]


DOWN = range(S - 1, -1, -1)
MOVED = (2, 5, 0, 1, 4, 3)
LAYOUTS = {  # the place in memory of each slot, runs of slots, runs in the best order
    "in order": (by_weight(range(S)), 1, 1),
    "in reverse": (by_weight(DOWN), S, 1),
    "expert by expert": (by_expert(range(S)), 1, 1),
    "expert by expert, in reverse": (by_expert(DOWN), S, 1),
    "moved": (by_weight(MOVED), 4, 1),
    "moved, expert by expert": (by_expert(MOVED), 4, 1),
    "every other": (by_expert([0, 2, 4, 6, 8, 10]), 1, 1),
    "with a gap": (by_expert([0, 1, 2, 6, 7, 8]), 2, 2),
    "in reverse with a gap": (by_expert([8, 7, 6, 2, 1, 0]), S, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_are_counted(layout: str) -> None:
    places, in_slot_order, at_best = LAYOUTS[layout]
    by_name = list(zip(*laid(places)))
    assert len(runs_of(by_name)) == in_slot_order
    order = arranged(by_name).order
    assert (order is None) == (in_slot_order == at_best)
    if order is not None:
        ordered = [[own[slot] for slot in order.slots] for own in by_name]
        assert len(runs_of(ordered)) == at_best


def test_order_does_not_depend_on_which_memory_comes_first() -> None:
    """Replicas that are freed and gathered again may lie elsewhere, and checkpoints ask for the
    same order."""
    one, other = (laid(by_weight(DOWN)) for _ in range(2))
    weights, replicas = one[:3], other[3:]
    there, back = (list(zip(*both)) for both in ((*weights, *replicas), (*other[:3], *one[3:])))
    assert arranged(there) == arranged(back)
    assert len(arranged(there).runs) == 2


def test_a_run_is_stacked_without_a_copy() -> None:
    for places in (by_weight(range(S)), by_expert(range(S)), by_expert([1, 3, 5])):
        for own in zip(*laid(places)):
            whole = stacked(own)
            assert torch.equal(whole, torch.stack(own))
            assert whole.data_ptr() == own[0].data_ptr()


def test_a_stack_has_the_gradients_of_its_slots() -> None:
    """Without a replica where they lie as one, as behind a grouped GEMM."""
    weight = torch.zeros(S, D, F, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(S, D, F, dtype=torch.float64)
    by_slot = unstacked(weight)
    assert [own.data_ptr() for own in by_slot] == [own.data_ptr() for own in weight]
    for grads in (whole.unbind(), [own.clone() for own in whole], whole.mT.contiguous().mT):
        (found,) = torch.autograd.grad(unstacked(weight), [weight], list(grads))
        assert torch.equal(found, whole)
    (found,) = torch.autograd.grad(unstacked(weight), [weight], whole.unbind())
    assert found.data_ptr() == whole.data_ptr()
    (found,) = torch.autograd.grad(unstacked(weight)[2], [weight], whole[2])
    assert torch.equal(found[2], whole[2]) and not found[[0, 1, 3, 4, 5]].any()


def test_weights_of_their_own_are_no_run() -> None:
    by_slot = [tuple(weight.clone() for weight in own) for own in laid(by_weight(range(S)))]
    by_name = list(zip(*by_slot))
    assert len(runs_of(by_name)) == S and arranged(by_name).order is None
    turned = [[weight.view(-1, 1).expand(-1, 2) for weight in own] for own in by_name]
    assert len(runs_of(turned)) == S


def computed(places: Sequence[Sequence[int]], expert: Expert) -> tuple[Tensor, list[Tensor]]:
    """What the stage writes, and gradients of the rows and of all weights."""
    generator = torch.Generator().manual_seed(1)
    expert_TK = torch.randint(S - 1, (20, 2), generator=generator)  # the last slot has no rows
    route = one_rank_route(expert_TK, Placement.block(S, 1))
    rows, grad = torch.randn(2, 40, D, generator=generator, dtype=torch.float64)
    weights = tuple(weight.requires_grad_() for own in laid(places) for weight in own)
    chunk_range = ChunkRange(0, 1)
    (out,), saved = expert.forward(chunk_range, rows.requires_grad_(), route, weights)
    found, of_weights = expert.backward(chunk_range, saved, grad)
    return out, [found, *of_weights]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_gradients_are_the_same_in_any_order(layout: str) -> None:
    expert = Expert(FeedForwardExperts(silu_gated, has_bias=True))
    plain, plain_gradients = computed(by_weight(range(S)), expert)
    ours, gradients = computed(LAYOUTS[layout][0], expert)
    assert torch.equal(ours, plain)
    assert all(map(torch.equal, gradients, plain_gradients))
