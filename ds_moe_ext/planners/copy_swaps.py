# SPDX-License-Identifier: Apache-2.0
"""Other copies beside or in place of those that a planner chose by load, where a priced share then
takes less time. Ours; docs/priced_share.md. Pure. Shape letters: E experts, C cells, V nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from ds_moe_ext.level_share import SWEEPS, LevelShare
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.priced_copies import is_even
from ds_moe_ext.row_levels import Division, RowLevels

TRIALS = 24
"""Of a layer, at most: what planning has time for, in counts, so that all ranks decide alike."""
MISSES = 8  # in a row, at most
CELLS = 16
"""On more cells trials are fewer, by the square: each takes longer, and one copy changes less."""


def cover_nodes(
    home: Placement,
    target: Placement,
    rows_CE: np.ndarray,
    node_C: np.ndarray,
    *,
    most_copies: int,
    most_experts: int,
) -> Placement:
    """Fill a target's free room with one copy of an expert for each node that sends it rows and has
    none: the nodes' links are what many copies of few hot experts do not relieve.

    Most rows first, each on the cell of its node that has fewest rows and room for a copy.

    Args:
        home: where the experts live.
        target: copies that a planner chose, with room left.
        rows_CE: that are predicted, int64 ``[C, E]``.
        node_C: node of each cell; any numbers.
        most_copies: that a cell holds at most (m).
        most_experts: that are copied at most (t); first those that the target copies, then those
            of which most rows cross.
    """
    node_C = np.unique(node_C, return_inverse=True)[1]
    is_on_VC = node_C == np.arange(int(node_C.max()) + 1)[:, None]
    is_there_VE = (is_on_VC @ target.holds_EC.T.astype(np.int64)) > 0
    rows_VE = np.where(is_there_VE, 0, is_on_VC @ rows_CE)
    copies_EC = target.holds_EC & ~home.holds_EC
    is_copied_E, crossing_E = copies_EC.any(axis=1), rows_VE.sum(axis=0)
    wanted_E = np.lexsort((-crossing_E, ~is_copied_E))
    rows_VE[:, wanted_E[most_experts:]] = 0
    room_C = most_copies - copies_EC.sum(axis=0)
    busy_C = np.bincount(home.owner_E, rows_CE.sum(axis=0), home.num_cells)
    for place in np.argsort(-rows_VE, axis=None, kind="stable")[: np.count_nonzero(rows_VE)]:
        node, expert = divmod(int(place), home.num_experts)
        free = np.flatnonzero(is_on_VC[node] & (room_C > 0))
        if free.size:
            cell = free[busy_C[free].argmin()]
            copies_EC[expert, cell] = True
            room_C[cell] -= 1
            busy_C[cell] += rows_VE[node, expert]
            busy_C[home.owner_E[expert]] -= rows_VE[node, expert]
            if not room_C.any():
                break
    return home.with_copies(copies_EC)


def swap_copies(
    home: Placement,
    share: LevelShare,
    rows_CE: np.ndarray,
    levels_of: Callable[[Placement], RowLevels],
    *,
    most_experts: int,
) -> LevelShare:
    """Let cells hold copies of other experts, one after the other, as long as that saves time.

    Most promising first: copies that would take most off the busiest cell and off the links. Where
    a cell is full, its copy with fewest rows makes room. Each is priced by rows divided anew, from
    where the division stands; the first that is better is kept, and others are looked for.

    Args:
        home: where the experts live.
        share: of the copies that a planner chose. No cell gets more than its fullest has.
        rows_CE: that are predicted, int64 ``[C, E]``.
        levels_of: what divides rows under a target.
        most_experts: that are copied, at most (t).

    Returns:
        The share of the best copies; the given one if no other saves time.
    """
    levels, division = share.levels, share.plan
    left = TRIALS * CELLS**2 // max(CELLS, home.num_cells) ** 2
    copies_C = (levels.target.holds_EC & ~home.holds_EC).sum(axis=0)
    swaps_of = partial(
        _swaps, home, rows_CE, most_copies=int(copies_C.max()), most_experts=most_experts
    )
    while copies_C.any() and not is_even(levels, division):
        tried = list(islice(swaps_of(levels, division), min(left, MISSES)))
        if not tried:
            break
        found = levels.first_below(division, np.stack(tried), rows_CE, sweeps=SWEEPS)
        if found is None:
            break
        number, division = found
        left -= number + 1
        levels = levels_of(home.with_copies(tried[number]))
    if levels is share.levels:
        return share
    swapped = LevelShare.planned(levels, rows_CE, sweeps=share.sweeps)
    return min(share, swapped, key=lambda each: each.plan.price)


def _swaps(
    home: Placement,
    rows_CE: np.ndarray,
    levels: RowLevels,
    division: Division,
    *,
    most_copies: int,
    most_experts: int,
) -> Iterator[np.ndarray]:
    """Who holds what with one copy more, or another one, bool ``[E, C]``; most promising first."""
    holds_EC = levels.target.holds_EC
    copies_EC = holds_EC & ~home.holds_EC
    computed_EC = levels.computed_EC(rows_CE, division.rows_N)
    fewest_C = np.where(copies_EC, computed_EC, np.iinfo(np.int64).max).argmin(axis=0)
    is_full_C = copies_EC.sum(axis=0) >= most_copies
    promise_EC = np.where(holds_EC, 0, _promise_EC(levels, rows_CE, computed_EC))
    for place in np.argsort(-promise_EC, axis=None, kind="stable")[: np.count_nonzero(promise_EC)]:
        expert, cell = divmod(int(place), levels.target.num_cells)
        others_EC = copies_EC.copy()
        others_EC[fewest_C[cell], cell] &= not is_full_C[cell]
        others_EC[expert, cell] = True
        if np.count_nonzero(others_EC.any(axis=1)) <= most_experts:
            yield home.holds_EC | others_EC


def _promise_EC(levels: RowLevels, rows_CE: np.ndarray, computed_EC: np.ndarray) -> np.ndarray:
    """What a copy could take, by the prices: off the busiest cell until its own does as much, off
    its node's card what senders there send elsewhere, and off its own link."""
    prices, node_C = levels.prices, levels.node_C
    busy_EC = computed_EC * prices.row_C
    busy_C = busy_EC.sum(axis=0)
    busiest = int(busy_C.argmax())
    is_near_CC = (node_C[:, None] == node_C).astype(np.int64)
    away_EC = np.maximum((rows_CE.T - computed_EC) @ is_near_CC, 0)
    own_EC = np.maximum(rows_CE.T - computed_EC, 0)
    taken_EC = np.minimum(busy_EC[:, [busiest]], (busy_C[busiest] - busy_C) // 2)
    promise_EC: np.ndarray = taken_EC + prices.cross * away_EC + prices.local * own_EC
    return promise_EC
