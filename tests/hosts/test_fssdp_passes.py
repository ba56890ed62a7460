# SPDX-License-Identifier: Apache-2.0
"""When replicas travel in a real step, how often, and what they read; what may come between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.core.comm import Arrived, Traffic, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.observation import Rows, TimedTask
from ds_moe_ext.report.recorder import traced_task_of
from ds_moe_ext.schedule.executor import Steps
from ds_moe_ext.schedule.step import whole_step
from ds_moe_ext.schedule.task import ATTENTION, PARAM, START, Schedule, Task
from ds_moe_ext.strategies.fssdp import FullySharded
from tests.hosts.copied_runs import (
    REPLICAS,
    Step,
    Watch,
    alone,
    check_equal,
    fssdp,
    num_moved,
    plain,
    run,
    train_watched,
    varied,
    watching,
)
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.marks import slow
from tests.ranks import pool_of

JOB = Job("toy", 0, dtype="float64", steps=5)
NUM_LAYERS = 3
EXPERT_BYTES = (2 * 12 * 16 + 16 * 12) * 8


def everywhere(job: Job, **keys: Any) -> Job:
    """All experts of all layers on all ranks, in every step."""
    return varied(job, layers=1.0, replicas=1.0, **keys)


# What hides them.

Moment = tuple[float, float]  # start and end, in seconds
MEETING_S = 20.0
LATE_S = 0.05


@dataclass
class Barriers:
    """What computes and what shall be hidden behind it wait for each other, so that neither can be
    over before the other has begun."""

    is_on: bool = False
    _barriers: dict[tuple[str, int], threading.Barrier] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, what: str, number: int) -> None:
        if not self.is_on:
            return
        with self._lock:
            barrier = self._barriers.setdefault((what, number), threading.Barrier(2))
        barrier.wait(MEETING_S)

    def dawdle(self) -> None:
        """So that whoever does not wait is too early."""
        if self.is_on:
            time.sleep(LATE_S)


@dataclass
class Meetings(Barriers):
    """Of attention and the replicas of its own layer."""

    _num_gathers: int = 0
    _num_reductions: int = 0

    def gather(self, *arguments: Any) -> Steps[Traffic]:
        """Gathers of a step come in the order of layers, then against it."""
        self.meet("gather", self._num_gathers)
        self._num_gathers += self.is_on
        self.dawdle()
        return (yield from sparse_all_gather(*arguments))

    def reduce(self, *arguments: Any, **how: Any) -> Steps[Arrived]:
        self.meet("reduction", NUM_LAYERS - 1 - self._num_reductions)
        self._num_reductions += self.is_on
        self.dawdle()
        return (yield from sparse_reduce_scatter(*arguments, **how))

    def attention_of(self, layer: int, *, gathers_again: bool) -> Any:
        """A hook on attention's first product."""

        def backward(grad: Tensor) -> None:
            self.meet("reduction", layer)
            if gathers_again and layer:
                self.meet("gather", 2 * NUM_LAYERS - 1 - layer)

        def forward(module: Any, given: Any, output: Tensor) -> None:
            self.meet("gather", layer)
            output.register_hook(backward)

        return forward


@dataclass
class Kept:
    """Keeps a step's tasks, in the place of a tracer."""

    steps: range
    moments: dict[tuple[str, str, int], Moment] = field(default_factory=dict)
    timed: list[TimedTask] = field(default_factory=list)

    def begin(self) -> None: ...

    def __call__(self, step: int, timed: list[TimedTask], rows: Sequence[Rows]) -> None:
        self.timed += timed
        for task in timed:
            traced = traced_task_of(task, timed[0], [str(layer) for layer in range(NUM_LAYERS)])
            key = (traced.name, traced.phase, int(traced.layer))
            while key in self.moments:
                key = (f"{key[0]} again", *key[1:])
            self.moments[key] = traced.start_s, traced.end_s


def described(engine: Any) -> Schedule:
    """A step of a model as its layers run now, by the tasks that they run."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    return whole_step([layer.routed.schedules for layer in run_of(engine).layers])


def too_early(timed: list[TimedTask], step: Schedule) -> list[str]:
    """Which tasks did not wait for what the step says, in words; and how many of a kind there were,
    if that is another number. Left out are the host's own tasks, which have other
    borders, and its blocks', which nobody is notified of."""
    moments: dict[tuple[str, int, bool], list[Moment]] = defaultdict(list)
    for each in timed:
        moments[_kind(each.task)].append(each.seconds_from(timed[0]))
    at: dict[int, Moment] = {}
    wrong = []
    for kind in {_kind(task) for task in step.tasks if task.op.begins is None}:
        places = [place for place, task in enumerate(step.tasks) if _kind(task) == kind]
        if kind[0] in (ATTENTION.name, START.name):
            continue
        if len(places) != len(moments[kind]):
            wrong.append(f"{kind}: {len(moments[kind])} times, in place of {len(places)}")
        at.update(zip(places, moments[kind]))
    before: list[set[int]] = []
    for place, (task, after) in enumerate(zip(step.tasks, step.after)):
        before.append(set(after).union(*(before[other] for other in after)))
        if place not in at:
            continue
        start = at[place][task.op.is_wait]  # what only waits has begun before
        late = [
            str(step.tasks[other]) for other in before[place] & at.keys() if at[other][1] > start
        ]
        wrong += [f"{task} before {other} had ended" for other in late]
    return wrong


def _kind(task: Task) -> tuple[str, int, bool]:
    return task.op.name, task.layer, bool(task.adjoint_of)


class Met(NamedTuple):
    """Of a step."""

    moments: dict[tuple[str, str, int], Moment]
    too_early: list[str]


def met(rank: int, world_size: int, job: Job) -> Met:
    """The moments of a step in which all that should be hidden met what hides it."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine = engine_of(job, world_size)
    meetings, kept = Meetings(), Kept(range(1, 2))
    run_of(engine).recorder.tracer = kept
    for layer, block in enumerate(engine.module.blocks):
        again = "rematerialized" in dict(job.keys)
        block.query_key_value.register_forward_hook(
            meetings.attention_of(layer, gathers_again=again)
        )
    with (
        mock.patch("ds_moe_ext.moe.replica_memory.sparse_all_gather", meetings.gather),
        mock.patch(f"{REPLICAS}.sparse_reduce_scatter", meetings.reduce),
    ):
        for step in range(2):
            meetings.is_on = step == 1
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
    return Met(kept.moments, too_early(kept.timed, described(engine)))


@pytest.mark.parametrize("rematerialized", [0.0, 1.0])
def test_attention_hides_what_travels(rematerialized: float) -> None:
    """Each gather lies between the layer before and the rows' arrival at experts, and begins before
    attention ends; each reduction begins after the rows' gradients were exchanged and before
    attention's backward ends, and is over before the next layer's."""
    keys = {"rematerialized": 1.0} if rematerialized else {}
    job = everywhere(replace(JOB, dtype="float32", micro_batches=2), **keys)
    for moments, early in pool_of(2).run(met, job):
        assert not early
        for layer in range(NUM_LAYERS):
            check_forward(layer, moments)
            check_backward(layer, moments)
            if rematerialized and layer < NUM_LAYERS - 1:
                check_gathered_again(layer, moments)


def check_forward(layer: int, moments: dict[tuple[str, str, int], Moment]) -> None:
    start, end = moments["gather", "forward", layer]
    assert start < moments["attention", "forward", layer][1]
    assert moments["attention", "forward", layer][1] <= moments["order", "forward", layer][0]
    assert end <= moments["expert", "forward", layer][0]
    if layer:
        assert moments["restore", "forward", layer - 1][1] <= start


def check_backward(layer: int, moments: dict[tuple[str, str, int], Moment]) -> None:
    start, end = moments["reduction", "backward", layer]
    assert moments["dispatch", "backward", layer][1] <= start
    assert start < moments["attention", "backward", layer][1]
    if layer:
        assert end <= moments["restore", "backward", layer - 1][0]


def check_gathered_again(layer: int, moments: dict[tuple[str, str, int], Moment]) -> None:
    start, end = moments["gather again", "forward", layer]
    assert start < moments["attention", "backward", layer + 1][1]
    assert end <= moments["expert", "backward", layer][0]
    assert moments["dispatch", "backward", layer + 1][1] <= start


def begun_in(rank: int, world_size: int, job: Job) -> list[set[str]]:
    """Names of the threads in which copies set out: in a first step, in one that nobody watches,
    and in one that is watched."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine, threads = engine_of(job, world_size), [set[str](), set[str](), set[str]()]
    run_of(engine).recorder.tracer = Kept(range(2, 3))

    def gather(*arguments: Any) -> Steps[Traffic]:
        threads[engine.global_steps].add(threading.current_thread().name)
        return (yield from sparse_all_gather(*arguments))

    with mock.patch("ds_moe_ext.moe.replica_memory.sparse_all_gather", gather):
        while engine.global_steps < len(threads):
            engine.backward(loss_of(engine, micro_batch(engine.micro_steps, rank)))
            engine.step()
    return threads


def test_only_what_is_watched_or_passed_on_needs_a_thread() -> None:
    """Of two ranks none passes replicas on."""
    job = everywhere(replace(JOB, dtype="float32"))
    for _, unwatched, watched in pool_of(2).run(begun_in, job):
        assert unwatched == {"MainThread"}
        assert watched
        assert all(name.startswith(PARAM.name) for name in watched)


def planned_beside(rank: int, world_size: int, job: Job) -> int:
    """Plans that were made while experts computed backward, in the last step."""
    engine = engine_of(job, world_size)
    barriers, backward, plan = Barriers(), Expert.backward, FullySharded.plan
    met: list[str] = []

    def meet_plan(stage: Expert, *arguments: Any) -> Any:
        if not met:  # by this thread alone: the next layer's may come before the other goes on
            barriers.meet("plan", 0)
            met.extend(["plan"] * barriers.is_on)
        return backward(stage, *arguments)

    def meet_backward(strategy: FullySharded, known: Any) -> Any:
        barriers.meet("plan", 0)
        return plan(strategy, known)

    with (
        mock.patch.object(Expert, "backward", meet_plan),
        mock.patch.object(FullySharded, "plan", meet_backward),
    ):
        for step in range(job.steps):
            barriers.is_on = step == job.steps - 1
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
    return len(met)


def test_the_next_step_is_planned_beside_backward() -> None:
    job = fssdp(replace(JOB, dtype="float32", steps=3, micro_batches=2))
    assert pool_of(2).run(planned_beside, job) == [1, 1]


# Late, and not a number before.

LATE = {
    "kept": {"layers": 1.0},
    "rematerialized": {"rematerialized": 1.0},
    "carried": {"layers": 1.0, "carried": 1.0},
    "of all kinds": {"revised": 0.5, "rematerialized": 0.5, "carried": 0.5, "shard_every": 2},
}


@pytest.mark.slow  # tests/gpu/test_stream_order.py sees who does not wait, quickly
@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("world_size", [2, 4])
def test_late_collectives_change_no_bit(world_size: int, name: str) -> None:
    job = varied(JOB, **LATE[name])
    late, _ = run(world_size, job, late_s=0.004)
    check_equal(late, plain(world_size, JOB), JOB)
    in_time, _ = run(world_size, job)
    assert late.losses == in_time.losses
    assert all(torch.equal(late.state[key], in_time.state[key]) for key in in_time.state)


@pytest.mark.slow  # experts move in test_states.py, quickly
@pytest.mark.parametrize("rematerialized", [0.0, 1.0])
def test_nothing_travels_when_experts_move(rematerialized: float) -> None:
    """Replicas and moves share a communicator. Only the last layer is trained: those below it need
    their replicas in forward alone, and another pass's would meet what moves."""
    base = Job("toy, top alone", 0, dtype="float64", steps=6)
    job = varied(base, layers=1.0, replicas=0.8, rematerialized=rematerialized, shard_every=1)
    ours, steps = run(2, job, late_s=0.02)
    check_equal(ours, alone(base), base)
    assert num_moved(steps)


# How often.


@pytest.mark.parametrize(
    ("rematerialized", "no_sync"),
    [(0.0, True), slow(1.0, False), slow(0.0, False), slow(1.0, True)],
)
def test_collectives_of_a_step(rematerialized: float, no_sync: bool) -> None:
    """Copies live for all micro-batches of a step, and what they learn travels in the last; where
    they are rematerialized, for one pass through one layer."""
    base = replace(JOB, micro_batches=6, no_sync=no_sync)
    job = everywhere(base, rematerialized=rematerialized)
    result, steps = run(2, job)
    check_equal(result, plain(2, JOB_OF_SIX), JOB)
    gathers = 3 * (2 * NUM_LAYERS - 1) if rematerialized else NUM_LAYERS
    reductions = 3 * NUM_LAYERS if rematerialized else NUM_LAYERS
    assert [len(step.gathers) for step in steps] == [gathers] * JOB.steps
    assert [len(step.reductions) for step in steps] == [reductions] * JOB.steps


JOB_OF_SIX = replace(JOB, micro_batches=6)


@pytest.mark.parametrize("use_reentrant", [slow(False), True])
def test_recomputed_passes_keep_their_replicas(use_reentrant: bool) -> None:
    job = everywhere(replace(JOB, use_reentrant=use_reentrant))
    _, steps = run(2, job)
    assert [len(step.gathers) for step in steps] == [NUM_LAYERS] * JOB.steps
    assert [len(step.reductions) for step in steps] == [NUM_LAYERS] * JOB.steps


# How much.

NO_REPLICAS: dict[str, dict[str, Any]] = {
    "nothing is hidden": {"overlap_degree": 0, "replicas_per_rank": 4},
    "no memory": {"overlap_degree": 4, "replicas_per_rank": 0, "calibrate": True},
    "no bytes": {"overlap_degree": 4, "replica_bytes": 0, "calibrate": True},
}


@pytest.mark.parametrize("name", [slow("nothing is hidden"), "no memory", slow("no bytes")])
def test_without_replicas_it_is_expert_parallelism(name: str) -> None:
    job = fssdp(JOB, **NO_REPLICAS[name], reshard_interval=0)
    result, steps = run(2, job)
    theirs = plain(2, JOB)
    assert result.losses == theirs.losses
    assert all(torch.equal(result.state[key], theirs.state[key]) for key in theirs.state)
    for step in steps:
        assert step.gathers == step.reductions == ()
        assert not any(plan.has_replicas for plan in step.plans)


@pytest.mark.parametrize(("world_size", "seed"), [(2, 0), slow(4, 1), slow(4, 2)])
def test_bytes_are_those_of_the_paper(world_size: int, seed: int) -> None:
    """Equation (1): no rank receives more in a gather than the experts that move at all."""
    job = varied(replace(JOB, micro_batches=world_size), seed=seed)
    ranks = pool_of(world_size).run(train_watched, job)
    for ep_rank, (_, steps) in enumerate(ranks):
        for step in steps:
            check_bytes(step, ep_rank)
    gathered = sum(sum(step.gathers) for _, steps in ranks for step in steps)
    assert gathered == sum(sum(step.reductions) for _, steps in ranks for step in steps) > 0


def check_bytes(step: Step, ep_rank: int) -> None:
    copied = [plan for plan in step.plans if plan.has_replicas]
    assert len(step.gathers) == len(step.reductions) == len(copied)
    for plan, gathered, reduced in zip(copied, step.gathers, reversed(step.reductions)):
        new_EC = plan.target.holds_EC & ~plan.owner.holds_EC
        assert gathered == reduced == new_EC[:, ep_rank].sum() * EXPERT_BYTES
        assert gathered <= new_EC.any(axis=1).sum() * EXPERT_BYTES  # HECATE, equation (1)


# What may come between.


@pytest.mark.parametrize("name", [*map(slow, list(LATE)[:-1]), "of all kinds"])
def test_evaluation_changes_nothing(name: str) -> None:
    """Between steps, between micro-batches, and between a pass and its backward."""
    job = replace(JOB, evaluate=True, evaluate_within=True)
    ours, _ = run(2, varied(job, **LATE[name]), late_s=0.002)
    check_equal(ours, plain(2, JOB), JOB)


def train_with_other_weights(rank: int, world_size: int, job: Job) -> list[float]:
    """Losses of this rank, in a run that is evaluated with other weights put in, in every step."""
    losses = []
    engine = engine_of(job, world_size)
    for step in range(job.steps):
        engine.backward(loss_of(engine, micro_batch(step, rank)))
        engine.step()
        with torch.no_grad():
            kept = [p.clone() for p in engine.module.parameters()]
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
            engine.eval()
            losses.append(float(loss_of(engine, micro_batch(step, 99))))
            for parameter, before in zip(engine.module.parameters(), kept):
                parameter.copy_(before)
            losses.append(float(loss_of(engine, micro_batch(step, 99))))
            engine.train()
    return losses


@pytest.mark.slow  # another evaluation than the one above
@pytest.mark.parametrize("name", LATE)
def test_other_weights_may_be_evaluated(name: str) -> None:
    """A mean of past weights, say: replicas are then of those, and afterwards of the run's own."""
    job = replace(JOB, dtype="float32", micro_batches=2)
    theirs = pool_of(2).run(train_with_other_weights, job)
    ours = pool_of(2).run(train_with_other_weights, varied(job, **LATE[name]))
    assert np.allclose(ours, theirs, rtol=1e-6)
    assert not np.allclose(np.ravel(theirs)[::2], np.ravel(theirs)[1::2], rtol=1e-3)


def train_with_failures(rank: int, world_size: int, job: Job, module: str) -> list[float]:
    """Losses of this rank in a run in which every pass first fails in a module, then goes well."""
    losses = []
    with watching(Watch(late_s=0.02)):
        engine = engine_of(job, world_size)
        for step in range(job.steps):
            for number in range(rank, job.micro_batches, world_size):
                with _failing(engine.module.get_submodule(module)), pytest.raises(KeyError):
                    loss_of(engine, micro_batch(step, number))
                loss = loss_of(engine, micro_batch(step, number))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
    return losses


@contextlib.contextmanager
def _failing(module: nn.Module) -> Iterator[None]:
    def fail(module: nn.Module, given: Any) -> None:
        raise KeyError("as the test wants it")

    handle = module.register_forward_pre_hook(fail)
    yield
    handle.remove()


MODULES = ["blocks.0.attention_norm", "blocks.1.router", "head"]


@pytest.mark.slow  # test_failing.py has one that others learn of
@pytest.mark.parametrize(
    ("name", "module"),
    [(name, module) for name in LATE for module in MODULES],
)
def test_a_pass_may_fail(name: str, module: str) -> None:
    """What it had launched is waited for, and what it left is not used."""
    job = replace(JOB, dtype="float32", steps=3)
    ranks = pool_of(2).run(train_with_failures, varied(job, **LATE[name]), module)
    losses = np.mean(ranks, axis=0).reshape(job.steps, -1).mean(axis=1)
    assert losses.tolist() == pytest.approx(plain(2, job).losses, rel=1e-6)
