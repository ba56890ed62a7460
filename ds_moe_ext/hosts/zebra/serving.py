# SPDX-License-Identifier: Apache-2.0
"""Experts at the service of stripes, and the gradients that a step finds.

Shape letters: R rows received, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_moe_ext.hosts.zebra.crossing import STRIPE
from ds_moe_ext.hosts.zebra.random_state import RandomState
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.executor import lanes_for
from ds_moe_ext.schedule.stages import Saved, Stage, Uncut
from ds_moe_ext.schedule.task import Span


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
            first = self._sums[key]
            lanes_for(first.device, overlaps=True).keep((first,))  # another may have made it
            self._sums[key] = first + grad
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
class StripeExpert(Uncut):
    """Rows of a stripe through the experts of this rank.

    Attributes:
        expert: of the layer.
        sums: takes the gradients of its weights, stripe by stripe; None where there are none.
        recomputes: forward keeps its rows alone, and backward computes the rest again.
        is_joined: its weights are joined from homes and copies; so their gradients go there.
    """

    expert: Stage
    sums: TakesGradients | None
    recomputes: bool = False
    is_joined: bool = False

    def forward(
        self, span: Span, rows_RD: Tensor, route: LayerRoute, weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], Saved]:
        if self.sums is None or not self.recomputes:
            written, saved = self.expert.forward(STRIPE, rows_RD, route, weights)
            return written, (weights, *saved)
        state, frozen = RandomState.now(), tuple(weight.detach() for weight in weights)
        written, _ = self.expert.forward(STRIPE, rows_RD.detach(), route, frozen)
        return written, (weights, rows_RD, route, state)

    def backward(self, span: Span, saved: Saved, grad_RD: Tensor) -> tuple[Any, ...]:
        weights, kept = saved[0], saved[1:]
        if self.recomputes:
            rows_RD, route, state = kept
            with state.again():
                _, kept = self.expert.forward(STRIPE, rows_RD, route, weights)
        grad_rows_RD, grads = self.expert.backward(STRIPE, kept, grad_RD)
        if self.is_joined:
            return grad_rows_RD, grads
        assert self.sums is not None
        for weight, grad in zip(weights, grads):
            if grad is not None:
                self.sums.add(weight, grad)
        return (grad_rows_RD,)
