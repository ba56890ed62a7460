# SPDX-License-Identifier: Apache-2.0
"""LAER-MoE: experts laid out anew over all slots, copies by their rows, close to every node. Pure.

Source: LAER-MoE (Liu et al., ASPLOS 2026, arXiv 2602.11686), its planner, and what its public code
(https://github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe) does where the paper is short. Taken:
two numbers of copies are tried, equal ones where slots divide, and by rows: one on each node where
there is room, then one more for whoever has most rows a copy, or one on each node once it is on
all; copies are placed from most rows to fewest, on the nodes with fewest of that expert, there on
the rank with fewest rows; a sender's rows are divided evenly over the copies on its node, or over
all where it has none. Not taken: its prices (of the two layouts the one wins that the table's
prices find faster), its random variations of them, its window of five steps. Its experts are
sharded over all ranks and have no home, so that it restores every slot in every step; the table
counts as copies only those that ``ep`` would not hold. Shape letters: E experts, C ranks, V nodes,
I copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np


def laid_out(
    rows_CE: np.ndarray, slots: int, node_C: np.ndarray, seconds: Callable[[np.ndarray], float]
) -> np.ndarray:
    """Slots that each rank gives to each expert, int64 ``[E, C]``; it may give it two.

    Args:
        rows_CE: of each sender for each expert.
        slots: of each rank.
        node_C: node of each rank, 0 to V - 1.
        seconds: of a layer, by the rows ``[C, C]`` from each rank to each.

    Raises:
        ValueError: the experts do not fit.
    """
    num_ranks, num_experts = rows_CE.shape
    num_slots = num_ranks * slots
    if num_experts > num_slots:
        raise ValueError(f"{num_experts} experts do not fit {num_ranks} ranks x {slots} slots")
    rows_E = rows_CE.sum(axis=0)
    tried = [copies_by_rows(rows_E, num_slots, int(node_C.max()) + 1)]
    if num_slots % num_experts == 0:
        tried.append(np.full(num_experts, num_slots // num_experts))
    layouts = [placed(rows_E, copies_E, slots, node_C) for copies_E in tried]
    return min(layouts, key=lambda slots_EC: seconds(sent(rows_CE, slots_EC, node_C)))


def copies_by_rows(rows_E: np.ndarray, num_slots: int, num_nodes: int) -> np.ndarray:
    """Copies of each expert, int64; one that is on all nodes gets one on each of them, or none."""
    num_experts = len(rows_E)
    first = num_nodes if num_nodes * num_experts <= num_slots else 1
    copies_E = np.full(num_experts, first, dtype=np.int64)
    left = num_slots - first * num_experts
    heaviest = [(-float(rows) / first, expert) for expert, rows in enumerate(rows_E)]
    heapq.heapify(heaviest)
    while left and heaviest:
        _, expert = heapq.heappop(heaviest)
        more = num_nodes if copies_E[expert] >= num_nodes else 1
        if more <= left:
            copies_E[expert] += more
            left -= more
            heapq.heappush(heaviest, (-float(rows_E[expert]) / copies_E[expert], expert))
    return copies_E


def placed(rows_E: np.ndarray, copies_E: np.ndarray, slots: int, node_C: np.ndarray) -> np.ndarray:
    """The same, of so many copies of each expert."""
    num_nodes = int(node_C.max()) + 1
    slots_EC = np.zeros((len(rows_E), len(node_C)), dtype=np.int64)
    on_EV = np.zeros((len(rows_E), num_nodes), dtype=np.int64)
    rows_C, free_C = np.zeros(len(node_C)), np.full(len(node_C), slots)
    rows_I = np.repeat(rows_E / copies_E, copies_E)
    expert_I = np.repeat(np.arange(len(rows_E)), copies_E)
    for copy in np.argsort(-rows_I, kind="stable").tolist():
        on_V = on_EV[expert_I[copy]]
        fits_C = free_C > 0
        wanted_C = fits_C & (on_V == on_V.min())[node_C]
        rank = np.where(wanted_C if wanted_C.any() else fits_C, rows_C, np.inf).argmin()
        slots_EC[expert_I[copy], rank] += 1
        on_V[node_C[rank]] += 1
        rows_C[rank] += rows_I[copy]
        free_C[rank] -= 1
    return slots_EC


def sent(rows_CE: np.ndarray, slots_EC: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Rows from each rank to each, in parts of rows, ``[C, C]``."""
    sent_CC = np.empty((len(node_C), len(node_C)))
    for node in range(int(node_C.max()) + 1):
        is_here_C = node_C == node
        near_EC = slots_EC * is_here_C
        weight_EC = np.where(near_EC.any(axis=1)[:, None], near_EC, slots_EC)
        sent_CC[is_here_C] = rows_CE[is_here_C] @ (weight_EC / weight_EC.sum(axis=1)[:, None])
    return sent_CC
