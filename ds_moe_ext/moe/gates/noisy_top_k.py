# SPDX-License-Identifier: Apache-2.0
"""Noisy top-k: noise, as large as the token asks for, lets other experts be tried.

Shape letters: T tokens, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, Gate, GateWeight, choose_by_softmax, logits


@dataclass(frozen=True, kw_only=True)
class NoisyTopK(Gate):
    """Top-k of noisy logits, softmax over those kept (Shazeer et al. 2017, eq. 3 to 5; FSMoE's
    "GShard" gate, section 3.1).

    With one choice its score is always 1, and only the losses train the gate.
    """

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """Of the logits and of the noise, ``[E, D]`` each; both start at zero, as Shazeer's."""
        shape = (num_experts, width)
        return tuple(GateWeight(name, shape, torch.nn.init.zeros_) for name in ("weight", "noise"))

    def logits_of(self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool) -> Tensor:
        """Noise is drawn in training only, from torch's default generator, ``T x E`` normal
        numbers a call."""
        weight_ED, noise_ED = weights
        logit_TE = logits(x_TD, weight_ED)
        if not is_training:
            return logit_TE
        deviation_TE = torch.nn.functional.softplus(logits(x_TD, noise_ED))
        return logit_TE + torch.randn_like(logit_TE) * deviation_TE

    def choose(self, logit_TE: Tensor) -> Choice:
        return choose_by_softmax(logit_TE, self.num_choices)
