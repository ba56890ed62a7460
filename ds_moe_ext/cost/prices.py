"""What a step of an MoE layer costs under a placement: HECATE's model, spec rule 22. Pure.

``T(P) = c * (rows of the busiest cell) + 4 * (the slowest of the all-to-all's links)``: rows travel
there and back, forward and backward. Shape letters: L layers, E experts of one layer, X experts of
all layers, C cells, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.cost.lines import check_costs
from ds_moe_ext.placement import Placement

TRIPS = 4  # of a row: dispatch and combine, forward and backward
PARTS = 2.0**16  # of a row, in which an even split is counted


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The cluster's costs, the same on every rank.

    Attributes:
        row_s: seconds an expert computes on one row, forward and backward.
        row_bytes: bytes of one row on one trip.
        copy_s: seconds to send one expert's weights: its bytes over the bandwidth.
        inter_bytes_per_s: what one node sends to, and receives from, the other nodes.
        intra_bytes_per_s: what one cell sends to, and receives from, all others.

    Raises:
        ValueError: a cost below zero or not finite, or a bandwidth of zero.
    """

    row_s: float
    row_bytes: float
    copy_s: float
    inter_bytes_per_s: float
    intra_bytes_per_s: float

    def __post_init__(self) -> None:
        check_costs(vars(self))


@dataclass(frozen=True, eq=False)
class RowFlow:
    """Rows of each layer by where they go, rounded down to ``1 / PARTS`` of a row.

    Attributes:
        computed_LC: rows that each cell computes.
        sent_LC: rows that leave each cell.
        received_LC: rows that come to each cell from others.
        out_LN: rows that leave each node.
        in_LN: rows that come to each node from others.
    """

    computed_LC: np.ndarray
    sent_LC: np.ndarray
    received_LC: np.ndarray
    out_LN: np.ndarray
    in_LN: np.ndarray


def nearest_copy_flow(
    placements: Sequence[Placement], rows: Sequence[np.ndarray], node_C: np.ndarray
) -> RowFlow:
    """Where rows go if nearest copies share them evenly, as ``share.NearestCopy`` does but for the
    remainders of a split.

    All sums are of whole numbers below ``2**53``, so that they are the same on every machine.
    Costs some passes over ``[X, C]``.

    Args:
        placements: of each layer.
        rows: of each layer, that each sender routes to each expert, int64 ``[C, E]``.
        node_C: node of each cell.
    """
    start_L = np.cumsum([0, *(p.num_experts for p in placements[:-1])])
    held_XC = np.concatenate([p.holds_EC for p in placements]).astype(np.float64)
    rows_XC = np.concatenate([rows_CE.T for rows_CE in rows]).astype(np.float64)
    is_on_CN = (node_C[:, None] == np.unique(node_C)).astype(np.float64)

    kept_XC = rows_XC * held_XC
    leaving_XN = (rows_XC - kept_XC) @ is_on_CN
    copies_XN = held_XC @ is_on_CN
    out_XN = leaving_XN * (copies_XN == 0)
    near_XN = np.floor((leaving_XN - out_XN) * PARTS / np.maximum(copies_XN, 1))  # of each copy
    far_X1 = np.floor(out_XN.sum(axis=1) * PARTS / copies_XN.sum(axis=1))[:, None]
    received_XC = ((near_XN + far_X1) @ is_on_CN.T) * held_XC

    def by_layer(table: np.ndarray) -> np.ndarray:
        return np.add.reduceat(table, start_L, axis=0)

    kept_LC, received_LC = by_layer(kept_XC), by_layer(received_XC) / PARTS
    return RowFlow(
        computed_LC=kept_LC + received_LC,
        sent_LC=by_layer(rows_XC) - kept_LC,
        received_LC=received_LC,
        out_LN=by_layer(out_XN),
        in_LN=by_layer(copies_XN * far_X1) / PARTS,
    )


def step_seconds(
    placements: Sequence[Placement],
    rows: Sequence[np.ndarray],
    *,
    prices: Prices,
    node_C: np.ndarray,
) -> np.ndarray:
    """Seconds of each layer's experts and all-to-alls, forward and backward, float ``[L]``.

    An all-to-all takes as long as its slowest link: that of a node to the other nodes, or that of a
    cell, which carries all rows that leave or enter the cell. Arguments as of
    ``nearest_copy_flow``.
    """
    return flow_seconds(nearest_copy_flow(placements, rows, node_C), prices=prices)


def flow_seconds(flow: RowFlow, *, prices: Prices) -> np.ndarray:
    """The same of rows that go any way."""
    inter_L = np.maximum(flow.out_LN, flow.in_LN).max(axis=1)
    intra_L = np.maximum(flow.sent_LC, flow.received_LC).max(axis=1)
    all_to_all_L = prices.row_bytes * np.maximum(
        inter_L / prices.inter_bytes_per_s, intra_L / prices.intra_bytes_per_s
    )
    seconds_L: np.ndarray = prices.row_s * flow.computed_LC.max(axis=1) + TRIPS * all_to_all_L
    return seconds_L


def busiest_link(home: Placement, before: Placement, after: Placement, node_C: np.ndarray) -> int:
    """Experts that the busiest cell or node sends or receives when ``before`` becomes ``after``.

    Counts as the sparse gather moves them: an expert leaves its home, or its home's node, once, and
    enters each node that had no copy of it once (spec rules 22 and 38, choice B7).
    """
    is_on_CN = node_C[:, None] == np.unique(node_C)
    new_EC = after.holds_EC & ~before.holds_EC
    new_EN = (after.holds_EC @ is_on_CN) & ~(before.holds_EC @ is_on_CN)
    owner_E = home.owner_E
    sent_C = np.bincount(owner_E[new_EC.any(axis=1)], minlength=home.num_cells)
    out_C = np.bincount(owner_E[new_EN.any(axis=1)], minlength=home.num_cells)
    links = (new_EC.sum(axis=0), new_EN.sum(axis=0), sent_C, out_C @ is_on_CN)
    return max(int(link.max()) for link in links)
