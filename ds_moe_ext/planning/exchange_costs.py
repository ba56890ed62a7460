# SPDX-License-Identifier: Apache-2.0
"""What exchanges and the other operations of an MoE layer's pipeline cost on a cluster. Pure.

``PipelineLines`` are straight lines (FSMoE, eq. 1): ``probe`` measures them on a run's own ranks,
``described_lines`` takes them from a hardware file; either way all ranks have the same, and plan by
them. ``line_of_way`` prices each way in which rows may travel between EP ranks, by a model of two
links. ``LinkPrices`` say what rows and replicas wait for by who sends what to whom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import fsum
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.hardware import Hardware, Link
from ds_moe_ext.core.transfer import Transfers
from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.prices import FREE, AllReduce, Line, between_nodes, busiest, check_costs


@dataclass(frozen=True, kw_only=True)
class PipelineLines:
    """The lines of one MoE layer, of one call on every rank at once."""

    # between EP ranks; by bytes of the rows that one rank gives, its own part among them
    all_to_all: Line
    all_gather: Line  # inside an ETP group; by bytes of the rows that one rank ends up with
    reduce_scatter: Line  # inside an ETP group; by bytes of the rows that one rank gives
    expert: Line  # forward of the part of the experts that one rank has; by rows
    all_reduce: Line  # of dense gradients, or what the host has in its place; by elements

    @property
    def gradients(self) -> AllReduce:
        """What the partition of dense gradients reckons with."""
        return AllReduce(self.all_reduce.alpha_s, self.all_reduce.beta_s)


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """The rows of one MoE layer in one pass, of the mean rank."""

    sent: float  # that a rank sends to the EP ranks of their experts, and that return to it
    gathered: float  # that a rank computes: those that arrived at all ranks of its ETP group
    row_bytes: float  # of one row as it travels between EP ranks
    etp_row_bytes: float  # and within one


def layer_costs(lines: PipelineLines, rows: LayerRows) -> LayerCosts:
    """The costs of a layer's forward pass; backward's are ``in_backward()`` of these."""
    gathered_bytes = rows.gathered * rows.etp_row_bytes
    return LayerCosts(
        all_to_all=lines.all_to_all.over(rows.sent * rows.row_bytes),
        all_gather=lines.all_gather.over(gathered_bytes),
        reduce_scatter=lines.reduce_scatter.over(gathered_bytes),
        expert=lines.expert.over(rows.gathered),
    )


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How a run uses a cluster."""

    num_ranks: int  # all
    num_ep_ranks: int  # EP ranks that exchange rows
    etp_size: int  # ranks of an ETP group, neighbours that split every expert
    # ranks of one node that sum the same dense gradients: all of them, or 1 where each has another
    # part of the dense weights
    dense_ranks_per_node: int
    number_type: str  # of the experts' products: ``fp32``, ``tf32``, ``fp16`` or ``bf16``
    row_multiply_adds: float  # of one row through the part of an expert that one rank has
    num_products: int  # matrix products in one call of a rank's experts; each has its start
    element_bytes: int  # of a dense gradient
    expert_bytes: int  # weights of a rank's experts, which each call reads


def described_lines(hardware: Hardware, usage: Usage) -> PipelineLines:
    """The lines by a hardware file: of what was measured there, else of the links' rates.

    Measured sums of gradients are those of one rank from each node, all at once; where more ranks
    of a node share one sum it is taken to be as many times as fast.
    """
    num_ranks, num_ep_ranks, etp_size = usage.num_ranks, usage.num_ep_ranks, usage.etp_size
    if etp_size > hardware.ranks_per_node:
        raise ValueError(
            f"EP ranks of {etp_size} ranks do not fit into the nodes of hardware "
            f"{hardware.name!r}, which have {hardware.ranks_per_node}; choose EP ranks of at most "
            "that"
        )
    line = partial(described_line, hardware)
    spans_nodes = num_ranks > hardware.ranks_per_node
    num_members = num_ranks if spans_nodes else usage.dense_ranks_per_node
    all_reduce = line("all_reduce", num_ranks, num_members=num_members, rounds=2)  # as in a ring
    speed = usage.dense_ranks_per_node if spans_nodes else 1
    return PipelineLines(
        all_to_all=line("all_to_all", num_ep_ranks * etp_size, num_members=num_ep_ranks),
        all_gather=line("all_gather", etp_size, num_members=etp_size),
        reduce_scatter=line("reduce_scatter", etp_size, num_members=etp_size),
        expert=_expert(hardware, usage),
        all_reduce=replace(all_reduce, beta_s=all_reduce.beta_s * usage.element_bytes / speed),
    )


def described_line(
    hardware: Hardware, what: str, num_ranks: int, *, num_members: int, rounds: int = 1
) -> Line:
    """The line of one collective by a hardware file, by bytes of one rank."""
    if num_members == 1:
        return FREE
    if num_ranks > hardware.ranks_per_node:
        level, wire, collectives = "inter", hardware.inter, hardware.inter_collectives
        num_sharers = hardware.ranks_per_node
        num_parties = math.ceil(num_ranks / hardware.ranks_per_node)
    else:
        level, wire, collectives = "intra", hardware.intra, hardware.intra_collectives
        num_sharers, num_parties = 1, num_members
    measured: Link | None = vars(collectives)[what]
    link = measured or wire
    if link is None:
        raise ValueError(
            f"hardware {hardware.name!r} does not say what {what} costs; measure it with "
            f"ds-moe-ext profile, or add the key '{level}_collectives.{what}' or {level!r} to its "
            "file"
        )
    crossing = 1.0 if measured else rounds * num_sharers * (num_parties - 1) / num_parties
    return Line(
        alpha_s=link.latency_s, beta_s=crossing / link.bytes_per_s, r_squared=link.r_squared
    )


def _expert(hardware: Hardware, usage: Usage) -> Line:
    product = hardware.device.product(usage.number_type)
    if product is None:
        raise ValueError(
            f"hardware {hardware.name!r} does not say how fast its device multiplies; measure it "
            f"with ds-moe-ext profile, or add the key 'device.products.{usage.number_type}' or "
            f"'device.flops_per_s.{usage.number_type}' to its file"
        )
    memory_rate = hardware.device.memory_bytes_per_s
    return Line(
        alpha_s=usage.num_products * product.start_s,
        beta_s=usage.row_multiply_adds / product.multiply_adds_per_s,
        r_squared=product.r_squared,
        least_s=usage.expert_bytes / memory_rate if memory_rate else 0.0,
    )


class Way(Enum):
    """How rows travel between EP ranks, by its JSON name."""

    DIRECT = "direct"  # each EP rank sends to each
    BY_LEADERS = "1dh"  # through the first EP rank of each node (HetuMoE)
    BY_PLACES = "2dh"  # to the receiver's place in one's own node, then over (Tutel, DeepSpeed-MoE)
    DEEP_EP = "deepep"  # by DeepEP's kernels


WAYS: Mapping[str, Way] = {way.value: way for way in Way}
BY_NODES = frozenset({Way.BY_LEADERS, Way.BY_PLACES})
BY_COST = (Way.DIRECT, Way.BY_LEADERS, Way.BY_PLACES)
"""What a cost model may choose from; of equals the first."""


@dataclass(frozen=True)
class Links:
    """What an all-to-all costs at each level, by the bytes that one rank gives, its own among
    them."""

    within: Line  # among the ranks of a node
    between: Line  # among ranks of which each node has one; all such groups at once
    num_nodes: int  # nodes, at least 2
    node_size: int  # ranks of each, at least 2

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.node_size) < 2:
            raise ValueError(
                f"{self.num_nodes} nodes of {self.node_size} ranks have one way only, the direct "
                "one; give at least 2 of each"
            )


@dataclass(frozen=True)
class Load:
    """What the busiest rank of a level does in one exchange."""

    messages: int  # that it sends or takes in, whichever are more
    bytes_part: float  # bytes of these, in units of what one rank gives to all


@dataclass(frozen=True)
class Hops:
    """The load of all hops of a way."""

    within: tuple[Load, ...]  # of the links inside nodes, hop after hop
    # of those between nodes; of 1DH a node's leader stands for all of its ranks
    between: tuple[Load, ...]


def hops_of(way: Way, num_nodes: int, node_size: int) -> Hops:
    """The load of one even exchange (spec 1.5)."""
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
    2DH, except as measured. DeepEP's way has no price.
    """
    num_nodes, node_size = links.num_nodes, links.node_size
    hops = hops_of(way, num_nodes, node_size)
    share = node_size if way is Way.BY_LEADERS else 1  # of a node's way out, in those of a rank
    within = _line(hops.within, links.within, node_size)
    between = _line(hops.between, links.between, num_nodes, share)
    return Line(alpha_s=within.alpha_s + between.alpha_s, beta_s=within.beta_s + between.beta_s)


def described_links(hardware: Hardware, num_nodes: int, node_size: int, etp_size: int = 1) -> Links:
    """The levels by a hardware file, of so many nodes of ``node_size`` EP ranks that exchange rows;
    as many exchanges go on at once as an EP rank has ranks."""
    in_node, in_all = node_size * etp_size, num_nodes * node_size * etp_size
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


class ExchangeFit(NamedTuple):
    """What an exchange of rows takes as layers make it, beside what links alone would."""

    start_s: float = 0.0  # seconds of any, however few rows travel
    factor: float = 1.0  # times the seconds of the links


BARE = ExchangeFit()


@dataclass(frozen=True, kw_only=True)
class LinkPrices:
    """The links of a cluster, the same on every rank."""

    near_bytes_per_s: float  # what an EP rank sends to, and receives from, others of its node
    far_bytes_per_s: float  # likewise, of other nodes, if no other EP rank of its node does
    node_bytes_per_s: float  # what all EP ranks of a node do together
    start_s: float = 0.0  # seconds of an exchange of next to nothing
    exchange_fit: ExchangeFit = BARE  # what layers add to that
    copy_factor: float = 1.0  # times the seconds of the links that replicas take

    def __post_init__(self) -> None:
        costs = {**vars(self), **self.exchange_fit._asdict()}
        del costs["exchange_fit"]
        check_costs(costs)

    def link_s(self, bytes_CC: np.ndarray, node_C: np.ndarray) -> float:
        """Seconds that the busiest link carries an exchange of so many bytes from each EP rank to
        each; its own are left out."""
        is_far_CC = node_C[:, None] != node_C
        near_CC = bytes_CC * ~is_far_CC
        np.fill_diagonal(near_CC, 0)
        return max(
            busiest(near_CC) / self.near_bytes_per_s,
            busiest(bytes_CC * is_far_CC) / self.far_bytes_per_s,
            busiest(between_nodes(bytes_CC, node_C)) / self.node_bytes_per_s,
        )

    def exchange_s(self, bytes_CC: np.ndarray, node_C: np.ndarray, num_chunks: int = 1) -> float:
        """Seconds of an exchange as layers make it, in chunks one after the other."""
        links_s = num_chunks * self.start_s + self.link_s(bytes_CC, node_C)
        return self.exchange_fit.start_s + self.exchange_fit.factor * links_s

    @property
    def exchange_start_s(self) -> float:
        """Seconds of an exchange of no rows, as layers make it."""
        return self.exchange_fit.start_s + self.exchange_fit.factor * self.start_s

    def replicas_s_C(self, transfers: Transfers, expert_bytes: float) -> np.ndarray:
        """Seconds until each EP rank is through with its part in replicas, float ``[C]``; of
        gradients on their way to the owner as well, which take the same way backwards."""
        node_C, parts_N = transfers.node_C, transfers.num_segments_N
        num_ep_ranks, num_nodes = len(node_C), int(node_C.max()) + 1
        # A transfer in segments is in as many rounds.
        segment = np.arange(parts_N.sum()) - np.repeat(parts_N.cumsum() - parts_N, parts_N)
        round_M = np.repeat(transfers.round_N, parts_N) + segment
        sender_M, receiver_M = (
            np.repeat(each, parts_N) for each in (transfers.sender_N, transfers.receiver_N)
        )
        bytes_M = np.repeat(expert_bytes / parts_N, parts_N)
        end_C = np.zeros(num_ep_ranks)
        for number in range(int(round_M.max(initial=-1)) + 1):
            now = round_M == number
            sender, receiver = sender_M[now], receiver_M[now]
            is_far = node_C[sender] != node_C[receiver]
            far, near = bytes_M[now] * is_far, bytes_M[now] * ~is_far
            far_s_C, near_s_C = np.zeros((2, num_ep_ranks))
            for ep_ranks in (sender, receiver):
                own_C = np.bincount(ep_ranks, far, num_ep_ranks) / self.far_bytes_per_s
                node_V = np.bincount(node_C[ep_ranks], far, num_nodes) / self.node_bytes_per_s
                far_s_C = np.maximum(far_s_C, np.maximum(own_C, (own_C > 0) * node_V[node_C]))
                own_C = np.bincount(ep_ranks, near, num_ep_ranks) / self.near_bytes_per_s
                near_s_C = np.maximum(near_s_C, own_C)
            of_sender, of_receiver = (
                np.where(is_far, far_s_C[ep_ranks], near_s_C[ep_ranks])
                for ep_ranks in (sender, receiver)
            )
            begin = np.maximum(end_C[sender], end_C[receiver])
            done = begin + np.maximum(of_sender, of_receiver) + self.start_s
            for ep_ranks in (sender, receiver):
                np.maximum.at(end_C, ep_ranks, done)
        return self.copy_factor * end_C


LEAST_SPREAD = 2.0  # of the longest exchange over the shortest, from which a line can be seen


def exchange_fit_of(predicted_N: Sequence[float], found_N: Sequence[float]) -> ExchangeFit:
    """What layers add to links, by exchanges of several sizes: least squares of the relative error.

    ``predicted_N`` are seconds of the links, ``found_N`` those that the exchanges took; of none
    they are left out. Where sizes hardly differ, or longer ones take no longer, only a start is
    added. Sums are exact, so that all ranks find the same.
    """
    pairs = [
        (stated, found) for stated, found in zip(predicted_N, found_N) if stated > 0 and found > 0
    ]
    if not pairs:
        return BARE
    if max(pairs)[0] >= LEAST_SPREAD * min(pairs)[0]:
        a, b, c = (fsum(stated**k / found**2 for stated, found in pairs) for k in range(3))
        d, e = (fsum(stated**k / found for stated, found in pairs) for k in range(2))
        determinant = a * c - b * b
        start_s, factor = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        if start_s >= 0 and factor > 0:
            return ExchangeFit(start_s, factor)
        if factor > 0:  # through zero
            return ExchangeFit(0.0, e / c)
    return ExchangeFit(max(fsum(found - stated for stated, found in pairs) / len(pairs), 0.0))
