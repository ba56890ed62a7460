# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed with ds_moe_ext, without DeepSpeed and without ranks.

DeepSpeed's file has dense weights, a folder of ours experts by number; see
``hosts.deepspeed.checkpoint_contents`` and ``hosts.deepspeed.layout_file``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.commands.conversion import dcp
from ds_moe_ext.commands.conversion.model import AnyModel, Part, Shape, pieces
from ds_moe_ext.commands.conversion.stored import Maker, Source, Stored, text_of
from ds_moe_ext.commands.conversion.tables import MASTER, Cell, cells, in_deepspeed
from ds_moe_ext.files import unpickle, whole_files
from ds_moe_ext.hosts.attachment.modules import plain
from ds_moe_ext.hosts.deepspeed.layout_file import FOLDER, LAYOUT_FILE, SAVE, SavedLayout

LATEST = "latest"
STATES = "mp_rank_00_model_states.pt"
TAG = "global_step0"


def is_here(folder: Path) -> bool:
    """Whether a folder is one, or one tag of one."""
    return (folder / LAYOUT_FILE).exists() or (folder / LATEST).exists()


def tag_of(folder: Path) -> Path:
    """The folder of the tag that a run would go on from."""
    tag = folder
    if not (folder / LAYOUT_FILE).exists():
        tag = folder / text_of(folder / LATEST)
    layout = SavedLayout.read(tag)
    if layout.tensor_parallel_size > 1:
        raise ValueError(
            f"{tag} was saved by {layout.tensor_parallel_size} tensor parallel ranks, which "
            "split weights as the model chooses; export the weights in the run "
            "(ds_moe_ext.full_state_dict), or train without tensor parallelism"
        )
    if layout.pipeline_stages > 1:
        raise ValueError(
            f"{tag} was saved by {layout.pipeline_stages} pipeline stages of a PipelineModule, "
            "whose layer names differ from those of a convertible model; export the weights "
            "in the run (ds_moe_ext.full_state_dict, of each stage)"
        )
    if not (tag / STATES).exists():
        raise ValueError(f"{tag} has no {STATES}: copy the whole folder again")
    return tag


def open_source(tag: Path, model: AnyModel) -> Source:
    """Its tensors. Experts are kept as the optimizer steps them, often wider than the model has
    them: they are given in the type that the routers have.
    """
    layout = SavedLayout.read(tag)
    layout.check(tag)
    states, stored = unpickle.load(tag / STATES), dcp.Folder(tag / FOLDER)
    module = states.get("module") if isinstance(states, Mapping) else None
    if not isinstance(module, Mapping):
        raise unpickle.damaged(tag / STATES, ValueError("it has no weights"))
    layout.check_save(tag / STATES, states.get(SAVE))
    layout.check_save(tag / FOLDER, stored.object(SAVE))
    dense = {plain(name): t for name, t in module.items() if isinstance(t, Tensor)}
    tensors = {name: Stored(tuple(t.shape), t.dtype, partial(_box, t)) for name, t in dense.items()}
    dtype = _dtype(model, dense, tag)
    known = in_deepspeed(model)
    for cell in cells(model, known.experts):
        kept = stored.tensors.get(cell.name)
        if kept is None:
            continue
        shape = cell.shape(model)
        if tuple(kept.size) == (torch.Size(shape).numel(),):  # of format 2, which had them flat
            read = partial(_unflat, stored, cell.name)
        else:
            shape, read = tuple(kept.size), partial(stored.read, cell.name)
        tensors[cell.name] = Stored(shape, dtype, read)
    return Source(str(tag), tensors, (known.both,), zeros=known.zeros)


def _dtype(model: AnyModel, dense: Mapping[str, Tensor], tag: Path) -> torch.dtype:
    """Of a norm: routers of a native MoE stay in float32."""
    name = next(cells(model, in_deepspeed(model).module)).name
    if name not in dense:
        raise ValueError(
            f"{tag / STATES} has no {name}; is it a {model.family.value} model? Describe it with "
            "--model"
        )
    return dense[name].dtype


def _box(tensor: Tensor, start: Shape, shape: Shape) -> Tensor:
    return tensor[tuple(slice(first, first + length) for first, length in zip(start, shape))]


def _unflat(stored: dcp.Folder, name: str, start: Shape, shape: Shape) -> Tensor:
    return stored.read(name, (0,), (torch.Size(shape).numel(),)).reshape(shape)


def write(folder: Path, maker: Maker) -> None:
    """Write a folder that ``engine.load_checkpoint(load_module_only=True)`` takes.

    Dense weights are in memory all at once, as they are in DeepSpeed's file; experts one by one.
    """
    tag, model, save = folder / TAG, maker.model, uuid4().hex
    _check_biases(maker)
    tag.mkdir(parents=True)
    known = in_deepspeed(model)
    made = {cell.name: _to_write(maker, cell) for cell in maker.cells(known.experts)}
    dcp.write(tag / FOLDER, made, {**_objects(model), SAVE: save})
    module = OrderedDict((cell.name, maker.make(cell)) for cell in maker.cells(known.module))
    torch.save({**_states(model, module), SAVE: save}, tag / STATES)
    files = (STATES, f"{FOLDER}/{dcp.DATA}", f"{FOLDER}/{dcp.TABLE}")
    layers, number = known.layers, model.num_experts
    SavedLayout(
        strategy="ep",
        expert_parallel_size=1,
        expert_sharding_size=1,
        world_size=1,
        zero_stage=0,
        num_experts=dict.fromkeys(layers, number),
        owners={layer: [0] * number for layer in layers},
        slots={
            layer: [known.slot.format(layer=layer, slot=slot) for slot in range(number)]
            for layer in layers
        },
        optimizer=None,
        step=0,
        save=save,
        files=whole_files.sums_of(tag, files),
    ).write(tag)
    (folder / LATEST).write_text(TAG)


def _check_biases(maker: Maker) -> None:
    for piece in pieces(maker.model):
        if piece.part is Part.ROUTER_BIAS and maker.pieces.read(piece).any():
            raise ValueError(
                f"layer {piece.where.layer} has a router's bias that is not zero, as Megatron "
                "trains one with --add-bias-linear; routers of deepspeed.moe have none, so "
                "this model cannot be converted"
            )


def _to_write(maker: Maker, cell: Cell) -> dcp.ToWrite:
    shape = cell.shape(maker.model)
    whole = {tuple(0 for _ in shape): dcp.ToMake(shape, partial(maker.make, cell))}
    return dcp.ToWrite(shape, maker.dtype_of(cell), whole)


def _objects(model: AnyModel) -> dict[str, Any]:
    """What a run keeps once, of a run that has not begun; see ``checkpoint_contents``."""
    found: dict[str, Any] = {
        "optimizer": {},
        "remembered": np.zeros((0, 0, 0, 0), dtype=np.int64),
    }
    for cell in cells(model, in_deepspeed(model).experts):
        name = cell.name.removesuffix(MASTER)
        about = {"shape": cell.shape(model), "options": None}
        found |= {f"{name}/scalars": {}, f"{name.rpartition('.')[0]}/about": about}
    return found


def _states(model: AnyModel, module: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": [],
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        **dict.fromkeys(("skipped_steps", "global_steps", "global_samples"), 0),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "num_experts": [model.num_experts] * model.num_moe_layers,
    }
