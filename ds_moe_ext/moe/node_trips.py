# SPDX-License-Identifier: Apache-2.0
"""Rows that go once to a node: over to it, on to its cells; and sums of what these made back.

Of ``visits.Visits`` by way of the nodes: each row is taken to all cells of a node where its token
has experts, and what comes back is added up before it leaves the node. Shape letters: V nodes, G
cells of a node, U visits of nodes that leave this cell, H visits of its node that come to it, to be
handed on; W visits of this cell that arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ds_moe_ext.all_to_all import Channel, Reach
from ds_moe_ext.moe.visits import Leaving, Legs


@dataclass(frozen=True, eq=False)
class NodeTrip:
    """A ``Trip`` of visits: to the cells, and their sums back.

    Attributes:
        legs: how many rows go where.
        channels: within the nodes and between them.
    """

    legs: Legs
    channels: Mapping[Reach, Channel]
    _on: list[Leaving] = field(default_factory=list)  # what is handed on, once it is known

    def out(self, rows_U: Tensor) -> Tensor:
        """Rows in the order of nodes to rows in that of arrival. Collective."""
        _, over_V, came_V, on_G, arrived_G = self.legs
        if not self._on:
            goes_HG = self._move(Reach.BETWEEN, self.legs.goes_UG.byte(), over_V, came_V)
            self._on.append(Leaving(goes_HG.bool(), sum(on_G)))
        rows_H = self._move(Reach.BETWEEN, rows_U, over_V, came_V)
        handed = rows_H.index_select(0, self._on[0].token_U)
        return self._move(Reach.WITHIN, handed, on_G, arrived_G)

    def home(self, rows_W: Tensor) -> Tensor:
        """And back: of each row the sum of what comes from the node. Collective; not before the
        first rows went out."""
        _, over_V, came_V, on_G, arrived_G = self.legs
        handed = self._move(Reach.WITHIN, rows_W, arrived_G, on_G)
        sums_H = self._on[0].by_token.sums(handed)
        return self._move(Reach.BETWEEN, sums_H, came_V, over_V)

    def _move(
        self, reach: Reach, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> Tensor:
        channel = self.channels[reach]
        return channel.all_to_all(rows, sent, received, channel.group)

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds on the device."""
        return (self.legs.goes_UG, *(tensor for on in self._on for tensor in on.tensors()))
