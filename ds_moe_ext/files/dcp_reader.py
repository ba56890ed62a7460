# SPDX-License-Identifier: Apache-2.0
"""A reader of folders of torch.distributed.checkpoint (DCP) that executes nothing of them.

DCP's own reads its table, and objects, by pickle.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ds_moe_ext.files import unpickle

TABLE = ".metadata"


class Reader(FileSystemReader):
    """DCP's, of tables that have nothing but what such tables have.

    Args:
        folder: that was written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The table.

        Raises:
            ValueError: it is missing, damaged, or no such table.
        """
        path = self._folder / TABLE
        try:
            with path.open("rb") as file:
                table = _checked(unpickle.load_table(file))
        except Exception as error:  # a damaged file may raise anything
            raise unpickle.damaged(path, error) from error
        if table.storage_meta is None:
            table.storage_meta = StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """What was planned.

        Raises:
            ValueError: a file is missing or damaged.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data.get(item.storage_index)
            if place is None:
                error = ValueError(f"it does not say where {item.storage_index} is")
                raise unpickle.damaged(self._folder / TABLE, error)
            by_file.setdefault(place.relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except Exception as error:
                raise unpickle.damaged(self._folder / name, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_object(self, name: str, table: Metadata) -> Any:
        """One that was saved whole.

        Args:
            name: of it.
            table: the folder's.

        Raises:
            ValueError: it is missing, damaged, or made of others.
        """
        place = table.storage_data.get(MetadataIndex(name))
        if place is None:
            error = ValueError(f"it does not say where {name!r} is")
            raise unpickle.damaged(self._folder / TABLE, error)
        path = self._folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                return unpickle.load_object(io.BytesIO(file.read(place.length)))
        except Exception as error:
            raise unpickle.damaged(path, error) from error


def files_of(table: Metadata) -> set[str]:
    """Names of the files that a folder's table speaks of."""
    return {place.relative_path for place in table.storage_data.values()}


def _checked(table: Any) -> Metadata:
    """Raises Exception, of any kind: what it should have is not there, or something else."""
    if not isinstance(table, Metadata):
        raise TypeError(f"it has a {type(table).__name__}, no table of tensors")
    for kept in (table.state_dict_metadata, table.storage_data):
        if not isinstance(kept, Mapping):
            raise TypeError(f"it has a {type(kept).__name__} where names should be")
    for place in table.storage_data.values():
        if not isinstance(place, _StorageInfo):
            raise TypeError(f"it has a {type(place).__name__} where a place should be")
        _check_kinds(str, [place.relative_path])
        _check_kinds(int, [place.offset, place.length])
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names {place.relative_path!r}, which lies elsewhere")
    for about in table.state_dict_metadata.values():
        if isinstance(about, TensorStorageMetadata):
            _check_kinds(torch.dtype, [about.properties.dtype])
            _check_kinds(torch.Size, [about.size])
            for box in about.chunks:
                _check_kinds(torch.Size, [box.offsets, box.sizes])
    return table


def _check_kinds(kind: type, found: Sequence[Any]) -> None:
    """A pickle sets what it names to what it has, whatever a class says."""
    for kept in found:
        if not isinstance(kept, kind):
            raise TypeError(f"it has a {type(kept).__name__} where a {kind.__name__} should be")
