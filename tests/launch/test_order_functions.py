# SPDX-License-Identifier: Apache-2.0
"""GShard's and Tutel's order functions against each other, plain loops and our own Order.

Shape letters: T tokens, K choices, E experts, B rows of an expert, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from order_functions import IndexOrdering, OneHotOrdering, Ordering, Room, Seats, room_of
from torch import Tensor

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.gate import drop_over_capacity
from ds_moe_ext.moe.route import one_cell_route
from ds_moe_ext.schedule.task import Span
from ds_moe_ext.testing import relative_error
from tests.ranks import pool_of

BOTH: tuple[Ordering, ...] = (OneHotOrdering(), IndexOrdering())
D = 5


@dataclass(frozen=True)
class Case:
    """Sizes, and what is drawn."""

    num_tokens: int
    top_k: int
    num_experts: int
    factor: float | None
    degrees: tuple[int, int]
    leaves_out: bool
    seed: int

    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, experts and scores."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_tokens, self.num_experts)
        logit_TE = torch.randn(shape, generator=generator, dtype=torch.float64)
        logit_TE[:, 0] += 2  # so that capacity is met
        score_TK, expert_TK = logit_TE.softmax(dim=1).topk(self.top_k)
        if self.leaves_out:
            is_out_TK = torch.rand(expert_TK.shape, generator=generator) < 0.3
            expert_TK = expert_TK.masked_fill(is_out_TK, -1)
        x_TD = torch.randn(self.num_tokens, D, generator=generator, dtype=torch.float64)
        return x_TD, expert_TK, score_TK

    def seats(self, expert_TK: Tensor) -> Seats:
        room = room_of(expert_TK, self.num_experts, factor=self.factor, multiple=lcm(*self.degrees))
        return Seats.of(expert_TK, self.num_experts, room)


def _cases() -> st.SearchStrategy[Case]:
    return st.integers(1, 6).flatmap(
        lambda num_experts: st.builds(
            Case,
            num_tokens=st.integers(1, 20),
            top_k=st.integers(1, num_experts),
            num_experts=st.just(num_experts),
            factor=st.sampled_from([None, 0.4, 1.0, 1.25, 3.0]),
            degrees=st.tuples(st.integers(1, 4), st.integers(1, 4)),
            leaves_out=st.booleans(),
            seed=st.integers(0, 99),
        )
    )


any_case = given(_cases())
often = settings(max_examples=60, deadline=None, derandomize=True)


def by_loops(x_TD: Tensor, expert_TK: Tensor, num_experts: int, room: Room) -> Tensor:
    """The buffers, row by row."""
    rows_EBD = x_TD.new_zeros(num_experts, room.padded, D)
    taken = [0] * num_experts
    for k in range(expert_TK.shape[1]):
        for token, expert in enumerate(expert_TK[:, k].tolist()):
            if expert >= 0 and taken[expert] < room.most:
                rows_EBD[expert, taken[expert]] = x_TD[token]
                taken[expert] += 1
    return rows_EBD


@often
@any_case
def test_both_fill_the_same_buffers(case: Case) -> None:
    x_TD, expert_TK, _ = case.drawn()
    seats = case.seats(expert_TK)
    room = room_of(expert_TK, case.num_experts, factor=case.factor, multiple=lcm(*case.degrees))
    wanted_EBD = by_loops(x_TD, expert_TK, case.num_experts, room)
    for ordering in BOTH:
        assert torch.equal(ordering.order(x_TD, seats), wanted_EBD)


@often
@any_case
def test_order_and_back_is_the_identity(case: Case) -> None:
    """Spec, property 2: with weight 1 a token comes back once for each choice that was kept."""
    x_TD, expert_TK, score_TK = case.drawn()
    seats = case.seats(expert_TK)
    num_kept_T1 = (seats.row_TK >= 0).sum(dim=1, keepdim=True)
    for ordering in BOTH:
        back_TD = ordering.restore(ordering.order(x_TD, seats), torch.ones_like(score_TK), seats)
        assert torch.allclose(back_TD, x_TD * num_kept_T1, rtol=1e-12, atol=0)
        assert not back_TD[num_kept_T1[:, 0] == 0].any()


@often
@any_case
def test_what_is_kept_is_what_our_own_gate_keeps(case: Case) -> None:
    _, expert_TK, _ = case.drawn()
    seats = case.seats(expert_TK)
    kept_TK = expert_TK.where(seats.row_TK >= 0, -1)
    room = room_of(expert_TK, case.num_experts, factor=case.factor)
    assert torch.equal(kept_TK, drop_over_capacity(expert_TK, case.num_experts, room.most))
    if case.factor is None:
        assert torch.equal(kept_TK, expert_TK)


@often
@any_case
def test_what_is_dropped_does_not_depend_on_the_degrees(case: Case) -> None:
    _, expert_TK, _ = case.drawn()
    seats = case.seats(expert_TK)
    unpadded = room_of(expert_TK, case.num_experts, factor=case.factor)
    assert torch.equal(seats.row_TK, Seats.of(expert_TK, case.num_experts, unpadded).row_TK)
    assert seats.num_rows % lcm(*case.degrees) == 0
    assert 0 <= seats.num_rows - unpadded.most < lcm(*case.degrees)


def through(
    ordering: Ordering, given: tuple[Tensor, Tensor], seats: Seats, factor_E: Tensor
) -> list[Tensor]:
    """Output and gradients of a layer whose expert ``e`` multiplies by ``factor_E[e]``."""
    x_TD, score_TK = (tensor.clone().requires_grad_() for tensor in given)
    rows_EBD = ordering.order(x_TD, seats) * factor_E[:, None, None]
    y_TD = ordering.restore(rows_EBD, score_TK, seats)
    y_TD.square().sum().backward()
    return [y_TD.detach(), x_TD.grad, score_TK.grad]


@often
@any_case
def test_outputs_and_gradients_are_those_of_a_dense_layer(case: Case) -> None:
    x_TD, expert_TK, score_TK = case.drawn()
    seats = case.seats(expert_TK)
    factor_E = torch.arange(1, case.num_experts + 1, dtype=torch.float64)
    x, score = x_TD.clone().requires_grad_(), score_TK.clone().requires_grad_()
    weight_TK = score * factor_E[expert_TK.clamp(min=0)] * (seats.row_TK >= 0)
    y_TD = x * weight_TK.sum(dim=1, keepdim=True)
    y_TD.square().sum().backward()
    for ordering in BOTH:
        ours = through(ordering, (x_TD, score_TK), seats, factor_E)
        for own, wanted in zip(ours, (y_TD, x.grad, score.grad)):
            assert relative_error(own, wanted) <= 1e-12


@pytest.mark.parametrize("ordering", BOTH, ids=lambda ordering: type(ordering).__name__)
def test_our_own_order_gives_the_same_output(ordering: Ordering) -> None:
    """Rows by expert without padding: the same rows, and the same way back."""
    case = Case(40, 2, 4, None, (1, 1), leaves_out=False, seed=1)
    x_TD, expert_TK, score_TK = case.drawn()
    seats = case.seats(expert_TK)
    route = one_cell_route(expert_TK, Placement.block(4, 1)).on(Span(0, 1))
    rows_RD = x_TD[route.token_N]
    rows_EBD = ordering.order(x_TD, seats)
    for own_RD, theirs_BD in zip(rows_RD.split(route.slots.on_host()), rows_EBD):
        in_buffer_RD = theirs_BD[: len(own_RD)]
        assert not theirs_BD[len(own_RD) :].any()
        assert torch.equal(_sorted(own_RD), _sorted(in_buffer_RD))
    y_TD = ordering.restore(rows_EBD, score_TK, seats)
    assert relative_error(route.sum_by_token(rows_RD, score_TK), y_TD) <= 1e-12


def _sorted(rows_RD: Tensor) -> Tensor:
    return rows_RD[rows_RD[:, 0].argsort()]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "factor", "wanted"),
    [(4 * 1024, 6, 2, 1.2, 1639), (2 * 4, 2, 1, 2.0, 8), (10, 4, 2, 1.2, 6)],
)
def test_capacity_of_the_golden_examples(
    num_tokens: int, num_experts: int, top_k: int, factor: float, wanted: int
) -> None:
    """Spec, G7."""
    expert_TK = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    assert room_of(expert_TK, num_experts, factor=factor) == (wanted, wanted)


def test_room_by_hand() -> None:
    expert_TK = torch.tensor([[0, 1], [0, -1], [0, 2]])
    assert room_of(expert_TK, 3, factor=None) == Room(3, 3)
    assert room_of(expert_TK, 3, factor=None, multiple=lcm(2, 2)) == Room(3, 4)
    assert room_of(expert_TK, 3, factor=0.5, multiple=4) == Room(1, 4)
    seats = Seats.of(expert_TK, 3, Room(2, 4))
    assert seats.row_TK.tolist() == [[0, 0], [1, -1], [-1, 0]]


def _room(rank: int, world_size: int) -> Room:
    import torch.distributed as dist

    expert_TK = torch.zeros(2 + 3 * rank, 1, dtype=torch.int64)
    return room_of(expert_TK, 2, factor=None, multiple=2, group=dist.group.WORLD)


def test_buffers_of_all_ranks_are_alike() -> None:
    """Spec, section 5, no. 7: the busiest expert of any rank."""
    assert pool_of(2).run(_room) == [Room(5, 6)] * 2


@pytest.mark.parametrize("ordering", BOTH, ids=lambda ordering: type(ordering).__name__)
def test_narrow_rows_stay_narrow(ordering: Ordering) -> None:
    """Scores are float32 where rows are bfloat16."""
    case = Case(12, 2, 3, None, (1, 1), leaves_out=False, seed=2)
    x_TD, expert_TK, score_TK = case.drawn()
    seats = case.seats(expert_TK)
    rows_EBD = ordering.order(x_TD.bfloat16(), seats)
    y_TD = ordering.restore(rows_EBD, score_TK.float(), seats)
    assert rows_EBD.dtype == y_TD.dtype == torch.bfloat16
    wanted_TD = x_TD * score_TK.sum(dim=1, keepdim=True)
    assert relative_error(y_TD.double(), wanted_TD) < 0.02
