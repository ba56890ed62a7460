# SPDX-License-Identifier: Apache-2.0
"""Norms, and rows of zeros behind each GEMM's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.signatures import takes

NORM = (
    "self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, "
    "zero_centered_gamma=False, hidden_size=None, **kwargs"
)


class RMSNorm(nn.Module):
    @takes(NORM)
    def __init__(self, asked: Any) -> None:
        super().__init__()
        vars(self).update({key: value for key, value in vars(asked).items() if key != "kwargs"})
        made = {"dtype": asked.params_dtype, **asked.kwargs}
        size = asked.normalized_shape or asked.hidden_size
        self.weight = nn.Parameter(torch.full((size,), 1.0 - asked.zero_centered_gamma, **made))
        self.bias = nn.Parameter(torch.zeros(size, **made)) if type(self) is LayerNorm else None
        for param in self.parameters():
            param.sequence_parallel = asked.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor) -> Tensor:
        return normalize(inp, self.weight + self.zero_centered_gamma, self.bias, self.eps)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None: ...


class LayerNorm(RMSNorm):
    """Not an RMSNorm there."""


def normalize(rows: Tensor, scale: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    if shift is None:
        return nn.functional.rms_norm(rows, (rows.shape[-1],), scale, eps)
    return nn.functional.layer_norm(rows, (rows.shape[-1],), scale, shift, eps)


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits: list[int]) -> list[int]:
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        if self.align_size is None:
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            self.align_size = 32 if recipe.mxfp8() else 64 if recipe.nvfp4() else 16
        return [-(-m // self.align_size) * self.align_size for m in m_splits]

    def forward(self, inp: Tensor, m_splits: list[int]) -> Any:
        padded, parts = self._padded(m_splits), torch.split(inp, m_splits)
        zeros = [inp.new_zeros(size - len(p), *p.shape[1:]) for size, p in zip(padded, parts)]
        return torch.cat([part for pair in zip(parts, zeros) for part in pair]), padded


class Fp8Unpadding(Fp8Padding):
    """Not an Fp8Padding there."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Any:
        parts = torch.split(inp, self._padded(m_splits))
        return torch.cat([part[:size] for part, size in zip(parts, m_splits)])
