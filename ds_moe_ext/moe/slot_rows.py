"""Rows of slots: how many each has, and how rows that came in blocks get to their slots and back.

Indices are made on the device, from a table with a few numbers a block: that is all that the host
has to send, however many rows there are. Shape letters: X blocks as they came, S expert slots, R
rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.rows import on_device


@dataclass(frozen=True, eq=False)
class SlotRows:
    """How many rows each expert slot has; rows lie slot by slot.

    Attributes:
        num_rows: rows in all.
        find_end: makes ``end_S``, when it is first asked for.
    """

    num_rows: int
    find_end: Callable[[], Tensor]
    _host: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, rows_S: np.ndarray, device: torch.device) -> SlotRows:
        """From counts that the host knows."""
        return cls(
            int(rows_S.sum()),
            lambda: on_device(np.cumsum(rows_S, dtype=np.int32), device),
            [tuple(rows_S.tolist())],
        )

    @classmethod
    def ending(cls, end_S: Tensor, num_rows: int) -> SlotRows:
        """From where they end, which the host does not know."""
        return cls(num_rows, lambda: end_S)

    @cached_property
    def end_S(self) -> Tensor:
        """Where each slot's rows end, int32 ``[S]`` on the device, as grouped GEMM wants it."""
        return self.find_end()

    def on_host(self) -> tuple[int, ...]:
        """Rows of each slot. Waits for the device if only the device knows."""
        if not self._host:
            self._host.append(tuple(self.end_S.diff(prepend=self.end_S.new_zeros(1)).tolist()))
        return self._host[0]

    def between(self, start: int, stop: int) -> SlotRows:
        """Those of some slots alone. Waits for the device if only the device knows."""
        rows_S = self.on_host()
        before, own = sum(rows_S[:start]), rows_S[start:stop]
        return SlotRows(sum(own), lambda: self.end_S[start:stop] - before, [own])


@dataclass(frozen=True, eq=False)
class SlotSorting:
    """Brings rows from the order in which they came to that of slots, and back.

    Attributes:
        rows_XS: rows of each block for each slot, on the host; as they came, rows lie block by
            block and in a block slot by slot.
        device: of the rows.
    """

    rows_XS: np.ndarray
    device: torch.device
    _made: list[Tensor] = field(default_factory=list)

    @cached_property
    def slots(self) -> SlotRows:
        """Rows of each slot, of all blocks."""
        host = np.add.reduce(self.rows_XS).tolist()
        return SlotRows(sum(host), lambda: self._table[-len(host) :], [tuple(host)])

    def to_slots(self, rows_RD: Tensor) -> Tensor:
        """From the order in which they came to that of slots."""
        return rows_RD if self._is_in_order else rows_RD.index_select(0, self.index_2R[0])

    def back(self, rows_RD: Tensor) -> Tensor:
        """From the order of slots to that in which they came."""
        return rows_RD if self._is_in_order else rows_RD.index_select(0, self.index_2R[1])

    @cached_property
    def index_2R(self) -> Tensor:
        """Takes rows to their slots, and back, int32."""
        size, num_rows = 2 * self.rows_XS.size, self.slots.num_rows
        shift, length = self._table[:size], self._table[size : 2 * size]
        index_2R = shift.repeat_interleave(length, output_size=2 * num_rows).view(2, num_rows)
        index_2R += torch.arange(num_rows, dtype=torch.int32, device=self.device)
        self._made.append(index_2R)
        return index_2R

    def tensors(self) -> list[Tensor]:
        """All that were made so far."""
        return self._made

    @property
    def _is_in_order(self) -> bool:
        return min(self.rows_XS.shape) <= 1

    @cached_property
    def _table(self) -> Tensor:
        """How far each block moves, there and back; its rows, likewise; then where the rows of each
        slot end. Int32, on the device."""
        num_blocks, num_slots = self.rows_XS.shape
        there, back = self.rows_XS.ravel(), self.rows_XS.T.ravel()
        starts, ends = there.cumsum() - there, back.cumsum()
        shift_SX = starts.reshape(num_blocks, num_slots).T.ravel() - ends + back
        shift_XS = shift_SX.reshape(num_slots, num_blocks).T.ravel()
        parts = shift_SX, -shift_XS, back, there, ends[num_blocks - 1 :: num_blocks]
        numbers = np.concatenate(parts, dtype=np.int32, casting="unsafe")
        table = on_device(numbers, self.device)
        self._made.append(table)
        return table
