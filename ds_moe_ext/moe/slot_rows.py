# SPDX-License-Identifier: Apache-2.0
"""Rows of slots: how many each has, and how rows that came in blocks get to their slots and back.

With kernels, indices are made on the device, from a table with a few numbers a block: that is all
that the host has to send, however many rows there are. Shape letters: G chunk ranges, X blocks as
they came, S expert slots, R rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core import rows
from ds_moe_ext.core.rows import Moved, indices_of, on_device
from ds_moe_ext.schedule.graphs import NotInGraphs, is_captured


@dataclass(frozen=True, eq=False)
class SlotRows:
    """How many rows each expert slot has; rows lie slot by slot."""

    num_rows: int  # rows in all
    # makes ``end_S`` of the slots from one up to another, or all behind it, from where the first of
    # their rows lies
    find_end: Callable[[int, int | None], Tensor]
    _host: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, rows_S: np.ndarray, device: torch.device) -> SlotRows:
        """From counts that the host knows."""

        def find_end(start: int, stop: int | None) -> Tensor:
            return on_device(np.cumsum(rows_S[start:stop], dtype=np.int32), device)

        return cls(int(rows_S.sum()), find_end, [tuple(rows_S.tolist())])

    @classmethod
    def ending(cls, end_S: Tensor, num_rows: int) -> SlotRows:
        """From where they end, which the host does not know."""

        def find_end(start: int, stop: int | None) -> Tensor:
            own_S = end_S[start:stop]
            return own_S - end_S[start - 1] if start else own_S

        return cls(num_rows, find_end)

    @cached_property
    def end_S(self) -> Tensor:
        """Where each slot's rows end, int32 ``[S]`` on the device, as grouped GEMM wants it."""
        return self.find_end(0, None)

    def on_host(self) -> tuple[int, ...]:
        """Rows of each slot. Waits for the device if only the device knows.

        Raises:
            NotInGraphs: it would, while a CUDA graph is captured.
        """
        if not self._host:
            if is_captured():
                raise NotInGraphs(
                    "the token counts of experts must be known on the host if experts run one "
                    "by one (there is no grouped GEMM for their type on this GPU, or their "
                    "weights are not one tensor)"
                )
            self._host.append(tuple(self.end_S.diff(prepend=self.end_S.new_zeros(1)).tolist()))
        return self._host[0]

    def between(self, start: int, stop: int) -> SlotRows:
        """Those of some slots alone. Waits for the device if only the device knows."""
        own_S = self.on_host()[start:stop]

        def find_end(first: int, last: int | None) -> Tensor:
            return self.find_end(start + first, stop if last is None else start + last)

        return SlotRows(sum(own_S), find_end, [own_S])


@dataclass(frozen=True, eq=False)
class SlotSortings:
    """Bring the rows of several chunk ranges from the order in which they came to that of slots,
    and back; what they need on the device is made for all at once.

    What knows where rows end asks this one, which must not know it in turn: memory of the device
    would wait for Python to find the circle.
    """

    # rows of each chunk range and block for each slot, on the host; as they came, the rows of a
    # chunk range lie block by block and in a block slot by slot
    rows_GXS: np.ndarray
    device: torch.device  # of the rows
    beside: Moved | None = None  # another order, whose index is wanted too
    # slots of each chunk range that may be computed apart from those behind them; 0 where nobody
    # does
    num_firsts: int = 0
    made: list[Tensor] = field(default_factory=list)  # what is on the device so far

    def each(self) -> list[SlotSorting]:
        # No bound methods, which would be kept for backward, too: see ``ctx.like`` of a program.
        return [
            SlotSorting(
                self,
                number,
                SlotRows(sum(host_S), partial(SlotSortings.end_S, self, number), [tuple(host_S)]),
            )
            for number, host_S in enumerate(self._host_GS)
        ]

    @cached_property
    def _host_GS(self) -> list[list[int]]:
        """Rows of each slot, of all blocks."""
        host_GS: list[list[int]] = np.add.reduce(self.rows_GXS, axis=1).tolist()
        return host_GS

    @cached_property
    def is_in_order(self) -> bool:
        """Whether rows come in the order of slots."""
        return min(self.rows_GXS.shape[1:]) <= 1

    @cached_property
    def _made(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Of each chunk range the index that takes its rows to their slots, and the one that takes
        them back; then of the order beside. And where the rows of each slot end, of each chunk
        range; then of each those of slots behind the first ones, without these. Int32."""
        num_ranges, _, num_slots = self.rows_GXS.shape
        sizes: list[int] = []
        if not self.is_in_order:
            sizes += [size for size in map(sum, self._host_GS) for _ in ("there", "back")]
        if self.beside is not None:
            sizes.append(int(self.beside.length_X.sum()))
        num_ends = [num_slots] * num_ranges
        if self.num_firsts:
            num_ends += [num_slots - self.num_firsts] * num_ranges
        if rows.are_there():
            indices, ends = rows.indices_to_slots(
                self.rows_GXS,
                self.device,
                sizes,
                num_ends,
                self.beside,
                num_firsts=self.num_firsts,
                is_in_order=self.is_in_order,
            )
        else:
            indices, all_ends = self._by_numpy(sizes)
            ends = all_ends.split_with_sizes(num_ends)
        self.made.extend((*indices, *ends))
        return indices, ends

    def _by_numpy(self, sizes: Sequence[int]) -> tuple[Sequence[Tensor], Tensor]:
        """The same where nothing can be compiled; ends one behind the other."""
        all_moved: list[Moved] = []
        ends: list[np.ndarray] = []
        for rows_XS in self.rows_GXS:
            num_blocks, num_slots = rows_XS.shape
            there, back = rows_XS.ravel(), rows_XS.T.ravel()
            end = back.cumsum()
            ends.append(end[num_blocks - 1 :: num_blocks])
            if self.is_in_order:
                continue
            # A block is as long in both orders: it lies as much farther back as it ends.
            end_SX = end.reshape(num_slots, num_blocks)
            shift_SX = there.cumsum().reshape(num_blocks, num_slots).T - end_SX
            all_moved += Moved(shift_SX.ravel(), back), Moved(-shift_SX.T.ravel(), there)
        if self.beside is not None:
            all_moved.append(self.beside)
        if self.num_firsts:
            first = self.num_firsts
            ends += [end_S[first:] - end_S[first - 1] for end_S in ends]
        all_ends = ends[0] if len(ends) == 1 else np.concatenate(ends)
        if not all_moved:
            return (), on_device(all_ends.astype(np.int32), self.device)
        return indices_of(all_moved, sizes, self.device, all_ends)

    def indices(self, number: int) -> Sequence[Tensor]:
        """Take the rows of a chunk range to their slots, and back, int32 ``[R]``."""
        return self._made[0][2 * number : 2 * number + 2]

    @property
    def index_beside(self) -> Tensor:
        return self._made[0][-1]

    def end_S(self, number: int, start: int, stop: int | None) -> Tensor:
        """Where the rows of some slots of a chunk range end, from where their first one lies,
        int32."""
        ends, num_slots = self._made[1], self.rows_GXS.shape[2]
        if start and start == self.num_firsts:
            end_S = ends[len(self.rows_GXS) + number]
            return end_S if stop is None or stop == num_slots else end_S[: stop - start]
        end_S = ends[number]
        if not start and (stop is None or stop == num_slots):
            return end_S
        own_S = end_S[start:stop]
        return own_S - sum(self._host_GS[number][:start]) if start else own_S


@dataclass(frozen=True, eq=False)
class SlotSorting:
    """Brings the rows of one chunk range from the order in which they came to that of slots, and
    back."""

    together: SlotSortings  # of several chunk ranges
    number: int  # of the chunk range among them
    slots: SlotRows  # rows of each slot, of all blocks

    @classmethod
    def of(cls, rows_XS: np.ndarray, device: torch.device, num_firsts: int = 0) -> SlotSorting:
        (alone,) = SlotSortings(rows_XS[None], device, num_firsts=num_firsts).each()
        return alone

    def to_slots(self, rows_RD: Tensor) -> Tensor:
        """From the order in which they came to that of slots."""
        if self.together.is_in_order:
            return rows_RD
        return rows_RD.index_select(0, self.together.indices(self.number)[0])

    def back(self, rows_RD: Tensor) -> Tensor:
        """From the order of slots to that in which they came."""
        if self.together.is_in_order:
            return rows_RD
        return rows_RD.index_select(0, self.together.indices(self.number)[1])
