# SPDX-License-Identifier: Apache-2.0
"""A schedule: which tasks, in which stream, issued in which order. Data only; nothing runs here.

The tokens of a layer are cut into *finest chunks*. A task works on a *chunk range* of them, and a
value is named by its kind, its layer and the chunk range it covers; so forward tasks may cover
other chunk ranges than backward tasks (FSMoE: the two degrees differ on most layers), and the
finest chunks are the least common multiple of the two degrees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Stream:
    """An in-order queue: a CUDA stream, a worker thread, or a row of the simulator."""

    name: str  # which
    # it moves data between ranks, which others wait for: on a device it goes first
    sends: bool = field(default=False, compare=False)

    def __hash__(self) -> int:  # they are keys of what every pass looks up
        return hash(self.name)


COMPUTE = Stream("compute")
INTER = Stream("inter", sends=True)  # collectives between EP ranks, over the slow links
INTRA = Stream("intra", sends=True)  # collectives inside an ETP group, over the fast links
PARAM = Stream("param", sends=True)  # expert weights and their gradients
HOST = Stream("host")  # what the CPU works out while a device or the links are busy


class Begun(NamedTuple):
    """Work that a task of another op begins."""

    op: Op  # its kind
    is_adjoint: bool = False  # it is what ``op`` is in backward


@dataclass(frozen=True, slots=True)
class Op:
    """A kind of task and the stream it runs in. An open set: a strategy may define its own."""

    name: str  # shown in errors and traces
    stream: Stream  # where it runs
    back: Stream | None = None  # stream of the adjoint, where it is another one
    is_wait: bool = False  # it only waits for what was begun elsewhere
    # the work in another stream that it only begins; whoever needs that waits for it
    begins: Begun | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_work(self) -> bool:
        """Whether it takes time in its own stream."""
        return not self.is_wait and self.begins is None


# The six sub-modules of an MoE layer.
GATE = Op("gate", COMPUTE)
ORDER = Op("order", INTER)
DISPATCH = Op("dispatch", INTER)
EXPERT = Op("expert", COMPUTE)
COMBINE = Op("combine", INTER)
RESTORE = Op("restore", COMPUTE)  # the papers' I-Order

# Around them, where experts have replicas.
ATTENTION = Op("attention", COMPUTE)  # what the host computes between two MoE layers
# weights to their replicas; its adjoint sums gradients at their owners
GATHER = Op("gather", PARAM)
# of a pass; its adjoint waits for what came to the owner
START = Op("start", COMPUTE, is_wait=True)
JOIN = Op("join", COMPUTE, is_wait=True)
HAVE_AGAIN = Op("have_again", COMPUTE, is_wait=True)  # replicas that were freed, in backward
LAUNCH = Op("launch", COMPUTE, begins=Begun(GATHER))
RECALL = Op("recall", COMPUTE, begins=Begun(GATHER))  # the same replicas again, for backward
SEND_TO_OWNER = Op("send_to_owner", COMPUTE, begins=Begun(GATHER, is_adjoint=True))
PLAN = Op("plan", HOST)  # of the next step

# Where the ranks of an ETP group split each expert, and where dense gradients are summed in slices.
ETP_GATHER = Op("etp_gather", INTRA)  # rows that arrived at any rank of the group, to all of it
ETP_SCATTER = Op("etp_scatter", INTRA)  # sums what the splits computed, to the rank of each row
GRADIENTS = Op("gradients", INTER)  # the all-reduce of a slice
BEGIN_GRADIENTS = Op("begin_gradients", COMPUTE, begins=Begun(GRADIENTS))


class ChunkRange(NamedTuple):
    """Finest chunks ``start`` to ``stop``, the end excluded."""

    start: int
    stop: int

    def overlaps(self, other: ChunkRange) -> bool:
        return self.start < other.stop and other.start < self.stop

    def shared_with(self, other: ChunkRange) -> ChunkRange:
        """The chunks of both; of chunk ranges that overlap."""
        return ChunkRange(max(self.start, other.start), min(self.stop, other.stop))

    def __str__(self) -> str:
        return f"{self.start}" if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"


class Cut(NamedTuple):
    """Where finest chunks begin, in tokens: chunk ``i`` is ``bounds[i]`` to ``bounds[i + 1]``."""

    bounds: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=64)  # batches are often alike
    def equal(cls, num_tokens: int, num_chunks: int) -> Cut:
        """As equal as can be, the longer chunks first."""
        size, longer = divmod(num_tokens, num_chunks)
        return cls(tuple(i * size + min(i, longer) for i in range(num_chunks + 1)))

    @property
    def num_chunks(self) -> int:
        return len(self.bounds) - 1

    def first(self, chunk_range: ChunkRange) -> int:
        return self.bounds[chunk_range.start]

    def length(self, chunk_range: ChunkRange) -> int:
        return self.bounds[chunk_range.stop] - self.bounds[chunk_range.start]


def chunk_ranges(num_chunks: int, degree: int) -> tuple[ChunkRange, ...]:
    """``degree`` equal chunk ranges of ``num_chunks`` finest chunks.

    Raises:
        ValueError: ``degree`` does not divide ``num_chunks``.
    """
    if num_chunks % degree:
        raise ValueError(
            f"degree {degree} does not divide {num_chunks} finest chunks; cut the tokens into the "
            "least common multiple of the forward and the backward degree"
        )
    width = num_chunks // degree
    return tuple(ChunkRange(i * width, (i + 1) * width) for i in range(degree))


def refined(num_chunks: int, *degrees: int) -> tuple[ChunkRange, ...]:
    """The fewest chunk ranges that the chunk ranges of each degree are made of."""
    ends = sorted(
        {chunk_range.stop for degree in degrees for chunk_range in chunk_ranges(num_chunks, degree)}
    )
    return tuple(ChunkRange(start, stop) for start, stop in pairwise((0, *ends)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value, and how it can be handed on."""

    name: str  # shown in errors and traces
    # its first dim is the tokens of its chunk range, so that it may be sliced and joined
    by_token: bool = False
    has_gradient: bool = True  # it has an adjoint; integers have none

    def __hash__(self) -> int:
        return hash(self.name)


class Value(NamedTuple):
    """What tasks hand each other: one kind of tensor, record or tuple of tensors of one layer."""

    kind: Kind
    layer: int
    chunk_range: ChunkRange | None = None  # None: not cut, as weights are

    def __str__(self) -> str:
        chunks = "" if self.chunk_range is None else f",{self.chunk_range}"
        return f"{self.kind.name}[{self.layer}{chunks}]"


class _ByKind(Generic[Made]):
    """What belongs to values, such as the tasks that write them, to be found by a value."""

    def __init__(self, pairs: Iterable[tuple[Value, Made]] = ()) -> None:
        self._alike: dict[tuple[Kind, int], list[tuple[ChunkRange | None, Made]]]
        self._alike = defaultdict(list)
        for value, of_it in pairs:
            self.add(value, of_it)

    def add(self, value: Value, of_it: Made) -> None:
        self._alike[value.kind, value.layer].append((value.chunk_range, of_it))

    def touching(self, value: Value) -> list[tuple[ChunkRange | None, Made]]:
        """Those of the values that (a part of) this value is (a part of), by their chunks."""
        kind, layer, wanted = value
        alike = self._alike.get((kind, layer), ())
        if wanted is None:
            return [each for each in alike if each[0] is None]
        start, stop = wanted
        return [each for each in alike if each[0] and start < each[0][1] and each[0][0] < stop]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of one layer on one chunk range."""

    op: Op
    layer: int
    chunk_range: ChunkRange
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    # in a backward schedule, the positions of the forward tasks whose adjoint this is: one, or
    # several when backward is cut otherwise than forward
    adjoint_of: tuple[int, ...] = ()

    @property
    def stream(self) -> Stream:
        return self.op.back if self.adjoint_of and self.op.back is not None else self.op.stream

    def __str__(self) -> str:
        return f"{self._name}[{self.layer},{self.chunk_range}]"

    @property
    def label(self) -> str:
        """For profilers: the same for all chunk ranges, so that their times add up."""
        return f"layer {self.layer} {self._name}"

    @property
    def _name(self) -> str:
        return self.op.name + ("'" if self.adjoint_of else "")


@dataclass(frozen=True)
class Schedule:
    """Tasks in issue order. A task starts when the task before it in its stream and every task that
    writes what it reads have finished. The executor obeys this rule; the simulator prices it."""

    tasks: tuple[Task, ...]  # in issue order
    inputs: tuple[Value, ...]  # what is given
    outputs: tuple[Value, ...]  # what is wanted
    # forward and backward in one: adjoints are of tasks of this schedule, and wait for them, too
    is_round_trip: bool = False
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, make: Callable[[Schedule], Made]) -> Made:
        """What is made of this schedule, for all who share it: plans of one shape do."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    def __str__(self) -> str:
        return " ".join(str(task) for task in self.tasks)

    def in_stream(self, stream: Stream) -> str:
        return " ".join(str(task) for task in self.tasks if task.stream == stream)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each task, the positions of the tasks it waits for, ascending.

        Raises:
            ValueError: a task reads what nothing before it wrote in full.
        """
        written = _ByKind((value, -1) for value in self.inputs)
        after = []
        for position, task in enumerate(self.tasks):
            # Data alone may leave it to ranks that do other tasks of the same step.
            waits = set(task.adjoint_of if self.is_round_trip else ())
            for value in task.reads:
                writers = written.touching(value)
                if not _covers((chunk_range for chunk_range, _ in writers), value.chunk_range):
                    raise ValueError(
                        f"task {position}, {task}, reads {value} before it is written in full; "
                        "issue the tasks that write it first"
                    )
                waits.update(w for _, w in writers if w >= 0)
            after.append(tuple(sorted(waits)))
            for value in task.writes:
                written.add(value, position)
        return tuple(after)

    @cached_property
    def written(self) -> tuple[Value, ...]:
        """Every value that is given or written, once."""
        values = (*self.inputs, *(value for task in self.tasks for value in task.writes))
        return tuple(dict.fromkeys(values))

    @cached_property
    def sources(self) -> dict[Value, tuple[Value, ...]]:
        """For each value that a task reads or the schedule puts out: the written values that hold
        (parts of) it."""
        written = _ByKind((value, value) for value in self.written)
        wanted = (*(value for task in self.tasks for value in task.reads), *self.outputs)
        return {value: tuple(w for _, w in written.touching(value)) for value in wanted}

    @cached_property
    def last_adjoint(self) -> dict[int, int]:
        """For each forward position, the last of this schedule's tasks that is its adjoint."""
        return {w: position for position, task in enumerate(self.tasks) for w in task.adjoint_of}

    @cached_property
    def by_stream(self) -> dict[Stream, tuple[int, ...]]:
        """What each stream does, by position; streams in the order of their first tasks."""
        positions: dict[Stream, list[int]] = defaultdict(list)
        for position, task in enumerate(self.tasks):
            positions[task.stream].append(position)
        return {stream: tuple(own) for stream, own in positions.items()}

    @cached_property
    def awaits(self) -> tuple[tuple[int, ...], ...]:
        """For each task, what it must wait for that its own stream has not waited for or done: the
        last of the tasks in ``after``, stream by stream."""
        seen: dict[tuple[Stream, Stream], int] = {}
        awaits = []
        for task, after in zip(self.tasks, self.after):
            latest = {self.tasks[w].stream: w for w in after}  # ascending: the last one stays
            latest.pop(task.stream, None)
            new = {
                other: w for other, w in latest.items() if w > seen.get((task.stream, other), -1)
            }
            seen |= {(task.stream, other): w for other, w in new.items()}
            awaits.append(tuple(new.values()))
        return tuple(awaits)

    @cached_property
    def is_chain(self) -> bool:
        """Whether work could never overlap: each task waits for the one issued before it.

        ``PLAN`` is not looked at: threads for that alone would cost every task a hand-over, and
        where there are none the plan is made behind the pass.
        """
        work = [
            position
            for position, task in enumerate(self.tasks)
            if task.op.is_work and task.op != PLAN
        ]
        return all(
            before in self.after[position]
            or self.tasks[position].stream == self.tasks[before].stream
            for before, position in pairwise(work)
        )

    @cached_property
    def live(self) -> tuple[bool, ...]:
        """For each task, whether gradients of an output reach it, so that it has an adjoint."""
        needed = _ByKind((value, None) for value in _graded(self.outputs))
        live = []
        for task in reversed(self.tasks):
            wanted = any(map(needed.touching, _graded(task.writes)))
            live.append(wanted)
            for value in _graded(task.reads) if wanted else ():
                needed.add(value, None)
        return tuple(reversed(live))

    def reversed(self) -> Schedule:
        """The backward pass: last task first, each reading the gradients of what it wrote.

        A strategy may insert tasks of its own into the result; they are no task's adjoint.
        """
        last = len(self.tasks) - 1
        tasks = tuple(
            Task(t.op, t.layer, t.chunk_range, _graded(t.writes), _graded(t.reads), (last - i,))
            for i, t in enumerate(reversed(self.tasks))
            if self.live[last - i]
        )
        # A value that nobody read has no gradient; it counts as given, and is None.
        read = _ByKind((value, None) for task in self.tasks for value in task.reads)
        unread = (
            value
            for task in self.tasks
            for value in _graded(task.writes)
            if not read.touching(value)
        )
        given = dict.fromkeys((*_graded(self.outputs), *unread))
        return Schedule(tasks, tuple(given), _graded(self.inputs))

    def backward_cut_as(self, template: Schedule) -> Schedule:
        """The backward pass of this schedule, cut as ``template.reversed()`` is."""
        tasks, back = [], template.reversed()
        alike: dict[tuple[str, int], list[int]] = defaultdict(list)
        for position, task in enumerate(self.tasks):
            alike[task.op.name, task.layer].append(position)
        for task in back.tasks:
            ours = tuple(
                position
                for position in alike[task.op.name, task.layer]
                if self.tasks[position].op == task.op
                and self.tasks[position].chunk_range.overlaps(task.chunk_range)
            )
            if not ours:
                raise ValueError(f"the forward pass has no task for {task} to be the adjoint of")
            tasks.append(Task(task.op, task.layer, task.chunk_range, task.reads, task.writes, ours))
        return Schedule(tuple(tasks), back.inputs, _graded(self.inputs))


def _graded(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(value for value in values if value.kind.has_gradient)


def _covers(chunk_ranges: Iterable[ChunkRange | None], wanted: ChunkRange | None) -> bool:
    if wanted is None:
        return any(True for _ in chunk_ranges)
    reached = wanted.start
    for chunk_range in sorted(filter(None, chunk_ranges)):
        if chunk_range.start <= reached:
            reached = max(reached, chunk_range.stop)
    return reached >= wanted.stop
