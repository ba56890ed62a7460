# SPDX-License-Identifier: Apache-2.0
"""Memory for copies of experts: slots that are used again from step to step.

Copies are no parameters. Autograd may save views of them, so that the memory can be freed and had
again behind its back, as long as the same values are put in (see ``Slab.release``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from ds_moe_ext.schedule.executor import Event

Weights = tuple[Tensor, ...]  # of one expert, in the order of their names


def by_slot(weights: Weights, like: Weights) -> Weights:
    """Weights of the first slot, then of the second and so on, where they may be stacked, one of
    all slots a name.

    Args:
        like: of one expert.
    """
    if not weights or weights[0].dim() == like[0].dim():
        return weights
    return tuple(chain.from_iterable(zip(*(weight.unbind() for weight in weights))))


def whole(grads: Sequence[Tensor | None], like: Weights) -> Weights:
    """Zeros for weights that an expert does not use: every copy sends all."""
    if all(grad is not None for grad in grads):
        return cast(Weights, grads)
    return tuple(torch.zeros_like(w) if g is None else g for g, w in zip(grads, like))


class Slab:
    """Memory for this rank's copies of one layer, which can be filled anew or freed.

    Attributes:
        held: copies, by expert.
        gathers: what fills it; whoever reads a copy joins them first.
        is_released: the memory was freed, if there was any: what other ranks copy from here is
            gathered again all the same.
    """

    def __init__(self) -> None:
        self._blocks: list[Weights] = []  # of some slots each, slot first
        self._slots: list[Weights] = []
        self.held: dict[int, Weights] = {}
        self._sizes: list[int] = []  # of the freed memory, in bytes
        self.gathers: list[Event] = []
        self.is_released = False

    def clear(self) -> None:
        """Forget whose copies they are; the memory stays."""
        self.held.clear()
        self.gathers.clear()

    def make_room(self, experts: Sequence[int], like: Weights) -> dict[int, Weights]:
        """Where the copies of these experts go, besides those that are there."""
        missing = len(self.held) + len(experts) - len(self._slots)
        if missing > 0:
            block = tuple(tensor.detach().new_empty(missing, *tensor.shape) for tensor in like)
            self._blocks.append(block)
            self._slots += zip(*(tensor.unbind() for tensor in block))
        free = self._slots[len(self.held) :]
        room = dict(zip(sorted(experts), free))  # as slots are: neighbours compute in one GEMM
        self.held |= room
        return room

    @property
    def tensors(self) -> Weights:
        return tuple(tensor for block in self._blocks for tensor in block)

    def release(self) -> None:
        """Free the memory; whoever has saved a view of it will find the same values after
        ``restore`` and another gather."""
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        self._sizes = [storage.nbytes() for storage in storages]
        self.is_released = True
        for storage in storages:
            storage.resize_(0)
        self.gathers.clear()

    def restore(self) -> dict[int, Weights]:
        """Have the memory again; where the copies go."""
        for tensor, size in zip(self.tensors, self._sizes):
            tensor.untyped_storage().resize_(size)
        self._sizes, self.is_released = [], False
        return {**self.held}
