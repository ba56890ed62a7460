"""Dispatch and Combine: rows to the cells of their experts and back, each the other's adjoint.

Shape letters: T tokens, N rows sent, R rows received, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import AllToAll, all_to_all_by_pairs, all_to_all_rows
from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.moe.order import LayerRoute, Route
from ds_moe_ext.schedule.task import Lane, Span


@dataclass(frozen=True)
class Wire:
    """The communicator and the algorithm of one direction.

    Attributes:
        group: the cells, in a communicator that only this lane uses; None where there is one cell.
        all_to_all: how rows are exchanged.
    """

    group: dist.ProcessGroup | None
    all_to_all: AllToAll = all_to_all_rows

    @classmethod
    def between(cls, layout: ParallelLayout, lane: Lane, device: torch.device) -> Wire:
        """The wire of a lane between the cells."""
        if layout.grid.num_cells == 1:
            return cls(None)
        by_pairs = layout.num_hosts > 1 and device.type == "cpu"
        return cls(layout.group("ep", lane), all_to_all_by_pairs if by_pairs else all_to_all_rows)

    def out(self, rows_ND: Tensor, route: Route) -> Tensor:
        """Rows ``[N, D]`` in send order to ``[R, D]`` in slot order at their experts."""
        if self.group is not None:
            rows_ND = self.all_to_all(rows_ND, route.sent_C, route.received_C, self.group)
        return route.to_slots(rows_ND)

    def home(self, rows_RD: Tensor, route: Route) -> Tensor:
        """Rows ``[R, D]`` in slot order back to ``[N, D]`` in send order at their tokens."""
        rows_RD = route.to_arrival(rows_RD)
        if self.group is None:
            return rows_RD
        return self.all_to_all(rows_RD, route.received_C, route.sent_C, self.group)


@dataclass(frozen=True)
class Dispatch:
    """Reads x ``[T, D]`` and the route; writes the rows that arrived, ``[R, D]`` in slot order."""

    wire: Wire
    back_wire: Wire  # of the lane in which gradients return

    def forward(
        self, span: Span, x_TD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        route = layer_route.on(span)
        sent_ND = x_TD.detach().index_select(0, route.token_N)
        return (self.wire.out(sent_ND, route),), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_RD: Tensor) -> tuple[Any, ...]:
        route = saved[0].on(span)
        return (route.sum_by_token(self.back_wire.home(grad_RD, route)),)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        return pieces[0][1]


@dataclass(frozen=True)
class Combine:
    """Reads expert outputs ``[R, D]`` in slot order and the route; writes ``[N, D]``."""

    wire: Wire
    back_wire: Wire

    def forward(
        self, span: Span, computed_RD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        returned_ND = self.wire.home(computed_RD.detach(), layer_route.on(span))
        return (returned_ND,), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_ND: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.out(grad_ND, saved[0].on(span)),)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        return pieces[0][1]
