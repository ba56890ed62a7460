# SPDX-License-Identifier: Apache-2.0
"""LongCat-Flash's experts: the last of them are the identity, and have no weights.

A token stays where it is for these: it is added by its score, and travels to the others alone.

Shape letters: T tokens, K choices of a token, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, class_of, found_experts
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, InOne, RoutedOf
from ds_moe_ext.moe.feed_forward import FeedForwardExperts
from ds_moe_ext.moe.sharding import Shard


def is_experts(module: nn.Module) -> bool:
    """Whether it is LongCat-Flash's, with an expert that is not the identity."""
    is_one = class_of(module).__name__ == "LongcatFlashExperts"
    return is_one and module._parameters.get("down_proj") is not None


def found(
    model: nn.Module, name: str, module: nn.Module, activation: Callable[[Tensor], Tensor]
) -> Found:
    """The layer of such experts, ``activation`` of which joins gate and up."""
    experts: Any = module
    number, idle = experts.num_routed_experts, experts.zero_expert_num
    described = ExpertsDescription(
        num_experts=number,
        weight_names=("gate_up_proj", "down_proj"),
        function=FeedForwardExperts(activation),
        kept_as=(InOne("gate_up_proj", number, num_unused=idle), InOne("down_proj", number)),
    )
    whole = found_experts(model, name, module, described)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted = whole.adopt(held, shard, routed_of)
        hosted: Any = adopted.hosted
        hosted.register_forward_pre_hook(partial(_keep_at_home, number))
        hosted.register_forward_hook(_add_own)
        return adopted

    return replace(whole, adopt=adopt, may_drop=True)


def _keep_at_home(number: int, experts: nn.Module, given: tuple[Tensor, ...]) -> Any:
    """Choices of the identity are marked as dropped."""
    hidden_TD, ids_TK, score_TK = given
    return hidden_TD, ids_TK.masked_fill(ids_TK >= number, -1), score_TK


def _add_own(experts: nn.Module, given: tuple[Tensor, ...], made_TD: Tensor) -> Tensor:
    hidden_TD, ids_TK, score_TK = given
    score_T1 = score_TK.masked_fill(ids_TK >= 0, 0).sum(dim=-1, keepdim=True)
    own_TD: Tensor = (hidden_TD * score_T1).to(made_TD.dtype)
    return made_TD + own_TD
