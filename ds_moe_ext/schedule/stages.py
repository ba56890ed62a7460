# SPDX-License-Identifier: Apache-2.0
"""Who does the tasks of a layer: stages, and the table by which a pass finds what they need.

A ``Stage`` is the work of one op and its adjoint side by side; a ``LayerStages`` has one for each
op of a layer. ``Binding`` is a schedule with its stages, looked up once: ``Table`` has a place for
each piece that a task writes, and ``Step`` where a task reads, writes and frees.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ds_moe_ext.schedule.task import ChunkRange, Op, Schedule, Stream, Task, Value

if TYPE_CHECKING:
    from ds_moe_ext.schedule.executor import Mark, ScheduleStreams

Saved = tuple[Any, ...]  # what a stage keeps for its own backward; nobody else looks inside
Done = tuple[tuple[Any, ...], Saved]  # what a task writes, in order, and what its adjoint needs


@runtime_checkable
class Stage(Protocol):
    """The work of one task. ``backward`` is the adjoint of ``forward`` at what it saved."""

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done: ...

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the reads that have one, in order; None where there is none.

        Args:
            grads: of the writes that have a gradient; None where nobody used what was written.
        """
        ...

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        """What forward would have saved on ``chunk_range``, from what it saved on overlapping chunk
        ranges."""
        ...


class Observer(Protocol):
    """Sees every task with the moments at which its stream began and ended it; changes nothing."""

    @property
    def is_on(self) -> bool:
        """Whether it wants to see the tasks of this pass: marks cost a little."""
        ...

    def saw(self, task: Task, start: Mark, end: Mark, streams: ScheduleStreams) -> None: ...

    def issued(self, task: Task, seconds: float) -> None:
        """Reported behind a pass whose tasks a device runs: what the host took to issue each of
        them, those of stream HOST apart."""
        ...


class Uncut:
    """A stage of tasks that are cut alike in both directions."""

    def recut(self, chunk_range: ChunkRange, pieces: Any) -> Saved:
        raise ValueError(f"{type(self).__qualname__} is not cut anew for backward")


class SavesAlike:
    """A stage that saves the same for any chunk range, such as the route of all: it is cut anew as
    is."""

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        return pieces[0][1]


@dataclass(frozen=True, eq=False)
class LayerStages:
    """Who does the tasks of a layer, and who sees them."""

    stages: Mapping[Op, Stage]  # the work of each op
    observers: tuple[Observer, ...] = ()  # notified of each task
    name: str = ""  # of the layer, for a person who is notified where a rank waits or has failed


@dataclass(frozen=True, slots=True)
class Place:
    """What a thread does, as a person is notified of it."""

    name: str  # of the layer
    task: Task  # of its program
    is_evaluation: bool = False  # its pass has no gradients

    def __call__(self) -> str:
        way = "backward" if self.task.adjoint_of else "forward"
        kind = " of a pass without gradients" if self.is_evaluation else ""
        return f"{self.name} ({self.task.op.name}, {way}{kind})"


# A schedule bound to its stages: what every pass would look up, looked up once.


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A value that is put together from several pieces, or from a part of one."""

    chunk_range: ChunkRange | None  # that is wanted; None: of a value that is not cut
    # place of each in the table, and the chunk range that it covers; in the order of writers
    pieces: tuple[tuple[int, ChunkRange | None], ...]
    # places of the pieces in the order of tokens, where they are the chunk range and no more
    in_row: tuple[int, ...] | None
    foreign: tuple[int, ...]  # places of those that another stream has written


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A task with what its runs need."""

    task: Task  # which
    is_seen: bool  # observers are notified of it; not of what only begins work elsewhere
    reads: tuple[int | Reading, ...]  # places in the table, or how to put together what it reads
    plain_reads: tuple[int, ...] | None  # the same where all is read as it is; else None
    # those of the reads that are read as they are and another stream has written
    foreign_reads: tuple[int, ...]
    graded_reads: tuple[int, ...]  # those of the reads that may have a gradient
    writes: tuple[int, ...]  # places in the table
    graded_writes: tuple[int, ...]  # those of the writes that may have a gradient
    frees: tuple[int, ...]  # pieces that nobody else reads
    releases: tuple[int, ...]  # pieces that others read, too
    forgets: tuple[int, ...]  # positions whose savings nobody needs after it


@dataclass(frozen=True, eq=False)
class Table:
    """The pieces of a schedule, and where each task finds its own: worked out once a schedule.

    A piece is what one task wrote of a value; each has its place in the table of a pass, in the
    order of writers, so that sums do not depend on timing.
    """

    steps: tuple[Step, ...]  # the tasks
    inputs: tuple[int, ...]  # places of what is given
    outputs: tuple[int | Reading, ...]  # of what is wanted; or how to put it together
    # of each piece, where there are several; who reads an output comes after all
    num_readers: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Table:
        pieces = _Pieces(schedule)

        def step(position: int, task: Task) -> Step:
            own = pieces.read_by[position]
            reads = tuple(pieces.reading(value, task.stream) for value in task.reads)
            plain = tuple(read for read in reads if isinstance(read, int))
            return Step(
                task=task,
                is_seen=task.op.begins is None,
                reads=reads,
                plain_reads=plain if len(plain) == len(reads) else None,
                foreign_reads=tuple(
                    number
                    for number, read in enumerate(reads)
                    if isinstance(read, int) and pieces.is_foreign(read, task.stream)
                ),
                graded_reads=_graded(task.reads),
                writes=tuple(pieces.number[value, position] for value in task.writes),
                graded_writes=_graded(task.writes),
                frees=tuple(n for n in own if pieces.num_readers[n] == 1),
                releases=tuple(n for n in own if pieces.num_readers[n] > 1),
                forgets=tuple(w for w in task.adjoint_of if schedule.last_adjoint[w] == position),
            )

        return cls(
            steps=tuple(step(position, task) for position, task in enumerate(schedule.tasks)),
            inputs=tuple(pieces.number[value, -1] for value in schedule.inputs),
            outputs=tuple(pieces.reading(value, None) for value in schedule.outputs),
            num_readers=pieces.num_readers,
        )


@dataclass(frozen=True, eq=False)
class Binding:
    """A schedule and who does it: what passes of one plan share."""

    # of forward, of backward, or of both in one: then its adjoints are of tasks of its own
    schedule: Schedule
    table: Table  # where its pieces lie
    stages: tuple[Stage, ...]  # the work of each task
    layers_stages: tuple[LayerStages, ...]  # who does them
    layer_numbers: tuple[int, ...]  # of each task
    adjoint_of: tuple[Task, ...]  # the tasks that the adjoints are of
    # of each task the one that it is the adjoint of, if it is of that alone, on its chunk range
    uncut: tuple[int | None, ...]
    is_backward: bool  # these are another schedule's

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        layer_stages_of: Callable[[Task], LayerStages],
        adjoint_of: Schedule | None = None,
    ) -> Binding:
        """Look up.

        Args:
            schedule: what is to be done.
            layer_stages_of: who does a task.
            adjoint_of: the schedule that its adjoints are of; None: this one.
        """
        own = [layer_stages_of(task) for task in schedule.tasks]
        numbers = {layer_stages: number for number, layer_stages in enumerate(dict.fromkeys(own))}
        forward = (adjoint_of or schedule).tasks

        def uncut(task: Task) -> int | None:
            chunk_ranges = [forward[w].chunk_range for w in task.adjoint_of]
            return task.adjoint_of[0] if chunk_ranges == [task.chunk_range] else None

        return cls(
            schedule=schedule,
            table=schedule.once(Table.of),
            stages=tuple(
                layer_stages.stages[task.op] for layer_stages, task in zip(own, schedule.tasks)
            ),
            layers_stages=tuple(numbers),
            layer_numbers=tuple(numbers[layer_stages] for layer_stages in own),
            adjoint_of=forward,
            uncut=tuple(map(uncut, schedule.tasks)),
            is_backward=adjoint_of is not None,
        )

    @cached_property
    def training(self) -> tuple[Place, ...]:
        """What a thread does in each task, as a person is notified."""
        names = (self.layers_stages[number].name for number in self.layer_numbers)
        return tuple(map(Place, names, self.schedule.tasks))

    @cached_property
    def evaluation(self) -> tuple[Place, ...]:
        return tuple(replace(place, is_evaluation=True) for place in self.training)


def _in_row(
    pieces: Sequence[tuple[int, ChunkRange | None]], wanted: ChunkRange | None
) -> tuple[int, ...] | None:
    """Places of pieces that lie end to end and are what is wanted; else None."""
    cut = sorted((chunk_range, number) for number, chunk_range in pieces if chunk_range is not None)
    if wanted is None or not cut or len(cut) < len(pieces):
        return None
    ends = [wanted.start, *(chunk_range.stop for chunk_range, _ in cut)]
    is_row = ends == [*(chunk_range.start for chunk_range, _ in cut), wanted.stop]
    return tuple(number for _, number in cut) if is_row else None


def _graded(values: Iterable[Value]) -> tuple[int, ...]:
    return tuple(number for number, value in enumerate(values) if value.kind.has_gradient)


class _Pieces:
    """The pieces that the values of a schedule are written in."""

    def __init__(self, schedule: Schedule) -> None:
        given = [(value, -1) for value in schedule.inputs]
        made = [(value, w) for w, task in enumerate(schedule.tasks) for value in task.writes]
        self.number = {piece: n for n, piece in enumerate(dict.fromkeys([*given, *made]))}
        self._of: dict[Value, list[int]] = defaultdict(list)
        for (value, _), number in self.number.items():
            self._of[value].append(number)
        self._streams = [None if w < 0 else schedule.tasks[w].stream for _, w in self.number]
        self._sources = schedule.sources
        self.read_by = [self._read(task.reads) for task in schedule.tasks]
        counts = Counter(n for own in (*self.read_by, self._read(schedule.outputs)) for n in own)
        self.num_readers = tuple(counts[n] for n in range(len(self.number)))

    def _read(self, values: Iterable[Value]) -> set[int]:
        return {n for value in values for source in self._sources[value] for n in self._of[source]}

    def is_foreign(self, number: int, stream: Stream | None) -> bool:
        """Whether a stream that reads a piece has not written it. Nobody has what is given; and who
        asks behind all tasks, with no stream, comes behind all streams."""
        return None not in (stream, self._streams[number]) and self._streams[number] != stream

    def reading(self, wanted: Value, stream: Stream | None) -> int | Reading:
        """How a stream reads a value."""
        pieces = sorted(
            (n, source.chunk_range) for source in self._sources[wanted] for n in self._of[source]
        )
        is_whole = len(pieces) == 1 and (
            pieces[0][1] == wanted.chunk_range or not wanted.kind.by_token
        )
        if is_whole:
            return pieces[0][0]
        chunk_range = wanted.chunk_range if wanted.kind.by_token else None
        foreign = tuple(n for n, _ in pieces if self.is_foreign(n, stream))
        return Reading(chunk_range, tuple(pieces), _in_row(pieces, chunk_range), foreign)
