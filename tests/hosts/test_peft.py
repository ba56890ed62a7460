# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft: of attention they simply train; of experts that are kept or called otherwise
than most they are refused by name. Those of others: ``test_expert_adapters.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment.host_layer import any_name
from tests.hosts import families, jobs
from tests.hosts.jobs import Job, Result
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


def adapted(model: nn.Module, **targets: Any) -> nn.Module:
    """The model with adapters that already compute something, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, init_lora_weights=False, **targets)
    return get_peft_model(model, config)


def train(rank: int, world_size: int, job: Job) -> Result | None:
    build = jobs.model_of

    def with_adapters(job: Job) -> nn.Module:
        return adapted(build(job), target_modules=["q_proj", "v_proj"])

    with mock.patch.object(jobs, "model_of", with_adapters):
        return jobs.train(rank, world_size, job)


def run(world_size: int, **keys: Any) -> Result:
    result: Result = pool_of(world_size).run(train, Job(**keys))[0]
    return result


@pytest.mark.parametrize("strategy", ["ep", slow("fssdp")])
def test_adapters_of_attention_train_as_in_stock(strategy: str) -> None:
    keys: dict[str, Any] = {"dtype": "float64", "stage": 0, "steps": 3}
    stock, ours = run(1, block=False, **keys), run(2, strategy=strategy, **keys)
    for mine, theirs in zip(ours.losses, stock.losses, strict=True):
        assert abs(mine - theirs) <= 1e-10 * abs(theirs)
    assert len(set(stock.losses)) == 3
    assert ours.state.keys() == stock.state.keys()
    for name, tensor in stock.state.items():
        assert (ours.state[name] - tensor).abs().max() <= 1e-6 * max(1, tensor.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_of_attention_are_saved_and_resumed(stage: int, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"stage": stage, "steps": 4, "folder": str(tmp_path)}
    whole = run(2, strategy="ep", save_at=2, **keys)
    rest = run(2, strategy="fssdp", resume=True, **keys)
    for mine, theirs in zip(rest.losses, whole.losses[2:], strict=True):
        assert abs(mine - theirs) <= 1e-5 * abs(theirs)


def test_adapters_of_experts_that_are_called_otherwise_are_refused() -> None:
    """Of Llama 4, whose rows are weighed before."""
    targets = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    model = adapted(families.build("llama4"), target_modules=["q_proj"], target_parameters=targets)
    with pytest.raises(ValueError, match="adapter of peft") as caught:
        list(huggingface.find(model, any_name))
    assert "gate_up_proj" in str(caught.value)
    assert "leave experts out of target_parameters" in str(caught.value)


def test_adapters_within_experts_are_refused() -> None:
    """Of DBRX, whose weights are in a module of its experts."""
    model = adapted(families.build("dbrx"), target_parameters=["experts.mlp.w1"])
    with pytest.raises(ValueError, match=r"base_layer\.w1.*adapters of experts are not supported"):
        list(huggingface.find(model, any_name))


def test_adapters_of_expert_modules_are_refused() -> None:
    """Of Switch Transformers, whose experts are modules."""
    model = adapted(families.build("switch_transformers"), target_modules=["wi"])
    with pytest.raises(ValueError, match="adapters of experts are not supported"):
        list(huggingface.find(model, any_name))
