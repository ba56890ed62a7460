# SPDX-License-Identifier: Apache-2.0
"""A program: a schedule with a stage for each op, run as one autograd node; and what runs any.

How the parts work together:

- ``task.py`` and ``orders.py`` have the schedules as data, forward and backward of a layer.
- ``stages.py`` binds a schedule to who does its tasks, once: each piece that a task writes has a
  place in a table.
- ``Pass`` is one run: it fills the table and empties it. Streams of ``executor.py`` (the caller's
  thread, worker threads or CUDA streams) call it with the position of each task.
- ``Program`` makes an autograd node of a forward and a backward pass. What stages save goes through
  autograd's own keeping, so that checkpointing and offloading see it.
- ``graphs.py`` records a program's passes as CUDA graphs; ``watch.py`` reports errors to
  other ranks.

Weights are inputs of the node and their gradients its outputs, so the hooks that ZeRO, DDP and
FSDP put on parameters see them as they see any other parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.schedule.executor import Issuing, OnDevice, ScheduleStreams, in_ranges
from ds_moe_ext.schedule.stages import Binding, LayerStages, Reading, Saved, Step
from ds_moe_ext.schedule.task import HOST, ChunkRange, Cut, Schedule, Value
from ds_moe_ext.schedule.watch import WATCH

_UNCUT = Cut.equal(0, 1)

Arity = tuple[int | None, ...]
"""Of each input of a program: a tensor's None, of a tuple how many there are."""


@dataclass(frozen=True, eq=False)
class Program:
    """Schedules, a stages and streams: everything that one pass of a layer needs."""

    forward: Schedule  # tasks of the forward pass
    # ``forward.reversed()`` or ``forward.backward_cut_as(...)``, and whatever the strategy put
    # between
    backward: Schedule
    layer_stages: LayerStages  # who does them
    streams: ScheduleStreams  # where the tasks run
    num_chunks: int = 1  # finest chunks that the tokens are cut into

    def __post_init__(self) -> None:
        for task in (*self.forward.tasks, *self.backward.tasks):
            if task.op not in self.layer_stages.stages:
                raise ValueError(f"task {task} has no stage; give one for op {task.op.name!r}")

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run forward, and backward when autograd asks.

        Args:
            inputs: a tensor or a tuple of tensors for each of ``forward.inputs``.

        Returns:
            One tensor for each of ``forward.outputs``.
        """
        flat, arity = flattened(inputs)
        if not is_graded(flat):
            with torch.no_grad():
                return Pass(self.bound_forward, self.streams, cut=self.cut_of(inputs))(inputs)
        return _Node.apply(self, arity, *flat)

    @property
    def name(self) -> str:
        """Of its layer, for a person."""
        return self.layer_stages.name or "this MoE layer"

    def ahead(self, inputs: Sequence[Any]) -> tuple[tuple[Tensor, ...], Cut, list[Saved]]:
        """Forward, of which adjoints will come: its outputs, how tokens were cut, and what each
        task saved. Autograd must not record, and ``saved`` is consumed."""
        cut = self.cut_of(inputs)
        run = Pass(self.bound_forward, self.streams, cut=cut, keeps=True)
        return tuple(t.detach() for t in run(inputs)), cut, run.saved

    def back(
        self, cut: Cut, saved: list[Saved], grads: Sequence[Tensor | None], arity: Arity
    ) -> list[Tensor | None]:
        """Gradients of forward's inputs, one tensor after another; None where no row came by.
        Autograd must not record, and ``saved`` is consumed."""
        run = Pass(self.bound_backward, self.streams, cut=cut, saved=saved)
        written = run(None if n is None else grads[n] for n in self.given_gradients)
        flat: list[Tensor | None] = []
        for number, size in zip(self.found_gradients, arity):
            grad = None if number is None else written[number]
            if size is None:
                flat.append(grad)
            else:
                flat += [None] * size if grad is None else grad
        return flat

    def cut_of(self, inputs: Sequence[Any]) -> Cut:
        first = self._first_by_token
        return Cut.equal(0 if first is None else inputs[first].shape[0], self.num_chunks)

    @cached_property
    def _first_by_token(self) -> int | None:
        """An input that says how many tokens there are; None where all are weights."""
        values = enumerate(self.forward.inputs)
        return next((number for number, value in values if value.kind.by_token), None)

    @cached_property
    def bound_forward(self) -> Binding:
        return Binding.of(self.forward, lambda task: self.layer_stages)

    @cached_property
    def bound_backward(self) -> Binding:
        return Binding.of(self.backward, lambda task: self.layer_stages, adjoint_of=self.forward)

    @cached_property
    def given_gradients(self) -> tuple[int | None, ...]:
        """Which of forward's outputs each input of backward is the gradient of; None: of none."""
        return _positions(self.backward.inputs, self.forward.outputs)

    @cached_property
    def found_gradients(self) -> tuple[int | None, ...]:
        """Which of backward's outputs is the gradient of each input of forward; None: none is."""
        return _positions(self.forward.inputs, self.backward.outputs)


def _positions(wanted: Iterable[Value], among: Sequence[Value]) -> tuple[int | None, ...]:
    return tuple(among.index(value) if value in among else None for value in wanted)


def flattened(inputs: Sequence[Any]) -> tuple[list[Tensor], Arity]:
    """Tensors and tuples of tensors as tensors in a row, and what ``grouped`` takes."""
    flat = [t for read in inputs for t in (read if isinstance(read, tuple) else (read,))]
    return flat, tuple(len(read) if isinstance(read, tuple) else None for read in inputs)


def grouped(flat: Sequence[Tensor], arity: Arity) -> list[Any]:
    inputs: list[Any] = []
    start = 0
    for size in arity:
        inputs.append(flat[start] if size is None else tuple(flat[start : start + size]))
        start += 1 if size is None else size
    return inputs


def is_graded(flat: Sequence[Tensor]) -> bool:
    """Whether autograd records what is made of these."""
    return torch.is_grad_enabled() and any([t.requires_grad for t in flat])


def in_backward() -> bool:
    """Whether autograd runs a backward pass around the caller: what is computed in it is what
    activation checkpointing computes again."""
    return torch._C._current_graph_task_id() != -1


class _Node(torch.autograd.Function):
    # What a stage saved is freed when its adjoint is done, not after the last adjoint.
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, program: Program, arity: Arity, *flat: Tensor) -> Any:
        outputs, ctx.cut, all_saved = program.ahead(grouped(flat, arity))
        ctx.program, ctx.arity = program, arity
        # Tensors go through autograd's own keeping, so that activation checkpointing and offloading
        # hooks see them; the rest of what stages saved is small.
        tensors: list[Tensor] = []
        ctx.saved = [_without_tensors(saved, tensors) for saved in all_saved]
        ctx.save_for_backward(*tensors)
        describe(ctx, flat, outputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise RuntimeError(ran_before(ctx.program.name))
        program, saved = ctx.program, _with_tensors(ctx.saved, ctx.saved_tensors)
        ctx.saved = None
        flat = program.back(ctx.cut, saved, grads, ctx.arity)
        return None, None, *filled(flat, ctx)


def ran_before(what: str) -> str:
    """What is reported to a person whose second backward finds nothing left of the first."""
    return (
        f"backward ran through {what} before and has freed what it saved; run one backward a "
        "forward (retain_graph is not supported)"
    )


_SAVED_TENSOR = object()


def _without_tensors(saved: Saved, tensors: list[Tensor]) -> Saved:
    """What a stage saved, its tensors moved to a list."""
    rest: list[Any] = []
    for thing in saved:
        if isinstance(thing, Tensor):
            tensors.append(thing)
            rest.append(_SAVED_TENSOR)
        else:
            rest.append(thing)
    return tuple(rest)


def _with_tensors(all_saved: Sequence[Saved], tensors: Iterable[Tensor]) -> list[Saved]:
    """What each stage saved, its tensors put back; nobody else holds them when this has ended."""
    given = iter(tensors)
    return [tuple([next(given) if x is _SAVED_TENSOR else x for x in saved]) for saved in all_saved]


def describe(ctx: Any, flat: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
    """Let the ctx of a function know what its last inputs and its outputs are like."""
    # Few things that Python's collector knows: its young ones are gone through every 700.
    ctx.like = [t.shape for t in flat], [t.dtype for t in flat], [t.device for t in flat]
    ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))


def filled(flat: list[Tensor | None], ctx: Any) -> list[Tensor | None]:
    """Zeros where an input wants a gradient and no row reached it: its hooks must still fire, or a
    collective that hangs on them would be missing on this rank alone. The inputs are those that
    the ctx was given by ``describe``."""
    wanted = ctx.needs_input_grad[-len(flat) :]
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None and needs else grad
        for grad, needs, shape, dtype, device in zip(flat, wanted, *ctx.like)
    ]


class Pass:
    """One run of one schedule: a table of pieces, filled and emptied by its tasks.

    Args:
        binding: what to do.
        streams: where.
        cut: of the tokens, where values are of tokens.
        keeps: whether adjoints will come, of what this pass does.
        saved: what the tasks of that saved, by position; consumed.
    """

    def __init__(
        self,
        binding: Binding,
        streams: ScheduleStreams,
        *,
        cut: Cut = _UNCUT,
        keeps: bool = False,
        saved: list[Saved] | None = None,
    ) -> None:
        self._binding, self._streams, self._cut, self._keeps = binding, streams, cut, keeps
        self._steps = binding.table.steps
        self.saved: list[Saved] = [()] * len(self._steps) if saved is None else saved
        is_training = binding.is_backward or keeps
        self._places = binding.training if is_training else binding.evaluation
        self._table: list[Any] = [None] * len(binding.table.num_readers)
        self._unread = list(binding.table.num_readers)
        self._parts: dict[tuple[int, int], dict[int, Tensor]] = {}  # of pieces, still to be read
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        # Of what the caller's stream has freed the others hear before they begin anything.
        self._is_late = streams.is_late and len(binding.schedule.by_stream) > 1
        self._held: list[OnDevice] = []  # until the caller's work comes behind all streams'
        # Asked once: marks cost a little.
        self._watching = [
            tuple(o for o in layer_stages.observers if o.is_on)
            for layer_stages in binding.layers_stages
        ]
        self._is_watched = any(self._watching)
        self._issuing = Issuing() if self._is_watched and streams.issues else None

    def __call__(self, inputs: Iterable[Any]) -> tuple[Any, ...]:
        """Do all tasks; the outputs. Autograd must not record.

        Args:
            inputs: of the schedule, in order; None for what this rank has none of.
        """
        for number, given in zip(self._binding.table.inputs, inputs):
            self._table[number] = given
        schedule = self._binding.schedule
        self._streams.run(schedule, in_ranges(schedule, self._run))
        if self._issuing is not None:
            for position, seconds in self._issuing.seconds():
                for observer in self._watching[self._binding.layer_numbers[position]]:
                    observer.issued(self._steps[position].task, seconds)
        outputs = tuple(map(self._read, self._binding.table.outputs))
        if WATCH.has_failed:  # in an earlier pass
            WATCH.went_through()
        return outputs

    def _run(self, position: int) -> None:
        if self._errors:  # of a task in another stream: nothing here is worth waiting for
            raise self._errors[0]
        WATCH.at(self._places[position])
        step = self._steps[position]
        try:
            if self._is_watched:
                self._do_watched(position, step)
            else:
                self._do(position, step)
        except BaseException as error:
            # Now, and not when the streams are joined: another one may wait for ranks that wait for
            # what this one was about to send.
            self._errors.append(error)
            WATCH.failed(error)
            raise

    def _do_watched(self, position: int, step: Step) -> None:
        streams = self._streams
        # stream HOST has a thread of its own
        issuing = None if step.task.stream == HOST else self._issuing
        if issuing is not None:
            issuing.begins(position)
        if not step.is_seen:
            self._do(position, step)
            return
        looking = nullcontext if issuing is None else issuing.aside
        with looking():
            start = streams.mark()
        self._do(position, step)
        with looking():
            for observer in self._watching[self._binding.layer_numbers[position]]:
                observer.saw(step.task, start, streams.mark(), streams)

    def _do(self, position: int, step: Step) -> None:
        table = self._table
        if step.plain_reads is None:
            reads = list(map(self._read, step.reads))
        else:
            reads = [table[number] for number in step.plain_reads]
        if self._is_late and step.foreign_reads:
            self._keep([reads[number] for number in step.foreign_reads])
        # Not a bound method kept on self: a cycle would hold the values until the next garbage
        # collection, and autograd copies a gradient that somebody else holds.
        work = self._adjoint if step.task.adjoint_of else self._forward
        for number, piece in zip(step.writes, work(position, step, reads)):
            table[number] = piece
        for number in step.frees:
            table[number] = None
        if step.releases:
            self._release(step.releases)

    def _forward(self, position: int, step: Step, reads: list[Any]) -> Sequence[Any]:
        written, saved = self._binding.stages[position].forward(step.task.chunk_range, *reads)
        if self._keeps:
            self.saved[position] = saved
            for number in step.graded_reads:
                if _wants_gradient(reads[number]):
                    for wanted in step.graded_writes:
                        _want_gradient(written[wanted])
                    break
        return written

    def _adjoint(self, position: int, step: Step, grads: list[Any]) -> Sequence[Any]:
        chunk_range, stage, kept = step.task.chunk_range, self._binding.stages[position], self.saved
        uncut = self._binding.uncut[position]
        if uncut is None:
            pieces = [
                (self._binding.adjoint_of[w].chunk_range, kept[w]) for w in step.task.adjoint_of
            ]
        else:
            saved = kept[uncut]
        if self._is_late:
            self._keep([kept[w] for w in step.task.adjoint_of])
        for w in step.forgets:
            kept[w] = ()
        for grad in grads:  # a generator would take the host as long as all the rest of this
            if grad is not None:
                break
        else:
            return ()
        if uncut is None:
            saved = stage.recut(chunk_range, pieces)
        return stage.backward(chunk_range, saved, *grads)

    def _keep(self, things: Iterable[Any]) -> None:
        """Nobody else gets the memory of what this stream reads and another has made until it has
        read it. Records of many small tensors stay as long as the streams run, which costs less
        than to record it of each; but not where that is a whole step."""
        kept: list[Tensor | OnDevice] = []
        for thing in things:
            if isinstance(thing, tuple):
                self._keep(thing)
            elif isinstance(thing, OnDevice) and not self._binding.schedule.is_round_trip:
                self._held.append(thing)
            elif isinstance(thing, Tensor | OnDevice):
                kept.append(thing)
        if kept:
            self._streams.keep(kept)

    def _read(self, read: int | Reading) -> Any:
        return self._together(read) if isinstance(read, Reading) else self._table[read]

    def _together(self, wanted: Reading) -> Any:
        """The value, put together from the pieces that were written of it."""
        if self._is_late and wanted.foreign:
            # The pieces, not what is made of them here: those are the ones other streams may free.
            self._keep([self._table[number] for number in wanted.foreign])
        if wanted.in_row is not None:
            row = [self._table[number] for number in wanted.in_row]
            if all(piece is not None for piece in row):
                return torch.cat(row).requires_grad_(any(piece.requires_grad for piece in row))
        elif len(wanted.pieces) == 1:
            ((number, chunk_range),) = wanted.pieces
            if (
                (piece := self._table[number]) is None
                or chunk_range is None
                or wanted.chunk_range is None
            ):
                return piece
            return self._part(number, piece, chunk_range, wanted.chunk_range)
        whole: list[tuple[int, Any]] = []
        smaller: list[tuple[ChunkRange, int, Tensor]] = []
        found = [(n, chunk_range, self._table[n]) for n, chunk_range in wanted.pieces]
        for number, chunk_range, piece in found:
            if piece is None:
                continue
            if (
                wanted.chunk_range is None
                or chunk_range is None
                or chunk_range == wanted.chunk_range
            ):
                whole.append((number, piece))
                continue
            shared = chunk_range.shared_with(wanted.chunk_range)
            narrowed = self._part(number, piece, chunk_range, shared)
            if shared == wanted.chunk_range:
                whole.append((number, narrowed))
            else:
                smaller.append((shared, number, narrowed))
        if smaller:
            assert wanted.chunk_range is not None
            whole.append((max(n for _, n, _ in smaller), self._joined(smaller, wanted.chunk_range)))
        return _sum([piece for _, piece in sorted(whole, key=itemgetter(0))])

    def _part(
        self, number: int, piece: Tensor, chunk_range: ChunkRange, wanted: ChunkRange
    ) -> Tensor:
        """Of a piece by its place in the table. Where it falls into parts that are as long, one
        after another is read, and all are made at once."""
        width, length = wanted.stop - wanted.start, chunk_range.stop - chunk_range.start
        if width == length or length % width or (wanted.start - chunk_range.start) % width:
            return self._narrow(piece, chunk_range, wanted)
        parts = self._parts.get((number, width))
        if parts is None:
            starts = range(chunk_range.start, chunk_range.stop, width)
            lengths = [self._cut.length(ChunkRange(start, start + width)) for start in starts]
            made = piece.detach().split_with_sizes(lengths)
            for part in made if piece.requires_grad else ():
                part.requires_grad_()
            # Streams that come at once take from the same.
            parts = self._parts.setdefault((number, width), dict(zip(starts, made)))
        found = parts.pop(wanted.start, None)
        return self._narrow(piece, chunk_range, wanted) if found is None else found

    def _narrow(self, piece: Tensor, chunk_range: ChunkRange, wanted: ChunkRange) -> Tensor:
        if chunk_range == wanted:
            return piece
        start = self._cut.first(wanted) - self._cut.first(chunk_range)
        narrow = piece.detach().narrow(0, start, self._cut.length(wanted))
        return narrow.requires_grad_(piece.requires_grad)

    def _joined(self, pieces: list[tuple[ChunkRange, int, Tensor]], wanted: ChunkRange) -> Tensor:
        """Pieces of a chunk range where they belong; where several writers wrote the same tokens,
        their sum."""
        in_turn = sorted(pieces, key=itemgetter(0, 1))  # of their chunk ranges and writers
        ordered = [(chunk_range, piece.detach()) for chunk_range, _, piece in in_turn]
        like = ordered[0][1]
        joined = like.new_zeros(self._cut.length(wanted), *like.shape[1:])
        for chunk_range, piece in ordered:
            self._narrow(joined, wanted, chunk_range).add_(piece)
        return joined.requires_grad_(any(piece.requires_grad for _, _, piece in pieces))

    def _release(self, numbers: Iterable[int]) -> None:
        """Free what has been read for the last time."""
        with self._lock:
            for number in numbers:
                self._unread[number] -= 1
                if not self._unread[number]:
                    self._table[number] = None


def _want_gradient(thing: Any) -> None:
    """What is written, a tensor or a tuple, is differentiated where it can be."""
    for part in thing if isinstance(thing, tuple) else (thing,):
        if isinstance(part, Tensor) and part.is_floating_point():
            part.requires_grad_()


def _wants_gradient(read: Any) -> bool:
    if isinstance(read, tuple):
        return any(isinstance(part, Tensor) and part.requires_grad for part in read)
    return isinstance(read, Tensor) and read.requires_grad


def _sum(pieces: Sequence[Any]) -> Any:
    """Pieces of equal chunk range, added in the order of their writers; None where there is
    none."""
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
