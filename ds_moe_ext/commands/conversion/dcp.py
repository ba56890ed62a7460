# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint (DCP), box by box and without a process group.

DCP's own functions read and write all that they are given at once; a checkpoint may be larger
than this machine's memory, so its planners are left out here: a file of boxes and a table of them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ds_moe_ext.commands.conversion.model import Shape
from ds_moe_ext.files.unpickle import TABLE, Reader, damaged

DATA = "__0_0.distcp"


class ToWrite(NamedTuple):
    """A tensor in boxes that are made when they are written."""

    shape: Shape  # of all of it
    dtype: torch.dtype  # of all of it
    boxes: Mapping[Shape, ToMake]  # by where they start; they tile the tensor


class ToMake(NamedTuple):
    """A box of a tensor."""

    shape: Shape
    make: Callable[[], Tensor]


def write(folder: Path, tensors: Mapping[str, ToWrite], objects: Mapping[str, Any]) -> None:
    """Write a folder that DCP loads; one box is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    with (folder / DATA).open("wb") as file:
        for name, kept in objects.items():
            storage[MetadataIndex(name)] = _written(file, kept)
        for name, tensor in tensors.items():
            for start, box in tensor.boxes.items():
                made = box.make()
                if made.shape != box.shape or made.dtype != tensor.dtype:
                    raise ValueError(
                        f"{name} at {start} is {made.dtype} of shape {tuple(made.shape)}, not "
                        f"{tensor.dtype} of {box.shape}; this is a bug in ds_moe_ext"
                    )
                storage[MetadataIndex(name, start)] = _written(file, made)
    kept_as = {name: _described(tensor) for name, tensor in tensors.items()}
    about = Metadata(kept_as | {name: BytesStorageMetadata() for name in objects}, None, storage)
    (folder / TABLE).write_bytes(pickle.dumps(about))


def _written(file: BinaryIO, kept: Any) -> _StorageInfo:
    start = file.tell()
    stream = io.BytesIO()
    torch.save(kept, stream)
    file.write(stream.getbuffer())
    return _StorageInfo(DATA, start, file.tell() - start)


def _described(tensor: ToWrite) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(start), torch.Size(box.shape))
        for start, box in tensor.boxes.items()
    ]
    properties = TensorProperties(dtype=tensor.dtype)
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


class Folder:
    """What DCP wrote."""

    def __init__(self, path: Path) -> None:
        self._path, self._reader = path, Reader(path)
        self._about = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._about, is_coordinator=True)

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        saved = self._about.state_dict_metadata
        return {k: v for k, v in saved.items() if isinstance(v, TensorStorageMetadata)}

    def object(self, name: str) -> Any:
        """One that is no tensor; None if it is not there."""
        if name not in self._about.state_dict_metadata:
            return None
        return self._reader.read_object(name, self._about)

    @cached_property
    def _by_first(self) -> dict[str, dict[int, list[ChunkStorageMetadata]]]:
        """Boxes by where they start in the first dim, of tensors in which each is one long there:
        there may be tens of thousands, of as many experts."""
        found: dict[str, dict[int, list[ChunkStorageMetadata]]] = {}
        for name, tensor in self.tensors.items():
            if tensor.chunks and all(box.sizes and box.sizes[0] == 1 for box in tensor.chunks):
                boxes = found.setdefault(name, {})
                for box in tensor.chunks:
                    boxes.setdefault(box.offsets[0], []).append(box)
        return found

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A box, however it was cut when it was written."""
        saved = self.tensors[name]
        boxes = self._by_first.get(name)
        if boxes is not None and shape[0] == 1:
            saved = TensorStorageMetadata(saved.properties, saved.size, boxes.get(start[0], []))
        tensor = torch.empty(shape, dtype=saved.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
        items = create_read_items_for_chunk_list(name, saved, [wanted])
        if sum(item.lengths.numel() for item in items) != tensor.numel():
            error = ValueError(f"{name} has no whole box of {shape} at {start}")
            raise damaged(self._path / TABLE, error)
        self._reader.read_data(LoadPlan(items), _Into(tensor)).wait()
        return tensor


class _Into(DefaultLoadPlanner):
    """Shows DCP's reader where one tensor lies."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor
