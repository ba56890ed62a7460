# SPDX-License-Identifier: Apache-2.0
"""The guard and the calibration: the spec's golden test, and what they promise. Pure.

Shape letters: L layers, E experts, C cells.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestCopy
from ds_moe_ext.planning.fssdp_planner import calibrate, guarded, materialize
from ds_moe_ext.planning.prices import Prices, RoutedRows, busiest_link, step_seconds
from tests.planners.plainly import HOME, NODE_C, PROPERTY, holdings, small_models

# Golden test H8: every device has these counts; the forecast copied expert 0 everywhere.
H8_ROWS_CE = np.array([[2, 2, 1, 1, 3, 2, 12, 1]] * 4)
FORECAST = HOME.with_copies(np.arange(8)[:, None] == np.zeros(4))


def only_compute(copy_s: float) -> Prices:
    """1 us a row; the all-to-all costs nothing."""
    return Prices(
        row_s=1e-6, row_bytes=0.0, copy_s=copy_s, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
    )


def test_h8() -> None:
    assert NearestCopy(HOME, NODE_C).computed_C(H8_ROWS_CE).tolist() == [16, 8, 20, 52]
    assert NearestCopy(FORECAST, NODE_C).computed_C(H8_ROWS_CE).tolist() == [10, 10, 22, 54]
    accepted = calibrate(
        HOME, FORECAST, H8_ROWS_CE, copies_left=1, prices=only_compute(15e-6), node_C=NODE_C
    )
    assert holdings(accepted) == [[0, 1, 6], [0, 2, 3, 6], [0, 4, 5, 6], [0, 6, 7]]
    assert NearestCopy(accepted, NODE_C).computed_C(H8_ROWS_CE).tolist() == [22, 22, 34, 18]
    # The peak falls from 54 to 34: 20 us.
    assert busiest_link(HOME, FORECAST, accepted, NODE_C) == 1
    refused = calibrate(
        HOME, FORECAST, H8_ROWS_CE, copies_left=1, prices=only_compute(25e-6), node_C=NODE_C
    )
    assert refused is FORECAST


def test_h8_without_memory_left() -> None:
    assert (
        calibrate(HOME, FORECAST, H8_ROWS_CE, copies_left=0, prices=only_compute(0), node_C=NODE_C)
        is FORECAST
    )


def test_experts_that_are_everywhere_do_not_compete() -> None:
    """Here the forecast was right about expert 0, the hottest: the next one gets the memory."""
    rows_CE = np.array([[20, 2, 1, 1, 3, 2, 12, 1]] * 4)
    target = calibrate(
        HOME, FORECAST, rows_CE, copies_left=1, prices=only_compute(0), node_C=NODE_C
    )
    assert target.holds_EC[6].all()


def test_guard_by_hand() -> None:
    """One sender has all rows: of an expert of cell 1, and of one that cell 0 holds already."""
    home = Placement.owned_by(np.array([0, 1]), 2)
    everywhere = Placement(np.ones((2, 2), dtype=bool))
    all_stay_CE = np.array([[10, 10], [0, 0]])  # the copy makes cell 0 compute all 20 rows
    all_meet_CE = np.array([[0, 10], [0, 10]])  # the copy splits the 20 rows
    node_C = np.array([0, 0])
    targets = guarded(
        (home, home),
        (everywhere, everywhere),
        RoutedRows.of((all_stay_CE, all_meet_CE), node_C),
        prices=only_compute(0),
    )
    assert targets == (home, everywhere)
    # Where the all-to-all is what takes time, keeping all rows is the faster way.
    wired = Prices(
        row_s=1e-6, row_bytes=1.0, copy_s=0, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
    )
    (target,) = guarded((home,), (everywhere,), RoutedRows.of((all_stay_CE,), node_C), prices=wired)
    assert target is everywhere


@st.composite
def prices(draw: st.DrawFn) -> Prices:
    def one_of(*values: float) -> float:
        return draw(st.sampled_from(values))

    return Prices(
        row_s=one_of(0.0, 1e-6),
        row_bytes=one_of(0.0, 1024.0),
        copy_s=one_of(0.0, 1e-5, 1e-3),
        inter_bytes_per_s=one_of(1e9, 1e12),
        intra_bytes_per_s=one_of(1e9, 1e12),
    )


@st.composite
def models(
    draw: st.DrawFn,
) -> tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray]:
    """Homes, skewed rows of each layer, nodes."""
    homes, sizes, node_C, rng = draw(small_models())
    rows = [(500 * rng.random((len(node_C), size)) ** 6).astype(np.int64) for size in sizes]
    return homes, rows, node_C


@PROPERTY
@given(
    models(),
    prices(),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_guarded_copies_never_make_a_layer_slower(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray],
    costs: Prices,
    t: int,
    m: int,
) -> None:
    """Invariant 11; and a layer with copies is faster by the model."""
    homes, rows, node_C = model
    loads = [rows_CE.sum(axis=0) for rows_CE in rows]
    targets = materialize(homes, loads, overlap_degree=t, copies_per_cell=m, node_C=node_C)
    kept = guarded(homes, targets, RoutedRows.of(rows, node_C), prices=costs)
    alone_L = step_seconds(homes, rows, prices=costs, node_C=node_C)
    kept_L = step_seconds(kept, rows, prices=costs, node_C=node_C)
    for home, target, each, alone, now in zip(homes, targets, kept, alone_L, kept_L):
        assert each is home or (each is target and now < alone)


@PROPERTY
@given(models(), prices(), st.integers(0, 4), st.integers(0, 3))
def test_calibration_pays_for_its_copies(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray],
    costs: Prices,
    m: int,
    copies_left: int,
) -> None:
    """Invariant 1, and what is added saves more than it costs."""
    homes, rows, node_C = model
    (target,) = materialize(
        homes[:1],
        [rows[0][0]],  # a forecast of sorts: what one sender has
        overlap_degree=m,
        copies_per_cell=m,
        node_C=node_C,
    )
    after = calibrate(
        homes[0], target, rows[0], copies_left=copies_left, prices=costs, node_C=node_C
    )
    assert (after.holds_EC >= target.holds_EC).all()
    new_EC = after.holds_EC & ~target.holds_EC
    assert new_EC.sum(axis=0).max() <= copies_left
    if after is not target:
        before_s, after_s = (
            step_seconds([p], rows[:1], prices=costs, node_C=node_C)[0] for p in (target, after)
        )
        sent_s = costs.copy_s * busiest_link(homes[0], target, after, node_C)
        assert before_s - after_s > sent_s - 1e-15
    else:
        assert not new_EC.any()


@pytest.mark.parametrize(
    ("copies", "busiest"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (0, 2), (0, 3)], 1),  # cell 0 sends one expert, however many want it
        ([(0, 2), (1, 2)], 2),  # both are received by cell 2
        ([(0, 2), (2, 3), (3, 2)], 3),  # all three enter node 1
        ([(0, 1), (2, 0), (4, 3), (6, 2)], 1),  # no node's border is crossed
    ],
)
def test_the_busiest_link(copies: list[tuple[int, int]], busiest: int) -> None:
    copies_EC = np.zeros_like(HOME.holds_EC)
    for expert, cell in copies:
        copies_EC[expert, cell] = True
    assert busiest_link(HOME, HOME, HOME.with_copies(copies_EC), NODE_C) == busiest
