# SPDX-License-Identifier: Apache-2.0
"""The simulated timeline of a way: of classes of cells, the busiest first; and of the stages of a
pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from ds_moe_ext.pricing.candidates import Priced
from ds_moe_ext.pricing.issue import ISSUING
from ds_moe_ext.report.record import Span
from ds_moe_ext.schedule.task import HOST
from ds_moe_ext.schedule.trace import Box


def class_names(priced: Priced) -> list[str]:
    """Of its classes of cells, or of all cells where there are few."""
    num_cells, last = priced.way.grid.num_cells, len(priced.steps[-1].timeline.start_s) - 1
    if num_cells == last + 1:
        return [f"cell {cell}" for cell in range(num_cells)]
    return [
        f"{_place(number, last)} of {num_cells} cells in each layer" for number in range(last + 1)
    ]


def _place(number: int, last: int) -> str:
    if number in (0, last):
        return "the idlest" if number else "the busiest"
    return f"between these, class {number + 1} of {last + 1},"


def row_names(priced: Priced) -> list[str]:
    """Of all rows of ``boxes``: classes of cells, and pipeline stages behind them."""
    stages = len({turn.stage for turn in priced.steps[-1].turns})
    return [*class_names(priced), *(f"pipeline stage {stage}" for stage in range(stages))]


def boxes(priced: Priced) -> Iterator[Box]:
    """One micro-batch of the last step that was priced, and what pipeline stages do in it."""
    step = priced.steps[-1]
    first_row = len(step.timeline.start_s)
    for turn, span in zip(step.turns, turn_spans(priced)):
        name = f"{span.name} {turn.what.micro_batch}"
        row = first_row + turn.stage
        yield Box(name, row, span.layer, turn.start_s, turn.end_s, span.name)
    for number, (starts, ends) in enumerate(zip(step.timeline.start_s, step.timeline.end_s)):
        for task, start_s, end_s in zip(step.schedule.tasks, starts, ends):
            lane = HOST.name if task.lane == ISSUING else task.lane.name
            back = "'" if task.adjoint_of else ""
            name = f"{task.op.name}{back} {step.layers_before + task.layer}"
            yield Box(name, number, lane, start_s, end_s, task.op.name)


def spans(priced: Priced, number: int) -> list[Span]:
    """The same of one class, but for tasks that take no time."""
    step = priced.steps[-1]
    tasks, starts, ends = (
        step.schedule.tasks,
        step.timeline.start_s[number],
        step.timeline.end_s[number],
    )
    turn = next(place for place, task in enumerate(tasks) if task.adjoint_of)
    return [
        Span(
            name=task.op.name,
            lane=HOST.name if task.lane == ISSUING else task.lane.name,
            phase="forward" if place < turn else "backward",
            layer=f"layer {step.layers_before + task.layer}",
            chunk=f"{task.span}",
            start_s=start_s,
            end_s=end_s,
        )
        for place, (task, start_s, end_s) in enumerate(zip(tasks, starts, ends))
        if end_s > start_s
    ]


def turn_spans(priced: Priced) -> list[Span]:
    """What pipeline stages do in the last step that was priced, a lane a stage."""
    return [
        Span(
            name="backward" if what.is_back else "forward",
            lane=f"stage {stage}",
            phase="backward" if what.is_back else "forward",
            layer=f"chunk {what.chunk}",
            chunk=f"micro-batch {what.micro_batch}",
            start_s=start_s,
            end_s=end_s,
        )
        for stage, what, start_s, end_s in priced.steps[-1].turns
    ]
