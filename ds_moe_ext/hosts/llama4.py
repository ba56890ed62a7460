# SPDX-License-Identifier: Apache-2.0
"""Llama 4's experts: its block weighs rows before they compute, and gives each of them all rows.

Rows of experts that a token did not choose are zeros there, as their scores are. A hook of the
router leaves the scores of those chosen, so that the same block makes rows of these alone.

Shape letters: T tokens, E experts, K choices of a token, D width, R = K * T rows, choices first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, class_of, found_experts
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, RoutedOf
from ds_moe_ext.moe.sharding import Shard


def is_block(module: nn.Module) -> bool:
    """Whether it is Llama 4's MoE block, which has a router and experts."""
    return class_of(module).__name__ == "Llama4TextMoe"


def found(model: nn.Module, block: nn.Module, name: str, described: ExpertsDescription) -> Found:
    """The layer of such a block, whose experts have this name."""
    router, experts = block.get_submodule("router"), block.get_submodule("experts")
    whole = found_experts(model, name, experts, described)
    top_k: Any = block.top_k

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted, chosen = whole.adopt(held, shard, routed_of), _Chosen(top_k)
        router.register_forward_hook(chosen.keep)
        block.get_submodule("experts").register_forward_pre_hook(chosen.add_to)
        return adopted

    return replace(whole, adopt=adopt)


class _Chosen:
    """What a block's router chose, until its experts ask.

    Args:
        top_k: choices ``K`` of a token.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._ids_R1: Tensor | None = None

    def keep(self, router: nn.Module, given: Any, made: tuple[Tensor, Tensor]) -> Any:
        """Scores ``[T, K]`` in place of ``[T, E]``, of which the others are zeros."""
        scores_TE, logits_TE = made
        scores_TK, ids_TK = scores_TE.topk(self._top_k, dim=1)
        self._ids_R1 = ids_TK.t().reshape(-1, 1)
        return scores_TK, logits_TE

    def add_to(self, experts: nn.Module, given: tuple[Tensor]) -> tuple[Tensor, ...]:
        """Rows ``[R, D]`` with the expert of each, and scores of one, for they are weighed."""
        (rows_RD,), ids_R1 = given, self._ids_R1
        assert ids_R1 is not None, "the router runs before the experts"
        self._ids_R1 = None
        return rows_RD, ids_R1, rows_RD.new_ones(ids_R1.shape)
