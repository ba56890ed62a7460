# SPDX-License-Identifier: Apache-2.0
"""Ways in which rows travel between cells, and what each costs by a model of two links. Pure.

A way differs in the number of messages between nodes, not in the bytes that cross there (spec 1.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ds_moe_ext.cost.lines import Line
from ds_moe_ext.cost.pipeline_lines import described_line
from ds_moe_ext.hardware import Hardware


class Way(Enum):
    """How rows travel between cells, by its JSON name."""

    DIRECT = "direct"  # each cell sends to each
    BY_LEADERS = "1dh"  # through the first cell of each node (HetuMoE)
    BY_PLACES = "2dh"  # to the receiver's place in one's own node, then over (Tutel, DeepSpeed-MoE)
    DEEP_EP = "deepep"  # by DeepEP's kernels


WAYS: Mapping[str, Way] = {way.value: way for way in Way}
BY_NODES = frozenset({Way.BY_LEADERS, Way.BY_PLACES})
BY_COST = (Way.DIRECT, Way.BY_LEADERS, Way.BY_PLACES)
"""What a cost model may choose from; of equals the first."""


@dataclass(frozen=True)
class Links:
    """What an all-to-all costs at each level, by the bytes that one rank gives, its own among them.

    Attributes:
        within: among the ranks of a node.
        between: among ranks of which each node has one; all such groups at once.
        num_nodes: nodes, at least 2.
        node_size: ranks of each, at least 2.

    Raises:
        ValueError: there is no way by the nodes.
    """

    within: Line
    between: Line
    num_nodes: int
    node_size: int

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.node_size) < 2:
            raise ValueError(
                f"{self.num_nodes} nodes of {self.node_size} ranks have one way only, the direct "
                "one; give at least 2 of each"
            )


@dataclass(frozen=True)
class Load:
    """What the busiest rank of a level does in one exchange.

    Attributes:
        messages: that it sends or takes in, whichever are more.
        bytes_part: bytes of these, in units of what one rank gives to all.
    """

    messages: int
    bytes_part: float


@dataclass(frozen=True)
class Hops:
    """The load of all hops of a way.

    Attributes:
        within: of the links inside nodes, hop after hop.
        between: of those between nodes; of 1DH a node's leader stands for all of its ranks.
    """

    within: tuple[Load, ...]
    between: tuple[Load, ...]


def hops_of(way: Way, num_nodes: int, node_size: int) -> Hops:
    """The load of one even exchange (spec 1.5).

    Args:
        way: one of ``BY_COST``.
        num_nodes: nodes ``V``.
        node_size: ranks of each, ``G``.
    """
    others, crossing = node_size - 1, (num_nodes - 1) / num_nodes
    to_all = Load(others, others / node_size)
    to_leader = Load(others, float(others))
    return {
        Way.DIRECT: Hops(
            within=(Load(others, others / (num_nodes * node_size)),),
            between=(Load((num_nodes - 1) * node_size, crossing),),
        ),
        Way.BY_LEADERS: Hops(
            within=(to_leader, to_leader),
            between=(Load(num_nodes - 1, node_size * crossing),),
        ),
        Way.BY_PLACES: Hops(within=(to_all,), between=(Load(num_nodes - 1, crossing),)),
    }[way]


def line_of_way(way: Way, links: Links) -> Line:
    """What a way costs, by the bytes that one rank gives.

    Each message costs its start; the parts of a call are reckoned one after another. The ranks of a
    node are taken to share its way out, so that a leader alone sends as fast as all of them
    together. So 2DH beats the direct way where the ``(V - 1) * (G - 1)`` starts between nodes that
    it saves cost more than to carry the rows of other nodes over inside one's own; 1DH never beats
    2DH, except as measured.

    Args:
        way: one of ``BY_COST``.
        links: of the levels.
    """
    num_nodes, node_size = links.num_nodes, links.node_size
    hops = hops_of(way, num_nodes, node_size)
    share = node_size if way is Way.BY_LEADERS else 1  # of a node's way out, in those of a rank
    within = _line(hops.within, links.within, node_size)
    between = _line(hops.between, links.between, num_nodes, share)
    return Line(alpha_s=within.alpha_s + between.alpha_s, beta_s=within.beta_s + between.beta_s)


def described_links(
    hardware: Hardware, num_nodes: int, node_size: int, cell_size: int = 1
) -> Links:
    """The levels by a hardware file.

    Args:
        hardware: the cluster.
        num_nodes: nodes of the cells that exchange rows.
        node_size: such cells of each.
        cell_size: ranks of a cell; as many exchanges go on at once.

    Raises:
        ValueError: what the file lacks.
    """
    in_node, in_all = node_size * cell_size, num_nodes * node_size * cell_size
    return Links(
        within=described_line(hardware, "all_to_all", in_node, num_members=node_size),
        between=described_line(hardware, "all_to_all", in_all, num_members=num_nodes),
        num_nodes=num_nodes,
        node_size=node_size,
    )


def _line(loads: tuple[Load, ...], even: Line, num_members: int, speed: int = 1) -> Line:
    """Of loads on the link of an even all-to-all among some members."""
    start_s = even.alpha_s / (num_members - 1)
    byte_s = even.beta_s * num_members / (num_members - 1)
    return Line(
        alpha_s=sum(load.messages for load in loads) * start_s,
        beta_s=sum(load.bytes_part for load in loads) * byte_s / speed,
    )
