# SPDX-License-Identifier: Apache-2.0
"""Expert: the rows of each slot through the weights of its expert.

Behind it stand stages that are made of a function: one that autograd differentiates, apart from the
graph around it (``Local``), one with an effect alone (``Aside``), and one in whose place another
comes (``Present``). Shape letters: R rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call

from ds_moe_ext.moe.feed_forward import Arrangement, FeedForwardExperts, SlotOrder, SwiGluAdjoint
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.schedule.program import added
from ds_moe_ext.schedule.stages import Done, Saved, SavesAlike, Stage, Uncut
from ds_moe_ext.schedule.task import ChunkRange

ExpertFunction = Callable[[Tensor, SlotRows, tuple[Tensor, ...]], Tensor]
"""``(rows [R, D] by slot, rows of each slot, weights) -> rows [R, D]``; weights are those of the
first slot's expert in the order of their names, then of the second's, and so on."""


@dataclass(frozen=True, eq=False)
class ModuleExperts:
    """Any ``nn.Module`` as expert: one call a slot, with the parameters of its expert.

    Weights: all parameters of the first slot's module in ``names`` order, then of the second's.
    """

    template: nn.Module  # a module of the experts' class; only its code is used
    names: tuple[str, ...]  # names of its parameters
    shard: Shard = WHOLE  # the part of every expert that is computed here

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
    """What backward needs besides tensors."""

    layer_route: LayerRoute  # of the pass
    order: SlotOrder | None  # of the slots while they computed, if not their own
    # that were computed one by one, each with the number of things saved for it
    pieces: tuple[tuple[ChunkRange, int], ...]


@dataclass(frozen=True, eq=False)
class Expert:
    """Reads rows ``[R, D]`` in slot order, the route and the weights; writes rows ``[R, D]`` of the
    same type.

    Where backward is cut otherwise than forward, rows are computed in pieces that the chunk ranges
    of both are made of: a graph of autograd can only be gone back through as a whole.
    """

    function: ExpertFunction  # what an expert computes
    # these chunk ranges; none where both directions are cut alike
    pieces: tuple[ChunkRange, ...] = ()

    def forward(
        self,
        chunk_range: ChunkRange,
        rows_RD: Tensor,
        layer_route: LayerRoute,
        weights: tuple[Tensor, ...],
    ) -> Done:
        own = [piece for piece in self.pieces if piece.overlaps(chunk_range)] or [chunk_range]
        parts = _parts(layer_route, rows_RD, chunk_range, own)
        arrangement = arrangement_for(self.function, weights)
        runs = [
            self._run(layer_route.computed(piece), part, weights, arrangement)
            for piece, part in zip(own, parts)
        ]
        computed = _whole(layer_route, chunk_range, own, [written for (written,), _ in runs])
        lengths = tuple((piece, len(saved)) for piece, (_, saved) in zip(own, runs))
        kept = _Kept(layer_route, arrangement.order, lengths)
        computed = computed.to(rows_RD.dtype)  # as ranks without experts expect, under autocast too
        return (computed,), (kept, *chain.from_iterable(saved for _, saved in runs))

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_RD: Tensor) -> tuple[Any, ...]:
        (layer_route, order, pieces), *rest = saved
        things = iter(rest)
        own = [piece for piece, _ in pieces]
        found = [
            _gradients(layer_route.computed(piece), part, tuple(islice(things, length)), order)
            for (piece, length), part in zip(pieces, _parts(layer_route, grad_RD, chunk_range, own))
        ]
        if not all(found):
            return ()
        rows, weights = zip(*found)
        whole = None if rows[0] is None else _whole(layer_route, chunk_range, own, rows)
        return whole, tuple(map(added, zip(*weights)))

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        own: list[tuple[ChunkRange, int]] = []
        things: list[Any] = []
        for _, ((_, _, kept), *rest) in pieces:
            saved = iter(rest)
            for piece, length in kept:
                part = tuple(islice(saved, length))
                if piece.overlaps(chunk_range):
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
    ) -> Done:
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
    slots: SlotRows, grad_RD: Tensor, saved: Saved, order: SlotOrder | None
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
    layer_route: LayerRoute, rows_RD: Tensor, chunk_range: ChunkRange, pieces: Sequence[ChunkRange]
) -> list[Tensor]:
    """The rows of each piece of a chunk range, in slot order each."""
    if len(pieces) == 1:
        return [rows_RD]
    parts = (layer_route.rows_of(piece, [(chunk_range, rows_RD.detach())]) for piece in pieces)
    return [part.requires_grad_(rows_RD.requires_grad) for part in parts]


def _whole(
    layer_route: LayerRoute,
    chunk_range: ChunkRange,
    pieces: Sequence[ChunkRange],
    parts: Sequence[Tensor],
) -> Tensor:
    """The rows of a chunk range in slot order, from those of its pieces."""
    return (
        parts[0] if len(parts) == 1 else layer_route.rows_of(chunk_range, list(zip(pieces, parts)))
    )


# Stages from functions.

Function = Callable[..., tuple[Any, ...]]  # (*reads) -> what the task writes


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """The graph of a function, apart from the tensors that its backward needs.

    Those are saved beside it, in the place where the whole program saves its tensors: hooks that
    checkpoint or offload activations see them there, once for all stages.
    """

    # edges of what it wrote; None where nothing has a gradient
    outputs: tuple[GradientEdge | None, ...]
    # what it read that has a gradient, in a row; autograd holds them anyway
    inputs: tuple[Tensor, ...]
    # for each read that can be differentiated, how many gradients it gets: of a tensor None, of a
    # tuple one a part; and for each of them whether it has an edge
    reads: tuple[bool | tuple[bool, ...], ...]
    kept: list[Tensor]  # the tensors, while backward runs


def run_apart(function: Function, reads: Sequence[Any]) -> Done:
    """Run a function under autograd, cut off from the graph around it."""
    leaves = tuple(map(_leaf, reads))
    flat = [part for leaf in leaves for part in (leaf if isinstance(leaf, tuple) else (leaf,))]
    graded = [part for part in flat if isinstance(part, Tensor) and part.requires_grad]
    if not graded:
        return function(*leaves), ()
    kept: list[Tensor] = []
    versions: list[int] = []

    def keep(tensor: Tensor) -> int:
        kept.append(tensor.detach())
        versions.append(tensor._version)
        return len(kept) - 1

    with torch.enable_grad(), saved_tensors_hooks(keep, kept.__getitem__):
        written = function(*leaves)
    if [tensor._version for tensor in kept] != versions:
        raise RuntimeError(
            "an expert or gate changed in place a tensor that its backward needs; compute the new "
            "values into a tensor of their own"
        )
    graph = Graph(
        outputs=tuple(_edge(x) if isinstance(x, Tensor) else None for x in written),
        inputs=tuple(graded),
        reads=tuple(wanted for leaf in leaves if (wanted := _wanted(leaf)) is not None),
        kept=kept,
    )
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in written)
    tensors = tuple(kept)
    kept.clear()
    return plain, (graph, *tensors)


def gradients(
    saved: Sequence[Any], grads: Sequence[Any], graded: Sequence[bool]
) -> tuple[Any, ...]:
    """Gradients of the differentiable reads of ``run_apart``, in order; frees the graph."""
    if not saved:
        return ()
    graph, *tensors = saved
    graph.kept.extend(tensors)
    outputs = [edge for edge, has_gradient in zip(graph.outputs, graded) if has_gradient]
    pairs = [(e, g) for e, g in zip(outputs, grads) if e is not None and g is not None]
    found = iter(
        torch.autograd.grad(
            [e for e, _ in pairs], graph.inputs, [g for _, g in pairs], allow_unused=True
        )
    )
    graph.kept.clear()
    return tuple(
        tuple(next(found) if part else None for part in wanted)
        if isinstance(wanted, tuple)
        else (next(found) if wanted else None)
        for wanted in graph.reads
    )


@dataclass(frozen=True)
class Local(Uncut):
    """A stage from a function."""

    function: Function  # called with what the task reads
    graded: tuple[bool, ...] = (True,)  # for each write, whether it has a gradient

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done:
        return run_apart(self.function, reads)

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        return gradients(saved, grads, self.graded)


@dataclass(frozen=True, eq=False)
class Aside(SavesAlike):
    """A stage that only has an effect: what the task reads says when, not what."""

    act: Callable[[ChunkRange], None]  # called with the task's chunk range

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done:
        self.act(chunk_range)
        return (None,), ()

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        return ()


@dataclass(eq=False)
class Present:
    """A stage in whose place another one comes between steps, in programs that stay."""

    stage: Stage  # the present one

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done:
        return self.stage.forward(chunk_range, *reads)

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        return self.stage.backward(chunk_range, saved, *grads)

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        return self.stage.recut(chunk_range, pieces)


def _leaf(read: Any) -> Any:
    if isinstance(read, tuple):
        return tuple(map(_leaf, read))
    if isinstance(read, Tensor) and read.is_floating_point():
        leaf = read.detach()
        return leaf.requires_grad_() if read.requires_grad else leaf
    return read


def _wanted(leaf: Any) -> bool | tuple[bool, ...] | None:
    """Which gradients there are of a read; None where it cannot be differentiated."""
    if isinstance(leaf, tuple):
        is_float = all(isinstance(part, Tensor) and part.is_floating_point() for part in leaf)
        return tuple(part.requires_grad for part in leaf) if is_float else None
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.requires_grad
    return None


def _edge(tensor: Tensor) -> GradientEdge | None:
    if tensor.grad_fn is not None:
        return GradientEdge(tensor.grad_fn, tensor.output_nr)
    return get_gradient_edge(tensor) if tensor.requires_grad else None
