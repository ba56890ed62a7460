# SPDX-License-Identifier: Apache-2.0
"""Switch Transformers' weights: an encoder and a decoder, with experts in some blocks of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ds_moe_ext.commands.conversion.document import Document, needed
from ds_moe_ext.commands.conversion.form_names import DeepSpeedNames, HuggingFaceNames
from ds_moe_ext.commands.conversion.listed_model import ListedModel, numbered, pieces_of, same_names
from ds_moe_ext.commands.conversion.model import AnyPart, Family, Shape, Weight
from ds_moe_ext.commands.conversion.tables import Row

_EMBEDDING = "shared.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


class _Block(NamedTuple):
    """One of either side.

    Attributes:
        name: of it.
        is_first: on its side.
        attentions: names of them, in the order of its layers.
        has_experts: in place of a dense feed-forward.
    """

    name: str
    is_first: bool
    attentions: tuple[str, ...]
    has_experts: bool

    @property
    def feed_forward(self) -> str:
        """Its last layer."""
        return f"{self.name}.layer.{len(self.attentions)}."


def model_of(document: Document) -> ListedModel:
    """The model that a config describes.

    Raises:
        ValueError: the config lacks a key.
    """
    blocks = [*_blocks(document)]
    number, hidden = needed(document, "num_experts"), needed(document, "d_model")
    width = needed(document, "d_ff")
    dense = _dense(document, blocks)
    is_tied = document.get("tie_word_embeddings", True)
    if not is_tied:
        dense |= dict.fromkeys(_COPIES, dense[_EMBEDDING])
    shapes: dict[AnyPart, Shape] = {Weight(name): shape for name, shape in dense.items()}
    files, apart = list[Row](), list[Row]()
    layers = tuple(f"{each.feed_forward}mlp.experts" for each in blocks if each.has_experts)
    for layer in layers:
        for name, shape in (("wi", (width, hidden)), ("wo", (hidden, width))):
            own = pieces_of(f"{layer}.{name}", number)
            shapes |= dict.fromkeys(own, shape)
            files += (Row(f"{layer}.expert_{n}.{name}.weight", (p,)) for n, p in enumerate(own))
            apart += numbered(f"{layer}.{name}", own)
    copies = tuple(Row(name, (Weight(_EMBEDDING),)) for name in _COPIES) if is_tied else ()
    return ListedModel(
        family=Family.SWITCH_TRANSFORMERS,
        architecture="SwitchTransformersForConditionalGeneration",
        num_layers=len(blocks),
        num_experts=number,
        shapes=shapes,
        huggingface=HuggingFaceNames(
            (*same_names(dense), *files), (), lambda name: is_tied and name in _COPIES
        ),
        deepspeed=DeepSpeedNames(
            (*same_names(dense), *copies), tuple(apart), layers, "{layer}.wi.{slot}"
        ),
        unlike_megatron="encoder and decoder with experts (its T5 has none)",
    )


def _blocks(document: Document) -> Iterator[_Block]:
    num_layers = needed(document, "num_layers")
    sides = (
        ("encoder", num_layers, ("SelfAttention",)),
        ("decoder", document.get("num_decoder_layers"), ("SelfAttention", "EncDecAttention")),
    )
    for side, told, attentions in sides:
        number = num_layers if told is None else told
        num_sparse = document.get(f"num_sparse_{side}_layers", 3)
        step = document.get(f"{side}_sparse_step")
        if step is None:
            step = number // num_sparse if num_sparse else number
        for block in range(number):
            has_experts = step == 1 or (step > 1 and block % step == 1)
            yield _Block(f"{side}.block.{block}", block == 0, attentions, has_experts)


def _dense(document: Document, blocks: list[_Block]) -> dict[str, Shape]:
    hidden, heads = needed(document, "d_model"), needed(document, "num_heads")
    inner, width = heads * needed(document, "d_kv"), needed(document, "d_ff")
    number = needed(document, "num_experts")
    num_buckets = document.get("relative_attention_num_buckets", 32)
    found: dict[str, Shape] = {_EMBEDDING: (needed(document, "vocab_size"), hidden)}
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
