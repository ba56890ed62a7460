# SPDX-License-Identifier: Apache-2.0
"""Layers of which some experts are trained and others are not, or by other groups of an optimizer:
each expert of the model has parameters of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
from ds_moe_ext.hosts.attachment.host_layer import OneEach
from ds_moe_ext.moe.feed_forward import silu_gated
from ds_moe_ext.testing import dense_experts
from tests.hosts import jobs, toy
from tests.hosts.copied_runs import varied
from tests.hosts.jobs import Job, Result
from tests.hosts.test_training import worst
from tests.marks import slow
from tests.ranks import pool_of, preload, refusal

preload("deepspeed")

GRADIENT = {"steps": 1, "optimizer": "object", "sgd": True, "learning_rate": 1e4}
REPLICAS = {"layers": 1.0, "replicas": 1.0}


class OneByOne(nn.Module):
    """The experts of a toy, each with parameters of its own."""

    def __init__(self, source: toy.Experts) -> None:
        super().__init__()
        self.num_experts = source.num_experts
        self.up, self.down = nn.ParameterList(), nn.ParameterList()
        for own, together in ((self.up, source.up_EFD), (self.down, source.down_EDF)):
            own.extend([nn.Parameter(weight.detach().clone()) for weight in together])

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        stacks = torch.stack([*self.up]), torch.stack([*self.down])
        return dense_experts(x_TD, expert_TK, score_TK, *stacks)


@register_experts(OneByOne)
def _describe(experts: OneByOne) -> ExpertsDescription:
    numbers = range(experts.num_experts)
    names = ("up", "down")
    return ExpertsDescription(
        experts.num_experts,
        names,
        FeedForwardExperts(silu_gated),
        kept_as=tuple(OneEach(tuple(f"{name}.{n}" for n in numbers)) for name in names),
    )


def _one_by_one() -> nn.Module:
    model: Any = toy.build("toy")
    for block in model.blocks:
        block.experts = OneByOne(block.experts)
    return model


FROZEN: dict[str, Callable[[str], bool]] = {
    "the first": lambda name: name.endswith((".up.0", ".down.0")) or "deepspeed_experts.0." in name,
    "all but the second": lambda name: (
        "experts." in name and not name.endswith((".up.1", ".down.1"))
    ),
    "the first rank's": lambda name: name.endswith(
        tuple(f".{weight}.{n}" for weight in ("up", "down") for n in range(4))
    ),
    "none": lambda name: False,
}


def train(
    rank: int, world_size: int, job: Job, frozen: str, rates: tuple[float, ...]
) -> Result | None:
    """As ``jobs.train``; with a second rate, the second expert of each layer is in a group that has
    it."""
    stock = jobs.model_of

    def build(job: Job) -> nn.Module:
        torch.manual_seed(0)
        model = _one_by_one() if job.family == "one by one" else stock(job)
        for name, parameter in model.named_parameters():
            if FROZEN[frozen](name):
                parameter.requires_grad_(False)
        second = [p for name, p in model.named_parameters() if name.endswith((".up.1", ".down.1"))]
        parts[:] = [p for p in model.parameters() if all(p is not own for own in second)], second
        return model

    def optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": part, "lr": rate} for part, rate in zip(parts, rates)]
        return torch.optim.SGD(groups or parameters, lr=job.learning_rate)

    parts: list[list[nn.Parameter]] = []
    with (
        mock.patch.object(jobs, "model_of", build),
        mock.patch.object(jobs, "_torch_optimizer", optimizer),
    ):
        return jobs.train(rank, world_size, job)


def stock(job: Job, frozen: str, rates: tuple[float, ...]) -> Result:
    """On one rank at ZeRO 0, without us."""
    job = replace(job, stage=0, block=False, strategy="ep", keys=())
    result: Result = pool_of(1).run(train, job, frozen, rates)[0]
    return result


@pytest.mark.parametrize(
    ("family", "strategy", "stage", "frozen", "rates"),
    [
        ("one by one", "ep", 0, "the first", ()),
        slow("one by one", "ep", 1, "the first", ()),
        slow("one by one", "ep", 0, "none", (1e4, 3e4)),
        ("one by one", "varied", 1, "the first", ()),
        slow("one by one", "varied", 0, "all but the second", ()),
        slow("gpt_moe", "varied", 0, "the first", ()),
        slow("one by one", "ep", 0, "the first rank's", ()),
        ("one by one", "fssdp", 0, "the first", ()),  # by default owners would move
        ("one by one", "fssdp", 0, "none", (1e4, 3e4)),
    ],
)
def test_first_gradients_equal_one_rank(
    family: str, strategy: str, stage: int, frozen: str, rates: tuple[float, ...]
) -> None:
    job = Job(family, stage, **GRADIENT)
    job = varied(job, **REPLICAS) if strategy == "varied" else replace(job, strategy=strategy)
    ours = pool_of(2).run(train, job, frozen, rates)[0]
    assert worst(ours.state, stock(job, frozen, rates).state) <= 1e-6


def refused(rank: int, world_size: int, job: Job, frozen: str, rates: tuple[float, ...]) -> str:
    return refusal(rank, world_size, train, job, frozen, rates)


@pytest.mark.parametrize(
    ("job", "frozen", "rates", "reported"),
    [
        (
            varied(Job("one by one", 0, **GRADIENT), shard_every=1, **REPLICAS),
            "the first",
            (),
            "a frozen owner cannot train an expert that moves to it",
        ),
        (
            Job("one by one", 1, **GRADIENT),
            "the first rank's",
            (),
            "trained experts are [[], [0]] on the ranks",
        ),
        (
            Job("one by one", 1, **GRADIENT),
            "none",
            (1e4, 3e4),
            "trained experts are [[0, 1], [0]] on the ranks",
        ),
        (Job("one by one", 3, **GRADIENT), "the first", (), "gather their weights together"),
    ],
)
def test_what_cannot_be_done_is_reported(
    job: Job, frozen: str, rates: tuple[float, ...], reported: str
) -> None:
    assert all(reported in stated for stated in pool_of(2).run(refused, job, frozen, rates))
