# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention as two products and a softmax."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.signatures import takes


class DotProductAttention(TransformerEngineBaseModule):
    @takes(
        "self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, "
        "qkv_format='sbhd', attn_mask_type='causal', window_size=None, sequence_parallel=False, "
        "tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, "
        "attention_type='self', cp_group=None, cp_global_ranks=None, cp_stream=None, "
        "cp_comm_type='p2p', softmax_scale=None, softmax_type='vanilla', return_max_logit=False"
    )
    def __init__(self, asked: Any) -> None:
        super().__init__()
        if asked.softmax_type != "vanilla" or (asked.cp_group and asked.cp_group.size() > 1):
            raise NotImplementedError("no other softmax and no context parallelism here")
        vars(self).update(vars(asked))

    @takes(
        "self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, "
        "cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, "
        "cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, "
        "window_size=None, checkpoint_core_attention=False, core_attention_bias_type='no_bias', "
        "core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None, "
        "pad_between_seqs=None, fp8_output=False, num_splits=1"
    )
    def forward(self, asked: Any) -> Any:
        if (asked.qkv_format or self.qkv_format) != "sbhd":
            raise NotImplementedError("sequence, batch, heads: no other order here")
        query, key, value = (
            layer.permute(1, 2, 0, 3)
            for layer in (asked.query_layer, asked.key_layer, asked.value_layer)
        )
        repeats = query.shape[1] // key.shape[1]
        key, value = (layer.repeat_interleave(repeats, dim=1) for layer in (key, value))
        scores = (query @ key.transpose(2, 3)) * (self.softmax_scale or query.shape[-1] ** -0.5)
        scores = scores if scores.dtype.itemsize > 2 else scores.float()
        if asked.core_attention_bias is not None:
            scores = scores + asked.core_attention_bias
        scores = scores.masked_fill(self._hidden(scores, asked), -10000.0)
        weights = scores.softmax(-1)
        tracker = self.get_rng_state_tracker
        with nullcontext() if tracker is None else tracker().fork():
            weights = nn.functional.dropout(weights, self.attention_dropout, self.training)
        found = (weights.to(value.dtype) @ value).permute(2, 0, 1, 3).flatten(2)
        return (found, scores.detach().amax((0, 2, 3))) if self.return_max_logit else found

    def _hidden(self, scores: Tensor, asked: Any) -> Tensor:
        """Where a query does not look: bool, of the last two dims of scores or of all four."""
        kind = asked.attn_mask_type or self.attn_mask_type
        queries, keys = scores.shape[-2:]
        shift = keys - queries if "bottom_right" in kind else 0
        ahead = torch.arange(keys) - torch.arange(queries)[:, None] - shift
        left, right = asked.window_size or self.window_size or (-1, -1)
        right = 0 if "causal" in kind else right
        hidden = (ahead > (right if right >= 0 else keys)) | (
            ahead < (-left if left >= 0 else -queries)
        )
        is_asked = "padding" in kind or kind == "arbitrary"
        return hidden | asked.attention_mask if is_asked else hidden
