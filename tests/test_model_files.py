# SPDX-License-Identifier: Apache-2.0
"""Model files of real sizes: as large as their authors say, and what would be replaced in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt_moe import GptMoe, GptMoeConfig
from torch import nn

from ds_moe_ext.commands.conversion.description import BUILDER, is_model_file
from ds_moe_ext.commands.model_layers import layers_table
from ds_moe_ext.files.documents import read_document

MODELS = Path(__file__).parents[1] / "configs" / "models"
OF_TRANSFORMERS = {
    "public/mixtral_8x7b": (46.70, 32),
    "public/mixtral_8x22b": (140.62, 56),
    "public/qwen3_30b_a3b": (30.53, 48),
    "public/deepseek_v3": (671.03, 58),
    "papers/hetermoe_w1": (2.156, 4),
    "papers/hetermoe_w2": (4.270, 4),
    "papers/hetermoe_d1": (2.135, 8),
    "papers/hetermoe_d2": (1.205, 6),
    "papers/hetermoe_d3": (3.545, 8),
}
"""Weights in billions, of HeterMoE's without embeddings as the paper counts; MoE layers."""
OF_GPT = {
    "papers/hecate_gpt_s": (1.84, 12),
    "papers/hecate_gpt_l": (7.36, 12),
    "papers/hecate_bert": (3.27, 12),
    "papers/hecate_bert_deep": (6.54, 24),
    "papers/fsmoe_gpt2_xl": (8.35, 48),
    "papers/proprophet_s": (0.214, 12),
    "papers/proprophet_m": (0.857, 12),
    "papers/proprophet_l": (3.42, 12),
    "papers/proprophet_ds": (0.429, 24),
    "papers/proprophet_dm": (1.713, 24),
}
"""Likewise, without embeddings; biases and norms, which papers do not count, are 0.3 % at most."""


def path_of(name: str) -> Path:
    return MODELS / f"{name}.json"


def test_all_files_are_here() -> None:
    there = {str(path.relative_to(MODELS).with_suffix("")) for path in MODELS.glob("*/*.json")}
    assert there == {*OF_TRANSFORMERS, *OF_GPT}
    assert all(is_model_file(read_document(path_of(name))) for name in there)


def billions(model: nn.Module, *without: str) -> float:
    """Weights, but for those whose names have one of these in them."""
    weights = model.named_parameters()
    return sum(p.numel() for name, p in weights if not any(w in name for w in without)) / 1e9


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    weights, num_layers = OF_TRANSFORMERS[name]
    document = read_document(path_of(name))
    with torch.device("meta"):
        config = AutoConfig.for_model(document["family"], **document["config"])
        model = AutoModelForCausalLM.from_config(config)
    without = ("embed_tokens", "lm_head") if name.startswith("papers/") else ()
    assert billions(model, *without) == pytest.approx(weights, rel=1e-3)
    assert layers_table(str(path_of(name))).row_count == num_layers


@pytest.mark.parametrize("name", OF_GPT)
def test_configs_of_gpts_are_read(name: str) -> None:
    document = read_document(path_of(name))
    config = GptMoeConfig.from_json(document["config"])
    assert config.num_layers == OF_GPT[name][1]
    assert config.moe_every == 1
    code, _, function = document[BUILDER].rpartition(":")
    assert (path_of(name).parent / code).resolve().name == "gpt_moe.py" and function == "build"


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_GPT)
def test_gpts(name: str) -> None:
    weights, num_layers = OF_GPT[name]
    config = GptMoeConfig.from_json(read_document(path_of(name))["config"])
    with torch.device("meta"):
        model = GptMoe(config)
    assert billions(model, "embedding") == pytest.approx(weights, rel=4e-3)
    assert layers_table(str(path_of(name))).row_count == num_layers
