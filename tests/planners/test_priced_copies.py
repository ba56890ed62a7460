# SPDX-License-Identifier: Apache-2.0
"""How many copies a priced share needs, and which it lacks once rows are known.

Shape letters: C cells, E experts.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ds_moe_ext.cost.block_costs import BlockPrices
from ds_moe_ext.cost.prices import Prices
from ds_moe_ext.level_share import SWEEPS, LevelShare
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.planners.priced_copies import TOLERANCE, calibrate, fewest
from ds_moe_ext.planners.prophet_greedy import place_experts
from ds_moe_ext.row_levels import RowLevels, WholePrices

NODES = np.array([0, 0, 1, 1])
HOME = Placement.block(8, 4)
HOT = np.array([400, 60, 50, 40, 30, 20, 10, 10])
FREE = Prices(row_s=1.0, row_bytes=0.0, copy_s=1.0, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0)
LEVELS = partial(RowLevels, node_C=NODES, prices=WholePrices.of(np.ones(4), 0.0, 0.0))


def targets_of(rows_CE: np.ndarray, most: int) -> list[Placement]:
    """By Algorithm 1, the widest first, and the home."""
    return [
        materialize(
            [HOME], [rows_CE.sum(axis=0)], overlap_degree=4, copies_per_cell=m, node_C=NODES
        )[0]
        for m in range(most, -1, -1)
    ]


def test_no_more_copies_than_it_takes() -> None:
    """One hot expert: a copy in each other cell is enough, and fewer are not."""
    rows_CE = np.tile(HOT, (4, 1))
    targets = targets_of(rows_CE, 4)
    share = fewest(targets, LEVELS, rows_CE, sweeps=SWEEPS)
    widest = LevelShare.planned(LEVELS(targets[0]), rows_CE, sweeps=SWEEPS)
    assert share.plan.price <= (1 + TOLERANCE) * widest.plan.price
    at = targets.index(share.levels.target)
    assert 0 < at < len(targets) - 1
    narrower = LevelShare.planned(LEVELS(targets[at + 1]), rows_CE, sweeps=SWEEPS)
    assert narrower.plan.price > (1 + TOLERANCE) * widest.plan.price


def test_even_rows_need_no_copies() -> None:
    rows_CE = np.full((4, 8), 100)
    share = fewest(targets_of(rows_CE, 2), LEVELS, rows_CE, sweeps=SWEEPS)
    assert share.levels.target.is_single


def test_copies_are_added_only_for_what_dividing_leaves() -> None:
    copies_EC = np.zeros((8, 4), dtype=bool)
    copies_EC[0, 1:] = True
    target = HOME.with_copies(copies_EC)
    rows_CE = np.tile(HOT, (4, 1))
    share = LevelShare.planned(LEVELS(target), rows_CE, sweeps=SWEEPS)
    mended = calibrate(HOME, share, rows_CE, copies_left=2, prices=FREE, levels_of=LEVELS)
    assert mended.target is target  # the copies that stand are enough
    other_CE = np.tile(np.roll(HOT, 4), (4, 1))  # another expert is hot now
    added = calibrate(HOME, share, other_CE, copies_left=2, prices=FREE, levels_of=LEVELS)
    copies = added.target.holds_EC & ~target.holds_EC
    assert copies[4].any() and copies.sum(axis=0).max() <= 2
    least = other_CE.sum() / 4
    busiest = [each.computed_C(other_CE).max() for each in (added, share.of_rows(other_CE))]
    assert busiest[0] < busiest[1] and busiest[0] < 1.1 * least
    dear = Prices(**{**vars(FREE), "copy_s": 1e6})
    kept = calibrate(HOME, share, other_CE, copies_left=2, prices=dear, levels_of=LEVELS)
    assert kept.target is target


def test_the_first_of_the_experts_that_pro_prophet_copies() -> None:
    prices = BlockPrices(
        row_s=1.0, row_bytes=1.0, bytes_per_s=10.0, weight_bytes=1, gradient_bytes=1,
        copy_bytes_per_s=1.0, forward_gap_s=0.0, backward_gap_s=0.0,
    )  # fmt: skip
    rows_CE = np.tile(HOT, (4, 1))
    found = place_experts(HOME, rows_CE, prices=prices, balance=0.1)
    assert len(found.selected) > 1
    one = found.first(1)
    assert one.selected == found.selected[:1]
    assert (one.target.num_holders_E > 1).nonzero()[0].tolist() == list(one.selected)
    assert (
        one.rows.computed_C.sum() == rows_CE.sum() and one.seconds_without == found.seconds_without
    )
    none = found.first(0)
    assert np.array_equal(none.target.holds_EC, HOME.holds_EC) and not none.selected
