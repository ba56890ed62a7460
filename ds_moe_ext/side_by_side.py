# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie side by side in memory, and so are one without a copy.

Shape letters: S slots, or tensors of one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor


def runs_of(by_name: Sequence[Sequence[Tensor]]) -> tuple[tuple[int, int], ...]:
    """Slots ``start`` to ``stop`` whose weights can be stacked, name by name, in their own order.

    Args:
        by_name: for each name the weights of all slots.
    """
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
    """One tensor of each piece of memory: an allocator is told of that once, however many are
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
