# SPDX-License-Identifier: Apache-2.0
"""Stages with hooks around them, hooks by their JSON names, and what rows weigh by them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.moe.codecs import BFloat16, Codec, Int8
from ds_moe_ext.moe.hooks import Batch, Hook, Hooked, Hooks, Moe
from ds_moe_ext.moe.replica_memory import Codecs, replica_bytes
from ds_moe_ext.moe.transforms import (
    AFTER_COMBINE,
    AFTER_DISPATCH,
    BEFORE_COMBINE,
    BEFORE_DISPATCH,
    Transform,
    applied,
    placed,
)
from ds_moe_ext.planning.model_shape import ModelShape, OnItsWay
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.schedule.stages import Done, Saved, Stage
from ds_moe_ext.schedule.task import COMBINE, DISPATCH, ETP_GATHER, ETP_SCATTER, ChunkRange, Op
from ds_moe_ext.strict import check_object, found_at, named, read_record


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
