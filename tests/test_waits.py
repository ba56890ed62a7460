# SPDX-License-Identifier: Apache-2.0
"""Who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence

from ds_moe_ext.report.timeline import Moment, bound_by, seen_after
from ds_moe_ext.schedule import task as ops
from ds_moe_ext.schedule.orders import (
    ARRIVED,
    COMPUTED,
    EXPERT_IDS,
    ROUTE,
    SCORES,
    TARGET_WEIGHTS,
    WEIGHTS,
    X,
    Y,
)
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.task import ChunkRange, Op, Schedule, Task, Value

WHOLE = ChunkRange(0, 1)


def task(op: Op, reads: Sequence[ops.Kind], writes: Sequence[ops.Kind], layer: int = 0) -> Task:
    read, written = (tuple(Value(kind, layer, WHOLE) for kind in each) for each in (reads, writes))
    return Task(op, layer, WHOLE, read, written)


ATTENTION = task(ops.ATTENTION, [], [X, EXPERT_IDS, SCORES])
ORDER = task(ops.ORDER, [EXPERT_IDS, SCORES], [ROUTE])
DISPATCH = task(ops.DISPATCH, [X, ROUTE], [ARRIVED])
GATHER = task(ops.GATHER, [WEIGHTS], [TARGET_WEIGHTS])
JOIN = task(ops.JOIN, [WEIGHTS, ROUTE], [TARGET_WEIGHTS])
EXPERT = task(ops.EXPERT, [ARRIVED, TARGET_WEIGHTS], [COMPUTED])
RESTORE = task(ops.RESTORE, [COMPUTED], [Y])


def bound(*seen: tuple[Task, Moment]) -> list[int | None]:
    tasks = [task for task, _ in seen]
    return bound_by(tasks, seen_after(tasks), [moment for _, moment in seen])


def test_a_task_waits_for_what_ended_last() -> None:
    head = ((ATTENTION, (0.0, 2.0)), (GATHER, (0.5, 3.0)), (ORDER, (2.0, 4.0)))
    rows = (DISPATCH, (4.0, 6.0))
    assert bound(*head, rows, (EXPERT, (6.0, 7.0))) == [None, None, 0, 2, 3]


def test_one_that_only_waits_hands_on_what_it_waited_for() -> None:
    head = ((ATTENTION, (0.0, 2.0)), (ORDER, (2.0, 4.0)), (DISPATCH, (4.0, 6.0)))
    # Replicas were there long before the rows, and then long after them.
    early, late = (GATHER, (0.5, 3.0)), (GATHER, (4.5, 8.0))
    joined = (JOIN, (6.0, 6.1)), (EXPERT, (6.1, 7.0))
    assert bound(head[0], early, *head[1:], *joined)[-1] == 3
    waited = (JOIN, (4.8, 8.0)), (EXPERT, (8.0, 9.0))
    assert bound(*head, late, *waited)[-2:] == [3, 3]


def test_what_the_model_gives_waits_for_what_was_computed_before() -> None:
    """Without the windows of the host: the next layer's order is not bound by a combine."""
    then = task(ops.ORDER, [EXPERT_IDS, SCORES], [ROUTE], layer=1)
    seen = ((ORDER, (0.0, 1.0)), (EXPERT, (1.0, 2.0)), (RESTORE, (2.0, 3.0)), (then, (4.0, 5.0)))
    assert bound(*seen)[-1] == 2


def test_in_a_simulated_step_nobody_idles_between_the_two() -> None:
    """All tasks start as what they waited for last ends, where no other rank is waited for."""
    tasks = (ATTENTION, ORDER, DISPATCH, EXPERT, RESTORE)
    seconds = dict(zip(tasks, (2.0, 1.0, 4.0, 0.5, 3.0)))
    schedule = Schedule(tasks, (Value(TARGET_WEIGHTS, 0, WHOLE),), ())
    found = simulate(schedule, lambda _, task: seconds[task])
    moments = list(zip(found.start_s[0], found.end_s[0]))
    by = bound_by(tasks, schedule.after, moments)
    assert by[0] is None
    for (start_s, _), position in zip(moments[1:], by[1:]):
        assert position is not None and moments[position][1] == start_s
