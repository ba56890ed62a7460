# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism: attention and experts on ranks of their own, striped by micro-batches. Pure.

HeterMoE, section 4.1 (spec 2.3, 2.4, 2.7). Layers and micro-batches are numbered from 0. A layer's
stage on the attention side is what lies between the experts of the layer before and its own; one
stage more, the head, ends in the loss. Each side has a stream, and so has each direction between
them. Here two micro-batches pass two layers: ``a`` attention, ``h`` head, ``e`` expert, ``d``
dispatch, ``c`` combine; adjoints have a prime::

    attention  a00 a01     a10 a11     h0 h'0 h1 h'1 a'10 a'11     a'00 a'01
    expert         e00 e01     e10 e11    e'10 e'11       e'00 e'01
    a2e           d00 d01     d10 d11      c'10 c'11     c'00 c'01
    e2a               c00 c01     c10 c11      d'10 d'11       d'00 d'01

What was sent to the experts comes back, with its gradients, against the direction it had: a stream
is a direction, not a task's name (spec rule 10), and so both sides issue each stream in one order.

Where a layer's experts have replicas, these travel in the stream of parameters, which both sides
issue alike too: from the beginning of the layer, so that attention and dispatch go on beside them,
and what a stripe's rows ask for in addition when its rows are known. Their gradients are summed
over the stripes and go to the owner when the last one has computed (``g`` gather, ``r`` revise,
``j`` join)::

    attention  a00 a01                     ...                     a'00 a'01
    expert         j00 e00 j01 e01         ...  e'00 j'00 e'01 j'01
    param      g0      r00     r01         ...                     g'0

Replicas that are freed after forward (``f``) take the memory of two layers at a time: a layer's are
gathered when those of the layer before the one before it are free, and again (``f'``) under the
backward of the layer behind::

    param      g0      g1      f0      g2      f1   ...   f'1     g'2     f'0     g'1     g'0

Nothing waits for ever: a task waits for tasks that stand before it in the schedule alone, in its
stream or by what it reads, and each side issues its part of the schedule in that order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from ds_moe_ext.schedule import task as ops
from ds_moe_ext.schedule.orders import (
    ARRIVED,
    COMPUTED,
    RECALLED,
    RETURNED,
    ROUTE,
    ROW_SCORES,
    TARGET_WEIGHTS,
    WEIGHTS,
)
from ds_moe_ext.schedule.step import LOSS, in_streams, primed
from ds_moe_ext.schedule.task import (
    GATHER,
    PARAM,
    ChunkRange,
    Kind,
    Op,
    Schedule,
    Stream,
    Task,
    Value,
    chunk_ranges,
)

# A side, the ranks of one role, by the stream that only they have.
ATTENTION_SIDE = Stream("attention")
EXPERT_SIDE = Stream("expert")
SIDES = (ATTENTION_SIDE, EXPERT_SIDE)
A2E = Stream("a2e", sends=True)  # from attention ranks to expert ranks
E2A = Stream("e2a", sends=True)
SHARED = (A2E, E2A, PARAM)  # where ranks of both sides meet

ATTENTION = replace(ops.ATTENTION, stream=ATTENTION_SIDE)
HEAD = Op("head", ATTENTION_SIDE)
EXPERT = replace(ops.EXPERT, stream=EXPERT_SIDE)
OFFLOADED = Op("offloaded", ATTENTION_SIDE)  # experts that attention ranks hold
DISPATCH = replace(ops.DISPATCH, stream=A2E, back=E2A)
COMBINE = replace(ops.COMBINE, stream=E2A, back=A2E)
REVISE = Op("revise", PARAM)  # the gather of replicas that a stripe's rows ask for in addition
FREE = Op("free", PARAM)  # the replicas of a layer; its adjoint gathers them again
JOIN = replace(ops.JOIN, stream=EXPERT_SIDE)
OFFLOADED_JOIN = Op("offloaded_join", ATTENTION_SIDE, is_wait=True)

TOKENS = Kind("tokens", has_gradient=False)  # of a micro-batch, and what is to follow them
DENSE = Kind("dense")  # weights of a stage of the attention side
HIDDEN = Kind("hidden")  # what a stage leaves to the next on the spot: residual stream and scores
ROWS = Kind("rows")  # what it sends
OFFLOADED_WEIGHTS = Kind("offloaded_weights")
COMPUTED_HERE = Kind("computed_here")  # outputs of experts that attention ranks hold
REPLICAS = Kind("replicas")  # on this rank, and who holds which
OFFLOADED_TARGET_WEIGHTS = Kind("offloaded_target_weights")
USED = Kind("used", has_gradient=False)  # a stripe has computed with its replicas


def striped_step(
    num_layers: int,
    num_micro_batches: int,
    *,
    offloaded: Collection[int] = (),
    copied: Collection[int] = (),
    revised: Collection[int] = (),
    freed: Collection[int] = (),
    once: bool = False,
) -> Schedule:
    """Forward and backward of a stack of MoE layers on both sides, in the order of Theorem 1.

    Layer by layer, micro-batches ascending, in backward too. In the last stage the backward of each
    micro-batch follows its forward at once, so that the expert side has work early. Experts that
    attention ranks hold compute behind the attention of all micro-batches, and their adjoints
    before it (spec rule 27). One collective brings rows to both sides, and one brings them back.

    Losses and gradients of all weights come out; those of a layer are final with its last task.

    Args:
        num_layers: MoE layers, each with its experts.
        num_micro_batches: stripes that the tokens of an attention rank are cut into; each is the
            chunk range of one finest chunk. With one, nothing overlaps.
        offloaded: numbers of the layers some of whose experts attention ranks hold, or replicas.
        copied: of those whose experts have replicas.
        revised: of those among them that may get more once the rows of a stripe are known.
        freed: of those that are copied, whose replicas are freed between forward and backward.
        once: each token's row goes once to an EP rank or node, so that rows are weighed there.

    Raises:
        ValueError: there is no layer or no micro-batch, or such a layer is not among them.
    """
    every = range(num_layers)
    for what, layers, known in (
        ("offloaded", offloaded, every),
        ("copied", copied, every),
        ("revised", revised, copied),
        ("freed", freed, copied),
    ):
        if num_layers < 1 or num_micro_batches < 1 or not set(layers) <= set(known):
            raise ValueError(
                f"{num_micro_batches} micro-batches of {num_layers} layers, of which "
                f"{list(layers)} are {what}; give one of both at least, and numbers of these "
                "layers, from 0; those that are revised or freed are copied, too"
            )
    micro_batches = chunk_ranges(num_micro_batches, num_micro_batches)
    step = _Step(micro_batches, offloaded, copied, revised, freed, once=once)
    for layer in range(num_layers):
        step.forward(layer)
    step.turn_around(num_layers)
    for layer in reversed(range(num_layers)):
        step.backward(layer)
    return step.schedule()


def part_of(schedule: Schedule, side: Stream) -> Schedule:
    """What the ranks of one side issue, in the order of the whole.

    What the other side computes counts as given, though a rank here has none of it: of a collective
    it does its own half.
    """
    own = {side, *SHARED}
    return picked(schedule, [i for i, task in enumerate(schedule.tasks) if task.stream in own])


def one_at_a_time(schedule: Schedule) -> Schedule:
    """With one stream for all: DistEP, the baseline whose sides never work at the same time."""
    return in_streams(schedule, dict.fromkeys((EXPERT_SIDE, *SHARED), ATTENTION_SIDE))


def picked(schedule: Schedule, positions: Sequence[int]) -> Schedule:
    """Some tasks of a schedule, in the order of their positions here.

    What none of them writes counts as given.

    Args:
        schedule: with forward and backward.
        positions: in it; with each adjoint what it is of.

    Raises:
        ValueError: an adjoint is picked without that.
    """
    place = {position: i for i, position in enumerate(positions)}
    tasks = [schedule.tasks[position] for position in positions]
    for task in tasks:
        if not place.keys() >= set(task.adjoint_of):
            raise ValueError(f"{task} is picked without what it is the adjoint of; pick both")
    written = {value for task in tasks for value in task.writes}
    given = (value for task in tasks for value in task.reads if value not in written)
    return Schedule(
        tuple(replace(t, adjoint_of=tuple(place[w] for w in t.adjoint_of)) for t in tasks),
        tuple(dict.fromkeys(given)),
        tuple(value for value in schedule.outputs if value in written),
        is_round_trip=True,
    )


def halves(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """Forward now and backward later, as a pipeline stage needs them; what the second reads of the
    first comes out of that, and is given to it.

    Args:
        schedule: with forward and backward, as of ``part_of``.
    """
    forward = [i for i, task in enumerate(schedule.tasks) if not task.adjoint_of]
    first, place = picked(schedule, forward), {position: i for i, position in enumerate(forward)}
    tasks = tuple(
        replace(task, adjoint_of=tuple(place[w] for w in task.adjoint_of))
        for task in schedule.tasks
        if task.adjoint_of
    )
    written = {value for task in tasks for value in task.writes}
    read = dict.fromkeys(value for task in tasks for value in task.reads if value not in written)
    also = (value for value in read if value in first.sources or value in first.written)
    outputs = tuple(dict.fromkeys((*first.outputs, *also)))
    later = tuple(value for value in schedule.outputs if value in written)
    return replace(first, outputs=outputs), Schedule(tasks, tuple(read), later)


class _Step:
    """The tasks of a step, as they are issued."""

    def __init__(
        self,
        micro_batches: Sequence[ChunkRange],
        offloaded: Collection[int],
        copied: Collection[int],
        revised: Collection[int],
        freed: Collection[int],
        *,
        once: bool,
    ) -> None:
        self._micro_batches, self._scores = micro_batches, (ROW_SCORES,) if once else ()
        self._whole = ChunkRange(0, len(micro_batches))
        self._offloaded, self._copied, self._revised = offloaded, copied, revised
        self._freed = freed
        self._tasks: list[Task] = []
        self._places: dict[tuple[Op, int, ChunkRange], int] = {}  # of forward

    def forward(self, layer: int) -> None:
        """A dispatch stands behind the attention of the next micro-batch, and its experts right
        behind it (spec rule 42): a host that issues the tasks one by one waits in a dispatch until
        the counts of its rows are known."""
        micro_batches, is_offloaded = self._micro_batches, layer in self._offloaded
        if layer in self._copied:
            self._run(_gather(layer, self._whole))
        self._free(layer - 1)
        self._run(_attention(layer, micro_batches[0]))
        for chunk_range, following in zip_longest(micro_batches, micro_batches[1:]):
            if following is not None:
                self._run(_attention(layer, following))
            self._run(_dispatch(layer, chunk_range, self._scores))
            if layer in self._revised:
                self._run(_revise(layer, chunk_range))
            self._compute(_expert(layer, chunk_range), JOIN, TARGET_WEIGHTS)
            if not is_offloaded:
                self._run(_combine(layer, chunk_range, (COMPUTED, *self._scores)))
        if is_offloaded:
            for chunk_range in micro_batches:
                self._compute(
                    _offloaded(layer, chunk_range), OFFLOADED_JOIN, OFFLOADED_TARGET_WEIGHTS
                )
                self._run(_combine(layer, chunk_range, (COMPUTED, COMPUTED_HERE, *self._scores)))

    def _compute(self, task: Task, join: Op, joined: Kind) -> None:
        """Experts, with their own weights or those that are joined from owners and replicas."""
        layer, chunk_range = task.layer, task.chunk_range
        if layer in self._copied:
            arrived, route, weights = task.reads
            target = Value(joined, layer, chunk_range)
            self._run(
                Task(
                    join,
                    layer,
                    chunk_range,
                    (weights, self._replicas(layer, chunk_range), route),
                    (target,),
                )
            )
            task = replace(task, reads=(arrived, route, target))
        if layer in self._freed:
            task = replace(task, writes=(*task.writes, Value(USED, layer, chunk_range)))
        self._run(task)

    def _free(self, layer: int) -> None:
        """Behind all stripes, each side its own."""
        if layer in self._freed:
            last = self._micro_batches[-1]
            reads = (self._replicas(layer, last), Value(USED, layer, last))
            self._run(Task(FREE, layer, self._whole, reads, ()))

    def _gather_again(self, layer: int) -> None:
        if layer in self._freed:
            place = (self._places[FREE, layer, self._whole],)
            reads, writes = (Value(WEIGHTS, layer),), (Value(RECALLED, layer),)
            self._tasks.append(Task(FREE, layer, self._whole, reads, writes, place))

    def _replicas(self, layer: int, chunk_range: ChunkRange) -> Value:
        return Value(REPLICAS, layer, chunk_range if layer in self._revised else None)

    def turn_around(self, layer: int) -> None:
        """The last stage, forward and backward of each micro-batch."""
        self._free(layer - 1)
        self._gather_again(layer - 1)
        for chunk_range in self._micro_batches:
            self._run(_head(layer, chunk_range))
            self._undo(HEAD, layer, chunk_range)
            self._undo(COMBINE, layer - 1, chunk_range)

    def backward(self, layer: int) -> None:
        is_copied = layer in self._copied
        self._gather_again(layer - 1)
        for chunk_range in self._micro_batches:
            self._undo(EXPERT, layer, chunk_range)
            if is_copied:
                self._undo(JOIN, layer, chunk_range)
            if layer in self._offloaded:
                self._undo(OFFLOADED, layer, chunk_range)
                if is_copied:
                    self._undo(OFFLOADED_JOIN, layer, chunk_range)
            self._undo(DISPATCH, layer, chunk_range)
        if is_copied:
            self._send_to_owner(layer)
        for chunk_range in self._micro_batches:
            self._undo(ATTENTION, layer, chunk_range)
            if layer:
                self._undo(COMBINE, layer - 1, chunk_range)

    def _send_to_owner(self, layer: int) -> None:
        """The adjoint of all that was gathered, at once."""
        revised = self._micro_batches if layer in self._revised else ()
        later = (self._places[REVISE, layer, chunk_range] for chunk_range in revised)
        gathers = (self._places[GATHER, layer, self._whole], *later)
        joined = dict.fromkeys(
            self._replicas(layer, chunk_range) for chunk_range in self._micro_batches
        )
        owner = _grads((Value(WEIGHTS, layer),))
        self._tasks.append(Task(GATHER, layer, self._whole, _grads(joined), owner, gathers))

    def schedule(self) -> Schedule:
        read = dict.fromkeys(value for task in self._tasks for value in task.reads)
        written = dict.fromkeys(value for task in self._tasks for value in task.writes)
        given = tuple(value for value in read if value not in written)
        left = tuple(value for value in written if value.kind == LOSS or value not in read)
        return Schedule(tuple(self._tasks), given, left, is_round_trip=True)

    def _run(self, task: Task) -> None:
        self._places[task.op, task.layer, task.chunk_range] = len(self._tasks)
        self._tasks.append(task)

    def _undo(self, op: Op, layer: int, chunk_range: ChunkRange) -> None:
        """The adjoint: it reads the gradients of what was written, and of a loss the loss. Rows
        that travel do so by the route that they have, and experts wait for replicas."""
        place = self._places[op, layer, chunk_range]
        task = self._tasks[place]
        route = (Value(ROUTE, layer, chunk_range),) if op in (DISPATCH, COMBINE) else ()
        is_late = op in (EXPERT, OFFLOADED) and layer in self._freed
        recalled = (Value(RECALLED, layer),) if is_late else ()
        reads = (*_grads(task.writes), *route, *recalled)
        self._tasks.append(
            replace(task, reads=reads, writes=_grads(task.reads), adjoint_of=(place,))
        )


def _attention(layer: int, chunk_range: ChunkRange) -> Task:
    """From the outputs of the experts of the layer before to the rows for this layer's."""
    before = _handed_on(layer, chunk_range) if layer else (Value(TOKENS, 0, chunk_range),)
    writes = (Value(HIDDEN, layer, chunk_range), Value(ROWS, layer, chunk_range))
    return Task(ATTENTION, layer, chunk_range, (*before, Value(DENSE, layer)), writes)


def _head(layer: int, chunk_range: ChunkRange) -> Task:
    reads = (*_handed_on(layer, chunk_range), Value(TOKENS, 0, chunk_range), Value(DENSE, layer))
    return Task(HEAD, layer, chunk_range, reads, (Value(LOSS, layer, chunk_range),))


def _handed_on(layer: int, chunk_range: ChunkRange) -> tuple[Value, ...]:
    return Value(HIDDEN, layer - 1, chunk_range), Value(RETURNED, layer - 1, chunk_range)


def _dispatch(layer: int, chunk_range: ChunkRange, scores: Sequence[Kind]) -> Task:
    writes = tuple(Value(kind, layer, chunk_range) for kind in (ARRIVED, *scores, ROUTE))
    return Task(DISPATCH, layer, chunk_range, (Value(ROWS, layer, chunk_range),), writes)


def _gather(layer: int, whole: ChunkRange) -> Task:
    return Task(GATHER, layer, whole, (Value(WEIGHTS, layer),), (Value(REPLICAS, layer),))


def _revise(layer: int, chunk_range: ChunkRange) -> Task:
    """Those that are lacking still. What one stripe has asked for, the next ones have."""
    before = Value(
        REPLICAS,
        layer,
        ChunkRange(chunk_range.start - 1, chunk_range.start) if chunk_range.start else None,
    )
    reads = (Value(WEIGHTS, layer), before, Value(ROUTE, layer, chunk_range))
    return Task(REVISE, layer, chunk_range, reads, (Value(REPLICAS, layer, chunk_range),))


def _expert(layer: int, chunk_range: ChunkRange) -> Task:
    reads = (
        Value(ARRIVED, layer, chunk_range),
        Value(ROUTE, layer, chunk_range),
        Value(WEIGHTS, layer),
    )
    return Task(EXPERT, layer, chunk_range, reads, (Value(COMPUTED, layer, chunk_range),))


def _offloaded(layer: int, chunk_range: ChunkRange) -> Task:
    route, weights = Value(ROUTE, layer, chunk_range), Value(OFFLOADED_WEIGHTS, layer)
    reads = (Value(ARRIVED, layer, chunk_range), route, weights)
    return Task(OFFLOADED, layer, chunk_range, reads, (Value(COMPUTED_HERE, layer, chunk_range),))


def _combine(layer: int, chunk_range: ChunkRange, kinds: Sequence[Kind]) -> Task:
    reads = tuple(Value(kind, layer, chunk_range) for kind in (*kinds, ROUTE))
    return Task(COMBINE, layer, chunk_range, reads, (Value(RETURNED, layer, chunk_range),))


def _grads(values: Iterable[Value]) -> tuple[Value, ...]:
    """With a prime; the loss begins them."""
    graded = (value for value in values if value.kind.has_gradient)
    return tuple(value if value.kind == LOSS else primed(value) for value in graded)


# Which attention rank runs which samples of a ZP group, in which stripe. Pure.


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples ``start`` to ``stop`` of one rank's batch, which run together."""

    sender: int  # place in the ZP group of the rank whose batch it is
    start: int  # its first sample there
    stop: int  # the one after its last

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def weight(self, num_samples_C: Sequence[int]) -> float:
        return self.num_samples / num_samples_C[self.sender]


OwnStripes = tuple[tuple[Samples, ...], ...]
"""The pieces of each stripe of an attention rank."""

GroupStripes = tuple[OwnStripes, ...]
"""The stripes of each attention rank: ``[attention rank][stripe]``."""


def stripes_of(num_samples_C: Sequence[int], attention_size: int, num_stripes: int) -> GroupStripes:
    """Cut the batches of a group into stripes as equal as can be.

    All samples lie on one line, which is cut into intervals, ``num_stripes`` for each attention
    rank. On the line, an attention rank's own batch comes before the samples that it takes on, and
    only what it has no room for goes to others: nothing travels that need not. An interval that
    reaches into another batch has a piece of each. Of equal batches none does so if the number of
    intervals is a multiple of theirs, and if it divides theirs no batch is cut.

    Args:
        num_samples_C: samples of each rank, attention ranks first; a piece's ``sender`` is an
            index into it.
        attention_size: attention ranks of the group.
        num_stripes: stripes of each.

    Raises:
        ValueError: a rank has no samples, or there are fewer samples than stripes.
    """
    total, num_intervals = sum(num_samples_C), attention_size * num_stripes
    if min(num_samples_C) < 1:
        raise ValueError(
            f"the batches of a ZP group have {', '.join(map(str, num_samples_C))} samples; every "
            "rank needs one at least, or it has no loss"
        )
    check_stripes(total, attention_size, num_stripes)
    # Where equal batches end, one of these borders lies, whatever is left over.
    borders = [total * interval // num_intervals for interval in range(num_intervals + 1)]
    shares = [
        borders[(m + 1) * num_stripes] - borders[m * num_stripes] for m in range(attention_size)
    ]
    lines = _lines(num_samples_C, shares)
    sizes = [stop - start for start, stop in pairwise(borders)]
    return tuple(
        tuple(_cut(line, sizes[m * num_stripes : (m + 1) * num_stripes]))
        for m, line in enumerate(lines)
    )


def check_stripes(
    num_samples: int, attention_size: int, num_stripes: int, *, key: str = "the number of stripes"
) -> None:
    """Refuse more stripes than a group has samples.

    Args:
        num_samples: of all its ranks.
        attention_size: attention ranks of the group.
        num_stripes: of each.
        key: by which a person chose it.
    """
    if num_samples < attention_size * num_stripes:
        raise ValueError(
            f"{key} is {num_stripes}, so that {attention_size} "
            f"attention rank(s) run {attention_size * num_stripes} stripes, but the ZP group has "
            f"{num_samples} samples; set it to {num_samples // attention_size} or less, or raise "
            "train_micro_batch_size_per_gpu"
        )


def default_stripes(attention_size: int, expert_size: int, num_samples: int | None = None) -> int:
    """The least number of stripes that lets each be of one batch if all batches are equal.

    With an expert rank in the group it is two or more, as overlap needs.

    Args:
        attention_size: attention ranks of the group.
        expert_size: its other ranks.
        num_samples: of all its ranks; fewer stripes if they are too few; None: unknown.
    """
    num_stripes = (attention_size + expert_size) // math.gcd(attention_size, expert_size)
    return num_stripes if num_samples is None else min(num_stripes, num_samples // attention_size)


def _lines(num_samples_C: Sequence[int], shares: Sequence[int]) -> list[list[Samples]]:
    """What each attention rank runs, ``shares`` samples of it: its own first, then others."""
    kept = [min(share, own) for share, own in zip(shares, num_samples_C)]
    kept += [0] * (len(num_samples_C) - len(kept))
    rest = [
        Samples(sender, start, stop)
        for sender, (start, stop) in enumerate(zip(kept, num_samples_C))
        if start < stop
    ]
    taken = _cut(rest, [share - own for share, own in zip(shares, kept)])
    return [[Samples(m, 0, kept[m]), *pieces] for m, pieces in enumerate(taken)]


def _cut(line: Sequence[Samples], sizes: Sequence[int]) -> Iterator[tuple[Samples, ...]]:
    """Cut pieces that lie one behind the other into intervals of these sizes."""
    start = 0
    for size in sizes:
        yield tuple(_within(line, start, start + size))
        start += size


def _within(line: Sequence[Samples], start: int, stop: int) -> Iterator[Samples]:
    """The parts of the pieces that lie in an interval of the line."""
    begin = 0
    for piece in line:
        first, last = max(start, begin), min(stop, begin + piece.num_samples)
        if first < last:
            shift = piece.start - begin
            yield Samples(piece.sender, first + shift, last + shift)
        begin += piece.num_samples
