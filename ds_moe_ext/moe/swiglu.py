# SPDX-License-Identifier: Apache-2.0
"""SwiGLU experts, with their adjoint written out: what autograd would record, and keep, is not.

The rows of a run of slots whose weights lie at equal distances are one grouped GEMM a matrix; other
rows go slot by slot. Shape letters: R rows, S slots, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.moe.grouped_linear import has_grouped_mm, rounded_up, with_rows
from ds_moe_ext.moe.memory_order import as_one
from ds_moe_ext.moe.slot_rows import SlotRows

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
    gate_RF, up_RF = _halves(gate_up_RF)
    return _silu(gate_RF).mul_(up_RF)


def _halves(gate_up_RF: Tensor) -> Sequence[Tensor]:
    half = gate_up_RF.shape[-1] // 2
    return gate_up_RF.split_with_sizes((half, half), -1)  # what ``chunk`` comes to in the end


def _product_grad(gate_up_RF: Tensor, grad_RF: Tensor) -> Tensor:
    """Of gate and up, ``[R, 2F]``; silu is computed again."""
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
        return torch.nn.functional.grouped_mm(one, other, offs=self.end_S)


_NUM_KEPT = 5  # of each run: rows, gate and up, their product, the weights up and down


@dataclass(frozen=True, eq=False, slots=True)
class SwiGluAdjoint:
    """Gradients of SwiGLU experts.

    Attributes:
        runs: of slots.
        wanted: gradients.
        is_transposed: weights are stored ``[in, out]``.
        is_stacked: they came as one tensor a name.
        dtype: of the rows as they came.
    """

    runs: tuple[_Run, ...]
    wanted: Wanted
    is_transposed: bool
    is_stacked: bool
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
        if self.is_stacked:
            return grad_rows, (grads_up.stack_S, grads_down.stack_S)
        return grad_rows, tuple(chain.from_iterable(zip(grads_up.by_slot, grads_down.by_slot)))

    def _room(self, is_wanted: bool, last: Tensor) -> _WeightGrads:
        """For a weight, of which the last run's is known."""
        num_slots = self.runs[-1].stop
        if is_wanted and self.is_stacked and len(self.runs) > 1:  # slot by slot into one
            stack_S = last.new_empty(num_slots, *last.shape)
            return _WeightGrads(list(stack_S), stack_S)
        return _WeightGrads([None] * num_slots)

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
        if grads.stack_S is not None:
            run.product(one.mT, other, grads.by_slot[run.start])
            return
        found = run.product(one.mT, other)
        if self.is_stacked:
            grads.stack_S = found if run.end_S is not None else found[None]
        elif run.end_S is None:
            grads.by_slot[run.start] = found
        else:
            grads.by_slot[run.start : run.stop] = found.unbind()


@dataclass(eq=False, slots=True)
class _WeightGrads:
    """Gradients of a weight.

    Attributes:
        by_slot: of each slot.
        stack_S: of all, where the weights came so.
    """

    by_slot: list[Tensor | None]
    stack_S: Tensor | None = None


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
        weights: up ``[2F, D]`` and down ``[D, F]`` of each slot, or these transposed; or of all
            slots one ``[S, 2F, D]`` and one ``[S, D, F]``.
        runs: slots ``start`` to ``stop`` whose weights can be stacked.
        is_transposed: they are.

    Returns:
        Rows ``[R, D]``, the adjoint and what it takes.
    """
    is_stacked = weights[0].dim() == 3
    up_S, down_S = weights if is_stacked else (weights[::2], weights[1::2])
    wanted = Wanted(rows_RD.requires_grad, *map(_is_trained, (up_S, down_S)))
    rows = _as_type(rows_RD.detach(), weights[0].dtype)
    kept: list[Tensor] = []
    outs: list[Tensor] = []
    own = tuple(_runs(rows, slots, up_S, down_S, runs))
    for (run, up, down), part in zip(own, _parts(rows, [run for run, _, _ in own])):
        part_RD = rounded_up(part) if part.is_cpu else part
        gate_up_RF = run.product(part_RD, up if is_transposed else up.mT)
        product_RF = _product(gate_up_RF)
        outs.append(run.own(run.product(product_RF, down if is_transposed else down.mT)))
        kept += part_RD, gate_up_RF, product_RF, up, down
    found = tuple(run for run, _, _ in own)
    adjoint = SwiGluAdjoint(found, wanted, is_transposed, is_stacked, rows_RD.dtype)
    return _joined(outs, rows_RD.dtype), adjoint, kept


_BySlot = Tensor | Sequence[Tensor]
"""A weight of all slots, stacked or one by one."""


def _is_trained(weight_S: _BySlot) -> bool:
    if isinstance(weight_S, Tensor):
        return weight_S.requires_grad
    return any(weight.requires_grad for weight in weight_S)


def _at_once(weight_S: _BySlot, start: int, stop: int) -> Tensor:
    """Of some slots, stacked."""
    if not isinstance(weight_S, Tensor):
        return as_one(weight_S[start:stop])
    all_S = weight_S.detach()
    return all_S if stop - start == len(all_S) else all_S[start:stop]


def _runs(
    rows_RD: Tensor,
    slots: SlotRows,
    up_S: _BySlot,
    down_S: _BySlot,
    found: Sequence[tuple[int, int]],
) -> Iterator[tuple[_Run, Tensor, Tensor]]:
    """What is computed at once, with its weights. On a CPU one expert after the other, from its
    rows to its output: what lies between fits the caches, where that of all experts at once would
    go through memory."""
    for start, stop in found:
        if stop - start > 1 and not rows_RD.is_cpu:
            up, down = (_at_once(own, start, stop) for own in (up_S, down_S))
            if has_grouped_mm(rows_RD, up) and has_grouped_mm(rows_RD, down):
                own = slots if len(found) == 1 else slots.between(start, stop)
                yield _Run(start, stop, own.num_rows, own.end_S), up, down
                continue
        # Slots without rows take part: their weights get gradients of zeros.
        for slot in range(start, stop):
            num_rows = slots.num_rows if len(up_S) == 1 else slots.on_host()[slot]
            run = _Run(slot, slot + 1, num_rows, None)
            yield run, up_S[slot].detach(), down_S[slot].detach()


def _parts(rows_RD: Tensor, runs: Sequence[_Run]) -> Sequence[Tensor]:
    if len(runs) == 1:
        return (rows_RD,)
    return rows_RD.split([run.num_rows for run in runs])


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return _as_type(parts[0] if len(parts) == 1 else torch.cat(parts), dtype)


def _as_type(rows_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """Asked first: ``to`` takes the host as long as an operation where it changes nothing."""
    return rows_RD if rows_RD.dtype == dtype else rows_RD.to(dtype)
