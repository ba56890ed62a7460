# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron loads what was converted, computes the same, and what it saves comes back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from ds_moe_ext.commands.conversion.conversion import Asked, Form, convert
from tests.convert import models
from tests.convert.test_deepspeed import GPT, converted, described, ran
from tests.hosts import jobs
from tests.hosts.processes import run_script
from tests.marks import slow

SIDE = Path(__file__).with_name("megatron_side.py")


class Sizes(NamedTuple):
    """Of Megatron's groups."""

    ranks: int
    tp: int
    ep: int


def set_by_megatron(loads: dict[Path, Path], tokens: Tensor, sizes: Sizes) -> list[Tensor]:
    """Logits of each checkpoint; it saves each again."""
    asked = {
        "cases": [[str(load / "release"), str(save)] for load, save in loads.items()],
        "tokens": tokens.tolist(),
        "tp": sizes.tp,
        "ep": sizes.ep,
    }
    run_script(
        SIDE,
        json.dumps(asked),
        world_size=sizes.ranks,
        python=("-W", "ignore"),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    return [torch.load(save / "logits.pt") for save in loads.values()]


def set_by_huggingface(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(models.tokens()).logits
    return logits


@cache
def quietly() -> Console:
    return Console(quiet=True)


@pytest.mark.parametrize(
    "sizes", [Sizes(1, 1, 1), slow(Sizes(2, 1, 2)), slow(Sizes(2, 2, 1)), slow(Sizes(2, 2, 2))]
)
def test_megatron_computes_what_huggingface_does(sizes: Sizes, tmp_path: Path) -> None:
    """From one checkpoint, however it is split; and what it saves is equal to the last bit."""
    expected, loads = [], {}
    for family in models.MODELS:
        expected.append(set_by_huggingface(models.saved(family, tmp_path / family)))
        there = tmp_path / f"{family}_there"
        convert(Asked(tmp_path / family, there, Form.MEGATRON), quietly())
        loads[there] = tmp_path / f"{family}_saved"
    got = set_by_megatron(loads, models.tokens(), sizes)
    for ours, theirs in zip(got, expected, strict=True):
        error = (ours[..., : models.VOCABULARY] - theirs).abs().max()
        assert error <= 1e-5 * theirs.abs().max()
    for family, save in zip(models.MODELS, loads.values(), strict=True):
        back = tmp_path / f"{family}_back"
        convert(Asked(save, back, Form.HUGGINGFACE, described=tmp_path / family), quietly())
        models.assert_equal(models.loaded(back), models.loaded(tmp_path / family))


@pytest.mark.slow
def test_our_gpt_in_megatron(tmp_path: Path) -> None:
    result = ran(GPT, save=tmp_path / "ds")
    model = described(result, tmp_path)
    there = converted(tmp_path / "ds", tmp_path / "there", Form.MEGATRON, model)
    (logits,) = set_by_megatron({there: tmp_path / "saved"}, jobs.micro_batch(0, 0), Sizes(1, 1, 1))
    assert (logits - result.logits).abs().max() <= 1e-5 * result.logits.abs().max()
    back = converted(tmp_path / "saved", tmp_path / "back", Form.DEEPSPEED, model)
    models.assert_equal(ran(GPT, load=back).state, result.state)
