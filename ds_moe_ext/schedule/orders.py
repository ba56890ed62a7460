# SPDX-License-Identifier: Apache-2.0
"""The tasks of one MoE layer and the orders in which they are issued. Pure.

First stands what each task reads and writes; then the pipelines that FSMoE compares, which are
passes from a list of tasks to another; last ``programs``, forward and backward of a layer with all
that goes on beside its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import lcm
from types import MappingProxyType
from typing import NamedTuple

from ds_moe_ext.schedule.task import (
    BEGIN_GRADIENTS,
    COMBINE,
    DISPATCH,
    ETP_GATHER,
    ETP_SCATTER,
    EXPERT,
    GATE,
    GRADIENTS,
    HAVE_AGAIN,
    INTER,
    JOIN,
    LAUNCH,
    ORDER,
    PLAN,
    RECALL,
    RESTORE,
    SEND_TO_OWNER,
    START,
    ChunkRange,
    Kind,
    Op,
    Schedule,
    Task,
    Value,
    chunk_ranges,
)

# The tasks of one MoE layer, one function each: what they read, what they write.


X = Kind("x", by_token=True)  # hidden states [T, D]
GATE_WEIGHTS = Kind("gate_weights")  # tuple of tensors
EXPERT_IDS = Kind("expert_ids", by_token=True, has_gradient=False)  # int64 [T, K], -1: dropped
SCORES = Kind("scores", by_token=True)  # [T, K]
GATE_LOSSES = Kind("gate_losses")  # [2]: load balance, z
ROUTE = Kind("route", has_gradient=False)  # LayerRoute
ROW_SCORES = Kind("row_scores")  # scores of all rows at the experts [R], by slot
WEIGHTS = Kind("weights")  # tuple of tensors: of the experts at their owners on this rank, by slot
TARGET_WEIGHTS = Kind("target_weights")  # and of all that compute here
ARRIVED = Kind("arrived")  # rows at the experts [R, D], by slot
GATHERED = Kind("gathered")  # rows at all ranks of the ETP group [G, D], by slot
PARTIAL = Kind("partial")  # outputs of the splits of experts on this rank [G, D], to be summed
COMPUTED = Kind("computed")  # expert outputs [R, D], by slot
RETURNED = Kind("returned")  # expert outputs [N, D], in send order
Y = Kind("y", by_token=True)  # output [T, D]
STARTED = Kind("started", has_gradient=False)  # a pass of replicas
LAUNCHED = Kind("launched", has_gradient=False)  # a piece of the replicas is on its way
RECALLED = Kind("recalled", has_gradient=False)  # the replicas are, once more
HAD_AGAIN = Kind("had_again", has_gradient=False)  # they are there
SENT = Kind("sent", has_gradient=False)  # a piece of their gradients is
PLANNED = Kind("planned", has_gradient=False)  # the plan of the next step

ROUTED_OPS = (ORDER, DISPATCH, EXPERT, COMBINE, RESTORE)  # of a layer whose gate is the host's


def gate(layer: int, whole: ChunkRange) -> Task:
    reads = (Value(X, layer, whole), Value(GATE_WEIGHTS, layer))
    writes = (
        Value(EXPERT_IDS, layer, whole),
        Value(SCORES, layer, whole),
        Value(GATE_LOSSES, layer),
    )
    return Task(GATE, layer, whole, reads, writes)


def order(layer: int, whole: ChunkRange, *, once: bool = False) -> Task:
    """One exchange of counts for all chunks of the layer; and of scores, if rows go ``once``."""
    ids, route = Value(EXPERT_IDS, layer, whole), Value(ROUTE, layer, whole)
    if not once:
        return Task(ORDER, layer, whole, (ids, Value(X, layer, whole)), (route,))
    scores, row_scores = Value(SCORES, layer, whole), Value(ROW_SCORES, layer, whole)
    return Task(ORDER, layer, whole, (ids, scores), (route, row_scores))


def dispatch(layer: int, chunk_range: ChunkRange) -> Task:
    reads = (Value(X, layer, chunk_range), Value(ROUTE, layer, chunk_range))
    return Task(DISPATCH, layer, chunk_range, reads, (Value(ARRIVED, layer, chunk_range),))


def join(layer: int, whole: ChunkRange) -> Task:
    """Wait for the replicas that this pass computes with; its adjoint sends their gradients to the
    owner."""
    reads = (Value(WEIGHTS, layer), Value(ROUTE, layer, whole))
    return Task(JOIN, layer, whole, reads, (Value(TARGET_WEIGHTS, layer),))


def start(layer: int) -> Task:
    """Start a pass of a layer's replicas; its adjoint waits until all their gradients are back."""
    return Task(START, layer, ChunkRange(0, 1), (Value(WEIGHTS, layer),), (Value(STARTED, layer),))


def launch(layer: int, piece: int, after: Value) -> Task:
    """Begin to gather a piece of a layer's replicas."""
    chunk_range = ChunkRange(piece, piece + 1)
    return Task(LAUNCH, layer, chunk_range, (after,), (Value(LAUNCHED, layer, chunk_range),))


def recall(layer: int, after: Value) -> Task:
    """Begin to gather a layer's replicas again, for its backward."""
    return Task(RECALL, layer, ChunkRange(0, 1), (after,), (Value(RECALLED, layer),))


def have_again(joined: Task, after: Value) -> Task:
    """Wait for the replicas that were freed after forward."""
    writes = (Value(HAD_AGAIN, joined.layer),)
    return replace(joined, op=HAVE_AGAIN, reads=(after,), writes=writes)


def send_to_owner(layer: int, piece: int, after: Value) -> Task:
    """Begin to send a piece of the gradients of a layer's replicas to the owner."""
    chunk_range = ChunkRange(piece, piece + 1)
    return Task(SEND_TO_OWNER, layer, chunk_range, (after,), (Value(SENT, layer, chunk_range),))


def plan_ahead(layer: int, whole: ChunkRange) -> Task:
    """Plan the layer's next step by the rows of this one."""
    return Task(PLAN, layer, whole, (Value(ROUTE, layer, whole),), (Value(PLANNED, layer),))


def etp_gather(layer: int, chunk_range: ChunkRange) -> Task:
    """The rows of all ranks of the ETP group, each of which computes with its part of every
    expert."""
    reads = (Value(ARRIVED, layer, chunk_range), Value(ROUTE, layer, chunk_range))
    return Task(ETP_GATHER, layer, chunk_range, reads, (Value(GATHERED, layer, chunk_range),))


def expert(
    layer: int, chunk_range: ChunkRange, weights: Kind = WEIGHTS, *, sharded: bool = False
) -> Task:
    read, written = (GATHERED, PARTIAL) if sharded else (ARRIVED, COMPUTED)
    reads = (
        Value(read, layer, chunk_range),
        Value(ROUTE, layer, chunk_range),
        Value(weights, layer),
    )
    return Task(EXPERT, layer, chunk_range, reads, (Value(written, layer, chunk_range),))


def etp_scatter(layer: int, chunk_range: ChunkRange) -> Task:
    """Sums over the ETP group, of each rank the rows that arrived there."""
    reads = (Value(PARTIAL, layer, chunk_range), Value(ROUTE, layer, chunk_range))
    return Task(ETP_SCATTER, layer, chunk_range, reads, (Value(COMPUTED, layer, chunk_range),))


def combine(layer: int, chunk_range: ChunkRange, scores: Value | None = None) -> Task:
    """Rows back to their tokens; where they are weighed before, by the ``scores`` of all rows."""
    weights = () if scores is None else (scores,)
    reads = (Value(COMPUTED, layer, chunk_range), *weights, Value(ROUTE, layer, chunk_range))
    return Task(COMBINE, layer, chunk_range, reads, (Value(RETURNED, layer, chunk_range),))


def restore(layer: int, chunk_range: ChunkRange, *, weighs: bool = True) -> Task:
    scores = (Value(SCORES, layer, chunk_range),) if weighs else ()
    reads = (Value(RETURNED, layer, chunk_range), *scores, Value(ROUTE, layer, chunk_range))
    return Task(RESTORE, layer, chunk_range, reads, (Value(Y, layer, chunk_range),))


def routed_tasks(
    layer: int,
    *,
    num_chunks: int,
    degree: int,
    copied: bool = False,
    sharded: bool = False,
    once: bool = False,
) -> list[Task]:
    """Order to restore, chunk by chunk: what every strategy starts from.

    Args:
        copied: experts may have replicas here, which are joined when the first rows are on their
            way.
        sharded: the ranks of an ETP group split each expert, so that rows are gathered and sums
            scattered within it.
        once: each token's row goes once to an EP rank, so that rows are weighed there.
    """
    whole = ChunkRange(0, num_chunks)
    weights = TARGET_WEIGHTS if copied else WEIGHTS
    scores = Value(ROW_SCORES, layer, whole) if once else None
    tasks = [order(layer, whole, once=once)]
    for chunk_range in chunk_ranges(num_chunks, degree):
        tasks.append(dispatch(layer, chunk_range))
        if copied and chunk_range.start == 0:
            tasks.append(join(layer, whole))
        computing = [expert(layer, chunk_range, weights, sharded=sharded)]
        if sharded:
            computing = [
                etp_gather(layer, chunk_range),
                *computing,
                etp_scatter(layer, chunk_range),
            ]
        tasks += [
            *computing,
            combine(layer, chunk_range, scores),
            restore(layer, chunk_range, weighs=not once),
        ]
    return tasks


def layer_schedule(tasks: Iterable[Task], layer: int, *, num_chunks: int, gated: bool) -> Schedule:
    """The forward schedule of one layer.

    Args:
        tasks: order to restore and what the strategy put between, in issue order.
        layer: number of the layer.
        num_chunks: finest chunks.
        gated: with a gate of ours before the tasks: x, gate weights and weights in; y and gate
            losses out. Else x, expert ids, scores and weights in; y out.
    """
    whole = ChunkRange(0, num_chunks)
    x, y, weights = Value(X, layer, whole), Value(Y, layer, whole), Value(WEIGHTS, layer)
    if gated:
        inputs = (x, Value(GATE_WEIGHTS, layer), weights)
        return Schedule((gate(layer, whole), *tasks), inputs, (y, Value(GATE_LOSSES, layer)))
    chosen = (Value(EXPERT_IDS, layer, whole), Value(SCORES, layer, whole))
    return Schedule(tuple(tasks), (x, *chosen, weights), (y,))


def stage_major(tasks: Iterable[Task], ops: Sequence[Op]) -> list[Task]:
    """All tasks of the first op, chunk by chunk, then all of the second, and so on.

    The order of PipeMoE and FSMoE: a collective of the next chunk is in its stream before the
    experts of this chunk have finished, so that the streams overlap.
    """
    rank = {op: position for position, op in enumerate(ops)}
    return sorted(tasks, key=lambda task: (rank[task.op], task.chunk_range))


# The schedules that FSMoE compares, as passes over the tasks of one layer (spec 2.5). Pure.


QUEUED: Mapping[Op, Op] = MappingProxyType(
    {op: replace(op, stream=INTER) for op in (ETP_GATHER, ETP_SCATTER)}
)
"""In one queue: for a collective of an ETP group, the op that runs in the stream of those between
EP ranks."""

REDUCED = Kind("reduced", has_gradient=False)  # a slice of the dense gradients, summed

ARRIVALS = (DISPATCH, ETP_GATHER)  # what a chunk needs before the experts
RETURNS = (ETP_SCATTER, COMBINE, RESTORE)  # and behind them


class Slices(NamedTuple):
    """How many reductions of dense gradients stand where, in the backward pass of one layer."""

    within_moe: int = 0  # behind the last exchange that brings chunks to the experts
    # behind the layer's last exchange, beside the dense part that follows in backward
    dense: int = 0
    tail: int = 0  # behind all else of the layer, exposed


NO_SLICES = Slices()


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How the tasks of a layer are issued, and where dense gradients may be reduced."""

    is_cut: bool = True  # tokens travel in chunks, else all at once
    # all collectives run in one stream, those of an ETP group by the ops of ``QUEUED``; else those
    # between EP ranks in another stream than those within
    has_one_queue: bool = True
    slices_moe: bool = False  # reductions may stand within the MoE part
    slices_dense: bool = False  # and beside the dense part. What stands nowhere is the tail.
    # gradients are reduced in pieces of this size; null: in as many as there are places, as large
    # as a plan says
    piece_bytes: int | None = None

    def arranged(self, schedule: Schedule, slices: Slices = NO_SLICES) -> Schedule:
        """The schedule of a layer in one direction, in this order and these streams.

        Slices are numbered from 0, as they are issued: slice ``i`` has the chunk range ``i``.

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
            *reductions(layer, ChunkRange(0, within)),
            *tasks[arrived:],
            *reductions(layer, ChunkRange(within, dense)),
            *reductions(layer, ChunkRange(dense, tail), after=ends),
        )
        return self.queued(replace(schedule, tasks=issued))

    def queued(self, schedule: Schedule) -> Schedule:
        """The same tasks in the same order, in the streams of this pipeline.

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
"""By the name of a strategy's key: PipeMoE is Tutel's, IIO is inter beside intra."""


def in_halves(tasks: Iterable[Task]) -> list[Task]:
    """What brings chunks to the experts, chunk by chunk, the experts, and what brings chunks back.

    Replicas of experts are joined just before the experts.

    Tasks of other ops stay before or behind all these, as they stood to the first of them.
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

    def turn(task: Task) -> tuple[int, ChunkRange, int]:
        half, rank = place[task.op]
        return half, task.chunk_range, rank

    return [*tasks[:first], *sorted(chunked, key=turn), *rest]


def reductions(layer: int, numbers: ChunkRange, after: tuple[Value, ...] = ()) -> list[Task]:
    """All-reduces of slices whose gradients were ready before the layer's backward began."""
    slices = (ChunkRange(number, number + 1) for number in range(*numbers))
    return [Task(GRADIENTS, layer, i, after, (Value(REDUCED, layer, i),)) for i in slices]


# The programs of a layer.


class Beside(NamedTuple):
    """What goes on beside the rows of a layer."""

    copied: bool = False  # experts may compute elsewhere than at the owner
    # the block before launches the replicas; else the layer's own, as it begins
    carried: bool = False
    carries: bool = False  # this layer's block launches those of the next
    plans: bool = False  # the next step is planned while rows travel
    freed: bool = False  # the replicas are freed after forward and gathered again for backward


class Cutting(NamedTuple):
    """How the rows of a layer travel."""

    pipeline: Pipeline = PIPELINES["default"]  # in which order and streams
    forward_degree: int = 1  # chunk ranges that the tokens of a forward pass are cut into
    backward_degree: int = 1  # and of a backward pass
    sharded: bool = False  # as in ``routed_tasks``
    slices: Slices = NO_SLICES  # reductions of dense gradients that the layer begins in backward
    once: bool = False  # as in ``routed_tasks``


ALONE, WHOLE = Beside(), Cutting()


class LayerTasks(NamedTuple):
    beside: Beside  # what goes on beside its rows
    forward: Schedule  # its program
    backward: Schedule  # likewise

    @property
    def layer(self) -> int:
        return self.forward.outputs[0].layer

    @property
    def block(self) -> tuple[Task, ...]:
        return block(self.layer, self.beside)


@cache
def block(layer: int, beside: Beside) -> tuple[Task, ...]:
    """What a layer's block does about replicas as it begins; adjoints of these, in reverse, end its
    backward.

    Where the next layer's replicas are carried, so that they travel from here on, their pass starts
    here: their gradients have until this block's backward ends.
    """
    tasks: list[Task] = []
    if beside.copied and not beside.carried:
        tasks += [start(layer), launch(layer, 0, after=Value(STARTED, layer))]
    if beside.carries:
        tasks.append(start(layer + 1))
    return tuple(tasks)


@cache
def programs(
    layer: int, *, gated: bool, beside: Beside = ALONE, cutting: Cutting = WHOLE
) -> tuple[Schedule, Schedule]:
    """Forward and backward of one layer.

    Raises:
        ValueError: as of ``Pipeline.arranged``.
    """
    pipeline, *degrees, sharded, slices, once = cutting
    num_chunks = lcm(*degrees)

    def cut(degree: int) -> Schedule:
        tasks = routed_tasks(
            layer,
            num_chunks=num_chunks,
            degree=degree,
            copied=beside.copied,
            sharded=sharded,
            once=once,
        )
        return layer_schedule(tasks, layer, num_chunks=num_chunks, gated=gated)

    forward, template = map(cut, degrees)
    forward = replace(forward, tasks=tuple(_forward(in_halves(forward.tasks), beside)))
    back = pipeline.arranged(forward.backward_cut_as(template), slices)
    end = forward.inputs[0]  # x, whose gradient dispatch's adjoint writes
    tasks = _backward(_begun(back.tasks, slices, end), end, beside)
    return pipeline.queued(forward), replace(back, tasks=tuple(tasks))


def _forward(tasks: list[Task], beside: Beside) -> list[Task]:
    """With what the layer launches and plans: the next one's replicas under its experts and under
    what follows them (Pro-Prophet, Algorithm 2; spec 3.4)."""
    layer = tasks[0].layer
    arrives, computes, returns = ([t for t in tasks if t.op is op] for op in _TURNS)
    if beside.carries:
        under_experts = launch(layer + 1, 0, after=arrives[0].writes[0])
        tasks.insert(tasks.index(computes[0]), under_experts)
        rest = launch(layer + 1, 1, after=returns[-1].writes[0])
        tasks.insert(tasks.index(returns[-1]) + 1, rest)
    if beside.plans:
        (ordered,) = (task for task in tasks if task.op is ORDER)
        tasks.insert(tasks.index(arrives[-1]) + 1, plan_ahead(layer, ordered.chunk_range))
    return tasks


_TURNS = (DISPATCH, EXPERT, COMBINE)


def _backward(tasks: Sequence[Task], end: Value, beside: Beside) -> list[Task]:
    """With what is to be done about replicas once the experts have computed.

    That begins when the gradients of the rows have been exchanged: that window is left to the rows
    (HECATE, spec rule 34). The gradients of this layer's replicas go to the owner, and the replicas
    of the layer before are recalled, if they were freed. Where that one carries this layer's, it
    needs its own for its experts, and the gradients have until after those.
    """
    layer, tasks = end.layer, sorted(tasks, key=lambda task: task.op == JOIN)
    if beside.copied:
        asides = [send_to_owner(layer, 0, after=end), recall(layer - 1, after=end)]
        tasks += reversed(asides) if beside.carried else asides
    first = next(task for task in tasks if task.op is EXPERT)
    if beside.carries:
        returning = send_to_owner(layer + 1, 1, after=Value(COMPUTED, layer, first.chunk_range))
        tasks.insert(tasks.index(first), returning)
    if beside.freed:
        joined = next(task for task in tasks if task.op is JOIN)
        tasks.insert(tasks.index(first), have_again(joined, after=first.reads[0]))
    return tasks


def _begun(tasks: Iterable[Task], slices: Slices, end: Value) -> list[Task]:
    """The reductions beside the dense part are only begun: they end while the host computes."""
    dense = range(slices.within_moe, slices.within_moe + slices.dense)
    return [
        replace(task, op=BEGIN_GRADIENTS, reads=(end,))
        if task.op is GRADIENTS and task.chunk_range.start in dense
        else task
        for task in tasks
    ]
