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

import threading
from dataclasses import dataclass
from enum import Enum
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

from ds_moe_ext.older_names import accepts_older
from ds_moe_ext.schedule.task import ChunkRange

if TYPE_CHECKING:  # settings are read where nothing runs, too, and without torch
    from torch import Tensor

    from ds_moe_ext.moe.codecs import Codec
    from ds_moe_ext.moe.transforms import Transforms


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
            from ds_moe_ext.moe.transforms import PLACES  # with torch

            if transform.at not in PLACES:
                raise ValueError(
                    f"{transform} is at {transform.at!r}, which is not a place; choose "
                    f"{', '.join(map(repr, PLACES))}"
                )
        for key, both in (
            ("dispatch", "both encode the rows of dispatch"),
            ("combine", "both encode the rows of combine"),
            ("replicas", "have both replicas"),
            ("replica_gradients", "have both replica_gradients"),
        ):
            found = [str(codec) for codec in self.codecs if getattr(codec, key)]
            if len(found) > 1:
                raise ValueError(
                    f"{' and '.join(found)} {both}; set {key!r} to false in all but one of them"
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
