# SPDX-License-Identifier: Apache-2.0
"""Who waited for whom: of each task, the one that it waited for last. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ds_moe_ext.schedule.task import COMPUTE, Lane, Schedule, Task

Moment = tuple[float, float]  # start and end of a task, seconds
_ROUNDING_S = 2e-6  # events of a device are told no finer


def bound_by(
    tasks: Sequence[Task], after: Sequence[Iterable[int]], moments: Sequence[Moment]
) -> list[int | None]:
    """Of each task, the position of the one that it waited for last.

    By the rule of time: a task starts when the task before it in its lane and all that it waits for
    have ended. One that only waits hands on what it waited for, until its own end.

    Args:
        tasks: of one rank, each lane's in the order in which it did them.
        after: for each task, the positions of those that it waits for.
        moments: of each task.

    Returns:
        A position before the task's own; None where nothing had ended yet that it waits for.
    """
    latest: dict[Lane, int] = {}
    found: list[int | None] = []
    for position, (task, awaited, (start_s, end_s)) in enumerate(zip(tasks, after, moments)):
        before = {*awaited, latest.get(task.lane, position)} - {position}
        work = {found[other] if tasks[other].op.is_wait else other for other in before}
        by_s = (end_s if task.op.is_wait else start_s) + _ROUNDING_S
        ended = [
            (moments[other][1], other)
            for other in work
            if other is not None and moments[other][1] <= by_s
        ]
        found.append(max(ended)[1] if ended else None)
        latest[task.lane] = position
    return found


def seen_after(tasks: Sequence[Task]) -> list[Iterable[int]]:
    """For each task that a rank was seen to do, the positions of those that it waits for.

    Args:
        tasks: of any programs, in the order in which they began. What none of them writes comes
            from the host's model, and that computes in the lane of what is computed. One that only
            waits writes what another has brought.
    """
    tasks = [
        replace(task, reads=(*task.reads, *task.writes)) if task.op.is_wait else task
        for task in tasks
    ]
    given = dict.fromkeys(value for task in tasks for value in task.reads)
    after: list[Iterable[int]] = []
    computed: int | None = None
    seen = Schedule(tuple(tasks), (*given,), ())
    for position, (task, writers) in enumerate(zip(tasks, seen.after)):
        # Values of both directions have the same names.
        is_given = all(bool(tasks[w].adjoint_of) != bool(task.adjoint_of) for w in writers)
        after.append((*writers, computed) if is_given and computed is not None else writers)
        computed = position if task.lane == COMPUTE else computed
    return after
