# SPDX-License-Identifier: Apache-2.0
"""Rows in memory: tensors that lie side by side, sums and copies of rows by index, and the tables
and splits that say where rows go."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core import kernels
from ds_moe_ext.core.compiled import NUMBER, PLACE, quick
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica, Share, received_by_slot, sent_by_pair
from ds_moe_ext.schedule.graphs import NotInGraphs, is_captured, remembered


def runs_of(by_name: Sequence[Sequence[Tensor]]) -> tuple[tuple[int, int], ...]:
    """Slots ``start`` to ``stop`` whose weights can be stacked, name by name, in order."""
    return runs_at(places_of(by_name))


def restacked(tensors_S: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one ``[S, ...]``, without a copy where each begins where the one
    before ends."""
    if len(runs_of([tensors_S])) == 1:
        whole = as_one(tensors_S)
        if whole.is_contiguous():
            return whole
    return torch.stack(list(tensors_S))


def as_one(run_S: Sequence[Tensor]) -> Tensor:
    """The weights of a run as one ``[S, ...]``, without a copy; autograd does not see it."""
    first = run_S[0].detach()
    distance = first.numel()
    if len(run_S) > 1:
        distance = (run_S[1].data_ptr() - first.data_ptr()) // first.element_size()
    return first.as_strided(
        (len(run_S), *first.shape), (distance, *first.stride()), first.storage_offset()
    )


def one_of_each(by_slot: Iterable[Sequence[Tensor]]) -> Iterator[Tensor]:
    """One tensor of each piece of memory: an allocator hears of that once, however many are
    there."""
    seen: set[int] = set()
    for tensor in chain.from_iterable(by_slot):
        memory = tensor.untyped_storage()._cdata
        if memory not in seen:
            seen.add(memory)
            yield tensor


Place = tuple[tuple[int, int, int], ...]
"""Of a slot: for each of its weights the number of its storage, where it lies there, and its bytes;
bytes are 0 where it cannot be stacked. Storages are numbered as slots come by them: where one lies
changes when copies are freed and had again, and what activation checkpointing computes again must
be computed as before, or torch would take one slot's rows for another's."""


def places_of(by_name: Sequence[Sequence[Tensor]]) -> tuple[Place, ...]:
    """Of each slot. Arguments as of ``runs_of``."""
    numbers: dict[int, int] = {}

    def place(weight: Tensor) -> tuple[int, int, int]:
        storage = weight.untyped_storage().data_ptr()
        number = numbers.setdefault(storage, len(numbers))
        return number, weight.data_ptr() - storage, weight.nbytes if weight.is_contiguous() else 0

    return tuple([tuple(map(place, own)) for own in zip(*by_name)])


@functools.lru_cache(maxsize=1024)
def runs_at(places: tuple[Place, ...]) -> tuple[tuple[int, int], ...]:
    """``runs_of``, of slots in any order."""
    bounds, distances = [0], None
    for slot, (first, second) in enumerate(pairwise(places), start=1):
        found = _distances(first, second)
        if found is None or distances not in (None, found):
            bounds.append(slot)
            distances = None
        else:
            distances = found
    return tuple(pairwise([*bounds, len(places)]))


def _distances(first: Place, second: Place) -> tuple[int, ...] | None:
    """Bytes from each weight of a slot to that of the next one; None where they cannot be in one
    run."""
    found = tuple(after - before for (_, before, _), (_, after, _) in zip(first, second))
    fits = all(
        storage == other and 0 < num_bytes <= distance and others
        for (storage, _, num_bytes), (other, _, others), distance in zip(first, second, found)
    )
    return found if fits else None


# Rows in blocks, one block behind the other: indices that bring them into another order.


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
    """Blocks of rows in a new order, which is that of the arrays."""

    shift_X: np.ndarray  # how much farther back each block lay, int64
    length_X: np.ndarray  # rows of each

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
    # From pageable memory the host would wait for what its stream still has to do.
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


# Indices of rows, and what they are made of, in one call: what ``rows.indices_of`` gives.


def are_there() -> bool:
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
    """Of each chunk range the index that takes its rows to their slots, and the one that takes them
    back; then of the order beside. And where the rows of each slot end, of each chunk range; then
    of each those of slots behind the first ones, without these. Int32.

    Args:
        rows_GXS: rows of each chunk range and block for each slot, int64.
        device: where the rows are.
        sizes: rows of each order.
        num_ends: slots whose ends are given, likewise.
        beside: another order, whose index is wanted too.
        num_firsts: slots of each chunk range that may be computed apart from those behind them, or
            0.
        is_in_order: rows come in the order of slots, and need no index.
    """
    num_ranges, num_blocks, num_slots = rows_GXS.shape
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
    reported = num_ranges, num_blocks, num_slots, num_firsts, at_rows, is_in_order, num_beside
    if code(*reported, *(at_beside or (None, None)), by_row, table.data_ptr()):
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
    return quick("row_tables", *[NUMBER] * 4, PLACE, *[NUMBER] * 2, *[PLACE] * 2, NUMBER, PLACE)


# How many rows an EP rank sends and gets in a pass, once the rows of all are known. Where copies
# divide a sender's rows it is one call of C (``row_splits.c``): a device may stand still
# meanwhile.


def in_32_bits(rows: np.ndarray) -> np.ndarray:
    """The same as int32 where all fit, which takes half of the memory to hold and to send; numpy
    adds them up in 64 bits."""
    fits = rows.max(initial=0) <= np.iinfo(np.int32).max
    return rows.astype(np.int32, copy=False) if fits else rows


class RowSplits(NamedTuple):
    """Of one pass, as one rank sees it."""

    # rows of each of its chunks that go to each EP rank; to this one alone where no row leaves its
    # EP rank
    sent_FC: np.ndarray
    received_FC: np.ndarray  # and that come from each; likewise
    # rows that each rank of its ETP group has from each EP rank, for each of its slots
    received_PCFS: np.ndarray
    # brings sent rows from the order of chunk, expert and holder into that of chunk, holder and
    # slot; None if they are
    moved: Moved | None = None


def split(
    share: Share,
    target: Placement,
    ep_rank: int,
    rows_CPFE: np.ndarray,
    place: int,
    *,
    has_moves: bool,
) -> RowSplits:
    """How the rows of one pass split. Each rank of an ETP group divides its own, as if they were
    chunks of the EP rank's, and they go to the ranks of its place.

    Args:
        share: how replicas divide rows.
        target: where experts compute.
        ep_rank: this one.
        rows_CPFE: rows of each rank and chunk for each expert, int32 or int64.
        place: this rank's in its ETP group.
        has_moves: ``moved`` is asked for.
    """
    rows_CPFE = rows_CPFE.astype(np.int64, copy=False)  # as the code reads them, for this call only
    if has_moves and _is_packed(share, target) and _can_be_read(rows_CPFE):
        return _by_code(share, ep_rank, rows_CPFE, place)
    num_ep_ranks, num_places, num_chunks, num_experts = rows_CPFE.shape
    all_chunks = rows_CPFE.reshape(num_ep_ranks, -1, num_experts)
    own = slice(place * num_chunks, (place + 1) * num_chunks)
    sent_FN = sent_by_pair(share, target, ep_rank, all_chunks[ep_rank])[own]
    order_N, moved = target.by_holder_N, None
    by_holder_FN = sent_FN if order_N is None else sent_FN.take(order_N, axis=1)
    if has_moves:
        starts_FN = starts_of(sent_FN)
        starts_FN = starts_FN if order_N is None else starts_FN.take(order_N, axis=1)
        moved = Moved.from_starts(starts_FN, by_holder_FN)
    received = received_by_slot(share, target, ep_rank, all_chunks)
    received_PCFS = received.reshape(num_ep_ranks, num_places, num_chunks, -1).swapaxes(0, 1)
    received_FC = np.add.reduce(received_PCFS[place], axis=2).T
    return RowSplits(_sums_by_holder(by_holder_FN, target), received_FC, received_PCFS, moved)


def _is_packed(share: Share, target: Placement) -> TypeGuard[NearestReplica]:
    is_ours = isinstance(share, NearestReplica) and share.target is target
    return is_ours and type(share) is NearestReplica  # others may share otherwise


def _can_be_read(rows_CPFE: np.ndarray) -> bool:
    """By the code: places and chunks are one dim, and experts side by side."""
    _, num_places, num_chunks, _ = rows_CPFE.shape
    _, place_step, chunk_step, expert_step = rows_CPFE.strides
    is_one = num_places == 1 or place_step == num_chunks * chunk_step
    return is_one and expert_step == _BYTES and _row_splits_code() is not None


def _by_code(share: NearestReplica, ep_rank: int, rows_CPFE: np.ndarray, place: int) -> RowSplits:
    code, plan = _row_splits_code(), share.packed(ep_rank)
    assert code is not None, "asked before"
    num_ep_ranks, _, num_pairs, num_slots = plan[:4].tolist()
    _, num_places, num_chunks, _ = rows_CPFE.shape
    steps = rows_CPFE.strides[0] // _BYTES, rows_CPFE.strides[2] // _BYTES
    sent, all_received = (
        num_chunks * num_ep_ranks,
        num_places * num_chunks * num_ep_ranks * num_slots,
    )
    end = 2 * sent + all_received
    out = np.empty(end + 2 * num_chunks * num_pairs, dtype=np.int64)
    reported = num_places * num_chunks, ep_rank, place * num_chunks, num_chunks
    if code(place_of(plan), place_of(rows_CPFE), *steps, *reported, place_of(out)):
        raise MemoryError(f"no room for {num_pairs} pairs of experts and holders")
    received = out[2 * sent : end].reshape(num_ep_ranks, num_places, num_chunks, num_slots)
    return RowSplits(
        out[:sent].reshape(num_chunks, num_ep_ranks),
        out[sent : 2 * sent].reshape(num_chunks, num_ep_ranks),
        received.swapaxes(0, 1),
        Moved(*out[end:].reshape(2, -1)),
    )


def _sums_by_holder(by_holder_FN: np.ndarray, target: Placement) -> np.ndarray:
    """Rows of each chunk for each EP rank, int64 ``[F, C]``, from those by EP rank and slot."""
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
def _row_splits_code() -> Callable[..., int] | None:
    return quick("row_splits", PLACE, PLACE, *[NUMBER] * 6, PLACE)
