# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a cell split every expert: expert-sharding parallelism (FSMoE, spec 1.6).

Rank ``p`` of ``P`` has the ``p``-th part of the expert's hidden width: rows of the matrices that
lead to it, columns of those that lead from it. What each computes of a row is a partial sum. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Along(NamedTuple):
    """How one weight is split.

    Attributes:
        dim: along which.
        num_blocks: equal blocks of that dim, each split by itself: 2 where gate and up are joined.
        adds: it is added to the output, as a bias is: a part adds to its own places only.
    """

    dim: int
    num_blocks: int = 1
    adds: bool = False


class Stretch(NamedTuple):
    """Consecutive places of one dim that a part has from the whole.

    Attributes:
        start: first place in the whole.
        own_start: first place in the part.
        length: places.
    """

    start: int
    own_start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """The part of every expert that one rank of a cell has.

    Attributes:
        alongs: how each weight is split, in the order of the weights' names; of whole experts they
            say nothing.
        index: this rank's place in the cell.
        num_shards: ranks of the cell.
    """

    alongs: tuple[Along, ...] = ()
    index: int = 0
    num_shards: int = 1

    @property
    def is_whole(self) -> bool:
        return self.num_shards == 1

    def stretches(self, number: int, whole_length: int) -> Iterator[Stretch]:
        """What the part has of the dim that a weight is split along.

        Args:
            number: of the weight.
            whole_length: of that dim in the whole weight.
        """
        if self.is_whole:
            yield Stretch(0, 0, whole_length)
            return
        block = whole_length // self.alongs[number].num_blocks
        length = block // self.num_shards
        for i in range(self.alongs[number].num_blocks):
            yield Stretch(i * block + self.index * length, i * length, length)

    def whole_shape(self, number: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a weight, from the shape of its part."""
        whole = list(shape)
        if not self.is_whole:
            whole[self.alongs[number].dim] *= self.num_shards
        return tuple(whole)

    def widened(self, number: int, weight: Tensor) -> Tensor:
        """What is added to the output, ``[..., D]``, from this rank's part of it: zeros elsewhere.

        Args:
            number: of the weight.
            weight: this rank's part.
        """
        if self.is_whole or not self.alongs[number].adds:
            return weight
        length = weight.shape[-1]
        before = self.index * length
        after = (self.num_shards - 1) * length - before
        return torch.nn.functional.pad(weight, (before, after))

    def of(self, number: int, weight: Tensor, *, first_dim: int = 0) -> Tensor:
        """The part of a weight; the weight itself if experts are whole.

        Args:
            number: of the weight.
            weight: one expert's, or that of several.
            first_dim: dims before the expert's own.
        """
        if self.is_whole:
            return weight
        dim = self.alongs[number].dim + first_dim
        places = self.stretches(number, weight.shape[dim])
        parts = [weight.narrow(dim, start, length) for start, _, length in places]
        return torch.cat(parts, dim)


WHOLE = Shard()
"""Of experts that nobody splits."""
