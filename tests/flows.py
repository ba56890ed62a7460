# SPDX-License-Identifier: Apache-2.0
"""Small schedules, written as text or drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ds_moe_ext.schedule.task import ChunkRange, Kind, Op, Schedule, Stream, Task, Value

STREAMS = ("compute", "inter", "param")


def flow(*lines: str) -> Schedule:
    """A schedule from lines ``"task stream"`` or ``"task stream task-that-it-reads ..."``."""
    return Schedule(tuple(_task(*line.split()) for line in lines), (), ())


def _task(name: str, stream: str, *reads: str) -> Task:
    values = tuple(Value(Kind(other), 0) for other in reads)
    return Task(Op(name, Stream(stream)), 0, ChunkRange(0, 1), values, (Value(Kind(name), 0),))


@st.composite
def flows(draw: st.DrawFn, max_tasks: int = 12, streams: Sequence[str] = STREAMS) -> Schedule:
    """Any schedule: tasks in random streams that read some of what was written before."""
    lines = []
    for number in range(draw(st.integers(1, max_tasks))):
        stream = draw(st.sampled_from(streams))
        earlier = [f"t{i}" for i in range(number)]
        reads = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []
        lines.append(" ".join((f"t{number}", stream, *reads)))
    return flow(*lines)


def before(schedule: Schedule) -> list[set[int]]:
    """For each task, those that the rule makes it wait for: written out apart from the package."""
    waits: list[set[int]] = []
    for position, task in enumerate(schedule.tasks):
        earlier = schedule.tasks[:position]
        same_stream = {i for i, other in enumerate(earlier) if other.stream == task.stream}
        writers = {i for i, other in enumerate(earlier) if set(other.writes) & set(task.reads)}
        waits.append(writers | set(sorted(same_stream)[-1:]))
    return waits
