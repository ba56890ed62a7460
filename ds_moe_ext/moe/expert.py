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

from ds_moe_ext.moe.local_stage import gradients, run_apart
from ds_moe_ext.moe.memory_order import SlotOrder, order_of, runs_of, stacked
from ds_moe_ext.moe.route import LayerRoute, SlotRows
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.schedule.program import added
from ds_moe_ext.schedule.task import Span

ExpertFunction = Callable[[Tensor, SlotRows, tuple[Tensor, ...]], Tensor]
"""``(rows [R, D] by slot, rows of each slot, weights) -> rows [R, D]``; weights are those of the
first slot's expert in the order of their names, then of the second's, and so on."""


def grouped_linear(
    rows_RD: Tensor, slots: SlotRows, weight_SDF: Tensor, bias_SF: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each slot by the slot's matrix: ``[R, D] x [S, D, F] -> [R, F]``.

    One grouped GEMM where the device and the dtype have it; else one GEMM a slot.
    """
    rows_RD = rows_RD.to(weight_SDF.dtype)
    if _has_grouped_mm(rows_RD, weight_SDF):
        out_RF = torch.nn.functional.grouped_mm(rows_RD, weight_SDF, offs=slots.end_S)
    elif weight_SDF.shape[0] == 1:
        out_RF = rows_RD @ weight_SDF[0]
    else:
        parts = rows_RD.split(slots.on_host())
        out_RF = torch.cat([part @ weight for part, weight in zip(parts, weight_SDF.unbind())])
    if bias_SF is None:
        return out_RF
    length_S = slots.end_S.diff(prepend=slots.end_S.new_zeros(1))
    return out_RF + bias_SF.repeat_interleave(length_S, dim=0, output_size=slots.num_rows)


_GROUPED_GEMM_MAJORS = (9, 10)  # compute capabilities: Hopper, Blackwell of data centres


def _has_grouped_mm(rows_RD: Tensor, weight_SDF: Tensor) -> bool:
    if rows_RD.shape[0] == 0:
        return False
    num_aligned = 16 // weight_SDF.element_size()  # the kernels want rows of 16 bytes
    if weight_SDF.shape[1] % num_aligned or weight_SDF.shape[2] % num_aligned:
        return False
    if rows_RD.is_cuda:
        # A view into a flat buffer may begin anywhere. Other GPUs have no such kernel: torch would
        # make the host wait in every call, we do once.
        return (
            weight_SDF.dtype == torch.bfloat16
            and weight_SDF.data_ptr() % 16 == 0
            and weight_SDF.stride(0) % num_aligned == 0
            and torch.cuda.get_device_capability(rows_RD.device)[0] in _GROUPED_GEMM_MAJORS
        )
    return weight_SDF.dtype in (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class FeedForwardExperts:
    """Up, activation, down: GPT's two matrices or SwiGLU's three (gate and up joined).

    Weights of a slot, in order: up ``[F', D]``, up bias ``[F']`` if ``has_bias``, down ``[D, F]``,
    down bias ``[D]`` if ``has_bias``; F' is 2F where ``activation`` halves.

    Attributes:
        activation: ``[R, F'] -> [R, F]``.
        is_transposed: weights are stored ``[D, F']`` and ``[F, D]``.
        has_bias: two more weights.
        shard: the part of every expert that is computed here.
    """

    activation: Callable[[Tensor], Tensor]
    is_transposed: bool = False
    has_bias: bool = False
    shard: Shard = WHOLE

    def __call__(self, rows_RD: Tensor, slots: SlotRows, weights: tuple[Tensor, ...]) -> Tensor:
        if not weights:
            return rows_RD.clone()  # this rank has no expert of the layer, and no rows
        by_name = self._by_name(weights)
        if not self._is_grouped(weights):
            return self._slot_by_slot(rows_RD, slots, *by_name)
        runs = runs_of(by_name)
        if len(runs) == 1:
            return self._grouped(rows_RD, slots, [stacked(own) for own in by_name])
        slots_of = [slots.between(start, stop) for start, stop in runs]
        # Split, not narrowed: backward is one copy for all.
        parts = rows_RD.split([own.num_rows for own in slots_of])
        return torch.cat(
            [
                self._grouped(rows, own, [stacked(w[start:stop]) for w in by_name])
                for rows, own, (start, stop) in zip(parts, slots_of, runs)
            ]
        )

    def order_of(self, weights: tuple[Tensor, ...]) -> SlotOrder | None:
        """See ``order_for``."""
        return order_of(self._by_name(weights)) if self._is_grouped(weights) else None

    def _by_name(self, weights: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        num_weights = 4 if self.has_bias else 2
        return [weights[i::num_weights] for i in range(num_weights)]

    def _is_grouped(self, weights: tuple[Tensor, ...]) -> bool:
        return bool(weights) and (self.has_bias or not weights[0].is_cpu)

    def _grouped(self, rows_RD: Tensor, slots: SlotRows, weights: Sequence[Tensor]) -> Tensor:
        """One grouped GEMM a matrix, for slots whose weights are ``[S, ...]``."""
        up, down = weights[:: 2 if self.has_bias else 1]
        up_bias, down_bias = weights[1::2] if self.has_bias else (None, None)
        if down_bias is not None:
            down_bias = self.shard.widened(3, down_bias)
        if not self.is_transposed:
            up, down = up.mT, down.mT
        hidden_RF = self.activation(grouped_linear(rows_RD, slots, up, up_bias))
        return grouped_linear(hidden_RF, slots, down, down_bias).to(rows_RD.dtype)

    def _slot_by_slot(
        self, rows_RD: Tensor, slots: SlotRows, up_S: Sequence[Tensor], down_S: Sequence[Tensor]
    ) -> Tensor:
        """On a CPU one expert after the other, from its rows to its output: what lies between fits
        the caches, where that of all experts at once would go through memory."""
        linear = torch.matmul if self.is_transposed else torch.nn.functional.linear
        # Slots without rows take part: their weights get gradients of zeros, which hosts wait for.
        parts = zip(rows_RD.to(up_S[0].dtype).split(slots.on_host()), up_S, down_S)
        outs = [
            linear(self.activation(linear(_rounded_up(rows), into)), out_of)[: rows.shape[0]]
            for rows, into, out_of in parts
        ]
        return torch.cat(outs).to(rows_RD.dtype)


def _rounded_up(rows_RD: Tensor) -> Tensor:
    """oneDNN compiles a bfloat16 kernel for every new shape, which costs as much as some hundred
    rows. With their number rounded up to four binary digits, shapes recur; it grows by 4 % on
    average."""
    num_rows = rows_RD.shape[0]
    missing = -num_rows % (1 << max(num_rows.bit_length() - 4, 0))
    if not missing or rows_RD.dtype != torch.bfloat16:
        return rows_RD
    return torch.nn.functional.pad(rows_RD, (0, 0, 0, missing))


def silu_gated(gate_up: Tensor) -> Tensor:
    """SwiGLU of joined gate and up halves, ``[R, 2F] -> [R, F]`` (Mixtral, Qwen, DeepSeek)."""
    product: Tensor = _SiluGated.apply(gate_up)
    return product


class _SiluGated(torch.autograd.Function):
    """The same as ``silu(gate) * up`` of the halves, but both gradients are written into one
    buffer, where autograd would make two and join them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate_up, silu)
        return silu * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, silu = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, silu, out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


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


def order_for(function: ExpertFunction, weights: tuple[Tensor, ...]) -> SlotOrder | None:
    """The order of slots that takes fewer GEMMs than their own, if one does."""
    return function.order_of(weights) if isinstance(function, FeedForwardExperts) else None


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
        order = order_for(self.function, weights)
        runs = [
            self._run(layer_route.computed(piece), part, weights, order)
            for piece, part in zip(own, parts)
        ]
        computed = _whole(layer_route, span, own, [written for (written,), _ in runs])
        lengths = tuple((piece, len(saved)) for piece, (_, saved) in zip(own, runs))
        kept = _Kept(layer_route, order, lengths)
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
        order: SlotOrder | None,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        if order is None:
            return run_apart(
                lambda rows, own: (self.function(rows, slots, own),), (rows_RD, weights)
            )
        # Brought into order apart from the graph, so that it keeps no rows but those.
        length_S = order.lengths(slots)
        ordered = SlotRows.of(np.asarray(length_S), rows_RD.device)
        reads = order.rows(rows_RD, slots.on_host()), order.weights(weights)
        (written,), saved = run_apart(lambda rows, own: (self.function(rows, ordered, own),), reads)
        return (order.inverse().rows(written, length_S),), saved


def _gradients(
    slots: SlotRows, grad_RD: Tensor, saved: tuple[Any, ...], order: SlotOrder | None
) -> tuple[Any, ...]:
    """Of the rows and the weights that ``Expert._run`` read, in slot order."""
    if order is None:
        return gradients(saved, (grad_RD,), (True,))
    found = gradients(saved, (order.rows(grad_RD, slots.on_host()),), (True,))
    if not found:
        return ()
    rows_RD, weights = found
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
