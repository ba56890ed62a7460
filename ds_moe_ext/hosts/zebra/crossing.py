# SPDX-License-Identifier: Apache-2.0
"""Rows between attention ranks and expert ranks, stripe by stripe. See ``schedule/stripes.py``.

What is done is done by the stages of the layer; here they are laid to the tasks of a step, where a
rank may have no tokens, or no experts. Shape letters: T tokens, N rows sent, R rows received, D
model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.hosts.zebra.passage import Answer, Question
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.stages import Saved, Stage, Uncut
from ds_moe_ext.schedule.task import Span

STRIPE = Span(0, 1)  # of a stripe all tokens travel at once


@dataclass(frozen=True, eq=False)
class StripeDispatch(Uncut):
    """Rows to the experts; before, all ranks learn how many. Reads a ``Question`` or nothing.

    Attributes:
        order: of the layer.
        dispatch: likewise.
        device: of the rows.
        is_graded: gradients will come.
        tell: what rows are like.
    """

    order: Stage
    dispatch: Stage
    device: torch.device
    is_graded: bool
    tell: Callable[[Tensor], None]

    def forward(self, span: Span, question: Question | None) -> tuple[tuple[Any, ...], Saved]:
        if question is None:
            nothing = torch.zeros(0, 1, dtype=torch.int64, device=self.device)
            (route,), _ = self.order.forward(STRIPE, nothing)
            x_TD = route.none_0D
        else:
            x_TD = question.x_TD
            (route,), _ = self.order.forward(STRIPE, question.expert_TK, x_TD)
        self.tell(x_TD)
        (arrived_RD,), saved = self.dispatch.forward(STRIPE, x_TD, route)
        # Whether the other side wants gradients nobody knows here; it takes them in any case.
        return (arrived_RD.requires_grad_(self.is_graded), route), saved

    def backward(
        self, span: Span, saved: Saved, grad_RD: Tensor | None, route: LayerRoute
    ) -> tuple[Any, ...]:
        return self.dispatch.backward(STRIPE, saved, _or_none(grad_RD, route))


@dataclass(frozen=True, eq=False)
class StripeCombine(Uncut):
    """Rows of experts back to their tokens, with how they were sent: an ``Answer``."""

    combine: Stage

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], Saved]:
        *computed, route = reads
        own_RD = next((rows for rows in computed if rows is not None), None)
        (returned_ND,), saved = self.combine.forward(STRIPE, _or_none(own_RD, route), route)
        own = route.on(STRIPE)
        if own.is_full:
            _ = own.row_N  # made in this lane, in which the adjoint of the dispatch reads it
        return (Answer(returned_ND, own),), (len(computed), *saved)

    def backward(
        self, span: Span, saved: Saved, grad_ND: Tensor | None, route: LayerRoute
    ) -> tuple[Any, ...]:
        grads = self.combine.backward(STRIPE, saved[1:], _or_none(grad_ND, route))
        return grads * int(saved[0])


def _or_none(rows: Tensor | None, route: LayerRoute) -> Tensor | None:
    """Rows that the other side has are none here."""
    return route.none_0D if rows is None else rows
