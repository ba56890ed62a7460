"""Sigmoid top-k: each expert's score stands for itself; they need not sum to one.

Shape letters: T tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, balance_loss, logits, z_loss


@dataclass(frozen=True, kw_only=True)
class SigmoidTopK:
    """Top-k of the logits, each kept one scored by its sigmoid (BASE layers, StableMoE; FSMoE,
    section 3.1).

    Of the load-balance loss, the probabilities are a token's sigmoids over their sum, as in
    DeepSeek-V3.

    Attributes:
        top_k: choices ``K``.
    """

    top_k: int

    def __call__(self, x_TD: Tensor, weights: tuple[Tensor, ...]) -> Choice:
        """Choose by ``weights[0]`` ``[E, D]``."""
        logit_TE = logits(x_TD, weights[0])
        logit_TK, expert_TK = logit_TE.topk(self.top_k, dim=-1)
        # Through logarithms: all sigmoids of a token may be zero in float32.
        probability_TE = torch.nn.functional.logsigmoid(logit_TE).softmax(dim=-1)
        losses = torch.stack((balance_loss(probability_TE, expert_TK), z_loss(logit_TE)))
        return Choice(expert_TK, logit_TK.sigmoid(), losses)
