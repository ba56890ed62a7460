# SPDX-License-Identifier: Apache-2.0
"""Each token's row is sent once to a cell: stages that take the place of the common ones.

Order tells each cell, beside the counts, which visit each of its rows is of and its score; rows are
weighed and summed at the experts, and one row a visit comes home. Dispatch is the common one, by
such a route. Shape letters: T tokens, K choices a token, N rows by choices, R rows at the experts,
U visits that leave, V visits that arrive, D model width. ``visits.py`` says what a visit is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.moe.dispatch import Wire
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.crew import SavesAlike, Stage
from ds_moe_ext.schedule.task import Span


@dataclass(frozen=True)
class OrderOnce(SavesAlike):
    """Reads expert ids and scores ``[T, K]``; writes the route, and the scores of the rows at this
    cell's experts, ``[R]`` in slot order.

    Attributes:
        order: the common stage, told to count visits.
        wire: straight from each cell to each, with rows as they are.
    """

    order: Stage
    wire: Wire

    def forward(
        self, span: Span, expert_TK: Tensor, score_TK: Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (counted,), _ = self.order.forward(span, expert_TK)
        parts = counted.visits.number_TK(), score_TK.detach()
        told_XB = torch.cat([_bytes(part) for part in parts], dim=1)
        told_NB = told_XB.index_select(0, counted.on(span).choice_N)
        told_RB = self.wire.out(told_NB, span, counted)
        sizes = [part.itemsize for part in parts]
        visit_R, score_R = map(_of_bytes, told_RB.split(sizes, dim=1), parts)
        return (counted.told(visit_R), score_R), (counted,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_R: Tensor) -> tuple[Any, ...]:
        (counted,) = saved
        grad_N1 = self.wire.home(grad_R[:, None], span, counted)
        return (counted.on(span).spread(grad_N1).squeeze(2),)


def _bytes(values: Tensor) -> Tensor:
    """uint8 ``[elements, bytes of each]``."""
    return values.contiguous().view(-1, 1).view(torch.uint8)


def _of_bytes(bytes_RB: Tensor, like: Tensor) -> Tensor:
    """What ``_bytes`` was made of, ``[R]``."""
    # A copy: a view of a part need not begin where a wider type may.
    own_RB = bytes_RB.clone(memory_format=torch.contiguous_format)
    return own_RB.view(like.dtype).squeeze(1)


@dataclass(frozen=True)
class CombineOnce:
    """Reads expert outputs ``[R, D]`` in slot order, the scores of the layer's rows, and the route;
    writes the weighed sum of each visit, ``[U, D]`` in send order."""

    wire: Wire
    back_wire: Wire

    def forward(
        self, span: Span, computed_RD: Tensor, score_R: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        computed_RD, score_R = computed_RD.detach(), score_R.detach()
        own_R = layer_route.of_span(span, score_R)
        returned_UD = self.wire.home(computed_RD, span, layer_route, own_R)
        return (returned_UD,), (computed_RD, score_R, layer_route)

    def backward(
        self, span: Span, saved: tuple[Any, ...], grad_UD: Tensor
    ) -> tuple[Tensor, Tensor]:
        computed_RD, score_R, layer_route = saved
        grad_RD = self.back_wire.out(grad_UD, span, layer_route)
        grad_score_R = torch.sum(computed_RD * grad_RD, dim=1, dtype=score_R.dtype)
        # In place: the product is rounded once, and never there in the scores' precision.
        grad_RD *= layer_route.of_span(span, score_R)[:, None]
        return grad_RD, layer_route.among_all(span, grad_score_R)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        _, score_R, layer_route = pieces[0][1]
        computed = [(other, saved[0]) for other, saved in pieces]
        return layer_route.own_rows_of(span, computed), score_R, layer_route


@dataclass(frozen=True)
class RestoreOnce(SavesAlike):
    """Add the visits' sums, which came weighed, to their tokens: ``[U, D]`` to ``[T, D]``."""

    def forward(
        self, span: Span, returned_UD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (layer_route.on(span).sum_by_token(returned_UD.detach()),), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_TD: Tensor) -> tuple[Any, ...]:
        return (saved[0].on(span).of_tokens(grad_TD),)
