# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps of an engine, and by which names.

Everything has a name that tells nothing of ranks, slots or ZeRO stages, so that any later run finds
it. ``NAME`` is a dense weight's own name, and of an expert ``<layer>.<weight>.<number>``; ``KIND``
leaves out the number, for what all experts of a layer have in common:

    NAME/master     the weight as the optimizer steps it; the module has it rounded
    NAME/exp_avg    and every other state, by the optimizer's name for it
    NAME/scalars    what the optimizer keeps once, such as ``step``
    KIND/about      shape, and options of the parameter group, such as ``lr``
    optimizer       settings of DeepSpeed's wrapper, such as the loss scale
    remembered      rows of the steps that predict the next; of a pipeline's stage by its layers
    ds_moe_ext_save id of the save, see ``layout_file``

An expert's tensors have the shape of its weight, whichever part of it a rank has; dense ones are
flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import Slot
from ds_moe_ext.hosts.attachment.modules import plain
from ds_moe_ext.hosts.deepspeed import pipeline, shards
from ds_moe_ext.hosts.deepspeed.dcp_folder import Part
from ds_moe_ext.hosts.deepspeed.parameter_groups import OF_A_PART
from ds_moe_ext.hosts.deepspeed.regions import Region
from ds_moe_ext.hosts.deepspeed.state_places import OptimizerStates
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.hosts.steps.expert_moves import Expert
from ds_moe_ext.hosts.steps.training_run import Run

SCALARS, ABOUT = "scalars", "about"
OPTIMIZER, REMEMBERED = "optimizer", "remembered"


class Named(NamedTuple):
    """What a parameter is called in a checkpoint, and which part of what is kept there it is.

    Attributes:
        name: its own.
        kind: the part of it that all experts of a layer share.
        shape: of the weight, whole.
        region: what this rank has of it, as its tensors are kept.
        is_expert: whether it is one's weight.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    region: Region
    is_expert: bool

    @classmethod
    def dense(cls, name: str, parameter: nn.Parameter, tensor_parallel: TensorParallel) -> Named:
        """Of a weight that is no expert's. Tensor parallel ranks have others by the same name."""
        if tensor_parallel.size > 1:
            name = f"part {tensor_parallel.rank} of {name}"
        shape = shards.shape_of(parameter)
        return cls(name, name, tuple(shape), Region.all_of((shape.numel(),)), False)


def named_parameters(
    engine: Any, run: Run, slots: Mapping[Expert, Slot]
) -> dict[nn.Parameter, Named]:
    """All parameters of this rank that have elements, if its experts lie in these slots."""
    tensor_parallel = TensorParallel.of(engine.mpu)
    named = {
        p: Named.dense(plain(name), p, tensor_parallel)
        for name, p in engine.module.named_parameters()
    }
    for expert, slot in slots.items():
        layer = run.layers[expert.layer]
        shard = layer.hosted.shard
        for index, (weight, p) in enumerate(zip(layer.hosted.weight_names, slot.parameters)):
            own = shards.shape_of(p)
            kind, shape = f"{layer.name}.{weight}", shard.whole_shape(index, own)
            region = Region.of_shard(shard, index, own)
            named[p] = Named(f"{kind}.{expert.number}", kind, shape, region, True)
    stacks = {stack for slot in slots.values() for stack in slot.stacks}
    return {
        p: names for p, names in named.items() if shards.shape_of(p).numel() and p not in stacks
    }


def remembered_name(run: Run) -> str:
    """Where rows are kept that predict the next: those of a pipeline's stage are of its layers."""
    first = run.layers[0]
    if not first.routed.site.layout.beside:
        return REMEMBERED
    return f"{REMEMBERED} of {', '.join(layer.name for layer in run.layers)}"


def kept_of(
    engine: Any, named: Mapping[nn.Parameter, Named], *, excludes_frozen: bool = False
) -> tuple[dict[str, Part], dict[str, Any]]:
    """All that this rank's optimizer keeps, and its experts; frozen dense weights are the host's.

    Args:
        engine: DeepSpeed's.
        named: its parameters.
        excludes_frozen: leave out experts that are not trained.

    Returns:
        Parts of tensors, and objects, by name.

    Raises:
        ValueError: the optimizer keeps what has no part for each element.
    """
    states = OptimizerStates(engine)
    parts, objects = dict[str, Part](), {OPTIMIZER: wrapper_settings(engine)}
    for parameter, names in named.items():
        if not names.is_expert and not is_stepped(states, parameter):
            continue
        if pipeline.is_of_another_stage(engine.module, parameter):
            continue
        if names.is_expert and excludes_frozen and not parameter.requires_grad:
            continue
        own, options = states.of(parameter), states.options(parameter)
        if own.start < own.stop:
            for state, tensor in own.tensors.items():
                parts[f"{names.name}/{state}"] = names.region.part(tensor, own.start)
            objects[f"{names.name}/{SCALARS}"] = dict(own.scalars)
        objects[f"{names.kind}/{ABOUT}"] = {
            "shape": names.shape,
            "options": options and {k: v for k, v in options.items() if k not in OF_A_PART},
        }
    return parts, objects


def is_stepped(states: OptimizerStates, parameter: nn.Parameter) -> bool:
    """Whether the optimizer changes it: a plain one may have been given what is frozen too."""
    return parameter.requires_grad and states.options(parameter) is not None


def has_dense_weights(run: Run) -> bool:
    """Whether this rank has weights that are no expert's."""
    roles = run.blueprint.strategy.roles
    return roles is None or roles.is_attention(run.rank)


def base_optimizer(engine: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside DeepSpeed's wrapper."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer | None = optimizer
    return inner


def wrapper_settings(engine: Any) -> dict[str, Any]:
    """What DeepSpeed's wrapper of the optimizer keeps beside tensors and their layout, under a name
    that tells which wrapper may take it."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedOptimizer):
        return {}
    state = type(optimizer).state_dict(optimizer)
    settings = {k: v for k, v in state.items() if not isinstance(v, (Tensor, list, tuple, dict))}
    return {wrapper_name(engine): settings}


def wrapper_name(engine: Any) -> str:
    """Wrappers of one name keep the same settings, and mean the same by them."""
    scaled = " with a loss scale" if engine.fp16_enabled() else ""
    return f"{type(engine.optimizer).__name__}{scaled}"
