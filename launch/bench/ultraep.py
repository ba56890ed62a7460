# SPDX-License-Identifier: Apache-2.0
"""UltraEP: the least level that all ranks can be brought to, and who computes what there. Pure.

Source: UltraEP (Wei et al., arXiv 2606.04101), its description at
https://github.com/Dots-Infra/UltraEP (``docs/blog_v1.md``), and its public solver where the text is
short. Taken: after the gate, of exact rows; bisection on the level, of which a greedy trial says
whether it can be reached: ranks from most rows to fewest, of each its experts likewise, whose rows
go to the rank with most room that has a free slot and no copy of the expert; the home keeps one row
at least; a level within ``tolerance`` of the mean is tried first, and is enough; ranks keep rows of
their own as far as their quota goes (``row_ways.in_turn``, whose other rows go in order, where
UltraEP divides them in proportion). It copies inside one NVLink domain alone: the table shows it on
each node for itself, and over all ranks as if these were one domain. Not taken: that no copy
computes below 1,024 rows, its default, which suits many more rows than the table's and would leave
ranks further from level; what hides and hastens copies: UltraEP relays copies of hot experts, sends
weights again before the backward pass, and hides the gradients' way back, where the table counts
weights once and gradients once, on the busiest link, in the open. Shape letters: E experts, C
ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np


def quotas(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    num_ranks: int,
    *,
    slots: int,
    min_rows: int = 1,
    tolerance: float = 0.01,
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``.

    Args:
        rows_E: of each expert in this step, int64.
        owner_E: the rank at which each is at home.
        num_ranks: of the domain.
        slots: of a rank for copies.
        min_rows: of a copy.
        tolerance: of the level, as a part of the mean.
    """

    def handed(level: int) -> np.ndarray | None:
        return _handed(rows_E, owner_E, rows_C, level, slots=slots, min_rows=min_rows)

    rows_C = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows_C, owner_E, rows_E)
    least = math.ceil((1 + tolerance) * rows_C.mean())
    levels = range(least, int(rows_C.max()))
    level = least + bisect_left(levels, True, key=lambda level: handed(level) is not None)
    handed_EC = handed(level)
    assert handed_EC is not None, "the bisection ended at a level that it did not try"
    handed_EC[np.arange(len(rows_E)), owner_E] = rows_E - handed_EC.sum(axis=1)
    return handed_EC


def _handed(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    rows_C: np.ndarray,
    level: int,
    *,
    slots: int,
    min_rows: int,
) -> np.ndarray | None:
    """Rows that homes hand to copies so that no rank has more than the level; None if some has."""
    handed_EC = np.zeros((len(rows_E), len(rows_C)), dtype=np.int64)
    room_C, free_C = np.maximum(level - rows_C, 0), np.full(len(rows_C), slots)
    for rank in np.argsort(-rows_C, kind="stable").tolist():
        over = int(rows_C[rank]) - level
        experts = np.flatnonzero(owner_E == rank)
        for expert in experts[np.argsort(-rows_E[experts], kind="stable")].tolist():
            left = int(rows_E[expert]) - 1
            while over > 0 and left > 0:
                is_open_C = (free_C > 0) & (handed_EC[expert] == 0)
                piece_C = np.where(is_open_C, np.minimum(room_C, min(over, left)), 0)
                fits_C = piece_C >= max(min_rows, 1)
                if not fits_C.any():
                    break
                to = int(np.where(fits_C, room_C, 0).argmax())
                piece = int(piece_C[to])
                handed_EC[expert, to] = piece
                room_C[to] -= piece
                free_C[to] -= 1
                over -= piece
                left -= piece
        if over > 0:
            return None
    return handed_EC
