# SPDX-License-Identifier: Apache-2.0
"""Experts under ZeRO 3, which shards weights and gathers them where a module needs them.

DeepSpeed can shard some weights over other ranks than the rest: experts over those that have the
same ones. Where that is one rank nothing is sharded, and to gather is to point at what lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.zero import register_external_parameter
from deepspeed.utils import get_z3_leaf_modules, groups, set_z3_leaf_module
from torch import nn

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.attachment.block_hooks import block_of, launches
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, Blueprint, parameters_of
from ds_moe_ext.hosts.deepspeed.engine_record import record_of
from ds_moe_ext.hosts.deepspeed.shards import whole
from ds_moe_ext.hosts.steps.training_run import Run
from ds_moe_ext.strategies.settings import BLOCK

EXPERTS = "autoep_expert"
"""DeepSpeed's word for weights that are sharded over fewer ranks than it averages gradients of."""

WHY_TOGETHER = "zero_optimization.stage is 3: every pass gathers weights from all ranks"


def check_homes(blueprint: Blueprint) -> None:
    """ZeRO compares the weights of all ranks one by one, and looks ahead by their sizes.

    Raises:
        ValueError: not every cell has as many experts of a layer as the others.
    """
    num_cells = blueprint.grid.num_cells
    for found, home in zip(blueprint.found, blueprint.homes()):
        counts = home.holds_EC.sum(axis=0)
        if counts.min() != counts.max():
            raise ValueError(
                f"zero_optimization.stage is 3, under which every rank has weights of equal sizes, "
                f"but {num_cells} cells have {counts.min()} to {counts.max()} of the "
                f"{found.num_experts} experts of {found.name}; set {BLOCK}.expert_parallel_size to "
                "a number that divides them, or use stage 0, 1 or 2"
            )


def shard_over_replicas(layer: AttachedLayer, grid: Grid, device: torch.device) -> None:
    """Let ZeRO shard a layer's experts over the ranks that have the same ones, and have them whole
    while the module in the experts' place runs, forward and backward, on this device."""
    if layer.routed.copies is not None:  # also of experts that are not whole right then
        layer.routed.copies.keep_shapes(device)
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


def open_layers(model: nn.Module, layers: Sequence[AttachedLayer]) -> None:
    """Let ZeRO see the modules around experts one by one. It takes MoE blocks that it knows for one
    module each, since theirs call what the routing says; ours are called in the same order always.
    """
    experts = {layer.hosted for layer in layers}
    for module in get_z3_leaf_modules(model):
        if not experts.isdisjoint(module.modules()):
            set_z3_leaf_module(module, False)


def gather_with_blocks(model: nn.Module, layers: Sequence[AttachedLayer]) -> None:
    """Have experts whole from the moment on in which a block launches their copies, and in backward
    until gradients of copies have come home."""
    for layer, launch in zip(layers, launches(layers)):
        if layer.routed.copies is not None:
            block = model.get_submodule(block_of(model, layer.name))
            for parameter in chain.from_iterable(map(parameters_of, launch.begun)):
                register_external_parameter(block, parameter)


def launch_when_whole(run: Run) -> None:
    """Let blocks launch copies behind ZeRO's hooks, which gather, and of whose nodes the backward
    releases; they were put on the blocks later."""
    for hook in run.block_hooks:
        hooks = hook.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(hook.id)


def waits(optimizer: Any, parameter: nn.Parameter) -> bool:
    """Whether a gradient that ZeRO is about to put into its bucket waits until the others have been
    reduced; it is remembered then.

    Where grids of ranks copy by plans of their own, gradients of experts come at other moments on
    each, and buckets would be full at others.
    """
    record = record_of(optimizer)
    if parameter not in record.last:
        return False
    record.waiting.append((parameter, 0))
    return True


def reduce_waiting(optimizer: Any) -> None:
    """Reduce the gradients that waited, in the same order on all ranks."""
    waiting: list[Any] = [parameter for parameter, _ in record_of(optimizer).take_waiting()]
    reduce = type(optimizer).reduce_independent_p_g_buckets_and_remove_grads.__wrapped__
    for parameter in sorted(waiting, key=lambda parameter: parameter.ds_id):
        reduce(optimizer, parameter)


def at_hand(engine: Any, run: Run) -> Any:
    """A block between steps, in which experts are whole where they are about to be measured, or
    where plans are made by their sizes, which stacks tell without. Collective."""
    if not engine.zero_optimization_partition_weights():
        return nullcontext()
    measures = run.blueprint.strategy.rhythm().measures and run.planning.costs.is_due
    needed = [
        layer
        for layer in run.layers
        if measures or (layer.routed.copies is not None and not layer.hosted.stacks)
    ]
    return whole(chain.from_iterable(layer.parameters for layer in needed))
