# SPDX-License-Identifier: Apache-2.0
"""Where the weights of slots lie: the order of slots that has fewest runs, of which a grouped GEMM
takes one each.

A grouped GEMM wants matrices at equal distances, each behind the one before. A host may lay them
down from the last slot to the first, and weights of another name between two of them (Megatron-core
does both); experts that have moved lie in whatever slots became free. Shape letters: R rows, S
slots, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.side_by_side import Place, as_one, places_of, restacked, runs_at


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
    return _arranged(places_of(by_name))


def stacked(weights_S: Sequence[Tensor]) -> Tensor:
    """``as_one`` for autograd, which gives each weight its gradient."""
    stacked: Tensor = _Stacked.apply(*weights_S)
    return stacked


def unstacked(weight_S: Tensor) -> tuple[Tensor, ...]:
    """The weight of each slot, from ``[S, ...]``; gradients that lie as the weights do become one
    without a copy."""
    by_slot: tuple[Tensor, ...] = _Unstacked.apply(weight_S)
    return by_slot


@functools.lru_cache(maxsize=1024)  # weights lie as they lay in the pass before
def _arranged(places: tuple[Place, ...]) -> Arrangement:
    runs = runs_at(places)
    if len(runs) == 1:
        return Arrangement(None, runs)
    slots = tuple(sorted(range(len(places)), key=places.__getitem__))
    by_place = runs_at(tuple(places[slot] for slot in slots))
    if len(by_place) < len(runs):
        return Arrangement(SlotOrder(slots), by_place)
    return Arrangement(None, runs)


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
