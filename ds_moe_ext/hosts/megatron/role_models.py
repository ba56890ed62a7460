# SPDX-License-Identifier: Apache-2.0
"""What becomes of Megatron's model on a rank that has attention, and on one that has experts only.

Both build the whole model as Megatron does. An attention rank drops the experts of each MoE layer
as soon as that is built, an expert rank all other weights just before the model is wrapped for data
parallelism: so neither DDP nor the optimizer ever sees them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from ds_moe_ext.hosts.attachment.host_layer import ExpertShape
from ds_moe_ext.hosts.megatron.expert_modules import function_of, shape_of_one
from ds_moe_ext.hosts.megatron.worlds import Worlds
from ds_moe_ext.hosts.zebra.stripe_model import keep_parameters
from ds_moe_ext.moe.feed_forward import FeedForwardExperts
from ds_moe_ext.strategies.settings import BLOCK

SIZES = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "num_distributed_optimizer_instances": "--num-distributed-optimizer-instances",
}
"""Of Megatron's groups, and their flags."""


class Elsewhere(nn.Module):
    """In the place of experts that are on other ranks.

    Args:
        experts: that were built here.

    Attributes:
        config: of the model.
        kind: name of their class.
        expert: what one is like.
        function: what they compute.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.config = experts.config
        self.kind = type(experts).__name__
        self.expert: ExpertShape = shape_of_one("a layer", experts)
        self.function: FeedForwardExperts = function_of(experts)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing: the ranks that have them tell of them."""
        return {}


def leave_experts(layer: Any) -> None:
    """Drop the experts of a layer that has just been built."""
    layer.experts = Elsewhere(layer.experts)
    layer.local_expert_indices = []


def keep_experts(model: nn.Module) -> None:
    """Drop all of a model that is about to be wrapped, but the experts."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    kept = [p for layer in layers for p in layer.get_submodule("experts").parameters()]
    if not kept:
        raise ValueError(
            f"{BLOCK}.strategy gives ranks roles, but the model has no MoE layer, so that "
            "expert ranks have nothing to do; give --num-experts, or leave ds_moe_ext out"
        )
    keep_parameters(model, kept)
    modules: Iterable[Any] = model.modules()
    for module in modules:
        is_empty = next(module.parameters(), None) is None
        if is_empty and not any(isinstance(inner, MoELayer) for inner in module.modules()):
            module.sharded_state_dict = _nothing
        elif isinstance(module, LanguageModule):  # its own looks for embeddings
            module.sharded_state_dict = partial(MegatronModule.sharded_state_dict, module)
    model.register_load_state_dict_post_hook(_only_experts)
    for wrapped in (m for name, m in model.named_modules() if set(name.split(".")) == {"module"}):
        wrapped.register_load_state_dict_post_hook(_only_experts)


def _only_experts(model: nn.Module, incompatible: Any) -> None:
    """Of what a checkpoint did not have, only weights that are here are missed."""
    here = {name for name, _ in model.named_parameters()}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in here]


def _nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}


def with_sizes(worlds: Worlds, initialize: Callable[..., Any]) -> Callable[..., Any]:
    """``initialize_model_parallel`` as it is to be called on this rank.

    Attention ranks are replicas of each other. The expert ranks of a ZP group share its experts,
    as expert parallel ranks do.
    """

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(initialize).bind(*args, **kwargs)
        for name, flag in SIZES.items():
            if bound.arguments.get(name) not in (None, 1):
                raise ValueError(
                    f"{BLOCK}.strategy gives ranks roles, but Megatron was given {flag} "
                    f"{bound.arguments[name]}; attention ranks are data parallel only, and the "
                    "strategy's own sizes say which ranks have which experts: leave it out"
                )
        if not worlds.is_attention:
            bound.arguments["expert_model_parallel_size"] = len(worlds.roles.expert_cells)
        return initialize(*bound.args, **bound.kwargs)

    return initialize_model_parallel
