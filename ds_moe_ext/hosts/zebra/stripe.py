# SPDX-License-Identifier: Apache-2.0
"""A stripe on its attention rank: pieces that run by turns, and travel together.

Shape letters: T tokens, N rows sent, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.hosts.zebra.passage import Answer, Passage, Question
from ds_moe_ext.moe.route import Route
from ds_moe_ext.schedule.stages import Saved, Uncut
from ds_moe_ext.schedule.task import Span

IN_ORDER = (
    "; under strategy zebra every forward calls every layer once, in the order in which the model "
    "has them; leave a layer out with moe_layer_pattern"
)


@dataclass(eq=False)
class Stripe:
    """The pieces that travel together.

    Attributes:
        passages: one a piece.
        seeds: gradient of the loss of each.
    """

    passages: Sequence[Passage]
    seeds: Sequence[float]
    _lengths: dict[int, list[int]] = field(default_factory=dict)  # tokens of the pieces, by layer
    _rows: dict[int, list[Tensor]] = field(default_factory=dict)  # which of them are whose

    def forward(self, layer: int, returned: Answer | None) -> Question:
        """On to the experts of a layer."""
        asked = self._resumed(layer, returned)
        questions = [question for question in asked if question is not None]
        where = [question.layer for question in questions]
        if where != [layer] * len(asked):
            raise RuntimeError(
                f"the model called the experts of MoE layer {where or 'none'} where layer {layer} "
                f"was to come{IN_ORDER}"
            )
        self._lengths[layer] = [question.x_TD.shape[0] for question in questions]
        if len(questions) == 1:
            return questions[0]
        x_TD = torch.cat([question.x_TD for question in questions])
        return Question(layer, x_TD, torch.cat([question.expert_TK for question in questions]))

    def finish(self, layer: int, returned: Answer) -> None:
        """On to the end, behind the experts of the last layer.

        Args:
            layer: how many layers there are.
            returned: what its experts returned.
        """
        for question in self._resumed(layer, returned):
            if question is not None:
                raise RuntimeError(
                    f"the model called the experts of MoE layer {question.layer} behind those of "
                    f"all {layer}{IN_ORDER}"
                )

    def turn(self, layer: int, seeds: Sequence[float]) -> Tensor:
        """Backward from the losses to what the last layer's experts returned."""
        pairs = zip(self.passages, seeds)
        return self._joined(layer, [passage.turn(seed) for passage, seed in pairs])

    def backward(self, layer: int, grad_TD: Tensor) -> Tensor | None:
        """Backward of a layer's block, and on to what the experts before it returned."""
        parts = grad_TD.split(self._lengths[layer])
        found = [passage.backward(layer, grad) for passage, grad in zip(self.passages, parts)]
        grads = [grad for grad in found if grad is not None]
        return self._joined(layer - 1, grads) if grads else None

    def _resumed(self, layer: int, returned: Answer | None) -> list[Question | None]:
        answers = self._answers(layer - 1, returned)
        return [passage.forward(answer) for passage, answer in zip(self.passages, answers)]

    def _answers(self, layer: int, returned: Answer | None) -> Sequence[Answer | None]:
        if returned is None:
            return [None] * len(self.passages)
        lengths = self._lengths[layer]
        if len(lengths) == 1:
            return [returned]
        returned_ND, route = returned
        stops = np.cumsum(lengths).tolist()
        routes, self._rows[layer] = [], []
        for stop, length in zip(stops, lengths):
            own, rows = _within(route, stop - length, stop)
            routes.append(own)
            self._rows[layer].append(rows)
        return [
            Answer(returned_ND.index_select(0, rows), own)
            for rows, own in zip(self._rows[layer], routes)
        ]

    def _joined(self, layer: int, grads: Sequence[Tensor]) -> Tensor:
        """Gradients of rows in the order in which those of all pieces returned."""
        if len(grads) == 1:
            return grads[0]
        together = torch.cat(list(grads))
        return torch.empty_like(together).index_copy_(0, torch.cat(self._rows[layer]), together)


def _within(route: Route, start: int, stop: int) -> tuple[Route, Tensor]:
    """The route of some tokens alone, and which rows are theirs. Waits for the device."""
    rows = torch.nonzero((route.token_N >= start) & (route.token_N < stop)).flatten()
    own = replace(
        route,
        choice_N=route.choice_N[rows] - start * route.top_k,
        token_N=route.token_N[rows] - start,
        num_tokens=stop - start,
    )
    return own, rows


@dataclass(frozen=True, eq=False)
class StripeAttention(Uncut):
    """All that the model computes between two layers' experts.

    Attributes:
        layer: number of the second one.
        stripes: of this rank.
    """

    layer: int
    stripes: Sequence[Stripe]

    def forward(
        self, span: Span, _: Any, returned: Any, *rest: Any
    ) -> tuple[tuple[Any, ...], Saved]:
        question = self.stripes[span.start].forward(self.layer, returned)
        return (None, question), ()

    def backward(self, span: Span, saved: Saved, _: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        return None, self.stripes[span.start].backward(self.layer, grad_TD)


@dataclass(frozen=True, eq=False)
class StripeHead(Uncut):
    """What follows the last layer's experts, and the gradients of the losses.

    Attributes:
        num_layers: of the stack.
        stripes: of this rank.
    """

    num_layers: int
    stripes: Sequence[Stripe]

    def forward(
        self, span: Span, _: Any, returned: Any, *rest: Any
    ) -> tuple[tuple[Any, ...], Saved]:
        stripe = self.stripes[span.start]
        stripe.finish(self.num_layers, returned)
        return (tuple(stripe.seeds),), ()

    def backward(self, span: Span, saved: Saved, seeds: Sequence[float]) -> tuple[Any, ...]:
        return None, self.stripes[span.start].turn(self.num_layers - 1, seeds)
