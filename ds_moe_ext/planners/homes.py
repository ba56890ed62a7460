# SPDX-License-Identifier: Apache-2.0
"""New homes for the experts of all layers: HECATE's Algorithm 2 (spec rules 23 to 26). Pure.

Shape letters: L layers, E experts of a layer, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from ds_moe_ext.load import check_loads, hottest_first, per_layer
from ds_moe_ext.placement import Placement


def shard(
    loads: Sequence[np.ndarray],
    *,
    overlap_degree: np.ndarray | int,
    node_C: np.ndarray,
    homes: Sequence[Placement] | None = None,
) -> tuple[Placement, ...]:
    """Choose every expert's home, so that the cold ones, which are never copied, are balanced.

    The layer whose hottest cold expert has most rows goes first. Its cold experts, most rows first,
    go to the node with fewest rows of this layer so far, and there to the cell with fewest; among
    equals to the one with fewer slots left, then the first. The hot experts, in order of layer and
    rows, fill the slots that remain: those whose home has one stay, the others go to the cell with
    most slots left, then the first.

    A cell has ``floor(experts of all layers / C)`` slots. Where that leaves experts over, the first
    cells have a slot more, as in ``placement.even_homes`` (spec choice B13).

    Costs two heap operations for each expert.

    Args:
        loads: rows of each expert, int64 ``[E]`` a layer.
        overlap_degree: ``t`` of Algorithm 1 (spec choice B16); one for all layers, or ``[L]``.
        node_C: node of each cell.
        homes: the present ones, where hot experts stay if they can; None lets none stay.

    Returns:
        One placement a layer. Over all layers, no cell owns more than one expert more than another.

    Raises:
        ValueError: loads that do not fit, or are no whole rows.
    """
    if len(loads) == 0:
        return ()
    num_experts = [home.num_experts for home in homes] if homes else [len(load) for load in loads]
    check_loads(loads, num_experts, factor=max(num_experts))
    degrees = np.minimum(per_layer(overlap_degree, len(loads)), num_experts).tolist()
    order = [order_E[:count] for order_E, count in zip(hottest_first(loads)[0], num_experts)]
    hot = [order_E[:degree] for order_E, degree in zip(order, degrees)]
    cold = [order_E[degree:] for order_E, degree in zip(order, degrees)]
    cold_rows = [load_E[cold_E].tolist() for load_E, cold_E in zip(loads, cold)]

    least, over = divmod(sum(num_experts), len(node_C))
    slots = [least + (cell < over) for cell in range(len(node_C))]
    nodes = [np.flatnonzero(node_C == node).tolist() for node in np.unique(node_C)]
    owners = [np.empty(count, dtype=np.int64) for count in num_experts]
    for layer in sorted(range(len(loads)), key=lambda layer: -max(cold_rows[layer], default=0)):
        owners[layer][cold[layer]] = _deal(cold_rows[layer], slots, nodes)
    _fill(owners, hot, slots, homes)
    return tuple(Placement.owned_by(owner_E, len(node_C)) for owner_E in owners)


def _deal(rows: list[int], slots: list[int], nodes: list[list[int]]) -> list[int]:
    """The cell of each cold expert of one layer; takes their slots.

    Args:
        rows: of each expert, most first.
        slots: that each cell has left, in all layers.
        nodes: cells of each node.
    """
    # A heap's key is rows, slots left and index in one integer, so that it grows by addition.
    per_slot = len(slots)
    per_row = (sum(slots) + 1) * per_slot
    open_cells = [
        [slots[cell] * per_slot + cell for cell in cells if slots[cell]] for cells in nodes
    ]
    open_nodes = [
        sum(slots[cell] for cell in cells) * per_slot + node
        for node, cells in enumerate(nodes)
        if open_cells[node]
    ]
    for heap in (open_nodes, *open_cells):
        heapify(heap)
    chosen = []
    for count in rows:
        growth = count * per_row - per_slot
        cells = open_cells[open_nodes[0] % per_slot]
        cell = cells[0] % per_slot
        chosen.append(cell)
        slots[cell] -= 1
        if slots[cell]:
            heapreplace(cells, cells[0] + growth)
        else:
            heappop(cells)
        if cells:
            heapreplace(open_nodes, open_nodes[0] + growth)
        else:
            heappop(open_nodes)
    return chosen


def _fill(
    owners: list[np.ndarray],
    hot: list[np.ndarray],
    slots: list[int],
    homes: Sequence[Placement] | None,
) -> None:
    """Write the owners of the hot experts, which take all slots that are left (line 16)."""
    moving = []
    for layer, hot_T in enumerate(hot):
        for expert in hot_T.tolist():
            home = int(homes[layer].owner_E[expert]) if homes else -1
            if home >= 0 and slots[home]:
                owners[layer][expert] = home
                slots[home] -= 1
            else:
                moving.append((layer, expert))
    roomiest = [(-count, cell) for cell, count in enumerate(slots)]
    heapify(roomiest)
    for layer, expert in moving:
        count, cell = roomiest[0]
        owners[layer][expert] = cell
        heapreplace(roomiest, (count + 1, cell))
