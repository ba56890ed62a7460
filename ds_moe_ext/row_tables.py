# SPDX-License-Identifier: Apache-2.0
"""Indices of rows, and what they are made of, in one call: what ``rows.indices_of`` gives.

Binds ``row_tables.c``. Numpy takes a score of calls for it, which is a tenth of what a layer takes
its host. Shape letters: G spans, X blocks as they came, S expert slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext import kernels
from ds_moe_ext.compiled import NUMBER, PLACE, quick
from ds_moe_ext.rows import Moved, check_not_captured, place_of, sent_to


def are_there() -> bool:
    """Whether the code is."""
    return _code() is not None


def indices_to_slots(
    rows_GXS: np.ndarray,
    device: torch.device,
    sizes: Sequence[int],
    num_ends: Sequence[int],
    beside: Moved | None,
    *,
    num_firsts: int,
    is_in_order: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Of each span the index that takes its rows to their slots, and the one that takes them back;
    then of the order beside. And where the rows of each slot end, of each span; then of each those
    of slots behind the first ones, without these. Int32.

    Args:
        rows_GXS: rows of each span and block for each slot, int64.
        device: where the rows are.
        sizes: rows of each order.
        num_ends: slots of which ends are told, likewise.
        beside: another order, whose index is wanted too.
        num_firsts: slots of each span that may be computed apart from those behind them, or 0.
        is_in_order: rows come in the order of slots, and need no index.
    """
    num_spans, num_blocks, num_slots = rows_GXS.shape
    code, by_row, num_rows = _code(), not kernels.are_there(device), sum(sizes)
    assert code is not None, "asked before"
    num_beside = 0 if beside is None else beside.length_X.size
    num_all = num_beside if is_in_order else 2 * rows_GXS.size + num_beside
    num_made = num_rows if by_row else 2 * num_all
    if is_cuda := device.type == "cuda":
        check_not_captured()  # before anything is pinned
    length = num_made + sum(num_ends)
    table = torch.empty(length, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
    arrays = [np.ascontiguousarray(each, np.int64) for each in (rows_GXS, *(beside or ()))]
    at_rows, *at_beside = map(place_of, arrays)
    told = num_spans, num_blocks, num_slots, num_firsts, at_rows, is_in_order, num_beside
    if code(*told, *(at_beside or (None, None)), by_row, table.data_ptr()):
        raise MemoryError(f"no room for {num_blocks} x {num_slots} blocks of rows")
    table = sent_to(table, device)
    if by_row:
        parts = table.split_with_sizes([*sizes, *num_ends])
        return parts[: len(sizes)], parts[len(sizes) :]
    _, *ends = table.split_with_sizes([num_made, *num_ends])
    if not sizes:
        return (), ends
    return kernels.index_of_blocks(table, num_all, num_rows).split_with_sizes(sizes), ends


@cache
def _code() -> Callable[..., int] | None:
    """See ``quick``."""
    return quick("row_tables", *[NUMBER] * 4, PLACE, *[NUMBER] * 2, *[PLACE] * 2, NUMBER, PLACE)
