# SPDX-License-Identifier: Apache-2.0
"""How the ranks of an ETP group split every expert: expert-sharding parallelism (FSMoE, spec 1.6).

Rank ``p`` of ``P`` has the ``p``-th part of the expert's hidden width: rows of the matrices that
lead to it, columns of those that lead from it. What each computes of a row is a partial sum. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import (
    AllToAll,
    all_gather_rows,
    all_gather_slots,
    all_to_all_rows,
    reduce_scatter_rows,
    sum_in_place,
)
from ds_moe_ext.moe.codecs import Coding
from ds_moe_ext.moe.route import EtpRoute, LayerRoute
from ds_moe_ext.schedule.stages import Done, Saved, SavesAlike
from ds_moe_ext.schedule.task import ChunkRange


class Along(NamedTuple):
    """How one weight is split."""

    dim: int  # along which
    # equal blocks of that dim, each split by itself: 2 where gate and up are joined
    num_blocks: int = 1
    # it is added to the output, as a bias is: a part adds to its own places only
    adds: bool = False


class Stretch(NamedTuple):
    """Consecutive places of one dim that a part has from the whole."""

    start: int  # first place in the whole
    own_start: int  # first place in the part
    length: int  # places


@dataclass(frozen=True)
class Shard:
    """The part of every expert that one rank of an ETP group has."""

    # how each weight is split, in the order of the weights' names; of whole experts they say
    # nothing
    alongs: tuple[Along, ...] = ()
    index: int = 0  # this rank's place in the ETP group
    num_shards: int = 1  # ranks of the ETP group

    @property
    def is_whole(self) -> bool:
        return self.num_shards == 1

    def stretches(self, number: int, whole_length: int) -> Iterator[Stretch]:
        """What the part has of the dim that a weight is split along."""
        if self.is_whole:
            yield Stretch(0, 0, whole_length)
            return
        block = whole_length // self.alongs[number].num_blocks
        length = block // self.num_shards
        for i in range(self.alongs[number].num_blocks):
            yield Stretch(i * block + self.index * length, i * length, length)

    def whole_shape(self, number: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a weight, from the shape of its part."""
        whole = list(shape)
        if not self.is_whole:
            whole[self.alongs[number].dim] *= self.num_shards
        return tuple(whole)

    def widened(self, number: int, weight: Tensor) -> Tensor:
        """What is added to the output, ``[..., D]``, from this part of it: zeros elsewhere."""
        if self.is_whole or not self.alongs[number].adds:
            return weight
        length = weight.shape[-1]
        before = self.index * length
        after = (self.num_shards - 1) * length - before
        return torch.nn.functional.pad(weight, (before, after))

    def of(self, number: int, weight: Tensor, *, first_dim: int = 0) -> Tensor:
        """The part of a weight; the weight itself if experts are whole.

        Args:
            number: of the weight.
            weight: one expert's, or that of several.
            first_dim: dims before the expert's own.
        """
        if self.is_whole:
            return weight
        dim = self.alongs[number].dim + first_dim
        places = self.stretches(number, weight.shape[dim])
        parts = [weight.narrow(dim, start, length) for start, _, length in places]
        return torch.cat(parts, dim)


WHOLE = Shard()
"""Of experts that nobody splits."""


# The ETP group: its ranks gather each other's rows, and scatter the sums of what they computed of
# them.


@dataclass(frozen=True)
class EtpWire:
    # the ranks of the ETP group, in a communicator that only one stream uses
    group: dist.ProcessGroup
    all_to_all: AllToAll = all_to_all_rows  # how partial sums are exchanged
    # what rows travel as; None: as they are. All ranks decode the same, their own too.
    coding: Coding | None = None

    def through(self, coding: Coding | None) -> EtpWire:
        """The same wire, on which rows travel encoded."""
        return replace(self, coding=coding)

    def gather(self, rows_RD: Tensor, route: EtpRoute) -> Tensor:
        """Rows ``[R, D]`` to those of the ETP group, ``[G, D]``; both in slot order."""

        def travel(rows_RB: Tensor) -> Tensor:
            return all_gather_rows(rows_RB, route.rows_P, self.group)

        coding = self.coding
        gathered_GD = travel(rows_RD) if coding is None else coding.around(travel, rows_RD)
        return route.sorting.to_slots(gathered_GD)

    def scatter(self, partial_GD: Tensor, route: EtpRoute) -> Tensor:
        """Partial sums ``[G, D]`` to the sums of the rows that are here, ``[R, D]``. Summands
        are encoded one by one, and added up decoded."""
        coding, plainly = self.coding, self.all_to_all

        def encoded(rows_GD: Tensor, *how: Any) -> Tensor:
            assert coding is not None
            return coding.around(lambda rows: plainly(rows, *how), rows_GD)

        all_to_all = plainly if coding is None else encoded
        return reduce_scatter_rows(
            route.sorting.back(partial_GD), route.rows_P, self.group, all_to_all
        )


@dataclass(frozen=True)
class EtpGather(SavesAlike):
    """Reads rows ``[R, D]`` and the route; writes those of all ranks of the ETP group, ``[G,
    D]``."""

    wire: EtpWire
    back_wire: EtpWire  # of gradients

    def forward(self, chunk_range: ChunkRange, rows_RD: Tensor, layer_route: LayerRoute) -> Done:
        return (self.wire.gather(rows_RD.detach(), layer_route.in_etp_group(chunk_range)),), (
            layer_route,
        )

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_GD: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.scatter(grad_GD, saved[0].in_etp_group(chunk_range)),)


@dataclass(frozen=True)
class EtpScatter(SavesAlike):
    """Reads partial sums ``[G, D]`` and the route; writes the sums of this rank's rows,
    ``[R, D]``."""

    wire: EtpWire
    back_wire: EtpWire

    def forward(self, chunk_range: ChunkRange, partial_GD: Tensor, layer_route: LayerRoute) -> Done:
        return (self.wire.scatter(partial_GD.detach(), layer_route.in_etp_group(chunk_range)),), (
            layer_route,
        )

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_RD: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.gather(grad_RD, saved[0].in_etp_group(chunk_range)),)


def whole_weights(part_S: Tensor, shard: Shard, number: int, group: dist.ProcessGroup) -> Tensor:
    """A weight of some experts, ``[S, ...]``, from the part of it that each rank of an ETP group
    has. Collective.

    Args:
        part_S: of this rank, ``[S, ...]``.
        shard: what it has of an expert.
        number: of the weight among those of an expert.
        group: the ranks of the ETP group.
    """
    num_experts, *shape = part_S.shape
    whole = shard.whole_shape(number, shape)
    whole_S, dim = part_S.new_empty(num_experts, *whole), shard.alongs[number].dim
    if not num_experts:
        return whole_S
    parts = all_gather_slots(part_S, [num_experts] * shard.num_shards, group)
    for index, of_rank in enumerate(parts.split(num_experts)):
        places = replace(shard, index=index).stretches(number, whole[dim])
        for start, own_start, length in places:
            to = whole_S.narrow(dim + 1, start, length)
            to.copy_(of_rank.narrow(dim + 1, own_start, length))
    return whole_S


# A weight that experts use with the product of two small ones added, as LoRA trains it.


@dataclass(frozen=True, eq=False)
class LowRank:
    """What is added to one weight of every expert. Its factors are weights of the expert as
    well."""

    weight: int  # number of the weight ``[O, I]`` among those of an expert
    down: int  # number of the factor ``[Q, I]``
    up: int  # number of the factor ``[O, Q]``
    is_transposed: bool  # the weight is stored ``[I, O]``
    # what the product is multiplied by, as it is when asked; 0: nothing is added
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
        other along Q, for each rank needs all of it and none has more to keep than another."""
        if self._splits_up(along):
            return Along(0), Along(0, along.num_blocks)
        return Along(1, along.num_blocks), Along(1)

    def _splits_up(self, along: Along) -> bool:
        return along.dim == (1 if self.is_transposed else 0)

    def along_width(self, along: Along) -> int:
        """Number of the factor that is split along Q, where the weight is split so."""
        return self.down if self._splits_up(along) else self.up


def with_low_ranks(
    by_name: Sequence[Tensor],
    low_ranks: Sequence[LowRank],
    shard: Shard,
    ep_rank: dist.ProcessGroup | None,
) -> list[Tensor]:
    """The weights that experts compute with, without the factors, which stand behind them.
    Collective over the ETP group where its ranks split experts.

    Args:
        by_name: all weights of this rank's experts, of all slots each, ``[S, ...]``.
        low_ranks: what is added to some of them.
        shard: the part that is here.
        ep_rank: the ranks of the ETP group; None where experts are whole.
    """
    factors = {number for each in low_ranks for number in (each.down, each.up)}
    weights = [weight for number, weight in enumerate(by_name) if number not in factors]
    for each in low_ranks:
        own = {number: by_name[number] for number in (each.down, each.up)}
        if ep_rank is not None and each.strength():
            number = each.along_width(shard.alongs[each.weight])
            own[number] = _OfEpRank.apply(own[number], shard, number, ep_rank)
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


class _OfEpRank(torch.autograd.Function):
    """A factor of some experts, from the part of it that each rank of the ETP group has. Each rank
    has a part of the gradient of all of it."""

    @staticmethod
    def forward(
        ctx: Any, part_S: Tensor, shard: Shard, number: int, ep_rank: dist.ProcessGroup
    ) -> Tensor:
        ctx.shard, ctx.number, ctx.ep_rank = shard, number, ep_rank
        return whole_weights(part_S, shard, number, ep_rank)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Any, ...]:
        total_S = sum_in_place(grad_S.clone(memory_format=torch.contiguous_format), ctx.ep_rank)
        return ctx.shard.of(ctx.number, total_S, first_dim=1), None, None, None
