# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed engines of two ranks, to and from the other forms."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ds_moe_ext.commands.conversion import dcp, deepspeed
from ds_moe_ext.commands.conversion.conversion import Asked, Form, convert
from tests.convert import models
from tests.hosts import jobs
from tests.hosts.jobs import Job
from tests.ranks import pool_of

MIXTRAL = Job("mixtral", 1, dtype="bfloat16", ep_ranks=2)
GPT = Job("gpt_moe", 1, ep_ranks=2, num_layers=2)
GPT_FILE = {
    "family": "gpt_moe",
    "config": {
        "vocab_size": jobs.VOCABULARY,
        "sequence_length": jobs.LENGTH,
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "ffn_hidden_size": 48,
        "moe_every": 1,
        "moe": {"num_experts": 4, "k": 2, "drop_tokens": False},
    },
}


class Run(NamedTuple):
    """What a run left."""

    state: dict[str, Tensor]
    document: dict[str, Any]
    logits: Tensor


def run(rank: int, world_size: int, job: Job, save: str | None, load: str | None) -> Run:
    """An engine that loads or takes a step, and saves."""
    from ds_moe_ext import full_state_dict

    engine = jobs.engine_of(job, world_size)
    if load is None:
        engine.backward(jobs.loss_of(engine, jobs.micro_batch(0, rank)))
        engine.step()
    else:
        engine.load_checkpoint(load, load_module_only=True)
    if save is not None:
        engine.save_checkpoint(save)
    engine.eval()
    heard: list[Tensor] = []
    with torch.no_grad():
        head = engine.module.head if job.family == "gpt_moe" else engine.module.lm_head
        head.register_forward_hook(lambda _, __, output: heard.append(output.float()))
        jobs.loss_of(engine, jobs.micro_batch(0, 0))
    state = {name: t.detach().cpu().clone() for name, t in full_state_dict(engine.module).items()}
    document = engine.module.config.to_dict() if job.family == "mixtral" else GPT_FILE
    return Run(state, json.loads(json.dumps(document, default=str)), heard[0])


def ran(job: Job, save: Path | None = None, load: Path | None = None) -> Run:
    folders = (None if folder is None else str(folder) for folder in (save, load))
    results: list[Run] = pool_of(2).run(run, job, *folders)
    return results[0]


def described(result: Run, folder: Path) -> Path:
    path = folder / "model.json"
    path.write_text(json.dumps(result.document))
    return path


def converted(source: Path, target: Path, goal: Form, model: Path | None) -> Path:
    convert(Asked(source, target, goal, described=model), Console(quiet=True))
    return target


@pytest.mark.slow
def test_an_engine_of_mixtral(tmp_path: Path) -> None:
    """Saved in bf16 with masters in fp32, by two ranks with half of the experts each."""
    result = ran(MIXTRAL, save=tmp_path / "ds")
    model = described(result, tmp_path)
    to = partial(converted, model=model)
    hf = to(tmp_path / "ds", tmp_path / "hf", Form.HUGGINGFACE)
    expected = {name: t.to(torch.bfloat16) for name, t in result.state.items()}
    models.assert_equal(models.loaded(hf), expected)
    there = to(tmp_path / "ds", tmp_path / "megatron", Form.MEGATRON)
    back = converted(there, tmp_path / "back", Form.DEEPSPEED, None)
    again = ran(MIXTRAL, load=back)
    models.assert_equal(again.state, result.state)
    assert torch.equal(again.logits, result.logits)
    models.assert_equal(models.loaded(to(back, tmp_path / "hf2", Form.HUGGINGFACE)), expected)


@pytest.mark.slow
def test_an_engine_of_our_gpt(tmp_path: Path) -> None:
    result = ran(GPT, save=tmp_path / "ds")
    model = described(result, tmp_path)
    there = converted(tmp_path / "ds", tmp_path / "megatron", Form.MEGATRON, model)
    back = converted(there, tmp_path / "back", Form.DEEPSPEED, None)
    again = ran(GPT, load=back)
    models.assert_equal(again.state, result.state)
    assert torch.equal(again.logits, result.logits)
    with pytest.raises(ValueError, match="gpt_moe has no class in Hugging Face transformers"):
        converted(there, tmp_path / "hf", Form.HUGGINGFACE, None)
    with pytest.raises(ValueError, match="does not name its model; add --model"):
        converted(tmp_path / "ds", tmp_path / "hf", Form.HUGGINGFACE, None)
    dropping = GPT_FILE["config"]["moe"] | {"drop_tokens": True}
    model.write_text(json.dumps(GPT_FILE | {"config": GPT_FILE["config"] | {"moe": dropping}}))
    with pytest.raises(ValueError, match="drop_tokens is true"):
        converted(tmp_path / "ds", tmp_path / "other", Form.MEGATRON, model)
    with pytest.raises(ValueError, match="layer 0 has a router's bias that is not zero"):
        converted(_with_biases(there), tmp_path / "never", Form.DEEPSPEED, None)


def _with_biases(folder: Path) -> Path:
    """The same checkpoint, as if Megatron had trained its routers' biases."""
    release = folder / "release"
    stored = dcp.Folder(release)
    whole = {
        name: stored.read(name, (0,) * len(kept.size), tuple(kept.size))
        for name, kept in stored.tensors.items()
    }
    whole["decoder.layers.mlp.router.bias"] += 0.5
    tensors = {
        name: dcp.ToWrite(
            tuple(t.shape), t.dtype, {(0,) * t.dim(): dcp.ToMake(tuple(t.shape), t.clone)}
        )
        for name, t in whole.items()
    }
    dcp.write(release, tensors, {})
    return folder


def test_a_stock_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / deepspeed.LATEST).write_text("global_step1")
    with pytest.raises(ValueError, match="written without ds_moe_ext, with it disabled"):
        converted(tmp_path, tmp_path / "hf", Form.HUGGINGFACE, tmp_path)
