# SPDX-License-Identifier: Apache-2.0
"""What the host takes to issue a step: one thread, task after task, and a wait for counts. Pure.

A device starts what the host has issued. So a host that is slower than the devices shows as a lane
of its own that everything else waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from ds_moe_ext.schedule.task import (
    ATTENTION,
    JOIN,
    LAUNCH,
    ORDER,
    START,
    Kind,
    Lane,
    Op,
    Schedule,
    Span,
    Task,
    Value,
)
from ds_moe_ext.schedule.wires import ROUTE

ISSUING = Lane("issuing")
ISSUE = Op("issue", ISSUING)
ISSUED = Kind("issued", has_gradient=False)
_OF_COPIES = (LAUNCH.name, JOIN.name, START.name)


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Seconds that the host takes to issue one task, by the name of its op; others take none.

    Attributes:
        forward: in forward.
        backward: in backward.
    """

    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, task: Task) -> float:
        """Of one task."""
        side = self.backward if task.adjoint_of else self.forward
        return side.get(task.op.name, 0.0)

    def with_forward_again(self) -> HostTimes:
        """Where layers run again in backward: all of forward but what is done about copies, which
        are there."""
        again = {name: s for name, s in self.forward.items() if name not in _OF_COPIES}
        # Counts have no adjoint: their time goes with that of what the host computes itself.
        again[ATTENTION.name] = again.get(ATTENTION.name, 0.0) + again.pop(ORDER.name, 0.0)
        names = dict.fromkeys((*self.backward, *again))
        both = {name: self.backward.get(name, 0.0) + again.get(name, 0.0) for name in names}
        return replace(self, backward=both)

    @property
    def is_nothing(self) -> bool:
        """Whether no task takes any."""
        return not any((*self.forward.values(), *self.backward.values()))


NO_HOST = HostTimes(forward=MappingProxyType({}), backward=MappingProxyType({}))


class Issued(NamedTuple):
    """A step with what the host does.

    Attributes:
        schedule: with a task ISSUE before each that takes the host time.
        seconds: of these, by their ``id``.
    """

    schedule: Schedule
    seconds: Mapping[int, float]


def with_host(schedule: Schedule, host: HostTimes) -> Issued:
    """The same step with what the host does.

    The host waits once in each layer's forward: for the counts of its rows, which ORDER brings.
    """
    if host.is_nothing:
        return Issued(schedule, {})
    tasks: list[Task] = []
    moved: list[int] = []  # where each task now stands
    seconds: dict[int, float] = {}
    waits: tuple[Value, ...] = ()
    for task in schedule.tasks:
        host_s = host.seconds(task)
        reads = task.reads
        if host_s:
            here = len(tasks)
            done = Value(ISSUED, task.layer, Span(here, here + 1))
            tasks.append(Task(ISSUE, task.layer, Span(0, 1), waits, (done,)))
            seconds[id(tasks[here])], reads, waits = host_s, (*reads, done), ()
        if task.op == ORDER and not task.adjoint_of:
            waits = tuple(value for value in task.writes if value.kind == ROUTE)
        moved.append(len(tasks))
        adjoint_of = tuple(moved[place] for place in task.adjoint_of)
        tasks.append(replace(task, reads=reads, adjoint_of=adjoint_of))
    return Issued(replace(schedule, tasks=tuple(tasks)), seconds)
