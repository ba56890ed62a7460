# SPDX-License-Identifier: Apache-2.0
"""Dispatch and Combine: rows to the cells of their experts and back, each the other's adjoint.

Shape letters: T tokens, N rows sent, R rows received, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.all_to_all import (
    Carrier,
    Channel,
    Planner,
    Reach,
    Relays,
    Trip,
    by_leaders,
    by_places,
)
from ds_moe_ext.comm import AllToAll, all_to_all_by_pairs, all_to_all_rows
from ds_moe_ext.cost.exchange import Way
from ds_moe_ext.layout import BETWEEN_NODES, WITHIN_NODES, ParallelLayout
from ds_moe_ext.moe.codecs import Coding
from ds_moe_ext.moe.deep_ep import DeepEp
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.crew import SavesAlike
from ds_moe_ext.schedule.task import Lane, Span

PLANNERS: Mapping[Way, Planner] = {Way.BY_LEADERS: by_leaders, Way.BY_PLACES: by_places}
"""Of ``BY_NODES``."""


def carrier_of(layout: ParallelLayout, lane: Lane, way: Way, direct: Channel) -> Carrier | None:
    """This rank's part in a way between the cells; None where that is the direct one.

    Args:
        layout: built with ``NODE_AXES`` of the lane, if the way leads by the nodes.
        lane: that the rows travel in.
        way: which.
        direct: between all cells.
    """
    if way is Way.DEEP_EP:
        return DeepEp.of(direct.group)
    if way not in PLANNERS or layout.why_flat:
        return None
    channels = {
        Reach.WITHIN: Channel(layout.group(WITHIN_NODES, lane)),
        Reach.BETWEEN: replace(direct, group=layout.group(BETWEEN_NODES, lane)),
    }
    return Relays(PLANNERS[way], layout.nodes, layout.index("ep"), channels)


@dataclass(frozen=True)
class Wire:
    """The communicator and the algorithm of one direction.

    Attributes:
        group: the cells, in a communicator that only this lane uses; None where there is one cell.
        all_to_all: how rows are exchanged.
        coding: what they travel as; None: as they are. Where nothing travels nothing is encoded.
        carrier: how they go another way than straight from each cell to each; None: so.
        node_channels: within and between the nodes, where a token's row goes once to a node.
    """

    group: dist.ProcessGroup | None
    all_to_all: AllToAll = all_to_all_rows
    coding: Coding | None = None
    carrier: Carrier | None = None
    node_channels: Mapping[Reach, Channel] | None = None

    @classmethod
    def between(
        cls, layout: ParallelLayout, lane: Lane, device: torch.device, way: Way = Way.DIRECT
    ) -> Wire:
        """The wire of a lane between the cells."""
        if layout.grid.num_cells == 1:
            return cls(None)
        by_pairs = layout.num_hosts > 1 and device.type == "cpu"
        all_to_all = all_to_all_by_pairs if by_pairs else all_to_all_rows
        direct = Channel(layout.group("ep", lane), all_to_all)
        return cls(direct.group, all_to_all, carrier=carrier_of(layout, lane, way, direct))

    def by_nodes(self) -> Wire:
        """The same wire, on which a row travels once to a node."""
        assert isinstance(self.carrier, Relays)
        return replace(self, carrier=None, node_channels=self.carrier.channels)

    def through(self, coding: Coding | None) -> Wire:
        """The same wire, on which rows travel encoded."""
        return replace(self, coding=coding)

    def out(self, rows_ND: Tensor, span: Span, layer_route: LayerRoute) -> Tensor:
        """Rows ``[N, D]`` in send order to ``[R, D]`` in slot order at their experts."""
        splits = layer_route.splits(span)
        if splits.stays:
            arrived_RD = rows_ND
        elif self.carrier is None and self.node_channels is None:
            arrived_RD = self._directly(rows_ND, splits.sent_C, splits.received_C)
        else:
            arrived_RD = self._coded(self._trip(span, layer_route).out, rows_ND)
        return layer_route.on(span).to_slots(arrived_RD)

    def home(
        self,
        rows_RD: Tensor,
        span: Span,
        layer_route: LayerRoute,
        weight_R: Tensor | None = None,
    ) -> Tensor:
        """Rows ``[R, D]`` in slot order back to ``[N, D]`` in send order at their tokens.

        Args:
            weight_R: of rows that are added up before they travel.
        """
        splits = layer_route.splits(span)
        rows_RD = layer_route.on(span).to_arrival(rows_RD, weight_R)
        if splits.stays:
            return rows_RD
        if self.carrier is None and self.node_channels is None:
            return self._directly(rows_RD, splits.received_C, splits.sent_C)
        return self._coded(self._trip(span, layer_route).home, rows_RD)

    def _trip(self, span: Span, layer_route: LayerRoute) -> Trip:
        if self.node_channels is not None:
            return layer_route.node_trip(span, self.node_channels)
        assert self.carrier is not None
        return layer_route.trip(span, self.carrier)

    def _directly(self, rows: Tensor, sent_C: Sequence[int], received_C: Sequence[int]) -> Tensor:
        group = self.group
        assert group is not None, "one cell exchanges nothing"
        if self.coding is None:
            return self.all_to_all(rows, sent_C, received_C, group)
        return self.coding.around(
            lambda sent: self.all_to_all(sent, sent_C, received_C, group), rows
        )

    def _coded(self, travel: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return travel(rows) if self.coding is None else self.coding.around(travel, rows)


@dataclass(frozen=True)
class Dispatch(SavesAlike):
    """Reads x ``[T, D]`` and the route; writes the rows that arrived, ``[R, D]`` in slot order.

    Attributes:
        wire: there.
        back_wire: of the lane in which gradients return.
        sent: called when all rows of a pass are sent.
    """

    wire: Wire
    back_wire: Wire
    sent: Callable[[], None] = lambda: None

    def forward(
        self, span: Span, x_TD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        sent_ND = layer_route.sent_rows(span, x_TD.detach())
        arrived_RD = self.wire.out(sent_ND, span, layer_route)
        if span.stop == layer_route.cut.num_chunks:
            self.sent()
        return (arrived_RD,), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_RD: Tensor) -> tuple[Any, ...]:
        returned_ND = self.back_wire.home(grad_RD, span, saved[0])
        return (saved[0].on(span).sum_by_token(returned_ND),)


@dataclass(frozen=True)
class Combine(SavesAlike):
    """Reads expert outputs ``[R, D]`` in slot order and the route; writes ``[N, D]``."""

    wire: Wire
    back_wire: Wire

    def forward(
        self, span: Span, computed_RD: Tensor, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        returned_ND = self.wire.home(computed_RD.detach(), span, layer_route)
        return (returned_ND,), (layer_route,)

    def backward(self, span: Span, saved: tuple[Any, ...], grad_ND: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.out(grad_ND, span, saved[0]),)
