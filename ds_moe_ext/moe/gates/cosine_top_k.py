"""Cosine top-k: the angle between token and expert in a few dimensions, not the token's length.

Shape letters: T tokens, E experts, D model width, P width of the projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from ds_moe_ext.moe.gate import Choice, choose_by_softmax, logits

SHORTEST = 1e-4  # shorter vectors are not stretched to one: their gradients would have no bound


@dataclass(frozen=True, kw_only=True)
class CosineTopK:
    """Top-k of cosines over a learned temperature (X-MoE, Chi et al. 2022; FSMoE, section 3.1; the
    temperature as in Tutel's cosine gate).

    Attributes:
        top_k: choices ``K``.
        renormalize: softmax over those kept; else over all experts, which X-MoE's one choice needs
            for its score to say anything.
        most: the logits are at most so large: cosine x min(1 / temperature, most).
    """

    top_k: int
    renormalize: bool = True
    most: float = 100.0

    def __call__(self, x_TD: Tensor, weights: tuple[Tensor, ...]) -> Choice:
        """Choose by ``weights``: projection ``[P, D]``, expert vectors ``[E, P]``, and the
        logarithm of 1 / temperature ``[1]``."""
        projection_PD, expert_EP, sharpness = weights
        cosine_TE = cosines(logits(x_TD, projection_PD), expert_EP)
        scale = sharpness.to(cosine_TE.dtype).clamp(max=math.log(self.most)).exp()
        return choose_by_softmax(cosine_TE * scale, self.top_k, renormalize=self.renormalize)


def cosines(token_TP: Tensor, expert_EP: Tensor) -> Tensor:
    """Of the angle between each token and each expert, ``[T, E]``; 0 for a vector of zeros."""
    direction_TP = normalize(token_TP, dim=-1, eps=SHORTEST)
    direction_EP = normalize(expert_EP.to(token_TP.dtype), dim=-1, eps=SHORTEST)
    return direction_TP @ direction_EP.T
