"""Megatron-core's MoE layers: found in a model, adopted in place.

Shape letters: S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from ds_moe_ext.hosts.found import Adopted, Found, RoutedOf, Wanted, shape_of
from ds_moe_ext.hosts.megatron.dispatcher import Dispatcher
from ds_moe_ext.hosts.megatron.experts import (
    HostedExperts,
    form_of,
    function_of,
    swap_class,
    ways_of,
    weight_names,
)
from ds_moe_ext.hosts.megatron.refusals import refuse_config
from ds_moe_ext.moe.expert import on_shard
from ds_moe_ext.moe.sharding import Shard


def is_trained(layer: nn.Module) -> bool:
    """Whether anything of its experts is."""
    return any(parameter.requires_grad for parameter in layer.get_submodule("experts").parameters())


def constructed(layer: Any) -> None:
    """Make ready a layer that Megatron has just built, before it is wrapped for data parallelism.

    Gradients of experts are summed over the ranks that hold the same ones. Up to version 0.18
    Megatron says so only where expert parallelism is above 1, and with tensor parallelism alone the
    copies of an expert drift apart (HOSTS_MEGATRON.md, section 1).

    Raises:
        ValueError: the layer was asked for what ds_moe_ext cannot do.
    """
    refuse_config(layer.config)
    for parameter in layer.experts.parameters():
        parameter.allreduce = False


def find(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The MoE layers, in the order of their modules, which is that in which they run."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and wanted(name):
            yield _found(name, module)


def _found(name: str, layer: Any) -> Found:
    form, names = form_of(name, layer.experts), weight_names(layer.config)
    first = form.slots(layer.experts, names)[0].parameters

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        if held.tolist() != list(layer.local_expert_indices):
            raise ValueError(
                f"this rank would be home to experts {held.tolist()} of {name}, but Megatron built "
                f"it with experts {list(layer.local_expert_indices)}"
            )
        routed = routed_of(on_shard(function_of(layer.experts), shard))
        hosted = HostedExperts(layer.experts, form, shard, routed)
        swap_class(hosted)
        layer.token_dispatcher = Dispatcher(layer.token_dispatcher.shared_experts)
        return Adopted(hosted, {p: (p,) for slot in hosted.slots() for p in slot.parameters}, ())

    return Found(
        name=name,
        kind=type(layer.experts).__name__,
        num_experts=layer.config.num_moe_experts,
        expert=shape_of((each, p, p.requires_grad) for each, p in zip(names, first)),
        num_cells=layer.ep_group.size(),
        may_drop=layer.config.moe_expert_capacity_factor is not None,
        split=lambda num_shards: ways_of(layer.config),
        adopt=adopt,
    )
