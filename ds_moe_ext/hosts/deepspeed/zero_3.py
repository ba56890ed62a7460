# SPDX-License-Identifier: Apache-2.0
"""Experts under ZeRO 3, which shards weights and gathers them where a module needs them.

DeepSpeed can shard some weights over other ranks than the rest: experts over those that have the
same ones. Where that is one rank nothing is sharded, and to gather is to point at what lies there.
In order: what a rank has of each weight, and the whole of it, for states and for files; models
built under ``zero.Init``; and where experts are whole while a model is trained. Where ZeRO shards
no weights all here is as if it were not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from deepspeed.module_inject.layers import DS_IS_REPLACED_MODULE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero import GatheredParameters, ZeroParamStatus, register_external_parameter
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import get_z3_leaf_modules, groups, set_z3_leaf_module
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.attachment.block_hooks import block_of, launches
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, RoutedOf
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, Blueprint, parameters_of
from ds_moe_ext.hosts.steps.expert_moves import Shard as StateShard
from ds_moe_ext.hosts.steps.training_run import Run
from ds_moe_ext.moe.sharding import Shard
from ds_moe_ext.strategies.settings import BLOCK


def shards_weights(engine: Any) -> bool:
    """Whether an engine's ZeRO shards weights."""
    return bool(engine.zero_optimization_stage() == ZeroStageEnum.weights)


def whole(parameters: Iterable[nn.Parameter]) -> Any:
    """A block in which these are whole, as far as they are sharded. Collective."""
    sharded = [parameter for parameter in parameters if is_zero_param(parameter)]
    return GatheredParameters(sharded, enabled=bool(sharded))


def state_of(model: nn.Module) -> dict[str, Any]:
    """The model's state, of what is no expert whole: each weight comes from its shards to host
    memory. Collective where ZeRO shards weights, or AutoTP divides them."""
    return {**model.state_dict(), **_whole_dense(model), **_undivided(model)}


def _whole_dense(model: nn.Module, *, keeps: bool = True) -> dict[str, Tensor]:
    """Dense weights that are sharded, in host memory; none where this rank does not keep them.
    Collective."""
    weights: dict[nn.Parameter, Tensor] = {}
    dense = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if is_zero_param(parameter) and not is_moe_param(parameter)
    }
    for parameter in dict.fromkeys(dense.values()):
        with whole([parameter]):
            if keeps:
                weights[parameter] = parameter.detach().to("cpu", copy=True)
    return {name: weights[parameter] for name, parameter in dense.items()} if keeps else {}


def _undivided(model: nn.Module) -> dict[str, Tensor]:
    """Weights that AutoTP divided, in host memory. Collective where there are some."""
    weights = dict[str, Tensor]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        named = dict(module.named_parameters(recurse=False))
        own: Any = module
        if not any(getattr(weight, DS_IS_REPLACED_MODULE, False) for weight in named.values()):
            continue
        with whole(named.values()):
            # Its own way back would not leave them where ZeRO has them.
            parts = [weight.data for weight in named.values()]
            own.gather_params(list(named.values()))
            for (name, weight), part in zip(named.items(), parts):
                weights[f"{prefix}.{name}"] = weight.detach().to("cpu", copy=True)
                weight.data = part
    return weights


def shape_of(parameter: nn.Parameter) -> torch.Size:
    sharded: Any = parameter
    return sharded.ds_shape if is_zero_param(parameter) else parameter.shape


def shards_of(optimizer: DeepSpeedZeroOptimizer_Stage3, model: nn.Module) -> Iterator[StateShard]:
    """What this rank has of every parameter. What is not trained is in no tensor that is stepped:
    there the shard stands for it."""
    trained = set[nn.Parameter]()
    for held, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups):
        offset = 0
        for parameter in parameters:
            yield _shard(parameter, held, offset)
            offset += parameter.partition_numel()
        trained.update(parameters)
    for parameter in model.parameters():
        if parameter not in trained and is_zero_param(parameter):
            yield _shard(parameter)


def _shard(parameter: Any, held: Tensor | None = None, offset: int = 0) -> StateShard:
    """Of a parameter, and the tensor that an optimizer steps; without one, the shard itself."""
    own = parameter.ds_tensor
    held = own if held is None else held
    begin = parameter.ds_zero_partition_rank * own.ds_numel
    left = min(max(parameter.ds_numel - begin, 0), own.ds_numel)  # the rest fills ranks up
    return StateShard(held, offset, parameter, parameter.ds_numel, begin, own.view(-1)[:left])


@contextmanager
def groups_filled(optimizer: Any) -> Iterator[None]:
    """A block in which the optimizer's parameter groups have what is stepped: ZeRO 3 steps one
    tensor after the other, and has none in them between."""
    is_sharded = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    if is_sharded:
        optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        if is_sharded:
            optimizer._clear_fp32_optimizer_param_groups()


def has_second_optimizer(optimizer: Any) -> bool:
    """Whether ``offload_optimizer.ratio`` leaves some of what is stepped to another optimizer."""
    is_sharded = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    return is_sharded and optimizer.offload_optimizer and optimizer.partial_offload != 1.0


def stepped_on_device(optimizer: Any) -> Iterator[Tensor]:
    """What is left to it."""
    if has_second_optimizer(optimizer):
        for held, device in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.subgroup_to_device.values()
        ):
            if device != "cpu":
                yield held


def share_second_groups(optimizer: Any) -> None:
    """Let the second optimizer have the groups of the first. DeepSpeed gives it one of its own in
    the place of the first group, whose rate no schedule reaches."""
    if has_second_optimizer(optimizer):
        second = optimizer.backup_optimizer
        for group in optimizer.optimizer.param_groups:
            for name, value in second.defaults.items():
                group.setdefault(name, value)
        second.param_groups[:] = optimizer.optimizer.param_groups


def one_file(engine: Any) -> Any:
    """A block in which DeepSpeed's file of dense weights is one for all ranks, which has them
    whole, as at other stages."""
    return during(engine, zero_optimization_partition_weights=lambda: False)


@contextmanager
def whole_in_state(engine: Any) -> Iterator[None]:
    """A block in which the module's state has dense weights whole, on a rank that writes them.
    Collective where ZeRO shards weights."""
    state = _whole_dense(engine.module, keeps=groups._get_data_parallel_rank() == 0)

    def put(module: nn.Module, given: dict[str, Any], prefix: str, _: Any) -> None:
        given.update({prefix + name: weight for name, weight in state.items()})

    hook = engine.module.register_state_dict_post_hook(put)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def take_shards(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state with whole weights: a rank takes its shards of them, and buffers."""
    rest = dict(state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            shard = _shard(parameter)
            own = rest.pop(name).reshape(-1)[shard.begin :][: shard.weight.numel()]
            shard.weight.copy_(own)
    model.load_state_dict(rest, strict=False)


# Models built under ``deepspeed.zero.Init``: all weights are sharded before layers are replaced.


@contextmanager
def described(model: nn.Module) -> Iterator[None]:
    """A block in which weights have their shapes, though their elements take no memory and mean
    nothing. Else one that is not gathered has no elements."""
    parameters: list[Any] = [p for p in model.parameters() if is_zero_param(p)]
    released = [p for p in parameters if p.shape != p.ds_shape]
    for parameter in released:
        parameter.data = parameter.data.new_empty(()).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter in released:
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                parameter.data = parameter.data.new_empty(0)


def gathering(model: nn.Module, found: Found) -> Found:
    """A layer that gathers its weights while it is replaced, if they are sharded."""
    weights: list[Any] = list(model.get_submodule(found.name).parameters())
    if not any(map(is_zero_param, weights)):
        return found

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        of_zero = _marks_of_zero(weights[0])
        of_user = {weight: vars(weight).keys() - of_zero for weight in weights}
        with whole(weights):
            adopted = found.adopt(held, shard, routed_of)
        for parameter, (source,) in adopted.sources.items():
            for name in vars(parameter).keys() - of_user[source]:
                delattr(parameter, name)
        return adopted

    return replace(found, adopt=adopt)


def _marks_of_zero(sharded: Any) -> set[str]:
    """Names of what ZeRO puts on a parameter that it shards. Collective."""
    probe = nn.Parameter(torch.empty(1, dtype=sharded.dtype, device=sharded.device))
    sharded.convert_to_zero_parameters(param_list=[probe])
    return set(vars(probe))


# Experts under ZeRO 3, which shards weights and gathers them where a module needs them.


EXPERTS = "autoep_expert"
"""DeepSpeed's word for weights that are sharded over fewer ranks than it averages gradients of."""

WHY_TOGETHER = "zero_optimization.stage is 3: every pass gathers weights from all ranks"


def check_owners(blueprint: Blueprint) -> None:
    """ZeRO compares the weights of all ranks one by one, and looks ahead by their sizes."""
    num_ep_ranks = blueprint.grid.num_ep_ranks
    for found, owner in zip(blueprint.found, blueprint.owners()):
        counts = owner.holds_EC.sum(axis=0)
        if counts.min() != counts.max():
            raise ValueError(
                f"zero_optimization.stage is 3, under which every rank has weights of equal sizes, "
                f"but {num_ep_ranks} EP ranks have {counts.min()} to {counts.max()} of the "
                f"{found.num_experts} experts of {found.name}; set {BLOCK}.expert_parallel_size to "
                "a number that divides them, or use stage 0, 1 or 2"
            )


def shard_over_replicas(
    layer: AttachedLayer, grid: Grid, device: torch.device, dtype: torch.dtype
) -> None:
    """Let ZeRO shard a layer's experts over the ranks that have the same ones, and have them whole
    while the module in the experts' place runs, forward and backward, on this device. The engine
    is going to cast them where its type is a half."""
    if layer.routed.replicas is not None:  # also of experts that are not whole right then
        layer.routed.replicas.keep_shapes(device, None if dtype == torch.float32 else dtype)
    name = f"ep_size_{grid.size}"
    hosted = layer.hosted
    assert isinstance(hosted, nn.Module)
    direct = set(hosted.parameters(recurse=False))
    for parameter in layer.parameters:
        parameter.ds_zero_placement_family = EXPERTS  # type: ignore[attr-defined]
        parameter.ds_zero_partition_group_name = name  # type: ignore[attr-defined]
        parameter.ds_zero_partition_process_group = (  # type: ignore[attr-defined]
            groups._get_expert_data_parallel_group(name)
        )
        if parameter not in direct:  # of modules that are never called
            register_external_parameter(hosted, parameter)


def gather_with_blocks(model: nn.Module, layers: Sequence[AttachedLayer]) -> None:
    """Have experts whole from the moment on in which a block launches their replicas, and in
    backward until gradients of replicas have come to the owner. ZeRO sees the modules around
    experts one by one: it takes MoE blocks that it knows for one module each, since theirs call
    what the routing says; ours are called in the same order always."""
    experts = {layer.hosted for layer in layers}
    for module in get_z3_leaf_modules(model):
        if not experts.isdisjoint(module.modules()):
            set_z3_leaf_module(module, False)
    for layer, launch in zip(layers, launches(layers)):
        if layer.routed.replicas is not None:
            block = model.get_submodule(block_of(model, layer.name))
            for parameter in chain.from_iterable(map(parameters_of, launch.begun)):
                register_external_parameter(block, parameter)


def launch_when_whole(run: Run) -> None:
    """Let blocks launch replicas behind ZeRO's hooks, which gather, and of whose nodes the backward
    releases; they were put on the blocks later."""
    for hook in run.block_hooks:
        hooks = hook.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(hook.id)


def at_hand(engine: Any, run: Run) -> Any:
    """A block between steps, in which experts are whole where they are about to be measured, or
    where plans are made by their sizes, which stacks show anyway. Collective."""
    if not engine.zero_optimization_partition_weights():
        return nullcontext()
    measures = run.blueprint.strategy.intervals().measures and run.planning.costs.is_due
    needed = [
        layer
        for layer in run.layers
        if measures or (layer.routed.replicas is not None and not layer.hosted.stacks)
    ]
    return whole(chain.from_iterable(layer.parameters for layer in needed))
