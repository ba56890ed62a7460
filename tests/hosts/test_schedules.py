# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate that users make on optimizers of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import AdamW, lr_scheduler

from tests.hosts import jobs
from tests.hosts.jobs import Job
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of

STEPS = 5


def cosine(optimizer: Any) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, 6)


def sequential(optimizer: Any) -> Any:
    falling = lr_scheduler.ExponentialLR(optimizer, 0.5)
    bending = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return lr_scheduler.SequentialLR(optimizer, [falling, bending], [2])


def chained(optimizer: Any) -> Any:
    falling = lr_scheduler.ExponentialLR(optimizer, 0.5)
    return lr_scheduler.ChainedScheduler([falling, lr_scheduler.StepLR(optimizer, 2)], optimizer)


def by_group(optimizer: Any) -> Any:
    """Each group in a way of its own."""
    return lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1 / (1 + step), lambda step: 2.0**step, lambda step: 1.0]
    )


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "by group": by_group,
    "cosine with warm-up": cosine,
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.2, 0.3], total_steps=9),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "sequential": sequential,
    "chained": chained,
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, min_lr=[1e-4, 2e-4, 3e-4]),
}


@dataclass(frozen=True)
class Plan:
    """How a run's rates are changed."""

    schedule: str
    is_passed: bool = True
    folder: str = ""
    saves: bool = False
    loads: bool = False


class Rates(NamedTuple):
    """After a step."""

    of_weights: dict[str, float]
    reported: list[float]
    users: list[float]


class Run(NamedTuple):
    losses: list[float]
    rates: list[Rates]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Experts alone, experts beside dense weights, dense weights alone."""
    named = [*model.named_parameters()]
    ups = [p for name, p in named if "up_EFD" in name]
    norms = [p for name, p in named if "norm" in name]
    others = [p for name, p in named if "up_EFD" not in name and "norm" not in name]
    return [
        {"params": ups, "lr": 1e-2},
        {"params": others, "lr": 2e-3, "betas": (0.8, 0.9)},
        {"params": norms, "lr": 1e-3, "weight_decay": 0.0},
    ]


def train(rank: int, world_size: int, job: Job, plan: Plan) -> Run:
    import deepspeed
    import torch.distributed as dist

    model = jobs.model_of(job)
    optimizer = AdamW(groups_of(model))
    schedule = SCHEDULES[plan.schedule](optimizer)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule if plan.is_passed else None,
        config=jobs.document_of(job, world_size),
    )
    path = Path(plan.folder) / f"schedule {rank}"
    if plan.loads:
        engine.load_checkpoint(plan.folder)
        if not plan.is_passed:
            schedule.load_state_dict(torch.load(path, weights_only=False))
    run = Run([], [])
    for step in range(engine.global_steps, STEPS):
        total = torch.zeros(())
        for number in range(rank, job.micro_batches, world_size):
            loss = jobs.loss_of(engine, jobs.micro_batch(step, number))
            engine.backward(loss)
            metrics = {"metrics": 1.0} if plan.schedule == "plateau" else {}
            engine.step(lr_kwargs=metrics)
            total += loss.detach()
        if not plan.is_passed:
            schedule.step(**metrics)
        dist.all_reduce(total)
        run.losses.append(float(total) / job.micro_batches)
        run.rates.append(rates_of(engine, optimizer, schedule))
        if plan.saves and step == 1:
            engine.save_checkpoint(plan.folder)
            torch.save(schedule.state_dict(), path)
    return run


def rates_of(engine: Any, optimizer: Any, schedule: Any) -> Rates:
    from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates

    states = OptimizerStates(engine)
    of_weights = {}
    for name, parameter in engine.module.named_parameters():
        options = states.options(parameter)
        assert options is not None
        key = name.rstrip(".0123456789") if ".experts." in name else name
        of_weights[key] = float(options["lr"])
    users = [group["lr"] for group in optimizer.param_groups]
    return Rates(of_weights, list(schedule.get_last_lr()), users)


def job_of(strategy: str, stage: int, **keys: Any) -> Job:
    job = Job("toy, two experts a layer", stage, strategy=strategy, optimizer="object", **keys)
    return zebra(job, num_micro_batches=1) if strategy == "zebra" else job


def run(job: Job, plan: Plan) -> list[Run]:
    result: list[Run] = pool_of(2).run(train, job, plan)
    return result


def stock(job: Job, plan: Plan) -> Run:
    """Without us."""
    return run(replace(job, strategy="ep", keys=(), block=False), plan)[0]


def check_equal(ours: list[Run], theirs: Run) -> None:
    known: set[str] = set()
    for each in ours:
        assert each.losses == pytest.approx(theirs.losses[-len(each.losses) :], rel=1e-5)
        for got, expected in zip(each.rates, theirs.rates[-len(each.rates) :], strict=True):
            assert got.reported == expected.reported and got.users == expected.users
            assert got.of_weights.items() <= expected.of_weights.items()
        known.update(each.rates[0].of_weights)
    assert known == set(theirs.rates[0].of_weights)


QUICK = {
    "by group": ("zebra", 1, True),
    "one cycle": ("ep", 0, False),
}
"""One way of some schedules, with roles and without, in each manner of stepping."""

CASES = [
    pytest.param(schedule, *each) if each == QUICK.get(schedule) else slow(schedule, *each)
    for schedule in SCHEDULES
    for each in product(["ep", "fssdp", "zebra"], [0, 1, 2], [True, False])
]


@pytest.mark.parametrize(("schedule", "strategy", "stage", "is_passed"), CASES)
def test_rates_are_those_without_us(
    schedule: str, strategy: str, stage: int, is_passed: bool
) -> None:
    job, plan = job_of(strategy, stage), Plan(schedule, is_passed)
    check_equal(run(job, plan), stock(job, plan))


@pytest.mark.slow  # test_checkpoint.py and test_zebra_checkpoint.py have one of each
@pytest.mark.parametrize(
    ("schedule", "is_passed", "source", "goals"),
    [
        ("sequential", True, ("zebra", 1), [("zebra", 1), ("fssdp", 0)]),
        ("one cycle", False, ("ep", 2), [("ep", 1), ("zebra", 2), ("zebra", 0)]),
        ("plateau", True, ("fssdp", 0), [("fssdp", 0), ("zebra", 2), ("ep", 0)]),
        ("by group", True, ("ep", 0), [("zebra", 0), ("zebra", 1), ("fssdp", 2)]),
        ("chained", False, ("zebra", 0), [("zebra", 0), ("ep", 1), ("fssdp", 1)]),
    ],
)
def test_a_schedule_goes_on(
    schedule: str,
    is_passed: bool,
    source: tuple[str, int],
    goals: list[tuple[str, int]],
    tmp_path: Path,
) -> None:
    """From a checkpoint of another strategy too. Its state is the one that it has without us."""
    plan = Plan(schedule, is_passed, str(tmp_path), saves=True)
    ours = run(job_of(*source), plan)
    theirs = stock(job_of(*source), replace(plan, folder=str(tmp_path / "stock")))
    check_equal(ours, theirs)
    for path in ("schedule 0", "schedule 1"):
        saved, expected = torch.load(tmp_path / path), torch.load(tmp_path / "stock" / path)
        assert saved == expected
    for goal in goals:
        check_equal(run(job_of(*goal), replace(plan, saves=False, loads=True)), theirs)
