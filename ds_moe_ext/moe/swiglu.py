# SPDX-License-Identifier: Apache-2.0
"""SwiGLU experts, with their adjoint written out: what autograd would record, and keep, is not.

The rows of a run of slots whose weights lie at equal distances are one grouped GEMM a matrix; other
rows go slot by slot. Shape letters: R rows, S slots, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_moe_ext import kernels
from ds_moe_ext.moe.grouped_linear import has_grouped_mm, rounded_up, with_rows
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.side_by_side import as_one

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
    """Slots that are computed at once.

    Attributes:
        start: the first one.
        stop: behind the last.
        num_rows: of them all.
        end_S: where the rows of each end, for one grouped GEMM; None for one slot.
    """

    start: int
    stop: int
    num_rows: int
    end_S: Tensor | None

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
    """Gradients of SwiGLU experts.

    Attributes:
        runs: of slots.
        wanted: gradients.
        is_transposed: weights are stored ``[in, out]``.
        stacks: slots ``start`` to ``stop`` whose weights came as one tensor a name; none where they
            came slot by slot.
        dtype: of the rows as they came.
    """

    runs: tuple[_Run, ...]
    wanted: Wanted
    is_transposed: bool
    stacks: Sequence[tuple[int, int]]
    dtype: torch.dtype

    def gradients(self, kept: Sequence[Tensor], grad_RD: Tensor) -> tuple[Any, ...]:
        """Of the rows, ``[R, D]``, and of the weights, as they came; None where it is not wanted.

        Args:
            kept: as forward gave it.
            grad_RD: of what it wrote.
        """
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
    """Gradients of a weight.

    Attributes:
        of_runs: of each run so far; none where they are not wanted.
        stacks: in which those of slots are put that are computed one by one, by the first of each.
        rooms: of each slot there.
    """

    of_runs: list[Tensor]
    stacks: Mapping[int, Tensor] = MappingProxyType({})
    rooms: Mapping[int, Tensor] = MappingProxyType({})


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
    """Up and down of each run."""
    if weights[0].dim() == 3:
        return zip(weights[::2], weights[1::2])
    up_S, down_S = weights[::2], weights[1::2]
    return ((up_S[start:stop], down_S[start:stop]) for start, stop in runs)


def _each(run_S: _Run_S) -> Sequence[Tensor]:
    """One by one."""
    return run_S.unbind() if isinstance(run_S, Tensor) else run_S


def _at_once(run_S: _Run_S) -> Tensor:
    """Stacked."""
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
