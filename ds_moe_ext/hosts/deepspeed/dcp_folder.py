# SPDX-License-Identifier: Apache-2.0
"""Named tensors and objects in a folder, in the format of torch.distributed.checkpoint (DCP).

A tensor is kept in boxes. A rank writes those that it has and reads those that it needs, which may
be cut otherwise: who writes need not know who will read. DCP finds the boxes by what its planners
tell it, so only they are ours.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from ds_moe_ext.files.dcp_reader import Reader, files_of

_OBJECTS = (LossScaler, DynamicLossScaler, ZeroStageEnum)
"""Classes that objects may be made of, beside plain ones: what wrappers of DeepSpeed's keep."""


class Box(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        tensor: what it has, in the dims of the whole tensor.
        offsets: where it starts in the whole tensor, in each dim.
    """

    tensor: Tensor
    offsets: tuple[int, ...]

    def chunk(self) -> ChunkStorageMetadata:
        """The same in DCP's words."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class Part(NamedTuple):
    """What a rank has of a tensor.

    Attributes:
        shape: of the whole tensor.
        boxes: none of which overlap.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Contents(NamedTuple):
    """What a folder has.

    Attributes:
        shapes: of each tensor.
        objects: names of the others.
    """

    shapes: Mapping[str, tuple[int, ...]]
    objects: frozenset[str]


def save(
    folder: Path,
    parts: Mapping[str, Part],
    objects: Mapping[str, Any],
    group: Any = None,
) -> list[str]:
    """Write what all ranks have; of what several have alike, one writes it. Collective.

    Args:
        folder: made if it is not there; what it had of these names is overwritten.
        parts: this rank's, by the tensor's name; those of all ranks make up whole tensors.
        objects: this rank's; of several of one name any is kept.
        group: by which ranks agree who writes what; None is that of the world.

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

    Args:
        folder: see ``contents`` for what it has.
        parts: by the tensor's name.
        names: of objects.

    Returns:
        The objects.

    Raises:
        ValueError: a file is missing or damaged.
    """
    objects: dict[str, Any] = dict.fromkeys(names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not communicate, as it is told
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
