# SPDX-License-Identifier: Apache-2.0
"""Dense gradients under Megatron-core, reduced bucket by bucket within backward of MoE layers.

Plans are fixed: real ones go by measured times. In the first step Megatron reduces after backward,
so that slices begin with the second. All is computed in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_moe_ext.hosts.steps.optimizers import Reduced
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.planning.layer_pipelines import Placed
from ds_moe_ext.planning.prices import Line
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.strategies.esp import ExpertSharding
from tests.hosts.megatron_jobs import Training, megatron, train
from tests.hosts.megatron_toy import MegatronRun
from tests.marks import slow
from tests.ranks import pool_of

RUN = MegatronRun(
    ep=2,
    dtype="float64",
    num_layers=3,
    num_microbatches=2,
    overlap_grad_reduce=True,
    bucket_size=1500,
)
PLACED = Placed(within_moe=(3000,), dense=(3000,))


def esp(**keys: Any) -> dict[str, Any]:
    report = {"enabled": False}
    return {"enabled": True, "strategy": "esp", "esp": {"degree": 2, **keys}, "report": report}


@dataclass(frozen=True)
class Event:
    """A bucket group is started."""

    step: int
    group: tuple[int, int, int]
    thread: str


@dataclass(frozen=True)
class Sliced:
    """What a rank has found."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, torch.Tensor]
    reduced: tuple[Reduced, ...]
    events: tuple[Event, ...]
    reported: tuple[str, ...]


@contextmanager
def fixed(placed: Placed | None) -> Iterator[None]:
    """Plans have these reductions beside every layer, from the start; None: their own."""
    if placed is None:
        yield
        return
    plans_of = ExpertSharding.plan

    def plan(self: ExpertSharding, job: Any) -> tuple[Plan, ...]:
        plans = plans_of(self, job)
        if not self.slices_gradients:
            return plans
        return tuple(replace(each, reductions=placed) for each in plans)

    with mock.patch.object(ExpertSharding, "plan", plan):
        yield


def sliced(
    rank: int,
    world_size: int,
    run: MegatronRun,
    placed: Placed | None = PLACED,
    settings: dict[str, Any] | None = None,
) -> Sliced:
    """Train, and note when bucket groups are started."""
    losses: list[float] = []
    norms: list[float] = []
    reduced: list[Reduced] = []
    events: list[Event] = []
    lines: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(fixed(placed))
        stack.enter_context(megatron(run, settings or esp()))
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        from ds_moe_ext.hosts.megatron.slices import SlicedGroup
        from ds_moe_ext.hosts.steps import host

        start = _ParamAndGradBucketGroup.start_grad_sync

        def noted(self: Any, *args: Any, **named: Any) -> None:
            is_started = self.grad_reduce_handle is not None  # and is not again, in the first step
            start(self, *args, **named)
            if type(self) is SlicedGroup and not is_started:
                bucket = self.buckets[0]
                about = (len(self.params), bucket.numel_unpadded, bucket.offset)
                events.append(Event(len(losses), about, threading.current_thread().name))

        def line_logger(settings: Any, place: int) -> Any:
            return lines.append

        stack.enter_context(mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", noted))
        stack.enter_context(mock.patch.object(host, "line_logger", line_logger))
        training = Training(run)
        for step in range(run.steps):
            losses.append(training.compute(step))
            norms.append(training.update() or 0.0)
            slices = vars(training.chunks[0].bucket_groups[0]).get("slices")
            reduced += [slices.reduced] if slices is not None else []
        weights = training.weights()
    return Sliced(
        tuple(losses),
        tuple(norms),
        weights,
        tuple(reduced),
        tuple(events),
        tuple(filter(None, lines)),
    )


def check(
    world_size: int, run: MegatronRun, placed: Placed | None = PLACED, **keys: Any
) -> list[Sliced]:
    """Train in slices: bit by bit as without, and to rounding as Megatron alone."""
    found = pool_of(world_size).run(sliced, run, placed, esp(**keys))
    unsliced = pool_of(world_size).run(sliced, run, placed, esp(slice_gradients=False, **keys))
    for one, plain, alone in zip(found, unsliced, pool_of(world_size).run(train, run, keep=True)):
        assert (one.losses, one.norms) == (plain.losses, plain.norms)
        assert plain.reduced == plain.events == ()
        assert one.losses == pytest.approx(alone.losses, rel=1e-11, abs=0)
        assert one.norms == pytest.approx(alone.norms, rel=1e-11, abs=0)
        assert one.weights.keys() == plain.weights.keys() == alone.weights.keys()
        for name, weight in one.weights.items():
            assert torch.equal(weight, plain.weights[name])
            # Adam's first steps are as long where a gradient is zero but for rounding.
            torch.testing.assert_close(weight, alone.weights[name], rtol=1e-7, atol=1e-9)
    return found


def check_sliced(
    found: list[Sliced], steps: int, *, within: bool | None = None, at_least: int = 3
) -> None:
    """Some went with layers, each once a step, in one order on all these ranks."""
    for one in found:
        elements = _dense_elements(one)
        assert [reduced.elements for reduced in one.reduced] == [elements * n for n in range(steps)]
        places = one.reduced[-1].within_moe, one.reduced[-1].beside_dense
        assert all(places) if within is None else places[not within]
        by_step = [[e.group for e in one.events if e.step == step] for step in range(steps)]
        assert all(sorted(groups) == sorted(by_step[0]) for groups in by_step)
        assert len(set(by_step[0])) == len(by_step[0]) >= at_least
        assert one.events == found[0].events


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["ddp", "distributed"])


def with_optimizer(run: MegatronRun, optimizer: Any) -> MegatronRun:
    return replace(run, optimizer=optimizer, overlap_param_gather=optimizer == "distributed")


def _dense_elements(one: Sliced) -> int:
    return sum(w.numel() for name, w in one.weights.items() if ".experts." not in name)


@pytest.mark.parametrize("optimizer", [slow("ddp"), "distributed"])
def test_two_ranks_train_as_without(optimizer: str) -> None:
    run = with_optimizer(RUN, optimizer)
    found = check(2, run)
    check_sliced(found, run.steps)
    in_stream = [event for event in found[0].events if event.thread.startswith("inter")]
    assert found[0].reduced[0] == Reduced() and all(event.step for event in in_stream)
    # Those of layers are started in the stream between EP ranks, which only their programs use.
    assert len(in_stream) == found[0].reduced[-1].num_slices >= 2 * (run.steps - 1)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        slow({"tp": 2, "etp": 1}, "distributed"),
        slow({}, "ddp"),
        slow({}, "distributed"),
        slow({"tp": 2, "etp": 1}, "ddp"),
        slow({"tp": 2}, "distributed"),
    ],
)
def test_four_ranks_train_as_without(layout: dict[str, Any], optimizer: str) -> None:
    """Of which two or four share dense weights, and two pairs may be at it at once."""
    run = with_optimizer(replace(RUN, bucket_size=1000, **layout), optimizer)
    found = check(4, run, Placed((2000,), (2000,)))
    check_sliced(found, run.steps)


@pytest.mark.slow
@OPTIMIZERS
def test_pipeline_stages_train_as_without(optimizer: str) -> None:
    """Megatron makes one bucket of a stage behind the first, and so does nothing differ there."""
    run = replace(RUN, pp=2, num_layers=4, num_microbatches=4)
    found = check(4, with_optimizer(run, optimizer))
    check_sliced(found[:2], run.steps, within=False)
    for behind in found[2:]:
        assert not behind.events and "stages after the first" in behind.reported[0]


@pytest.mark.slow
@OPTIMIZERS
def test_interleaved_stages_train_as_without(optimizer: str) -> None:
    """A stage's last chunk is one bucket, which goes within layers of the chunk before."""
    run = replace(RUN, pp=2, vpp=2, num_layers=4, num_microbatches=4)
    found = check(4, with_optimizer(run, optimizer), Placed((20_000,), ()))
    for ranks in (found[:2], found[2:]):
        check_sliced(ranks, run.steps, within=True, at_least=2)


@pytest.mark.slow
@OPTIMIZERS
@pytest.mark.parametrize("schedule", ["fsmoe", "tutel_improved"])
def test_planned_slices_train_as_without(optimizer: str, schedule: str) -> None:
    """Costs are measured in step 4; behind it gradients are reduced as planned by them. How many go
    where is not known beforehand; "tutel_improved" has all reduced that can be."""
    run = with_optimizer(replace(RUN, steps=10), optimizer)
    for one in check(2, run, None, schedule=schedule, degree=2):
        elements = _dense_elements(one)
        assert [r.elements for r in one.reduced[:5]] == [0] * 5
        is_planned = schedule == "tutel_improved" or one.reduced[-1].elements
        assert one.reduced[-1].elements == (5 * elements if is_planned else 0)
        assert schedule != "tutel_improved" or one.reduced[-1].beside_dense


def test_without_overlap_nothing_is_sliced_and_a_person_is_reported() -> None:
    run = replace(RUN, steps=2, overlap_grad_reduce=False)
    for one in pool_of(2).run(sliced, run):
        assert not one.events and not one.reduced
        (line,) = (line for line in one.reported if "gradients" in line)
        assert "--overlap-grad-reduce" in line and "--ddp-bucket-size" in line


def chunk(num_groups: int = 3, size: int = 2, *, is_bucketed: bool = True, **config: Any) -> Any:
    """What is looked at of Megatron's DDP."""
    defaults = {"overlap_grad_reduce": True, "num_distributed_optimizer_instances": 1}
    given = {**defaults, "use_distributed_optimizer": False, **config}
    communicator = SimpleNamespace(size=lambda: size)
    group = SimpleNamespace(
        ddp_config=SimpleNamespace(**given),
        data_parallel_group=communicator,
        intra_distributed_optimizer_instance_group=communicator,
    )
    return SimpleNamespace(
        ddp_config=group.ddp_config,
        bucket_groups=[group] * num_groups,
        bucket_size=1000 if is_bucketed else None,
    )


CASES: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({}, None),
    ({"use_distributed_optimizer": True}, None),
    ({"overlap_grad_reduce": False}, "add --overlap-grad-reduce"),
    ({"num_distributed_optimizer_instances": 2}, "optimizer-instances 2; leave that out"),
    ({"num_groups": 1}, "give a smaller --ddp-bucket-size"),
    ({"num_groups": 1, "is_bucketed": False}, "pipeline stages after the first"),
    ({"size": 1}, ""),
)


def whys(rank: int, world_size: int) -> list[str | None]:
    from ds_moe_ext.hosts.megatron.slices import why_unsliced

    return [why_unsliced([chunk(**given)]) for given, _ in CASES]


def test_why_gradients_are_left_to_megatron() -> None:
    for found, (_, reported) in zip(pool_of(2).run(whys)[0], CASES):
        assert found == reported if not reported else reported in (found or "")


class Group:
    """A bucket group of so many elements, which notes what becomes of it."""

    def __init__(self, elements: int, log: list[int]) -> None:
        self.params = [nn.Parameter(torch.zeros(elements))]
        self.log = log
        self.grad_reduce_handle: Any = None

    def start(self) -> None:
        self.log.append(self.params[0].numel())
        self.grad_reduce_handle = mock.Mock()


def grants(rank: int, world_size: int) -> None:
    from ds_moe_ext.hosts.megatron.slices import BucketSlices, Waiting

    log: list[int] = []
    slices = BucketSlices([], torch.device("cpu"))

    def add(*sizes: int) -> None:
        groups = [Group(size, log) for size in sizes]
        for group in groups:
            slices.add(Waiting(group, group.start))

    slices.reduce(100)  # nothing is ready, and that is not granted later
    add(5, 2, 9, 4)
    slices.reduce(3)
    assert log == []
    slices.begin(3)
    slices.reduce(1)  # with the one left over
    assert log == [5, 2] and slices.reduced == Reduced(2, 5, 0, 2)
    slices.reduce(8)
    slices.finish()
    assert log == [5, 2, 9, 4] and slices.reduced == Reduced(2, 5, 13, 2)
    add(6)
    with pytest.raises(ValueError, match="a slice of -1 dense gradients; slices"):
        slices.reduce(-1)
    slices.reduce(5)  # of what was granted before nothing is left
    assert log == [5, 2, 9, 4]


def test_a_group_goes_when_what_was_granted_covers_it() -> None:
    pool_of(2).run(grants)


def test_gradients_are_ready_when_the_last_of_their_bucket_is() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 3, bias=False) for name in "abcdef"})
    layers: Any = [SimpleNamespace(name=name, parameters=[model[name].weight]) for name in "be"]
    by_name = [("a", "c"), ("d",), ("f",)]
    buckets = [[model[name].weight for name in names] for names in by_name]
    alone = DenseGradients.of(model, layers, torch.float32, None)
    assert (alone.elements_L, alone.head_elements) == ((6, 12), 6)
    bucketed = DenseGradients.of(model, layers, torch.float32, None, buckets=buckets)
    assert (bucketed.elements_L, bucketed.head_elements) == ((12, 6), 6)


def measured(rank: int, world_size: int, scatters: bool) -> tuple[Line, set[str]]:
    from ds_moe_ext.planning import probe

    paths = probe.Paths(None, None, dist.group.WORLD, scatters)
    payload = probe.Payload(8, 2, torch.float32, 80, torch.bfloat16)
    used: set[str] = set()

    def noted(name: str) -> Any:
        sweep = vars(probe)[name]

        def note(level: Any, sizes: Any, like: Any) -> Any:
            made = sweep(level, sizes, like)
            used.add(f"{name} of {made.units_N}")
            return made

        return mock.patch.object(probe, name, note)

    with noted("all_reduce_sweep"), noted("reduce_scatter_sweep"):
        bench = probe.quick_bench(torch.device("cpu"))
        lines = probe.measure_pipeline(paths, payload, lambda rows: None, bench)
    return lines.all_reduce, used


@pytest.mark.parametrize("scatters", [False, True])
def test_what_is_measured_is_what_megatron_does(scatters: bool) -> None:
    """Sizes are those that a rank gives, either way."""
    (line, used), other = pool_of(2).run(measured, scatters)
    assert line == other[0]
    assert used == {f"{'reduce_scatter' if scatters else 'all_reduce'}_sweep of [20, 40, 80, 160]"}
