# SPDX-License-Identifier: Apache-2.0
"""The simulated timeline of a way: of classes of EP ranks, the busiest first; and of the stages of
a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_moe_ext.planning.candidates import Priced
from ds_moe_ext.planning.layer_seconds import ISSUING
from ds_moe_ext.report.record import TracedTask
from ds_moe_ext.report.timeline import Moment, bound_by
from ds_moe_ext.schedule.simulator import Box
from ds_moe_ext.schedule.task import HOST, Task


def class_names(priced: Priced) -> list[str]:
    """Of its classes of EP ranks, or of all EP ranks where there are few."""
    num_ep_ranks, last = priced.way.grid.num_ep_ranks, len(priced.steps[-1].timeline.start_s) - 1
    if num_ep_ranks == last + 1:
        return [f"EP rank {ep_rank}" for ep_rank in range(num_ep_ranks)]
    return [
        f"{_place(number, last)} of {num_ep_ranks} EP ranks in each layer"
        for number in range(last + 1)
    ]


def _place(number: int, last: int) -> str:
    if number in (0, last):
        return "the idlest" if number else "the busiest"
    return f"between these, class {number + 1} of {last + 1},"


def row_names(priced: Priced) -> list[str]:
    """Of all rows of ``boxes``: classes of EP ranks, and pipeline stages behind them."""
    stages = len({stage_pass.stage for stage_pass in priced.steps[-1].stage_passes})
    return [*class_names(priced), *(f"pipeline stage {stage}" for stage in range(stages))]


def boxes(priced: Priced) -> Iterator[Box]:
    """One micro-batch of the last step that was priced, and what pipeline stages do in it."""
    step = priced.steps[-1]
    first_row = len(step.timeline.start_s)
    for stage_pass, drawn in zip(step.stage_passes, stage_tasks(priced)):
        name = f"{drawn.name} {stage_pass.what.micro_batch}"
        row = first_row + stage_pass.stage
        yield Box(name, row, drawn.layer, stage_pass.start_s, stage_pass.end_s, drawn.name)
    for number in range(first_row):
        moments, bound = _seen(priced, number)
        for task, (start_s, end_s), by in zip(step.schedule.tasks, moments, bound):
            numbered = replace(task, layer=step.layers_before + task.layer)
            reported = {"layer": f"layer {numbered.layer}", "chunk": f"{task.chunk_range}"}
            stream = _stream(task)
            yield Box(numbered.label, number, stream, start_s, end_s, task.op.name, by, reported)


def traced_tasks(priced: Priced, number: int) -> list[TracedTask]:
    """The same of one class, but for tasks that take no time, in the order in which they begin."""
    step = priced.steps[-1]
    tasks, (moments, bound) = step.schedule.tasks, _seen(priced, number)
    stage_pass = next(place for place, task in enumerate(tasks) if task.adjoint_of)
    takes = [end_s > start_s for start_s, end_s in moments]
    for place, by in enumerate(bound):  # ascending: what one waited for is settled
        bound[place] = bound[by] if by is not None and not takes[by] else by
    kept = sorted((place for place, one in enumerate(takes) if one), key=lambda p: moments[p][0])
    new = {old: place for place, old in enumerate(kept)}
    return [
        TracedTask(
            name=tasks[place].op.name,
            stream=_stream(tasks[place]),
            phase="forward" if place < stage_pass else "backward",
            layer=f"layer {step.layers_before + tasks[place].layer}",
            chunk=f"{tasks[place].chunk_range}",
            start_s=moments[place][0],
            end_s=moments[place][1],
            bound_by=new.get(by) if (by := bound[place]) is not None else None,
        )
        for place in kept
    ]


def stage_tasks(priced: Priced) -> list[TracedTask]:
    """What pipeline stages do in the last step that was priced, a stream a stage."""
    return [
        TracedTask(
            name="backward" if what.is_back else "forward",
            stream=f"stage {stage}",
            phase="backward" if what.is_back else "forward",
            layer=f"chunk {what.chunk}",
            chunk=f"micro-batch {what.micro_batch}",
            start_s=start_s,
            end_s=end_s,
        )
        for stage, what, start_s, end_s in priced.steps[-1].stage_passes
    ]


def _stream(task: Task) -> str:
    return HOST.name if task.stream == ISSUING else task.stream.name


def _seen(priced: Priced, number: int) -> tuple[list[Moment], list[int | None]]:
    """When each task began and ended, and which it waited for last."""
    step = priced.steps[-1]
    moments = list(zip(step.timeline.start_s[number], step.timeline.end_s[number]))
    return moments, bound_by(step.schedule.tasks, step.schedule.after, moments)
