"""The dense reference: every expert on every token, plain autograd, no communication.

Shape letters: T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_experts(
    x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor
) -> Tensor:
    """SwiGLU experts on all tokens, weighed; ``expert_TK`` is -1 where a choice was dropped."""
    gate_up = torch.einsum("td,efd->tef", x_TD, up_EFD)
    gate, up = gate_up.chunk(2, dim=-1)
    y_TED = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, down_EDF)
    index = expert_TK.clamp(min=0)[..., None].expand(-1, -1, x_TD.shape[1])
    y_TKD = y_TED.gather(1, index) * (expert_TK >= 0)[..., None]
    return (y_TKD * score_TK[..., None]).sum(dim=1)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest reference value."""
    if reference.numel() == 0:
        assert ours.shape == reference.shape
        return 0.0
    ours, reference = ours.detach(), reference.detach()
    scale = reference.abs().max().clamp(min=1e-30)
    return float((ours - reference).abs().max() / scale)
