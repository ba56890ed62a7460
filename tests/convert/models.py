# SPDX-License-Identifier: Apache-2.0
"""Tiny models of Hugging Face with weights that are all drawn, norms too, and folders of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 70  # no multiple of what Megatron pads to

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **_COMMON, num_hidden_layers=2, intermediate_size=24, num_local_experts=4, head_dim=16
        )
    )


def qwen3_moe() -> nn.Module:
    """A dense layer, queries wider than rows, tied embeddings, scores that sum to less than 1."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_COMMON,
            num_hidden_layers=3,
            intermediate_size=40,
            moe_intermediate_size=24,
            num_experts=4,
            head_dim=16,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        )
    )


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}


def drawn(family: str) -> nn.Module:
    """Every weight differs from every other, and has an influence."""
    torch.manual_seed(0)
    model = MODELS[family]()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model.eval()


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """In a folder, as ``from_pretrained`` takes it."""
    model = drawn(family).to(dtype)
    model.save_pretrained(folder)
    return model


def loaded(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, by Hugging Face's own reader; it must miss nothing."""
    from transformers import AutoModelForCausalLM

    model, reported = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(reported[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def edited(**changes: Any) -> Callable[[Path], None]:
    """A folder whose config says something else."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change
