# SPDX-License-Identifier: Apache-2.0
"""Named tensors and objects in a folder, in the format of torch.distributed.checkpoint (DCP); and
what a rank keeps of its part of a weight, as rectangles of the whole.

A tensor is kept in boxes. A rank writes those that it has and reads those that it needs, which may
be cut otherwise: who writes need not know who will read. DCP finds the boxes by what its planners
report it, so only they are ours.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from ds_moe_ext.files import unpickle
from ds_moe_ext.files.unpickle import Reader, files_of
from ds_moe_ext.moe.sharding import Shard, Stretch

_OBJECTS = (LossScaler, DynamicLossScaler, ZeroStageEnum)
"""Classes that objects may be made of, beside plain ones: what wrappers of DeepSpeed's keep."""


class Box(NamedTuple):
    """A rectangle of a tensor."""

    tensor: Tensor  # what it has, in the dims of the whole tensor
    offsets: tuple[int, ...]  # where it starts in the whole tensor, in each dim

    def chunk(self) -> ChunkStorageMetadata:
        """The same in DCP's words."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class Part(NamedTuple):
    """What a rank has of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    boxes: tuple[Box, ...]  # none of which overlap


class Contents(NamedTuple):
    """What a folder has."""

    shapes: Mapping[str, tuple[int, ...]]  # of each tensor
    objects: frozenset[str]  # names of the others


def save(
    folder: Path,
    parts: Mapping[str, Part],
    objects: Mapping[str, Any],
    group: Any = None,
) -> list[str]:
    """Write what all ranks have; of what several have alike, one writes it. Collective.

    Returns:
        Names of the files that all ranks have written, of lower ranks first, and no table.

    Raises:
        OSError: on all ranks, where one could not write.
    """
    try:
        planner = _SaveParts(parts)
        writer = _Writer(folder)
        table = dcp.save(dict(objects), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise OSError(f"{folder} could not be written: {_reason(error)!r}") from error
    assert isinstance(table, Metadata)
    return sorted(files_of(table), key=lambda name: (len(name), name))


def contents(folder: Path) -> Contents:
    """What can be read.

    Raises:
        ValueError: nothing was written there, or not to its end.
    """
    saved = Reader(folder).read_metadata().state_dict_metadata
    shapes = {
        name: tuple(kept.size)
        for name, kept in saved.items()
        if isinstance(kept, TensorStorageMetadata)
    }
    return Contents(shapes, frozenset(saved.keys() - shapes.keys()))


def load(folder: Path, parts: Mapping[str, Part], names: Iterable[str] = ()) -> dict[str, Any]:
    """Read into the tensors of the parts, whose type may be another than what was written.

    Not collective: each rank reads what it needs.

    Raises:
        ValueError: a file is missing or damaged.
    """
    objects: dict[str, Any] = dict.fromkeys(names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not communicate, as it is asked
            dcp.load(
                objects, storage_reader=Reader(folder), planner=_LoadParts(parts), no_dist=True
            )
    except CheckpointException as error:
        reason = _reason(error)
        if isinstance(reason, unpickle.Damaged):
            raise reason from error
        raise unpickle.damaged(folder, reason) from error
    return objects


def _reason(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed; DCP's own error is no ``Exception``."""
    return next(iter(error.failures.values()))[0]


def _indices(parts: Mapping[str, Part]) -> dict[MetadataIndex, Box]:
    """Each box by what DCP calls it."""
    return {
        MetadataIndex(name, box.offsets): box for name, part in parts.items() for box in part.boxes
    }


class _Writer(FileSystemWriter):
    """Hands back what it writes as the table; torch 2.10 fills in a copy of that."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        metadata.storage_data = {
            written.index: written.storage_data for rank in results for written in rank
        }


class _SaveParts(DefaultSavePlanner):
    """Writes parts beside the objects of the state dict, in which DCP would take them to pieces."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes = {name: torch.Size(part.shape) for name, part in parts.items()}
        self._boxes = _indices(parts)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *map(self._write, self._boxes)])
        return self.plan

    def _write(self, index: MetadataIndex) -> WriteItem:
        box = self._boxes[index]
        properties = TensorProperties.create_from_tensor(box.tensor)
        data = TensorWriteData(box.chunk(), properties, self._shapes[index.fqn])
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        if isinstance(made, io.BytesIO):
            unpickle.check_object(write_item.index.fqn, made, _OBJECTS)
        return made

    def lookup_object(self, index: MetadataIndex) -> Any:
        box = self._boxes.get(index)
        return super().lookup_object(index) if box is None else box.tensor


class _LoadParts(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._boxes = _indices(parts)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        items = list(plan.items)
        for name, part in self._parts.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [box.chunk() for box in part.boxes]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = unpickle.load_object(value, _OBJECTS)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._boxes[index].tensor


# An optimizer keeps consecutive elements of a flattened parameter, and a parameter may be a part of
# an expert's weight, cut along any dim; what is stored is known by rectangles of the whole, however
# other ranks cut and wrote them. Shape letters: F consecutive elements of a flattened part.


class Rectangle(NamedTuple):
    """Some places of each dim of a tensor."""

    offsets: tuple[int, ...]  # the first of each dim
    sizes: tuple[int, ...]  # how many


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
    """What one rank has of a weight."""

    shape: tuple[int, ...]  # of the whole weight; one dim at least
    dim: int  # along which it is cut
    # of that dim, what the rank has, in the order in which its part has them
    stretches: tuple[Stretch, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Region:
        """A whole weight; one without dims has one element all the same."""
        shape = tuple(shape) or (1,)
        return cls(shape, 0, (Stretch(0, 0, shape[0]),))

    @classmethod
    def of_shard(cls, shard: Shard, number: int, shape: Sequence[int]) -> Region:
        """A rank's part of an expert's weight."""
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
        """Elements of the part as they lie in the whole; the boxes are views of ``flat_F``, whose
        first element is that of the flattened part."""
        dim, taken, boxes = self.dim, 0, list[Box]()
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
                    boxes.append(Box(view.narrow(dim, low - first, high - low), at))
        return Part(self.shape, tuple(boxes))


class Fragment(NamedTuple):
    """Elements ``[start, stop)`` of what a rank has of a weight."""

    region: Region  # what it has
    start: int  # the first element, of the flattened part
    stop: int  # one past the last
    dtype: torch.dtype  # to read it as


def read_fragments(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], fragments: Mapping[str, Fragment]
) -> dict[str, Tensor]:
    """Each fragment, ``[F]`` in host memory, by its tensor's name. Not collective."""
    landings = {name: _landing(each, shapes[name]) for name, each in fragments.items()}
    load(folder, {name: part for name, (part, _) in landings.items()})
    return {name: take() for name, (_, take) in landings.items()}


def _landing(fragment: Fragment, shape: tuple[int, ...]) -> tuple[Part, Callable[[], Tensor]]:
    """What is read of a tensor that is kept in a shape, and how the fragment is taken from it."""
    region, start, stop, dtype = fragment
    if shape != region.shape:  # kept flat
        if start < stop and not region.is_whole:  # in too many pieces to read each
            weight = torch.empty(region.shape, dtype=dtype)
            flat = Region.all_of((weight.numel(),)).part(weight.view(-1), 0)
            return flat, lambda: region.of(weight).view(-1)[start:stop]
        region = Region.all_of(shape)
    begin, end = region.rows_around(start, stop)
    rows = torch.empty(end - begin, dtype=dtype)
    return region.part(rows, begin), lambda: rows[start - begin : stop - begin]
