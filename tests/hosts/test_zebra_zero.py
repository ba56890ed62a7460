# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism in float16, whose scale all ranks share, and with rates of a role's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from deepspeed.runtime import torch_autocast
from torch import nn

from tests.hosts import jobs
from tests.hosts.jobs import Job, Result, train
from tests.hosts.test_configurations import SHAPES
from tests.hosts.test_states import trust_in_float16
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.slow  # quicker tests train at ZeRO 1 and 2 too


def by_zebra(shape: str, job: Job) -> Job:
    """The job by zebra parallelism, in stripes that cut no rank's batch."""
    _, attention, experts, moved = SHAPES[shape]
    return zebra(job, attention, experts, moved=moved, num_micro_batches=1)


class Scaled(NamedTuple):
    """A rank's run in float16."""

    result: Result | None
    scale: float  # at the end
    skipped: int  # steps


@trust_in_float16
def in_float16(rank: int, world_size: int, job: Job) -> Scaled:
    engines: list[Any] = []
    build = jobs.engine_of

    def built(*given: Any) -> Any:
        engines.append(build(*given))
        return engines[0]

    with mock.patch.object(jobs, "engine_of", built):
        result = train(rank, world_size, job)
    return Scaled(result, float(engines[0].optimizer.loss_scale), engines[0].skipped_steps)


@pytest.mark.parametrize("stage", [0, 1, slow(2)])
@pytest.mark.parametrize("shape", ["1+1 moved", slow("2+2"), slow("2 groups")])
def test_float16(shape: str, stage: int) -> None:
    """At a scale that fits, the steps of ``ep``. At one that does not, every rank skips the same
    steps until it does; rounding decides how many. At ZeRO 0 DeepSpeed's own norm leaves the
    experts of other ranks out; ours is the same at every stage."""

    def runs(power: int, made: Callable[[Job], Job], stage: int) -> list[Scaled]:
        halves = {"enabled": True, "initial_scale_power": power}
        job = Job("gpt_moe", stage, clip=0.5, steps=6, extra=(("fp16", halves),))
        return pool_of(SHAPES[shape][0]).run(in_float16, made(job))

    def striped(job: Job) -> Job:
        return by_zebra(shape, job)

    ours, theirs = runs(8, striped, stage), runs(8, lambda job: job, stage)
    assert ours[0].result.losses == pytest.approx(theirs[0].result.losses, rel=5e-4)
    assert {each.skipped for each in ours} == {0}
    unsharded = runs(8, striped, 0)[0].result.norms
    assert ours[0].result.norms[0] == pytest.approx(unsharded[0], rel=1e-4)

    ours = runs(21, striped, stage)
    assert len({(each.scale, each.skipped) for each in ours}) == 1
    assert 1 < ours[0].skipped < 6


@trust_in_float16
def in_autocast(rank: int, world_size: int, job: Job, power: int) -> Scaled:
    """From this scale on."""
    engines: list[Any] = []
    build = jobs.engine_of

    def built(*given: Any) -> Any:
        engines.append(build(*given))
        if job.stage:
            engines[0].optimizer.loss_scale = 2.0**power
        else:
            engines[0].torch_autocast_z0_gradscaler._init_scale = 2.0**power
        return engines[0]

    # DeepSpeed remembers in a module that a process has once used autocast.
    forgotten = mock.patch.object(torch_autocast, "TORCH_AUTOCAST_INITIALIZED", False)
    with mock.patch.object(jobs, "engine_of", built), forgotten:
        result = train(rank, world_size, job)
    (engine,) = engines
    scaler = engine.torch_autocast_z0_gradscaler
    scale = engine.optimizer.loss_scale if scaler is None else scaler.get_scale()
    return Scaled(result, scale, engine.skipped_steps)


@pytest.mark.parametrize(
    ("family", "strategy", "stage"),
    [
        ("mixtral", "1+1 moved", 0),
        ("mixtral", "2+2", 0),
        ("mixtral", "ep", 0),
        # Whose experts return other types than they get.
        ("gpt_moe", "1+1 moved", 0),
        ("gpt_moe", "1+1", 1),
        ("mixtral", "2+2", 1),
        ("mixtral", "1+1 moved", 2),
        ("mixtral", "ep", 2),
    ],
)
def test_autocast_in_float16(family: str, strategy: str, stage: int) -> None:
    """Ranks with other weights skip the same steps: the scale, halved each time, is one."""
    autocast = {"enabled": True, "dtype": "float16"}
    job = Job(family, stage, clip=0.5, steps=6, extra=(("torch_autocast", autocast),))
    ours = job if strategy == "ep" else by_zebra(strategy, job)
    ranks = pool_of(SHAPES.get(strategy, (2,))[0])
    theirs = ranks.run(train, replace(job, extra=()))[0]
    for power, skips in ((8, False), (24, True)):
        runs = ranks.run(in_autocast, ours, power)
        (scale,) = {each.scale for each in runs}
        assert (scale < 2**power) == skips
        if not skips:
            assert runs[0].result.losses == pytest.approx(theirs.losses, rel=2e-3)
            assert runs[0].result.norms == pytest.approx(theirs.norms, rel=2e-2)


@pytest.mark.parametrize("stage", [0, 1])
def test_autocast_in_bfloat16(stage: int) -> None:
    """Experts of DeepSpeed's own layer return bfloat16 for float32."""
    autocast = {"enabled": True, "dtype": "bfloat16"}
    job = Job("gpt_moe", stage, clip=0.5, steps=6, extra=(("torch_autocast", autocast),))
    ours = pool_of(2).run(in_bfloat16, by_zebra("1+1", job))[0]
    theirs = pool_of(2).run(train, replace(job, extra=()))[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=5e-3)
    assert ours.norms == pytest.approx(theirs.norms, rel=5e-2)


def test_autocast_where_ranks_have_no_experts() -> None:
    """Owners move, two of four ranks own none; the others' experts return other types."""
    autocast = {"enabled": True, "dtype": "bfloat16"}
    keys = (("overlap_degree", 2), ("replicas_per_rank", 2), ("reshard_interval", 1))
    job = Job("gpt_moe", 0, clip=0.5, steps=4, num_experts=2, strategy="fssdp", keys=keys)
    ours = pool_of(4).run(in_bfloat16, replace(job, extra=(("torch_autocast", autocast),)))[0]
    theirs = pool_of(4).run(train, job)[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=5e-3)
    assert ours.norms == pytest.approx(theirs.norms, rel=5e-2)


def in_bfloat16(rank: int, world_size: int, job: Job) -> Result | None:
    with mock.patch.object(torch_autocast, "TORCH_AUTOCAST_INITIALIZED", False):
        return train(rank, world_size, job)


def in_two_groups(rank: int, world_size: int, job: Job) -> Result | None:
    """With a rate for matrices and another for the rest, of which expert ranks have nothing."""

    def optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() <= 1]
        rate = job.learning_rate
        groups = [{"params": others, "lr": 10 * rate}, {"params": matrices, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=rate)

    with mock.patch.object(jobs, "_torch_optimizer", optimizer):
        return train(rank, world_size, job)


@pytest.mark.parametrize("stage", [0, 1, slow(2)])
@pytest.mark.parametrize("shape", ["1+1", slow("1+1 moved"), slow("2 groups")])
@pytest.mark.parametrize("optimizer", ["object", slow("callable")])
def test_parameter_groups_of_one_role(optimizer: str, shape: str, stage: int) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}}
    job = Job("mixtral", stage, steps=5, optimizer=optimizer, extra=(("scheduler", schedule),))
    world_size = SHAPES[shape][0]
    ours = pool_of(world_size).run(in_two_groups, by_zebra(shape, job))[0]
    theirs = pool_of(world_size).run(in_two_groups, job)[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-5)
