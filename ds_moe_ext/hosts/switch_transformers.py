# SPDX-License-Identifier: Apache-2.0
"""Switch Transformers' experts: a module each, and one choice a token, which may be dropped.

The block tells a token's expert by a row of zeros and a one; of zeros alone where the expert is
over its capacity.

Shape letters: T tokens, K choices of a token (one), E experts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, class_of, found_experts
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, OneEach, RoutedOf
from ds_moe_ext.moe.feed_forward import FeedForwardExperts
from ds_moe_ext.moe.sharding import Shard

NAMES = ("wi", "wo")


def is_experts(module: nn.Module) -> bool:
    """Whether it is Switch Transformers', whose experts are of their own class."""
    if class_of(module).__name__ != "SwitchTransformersExperts":
        return False
    kinds = {type(expert).__name__ for expert in module.children()}
    return kinds == {"SwitchTransformersDenseActDense"}


def found(model: nn.Module, name: str, module: nn.Module) -> Found:
    """The layer of such experts.

    Raises:
        ValueError: their experts have other weights, or are trained in part.
    """
    experts: Any = module
    _check_alike(name, module)
    numbers = range(experts.num_experts)
    first: Any = experts["expert_0"]
    described = ExpertsDescription(
        num_experts=experts.num_experts,
        weight_names=NAMES,
        function=FeedForwardExperts(_Between(first.act, first.dropout)),
        kept_as=tuple(
            OneEach(tuple(f"expert_{number}.{each}.weight" for number in numbers)) for each in NAMES
        ),
        within=(first.dropout,),
    )
    whole = found_experts(model, name, module, described)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted = whole.adopt(held, shard, routed_of)
        hosted: Any = adopted.hosted
        hosted.register_forward_pre_hook(_as_ids)
        return adopted

    return replace(whole, adopt=adopt, may_drop=True)


def _check_alike(name: str, module: nn.Module) -> None:
    told = [
        {key: (tuple(p.shape), p.dtype, p.requires_grad) for key, p in each.named_parameters()}
        for each in module.children()
    ]
    wanted = {f"{each}.weight" for each in NAMES}
    if any(each.keys() != wanted or each != told[0] for each in told):
        raise ValueError(
            f"{name} has experts of Switch Transformers that are not alike: each needs wi.weight "
            "and wo.weight and no more, of one shape and type, all trained or all frozen (adapters "
            "of experts are not supported); or leave the layer out with "
            "ds_moe_ext.moe_layer_pattern"
        )


@dataclass(frozen=True, eq=False)
class _Between:
    """What stands between the two matrices; modules, so that dropout is on in training only."""

    activation: nn.Module
    dropout: nn.Module

    def __call__(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.dropout(self.activation(hidden))
        return made


def ids_of(chosen_TKE: Tensor) -> Tensor:
    """Expert ids ``[T, K]``, -1 where a token is dropped."""
    best_TK, ids_TK = chosen_TKE.max(dim=-1)
    return torch.where(best_TK > 0, ids_TK, -1)


def _as_ids(experts: nn.Module, given: tuple[Tensor, ...]) -> Any:
    hidden_TD, chosen_TKE, score_TK = given
    return hidden_TD, ids_of(chosen_TKE), score_TK
