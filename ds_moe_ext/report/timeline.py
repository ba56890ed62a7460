# SPDX-License-Identifier: Apache-2.0
"""The tasks of one step: which layer was at work when, who waited for whom, and what was hidden."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.report.charts import HOST_WORK, Box, task_chart
from ds_moe_ext.report.markup import Html
from ds_moe_ext.report.record import TracedTask
from ds_moe_ext.report.units import counted, seconds_text, short_names
from ds_moe_ext.schedule.simulator import in_order
from ds_moe_ext.schedule.task import (
    COMPUTE,
    GRADIENTS,
    HAVE_AGAIN,
    HOST,
    INTER,
    INTRA,
    JOIN,
    PARAM,
    PLAN,
    Schedule,
    Stream,
    Task,
)

_WAITS = (JOIN.name, HAVE_AGAIN.name)  # no work, in the stream of what is computed
_LEAST_SHARE = 0.01  # of the critical path, of a kind that is named
_MOST_STRETCHES = 1000


@dataclass(frozen=True)
class Pass:
    """The tasks of one layer in one phase."""

    layer: str
    phase: str
    traced_tasks: tuple[TracedTask, ...]

    @property
    def start_s(self) -> float:
        return min(task.start_s for task in self.traced_tasks)

    @property
    def end_s(self) -> float:
        return max(task.end_s for task in self.traced_tasks)

    @property
    def length_s(self) -> float:
        """From the first start to the last end."""
        return self.end_s - self.start_s

    @property
    def own(self) -> Pass:
        """Of its own tasks, as ``stretches`` has them."""
        return replace(self, traced_tasks=tuple(_own(self.traced_tasks)))


def passes_of(timeline: Iterable[TracedTask]) -> list[Pass]:
    """The timeline by layer and phase, in the order in which they start."""
    held: dict[tuple[str, str], list[TracedTask]] = {}
    for task in timeline:
        held.setdefault((task.layer, task.phase), []).append(task)
    passes = [
        Pass(layer, phase, tuple(traced_tasks)) for (layer, phase), traced_tasks in held.items()
    ]
    return sorted(passes, key=lambda one: one.start_s)


def stretches(timeline: Sequence[TracedTask]) -> list[Pass]:
    """Which layer was at work when, in one phase: what is done in a row of its own tasks, in the
    order in which they begin. A layer comes once a micro-batch; where tasks of many layers take
    turns, once."""
    held: list[list[TracedTask]] = []
    for task in sorted(_own(timeline), key=lambda task: task.start_s):
        if held and (held[-1][0].layer, held[-1][0].phase) == (
            task.layer,
            task.phase,
        ):
            held[-1].append(task)
        else:
            held.append([task])
    if len(held) > _MOST_STRETCHES:
        return [one.own for one in passes_of(timeline)]
    return [
        Pass(traced_tasks[0].layer, traced_tasks[0].phase, tuple(traced_tasks))
        for traced_tasks in held
    ]


def _own(traced_tasks: Sequence[TracedTask]) -> Sequence[TracedTask]:
    """Without what may happen while another layer is at work: weights travel, and the host
    plans."""
    return tuple(s for s in traced_tasks if s.stream not in (PARAM.name, HOST.name)) or traced_tasks


# Who waited for whom.

Moment = tuple[float, float]  # start and end of a task, seconds
_ROUNDING_S = 2e-6  # events of a device are reported no finer


def bound_by(
    tasks: Sequence[Task], after: Sequence[Iterable[int]], moments: Sequence[Moment]
) -> list[int | None]:
    """Of each task, the position of the one that it waited for last.

    By the rule of time: a task starts when the task before it in its stream and all that it waits
    for have ended. One that only waits hands on what it waited for, until its own end.

    Args:
        tasks: of one rank, each stream's in the order in which it did them.
        after: for each task, the positions of those that it waits for.
        moments: of each task.

    Returns:
        A position before the task's own; None where nothing had ended yet that it waits for.
    """
    latest: dict[Stream, int] = {}
    found: list[int | None] = []
    for position, (task, awaited, (start_s, end_s)) in enumerate(zip(tasks, after, moments)):
        before = {*awaited, latest.get(task.stream, position)} - {position}
        work = {found[other] if tasks[other].op.is_wait else other for other in before}
        by_s = (end_s if task.op.is_wait else start_s) + _ROUNDING_S
        ended = [
            (moments[other][1], other)
            for other in work
            if other is not None and moments[other][1] <= by_s
        ]
        found.append(max(ended)[1] if ended else None)
        latest[task.stream] = position
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
        computed = position if task.stream == COMPUTE else computed
    return after


# In words.


def hidden(timeline: Sequence[TracedTask]) -> str:
    """How long replicas travelled, dense gradients were reduced in slices and the next step was
    planned, and how much of each was hidden; nothing of what there was none of."""
    computed = [s for s in timeline if s.stream == COMPUTE.name and s.name not in _WAITS]
    sent = [task for task in timeline if task.stream in (INTER.name, INTRA.name)]
    text = ""
    if travels := [task for task in timeline if task.stream == PARAM.name]:
        text += (
            f" Transfers of replicas and their gradients took {_beside(travels, computed)} "
            "this rank computed. They may overlap with another layer; the drawing of a layer "
            "shows all of its transfers."
        )
    if slices := [task for task in timeline if task.name == GRADIENTS.name]:
        text += (
            f" Reducing slices of the dense gradients took {_beside(slices, computed)} this "
            "rank computed."
        )
    if plans := [task for task in timeline if task.name == PLAN.name]:
        text += f" The host planned the next step for {_beside(plans, sent)} token all-to-alls ran."
    return text


def _beside(traced_tasks: Sequence[TracedTask], others: Iterable[TracedTask]) -> str:
    """How long some chunk ranges took, and which share of that others ran beside them."""
    at_s, busy_s = [0.0], [0.0]  # moments, and seconds until then during which any of others ran
    for other in sorted(others, key=lambda task: task.start_s):
        start_s = max(other.start_s, at_s[-1])
        length_s = max(other.end_s - start_s, 0.0)
        at_s += [start_s, start_s + length_s]
        busy_s += [busy_s[-1], busy_s[-1] + length_s]
    ends = np.array([(task.start_s, task.end_s) for task in traced_tasks])
    beside_s = np.diff(np.interp(ends, at_s, busy_s)).sum()
    total_s = float(np.diff(ends).sum())
    share = 100 * beside_s / max(total_s, 1e-12)
    return f"{seconds_text(total_s)}, during {share:.0f} % of which"


def critical_path(traced_tasks: Sequence[TracedTask]) -> list[TracedTask]:
    """The last task, the one that it waited for last, and so on; none where that is not known."""
    if all(task.bound_by is None for task in traced_tasks):
        return []
    at: int | None = max(range(len(traced_tasks)), key=lambda at: traced_tasks[at].end_s)
    chain = []
    while at is not None:
        chain.append(traced_tasks[at])
        at = traced_tasks[at].bound_by
    return chain


def critical(traced_tasks: Sequence[TracedTask]) -> str:
    """What the step spent its time on, from its last task back, each to the one that it waited for
    last; nothing where that is not known."""
    chain = critical_path(traced_tasks)
    if not chain:
        return ""
    seconds: dict[str, float] = defaultdict(float)
    for task in chain:
        seconds[task.name] += task.length_s
    total_s = max(chain[0].end_s - chain[-1].start_s, 1e-12)
    parts = [
        f"{name} {100 * own_s / total_s:.0f} %"
        for name, own_s in sorted(seconds.items(), key=lambda item: -item[1])
        if own_s >= _LEAST_SHARE * total_s
    ]
    idle_s = total_s - sum(seconds.values())
    return (
        " Critical path, from the last task back to the one that each waited for last: "
        f"{seconds_text(total_s)} in all: {', '.join(parts)}; idle "
        f"{100 * max(idle_s, 0.0) / total_s:.0f} %."
    )


# Drawn.


@dataclass(frozen=True)
class Step:
    """What is drawn of a step."""

    traced_tasks: Sequence[TracedTask]  # the tasks of one rank
    length_s: float = 0.0  # from the start of the step to its end; 0 if that is not known
    shown_s: float = 0.0  # what is drawn at least, to compare it with another

    @property
    def window(self) -> tuple[float, float]:
        """Where the drawing begins and how long it is: from the start of the step, or its first
        task, to its end, or that of its last task."""
        start_s = 0.0 if self.length_s else min(task.start_s for task in self.traced_tasks)
        end_s = max(self.length_s, *(task.end_s for task in self.traced_tasks))
        return start_s, max(end_s - start_s, self.shown_s, 1e-9)

    def others(self) -> list[TracedTask]:
        """What the model does when no layer of ours is at work; none where nobody knows how long
        the step was."""
        if not self.length_s:
            return []
        ordered = sorted(self.traced_tasks, key=lambda task: task.start_s)
        streams = in_order(task.stream for task in ordered)
        stream = COMPUTE.name if COMPUTE.name in streams else streams[0]
        before, ended_s, found = None, 0.0, []
        for after in (*ordered, None):
            start_s = self.length_s if after is None else after.start_s
            where = _between(before, after)
            if start_s > ended_s and where:
                found.append(TracedTask(HOST_WORK, stream, "", where, "", ended_s, start_s))
            if after is not None and after.end_s > ended_s:
                before, ended_s = after, after.end_s
        return found


def _between(before: TracedTask | None, after: TracedTask | None) -> str:
    """What the host's model does between two tasks; empty within a layer."""
    if after is None:
        return "after the last layer: gradients, optimizer"
    if before is None:
        return "before the first layer: data, embedding"
    if before.layer != after.layer:
        return f"between {before.layer} and {after.layer}, {after.phase}"
    return f"between {before.phase} and {after.phase} of {after.layer}" * (
        before.phase != after.phase
    )


def overview(step: Step, colours: Mapping[str, str], *, what: str = "the whole step") -> Html:
    """The whole step: which layer was at work, every task of every stream, the rest of the model,
    and the critical path where that is known."""
    start_s, length_s = step.window
    short = short_names(list(dict.fromkeys(task.layer for task in step.traced_tasks)))
    path = [replace(task, stream=CRITICAL) for task in critical_path(step.traced_tasks)]
    return task_chart(
        [*step.traced_tasks, *step.others(), *path],
        colours,
        start_s=start_s,
        length_s=length_s,
        what=what,
        boxes=[
            Box(f"{short[one.layer]} {one.phase}", one.start_s, one.end_s)
            for one in stretches(step.traced_tasks)
        ],
    )


CRITICAL = "critical path"  # a row of its own


def layer_chart(passes: Sequence[Pass], colours: Mapping[str, str]) -> Html:
    """The tasks of one layer, each phase from its own start, on one scale."""
    text = Html("")
    traced_tasks: list[TracedTask] = []
    lengths_s: dict[str, float] = {}
    for one in passes:
        busy_s = sum(task.length_s for task in one.traced_tasks)
        text += Html(
            '<p class="note"><b>{}</b> {} in {}, from {} into the step; {:.2f} streams busy '
            "on average</p>"
        ).format(
            one.phase,
            counted(len(one.traced_tasks), "task"),
            seconds_text(one.length_s),
            seconds_text(one.start_s),
            busy_s / max(one.length_s, 1e-12),
        )
        streams = in_order(task.stream for task in one.traced_tasks)
        lengths_s |= {f"{one.phase} {stream}": one.length_s for stream in streams}
        traced_tasks += [
            replace(
                task,
                stream=f"{one.phase} {task.stream}",
                start_s=task.start_s - one.start_s,
                end_s=task.end_s - one.start_s,
            )
            for stream in streams
            for task in one.traced_tasks
            if task.stream == stream
        ]
    longest_s = max(*(one.length_s for one in passes), 1e-9)
    what = f"tasks of {passes[0].layer}"
    return text + task_chart(
        traced_tasks, colours, start_s=0.0, length_s=longest_s, what=what, lengths_s=lengths_s
    )
