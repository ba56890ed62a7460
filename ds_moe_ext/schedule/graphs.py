# SPDX-License-Identifier: Apache-2.0
"""Passes of a program that are recorded once and then replayed: CUDA graphs.

A graph reads memory of its own, or such as stays, and nobody waits for it. ``Graphs`` is called as
its program is. Passes of one kind (shapes, types) share tapes: a tape is a forward and its backward
as they were recorded, and serves one pass at a time. ``Recorder`` is what records on a device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ds_moe_ext.schedule.program import (
    Arity,
    Program,
    describe,
    filled,
    flattened,
    grouped,
    is_graded,
    ran_before,
)
from ds_moe_ext.schedule.watch import WATCH

Made = TypeVar("Made", bound=Callable[..., Tensor])


class NotInGraphs(RuntimeError):
    """What a pass does cannot be recorded; says why, for a person."""


def is_captured() -> bool:
    """Whether what the caller issues to a GPU becomes a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def remembered(most: int) -> Callable[[Made], Made]:
    """A function gives again what it made for these arguments, up to ``most`` tensors; but makes a
    new one while a graph is captured: what a graph reads must not be forgotten."""

    def around(make: Made) -> Made:
        known = lru_cache(most)(make)

        @wraps(make)
        def given(*args: Hashable) -> Tensor:
            return (make if is_captured() else known)(*args)

        return cast(Made, given)

    return around


Tensors = tuple[Tensor | None, ...]


class Recorded(Protocol):
    """Work that a device can be asked to do again."""

    @property
    def outputs(self) -> Tensors:
        """What it writes, each time into the same memory."""
        ...

    def replay(self) -> None: ...


class Recorder(Protocol):
    def is_recording(self) -> bool:
        """Whether somebody does, around the caller."""
        ...

    def stream(self) -> object: ...

    def follow(self, stream: Any) -> None:
        """Let what the caller issues from now on come behind all that a stream was given."""
        ...

    def record(self, work: Callable[[], Tensors], after: Any = None) -> Recorded:
        """Record what a call issues to the device. Nothing of it is done before a replay.

        Args:
            work: called once; returns what it writes.
            after: what was recorded of the same recorder, and is replayed before this each time:
                memory that it has freed may be taken.
        """
        ...


@dataclass(frozen=True, eq=False)
class CudaGraph:
    graph: torch.cuda.CUDAGraph
    outputs: Tensors

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class CudaRecorder:
    device: torch.device  # of the work

    def is_recording(self) -> bool:
        return is_captured()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def follow(self, stream: Any) -> None:
        self.stream().wait_stream(stream)

    def record(self, work: Callable[[], Tensors], after: Any = None) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        pool = None if after is None else after.graph.pool()
        aside = _aside(self.device)
        aside.wait_stream(self.stream())
        # Not by ``torch.cuda.graph``, which waits for all of the device: other ranks may wait for
        # what this one sends behind it.
        with torch.cuda.stream(aside):
            # Of this thread alone: NCCL's own asks events meanwhile, which is refused to all else.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                with suppress(RuntimeError):  # that it is spoilt
                    graph.capture_end()
                raise
            graph.capture_end()
        return CudaGraph(graph, outputs)


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Where graphs of a device are captured."""
    return torch.cuda.Stream(device)


def recorder_for(device: torch.device) -> Recorder | None:
    """What records there; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


WARM_UPS = 3
"""Passes of a kind, there and back, before it is recorded: libraries choose and allocate in the
first, in the thread that runs it."""

MOST_KINDS = 8
"""Kinds of batches that are recorded: each takes memory of its own."""

MOST_MOVES = 3
"""Passes in a row whose weights may lie elsewhere than in the one before."""


class Hearer(Protocol):
    """Who is notified on the host of what a pass does."""

    def held(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """What is reported inside the block is not heard, but kept: to be called in each pass."""
        ...


@dataclass(eq=False)
class GraphUse:
    """A layer's training passes with gradients, for a person."""

    num_passes: int = 0  # in forward
    num_replayed: int = 0  # of these
    why_not: str = ""  # why the latest could not be that could not

    @classmethod
    def of_all(cls, uses: Sequence[GraphUse]) -> GraphUse:
        return cls(
            sum(use.num_passes for use in uses),
            sum(use.num_replayed for use in uses),
            next((use.why_not for use in uses if use.why_not), ""),
        )

    def __str__(self) -> str:
        """A line; empty where nothing was to be replayed."""
        if not self.num_passes:
            return ""
        line = (
            f"CUDA graphs: of {self.num_passes:,} training passes of MoE layers "
            f"{self.num_replayed:,} were replayed"
        )
        return (
            (f"{line}; others could not be replayed, because {self.why_not}")
            if self.why_not
            else line
        )


@dataclass(frozen=True, eq=False)
class Replayed:
    """What is replayed, and by what. Tapes know this and not ``Graphs``, which holds them: memory
    of the device would wait for Python to find the circle."""

    program: Program  # whose tensors have the same shapes in every pass
    recorder: Recorder  # of its device
    hearer: Hearer  # who is notified on the host of what a pass does
    key: str  # what a person sets to have graphs, for errors

    def record(self, work: Callable[[], Tensors], after: Recorded | None = None) -> Recorded:
        """See ``Recorder.record``; an error says what to do.

        Raises:
            NotInGraphs: forward cannot be recorded, and may run as ever.
            RuntimeError: it failed.
        """
        try:
            with torch.no_grad():
                return self.recorder.record(work, after)
        except Exception as error:
            if isinstance(error, NotInGraphs) and after is None:  # nothing was done yet
                raise
            raise RuntimeError(
                f"{self.name} could not be recorded as a CUDA graph ({error}); leave {self.key} out"
            ) from error

    def moved(self) -> ValueError:
        """What is raised where weights do not stay where a graph reads them."""
        return ValueError(
            f"{self.key} is true, but weights of {self.name} lie elsewhere in every pass, where "
            "no graph finds them (as they do with adapters, or under ZeRO 3 where several ranks "
            "have the same experts); leave it out"
        )

    @property
    def name(self) -> str:
        return self.program.layer_stages.name or "this MoE layer"


@dataclass(frozen=True, eq=False)
class Graphs:
    """A program whose passes with gradients are replayed. Called as the program is."""

    replayed: Replayed  # the program, and what replays it
    use: GraphUse  # how often passes are replayed
    _kinds: dict[_Kind, _Tapes] = field(default_factory=dict)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Takes and gives what the program does.

        Raises:
            ValueError: weights lie elsewhere in every pass.
            RuntimeError: a pass cannot be recorded.
        """
        flat, arity = flattened(inputs)
        program = self.replayed.program
        if not is_graded(flat):
            return program(*inputs)
        self.use.num_passes += 1
        kind = _Kind.of(flat, arity)
        tapes = self._kinds.get(kind)
        if why_not := self._why_not(tapes):
            self._warn(why_not)
            return program(*inputs)
        if any(observer.is_on for observer in program.layer_stages.observers):
            return program(*inputs)  # they are notified of each task
        if tapes is None:
            # What comes with the tokens is another in each pass; the rest are weights, which stay.
            values = zip(program.forward.inputs, arity)
            by_token = [value.kind.by_token for value, size in values for _ in range(size or 1)]
            tapes = self._kinds[kind] = _Tapes(by_token)
        if tapes.num_backwards < WARM_UPS:
            return tapes.warm(program(*inputs))
        is_input = tapes.is_input
        tapes.look_at(_places(_weights(flat, is_input)))
        if tapes.num_moves >= MOST_MOVES:
            raise self.replayed.moved()
        try:
            tape = tapes.free.pop() if tapes.free else _Tape(self.replayed, flat, arity, is_input)
        except NotInGraphs as error:
            tapes.why_not = str(error)
            self._warn(tapes.why_not)
            return program(*inputs)
        self.use.num_replayed += 1
        outputs: tuple[Any, ...] = _Replay.apply(_TapeInUse(tape, tapes.free), *flat)
        return outputs

    def _why_not(self, tapes: _Tapes | None) -> str:
        """Why a pass of a kind that has these cannot be replayed, for a person; empty if it can."""
        key = self.replayed.key
        if self.replayed.recorder.is_recording():
            return "they are recorded with what is around them"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return (
                "activation checkpointing or offloading wants to keep what they save, which a "
                f"graph has in memory of its own: leave {key} out, or them"
            )
        if tapes is not None:
            return tapes.why_not
        if len(self._kinds) == MOST_KINDS:
            return f"batches have more than {MOST_KINDS} shapes: pad them, or leave {key} out"
        return ""

    def _warn(self, why_not: str) -> None:
        """Let a person know of passes that run as ever, once of all layers."""
        if self.use.why_not != why_not:
            self.use.why_not = why_not
            warnings.warn(f"ds_moe_ext: passes are not replayed, because {why_not}", stacklevel=3)


class _Kind(NamedTuple):
    arity: Arity  # of the inputs
    # shape and type of each tensor, and whether it wants a gradient
    like: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    cast: torch.dtype | None  # autocast's type; None where it is off

    @classmethod
    def of(cls, flat: Sequence[Tensor], arity: Arity) -> _Kind:
        device = flat[0].device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(arity, tuple((t.shape, t.dtype, t.requires_grad) for t in flat), cast)


@dataclass(eq=False)
class _Tapes:
    is_input: Sequence[bool]  # which tensors are others in each pass; the rest are weights
    num_backwards: int = 0  # that began, of passes that warmed up
    why_not: str = ""  # why there can be none, for a person; empty if there can
    places: tuple[int, ...] | None = None  # of the weights, where tapes read them
    num_moves: int = 0  # passes in a row whose weights had moved
    free: list[_Tape] = field(default_factory=list)  # those that nobody uses

    def warm(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs of a pass that is not recorded, whose backward is counted if it comes."""

        def began(grad: Tensor) -> None:
            self.num_backwards += 1

        if outputs[0].requires_grad:
            outputs[0].register_hook(began)
        return outputs

    def look_at(self, places: tuple[int, ...]) -> None:
        """Forget the tapes if weights lie elsewhere now."""
        if places == self.places:
            self.num_moves = 0
            return
        self.num_moves += self.places is not None
        self.places = places
        self.free = []  # another list: those in use come back to the one before


class _Tape:
    """A forward and its backward, once they are recorded."""

    def __init__(
        self, replayed: Replayed, flat: Sequence[Tensor], arity: Arity, is_input: Sequence[bool]
    ) -> None:
        self.program = replayed.program
        self._replayed, self._arity, self._is_input = replayed, arity, is_input
        self._stream = replayed.recorder.stream()
        # Inputs of its own, of zeros: what records may run it.
        self._inputs = [
            torch.zeros(t.shape, dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
            if is_new
            else t
            for t, is_new in zip(flat, is_input)
        ]
        self._weights = _weights(flat, is_input)
        self._places, self._versions = _places(self._weights), _versions(self._weights)
        self._forward = replayed.record(self._ahead)
        self._backward: Recorded | None = None
        self._grads = [
            torch.zeros_like(t) if t is not None and t.is_floating_point() else None
            for t in self._forward.outputs
        ]

    def _ahead(self) -> Tensors:
        inputs = grouped(self._inputs, self._arity)
        with self._replayed.hearer.held() as self._to_notify:
            outputs, self._cut, self._saved = self.program.ahead(inputs)
        return outputs

    def _back(self) -> Tensors:
        saved, self._saved = self._saved, []
        return tuple(self.program.back(self._cut, saved, self._grads, self._arity))

    def play(self, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Forward's outputs, of inputs like those of the first pass."""
        self._follow()
        for own, given, is_new in zip(self._inputs, flat, self._is_input):
            if is_new:
                own.copy_(given)
        self._versions = _versions(self._weights)
        WATCH.at(self.program.bound_forward.training[0])
        self._forward.replay()
        for notify in self._to_notify:
            notify()
        if WATCH.has_failed:  # in an earlier pass
            WATCH.went_through()
        return tuple(t.clone() for t in self._forward.outputs if t is not None)

    def play_back(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        if _places(self._weights) != self._places:
            raise self._replayed.moved()
        if _versions(self._weights) != self._versions:
            raise RuntimeError(
                f"weights of {self._replayed.name} have changed between forward and backward, "
                "which needs those of forward; take the optimizer's step after backward"
            )
        self._follow()
        for own, grad in zip(self._grads, grads):
            if own is not None:
                own.copy_(grad)
        if self._backward is None:
            self._backward = self._replayed.record(self._back, self._forward)
        WATCH.at(self.program.bound_backward.training[0])
        self._backward.replay()
        return [None if grad is None else grad.clone() for grad in self._backward.outputs]

    @property
    def is_whole(self) -> bool:
        """Whether it can be used again: not if its backward could not be recorded."""
        return self._backward is not None or bool(self._saved)

    def _follow(self) -> None:
        """What it did last ends before it does more."""
        if (stream := self._replayed.recorder.stream()) != self._stream:
            self._replayed.recorder.follow(self._stream)
            self._stream = stream


def _weights(flat: Sequence[Tensor], is_input: Sequence[bool]) -> list[Tensor]:
    """Of a pass's tensors those that stay."""
    return [t for t, is_new in zip(flat, is_input) if not is_new]


def _places(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in weights)


def _versions(weights: Sequence[Tensor]) -> list[int]:
    """How often each has been changed in place."""
    return [t._version for t in weights]


class _TapeInUse:
    """A tape in use; free again as soon as nobody holds this."""

    def __init__(self, tape: _Tape, free: list[_Tape]) -> None:
        self.tape, self._free = tape, free

    def __del__(self) -> None:
        if self.tape.is_whole:
            self._free.append(self.tape)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_use: _TapeInUse, *flat: Tensor) -> Any:
        outputs = in_use.tape.play(flat)
        ctx.in_use, ctx.program = in_use, in_use.tape.program
        describe(ctx, flat, outputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.in_use is None:
            raise RuntimeError(ran_before(ctx.program.name))
        in_use, ctx.in_use = ctx.in_use, None
        return None, *filled(in_use.tape.play_back(grads), ctx)
