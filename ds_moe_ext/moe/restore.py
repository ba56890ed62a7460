# SPDX-License-Identifier: Apache-2.0
"""Restore: the rows that came back, weighed by their scores, added to their tokens (I-Order).

Shape letters: T tokens, K choices a token, N rows sent, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext import kernels
from ds_moe_ext.moe.route import LayerRoute, Route
from ds_moe_ext.schedule.task import Span


@dataclass(frozen=True)
class Restore:
    """Weigh each returned row by its score and add it to its token.

    Reads rows ``[N, D]`` in send order, scores ``[T, K]`` and the route; writes ``[T, D]``.
    """

    def forward(
        self, span: Span, returned_ND: Tensor, score_TK: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        returned_ND, score_TK = returned_ND.detach(), score_TK.detach()
        y_TD = layer_route.on(span).sum_by_token(returned_ND, score_TK)
        return (y_TD,), (returned_ND, score_TK, layer_route)

    def backward(
        self, span: Span, saved: tuple[Any, ...], grad_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        returned_ND, score_TK, layer_route = saved
        return weighing_grads(layer_route.on(span), returned_ND, score_TK, grad_TD)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        layer_route: LayerRoute = pieces[0][1][2]
        cut, route = layer_route.cut, layer_route.on(span)
        start = cut.first(span) - cut.first(pieces[0][0])
        y = torch.cat([layer_route.on(other).spread(saved[0]) for other, saved in pieces])
        y_TKD = y.narrow(0, start, route.num_tokens)
        score = torch.cat([saved[1] for _, saved in pieces]).narrow(0, start, route.num_tokens)
        return y_TKD.flatten(0, 1).index_select(0, route.choice_N), score, layer_route


def weighing_grads(
    route: Route, returned_ND: Tensor, score_TK: Tensor, grad_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``route.sum_by_token``: of rows ``[N, D]`` and of their weights ``[T, K]``."""
    is_indexed = route.is_indexed and route.visits is None
    if is_indexed and kernels.has_kernels(returned_ND, score_TK, grad_TD):
        places = route.token_N, route.choice_N
        return kernels.sums_by_token_grads(
            returned_ND, *places, score_TK, grad_TD, is_full=route.is_full
        )
    grad_ND = route.of_tokens(grad_TD)
    grad_score_N = torch.sum(returned_ND * grad_ND, dim=1, dtype=score_TK.dtype)
    # In place: the product is rounded once, and never there in the scores' precision.
    grad_ND *= route.of_choices(score_TK)[:, None]
    return grad_ND, route.spread(grad_score_N)
