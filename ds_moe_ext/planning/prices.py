# SPDX-License-Identifier: Apache-2.0
"""What operations, rows and replicas cost: starts, prices a unit, and where rows go. Pure.

``Line`` and ``LinearCost`` price an operation by its size (FSMoE, eq. 1; spec 2.1). ``Prices``
price a step of an MoE layer by where its rows go (``RowFlow``) under a placement: HECATE's model,
spec rule 22. ``RowPrices`` price rows one by one: to compute, to leave an EP rank, to cross between
nodes. Units are what the fit counted: elements or bytes of a message, rows or multiply-adds of an
expert. Nothing here depends on the unit of time: all costs of one plan in milliseconds give a plan
in milliseconds. Shape letters: R pipeline degrees, the numbers of chunks that a layer's tokens are
cut into; N slices of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.placement import Holders, Placement

ROUNDING = 1e-9  # of a window's elements, so that a window as long as a slice takes that slice


def check_costs(costs: Mapping[str, float]) -> None:
    """Refuse costs by name that cannot be; bandwidths end in ``_per_s``."""
    for name, value in costs.items():
        if not 0 <= value < math.inf or (value == 0 and name.endswith("_per_s")):
            raise ValueError(
                f"{name} is {value}; costs are finite and not below zero, bandwidths above it"
            )


@dataclass(frozen=True)
class Line:
    """``alpha_s + units * beta_s`` seconds for each call."""

    alpha_s: float = 0.0  # seconds to start a call
    beta_s: float = 0.0  # seconds of one unit
    r_squared: float | None = None  # of the line through what was measured; None where nothing was
    least_s: float = 0.0  # seconds of any call, however few units it has

    def __post_init__(self) -> None:
        check_costs({key: value for key, value in vars(self).items() if key != "r_squared"})

    def over(self, n: float) -> LinearCost:
        """The cost of ``n`` units, which chunks share."""
        return LinearCost(alpha_s=self.alpha_s, beta_s=self.beta_s, n=n, least_s=self.least_s)


@dataclass(frozen=True)
class LinearCost(Line):
    """One operation on one layer, by the units of the whole layer, which chunks share equally."""

    n: float = field(kw_only=True)

    def chunk_seconds(self, degree_R: np.ndarray) -> np.ndarray:
        """Seconds of one of ``r`` chunks, float ``[R]``."""
        return np.maximum(self.alpha_s + self.n * self.beta_s / degree_R, self.least_s)

    def doubled(self) -> LinearCost:
        """Twice the seconds for the same units."""
        starts = self.started(2.0)
        return replace(starts, beta_s=2 * self.beta_s)

    def started(self, times: float) -> LinearCost:
        """With so many times the seconds that a call takes whatever its units."""
        return replace(self, alpha_s=times * self.alpha_s, least_s=times * self.least_s)


FREE = Line()
"""Of a collective among one rank."""


@dataclass(frozen=True)
class AllReduce(Line):
    """What a reduction of dense gradients costs, by elements."""

    def seconds(self, elements: int) -> float:
        """Of one reduction; of none if there is nothing to reduce. There is none of less."""
        if elements < 0:
            return math.inf
        return self.alpha_s + self.beta_s * elements if elements else 0.0

    def seconds_of_each(self, elements_N: np.ndarray) -> np.ndarray:
        """Of many reductions, float ``[N]``; see ``seconds``."""
        seconds_N = np.where(elements_N > 0, self.alpha_s + self.beta_s * elements_N, 0.0)
        return np.where(elements_N < 0, np.inf, seconds_N)

    def hidden_elements(self, elements: int, window_s: float) -> int:
        """As many of ``elements`` as one reduction within the window reduces."""
        if self.seconds(elements) <= window_s:
            return elements
        if window_s <= self.alpha_s:
            return 0
        fitting = (window_s - self.alpha_s) / self.beta_s
        return min(elements, math.floor(fitting * (1 + ROUNDING)))


NUM_EXCHANGES = 4  # of a row: dispatch and combine, forward and backward
PARTS = 2.0**16  # of a row, in which an even split is counted


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The cluster's costs, the same on every rank."""

    row_s: float  # seconds an expert computes on one row, forward and backward
    row_bytes: float  # bytes of one row in one transfer
    copy_s: float  # seconds to send one expert's weights: its bytes over the bandwidth
    inter_bytes_per_s: float  # what one node sends to, and receives from, the other nodes
    intra_bytes_per_s: float  # what an EP rank sends to, and receives from, all others
    # by how much more a node sends to other nodes than one of its EP ranks alone; 1 where its EP
    # ranks share a card. Only rows that are divided by price know it.
    cards: float = 1.0

    def __post_init__(self) -> None:
        check_costs(vars(self))


@dataclass(frozen=True, eq=False)
class RowFlow:
    """Rows of each layer by where they go, rounded down to ``1 / PARTS`` of a row."""

    computed_LC: np.ndarray  # rows that each EP rank computes
    sent_LC: np.ndarray  # rows that leave each EP rank
    received_LC: np.ndarray  # rows that come to each EP rank from others
    out_LN: np.ndarray  # rows that leave each node
    in_LN: np.ndarray  # rows that come to each node from others


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """Rows of some layers, side by side, added up as flows want them: once for several
    placements."""

    rows_CY: np.ndarray  # that each sender routes to each expert, int64
    first_L1: np.ndarray  # where each layer's experts begin, and where the last one's end
    node_C: np.ndarray  # node of each EP rank, 0 to N - 1
    sent_LC: np.ndarray  # rows of each sender, int64
    of_nodes_NY: np.ndarray  # rows of each node's senders for each expert, int64

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], node_C: np.ndarray) -> RoutedRows:
        """Of each layer, int64 ``[C, E]``. Costs some passes over them. ``node_C`` may number nodes
        by any numbers."""
        numbered_C = np.unique(node_C, return_inverse=True)[1]
        rows_CY = np.concatenate(rows, axis=1)
        first_L1 = np.cumsum([0, *(rows_CE.shape[1] for rows_CE in rows)])
        sent_LC = np.add.reduceat(rows_CY, first_L1[:-1], axis=1).T
        return cls(rows_CY, first_L1, numbered_C, sent_LC, by_node(rows_CY, numbered_C))

    @property
    def num_layers(self) -> int:
        return len(self.first_L1) - 1

    @cached_property
    def total_Y(self) -> np.ndarray:
        """Rows of each expert, int64."""
        total_Y: np.ndarray = self.of_nodes_NY.sum(axis=0)
        return total_Y

    @property
    def totals(self) -> list[np.ndarray]:
        """The same, ``[E]`` a layer."""
        return np.split(self.total_Y, self.first_L1[1:-1])

    def of_layers(self, layers: Sequence[int]) -> RoutedRows:
        """Those of some of the layers, each as often as it is named."""
        if list(layers) == list(range(self.num_layers)):
            return self
        own = [slice(*self.first_L1[layer : layer + 2]) for layer in layers]
        return RoutedRows(
            np.concatenate([self.rows_CY[:, each] for each in own], axis=1),
            np.cumsum([0, *(each.stop - each.start for each in own)]),
            self.node_C,
            self.sent_LC[list(layers)],
            np.concatenate([self.of_nodes_NY[:, each] for each in own], axis=1),
        )

    @cached_property
    def is_on_CN(self) -> np.ndarray:
        """1 where an EP rank is of a node, else 0; float64."""
        return (self.node_C[:, None] == np.arange(int(self.node_C.max()) + 1)).astype(np.float64)


def by_node(table_CX: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Sums over the EP ranks of each node, ``[V, X]``, nodes in the order of their numbers. One
    pass: a product of whole numbers with a table of 0 and 1 takes one for every node, without
    BLAS."""
    numbered_C, size_V = np.unique(node_C, return_inverse=True, return_counts=True)[1:]
    order_C = np.argsort(numbered_C, kind="stable")
    ordered_CX = table_CX if (order_C[1:] > order_C[:-1]).all() else table_CX[order_C]
    if (size_V == size_V[0]).all():  # add.reduceat takes four times as long
        sums_VX: np.ndarray = ordered_CX.reshape(len(size_V), size_V[0], -1).sum(axis=1)
        return sums_VX
    return np.add.reduceat(ordered_CX, size_V.cumsum() - size_V)


def nearest_replica_flow(
    placements: Sequence[Placement], rows: Sequence[np.ndarray], node_C: np.ndarray
) -> RowFlow:
    """Where rows go if nearest replicas share them evenly, as ``share.NearestReplica`` does but for
    the remainders of a split.

    All sums are of whole numbers below ``2**53``, so that they are the same on every machine.
    Costs some passes over the rows of each layer, int64 ``[C, E]``, and some over ``[X, C]`` for X
    copied experts.
    """
    return nearest_flow(placements, RoutedRows.of(rows, node_C))


def nearest_flow(placements: Sequence[Placement], routed: RoutedRows) -> RowFlow:
    """The same of rows that have been added up."""
    holders = Holders.of(tuple(placements))
    flow = _flow_to_only_holders(holders, routed)
    if holders.layer_X.size:
        flow = _Flow(*(a + b for a, b in zip(flow, _flow_to_replicas(holders, routed))))
    return RowFlow(
        computed_LC=flow.kept_LC + flow.received_LC,
        sent_LC=routed.sent_LC - flow.kept_LC,
        received_LC=flow.received_LC,
        out_LN=routed.sent_LC @ routed.is_on_CN - flow.near_LN,
        in_LN=flow.in_LN,
    )


def least_flow(placements: Sequence[Placement], routed: RoutedRows) -> RowFlow:
    """What no division of rows over replicas can do without: experts with one holder compute and
    receive there, and the busiest EP rank computes the mean at least."""
    flow = _flow_to_only_holders(Holders.of(tuple(placements)), routed)
    mean_L1 = routed.sent_LC.mean(axis=1, keepdims=True)
    return RowFlow(
        computed_LC=np.maximum(flow.kept_LC + flow.received_LC, mean_L1),
        sent_LC=np.zeros_like(flow.received_LC),
        received_LC=flow.received_LC,
        out_LN=np.zeros_like(flow.in_LN),
        in_LN=flow.in_LN,
    )


class _Flow(NamedTuple):
    """Of some experts; all sums over them, float64."""

    kept_LC: np.ndarray  # rows that stay in their EP rank
    received_LC: np.ndarray  # rows that come to each EP rank from others
    near_LN: np.ndarray  # rows of each node's senders for experts that the node holds
    in_LN: np.ndarray  # rows that come to each node from others


def _flow_to_only_holders(holders: Holders, routed: RoutedRows) -> _Flow:
    at_A = routed.first_L1[holders.layer_A] + holders.expert_A
    node_A = routed.node_C[holders.ep_rank_A]
    own_A, near_A = routed.rows_CY[holders.ep_rank_A, at_A], routed.of_nodes_NY[node_A, at_A]
    total_A = routed.total_Y[at_A]
    at_ep_ranks = _sums(holders.layer_A, holders.ep_rank_A, routed.sent_LC.shape)
    at_nodes = _sums(holders.layer_A, node_A, (holders.num_layers, len(routed.of_nodes_NY)))
    return _Flow(
        at_ep_ranks(own_A),
        at_ep_ranks(total_A - own_A),
        at_nodes(near_A),
        at_nodes(total_A - near_A),
    )


def _flow_to_replicas(holders: Holders, routed: RoutedRows) -> _Flow:
    at_X = routed.first_L1[holders.layer_X] + holders.expert_X
    rows_XC = routed.rows_CY[:, at_X].T.astype(np.float64)
    held_XC = holders.holds_XC.astype(np.float64)
    is_on_CN = routed.is_on_CN
    nodes_N = np.arange(is_on_CN.shape[1])

    kept_XC = rows_XC * held_XC
    leaving_XN = (rows_XC - kept_XC) @ is_on_CN
    replicas_XN = held_XC @ is_on_CN
    out_XN = leaving_XN * (replicas_XN == 0)
    # of each replica
    near_XN = np.floor((leaving_XN - out_XN) * PARTS / np.maximum(replicas_XN, 1))
    far_X1 = np.floor(out_XN.sum(axis=1) * PARTS / replicas_XN.sum(axis=1))[:, None]
    received_XC = (near_XN + far_X1)[:, routed.node_C] * held_XC

    layer_X1 = holders.layer_X[:, None]
    at_ep_ranks = _sums(layer_X1, np.arange(holders.num_ep_ranks), routed.sent_LC.shape)
    at_nodes = _sums(layer_X1, nodes_N, (holders.num_layers, len(nodes_N)))
    return _Flow(
        kept_LC=at_ep_ranks(kept_XC),
        received_LC=at_ep_ranks(received_XC) / PARTS,
        near_LN=at_nodes(rows_XC @ is_on_CN - out_XN),
        in_LN=at_nodes(replicas_XN * far_X1) / PARTS,
    )


def _sums(
    layer: np.ndarray, place: np.ndarray, shape: tuple[int, ...]
) -> Callable[[np.ndarray], np.ndarray]:
    """What adds up tables by layers and EP ranks, or nodes, to which their elements belong."""
    key = (layer * shape[1] + place).ravel()

    def of(table: np.ndarray) -> np.ndarray:
        sums = np.bincount(key, table.ravel(), math.prod(shape)).astype(np.float64)
        return sums.reshape(shape)

    return of


def step_seconds(
    placements: Sequence[Placement],
    rows: Sequence[np.ndarray],
    *,
    prices: Prices,
    node_C: np.ndarray,
) -> np.ndarray:
    """Seconds of each layer's experts and all-to-alls, forward and backward, float ``[L]``.

    An all-to-all takes as long as its slowest link: that of a node to the other nodes, or that of
    an EP rank, which carries all rows that leave or enter the EP rank.
    """
    return flow_seconds(nearest_replica_flow(placements, rows, node_C), prices=prices)


def seconds_saved(
    owners: Sequence[Placement], targets: Sequence[Placement], routed: RoutedRows, prices: Prices
) -> np.ndarray:
    """``step_seconds`` under owners less those under targets, float ``[L]``."""
    alone_L, copied_L = (
        flow_seconds(nearest_flow(placements, routed), prices=prices)
        for placements in (owners, targets)
    )
    return alone_L - copied_L


def flow_seconds(flow: RowFlow, *, prices: Prices) -> np.ndarray:
    """The same of rows that go any way."""
    inter_L = np.maximum(flow.out_LN, flow.in_LN).max(axis=1)
    intra_L = np.maximum(flow.sent_LC, flow.received_LC).max(axis=1)
    all_to_all_L = prices.row_bytes * np.maximum(
        inter_L / prices.inter_bytes_per_s, intra_L / prices.intra_bytes_per_s
    )
    seconds_L: np.ndarray = (
        prices.row_s * flow.computed_LC.max(axis=1) + NUM_EXCHANGES * all_to_all_L
    )
    return seconds_L


def busiest_link(owner: Placement, before: Placement, after: Placement, node_C: np.ndarray) -> int:
    """Experts that the busiest EP rank or node sends or receives when ``before`` becomes ``after``.

    Counts as the sparse gather moves them: an expert leaves its owner, or its owner's node, once,
    and enters each node that had no replica of it once (spec rules 22 and 38, choice B7).
    """
    is_on_CN = node_C[:, None] == np.unique(node_C)
    new_EC = after.holds_EC & ~before.holds_EC
    new_EN = (after.holds_EC @ is_on_CN) & ~(before.holds_EC @ is_on_CN)
    owner_E = owner.owner_E
    sent_C = np.bincount(owner_E[new_EC.any(axis=1)], minlength=owner.num_ep_ranks)
    out_C = np.bincount(owner_E[new_EN.any(axis=1)], minlength=owner.num_ep_ranks)
    links = (new_EC.sum(axis=0), new_EN.sum(axis=0), sent_C, out_C @ is_on_CN)
    return max(int(link.max()) for link in links)


@dataclass(frozen=True, eq=False)
class RowPrices:
    """Seconds a row; the same on every rank."""

    row_s_C: np.ndarray  # that an expert computes on it in each EP rank, float64
    # that it takes of an EP rank's own link, which carries all rows that leave or enter the EP rank
    local_row_s: float
    # that it takes of a node's card, which carries all rows that leave or enter the node; its EP
    # ranks share it
    cross_row_s: float
    # by how much more a row takes of its own EP rank's part of the node's card; 1 where an EP rank
    # may use all of it
    cards: float = 1.0

    def __post_init__(self) -> None:
        for name, price in (
            *(("row_s", float(row_s)) for row_s in self.row_s_C),
            ("local_row_s", self.local_row_s),
            ("cross_row_s", self.cross_row_s),
            ("cards", self.cards),
        ):
            if not 0 <= price < math.inf:
                raise ValueError(f"{name} is {price}; prices are finite and not below zero")

    @classmethod
    def of(cls, prices: Prices, num_ep_ranks: int) -> RowPrices:
        """Of like EP ranks: a row's transfers, forward and backward, and its experts."""
        exchanges_bytes = NUM_EXCHANGES * prices.row_bytes
        return cls(
            np.full(num_ep_ranks, prices.row_s),
            exchanges_bytes / prices.intra_bytes_per_s,
            exchanges_bytes / prices.inter_bytes_per_s,
            prices.cards,
        )

    def seconds(self, sent_CC: np.ndarray, node_C: np.ndarray) -> float:
        """Of a layer, of which so many rows go from each EP rank to each; any numbers name
        nodes."""
        numbered_C, each_C = np.unique(node_C, return_inverse=True)[1], np.arange(len(node_C))
        to_CV, from_VC = by_node(sent_CC.T, node_C).T, by_node(sent_CC, node_C)
        sent_C, computed_C, own_C = to_CV.sum(axis=1), from_VC.sum(axis=0), sent_CC.diagonal()
        crossing_VV = _without_own(by_node(to_CV, node_C))
        links = (
            (self.local_row_s, (sent_C - own_C, computed_C - own_C)),
            (self.cross_row_s, (crossing_VV.sum(axis=1), crossing_VV.sum(axis=0))),
            (
                self.cards * self.cross_row_s,
                (sent_C - to_CV[each_C, numbered_C], computed_C - from_VC[numbered_C, each_C]),
            ),
        )
        link_s = max(price * float(max(map(np.max, ends))) for price, ends in links)
        return float((self.row_s_C * computed_C).max()) + link_s


def between_nodes(sent_CC: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Rows from each node to each other one, ``[V, V]``; nodes in the order of their numbers."""
    return _without_own(by_node(by_node(sent_CC, node_C).T, node_C).T)


def _without_own(sent: np.ndarray) -> np.ndarray:
    """But for what stays in its place."""
    leaving = sent.copy()
    np.fill_diagonal(leaving, 0)
    return leaving


def met_share(share: np.ndarray, num_experts: int, top_k: int) -> np.ndarray:
    """Share of tokens with one or more of their ``top_k`` experts in a place that has ``share`` of
    all ``num_experts``, where all sets of a token's experts are as likely; float64, as shaped."""
    drawn_K = np.arange(top_k).reshape(-1, *[1] * share.ndim)
    others = (num_experts * (1 - share) - drawn_K).clip(0)
    met: np.ndarray = 1 - (others / (num_experts - drawn_K)).prod(axis=0)
    return met


def busiest(leaving: np.ndarray) -> float:
    """The most that leaves one place, or comes to it."""
    return float(max(leaving.sum(axis=0).max(), leaving.sum(axis=1).max()))


class RowBytes(NamedTuple):
    """Bytes of one row in one transfer, the mean of forward and backward, there and back."""

    between: float  # from EP rank to EP rank
    within: float  # of an ETP group that splits its experts


def overlap_degree(
    window_s: float,
    *,
    bytes_per_s: float,
    expert_bytes: float,
    num_experts: int,
    latency_s: float = 0.0,
) -> int:
    """Experts whose replicas can be sent behind other work: ``t`` (spec rules 11 and 50).

    Args:
        window_s: seconds of the forward of what runs beside the replicas: attention.
        bytes_per_s: bandwidth between nodes, all cards of a node together; within a node where
            there is only one.
        expert_bytes: bytes of one expert's parameters.
        num_experts: of the layer; no more are ever copied.
        latency_s: seconds until the first byte arrives; 0 is the paper's formula.
    """
    hidden = (window_s - latency_s) * bytes_per_s / expert_bytes
    return min(max(math.floor(hidden), 0), num_experts)


def replicas_that_fit(
    free_bytes: float, *, expert_bytes: float, layers_held: int, layers_reduced: int = 0
) -> int:
    """Replicas that an EP rank has memory for in each layer: ``m`` (spec choice B8).

    In memory at once are the replicas of ``layers_held`` layers: all, or 1 where they are released
    after forward and gathered again; and the gradients of replicas, as large, of
    ``layers_reduced``: 1 where they are reduced layer by layer, all where they are summed over
    micro-steps. With 0 they are taken to fit elsewhere, as in the spec's formula for the default
    mode.
    """
    return max(math.floor(free_bytes / ((layers_held + layers_reduced) * expert_bytes)), 0)
