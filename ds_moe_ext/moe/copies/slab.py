# SPDX-License-Identifier: Apache-2.0
"""Memory for copies of experts: slots that are used again from step to step.

Copies are no parameters. Autograd may save views of them, so that the memory can be freed and had
again behind its back, as long as the same values are put in (see ``Slab.release``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ds_moe_ext.schedule.executor import Event, OnDevice

Weights = tuple[Tensor, ...]  # of one expert, in the order of their names


def are_stacked(weights: Weights, like: Weights) -> bool:
    """Whether each is of all slots, ``[S, ...]``, a name each, and not one after the other of the
    first slot, then of the second and so on.

    Args:
        like: of one expert.
    """
    return bool(weights) and weights[0].dim() > like[0].dim()


def by_slot(stacks: Weights) -> list[Weights]:
    """What is stacked, slot by slot."""
    return list(zip(*(stack.unbind() for stack in stacks)))


def whole(grads: Sequence[Tensor | None], like: Weights) -> Weights:
    """Zeros for weights that an expert does not use: every copy sends all."""
    if all(grad is not None for grad in grads):
        return cast(Weights, grads)
    return tuple(torch.zeros_like(w) if g is None else g for g, w in zip(grads, like))


class Slab(OnDevice):
    """Memory for this rank's copies of one layer, which can be filled anew or freed.

    Args:
        planned: experts that are to be copied, by slot.

    Attributes:
        held: copies, by expert.
        gathers: what fills it; whoever reads a copy joins them first.
        is_released: the memory was freed, if there was any: what other ranks copy from here is
            gathered again all the same.
        stacks: of each name all copies that were planned, ``[S, ...]``; none before there is room.
    """

    def __init__(self, planned: Sequence[int] = ()) -> None:
        self._planned = planned
        self._blocks: list[Weights] = []  # of some slots each, slot first; first of the planned
        self._slots: list[Weights] = []  # of the first block
        self._room: dict[int, Weights] = {}
        self.held: dict[int, Weights] = {}
        self._sizes: list[int] = []  # of the freed memory, in bytes
        self.gathers: list[Event] = []
        self.is_released = False
        self.stacks: Weights = ()

    def clear(self, planned: Sequence[int]) -> None:
        """Forget whose copies they are; the memory stays, if it is enough for those planned now."""
        self.held.clear()
        self.gathers.clear()
        if planned is self._planned:  # their slots wait for them
            return
        self._planned = planned
        if len(planned) > len(self._slots):
            self._blocks, self._slots = [], []
        self._reserve()

    def make_room(self, experts: Sequence[int], like: Weights) -> dict[int, Weights]:
        """Where the copies of these experts go, besides those that are there."""
        if self._planned and not self._blocks:
            self._slots = self._make(len(self._planned), like)
            self._reserve()
        more = sorted(expert for expert in experts if expert not in self._room)
        if more:
            self._room |= zip(more, self._make(len(more), like))
        room = {expert: self._room[expert] for expert in experts}
        self.held |= room
        return room

    def _make(self, num_slots: int, like: Weights) -> list[Weights]:
        """A block; its slots."""
        block = tuple(tensor.detach().new_empty(num_slots, *tensor.shape) for tensor in like)
        self._blocks.append(block)
        return list(zip(*(tensor.unbind() for tensor in block)))

    def _reserve(self) -> None:
        """The first slots for what is planned."""
        planned = self._planned
        self._room = dict(zip(planned, self._slots))
        has_room = bool(planned and self._blocks)
        self.stacks = tuple(own[: len(planned)] for own in self._blocks[0]) if has_room else ()

    def tensors(self) -> Weights:
        return tuple(tensor for block in self._blocks for tensor in block)

    def release(self) -> None:
        """Free the memory; whoever has saved a view of it will find the same values after
        ``restore`` and another gather."""
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        self._sizes = [storage.nbytes() for storage in storages]
        self.is_released = True
        for storage in storages:
            storage.resize_(0)
        self.gathers.clear()

    def restore(self) -> dict[int, Weights]:
        """Have the memory again; where the copies go."""
        for tensor, size in zip(self.tensors(), self._sizes):
            tensor.untyped_storage().resize_(size)
        self._sizes, self.is_released = [], False
        return {**self.held}
