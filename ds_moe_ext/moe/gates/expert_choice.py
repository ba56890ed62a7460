"""Expert choice: experts choose tokens, each as many, so that the load is even by construction.

Shape letters: T tokens, K choices, E experts, D model width, R rows that each expert takes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, capacity_of, logits, z_loss


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Each expert keeps its best tokens, scored by softmax over those kept (FSMoE, section 3.1;
    the idea is Zhou et al. 2022's, who take the softmax over experts).

    A token may have any number of experts, or none. Experts choose among the tokens of one call,
    that is of one rank. The layer needs ``LayerOptions(gate_may_drop=True)``.

    Attributes:
        top_k: experts that a token has on average.
        is_causal: the model predicts what comes next. Then it warns: whether an expert keeps a
            token depends on later tokens, which are not there when text is generated.
        capacity_factor: scales that average.

    Raises:
        ValueError: no expert could take a row.
    """

    top_k: int
    is_causal: bool
    capacity_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.capacity_factor <= 0:
            raise ValueError(
                f"top_k {self.top_k} and capacity_factor {self.capacity_factor} leave experts no "
                "rows; give a top_k of 1 or more and a factor above 0"
            )
        if self.is_causal:
            warnings.warn(
                "expert choice looks at future tokens: a causal model's training loss is then too "
                "good, and generation routes otherwise than training; choose another gate",
                stacklevel=3,
            )

    def __call__(self, x_TD: Tensor, weights: tuple[Tensor, ...]) -> Choice:
        """Choose by ``weights[0]`` ``[E, D]``.

        ``K`` is the most experts that any token has, at least 1; the host waits for the device to
        know it. The load-balance loss is a constant: there is nothing to balance.
        """
        logit_TE = logits(x_TD, weights[0])
        num_tokens, num_experts = logit_TE.shape
        rows = capacity_of(num_tokens * self.top_k, num_experts, self.capacity_factor)
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
