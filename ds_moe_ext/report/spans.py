# SPDX-License-Identifier: Apache-2.0
"""Tasks of a timed step as a report has them: who waited for whom, what nothing hides. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import numpy as np

from ds_moe_ext.report.record import Span
from ds_moe_ext.schedule.stripes import A2E, ATTENTION_SIDE, E2A, EXPERT_SIDE, OFFLOADED_JOIN
from ds_moe_ext.schedule.task import (
    COMBINE,
    COMPUTE,
    DISPATCH,
    GATHER,
    GRADIENTS,
    HAVE_AGAIN,
    INTER,
    INTRA,
    JOIN,
    START,
    Lane,
    Schedule,
    Task,
)

REDUCTION = "reduction"  # a gather's adjoint is known by a name of its own
TRAVELS = frozenset((GATHER.name, REDUCTION))
"""Copies of experts on their way, and their gradients."""
WAITS = frozenset(op.name for op in (START, JOIN, HAVE_AGAIN, OFFLOADED_JOIN))
"""Tasks that only wait for copies of experts, or for their gradients."""
_COMPUTING = frozenset(lane.name for lane in (COMPUTE, ATTENTION_SIDE, EXPERT_SIDE))
_SENDING = frozenset(lane.name for lane in (INTER, INTRA, A2E, E2A))
_EXCHANGES = frozenset(op.name for op in (DISPATCH, COMBINE))


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
    """For each task that a rank was seen to do, the positions of those that it waits for."""
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


def exposed_s(spans: Iterable[Span]) -> float:
    """Seconds in which rows were exchanged or copies waited for, and nothing was computed. Pure.

    What else the lane ``param`` does is hidden, or waited for; slices of dense gradients go on
    beside what the host computes, which nobody times.
    """
    computed, sent = [], []
    for span in spans:
        if span.lane in _COMPUTING and span.name not in WAITS:
            computed.append(span)
        elif span.name in WAITS or (span.lane in _SENDING and span.name != GRADIENTS.name):
            sent.append(span)
    return _covered_s([*computed, *sent]) - _covered_s(computed)


def _covered_s(spans: Sequence[Span]) -> float:
    """Seconds in which one of them ran, at least."""
    if not spans:
        return 0.0
    times = np.array([(span.start_s, span.end_s) for span in spans])
    start_N, end_N = times[np.argsort(times[:, 0])].T
    reached_N = np.maximum.accumulate(end_N)
    gaps_s = np.maximum(start_N[1:] - reached_N[:-1], 0.0).sum()
    return float(reached_N[-1] - start_N[0] - gaps_s)


def exchanges_s(spans: Iterable[Span], apart: Container[str] = ()) -> tuple[float, ...]:
    """Seconds of each exchange of rows, waiting included, in the order that a lane has them, which
    is the same on all ranks that exchange. Pure."""
    found = [span for span in spans if span.name in _EXCHANGES and span.layer not in apart]
    found.sort(key=lambda span: (span.lane, span.start_s))
    return tuple(span.end_s - span.start_s for span in found)
