# SPDX-License-Identifier: Apache-2.0
"""What a rank has of each weight under ZeRO 3, and the whole of it: for states and for files.

Where ZeRO shards no weights all here is as if it were not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.module_inject.layers import DS_IS_REPLACED_MODULE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_moe_ext.hosts.steps.expert_moves import Shard


def are_of(engine: Any) -> bool:
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
    """Of the whole parameter."""
    sharded: Any = parameter
    return sharded.ds_shape if is_zero_param(parameter) else parameter.shape


def all_of(optimizer: DeepSpeedZeroOptimizer_Stage3, model: nn.Module) -> Iterator[Shard]:
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


def _shard(parameter: Any, held: Tensor | None = None, offset: int = 0) -> Shard:
    """Of a parameter, and the tensor that an optimizer steps; without one, the shard itself."""
    own = parameter.ds_tensor
    held = own if held is None else held
    begin = parameter.ds_zero_partition_rank * own.ds_numel
    left = min(max(parameter.ds_numel - begin, 0), own.ds_numel)  # the rest fills ranks up
    return Shard(held, offset, parameter, parameter.ds_numel, begin, own.view(-1)[:left])


@contextmanager
def groups_filled(optimizer: Any) -> Iterator[None]:
    """A block in which the optimizer's parameter groups have what is stepped: ZeRO 3 steps one
    tensor after the other, and has none in them between."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield
        return
    optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
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


def share_groups(optimizer: Any) -> None:
    """Let the second optimizer have the groups of the first. DeepSpeed gives it one of its own in
    the place of the first group, whose rate no schedule reaches."""
    if has_second_optimizer(optimizer):
        second = optimizer.backup_optimizer
        for group in optimizer.optimizer.param_groups:
            for name, value in second.defaults.items():
                group.setdefault(name, value)
        second.param_groups[:] = optimizer.optimizer.param_groups


@contextmanager
def one_file(engine: Any) -> Iterator[None]:
    """A block in which DeepSpeed's file of dense weights is one for all ranks, which has them
    whole, as at other stages."""
    engine.zero_optimization_partition_weights = lambda: False
    try:
        yield
    finally:
        del engine.zero_optimization_partition_weights


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
def take(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state with whole weights: a rank takes its shards of them, and buffers."""
    rest = dict(state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            shard = _shard(parameter)
            own = rest.pop(name).reshape(-1)[shard.begin :][: shard.weight.numel()]
            shard.weight.copy_(own)
    model.load_state_dict(rest, strict=False)
