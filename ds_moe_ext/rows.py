# SPDX-License-Identifier: Apache-2.0
"""Rows in blocks, one block behind the other: indices that bring them into another order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext import kernels
from ds_moe_ext.captured import NotInGraphs, is_captured, remembered


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each block begins, blocks stored one behind the other in C order."""
    flat = lengths.ravel()
    starts: np.ndarray = (flat.cumsum() - flat).reshape(lengths.shape)
    return starts


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``start, start + 1, ...`` for each block, one behind the other, int64."""
    shift = np.repeat(starts - starts_of(lengths), lengths)
    indices: np.ndarray = shift + np.arange(shift.size)
    return indices


class Moved(NamedTuple):
    """Blocks of rows in a new order, which is that of the arrays.

    Attributes:
        shift_X: how much farther back each block lay, int64.
        length_X: rows of each.
    """

    shift_X: np.ndarray
    length_X: np.ndarray

    @classmethod
    def from_starts(cls, starts: np.ndarray, lengths: np.ndarray) -> Moved:
        """Of where each block began, in the new order; arrays of any number of dims."""
        length_X = lengths.ravel()
        return cls(starts.ravel() - length_X.cumsum() + length_X, length_X)


def indices_of(
    all_moved: Sequence[Moved], num_rows: Sequence[int], device: torch.device, also: np.ndarray
) -> tuple[Sequence[Tensor], Tensor]:
    """Indices that bring rows into new orders. With kernels they are made on the device, to which
    the host sends two numbers a block, of all orders at once.

    Args:
        all_moved: each order.
        num_rows: rows of each.
        device: where the rows are.
        also: what else is wanted there.

    Returns:
        Of each order the index, int32 ``[R]``; and ``also``, int32.
    """
    before, shifts = 0, []
    for moved, num in zip(all_moved, num_rows):
        shifts.append(moved.shift_X - before if before else moved.shift_X)
        before += num
    lengths = np.concatenate([moved.length_X for moved in all_moved])
    if kernels.are_there(device):
        table = _table((*shifts, lengths.cumsum(), also), device)
        index = kernels.index_of_blocks(table, lengths.size, before)
        there = table[2 * lengths.size :]
    else:
        index_R = np.repeat(np.concatenate(shifts), lengths)
        index_R += np.arange(before)
        index, there = _table((index_R, also), device).split_with_sizes((before, len(also)))
    return index.split_with_sizes(num_rows) if len(num_rows) > 1 else (index,), there


def _table(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """All of them there, one behind the other, int32."""
    return on_device(np.concatenate(parts, dtype=np.int32, casting="unsafe"), device)


_NOTHING = np.zeros(0, dtype=np.int64)


def block_index(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    """The same as ``ranges`` there, int32."""
    moved = Moved.from_starts(starts, lengths)
    (index,), _ = indices_of((moved,), (int(moved.length_X.sum()),), device, _NOTHING)
    return index


def sums_of_groups(
    rows_ND: Tensor, row_N: Tensor, start_J: Tensor, weight_N: Tensor | None = None
) -> Tensor:
    """The sum of each group of rows, in one pass over them, ``[J, D]``; zeros of an empty one.

    What ``torch.nn.functional.embedding_bag`` asks before it calls this takes as long.

    Args:
        rows_ND: all rows; at least one.
        row_N: rows of the first group, of the second, and so on, int64.
        start_J: where each group begins there, int64.
        weight_N: by which each of them counts, in the type of the rows; None: once.
    """
    sum_JD, *_ = torch.embedding_bag(rows_ND, row_N, start_J, per_sample_weights=weight_N)
    return sum_JD


@remembered(16)  # batches are often alike
def numbers(length: int, device: torch.device) -> Tensor:
    """From 0 on, int64."""
    return torch.arange(length, device=device)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array there; the host does not wait."""
    return sent_to(torch.from_numpy(array), device)


def sent_to(host: Tensor, device: torch.device) -> Tensor:
    """What the host has, there; it does not wait."""
    if device.type != "cuda":
        return host.to(device)
    check_not_captured()
    # From pageable memory the host would wait for what its lane still has to do.
    return host.pin_memory().to(device, non_blocking=True)


def place_of(array: np.ndarray) -> int:
    """Where an array lies in memory. What numpy says of that takes a layer's host as long as an
    operation; of a whole one that may be written to ctypes says it sooner."""
    if array.size and array.flags.c_contiguous and array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return array.ctypes.data


def check_not_captured() -> None:
    """Raises NotInGraphs where what the host works out would go to a device amid a capture."""
    if is_captured():
        raise NotInGraphs("they copy to the device what the host has found, anew in each")
