"""A pass that comes back: forward and backward of many layers, as one schedule."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ds_moe_ext.schedule.executor import Lanes, execute
from ds_moe_ext.schedule.program import Observer, Place
from ds_moe_ext.schedule.task import Lane, Op, Schedule, Task, Value
from ds_moe_ext.watch import WATCH


class Work(Protocol):
    """What is done in the tasks of an op."""

    def forward(self, task: Task, *reads: Any) -> tuple[tuple[Any, ...], Any]:
        """What the task writes, and what its adjoint will need."""
        ...

    def backward(self, task: Task, saved: Any, *grads: Any) -> tuple[Any, ...]:
        """What the adjoint writes; ``grads`` are None where this rank has none of them."""
        ...


def round_trip(
    schedule: Schedule,
    works: Mapping[Op, Work],
    lanes: Lanes,
    seen: Sequence[Observer],
    names: Sequence[str] = (),
) -> Done:
    """Do the tasks of a schedule that has forward and backward in one.

    Args:
        schedule: whose adjoints are of tasks of its own.
        works: what is done, by op.
        lanes: where.
        seen: told of the tasks of each layer, the last of what follows the layers too.
        names: of the layers, for a person who is told where a rank waits or has failed.
    """
    table: dict[Value, Any] = dict.fromkeys(schedule.written)
    unread = dict(schedule.num_readers)
    saved: list[Any] = [None] * len(schedule.tasks)
    errors: list[BaseException] = []
    done: Done = {task.lane: [] for task in schedule.tasks}
    lock = threading.Lock()  # lanes run at once

    def do(position: int) -> None:
        task = schedule.tasks[position]
        if errors:
            raise errors[0]
        WATCH.at(Place(names[task.layer] if task.layer < len(names) else "the end", task))
        try:
            work(position, task)
        except BaseException as error:
            errors.append(error)
            WATCH.failed(error)
            raise

    def work(position: int, task: Task) -> None:
        observer = seen[min(task.layer, len(seen) - 1)]
        start = lanes.mark() if observer.is_on else None
        reads = [table[value] for value in task.reads]
        lanes.keep(reads)
        if task.adjoint_of:
            (place,) = task.adjoint_of
            lanes.keep((saved[place],))
            written = works[task.op].backward(task, saved[place], *reads)
            saved[place] = None
        else:
            written, saved[position] = works[task.op].forward(task, *reads)
        table.update(zip(task.writes, written))
        done[task.lane].append(task)
        with lock:
            for value in task.reads:
                unread[value] -= 1
                if not unread[value]:
                    table[value] = None
        if observer.is_on:
            observer.saw(task, start, lanes.mark(), lanes)

    execute(schedule, do, lanes)
    if WATCH.has_failed:  # in an earlier pass
        WATCH.went_through()
    return done


Done = dict[Lane, list[Task]]
"""Tasks of a pass by their lanes, in the order in which they were done."""
