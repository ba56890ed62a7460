# SPDX-License-Identifier: Apache-2.0
"""Stages that move rows, with transforms where rows enter and leave them.

A stage keeps the rows that a transform was given, and its adjoint runs the transform on them again:
rows can be cut anew for a backward of other chunks, a graph cannot. Shape letters: T tokens, N rows
sent, R rows received, G rows of a cell, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.moe.transforms import (
    AFTER_COMBINE,
    AFTER_DISPATCH,
    BEFORE_COMBINE,
    BEFORE_DISPATCH,
    Transform,
    Transforms,
    adjoint,
    applied,
    placed,
)
from ds_moe_ext.schedule.crew import Stage
from ds_moe_ext.schedule.task import CELL_GATHER, COMBINE, DISPATCH, Op, Span

Pieces = Sequence[tuple[Span, Tensor]]
Recut = Callable[[LayerRoute, Span, Pieces], Tensor]
"""Rows of a span, from those of the overlapping spans that they were kept in."""


def _tokens(layer_route: LayerRoute, span: Span, pieces: Pieces) -> Tensor:
    """``[T, D]``."""
    cut = layer_route.cut
    start = cut.first(span) - cut.first(pieces[0][0])
    return torch.cat([rows for _, rows in pieces]).narrow(0, start, cut.length(span))


def _sent(layer_route: LayerRoute, span: Span, pieces: Pieces) -> Tensor:
    """``[N, D]`` in send order."""
    by_choice = [(own, layer_route.on(own).spread(rows)) for own, rows in pieces]
    whole_TKD = _tokens(layer_route, span, by_choice)
    return whole_TKD.flatten(0, 1).index_select(0, layer_route.on(span).choice_N)


@dataclass(frozen=True)
class Ends:
    """How the rows at the two ends of a stage are cut anew.

    Attributes:
        read: those that it reads.
        written: those that it writes.
    """

    read: Recut
    written: Recut


_DISPATCHED = Ends(_tokens, LayerRoute.own_rows_of)
_GATHERED = Ends(LayerRoute.own_rows_of, LayerRoute.rows_of)
_COMBINED = Ends(LayerRoute.own_rows_of, _sent)


@dataclass(frozen=True)
class TransformedStage:
    """A stage of which the first read and the first write are rows, and the last read is the route.

    Attributes:
        stage: what is done.
        ends: how rows are cut anew.
        before: transforms of the rows that it reads.
        after: of those that it writes.
    """

    stage: Stage
    ends: Ends
    before: Transforms
    after: Transforms

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        given, *others = reads
        moved = applied(self.before, given) if self.before else given
        (came, *rest), saved = self.stage.forward(span, moved, *others)
        written = applied(self.after, came) if self.after else came
        kept_read = given.detach() if self.before else None
        kept_written = came.detach() if self.after else None
        return (written, *rest), (reads[-1], kept_read, kept_written, *saved)

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        _, read, written, *own = saved
        grad, *others = grads
        if self.after and grad is not None:
            grad = adjoint(self.after, written, grad)
        found, *rest = self.stage.backward(span, tuple(own), grad, *others)
        if self.before and found is not None:
            found = adjoint(self.before, read, found)
        return found, *rest

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        layer_route: LayerRoute = pieces[0][1][0]

        def kept(number: int, recut: Recut) -> Tensor | None:
            if pieces[0][1][number] is None:
                return None
            return recut(layer_route, span, [(own, saved[number]) for own, saved in pieces])

        read, written = kept(1, self.ends.read), kept(2, self.ends.written)
        inner = self.stage.recut(span, [(own, saved[3:]) for own, saved in pieces])
        return (layer_route, read, written, *inner)


def transformed(
    stages: Mapping[Op, Stage], transforms: Sequence[Transform]
) -> Mapping[Op, TransformedStage]:
    """The stages at which there are transforms, with these.

    Where a cell gathers its rows, they are transformed once it has, and travel in it as they came.
    What its ranks computed are summands: they are added up before they are transformed.

    Args:
        stages: of a layer.
        transforms: at any place.
    """
    if not transforms:
        return {}

    def at(place: str) -> Transforms:
        return placed(transforms, place)

    has_cells = CELL_GATHER in stages
    arrived = at(AFTER_DISPATCH)
    ends = {
        DISPATCH: (_DISPATCHED, at(BEFORE_DISPATCH), () if has_cells else arrived),
        COMBINE: (_COMBINED, at(BEFORE_COMBINE), at(AFTER_COMBINE)),
    }
    if has_cells:
        ends[CELL_GATHER] = _GATHERED, (), arrived
    return {
        op: TransformedStage(stages[op], own, before, after)
        for op, (own, before, after) in ends.items()
        if before or after
    }
