# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's MoE layers: found in a model, adopted in place.

Shape letters: S slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.hosts.attachment.host_layer import (
    Adopted,
    ExpertShape,
    Found,
    RoutedOf,
    Wanted,
    stated,
)
from ds_moe_ext.hosts.attachment.notices import refuse
from ds_moe_ext.hosts.megatron.active_settings import worlds
from ds_moe_ext.hosts.megatron.choices import Choices
from ds_moe_ext.hosts.megatron.dispatcher import Dispatcher
from ds_moe_ext.hosts.megatron.expert_modules import (
    Form,
    HostedExperts,
    Nowhere,
    form_of,
    function_of,
    shape_of_one,
    swap_class,
    ways_of,
)
from ds_moe_ext.hosts.megatron.ranks import place_in
from ds_moe_ext.hosts.megatron.refusals import REFUSALS
from ds_moe_ext.hosts.megatron.role_models import Elsewhere, leave_experts
from ds_moe_ext.hosts.megatron.role_refusals import WITH_ROLES
from ds_moe_ext.moe.expert import on_shard
from ds_moe_ext.moe.sharding import Shard
from ds_moe_ext.strategies.settings import BLOCK

_WAITING: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()  # to be started
_MADE_READY: WeakSet[nn.Module] = WeakSet()


def is_trained(layer: nn.Module) -> bool:
    """Whether anything of its experts is."""
    return any(parameter.requires_grad for parameter in layer.get_submodule("experts").parameters())


def constructed(layer: Any, collection: Any) -> None:
    """Make ready a layer that Megatron has just built, before it is wrapped for data parallelism.

    Gradients of experts are summed over the ranks that hold the same ones. Up to version 0.18
    Megatron says so only where expert parallelism is above 1; where experts are split otherwise
    than the rest, as with --expert-tensor-parallel-size 1, copies of an expert then drift apart
    (HOSTS_MEGATRON.md, section 1).

    Args:
        layer: a ``MoELayer``.
        collection: the process groups that it was given; None for those of ``parallel_state``.

    Raises:
        ValueError: the layer was asked for what ds_moe_ext cannot do.
    """
    refuse(REFUSALS, layer.config)
    parted = worlds()
    if parted is not None:
        refuse(WITH_ROLES, layer.config)
        if parted.is_attention:
            leave_experts(layer)
    # Elsewhere Megatron is right, and its optimizer's states stay in the form of a run without us.
    if parted is not None or _is_split_otherwise(collection):
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
    _MADE_READY.add(layer)
    _WAITING[layer] = layer.register_forward_pre_hook(_refuse_unstarted)


def _is_split_otherwise(collection: Any) -> bool:
    """Whether experts are over other ranks than dense weights."""
    return place_in(collection, "expt_tp").size != place_in(collection, "tp").size


def _refuse_unstarted(layer: nn.Module, given: tuple[Any, ...]) -> None:
    if layer.training and torch.is_grad_enabled() and is_trained(layer):
        raise ValueError(
            f"{BLOCK} is enabled, but this MoE layer is trained by Megatron alone: ds_moe_ext "
            "starts where the model's optimizer is made by "
            "megatron.core.optimizer.get_megatron_optimizer, which was not called; call it before "
            "the first step, or leave ds_moe_ext out"
        )


def started(chunks: Iterable[nn.Module]) -> None:
    """Layers of this model may be trained: also those that are left to Megatron."""
    for chunk in chunks:
        for module in chunk.modules():
            if module in _WAITING:
                _WAITING.pop(module).remove()


def check_made_ready(model: nn.Module, found: Iterable[Found]) -> None:
    """Whether ``constructed`` has seen all of them.

    Raises:
        ValueError: some were built when settings were not in use.
    """
    for layer in found:
        if model.get_submodule(layer.name) not in _MADE_READY:
            raise ValueError(
                f"{BLOCK} is enabled, but {layer.name} was built before ds_moe_ext.use was called, "
                "so that Megatron's flags were not checked and its expert weights not marked "
                "before they were wrapped; call use before the model is built"
            )


def find(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The MoE layers, in the order of their modules, which is that in which they run. Where the
    model is a list of chunks, each is a stack of its own: passes through others come between."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and wanted(name):
            chunk = int(name.split(".")[0]) if isinstance(model, nn.ModuleList) else 0
            yield _found(name, module, chunk)


def trained_on_any(found: Sequence[Found], told: Sequence[Sequence[ExpertShape]]) -> list[Found]:
    """The same layers, whose weights are said to be trained where any rank trains one: all experts
    of some ranks may be frozen.

    Args:
        found: on this rank.
        told: what an expert of each is like, on the ranks that have experts.
    """
    if any(len(experts) != len(found) for experts in told):
        return list(found)  # which is compared with those of the others
    return [
        replace(each, expert=_trained_on_any(each.expert, experts))
        for each, *experts in zip(found, *told)
    ]


def _trained_on_any(own: ExpertShape, told: Sequence[ExpertShape]) -> ExpertShape:
    trained = [any(weight[3] for weight in weights) for weights in zip(*told)]
    return tuple((*weight[:3], is_trained) for weight, is_trained in zip(own, trained))


def _found(name: str, layer: Any, chunk: int) -> Found:
    kept = layer.experts
    form: Form
    if isinstance(kept, Elsewhere):
        form, kind, expert, function = Nowhere(), kept.kind, kept.expert, kept.function
    else:
        form = form_of(name, kept)
        kind, expert, function = type(kept).__name__, shape_of_one(name, kept), function_of(kept)
    choices = Choices.of(name, layer)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        if isinstance(layer.token_dispatcher, Dispatcher):
            raise ValueError(
                f"{name} runs by ds_moe_ext already: get_megatron_optimizer was called twice for "
                f"this model; call it once, or make the model anew"
            )
        if held.tolist() != list(layer.local_expert_indices):
            raise ValueError(
                f"this rank would be home to experts {held.tolist()} of {name}, but Megatron built "
                f"it with experts {list(layer.local_expert_indices)}"
            )
        routed = routed_of(on_shard(function, shard))
        hosted = HostedExperts(layer.experts, form, shard, routed, choices)
        swap_class(hosted)
        layer.token_dispatcher = Dispatcher(layer.token_dispatcher.shared_experts)
        return Adopted(hosted, {p: (p,) for slot in hosted.slots() for p in slot.parameters}, ())

    return Found(
        name=name,
        kind=kind,
        num_experts=layer.config.num_moe_experts,
        expert=expert,
        num_cells=layer.ep_group.size(),
        may_drop=choices.may_drop,
        split=lambda num_shards: ways_of(layer.config),
        adopt=adopt,
        stack=chunk,
        routing=stated(choices.config),
    )
