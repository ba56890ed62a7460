# SPDX-License-Identifier: Apache-2.0
"""Which pass through a layer is the last before the optimizer's step, by the host's schedules.

They say how many micro-batches a step has. With a pipeline, passes of several micro-batches are
under way at once, so that forward and backward passes are counted by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ds_moe_ext.schedule.program import in_backward


@dataclass(eq=False)
class Schedules:
    """What the host's schedule is about to do; one for all layers.

    Attributes:
        num_micro_batches: of the present step; None where no schedule runs.
        latest: number of them in the latest step; it changes while batches grow.
        steps: schedules with a backward so far.
        losses: of the micro-batches of the present step, where this rank has any.
    """

    num_micro_batches: int | None = None
    latest: int = 1
    steps: int = 0
    losses: list[Tensor] = field(default_factory=list)

    def begin(self, num_micro_batches: int, *, forward_only: bool) -> None:
        """A schedule begins."""
        if not forward_only:
            self.num_micro_batches = self.latest = num_micro_batches
            self.steps += 1

    def end(self) -> None:
        """It has ended: of passes outside of it, nobody knows which is the last."""
        self.num_micro_batches = None


@dataclass(eq=False)
class Passes:
    """Counts the passes of one layer.

    Attributes:
        schedules: of the model.
    """

    schedules: Schedules
    _step: int = 0
    _forward: int = field(default=0)
    _backward: int = field(default=0)

    def begins(self, *, is_training: bool) -> None:
        """Call it as a forward pass begins."""
        self._turn()
        if is_training and not in_backward():
            self._forward += 1

    def watch(self, output: Tensor) -> None:
        """Call it with what a pass gives: its gradient begins the backward pass."""
        if output.requires_grad:
            output.register_hook(self._returns)

    def is_last(self) -> bool:
        """Whether the pass that runs is the last of its direction; yes, where nobody knows."""
        self._turn()
        number = self._backward if in_backward() else self._forward
        return self.schedules.num_micro_batches in (None, number)

    def _returns(self, grad: Tensor) -> None:
        self._turn()
        self._backward += 1

    def _turn(self) -> None:
        if self._step != self.schedules.steps:
            self._step, self._forward, self._backward = self.schedules.steps, 0, 0
