# SPDX-License-Identifier: Apache-2.0
"""How forms keep the pieces of a model: tables of rows, the same for reading and for writing.

A row names a stored tensor and the parts that are joined in it. ``{layer}`` and ``{expert}`` stand
for numbers; where a name lacks one that its parts have, the stored tensor has a leading dim of
them. Below are the tables of what Hugging Face, DeepSpeed and Megatron call the parts of a
``Model``; a ``ListedModel`` brings its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion.model import (
    AnyModel,
    AnyPart,
    DeepSpeedNames,
    Family,
    HuggingFaceNames,
    ListedModel,
    Model,
    Part,
    Piece,
    Row,
    Shape,
    Table,
    Weight,
    Where,
)


class Cell(NamedTuple):
    """What a row has of one layer or expert."""

    name: str  # of the stored tensor
    lead: tuple[int, ...]  # numbers in its leading dims: none, layer, expert, or both
    lead_shape: Shape  # of those dims
    row: Row  # that it is of
    where: Where  # of its pieces

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """That are joined in it."""
        return tuple(Piece(part, self.where) for part in self.row.parts)

    def inner_shape(self, model: AnyModel) -> Shape:
        """Without the leading dims."""
        shape = model.shapes
        rest = shape[self.row.parts[0]][1:]
        return sum(shape[part][0] for part in self.row.parts), *rest

    def shape(self, model: AnyModel) -> Shape:
        """Of the stored tensor."""
        return *self.lead_shape, *self.inner_shape(model)


def of_model(model: AnyModel, table: Sequence[Row]) -> Table:
    """The rows whose parts a model has."""
    has = model.shapes.keys()
    return tuple(row for row in table if has >= set(row.parts))


def cells(model: AnyModel, table: Sequence[Row]) -> Iterator[Cell]:
    """All of a model, layer by layer, in each expert by expert: what is read at one place is needed
    at one place."""
    found = (
        (where, number, row)
        for number, row in enumerate(of_model(model, table))
        for where in model.places(row.parts[0].scope)
    )
    order = sorted(found, key=lambda each: (*(-1 if n is None else n for n in each[0]), each[1]))
    return (_cell(model, row, where) for where, _, row in order)


def _cell(model: AnyModel, row: Row, where: Where) -> Cell:
    lead, lead_shape = [], []
    if where.layer is not None and "{layer}" not in row.name:
        lead.append(where.layer)
        lead_shape.append(model.num_layers)
    if where.expert is not None and "{expert}" not in row.name:
        lead.append(where.expert)
        lead_shape.append(model.num_experts)
    name = row.name.format(layer=where.layer, expert=where.expert)
    return Cell(name, tuple(lead), tuple(lead_shape), row, where)


def join(model: AnyModel, row: Row, tensors: Sequence[Tensor]) -> Tensor:
    """What is stored of these parts."""
    if len(tensors) == 1:
        return tensors[0]
    groups = _num_groups(model, row)
    return torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], 1).flatten(0, 1)


def split(model: AnyModel, row: Row, stored: Tensor) -> tuple[Tensor, ...]:
    """The parts of what is stored; undoes ``join``."""
    if len(row.parts) == 1:
        return (stored,)
    groups, shape = _num_groups(model, row), model.shapes
    sizes = [shape[part][0] // groups for part in row.parts]
    parts = stored.unflatten(0, (groups, -1)).split(sizes, 1)
    return tuple(part.flatten(0, 1) for part in parts)


def _num_groups(model: AnyModel, row: Row) -> int:
    return model.num_groups if row.is_grouped else 1


MASTER = "/master"
"""Ends the name of an expert's weight in the folder of experts: as the optimizer steps it."""


def decoder_of(model: AnyModel) -> Model:
    """The same, as Megatron has it too."""
    if isinstance(model, ListedModel):
        raise ValueError(
            f"a {model.family.value} model is converted between deepspeed and huggingface only: "
            f"Megatron-core has no {model.unlike_megatron}; choose these two forms"
        )
    return model


def pieces_of(name: str, number: int) -> tuple[Weight, ...]:
    """A piece for each expert: what a weight of all of them is made of."""
    return tuple(Weight(f"{name}.{expert}") for expert in range(number))


def same_names(dense: Iterable[str]) -> Table:
    """Weights that are called so in both forms."""
    return tuple(Row(name, (Weight(name),)) for name in dense)


def numbered(name: str, *joined: Sequence[Weight]) -> Table:
    """A weight in the folder of experts, named by the module that is replaced and its own name, of
    pieces of all experts, of which each expert's are joined in this order."""
    return tuple(
        Row(f"{name}.{expert}{MASTER}", pieces) for expert, pieces in enumerate(zip(*joined))
    )


_QKV = (Part.QUERY, Part.KEY, Part.VALUE)
_QKV_BIAS = (Part.QUERY_BIAS, Part.KEY_BIAS, Part.VALUE_BIAS)


# Hugging Face.

_HF = "model.layers.{layer}."
_HF_DENSE: Table = (
    Row("model.embed_tokens.weight", (Part.EMBEDDING,)),
    Row("model.norm.weight", (Part.FINAL_NORM,)),
    Row("lm_head.weight", (Part.OUTPUT,)),
    Row(_HF + "input_layernorm.weight", (Part.INPUT_NORM,)),
    Row(_HF + "self_attn.q_proj.weight", (Part.QUERY,)),
    Row(_HF + "self_attn.k_proj.weight", (Part.KEY,)),
    Row(_HF + "self_attn.v_proj.weight", (Part.VALUE,)),
    Row(_HF + "self_attn.o_proj.weight", (Part.PROJECTION,)),
    Row(_HF + "self_attn.q_norm.weight", (Part.QUERY_NORM,)),
    Row(_HF + "self_attn.k_norm.weight", (Part.KEY_NORM,)),
    Row(_HF + "post_attention_layernorm.weight", (Part.DENSE_NORM,)),
    Row(_HF + "post_attention_layernorm.weight", (Part.MOE_NORM,)),
    Row(_HF + "mlp.gate_proj.weight", (Part.DENSE_GATE,)),
    Row(_HF + "mlp.up_proj.weight", (Part.DENSE_UP,)),
    Row(_HF + "mlp.down_proj.weight", (Part.DENSE_DOWN,)),
)
_MIXTRAL_FILES: Table = (
    Row(_HF + "block_sparse_moe.gate.weight", (Part.ROUTER,)),
    Row(_HF + "block_sparse_moe.experts.{expert}.w1.weight", (Part.GATE,)),
    Row(_HF + "block_sparse_moe.experts.{expert}.w3.weight", (Part.UP,)),
    Row(_HF + "block_sparse_moe.experts.{expert}.w2.weight", (Part.DOWN,)),
)
_QWEN3_FILES: Table = (
    Row(_HF + "mlp.gate.weight", (Part.ROUTER,)),
    Row(_HF + "mlp.experts.{expert}.gate_proj.weight", (Part.GATE,)),
    Row(_HF + "mlp.experts.{expert}.up_proj.weight", (Part.UP,)),
    Row(_HF + "mlp.experts.{expert}.down_proj.weight", (Part.DOWN,)),
)
_HF_EXPERTS = _HF + "mlp.experts"
_HF_ROUTER = Row(_HF + "mlp.gate.weight", (Part.ROUTER,))
_HF_MODULE: Table = (
    _HF_ROUTER,
    Row(_HF_EXPERTS + ".gate_up_proj", (Part.GATE, Part.UP)),
    Row(_HF_EXPERTS + ".down_proj", (Part.DOWN,)),
)


def in_huggingface(model: AnyModel) -> HuggingFaceNames:
    """Names in safetensors files; those of transformers 5's modules, which some write, are read."""
    if isinstance(model, ListedModel):
        return model.huggingface
    decoder = decoder_of(model)
    files = _MIXTRAL_FILES if model.family is Family.MIXTRAL else _QWEN3_FILES
    tied = "lm_head.weight" if decoder.is_tied else None
    return HuggingFaceNames(
        _HF_DENSE + files,
        (_HF_DENSE + _HF_MODULE,),
        # a tied output, and buffers that some versions saved
        lambda name: name == tied or name.endswith(".rotary_emb.inv_freq"),
    )


# DeepSpeed: names of modules in its own file; experts in ours, by number.

_NUMBERED = ".{expert}" + MASTER
_HF_APART: Table = (
    Row(_HF_EXPERTS + ".gate_up_proj" + _NUMBERED, (Part.GATE, Part.UP)),
    Row(_HF_EXPERTS + ".down_proj" + _NUMBERED, (Part.DOWN,)),
)
_GPT = "blocks.{layer}."
_GPT_MOE = _GPT + "ffn"
_GPT_DENSE: Table = (
    Row("token_embedding.weight", (Part.EMBEDDING,)),
    Row("position_embedding.weight", (Part.POSITIONS,)),
    Row("final_norm.weight", (Part.FINAL_NORM,)),
    Row("final_norm.bias", (Part.FINAL_NORM_BIAS,)),
    Row("head.weight", (Part.OUTPUT,)),
    Row(_GPT + "attention_norm.weight", (Part.INPUT_NORM,)),
    Row(_GPT + "attention_norm.bias", (Part.INPUT_NORM_BIAS,)),
    Row(_GPT + "attention.query_key_value.weight", _QKV),
    Row(_GPT + "attention.query_key_value.bias", _QKV_BIAS),
    Row(_GPT + "attention.output.weight", (Part.PROJECTION,)),
    Row(_GPT + "attention.output.bias", (Part.PROJECTION_BIAS,)),
    Row(_GPT + "ffn_norm.weight", (Part.DENSE_NORM,)),
    Row(_GPT + "ffn_norm.bias", (Part.DENSE_NORM_BIAS,)),
    Row(_GPT + "ffn_norm.weight", (Part.MOE_NORM,)),
    Row(_GPT + "ffn_norm.bias", (Part.MOE_NORM_BIAS,)),
    Row(_GPT_MOE + ".0.weight", (Part.DENSE_UP,)),
    Row(_GPT_MOE + ".0.bias", (Part.DENSE_UP_BIAS,)),
    Row(_GPT_MOE + ".2.weight", (Part.DENSE_DOWN,)),
    Row(_GPT_MOE + ".2.bias", (Part.DENSE_DOWN_BIAS,)),
    Row(_GPT_MOE + ".deepspeed_moe.gate.wg.weight", (Part.ROUTER,)),
)
_GPT_APART: Table = (
    Row(_GPT_MOE + ".0.weight" + _NUMBERED, (Part.UP,)),
    Row(_GPT_MOE + ".0.bias" + _NUMBERED, (Part.UP_BIAS,)),
    Row(_GPT_MOE + ".2.weight" + _NUMBERED, (Part.DOWN,)),
    Row(_GPT_MOE + ".2.bias" + _NUMBERED, (Part.DOWN_BIAS,)),
)


_ZERO: Mapping[AnyPart, AnyPart] = {Part.ROUTER_BIAS: Part.ROUTER}
"""What Megatron's routers have if linears have biases, and those of ``deepspeed.moe`` have not."""


def in_deepspeed(model: AnyModel) -> DeepSpeedNames:
    """Names of modules in its own file; experts in ours, by number."""
    if isinstance(model, ListedModel):
        return model.deepspeed
    decoder = decoder_of(model)
    if decoder.is_gpt:
        slots = "{layer}.deepspeed_moe.experts.deepspeed_experts.{slot}.0.weight"
        dense, apart, replaced, output = _GPT_DENSE, _GPT_APART, _GPT_MOE, "head.weight"
    else:
        slots = "{layer}.gate_up_proj.{slot}"
        dense, apart, replaced = (*_HF_DENSE, _HF_ROUTER), _HF_APART, _HF_EXPERTS
        output = "lm_head.weight"
    # A module's state has a shared weight under both of its names.
    tied = (Row(output, (Part.EMBEDDING,)),) if decoder.is_tied else ()
    layers = tuple(replaced.format(layer=layer) for layer in decoder.moe_layers)
    return DeepSpeedNames((*dense, *tied), apart, layers, slots, _ZERO)


# Megatron: names of its distributed checkpoints, which do not depend on how a model is split.

_EMBEDDINGS: Table = (
    Row("embedding.word_embeddings.weight", (Part.EMBEDDING,)),
    Row("embedding.position_embeddings.weight", (Part.POSITIONS,)),
    Row("output_layer.weight", (Part.OUTPUT,)),
    Row("decoder.final_layernorm.weight", (Part.FINAL_NORM,)),
    Row("decoder.final_layernorm.bias", (Part.FINAL_NORM_BIAS,)),
)
_OF_LAYERS: Table = (
    Row("self_attention.linear_qkv.layer_norm_weight", (Part.INPUT_NORM,)),
    Row("self_attention.linear_qkv.layer_norm_bias", (Part.INPUT_NORM_BIAS,)),
    Row("self_attention.linear_qkv.weight", _QKV, is_grouped=True),
    Row("self_attention.linear_qkv.bias", _QKV_BIAS, is_grouped=True),
    Row("self_attention.q_layernorm.weight", (Part.QUERY_NORM,)),
    Row("self_attention.k_layernorm.weight", (Part.KEY_NORM,)),
    Row("self_attention.linear_proj.weight", (Part.PROJECTION,)),
    Row("self_attention.linear_proj.bias", (Part.PROJECTION_BIAS,)),
    Row("mlp.linear_fc1.layer_norm_weight", (Part.DENSE_NORM,)),
    Row("mlp.linear_fc1.layer_norm_bias", (Part.DENSE_NORM_BIAS,)),
    Row("mlp.linear_fc1.bias", (Part.DENSE_UP_BIAS,)),
    Row("mlp.linear_fc2.weight", (Part.DENSE_DOWN,)),
    Row("mlp.linear_fc2.bias", (Part.DENSE_DOWN_BIAS,)),
    Row("mlp.router.weight", (Part.ROUTER,)),
    Row("mlp.router.bias", (Part.ROUTER_BIAS,)),
    Row("mlp.experts.experts.linear_fc1.bias", (Part.UP_BIAS,)),
    Row("mlp.experts.experts.linear_fc2.weight", (Part.DOWN,)),
    Row("mlp.experts.experts.linear_fc2.bias", (Part.DOWN_BIAS,)),
)
_GATED: Table = (
    Row("mlp.linear_fc1.weight", (Part.DENSE_GATE, Part.DENSE_UP)),
    Row("mlp.experts.experts.linear_fc1.weight", (Part.GATE, Part.UP)),
)
_NOT_GATED: Table = (
    Row("mlp.linear_fc1.weight", (Part.DENSE_UP,)),
    Row("mlp.experts.experts.linear_fc1.weight", (Part.UP,)),
)
_NORM_OF_TE: Table = (
    Row("pre_mlp_layernorm.weight", (Part.MOE_NORM,)),
    Row("pre_mlp_layernorm.bias", (Part.MOE_NORM_BIAS,)),
)
_NORM_OF_LOCAL: Table = (
    Row("mlp.linear_fc1.layer_norm_weight", (Part.MOE_NORM,)),
    Row("mlp.linear_fc1.layer_norm_bias", (Part.MOE_NORM_BIAS,)),
)
"""The one name that depends on ``--transformer-impl``."""


def in_megatron(model: Model) -> Table:
    """What is written: the norm before experts under both of its names, for either implementation.

    Layers are stacked where all have experts: Megatron asks for them so.
    """
    rows = (*_NORM_OF_TE, *_NORM_OF_LOCAL, *_OF_LAYERS)
    return _megatron(model, rows, is_stacked=model.is_uniform)


def megatron_layouts(model: Model) -> Iterator[Table]:
    """What may be read: names of either implementation, layers stacked or not."""
    for norm in (_NORM_OF_TE, _NORM_OF_LOCAL):
        for is_stacked in (True, False):
            if model.is_uniform or not is_stacked:
                yield _megatron(model, (*norm, *_OF_LAYERS), is_stacked=is_stacked)


def _megatron(model: Model, of_layers: Table, *, is_stacked: bool) -> Table:
    prefix = "decoder.layers." if is_stacked else "decoder.layers.{layer}."
    rows = (*of_layers, *(_NOT_GATED if model.is_gpt else _GATED))
    return (*_EMBEDDINGS, *(row._replace(name=prefix + row.name) for row in rows))


EXTRA_STATES: Table = (
    Row("decoder.final_layernorm", (Part.FINAL_NORM,)),
    *(
        Row("decoder.layers." + name, (part,))
        for name, part in (
            ("self_attention.linear_qkv", Part.QUERY),
            ("self_attention.linear_proj", Part.PROJECTION),
            ("self_attention.q_layernorm", Part.QUERY_NORM),
            ("self_attention.k_layernorm", Part.KEY_NORM),
            ("pre_mlp_layernorm", Part.MOE_NORM),
            ("mlp.linear_fc1", Part.DENSE_UP),
            ("mlp.linear_fc2", Part.DENSE_DOWN),
            ("mlp.experts.experts.linear_fc1", Part.UP),
            ("mlp.experts.experts.linear_fc2", Part.DOWN),
        )
    ),
)
"""Modules that Megatron expects an ``_extra_state`` of, which is empty without FP8."""
