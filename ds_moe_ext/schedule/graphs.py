# SPDX-License-Identifier: Apache-2.0
"""Passes of a program that are recorded once and then replayed: CUDA graphs.

For programs whose tensors have the same shapes in every pass. A forward and its backward are a
tape. It is in use from the one to the other, so that a layer has as many as it has batches under
way. What is computed is copied off the tape, which writes the same memory the next time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_moe_ext.schedule.cuda_graph import Recorded, Recorder, Tensors
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
from ds_moe_ext.watch import WATCH

WARM_UPS = 3
"""Passes of a kind before it is recorded: libraries choose and allocate in the first."""

MOST_KINDS = 8
"""Kinds of batches that are recorded: each takes memory of its own."""

MOST_MOVES = 3
"""How often in a row weights may have moved before what was recorded was replayed twice."""


class Told(Protocol):
    """Who is told on the host what a pass does."""

    def held(self) -> AbstractContextManager[list[Callable[[], None]]]:
        """What is told inside the block is not heard, but kept: to be called in each pass."""
        ...


@dataclass(eq=False)
class GraphUse:
    """A layer's training passes with gradients, for a person.

    Attributes:
        num_passes: in forward.
        num_replayed: of these.
        why_not: why the latest could not be that could not.
    """

    num_passes: int = 0
    num_replayed: int = 0
    why_not: str = ""

    @classmethod
    def of_all(cls, uses: Sequence[GraphUse]) -> GraphUse:
        """Of all layers."""
        return cls(
            sum(use.num_passes for use in uses),
            sum(use.num_replayed for use in uses),
            next((use.why_not for use in uses if use.why_not), ""),
        )

    def __str__(self) -> str:
        """A line; empty where nothing was to be replayed."""
        if not self.num_passes:
            return ""
        share = self.num_replayed / self.num_passes
        line = f"CUDA graphs: {share:.0%} of the MoE layers' training passes were replayed"
        return f"{line}. Others were not, as {self.why_not}" if self.why_not else line


@dataclass(frozen=True, eq=False)
class Graphs:
    """A program whose passes with gradients are replayed. Called as the program is.

    Attributes:
        program: whose tensors have the same shapes in every pass.
        recorder: of its device.
        told: who is told on the host what a pass does.
        key: what a person sets to have graphs, for errors.
        use: how often passes are replayed.
    """

    program: Program
    recorder: Recorder
    told: Told
    key: str
    use: GraphUse
    _kinds: dict[_Kind, _Kept] = field(default_factory=dict)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Takes and gives what the program does.

        Raises:
            ValueError: weights lie elsewhere in every pass.
            RuntimeError: a pass cannot be recorded.
        """
        flat, arity = flattened(inputs)
        if not is_graded(flat):
            return self.program(*inputs)
        self.use.num_passes += 1
        kind = _Kind.of(flat, arity)
        if why_not := self._why_not(kind):
            self._tell(why_not)
            return self.program(*inputs)
        if any(observer.is_on for observer in self.program.crew.observers):
            return self.program(*inputs)  # they are told of each task
        kept = self._kinds.setdefault(kind, _Kept())
        if kept.num_passes < WARM_UPS:
            kept.num_passes += 1
            return self.program(*inputs)
        comes = self._comes(arity)
        kept.look_at(_places(flat, comes))
        if kept.num_moves >= MOST_MOVES:
            raise self.moved()
        self.use.num_replayed += 1
        if kept.free:
            kept.has_replayed, tape = True, kept.free.pop()
        else:
            tape = _Tape(self, flat, arity, comes)
        outputs: tuple[Any, ...] = _Replay.apply(_Lease(tape, kept.free), *flat)
        return outputs

    def recorded(self, work: Callable[[], Tensors], after: Recorded | None = None) -> Recorded:
        """See ``Recorder.record``; an error says what to do."""
        try:
            with torch.no_grad():
                return self.recorder.record(work, after)
        except Exception as error:
            raise RuntimeError(
                f"{self._name} could not be recorded as a CUDA graph ({error}); leave {self.key} "
                "out"
            ) from error

    def moved(self) -> ValueError:
        """What is raised where weights do not stay where a graph reads them."""
        return ValueError(
            f"{self.key} is true, but weights of {self._name} lie elsewhere in every pass, where "
            "no graph finds them (as they do with adapters, or under ZeRO 3 where several ranks "
            "have the same experts); leave it out"
        )

    @property
    def _name(self) -> str:
        return self.program.crew.name or "this MoE layer"

    def _why_not(self, kind: _Kind) -> str:
        """Why a pass cannot be replayed, for a person; empty if it can."""
        if self.recorder.is_recording():
            return "they are recorded with what is around them"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return (
                "activation checkpointing or offloading wants to keep what they save, which a "
                f"graph has in memory of its own: leave {self.key} out, or them"
            )
        if kind not in self._kinds and len(self._kinds) == MOST_KINDS:
            return f"batches have more than {MOST_KINDS} shapes: pad them, or leave {self.key} out"
        return ""

    def _tell(self, why_not: str) -> None:
        """Let a person know of passes that run as ever, once of all layers."""
        if self.use.why_not != why_not:
            self.use.why_not = why_not
            warnings.warn(f"ds_moe_ext: passes are not replayed, as {why_not}", stacklevel=3)

    def _comes(self, arity: Arity) -> list[bool]:
        """Of each tensor, whether it comes with the tokens; else it is a weight, which stays."""
        values = zip(self.program.forward.inputs, arity)
        return [value.kind.by_token for value, size in values for _ in range(size or 1)]


class _Kind(NamedTuple):
    """What a tape is for.

    Attributes:
        arity: of the inputs.
        like: shape and type of each tensor, and whether it wants a gradient.
        cast: autocast's type; None where it is off.
    """

    arity: Arity
    like: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    cast: torch.dtype | None

    @classmethod
    def of(cls, flat: Sequence[Tensor], arity: Arity) -> _Kind:
        """Of a pass that comes."""
        device = flat[0].device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(arity, tuple((t.shape, t.dtype, t.requires_grad) for t in flat), cast)


@dataclass(eq=False)
class _Kept:
    """What there is of a kind.

    Attributes:
        num_passes: of it that warmed up.
        places: of the weights, where tapes read them.
        num_moves: in a row, of what was not replayed twice.
        has_replayed: something was, since the weights moved.
        free: tapes that nobody uses.
    """

    num_passes: int = 0
    places: tuple[int, ...] | None = None
    num_moves: int = 0
    has_replayed: bool = False
    free: list[_Tape] = field(default_factory=list)

    def look_at(self, places: tuple[int, ...]) -> None:
        """Forget the tapes if weights lie elsewhere now."""
        if places == self.places:
            return
        has_moved = self.places is not None and not self.has_replayed
        self.num_moves = self.num_moves + 1 if has_moved else 0
        self.places, self.has_replayed = places, False
        self.free = []  # another list: those in use come back to the one before


class _Tape:
    """A forward and its backward, once they are recorded.

    Args:
        graphs: whose.
        flat: inputs of the first pass.
        arity: of these.
        comes: which of them are others in each pass.
    """

    def __init__(
        self, graphs: Graphs, flat: Sequence[Tensor], arity: Arity, comes: Sequence[bool]
    ) -> None:
        self.program = graphs.program
        self._graphs, self._arity, self._comes = graphs, arity, comes
        self._stream = graphs.recorder.stream()
        self._inputs = [_like(t) if is_new else t for t, is_new in zip(flat, comes)]
        self._forward = graphs.recorded(self._ahead)
        self._backward: Recorded | None = None
        self._read_at: tuple[int, ...] = ()  # the weights, by backward
        self._grads = [
            torch.zeros_like(t) if t is not None and t.is_floating_point() else None
            for t in self._forward.outputs
        ]

    def _ahead(self) -> Tensors:
        inputs = grouped(self._inputs, self._arity)
        with self._graphs.told.held() as self._to_tell:
            outputs, self._cut, self._saved = self.program.ahead(inputs)
        return outputs

    def _back(self) -> Tensors:
        saved, self._saved = self._saved, []
        return tuple(self.program.back(self._cut, saved, self._grads, self._arity))

    def play(self, flat: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Forward's outputs, of inputs like those of the first pass."""
        self._follow()
        for own, given, comes in zip(self._inputs, flat, self._comes):
            if comes:
                own.copy_(given)
        WATCH.at(self.program.bound_forward.training[0])
        self._forward.replay()
        for tell in self._to_tell:
            tell()
        if WATCH.has_failed:  # in an earlier pass
            WATCH.went_through()
        return tuple(t.clone() for t in self._forward.outputs if t is not None)

    def play_back(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of its inputs."""
        self._follow()
        for own, grad in zip(self._grads, grads):
            if own is not None:
                own.copy_(grad)
        read_at = _places(self._inputs, self._comes)
        if self._backward is None:
            self._read_at = read_at
            self._backward = self._graphs.recorded(self._back, self._forward)
        elif read_at != self._read_at:  # a host may gather them anew for backward
            raise self._graphs.moved()
        WATCH.at(self.program.bound_backward.training[0])
        self._backward.replay()
        return [None if grad is None else grad.clone() for grad in self._backward.outputs]

    def _follow(self) -> None:
        """What it did last ends before it does more."""
        if (stream := self._graphs.recorder.stream()) != self._stream:
            self._graphs.recorder.follow(self._stream)
            self._stream = stream


def _places(flat: Sequence[Tensor], comes: Sequence[bool]) -> tuple[int, ...]:
    """Where the weights among these tensors lie."""
    return tuple(t.data_ptr() for t, is_new in zip(flat, comes) if not is_new)


def _like(tensor: Tensor) -> Tensor:
    own = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return own.requires_grad_(tensor.requires_grad)


class _Lease:
    """A tape in use; free again as soon as nobody holds this."""

    def __init__(self, tape: _Tape, free: list[_Tape]) -> None:
        self.tape, self._free = tape, free

    def __del__(self) -> None:
        self._free.append(self.tape)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lease: _Lease, *flat: Tensor) -> Any:
        outputs = lease.tape.play(flat)
        ctx.lease, ctx.program = lease, lease.tape.program
        describe(ctx, flat, outputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.lease is None:
            raise RuntimeError(ran_before(ctx.program))
        lease, ctx.lease = ctx.lease, None
        return None, *filled(lease.tape.play_back(grads), ctx)
