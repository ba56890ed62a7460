# SPDX-License-Identifier: Apache-2.0
"""The schedules that FSMoE compares, as passes over the tasks of one layer (spec 2.5). Pure.

One issue order serves them all. Here it is in three lanes, of two chunks; backward has the adjoints
from combine to dispatch in place of dispatch to combine::

    inter    dispatch[0]  dispatch[1]     gradients           combine[0]       combine[1]
    intra                 cell_gather[0]  cell_gather[1]  cell_scatter[0]  cell_scatter[1]
    compute                               expert[0]       expert[1]

In one queue the collectives stand as they are issued: dispatch and gather of each chunk, gradients,
scatter and combine of each chunk. What differs is the lanes, whether tokens are cut at all, and
where slices of the dense gradients are reduced. What follows in backward up to the next MoE layer,
the dense part, is the host's; a slice that is issued as the MoE part ends runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from ds_moe_ext.schedule.task import (
    CELL_GATHER,
    CELL_SCATTER,
    COMBINE,
    DISPATCH,
    EXPERT,
    GRADIENTS,
    INTER,
    JOIN,
    RESTORE,
    Kind,
    Op,
    Schedule,
    Span,
    Task,
    Value,
)

QUEUED: Mapping[Op, Op] = MappingProxyType(
    {op: replace(op, lane=INTER) for op in (CELL_GATHER, CELL_SCATTER)}
)
"""In one queue: for a collective of a cell, the op that runs in the lane of those between cells."""

REDUCED = Kind("reduced", has_gradient=False)  # a slice of the dense gradients, summed

ARRIVALS = (DISPATCH, CELL_GATHER)  # what a chunk needs before the experts
RETURNS = (CELL_SCATTER, COMBINE, RESTORE)  # and behind them


class Slices(NamedTuple):
    """How many reductions of dense gradients stand where, in the backward pass of one layer.

    Attributes:
        within_moe: behind the last exchange that brings chunks to the experts.
        dense: behind the layer's last exchange, beside the dense part that follows in backward.
        tail: behind all else of the layer, exposed.
    """

    within_moe: int = 0
    dense: int = 0
    tail: int = 0


NO_SLICES = Slices()


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How the tasks of a layer are issued, and where dense gradients may be reduced.

    Attributes:
        is_cut: tokens travel in chunks, else all at once.
        has_one_queue: all collectives run in one lane, those of a cell by the ops of ``QUEUED``;
            else those between cells in another lane than those within.
        slices_moe: reductions may stand within the MoE part.
        slices_dense: and beside the dense part. What stands nowhere is the tail.
        piece_bytes: gradients are reduced in pieces of this size; null: in as many as there are
            places, as large as a plan says.
    """

    is_cut: bool = True
    has_one_queue: bool = True
    slices_moe: bool = False
    slices_dense: bool = False
    piece_bytes: int | None = None

    def arranged(self, schedule: Schedule, slices: Slices = NO_SLICES) -> Schedule:
        """The schedule of a layer in one direction, in this order and these lanes.

        Slices are numbered from 0, as they are issued: slice ``i`` has the span ``i``.

        Args:
            schedule: of one layer, cut already.
            slices: reductions to put between, of the backward pass.

        Raises:
            ValueError: tokens are cut, or a slice stands, where this pipeline has none.
        """
        self._check(slices)
        layer, tasks = schedule.tasks[0].layer, in_halves(schedule.tasks)
        within, dense, tail = accumulate(slices)
        ends = tuple(value for value in schedule.outputs if value.kind.by_token)
        arrived = [task.op for task in tasks].index(EXPERT)
        issued = (
            *tasks[:arrived],
            *reductions(layer, Span(0, within)),
            *tasks[arrived:],
            *reductions(layer, Span(within, dense)),
            *reductions(layer, Span(dense, tail), after=ends),
        )
        return self.queued(replace(schedule, tasks=issued))

    def queued(self, schedule: Schedule) -> Schedule:
        """The same tasks in the same order, in the lanes of this pipeline.

        Raises:
            ValueError: tokens are cut where this pipeline cuts none.
        """
        num_chunks = sum(task.op == EXPERT for task in schedule.tasks)
        if num_chunks > 1 and not self.is_cut:
            raise ValueError(
                f"the layer is cut into {num_chunks} chunks, but the pipeline cuts no tokens; "
                "build its schedule with degree 1"
            )
        if not self.has_one_queue:
            return schedule
        tasks = (replace(task, op=QUEUED.get(task.op, task.op)) for task in schedule.tasks)
        return replace(schedule, tasks=tuple(tasks))

    def _check(self, slices: Slices) -> None:
        allowed = Slices(self.slices_moe, self.slices_dense, tail=True)
        for name, count, is_allowed in zip(Slices._fields, slices, allowed):
            if count and not is_allowed:
                raise ValueError(
                    f"{count} slices of gradients stand in {name!r}, where the pipeline has no "
                    "place for them; count them to its tail"
                )


LINA_BYTES = 30 * 10**6

PIPELINES: Mapping[str, Pipeline] = MappingProxyType(
    {
        "default": Pipeline(is_cut=False),
        "tutel": Pipeline(),
        "tutel_improved": Pipeline(slices_dense=True),
        "fsmoe_unsliced": Pipeline(has_one_queue=False, slices_dense=True),
        "fsmoe": Pipeline(has_one_queue=False, slices_moe=True, slices_dense=True),
        "fsmoe_no_iio": Pipeline(slices_moe=True, slices_dense=True),
        "pipemoe_lina": Pipeline(slices_moe=True, slices_dense=True, piece_bytes=LINA_BYTES),
    }
)
"""By the name of a strategy's key: PipeMoE is Tutel's, IIO is inter- beside intra-cell."""


def in_halves(tasks: Iterable[Task]) -> list[Task]:
    """What brings chunks to the experts, chunk by chunk, the experts, and what brings chunks back.

    Copies of experts are joined just before the experts.

    Tasks of other ops stay before or behind all these, as they stood to the first of them.

    Raises:
        ValueError: no task computes.
    """
    tasks = list(tasks)
    is_backward = any(task.op == EXPERT and task.adjoint_of for task in tasks)
    stages: tuple[tuple[Op, ...], ...] = (ARRIVALS, (JOIN,), (EXPERT,), RETURNS)
    if is_backward:
        stages = tuple(stage[::-1] for stage in stages[::-1])
    place = {op: (half, rank) for half, ops in enumerate(stages) for rank, op in enumerate(ops)}
    chunked = [task for task in tasks if task.op in place]
    if not any(task.op == EXPERT for task in chunked):
        raise ValueError(
            f"none of the tasks {', '.join(map(str, tasks))} is an expert's; give those of a layer"
        )
    first = tasks.index(chunked[0])
    rest = [task for task in tasks[first:] if task.op not in place]

    def turn(task: Task) -> tuple[int, Span, int]:
        half, rank = place[task.op]
        return half, task.span, rank

    return [*tasks[:first], *sorted(chunked, key=turn), *rest]


def reductions(layer: int, numbers: Span, after: tuple[Value, ...] = ()) -> list[Task]:
    """The all-reduces of some slices, whose gradients were ready before the layer's backward began.

    Args:
        layer: beside which they run.
        numbers: of the slices.
        after: what they wait for besides.
    """
    slices = (Span(number, number + 1) for number in range(*numbers))
    return [Task(GRADIENTS, layer, i, after, (Value(REDUCED, layer, i),)) for i in slices]
