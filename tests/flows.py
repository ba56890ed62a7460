# SPDX-License-Identifier: Apache-2.0
"""Small schedules, written as text or drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ds_moe_ext.schedule.task import Kind, Lane, Op, Schedule, Span, Task, Value

LANES = ("compute", "inter", "param")


def flow(*lines: str) -> Schedule:
    """A schedule from lines ``"task lane"`` or ``"task lane task-that-it-reads ..."``."""
    return Schedule(tuple(_task(*line.split()) for line in lines), (), ())


def _task(name: str, lane: str, *reads: str) -> Task:
    values = tuple(Value(Kind(other), 0) for other in reads)
    return Task(Op(name, Lane(lane)), 0, Span(0, 1), values, (Value(Kind(name), 0),))


@st.composite
def flows(draw: st.DrawFn, max_tasks: int = 12, lanes: Sequence[str] = LANES) -> Schedule:
    """Any schedule: tasks in random lanes that read some of what was written before."""
    lines = []
    for number in range(draw(st.integers(1, max_tasks))):
        lane = draw(st.sampled_from(lanes))
        earlier = [f"t{i}" for i in range(number)]
        reads = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []
        lines.append(" ".join((f"t{number}", lane, *reads)))
    return flow(*lines)


def before(schedule: Schedule) -> list[set[int]]:
    """For each task, those that the rule makes it wait for: written out apart from the package."""
    waits: list[set[int]] = []
    for position, task in enumerate(schedule.tasks):
        earlier = schedule.tasks[:position]
        same_lane = {i for i, other in enumerate(earlier) if other.lane == task.lane}
        writers = {i for i, other in enumerate(earlier) if set(other.writes) & set(task.reads)}
        waits.append(writers | set(sorted(same_lane)[-1:]))
    return waits
