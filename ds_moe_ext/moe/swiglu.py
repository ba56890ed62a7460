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
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    return _silu(gate_RF).mul_(up_RF)


def _product_grad(gate_up_RF: Tensor, grad_RF: Tensor) -> Tensor:
    """Of gate and up, ``[R, 2F]``; silu is computed again."""
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    grad_gate_up_RF = torch.empty_like(gate_up_RF)
    grad_gate_RF, grad_up_RF = grad_gate_up_RF.chunk(2, dim=-1)
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

    def apart(self, grad: Tensor | None) -> Sequence[Tensor | None]:
        """A weight's gradient, slot by slot."""
        if grad is None:
            return [None] * (self.stop - self.start)
        return (grad,) if self.end_S is None else grad.unbind()

    def own(self, rows_RD: Tensor) -> Tensor:
        """Without those that were added to round their number up."""
        return rows_RD if rows_RD.shape[0] == self.num_rows else rows_RD[: self.num_rows]

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """Slot by slot."""
        if self.end_S is None:
            return one @ other
        return torch.nn.functional.grouped_mm(one, other, offs=self.end_S)


_NUM_KEPT = 5  # of each run: rows, gate and up, their product, the weights up and down


@dataclass(frozen=True, eq=False, slots=True)
class SwiGluAdjoint:
    """Gradients of SwiGLU experts.

    Attributes:
        runs: of slots.
        wanted: gradients.
        is_transposed: weights are stored ``[in, out]``.
        dtype: of the rows as they came.
    """

    runs: tuple[_Run, ...]
    wanted: Wanted
    is_transposed: bool
    dtype: torch.dtype

    def gradients(self, kept: Sequence[Tensor], grad_RD: Tensor) -> tuple[Any, ...]:
        """Of the rows, ``[R, D]``, and of the weights, slot by slot; None where it is not wanted.

        Args:
            kept: as forward gave it.
            grad_RD: of what it wrote.
        """
        rows: list[Tensor | None] = []
        grads: list[Tensor | None] = []
        for number, (run, part_RD) in enumerate(zip(self.runs, _parts(grad_RD, self.runs))):
            of_run = kept[_NUM_KEPT * number :][:_NUM_KEPT]
            grad_rows, grad_up, grad_down = self._of_run(run, of_run, part_RD)
            rows.append(grad_rows)
            grads += chain.from_iterable(zip(run.apart(grad_up), run.apart(grad_down)))
        return _joined(rows, self.dtype) if self.wanted.rows else None, tuple(grads)

    def _of_run(
        self, run: _Run, kept: Sequence[Tensor], grad_RD: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the rows, of the weights up and of those down."""
        rows_RD, gate_up_RF, product_RF, up, down = kept
        grad_RD = with_rows(grad_RD.to(rows_RD.dtype), rows_RD.shape[0])
        grad_down = self._of_weight(run, grad_RD, product_RF) if self.wanted.down else None
        if not self.wanted.rows and not self.wanted.up:
            return None, None, grad_down
        grad_RF = _product_grad(gate_up_RF, run.product(grad_RD, self._back(down)))
        grad_up = self._of_weight(run, grad_RF, rows_RD) if self.wanted.up else None
        if not self.wanted.rows:
            return None, grad_up, grad_down
        return run.own(run.product(grad_RF, self._back(up))), grad_up, grad_down

    def _back(self, weight: Tensor) -> Tensor:
        return weight.mT if self.is_transposed else weight

    def _of_weight(self, run: _Run, grad: Tensor, rows: Tensor) -> Tensor:
        one, other = (rows, grad) if self.is_transposed else (grad, rows)
        return run.product(one.mT, other)


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
        weights: up ``[2F, D]`` and down ``[D, F]`` of each slot, or these transposed.
        runs: slots ``start`` to ``stop`` whose weights can be stacked.
        is_transposed: they are.

    Returns:
        Rows ``[R, D]``, the adjoint and what it takes.
    """
    up_S, down_S = weights[::2], weights[1::2]
    trained = (any(weight.requires_grad for weight in own) for own in (up_S, down_S))
    wanted = Wanted(rows_RD.requires_grad, *trained)
    rows = rows_RD.detach().to(up_S[0].dtype)
    kept: list[Tensor] = []
    outs: list[Tensor | None] = []
    with torch.no_grad():
        own = tuple(_runs(rows, slots, up_S, down_S, runs))
        for (run, up, down), part in zip(own, _parts(rows, [run for run, _, _ in own])):
            part_RD = rounded_up(part) if part.is_cpu else part
            gate_up_RF = run.product(part_RD, up if is_transposed else up.mT)
            product_RF = _product(gate_up_RF)
            outs.append(run.own(run.product(product_RF, down if is_transposed else down.mT)))
            kept += part_RD, gate_up_RF, product_RF, up, down
    adjoint = SwiGluAdjoint(tuple(run for run, _, _ in own), wanted, is_transposed, rows_RD.dtype)
    return _joined(outs, rows_RD.dtype), adjoint, kept


def _runs(
    rows_RD: Tensor,
    slots: SlotRows,
    up_S: Sequence[Tensor],
    down_S: Sequence[Tensor],
    found: Sequence[tuple[int, int]],
) -> Iterator[tuple[_Run, Tensor, Tensor]]:
    """What is computed at once, with its weights. On a CPU one expert after the other, from its
    rows to its output: what lies between fits the caches, where that of all experts at once would
    go through memory."""
    for start, stop in found:
        if stop - start > 1 and not rows_RD.is_cpu:
            up, down = (as_one(own[start:stop]) for own in (up_S, down_S))
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


def _joined(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    rows_RD = (
        parts[0] if len(parts) == 1 else torch.cat([part for part in parts if part is not None])
    )
    assert rows_RD is not None
    return rows_RD.to(dtype)
