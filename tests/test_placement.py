"""Placements and shares against counting by hand and by loops. Pure.

Shape letters: E experts, C cells, S slots, F chunks.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.placement import Placement, Share


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
        Share.local_else_home(placement, placement).fraction_CEC,
        Share(np.ones((1, 1, 1))).fraction_CEC,
    )
    for table in tables:
        with pytest.raises(ValueError, match="read-only"):
            table[...] = 0


def test_local_else_home() -> None:
    """Homes: experts 0, 1 in cell 0, experts 2, 3 in cell 1. Copies: 0 in cell 1, 3 in cell 2."""
    home = Placement.owned_by(np.array([0, 0, 1, 1]), 3)
    target = Placement(
        holds(
            "xx.",
            "x..",
            ".x.",
            ".xx",
        )
    )
    share = Share.local_else_home(home, target)
    # Who computes for each sender, expert by expert.
    assert share.fraction_CEC.argmax(axis=2).tolist() == [
        [0, 0, 1, 1],  # sender 0 has 0 and 1 itself
        [1, 0, 1, 1],  # sender 1 has a copy of 0
        [0, 0, 1, 2],  # sender 2 has a copy of 3
    ]
    assert np.array_equal(share.fraction_CEC.sum(axis=2), np.ones((3, 4)))

    rows_FE = np.array([[5, 0, 2, 7]])
    # Sender 2: 5 rows of expert 0 to cell 0, 2 of expert 2 to cell 1, 7 of expert 3 to itself.
    assert share.rows_from(2, rows_FE).tolist() == [[[5, 0, 0], [0, 0, 0], [0, 2, 0], [0, 0, 7]]]


def test_quotas_are_rounded_cumulatively() -> None:
    """Fractions 1/4, 1/4, 1/2 of one sender: ends at 1/4, 1/2 and all of its rows."""
    share = Share(np.array([[[0.25, 0.25, 0.5]]] * 3))
    for num_rows, expected in (
        (0, [0, 0, 0]),
        (1, [0, 0, 1]),  # ends rint(.25), rint(.5), 1 = 0, 0, 1
        (2, [0, 1, 1]),  # ends rint(.5), rint(1.), 2 = 0, 1, 2
        (3, [1, 1, 1]),  # ends rint(.75), rint(1.5), 3 = 1, 2, 3
        (8, [2, 2, 4]),
        (10, [2, 3, 5]),  # ends rint(2.5), 5, 10 = 2, 5, 10: half goes to even
    ):
        assert share.rows_from(1, np.array([[num_rows]])).tolist() == [[expected]]


@st.composite
def shared_rows(draw: st.DrawFn) -> tuple[Placement, Share, np.ndarray]:
    """A placement with copies, fractions over the holders, and rows ``[C, F, E]``."""
    num_experts, num_cells = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    held_EC = rng.random((num_experts, num_cells)) < draw(st.sampled_from((0.2, 0.6, 1.0)))
    held_EC[np.arange(num_experts), rng.integers(num_cells, size=num_experts)] = True
    weight_CEC = rng.random((num_cells, num_experts, num_cells)) ** 3 * held_EC
    # Some holders get nothing of some sender; one at least gets something.
    weight_CEC *= rng.random(weight_CEC.shape) < 0.7
    weight_CEC[weight_CEC.sum(axis=2) == 0] = held_EC[np.nonzero(weight_CEC.sum(axis=2) == 0)[1]]
    fraction_CEC = weight_CEC / weight_CEC.sum(axis=2, keepdims=True)
    most = draw(st.sampled_from((0, 1, 7, 10**6)))
    rows_CFE = rng.integers(0, most + 1, size=(num_cells, draw(st.integers(1, 4)), num_experts))
    return Placement(held_EC), Share(fraction_CEC), rows_CFE


@given(shared_rows())
def test_sender_and_holder_agree_on_every_row(case: tuple[Placement, Share, np.ndarray]) -> None:
    placement, share, rows_CFE = case
    cells = range(placement.num_cells)
    sent_CFEC = np.stack([share.rows_from(sender, rows_CFE[sender]) for sender in cells])
    assert np.array_equal(sent_CFEC.sum(axis=3), rows_CFE)
    assert (sent_CFEC >= 0).all()
    for holder in cells:
        assert np.array_equal(share.rows_to(holder, rows_CFE), sent_CFEC[..., holder])
    nobody_EC = ~placement.holds_EC
    assert not sent_CFEC[:, :, nobody_EC].any()
    # No quota is off by more than one row: both of its ends are rounded by at most a half.
    exact_CFEC = rows_CFE[..., None] * share.fraction_CEC[:, None]
    assert (np.abs(sent_CFEC - exact_CFEC) <= 1 + 1e-6).all()


@given(shared_rows())
def test_tables_agree_with_each_other(case: tuple[Placement, Share, np.ndarray]) -> None:
    placement, _, _ = case
    for cell in range(placement.num_cells):
        experts = placement.experts_of(cell).tolist()
        assert experts == [e for e in range(placement.num_experts) if placement.holds_EC[e, cell]]
        row = placement.expert_CS[cell].tolist()
        assert row == experts + [-1] * (placement.num_slots - len(experts))
        assert [placement.slot_EC[e, cell] for e in experts] == list(range(len(experts)))
    assert placement.holds_EC[np.arange(placement.num_experts), placement.owner_E].all()


@given(shared_rows())
def test_local_else_home_sends_nothing_that_could_stay(
    case: tuple[Placement, Share, np.ndarray],
) -> None:
    target, _, rows_CFE = case
    home = Placement.owned_by(target.owner_E, target.num_cells)
    share = Share.local_else_home(home, target)
    for sender in range(target.num_cells):
        sent_FEC = share.rows_from(sender, rows_CFE[sender])
        for expert in range(target.num_experts):
            keeps = target.holds_EC[expert, sender]
            holder = sender if keeps else home.owner_E[expert]
            assert np.array_equal(sent_FEC[:, expert, holder], rows_CFE[sender, :, expert])
