# SPDX-License-Identifier: Apache-2.0
"""Where the weights of slots lie: runs of slots that one grouped GEMM takes, and the order of slots
that has fewest.

A grouped GEMM wants matrices at equal distances, each behind the one before. A host may lay them
down from the last slot to the first, and weights of another name between two of them (Megatron-core
does both); experts that have moved lie in whatever slots became free. Shape letters: R rows, S
slots, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.moe.slot_rows import SlotRows


class SlotOrder(NamedTuple):
    """Another order of slots, for rows and weights while experts compute.

    Attributes:
        slots: in that order.
    """

    slots: tuple[int, ...]

    def inverse(self) -> SlotOrder:
        """That which brings slots back."""
        return SlotOrder(tuple(np.argsort(self.slots).tolist()))

    def lengths(self, slots: SlotRows) -> list[int]:
        """Rows of each slot, in this order. Waits for the device if only the device knows."""
        length_S = slots.on_host()
        return [length_S[slot] for slot in self.slots]

    def rows(self, rows_RD: Tensor, length_S: Sequence[int]) -> Tensor:
        """Rows of slots with these lengths, in one copy, which wants a gradient if they do."""
        parts = rows_RD.detach().split(list(length_S))
        ordered = torch.cat([parts[slot] for slot in self.slots])
        return ordered.requires_grad_(rows_RD.requires_grad)

    def weights(self, by_slot: Sequence[Any]) -> tuple[Any, ...]:
        """As many things a slot as there are weights."""
        size = len(by_slot) // len(self.slots)
        return tuple(chain.from_iterable(by_slot[slot * size :][:size] for slot in self.slots))


class Arrangement(NamedTuple):
    """How slots compute.

    Attributes:
        order: of the slots, where another one than theirs has fewer runs.
        runs: slots ``start`` to ``stop`` of that order whose weights can be stacked, name by name.
    """

    order: SlotOrder | None
    runs: tuple[tuple[int, int], ...]


def arranged(by_name: Sequence[Sequence[Tensor]]) -> Arrangement:
    """How slots compute whose weights lie where they lie.

    Args:
        by_name: for each name the weights of all slots.
    """
    return _arranged(_places(by_name))


def runs_of(by_name: Sequence[Sequence[Tensor]]) -> tuple[tuple[int, int], ...]:
    """Slots ``start`` to ``stop`` whose weights can be stacked, name by name, in their own order.

    Args:
        by_name: for each name the weights of all slots.
    """
    return _runs(_places(by_name))


def stacked(weights_S: Sequence[Tensor]) -> Tensor:
    """The same for autograd, which gives each weight its gradient."""
    stacked: Tensor = _Stacked.apply(*weights_S)
    return stacked


def unstacked(weight_S: Tensor) -> tuple[Tensor, ...]:
    """The weight of each slot, from ``[S, ...]``; gradients that lie as the weights do become one
    without a copy."""
    by_slot: tuple[Tensor, ...] = _Unstacked.apply(weight_S)
    return by_slot


def restacked(grads_S: Sequence[Tensor]) -> Tensor:
    """Gradients of slots as one ``[S, ...]``, without a copy where they lie so."""
    if len(runs_of([grads_S])) == 1:
        whole = as_one(grads_S)
        if whole.is_contiguous():
            return whole
    return torch.stack(list(grads_S))


_Place = tuple[tuple[int, int, int], ...]
"""Of a slot: for each of its weights the number of its storage, where it lies there, and its bytes;
bytes are 0 where it cannot be stacked. Storages are numbered as slots come by them: where one lies
changes when copies are freed and had again, and what activation checkpointing computes again must
be computed as before, or torch would take one slot's rows for another's."""


def _places(by_name: Sequence[Sequence[Tensor]]) -> tuple[_Place, ...]:
    numbers: dict[int, int] = {}

    def place(weight: Tensor) -> tuple[int, int, int]:
        storage = weight.untyped_storage().data_ptr()
        number = numbers.setdefault(storage, len(numbers))
        return number, weight.data_ptr() - storage, weight.nbytes if weight.is_contiguous() else 0

    return tuple([tuple(map(place, own)) for own in zip(*by_name)])


@functools.lru_cache(maxsize=1024)  # weights lie as they lay in the pass before
def _arranged(places: tuple[_Place, ...]) -> Arrangement:
    runs = _runs(places)
    if len(runs) == 1:
        return Arrangement(None, runs)
    slots = tuple(sorted(range(len(places)), key=places.__getitem__))
    by_place = _runs(tuple(places[slot] for slot in slots))
    if len(by_place) < len(runs):
        return Arrangement(SlotOrder(slots), by_place)
    return Arrangement(None, runs)


@functools.lru_cache(maxsize=1024)
def _runs(places: tuple[_Place, ...]) -> tuple[tuple[int, int], ...]:
    bounds, distances = [0], None
    for slot, (first, second) in enumerate(pairwise(places), start=1):
        found = _distances(first, second)
        if found is None or distances not in (None, found):
            bounds.append(slot)
            distances = None
        else:
            distances = found
    return tuple(pairwise([*bounds, len(places)]))


def _distances(first: _Place, second: _Place) -> tuple[int, ...] | None:
    """Bytes from each weight of a slot to that of the next one; None where they cannot be in one
    run."""
    found = tuple(after - before for (_, before, _), (_, after, _) in zip(first, second))
    fits = all(
        storage == other and 0 < num_bytes <= distance and others
        for (storage, _, num_bytes), (other, _, others), distance in zip(first, second, found)
    )
    return found if fits else None


def as_one(run_S: Sequence[Tensor]) -> Tensor:
    """The weights of a run as one ``[S, ...]``, without a copy; autograd does not see it."""
    first = run_S[0].detach()
    distance = first.numel()
    if len(run_S) > 1:
        distance = (run_S[1].data_ptr() - first.data_ptr()) // first.element_size()
    return first.as_strided(
        (len(run_S), *first.shape), (distance, *first.stride()), first.storage_offset()
    )


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights_S: Tensor) -> Tensor:
        return as_one(weights_S)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.unbind()


class _Unstacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_S: Tensor) -> tuple[Tensor, ...]:
        return weight_S.unbind()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_S: Tensor) -> Tensor:
        return restacked(grads_S)
