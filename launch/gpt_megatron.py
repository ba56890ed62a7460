# SPDX-License-Identifier: Apache-2.0
"""The Megatron-core model that a file of configs/models/ describes.

The files are those of DeepSpeed's script: the same shapes, built of Megatron's own modules.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from console import read_json
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from text import VOCABULARY_SIZE
from torch.nn import functional as F

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class Architecture:
    """What a model file says, in Megatron's words.

    Attributes:
        transformer: fields of TransformerConfig.
        embeddings: arguments of GPTModel that are about positions and about tied embeddings.
        max_positions: the longest window.
    """

    transformer: Mapping[str, Any]
    embeddings: Mapping[str, Any]
    max_positions: int


def read_architecture(arguments: Namespace) -> Architecture:
    """Read the file that `--model` names.

    Raises:
        ValueError: it is not there, or no model of Megatron's can be made of it.
    """
    path: Path = arguments.model
    file = read_json(path, "--model")
    family, config = file.get("family"), file.get("config", {})
    if family not in FAMILIES:
        raise ValueError(
            f"--model {path}: family {family!r} is not one of {', '.join(FAMILIES)}, which "
            "this script builds"
        )
    if config.get("vocab_size") != VOCABULARY_SIZE:
        raise ValueError(
            f"--model {path}: config.vocab_size {config.get('vocab_size')} is not the number of "
            f"values of a byte; set it to {VOCABULARY_SIZE}"
        )
    try:
        architecture = FAMILIES[family](config, arguments.num_layers)
    except KeyError as error:
        raise ValueError(f"--model {path}: config has no key {error}; add it") from error
    if arguments.seq_length > architecture.max_positions:
        raise ValueError(
            f"--seq-length {arguments.seq_length} is more than the {architecture.max_positions} "
            f"positions of {path}; lower it"
        )
    return architecture


def _gpt_moe(config: Mapping[str, Any], num_layers: int | None) -> Architecture:
    """GPT-2's layers; every n-th feed-forward is a mixture of experts."""
    moe, num_layers = config["moe"], num_layers or config["num_layers"]
    transformer = {
        "num_layers": num_layers,
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_heads"],
        "ffn_hidden_size": config["ffn_hidden_size"],
        "moe_ffn_hidden_size": config["ffn_hidden_size"],
        "num_moe_experts": moe["num_experts"],
        "moe_router_topk": moe["k"],
        "moe_router_pre_softmax": moe["k"] == 1,
        "moe_layer_freq": [int((i + 1) % config["moe_every"] == 0) for i in range(num_layers)],
        "moe_aux_loss_coeff": config["aux_loss_coef"],
        "moe_expert_capacity_factor": moe["capacity_factor"] if moe["drop_tokens"] else None,
    }
    embeddings = {
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config["tie_embeddings"],
    }
    return Architecture(transformer, embeddings, config["sequence_length"])


def _mixtral(config: Mapping[str, Any], num_layers: int | None) -> Architecture:
    """Hugging Face's Mixtral: SwiGLU experts in every layer, RMSNorm, rotary positions."""
    transformer = {
        "num_layers": num_layers or config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "num_moe_experts": config["num_local_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_aux_loss_coeff": config["router_aux_loss_coef"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-5),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }
    embeddings = {
        "position_embedding_type": "rope",
        "rotary_base": config.get("rope_theta", 1_000_000),
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
    }
    return Architecture(transformer, embeddings, config["max_position_embeddings"])


FAMILIES: dict[str, Callable[[Mapping[str, Any], int | None], Architecture]] = {
    "gpt_moe": _gpt_moe,
    "mixtral": _mixtral,
}


def transformer_config(architecture: Architecture, arguments: Namespace) -> TransformerConfig:
    """Complete the file by the command line: as in Megatron-LM, an argument with the name of a
    field of TransformerConfig is that field."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    fixed = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": HAS_TRANSFORMER_ENGINE,
    }
    return TransformerConfig(**{**architecture.transformer, **fixed, **given})


def build_chunks(config: TransformerConfig, architecture: Architecture) -> list[GPTModel]:
    """Build this rank's part of the model: one chunk, or several under an interleaved pipeline."""
    num_chunks = config.virtual_pipeline_model_parallel_size
    if num_chunks is None:
        return [_chunk(config, architecture, None)]
    return [_chunk(config, architecture, stage) for stage in range(num_chunks)]


def _chunk(config: TransformerConfig, architecture: Architecture, stage: int | None) -> GPTModel:
    place = {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=HAS_TRANSFORMER_ENGINE,
            normalization=config.normalization,
            vp_stage=stage,
        ),
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=stage,
        **architecture.embeddings,
    )
