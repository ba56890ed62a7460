# SPDX-License-Identifier: Apache-2.0
"""Feed-forward experts: GPT's two matrices, or SwiGLU's three with gate and up joined.

Shape letters: R rows, S slots, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from ds_moe_ext.moe.grouped_linear import grouped_linear, rounded_up
from ds_moe_ext.moe.memory_order import Arrangement, arranged, stacked
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.moe.swiglu import SwiGluAdjoint, silu_gated, swiglu
from ds_moe_ext.side_by_side import runs_of


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
        find it: of other activations, with biases, under autocast, of mixed types.

        Args:
            runs: of slots, by ``arrangement``.
        """
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
        """Whether each is of several slots."""
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
        """The weights of each stack."""
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
