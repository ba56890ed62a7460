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

from ds_moe_ext.moe.route import Route
from ds_moe_ext.schedule.task import Task
from ds_moe_ext.zebra.crossing import STRIPE, Met
from ds_moe_ext.zebra.passage import Answer, Passage, Question

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

    def forward(self, layer: int, returned: tuple[Tensor, Met] | None) -> Question:
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

    def finish(self, layer: int, returned: tuple[Tensor, Met]) -> None:
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

    def turn(self, layer: int) -> Tensor:
        """Backward from the losses to what the last layer's experts returned."""
        pairs = zip(self.passages, self.seeds)
        return self._joined(layer, [passage.turn(seed) for passage, seed in pairs])

    def backward(self, layer: int, grad_TD: Tensor) -> Tensor | None:
        """Backward of a layer's block, and on to what the experts before it returned."""
        parts = grad_TD.split(self._lengths[layer])
        found = [passage.backward(layer, grad) for passage, grad in zip(self.passages, parts)]
        grads = [grad for grad in found if grad is not None]
        return self._joined(layer - 1, grads) if grads else None

    def _resumed(self, layer: int, returned: tuple[Tensor, Met] | None) -> list[Question | None]:
        answers = self._answers(layer - 1, returned)
        return [passage.forward(answer) for passage, answer in zip(self.passages, answers)]

    def _answers(self, layer: int, returned: tuple[Tensor, Met] | None) -> Sequence[Answer | None]:
        if returned is None:
            return [None] * len(self.passages)
        returned_ND, met = returned
        route = met.route.on(STRIPE)
        lengths = self._lengths[layer]
        if len(lengths) == 1:
            return [Answer(returned_ND, route)]
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
class AttentionWork:
    """All that the model computes between two layers' experts."""

    stripes: Sequence[Stripe]

    def forward(self, task: Task, *reads: Any) -> tuple[tuple[Any, ...], Any]:
        returned = reads[1] if task.layer else None
        return (None, self.stripes[task.span.start].forward(task.layer, returned)), None

    def backward(self, task: Task, saved: Any, _: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        grad_ND = self.stripes[task.span.start].backward(task.layer, grad_TD)
        return (None, grad_ND, None) if task.layer else (None,)


@dataclass(frozen=True, eq=False)
class HeadWork:
    """What follows the last layer's experts, and the loss."""

    stripes: Sequence[Stripe]

    def forward(self, task: Task, _: Any, returned: Any, *rest: Any) -> tuple[tuple[Any, ...], Any]:
        self.stripes[task.span.start].finish(task.layer, returned)
        return (None,), None

    def backward(self, task: Task, saved: Any, *grads: Any) -> tuple[Any, ...]:
        return None, self.stripes[task.span.start].turn(task.layer - 1), None
