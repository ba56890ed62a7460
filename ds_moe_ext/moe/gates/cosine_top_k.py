# SPDX-License-Identifier: Apache-2.0
"""Cosine top-k: the angle between token and expert in a few dimensions, not the token's length.

Shape letters: T tokens, E experts, D model width, P width of the projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.init import constant_, normal_

from ds_moe_ext.moe.gate import Choice, Gate, GateWeight, choose_by_softmax, logits, projection

SHORTEST = 1e-4  # shorter vectors are not stretched to one: their gradients would have no bound


@dataclass(frozen=True, kw_only=True)
class CosineTopK(Gate):
    """Top-k of cosines over a learned temperature (X-MoE, Chi et al. 2022; FSMoE, section 3.1; the
    temperature as in Tutel's cosine gate).

    Attributes:
        renormalize: softmax over those kept; else over all experts, which X-MoE's one choice needs
            for its score to say anything.
        most: the logits are at most so large: cosine x min(1 / temperature, most).
        projection_size: width ``P`` in which angles are taken.
    """

    renormalize: bool = True
    most: float = 100.0
    projection_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most <= 0 or self.projection_size < 1:
            raise ValueError(
                f"most {self.most} and projection_size {self.projection_size} leave no logits; "
                "give a most above 0 and a projection_size of 1 or more"
            )

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """Projection ``[P, D]``, expert vectors ``[E, P]``, and the logarithm of 1 / temperature
        ``[1]``, whose start is Tutel's 0.5."""
        return (
            projection("projection", self.projection_size, width),
            GateWeight(
                "direction", (num_experts, self.projection_size), lambda w: normal_(w, std=0.01)
            ),
            GateWeight("sharpness", (1,), lambda w: constant_(w, math.log(2))),
        )

    def logits_of(self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool) -> Tensor:
        """Cosines over the temperature."""
        projection_PD, expert_EP, sharpness = weights
        cosine_TE = cosines(logits(x_TD, projection_PD), expert_EP)
        return cosine_TE * sharpness.to(cosine_TE.dtype).clamp(max=math.log(self.most)).exp()

    def choose(self, logit_TE: Tensor) -> Choice:
        return choose_by_softmax(logit_TE, self.num_choices, renormalize=self.renormalize)


def cosines(token_TP: Tensor, expert_EP: Tensor) -> Tensor:
    """Of the angle between each token and each expert, ``[T, E]``; 0 for a vector of zeros."""
    direction_TP = normalize(token_TP, dim=-1, eps=SHORTEST)
    direction_EP = normalize(expert_EP.to(token_TP.dtype), dim=-1, eps=SHORTEST)
    return direction_TP @ direction_EP.T
