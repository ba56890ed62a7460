"""Experts at the service of stripes, and the gradients that a step finds.

Shape letters: R rows received, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.schedule.task import Task
from ds_moe_ext.zebra.crossing import STRIPE, Met
from ds_moe_ext.zebra.random_state import RandomState


class TakesGradients(Protocol):
    """Where gradients of parameters go, stripe by stripe."""

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """One more."""
        ...


@dataclass(eq=False)
class GradientSums:
    """Gradients of parameters, summed over the stripes in their order."""

    _sums: dict[int, Tensor] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)  # whose sum is a buffer of ours

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """One more."""
        key = id(parameter)
        if key not in self._sums:
            self._sums[key] = grad
        elif key in self._own:
            self._sums[key] += grad
        else:
            self._sums[key] = self._sums[key] + grad
            self._own.add(key)

    def has(self, parameter: Tensor) -> bool:
        """Whether there is one."""
        return id(parameter) in self._sums

    def take(self, parameter: Tensor, factor: Tensor) -> Tensor | None:
        """The sum times a scalar, rounded once; None where there is none. It is forgotten."""
        total = self._sums.pop(id(parameter), None)
        if total is None:
            return None
        wide = torch.promote_types(total.dtype, torch.float32)
        if total.dtype == wide and id(parameter) in self._own:
            return total.mul_(factor.to(wide))
        return (total.to(wide) * factor.to(wide)).to(total.dtype)


@dataclass(frozen=True, eq=False)
class ExpertWork:
    """Rows through the experts of this rank.

    Attributes:
        experts: of each layer, its function.
        weights: of each layer's experts here, at present.
        sums: takes their gradients; None where there are none.
        recomputes: forward keeps its rows alone, and backward computes the rest again.
    """

    experts: Sequence[Expert]
    weights: Callable[[int], tuple[Tensor, ...]]
    sums: TakesGradients | None
    recomputes: bool = False

    def forward(
        self, task: Task, arrived_RD: Tensor, met: Met, _: Any
    ) -> tuple[tuple[Any, ...], Any]:
        weights = self.weights(task.layer)
        is_graded = self.sums is not None
        if not is_graded or self.recomputes:
            frozen = tuple(weight.detach() for weight in weights)
            expert = self.experts[task.layer]
            state = RandomState.now() if is_graded else None
            (computed_RD,), _ = expert.forward(STRIPE, arrived_RD.detach(), met.route, frozen)
            return (computed_RD,), (arrived_RD, met, state) if is_graded else None
        (computed_RD,), saved = self._run(task, arrived_RD, met, weights)
        return (computed_RD,), saved

    def backward(self, task: Task, saved: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        weights = self.weights(task.layer)
        if self.recomputes:
            arrived_RD, met, state = saved
            with state.again():
                _, saved = self._run(task, arrived_RD, met, weights)
        grad_rows_RD, grads = self.experts[task.layer].backward(STRIPE, saved, grad_RD)
        assert self.sums is not None
        for weight, grad in zip(weights, grads):
            if grad is not None:
                self.sums.add(weight, grad)
        return grad_rows_RD, None

    def _run(
        self, task: Task, arrived_RD: Tensor, met: Met, weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], Any]:
        rows_RD = arrived_RD.detach().requires_grad_()
        return self.experts[task.layer].forward(STRIPE, rows_RD, met.route, weights)
