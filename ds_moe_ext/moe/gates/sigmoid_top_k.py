# SPDX-License-Identifier: Apache-2.0
"""Sigmoid top-k: each expert's score stands for itself; they need not sum to one.

Shape letters: T tokens, K choices, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, Gate, balance_loss, z_loss


@dataclass(frozen=True, kw_only=True)
class SigmoidTopK(Gate):
    """Top-k of the logits, each kept one scored by its sigmoid (BASE layers, StableMoE; FSMoE,
    section 3.1).

    Of the load-balance loss, the probabilities are a token's sigmoids over their sum, as in
    DeepSeek-V3.
    """

    def choose(self, logit_TE: Tensor) -> Choice:
        logit_TK, expert_TK = logit_TE.topk(self.num_choices, dim=-1)
        # Through logarithms: all sigmoids of a token may be zero in float32.
        probability_TE = torch.nn.functional.logsigmoid(logit_TE).softmax(dim=-1)
        losses = torch.stack((balance_loss(probability_TE, expert_TK), z_loss(logit_TE)))
        return Choice(expert_TK, logit_TK.sigmoid(), losses)
