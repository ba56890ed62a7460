# SPDX-License-Identifier: Apache-2.0
"""Transforms: functions of rows at FSMoE's six places, each with its adjoint.

Shape letters: N rows, D numbers of each as they come, B as they go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.stages import Done, Saved, Stage
from ds_moe_ext.schedule.task import COMBINE, DISPATCH, ETP_GATHER, ChunkRange, Op

START, END = "before_moe_start", "before_moe_end"
BEFORE_DISPATCH, AFTER_DISPATCH = "before_dispatch", "after_dispatch"
BEFORE_COMBINE, AFTER_COMBINE = "before_combine", "after_combine"
OF_CHUNKS = (BEFORE_DISPATCH, AFTER_DISPATCH, BEFORE_COMBINE, AFTER_COMBINE)
PLACES = (START, *OF_CHUNKS, END)


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """A function of rows. A subclass is a frozen dataclass: its fields are its JSON keys.

    Each row is changed by itself, whatever rows are beside it: which these are depends on ranks and
    degrees. At the start and the end it is given the tokens of the layer, and may change how many
    there are, as long as the end gives as many as the start took. It has no weights of its own, and
    neither communicates nor waits for the device. It is called in the stream of the exchange that
    it stands at, without a graph: ``adjoint`` makes one, of the rows that were kept.
    """

    at: str  # its place, one of ``PLACES``

    @abstractmethod
    def forward(self, rows_ND: Tensor) -> Tensor:
        """``[N, D]`` to ``[N, B]``, of any floating type. Rows may be none."""

    def adjoint(self, rows_ND: Tensor, grad_NB: Tensor) -> Tensor:
        """The gradient ``[N, D]`` of what ``forward`` was given, from that of what it made.

        As autograd has it, which runs ``forward`` again; override it to say it yourself.

        Raises:
            ValueError: ``forward`` has weights, whose gradients nobody would take.
        """
        leaf_ND = rows_ND.detach().requires_grad_()
        with torch.enable_grad():
            made_NB = self.forward(leaf_ND)
        if _ends(made_NB) - {get_gradient_edge(leaf_ND).node}:
            raise ValueError(
                f"{self} has weights of its own, which would not be trained; detach them, or "
                "let the model compute this before or after the layer"
            )
        if not made_NB.requires_grad:
            return torch.zeros_like(leaf_ND)
        (grad_ND,) = torch.autograd.grad(made_NB, leaf_ND, grad_NB, materialize_grads=True)
        return grad_ND

    def applied(self, rows_ND: Tensor) -> Tensor:
        """``forward`` of rows that autograd does not see.

        Raises:
            ValueError: it makes no rows, or other ones of rows of a chunk.
            RuntimeError: it changes what it was given.
        """
        rows_ND = rows_ND.detach()
        is_counted = not rows_ND.is_inference()
        before = rows_ND._version if is_counted else 0
        with torch.no_grad():
            made_NB = self.forward(rows_ND)
        if is_counted and rows_ND._version != before:
            raise RuntimeError(
                f"{self} changed its input in place, but others read it; compute the new "
                "values into a tensor of their own"
            )
        is_of_layer = self.at in (START, END)
        if made_NB.dim() != 2 or not (is_of_layer or len(made_NB) == len(rows_ND)):
            raise ValueError(
                f"{self} makes {tuple(made_NB.shape)} of {tuple(rows_ND.shape)}; at {self.at} "
                + ("it must give rows" if is_of_layer else "every row must stay one")
            )
        return made_NB.contiguous()


Transforms = tuple[Transform, ...]
"""In a row."""


def applied(transforms: Transforms, rows_ND: Tensor) -> Tensor:
    for transform in transforms:
        rows_ND = transform.applied(rows_ND)
    return rows_ND


def adjoint(transforms: Transforms, rows_ND: Tensor, grad_NB: Tensor) -> Tensor:
    """The adjoint of ``applied``, at the rows that it was given."""
    given = [rows_ND.detach()]
    for transform in transforms[:-1]:
        given.append(transform.applied(given[-1]))
    for transform, rows in zip(reversed(transforms), reversed(given)):
        grad_NB = transform.adjoint(rows, grad_NB)
        if grad_NB.shape != rows.shape:
            raise ValueError(
                f"the adjoint of {transform} gives {tuple(grad_NB.shape)} for rows "
                f"{tuple(rows.shape)}; it must give a gradient of what forward was given"
            )
    return grad_NB.contiguous()  # who gets it may write to it


def differentiably(transforms: Transforms, rows_ND: Tensor) -> Tensor:
    made_NB: Tensor = _Node.apply(transforms, rows_ND)
    return made_NB


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transforms: Transforms, rows_ND: Tensor) -> Tensor:
        ctx.transforms = transforms
        ctx.save_for_backward(rows_ND)
        made_NB = applied(transforms, rows_ND)
        # Not what was given itself, which autograd would take for a change of it.
        return made_NB.view_as(made_NB)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NB: Tensor) -> tuple[Any, ...]:
        (rows_ND,) = ctx.saved_tensors
        return None, adjoint(ctx.transforms, rows_ND, grad_NB)


def _ends(tensor: Tensor) -> set[Any]:
    """Where the graph of a tensor ends: at nodes that take the gradients of leaves."""
    todo: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return {node for node in seen if not node.next_functions}


def placed(transforms: Sequence[Transform], place: str) -> Transforms:
    return tuple(each for each in transforms if each.at == place)


# Stages that move rows, with transforms where rows enter and leave them.


Pieces = Sequence[tuple[ChunkRange, Tensor]]
Recut = Callable[[LayerRoute, ChunkRange, Pieces], Tensor]
"""Rows of a chunk range, from those of the overlapping chunk ranges that they were kept in."""


def _tokens(layer_route: LayerRoute, chunk_range: ChunkRange, pieces: Pieces) -> Tensor:
    """``[T, D]``."""
    cut = layer_route.cut
    start = cut.first(chunk_range) - cut.first(pieces[0][0])
    return torch.cat([rows for _, rows in pieces]).narrow(0, start, cut.length(chunk_range))


def _sent(layer_route: LayerRoute, chunk_range: ChunkRange, pieces: Pieces) -> Tensor:
    """``[N, D]`` in send order."""
    by_choice = [(own, layer_route.on(own).spread(rows)) for own, rows in pieces]
    whole_TKD = _tokens(layer_route, chunk_range, by_choice)
    return whole_TKD.flatten(0, 1).index_select(0, layer_route.on(chunk_range).choice_N)


@dataclass(frozen=True)
class TransformedStage:
    """A stage of which the first read and the first write are rows, and the last read is the
    route."""

    stage: Stage  # what is done
    recut_read: Recut  # how the rows that it reads are cut anew
    recut_written: Recut  # and those that it writes
    before: Transforms  # transforms of the rows that it reads
    after: Transforms  # of those that it writes

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done:
        given, *others = reads
        moved = applied(self.before, given) if self.before else given
        (came, *rest), saved = self.stage.forward(chunk_range, moved, *others)
        written = applied(self.after, came) if self.after else came
        kept_read = given.detach() if self.before else None
        kept_written = came.detach() if self.after else None
        return (written, *rest), (reads[-1], kept_read, kept_written, *saved)

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        _, read, written, *own = saved
        grad, *others = grads
        if self.after and grad is not None:
            grad = adjoint(self.after, written, grad)
        found, *rest = self.stage.backward(chunk_range, tuple(own), grad, *others)
        if self.before and found is not None:
            found = adjoint(self.before, read, found)
        return found, *rest

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        layer_route: LayerRoute = pieces[0][1][0]

        def kept(number: int, recut: Recut) -> Tensor | None:
            if pieces[0][1][number] is None:
                return None
            return recut(layer_route, chunk_range, [(own, saved[number]) for own, saved in pieces])

        read, written = kept(1, self.recut_read), kept(2, self.recut_written)
        inner = self.stage.recut(chunk_range, [(own, saved[3:]) for own, saved in pieces])
        return (layer_route, read, written, *inner)


def transformed(
    stages: Mapping[Op, Stage], transforms: Sequence[Transform]
) -> Mapping[Op, TransformedStage]:
    """The stages at which there are transforms, with these.

    Where an ETP group gathers its rows, they are transformed once it has, and travel in it as they
    came. What its ranks computed are summands: they are added up before they are transformed.
    """
    if not transforms:
        return {}

    def at(place: str) -> Transforms:
        return placed(transforms, place)

    has_ep_ranks = ETP_GATHER in stages
    arrived = at(AFTER_DISPATCH)
    own, of_ep_rank = LayerRoute.own_rows_of, LayerRoute.rows_of
    around: dict[Op, tuple[Recut, Recut, Transforms, Transforms]] = {
        DISPATCH: (_tokens, own, at(BEFORE_DISPATCH), () if has_ep_ranks else arrived),
        COMBINE: (own, _sent, at(BEFORE_COMBINE), at(AFTER_COMBINE)),
    }
    if has_ep_ranks:
        around[ETP_GATHER] = own, of_ep_rank, (), arrived
    return {
        op: TransformedStage(stages[op], read, written, before, after)
        for op, (read, written, before, after) in around.items()
        if before or after
    }
