# SPDX-License-Identifier: Apache-2.0
"""Who does the tasks of a layer, and who sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ds_moe_ext.schedule.executor import Lanes, Mark
from ds_moe_ext.schedule.task import Op, Span, Task

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

    def issued(self, task: Task, seconds: float) -> None:
        """Told behind a pass whose tasks a device runs: what the host took to issue each of them,
        those of lane HOST apart."""
        ...


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
