"""A program: a schedule with a stage for each op, run as one autograd node; and what runs any.

Weights are inputs of the node and their gradients its outputs, so the hooks that ZeRO, DDP and
FSDP put on parameters see them as they see any other parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ds_moe_ext.schedule.executor import Lanes, Mark, execute
from ds_moe_ext.schedule.task import Cut, Op, Schedule, Span, Task, Value
from ds_moe_ext.watch import WATCH

_UNCUT = Cut.equal(0, 1)
Saved = tuple[Any, ...]  # what a stage keeps for its own backward; nobody else looks inside


@runtime_checkable
class Stage(Protocol):
    """The work of one task. ``backward`` is the adjoint of ``forward`` at what it saved."""

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], Saved]:
        """What the task writes, in order, and what its adjoint will need."""
        ...

    def backward(self, span: Span, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        """Gradients of the reads that have one, in order; None where there is none.

        Args:
            grads: of the writes that have a gradient; None where nobody used what was written.
        """
        ...

    def recut(self, span: Span, pieces: Sequence[tuple[Span, Saved]]) -> Saved:
        """What forward would have saved on ``span``, from what it saved on overlapping spans."""
        ...


class Observer(Protocol):
    """Sees every task with the moments at which its lane began and ended it; changes nothing."""

    @property
    def is_on(self) -> bool:
        """Whether it wants to see the tasks of this pass: marks cost a little."""
        ...

    def saw(self, task: Task, start: Mark, end: Mark, lanes: Lanes) -> None: ...


class Uncut:
    """A stage of tasks that are cut alike in both directions."""

    def recut(self, span: Span, pieces: Any) -> Saved:
        raise ValueError(f"{type(self).__qualname__} is not cut anew for backward")


class SavesAlike:
    """A stage that saves the same for any span, such as the route of all: it is cut anew as is."""

    def recut(self, span: Span, pieces: Sequence[tuple[Span, Saved]]) -> Saved:
        return pieces[0][1]


@dataclass(frozen=True, eq=False)
class Crew:
    """Who does the tasks of a layer, and who sees them.

    Attributes:
        stages: the work of each op.
        observers: told of each task.
        name: of the layer, for a person who is told where a rank waits or has failed.
    """

    stages: Mapping[Op, Stage]
    observers: tuple[Observer, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Program:
    """Schedules, stages and lanes: everything that one pass of a layer needs.

    Attributes:
        forward: tasks of the forward pass.
        backward: ``forward.reversed()`` or ``forward.backward_cut_as(...)``, and whatever the
            strategy put between.
        stages: the work of each op.
        lanes: where the tasks run.
        num_chunks: finest chunks that the tokens are cut into.
        observers: who is told of each task.
        name: of the layer, for a person who is told where a rank waits or has failed.
    """

    forward: Schedule
    backward: Schedule
    stages: Mapping[Op, Stage]
    lanes: Lanes
    num_chunks: int = 1
    observers: tuple[Observer, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for task in (*self.forward.tasks, *self.backward.tasks):
            if task.op not in self.stages:
                raise ValueError(f"task {task} has no stage; give one for op {task.op.name!r}")

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run forward, and backward when autograd asks.

        Args:
            inputs: a tensor or a tuple of tensors for each of ``forward.inputs``.

        Returns:
            One tensor for each of ``forward.outputs``.
        """
        flat = [t for read in inputs for t in (read if isinstance(read, tuple) else (read,))]
        arity = tuple(len(read) if isinstance(read, tuple) else None for read in inputs)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in flat)
        if not wanted:
            return self.passing(self.forward, _cut_of(self, inputs))(inputs)
        return _Node.apply(self, arity, *flat)

    def passing(self, schedule: Schedule, cut: Cut, **how: Any) -> Pass:
        """A pass of one of its schedules."""
        crew = self._crew
        return Pass(schedule, lambda task: crew, self.lanes, cut=cut, **how)

    @cached_property
    def _crew(self) -> Crew:
        return Crew(self.stages, self.observers, self.name)


def in_backward() -> bool:
    """Whether autograd runs a backward pass around the caller: what is computed in it is what
    activation checkpointing computes again."""
    return torch._C._current_graph_task_id() != -1


class _Node(torch.autograd.Function):
    # What a stage saved is freed when its adjoint is done, not after the last adjoint.
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, program: Program, arity: tuple[int | None, ...], *flat: Tensor) -> Any:
        inputs = _grouped(flat, arity)
        run = program.passing(program.forward, _cut_of(program, inputs), keeps=True)
        outputs = tuple(t.detach() for t in run(inputs))
        ctx.program, ctx.arity, ctx.cut = program, arity, run.cut
        # Tensors go through autograd's own keeping, so that activation checkpointing and offloading
        # hooks see them; the rest of what stages saved is small.
        tensors = [x for saved in run.saved for x in saved if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.saved = [
            tuple(_SAVED_TENSOR if isinstance(x, Tensor) else x for x in saved)
            for saved in run.saved
        ]
        ctx.like = [(t.shape, t.dtype, t.device) for t in flat]
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise RuntimeError(
                f"backward ran through {ctx.program.name or 'this MoE layer'} before and has freed "
                "what it saved; run one backward a forward (retain_graph is not supported)"
            )
        program, tensors = ctx.program, list(reversed(ctx.saved_tensors))
        saved = [
            tuple(tensors.pop() if x is _SAVED_TENSOR else x for x in kept) for kept in ctx.saved
        ]
        ctx.saved = None
        back = program.passing(program.backward, ctx.cut, of=program.forward, saved=saved)
        given = dict(zip(program.forward.outputs, grads))
        written = back(given.get(value) for value in program.backward.inputs)
        found = dict(zip(program.backward.outputs, written))
        flat: list[Tensor | None] = []
        for value, arity in zip(program.forward.inputs, ctx.arity):
            grad = found.get(value)
            if arity is None:
                flat.append(grad)
            else:
                flat += [None] * arity if grad is None else grad
        return None, None, *_filled(flat, ctx)


_SAVED_TENSOR = object()


def _filled(flat: list[Tensor | None], ctx: Any) -> list[Tensor | None]:
    """Zeros where an input wants a gradient and no row reached it: its hooks must still fire, or a
    collective that hangs on them would be missing on this rank alone."""
    wanted = ctx.needs_input_grad[2:]
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None and needs else grad
        for grad, needs, (shape, dtype, device) in zip(flat, wanted, ctx.like)
    ]


def _grouped(flat: Sequence[Tensor], arity: Sequence[int | None]) -> list[Any]:
    inputs: list[Any] = []
    start = 0
    for size in arity:
        inputs.append(flat[start] if size is None else tuple(flat[start : start + size]))
        start += 1 if size is None else size
    return inputs


def _cut_of(program: Program, inputs: Sequence[Any]) -> Cut:
    pairs = zip(program.forward.inputs, inputs)
    lengths = (read.shape[0] for value, read in pairs if value.kind.by_token)
    return Cut.equal(next(lengths, 0), program.num_chunks)  # 0: of weights alone


@dataclass(frozen=True, slots=True)
class Place:
    """What a thread does, as a person is told of it.

    Attributes:
        name: of the layer.
        task: of its program.
        is_evaluation: its pass has no gradients.
    """

    name: str
    task: Task
    is_evaluation: bool = False

    def __call__(self) -> str:
        way = "backward" if self.task.adjoint_of else "forward"
        kind = " of a pass without gradients" if self.is_evaluation else ""
        return f"{self.name} ({self.task.op.name}, {way}{kind})"


class Pass:
    """One run of one schedule: the table of values, filled and emptied by its tasks.

    Args:
        schedule: of forward, of backward, or of both in one: then its adjoints are of tasks of its
            own.
        crew_of: who does a task.
        lanes: where.
        cut: of the tokens, where values are of tokens.
        keeps: whether adjoints will come, of what this pass does.
        of: the schedule that the adjoints are of; None: this one.
        saved: what the tasks of that saved, by position; consumed.
    """

    def __init__(
        self,
        schedule: Schedule,
        crew_of: Callable[[Task], Crew],
        lanes: Lanes,
        *,
        cut: Cut = _UNCUT,
        keeps: bool = False,
        of: Schedule | None = None,
        saved: list[Saved] | None = None,
    ) -> None:
        self.schedule, self.cut = schedule, cut
        self.saved: list[Saved] = [()] * len(schedule.tasks) if saved is None else saved
        self._crew_of, self._lanes, self._keeps = crew_of, lanes, keeps
        self._of = (of or schedule).tasks
        self._is_evaluation = of is None and not keeps
        # By value, then by writer: pieces are added in the order of their writers, so that sums do
        # not depend on timing. All keys exist from the start: lanes fill the table concurrently.
        self._table: dict[Value, dict[int, Any]] = {value: {} for value in schedule.written}
        self._unread = dict(schedule.num_readers)
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._watching: dict[Crew, tuple[Observer, ...]] = {}

    def __call__(self, inputs: Iterable[Any]) -> tuple[Any, ...]:
        """Do all tasks; the outputs.

        Args:
            inputs: of the schedule, in order; None for what this rank has none of.
        """
        for value, given in zip(self.schedule.inputs, inputs):
            if given is not None:
                self._table[value][-1] = given
        execute(self.schedule, self._run, self._lanes)
        if WATCH.has_failed:  # in an earlier pass
            WATCH.went_through()
        return tuple(self._read(value) for value in self.schedule.outputs)

    def _run(self, position: int) -> None:
        task = self.schedule.tasks[position]
        if self._errors:  # of a task in another lane: nothing here is worth waiting for
            raise self._errors[0]
        crew = self._crew_of(task)
        WATCH.at(Place(crew.name, task, self._is_evaluation))
        try:
            self._do(position, task, crew)
        except BaseException as error:
            # Now, and not when the lanes are joined: another one may wait for ranks that wait for
            # what this one was about to send.
            self._errors.append(error)
            WATCH.failed(error)
            raise

    def _do(self, position: int, task: Task, crew: Crew) -> None:
        lanes = self._lanes
        watching = self._watching_of(crew) if task.op.begins is None else ()
        start = lanes.mark() if watching else None
        with torch.no_grad():
            reads = [self._read(value) for value in task.reads]
            # Not a bound method kept on self: a cycle would hold the values until the next
            # garbage collection, and autograd copies a gradient that somebody else holds.
            work = self._adjoint if task.adjoint_of else self._forward
            written = work(position, task, crew.stages[task.op], reads)
        for value, piece in zip(task.writes, written):
            if piece is not None:
                self._table[value][position] = piece
        self._drop(task.reads)
        for observer in watching:
            observer.saw(task, start, lanes.mark(), lanes)

    def _watching_of(self, crew: Crew) -> tuple[Observer, ...]:
        """Observers that are on; asked once a pass."""
        if crew not in self._watching:
            self._watching[crew] = tuple(o for o in crew.observers if o.is_on)
        return self._watching[crew]

    def _forward(
        self, position: int, task: Task, stage: Stage, reads: list[Any]
    ) -> tuple[Any, ...]:
        written, saved = stage.forward(task.span, *reads)
        if self._keeps:
            self.saved[position] = saved
            if any(_wants_gradient(read) for read in reads):
                for value, piece in zip(task.writes, written):
                    if value.kind.has_gradient:
                        for part in _parts(piece):
                            part.requires_grad_()
        return written

    def _adjoint(
        self, position: int, task: Task, stage: Stage, grads: list[Any]
    ) -> tuple[Any, ...]:
        pieces = [(self._of[w].span, self.saved[w]) for w in task.adjoint_of]
        for w in task.adjoint_of:
            if self.schedule.last_adjoint[w] == position:
                self.saved[w] = ()
        if all(grad is None for grad in grads):
            return ()
        whole = len(pieces) == 1 and pieces[0][0] == task.span
        saved = pieces[0][1] if whole else stage.recut(task.span, pieces)
        self._lanes.keep(saved)
        return stage.backward(task.span, saved, *grads)

    def _read(self, wanted: Value) -> Any:
        """The value, put together from the pieces that were written of it."""
        parts: dict[int, Any] = {}
        smaller: list[tuple[Span, int, Tensor]] = []
        for source in self.schedule.sources[wanted]:
            pieces = self._table[source]
            if source.span == wanted.span or not wanted.kind.by_token:
                parts.update(pieces)
                continue
            assert source.span is not None and wanted.span is not None
            shared = source.span.shared_with(wanted.span)
            narrowed = {w: self._narrow(p, source.span, shared) for w, p in pieces.items()}
            if shared == wanted.span:
                parts.update(narrowed)
            else:
                smaller += [(shared, w, piece) for w, piece in narrowed.items()]
        # The pieces, not what is made of them here: those are the ones other lanes may free.
        self._lanes.keep((*parts.values(), *(piece for _, _, piece in smaller)))
        if smaller:
            assert wanted.span is not None
            parts[max(w for _, w, _ in smaller)] = self._joined(smaller, wanted.span)
        return _sum(parts)

    def _narrow(self, piece: Tensor, span: Span, wanted: Span) -> Tensor:
        if span == wanted:
            return piece
        start = self.cut.first(wanted) - self.cut.first(span)
        narrow = piece.detach().narrow(0, start, self.cut.length(wanted))
        return narrow.requires_grad_(piece.requires_grad)

    def _joined(self, pieces: list[tuple[Span, int, Tensor]], wanted: Span) -> Tensor:
        """Pieces of a span in the order of their tokens; where several writers wrote the same
        tokens, their sum."""
        ordered = [(span, piece.detach()) for span, _, piece in sorted(pieces, key=_place)]
        ends = [wanted.start, *(span.stop for span, _ in ordered)]
        if ends == [*(span.start for span, _ in ordered), wanted.stop]:
            joined = torch.cat([piece for _, piece in ordered])
        else:
            like = ordered[0][1]
            joined = like.new_zeros(self.cut.length(wanted), *like.shape[1:])
            for span, piece in ordered:
                self._narrow(joined, wanted, span).add_(piece)
        return joined.requires_grad_(any(piece.requires_grad for _, _, piece in pieces))

    def _drop(self, values: Iterable[Value]) -> None:
        """Free what has been read for the last time."""
        with self._lock:
            for value in values:
                for source in self.schedule.sources[value]:
                    self._unread[source] -= 1
                    if not self._unread[source]:
                        self._table[source].clear()


def _place(piece: tuple[Span, int, Any]) -> tuple[Span, int]:
    span, writer, _ = piece
    return span, writer


def _parts(thing: Any) -> list[Tensor]:
    """What may have a gradient of a value, which may be a tensor or a tuple."""
    parts: Iterable[Any] = thing if isinstance(thing, tuple) else (thing,)
    return [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]


def _wants_gradient(read: Any) -> bool:
    parts: Iterable[Any] = read if isinstance(read, tuple) else (read,)
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


def _sum(parts: Mapping[int, Any]) -> Any:
    """Pieces of equal span, added in the order of their writers; None where there is none."""
    pieces = [parts[writer] for writer in sorted(parts)]
    if len(pieces) <= 1:
        return pieces[0] if pieces else None
    if isinstance(pieces[0], tuple):
        return tuple(added([piece[i] for piece in pieces]) for i in range(len(pieces[0])))
    return added(pieces)


def added(pieces: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there; None of none."""
    given = [piece for piece in pieces if piece is not None]
    if not given:
        return None
    total = given[0]
    for index, piece in enumerate(given[1:]):
        # The first sum makes a buffer of our own; later pieces are added in place.
        total = total.add_(piece) if index else total + piece
    return total
