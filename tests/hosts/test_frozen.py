# SPDX-License-Identifier: Apache-2.0
"""Models of which little is trained, as where adapters of attention are: all experts are frozen, or
some, or all but a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.hosts import jobs
from tests.hosts.jobs import Job, Result
from tests.hosts.test_training import worst
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of

TRAINED: dict[str, Callable[[str], bool]] = {
    "attention": lambda name: "self_attn" in name,
    "routers": lambda name: "mlp.gate." in name,
    "one layer's experts": lambda name: "experts" not in name or "layers.1." in name,
    "one weight of experts": lambda name: "down_proj" in name,
}


def train(rank: int, world_size: int, job: Job, trained: str, given: str = "all") -> Result | None:
    """As ``jobs.train``."""
    build = jobs.model_of

    def frozen(job: Job) -> nn.Module:
        model = build(job)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[trained](name))
        return model

    def optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        both = [[p for p in parameters if p.requires_grad == is_trained] for is_trained in (1, 0)]
        of: dict[str, Any] = {"all": parameters, "trained": both[0]}
        of["groups"] = [{"params": each} for each in both]
        kind = torch.optim.SGD if job.sgd else torch.optim.AdamW
        return kind(of[given], lr=job.learning_rate)

    with (
        mock.patch.object(jobs, "model_of", frozen),
        mock.patch.object(jobs, "_torch_optimizer", optimizer),
    ):
        return jobs.train(rank, world_size, job)


def run(world_size: int, job: Job, trained: str, given: str = "all") -> Result:
    result: Result = pool_of(world_size).run(train, job, trained, given)[0]
    return result


def stock(job: Job, trained: str) -> Result:
    """On one rank at ZeRO 0, without us."""
    return run(1, replace(job, stage=0, block=False, strategy="ep", keys=()), trained)


@pytest.mark.parametrize(
    ("trained", "strategy", "stage", "given"),
    [
        ("attention", "ep", 1, "all"),
        ("attention", "fssdp", 2, "trained"),
        ("attention", "ep", 2, "groups"),
        ("routers", "fssdp", 1, "all"),
        ("one layer's experts", "ep", 2, "trained"),
        ("one weight of experts", "fssdp", 1, "all"),
        slow("attention", "ep", 0, "groups"),
        slow("attention", "fssdp", 1, "groups"),
        slow("routers", "ep", 2, "trained"),
        slow("one layer's experts", "fssdp", 1, "groups"),
        slow("one weight of experts", "ep", 2, "trained"),
    ],
)
def test_first_gradients_equal_one_rank(
    trained: str, strategy: str, stage: int, given: str
) -> None:
    gradient = {"steps": 1, "optimizer": "object", "sgd": True, "learning_rate": 1e4}
    job = Job("mixtral", stage, strategy=strategy, **gradient)
    ours, plain = run(2, job, trained, given), stock(job, trained)
    assert worst(ours.state, plain.state) <= 1e-6


@pytest.mark.parametrize("stage", [slow(0), 1, 2])
def test_optimizer_of_the_json(stage: int) -> None:
    """It is given all parameters."""
    job = Job("mixtral", stage, steps=5, clip=0.05)
    ours, plain = run(2, job, "attention"), stock(job, "attention")
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("trained", "source", "goals"),
    [
        ("attention", ("ep", 1), [("fssdp", 0), ("ep", 2), ("zebra", 0)]),
        slow("attention", ("zebra", 0), [("zebra", 0), ("ep", 1)]),
        slow("routers", ("fssdp", 2), [("ep", 0), ("zebra", 0), ("fssdp", 2)]),
        slow("one layer's experts", ("ep", 2), [("zebra", 1), ("fssdp", 0), ("zebra", 0)]),
        slow("one weight of experts", ("fssdp", 0), [("zebra", 0), ("ep", 1)]),
    ],
)
def test_another_layout_goes_on(
    trained: str, source: tuple[str, int], goals: list[tuple[str, int]], tmp_path: Path
) -> None:
    job = Job("mixtral", steps=4, optimizer="object", folder=str(tmp_path))
    plain = stock(job, trained)
    saves = run(2, laid_out(replace(job, save_at=2), *source), trained)
    assert saves.losses == pytest.approx(plain.losses, rel=1e-6)
    for goal in goals:
        goes_on = run(2, laid_out(replace(job, resume=True), *goal), trained)
        assert goes_on.losses == pytest.approx(plain.losses[2:], rel=1e-6)
        assert worst(goes_on.state, plain.state) <= 1e-4


def laid_out(job: Job, strategy: str, stage: int) -> Job:
    job = replace(job, strategy=strategy, stage=stage)
    return zebra(job, num_micro_batches=1) if strategy == "zebra" else job
