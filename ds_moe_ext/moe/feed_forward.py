# SPDX-License-Identifier: Apache-2.0
"""Feed-forward experts: gate, up and down matrices, of all slots at once where they can be.

``FeedForwardExperts``, the last class here, computes by what stands before it: an order of slots in
which their weights lie in few runs, a grouped GEMM for each, and SwiGLU with its adjoint written
out. Shape letters: R rows, S slots, D model width, F expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core import kernels
from ds_moe_ext.core.rows import Place, as_one, places_of, restacked, runs_at, runs_of
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.moe.slot_rows import SlotRows

# Where the weights of slots lie. A grouped GEMM wants matrices at equal distances, each behind the
# one before. A host may lay them down from the last slot to the first, and weights of another name
# between two of them (Megatron-core does both); experts that have moved lie in whatever slots
# became free.


class SlotOrder(NamedTuple):
    """Another order of slots, for rows and weights while experts compute."""

    slots: tuple[int, ...]  # in that order

    def inverse(self) -> SlotOrder:
        return SlotOrder(tuple(np.argsort(self.slots).tolist()))

    def lengths(self, slots: SlotRows) -> list[int]:
        """Rows of each slot, in this order. Waits for the device if only the device knows."""
        length_S = slots.on_host()
        return [length_S[slot] for slot in self.slots]

    def rows(self, rows_RD: Tensor, length_S: Sequence[int]) -> Tensor:
        """Rows of slots with these lengths, in one copy, which wants a gradient if they do."""
        parts = rows_RD.detach().split(list(length_S))
        ordered = torch.cat([parts[slot] for slot in self.slots])
        return ordered.requires_grad_(rows_RD.requires_grad)

    def weights(self, by_slot: Sequence[Any]) -> tuple[Any, ...]:
        """As many things a slot as there are weights."""
        size = len(by_slot) // len(self.slots)
        return tuple(chain.from_iterable(by_slot[slot * size :][:size] for slot in self.slots))


class Arrangement(NamedTuple):
    """How slots compute."""

    order: SlotOrder | None  # of the slots, where another one than theirs has fewer runs
    # slots ``start`` to ``stop`` of that order whose weights can be stacked, name by name
    runs: tuple[tuple[int, int], ...]


def arranged(by_name: Sequence[Sequence[Tensor]]) -> Arrangement:
    """How slots compute whose weights lie where they lie."""
    return _arranged(places_of(by_name))


def stacked(weights_S: Sequence[Tensor]) -> Tensor:
    """``as_one`` for autograd, which gives each weight its gradient."""
    stacked: Tensor = _Stacked.apply(*weights_S)
    return stacked


def unstacked(weight_S: Tensor) -> tuple[Tensor, ...]:
    """The weight of each slot, from ``[S, ...]``; gradients that lie as the weights do become one
    without a copy."""
    by_slot: tuple[Tensor, ...] = _Unstacked.apply(weight_S)
    return by_slot


@functools.lru_cache(maxsize=1024)  # weights lie as they lay in the pass before
def _arranged(places: tuple[Place, ...]) -> Arrangement:
    runs = runs_at(places)
    if len(runs) == 1:
        return Arrangement(None, runs)
    slots = tuple(sorted(range(len(places)), key=places.__getitem__))
    by_place = runs_at(tuple(places[slot] for slot in slots))
    if len(by_place) < len(runs):
        return Arrangement(SlotOrder(slots), by_place)
    return Arrangement(None, runs)


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights_S: Tensor) -> Tensor:
        return as_one(weights_S)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.unbind()


class _Unstacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_S: Tensor) -> tuple[Tensor, ...]:
        return weight_S.unbind()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_S: Tensor) -> Tensor:
        return restacked(grads_S)


# Rows of each slot times the slot's matrix: one grouped GEMM where there is one.


def grouped_linear(
    rows_RD: Tensor, slots: SlotRows, weight_SDF: Tensor, bias_SF: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each slot by the slot's matrix: ``[R, D] x [S, D, F] -> [R, F]``.

    One grouped GEMM where the device and the dtype have it; else one GEMM a slot.
    """
    rows_RD = rows_RD.to(weight_SDF.dtype)
    if rows_RD.shape[0] and has_grouped_mm(rows_RD, weight_SDF):
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


_IS_THERE = "grouped_mm" in dir(torch.nn.functional)  # not before torch 2.10
_GROUPED_GEMM_MAJORS = (9, 10)  # compute capabilities: Hopper, Blackwell of data centres


def has_grouped_mm(rows_RD: Tensor, weight_SDF: Tensor) -> bool:
    """Whether the device and the type have one grouped GEMM for them, if there are rows."""
    if not _IS_THERE:
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


def rounded_up(rows_RD: Tensor) -> Tensor:
    """Rows of a CPU, with zeros behind them.

    oneDNN compiles a bfloat16 kernel for every new shape, which costs as much as some hundred rows.
    With their number rounded up to four binary digits, shapes recur; it grows by 4 % on average.
    """
    if rows_RD.dtype != torch.bfloat16:
        return rows_RD
    num_rows = rows_RD.shape[0]
    return with_rows(rows_RD, num_rows + -num_rows % (1 << max(num_rows.bit_length() - 4, 0)))


def with_rows(rows_RD: Tensor, num_rows: int) -> Tensor:
    """As many rows, the missing ones of zeros."""
    missing = num_rows - rows_RD.shape[0]
    return torch.nn.functional.pad(rows_RD, (0, 0, 0, missing)) if missing else rows_RD


# SwiGLU experts, with their adjoint written out: what autograd would record, and keep, is not.


_silu, _silu_backward = torch.nn.functional.silu, torch.ops.aten.silu_backward.grad_input


def silu_gated(gate_up_RF: Tensor) -> Tensor:
    """SwiGLU of joined gate and up halves, ``[R, 2F] -> [R, F]`` (Mixtral, Qwen, DeepSeek)."""
    product: Tensor = _SiluGated.apply(gate_up_RF)
    return product


class _SiluGated(torch.autograd.Function):
    """The same as ``silu(gate) * up`` of the halves, but nothing else is kept than these, and both
    gradients are written into one buffer, where autograd would make two and join them."""

    @staticmethod
    def forward(ctx: Any, gate_up_RF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_RF)
        return _product(gate_up_RF)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> Tensor:
        (gate_up_RF,) = ctx.saved_tensors
        return _product_grad(gate_up_RF, grad_RF)


def _product(gate_up_RF: Tensor) -> Tensor:
    if kernels.has_kernels(gate_up_RF):
        return kernels.silu_product(gate_up_RF)
    gate_RF, up_RF = _halves(gate_up_RF)
    return _silu(gate_RF).mul_(up_RF)


def _halves(gate_up_RF: Tensor) -> Sequence[Tensor]:
    half = gate_up_RF.shape[-1] // 2
    return gate_up_RF.split_with_sizes((half, half), -1)  # what ``chunk`` comes to in the end


def _product_grad(gate_up_RF: Tensor, grad_RF: Tensor) -> Tensor:
    """Of gate and up, ``[R, 2F]``; silu is computed again."""
    if kernels.has_kernels(gate_up_RF, grad_RF):
        return kernels.silu_product_grad(gate_up_RF, grad_RF)
    gate_RF, up_RF = _halves(gate_up_RF)
    grad_gate_up_RF = torch.empty_like(gate_up_RF)
    grad_gate_RF, grad_up_RF = _halves(grad_gate_up_RF)
    torch.mul(grad_RF, _silu(gate_RF), out=grad_up_RF)
    _silu_backward(grad_RF * up_RF, gate_RF, grad_input=grad_gate_RF)
    return grad_gate_up_RF


class Wanted(NamedTuple):
    """Whose gradients are."""

    rows: bool
    up: bool
    down: bool


class _Run(NamedTuple):
    """Slots that are computed at once."""

    start: int  # the first one
    stop: int  # behind the last
    num_rows: int  # of them all
    end_S: Tensor | None  # where the rows of each end, for one grouped GEMM; None for one slot

    def own(self, rows_RD: Tensor) -> Tensor:
        """Without those that were added to round their number up."""
        return rows_RD if rows_RD.shape[0] == self.num_rows else rows_RD[: self.num_rows]

    def product(self, one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        """Slot by slot; into ``out``, if there is one slot."""
        if self.end_S is None:
            return torch.mm(one, other, out=out)
        if not self.num_rows:  # of rows none; of a weight's gradients zeros
            num_slots = () if other.dim() == 3 else (self.stop - self.start,)
            return one.new_zeros(*num_slots, one.shape[0], other.shape[-1])
        return torch.nn.functional.grouped_mm(one, other, offs=self.end_S)


_FEW_ROWS = 128  # on a CPU, where it takes longer to call products one by one than to compute them
_NUM_KEPT = 5  # of each run: rows, gate and up, their product, the weights up and down


@dataclass(frozen=True, eq=False, slots=True)
class SwiGluAdjoint:
    """Gradients of SwiGLU experts."""

    runs: tuple[_Run, ...]  # of slots
    wanted: Wanted  # gradients
    is_transposed: bool  # weights are stored ``[in, out]``
    # slots ``start`` to ``stop`` whose weights came as one tensor a name; none where they came slot
    # by slot
    stacks: Sequence[tuple[int, int]]
    dtype: torch.dtype  # of the rows as they came

    def gradients(self, kept: Sequence[Tensor], grad_RD: Tensor) -> tuple[Any, ...]:
        """Of the rows, ``[R, D]``, and of the weights, as they came; None where unwanted."""
        *_, up, down = kept
        grads_up, grads_down = self._room(self.wanted.up, up), self._room(self.wanted.down, down)
        rows: list[Tensor] = []
        for number, (run, part_RD) in enumerate(zip(self.runs, _parts(grad_RD, self.runs))):
            of_run = kept[_NUM_KEPT * number :][:_NUM_KEPT]
            grad_rows = self._of_run(run, of_run, part_RD, grads_up, grads_down)
            if grad_rows is not None:
                rows.append(grad_rows)
        grad_rows = _joined(rows, self.dtype) if self.wanted.rows else None
        both = zip(self._as_weights(grads_up), self._as_weights(grads_down))
        return grad_rows, tuple(chain.from_iterable(both))

    def _room(self, is_wanted: bool, last: Tensor) -> _WeightGrads:
        """For a weight, of which the last run's is known."""
        if not is_wanted or not len(self.runs) > len(self.stacks) > 0:
            return _WeightGrads([])
        # Slot by slot, each into its stack; what was computed at once is a stack already.
        one_by_one = {run.start for run in self.runs if run.end_S is None}
        stacks = {
            start: last.new_empty(stop - start, *last.shape[-2:])
            for start, stop in self.stacks
            if start in one_by_one
        }
        rooms = {
            slot: room
            for start, stack in stacks.items()
            for slot, room in enumerate(stack.unbind(), start)
        }
        return _WeightGrads([], stacks, rooms)

    def _as_weights(self, grads: _WeightGrads) -> Sequence[Tensor | None]:
        """By stack or slot by slot, as the weights came."""
        if not grads.of_runs:
            return [None] * (len(self.stacks) or self.runs[-1].stop)
        both = zip(self.runs, grads.of_runs)
        if self.stacks:
            first = {run.start: own for run, own in both}
            found = [grads.stacks.get(start, first[start]) for start, _ in self.stacks]
            return [own.unsqueeze(0) if own.dim() == 2 else own for own in found]
        by_slot = [(own,) if run.end_S is None else own.unbind() for run, own in both]
        return [*chain.from_iterable(by_slot)]

    def _of_run(
        self,
        run: _Run,
        kept: Sequence[Tensor],
        grad_RD: Tensor,
        grads_up: _WeightGrads,
        grads_down: _WeightGrads,
    ) -> Tensor | None:
        """Gradients of the rows; those of the weights are put where they belong."""
        rows_RD, gate_up_RF, product_RF, up, down = kept
        grad_RD = with_rows(_as_type(grad_RD, rows_RD.dtype), rows_RD.shape[0])
        if self.wanted.down:
            self._of_weight(run, grad_RD, product_RF, grads_down)
        if not self.wanted.rows and not self.wanted.up:
            return None
        grad_RF = _product_grad(gate_up_RF, run.product(grad_RD, self._back(down)))
        if self.wanted.up:
            self._of_weight(run, grad_RF, rows_RD, grads_up)
        if not self.wanted.rows:
            return None
        return run.own(run.product(grad_RF, self._back(up)))

    def _back(self, weight: Tensor) -> Tensor:
        return weight.mT if self.is_transposed else weight

    def _of_weight(self, run: _Run, grad: Tensor, rows: Tensor, grads: _WeightGrads) -> None:
        one, other = (rows, grad) if self.is_transposed else (grad, rows)
        room = grads.rooms.get(run.start)
        grads.of_runs.append(run.product(one.mT, other, room))


class _WeightGrads(NamedTuple):
    """Gradients of a weight."""

    of_runs: list[Tensor]  # of each run so far; none where they are not wanted
    # in which those of slots are put that are computed one by one, by the first of each
    stacks: Mapping[int, Tensor] = MappingProxyType({})
    rooms: Mapping[int, Tensor] = MappingProxyType({})  # of each slot there


def swiglu(
    rows_RD: Tensor,
    slots: SlotRows,
    weights: Sequence[Tensor],
    runs: Sequence[tuple[int, int]],
    *,
    is_transposed: bool,
) -> tuple[Tensor, SwiGluAdjoint, list[Tensor]]:
    """SwiGLU of every slot. Autograd sees nothing of it.

    Args:
        rows_RD: slot by slot.
        slots: rows of each.
        weights: up ``[2F, D]`` and down ``[D, F]`` of each slot, or these transposed; or of stacks
            of slots an ``[S, 2F, D]`` and an ``[S, D, F]`` each.
        runs: slots ``start`` to ``stop`` whose weights can be stacked, or are.
        is_transposed: they are.

    Returns:
        Rows ``[R, D]``, the adjoint and what it takes.
    """
    stacks = runs if weights[0].dim() == 3 else ()
    are_trained = _are_trained(weights[::2]), _are_trained(weights[1::2])
    wanted = Wanted(rows_RD.requires_grad, *are_trained)
    rows = _as_type(rows_RD.detach(), weights[0].dtype)
    kept: list[Tensor] = []
    outs: list[Tensor] = []
    own = tuple(_runs(rows, slots, weights, runs))
    for (run, up, down), part in zip(own, _parts(rows, [run for run, _, _ in own])):
        part_RD = rounded_up(part) if part.is_cpu and run.end_S is None else part
        gate_up_RF = run.product(part_RD, up if is_transposed else up.mT)
        product_RF = _product(gate_up_RF)
        outs.append(run.own(run.product(product_RF, down if is_transposed else down.mT)))
        kept += part_RD, gate_up_RF, product_RF, up, down
    found = tuple(run for run, _, _ in own)
    adjoint = SwiGluAdjoint(found, wanted, is_transposed, stacks, rows_RD.dtype)
    return _joined(outs, rows_RD.dtype), adjoint, kept


def _are_trained(weights: Sequence[Tensor]) -> bool:
    return any([weight.requires_grad for weight in weights])  # no generator: it would take longer


_Run_S = Tensor | Sequence[Tensor]
"""A weight of the slots of a run, stacked or one by one."""


def _by_run(
    weights: Sequence[Tensor], runs: Sequence[tuple[int, int]]
) -> Iterator[tuple[_Run_S, _Run_S]]:
    if weights[0].dim() == 3:
        return zip(weights[::2], weights[1::2])
    up_S, down_S = weights[::2], weights[1::2]
    return ((up_S[start:stop], down_S[start:stop]) for start, stop in runs)


def _each(run_S: _Run_S) -> Sequence[Tensor]:
    return run_S.unbind() if isinstance(run_S, Tensor) else run_S


def _at_once(run_S: _Run_S) -> Tensor:
    return run_S.detach() if isinstance(run_S, Tensor) else as_one(run_S)


def _runs(
    rows_RD: Tensor,
    slots: SlotRows,
    weights: Sequence[Tensor],
    found: Sequence[tuple[int, int]],
) -> Iterator[tuple[_Run, Tensor, Tensor]]:
    """What is computed at once, with its weights. On a CPU many rows go one expert after the
    other, from its rows to its output: what lies between fits the caches, where that of all experts
    at once would go through memory."""
    for (start, stop), (ups, downs) in zip(found, _by_run(weights, found)):
        is_small = slots.num_rows <= _FEW_ROWS and isinstance(ups, Tensor)
        if stop - start > 1 and (is_small or not rows_RD.is_cpu):
            up, down = _at_once(ups), _at_once(downs)
            own = slots if len(found) == 1 else slots.between(start, stop)
            if not own.num_rows or all([has_grouped_mm(rows_RD, each) for each in (up, down)]):
                yield _Run(start, stop, own.num_rows, own.end_S), up, down
                continue
        is_all = len(found) == stop - start == 1
        # Slots without rows take part: their weights get gradients of zeros.
        for slot, (up, down) in enumerate(zip(_each(ups), _each(downs)), start):
            num_rows = slots.num_rows if is_all else slots.on_host()[slot]
            yield _Run(slot, slot + 1, num_rows, None), up.detach(), down.detach()


def _parts(rows_RD: Tensor, runs: Sequence[_Run]) -> Sequence[Tensor]:
    if len(runs) == 1:
        return (rows_RD,)
    return rows_RD.split_with_sizes([run.num_rows for run in runs])


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return _as_type(parts[0] if len(parts) == 1 else torch.cat(parts), dtype)


def _as_type(rows_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """Asked first: ``to`` takes the host as long as an operation where it changes nothing."""
    return rows_RD if rows_RD.dtype == dtype else rows_RD.to(dtype)


# Feed-forward experts: GPT's two matrices, or SwiGLU's three with gate and up joined.


@dataclass(frozen=True)
class FeedForwardExperts:
    """Up, activation, down: GPT's two matrices or SwiGLU's three (gate and up joined).

    Weights of a slot, in order: up ``[F', D]``, up bias ``[F']`` if ``has_bias``, down ``[D, F]``,
    down bias ``[D]`` if ``has_bias``; F' is 2F where ``activation`` halves. Or those of stacks: of
    the first so many slots one tensor each, with the slots first, then of the slots behind these.

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
        if not self._is_grouped(weights):
            return self._slot_by_slot(rows_RD, slots, *self._by_name(weights))
        if self.is_stacked(weights):
            stacks = self._stacks(weights)
            runs = self._bounds(weights)
        else:
            by_name = self._by_name(weights)
            runs = runs_of(by_name)
            stacks = [tuple(stacked(own[start:stop]) for own in by_name) for start, stop in runs]
        if len(runs) == 1:
            return self._grouped(rows_RD, slots, stacks[0])
        slots_of = [slots.between(start, stop) for start, stop in runs]
        # Split, not narrowed: backward is one copy for all.
        parts = rows_RD.split([own.num_rows for own in slots_of])
        computed = zip(parts, slots_of, stacks)
        return torch.cat([self._grouped(rows, own, stack) for rows, own, stack in computed])

    def by_hand(
        self,
        rows_RD: Tensor,
        slots: SlotRows,
        weights: tuple[Tensor, ...],
        runs: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, SwiGluAdjoint, list[Tensor]] | None:
        """The same as a call, with an adjoint of its own; see ``swiglu``. None where autograd must
        find it: of other activations, with biases, under autocast, of mixed types."""
        is_plain = self.activation is silu_gated and not self.has_bias and bool(weights)
        if not is_plain or weights[0].dtype != weights[1].dtype:
            return None
        if torch.is_autocast_enabled(weights[0].device.type):
            return None
        return swiglu(rows_RD, slots, weights, runs, is_transposed=self.is_transposed)

    def arrangement(self, weights: tuple[Tensor, ...]) -> Arrangement:
        """How slots compute: in another order where that takes fewer GEMMs, at once or alone."""
        if self.is_stacked(weights):
            return Arrangement(None, self._bounds(weights))
        by_name = self._by_name(weights)
        num_slots = len(by_name[0])
        if num_slots > 1 and self._is_grouped(weights):
            return arranged(by_name)
        return Arrangement(None, ((0, num_slots),))

    def is_stacked(self, weights: tuple[Tensor, ...]) -> bool:
        return bool(weights) and weights[0].dim() == 3

    @property
    def _num_names(self) -> int:
        return 4 if self.has_bias else 2

    def _by_name(self, weights: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        by_name = [weights[i :: self._num_names] for i in range(self._num_names)]
        if self.is_stacked(weights):
            return [tuple(chain.from_iterable(map(torch.unbind, own))) for own in by_name]
        return by_name

    def _stacks(self, weights: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        size = self._num_names
        return [weights[first : first + size] for first in range(0, len(weights), size)]

    def _bounds(self, weights: tuple[Tensor, ...]) -> tuple[tuple[int, int], ...]:
        """First slot of each stack, and the first one behind it."""
        sizes = [stack.shape[0] for stack in weights[:: self._num_names]]
        return tuple(pairwise(accumulate(sizes, initial=0)))

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
            linear(self.activation(linear(rounded_up(rows), into)), out_of)[: rows.shape[0]]
            for rows, into, out_of in parts
        ]
        return torch.cat(outs).to(rows_RD.dtype)
