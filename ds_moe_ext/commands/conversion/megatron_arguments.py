# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments of a model: those that a checkpoint keeps, and flags of pretrain_gpt.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from ds_moe_ext.commands.conversion.model import Attention, Experts, Family, Model

LEARNED, ROTARY = "learned_absolute", "rope"
LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"


def arguments_of(model: Model) -> Namespace:
    """What ``common.pt`` has as ``args``: enough for ``--use-checkpoint-args``."""
    attention, experts, is_gpt = model.attention, model.experts, model.is_gpt
    return Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.dense_ffn_size or experts.ffn_size,
        seq_length=model.max_positions,
        max_position_embeddings=model.max_positions,
        num_attention_heads=attention.num_heads,
        group_query_attention=attention.num_groups != attention.num_heads,
        num_query_groups=attention.num_groups,
        kv_channels=attention.head_size,
        qk_layernorm=attention.has_norms,
        position_embedding_type=LEARNED if is_gpt else ROTARY,
        add_position_embedding=is_gpt,
        use_rotary_position_embeddings=not is_gpt,
        rotary_base=_rotary_base(model),
        rotary_percent=1.0,
        rotary_interleaved=False,
        add_bias_linear=is_gpt,
        add_qkv_bias=False,
        swiglu=not is_gpt,
        squared_relu=False,
        normalization=LAYER_NORM if is_gpt else RMS_NORM,
        norm_epsilon=model.norm_epsilon,
        apply_layernorm_1p=False,
        untie_embeddings_and_output_weights=not model.is_tied,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        num_experts=experts.number,
        moe_layer_freq=_frequency(model),
        moe_ffn_hidden_size=experts.ffn_size,
        moe_router_topk=experts.top_k,
        moe_router_pre_softmax=not experts.normalizes,
        moe_router_score_function="softmax",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )


def _rotary_base(model: Model) -> int:
    """Megatron takes whole numbers only."""
    theta = model.attention.rope_theta or 10000.0  # its default, where it counts for nothing
    if not theta.is_integer():
        raise ValueError(f"rope_theta is {theta}; Megatron's --rotary-base is a whole number")
    return int(theta)


def _frequency(model: Model) -> int | list[int]:
    """One for all layers, so that Megatron stacks them; else 1 for each with experts."""
    if model.is_uniform:
        return 1
    return [int(layer in model.moe_layers) for layer in range(model.num_layers)]


def flags_of(model: Model) -> Iterator[str]:
    """Of pretrain_gpt.py, for a model that takes the weights."""
    attention, experts = model.attention, model.experts
    yield f"--num-layers {model.num_layers} --hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {model.dense_ffn_size or experts.ffn_size}"
    yield f"--num-attention-heads {attention.num_heads} --kv-channels {attention.head_size}"
    if attention.num_groups != attention.num_heads:
        yield f"--group-query-attention --num-query-groups {attention.num_groups}"
    if attention.has_norms:
        yield "--qk-layernorm"
    yield f"--max-position-embeddings {model.max_positions} --norm-epsilon {model.norm_epsilon}"
    if model.is_gpt:
        yield f"--position-embedding-type {LEARNED} --no-bias-gelu-fusion"
    else:
        yield f"--position-embedding-type {ROTARY} --rotary-base {_rotary_base(model)}"
        yield f"--normalization {RMS_NORM} --swiglu --disable-bias-linear"
    if not model.is_tied:
        yield "--untie-embeddings-and-output-weights"
    yield f"--num-experts {experts.number} --moe-ffn-hidden-size {experts.ffn_size}"
    yield f"--moe-router-topk {experts.top_k}"
    if not experts.normalizes:
        yield "--moe-router-pre-softmax"
    frequency = _frequency(model)
    if isinstance(frequency, list):
        yield f"--moe-layer-freq {str(frequency).replace(' ', '')}"


_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("multi_latent_attention", (False, None)),
    ("moe_shared_expert_intermediate_size", (None,)),
    ("moe_router_score_function", ("softmax", None)),
    ("moe_router_enable_expert_bias", (False, None)),
    ("moe_router_topk_scaling_factor", (None,)),
    ("moe_router_num_groups", (None,)),
    ("moe_latent_size", (None,)),
    ("mtp_num_layers", (None,)),
    ("rotary_percent", (1.0, None)),
    ("rotary_interleaved", (False, None)),
    ("rotary_seq_len_interpolation_factor", (None,)),
    ("use_rope_scaling", (False, None)),
    ("window_size", (None,)),
    ("squared_relu", (False, None)),
    ("apply_layernorm_1p", (False, None)),
    ("softmax_type", ("vanilla", None)),
    ("attention_output_gate", (False, None)),
    ("moe_expert_capacity_factor", (None,)),
)
"""Arguments of which no other value has a counterpart in a family that is converted."""


def model_of(arguments: Namespace) -> Model:
    """The model that a checkpoint's arguments describe.

    Raises:
        ValueError: it is of no family that is converted.
    """
    given = vars(arguments)
    for name, values in _ONLY:
        if given.get(name) not in values:
            raise ValueError(
                f"the checkpoint's {name} is {given[name]!r}, of which the models that are "
                f"converted have only {values[0]!r}"
            )
    family = _family(given)
    hidden, heads = _needed(given, "hidden_size"), _needed(given, "num_attention_heads")
    groups = given.get("num_query_groups") if given.get("group_query_attention") else heads
    is_gpt, ffn_size = family is Family.GPT_MOE, _needed(given, "ffn_hidden_size")
    return Model(
        family=family,
        vocab_size=given.get("padded_vocab_size") or _needed(given, "vocab_size"),
        max_positions=_needed(given, "max_position_embeddings"),
        hidden_size=hidden,
        num_layers=_needed(given, "num_layers"),
        moe_layers=_moe_layers(given),
        dense_ffn_size=ffn_size,
        attention=Attention(
            num_heads=heads,
            num_groups=groups or heads,
            head_size=given.get("kv_channels") or hidden // heads,
            has_norms=bool(given.get("qk_layernorm")),
            rope_theta=None if is_gpt else float(_needed(given, "rotary_base")),
        ),
        experts=Experts(
            number=_needed(given, "num_experts"),
            top_k=_needed(given, "moe_router_topk"),
            ffn_size=given.get("moe_ffn_hidden_size") or ffn_size,
            normalizes=not given.get("moe_router_pre_softmax"),
        ),
        norm_epsilon=_needed(given, "norm_epsilon"),
        is_tied=not given.get("untie_embeddings_and_output_weights"),
    )


def _needed(given: Mapping[str, Any], name: str) -> Any:
    if given.get(name) is None:
        raise ValueError(f"the checkpoint's arguments have no {name}; describe it with --model")
    return given[name]


_FAMILY_BY = (
    ("position_embedding_type", ROTARY, LEARNED),
    ("normalization", RMS_NORM, LAYER_NORM),
    ("swiglu", True, False),
    ("add_bias_linear", False, True),
)
"""An argument, what it is in families of Hugging Face, and in our GPT."""


def _family(given: Mapping[str, Any]) -> Family:
    values = tuple(given.get(name) for name, _, _ in _FAMILY_BY)
    if values == tuple(of_gpt for _, _, of_gpt in _FAMILY_BY):
        return Family.GPT_MOE
    expected = tuple(of_huggingface for _, of_huggingface, _ in _FAMILY_BY)
    if values != expected or given.get("add_qkv_bias"):
        names = (name for name, _, _ in _FAMILY_BY)
        told = ", ".join(f"{name} {value!r}" for name, value in zip(names, values))
        raise ValueError(
            f"the checkpoint is of a model with {told}, add_qkv_bias "
            f"{given.get('add_qkv_bias')!r}, which is of no family that is converted"
        )
    is_qwen3 = given.get("qk_layernorm") or given.get("moe_router_pre_softmax")
    is_uniform = len(_moe_layers(given)) == given["num_layers"]
    return Family.QWEN3_MOE if is_qwen3 or not is_uniform else Family.MIXTRAL


def _moe_layers(given: Mapping[str, Any]) -> tuple[int, ...]:
    """As Megatron reads ``--moe-layer-freq``: every n-th from the first, or 1 for each."""
    frequency, layers = given.get("moe_layer_freq") or 1, range(given["num_layers"])
    if isinstance(frequency, int):
        return tuple(layer for layer in layers if layer % frequency == 0)
    return tuple(layer for layer in layers if frequency[layer])
