# SPDX-License-Identifier: Apache-2.0
"""What rows cost one by one: to compute, to leave a cell, to cross between nodes. Pure.

The model is ``cost.prices``': a layer takes as long as its busiest cell computes and its busiest
link carries rows, where a link is a cell's own or its node's card, in or out; or a cell's part of
that card, if it can use no more of it. Shape letters: C
cells, V nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.cost.prices import TRIPS, Prices


@dataclass(frozen=True, eq=False)
class RowPrices:
    """Seconds a row; the same on every rank.

    Attributes:
        row_s_C: that an expert computes on it in each cell, float64.
        local_row_s: that it takes of a cell's own link, which carries all rows that leave or enter
            the cell.
        cross_row_s: that it takes of a node's card, which carries all rows that leave or enter the
            node; its cells share it.
        cards: by how much more a row takes of its own cell's part of the node's card; 1 where a
            cell may use all of it.

    Raises:
        ValueError: a price below zero or not finite.
    """

    row_s_C: np.ndarray
    local_row_s: float
    cross_row_s: float
    cards: float = 1.0

    def __post_init__(self) -> None:
        for name, price in (
            *(("row_s", float(row_s)) for row_s in self.row_s_C),
            ("local_row_s", self.local_row_s),
            ("cross_row_s", self.cross_row_s),
            ("cards", self.cards),
        ):
            if not 0 <= price < math.inf:
                raise ValueError(f"{name} is {price}; prices are finite and not below zero")

    @classmethod
    def of(cls, prices: Prices, num_cells: int) -> RowPrices:
        """Of like cells: a row's trips, forward and backward, and its experts."""
        trips_bytes = TRIPS * prices.row_bytes
        return cls(
            np.full(num_cells, prices.row_s),
            trips_bytes / prices.intra_bytes_per_s,
            trips_bytes / prices.inter_bytes_per_s,
            prices.cards,
        )

    def seconds(self, sent_CC: np.ndarray, node_C: np.ndarray) -> float:
        """Of a layer.

        Args:
            sent_CC: rows from each cell to each, ``[C, C]``.
            node_C: node of each cell; any numbers.
        """
        leaving_CC, crossing_VV = _without_own(sent_CC), between_nodes(sent_CC, node_C)
        far_CC = sent_CC * (node_C[:, None] != node_C)
        links = (
            (self.local_row_s, leaving_CC),
            (self.cross_row_s, crossing_VV),
            (self.cards * self.cross_row_s, far_CC),
        )
        link_s = max(price * busiest(sent) for price, sent in links)
        return float((self.row_s_C * sent_CC.sum(axis=0)).max()) + link_s


def between_nodes(sent_CC: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Rows from each node to each other one, ``[V, V]``; nodes in the order of their numbers."""
    is_on_CV = (node_C[:, None] == np.unique(node_C)).astype(sent_CC.dtype)
    return _without_own(is_on_CV.T @ sent_CC @ is_on_CV)


def _without_own(sent: np.ndarray) -> np.ndarray:
    """But for what stays in its place."""
    leaving: np.ndarray = sent - np.diag(np.diag(sent))
    return leaving


def busiest(leaving: np.ndarray) -> float:
    """The most that leaves one place, or comes to it."""
    return float(max(leaving.sum(axis=0).max(), leaving.sum(axis=1).max()))
