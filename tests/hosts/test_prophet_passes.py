# SPDX-License-Identifier: Apache-2.0
"""When replicas that a block carries travel: what hides them, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from ds_moe_ext.core.comm import Arrived, Traffic, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.moe import layer as layer_module
from ds_moe_ext.moe.dispatch import Dispatch
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.schedule.executor import Steps, ThreadStreams
from tests.hosts.copied_runs import (
    REPLICAS,
    check_equal,
    num_copied,
    plain,
    run,
    train_watched,
    varied,
)
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.hosts.test_configurations import EAGER, FREE, prophet
from tests.hosts.test_fssdp_memory import Counted, counted
from tests.hosts.test_fssdp_passes import Barriers, Kept, Met, Moment, described, too_early
from tests.marks import slow
from tests.ranks import pool_of

NUM_LAYERS = 3
HALVED = "tests.hosts.varied:Halved"


def carried(job: Job, **keys: Any) -> Job:
    """All experts on all ranks, by one plan; the replicas of a layer travel in two halves."""
    given = {"layers": 1.0, "replicas": 1.0, "carried": 1.0, "plan_every": 0, **keys}
    return replace(varied(job, **given), strategy=HALVED)


# What hides what.


@dataclass
class Meetings(Barriers):
    """Of what a block computes and the replicas that it carries."""

    _counts: dict[str, int] = field(default_factory=dict)

    def next_of(self, what: str) -> int:
        """How often this was asked before, while it is on."""
        self._counts[what] = self._counts.get(what, -1) + self.is_on
        return self._counts[what]

    # Gathers: all of layer 0, then halves of each layer; in backward the same from the end.

    def gather(self, *arguments: Any) -> Steps[Traffic]:
        self.meet("gather", self.next_of("gather"))
        self.dawdle()
        return (yield from sparse_all_gather(*arguments))

    def reduce(self, *arguments: Any, **how: Any) -> Steps[Arrived]:
        self.meet("reduction", self.next_of("reduction"))
        self.dawdle()
        return (yield from sparse_reduce_scatter(*arguments, **how))

    def expert(self, forward: Any) -> Any:
        """Experts of layer i meet the first half of layer i + 1."""

        def met(stage: Expert, *arguments: Any) -> Any:
            layer = self.next_of("expert")
            if layer < NUM_LAYERS - 1:
                self.meet("gather", 2 * layer + 1)
            return forward(stage, *arguments)

        return met

    def expert_back(self, backward: Any) -> Any:
        """In backward they meet the second."""

        def met(stage: Expert, *arguments: Any) -> Any:
            from_last = self.next_of("expert'")
            if from_last:
                self.meet("reduction", 2 * from_last - 1)
            return backward(stage, *arguments)

        return met

    def attention_of(self, layer: int) -> Any:
        """A hook on attention's first product: it meets the second half, in backward the first."""

        def backward(grad: Tensor) -> None:
            self.meet("reduction", 2 * (NUM_LAYERS - 1 - layer))

        def forward(module: Any, given: Any, output: Tensor) -> None:
            self.meet("gather", 2 * layer)
            output.register_hook(backward)

        return forward


def met(rank: int, world_size: int, job: Job) -> Met:
    """The moments of a step in which all that should be hidden met what hides it."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine = engine_of(job, world_size)
    meetings, kept = Meetings(), Kept(range(1, 2))
    run_of(engine).recorder.tracer = kept
    for layer, block in enumerate(engine.module.blocks):
        block.query_key_value.register_forward_hook(meetings.attention_of(layer))
    with (
        mock.patch("ds_moe_ext.moe.replica_memory.sparse_all_gather", meetings.gather),
        mock.patch(f"{REPLICAS}.sparse_reduce_scatter", meetings.reduce),
        mock.patch.object(Expert, "forward", meetings.expert(Expert.forward)),
        mock.patch.object(Expert, "backward", meetings.expert_back(Expert.backward)),
    ):
        for step in range(2):
            meetings.is_on = step == 1
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
    return Met(kept.moments, too_early(kept.timed, described(engine)))


JOB = Job("toy", 0, dtype="float32", steps=2, micro_batches=2)


def test_the_block_before_hides_what_travels() -> None:
    """Trans of a layer beside the experts of the layer before and what follows them, Agg beside
    the backward of the same."""
    for moments, early in pool_of(2).run(met, carried(JOB)):
        assert not early
        for layer in range(1, NUM_LAYERS):
            check_carried(layer, moments)


def check_carried(layer: int, moments: dict[tuple[str, str, int], Moment]) -> None:
    """The trace says the same: pieces in order, each begun when its time had come."""
    first, second = moments["gather", "forward", layer], moments["gather again", "forward", layer]
    before = layer - 1
    assert moments["dispatch", "forward", before][1] <= first[0]
    assert first[0] < moments["expert", "forward", before][1]
    assert moments["combine", "forward", before][1] <= second[0]
    assert second[0] < moments["attention", "forward", layer][1]
    assert second[1] <= moments["expert", "forward", layer][0]
    first = moments["reduction", "backward", layer]
    second = moments["reduction again", "backward", layer]
    assert moments["dispatch", "backward", layer][1] <= first[0]
    assert first[0] < moments["attention", "backward", layer][1]
    assert moments["combine", "backward", before][1] <= second[0]
    assert second[0] < moments["expert", "backward", before][1]


def planned_ahead(rank: int, world_size: int, job: Job) -> int:
    """Plans that were made while their layer's rows were on their way, in the last step, where
    streams have threads."""
    engine = engine_of(job, world_size)
    meetings, dispatch, plan = Meetings(), Dispatch.forward, RoutedExperts._plan_ahead

    def meet_plan(stage: Dispatch, *arguments: Any) -> Any:
        meetings.meet("plan", meetings.next_of("dispatch"))
        return dispatch(stage, *arguments)

    def meet_dispatch(layer: RoutedExperts, *arguments: Any) -> Any:
        meetings.meet("plan", meetings.next_of("plan"))
        return plan(layer, *arguments)

    with (
        mock.patch.object(layer_module, "streams_for", lambda device, overlaps: ThreadStreams()),
        mock.patch.object(Dispatch, "forward", meet_plan),
        mock.patch.object(RoutedExperts, "_plan_ahead", meet_dispatch),
    ):
        for step in range(job.steps):
            meetings.is_on = step == job.steps - 1
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
    return meetings.next_of("plan")


def test_the_next_step_is_planned_while_rows_travel() -> None:
    job = replace(JOB, steps=8, strategy="prophet")
    assert pool_of(2).run(planned_ahead, job) == [NUM_LAYERS, NUM_LAYERS]


@pytest.mark.slow  # ranks that plan otherwise do not equal stock in test_configurations.py
def test_all_ranks_plan_alike(tmp_path: Path) -> None:
    """With debug they also compare all that they run by, and would raise."""
    path = tmp_path / "hardware.json"
    path.write_text(FREE.to_json())
    job = prophet(replace(JOB, steps=8, hardware=str(path)), **EAGER)
    ranks = [steps for _, steps in pool_of(2).run(train_watched, job)]
    for own, *others in zip(*ranks):
        for plans in zip(own.plans, *(step.plans for step in others)):
            assert len({(plan.target.describe(), plan.carried) for plan in plans}) == 1
    assert any(num_copied(ranks[0]))


@pytest.mark.slow  # varied rows of test_configurations.py carry some
def test_carried_pieces_change_nothing() -> None:
    job = replace(JOB, dtype="float64", steps=4)
    for rematerialized in (0.0, 1.0):
        ours, _ = run(2, carried(job, rematerialized=rematerialized), late_s=0.003)
        check_equal(ours, plain(2, job), job)


# How much.


@pytest.mark.parametrize("family", ["toy, wide", slow("toy, deep")])
def test_no_more_memory_than_replicas_of_two_layers(family: str) -> None:
    """Of replicas and of their gradients, however many layers there are."""
    job = Job(family, 1, dtype="bfloat16", steps=3)
    keys = {"replicas": 0.6, "rematerialized": 1.0}
    ranks: list[Counted] = pool_of(4).run(counted, carried(job, **keys))
    for rank in ranks:
        most_replicas, most_grads, most_layers = rank.census
        two = sum(sorted(rank.replicas_L)[-2:]) * rank.expert
        assert 0 < most_replicas <= two
        assert 0 < most_grads <= two
        assert most_layers == 2 < len(rank.replicas_L)
