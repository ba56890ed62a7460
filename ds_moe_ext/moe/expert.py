# SPDX-License-Identifier: Apache-2.0
"""Expert: the rows of each slot through the weights of its expert.

An expert function maps rows, slot by slot, and the weights of all slots to rows; any
differentiable one works, autograd gives its adjoint. Each slot's weights are tensors of their own:
an expert can be in a parameter of this rank or in a copy of another rank's. Shape letters: R rows,
S slots, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ds_moe_ext.moe.feed_forward import FeedForwardExperts
from ds_moe_ext.moe.local_stage import gradients, run_apart
from ds_moe_ext.moe.memory_order import Arrangement, SlotOrder
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.moe.swiglu import SwiGluAdjoint
from ds_moe_ext.schedule.program import added
from ds_moe_ext.schedule.task import Span

ExpertFunction = Callable[[Tensor, SlotRows, tuple[Tensor, ...]], Tensor]
"""``(rows [R, D] by slot, rows of each slot, weights) -> rows [R, D]``; weights are those of the
first slot's expert in the order of their names, then of the second's, and so on."""


@dataclass(frozen=True, eq=False)
class ModuleExperts:
    """Any ``nn.Module`` as expert: one call a slot, with the parameters of its expert.

    Weights: all parameters of the first slot's module in ``names`` order, then of the second's.

    Attributes:
        template: a module of the experts' class; only its code is used.
        names: names of its parameters.
        shard: the part of every expert that is computed here.
    """

    template: nn.Module
    names: tuple[str, ...]
    shard: Shard = WHOLE

    def __call__(self, rows_RD: Tensor, slots: SlotRows, weights: tuple[Tensor, ...]) -> Tensor:
        if not weights:
            return rows_RD.clone()
        num_names = len(self.names)
        outs = []
        for slot, rows in enumerate(rows_RD.split(slots.on_host())):
            own = [
                self.shard.widened(number, weight)
                for number, weight in enumerate(weights[slot * num_names : (slot + 1) * num_names])
            ]
            # A slot without rows is called too: its weights stay in the graph.
            out = functional_call(self.template, dict(zip(self.names, own)), (rows,))
            outs.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(outs)


def on_shard(function: ExpertFunction, shard: Shard) -> ExpertFunction:
    """What a rank computes that has a part of every expert. A function of the user's own computes
    the same with smaller weights."""
    if isinstance(function, (FeedForwardExperts, ModuleExperts)):
        return replace(function, shard=shard)
    return function


def arrangement_for(function: ExpertFunction, weights: tuple[Tensor, ...]) -> Arrangement:
    """How slots compute: in their own order, where a function does not say another."""
    if isinstance(function, FeedForwardExperts):
        return function.arrangement(weights)
    return Arrangement(None, ())


class _Kept(NamedTuple):
    """What backward needs besides tensors.

    Attributes:
        layer_route: of the pass.
        order: of the slots while they computed, if not their own.
        pieces: that were computed one by one, each with the number of things saved for it.
    """

    layer_route: LayerRoute
    order: SlotOrder | None
    pieces: tuple[tuple[Span, int], ...]


@dataclass(frozen=True, eq=False)
class Expert:
    """Reads rows ``[R, D]`` in slot order, the route and the weights; writes rows ``[R, D]``.

    Where backward is cut otherwise than forward, rows are computed in pieces that the spans of both
    are made of: a graph of autograd can only be gone back through as a whole.

    Attributes:
        function: what an expert computes.
        pieces: these spans; none where both directions are cut alike.
    """

    function: ExpertFunction
    pieces: tuple[Span, ...] = ()

    def forward(
        self, span: Span, rows_RD: Tensor, layer_route: LayerRoute, weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        own = [piece for piece in self.pieces if piece.overlaps(span)] or [span]
        parts = _parts(layer_route, rows_RD, span, own)
        arrangement = arrangement_for(self.function, weights)
        runs = [
            self._run(layer_route.computed(piece), part, weights, arrangement)
            for piece, part in zip(own, parts)
        ]
        computed = _whole(layer_route, span, own, [written for (written,), _ in runs])
        lengths = tuple((piece, len(saved)) for piece, (_, saved) in zip(own, runs))
        kept = _Kept(layer_route, arrangement.order, lengths)
        return (computed,), (kept, *chain.from_iterable(saved for _, saved in runs))

    def backward(self, span: Span, saved: tuple[Any, ...], grad_RD: Tensor) -> tuple[Any, ...]:
        (layer_route, order, pieces), *rest = saved
        things = iter(rest)
        own = [piece for piece, _ in pieces]
        found = [
            _gradients(layer_route.computed(piece), part, tuple(islice(things, length)), order)
            for (piece, length), part in zip(pieces, _parts(layer_route, grad_RD, span, own))
        ]
        if not all(found):
            return ()
        rows, weights = zip(*found)
        whole = None if rows[0] is None else _whole(layer_route, span, own, rows)
        return whole, tuple(map(added, zip(*weights)))

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        own: list[tuple[Span, int]] = []
        things: list[Any] = []
        for _, ((_, _, kept), *rest) in pieces:
            saved = iter(rest)
            for piece, length in kept:
                part = tuple(islice(saved, length))
                if piece.overlaps(span):
                    own.append((piece, length))
                    things += part
        first = pieces[0][1][0]
        return first._replace(pieces=tuple(own)), *things

    def _run(
        self,
        slots: SlotRows,
        rows_RD: Tensor,
        weights: tuple[Tensor, ...],
        arrangement: Arrangement,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        order, runs = arrangement
        if order is None:
            written, saved = _computed(self.function, slots, rows_RD, weights, runs)
            return (written,), saved
        # Brought into order apart from the graph, so that it keeps no rows but those.
        length_S = order.lengths(slots)
        ordered = SlotRows.of(np.asarray(length_S), rows_RD.device)
        rows_RD = order.rows(rows_RD, slots.on_host())
        written, saved = _computed(self.function, ordered, rows_RD, order.weights(weights), runs)
        return (order.inverse().rows(written, length_S),), saved


def _computed(
    function: ExpertFunction,
    slots: SlotRows,
    rows_RD: Tensor,
    weights: tuple[Tensor, ...],
    runs: Sequence[tuple[int, int]],
) -> tuple[Tensor, tuple[Any, ...]]:
    """Rows ``[R, D]``, and what ``_gradients`` takes: whose first is the adjoint, of its own or
    autograd's; nothing if nothing has a gradient."""
    found = None
    if isinstance(function, FeedForwardExperts):
        found = function.by_hand(rows_RD, slots, weights, runs)
    if found is None:
        (written,), saved = run_apart(lambda x, w: (function(x, slots, w),), (rows_RD, weights))
        return written, saved
    written, adjoint, kept = found
    return written, (adjoint, *kept) if any(adjoint.wanted) else ()


def _gradients(
    slots: SlotRows, grad_RD: Tensor, saved: tuple[Any, ...], order: SlotOrder | None
) -> tuple[Any, ...]:
    """Of the rows and the weights that ``Expert._run`` read, in slot order."""
    if not saved:
        return ()
    if order is not None:
        grad_RD = order.rows(grad_RD, slots.on_host())
    adjoint, *kept = saved
    if isinstance(adjoint, SwiGluAdjoint):
        rows_RD, weights = adjoint.gradients(kept, grad_RD)
    else:
        rows_RD, weights = gradients(saved, (grad_RD,), (True,))
    if order is None:
        return rows_RD, weights
    back = order.inverse()
    rows_RD = None if rows_RD is None else back.rows(rows_RD, order.lengths(slots))
    return rows_RD, back.weights(weights)


def _parts(
    layer_route: LayerRoute, rows_RD: Tensor, span: Span, pieces: Sequence[Span]
) -> list[Tensor]:
    """The rows of each piece of a span, in slot order each."""
    if len(pieces) == 1:
        return [rows_RD]
    parts = (layer_route.rows_of(piece, [(span, rows_RD.detach())]) for piece in pieces)
    return [part.requires_grad_(rows_RD.requires_grad) for part in parts]


def _whole(
    layer_route: LayerRoute, span: Span, pieces: Sequence[Span], parts: Sequence[Tensor]
) -> Tensor:
    """The rows of a span in slot order, from those of its pieces."""
    return parts[0] if len(parts) == 1 else layer_route.rows_of(span, list(zip(pieces, parts)))
