# SPDX-License-Identifier: Apache-2.0
"""Hooks: what is done to the rows of a layer at the six places of FSMoE, who is notified of them
there, and what they travel as.

Where, in the way of one chunk; the two in brackets stand once around all chunks::

    [before_moe_start]  gate, order
    before_dispatch     all-to-all, gather of the ETP group      after_dispatch
    expert
    before_combine      scatter of the ETP group, all-to-all     after_combine
    restore             [before_moe_end]

In backward the same happens to gradients, which take the same way from behind: they are dispatched
to the experts and combined at the tokens, and the four hooks between are called in this order
(FSMoE's code; spec 1.2). Shape letters: T tokens, N rows sent, R rows received, G rows of an ETP
group, D model width.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.moe.codecs import BFloat16, Codec, Int8
from ds_moe_ext.moe.replica_memory import Codecs, replica_bytes
from ds_moe_ext.moe.transforms import (
    AFTER_COMBINE,
    AFTER_DISPATCH,
    BEFORE_COMBINE,
    BEFORE_DISPATCH,
    PLACES,
    Transform,
    Transforms,
    applied,
    placed,
)
from ds_moe_ext.older_names import accepts_older
from ds_moe_ext.planning.model_shape import ModelShape, OnItsWay
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.schedule.stages import Done, Saved, Stage
from ds_moe_ext.schedule.task import COMBINE, DISPATCH, ETP_GATHER, ETP_SCATTER, ChunkRange, Op
from ds_moe_ext.strict import check_object, found_at, named, read_record


class Moe(NamedTuple):
    number: int  # from 0, in the order of the model
    name: str = ""  # dotted module name; empty where no host has given one


@accepts_older
@dataclass(frozen=True, eq=False)
class Batch:
    """What is there at a hook."""

    # to be read, not written; no gradient goes through it. At the start and the end it is the
    # layer's input and output, ``[T, D]``; before dispatch a chunk's tokens, ``[T, D]``; between
    # dispatch and combine rows by expert, ``[R, D]``, or those of the whole ETP group, ``[G, D]``;
    # after combine rows in send order, ``[N, D]``. Gradients likewise, but ``[N, D]`` before
    # dispatch, and ``[T, D]`` after combine.
    data: Tensor
    # finest chunks that it is of; None at the start and the end
    chunk_range: ChunkRange | None = None
    is_backward: bool = False  # whether they are gradients


class Hooks:
    """Sees what goes through MoE layers; changes nothing. Derive from it and override any method.

    One object sees all layers, one call at a time; which thread calls, and in which order chunks
    come, is up to the schedule. On CUDA the call is made in the stream that owns the data: work on
    them in that stream, and do not wait for the device. Do not communicate. What is computed again
    (activation checkpointing) is seen again.
    """

    in_backward: bool = True  # whether the four hooks of the chunks see gradients too

    def before_moe_start_hook(self, moe: Moe, batch: Batch) -> None:
        """Once, before the gate (where the host has one: behind that, before order)."""

    def before_dispatch_hook(self, moe: Moe, batch: Batch) -> None:
        """Of each chunk, before its rows leave for the experts."""

    def after_dispatch_hook(self, moe: Moe, batch: Batch) -> None:
        """When they are there, on all ranks of the ETP group."""

    def before_combine_hook(self, moe: Moe, batch: Batch) -> None:
        """When the experts have computed."""

    def after_combine_hook(self, moe: Moe, batch: Batch) -> None:
        """When the rows are back."""

    def before_moe_end_hook(self, moe: Moe, batch: Batch) -> None:
        """Once, when every token has its output."""


CallbackBase = Hooks
"""FSMoE's name of it."""


class Hook(Enum):
    """Where hooks are called: the paper's name, and the method."""

    BEFORE_MOE_START = "before_moe_start_hook"
    BEFORE_DISPATCH = "before_dispatch_hook"
    AFTER_DISPATCH = "after_dispatch_hook"
    BEFORE_COMBINE = "before_combine_hook"
    AFTER_COMBINE = "after_combine_hook"
    BEFORE_MOE_END = "before_moe_end_hook"


_ONE_AT_A_TIME = threading.Lock()  # streams are threads, on a CPU


@dataclass(frozen=True)
class Hooked:
    """What a run's layers have at the six places.

    Raises:
        ValueError: two codecs for the same rows, or a transform without a place.
    """

    observers: tuple[Hooks, ...] = ()  # called in order
    # of rows that travel; one at most for each of dispatch and combine
    codecs: tuple[Codec, ...] = ()
    transforms: Transforms = ()  # of rows at the six places, in order

    def __post_init__(self) -> None:
        for transform in self.transforms:
            if transform.at not in PLACES:
                raise ValueError(
                    f"{transform} is at {transform.at!r}, which is not a place; choose "
                    f"{', '.join(map(repr, PLACES))}"
                )
        rows = {
            "dispatch": [codec for codec in self.codecs if codec.dispatch],
            "combine": [codec for codec in self.codecs if codec.combine],
        }
        for name, found in rows.items():
            if len(found) > 1:
                raise ValueError(
                    f"{' and '.join(map(str, found))} both encode the rows of {name}; set "
                    f"{name!r} to false in all but one of them"
                )
        experts = {
            "replicas": [codec for codec in self.codecs if codec.replicas],
            "replica_gradients": [codec for codec in self.codecs if codec.replica_gradients],
        }
        for key, found in experts.items():
            if len(found) > 1:
                raise ValueError(
                    f"{' and '.join(map(str, found))} have both {key}; set {key!r} to false in "
                    "all but one of them"
                )

    @property
    def of_dispatch(self) -> Codec | None:
        """What rows travel as to the experts."""
        return next((codec for codec in self.codecs if codec.dispatch), None)

    @property
    def of_combine(self) -> Codec | None:
        """And back."""
        return next((codec for codec in self.codecs if codec.combine), None)

    @property
    def of_gather(self) -> Codec | None:
        """What rows travel as in an ETP group that gathers them."""
        return next((codec for codec in self.codecs if codec.dispatch and codec.etp), None)

    @property
    def of_scatter(self) -> Codec | None:
        """And what its ranks computed of them."""
        return next((codec for codec in self.codecs if codec.combine and codec.etp), None)

    @property
    def of_replicas(self) -> Codec | None:
        """And replicas of experts."""
        return next((codec for codec in self.codecs if codec.replicas), None)

    @property
    def of_replica_gradients(self) -> Codec | None:
        """And their gradients on their way to the owner."""
        return next((codec for codec in self.codecs if codec.replica_gradients), None)

    @property
    def rule(self) -> str:
        """What observers may do, for a person; empty where there are none."""
        if not self.observers:
            return ""
        names = ", ".join(type(observer).__qualname__ for observer in self.observers)
        return (
            f"hooks: {names} may read and clone tensors; changing one in place raises an "
            "error, and communicating would make ranks wait for each other"
        )

    def notify(self, hook: Hook, moe: Moe, batch: Batch) -> None:
        """Call the observers.

        Raises:
            RuntimeError: one of them has changed the data.
        """
        for observer in self.observers:
            if batch.is_backward and not observer.in_backward:
                continue
            before = _version(batch.data)
            with _ONE_AT_A_TIME:
                methodcaller(hook.value, moe, batch)(observer)
            if _version(batch.data) != before:
                raise RuntimeError(
                    f"{type(observer).__qualname__}.{hook.value} has changed the data of layer "
                    f"{moe.number} {moe.name!r} in place; a hook only reads them: clone what you "
                    "want to change, or derive from ds_moe_ext.moe.transforms.Transform"
                )


NO_HOOKS = Hooked()


def _version(tensor: Tensor) -> int:
    """Counts changes in place, where torch counts them."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class HookedStage:
    """A stage with hooks before and behind it; of its adjoint too."""

    stage: Stage  # what is done
    hooks: Hooked  # who is notified
    moe: Moe  # the layer
    before: Hook | None = None  # notified of the first read of ``forward``
    after: Hook | None = None  # of what that writes
    before_adjoint: Hook | None = None  # of the gradient that ``backward`` gets
    after_adjoint: Hook | None = None  # of what that gives

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done:
        self._notify(self.before, reads[0], chunk_range)
        written, saved = self.stage.forward(chunk_range, *reads)
        self._notify(self.after, written[0], chunk_range)
        return written, saved

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        self._notify(self.before_adjoint, grads[0], chunk_range, is_backward=True)
        given = self.stage.backward(chunk_range, saved, *grads)
        self._notify(self.after_adjoint, given[0], chunk_range, is_backward=True)
        return given

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        return self.stage.recut(chunk_range, pieces)

    def _notify(
        self, hook: Hook | None, data: Tensor, chunk_range: ChunkRange, *, is_backward: bool = False
    ) -> None:
        if hook is not None:
            self.hooks.notify(hook, self.moe, Batch(data.detach(), chunk_range, is_backward))


_BEFORE, _ARRIVED = Hook.BEFORE_DISPATCH, Hook.AFTER_DISPATCH
_COMPUTED, _AFTER = Hook.BEFORE_COMBINE, Hook.AFTER_COMBINE

_OF_WHOLE = {
    DISPATCH: (_BEFORE, _ARRIVED, _COMPUTED, _AFTER),
    COMBINE: (_COMPUTED, _AFTER, _BEFORE, _ARRIVED),
}
_OF_SPLIT = {
    DISPATCH: (_BEFORE, None, None, _AFTER),
    ETP_GATHER: (None, _ARRIVED, _COMPUTED, None),
    ETP_SCATTER: (_COMPUTED, None, None, _ARRIVED),
    COMBINE: (None, _AFTER, _BEFORE, None),
}
"""By op: the hooks before and behind its stage, and before and behind that one's adjoint."""


def watched(stages: Mapping[Op, Stage], hooks: Hooked, moe: Moe) -> Mapping[Op, Stage]:
    """The stages that move rows, with hooks around them; none where nobody wants to be notified.

    Args:
        stages: of a layer. With those of an ETP group, rows have arrived once the group has
            gathered them.
        hooks: who is notified.
        moe: the layer.
    """
    if not hooks.observers:
        return {}
    around = _OF_SPLIT if ETP_GATHER in stages else _OF_WHOLE
    return {op: HookedStage(stages[op], hooks, moe, *where) for op, where in around.items()}


# Which of them a JSON list names.

Kind = Hooks | Codec | Transform
CODECS: Mapping[str, type[Kind]] = {"bf16": BFloat16, "int8": Int8}
"""By the name that JSON gives."""

EXAMPLE = "'my_package.my_module:MyHooks'"


def read_hooks(values: Any, where: str) -> Hooked:
    """Observers, codecs and transforms from a JSON list.

    Args:
        values: what ``json`` read: names, or objects with the name as ``type`` and beside it the
            keys of what is named, which are the fields of its dataclass.
        where: dotted name of the list, for errors.

    Raises:
        ValueError: something is no hook, has no such key or place, or two codecs are for the same
            rows.
    """
    if not isinstance(values, list):
        raise ValueError(f"{where} is {values!r}, but must be a list")
    found = [_read(value, f"{where}[{number}]") for number, value in enumerate(values)]
    observers = tuple(hook for hook in found if isinstance(hook, Hooks))
    codecs = tuple(hook for hook in found if isinstance(hook, Codec))
    transforms = tuple(hook for hook in found if isinstance(hook, Transform))
    try:
        return Hooked(observers, codecs, transforms)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read(value: Any, where: str) -> Kind:
    if isinstance(value, str):
        name, keys, where_name = value, {}, where
    else:
        check_object(where, value)
        keys, where_name = dict(value), f"{where}.type"
        if "type" not in keys:
            raise ValueError(
                f"{where} needs the key 'type'; add it: {', '.join(map(repr, CODECS))}, or "
                f"{EXAMPLE}"
            )
        name = keys.pop("type")
    own = f"; hooks of your own are {EXAMPLE}"
    cls = named(name, where_name, CODECS, _class_at, own)
    if dataclasses.is_dataclass(cls):
        return read_record(cls, keys, where)
    if keys:
        raise ValueError(
            f"{where} has no key {next(iter(keys))!r}; make {name} a dataclass: its fields are its "
            "JSON keys"
        )
    try:
        return cls()
    except TypeError as error:
        raise ValueError(
            f"{where} is {name!r}, which cannot be made ({error}); make it a dataclass: its fields "
            "are its JSON keys"
        ) from error


def _class_at(path: str, where: str) -> type[Kind]:
    cls = found_at(path, where, EXAMPLE)
    is_kind = isinstance(cls, type) and issubclass(cls, (Hooks, Codec, Transform))
    if not is_kind or inspect.isabstract(cls):
        raise ValueError(
            f"{where} is {path!r}, which is not a hook; derive it from "
            "ds_moe_ext.moe.hooks.Hooks, from ds_moe_ext.moe.codecs.Codec and let it encode "
            "and decode, or from ds_moe_ext.moe.transforms.Transform and let it have forward"
        )
    return cls


# What a row weighs on its way, by the hooks that change it, for planners and prices.


def row_bytes(hooks: Hooked, row_1D: Tensor) -> RowBytes:
    """Of rows like one that is given.

    Raises:
        ValueError: experts, or tokens, would get rows of other width or type than they have.
    """
    plain = float(row_1D.nbytes)
    if not hooks.codecs and not hooks.transforms:
        return RowBytes(plain, plain)
    there_1B = _on_its_way(hooks, row_1D, BEFORE_DISPATCH, AFTER_DISPATCH)
    back_1B = _on_its_way(hooks, row_1D, BEFORE_COMBINE, AFTER_COMBINE)
    of_dispatch, of_combine = hooks.of_dispatch, hooks.of_combine
    between = _mean(of_dispatch, there_1B) + _mean(of_combine, back_1B)
    # What ranks of an ETP group computed is transformed once it is added up.
    within = _mean(hooks.of_gather, there_1B) + _mean(hooks.of_scatter, row_1D)
    return RowBytes(between / 2, within / 2)


def _on_its_way(hooks: Hooked, row_1D: Tensor, before: str, after: str) -> Tensor:
    """The row between two places, ``[1, B]``."""
    leaves, comes = placed(hooks.transforms, before), placed(hooks.transforms, after)
    there_1B = applied(leaves, row_1D)
    back_1D = applied(comes, there_1B)
    if (back_1D.shape, back_1D.dtype) != (row_1D.shape, row_1D.dtype):
        names = " and ".join(map(str, (*leaves, *comes)))
        raise ValueError(
            f"hooks: by {names} rows of {row_1D.shape[1]} numbers in {row_1D.dtype} are "
            f"{back_1D.shape[1]} in {back_1D.dtype} behind {after}; they must be as they were "
            f"before {before}: add what makes them so to {before} or {after}"
        )
    return there_1B


def _mean(codec: Codec | None, row_1B: Tensor) -> float:
    if codec is None:
        return float(row_1B.nbytes)
    own = codec.encode(row_1B).nbytes
    return (own + (codec.encode_grad(row_1B) if codec.gradients else row_1B).nbytes) / 2


# What rows and replicas of a described model weigh on their way, by the hooks of its run.


DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def on_its_way(
    hooks: Hooked, shape: ModelShape, number_type: str, etp_size: int
) -> OnItsWay | None:
    """As a run would plan by.

    An expert is taken to have the weights of what it reads, gate and up, row by row of the model's
    width, and those of what it writes, row by row of its own: so most hosts have them.

    Args:
        hooks: of the run.
        shape: of the model.
        number_type: that it computes in.
        etp_size: ranks that split each expert.

    Returns:
        None where all travels as it is in memory.

    Raises:
        ValueError: as of ``row_bytes``.
    """
    if not hooks.codecs and not hooks.transforms:
        return None
    dtype, own_width = DTYPES[number_type], max(shape.expert_width // etp_size, 1)
    sizes = ((shape.products - 1) * own_width, shape.width), (shape.width, own_width)
    like = tuple(torch.empty((), dtype=dtype).expand(size) for size in sizes)  # without memory
    codecs = Codecs(hooks.of_replicas, hooks.of_replica_gradients)
    row_1D = torch.zeros(1, shape.width, dtype=dtype)
    return OnItsWay(row_bytes(hooks, row_1D), replica_bytes(like, codecs))
