# SPDX-License-Identifier: Apache-2.0
"""LoongForge's TAOT: ECHO's spill, placed by a transport plan that knows nodes. Pure.

Source: LoongForge's ECHO (Baidu, https://github.com/baidu-baige/LoongForge/issues/28), its paper's
abstract (TAOT, Zhang et al., arXiv 2608.03676), and its public planner, ``sinkhorn``, where these
are short. Taken: ranks above the mean have a surplus, those below it room; first a transport plan
between them by Sinkhorn's iterations, where a way costs ``far`` times as much between nodes as
within one; then, a slot of every rank at a time, each rank with room asks for the expert of highest
score, and each expert goes to the one of those that ask whose score is highest, until none asks.
The score is rows that would move, plus a mean expert's rows times 1 within a node, ``1 / far``
between nodes, and a tenth of the part of the home's surplus that the transport plan sends there.
What experts spill is ECHO's, and so is the way of rows (``row_ways.evenly``). Not taken: its
optional auction between senders; that copies travel beside the rows of experts at home: the table
counts all of their time. Shape letters: E experts, C ranks.
"""

from __future__ import annotations

import numpy as np
from echo import overflow, with_homes

TINY = 1e-8


def transported(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    node_C: np.ndarray,
    *,
    slots: int,
    far: float = 3.0,
    iterations: int = 50,
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``.

    Args:
        rows_E: of each expert in this step, int64.
        owner_E: the rank at which each is at home.
        node_C: node of each rank.
        slots: of a rank for copies.
        far: cost of a way between nodes over that of one within.
        iterations: of Sinkhorn's.
    """
    spill_E, room_C = overflow(rows_E, owner_E, len(node_C))
    is_near_CC = node_C[:, None] == node_C
    surplus_C = np.bincount(owner_E, spill_E, len(node_C))
    plan_CC = _plan(surplus_C, room_C, np.where(is_near_CC, 1.0, far), iterations)
    part_CC = plan_CC / np.maximum(surplus_C, 1.0)[:, None]
    mean_expert = rows_E.sum() / len(rows_E)
    bonus_EC = mean_expert * (np.where(is_near_CC, 1.0, 1.0 / far) + 0.1 * part_CC)[owner_E]
    handed_EC = np.zeros((len(rows_E), len(node_C)), dtype=np.int64)
    for _ in range(slots):
        is_open_EC = np.broadcast_to(room_C > 0, handed_EC.shape) & (handed_EC == 0)
        while True:
            moved_EC = np.minimum(spill_E[:, None], room_C) * is_open_EC
            score_EC = np.where(moved_EC > 0, moved_EC + bonus_EC, 0.0)
            experts, ranks = _matched(score_EC)
            if not len(experts):
                break
            handed_EC[experts, ranks] = moved_EC[experts, ranks]
            spill_E[experts] -= moved_EC[experts, ranks]
            room_C[ranks] -= moved_EC[experts, ranks]
            is_open_EC[:, ranks] = False
    return with_homes(handed_EC, rows_E, owner_E)


def _plan(
    surplus_C: np.ndarray, room_C: np.ndarray, cost_CC: np.ndarray, iterations: int
) -> np.ndarray:
    """Rows from each rank to each that carry surplus to room, float ``[C, C]``."""
    kernel_CC = np.exp(-cost_CC / cost_CC.max())
    supply_C = surplus_C * min(room_C.sum() / max(surplus_C.sum(), 1.0), 1.0)
    to_C = np.ones(len(room_C))
    for _ in range(iterations):
        from_C = supply_C / np.maximum(kernel_CC @ to_C, TINY)
        to_C = room_C / np.maximum(kernel_CC.T @ from_C, TINY)
    plan_CC: np.ndarray = from_C[:, None] * kernel_CC * to_C
    return plan_CC


def _matched(score_EC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts, and the ranks that they go to: each rank asks for one, each expert takes one."""
    ranks = np.flatnonzero(score_EC.any(axis=0))
    asked = score_EC.argmax(axis=0)[ranks]
    asks_EC = np.zeros_like(score_EC)
    asks_EC[asked, ranks] = score_EC[asked, ranks]
    experts = np.unique(asked)
    return experts, asks_EC[experts].argmax(axis=1)
