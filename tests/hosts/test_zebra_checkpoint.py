# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of zebra parallelism: any other run goes on from them, and it from any other's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import torch_autocast
from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates
from tests.hosts import jobs
from tests.hosts.checkpoints import (
    LAST,
    MOVED,
    Held,
    Layout,
    assert_all_raise,
    assert_equal,
    edit_module,
    ep,
    fssdp,
    held_by,
    joined,
    refused,
    run_steps,
    saved,
    striped,
)
from tests.hosts.copied_runs import check_equal
from tests.hosts.jobs import Job, Result, train
from tests.hosts.test_states import trust_in_float16
from tests.hosts.zebra_runs import by_device, zebra
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")


def trained(layout: Layout, job: Job) -> Result:
    """A job by a layout's strategy."""
    theirs = layout.job
    job = replace(job, strategy=theirs.strategy, keys=theirs.keys, stage=theirs.stage)
    result: Result = pool_of(layout.world_size).run(train, job)[0]
    return result


@pytest.mark.slow  # in float32, test_checkpoint.py has both directions
@pytest.mark.parametrize(
    ("source", "goal"),
    [
        (striped(2, 0, moved=[0, 1]), striped(2, 0, moved=[2, 0])),
        (striped(2, 0), ep(2, 0)),
        (ep(2, 0), striped(2, 0, moved=[0, 3])),
        (striped(4, 0, 2, 2, moved=[1, 0]), striped(2, 0)),
        (striped(2, 0), striped(4, 0)),
        (striped(4, 0), fssdp(2, 0)),
    ],
    ids=str,
)
def test_in_float64_nothing_has_happened(source: Layout, goal: Layout, tmp_path: Path) -> None:
    job = Job("mixtral", dtype="float64", clip=0.5, steps=4)
    straight = trained(goal, job)
    trained(source, replace(job, steps=2, save_at=2, folder=str(tmp_path)))
    resumed = trained(goal, replace(job, folder=str(tmp_path), resume=True))
    rest = Result(straight.losses[2:], straight.norms[2:], straight.state)
    check_equal(resumed, rest, job)


@pytest.mark.slow
def test_a_run_with_replicas_resumes(tmp_path: Path) -> None:
    """Saved while there are some; resumed with and without a balance."""
    plain = zebra(Job("mixtral", 0, dtype="float64", clip=0.5, steps=9), 2, 2, num_micro_batches=1)
    keys = (("overlap_degree", 2), ("replicas_per_rank", 2))
    job = replace(plain, balance="fssdp", balance_keys=keys)
    straight: Result = pool_of(4).run(train, job)[0]
    pool_of(4).run(train, replace(job, steps=7, save_at=7, folder=str(tmp_path)))
    rest = Result(straight.losses[7:], straight.norms[7:], straight.state)
    for goal in (job, plain):
        resumed = pool_of(4).run(train, replace(goal, folder=str(tmp_path), resume=True))[0]
        check_equal(resumed, rest, job)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("goes", ["here", "to neighbours", "to ep"])
def test_groups_of_ranks_that_are_no_neighbours(goes: str, stage: int, tmp_path: Path) -> None:
    """There and back."""
    job = Job("mixtral", stage, dtype="float32" if stage else "float64", clip=0.5, steps=4)
    here = zebra(job, 1, 1, attention_device="A40", moved=[0, 1], num_micro_batches=1)
    next_to = zebra(job, 1, 1, moved=[1, 0], num_micro_batches=1)
    there = {"here": here, "to neighbours": next_to, "to ep": job}[goes]
    work = partial(pool_of(4).run, by_device, ("A40", "A40", "T4", "T4"), train)
    straight = work(here)[0]
    rest = Result(straight.losses[2:], straight.norms[2:], straight.state)
    for number, (source, goal) in enumerate([(here, there), (there, here)]):
        folder = str(tmp_path / str(number))
        work(replace(source, steps=2, save_at=2, folder=folder))
        resumed = work(replace(goal, folder=folder, resume=True))[0]
        if stage:
            assert resumed.losses == pytest.approx(rest.losses, rel=2e-5)
            assert resumed.norms == pytest.approx(rest.norms, rel=2e-4)
        else:
            check_equal(resumed, rest, job)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_in_float32_nothing_has_happened(stage: int, tmp_path: Path) -> None:
    """Saved on two ranks, resumed on four: four roundings of a sum in place of two."""
    job = Job("mixtral", clip=0.5, steps=4)
    straight = trained(striped(2, stage, moved=[0, 1]), job)
    trained(striped(2, stage, moved=[0, 1]), replace(job, steps=2, save_at=2, folder=str(tmp_path)))
    resumed = trained(striped(4, stage, 2, 2), replace(job, folder=str(tmp_path), resume=True))
    assert resumed.losses == pytest.approx(straight.losses[2:], rel=2e-6)
    assert resumed.norms == pytest.approx(straight.norms[2:], rel=2e-5)


# Beside weights and states.


class Counted(NamedTuple):
    """What a rank's engine counts."""

    scale: float
    batches: int  # of the schedule
    rates: list[float]
    steps: int
    skipped: int
    samples: int
    client: dict[str, Any]


# DeepSpeed remembers in a module that a process has once used autocast.
@mock.patch.object(torch_autocast, "TORCH_AUTOCAST_INITIALIZED", False)
@trust_in_float16
def counted(rank: int, world_size: int, job: Job, folder: str, saves: bool) -> Counted:
    """Of a run that saved or loaded."""
    engine = jobs.engine_of(job, world_size)
    client = {"mine": [7]}
    if saves:
        if not engine.fp16_enabled():  # autocast, whose first scale is no setting
            engine.optimizer.loss_scale = 2.0**24
        run_steps(rank, world_size, engine, range(4))
        engine.save_checkpoint(folder, client_state=client)
    else:
        client = engine.load_checkpoint(folder)[1]
    return Counted(
        float(engine.optimizer.loss_scale),
        engine.lr_scheduler.last_batch_iteration,
        engine.lr_scheduler.get_lr()[:1],
        engine.global_steps,
        engine.skipped_steps,
        engine.global_samples,
        {"mine": client["mine"]},
    )


HALVES = ("fp16", {"enabled": True, "initial_scale_power": 20, "hysteresis": 1})
AUTOCAST = ("torch_autocast", {"enabled": True, "dtype": "float16"})


@pytest.mark.parametrize(
    ("stage", "halves"),
    [slow(0, HALVES), (1, HALVES), slow(2, HALVES), slow(1, AUTOCAST), slow(2, AUTOCAST)],
)
def test_scale_schedule_and_counters_go_on(stage: int, halves: Any, tmp_path: Path) -> None:
    """The first steps overflow, on all ranks."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.1}}
    job = Job("gpt_moe", stage, extra=(halves, ("scheduler", schedule)))
    by_zebra = zebra(job, moved=[0, 1], num_micro_batches=1)
    others = zebra(job, 2, 2, num_micro_batches=1)
    written = pool_of(2).run(counted, by_zebra, str(tmp_path / "zebra"), True)
    assert written[0].skipped and written[0].scale < 2**24 and written[0] == written[1]
    for world_size, goal in ((2, by_zebra), (2, job), (4, others)):
        got = pool_of(world_size).run(counted, goal, str(tmp_path / "zebra"), False)
        assert got == [written[0]] * world_size
    expected = pool_of(2).run(counted, job, str(tmp_path / "ep"), True)[0]
    for each in pool_of(2).run(counted, by_zebra, str(tmp_path / "ep"), False):
        assert each == expected


def rates(rank: int, world_size: int, job: Job, folder: str, saves: bool) -> list[Rates]:
    """Rates of weights, and what the schedule shows, of a run that saved, or loaded after a step on
    other data; then after a further step."""
    import deepspeed

    def optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        experts = [p for p in parameters if is_moe_param(p)]
        dense = [p for p in parameters if not is_moe_param(p)]
        groups = [{"params": dense, "lr": 1e-3}, {"params": experts, "lr": 1e-2}]
        return torch.optim.AdamW([group for group in groups if group["params"]])

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        bending = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [falling, bending], [4])

    with (
        mock.patch.object(jobs, "_torch_optimizer", optimizer),
        mock.patch.object(
            deepspeed, "initialize", partial(deepspeed.initialize, lr_scheduler=schedule)
        ),
    ):
        engine = jobs.engine_of(replace(job, optimizer="callable"), world_size)

    def seen() -> Rates:
        states = OptimizerStates(engine)
        of_kinds = {
            is_moe_param(p): float(states.options(p)["lr"]) for p in engine.module.parameters()
        }
        return Rates(of_kinds, sorted(engine.get_lr()), sorted(engine.lr_scheduler.get_last_lr()))

    run_steps(rank, world_size, engine, range(3) if saves else range(1))
    if saves:
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = [seen()]
    for step in range(3, 6):
        run_steps(rank, world_size, engine, [step])
        found.append(seen())
    return found


class Rates(NamedTuple):
    of_kinds: dict[bool, float]  # by whether a weight is an expert's
    used: list[float]  # by the optimizer
    reported: list[float]  # by the schedule


@pytest.mark.parametrize(
    ("stage", "moves"),
    [slow(1, [[0, 1]]), *(slow(stage, [None, [0, 1]]) for stage in (0, 1, 2))],
)
def test_rates_of_groups_that_a_rank_lacks(
    stage: int, moves: list[list[int] | None], tmp_path: Path
) -> None:
    """Experts have another rate than dense weights; torch keeps it in the schedule's state, in the
    order of the groups of the rank that saved."""
    layouts = [ep(2, stage), *(striped(2, stage, moved=moved) for moved in moves)]
    for number, source in enumerate(layouts):
        folder = str(tmp_path / str(number))
        expected = merged(pool_of(2).run(rates, source.job, folder, True))
        assert expected[0] == {False: 1e-3 / 8, True: 1e-2 / 8}
        for goal in layouts:
            ranks = pool_of(2).run(rates, goal.job, folder, False)
            assert merged(ranks) == [pytest.approx(each) for each in expected]


def merged(ranks: list[list[Rates]]) -> list[dict[bool, float]]:
    """The rates of both kinds after each step, on which ranks agree."""
    found: list[dict[bool, float]] = []
    for of_ranks in zip(*ranks, strict=True):
        pairs = {pair for each in of_ranks for pair in each.of_kinds.items()}
        for each in of_ranks:
            assert each.used == each.reported == sorted(each.of_kinds.values())
        assert len(pairs) == 2
        found.append(dict(pairs))
    return found


# What is asked for.


def by_own_function(rank: int, world_size: int, job: Job, folder: str) -> list[list[str]]:
    """Names that a function of the user's is given to load, and those that it is to load into."""
    engine, seen = jobs.engine_of(job, world_size), []

    def take(src: dict[str, Tensor], dst: nn.Module) -> None:
        seen.append(sorted(src))
        dst.load_state_dict(src)

    engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=take)
    return [*seen, sorted(engine.module.state_dict())]


def test_a_function_of_the_users_loads() -> None:
    folder = str(saved(2, MOVED.job).folder)
    for given, wanted in pool_of(2).run(by_own_function, striped(2, 0).job, folder):
        assert given == wanted


def without_optimizer(rank: int, world_size: int, job: Job, folder: str, saves: bool) -> Held:
    import deepspeed

    document = jobs.document_of(job, world_size)
    del document["optimizer"]
    engine, *_ = deepspeed.initialize(model=jobs.model_of(job), config=document)
    if saves:
        engine.save_checkpoint(folder)
    else:
        for parameter in engine.module.parameters():
            parameter.data.zero_()
        engine.load_checkpoint(folder)
    return held_by(engine)


@pytest.mark.slow
def test_without_an_optimizer(tmp_path: Path) -> None:
    """Both roles save and load in one way."""
    ours, theirs = striped(2, 0), ep(2, 0)
    for number, (source, goal) in enumerate([(ours, theirs), (theirs, ours)]):
        folder = str(tmp_path / str(number))
        expected = pool_of(2).run(without_optimizer, source.job, folder, True)
        got = pool_of(2).run(without_optimizer, goal.job, folder, False)
        assert_equal(joined(got), joined(expected))


# Refusals.

DENSE = {
    "missing": (lambda module: module.pop("lm_head.weight"), r"has no \['lm_head\.weight'\]"),
    "of another shape": (
        lambda module: module.update({"lm_head.weight": torch.zeros(3)}),
        r"lm_head\.weight of shape \(3,\), but this model of shape \(64, 32\)",
    ),
    "unknown": (
        lambda module: module.update({"lm_tail.weight": torch.zeros(3)}),
        r"this model no \['lm_tail\.weight'\]",
    ),
}


def test_what_only_attention_ranks_can_tell_is_refused_by_all(tmp_path: Path) -> None:
    checkpoint = saved(2, MOVED.job)
    folders = []
    for name, (change, _) in DENSE.items():
        shutil.copytree(checkpoint.folder, tmp_path / name)
        edit_module(lambda state, change=change: change(state["module"]))(
            tmp_path / name / checkpoint.tag.name
        )
        folders.append(str(tmp_path / name))
    for layout in (MOVED, striped(2, 2, **LAST)):
        ranks = pool_of(2).run(refused, layout.job, folders)
        for (_, expected), messages in zip(DENSE.values(), zip(*ranks), strict=True):
            assert_all_raise(messages, expected)
