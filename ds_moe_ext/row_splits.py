# SPDX-License-Identifier: Apache-2.0
"""How many rows a cell sends and gets in a pass, once the rows of all are known. Where copies
divide a sender's rows it is one call of C (``row_splits.c``): a device may stand still meanwhile.

Shape letters: E experts, C cells, F chunks, O chunks of one rank, N (expert, holder) pairs, S slots
of experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeGuard

import numpy as np

from ds_moe_ext.compiled import library
from ds_moe_ext.placement import Placement
from ds_moe_ext.rows import Moved, place_of, starts_of
from ds_moe_ext.share import NearestCopy, Share, received_by_slot, sent_by_pair


class RowSplits(NamedTuple):
    """Of one pass.

    Attributes:
        sent_OC: rows of each chunk that go to each cell.
        received_OC: and that come from each.
        received_CFS: the same for each slot, of the chunks of all ranks.
        moved: brings sent rows from the order of chunk, expert and holder into that of chunk,
            holder and slot; None where nobody asked.
    """

    sent_OC: np.ndarray
    received_OC: np.ndarray
    received_CFS: np.ndarray
    moved: Moved | None


def split(
    share: Share,
    target: Placement,
    cell: int,
    rows_CFE: np.ndarray,
    own: slice,
    *,
    has_moves: bool,
) -> RowSplits:
    """How the rows of one pass split, as one cell sees it.

    Args:
        share: how copies divide rows.
        target: where experts compute.
        cell: this one.
        rows_CFE: rows of each cell for each expert, of the chunks of all its ranks, int64.
        own: chunks of this rank.
        has_moves: ``moved`` is asked for.
    """
    if has_moves and _is_packed(share, target) and _can_read(rows_CFE):
        return _by_code(share, cell, rows_CFE, own)
    return _by_numpy(share, target, cell, rows_CFE, own, has_moves=has_moves)


def _is_packed(share: Share, target: Placement) -> TypeGuard[NearestCopy]:
    is_ours = isinstance(share, NearestCopy) and share.target is target
    return is_ours and type(share) is NearestCopy  # others may share otherwise


def _can_read(rows_CFE: np.ndarray) -> bool:
    return rows_CFE.strides[2] == _BYTES and _code() is not None


def _by_code(share: NearestCopy, cell: int, rows_CFE: np.ndarray, own: slice) -> RowSplits:
    code, plan = _code(), share.packed(cell)
    assert code is not None, "asked before"
    num_cells, _, num_pairs, num_slots = plan[:4].tolist()
    num_chunks, num_own = rows_CFE.shape[1], own.stop - own.start
    sizes = (
        *(num_own * num_cells, num_own * num_cells),
        *(num_cells * num_chunks * num_slots, 2 * num_own * num_pairs),
    )
    out = np.empty(sum(sizes), dtype=np.int64)
    steps = rows_CFE.strides[0] // _BYTES, rows_CFE.strides[1] // _BYTES
    told = num_chunks, cell, own.start, num_own
    if code(place_of(plan), place_of(rows_CFE), *steps, *told, place_of(out)):
        raise MemoryError(f"no room for {num_pairs} pairs of experts and holders")
    first, second, third = sizes[0], 2 * sizes[0], 2 * sizes[0] + sizes[2]
    return RowSplits(
        out[:first].reshape(num_own, num_cells),
        out[first:second].reshape(num_own, num_cells),
        out[second:third].reshape(num_cells, num_chunks, num_slots),
        Moved(*out[third:].reshape(2, -1)),
    )


def _by_numpy(
    share: Share,
    target: Placement,
    cell: int,
    rows_CFE: np.ndarray,
    own: slice,
    *,
    has_moves: bool,
) -> RowSplits:
    sent_ON = sent_by_pair(share, target, cell, rows_CFE[cell])[own]
    received_CFS = received_by_slot(share, target, cell, rows_CFE)
    order_N, moved = target.by_holder_N, None
    by_holder_ON = sent_ON if order_N is None else sent_ON.take(order_N, axis=1)
    if has_moves:
        starts_ON = starts_of(sent_ON)
        starts_ON = starts_ON if order_N is None else starts_ON.take(order_N, axis=1)
        moved = Moved.from_starts(starts_ON, by_holder_ON)
    received_OC = np.add.reduce(received_CFS[:, own], axis=2).T
    return RowSplits(_sums_by_holder(by_holder_ON, target), received_OC, received_CFS, moved)


def _sums_by_holder(by_holder_ON: np.ndarray, target: Placement) -> np.ndarray:
    """Rows of each chunk for each cell, int64 ``[O, C]``, from those by cell and slot."""
    held_C1 = target.held_C1
    if target.is_everywhere:
        sums_OC: np.ndarray = np.add.reduceat(by_holder_ON, held_C1[:-1], axis=1)
        return sums_OC
    num_chunks, num_pairs = by_holder_ON.shape
    ends_ON1 = np.zeros((num_chunks, num_pairs + 1), dtype=np.int64)
    by_holder_ON.cumsum(axis=1, out=ends_ON1[:, 1:])
    return ends_ON1[:, held_C1[1:]] - ends_ON1[:, held_C1[:-1]]


_BYTES = 8


@cache
def _code() -> Callable[..., int] | None:
    """The function, or None where it can be neither found nor compiled. It keeps Python's lock: for
    a few us nobody else needs to have it, who might not give it back for milliseconds."""
    try:
        code = library("row_splits")
    except RuntimeError:
        return None
    number, place = ctypes.c_int64, ctypes.c_void_p
    told = place, place, *[number] * 6, place
    return ctypes.PYFUNCTYPE(ctypes.c_int, *told)(("row_splits", code))
