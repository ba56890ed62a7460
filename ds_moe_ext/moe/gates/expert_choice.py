# SPDX-License-Identifier: Apache-2.0
"""Expert choice: experts choose tokens, each as many, so that the load is even by construction.

Shape letters: T tokens, K choices, E experts, R rows that each expert takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, Gate, capacity_of, z_loss


@dataclass(frozen=True, kw_only=True)
class ExpertChoice(Gate):
    """Each expert keeps its best tokens, scored by softmax over those kept (FSMoE, section 3.1;
    the idea is Zhou et al. 2022's, who take the softmax over experts).

    A token may have any number of experts, or none; ``top_k`` is how many it has on average.
    Experts choose among the tokens of one call, that is of one rank. The layer needs
    ``LayerOptions(gate_may_drop=True)``. Not for causal models: whether an expert keeps a token
    depends on later tokens, which are not there when text is generated.

    Attributes:
        capacity_factor: scales the average.

    Raises:
        ValueError: no expert could take a row.
    """

    capacity_factor: float = 1.0
    looks_ahead: ClassVar[bool] = True
    may_drop: ClassVar[bool] = True
    is_even: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor {self.capacity_factor} leaves experts no rows; give a factor "
                "above 0"
            )

    def choose(self, logit_TE: Tensor) -> Choice:
        """``K`` is the most experts that any token has, at least 1; the host waits for the device
        to know it. The load-balance loss is a constant: there is nothing to balance."""
        num_tokens, num_experts = logit_TE.shape
        rows = capacity_of(num_tokens * self.num_choices, num_experts, self.capacity_factor)
        kept_ER, token_ER = logit_TE.T.topk(min(rows, num_tokens), dim=-1)
        score_TE = torch.zeros_like(logit_TE).scatter(0, token_ER.T, kept_ER.softmax(dim=-1).T)
        is_kept_TE = torch.zeros_like(logit_TE, dtype=torch.bool).scatter_(0, token_ER.T, True)
        most = int(is_kept_TE.sum(dim=-1).max()) if num_tokens else 1
        by_score_TE = score_TE.where(is_kept_TE, -1).argsort(dim=-1, descending=True, stable=True)
        expert_TK = by_score_TE[:, :most]
        losses = torch.stack((logit_TE.new_full((), min(num_tokens, 1)), z_loss(logit_TE)))
        return Choice(
            expert_TK.where(is_kept_TE.gather(1, expert_TK), -1),
            score_TE.gather(1, expert_TK),
            losses,
        )
