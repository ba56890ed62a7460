# SPDX-License-Identifier: Apache-2.0
"""What describes a model: a Hugging Face config.json, or a model file of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_moe_ext.commands.conversion import (
    dbrx_weights,
    longcat_flash_weights,
    switch_transformers_weights,
)
from ds_moe_ext.commands.conversion.document import Document, needed
from ds_moe_ext.commands.conversion.listed_model import ListedModel, decoder_of
from ds_moe_ext.commands.conversion.model import AnyModel, Attention, Experts, Family, Model
from ds_moe_ext.files.configs import file_of
from ds_moe_ext.files.documents import read_document as read_json

CONFIG = "config.json"


@dataclass(frozen=True)
class Keys:
    """What a family of Hugging Face calls its experts, and what it takes where a config is silent.

    Attributes:
        architecture: class of the model.
        num_experts: keys, of which the first that is there counts.
        ffn_size: of an expert.
        dense_ffn_size: of a layer without experts; None where there is no such layer.
        has_norms: queries and keys are normalised.
        norm_epsilon: default.
        rope_theta: default.
        normalizes: default of ``norm_topk_prob``; None where the scores always sum to 1.
    """

    architecture: str
    num_experts: tuple[str, ...]
    ffn_size: str
    dense_ffn_size: str | None
    has_norms: bool
    norm_epsilon: float
    rope_theta: float
    normalizes: bool | None


FAMILIES = {
    Family.MIXTRAL: Keys(
        "MixtralForCausalLM",
        ("num_local_experts",),
        "intermediate_size",
        None,
        has_norms=False,
        norm_epsilon=1e-5,
        rope_theta=1e6,
        normalizes=None,
    ),
    Family.QWEN3_MOE: Keys(
        "Qwen3MoeForCausalLM",
        ("num_local_experts", "num_experts"),
        "moe_intermediate_size",
        "intermediate_size",
        has_norms=True,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        normalizes=False,
    ),
}

_ONLY = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("rope_scaling", (None,)),
)
"""Keys of which no other value has a counterpart in Megatron or here."""


def read_document(path: Path) -> Document:
    """The config of a model.

    Args:
        path: of a Hugging Face config.json, its folder, or a model file of ours, by name too.

    Returns:
        It, with ``model_type``.

    Raises:
        ValueError: it is none of them.
    """
    file = path
    try:
        file = path / CONFIG if path.is_dir() else file_of("models", path)
        document = read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); name a Hugging Face config.json, its folder, or a "
            "file like those of configs/models"
        ) from error
    if is_model_file(document):
        return {"model_type": document["family"], **document["config"]}
    if not isinstance(document, dict) or "model_type" not in document:
        raise ValueError(
            f"{file} has no model_type, so it is no config of Hugging Face; name another --model"
        )
    return document


BUILDER = "builder"  # names the code of a family that transformers does not know


def is_model_file(document: Any) -> bool:
    """Whether it is like those of configs/models: a family, its config, and maybe a builder."""
    return isinstance(document, dict) and document.keys() - {BUILDER} == {"family", "config"}


_LISTED: dict[Family, Callable[[Document], ListedModel]] = {
    Family.DBRX: dbrx_weights.model_of,
    Family.LONGCAT_FLASH: longcat_flash_weights.model_of,
    Family.SWITCH_TRANSFORMERS: switch_transformers_weights.model_of,
}


def model_of(document: Document) -> AnyModel:
    """The model that a config describes.

    Raises:
        ValueError: another family, or something that has no counterpart.
    """
    kind = document["model_type"]
    if kind not in {family.value for family in Family}:
        raise ValueError(
            f"model_type is {kind!r}; converted are {', '.join(family.value for family in Family)}"
        )
    family = Family(kind)
    if family in _LISTED:
        return _LISTED[family](document)
    return _gpt(document) if family is Family.GPT_MOE else _of_huggingface(family, document)


def _of_huggingface(family: Family, document: Document) -> Model:
    keys = FAMILIES[family]
    for key, values in _ONLY:
        if document.get(key, values[0]) not in values:
            raise ValueError(
                f"{key} is {document[key]!r}; only {values[0]!r} is converted: Megatron has no "
                "counterpart of it in the same weights"
            )
    _check_window(family, document)
    heads, hidden = needed(document, "num_attention_heads"), needed(document, "hidden_size")
    normalizes = True
    if keys.normalizes is not None:
        normalizes = document.get("norm_topk_prob", keys.normalizes)
    top_k = needed(document, "num_experts_per_tok")
    return Model(
        family=family,
        vocab_size=needed(document, "vocab_size"),
        max_positions=needed(document, "max_position_embeddings"),
        hidden_size=hidden,
        num_layers=needed(document, "num_hidden_layers"),
        moe_layers=_moe_layers(document, keys),
        dense_ffn_size=needed(document, keys.dense_ffn_size) if keys.dense_ffn_size else 0,
        attention=Attention(
            num_heads=heads,
            num_groups=needed(document, "num_key_value_heads"),
            head_size=document.get("head_dim") or hidden // heads,
            has_norms=keys.has_norms,
            rope_theta=_theta(document, keys),
        ),
        experts=Experts(
            number=needed(document, *keys.num_experts),
            top_k=top_k,
            ffn_size=needed(document, keys.ffn_size),
            normalizes=normalizes,
        ),
        norm_epsilon=document.get("rms_norm_eps", keys.norm_epsilon),
        is_tied=document.get("tie_word_embeddings", False),
    )


def _check_window(family: Family, document: Document) -> None:
    """Qwen3's counts only if it is used."""
    window = document.get("sliding_window")
    if family is Family.QWEN3_MOE and not document.get("use_sliding_window", False):
        window = None
    if window is not None:
        raise ValueError(
            f"sliding_window is {window}: that is not converted, for Megatron's windows are a "
            "setting of the run (--window-size); set it to null if windows are never longer"
        )


def _theta(document: Document, keys: Keys) -> float:
    """Of transformers 5, which has a record of it, or of 4."""
    record = document.get("rope_parameters") or {}
    if record.get("rope_type", _DEFAULT_ROPE) != _DEFAULT_ROPE:
        raise ValueError(
            f"rope_type is {record['rope_type']!r}; only {_DEFAULT_ROPE!r} is converted"
        )
    return float(record.get("rope_theta") or document.get("rope_theta") or keys.rope_theta)


_DEFAULT_ROPE = "default"


def _moe_layers(document: Document, keys: Keys) -> tuple[int, ...]:
    layers: Iterable[int] = range(needed(document, "num_hidden_layers"))
    if keys.dense_ffn_size is not None:
        step, dense = document.get("decoder_sparse_step", 1), document.get("mlp_only_layers") or ()
        layers = (n for n in layers if (n + 1) % step == 0 and n not in dense)
    return tuple(layers)


def _gpt(document: Document) -> Model:
    """A GPT with DeepSpeed's MoE layers, by the config of its family."""
    moe, heads = document["moe"], document["num_heads"]
    if moe.get("drop_tokens", True):
        raise ValueError(
            "moe.drop_tokens is true: which rows are dropped at a capacity differs between "
            "DeepSpeed and Megatron; set it to false, in the run that goes on too"
        )
    every, num_layers = document.get("moe_every", 2), document["num_layers"]
    return Model(
        family=Family.GPT_MOE,
        vocab_size=document["vocab_size"],
        max_positions=document["sequence_length"],
        hidden_size=document["hidden_size"],
        num_layers=num_layers,
        moe_layers=tuple(n for n in range(num_layers) if (n + 1) % every == 0),
        dense_ffn_size=document["ffn_hidden_size"],
        attention=Attention(heads, heads, document["hidden_size"] // heads, False, None),
        experts=Experts(
            number=moe["num_experts"],
            top_k=moe["k"],
            ffn_size=document["ffn_hidden_size"],
            normalizes=moe["k"] > 1,  # DeepSpeed's gate: a lone score stays as it is
        ),
        norm_epsilon=1e-5,  # torch's LayerNorm
        is_tied=document.get("tie_embeddings", True),
    )


def document_of(model: AnyModel) -> Document:
    """config.json of a model; of one that is listed, what its config may lack.

    Raises:
        ValueError: it is of no class of Hugging Face.
    """
    if isinstance(model, ListedModel):
        return {"architectures": [model.architecture], "model_type": model.family.value}
    model = decoder_of(model)
    if model.is_gpt:
        raise ValueError(
            f"family {model.family.value} has no class in Hugging Face transformers, so there is "
            "no such folder of it; convert to deepspeed or megatron"
        )
    keys, attention, experts = FAMILIES[model.family], model.attention, model.experts
    document = {
        "architectures": [keys.architecture],
        "model_type": model.family.value,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_groups,
        "head_dim": attention.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_theta": attention.rope_theta, "rope_type": _DEFAULT_ROPE},
        "rope_theta": attention.rope_theta,  # for transformers 4
        "sliding_window": None,
        "tie_word_embeddings": model.is_tied,
        "num_experts_per_tok": experts.top_k,
        **dict.fromkeys(keys.num_experts, experts.number),
        keys.ffn_size: experts.ffn_size,
    }
    if keys.normalizes is None and not experts.normalizes:
        raise ValueError(
            f"the experts' scores of a token do not sum to 1, as they always do in "
            f"{keys.architecture}; there is no such model there"
        )
    if keys.dense_ffn_size is None:
        return document
    return document | {
        keys.dense_ffn_size: model.dense_ffn_size,
        "norm_topk_prob": experts.normalizes,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(set(range(model.num_layers)) - set(model.moe_layers)),
        "attention_bias": False,
        "use_sliding_window": False,
    }
