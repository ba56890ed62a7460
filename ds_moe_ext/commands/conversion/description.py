# SPDX-License-Identifier: Apache-2.0
"""What describes a model: a Hugging Face config.json, or a model file of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_moe_ext.commands.conversion.model import (
    AnyModel,
    AnyPart,
    Attention,
    DeepSpeedNames,
    Document,
    Experts,
    Family,
    HuggingFaceNames,
    ListedModel,
    Model,
    Row,
    Shape,
    Weight,
    needed,
)
from ds_moe_ext.commands.conversion.tables import decoder_of, numbered, pieces_of, same_names
from ds_moe_ext.files.documents import file_of
from ds_moe_ext.files.documents import read_document as read_json
from ds_moe_ext.hosts.huggingface import DBRX_NAMES

CONFIG = "config.json"
BUILDER = "builder"  # names the code of a family that transformers does not know


@dataclass(frozen=True)
class Keys:
    """What a family calls its experts, and what it takes where a config is silent."""

    architecture: str  # class of the model
    num_experts: tuple[str, ...]  # keys, of which the first that is there counts
    ffn_size: str  # of an expert
    dense_ffn_size: str | None  # of a layer without experts; None where there is no such layer
    has_norms: bool  # queries and keys are normalised
    norm_epsilon: float  # default
    rope_theta: float  # default
    normalizes: bool | None  # default of ``norm_topk_prob``; None where the scores always sum to 1


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

_DEFAULT_ROPE = "default"
_ONLY = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("rope_scaling", (None,)),
)
"""Keys of which no other value has a counterpart in Megatron or here."""


def read_document(path: Path) -> Document:
    """The config of a model, with ``model_type``: a Hugging Face config.json, by its folder too, or
    a model file of ours, by name too."""
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
            f"{file} has no model_type, so it is not a Hugging Face config; name another --model"
        )
    return document


def is_model_file(document: Any) -> bool:
    """Whether it is like those of configs/models: a family, its config, and maybe a builder."""
    return isinstance(document, dict) and document.keys() - {BUILDER} == {"family", "config"}


def model_of(document: Document) -> AnyModel:
    """The model that a config describes."""
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
            f"sliding_window is {window}: sliding windows are not converted, because in "
            "Megatron they are a flag of the run (--window-size); set it to null if sequences "
            "are never longer"
        )


def _theta(document: Document, keys: Keys) -> float:
    """Of transformers 5, which has a record of it, or of 4."""
    record = document.get("rope_parameters") or {}
    kind = record.get("rope_type", _DEFAULT_ROPE)
    if kind != _DEFAULT_ROPE:
        raise ValueError(f"rope_type is {kind!r}; only {_DEFAULT_ROPE!r} is converted")
    return float(record.get("rope_theta") or document.get("rope_theta") or keys.rope_theta)


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
            "moe.drop_tokens is true: DeepSpeed and Megatron drop different tokens; set it to "
            "false, also in the run that resumes"
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
    """config.json of a model; of one that is listed, what its config may lack."""
    if isinstance(model, ListedModel):
        return {"architectures": [model.architecture], "model_type": model.family.value}
    model = decoder_of(model)
    if model.is_gpt:
        raise ValueError(
            f"family {model.family.value} has no class in Hugging Face transformers, so it has "
            "no such form; convert to deepspeed or megatron"
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
            "the experts' scores of a token do not sum to 1, as they always do in "
            f"{keys.architecture}; that form has no such model"
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


# Families that are lists of weights. DBRX: Hugging Face keeps those of all experts one below the
# other, [E * F, D].

_DBRX_LAYER = "transformer.blocks.{}."


def _dbrx(document: Document) -> ListedModel:
    """The model that a config describes."""
    hidden, num_layers = needed(document, "d_model"), needed(document, "n_layers")
    within = document.get("ffn_config") or {}  # files of transformers 4 lack what is its default
    num_experts, width = within.get("moe_num_experts", 4), within.get("ffn_hidden_size", 3584)
    dense = _dbrx_dense(document, hidden, num_layers, num_experts)
    layers = tuple(f"{_DBRX_LAYER.format(layer)}ffn.experts" for layer in range(num_layers))
    shapes: dict[AnyPart, Shape] = {Weight(name): shape for name, shape in dense.items()}
    files, apart = list[Row](), list[Row]()
    for layer in layers:
        for name in DBRX_NAMES:
            own = pieces_of(f"{layer}.{name}", num_experts)
            shapes |= dict.fromkeys(own, (width, hidden))
            files.append(Row(f"{layer}.mlp.{name}", own))
            apart += numbered(f"{layer}.{name}", own)
    return ListedModel(
        family=Family.DBRX,
        architecture="DbrxForCausalLM",
        num_layers=num_layers,
        num_experts=num_experts,
        shapes=shapes,
        huggingface=HuggingFaceNames((*same_names(dense), *files), (), lambda _: False),
        deepspeed=DeepSpeedNames(same_names(dense), tuple(apart), layers, "{layer}.w1.{slot}"),
        unlike_megatron="LayerNorm without biases, nor queries, keys and values that are "
        "clipped (clip_qkv)",
    )


def _dbrx_dense(
    document: Document, hidden: int, num_layers: int, num_experts: int
) -> dict[str, Shape]:
    heads = needed(document, "n_heads")
    groups = (document.get("attn_config") or {}).get("kv_n_heads", 1)
    rows = needed(document, "vocab_size"), hidden
    found: dict[str, Shape] = {"transformer.wte.weight": rows}
    for layer in range(num_layers):
        before = _DBRX_LAYER.format(layer) + "norm_attn_norm."
        found |= {
            before + "norm_1.weight": (hidden,),
            before + "attn.Wqkv.weight": (hidden + 2 * groups * (hidden // heads), hidden),
            before + "attn.out_proj.weight": (hidden, hidden),
            before + "norm_2.weight": (hidden,),
            _DBRX_LAYER.format(layer) + "ffn.router.layer.weight": (num_experts, hidden),
        }
    return found | {"transformer.norm_f.weight": (hidden,), "lm_head.weight": rows}


# LongCat-Flash: two attentions and two dense feed-forwards a layer beside its experts. Hugging Face
# writes gates and ups of experts that are the identity, too, which nothing reads.

_LONGCAT_EMBEDDING, _LONGCAT_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LONGCAT_LAYER = "model.layers.{}."


def _longcat(document: Document) -> ListedModel:
    """The model that a config describes."""
    hidden, num_layers = needed(document, "hidden_size"), needed(document, "num_layers")
    width, number = needed(document, "expert_ffn_hidden_size"), needed(document, "n_routed_experts")
    num_idle = document.get("zero_expert_num") or 0
    dense = _longcat_dense(document, hidden, num_layers, number + num_idle)
    shapes: dict[AnyPart, Shape] = {Weight(name): shape for name, shape in dense.items()}
    files, unread, apart = list[Row](), list[Row](), list[Row]()
    zeros: dict[AnyPart, AnyPart] = {}
    layers = tuple(f"{_LONGCAT_LAYER.format(layer)}mlp.experts" for layer in range(num_layers))
    for layer in layers:
        gates, ups = (pieces_of(f"{layer}.{name}", number + num_idle) for name in ("gate", "up"))
        downs = pieces_of(f"{layer}.down", number)
        shapes |= dict.fromkeys((*gates, *ups), (width, hidden))
        shapes |= dict.fromkeys(downs, (hidden, width))
        for name, own in (("gate_proj", gates), ("up_proj", ups), ("down_proj", downs)):
            rows = [Row(f"{layer}.{n}.{name}.weight", (each,)) for n, each in enumerate(own)]
            files += rows[:number]
            unread += rows[number:]
            zeros |= dict.fromkeys(own[number:], own[0])
        apart += numbered(f"{layer}.gate_up_proj", gates[:number], ups[:number])
        apart += numbered(f"{layer}.down_proj", downs)
    read = (*same_names(dense), *files)
    is_tied = _longcat_tied(document)
    tied = (Row(_LONGCAT_OUTPUT, (Weight(_LONGCAT_EMBEDDING),)),) if is_tied else ()
    return ListedModel(
        family=Family.LONGCAT_FLASH,
        architecture="LongcatFlashForCausalLM",
        num_layers=num_layers,
        num_experts=number,
        shapes=shapes,
        huggingface=HuggingFaceNames(
            (*read, *unread),
            (read,),
            # a tied output, and what is of multi-token prediction, which transformers does not read
            lambda name: (is_tied and name == _LONGCAT_OUTPUT) or name.startswith("model.mtp."),
        ),
        deepspeed=DeepSpeedNames(
            (*same_names(dense), *tied),
            tuple(apart),
            layers,
            "{layer}.gate_up_proj.{slot}",
            zeros,
        ),
        unlike_megatron="layers of two attentions, and no experts that are the identity",
    )


def _longcat_tied(document: Document) -> bool:
    return bool(document.get("tie_word_embeddings", False))


def _longcat_dense(
    document: Document, hidden: int, num_layers: int, num_scores: int
) -> dict[str, Shape]:
    rows = needed(document, "vocab_size"), hidden
    width, attention = needed(document, "ffn_hidden_size"), _latent_attention(document, hidden)
    found: dict[str, Shape] = {_LONGCAT_EMBEDDING: rows}
    for layer in map(_LONGCAT_LAYER.format, range(num_layers)):
        for half in range(2):
            found |= {
                f"{layer}input_layernorm.{half}.weight": (hidden,),
                f"{layer}post_attention_layernorm.{half}.weight": (hidden,),
                f"{layer}mlps.{half}.gate_proj.weight": (width, hidden),
                f"{layer}mlps.{half}.up_proj.weight": (width, hidden),
                f"{layer}mlps.{half}.down_proj.weight": (hidden, width),
            }
            found |= {f"{layer}self_attn.{half}.{name}": s for name, s in attention.items()}
        found |= {
            f"{layer}mlp.router.classifier.weight": (num_scores, hidden),
            f"{layer}mlp.router.e_score_correction_bias": (num_scores,),
        }
        if document.get("router_bias", False):
            found[f"{layer}mlp.router.classifier.bias"] = (num_scores,)
    found |= {"model.norm.weight": (hidden,)}
    return found if _longcat_tied(document) else found | {_LONGCAT_OUTPUT: rows}


def _latent_attention(document: Document, hidden: int) -> dict[str, Shape]:
    """Latent: queries, keys and values come of narrow rows."""
    heads, rotated = needed(document, "num_attention_heads"), needed(document, "qk_rope_head_dim")
    plain, value = needed(document, "qk_nope_head_dim"), needed(document, "v_head_dim")
    narrow, rank = needed(document, "kv_lora_rank"), needed(document, "q_lora_rank")
    found: dict[str, Shape] = {
        "q_a_proj.weight": (rank, hidden),
        "q_a_layernorm.weight": (rank,),
        "q_b_proj.weight": (heads * (plain + rotated), rank),
        "kv_a_proj_with_mqa.weight": (narrow + rotated, hidden),
        "kv_a_layernorm.weight": (narrow,),
        "kv_b_proj.weight": (heads * (plain + value), narrow),
        "o_proj.weight": (hidden, heads * value),
    }
    if document.get("attention_bias", False):
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            found[f"{name}.bias"] = found[f"{name}.weight"][:1]
    return found


# Switch Transformers: an encoder and a decoder, with experts in some blocks of each.

_SWITCH_EMBEDDING = "shared.weight"
_SWITCH_REPLICAS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


class _SwitchBlock(NamedTuple):
    """One of either side."""

    name: str  # of it
    is_first: bool  # on its side
    attentions: tuple[str, ...]  # names of them, in the order of its layers
    has_experts: bool  # in place of a dense feed-forward

    @property
    def feed_forward(self) -> str:
        return f"{self.name}.layer.{len(self.attentions)}."


def _switch(document: Document) -> ListedModel:
    """The model that a config describes."""
    blocks = [*_switch_blocks(document)]
    number, hidden = needed(document, "num_experts"), needed(document, "d_model")
    width = needed(document, "d_ff")
    dense = _switch_dense(document, blocks)
    is_tied = document.get("tie_word_embeddings", True)
    if not is_tied:
        dense |= dict.fromkeys(_SWITCH_REPLICAS, dense[_SWITCH_EMBEDDING])
    shapes: dict[AnyPart, Shape] = {Weight(name): shape for name, shape in dense.items()}
    files, apart = list[Row](), list[Row]()
    layers = tuple(f"{each.feed_forward}mlp.experts" for each in blocks if each.has_experts)
    for layer in layers:
        for name, shape in (("wi", (width, hidden)), ("wo", (hidden, width))):
            own = pieces_of(f"{layer}.{name}", number)
            shapes |= dict.fromkeys(own, shape)
            files += (Row(f"{layer}.expert_{n}.{name}.weight", (p,)) for n, p in enumerate(own))
            apart += numbered(f"{layer}.{name}", own)
    replicas = (
        tuple(Row(name, (Weight(_SWITCH_EMBEDDING),)) for name in _SWITCH_REPLICAS)
        if is_tied
        else ()
    )
    return ListedModel(
        family=Family.SWITCH_TRANSFORMERS,
        architecture="SwitchTransformersForConditionalGeneration",
        num_layers=len(blocks),
        num_experts=number,
        shapes=shapes,
        huggingface=HuggingFaceNames(
            (*same_names(dense), *files), (), lambda name: is_tied and name in _SWITCH_REPLICAS
        ),
        deepspeed=DeepSpeedNames(
            (*same_names(dense), *replicas), tuple(apart), layers, "{layer}.wi.{slot}"
        ),
        unlike_megatron="encoder and decoder with experts (its T5 has none)",
    )


def _switch_blocks(document: Document) -> Iterator[_SwitchBlock]:
    num_layers = needed(document, "num_layers")
    sides = (
        ("encoder", num_layers, ("SelfAttention",)),
        ("decoder", document.get("num_decoder_layers"), ("SelfAttention", "EncDecAttention")),
    )
    for side, reported, attentions in sides:
        number = num_layers if reported is None else reported
        num_sparse = document.get(f"num_sparse_{side}_layers", 3)
        step = document.get(f"{side}_sparse_step")
        if step is None:
            step = number // num_sparse if num_sparse else number
        for block in range(number):
            has_experts = step == 1 or (step > 1 and block % step == 1)
            yield _SwitchBlock(f"{side}.block.{block}", block == 0, attentions, has_experts)


def _switch_dense(document: Document, blocks: list[_SwitchBlock]) -> dict[str, Shape]:
    hidden, heads = needed(document, "d_model"), needed(document, "num_heads")
    inner, width = heads * needed(document, "d_kv"), needed(document, "d_ff")
    number = needed(document, "num_experts")
    num_buckets = document.get("relative_attention_num_buckets", 32)
    found: dict[str, Shape] = {_SWITCH_EMBEDDING: (needed(document, "vocab_size"), hidden)}
    for block in blocks:
        for layer, attention in enumerate(block.attentions):
            name = f"{block.name}.layer.{layer}."
            found |= {f"{name}{attention}.{each}.weight": (inner, hidden) for each in "qkv"}
            found[f"{name}{attention}.o.weight"] = (hidden, inner)
            found[f"{name}layer_norm.weight"] = (hidden,)
        if block.is_first:
            bias = f"{block.name}.layer.0.SelfAttention.relative_attention_bias.weight"
            found[bias] = (num_buckets, heads)
        last = block.feed_forward
        found[last + "layer_norm.weight"] = (hidden,)
        if not block.has_experts:
            found |= {
                last + "mlp.wi.weight": (width, hidden),
                last + "mlp.wo.weight": (hidden, width),
            }
            continue
        found[last + "mlp.router.classifier.weight"] = (number, hidden)
        if document.get("router_bias", False):
            found[last + "mlp.router.classifier.bias"] = (number,)
    return found | {f"{side}.final_layer_norm.weight": (hidden,) for side in ("encoder", "decoder")}


_LISTED: Mapping[Family, Callable[[Document], ListedModel]] = {
    Family.DBRX: _dbrx,
    Family.LONGCAT_FLASH: _longcat,
    Family.SWITCH_TRANSFORMERS: _switch,
}
