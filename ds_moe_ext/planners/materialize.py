# SPDX-License-Identifier: Apache-2.0
"""Copies of hot experts for the next step: HECATE's Algorithm 1 (spec rules 16 to 20). Pure.

All layers are planned at once; a turn of the loop places one expert of each. Shape letters: L
layers, E experts of one layer, X experts of all layers, T hot experts of a layer, C cells, N nodes,
G cells of a node, P places in the table of ``N`` times ``G``, I copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.load import check_loads, hottest_first, per_layer
from ds_moe_ext.placement import Placement

NEVER = np.int32(np.iinfo(np.int32).max)  # sorts behind every place that is open


def materialize(
    homes: Sequence[Placement],
    loads: Sequence[np.ndarray],
    *,
    overlap_degree: np.ndarray | int,
    copies_per_cell: np.ndarray | int,
    node_C: np.ndarray,
) -> tuple[Placement, ...]:
    """Choose where the hot experts of each layer compute, beside their homes.

    The hot experts are the ``t`` with most rows, the lower index first among equals. If a cell has
    memory for all of them, they go everywhere. If not, the ``C * m`` slots are shared among them by
    load, and the copies of each are spread over nodes, then cells, more free slots first.
    A layer without any rows gets no copies: nothing is known of it yet (spec rule 15).

    Costs a sort of each layer's loads, and a sort of ``[L, C]`` for each hot expert.

    Args:
        homes: of each layer. Copies that are there already are kept (spec rule 21).
        loads: rows of each expert, int64 ``[E]`` a layer; only their ratios count.
        overlap_degree: ``t``, experts whose copies can be sent behind attention; one for all
            layers, or ``[L]``.
        copies_per_cell: ``m``, copies that a cell has memory for; likewise.
        node_C: node of each cell.

    Returns:
        One placement a layer, homes included. No cell receives more than ``min(m, t)`` copies.

    Raises:
        ValueError: loads that do not fit, or are no whole rows.
    """
    if not homes:
        return ()
    _check_cells(homes, node_C)
    num_experts_L = np.array([home.num_experts for home in homes])
    check_loads(loads, num_experts_L.tolist(), factor=len(node_C) * num_experts_L.max())
    degree_L = np.minimum(per_layer(overlap_degree, len(homes)), num_experts_L)
    order_LE, rows_LE = hottest_first(loads)
    degree_L = np.where(rows_LE[:, 0] > 0, degree_L, 0)
    copies_L = np.minimum(per_layer(copies_per_cell, len(homes)), degree_L)

    hot = _Hot.of(order_LE, rows_LE, num_experts_L, degree_L)
    all_fit_L = degree_L <= copies_L
    holds_XC = np.concatenate([home.holds_EC for home in homes])
    holds_XC[hot.of_layers(all_fit_L).experts] = True
    if not all_fit_L.all():
        few = hot.of_layers(~all_fit_L)
        copies_L = copies_L[~all_fit_L]
        lacks_LT = (~holds_XC[few.expert_LT]).sum(axis=2) * few.is_one_LT
        quota_LT = slot_quotas(few.rows_LT, copies_L * len(node_C), lacks_LT)
        _spread(holds_XC, few.expert_LT, quota_LT, copies_L, node_C)
    by_layer = np.split(holds_XC, num_experts_L.cumsum()[:-1])
    return tuple(home.with_copies(holds_EC) for home, holds_EC in zip(homes, by_layer))


def _check_cells(homes: Sequence[Placement], node_C: np.ndarray) -> None:
    for layer, home in enumerate(homes):
        if node_C.shape != (home.num_cells,):
            raise ValueError(
                f"layer {layer} lies on {home.num_cells} cells, but node_C names the nodes of "
                f"{node_C.shape}; name one node a cell"
            )


@dataclass(frozen=True, eq=False)
class _Hot:
    """The hot experts of each layer, hottest first.

    Attributes:
        expert_LT: index among the experts of all layers; 0 where a layer has fewer hot ones.
        rows_LT: their rows; 0 likewise.
        is_one_LT: whether there is one.
    """

    expert_LT: np.ndarray
    rows_LT: np.ndarray
    is_one_LT: np.ndarray

    @classmethod
    def of(
        cls,
        order_LE: np.ndarray,
        rows_LE: np.ndarray,
        num_experts_L: np.ndarray,
        degree_L: np.ndarray,
    ) -> _Hot:
        """Args: order_LE and rows_LE: as of ``hottest_first``. degree_L: hot ones of each layer."""
        most = degree_L.max()
        is_one_LT = np.arange(most) < degree_L[:, None]
        first_L = np.cumsum(num_experts_L) - num_experts_L
        expert_LT = order_LE[:, :most] + first_L[:, None]
        return cls(expert_LT * is_one_LT, rows_LE[:, :most] * is_one_LT, is_one_LT)

    def of_layers(self, is_in_L: np.ndarray) -> _Hot:
        return _Hot(self.expert_LT[is_in_L], self.rows_LT[is_in_L], self.is_one_LT[is_in_L])

    @property
    def experts(self) -> np.ndarray:
        """Those of all layers, in one row."""
        return self.expert_LT[self.is_one_LT]


def slot_quotas(rows_LT: np.ndarray, slots_L: np.ndarray, most_LT: np.ndarray) -> np.ndarray:
    """Share slots among experts by load: largest remainders, capped (spec rule 18, choice B6).

    Slots that remain are dealt one by one, largest remainder first, then most rows, round after
    round, until none is left or no expert can take one.

    Args:
        rows_LT: rows of each expert, most first, int64.
        slots_L: slots to share.
        most_LT: slots that an expert can take.

    Returns:
        Slots of each expert, int64 ``[L, T]``.
    """
    total_L1 = np.maximum(rows_LT.sum(axis=1, keepdims=True), 1)
    whole_LT, rest_LT = np.divmod(slots_L[:, None] * rows_LT, total_L1)
    quota_LT = np.minimum(whole_LT, most_LT)
    order_LT = np.argsort(-rest_LT, axis=1, kind="stable")
    room_LT = np.take_along_axis(most_LT - quota_LT, order_LT, axis=1)
    left_L1 = (slots_L - quota_LT.sum(axis=1))[:, None]
    dealt_LT = np.zeros_like(room_LT)
    while True:
        takes_LT = dealt_LT < room_LT
        takes_LT &= takes_LT.cumsum(axis=1) <= left_L1
        if not takes_LT.any():
            break
        dealt_LT += takes_LT
        left_L1 = left_L1 - takes_LT.sum(axis=1, keepdims=True)
    filled_LT = np.take_along_axis(quota_LT, order_LT, axis=1) + dealt_LT
    np.put_along_axis(quota_LT, order_LT, filled_LT, axis=1)
    return quota_LT


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Cells in a table with a row a node; short rows are padded.

    Attributes:
        cell_P: cell in each place of the flattened table ``[N, G]``; 0 where it is padded.
        is_pad_P: whether it is padded.
        place_C: place of each cell.
        num_nodes: nodes ``N``.
    """

    cell_P: np.ndarray
    is_pad_P: np.ndarray
    place_C: np.ndarray
    num_nodes: int

    @classmethod
    def of(cls, node_C: np.ndarray) -> _Nodes:
        _, row_C, size_N = np.unique(node_C, return_inverse=True, return_counts=True)
        order_C = np.argsort(row_C, kind="stable")
        place_C = np.empty_like(row_C)
        start_N = np.arange(len(size_N)) * size_N.max() - (np.cumsum(size_N) - size_N)
        place_C[order_C] = np.arange(len(row_C)) + np.repeat(start_N, size_N)
        cell_P = np.zeros(len(size_N) * size_N.max(), dtype=np.int64)
        cell_P[place_C] = np.arange(len(node_C))
        is_pad_P = np.ones(len(cell_P), dtype=bool)
        is_pad_P[place_C] = False
        return cls(cell_P, is_pad_P, place_C, len(size_N))


def _spread(
    holds_XC: np.ndarray,
    hot_LT: np.ndarray,
    quota_LT: np.ndarray,
    copies_L: np.ndarray,
    node_C: np.ndarray,
) -> None:
    """Put the copies into ``holds_XC``, expert by expert, hottest first (spec rule 19)."""
    # Experts that get copies first, so that no turn is spent on the others.
    order_LT = np.argsort(quota_LT == 0, axis=1, kind="stable")
    hot_TL = np.take_along_axis(hot_LT, order_LT, axis=1).T
    quota_TL = np.take_along_axis(quota_LT, order_LT, axis=1).T
    turns = list(zip(hot_TL, quota_TL))[: (quota_LT > 0).sum(axis=1).max()]
    nodes = _Nodes.of(node_C)
    if nodes.num_nodes == 1:
        _spread_on_one_node(holds_XC, turns, copies_L)
        return
    table = (-1, nodes.num_nodes, len(nodes.cell_P) // nodes.num_nodes)
    free_LNG = np.where(nodes.is_pad_P, 0, copies_L[:, None]).astype(np.int32).reshape(table)
    for expert_L, quota_L in turns:
        held_LP = holds_XC[expert_L[:, None], nodes.cell_P] & ~nodes.is_pad_P
        layer_I, node_I, column_I = _best_places(held_LP.reshape(table), free_LNG, quota_L)
        free_LNG[layer_I, node_I, column_I] -= 1
        holds_XC[expert_L[layer_I], nodes.cell_P[node_I * table[2] + column_I]] = True


def _spread_on_one_node(
    holds_XC: np.ndarray, turns: Sequence[tuple[np.ndarray, np.ndarray]], copies_L: np.ndarray
) -> None:
    """The same where there is one node: the cells with most free slots, the first among equals."""
    num_cells, most = holds_XC.shape[1], copies_L.max()
    # Slots taken and cell as one number, by which cells are ordered; who has no slot comes last.
    key_LC = (most - copies_L)[:, None] * num_cells + np.arange(num_cells)
    for expert_L, quota_L in turns:
        open_LC = np.where(holds_XC[expert_L], NEVER, key_LC)
        open_LC.sort(axis=1)
        is_chosen_LC = (open_LC < most * num_cells) & (np.arange(num_cells) < quota_L[:, None])
        layer_I = np.nonzero(is_chosen_LC)[0]
        cell_I = open_LC[is_chosen_LC] % num_cells
        key_LC[layer_I, cell_I] += num_cells
        holds_XC[expert_L[layer_I], cell_I] = True


def _best_places(
    held_LNG: np.ndarray, free_LNG: np.ndarray, quota_L: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Layer, node and column of every copy of one expert of each layer.

    One by one, a copy goes to the node that has none yet; among those, that has most free slots;
    then, that comes first. In the node it goes to the cell with most free slots, then the first. A
    copy takes a slot from its node, so a node's copy number ``j`` competes as a node with ``j``
    free slots less and, from ``j = 1`` on, as one that has a copy. So the copies of an expert are
    the places with the smallest keys, and one sort finds all of them.
    """
    num_layers, num_nodes, size = held_LNG.shape
    column_G = np.arange(size, dtype=np.int32)
    most_free = np.int32(free_LNG.max())
    is_open_LNG = (free_LNG > 0) & ~held_LNG
    closed = (most_free + 1) * size
    # Sorted: column j tells the cell that the node's copy number j goes to.
    cell_LNG = np.sort(np.where(is_open_LNG, (most_free - free_LNG) * size + column_G, closed))

    waits_LNG = held_LNG.any(axis=2, keepdims=True) | (column_G > 0)
    fewer_LNG = most_free * size - free_LNG.sum(axis=2, keepdims=True, dtype=np.int32) + column_G
    key_LNG = (waits_LNG * closed + fewer_LNG) * num_nodes
    key_LNG += np.arange(num_nodes, dtype=np.int32)[:, None]
    key_LNG[cell_LNG == closed] = NEVER
    sorted_LP = np.sort(key_LNG.reshape(num_layers, -1))
    last_L = np.where(quota_L > 0, sorted_LP[np.arange(num_layers), quota_L - 1], -1)
    is_chosen_LNG = (key_LNG <= last_L[:, None, None]) & (key_LNG < NEVER)
    layer_I, node_I, _ = np.nonzero(is_chosen_LNG)
    return layer_I, node_I, cell_LNG[is_chosen_LNG] % size
