# SPDX-License-Identifier: Apache-2.0
"""Which copies a priced share needs, and which it lacks once the rows are known. Pure.

Planners that judge a placement by a rule of their own cannot know what a share will mend. These
count what it leaves. Ours; docs/priced_share.md. Shape letters: E experts, C cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ds_moe_ext.cost.prices import Prices, busiest_link
from ds_moe_ext.level_share import PLANNED_SWEEPS, DividedRows, LevelShare
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.calibrate import wider
from ds_moe_ext.row_levels import Division, RowLevels

TOLERANCE = 0.01
"""By so much a layer may take longer with fewer copies; and than if all rows were local and even,
before copies are added to it; and longer or less long than planned, before it is planned anew."""


def is_even(levels: RowLevels, division: Division) -> bool:
    """Whether a layer takes hardly longer than if all rows were local and even."""
    even = division.mean * int(levels.prices.row_C.min())
    return division.price <= (1 + TOLERANCE) * even + levels.prices.worth


def is_as_planned(share: LevelShare, rows_CE: np.ndarray) -> bool:
    """Whether a layer takes as long by other rows as by those that its share was planned for, in
    proportion to how many they are, hardly more or less."""
    plan = share.plan
    found = share.levels.divided(rows_CE, plan, sweeps=share.sweeps)
    planned = plan.price * found.mean
    return abs(found.price * plan.mean - planned) <= TOLERANCE * planned


def fewest(
    targets: Iterable[Placement],
    levels_of: Callable[[Placement], RowLevels],
    rows_CE: np.ndarray,
    *,
    sweeps: int,
) -> LevelShare:
    """The share of the narrowest target under which the layer takes hardly longer than under the
    widest. Targets are asked for, and tried, until one is too narrow.

    Args:
        targets: the widest first.
        levels_of: what divides rows under a target.
        rows_CE: that are predicted, int64 ``[C, E]``.
        sweeps: of the share.
    """
    shares = (LevelShare.planned(levels_of(each), rows_CE, sweeps=sweeps) for each in targets)
    found = next(shares)
    most = (1 + TOLERANCE) * found.plan.price
    for narrower in shares:
        if narrower.plan.price > most:
            break
        found = narrower
    return found


def calibrate(
    home: Placement,
    share: LevelShare,
    rows_CE: np.ndarray,
    *,
    copies_left: int,
    prices: Prices,
    levels_of: Callable[[Placement], RowLevels],
) -> DividedRows:
    """Rows divided over the copies that stand; and over further ones, which are sent at once, where
    dividing alone leaves a layer that takes too long, and sending them costs less than they save.

    As ``planners/calibrate.py``, HECATE's, adds them: Algorithm 1 on the rows as they are.

    Args:
        home: where the experts live.
        share: of the copies that stand.
        rows_CE: rows that each sender routes to each expert, int64.
        copies_left: further copies that a cell has memory for.
        prices: of the cluster.
        levels_of: what divides rows under a target.
    """
    levels, target = share.levels, share.levels.target
    rows_CE = np.ascontiguousarray(rows_CE, dtype=np.int64)
    divided = levels.divided(rows_CE, share.plan, sweeps=share.sweeps)
    found = DividedRows(levels, rows_CE, divided.rows_N)
    if is_even(levels, divided):
        return found
    least_s = divided.price * levels.prices.unit_s
    for each in wider(target, rows_CE, copies_left, levels.node_C):
        own = levels_of(each)
        copies_s = prices.copy_s * busiest_link(home, target, each, levels.node_C)
        divided = own.divided(rows_CE, None, sweeps=PLANNED_SWEEPS)
        taken_s = divided.price * own.prices.unit_s + copies_s
        if taken_s < least_s:
            least_s, found = taken_s, DividedRows(own, rows_CE, divided.rows_N)
    return found
