# SPDX-License-Identifier: Apache-2.0
"""Fused RoPE: Megatron's own, not fused."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", interleaved: bool = False, **named: Any
) -> Tensor:
    from megatron.core.models.common.embeddings import rope_utils

    if tensor_format != "sbhd":
        raise NotImplementedError("sequence, batch, heads: no other order here")
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)
