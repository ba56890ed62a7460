# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of Hugging Face's MoE families."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH, ROWS = 64, 12, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_AUX_LOSS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.05}


_LATENT: dict[str, Any] = {
    **{**_COMMON, "num_key_value_heads": 4},
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        {**_COMMON, **_AUX_LOSS, "intermediate_size": 24, "num_local_experts": 8},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **_COMMON,
            **_AUX_LOSS,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 8,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            **_AUX_LOSS,
            "head_dim": 8,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        {
            **_COMMON,
            **_AUX_LOSS,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 8,
        },
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "olmoe": (
        "OlmoeForCausalLM",
        {**_COMMON, **_AUX_LOSS, "intermediate_size": 24, "num_experts": 8},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_COMMON,
            **_AUX_LOSS,
            "head_dim": 8,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "sliding_window": 8,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            **_COMMON,
            "head_dim": 8,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 8,
            "attention_chunk_size": 8,
        },
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": VOCABULARY,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "hidden_size": 32,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "moe_jitter_eps": None,
                "moe_loss_weight": 0.05,
            },
            "output_router_logits": True,
            "use_cache": False,
            "attn_implementation": "eager",
        },
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "num_experts_per_tok": 3,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "use_cache": False,
            "attn_implementation": "eager",
        },
    ),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_decoder_layers": 2,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 8,
            "expert_capacity": 3,  # so that some tokens are dropped
            "router_jitter_noise": 0.0,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "use_cache": False,
        },
    ),
}
"""The class of each, and its configuration."""


def made(family: str) -> nn.Module:
    """With the weights that its own initialiser draws."""
    import transformers

    name, keys = _FAMILIES[family]
    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**keys))
    return model


OTHERS = ("dbrx", "longcat_flash", "switch_transformers")
"""Families that keep or call their experts otherwise than all others do."""
NAMES = tuple(name for name in _FAMILIES if name not in OTHERS)
MOE_LAYERS = {name: 1 if name.startswith("deepseek") else 2 for name in NAMES}
"""How many of a family's two layers here are MoE layers."""


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The stock model; the same seed gives every rank the same weights."""
    torch.manual_seed(seed)
    model = made(family)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)
        elif name.endswith(
            (
                ".gate.weight",
                ".router.weight",
                ".router.bias",
                "classifier.weight",
                "router.layer.weight",
            )
        ):
            nn.init.normal_(parameter, std=0.5)
    return model.to(dtype)


def tokens_of(rank: int) -> torch.Tensor:
    """The batch of one rank, int64 ``[ROWS, LENGTH]``."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
