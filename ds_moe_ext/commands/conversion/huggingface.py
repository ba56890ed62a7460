# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: config.json and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_moe_ext.commands.conversion.description import CONFIG, Document
from ds_moe_ext.commands.conversion.model import AnyModel, Shape
from ds_moe_ext.commands.conversion.stored import Maker, Source, Stored, object_of
from ds_moe_ext.commands.conversion.tables import Cell, in_huggingface
from ds_moe_ext.files.unpickle import damaged

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def is_here(folder: Path) -> bool:
    return (folder / CONFIG).exists() and any(folder.glob("*.safetensors"))


def open_source(folder: Path, model: AnyModel, files: ExitStack) -> Source:
    """Its tensors; files stay open as long as the stack."""
    tensors = {}
    for path in _files(folder):
        try:
            file = files.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): it is missing or damaged; download or copy the "
                "folder again"
            ) from error
        tensors.update({name: _stored(file, name) for name in file.keys()})  # noqa: SIM118
    known = in_huggingface(model)
    tables = (known.files, *known.others)
    return Source(str(folder), tensors, tables, spare=known.is_spare)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    reported = object_of(index, "weight_map")["weight_map"]
    if not isinstance(reported, Mapping) or not all(isinstance(n, str) for n in reported.values()):
        raise damaged(index, ValueError("its weight_map does not name files"))
    return [folder / name for name in dict.fromkeys(reported.values())]


def _stored(file: Any, name: str) -> Stored:
    about = file.get_slice(name)
    if about.get_dtype() not in _DTYPES:
        raise ValueError(
            f"{name} is of type {about.get_dtype()}; only {', '.join(_DTYPES)} are converted: "
            "quantized weights have to be restored first"
        )
    return Stored(tuple(about.get_shape()), _DTYPES[about.get_dtype()], partial(_read, file, name))


def _read(file: Any, name: str, start: Shape, shape: Shape) -> Tensor:
    box = tuple(slice(first, first + length) for first, length in zip(start, shape))
    tensor: Tensor = file.get_slice(name)[box]
    return tensor


def write(folder: Path, maker: Maker, document: Document) -> None:
    """Write a folder that ``from_pretrained`` loads; a file's tensors are in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(maker))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if shards[1:] else WHOLE
        made = {cell.name: maker.make(cell) for cell in shard}
        save_file(made, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(made, name)
    if shards[1:]:
        total = sum(_num_bytes(maker, cell) for shard in shards for cell in shard)
        reported = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(reported, indent=2), encoding="utf-8")
    dtype = str(maker.dtype_of(shards[0][0])).removeprefix("torch.")
    reported = {**document, "dtype": dtype, "torch_dtype": dtype}
    (folder / CONFIG).write_text(json.dumps(reported, indent=2), encoding="utf-8")


def _shards(maker: Maker) -> Iterator[list[Cell]]:
    shard: list[Cell] = []
    size = 0
    for cell in maker.cells(in_huggingface(maker.model).files):
        num_bytes = _num_bytes(maker, cell)
        if shard and size + num_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(cell)
        size += num_bytes
    yield shard


def _num_bytes(maker: Maker, cell: Cell) -> int:
    numel = torch.Size(cell.shape(maker.model)).numel()
    return numel * maker.dtype_of(cell).itemsize
