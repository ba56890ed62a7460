# SPDX-License-Identifier: Apache-2.0
"""What a router of Megatron-core's chose, in the form in which our layers are told: experts and
scores ``[T, K]`` from its map and probabilities ``[T, E]``.

Shape letters: T tokens, K choices a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_moe_ext.strategies.settings import BLOCK

STOCK = "megatron.core."


@dataclass(frozen=True, eq=False)
class Choices:
    """How the choices of one layer are read.

    Attributes:
        name: of the layer.
        config: that its router goes by. It is read in each pass, for Megatron changes capacities
            and padding around an evaluation.
        is_own: the router is not Megatron's, and may choose fewer or more than it was asked to.
        may_drop: the layer's program takes choices that were dropped.
    """

    name: str
    config: Any
    is_own: bool
    may_drop: bool

    @classmethod
    def of(cls, name: str, layer: Any) -> Choices:
        """Of a ``MoELayer``, which may drop choices where it was built to, or by its own router."""
        config = getattr(layer.router, "config", layer.config)
        is_own = has_own_routing(layer.router)
        return cls(name, config, is_own, is_own or config.moe_expert_capacity_factor is not None)

    def __call__(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and scores; -1 where a choice was dropped.

        The host does not wait for the device, but where the router is the user's own: nothing else
        says that it chose more than there is room for.

        Raises:
            ValueError: choices would be dropped, by the router or here, that must not be.
        """
        config, top_k = self.config, self.config.moe_router_topk
        self._check_capacity(routing_map.shape[1])
        if self.is_own:
            self._check_number(routing_map)
        if config.moe_pad_expert_input_to_capacity:
            routing_map = routing_map & (probs != 0)  # without the rows that only fill up
        expert_TK = routing_map.byte().topk(top_k, dim=1).indices
        score_TK = probs.gather(1, expert_TK)
        if self.is_own or (self.may_drop and config.moe_expert_capacity_factor is not None):
            expert_TK = expert_TK.masked_fill(~routing_map.gather(1, expert_TK), -1)
        return expert_TK, score_TK

    def _check_capacity(self, num_experts: int) -> None:
        factor, top_k = self.config.moe_expert_capacity_factor, self.config.moe_router_topk
        if self.may_drop or factor is None or factor >= num_experts / top_k:
            return
        raise ValueError(
            f"{BLOCK}: the capacity factor of {self.name} is {factor} in this pass, but was None "
            "when its optimizer was made, and its program was built for a router that drops "
            f"nothing; give --moe-expert-capacity-factor from the start, or here at least "
            f"{num_experts / top_k:g} ({num_experts} experts, {top_k} choices), which drops nothing"
        )

    def _check_number(self, routing_map: Tensor) -> None:
        most = int(routing_map.sum(1).max()) if len(routing_map) else 0
        if most > self.config.moe_router_topk:
            raise ValueError(
                f"{BLOCK}: the router of {self.name}, which is not Megatron's, chose {most} "
                "experts for a token, but the layer takes at most --moe-router-topk "
                f"{self.config.moe_router_topk} of them; give --moe-router-topk {most} or more (a "
                "token may have fewer choices)"
            )


def has_own_routing(router: Any) -> bool:
    """Whether code other than Megatron's chooses: by a class below its router, or instead."""
    methods = (getattr(router, name, None) for name in ("forward", "routing"))
    return not all((getattr(m, "__module__", None) or "").startswith(STOCK) for m in methods)
