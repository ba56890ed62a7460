# SPDX-License-Identifier: Apache-2.0
"""ECHO: what is above the mean spills to spare slots of ranks below it, after the gate. Pure.

Source: MoE ECHO, elastic cloning of hot experts, a draft for Megatron-LM
(https://github.com/NVIDIA/Megatron-LM/pull/2368; Victarry et al.), and its public planner where the
text is short. Taken: a rank's experts from fewest rows to most keep what brings it to the mean, the
rest spills; ranks below the mean have as much room. Two policies place what spills. In one shot:
experts by what they spill and ranks by their room, most first, are laid along one line, and where
two overlap the rank takes these rows; of each rank the largest pieces live, as many as slots, and
the others go home. In bins, for one slot a rank: ranks in that order take what one expert spills,
from the fullest of 8 bins by its size, the first in it. ECHO takes bins where a rank has one slot,
one shot where it has more. All senders of an expert give in proportion (``row_ways.evenly``). Not
taken: the threshold that gives slots back, off by default. Shape letters: E experts, C ranks, X
experts and R ranks by what they have.
"""

from __future__ import annotations

import heapq

import numpy as np

BINS = 8


def overflow(
    rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows above the mean that each expert spills ``[E]``, room of each rank ``[C]``, int64.

    Args:
        rows_E: of each expert in this step, int64.
        owner_E: the rank at which each is at home.
        num_ranks: of the grid.
    """
    rows_C = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows_C, owner_E, rows_E)
    mean = int(rows_E.sum()) // num_ranks
    order = np.lexsort((rows_E, owner_E))
    before_C = rows_C.cumsum() - rows_C
    through_E = rows_E[order].cumsum() - before_C[owner_E[order]]
    spill_E = np.empty_like(rows_E)
    spill_E[order] = np.clip(through_E - mean, 0, rows_E[order])
    return spill_E, np.maximum(mean - rows_C, 0)


def in_one_shot(
    rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, *, slots: int
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``.

    Args:
        rows_E: as of ``overflow``.
        owner_E: as of ``overflow``.
        num_ranks: as of ``overflow``.
        slots: of a rank for copies.
    """
    spill_E, room_C = overflow(rows_E, owner_E, num_ranks)
    experts, ranks = (np.argsort(-each, kind="stable") for each in (spill_E, room_C))
    spill_X1, room_R = spill_E[experts][:, None], room_C[ranks]
    end_X1, end_R = spill_X1.cumsum(axis=0), room_R.cumsum()
    overlap_XR = np.minimum(end_X1, end_R) - np.maximum(end_X1 - spill_X1, end_R - room_R)
    overlap_XR = np.maximum(overlap_XR, 0)
    too_many = np.argsort(-overlap_XR, axis=0, kind="stable")[slots:]
    np.put_along_axis(overlap_XR, too_many, 0, axis=0)
    handed_EC = np.zeros_like(overlap_XR)
    handed_EC[np.ix_(experts, ranks)] = overlap_XR
    return with_homes(handed_EC, rows_E, owner_E)


def in_bins(rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """The same with one slot a rank, by the other policy. Arguments as of ``overflow``."""
    spill_E, room_C = overflow(rows_E, owner_E, num_ranks)
    mean = int(rows_E.sum()) // num_ranks
    width = max(mean // (BINS - 1), 1)

    def bin_of(spilt: int) -> int:
        return 0 if spilt >= mean else min((mean - spilt) // width + 1, BINS - 1)

    order = np.argsort(-spill_E, kind="stable").tolist()
    waiting = [(bin_of(int(spill_E[e])), turn, e) for turn, e in enumerate(order) if spill_E[e]]
    heapq.heapify(waiting)
    handed_EC = np.zeros((len(rows_E), num_ranks), dtype=np.int64)
    for turn, rank in enumerate(np.argsort(-room_C, kind="stable").tolist(), len(order)):
        if not waiting or not room_C[rank]:
            break
        _, _, expert = heapq.heappop(waiting)
        handed_EC[expert, rank] = min(spill_E[expert], room_C[rank])
        spill_E[expert] -= handed_EC[expert, rank]
        if spill_E[expert]:
            heapq.heappush(waiting, (bin_of(int(spill_E[expert])), turn, expert))
    return with_homes(handed_EC, rows_E, owner_E)


def with_homes(handed_EC: np.ndarray, rows_E: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """What homes hand to copies, and what they keep, int64 ``[E, C]``."""
    quota_EC = handed_EC.copy()
    quota_EC[np.arange(len(rows_E)), owner_E] += rows_E - handed_EC.sum(axis=1)
    return quota_EC
