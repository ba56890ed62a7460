"""A schedule and its crew, bound: all that passes of one plan would look up in every pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ds_moe_ext.schedule.crew import Crew, Place, Stage
from ds_moe_ext.schedule.task import Schedule, Span, Task, Value


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A value that is put together from several pieces, or from a part of one.

    Attributes:
        span: that is wanted; None: of a value that is not cut.
        pieces: place of each in the table, and the span that it covers; in the order of writers.
    """

    span: Span | None
    pieces: tuple[tuple[int, Span | None], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A task with what its runs need.

    Attributes:
        task: which.
        stage: its work.
        crew: number of the crew, for its observers; None: nobody sees it.
        reads: places in the table, or how to put together what it reads.
        graded_reads: those of the reads that may have a gradient.
        writes: places in the table.
        graded_writes: those of the writes that may have a gradient.
        frees: pieces that nobody else reads.
        releases: pieces that others read, too.
        adjoint_of: the position whose savings it takes as they are; None: several, or cut anew.
        forgets: positions whose savings nobody needs after it.
        training: what the thread does then, as a person is told.
        evaluation: the same, in a pass without gradients.
    """

    task: Task
    stage: Stage
    crew: int | None
    reads: tuple[int | Reading, ...]
    graded_reads: tuple[int, ...]
    writes: tuple[int, ...]
    graded_writes: tuple[int, ...]
    frees: tuple[int, ...]
    releases: tuple[int, ...]
    adjoint_of: int | None
    forgets: tuple[int, ...]
    training: Place
    evaluation: Place


@dataclass(frozen=True, eq=False)
class Binding:
    """A schedule with all that its passes would look up: made once, for passes of one plan.

    A piece is what one task wrote of a value; each has its place in the table of a pass, in the
    order of writers, so that sums do not depend on timing.

    Attributes:
        schedule: of forward, of backward, or of both in one: then its adjoints are of tasks of its
            own.
        steps: its tasks.
        crews: who does them.
        inputs: places in the table of what is given.
        outputs: of what is wanted; or how to put it together.
        num_readers: of each piece, where there are several; who reads an output comes after all.
        adjoint_of: the tasks that the adjoints are of.
        is_backward: these are another schedule's.
    """

    schedule: Schedule
    steps: tuple[Step, ...]
    crews: tuple[Crew, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Reading, ...]
    num_readers: tuple[int, ...]
    adjoint_of: tuple[Task, ...]
    is_backward: bool

    @classmethod
    def of(
        cls, schedule: Schedule, crew_of: Callable[[Task], Crew], adjoint_of: Schedule | None = None
    ) -> Binding:
        """Look up.

        Args:
            schedule: what is to be done.
            crew_of: who does a task.
            adjoint_of: the schedule that its adjoints are of; None: this one.
        """
        pieces = _Pieces(schedule)
        before = (adjoint_of or schedule).tasks
        crews = {crew_of(task): None for task in schedule.tasks}
        numbers = {crew: number for number, crew in enumerate(crews)}

        def bound(position: int, task: Task) -> Step:
            crew = crew_of(task)
            alone = len(task.adjoint_of) == 1 and before[task.adjoint_of[0]].span == task.span
            own = dict.fromkeys(pieces.read_by[position])
            last = schedule.last_adjoint
            return Step(
                task=task,
                stage=crew.stages[task.op],
                crew=None if task.op.begins is not None else numbers[crew],
                reads=tuple(map(pieces.reading, task.reads)),
                graded_reads=_graded(task.reads),
                writes=tuple(pieces.number[value, position] for value in task.writes),
                graded_writes=_graded(task.writes),
                frees=tuple(n for n in own if pieces.num_readers[n] == 1),
                releases=tuple(n for n in own if pieces.num_readers[n] > 1),
                adjoint_of=task.adjoint_of[0] if alone else None,
                forgets=tuple(w for w in task.adjoint_of if last[w] == position),
                training=Place(crew.name, task),
                evaluation=Place(crew.name, task, is_evaluation=True),
            )

        return cls(
            schedule=schedule,
            steps=tuple(bound(position, task) for position, task in enumerate(schedule.tasks)),
            crews=tuple(crews),
            inputs=tuple(pieces.number[value, -1] for value in schedule.inputs),
            outputs=tuple(map(pieces.reading, schedule.outputs)),
            num_readers=pieces.num_readers,
            adjoint_of=before,
            is_backward=adjoint_of is not None,
        )


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
        self._sources = schedule.sources
        self.read_by = [self._read(task.reads) for task in schedule.tasks]
        counts = Counter(n for own in (*self.read_by, self._read(schedule.outputs)) for n in own)
        self.num_readers = tuple(counts[n] for n in range(len(self.number)))

    def _read(self, values: Iterable[Value]) -> set[int]:
        return {n for value in values for source in self._sources[value] for n in self._of[source]}

    def reading(self, wanted: Value) -> int | Reading:
        """How to read a value."""
        pieces = sorted(
            (n, source.span) for source in self._sources[wanted] for n in self._of[source]
        )
        is_whole = len(pieces) == 1 and (pieces[0][1] == wanted.span or not wanted.kind.by_token)
        if is_whole:
            return pieces[0][0]
        return Reading(wanted.span if wanted.kind.by_token else None, tuple(pieces))
