# SPDX-License-Identifier: Apache-2.0
"""Every form's table has every piece of a model once, and undoes what it joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_moe_ext.commands.conversion import description, megatron, tables
from ds_moe_ext.commands.conversion.model import Experts, Model, Part, Piece, Table, pieces
from ds_moe_ext.commands.conversion.tables import cells, decoder_of, join, of_model, split

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
MODELS = {
    path.stem: decoder_of(description.model_of(description.read_document(path)))
    for path in CONFIGS.glob("*.json")
}
MODELS["half"] = replace(MODELS["qwen3_moe_tiny"], moe_layers=(0, 2), is_tied=False)
OF_HUGGINGFACE = [name for name, model in MODELS.items() if not model.is_gpt]


def readable(model: Model) -> Table:
    *_, last = tables.megatron_layouts(model)
    return last


def apart(model: Model) -> Table:
    tied = {"lm_head.weight", "head.weight"} if model.is_tied else set()
    known = tables.in_deepspeed(model)
    return tuple(row for row in known.module + known.experts if row.name not in tied)


def files(model: Model) -> Table:
    return tables.in_huggingface(model).files


def modules(model: Model) -> Table:
    (table,) = tables.in_huggingface(model).others
    return table


@pytest.mark.parametrize(
    ("name", "table"),
    [(name, table) for name in MODELS for table in (readable, apart)]
    + [(name, table) for name in OF_HUGGINGFACE for table in (files, modules)],
)
def test_every_piece_is_once_in_every_form(name: str, table: Callable[[Model], Table]) -> None:
    model = MODELS[name]
    counts = Counter(piece for cell in cells(model, table(model)) for piece in cell.pieces)
    zeros = {Part.ROUTER_BIAS} if table is apart else set()
    assert counts == Counter(piece for piece in pieces(model) if piece.part not in zeros)


@pytest.mark.parametrize("name", MODELS)
def test_split_undoes_join(name: str) -> None:
    model = MODELS[name]
    for row in of_model(model, readable(model)):
        parts = [torch.randn(model.shapes[part]) for part in row.parts]
        again = split(model, row, join(model, row, parts))
        assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))


def test_queries_lie_with_their_keys_and_values() -> None:
    """By group: 2 heads of queries, then the key and the value that they share."""
    model = MODELS["mixtral_tiny"]
    heads = model.attention
    row = next(row for row in of_model(model, readable(model)) if row.is_grouped)
    sizes = [model.shapes[part][0] for part in row.parts]
    marks = [torch.arange(size)[:, None] // heads.head_size for size in sizes]
    numbered = [mark + 10 * (1 + place) for place, mark in enumerate(marks)]
    order = join(model, row, numbered).flatten()[:: heads.head_size].tolist()
    assert order == [10, 11, 20, 30, 12, 13, 21, 31]


def test_experts_lie_by_number() -> None:
    model = MODELS["mixtral_tiny"]
    found = {
        cell.lead: cell.pieces
        for cell in cells(model, tables.in_megatron(model))
        if cell.name == "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    }
    assert list(found) == [(layer, expert) for layer in range(3) for expert in range(8)]
    assert all(
        piece.where == lead and isinstance(piece, Piece)
        for lead, both in found.items()
        for piece in both
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_moe_tiny"])
def test_a_description_comes_back(name: str) -> None:
    model = MODELS[name]
    assert description.model_of(description.document_of(model)) == model
    again = megatron.model_of_arguments(megatron.arguments_of(model))
    assert replace(again, dense_ffn_size=model.dense_ffn_size) == model


def test_our_gpt_is_a_gpt_of_megatron() -> None:
    model = MODELS["gpt_moe_tiny"]
    assert model.moe_layers == (1, 3)
    assert model.experts == Experts(8, 2, 512, True)
    assert megatron.model_of_arguments(megatron.arguments_of(model)) == model


def test_defaults_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    for family, keys in description.FAMILIES.items():
        theirs = AutoConfig.for_model(family.value).to_dict()
        assert theirs["rms_norm_eps"] == keys.norm_epsilon
        assert theirs["rope_parameters"]["rope_theta"] == keys.rope_theta
        assert theirs.get("norm_topk_prob") == keys.normalizes
        assert theirs["tie_word_embeddings"] is False
