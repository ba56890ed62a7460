# SPDX-License-Identifier: Apache-2.0
"""EPLB: slots of heavy experts' copies, packed to ranks of equal rows. Pure.

Source: the description of DeepSeek's Expert Parallelism Load Balancer
(https://github.com/deepseek-ai/EPLB; redundant experts of the DeepSeek-V3 report). Taken: both of
its policies, hierarchical where nodes divide the groups of experts and global else; copies go one
by one to the expert with most rows a copy; packing takes the heaviest first, to the lightest pack
with room; an expert's rows are divided evenly over its copies, whichever rank they come from. Not
taken: how it predicts rows, and how seldom it moves experts; here it plans every step, on the
forecast that all planners get. Shape letters: E experts, C ranks, G groups of experts, I items.
"""

from __future__ import annotations

import heapq

import numpy as np


def balanced_slots(
    rows_E: np.ndarray, num_ranks: int, slots: int, *, num_nodes: int = 1, num_groups: int = 1
) -> np.ndarray:
    """Slots that each rank gives to each expert, int64 ``[E, C]``; it may give it two.

    Args:
        rows_E: of each expert.
        num_ranks: node by node.
        slots: of each rank, all of them used.
        num_nodes: of as many ranks each.
        num_groups: of experts, in order of their numbers, that are best on one node together.

    Raises:
        ValueError: the experts do not fit, or do not divide into groups.
    """
    num_experts = len(rows_E)
    if num_experts > num_ranks * slots:
        raise ValueError(f"{num_experts} experts do not fit {num_ranks} ranks x {slots} slots")
    if num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide into {num_groups} groups")
    if num_groups % num_nodes:
        num_nodes = num_groups = 1
    rows_G = rows_E.reshape(num_groups, -1).sum(axis=1)
    node_E = np.repeat(packed(rows_G, num_nodes), num_experts // num_groups)
    slots_EC = np.zeros((num_experts, num_ranks), dtype=np.int64)
    ranks = num_ranks // num_nodes
    for node in range(num_nodes):
        experts = np.flatnonzero(node_E == node)
        copies = replicated(rows_E[experts], ranks * slots)
        rank_I = node * ranks + packed(np.repeat(rows_E[experts] / copies, copies), ranks)
        np.add.at(slots_EC, (np.repeat(experts, copies), rank_I), 1)
    return slots_EC


def replicated(rows_E: np.ndarray, num_slots: int) -> np.ndarray:
    """Copies of each expert, int64: one, and one more wherever there are most rows a copy."""
    copies_E = np.ones(len(rows_E), dtype=np.int64)
    for _ in range(num_slots - len(rows_E)):
        copies_E[(rows_E / copies_E).argmax()] += 1
    return copies_E


def packed(rows_I: np.ndarray, num_packs: int) -> np.ndarray:
    """Pack of each item, int64: as many items in each pack, about as many rows."""
    pack_I = np.empty(len(rows_I), dtype=np.int64)
    room = [len(rows_I) // num_packs] * num_packs
    lightest = [(0.0, pack) for pack in range(num_packs)]
    for item in np.argsort(-rows_I, kind="stable").tolist():
        rows, pack = heapq.heappop(lightest)
        pack_I[item] = pack
        room[pack] -= 1
        if room[pack]:
            heapq.heappush(lightest, (rows + float(rows_I[item]), pack))
    return pack_I
