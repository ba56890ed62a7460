# SPDX-License-Identifier: Apache-2.0
"""Runs with replicas: what each rank does for them counted, and results compared.

Collectives can be late on purpose, each by another time on each rank, and what a gather will write
is not a number until it has arrived.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_moe_ext.core.comm import Arrived, Traffic, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.core.hardware import Collectives, Device, Hardware, Link
from ds_moe_ext.core.share import LevelShare
from ds_moe_ext.core.transfer import Part
from ds_moe_ext.hosts.steps.planning import Planning
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule.executor import Steps
from tests.hosts.jobs import Job, Result, train
from tests.hosts.varied import VARIED
from tests.ranks import pool_of

SLOW = Hardware(
    name="of a test",
    source="made up",
    num_nodes=4,
    ranks_per_node=2,
    device=Device(name="CPU"),
    intra=Link(bytes_per_s=1e6),
    inter=Link(bytes_per_s=2e5),
    intra_collectives=Collectives(copy=Link(bytes_per_s=1e12)),
    copy=Link(bytes_per_s=1e12),
)
"""Where a row on its way is so dear that dividing anew always pays, and replicas are cheap."""

REPLICAS = "ds_moe_ext.moe.replicas"

Tensors = Mapping[int, Sequence[Tensor]]


@dataclass(frozen=True)
class Step:
    """What one rank did in one step."""

    plans: tuple[Plan, ...]
    gathers: tuple[int, ...]
    reductions: tuple[int, ...]


@dataclass
class Watch:
    """Sees the sparse collectives of its process."""

    late_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    _gathers: list[int] = field(default_factory=list)
    _reductions: list[int] = field(default_factory=list)

    def gather(self, part: Part, chunks: Tensors, buffers: Tensors, group: Any) -> Steps[Traffic]:
        for buffer in (tensor for own in buffers.values() for tensor in own):
            buffer.fill_(torch.nan)
        self._be_late(part)
        traffic = yield from sparse_all_gather(part, chunks, buffers, group)
        self._gathers.append(traffic.received_bytes)
        return traffic

    def reduce(self, part: Part, grads: Tensors, group: Any, **how: Any) -> Steps[Arrived]:
        self._be_late(part)
        arrived = yield from sparse_reduce_scatter(part, grads, group, **how)
        self._reductions.append(arrived.traffic.sent_bytes)
        return arrived

    def end_step(self, planning: Planning) -> None:
        plans = tuple(layer.routed.layer_context.plan for layer in planning.layers)
        self.steps.append(Step(plans, tuple(self._gathers), tuple(self._reductions)))
        self._gathers.clear()
        self._reductions.clear()

    def _be_late(self, part: Part) -> None:
        number = len(self._gathers) + len(self._reductions)
        chance = np.random.default_rng([part.ep_rank, len(self.steps), number])
        time.sleep(self.late_s * chance.random())


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """While it lasts, the process's sparse collectives go through ``watch``."""
    after_step = Planning.after_step

    def then_plan(planning: Planning, step: int, rows: Any) -> None:
        watch.end_step(planning)
        after_step(planning, step, rows)

    with (
        mock.patch("ds_moe_ext.moe.replica_memory.sparse_all_gather", watch.gather),
        mock.patch(f"{REPLICAS}.sparse_reduce_scatter", watch.reduce),
        mock.patch.object(Planning, "after_step", then_plan),
    ):
        yield


def train_watched(
    rank: int, world_size: int, job: Job, late_s: float = 0.0
) -> tuple[Result | None, list[Step]]:
    """Run the job; rank 0 also returns its result."""
    watch = Watch(late_s)
    with watching(watch):
        result = train(rank, world_size, job)
    return result, watch.steps


# In the process of the tests.


def varied(job: Job, **keys: Any) -> Job:
    """The job by plans at random."""
    return replace(job, strategy=VARIED, keys=tuple(keys.items()))


def fssdp(job: Job, **keys: Any) -> Job:
    """The job by HECATE's plans."""
    return replace(job, strategy="fssdp", keys=tuple(keys.items()))


def run(world_size: int, job: Job, late_s: float = 0.0) -> tuple[Result, list[Step]]:
    """The job's result, and the steps of rank 0."""
    result, steps = pool_of(world_size).run(train_watched, job, late_s)[0]
    return result, steps


@functools.cache
def plain(world_size: int, job: Job) -> Result:
    """The job by plain expert parallelism on as many ranks."""
    result: Result = pool_of(world_size).run(train, replace(job, strategy="ep", keys=()))[0]
    return result


@functools.cache
def alone(job: Job) -> Result:
    """The job on one rank without us; at ZeRO 1 where norms count, of which DeepSpeed has none at
    ZeRO 0, and where masters do."""
    stage = min(job.stage, 1) if job.clip or job.dtype == "bfloat16" else 0
    job = replace(job, stage=stage, block=False, strategy="ep", keys=(), hardware=None)
    result: Result = pool_of(1).run(train, job)[0]
    return result


def check_equal(ours: Result, theirs: Result, job: Job, tolerance: float = 1e-12) -> None:
    """To the last digits, every loss, every norm if both clip, and every weight at the end."""
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    if job.clip and any(theirs.norms):
        assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
    assert worst(ours.state, theirs.state, job) <= tolerance


def worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], job: Job) -> float:
    """Largest error of a parameter, over its largest value, or over Adam's learning rate."""
    assert ours.keys() == theirs.keys()
    least = 1e-30 if job.sgd else job.learning_rate
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=least))
        for name in theirs
    )


def num_copied(steps: Sequence[Step]) -> list[int]:
    """Replicas in each step's plans."""
    return [
        sum(int((plan.target.holds_EC & ~plan.owner.holds_EC).sum()) for plan in step.plans)
        for step in steps
    ]


def num_moved(steps: Sequence[Step]) -> int:
    """Experts that went to new owners, in all steps."""
    pairs = itertools.pairwise(steps)
    return sum(
        int((before.owner.owner_E != after.owner.owner_E).sum())
        for first, second in pairs
        for before, after in zip(first.plans, second.plans)
    )


def with_rows(steps: Sequence[Step]) -> Iterator[tuple[Plan, np.ndarray]]:
    """Plans, and the rows of each one's step where the next is planned by these alone."""
    for first, second in itertools.pairwise(steps):
        for plan, after in zip(first.plans, second.plans):
            if after.predicted_CE is not None:
                yield plan, after.predicted_CE


def divides_anew(steps: Sequence[Step]) -> bool:
    """Whether rows were ever divided otherwise than in the parts that were planned."""
    return any(
        rule.of_rows(rows_CE).describe() != replace(rule, sweeps=0).of_rows(rows_CE).describe()
        for plan, rows_CE in with_rows(steps)
        if isinstance(rule := plan.share, LevelShare)
    )
