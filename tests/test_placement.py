# SPDX-License-Identifier: Apache-2.0
"""Placements against counting by hand and by loops. Pure.

Shape letters: E experts, C EP ranks, S slots.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement, even_owners


def holds(*rows: str) -> np.ndarray:
    """``holds("x.", ".x")``: a row an expert, a column an EP rank."""
    return np.array([[mark == "x" for mark in row] for row in rows])


# EP rank 0 holds experts 0, 2, 3; EP rank 1 holds 2; EP rank 2 holds 1, 3.
UNEVEN = holds(
    "x..",
    "..x",
    "xx.",
    "x.x",
)


def test_tables_of_an_uneven_placement_with_replicas() -> None:
    placement = Placement(UNEVEN)
    assert (placement.num_experts, placement.num_ep_ranks, placement.num_slots) == (4, 3, 3)
    # The first holder from the left.
    assert placement.owner_E.tolist() == [0, 2, 0, 0]
    # Down each column, the holders are counted from 0.
    assert placement.slot_EC.tolist() == [[0, -1, -1], [-1, -1, 0], [1, 0, -1], [2, -1, 1]]
    assert placement.expert_CS.tolist() == [[0, 2, 3], [2, -1, -1], [1, 3, -1]]
    assert [placement.experts_of(ep_rank).tolist() for ep_rank in range(3)] == [
        [0, 2, 3],
        [2],
        [1, 3],
    ]


def test_block() -> None:
    placement = Placement.block(6, 3)
    assert placement.owner_E.tolist() == [0, 0, 1, 1, 2, 2]
    assert placement.expert_CS.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_owned_by_may_leave_an_ep_rank_empty() -> None:
    placement = Placement.owned_by(np.array([2, 0, 2]), 3)
    assert placement.expert_CS.tolist() == [[1, -1], [-1, -1], [0, 2]]
    assert placement.experts_of(1).tolist() == []


@pytest.mark.parametrize(("num_experts", "num_ep_ranks"), [(8, 3), (4, 8), (1, 2)])
def test_block_that_does_not_divide(num_experts: int, num_ep_ranks: int) -> None:
    with pytest.raises(
        ValueError, match=f"{num_experts} experts do not divide over {num_ep_ranks}"
    ):
        Placement.block(num_experts, num_ep_ranks)


def test_an_expert_without_a_holder_is_named() -> None:
    with pytest.raises(ValueError, match=r"no EP rank has expert\(s\) \[1, 2\]"):
        Placement(holds("x.", "..", "..", ".x"))
    with pytest.raises(ValueError, match=r"expert\(s\) \[0\]"):
        Placement.owned_by(np.array([2, 0]), 2)


def test_tables_are_read_only() -> None:
    placement = Placement(UNEVEN.copy())
    tables = (
        placement.holds_EC,
        placement.owner_E,
        placement.slot_EC,
        placement.expert_CS,
    )
    for table in tables:
        with pytest.raises(ValueError, match="read-only"):
            table[...] = 0


def test_replicas_beside_what_is_held() -> None:
    owner = Placement.owned_by(np.array([2, 0]), 3)
    target = owner.with_replicas(holds(".x.", "..."))
    assert np.array_equal(target.holds_EC, holds(".xx", "x.."))
    assert owner.holds_EC.sum() == 2


def test_replicas_have_slots_behind() -> None:
    """Also those that are added later; either kind in the order of experts."""
    owner = Placement.block(4, 2)
    target = owner.with_replicas(holds("..", ".x", "x.", "x."))
    assert [target.experts_of(ep_rank).tolist() for ep_rank in range(2)] == [
        [0, 1, 2, 3],
        [2, 3, 1],
    ]
    more = target.with_replicas(holds(".x", "..", "..", ".."))
    assert more.experts_of(1).tolist() == [2, 3, 0, 1]
    assert more.expert_CS.tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert more.slot_EC.tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert more.describe() == "0 1 2 3|2 3 0 1"
    in_order = Placement(more.holds_EC)
    assert in_order.experts_of(1).tolist() == [0, 1, 2, 3]
    assert not more.is_like(in_order) and in_order.is_like(Placement(more.holds_EC.copy()))
    assert more.is_like(owner.with_replicas(more.holds_EC)) and not more.is_like(target)
    assert owner.is_like(owner.with_replicas(owner.holds_EC))


def test_an_ep_rank_with_every_expert_is_alone() -> None:
    """Its slots are those that it has among others, experts at their owners first."""
    owner = Placement.block(6, 3)
    full = owner.with_replicas(np.ones((6, 3), dtype=bool))
    for ep_rank, experts in enumerate(([0, 1, 2, 3, 4, 5], [2, 3, 0, 1, 4, 5], [4, 5, 0, 1, 2, 3])):
        alone = full.alone(ep_rank)
        assert (alone.num_ep_ranks, alone.is_single, alone.is_full) == (1, True, True)
        assert alone.experts_of(0).tolist() == full.experts_of(ep_rank).tolist() == experts
        assert full.alone(ep_rank) is alone
    assert Placement(full.holds_EC).alone(1).experts_of(0).tolist() == [*range(6)]


def test_text() -> None:
    assert Placement(UNEVEN).describe() == "0 2 3|2|1 3"
    assert Placement.owned_by(np.array([2, 0, 2]), 3).describe() == "1||0 2"


def test_even_owners_by_hand() -> None:
    owners = even_owners([4, 3, 6, 8], 4)
    # Layers of 4 and 8 experts in blocks; those of 3 and 6 are dealt out: 0 1 2, then 3 0 1 2 3 0.
    assert [owner.owner_E.tolist() for owner in owners] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [3, 0, 1, 2, 3, 0],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9))
def test_even_owners_are_even(num_experts: list[int], num_ep_ranks: int) -> None:
    owners = even_owners(num_experts, num_ep_ranks)
    assert [owner.num_experts for owner in owners] == num_experts
    assert all((owner.holds_EC.sum(axis=1) == 1).all() for owner in owners)
    total_C = np.sum([owner.holds_EC.sum(axis=0) for owner in owners], axis=0)
    assert total_C.max() - total_C.min() <= 1
    for owner in owners:
        of_layer_C = owner.holds_EC.sum(axis=0)
        assert of_layer_C.max() - of_layer_C.min() <= 1
        if owner.num_experts % num_ep_ranks == 0:
            block = Placement.block(owner.num_experts, num_ep_ranks)
            assert np.array_equal(owner.holds_EC, block.holds_EC)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """With replicas; EP ranks may be empty."""
    num_experts, num_ep_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    held_EC = rng.random((num_experts, num_ep_ranks)) < draw(st.sampled_from((0.0, 0.2, 0.6, 1.0)))
    owner_E = rng.integers(num_ep_ranks, size=num_experts)
    if draw(st.booleans()):
        return Placement.owned_by(owner_E, num_ep_ranks).with_replicas(held_EC)
    held_EC[np.arange(num_experts), owner_E] = True
    return Placement(held_EC)


@settings(deadline=None, derandomize=True)
@given(placements())
def test_tables_agree_with_each_other(placement: Placement) -> None:
    for ep_rank in range(placement.num_ep_ranks):
        experts = placement.experts_of(ep_rank).tolist()
        first_E = (
            placement.holds_EC[:, ep_rank]
            if placement.first_EC is None
            else placement.first_EC[:, ep_rank]
        )
        later_E = placement.holds_EC[:, ep_rank] & ~first_E
        assert experts == [*np.flatnonzero(first_E), *np.flatnonzero(later_E)]
        row = placement.expert_CS[ep_rank].tolist()
        assert row == experts + [-1] * (placement.num_slots - len(experts))
        assert [placement.slot_EC[e, ep_rank] for e in experts] == list(range(len(experts)))
    assert placement.holds_EC[np.arange(placement.num_experts), placement.owner_E].all()
    columns = placement.describe().split("|")
    assert [[int(e) for e in column.split()] for column in columns] == [
        placement.experts_of(ep_rank).tolist() for ep_rank in range(placement.num_ep_ranks)
    ]
