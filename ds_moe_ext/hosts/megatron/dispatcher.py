# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's dispatcher of tokens, in six phases: ours hands everything on to the experts,
whose program has all of them.

Megatron calls the phases in this order, in versions 0.13 and up, between the router and what it
adds to the output. So routers, losses, shared experts, latent projections and recomputation stay
Megatron's.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class _Pass(threading.local):
    """What a pass keeps between phases. Under zebra parallelism several are under way at once, each
    in a thread of its own."""

    shape: torch.Size
    routing_map: Tensor


class Dispatcher:
    """In the place of a ``MoETokenDispatcher``.

    Args:
        shared_experts: that the replaced one ran beside its phases; None where it ran none.
    """

    def __init__(self, shared_experts: Any | None) -> None:
        self.shared_experts = shared_experts
        self._pass = _Pass()

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep what later phases are not given."""
        self._pass.shape, self._pass.routing_map = hidden.shape, routing_map
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
        return hidden, self._pass.routing_map, probs

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Asked for by versions 0.19 and up: none, what experts give is nobody's buffer."""
        return None, None

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
        output = output.view(self._pass.shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
