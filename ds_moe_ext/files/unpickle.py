# SPDX-License-Identifier: Apache-2.0
"""Pickles that others wrote, of known classes only: nothing of a file is executed. Of files of
``torch.save``, and of folders of torch.distributed.checkpoint (DCP), whose own reader does.

What hosts pickle beside weights, such as enums of Megatron and settings of DeepSpeed, becomes an
``Unknown`` where weights are read, so that neither host need be there. Tables of DCP have no room
for such things: there whatever is not known is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import EnumMeta
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import serialization
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

TABLE = ".metadata"  # of a folder of DCP

_DTYPES = tuple(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_PLAIN = ("set", "frozenset", "list", "dict", "tuple", "int", "float", "complex", "slice")
_KNOWN = {
    "collections": ("OrderedDict", "defaultdict"),
    "torch._utils": ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch": ("Size", "device", *_DTYPES),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "builtins": _PLAIN,
}
_CHECKPOINT = "torch.distributed.checkpoint"
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath")
_IN_TABLES = {
    f"{_CHECKPOINT}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_CHECKPOINT}.planner": (
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size", "device", *_DTYPES),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # of Python 3.13
    "collections": ("OrderedDict", "defaultdict"),
    "builtins": _PLAIN,
}
_rebuild_array = np.zeros(0).__reduce__()[0]
_OF_ARRAYS: tuple[Any, ...] = (
    *(np.ndarray, np.dtype, bytes, _rebuild_array),
    (_rebuild_array, "numpy.core.multiarray._reconstruct"),  # of numpy 1
    *{type(np.dtype(kind)) for kind in (np.int64, np.float64)},
)
"""What ``torch.save`` makes of arrays of numbers."""


def _member(kind: Any, name: str) -> Any:
    """In the place of ``getattr``, by which Python 3.11 before 3.11.4 pickles members of enums."""
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r}, which is no enum")
    return kind[name]


_SAFE = (*_OF_ARRAYS, (_member, "builtins.getattr"))


class Unknown:
    """Stands for an object of a class that is not loaded."""

    def __new__(cls, *_: Any, **__: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """A list's way to be unpickled."""

    def extend(self, items: Any) -> None:
        """Likewise."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if name in _KNOWN.get(module, ()) else Unknown


class _OfTables(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):  # of 0.15 the table itself, of others what lies beside
            return Metadata if name == "MCoreMetadata" else Unknown
        if name == "getattr" and module in ("builtins", "__builtin__"):  # the latter in protocol 2
            return _member
        if name not in _IN_TABLES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not run")
        return super().find_class(module, name)


def load(path: Path) -> Any:
    """What a file of ``torch.save`` has; tensors are read from it when they are used.

    Raises:
        ValueError: it cannot be read.
    """
    module: Any = ModuleType("pickle of known classes")
    module.Unpickler = _Unpickler
    try:
        _check_archive(path)
        return torch.load(
            path, map_location="cpu", mmap=True, weights_only=False, pickle_module=module
        )
    except Exception as error:  # a damaged file may raise anything
        raise damaged(path, error) from error


def _check_archive(path: Path) -> None:
    """``torch.load`` would take a program of TorchScript for one, and set it up."""
    with serialization._open_zipfile_reader(str(path)) as archive:
        if serialization._is_torchscript_zip(archive):
            raise pickle.UnpicklingError("it is a program of TorchScript, which is not run")


def load_table(file: BinaryIO) -> Any:
    """What a file named ``.metadata`` of ``torch.distributed.checkpoint`` has."""
    return _OfTables(file).load()


def load_object(stream: io.BytesIO, more: Iterable[type] = ()) -> Any:
    """An object that ``torch.save`` wrote, of what ``torch.load`` calls safe, which
    ``torch.serialization.add_safe_globals`` extends, and arrays of numpy.

    Raises:
        pickle.UnpicklingError: it has others.
        Exception: of any kind; it is damaged.
    """
    with serialization.safe_globals([*_SAFE, *more]):
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            stream.seek(0)
            others = sorted(serialization.get_unsafe_globals_in_checkpoint(stream))
            if not others:  # known things, put to no known use
                raise
            raise pickle.UnpicklingError(f"it asks for {others}, which is not run") from error


def check_object(name: str, stream: io.BytesIO, more: Iterable[type] = ()) -> None:
    """Whether ``load_object`` would load what was written.

    Raises:
        ValueError: it would not.
    """
    stream.seek(0)
    with serialization.safe_globals([*_SAFE, *more]):
        others = sorted(serialization.get_unsafe_globals_in_checkpoint(stream))
    if others:
        raise ValueError(
            f"{name} is made of {others}, which would not be loaded again, for it might run code; "
            "keep plain values there, or declare them safe by "
            "torch.serialization.add_safe_globals"
        )


class Damaged(ValueError):
    """Of a file."""


def damaged(path: Path, error: BaseException) -> Damaged:
    """What to say of a file that cannot be read, in one line."""
    first, *_ = str(error).strip().splitlines() or [""]
    return Damaged(
        f"{path} cannot be read ({type(error).__name__}: {first}): it is missing or damaged; copy "
        "the whole folder again, or choose another checkpoint"
    )


# Folders of DCP.


class Reader(FileSystemReader):
    """DCP's, of tables that have nothing but what such tables have."""

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
                table = _checked(load_table(file))
        except Exception as error:  # a damaged file may raise anything
            raise damaged(path, error) from error
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
                raise damaged(self._folder / TABLE, error)
            by_file.setdefault(place.relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except Exception as error:
                raise damaged(self._folder / name, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_object(self, name: str, table: Metadata) -> Any:
        """One that was saved whole.

        Raises:
            ValueError: it is missing, damaged, or made of others.
        """
        place = table.storage_data.get(MetadataIndex(name))
        if place is None:
            error = ValueError(f"it does not say where {name!r} is")
            raise damaged(self._folder / TABLE, error)
        path = self._folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                return load_object(io.BytesIO(file.read(place.length)))
        except Exception as error:
            raise damaged(path, error) from error


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
