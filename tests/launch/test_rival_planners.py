# SPDX-License-Identifier: Apache-2.0
"""EPLB, LLEP and LAER-MoE, written anew: what their descriptions promise, and cases by hand.

Shape letters: C ranks, E experts.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from eplb import balanced_slots, packed, replicated
from laer import copies_by_rows, laid_out, placed, sent
from llep import spilled
from priced_cluster import A100, PricedCluster
from row_ways import Layout, evenly_on_node

from ds_moe_ext.cost.row_prices import RowPrices
from ds_moe_ext.loads.zipf import zipf_loads
from ds_moe_ext.placement import Placement

LOADS = zipf_loads((20, 1, 8, 16), rows=500, skew=1.2)[:, 0]
"""Rows of 8 ranks for 16 experts, 20 layers."""
NODE_C = np.repeat([0, 1], 4)


def test_eplb_by_hand() -> None:
    """Copies of 30 rows; ranks take 30, 30, 30, 10, 10, 10 in turn, each where there is least."""
    rows_E = np.array([90, 10, 10, 10])
    assert replicated(rows_E, 6).tolist() == [3, 1, 1, 1]
    assert packed(np.array([30, 30, 30, 10, 10, 10]), 2).tolist() == [0, 1, 0, 1, 1, 0]
    slots_EC = balanced_slots(rows_E, 2, 3)
    assert slots_EC.tolist() == [[2, 1], [0, 1], [0, 1], [1, 0]]


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_eplb_uses_all_slots(slots: int) -> None:
    for rows_CE in LOADS:
        slots_EC = balanced_slots(rows_CE.sum(axis=0), 8, slots)
        assert (slots_EC.sum(axis=0) == slots).all()
        assert slots_EC.any(axis=1).all()


def test_eplb_copies_whom_it_helps_most() -> None:
    """No other number of copies has fewer rows in the fullest copy."""
    for rows_E in np.random.default_rng(0).integers(0, 100, (20, 4)):
        found = (rows_E / replicated(rows_E, 8)).max()
        counts = (c for c in itertools.product(range(1, 6), repeat=4) if sum(c) == 8)
        assert found == min((rows_E / np.array(copies_E)).max() for copies_E in counts)


def test_eplb_keeps_groups_on_a_node() -> None:
    """Where nodes divide them; else, as where there are none, all ranks are one node."""
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        slots_EC = balanced_slots(rows_E, 8, 3, num_nodes=2, num_groups=4)
        is_on_GV = slots_EC.reshape(4, 4, 2, 4).any(axis=(1, 3))
        assert (is_on_GV.sum(axis=1) == 1).all()
        assert (is_on_GV.sum(axis=0) == 2).all()
        alone_EC = balanced_slots(rows_E, 8, 3)
        assert np.array_equal(balanced_slots(rows_E, 8, 3, num_nodes=2, num_groups=1), alone_EC)


def test_llep_by_hand() -> None:
    """Ranks of one expert each; the fullest shall have the mean, 30."""
    spill = partial(spilled, owner_E=np.arange(4), num_ranks=4, alpha=1.0)
    quota_EC = spill(np.array([100, 20, 0, 0]), min_rows=15)
    assert quota_EC.tolist() == [[30, 10, 30, 30], [0, 20, 0, 0], [0] * 4, [0] * 4]
    # The mean is 31: rank 1 has room for 6 of the last 7, too short a piece; it takes all of them,
    # and one of its own has to go.
    quota_EC = spill(np.array([100, 25, 0, 0]), min_rows=15)
    assert quota_EC[:2].tolist() == [[31, 7, 31, 31], [1, 24, 0, 0]]
    # Within 1.3 times the mean nobody moves.
    assert np.array_equal(spill(np.array([38, 32, 30, 20])), np.diag([38, 32, 30, 20]))


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5])
def test_llep_keeps_below_alpha(alpha: float) -> None:
    """Where the ranks together have the room; and no row is lost."""
    owner_E = np.arange(16) // 2
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        rows_E[0] += -rows_E.sum() % 8  # so that whole rows can be even
        quota_EC = spilled(rows_E, owner_E, 8, alpha=alpha, min_rows=1)
        assert (quota_EC.sum(axis=1) == rows_E).all()
        assert quota_EC.min() == 0
        assert quota_EC.sum(axis=0).max() <= alpha * rows_E.sum() / 8


def test_llep_makes_no_small_copies() -> None:
    """A piece is as long as asked, or the rest of its expert."""
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        quota_EC = spilled(rows_E, np.arange(16) // 2, 8, min_rows=100)
        copied = quota_EC * (np.arange(16)[:, None] // 2 != np.arange(8))
        for pieces_C in copied:
            pieces = pieces_C[pieces_C > 0]
            assert (pieces < 100).sum() <= 1


def test_laer_copies_by_hand() -> None:
    """Two nodes: one copy on each, where there is room, and then one more on each."""
    rows_E = np.array([80, 10, 5, 5])
    assert copies_by_rows(rows_E, 12, 2).tolist() == [6, 2, 2, 2]
    # 6 slots: one each and two left, of which the hottest gets one; it then wants two.
    assert copies_by_rows(rows_E, 6, 2).tolist() == [2, 2, 1, 1]


def test_laer_places_by_hand() -> None:
    """Copies of 30, 30, 20, 10 rows on 4 ranks: first to the other node, to the emptiest rank."""
    slots_EC = placed(
        np.array([60, 20, 10]), np.array([2, 1, 1]), slots=1, node_C=np.array([0, 0, 1, 1])
    )
    assert slots_EC.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_laer_lays_out(slots: int) -> None:
    """Slots are kept, and with 32 of them every expert is on both nodes; of the layouts it is the
    faster one."""
    seconds = partial(RowPrices(np.ones(8), 0.2, 2.0).seconds, node_C=NODE_C)
    for rows_CE in LOADS:
        slots_EC = laid_out(rows_CE, slots, NODE_C, seconds)
        assert slots_EC.sum(axis=0).max() <= slots
        assert slots_EC.any(axis=1).all()
        rows_E = rows_CE.sum(axis=0)
        if slots * 8 >= 32:
            copies_E = copies_by_rows(rows_E, slots * 8, 2)
            by_rows_EC = placed(rows_E, copies_E, slots, NODE_C)
            assert by_rows_EC.reshape(16, 2, 4).any(axis=2).all()
        even_EC = placed(rows_E, np.full(16, slots * 8 // 16), slots, NODE_C)
        found_s = seconds(sent(rows_CE, slots_EC, NODE_C))
        assert slots % 2 or found_s <= seconds(sent(rows_CE, even_EC, NODE_C))


def test_laer_plans_for_the_way_its_rows_go() -> None:
    """What it counts of a layout is what the table sends, up to whole rows."""
    cluster = PricedCluster.of(replace(A100, ranks_per_node=4), rows=500, width=64)
    slots_EC = laid_out(LOADS[0], 3, NODE_C, lambda sent_CC: float(sent_CC.max()))
    way = evenly_on_node(Placement.block(16, 8), Layout.of_slots(slots_EC), LOADS[0], cluster)
    off_CC = way(LOADS[0]).sum(axis=1) - sent(LOADS[0], slots_EC, NODE_C)
    assert np.abs(off_CC).max() < 16  # experts: a row of each


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="16 experts do not fit 7 ranks x 2 slots"):
        balanced_slots(np.ones(16), 7, 2)
    with pytest.raises(ValueError, match="16 experts do not divide into 3 groups"):
        balanced_slots(np.ones(16), 8, 2, num_groups=3)
    with pytest.raises(ValueError, match="16 experts do not fit 8 ranks x 1 slots"):
        laid_out(LOADS[0], 1, NODE_C, lambda sent_CC: 0.0)
