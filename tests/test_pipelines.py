# SPDX-License-Identifier: Apache-2.0
"""The schedules of FSMoE: golden tests, the planner's formulas against them, their order. Pure.

Shape letter: R degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.planning.layer_costs import Chunks, LayerCosts, makespans
from ds_moe_ext.planning.pipeline_degrees import best_degree
from ds_moe_ext.planning.prices import LinearCost
from ds_moe_ext.schedule import orders
from ds_moe_ext.schedule.orders import NO_SLICES, PIPELINES, QUEUED, Pipeline, Slices, in_halves
from ds_moe_ext.schedule.simulator import Timeline, simulate
from ds_moe_ext.schedule.step import whole_step
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    COMPUTE,
    DISPATCH,
    ETP_GATHER,
    ETP_SCATTER,
    EXPERT,
    GRADIENTS,
    INTER,
    INTRA,
    Op,
    Schedule,
    Task,
)
from tests.planners.plainly import PROPERTY

FSMOE, NO_IIO, TUTEL = (PIPELINES[name] for name in ("fsmoe", "fsmoe_no_iio", "tutel"))
ONE = Slices(within_moe=1)


def forward_of(degree: int, layer: int = 0) -> Schedule:
    """Of a layer whose gate is the host's, its experts split in EP ranks, nothing reordered."""
    tasks = orders.routed_tasks(layer, num_chunks=degree, degree=degree, sharded=True)
    return orders.layer_schedule(tasks, layer, num_chunks=degree, gated=False)


def backward_of(degree: int, layer: int = 0) -> Schedule:
    return forward_of(degree, layer).reversed()


def programs(
    pipeline: Pipeline, degrees: tuple[int, int], slices: Slices, layer: int = 0
) -> tuple[Schedule, Schedule]:
    """Those of a layer, as it runs by them."""
    cutting = orders.Cutting(pipeline, *degrees, sharded=True, slices=slices)
    return orders.programs(layer, gated=False, cutting=cutting)


class Seconds(NamedTuple):
    """Of one task: all-to-all, all-gather, reduce-scatter, expert, all-reduce."""

    a: float
    g: float
    s: float
    e: float
    t: float = 0.0

    def of(self, rank: int, task: Task) -> float:
        before, behind = (self.s, self.g) if task.adjoint_of else (self.g, self.s)
        by_op = {DISPATCH: self.a, COMBINE: self.a, EXPERT: self.e, GRADIENTS: self.t}
        by_op |= {ETP_GATHER: before, ETP_SCATTER: behind}
        return {op.name: seconds for op, seconds in by_op.items()}.get(task.op.name, 0.0)


def simulated(schedule: Schedule, seconds: Seconds) -> float:
    return simulate(schedule, seconds.of).makespan_s


def streams(schedule: Schedule) -> dict[str, str]:
    """The work of each stream as text, in issue order."""
    work = [task for task in schedule.tasks if not task.op.name.startswith(("order", "restore"))]
    names = {task.stream.name for task in work}
    return {name: " ".join(str(t) for t in work if t.stream.name == name) for name in names}


# Issue orders.


def test_the_ep_ranks_collectives_stand_around_the_experts() -> None:
    words = ["order", "dispatch", "etp_gather", "expert", "etp_scatter", "combine", "restore"]
    assert str(forward_of(1)) == " ".join(f"{word}[0,0]" for word in words)
    words = ["restore", "combine", "etp_scatter", "expert", "etp_gather", "dispatch"]
    assert str(backward_of(1)) == " ".join(f"{word}'[0,0]" for word in words)
    assert len(forward_of(2).after) == 13  # nothing is read before it is written
    assert [t.stream for t in forward_of(1).tasks[1:6]] == [INTER, INTRA, COMPUTE, INTRA, INTER]


def test_fsmoe_forward() -> None:
    assert streams(FSMOE.arranged(forward_of(2))) == {
        "inter": "dispatch[0,0] dispatch[0,1] combine[0,0] combine[0,1]",
        "intra": "etp_gather[0,0] etp_gather[0,1] etp_scatter[0,0] etp_scatter[0,1]",
        "compute": "expert[0,0] expert[0,1]",
    }


def test_fsmoe_backward() -> None:
    schedule = FSMOE.arranged(backward_of(2), Slices(within_moe=1, dense=2, tail=1))
    assert streams(schedule) == {
        "inter": "combine'[0,0] combine'[0,1] gradients[0,0] dispatch'[0,0] dispatch'[0,1] "
        "gradients[0,1] gradients[0,2] gradients[0,3]",
        "intra": "etp_scatter'[0,0] etp_scatter'[0,1] etp_gather'[0,0] etp_gather'[0,1]",
        "compute": "expert'[0,0] expert'[0,1]",
    }


def test_tutel_takes_turns_in_one_queue() -> None:
    assert streams(TUTEL.arranged(forward_of(2)))["inter"] == (
        "dispatch[0,0] etp_gather[0,0] dispatch[0,1] etp_gather[0,1] "
        "etp_scatter[0,0] combine[0,0] etp_scatter[0,1] combine[0,1]"
    )


def test_no_iio_reduces_behind_the_last_gather() -> None:
    assert streams(NO_IIO.arranged(backward_of(2), ONE))["inter"] == (
        "combine'[0,0] etp_scatter'[0,0] combine'[0,1] etp_scatter'[0,1] gradients[0,0] "
        "etp_gather'[0,0] dispatch'[0,0] etp_gather'[0,1] dispatch'[0,1]"
    )


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("schedule", [forward_of(1), backward_of(1)], ids=["forward", "backward"])
def test_every_pipeline_issues_every_task_once(pipeline: Pipeline, schedule: Schedule) -> None:
    arranged = pipeline.arranged(schedule)
    assert sorted(map(str, arranged.tasks)) == sorted(map(str, schedule.tasks))
    assert (arranged.inputs, arranged.outputs) == (schedule.inputs, schedule.outputs)
    assert arranged.after  # in an order in which it can run
    queued = set(QUEUED.values()) if pipeline.has_one_queue else set(QUEUED)
    assert queued < {task.op for task in arranged.tasks}
    assert {task.op for task in arranged.tasks} - queued == {
        task.op for task in schedule.tasks
    } - set(QUEUED)
    assert (INTRA in {task.stream for task in arranged.tasks}) == (not pipeline.has_one_queue)


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_adjoints_are_of_the_tasks_they_name(pipeline: Pipeline) -> None:
    degrees = (2, 3) if pipeline.is_cut else (1, 1)
    forward, backward = programs(pipeline, degrees, Slices(tail=1))
    for task in backward.tasks:
        for position in task.adjoint_of:
            assert forward.tasks[position].op == task.op
            assert forward.tasks[position].chunk_range.overlaps(task.chunk_range)
    adjoints = [task for task in backward.tasks if task.adjoint_of]
    assert len(adjoints) == 6 * degrees[1]
    assert len(backward.tasks) == len(adjoints) + 1


def test_the_tail_waits_for_the_layer() -> None:
    arranged = FSMOE.arranged(backward_of(2), Slices(tail=1))
    times = simulate(arranged, Seconds(a=1, g=1, s=1, e=9, t=5).of)
    assert events(arranged, times, GRADIENTS) == [(22, 27)]


def test_what_a_pipeline_has_no_place_for_is_refused() -> None:
    with pytest.raises(ValueError, match="cut into 2 chunks, but the pipeline cuts no tokens"):
        PIPELINES["default"].arranged(forward_of(2))
    with pytest.raises(ValueError, match="1 slices of gradients stand in 'within_moe'"):
        PIPELINES["tutel_improved"].arranged(backward_of(2), ONE)
    with pytest.raises(ValueError, match="stand in 'dense'"):
        TUTEL.arranged(backward_of(2), Slices(dense=1))
    with pytest.raises(ValueError, match="none of the tasks order"):
        in_halves(forward_of(1).tasks[:2])


# Golden tests.


def events(schedule: Schedule, timeline: Timeline, op: Op) -> list[tuple[float, float]]:
    """Start and end of each task of an op."""
    times = zip(schedule.tasks, timeline.start_s[0], timeline.end_s[0])
    return [(start, end) for task, start, end in times if task.op.name == op.name]


def test_g4_events() -> None:
    schedule = FSMOE.arranged(backward_of(2), ONE)
    timeline = simulate(schedule, Seconds(a=2, g=1, s=1, e=3, t=3).of)
    ops = (COMBINE, GRADIENTS, ETP_SCATTER, EXPERT, ETP_GATHER, DISPATCH)
    assert [events(schedule, timeline, op) for op in ops] == [
        [(0, 2), (2, 4)],
        [(4, 7)],
        [(2, 3), (4, 5)],
        [(3, 6), (6, 9)],
        [(6, 7), (9, 10)],
        [(7, 9), (10, 12)],
    ]
    assert timeline.makespan_s == 12


def test_g4_in_one_queue() -> None:
    """Then the all-reduce is no longer free."""
    seconds = Seconds(a=2, g=1, s=1, e=3, t=3)
    assert simulated(NO_IIO.arranged(backward_of(2), ONE), seconds) == 15
    assert simulated(NO_IIO.arranged(backward_of(2)), seconds) == 12


ELEMENTS = 2.4 * 4096 * 1600
G5 = LayerCosts(
    all_to_all=LinearCost(alpha_s=0.28746, beta_s=2.3201e-6, n=ELEMENTS / 8),
    all_gather=LinearCost(alpha_s=0.33789, beta_s=2.3478e-7, n=ELEMENTS),
    reduce_scatter=LinearCost(alpha_s=0.39538, beta_s=2.2171e-7, n=ELEMENTS),
    expert=LinearCost(alpha_s=0.70623, beta_s=7.6571e-11, n=ELEMENTS * 6400 / 8 * 2),
)


def by_degree(pipeline: Pipeline, costs: LayerCosts, schedules: Sequence[Schedule]) -> list[float]:
    """Seconds at each degree, from 1."""
    chunks = [costs.cut(np.array(degree)) for degree in range(1, len(schedules) + 1)]
    return [
        simulated(pipeline.arranged(schedule), Seconds(*map(float, each[1:])))
        for schedule, each in zip(schedules, chunks)
    ]


FORWARDS = [forward_of(degree) for degree in range(1, 9)]
BACKWARDS = [backward_of(degree) for degree in range(1, 9)]


def test_g5() -> None:
    times = by_degree(FSMOE, G5, FORWARDS)
    spec = [20.245, 14.596, 13.975, 13.951, 14.167, 15.353]
    assert [times[r - 1] for r in (1, 2, 3, 4, 5, 8)] == pytest.approx(spec, abs=1e-3)
    times = by_degree(FSMOE, G5.in_backward(), BACKWARDS)
    spec = [22.878, 16.139, 14.834, 14.888, 15.485, 18.5]
    assert [times[r - 1] for r in (1, 2, 3, 4, 5, 8)] == pytest.approx(spec, abs=1e-3)


def test_g5_in_one_queue() -> None:
    for costs, schedules in ((G5, FORWARDS), (G5.in_backward(), BACKWARDS)):
        times = by_degree(TUTEL, costs, schedules)
        assert times.index(min(times)) + 1 == 2
        assert min(times) == pytest.approx(18.92, abs=5e-3)


GATHER = LinearCost(alpha_s=0.1, beta_s=1e-3, n=1000)
G1 = LayerCosts(
    all_to_all=LinearCost(alpha_s=0.2, beta_s=1e-3, n=4000),
    all_gather=GATHER,
    reduce_scatter=GATHER,
    expert=LinearCost(alpha_s=0.3, beta_s=1e-3, n=5000),
)


def g8(pipeline: Pipeline, slices: Sequence[Slices], elements: dict[tuple[int, int], int]) -> float:
    """Milliseconds of the spec's iteration of two layers; what is dense is one task."""
    degrees = best_degree(G1, 0.0, 8).degree, best_degree(G1.in_backward(), 0.0, 8).degree
    assert degrees == (3, 4)
    chunks = G1.cut(np.array(3)), G1.in_backward().cut(np.array(4))
    forward, backward = (Seconds(*map(float, each[1:])) for each in chunks)

    def seconds_of(rank: int, task: Task) -> float:
        if task.op.name == GRADIENTS.name:
            return 0.5 + 1e-3 * elements[task.layer, task.chunk_range.start]
        if task.op.name == ATTENTION.name:
            return 2.0 if task.adjoint_of else 1.2
        return (backward if task.adjoint_of else forward).of(rank, task)

    pairs = (programs(pipeline, degrees, each, layer) for layer, each in enumerate(slices))
    step = whole_step([orders.LayerTasks(orders.ALONE, *pair) for pair in pairs])
    return simulate(step, seconds_of).makespan_s


def test_g8() -> None:
    hidden = {(1, 0): 5400, (1, 1): 1500, (0, 0): 6900}
    slices = (Slices(tail=1), Slices(within_moe=1, dense=1))
    assert g8(FSMOE, slices, hidden) == pytest.approx(64.9333, abs=5e-5)
    serial = {(0, 0): 6900, (0, 1): 6900}
    assert g8(FSMOE, (Slices(tail=2), NO_SLICES), serial) == pytest.approx(72.3333, abs=5e-5)


# Formulas and properties.

QUARTERS = st.integers(0, 40).map(lambda n: n / 4)  # exact in floats, whatever their sums
ALL_SECONDS = st.builds(Seconds, *[QUARTERS] * 5)


def chunks_of(degree: int, seconds: Seconds) -> Chunks:
    return Chunks(np.array(degree), *map(np.array, seconds[:4]))


FSMOES = {
    (degree, has_slice): FSMOE.arranged(backward_of(degree), Slices(within_moe=has_slice))
    for degree, has_slice in product(range(1, 9), (0, 1))
}
ONE_QUEUES = {
    (degree, has_slice): NO_IIO.arranged(backward_of(degree), Slices(within_moe=has_slice))
    for degree, has_slice in product(range(1, 9), (0, 1))
}


@PROPERTY
@given(st.integers(1, 8), st.integers(0, 1), ALL_SECONDS)
def test_makespans(degree: int, has_slice: int, seconds: Seconds) -> None:
    """The planner's formula is what FSMoE's schedule takes; spec 2.5's is what one queue takes."""
    gradient_s = seconds.t * has_slice
    expected = makespans(chunks_of(degree, seconds), gradient_s)
    assert simulated(FSMOES[degree, has_slice], seconds) == expected
    r, (a, g, s, e, _) = degree, seconds
    there, back = a + g, s + a
    assert simulated(ONE_QUEUES[degree, has_slice], seconds) == max(
        r * (there + back) + gradient_s,
        there + r * e + back,
        r * there + e + back,
        there + e + r * back,
    )


@pytest.mark.slow
def test_makespans_of_ten_thousand_layers() -> None:
    """Quarters of seconds, so that sums are exact; every degree, with and without a slice."""
    rng = np.random.default_rng(0)
    for numbers in rng.integers(0, 41, size=(10_000, 5)) / 4:
        seconds = Seconds(*numbers.tolist())
        degree, has_slice = int(rng.integers(1, 9)), int(rng.integers(2))
        expected = makespans(chunks_of(degree, seconds), seconds.t * has_slice)
        assert simulated(FSMOES[degree, has_slice], seconds) == expected


@PROPERTY
@given(st.integers(1, 8), ALL_SECONDS)
def test_order_at_one_degree(degree: int, seconds: Seconds) -> None:
    """Property 8: FSMoE, its one queue, and everything one after the other."""
    fsmoe = simulated(FSMOES[degree, 1], seconds)
    no_iio = simulated(ONE_QUEUES[degree, 1], seconds)
    a, g, s, e, t = seconds
    assert fsmoe <= no_iio <= degree * (2 * a + g + s + e) + t


UNSLICED = {
    name: [PIPELINES[name].arranged(backward_of(degree), Slices(tail=1)) for degree in range(1, 9)]
    for name in ("tutel", "fsmoe_unsliced")
} | {"default": [PIPELINES["default"].arranged(backward_of(1), Slices(tail=1))]}


@PROPERTY
@given(st.builds(Seconds, *[st.floats(0, 10)] * 5), st.floats(0, 1))
def test_order_at_the_best_degrees(layer: Seconds, start_s: float) -> None:
    """Property 8: FSMoE, its one queue, Tutel and the default, each at its best degree."""

    def best(schedules: Sequence[Schedule]) -> float:
        cut = (
            Seconds(*(start_s + s / degree for s in layer[:4]), layer.t)
            for degree in range(1, len(schedules) + 1)
        )
        return min(map(simulated, schedules, cut))

    fsmoe = best([FSMOES[degree, 1] for degree in range(1, 9)])
    no_iio = best([ONE_QUEUES[degree, 1] for degree in range(1, 9)])
    tutel, unsliced, default = (best(UNSLICED[n]) for n in ("tutel", "fsmoe_unsliced", "default"))
    times = [fsmoe, no_iio, tutel, default]
    assert all(less <= more + 1e-9 for less, more in pairwise(times))
    assert fsmoe <= unsliced + 1e-9
    assert unsliced <= tutel + 1e-9


# Tasks that slow each other.


def test_crowding() -> None:
    """Two streams at half the rate, so that 2 s beside 2 s take 4; alone they take 2."""

    def crowding_of(task: Task, under_way: Sequence[Task]) -> float:
        return float(len(under_way))

    schedule = FSMOE.arranged(backward_of(1), ONE)
    seconds = Seconds(a=0, g=2, s=0, e=0, t=2)
    assert simulate(schedule, seconds.of, crowding_of=crowding_of).makespan_s == 4
    assert simulate(schedule, seconds.of).makespan_s == 2
    # The all-reduce has 1 s left when the gather is done: 2 * 1 beside it, then 1 alone.
    seconds = Seconds(a=0, g=1, s=0, e=0, t=2)
    assert simulate(schedule, seconds.of, crowding_of=crowding_of).makespan_s == 3


def test_crowding_counts_what_is_on_the_same_rank() -> None:
    schedule = FSMOE.arranged(backward_of(1))
    times = simulate(
        schedule,
        Seconds(a=1, g=1, s=1, e=1).of,
        num_ranks=3,
        crowding_of=lambda task, under_way: float(len(under_way)),
    )
    assert times.makespan_s == 5
