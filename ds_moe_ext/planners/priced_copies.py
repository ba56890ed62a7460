# SPDX-License-Identifier: Apache-2.0
"""Which copies a priced share needs, and which it lacks once the rows are known. Pure.

Planners that judge a placement by a rule of their own cannot know what a share will mend. These
count what it leaves. Ours; docs/priced_share.md. Shape letters: E experts, C cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.level_share import DividedRows, LevelShare
from ds_moe_ext.placement import Placement
from ds_moe_ext.row_levels import Division, RowLevels
from ds_moe_ext.share import Rule

TOLERANCE = 0.01
"""By so much a layer may take longer with fewer copies; and than if all rows were local and even,
before copies are added to it; and longer or less long than planned, before it is planned anew."""


def even_price(levels: RowLevels, division: Division) -> float:
    """Of a layer that takes hardly longer than if all rows were local and even."""
    even = division.mean * int(levels.prices.row_C.min())
    return (1 + TOLERANCE) * even + levels.prices.worth


def is_even(levels: RowLevels, division: Division) -> bool:
    """Whether a layer takes hardly longer than that."""
    return division.price <= even_price(levels, division)


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
    most_s: float = math.inf,
) -> LevelShare:
    """The share of the narrowest target under which the layer takes hardly longer than under the
    widest. Targets are asked for, and tried, until one is too narrow.

    Args:
        targets: the widest first.
        levels_of: what divides rows under a target.
        rows_CE: that are predicted, int64 ``[C, E]``.
        sweeps: of the share.
        most_s: seconds that a narrower target may take at most.
    """
    shares = (LevelShare.planned(levels_of(each), rows_CE, sweeps=sweeps) for each in targets)
    found = next(shares)
    most_s = min((1 + TOLERANCE) * found.planned_s, most_s)
    for narrower in shares:
        if narrower.planned_s > most_s:
            break
        found = narrower
    return found


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Adds copies once rows are known, where the forecast failed; docs/priced_share.md.

    Attributes:
        home: where the experts live.
        share: of the copies that stand.
        levels_of: what divides rows under a target.
        copy_price: of an expert that the busiest link carries, its weights there and its gradients
            back, in the whole units of the prices. Nothing hides them.
        num_slots: further copies that a cell has room for.
    """

    home: Placement
    share: LevelShare
    levels_of: Callable[[Placement], RowLevels]
    copy_price: int
    num_slots: int

    def __call__(self, rows_CE: np.ndarray) -> tuple[Placement, Rule]:
        """Who holds what, and how rows are divided, int64 ``[C, E]``: over the copies that stand,
        where the busiest cell has hardly more to do than the mean; else over further ones, too,
        where they pay. Pure."""
        share, rows_CE = self.share, np.ascontiguousarray(rows_CE, dtype=np.int64)
        levels = share.levels
        division = levels.divided(rows_CE, share.plan, sweeps=share.sweeps)
        found = None
        if levels.busiest_cell(division, rows_CE) > even_price(levels, division) + self.copy_price:
            found = levels.repaired(
                division,
                rows_CE,
                self.home.owner_E,
                copy_price=self.copy_price,
                num_slots=self.num_slots,
                sweeps=share.sweeps,
            )
        if found is None:
            return levels.target, DividedRows(levels, rows_CE, division.rows_N)
        holds_EC, division = found
        levels = self.levels_of(self.home.with_copies(holds_EC))
        return levels.target, LevelShare(levels, division, share.sweeps)
