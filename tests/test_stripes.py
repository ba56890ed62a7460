# SPDX-License-Identifier: Apache-2.0
"""Zebra steps: Theorem 1's order, the goldens of HeterMoE's spec, and what holds at any size.

Tasks have short names here: letter, prime of an adjoint, layer, micro-batch. ``a`` attention, ``h``
head, ``e`` expert, ``o`` offloaded experts, ``d`` dispatch, ``c`` combine; ``g`` gather of
replicas, ``r`` revise, ``j`` join, ``k`` join of offloaded experts. Pure: nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from ds_moe_ext.schedule.simulator import Timeline, simulate
from ds_moe_ext.schedule.stripes import (
    A2E,
    ATTENTION_SIDE,
    E2A,
    EXPERT_SIDE,
    HEAD,
    OFFLOADED_JOIN,
    SHARED,
    SIDES,
    halves,
    one_at_a_time,
    part_of,
    picked,
    striped_step,
)
from ds_moe_ext.schedule.task import GATHER, PARAM, Schedule, Stream, Task

STREAMS = (ATTENTION_SIDE, EXPERT_SIDE, A2E, E2A)
WITH_PARAM = (*STREAMS, PARAM)


def forward_first(schedule: Schedule) -> Schedule:
    """All of forward before all of backward: the last stage does not alternate."""
    positions = range(len(schedule.tasks))
    return picked(schedule, sorted(positions, key=lambda i: bool(schedule.tasks[i].adjoint_of)))


def name(task: Task) -> str:
    letter = "k" if task.op == OFFLOADED_JOIN else task.op.name[0]
    return f"{letter}{chr(39) if task.adjoint_of else ''}{task.layer}{task.chunk_range}"


def names(tasks: Sequence[Task]) -> str:
    return " ".join(map(name, tasks))


def stream_of(schedule: Schedule, stream: Stream) -> list[Task]:
    return [task for task in schedule.tasks if task.stream == stream]


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one micro-batch."""

    attention: float = 3
    expert: float = 4
    sent: float = 1
    head: float = 3
    backward: float = 2
    moved: Mapping[int, float] | None = None
    speed: float = 1
    copied: float = 2

    def __call__(self, rank: int, task: Task) -> float:
        if task.op.name == "free":
            return self.copied if task.adjoint_of else 0
        moved = (self.moved or {}).get(task.layer, 0.0)
        forward = {
            "attention": self.attention,
            "head": self.head,
            "expert": self.expert * (1 - moved),
            "offloaded": self.expert * moved * self.speed,
            "dispatch": self.sent,
            "combine": self.sent,
            "gather": self.copied,
            "revise": self.copied,
            "join": 0,
            "offloaded_join": 0,
        }[task.op.name]
        backward = {"head": 2, "dispatch": 1, "combine": 1, "gather": 1}.get(
            task.op.name, self.backward
        )
        return forward * (backward if task.adjoint_of else 1)

    def busy(self, schedule: Schedule, stream: Stream) -> float:
        return sum(self(0, task) for task in stream_of(schedule, stream))


GOLDEN = Seconds()


def makespan(schedule: Schedule, seconds: Seconds = GOLDEN) -> float:
    return simulate(schedule, seconds).makespan_s


def started(schedule: Schedule, timeline: Timeline, stream: Stream) -> str:
    tasks = zip(schedule.tasks, timeline.start_s[0])
    return " ".join(f"{name(task)}@{at:g}" for task, at in tasks if task.stream == stream)


# Theorem 1, written out.


def theorem(num_layers: int, num_micro_batches: int) -> dict[Stream, list[str]]:
    """Spec rules 15, 16 and 10, layers and micro-batches from 0."""
    layers, each = range(num_layers), range(num_micro_batches)
    up = [(i, j) for i in layers for j in each]
    down = [(i, j) for i in reversed(layers) for j in each]
    return {
        ATTENTION_SIDE: [
            *(f"a{i}{j}" for i, j in up),
            *(f"{h}{num_layers}{j}" for j in each for h in ("h", "h'")),
            *(f"a'{i}{j}" for i, j in down),
        ],
        EXPERT_SIDE: [*(f"e{i}{j}" for i, j in up), *(f"e'{i}{j}" for i, j in down)],
        A2E: [*(f"d{i}{j}" for i, j in up), *(f"c'{i}{j}" for i, j in down)],
        E2A: [*(f"c{i}{j}" for i, j in up), *(f"d'{i}{j}" for i, j in down)],
    }


def test_the_simulator_hides_replicas_behind_what_precedes_their_experts() -> None:
    """Attention and dispatch of the first stripe take 4 s, the adjoint of attention more."""
    plain, copied = striped_step(2, 2), striped_step(2, 2, copied=[0, 1])
    for seconds in (2, 4):
        assert makespan(copied, Seconds(copied=seconds)) == makespan(plain) == 68
    assert makespan(copied, Seconds(copied=6)) == 70  # and the rest is waited for, once
    timeline = simulate(copied, GOLDEN)
    assert started(copied, timeline, PARAM) == "g00-1@0 g10-1@2 g'10-1@45 g'00-1@61"


def test_freed_replicas_are_those_of_two_layers_at_a_time() -> None:
    """They cost no time where they travel under the layer before or behind."""
    kept = striped_step(4, 2, copied=[0, 1, 2, 3])
    freed = striped_step(4, 2, copied=[0, 1, 2, 3], freed=[0, 1])
    for side in SIDES:
        own = part_of(freed, side)
        found = " ".join(name(task)[:-3] for task in stream_of(own, PARAM))
        assert found == "g0 g1 f0 g2 f1 g3 g'3 f'1 g'2 f'0 g'1 g'0"
    assert makespan(freed, Seconds(copied=2)) == makespan(kept, Seconds(copied=2))


def test_only_layers_of_the_stack_are_offloaded() -> None:
    with pytest.raises(ValueError, match=r"of which \[1, 2\] are offloaded"):
        striped_step(2, 2, offloaded=[1, 2])
    with pytest.raises(ValueError, match=r"of which \[2\] are copied"):
        striped_step(2, 2, copied=[2])
    with pytest.raises(ValueError, match=r"of which \[1\] are revised; .* freed are copied, too"):
        striped_step(2, 2, copied=[0], revised=[1])
    with pytest.raises(ValueError, match=r"of which \[1\] are freed; .* freed are copied, too"):
        striped_step(2, 2, copied=[0], freed=[1])


# G6: whole steps.


def test_golden_starts() -> None:
    step = striped_step(2, 2)
    timeline = simulate(step, GOLDEN)
    assert {stream.name: started(step, timeline, stream) for stream in STREAMS} == {
        "attention": "a00@0 a01@3 a10@9 a11@13 h20@18 h'20@21 h21@27 h'21@30 "
        "a'10@37 a'11@46 a'00@54 a'01@62",
        "expert": "e00@4 e01@8 e10@13 e11@17 e'10@28 e'11@37 e'00@45 e'01@53",
        "a2e": "d00@3 d01@6 d10@12 d11@16 c'10@27 c'11@36 c'00@43 c'01@52",
        "e2a": "c00@8 c01@12 c10@17 c11@21 d'10@36 d'11@45 d'00@53 d'01@61",
    }
    assert timeline.makespan_s == 68
    assert [GOLDEN.busy(step, stream) for stream in STREAMS] == [54, 48, 8, 8]


def test_golden_makespans() -> None:
    assert makespan(forward_first(striped_step(2, 2))) == 71
    assert makespan(one_at_a_time(striped_step(2, 2))) == 118
    assert makespan(striped_step(3, 3)) == 124
    assert makespan(striped_step(3, 4)) == 157
    assert makespan(forward_first(striped_step(3, 4))) == 166
    deep, recomputed = striped_step(8, 4), Seconds(backward=3)  # the head is not recomputed
    assert makespan(deep, recomputed) == 526
    assert [recomputed.busy(deep, stream) for stream in STREAMS[:2]] == [420, 512]


# G7: Fig. 6, forward only.


def forward_of(schedule: Schedule) -> Schedule:
    """Without the last stage."""
    return picked(
        schedule,
        [i for i, t in enumerate(schedule.tasks) if not t.adjoint_of and t.op != HEAD],
    )


def sixths(*moved: int) -> Seconds:
    """Of 6 experts that take 2/3 s each on either side."""
    return Seconds(moved={layer: count / 6 for layer, count in enumerate(moved)})


def figure_6(*moved: int) -> tuple[Schedule, Timeline]:
    step = striped_step(3, 3, offloaded=[layer for layer, count in enumerate(moved) if count])
    return forward_of(step), simulate(forward_of(step), sixths(*moved))


def window(forward: Schedule, timeline: Timeline, stream: Stream) -> tuple[float, float]:
    """Seconds that a stream is busy, and that pass from its first start to its last end."""
    chunk_ranges = [
        (start, end)
        for task, start, end in zip(forward.tasks, timeline.start_s[0], timeline.end_s[0])
        if task.stream == stream
    ]
    return sum(end - start for start, end in chunk_ranges), chunk_ranges[-1][1] - chunk_ranges[0][0]


@pytest.mark.parametrize(
    ("moved", "ends", "attention", "expert"),
    [
        ((0, 0, 0), 41, (27, 32), (36, 36)),
        ((0, 1, 1), 37, (31, 33), (32, 32)),
        ((1, 1, 1), 37, (33, 33), (30, 32)),
    ],
)
def test_figure_6(
    moved: Sequence[int], ends: float, attention: Sequence[float], expert: Sequence[float]
) -> None:
    forward, timeline = figure_6(*moved)
    assert timeline.makespan_s == approx(ends)
    assert window(forward, timeline, ATTENTION_SIDE) == approx(attention)
    assert window(forward, timeline, EXPERT_SIDE) == approx(expert)


def test_figure_6_as_published() -> None:
    """75 % of the experts' window is attention; the gaps shrink by 60 %, the time by 10 %; one
    layer more does not pay, and idles the experts for 6 %."""
    plain, moved, more = figure_6(0, 0, 0), figure_6(0, 1, 1), figure_6(1, 1, 1)
    (busy, open_s), (busy_moved, open_moved) = (
        window(*of, ATTENTION_SIDE) for of in (plain, moved)
    )
    assert busy / window(*plain, EXPERT_SIDE)[1] == approx(0.75)
    assert (open_moved - busy_moved) / (open_s - busy) - 1 == approx(-0.60)
    assert plain[1].makespan_s / moved[1].makespan_s == approx(1.108, abs=5e-4)
    assert more[1].makespan_s == approx(moved[1].makespan_s)
    expert, expert_open = window(*more, EXPERT_SIDE)
    assert 1 - expert / expert_open == approx(0.0625)


# G8 and G10: what the order does not promise.


def test_offloading_does_not_pay_in_a_shallow_stack() -> None:
    step, seconds = striped_step(2, 2, offloaded=[1]), sixths(0, 1)
    assert makespan(step, seconds) == approx(205 / 3)
    assert [seconds.busy(step, stream) for stream in STREAMS[:2]] == approx([58, 44])


def computed_in_order(schedule: Schedule, attention: str, expert: str) -> Schedule:
    """With other orders of computing; what is sent follows the task that has it (spec rule 11)."""
    place = {name(task): position for position, task in enumerate(schedule.tasks)}
    queues = [[place[word] for word in words.split()] for words in (attention, expert)]
    sent = [i for i, task in enumerate(schedule.tasks) if task.stream in (A2E, E2A)]
    issued: list[int] = []
    while any(queues):
        (queue, *_) = (q for q in queues if q and set(schedule.after[q[0]]) <= set(issued))
        issued.append(queue.pop(0))
        issued += [i for i in sent if i not in issued and set(schedule.after[i]) <= set(issued)]
    return picked(schedule, issued)


@pytest.mark.parametrize(
    ("seconds", "by_theorem", "better", "attention", "expert"),
    [
        (
            GOLDEN,
            109,
            108,
            "a00 a01 a03 a10 a02 a11 h20 h'20 a12 a13 h21 h'21 a'10 h23 h22 h'23 h'22 "
            "a'11 a'13 a'00 a'12 a'01 a'03 a'02",
            "e00 e01 e10 e03 e02 e11 e'10 e12 e13 e'11 e'00 e'13 e'12 e'01 e'03 e'02",
        ),
        (
            Seconds(attention=1, expert=6, head=10, sent=0),
            213,
            173,
            "a00 a01 a02 a10 a03 h20 a12 h'20 a11 h22 h'22 a13 a'10 h21 h'21 a'12 h23 "
            "a'00 a'11 h'23 a'13 a'02 a'01 a'03",
            "e00 e10 e02 e01 e12 e11 e03 e'10 e'00 e'12 e13 e'11 e'02 e'01 e'13 e'03",
        ),
    ],
)
def test_theorem_1_is_not_always_the_best(
    seconds: Seconds, by_theorem: float, better: float, attention: str, expert: str
) -> None:
    step = striped_step(2, 4)
    assert makespan(step, seconds) == by_theorem
    other = computed_in_order(step, attention, expert)
    assert sorted(map(name, other.tasks)) == sorted(map(name, step.tasks))
    assert makespan(other, seconds) == better


@pytest.mark.parametrize(("layers", "each", "ours", "literal"), [(2, 2, 60, 75), (8, 4, 395, 436)])
def test_the_last_stage_has_no_experts(layers: int, each: int, ours: int, literal: int) -> None:
    """Note A1 of the spec: were the last layer's experts in the stage that alternates, its tasks
    would run one after the other."""
    step, last, seconds = striped_step(layers, each), layers - 1, Seconds(head=0)

    def in_turn(stream: Stream, *stage: str) -> str:
        own = [name(task) for task in stream_of(step, stream)]
        taken = [f"{task}{j}" for j in range(each) for task in stage]
        first = own.index(f"{stage[0]}0")
        rest = [word for word in own[first:] if word not in taken]
        return " ".join([*own[:first], *taken, *rest])

    attention = in_turn(ATTENTION_SIDE, f"a{last}", f"h{layers}", f"h'{layers}", f"a'{last}")
    other = computed_in_order(step, attention, in_turn(EXPERT_SIDE, f"e{last}", f"e'{last}"))
    assert makespan(step, seconds) == ours
    assert makespan(other, seconds) == literal


# Section 6.4, rule 4: Table 3 on O1 at 8K, 24 experts of which each GPU has 4.


@pytest.mark.parametrize(
    ("moved", "attention", "expert"),
    [((0,) * 8, 0.59, 0.96), ((0, 1, 1, 1, 1, 1, 0, 1), 0.84, 0.89)],
)
def test_utilisation_of_table_3(moved: Sequence[int], attention: float, expert: float) -> None:
    step = striped_step(8, 2, offloaded=[layer for layer, count in enumerate(moved) if count])
    seconds = Seconds(
        attention=0.62,
        expert=1,
        sent=0.155,
        head=0,
        backward=3,
        moved={layer: count / 4 for layer, count in enumerate(moved)},
        speed=0.8,
    )
    taken = makespan(step, seconds)
    assert seconds.busy(step, ATTENTION_SIDE) / taken == approx(attention, abs=0.005)
    assert seconds.busy(step, EXPERT_SIDE) / taken == approx(expert, abs=0.005)


# What holds at any size.

sizes = st.tuples(st.integers(1, 3), st.integers(1, 4))


@st.composite
def steps(draw: st.DrawFn) -> Schedule:
    num_layers, num_micro_batches = draw(sizes)
    offloaded, copied = (draw(st.sets(st.integers(0, num_layers - 1))) for _ in range(2))
    revised, freed = ({layer for layer in copied if draw(st.booleans())} for _ in range(2))
    kinds = {"offloaded": offloaded, "copied": copied, "revised": revised, "freed": freed}
    return striped_step(num_layers, num_micro_batches, **kinds)


whole = st.integers(0, 9)
any_seconds = st.builds(
    Seconds,
    attention=whole,
    expert=whole,
    sent=whole,
    head=whole,
    backward=st.integers(1, 3),
    moved=st.just({0: 0.5}),
)

at_any_size = settings(deadline=None, derandomize=True, max_examples=50)


@at_any_size
@given(sizes)
def test_streams_are_in_the_order_of_the_theorem(size: tuple[int, int]) -> None:
    step = striped_step(*size)
    assert {stream: [name(t) for t in stream_of(step, stream)] for stream in STREAMS} == theorem(
        *size
    )


@at_any_size
@given(steps())
def test_nothing_is_read_before_it_is_written(step: Schedule) -> None:
    for schedule in (step, forward_first(step), one_at_a_time(step)):
        assert len(schedule.after) == len(schedule.tasks)
        assert set(schedule.inputs) == set(step.inputs)
        assert set(schedule.outputs) == set(step.outputs)
    assert len({name(task) for task in step.tasks}) == len(step.tasks)


@at_any_size
@given(steps())
def test_each_task_has_one_adjoint(step: Schedule) -> None:
    """So attention goes back once for each layer and micro-batch, when both branches are there."""
    for schedule in (step, forward_first(step), *(part_of(step, side) for side in SIDES)):
        of = [place for task in schedule.tasks for place in task.adjoint_of]
        assert sorted(of) == [i for i, t in enumerate(schedule.tasks) if not t.adjoint_of]
        for task in schedule.tasks:
            for place in task.adjoint_of if task.op != GATHER else ():
                assert name(schedule.tasks[place]) == name(task).replace("'", "")
    last = max(task.layer for task in step.tasks)
    for position, task in enumerate(step.tasks):
        if name(task).startswith("a'"):
            layer, micro_batch = task.layer, task.chunk_range
            later = f"{'h' if layer + 1 == last else 'a'}'{layer + 1}{micro_batch}"
            branches = {name(step.tasks[w]) for w in step.after[position]}
            assert branches == {later, f"d'{layer}{micro_batch}", f"a{layer}{micro_batch}"}


@at_any_size
@given(steps())
def test_halves_are_the_whole(step: Schedule) -> None:
    """Of each side, in its order; backward is given what forward wrote and it reads."""
    for own in (part_of(step, side) for side in SIDES):
        first, later = halves(own)
        tasks = [t for t in own.tasks if not t.adjoint_of], [t for t in own.tasks if t.adjoint_of]
        assert (names(first.tasks), names(later.tasks)) == tuple(map(names, tasks))
        assert len(first.after) == len(first.tasks) and len(later.after) == len(later.tasks)
        for half, whole in zip(later.tasks, tasks[1]):
            of, before = half.adjoint_of, whole.adjoint_of
            assert names([first.tasks[w] for w in of]) == names([own.tasks[w] for w in before])
        written = {value for task in first.tasks for value in task.writes}
        assert written & set(later.inputs) <= set(first.outputs)
        assert set(own.outputs) <= {*first.outputs, *later.outputs}


@at_any_size
@given(steps(), any_seconds)
def test_order_of_a_stream_and_bounds_of_a_step(step: Schedule, seconds: Seconds) -> None:
    timeline = simulate(step, seconds)
    for stream in WITH_PARAM:
        at = [i for i, task in enumerate(step.tasks) if task.stream == stream]
        for before, after in pairwise(at):
            assert timeline.end_s[0][before] <= timeline.start_s[0][after]
    for position, waits in enumerate(step.after):
        for writer in waits:
            assert timeline.end_s[0][writer] <= timeline.start_s[0][position]
    first = (
        i
        for i, task in enumerate(step.tasks)
        if task.chunk_range.start == 0 and task.stream != PARAM
    )
    alone = picked(step, list(first))
    least = max(*(seconds.busy(step, stream) for stream in STREAMS), makespan(alone, seconds))
    assert least <= timeline.makespan_s
    serial = sum(seconds(0, task) for task in step.tasks)
    assert timeline.makespan_s <= makespan(one_at_a_time(step), seconds) == serial


@at_any_size
@given(st.integers(1, 4), any_seconds)
def test_one_micro_batch_overlaps_nothing(num_layers: int, seconds: Seconds) -> None:
    step = striped_step(num_layers, 1)
    assert makespan(step, seconds) == makespan(one_at_a_time(step), seconds)


# Both sides.


@at_any_size
@given(steps())
def test_sides_never_wait_for_each_other_in_a_circle(step: Schedule) -> None:
    """Each side starts what is next in a stream and has its inputs there; collectives need both."""
    parts = [part_of(step, side) for side in SIDES]
    queues = [
        {
            stream: [i for i, task in enumerate(part.tasks) if task.stream == stream]
            for stream in WITH_PARAM
        }
        for part in parts
    ]
    done: list[set[int]] = [set(), set()]

    def is_ready(side: int, stream: Stream) -> bool:
        queue = queues[side][stream]
        return bool(queue) and set(parts[side].after[queue[0]]) <= done[side]

    moves = [((0,), ATTENTION_SIDE), ((1,), EXPERT_SIDE), *(((0, 1), stream) for stream in SHARED)]
    while ready := [
        (who, stream) for who, stream in moves if all(is_ready(s, stream) for s in who)
    ]:
        who, stream = ready[0]
        places = [queues[side][stream].pop(0) for side in who]
        assert len({name(parts[side].tasks[i]) for side, i in zip(who, places)}) == 1
        for side, place in zip(who, places):
            done[side].add(place)
    assert [len(places) for places in done] == [len(part.tasks) for part in parts]


@at_any_size
@given(steps(), any_seconds, st.integers(1, 2), st.integers(1, 2))
def test_several_ranks_of_a_side_that_are_alike_are_as_one(
    step: Schedule, seconds: Seconds, num_attention: int, num_expert: int
) -> None:
    """A rank has no work in the other side's stream, and meets all in those between."""
    ranks = range(num_attention + num_expert)

    def of_rank(rank: int, task: Task) -> float:
        side = ATTENTION_SIDE if rank < num_attention else EXPERT_SIDE
        return seconds(rank, task) if task.stream in (side, *SHARED) else 0.0

    timeline = simulate(
        step,
        of_rank,
        num_ranks=len(ranks),
        peers_of=lambda rank, task: ranks if task.stream in SHARED else (rank,),
    )
    assert timeline.makespan_s == makespan(step, seconds)
