# SPDX-License-Identifier: Apache-2.0
"""SoftMoE: every slot of an expert takes a mixture of all tokens, every token one of all slots.

Shape letters: B sequences, T tokens, L tokens of a sequence, E experts, S slots of all experts, D
model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, Gate, GateWeight, RunRows, projection, z_loss


@dataclass(frozen=True, kw_only=True)
class SoftMixture(Gate):
    """Slot inputs ``D^T x``, output ``C e(slots)``: of the logits ``x Phi``, ``D`` is the softmax
    over the tokens of a sequence and ``C`` that over all slots (Puigcerver et al. 2024, section 2;
    FSMoE's specification, 1.3).

    The slots are the rows that travel: each goes to its expert with score 1, by any strategy.
    Nothing is chosen, so there is no ``top_k``. Not for causal models.

    Attributes:
        slots_per_expert: of each sequence.
    """

    slots_per_expert: int = 1
    looks_ahead: ClassVar[bool] = True
    is_even: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.top_k is not None:
            raise ValueError(f"top_k is {self.top_k}, but SoftMoE does not choose; leave it out")
        if self.slots_per_expert < 1:
            raise ValueError(f"slots_per_expert is {self.slots_per_expert}; it must be 1 or more")

    def with_top_k(self, top_k: int | None) -> Gate:
        return self

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """``Phi``, ``[S, D]``, expert by expert."""
        return (projection("weight", num_experts * self.slots_per_expert, width),)

    def choose(self, logit_TE: Tensor) -> Choice:
        """Of logits by slot, ``[T, S]``: the expert of each slot, ``[1, S]``, and in the place of
        scores the logits themselves, for ``around`` to make both mixtures from. The load-balance
        loss is a constant: there is nothing to balance."""
        num_tokens, num_slots = logit_TE.shape
        slot_S = torch.arange(num_slots, device=logit_TE.device)
        losses = torch.stack((logit_TE.new_full((), min(num_tokens, 1)), z_loss(logit_TE)))
        return Choice(slot_S[None] // self.slots_per_expert, logit_TE, losses)

    def by_expert(self, logit_TE: Tensor) -> Tensor:
        """Their softmax is the weight of an expert's slots together."""
        return logit_TE.unflatten(-1, (-1, self.slots_per_expert)).logsumexp(dim=-1)

    def around(self, run: RunRows, num_sequences: Callable[[], int]) -> RunRows:
        """Mix before the experts and behind them."""

        def mixed(
            x_TD: Tensor, expert_1S: Tensor, logit_TS: Tensor, weights: tuple[Tensor, ...]
        ) -> Tensor:
            count = num_sequences()
            shape = (count, x_TD.shape[0] // count)
            x_BLD, logit_BLS = x_TD.unflatten(0, shape), logit_TS.unflatten(0, shape)
            slots_BSD = logit_BLS.softmax(dim=1).to(x_TD.dtype).transpose(1, 2) @ x_BLD
            rows_RD = slots_BSD.flatten(0, 1)
            expert_R1 = expert_1S.expand(count, -1).reshape(-1, 1)
            y_RD = run(rows_RD, expert_R1, torch.ones_like(rows_RD[:, :1]).detach(), weights)
            return (logit_BLS.softmax(dim=2).to(x_TD.dtype) @ y_RD.view_as(slots_BSD)).flatten(0, 1)

        return mixed
