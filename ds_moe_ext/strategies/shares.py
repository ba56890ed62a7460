# SPDX-License-Identifier: Apache-2.0
"""How copies divide rows, as strategies take it from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from ds_moe_ext.cost.row_prices import RowPrices
from ds_moe_ext.level_share import SWEEPS, LevelShare
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.copy_swaps import swap_copies
from ds_moe_ext.planners.priced_copies import calibrate, fewest
from ds_moe_ext.row_levels import RowLevels, WholePrices, is_compiled
from ds_moe_ext.strategy import Destination, Plan, Pool
from ds_moe_ext.strict import one_of

SWEEPS_OF = {"planned": 0, "priced": SWEEPS}  # by the names of shares
STEADY = 0.05
"""Drift below which copies are left out that the predicted rows can do without: where loads move
faster, those come in for rows that nobody predicted."""
WORTH_S = 1e-4
"""What dividing anew has to save: it takes about so long between gate and dispatch."""


def check_share(key: str, value: str, papers: str) -> None:
    """Raises ValueError for a share that a strategy does not know. What the others need is compiled
    here, as a run starts, and not in the step that needs it first.

    Args:
        key: as a person writes it.
        value: what is there.
        papers: the name of the paper's own.
    """
    one_of(key, value, (papers, *SWEEPS_OF))
    if value != papers:
        is_compiled()


def levels_by(pool: Pool, node_C: np.ndarray) -> Callable[[Placement], RowLevels]:
    """What divides rows of a pool's layers under a target, by what they cost."""
    each = RowPrices.of(pool.prices, len(node_C))
    row_s_C = np.array(pool.row_s_C) if pool.row_s_C else each.row_s_C
    whole = WholePrices.of(
        row_s_C, each.local_row_s, each.cross_row_s, cards=each.cards, worth_s=WORTH_S
    )
    return partial(RowLevels, node_C=node_C, prices=whole)


def shared_by_time(
    targets: Iterable[Placement], rows_CE: np.ndarray, node_C: np.ndarray, pool: Pool, name: str
) -> LevelShare:
    """The share under which a layer takes least time, and which target it is of: the one with
    fewest copies that is hardly slower than the widest.

    Args:
        targets: the widest first.
        rows_CE: that are predicted, int64 ``[C, E]``.
        node_C: node of each cell.
        pool: with what rows cost.
        name: "planned" or "priced".
    """
    return fewest(targets, levels_by(pool, node_C), rows_CE, sweeps=SWEEPS_OF[name])


def swapped(
    home: Placement, share: LevelShare, rows_CE: np.ndarray, pool: Pool, most_experts: int
) -> LevelShare:
    """The share of other copies, no more in any cell and of so many experts at most, where that is
    better on the rows that are predicted."""
    levels_of = levels_by(pool, share.levels.node_C)
    return swap_copies(home, share, rows_CE, levels_of, most_experts=most_experts)


def calibrated(plan: Plan, share: LevelShare, pool: Pool, copies_left: int) -> Plan:
    """The plan, to which copies are added once rows are known, where a cell has room for more."""
    if copies_left <= 0:
        return plan
    revise = partial(_calibrated, plan.home, share, pool=pool, copies_left=copies_left)
    return replace(plan, revise=revise)


def _calibrated(
    home: Placement,
    share: LevelShare,
    rows_CE: np.ndarray,
    *,
    pool: Pool,
    copies_left: int,
) -> Destination:
    divided = calibrate(
        home,
        share,
        rows_CE,
        copies_left=copies_left,
        prices=pool.prices,
        levels_of=levels_by(pool, share.levels.node_C),
    )
    return Destination(divided.target, divided)
