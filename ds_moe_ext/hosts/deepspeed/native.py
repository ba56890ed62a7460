# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.moe.layer.MoE``: its gate stays, its experts run by a strategy.

Parameter names stay as DeepSpeed's checkpoints have them
(``deepspeed_moe.experts.deepspeed_experts.<slot>...``), and so does what ``MoE.forward`` reads:
``l_aux`` and ``exp_counts``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import check_own_weights, shell, ways_to_split
from ds_moe_ext.hosts.attachment.host_layer import (
    Adopted,
    Found,
    RoutedOf,
    Slot,
    Wanted,
    keep_marks,
    shape_of,
    stated,
    weights_of,
)
from ds_moe_ext.hosts.attachment.modules import eager, named_modules
from ds_moe_ext.moe.expert import ModuleExperts, on_shard
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.sharding import Shard


def find(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The MoE layers, in model order."""
    for name, module in named_modules(model):
        if isinstance(module, MoE) and wanted(name):
            check_own_weights(model, f"{name}.deepspeed_moe.experts")
            yield _found(name, module)


def _found(name: str, moe: MoE) -> Found:
    if moe.enable_expert_tensor_parallelism:
        raise ValueError(
            f"{name} has enable_expert_tensor_parallelism on, which ds_moe_ext does not support; "
            "build it without"
        )
    here = list(moe.deepspeed_moe.experts.deepspeed_experts)
    first = here[0]
    buffers = [buffer for buffer, _ in first.named_buffers()]
    if buffers:
        raise ValueError(
            f"an expert of {name} has buffers {buffers}, but under ds_moe_ext one module "
            "computes all experts of a rank; make them frozen parameters"
        )

    function = ModuleExperts(_code(first), tuple(name for name, _ in first.named_parameters()))

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        layer = moe.deepspeed_moe
        slots = list(layer.experts.deepspeed_experts)
        built = [parameter for module in slots for parameter in module.parameters()]
        if len(slots) == moe.num_experts:  # every rank has all: keep this rank's
            kept = [slots[expert] for expert in held.tolist()]
        else:
            kept = slots  # built for as many EP ranks as there are
        before = [dict(module.named_parameters()) for module in kept]
        for module in kept:
            _keep_part(module, function.names, shard)
        routed = routed_of(on_shard(function, shard))
        layer.experts.deepspeed_experts = nn.ModuleList(kept)
        layer.experts.num_local_experts = len(kept)
        hosted = HostedMoE(layer.gate, layer.experts, shard, routed, function.names)
        moe.deepspeed_moe = hosted
        grid = routed.layer_context.layout.grid
        moe.ep_size, moe.num_local_experts = grid.num_ep_ranks, len(kept)
        moe.expert_group_name = f"ep_size_{grid.size}"
        sources = {
            module.get_parameter(name): (whole,)
            for module, parameters in zip(kept, before)
            for name, whole in parameters.items()
        }
        left = {id(p) for p in sources}
        return Adopted(hosted, sources, tuple(p for p in built if id(p) not in left))

    num_ep_ranks = moe.num_experts // moe.num_local_experts
    return Found(
        name=name,
        kind="deepspeed.moe",
        num_experts=moe.num_experts,
        expert=shape_of(
            (each, p, any(one.get_parameter(each).requires_grad for one in here))
            for each, p in first.named_parameters()
        ),
        num_ep_ranks=num_ep_ranks,
        may_drop=bool(moe.deepspeed_moe.gate.drop_tokens),
        split=cache(lambda size: ways_to_split(name, function, [*first.parameters()], size)),
        adopt=adopt,
        routing=stated(moe.deepspeed_moe.gate),
    )


def _keep_part(expert: nn.Module, names: Sequence[str], shard: Shard) -> None:
    """Leave an expert this rank's part of its weights."""
    if shard.is_whole:
        return
    for number, name in enumerate(names):
        path, _, key = name.rpartition(".")
        owner, whole = expert.get_submodule(path), expert.get_parameter(name)
        part = nn.Parameter(shard.of(number, whole.detach()), requires_grad=whole.requires_grad)
        keep_marks(part, whole)
        owner.register_parameter(key, part)


def _code(expert: nn.Module) -> nn.Module:
    """The expert's modules without weights: ``functional_call`` brings them. They have its hooks,
    but not those that a host will put on the modules of its model, as ZeRO 3 does."""
    empty = shell(expert)
    empty._forward_pre_hooks = copy.copy(expert._forward_pre_hooks)
    empty._forward_hooks = copy.copy(expert._forward_hooks)
    empty._modules = {name: module and _code(module) for name, module in expert._modules.items()}
    return empty


class HostedMoE(nn.Module):
    """In the place of DeepSpeed's ``MOELayer``: same gate, same names, our way of the rows."""

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        shard: Shard,
        routed: RoutedExperts,
        weight_names: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.routed = routed
        self.run: RunRows = routed
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self.weight_names = weight_names
        self.shard = shard
        self.forward = eager(self.forward)  # type: ignore[method-assign]

    def _set_ep_group(self, group: Any) -> None:
        """DeepSpeed hands over its expert-parallel group; our rows travel by the layout's.

        Its gate would use the group to agree on a padded capacity, which we do not need.
        """

    stacks = ()  # experts are modules, and each has its own parameters

    def slots(self) -> list[Slot]:
        return [
            Slot(tuple(expert.get_parameter(name) for name in self.weight_names), expert)
            for expert in self.experts.deepspeed_experts  # type: ignore[union-attr]
        ]

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        modules = [slot.module for slot in slots if slot.module is not None]
        self.experts.deepspeed_experts = nn.ModuleList(modules)
        self.experts.num_local_experts = len(modules)  # type: ignore[assignment]

    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the first slot's expert in name order, then of the second's, and so on."""
        return weights_of(self.slots())

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """``[..., D]`` to ``[..., D]``. Collective over the EP ranks."""
        self.routed.rows.begin(is_training=self.training)
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        l_aux, _, _, ids_KT, _, score_KT, exp_counts = self.gate(x_TD, used_token, True)
        expert_TK = ids_KT.T.contiguous().to(torch.int64)
        self.routed.rows.saw_scores(score_KT)
        y_TD = self.run(x_TD, expert_TK, score_KT.T.contiguous(), self.weights())
        # Behind the experts: other micro-batches may have come by while this one waited for them.
        self.l_aux, self.exp_counts = l_aux, exp_counts
        return y_TD.view_as(hidden)
