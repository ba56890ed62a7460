"""Noisy top-k: noise, as large as the token asks for, lets other experts be tried.

Shape letters: T tokens, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_moe_ext.moe.gate import Choice, choose_by_softmax, logits


@dataclass(frozen=True, kw_only=True)
class NoisyTopK:
    """Top-k of noisy logits, softmax over those kept (Shazeer et al. 2017, eq. 3 to 5; FSMoE's
    "GShard" gate, section 3.1).

    Attributes:
        top_k: choices ``K``. With one, its score is always 1, and only the losses train the gate.
        is_training: asked at each call; noise is added in training only. Give the module's mode:
            ``lambda: model.training``.
    """

    top_k: int
    is_training: Callable[[], bool]

    def __call__(self, x_TD: Tensor, weights: tuple[Tensor, ...]) -> Choice:
        """Choose by ``weights``: of the logits, and of the noise, ``[E, D]`` each.

        Noise is drawn from torch's default generator, ``T x E`` normal numbers a call.
        """
        weight_ED, noise_ED = weights
        logit_TE = logits(x_TD, weight_ED)
        if self.is_training():
            deviation_TE = torch.nn.functional.softplus(logits(x_TD, noise_ED))
            logit_TE = logit_TE + torch.randn_like(logit_TE) * deviation_TE
        return choose_by_softmax(logit_TE, self.top_k)
