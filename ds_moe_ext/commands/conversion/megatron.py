# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed checkpoints (``--ckpt-format torch_dist``), without Megatron.

Their tensors are whole, whatever sizes of TP, PP, EP and ETP a run has that saves or loads them.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion import dcp, names
from ds_moe_ext.commands.conversion.listed_model import decoder_of
from ds_moe_ext.commands.conversion.megatron_arguments import arguments_of
from ds_moe_ext.commands.conversion.model import Model
from ds_moe_ext.commands.conversion.small_files import object_of, text_of
from ds_moe_ext.commands.conversion.source import Source, Stored
from ds_moe_ext.commands.conversion.tables import Cell, cells, of_model
from ds_moe_ext.commands.conversion.target import Maker
from ds_moe_ext.files import unpickle
from ds_moe_ext.hosts.megatron import checkpoint_sums

TRACKER = "latest_checkpointed_iteration.txt"
BACKENDS, COMMON = checkpoint_sums.LAST_FILE, "common.pt"
RELEASE = "release"
"""In place of an iteration: Megatron then takes weights, and starts optimizer and counters anew."""

_TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""How the names of tensors are to be understood; Megatron asks for them by it."""


def is_here(folder: Path) -> bool:
    """Whether a folder is one, or one iteration of one."""
    return (folder / TRACKER).exists() or (folder / BACKENDS).exists()


def iteration_of(folder: Path) -> Path:
    """The folder of the iteration that a run would go on from.

    Raises:
        ValueError: there is none, or it is of another format.
    """
    chosen = folder
    if not (folder / BACKENDS).exists():
        told = text_of(folder / TRACKER)
        if told != RELEASE and not told.isdecimal():
            raise ValueError(
                f"{folder / TRACKER} has {told[:50]!r}, neither a number nor {RELEASE}: it is "
                "damaged; write the iteration there that is to be read"
            )
        chosen = folder / (told if told == RELEASE else f"iter_{int(told):07d}")
    path = chosen / BACKENDS
    if not path.exists():
        raise ValueError(
            f"{chosen} has no {BACKENDS}: it was not saved with --ckpt-format torch_dist, or not "
            "to its end; let Megatron save it so"
        )
    backend = object_of(path, "sharded_backend")["sharded_backend"]
    if backend != _TORCH_DIST["sharded_backend"]:
        raise ValueError(f"{chosen} is of format {backend}; let Megatron save it as torch_dist")
    return chosen


def arguments(folder: Path) -> Namespace:
    """What it was saved with.

    Raises:
        ValueError: it does not say.
    """
    common = unpickle.load(folder / COMMON)
    found = common.get("args") if isinstance(common, Mapping) else None
    if not isinstance(found, Namespace):
        raise ValueError(
            f"{folder / COMMON} has no args; describe the model with --model: a Hugging Face "
            "config.json or a file like those of configs/models"
        )
    return found


def has_optimizer(folder: Path) -> bool:
    """Whether it has states, which are not converted."""
    return any(map(_is_of_optimizer, dcp.Folder(folder).tensors))


def _is_of_optimizer(name: str) -> bool:
    return name.startswith(("optimizer.", "chained_"))


def open_source(folder: Path, model: Model) -> Source:
    """Its tensors.

    Raises:
        ValueError: a file is not what was written, where that can be told.
    """
    checkpoint_sums.check_part(folder)
    stored = dcp.Folder(folder)
    tensors = {
        name: Stored(tuple(kept.size), kept.properties.dtype, partial(stored.read, name))
        for name, kept in stored.tensors.items()
        if not _is_of_optimizer(name)
    }
    tables = tuple(names.megatron_written(model))
    any_of_them = {cell.name for table in tables for cell in cells(model, table)}
    return Source(str(folder), tensors, tables, may_pad=True, spare=any_of_them.__contains__)


def write(folder: Path, maker: Maker) -> None:
    """Write a folder that ``--load`` takes; one box is in memory at a time."""
    release = folder / RELEASE
    release.mkdir(parents=True)
    model, made = decoder_of(maker.model), dict[str, dict[tuple[int, ...], Cell]]()
    for cell in maker.cells(names.megatron(model)):
        start = (*cell.lead, *(0 for _ in cell.inner_shape(model)))
        made.setdefault(cell.name, {})[start] = cell
    tensors = {
        name: dcp.ToWrite(
            shape=next(iter(boxes.values())).shape(model),
            dtype=maker.dtype_of(next(iter(boxes.values()))),
            boxes={start: _to_make(maker, cell) for start, cell in boxes.items()},
        )
        for name, boxes in made.items()
    }
    dcp.write(release, tensors, _extra_states(model))
    common = {
        "args": arguments_of(model),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": _CONTENT,
    }
    torch.save(common, release / COMMON)
    (release / BACKENDS).write_text(json.dumps(_TORCH_DIST))
    (folder / TRACKER).write_text(RELEASE)  # last: that it is there says that all else is


def _to_make(maker: Maker, cell: Cell) -> dcp.ToMake:
    shape = (*(1 for _ in cell.lead), *cell.inner_shape(maker.model))

    def make() -> Tensor:
        return maker.make(cell).reshape(shape)

    return dcp.ToMake(shape, make)


def _extra_states(model: Model) -> dict[str, Any]:
    """What modules keep beside weights: nothing, but Megatron misses it if it is not there."""
    found: dict[str, Any] = {}
    for row in of_model(model, names.EXTRA_STATES):
        for layer, expert in model.places(row.parts[0].scope):
            lead = [] if layer is None or not model.is_uniform else [(layer, model.num_layers)]
            lead += [] if expert is None else [(expert, model.experts.number)]
            numbers, sizes = zip(*(lead or [(0, 1)]))
            shard = f"shard_{'.'.join(map(str, numbers))}_{'.'.join(map(str, sizes))}"
            name = row.name
            if layer is not None and not model.is_uniform:
                name = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            found[f"{name}._extra_state/{shard}"] = [None]
    return found
