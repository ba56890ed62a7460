# SPDX-License-Identifier: Apache-2.0
"""Placements against counting by hand and by loops. Pure.

Shape letters: E experts, C cells, S slots.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement, even_homes


def holds(*rows: str) -> np.ndarray:
    """``holds("x.", ".x")``: a row an expert, a column a cell."""
    return np.array([[mark == "x" for mark in row] for row in rows])


# Cell 0 holds experts 0, 2, 3; cell 1 holds 2; cell 2 holds 1, 3.
UNEVEN = holds(
    "x..",
    "..x",
    "xx.",
    "x.x",
)


def test_tables_of_an_uneven_placement_with_copies() -> None:
    placement = Placement(UNEVEN)
    assert (placement.num_experts, placement.num_cells, placement.num_slots) == (4, 3, 3)
    # The first holder from the left.
    assert placement.owner_E.tolist() == [0, 2, 0, 0]
    # Down each column, the holders are counted from 0.
    assert placement.slot_EC.tolist() == [[0, -1, -1], [-1, -1, 0], [1, 0, -1], [2, -1, 1]]
    assert placement.expert_CS.tolist() == [[0, 2, 3], [2, -1, -1], [1, 3, -1]]
    assert [placement.experts_of(cell).tolist() for cell in range(3)] == [[0, 2, 3], [2], [1, 3]]


def test_block() -> None:
    placement = Placement.block(6, 3)
    assert placement.owner_E.tolist() == [0, 0, 1, 1, 2, 2]
    assert placement.expert_CS.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_owned_by_may_leave_a_cell_empty() -> None:
    placement = Placement.owned_by(np.array([2, 0, 2]), 3)
    assert placement.expert_CS.tolist() == [[1, -1], [-1, -1], [0, 2]]
    assert placement.experts_of(1).tolist() == []


@pytest.mark.parametrize(("num_experts", "num_cells"), [(8, 3), (4, 8), (1, 2)])
def test_block_that_does_not_divide(num_experts: int, num_cells: int) -> None:
    with pytest.raises(ValueError, match=f"{num_experts} experts do not divide over {num_cells}"):
        Placement.block(num_experts, num_cells)


def test_an_expert_without_a_holder_is_named() -> None:
    with pytest.raises(ValueError, match=r"no cell holds expert\(s\) \[1, 2\]"):
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


def test_copies_beside_what_is_held() -> None:
    home = Placement.owned_by(np.array([2, 0]), 3)
    target = home.with_copies(holds(".x.", "..."))
    assert np.array_equal(target.holds_EC, holds(".xx", "x.."))
    assert home.holds_EC.sum() == 2


def test_copies_have_slots_behind() -> None:
    """Also those that are added later; either kind in the order of experts."""
    home = Placement.block(4, 2)
    target = home.with_copies(holds("..", ".x", "x.", "x."))
    assert [target.experts_of(cell).tolist() for cell in range(2)] == [[0, 1, 2, 3], [2, 3, 1]]
    more = target.with_copies(holds(".x", "..", "..", ".."))
    assert more.experts_of(1).tolist() == [2, 3, 0, 1]
    assert more.expert_CS.tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert more.slot_EC.tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert more.describe() == "0 1 2 3|2 3 0 1"
    in_order = Placement(more.holds_EC)
    assert in_order.experts_of(1).tolist() == [0, 1, 2, 3]
    assert not more.is_like(in_order) and in_order.is_like(Placement(more.holds_EC.copy()))
    assert more.is_like(home.with_copies(more.holds_EC)) and not more.is_like(target)
    assert home.is_like(home.with_copies(home.holds_EC))


def test_a_cell_with_every_expert_is_alone() -> None:
    """Its slots are those that it has among others, experts at home first."""
    home = Placement.block(6, 3)
    full = home.with_copies(np.ones((6, 3), dtype=bool))
    for cell, experts in enumerate(([0, 1, 2, 3, 4, 5], [2, 3, 0, 1, 4, 5], [4, 5, 0, 1, 2, 3])):
        alone = full.alone(cell)
        assert (alone.num_cells, alone.is_single, alone.is_full) == (1, True, True)
        assert alone.experts_of(0).tolist() == full.experts_of(cell).tolist() == experts
        assert full.alone(cell) is alone
    assert Placement(full.holds_EC).alone(1).experts_of(0).tolist() == [*range(6)]


def test_text() -> None:
    assert Placement(UNEVEN).describe() == "0 2 3|2|1 3"
    assert Placement.owned_by(np.array([2, 0, 2]), 3).describe() == "1||0 2"


def test_even_homes_by_hand() -> None:
    homes = even_homes([4, 3, 6, 8], 4)
    # Layers of 4 and 8 experts in blocks; those of 3 and 6 are dealt out: 0 1 2, then 3 0 1 2 3 0.
    assert [home.owner_E.tolist() for home in homes] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [3, 0, 1, 2, 3, 0],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9))
def test_even_homes_are_even(num_experts: list[int], num_cells: int) -> None:
    homes = even_homes(num_experts, num_cells)
    assert [home.num_experts for home in homes] == num_experts
    assert all((home.holds_EC.sum(axis=1) == 1).all() for home in homes)
    total_C = np.sum([home.holds_EC.sum(axis=0) for home in homes], axis=0)
    assert total_C.max() - total_C.min() <= 1
    for home in homes:
        of_layer_C = home.holds_EC.sum(axis=0)
        assert of_layer_C.max() - of_layer_C.min() <= 1
        if home.num_experts % num_cells == 0:
            block = Placement.block(home.num_experts, num_cells)
            assert np.array_equal(home.holds_EC, block.holds_EC)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """With copies; cells may be empty."""
    num_experts, num_cells = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    held_EC = rng.random((num_experts, num_cells)) < draw(st.sampled_from((0.0, 0.2, 0.6, 1.0)))
    home_E = rng.integers(num_cells, size=num_experts)
    if draw(st.booleans()):
        return Placement.owned_by(home_E, num_cells).with_copies(held_EC)
    held_EC[np.arange(num_experts), home_E] = True
    return Placement(held_EC)


@settings(deadline=None, derandomize=True)
@given(placements())
def test_tables_agree_with_each_other(placement: Placement) -> None:
    for cell in range(placement.num_cells):
        experts = placement.experts_of(cell).tolist()
        first_E = (
            placement.holds_EC[:, cell]
            if placement.first_EC is None
            else placement.first_EC[:, cell]
        )
        later_E = placement.holds_EC[:, cell] & ~first_E
        assert experts == [*np.flatnonzero(first_E), *np.flatnonzero(later_E)]
        row = placement.expert_CS[cell].tolist()
        assert row == experts + [-1] * (placement.num_slots - len(experts))
        assert [placement.slot_EC[e, cell] for e in experts] == list(range(len(experts)))
    assert placement.holds_EC[np.arange(placement.num_experts), placement.owner_E].all()
    columns = placement.describe().split("|")
    assert [[int(e) for e in column.split()] for column in columns] == [
        placement.experts_of(cell).tolist() for cell in range(placement.num_cells)
    ]
