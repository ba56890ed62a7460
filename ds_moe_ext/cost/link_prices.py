# SPDX-License-Identifier: Apache-2.0
"""What rows and copies of experts wait for on a cluster's links, by who sends what to whom. Pure.

Rows go all at once: an exchange takes as long as its busiest link. Copies go in rounds, and a cell
passes on what it got in an earlier one, so that each cell's rounds follow each other. A link is a
cell's own to its node, its own to other nodes, or that of its node to others, which the cells there
may share; each carries as much in as out. Shape letters: C cells, N transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

import numpy as np

from ds_moe_ext.cost.lines import check_costs
from ds_moe_ext.cost.row_prices import between_nodes, busiest
from ds_moe_ext.transfer import Transfers


class Trip(NamedTuple):
    """What an exchange of rows takes as layers make it, beside what links alone would.

    Attributes:
        start_s: seconds of any, however few rows travel.
        factor: times the seconds of the links.
    """

    start_s: float = 0.0
    factor: float = 1.0


BARE = Trip()


@dataclass(frozen=True, kw_only=True)
class LinkPrices:
    """The links of a cluster, the same on every rank.

    Attributes:
        near_bytes_per_s: what one cell sends to, and receives from, others of its node.
        far_bytes_per_s: likewise, of other nodes, if no other cell of its node does.
        node_bytes_per_s: what all cells of a node do together.
        start_s: seconds of an exchange of next to nothing.
        trip: what layers add to that.
        copy_factor: times the seconds of the links that copies take.

    Raises:
        ValueError: a cost below zero or not finite, or a bandwidth of zero.
    """

    near_bytes_per_s: float
    far_bytes_per_s: float
    node_bytes_per_s: float
    start_s: float = 0.0
    trip: Trip = BARE
    copy_factor: float = 1.0

    def __post_init__(self) -> None:
        costs = {**vars(self), **self.trip._asdict()}
        del costs["trip"]
        check_costs(costs)

    def link_s(self, bytes_CC: np.ndarray, node_C: np.ndarray) -> float:
        """Seconds that the busiest link carries an exchange.

        Args:
            bytes_CC: from each cell to each; its own are left out.
            node_C: node of each cell.
        """
        is_far_CC = node_C[:, None] != node_C
        near_CC = bytes_CC * ~is_far_CC
        np.fill_diagonal(near_CC, 0)
        return max(
            busiest(near_CC) / self.near_bytes_per_s,
            busiest(bytes_CC * is_far_CC) / self.far_bytes_per_s,
            busiest(between_nodes(bytes_CC, node_C)) / self.node_bytes_per_s,
        )

    def exchange_s(self, bytes_CC: np.ndarray, node_C: np.ndarray, num_chunks: int = 1) -> float:
        """Seconds of an exchange as layers make it.

        Args:
            bytes_CC: as of ``link_s``.
            node_C: likewise.
            num_chunks: in which rows travel one after the other.
        """
        links_s = num_chunks * self.start_s + self.link_s(bytes_CC, node_C)
        return self.trip.start_s + self.trip.factor * links_s

    @property
    def exchange_start_s(self) -> float:
        """Seconds of an exchange of no rows, as layers make it."""
        return self.trip.start_s + self.trip.factor * self.start_s

    def copies_s_C(self, transfers: Transfers, expert_bytes: float) -> np.ndarray:
        """Seconds until each cell is through with its part in copies, float ``[C]``; of gradients
        on their way home as well, which take the same way backwards.

        Args:
            transfers: of experts.
            expert_bytes: of one.
        """
        node_C, parts_N = transfers.node_C, transfers.num_segments_N
        num_cells, num_nodes = len(node_C), int(node_C.max()) + 1
        # A transfer in segments is in as many rounds.
        segment = np.arange(parts_N.sum()) - np.repeat(parts_N.cumsum() - parts_N, parts_N)
        round_M = np.repeat(transfers.round_N, parts_N) + segment
        sender_M, receiver_M = (
            np.repeat(each, parts_N) for each in (transfers.sender_N, transfers.receiver_N)
        )
        bytes_M = np.repeat(expert_bytes / parts_N, parts_N)
        end_C = np.zeros(num_cells)
        for number in range(int(round_M.max(initial=-1)) + 1):
            now = round_M == number
            sender, receiver = sender_M[now], receiver_M[now]
            is_far = node_C[sender] != node_C[receiver]
            far, near = bytes_M[now] * is_far, bytes_M[now] * ~is_far
            far_s_C, near_s_C = np.zeros((2, num_cells))
            for cells in (sender, receiver):
                own_C = np.bincount(cells, far, num_cells) / self.far_bytes_per_s
                node_V = np.bincount(node_C[cells], far, num_nodes) / self.node_bytes_per_s
                far_s_C = np.maximum(far_s_C, np.maximum(own_C, (own_C > 0) * node_V[node_C]))
                own_C = np.bincount(cells, near, num_cells) / self.near_bytes_per_s
                near_s_C = np.maximum(near_s_C, own_C)
            of_sender, of_receiver = (
                np.where(is_far, far_s_C[cells], near_s_C[cells]) for cells in (sender, receiver)
            )
            begin = np.maximum(end_C[sender], end_C[receiver])
            done = begin + np.maximum(of_sender, of_receiver) + self.start_s
            for cells in (sender, receiver):
                np.maximum.at(end_C, cells, done)
        return self.copy_factor * end_C


LEAST_SPREAD = 2.0  # of the longest exchange over the shortest, from which a line is told


def trip_through(said_N: Sequence[float], found_N: Sequence[float]) -> Trip:
    """What layers add to links, by exchanges of several sizes: least squares of the relative error.

    Where sizes hardly differ, or longer ones take no longer, only a start is added. Sums are exact,
    so that all ranks find the same.

    Args:
        said_N: seconds of the links.
        found_N: that the exchanges took; those of none are left out.
    """
    pairs = [(said, found) for said, found in zip(said_N, found_N) if said > 0 and found > 0]
    if not pairs:
        return BARE
    if max(pairs)[0] >= LEAST_SPREAD * min(pairs)[0]:
        a, b, c = (fsum(said**k / found**2 for said, found in pairs) for k in range(3))
        d, e = (fsum(said**k / found for said, found in pairs) for k in range(2))
        determinant = a * c - b * b
        start_s, factor = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        if start_s >= 0 and factor > 0:
            return Trip(start_s, factor)
        if factor > 0:  # through zero
            return Trip(0.0, e / c)
    return Trip(max(fsum(found - said for said, found in pairs) / len(pairs), 0.0))
