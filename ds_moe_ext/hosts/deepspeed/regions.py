# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of its part of a weight, as rectangles of the whole; and read back so.

An optimizer keeps consecutive elements of a flattened parameter, and a parameter may be a part of
an expert's weight, cut along any dim; what is stored is known by rectangles of the whole, however
other ranks cut and wrote them.

Shape letters: F consecutive elements of a flattened part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.dcp_folder import Box, Part
from ds_moe_ext.moe.sharding import Shard, Stretch


class Rectangle(NamedTuple):
    """Some places of each dim of a tensor.

    Attributes:
        offsets: the first of each dim.
        sizes: how many.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """What elements ``[start, stop)`` of a flattened tensor are made up of, in their order: an
    incomplete row, full rows and an incomplete row, each of the incomplete ones likewise."""
    length = prod(shape[1:])
    full = min(-(-start // length) * length, stop)  # where full rows start
    last = max(stop // length * length, full)  # and end
    yield from _in_a_row(shape, start, full)
    if full < last:
        rest = shape[1:]
        yield Rectangle((full // length, *(0 for _ in rest)), ((last - full) // length, *rest))
    yield from _in_a_row(shape, last, stop)


def _in_a_row(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    if start < stop:
        row, first = divmod(start, prod(shape[1:]))
        for offsets, sizes in rectangles(shape[1:], first, first + stop - start):
            yield Rectangle((row, *offsets), (1, *sizes))


@dataclass(frozen=True)
class Region:
    """What one rank has of a weight.

    Attributes:
        shape: of the whole weight; one dim at least.
        dim: along which it is cut.
        stretches: of that dim, what the rank has, in the order in which its part has them.
    """

    shape: tuple[int, ...]
    dim: int
    stretches: tuple[Stretch, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Region:
        """A whole weight; one without dims has one element all the same."""
        shape = tuple(shape) or (1,)
        return cls(shape, 0, (Stretch(0, 0, shape[0]),))

    @classmethod
    def of_shard(cls, shard: Shard, number: int, shape: Sequence[int]) -> Region:
        """A rank's part of an expert's weight.

        Args:
            number: of the weight.
            shape: of the part.
        """
        if shard.is_whole:
            return cls.all_of(shape)
        whole, dim = shard.whole_shape(number, shape), shard.alongs[number].dim
        return cls(whole, dim, tuple(shard.stretches(number, whole[dim])))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the weight."""
        return self.part_shape == self.shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of what the rank has."""
        length = sum(stretch.length for stretch in self.stretches)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def of(self, weight: Tensor) -> Tensor:
        """The part, from the whole weight."""
        parts = [weight.narrow(self.dim, start, length) for start, _, length in self.stretches]
        return torch.cat(parts, self.dim)

    def rows_around(self, start: int, stop: int) -> tuple[int, int]:
        """Elements of the flattened part from where the row of the first one starts to where that
        of the last one ends: fewer rectangles, to be read at once."""
        if start == stop:
            return start, stop
        length = prod(self.part_shape[1:])
        return start // length * length, -(-stop // length) * length

    def part(self, flat_F: Tensor, start: int) -> Part:
        """Elements of the part as they lie in the whole.

        Args:
            flat_F: contiguous; the boxes are views of it.
            start: the first of them in the flattened part.
        """
        return Part(self.shape, tuple(self._boxes(flat_F, start)))

    def _boxes(self, flat_F: Tensor, start: int) -> Iterator[Box]:
        dim, taken = self.dim, 0
        for offsets, sizes in rectangles(self.part_shape, start, start + flat_F.numel()):
            view = flat_F.narrow(0, taken, prod(sizes)).view(sizes)
            taken += prod(sizes)
            first, end = offsets[dim], offsets[dim] + sizes[dim]
            for stretch in self.stretches:
                low = max(first, stretch.own_start)
                high = min(end, stretch.own_start + stretch.length)
                if low < high:
                    place = stretch.start + low - stretch.own_start
                    at = (*offsets[:dim], place, *offsets[dim + 1 :])
                    yield Box(view.narrow(dim, low - first, high - low), at)


# Reading.


class Fragment(NamedTuple):
    """Elements ``[start, stop)`` of what a rank has of a weight.

    Attributes:
        region: what it has.
        start: the first element, of the flattened part.
        stop: one past the last.
        dtype: to read it as.
    """

    region: Region
    start: int
    stop: int
    dtype: torch.dtype


class _Landing(NamedTuple):
    """Where a fragment arrives.

    Attributes:
        part: what is read, which may be more.
        take: the fragment, ``[F]``, once that was read.
    """

    part: Part
    take: Callable[[], Tensor]


def read_fragments(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], fragments: Mapping[str, Fragment]
) -> dict[str, Tensor]:
    """Each fragment, ``[F]`` in host memory, by its tensor's name. Not collective.

    Args:
        folder: see ``dcp_folder.load``.
        shapes: in which each tensor is kept there: its own, or flat.
        fragments: what to read, by the tensor's name.

    Raises:
        ValueError: a file is missing or damaged.
    """
    landings = {name: _landing(each, shapes[name]) for name, each in fragments.items()}
    dcp_folder.load(folder, {name: landing.part for name, landing in landings.items()})
    return {name: landing.take() for name, landing in landings.items()}


def _landing(fragment: Fragment, shape: tuple[int, ...]) -> _Landing:
    region, start, stop, dtype = fragment
    if shape != region.shape:  # kept flat, where a split weight is in too many pieces to read each
        if start < stop and not region.is_whole:
            return _from_whole(fragment)
        region = Region.all_of(shape)
    begin, end = region.rows_around(start, stop)
    rows = torch.empty(end - begin, dtype=dtype)
    return _Landing(region.part(rows, begin), lambda: rows[start - begin : stop - begin])


def _from_whole(fragment: Fragment) -> _Landing:
    region, start, stop, dtype = fragment
    weight = torch.empty(region.shape, dtype=dtype)
    flat = Region.all_of((weight.numel(),)).part(weight.view(-1), 0)
    return _Landing(flat, lambda: region.of(weight).view(-1)[start:stop])
