# SPDX-License-Identifier: Apache-2.0
"""Static capacity: every rank sends as many rows to each expert in every pass, padded with zeros.

So the splits of the exchange are known beforehand: no counts are gathered, and the host waits for
nothing. GShard's and HeterMoE's way, and what CUDA graphs need. Shape letters: T tokens, K choices
a token, N rows sent, E experts, C cells, P places in a cell, S expert slots of this cell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.captured import remembered
from ds_moe_ext.moe.one_hot_order import OneHotRoute
from ds_moe_ext.moe.route import LayerRoute, Route, Splits
from ds_moe_ext.moe.slot_rows import SlotRows, SlotSorting
from ds_moe_ext.placement import Placement
from ds_moe_ext.row_splits import RowSplits
from ds_moe_ext.rows import numbers, on_device
from ds_moe_ext.schedule.task import Cut, Span

WHOLE = Span(0, 1)


@dataclass(frozen=True, eq=False)
class Padding:
    """Of one layer on one rank.

    Attributes:
        capacity: rows that each rank sends to each expert.
        target: where experts compute; one holder each.
        cell: this rank's.
        place: and its place there.
        cell_size: places ``P`` of a cell.
        by_masks: rows are put in place by products with a mask, and not by an index.
    """

    capacity: int
    target: Placement
    cell: int
    place: int = 0
    cell_size: int = 1
    by_masks: bool = False
    _first_row: dict[torch.device, Tensor] = field(default_factory=dict)
    _sortings: dict[torch.device, SlotSorting] = field(default_factory=dict)

    def route(self, expert_TK: Tensor) -> tuple[LayerRoute, SlotRows]:
        """The route of a pass, and this rank's rows that travel, by expert. The host does not wait.

        Args:
            expert_TK: chosen experts, -1 where none is; of an expert's rows over the capacity the
                last in GShard's order are dropped.
        """
        (num_tokens, top_k), device = expert_TK.shape, expert_TK.device
        num_rows, num_choices = self.capacity * self.target.num_experts, expert_TK.numel()
        # Choice-major, GShard's priority: first choices of all tokens before second ones.
        expert_N, by_expert_N = expert_TK.T.flatten().sort(stable=True)
        expert_E1 = numbers(self.target.num_experts + 1, device)
        first_E1 = torch.searchsorted(expert_N, expert_E1)
        first_row_E = self._first_row_E(device)
        nth_N = numbers(num_choices, device) - first_E1.index_select(0, expert_N.clamp(min=0))
        row_N = first_row_E[expert_N] + nth_N
        # Those without an expert come before the first one.
        row_N = row_N.where((nth_N < self.capacity) & (nth_N >= 0), num_rows)
        choice_of_N = _choices(num_tokens, top_k, device).index_select(0, by_expert_N)
        choice_N = row_N.new_full((num_rows + 1,), num_choices)
        choice_N.scatter_(0, row_N, choice_of_N)
        choice_N = choice_N[:-1]
        padded_row_N = torch.empty_like(row_N).scatter_(0, choice_of_N, row_N)
        end_E = first_E1.diff().clamp(max=self.capacity).cumsum(dim=0)
        sorting, rows = self._sorting(device), self._rows
        kind = OneHotRoute if self.by_masks else Route
        route = kind(
            choice_N=choice_N,
            token_N=choice_N // top_k,
            splits=Splits.of(rows.sent_FC[0].tolist(), rows.received_FC[0].tolist()),
            sorting=sorting,
            slots=sorting.slots,
            num_tokens=num_tokens,
            top_k=top_k,
            padded_row_N=padded_row_N,
        )
        layer_route = LayerRoute(
            cut=Cut.equal(num_tokens, 1),
            target=self.target,
            top_k=top_k,
            by_key_N=choice_N,
            rows=rows,
            place=self.place,
            count_between=lambda: np.repeat(rows.sent_FC[:, None], self.target.num_cells, axis=1),
            _routes={WHOLE: route},
        )
        return layer_route, SlotRows.ending(end_E, num_rows)

    @property
    def _rows(self) -> RowSplits:
        sent_1C = np.diff(self.target.held_C1)[None] * self.capacity
        received_1C = np.full_like(sent_1C, self.capacity * self._num_slots)
        shape_PC1S = self.cell_size, self.target.num_cells, 1, self._num_slots
        return RowSplits(sent_1C, received_1C, np.full(shape_PC1S, self.capacity))

    @property
    def _num_slots(self) -> int:
        return len(self.target.experts_of(self.cell))

    def _first_row_E(self, device: torch.device) -> Tensor:
        """Where each expert's rows begin in send order, int64 ``[E]``; made once."""
        if device not in self._first_row:
            by_cell = map(self.target.experts_of, range(self.target.num_cells))
            first_E = np.empty(self.target.num_experts, dtype=np.int64)
            first_E[np.concatenate([*by_cell])] = np.arange(len(first_E)) * self.capacity
            with torch.inference_mode(False):
                self._first_row[device] = on_device(first_E, device)
        return self._first_row[device]

    def _sorting(self, device: torch.device) -> SlotSorting:
        """Rows that arrived, to their slots and back: the same in every pass, made once."""
        if device not in self._sortings:
            received_CS = self._rows.received_PCFS[self.place, :, 0]
            with torch.inference_mode(False):
                self._sortings[device] = SlotSorting.of(received_CS, device).made()
        return self._sortings[device]


@remembered(4)  # batches are often alike
def _choices(num_tokens: int, top_k: int, device: torch.device) -> Tensor:
    """Of choices in choice-major order their places in ``[T, K]``, int64 ``[T * K]``."""
    return torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k).T.flatten()
