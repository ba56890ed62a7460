# SPDX-License-Identifier: Apache-2.0
"""LongCat-Flash's weights: two attentions and two dense feed-forwards a layer beside its experts.

Hugging Face writes gates and ups of experts that are the identity, too, which nothing reads.
"""

from __future__ import annotations

from functools import partial

from ds_moe_ext.commands.conversion.document import Document, needed
from ds_moe_ext.commands.conversion.form_names import DeepSpeedNames, HuggingFaceNames
from ds_moe_ext.commands.conversion.listed_model import ListedModel, numbered, pieces_of, same_names
from ds_moe_ext.commands.conversion.model import AnyPart, Family, Shape, Weight
from ds_moe_ext.commands.conversion.tables import Row, Table

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "model.layers.{}."


def model_of(document: Document) -> ListedModel:
    """The model that a config describes.

    Raises:
        ValueError: the config lacks a key.
    """
    hidden, num_layers = needed(document, "hidden_size"), needed(document, "num_layers")
    width, number = needed(document, "expert_ffn_hidden_size"), needed(document, "n_routed_experts")
    num_idle = document.get("zero_expert_num") or 0
    dense = _dense(document, hidden, num_layers, number + num_idle)
    shapes: dict[AnyPart, Shape] = {Weight(name): shape for name, shape in dense.items()}
    files, unread, apart = list[Row](), list[Row](), list[Row]()
    zeros: dict[AnyPart, AnyPart] = {}
    layers = tuple(f"{_LAYER.format(layer)}mlp.experts" for layer in range(num_layers))
    for layer in layers:
        gates, ups = (pieces_of(f"{layer}.{name}", number + num_idle) for name in ("gate", "up"))
        downs = pieces_of(f"{layer}.down", number)
        shapes |= dict.fromkeys((*gates, *ups), (width, hidden))
        shapes |= dict.fromkeys(downs, (hidden, width))
        for name, own in (("gate_proj", gates), ("up_proj", ups), ("down_proj", downs)):
            rows = _by_number(f"{layer}.{{}}.{name}.weight", own)
            files += rows[:number]
            unread += rows[number:]
            zeros |= dict.fromkeys(own[number:], own[0])
        apart += numbered(f"{layer}.gate_up_proj", gates[:number], ups[:number])
        apart += numbered(f"{layer}.down_proj", downs)
    read = (*same_names(dense), *files)
    tied = (Row(_OUTPUT, (Weight(_EMBEDDING),)),) if _is_tied(document) else ()
    return ListedModel(
        family=Family.LONGCAT_FLASH,
        architecture="LongcatFlashForCausalLM",
        num_layers=num_layers,
        num_experts=number,
        shapes=shapes,
        huggingface=HuggingFaceNames(
            (*read, *unread), (read,), partial(_is_spare, _is_tied(document))
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


def _by_number(pattern: str, pieces: tuple[Weight, ...]) -> Table:
    return tuple(Row(pattern.format(number), (each,)) for number, each in enumerate(pieces))


def _is_tied(document: Document) -> bool:
    return bool(document.get("tie_word_embeddings", False))


def _is_spare(tied: bool, name: str) -> bool:
    """A tied output, and what is of multi-token prediction, which transformers does not read."""
    return (tied and name == _OUTPUT) or name.startswith("model.mtp.")


def _dense(document: Document, hidden: int, num_layers: int, num_scores: int) -> dict[str, Shape]:
    rows = needed(document, "vocab_size"), hidden
    width, attention = needed(document, "ffn_hidden_size"), _attention(document, hidden)
    found: dict[str, Shape] = {_EMBEDDING: rows}
    for layer in map(_LAYER.format, range(num_layers)):
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
    return found if _is_tied(document) else found | {_OUTPUT: rows}


def _attention(document: Document, hidden: int) -> dict[str, Shape]:
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
