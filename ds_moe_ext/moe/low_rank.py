# SPDX-License-Identifier: Apache-2.0
"""A weight that experts use with the product of two small ones added, as LoRA trains it.

``W + strength * up @ down`` is computed once a pass on the rank that is home to the expert, in
memory of its own, and is what the program takes: copies carry it, and its gradient goes on from
there to both factors. Shape letters: S slots, O and I the dims of a weight, Q the width of its
factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import sum_in_place
from ds_moe_ext.moe.cell import whole_weights
from ds_moe_ext.moe.sharding import Along, Shard


@dataclass(frozen=True, eq=False)
class LowRank:
    """What is added to one weight of every expert. Its factors are weights of the expert as well.

    Attributes:
        weight: number of the weight ``[O, I]`` among those of an expert.
        down: number of the factor ``[Q, I]``.
        up: number of the factor ``[O, Q]``.
        is_transposed: the weight is stored ``[I, O]``.
        strength: what the product is multiplied by, as it is when asked; 0: nothing is added.
    """

    weight: int
    down: int
    up: int
    is_transposed: bool
    strength: Callable[[], float]

    def added_to(self, weight_S: Tensor, down_S: Tensor, up_S: Tensor) -> Tensor:
        """The weight of all slots as experts use it, in the weight's own type; each tensor has the
        slots first."""
        strength = self.strength()
        if not strength:
            return weight_S
        how = _How(self.is_transposed, strength)
        added: Tensor = _Added.apply(weight_S, down_S, up_S, how)
        return added

    def ways_to_split(self, along: Along) -> tuple[Along, Along]:
        """How the factors, down and up, are split where the weight is so: one as the weight, the
        other along Q, for each rank needs all of it and none has more to keep than another.

        Args:
            along: of the weight.
        """
        if self._splits_up(along):
            return Along(0), Along(0, along.num_blocks)
        return Along(1, along.num_blocks), Along(1)

    def _splits_up(self, along: Along) -> bool:
        """Whether the weight is split along O."""
        return along.dim == (1 if self.is_transposed else 0)

    def along_width(self, along: Along) -> int:
        """Number of the factor that is split along Q, where the weight is split so."""
        return self.down if self._splits_up(along) else self.up


def with_low_ranks(
    by_name: Sequence[Tensor],
    low_ranks: Sequence[LowRank],
    shard: Shard,
    cell: dist.ProcessGroup | None,
) -> list[Tensor]:
    """The weights that experts compute with, without the factors, which stand behind them.
    Collective over the cell where its ranks split experts.

    Args:
        by_name: all weights of this rank's experts, of all slots each, ``[S, ...]``.
        low_ranks: what is added to some of them.
        shard: the part that is here.
        cell: its ranks; None where experts are whole.
    """
    factors = {number for each in low_ranks for number in (each.down, each.up)}
    weights = [weight for number, weight in enumerate(by_name) if number not in factors]
    for each in low_ranks:
        own = {number: by_name[number] for number in (each.down, each.up)}
        if cell is not None and each.strength():
            number = each.along_width(shard.alongs[each.weight])
            own[number] = _OfCell.apply(own[number], shard, number, cell)
        weights[each.weight] = each.added_to(weights[each.weight], own[each.down], own[each.up])
    return weights


class _How(NamedTuple):
    """The product of two factors is added: transposed or not, times ``strength``."""

    is_transposed: bool
    strength: float


class _Added(torch.autograd.Function):
    """Keeps its factors past autograd's own saving: a block may begin the pass of the layer after
    it, but not where activation checkpointing computes it anew, which wants to find as many tensors
    saved. Factors are parameters, or made of them, and small."""

    @staticmethod
    def forward(ctx: Any, weight_S: Tensor, down_S: Tensor, up_S: Tensor, how: _How) -> Tensor:
        ctx.factors, ctx.how, ctx.dtype = (down_S, up_S), how, weight_S.dtype
        left, right = _sides(ctx)
        with torch.autocast(weight_S.device.type, enabled=False):
            return torch.baddbmm(weight_S, left, right, alpha=how.strength)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Any, ...]:
        (down_S, up_S), (left, right) = ctx.factors, _sides(ctx)
        with torch.autocast(grad_S.device.type, enabled=False):
            of_left, of_right = grad_S @ right.mT, left.mT @ grad_S
        is_transposed, strength = ctx.how
        of_up, of_down = (of_right.mT, of_left.mT) if is_transposed else (of_left, of_right)
        of_down = of_down.mul_(strength).to(down_S.dtype)
        of_up = of_up.mul_(strength).to(up_S.dtype)
        return grad_S if ctx.needs_input_grad[0] else None, of_down, of_up, None


def _sides(ctx: Any) -> tuple[Tensor, Tensor]:
    """Factors as they are multiplied: ``[S, O, Q]`` and ``[S, Q, I]``, or as it is stored."""
    down_S, up_S = (factor.detach().to(ctx.dtype) for factor in ctx.factors)
    return (down_S.mT, up_S.mT) if ctx.how.is_transposed else (up_S, down_S)


class _OfCell(torch.autograd.Function):
    """A factor of some experts, from the part of it that each of the cell's ranks has. Each rank
    has a part of the gradient of all of it."""

    @staticmethod
    def forward(
        ctx: Any, part_S: Tensor, shard: Shard, number: int, cell: dist.ProcessGroup
    ) -> Tensor:
        ctx.shard, ctx.number, ctx.cell = shard, number, cell
        return whole_weights(part_S, shard, number, cell)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Any, ...]:
        total_S = sum_in_place(grad_S.clone(memory_format=torch.contiguous_format), ctx.cell)
        return ctx.shard.of(ctx.number, total_S, first_dim=1), None, None, None
