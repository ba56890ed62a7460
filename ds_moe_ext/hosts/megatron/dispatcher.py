"""Megatron-core's dispatcher of tokens, in six phases: ours hands everything on to the experts,
whose program has all of them.

Megatron calls the phases in this order, in versions 0.13 and up, between the router and what it
adds to the output. So routers, losses, shared experts, latent projections and recomputation stay
Megatron's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Dispatcher:
    """In the place of a ``MoETokenDispatcher``.

    Args:
        shared_experts: that the replaced one ran beside its phases; None where it ran none.
    """

    def __init__(self, shared_experts: Any | None) -> None:
        self.shared_experts = shared_experts

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep what later phases are not given."""
        self._shape, self._routing_map = hidden.shape, routing_map
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden)
        return hidden.reshape(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing travels yet."""
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts are called with: the map stands where Megatron counts rows."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden)
        return hidden, self._routing_map, probs

    def combine_preprocess(self, output: Tensor) -> Tensor:
        """Everything is back already."""
        return output

    def token_combine(self, output: Tensor, *options: Any, **named: Any) -> Tensor:
        """Everything is back already."""
        return output

    def combine_postprocess(self, output: Tensor) -> Tensor:
        """In the shape that came in, with what shared experts add."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        output = output.view(self._shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
