# SPDX-License-Identifier: Apache-2.0
"""One parameter a weight where experts stay in their slots; all else as if each had its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.hosts import jobs
from tests.hosts.checkpoints import Call, Held, Saved, assert_equal, joined, load, save
from tests.hosts.jobs import Job, Result, train
from tests.marks import slow
from tests.ranks import pool_of

REPLICAS = (("overlap_degree", 2), ("replicas_per_rank", 2))
STAYS = (*REPLICAS, ("reshard_interval", 0))
ONE_A_WEIGHT = {
    "ep": Job(),
    "esp": Job(strategy="esp", etp_size=2),
    "prophet": Job(strategy="prophet"),
    "fssdp": Job(strategy="fssdp", keys=STAYS),
    "given": Job(optimizer="object", parameters="groups"),
}
ONE_A_SLOT = {
    "fssdp": Job(strategy="fssdp", keys=REPLICAS),
    "uneven": Job(strategy="fssdp", keys=STAYS, num_experts=1, ep_ranks=2),
    "callable": Job(optimizer="callable"),
}


def shapes(rank: int, world_size: int, job: Job) -> list[dict[str, tuple[int, ...]]]:
    """Of the experts' parameters of each layer, by their names."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine = jobs.engine_of(job, world_size)
    return [
        {name: tuple(p.shape) for name, p in layer.hosted.named_parameters()}
        for layer in run_of(engine).layers
    ]


@pytest.mark.parametrize("name", ONE_A_WEIGHT)
def test_experts_that_stay_are_one_parameter_a_weight(name: str) -> None:
    job = ONE_A_WEIGHT[name]
    num_slots = job.num_experts // (1 if job.etp_size else 2)
    for layers in pool_of(2).run(shapes, job):
        for layer in layers:
            assert layer.keys() == {"gate_up_proj", "down_proj"}
            assert {shape[0] for shape in layer.values()} == {num_slots}


@pytest.mark.parametrize("name", ONE_A_SLOT)
def test_others_are_one_parameter_a_slot(name: str) -> None:
    for layers in pool_of(2).run(shapes, ONE_A_SLOT[name]):
        assert all(key.rpartition(".")[2].isdigit() for layer in layers for key in layer)


@pytest.mark.parametrize(
    ("given", "named", "alone"),
    [
        (torch.optim.AdamW, None, True),
        (torch.optim.Adafactor, "adamw", False),
        (None, "adam", True),
        (None, "lamb", False),
        (None, "muon", False),
        (None, None, False),
    ],
)
def test_optimizers_that_look_at_whole_weights_have_those_of_each_expert(
    given: Any, named: str | None, alone: bool
) -> None:
    from ds_moe_ext.hosts.deepspeed.engine import takes_each_number_alone

    optimizer = None if given is None else given([torch.nn.Parameter(torch.zeros(1, 1))])
    engine = SimpleNamespace(client_optimizer=optimizer, optimizer_name=lambda: named)
    assert takes_each_number_alone(engine) == alone


def apart(rank: int, world_size: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The same function of a rank, with a parameter for each slot."""
    from ds_moe_ext.hosts.deepspeed import engine

    with mock.patch.object(engine, "takes_each_number_alone", lambda _: False):
        return function(rank, world_size, *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "stage", "dtype"),
    [
        slow("ep", 0, "float32"),
        slow("ep", 1, "bfloat16"),
        slow("esp", 1, "float32"),
        slow("prophet", 2, "bfloat16"),
        ("fssdp", 2, "float32"),
        slow("given", 1, "float32"),
    ],
)
def test_stacked_experts_train_bit_by_bit_as_those_apart(name: str, stage: int, dtype: str) -> None:
    job = replace(ONE_A_WEIGHT[name], stage=stage, dtype=dtype, steps=4)
    stacked, *_ = pool_of(2).run(train, job)
    plain, *_ = pool_of(2).run(apart, train, job)
    assert isinstance(stacked, Result) and stacked.losses == plain.losses
    assert stacked.norms == pytest.approx(plain.norms, rel=1e-6)
    assert stacked.state.keys() == plain.state.keys()
    assert all(torch.equal(tensor, plain.state[key]) for key, tensor in stacked.state.items())


@pytest.mark.parametrize(
    ("stage", "dtype"), [slow(0, "float32"), slow(1, "bfloat16"), slow(2, "float32")]
)
def test_a_checkpoint_of_either_goes_on_as_the_other(
    stage: int, dtype: str, tmp_path: Path
) -> None:
    job = Job(stage=stage, dtype=dtype)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    stacked: list[Held] = pool_of(2).run(save, job, whole, steps=2)
    plain: list[Held] = pool_of(2).run(apart, save, job, parts, steps=2)
    assert_equal(joined(stacked), joined(plain))
    layouts = [Saved(Path(p), stacked).tag / "ds_moe_ext.json" for p in (whole, parts)]
    first, second = (_without_sums(path.read_text()) for path in layouts)
    assert first == second
    call = Call(before=1, after=2)
    for folder in (whole, parts):
        got = pool_of(2).run(load, job, folder, call)
        assert_equal(joined(got), joined(stacked))
        assert got[0].losses == stacked[0].losses
    got = pool_of(2).run(apart, load, job, whole, call)
    assert_equal(joined(got), joined(stacked))
    assert got[0].losses == stacked[0].losses


def _without_sums(text: str) -> dict[str, Any]:
    """What a layout file says that two saves have in common."""
    document = json.loads(text)
    return {k: v for k, v in document.items() if k not in ("crc32", "files", "save")}
