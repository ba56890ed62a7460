# SPDX-License-Identifier: Apache-2.0
"""The cell: its ranks gather each other's rows, and scatter the sums of what they computed of them.

Where the ranks of a cell split every expert, each computes with its part on the rows of all; the
outputs are partial sums. Each stage is the other's adjoint (FSMoE, spec 1.7). Shape letters: R rows
that arrived here, G rows of the whole cell, D model width, B numbers that a row travels as.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import (
    AllToAll,
    all_gather_rows,
    all_gather_slots,
    all_to_all_rows,
    reduce_scatter_rows,
)
from ds_moe_ext.moe.codecs import Coding
from ds_moe_ext.moe.route import CellRoute, LayerRoute
from ds_moe_ext.moe.sharding import Shard
from ds_moe_ext.schedule.crew import SavesAlike
from ds_moe_ext.schedule.task import Span


@dataclass(frozen=True)
class CellWire:
    """The communicator of a cell.

    Attributes:
        group: the ranks of the cell, in a communicator that only one lane uses.
        all_to_all: how partial sums are exchanged.
        coding: what rows travel as; None: as they are. All ranks decode the same, their own too.
    """

    group: dist.ProcessGroup
    all_to_all: AllToAll = all_to_all_rows
    coding: Coding | None = None

    def through(self, coding: Coding | None) -> CellWire:
        """The same wire, on which rows travel encoded."""
        return replace(self, coding=coding)

    def gather(self, rows_RD: Tensor, route: CellRoute) -> Tensor:
        """Rows ``[R, D]`` to those of the cell, ``[G, D]``; both in slot order."""

        def travel(rows_RB: Tensor) -> Tensor:
            return all_gather_rows(rows_RB, route.rows_P, self.group)

        coding = self.coding
        gathered_GD = travel(rows_RD) if coding is None else coding.around(travel, rows_RD)
        return route.to_slots(gathered_GD)

    def scatter(self, partial_GD: Tensor, route: CellRoute) -> Tensor:
        """Partial sums ``[G, D]`` to the sums of the rows that are here, ``[R, D]``. Summands
        are encoded one by one, and added up decoded."""
        by_place_GD = route.to_places(partial_GD)
        coding, plainly = self.coding, self.all_to_all

        def encoded(
            rows_GD: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
        ) -> Tensor:
            assert coding is not None
            return coding.around(lambda rows: plainly(rows, sent, received, group), rows_GD)

        all_to_all = plainly if coding is None else encoded
        return reduce_scatter_rows(by_place_GD, route.rows_P, self.group, all_to_all)


@dataclass(frozen=True)
class CellGather(SavesAlike):
    """Reads rows ``[R, D]`` and the route; writes those of all ranks of the cell, ``[G, D]``."""

    wire: CellWire
    back_wire: CellWire  # of gradients

    def forward(
        self, span: Span, rows_RD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (self.wire.gather(rows_RD.detach(), layer_route.in_cell(span)),), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_GD: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.scatter(grad_GD, saved[0].in_cell(span)),)


@dataclass(frozen=True)
class CellScatter(SavesAlike):
    """Reads partial sums ``[G, D]`` and the route; writes the sums of this rank's rows,
    ``[R, D]``."""

    wire: CellWire
    back_wire: CellWire

    def forward(
        self, span: Span, partial_GD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (self.wire.scatter(partial_GD.detach(), layer_route.in_cell(span)),), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_RD: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.gather(grad_RD, saved[0].in_cell(span)),)


def whole_weights(part_S: Tensor, shard: Shard, number: int, group: dist.ProcessGroup) -> Tensor:
    """A weight of some experts, ``[S, ...]``, from the part of it that each of a cell's ranks has.
    Collective.

    Args:
        part_S: of this rank, ``[S, ...]``.
        shard: what it has of an expert.
        number: of the weight among those of an expert.
        group: the ranks of the cell.
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
