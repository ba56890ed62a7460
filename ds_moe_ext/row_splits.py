# SPDX-License-Identifier: Apache-2.0
"""How many rows a cell sends and gets in a pass, once the rows of all are known. Where copies
divide a sender's rows it is one call of C (``row_splits.c``): a device may stand still meanwhile.

Shape letters: E experts, C cells, P places in a cell, F chunks of a rank, N (expert, holder) pairs,
S slots of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeGuard

import numpy as np

from ds_moe_ext.compiled import NUMBER, PLACE, quick
from ds_moe_ext.placement import Placement
from ds_moe_ext.rows import Moved, place_of, starts_of
from ds_moe_ext.share import NearestCopy, Share, received_by_slot, sent_by_pair


class RowSplits(NamedTuple):
    """Of one pass, as one rank sees it.

    Attributes:
        sent_FC: rows of each of its chunks that go to each cell; to this one alone where no row
            leaves its cell.
        received_FC: and that come from each; likewise.
        received_PCFS: rows that each rank of its cell has from each cell, for each of its slots.
        moved: brings sent rows from the order of chunk, expert and holder into that of chunk,
            holder and slot; None if they are.
    """

    sent_FC: np.ndarray
    received_FC: np.ndarray
    received_PCFS: np.ndarray
    moved: Moved | None = None


def split(
    share: Share,
    target: Placement,
    cell: int,
    rows_CPFE: np.ndarray,
    place: int,
    *,
    has_moves: bool,
) -> RowSplits:
    """How the rows of one pass split. Each rank of a cell divides its own, as if they were chunks
    of the cell's, and they go to the ranks of its place.

    Args:
        share: how copies divide rows.
        target: where experts compute.
        cell: this one.
        rows_CPFE: rows of each rank and chunk for each expert, int64.
        place: this rank's in its cell.
        has_moves: ``moved`` is asked for.
    """
    if has_moves and _is_packed(share, target) and _can_be_read(rows_CPFE):
        return _by_code(share, cell, rows_CPFE, place)
    num_cells, num_places, num_chunks, num_experts = rows_CPFE.shape
    all_chunks = rows_CPFE.reshape(num_cells, -1, num_experts)
    own = slice(place * num_chunks, (place + 1) * num_chunks)
    sent_FN = sent_by_pair(share, target, cell, all_chunks[cell])[own]
    order_N, moved = target.by_holder_N, None
    by_holder_FN = sent_FN if order_N is None else sent_FN.take(order_N, axis=1)
    if has_moves:
        starts_FN = starts_of(sent_FN)
        starts_FN = starts_FN if order_N is None else starts_FN.take(order_N, axis=1)
        moved = Moved.from_starts(starts_FN, by_holder_FN)
    received = received_by_slot(share, target, cell, all_chunks)
    received_PCFS = received.reshape(num_cells, num_places, num_chunks, -1).swapaxes(0, 1)
    received_FC = np.add.reduce(received_PCFS[place], axis=2).T
    return RowSplits(_sums_by_holder(by_holder_FN, target), received_FC, received_PCFS, moved)


def _is_packed(share: Share, target: Placement) -> TypeGuard[NearestCopy]:
    is_ours = isinstance(share, NearestCopy) and share.target is target
    return is_ours and type(share) is NearestCopy  # others may share otherwise


def _can_be_read(rows_CPFE: np.ndarray) -> bool:
    """By the code: places and chunks are one dim, and experts side by side."""
    _, num_places, num_chunks, _ = rows_CPFE.shape
    _, place_step, chunk_step, expert_step = rows_CPFE.strides
    is_one = num_places == 1 or place_step == num_chunks * chunk_step
    return is_one and expert_step == _BYTES and _code() is not None


def _by_code(share: NearestCopy, cell: int, rows_CPFE: np.ndarray, place: int) -> RowSplits:
    code, plan = _code(), share.packed(cell)
    assert code is not None, "asked before"
    num_cells, _, num_pairs, num_slots = plan[:4].tolist()
    _, num_places, num_chunks, _ = rows_CPFE.shape
    steps = rows_CPFE.strides[0] // _BYTES, rows_CPFE.strides[2] // _BYTES
    sent, all_received = num_chunks * num_cells, num_places * num_chunks * num_cells * num_slots
    end = 2 * sent + all_received
    out = np.empty(end + 2 * num_chunks * num_pairs, dtype=np.int64)
    told = num_places * num_chunks, cell, place * num_chunks, num_chunks
    if code(place_of(plan), place_of(rows_CPFE), *steps, *told, place_of(out)):
        raise MemoryError(f"no room for {num_pairs} pairs of experts and holders")
    received = out[2 * sent : end].reshape(num_cells, num_places, num_chunks, num_slots)
    return RowSplits(
        out[:sent].reshape(num_chunks, num_cells),
        out[sent : 2 * sent].reshape(num_chunks, num_cells),
        received.swapaxes(0, 1),
        Moved(*out[end:].reshape(2, -1)),
    )


def _sums_by_holder(by_holder_FN: np.ndarray, target: Placement) -> np.ndarray:
    """Rows of each chunk for each cell, int64 ``[F, C]``, from those by cell and slot."""
    held_C1 = target.held_C1
    if target.is_everywhere:
        sums_FC: np.ndarray = np.add.reduceat(by_holder_FN, held_C1[:-1], axis=1)
        return sums_FC
    num_chunks, num_pairs = by_holder_FN.shape
    ends_FN1 = np.zeros((num_chunks, num_pairs + 1), dtype=np.int64)
    by_holder_FN.cumsum(axis=1, out=ends_FN1[:, 1:])
    return ends_FN1[:, held_C1[1:]] - ends_FN1[:, held_C1[:-1]]


_BYTES = 8


@cache
def _code() -> Callable[..., int] | None:
    """See ``quick``."""
    return quick("row_splits", PLACE, PLACE, *[NUMBER] * 6, PLACE)
