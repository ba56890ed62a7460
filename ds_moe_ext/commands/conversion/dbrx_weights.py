# SPDX-License-Identifier: Apache-2.0
"""DBRX's weights: Hugging Face keeps those of all experts one below the other, ``[E * F, D]``."""

from __future__ import annotations

from ds_moe_ext.commands.conversion.document import Document, needed
from ds_moe_ext.commands.conversion.form_names import DeepSpeedNames, HuggingFaceNames
from ds_moe_ext.commands.conversion.listed_model import ListedModel, numbered, pieces_of, same_names
from ds_moe_ext.commands.conversion.model import AnyPart, Family, Shape, Weight
from ds_moe_ext.commands.conversion.tables import Row
from ds_moe_ext.hosts.huggingface import DBRX_NAMES

_LAYER = "transformer.blocks.{}."


def model_of(document: Document) -> ListedModel:
    """The model that a config describes.

    Raises:
        ValueError: the config lacks a key.
    """
    hidden, num_layers = needed(document, "d_model"), needed(document, "n_layers")
    within = document.get("ffn_config") or {}  # files of transformers 4 lack what is its default
    num_experts, width = within.get("moe_num_experts", 4), within.get("ffn_hidden_size", 3584)
    dense = _dense(document, hidden, num_layers, num_experts)
    layers = tuple(f"{_LAYER.format(layer)}ffn.experts" for layer in range(num_layers))
    pieces = {
        (layer, name): pieces_of(f"{layer}.{name}", num_experts)
        for layer in layers
        for name in DBRX_NAMES
    }
    shapes: dict[AnyPart, Shape] = {Weight(name): shape for name, shape in dense.items()}
    files = tuple(Row(f"{layer}.mlp.{name}", own) for (layer, name), own in pieces.items())
    apart = (
        row for (layer, name), own in pieces.items() for row in numbered(f"{layer}.{name}", own)
    )
    return ListedModel(
        family=Family.DBRX,
        architecture="DbrxForCausalLM",
        num_layers=num_layers,
        num_experts=num_experts,
        shapes=shapes | {each: (width, hidden) for own in pieces.values() for each in own},
        huggingface=HuggingFaceNames(same_names(dense) + files, (), lambda _: False),
        deepspeed=DeepSpeedNames(same_names(dense), tuple(apart), layers, "{layer}.w1.{slot}"),
        unlike_megatron="LayerNorm without biases, nor queries, keys and values that are "
        "clipped (clip_qkv)",
    )


def _dense(document: Document, hidden: int, num_layers: int, num_experts: int) -> dict[str, Shape]:
    heads = needed(document, "n_heads")
    groups = (document.get("attn_config") or {}).get("kv_n_heads", 1)
    rows = needed(document, "vocab_size"), hidden
    found: dict[str, Shape] = {"transformer.wte.weight": rows}
    for layer in range(num_layers):
        before = _LAYER.format(layer) + "norm_attn_norm."
        found |= {
            before + "norm_1.weight": (hidden,),
            before + "attn.Wqkv.weight": (hidden + 2 * groups * (hidden // heads), hidden),
            before + "attn.out_proj.weight": (hidden, hidden),
            before + "norm_2.weight": (hidden,),
            _LAYER.format(layer) + "ffn.router.layer.weight": (num_experts, hidden),
        }
    return found | {"transformer.norm_f.weight": (hidden,), "lm_head.weight": rows}
