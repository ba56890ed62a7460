# SPDX-License-Identifier: Apache-2.0
"""How many rows a cell sends and gets in a pass, once the rows of all are known: in one call of C
(``row_splits.c``), for a device may stand still meanwhile; by numpy where that is not to be had.

Shape letters: E experts, C cells, F chunks, O chunks of one rank, N (expert, holder) pairs, S slots
of experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from ds_moe_ext.compiled import library
from ds_moe_ext.placement import Placement
from ds_moe_ext.rows import Moved, starts_of
from ds_moe_ext.share import Parts, Share, parts_of, received_by_slot, sent_by_pair


class RowSplits(NamedTuple):
    """Of one pass.

    Attributes:
        there_and_here_2OC: rows of each chunk that go to each cell; and that come from each.
        received_CFS: rows that come from each cell for each slot, of the chunks of all ranks.
        moved: brings sent rows from the order of chunk, expert and holder into that of chunk,
            holder and slot; None where nobody asked.
    """

    there_and_here_2OC: np.ndarray
    received_CFS: np.ndarray
    moved: Moved | None


@dataclass(frozen=True, eq=False)
class Splitting:
    """Says how rows split, as long as a plan stays.

    Attributes:
        share: how copies divide rows.
        target: where experts compute.
        cell: this one.
    """

    share: Share
    target: Placement
    cell: int

    def of(self, rows_CFE: np.ndarray, own: slice, *, has_moves: bool) -> RowSplits:
        """Of one pass.

        Args:
            rows_CFE: rows of each cell for each expert, of the chunks of all its ranks, int64.
            own: chunks of this rank.
            has_moves: ``moved`` is asked for.
        """
        if self._bound is None or rows_CFE.strides[2] != _BYTES:
            return self._by_numpy(rows_CFE, own, has_moves=has_moves)
        return self._bound.of(rows_CFE, self.cell, own, has_moves=has_moves)

    @cached_property
    def _bound(self) -> _Bound | None:
        parts = parts_of(self.share, self.target, self.cell)
        return None if parts is None or _code() is None else _Bound(parts, self.target)

    def _by_numpy(self, rows_CFE: np.ndarray, own: slice, *, has_moves: bool) -> RowSplits:
        share, target, cell = self.share, self.target, self.cell
        sent_ON = sent_by_pair(share, target, cell, rows_CFE[cell])[own]
        received_CFS = received_by_slot(share, target, cell, rows_CFE)
        order_N, moved = target.by_holder_N, None
        by_holder_ON = sent_ON if order_N is None else sent_ON.take(order_N, axis=1)
        if has_moves:
            starts_ON = starts_of(sent_ON)
            starts_ON = starts_ON if order_N is None else starts_ON.take(order_N, axis=1)
            moved = Moved.from_starts(starts_ON, by_holder_ON)
        came_OC = received_CFS[:, own].sum(axis=2).T
        both_2OC = np.stack((_sums_by_holder(by_holder_ON, target), came_OC))
        return RowSplits(both_2OC, received_CFS, moved)


def _sums_by_holder(by_holder_ON: np.ndarray, target: Placement) -> np.ndarray:
    """Rows of each chunk for each cell, int64 ``[O, C]``, from those by cell and slot."""
    ends_ON1 = np.zeros((len(by_holder_ON), by_holder_ON.shape[1] + 1), dtype=np.int64)
    by_holder_ON.cumsum(axis=1, out=ends_ON1[:, 1:])
    sums_OC: np.ndarray = np.diff(ends_ON1[:, target.held_C1], axis=1)
    return sums_OC


class _Plan(ctypes.Structure):
    """As the C code has it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in "CMNS"),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("expert_M", "pair_M", "among_M", "more_M", "order_N", "held_C1"),
                *("expert_S", "among_CS", "more_CS"),
            )
        ),
    )


class _Bound:
    """Tables of a plan, bound to the C code."""

    def __init__(self, parts: Parts, target: Placement) -> None:
        code = _code()
        assert code is not None, "asked before"
        order_N, num_slots = target.by_holder_N, len(parts.expert_S)
        self._code, self._shape = code, (target.num_cells, target.flat_N.size, num_slots)
        arrays = (
            *(parts.expert_M, parts.pair_M, *parts.sent_M),
            *(order_N, target.held_C1),
            *(parts.expert_S, *parts.came_CS),
        )
        self._arrays = [x if x is None else np.ascontiguousarray(x, np.int64) for x in arrays]
        num_cells, num_pairs, _ = self._shape
        places = (None if each is None else _place(each) for each in self._arrays)
        self._plan = _Plan(num_cells, len(parts.expert_M), num_pairs, num_slots, *places)
        self._at_plan = ctypes.addressof(self._plan)

    def of(self, rows_CFE: np.ndarray, cell: int, own: slice, *, has_moves: bool) -> RowSplits:
        """See ``Splitting.of``."""
        (num_cells, num_pairs, num_slots), num_chunks = self._shape, rows_CFE.shape[1]
        num_own = own.stop - own.start
        num_split, num_received = num_own * num_cells, num_cells * num_chunks * num_slots
        before = 2 * num_split + num_received
        out = np.empty(before + 2 * num_own * num_pairs * has_moves, dtype=np.int64)
        steps = rows_CFE.strides[0] // _BYTES, rows_CFE.strides[1] // _BYTES
        told = num_chunks, cell, own.start, num_own, has_moves
        if self._code(self._at_plan, _place(rows_CFE), *steps, *told, _place(out)):
            raise MemoryError(f"no room for {num_pairs} pairs of experts and holders")
        both_2OC = out[: 2 * num_split].reshape(2, num_own, num_cells)
        received = out[2 * num_split : before]
        moved = Moved(*out[before:].reshape(2, -1)) if has_moves else None
        return RowSplits(both_2OC, received.reshape(num_cells, num_chunks, num_slots), moved)


_BYTES = 8


def _place(array: np.ndarray) -> int:
    """In memory; ``array.ctypes`` takes a layer's host as long as an operation."""
    place: int = array.__array_interface__["data"][0]
    return place


@cache
def _code() -> Callable[..., int] | None:
    """The function, or None where it can be neither found nor compiled. It keeps Python's lock: for
    a few us nobody else needs to have it, who might not give it back for milliseconds."""
    try:
        code = library("row_splits")
    except RuntimeError:
        return None
    number, place = ctypes.c_int64, ctypes.c_void_p
    told = place, place, *[number] * 7, place
    return ctypes.PYFUNCTYPE(ctypes.c_int, *told)(("row_splits", code))
