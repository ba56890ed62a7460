# SPDX-License-Identifier: Apache-2.0
"""What planners_table.py compares: others' planners, and ways of rows; and what a described cluster
costs.

The policies are written anew from what is published. EPLB, LAER-MoE, SmartMoE and FlexMoE plan on
forecasts, the others after the gate, on exact rows. All is pure. Shape letters: E experts, C ranks
(EP ranks), V nodes, I items or replicas, X experts and R ranks by what they have.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import RowLevels, WholePrices
from ds_moe_ext.core.share import SWEEPS, LevelShare, LocalElseOwner, NearestReplica, Rule
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD, BlockPrices
from ds_moe_ext.planning.priced_plans import Routed, divide, in_whole_rows, sent_rows
from ds_moe_ext.planning.prices import Prices, RowPrices

# A described cluster.

A100 = Hardware(
    name="A100 nodes with 400 Gb/s",
    source="assumed",
    num_nodes=2,
    ranks_per_node=8,
    device=Device(name="NVIDIA A100", flops_per_s=Flops(bf16=312e12)),
    intra=Link(bytes_per_s=300e9),
    inter=Link(bytes_per_s=50e9),
)
EFFICIENCY = 0.35  # of the device's peak
SEQUENCE = 2048  # tokens that attention goes over: GPT-MoE's
TOP_K = 2  # rows of a token


@dataclass(frozen=True, eq=False)
class PricedCluster:
    """What plans are made for."""

    node_C: np.ndarray  # node of each rank
    prices: Prices  # as HECATE counts
    row_prices: RowPrices  # the same, by the row
    # as Pro-Prophet counts; whether replicas are scheduled is the planner's to say
    block: BlockPrices
    text: str  # what was assumed, for a person

    @classmethod
    def of(cls, hardware: Hardware, *, rows: float, width: int) -> PricedCluster:
        """Costs of a GPT all of whose layers are MoE layers, of experts twice as wide as it is.

        A rank receives rows as fast as its share of the node's link, and copies as
        ``Hardware.copy_link`` says. What a file does not say of the links within a node is taken
        to be as between nodes.

        Raises:
            ValueError: the hardware does not say how nodes are linked, or how the device computes.
        """
        rates, inter = hardware.device.flops_per_s, hardware.inter
        half_rate = rates.bf16 or rates.fp16
        peak = half_rate or rates.fp32
        if inter is None or peak is None:
            raise ValueError(
                f"hardware {hardware.name!r} lacks 'inter' or a rate in 'flops_per_s'; add both to "
                "its file"
            )
        rate, item_bytes = EFFICIENCY * peak, 2 if half_rate else 4
        weights = 4 * width**2
        gap_s = rows / TOP_K * (2 * weights + 4 * SEQUENCE * width) / rate
        block = BlockPrices(
            row_s=2 * weights / rate,
            row_bytes=item_bytes * width,
            bytes_per_s=inter.bytes_per_s / hardware.ranks_per_node,
            weight_bytes=item_bytes * weights,
            gradient_bytes=item_bytes * weights,
            copy_bytes_per_s=hardware.copy_link(hardware.num_ranks).bytes_per_s,
            forward_gap_s=FORWARD * gap_s,
            backward_gap_s=BACKWARD * gap_s,
        )
        prices = Prices(
            row_s=(FORWARD + BACKWARD) * block.row_s,
            row_bytes=block.row_bytes,
            copy_s=block.weight_bytes / block.copy_bytes_per_s,
            inter_bytes_per_s=inter.bytes_per_s,
            intra_bytes_per_s=(hardware.intra or inter).bytes_per_s,
        )
        text = (
            f"Assumed: {hardware.name}, {hardware.num_nodes} nodes of {hardware.ranks_per_node} "
            f"ranks; {rate / 1e12:.3g} TFLOP/s a rank ({EFFICIENCY:.0%} of the peak), "
            f"{item_bytes} bytes a number; width {width}, {weights / 1e6:.2f} M weights an expert, "
            f"attention over {SEQUENCE:,} tokens, top-{TOP_K}, {rows:,.0f} rows a rank and layer. "
            f"Rows travel at {block.bytes_per_s / 1e9:.3g} GB/s a rank (its share of the node's "
            f"link), replicas at {block.copy_bytes_per_s / 1e9:.3g} GB/s: "
            f"{1e3 * prices.copy_s:.2g} ms an expert, its gradients as long. 1/t is "
            f"{1e9 * block.row_s:.3g} ns a row, T_FNEC {1e3 * gap_s:.3g} ms (attention), T_BNEC "
            "twice that."
        )
        row_prices = RowPrices.of(prices, hardware.num_ranks)
        node_C = hardware.node_of_ep_ranks(hardware.num_ranks)
        return cls(node_C, prices, row_prices, block, text)


# How replicas divide rows.


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the experts of a layer compute in a step."""

    target: Placement  # who holds what
    # of an expert's rows what each rank shall get, in any unit, int64: what some policies plan with
    # the replicas
    weight_EC: np.ndarray
    # who holds what by what was planned before the gate; the target's other replicas are made after
    # it, and nothing hides their way. None: it is the target
    planned: Placement | None = None
    rule: Rule | None = None  # how replicas divide rows, where a plan says it

    @classmethod
    def of(cls, target: Placement, planned: Placement | None = None) -> Layout:
        """Replicas alone: how they divide rows is another's to say."""
        return cls(target, target.holds_EC.astype(np.int64), planned)

    @classmethod
    def of_quotas(cls, owner: Placement, quota_EC: np.ndarray) -> Layout:
        """By the rows of each expert that each rank computes, int64, known after the gate; owners
        of experts without rows count as if they had one."""
        is_idle_E1 = ~quota_EC.any(axis=1, keepdims=True)
        weight_EC = quota_EC + (owner.holds_EC & is_idle_E1)
        return cls(owner.with_replicas(quota_EC > 0), weight_EC, planned=owner)

    @classmethod
    def of_slots(cls, slots_EC: np.ndarray) -> Layout:
        """By the slots that each rank gives to each expert, int64."""
        return cls(Placement(slots_EC > 0), slots_EC)

    @property
    def at_gate(self) -> Placement:
        """Who holds what before replicas are made after the gate."""
        return self.target if self.planned is None else self.planned


Sending = Callable[[np.ndarray], np.ndarray]
"""Rows that each sender sends of each expert to each rank, int64 ``[C, E, C]``, of its rows ``[C,
E]``."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What is known of a layer before its rows are."""

    owner: Placement
    layout: Layout
    planned_CE: np.ndarray  # rows planned on
    cluster: PricedCluster


Way = Callable[[Layer], Sending]
"""How the replicas of a layer divide rows."""


def by_rule(rule: Rule) -> Sending:
    """As a rule says."""

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        share = rule.of_rows(rows_CE)
        senders = enumerate(rows_CE[:, None])
        return np.stack([share.rows_from(ep_rank, rows_1E)[0] for ep_rank, rows_1E in senders])

    return sent


def by_own_rule(layer: Layer) -> Sending:
    """As the plan says."""
    assert layer.layout.rule is not None
    return by_rule(layer.layout.rule)


def to_nearest(layer: Layer) -> Sending:
    """HECATE's way: rows without a replica at hand go to the nearest ones."""
    return by_rule(NearestReplica(layer.layout.target, layer.cluster.node_C))


def to_owner(layer: Layer) -> Sending:
    """Pro-Prophet's way: rows without a replica at hand go to the owner."""
    return by_rule(LocalElseOwner(layer.owner, layer.layout.target))


def by_planned_parts(layer: Layer) -> Sending:
    """In the parts that would have been best for the rows planned on."""
    return by_rule(_by_levels(layer, sweeps=0))


def by_priced(layer: Layer) -> Sending:
    """Divided anew when rows are known, as the product does it, where these are others."""
    return by_rule(_by_levels(layer, sweeps=SWEEPS))


def _by_levels(layer: Layer, *, sweeps: int) -> LevelShare:
    levels = levels_by(layer.cluster)(layer.layout.target)
    return LevelShare.planned(levels, layer.planned_CE, sweeps=sweeps)


def levels_by(cluster: PricedCluster) -> Callable[[Placement], RowLevels]:
    """What divides rows under a target."""
    each = cluster.row_prices
    prices = WholePrices.of(each.row_s_C, each.local_row_s, each.cross_row_s, cards=each.cards)
    return partial(RowLevels, node_C=cluster.node_C, prices=prices)


def by_optimum(layer: Layer) -> Sending:
    """As is best for the rows that come; by a solver, after the gate."""
    layout, cluster = layer.layout, layer.cluster

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        routed = Routed(rows_CE, layout.target, cluster.node_C)
        whole = in_whole_rows(divide(routed, cluster.row_prices), routed)
        holders = routed.holders
        sent_CEC = np.zeros((*rows_CE.shape, len(rows_CE)), dtype=np.int64)
        sent_CEC[:, holders.expert_A, holders.ep_rank_A] = rows_CE[:, holders.expert_A]
        copied = holders.expert_X[holders.copied_N], holders.ep_rank_N
        sent_CEC[:, copied[0], copied[1]] = sent_rows(whole, routed)
        return sent_CEC

    return sent


def evenly(layer: Layer) -> Sending:
    """By the layout's weights, wherever rows come from."""
    return partial(_in_parts, weight_CEC=layer.layout.weight_EC[None])


def evenly_on_node(layer: Layer) -> Sending:
    """By the layout's weights over the ranks of the sender's node, or over all if none has any."""
    weight_EC, node_C = layer.layout.weight_EC, layer.cluster.node_C

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        is_near_CC = node_C[:, None] == node_C
        near_CEC = weight_EC * is_near_CC[:, None]
        has_near_CE1 = near_CEC.any(axis=2, keepdims=True)
        return _in_parts(rows_CE, np.where(has_near_CE1, near_CEC, weight_EC))

    return sent


def _in_parts(rows_CE: np.ndarray, weight_CEC: np.ndarray) -> np.ndarray:
    """In whole rows; senders round at unlike places."""
    through_CEC = weight_CEC.cumsum(axis=2)
    total_CE1 = through_CEC[..., -1:]
    turn_CE1 = np.arange(len(rows_CE))[:, None, None] % total_CE1
    ends_CEC = (rows_CE[..., None] * through_CEC + turn_CE1) // total_CE1
    return np.diff(ends_CEC, axis=2, prepend=0)


def in_turn(layer: Layer) -> Sending:
    """By the layout's weights, which are all rows of an expert: ranks keep of their own what they
    can, of the rest senders in order meet ranks in order."""
    weight_EC = layer.layout.weight_EC

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        kept_CE = np.minimum(rows_CE, weight_EC.T)
        last_CE1 = (rows_CE - kept_CE).cumsum(axis=0)[..., None]
        end_EC = (weight_EC - kept_CE.T).cumsum(axis=1)
        first_CE1 = np.concatenate([np.zeros_like(last_CE1[:1]), last_CE1[:-1]])
        start_EC = np.concatenate([np.zeros_like(end_EC[:, :1]), end_EC[:, :-1]], axis=1)
        sent_CEC = np.minimum(last_CE1, end_EC) - np.maximum(first_CE1, start_EC)
        sent_CEC = np.maximum(sent_CEC, 0)
        ep_ranks = np.arange(len(rows_CE))
        sent_CEC[ep_ranks, :, ep_ranks] += kept_CE
        return sent_CEC

    return sent


# EPLB, DeepSeek's expert-parallel load balancer (https://github.com/deepseek-ai/EPLB, from its
# README's description): one more copy wherever there are most rows a replica; copies packed,
# heaviest first, to the lightest pack with room; rows divided evenly
# over copies. Not taken: how it predicts rows, and how seldom it moves experts: here it plans every
# step.


def balanced_slots(rows_E: np.ndarray, num_ranks: int, slots: int) -> np.ndarray:
    """Slots that each rank gives to each expert, all of them used, int64 ``[E, C]``; it may give it
    two.

    Raises:
        ValueError: the experts do not fit.
    """
    num_experts = len(rows_E)
    if num_experts > num_ranks * slots:
        raise ValueError(f"{num_experts} experts do not fit {num_ranks} ranks x {slots} slots")
    slots_EC = np.zeros((num_experts, num_ranks), dtype=np.int64)
    replicas = replicated(rows_E, num_ranks * slots)
    rank_I = packed(np.repeat(rows_E / replicas, replicas), num_ranks)
    np.add.at(slots_EC, (np.repeat(np.arange(num_experts), replicas), rank_I), 1)
    return slots_EC


def replicated(rows_E: np.ndarray, num_slots: int) -> np.ndarray:
    """Replicas of each expert, int64: one, and one more wherever there are most rows a copy."""
    replicas_E = np.ones(len(rows_E), dtype=np.int64)
    for _ in range(num_slots - len(rows_E)):
        replicas_E[(rows_E / replicas_E).argmax()] += 1
    return replicas_E


def packed(rows_I: np.ndarray, num_packs: int) -> np.ndarray:
    """Pack of each item, int64: as many items in each pack, about as many rows."""
    pack_I = np.empty(len(rows_I), dtype=np.int64)
    room = [len(rows_I) // num_packs] * num_packs
    lightest = [(0.0, pack) for pack in range(num_packs)]
    for item in np.argsort(-rows_I, kind="stable").tolist():
        rows, pack = heapq.heappop(lightest)
        pack_I[item] = pack
        room[pack] -= 1
        if room[pack]:
            heapq.heappush(lightest, (rows + float(rows_I[item]), pack))
    return pack_I


# LAER-MoE (Liu et al., ASPLOS 2026, arXiv 2602.11686, and Hetu-Galvatron's branch laer-moe): two
# numbers of replicas are tried, equal ones and by rows; replicas are placed from most rows to
# fewest, on the nodes with fewest of that expert, there on the rank with fewest rows. Not taken:
# its prices (the table's say which layout is faster), random variations, its window of five steps.


def laid_out(
    rows_CE: np.ndarray, slots: int, node_C: np.ndarray, seconds: Callable[[np.ndarray], float]
) -> np.ndarray:
    """Slots that each rank gives to each expert, int64 ``[E, C]``; it may give it two.

    Raises:
        ValueError: the experts do not fit.
    """
    num_ranks, num_experts = rows_CE.shape
    num_slots = num_ranks * slots
    if num_experts > num_slots:
        raise ValueError(f"{num_experts} experts do not fit {num_ranks} ranks x {slots} slots")
    rows_E = rows_CE.sum(axis=0)
    tried = [replicas_by_rows(rows_E, num_slots, int(node_C.max()) + 1)]
    if num_slots % num_experts == 0:
        tried.append(np.full(num_experts, num_slots // num_experts))
    layouts = [placed(rows_E, replicas_E, slots, node_C) for replicas_E in tried]
    return min(layouts, key=lambda slots_EC: seconds(sent(rows_CE, slots_EC, node_C)))


def replicas_by_rows(rows_E: np.ndarray, num_slots: int, num_nodes: int) -> np.ndarray:
    """Replicas of each expert, int64; one that is on all nodes gets one on each of them, or
    none."""
    num_experts = len(rows_E)
    first = num_nodes if num_nodes * num_experts <= num_slots else 1
    replicas_E = np.full(num_experts, first, dtype=np.int64)
    left = num_slots - first * num_experts
    heaviest = [(-float(rows) / first, expert) for expert, rows in enumerate(rows_E)]
    heapq.heapify(heaviest)
    while left and heaviest:
        _, expert = heapq.heappop(heaviest)
        more = num_nodes if replicas_E[expert] >= num_nodes else 1
        if more <= left:
            replicas_E[expert] += more
            left -= more
            heapq.heappush(heaviest, (-float(rows_E[expert]) / replicas_E[expert], expert))
    return replicas_E


def placed(
    rows_E: np.ndarray, replicas_E: np.ndarray, slots: int, node_C: np.ndarray
) -> np.ndarray:
    """The same, of so many replicas of each expert."""
    num_nodes = int(node_C.max()) + 1
    slots_EC = np.zeros((len(rows_E), len(node_C)), dtype=np.int64)
    on_EV = np.zeros((len(rows_E), num_nodes), dtype=np.int64)
    rows_C, free_C = np.zeros(len(node_C)), np.full(len(node_C), slots)
    rows_I = np.repeat(rows_E / replicas_E, replicas_E)
    expert_I = np.repeat(np.arange(len(rows_E)), replicas_E)
    for copy in np.argsort(-rows_I, kind="stable").tolist():
        on_V = on_EV[expert_I[copy]]
        fits_C = free_C > 0
        wanted_C = fits_C & (on_V == on_V.min())[node_C]
        rank = np.where(wanted_C if wanted_C.any() else fits_C, rows_C, np.inf).argmin()
        slots_EC[expert_I[copy], rank] += 1
        on_V[node_C[rank]] += 1
        rows_C[rank] += rows_I[copy]
        free_C[rank] -= 1
    return slots_EC


def sent(rows_CE: np.ndarray, slots_EC: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Rows from each rank to each, in parts of rows, ``[C, C]``."""
    sent_CC = np.empty((len(node_C), len(node_C)))
    for node in range(int(node_C.max()) + 1):
        is_here_C = node_C == node
        near_EC = slots_EC * is_here_C
        weight_EC = np.where(near_EC.any(axis=1)[:, None], near_EC, slots_EC)
        sent_CC[is_here_C] = rows_CE[is_here_C] @ (weight_EC / weight_EC.sum(axis=1)[:, None])
    return sent_CC


# SmartMoE (Zhai et al., USENIX ATC 2023, section 6, and its artifact, thu-pacman/SmartMoE-AE):
# experts change places, as many on each rank as before: from most rows to fewest, to the rank with
# fewest rows that has room, among equals to the one where it is; only if the busiest rank gets
# fewer rows. Not taken: its dynamic program for few experts, its offline choice of parallelism.


def exchanged(rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """Rank of each expert, int64 ``[E]``."""
    rows_C, room_C = np.zeros(num_ranks), np.bincount(owner_E, minlength=num_ranks)
    before_C = np.bincount(owner_E, rows_E, num_ranks)
    rank_E = np.empty(len(rows_E), dtype=np.int64)
    for expert in np.argsort(-rows_E, kind="stable").tolist():
        least_C = np.where(room_C > 0, rows_C, np.inf)
        own = owner_E[expert]
        rank = own if least_C[own] == least_C.min() else least_C.argmin()
        rank_E[expert] = rank
        rows_C[rank] += rows_E[expert]
        room_C[rank] -= 1
    return rank_E if rows_C.max() < before_C.max() else owner_E.astype(np.int64)


# FlexMoE (Nie et al., SIGMOD 2023, arXiv 2304.03946, Algorithms 1 and 2, as HECATE's section 2
# describes them and LAER-MoE's authors rewrote them, PKU-DAIR/Hetu-Galvatron): every rank has as
# many slots, which experts begin with in even numbers; the expert with most rows a slot gets one
# more (Expand), that with fewest loses one (Shrink), on its least busy rank, as long as the layer
# takes no more time. Kinder to it: the paper asks for less time, which most first changes do not
# give, since several experts are as hot. Not taken: Migrate, which brings replicas to one node; its
# prices (the table's say which layout is faster), its threshold and its queue of changes.


def even_slots(num_experts: int, slots: int, node_C: np.ndarray) -> np.ndarray:
    """Slots that each rank gives to each expert at first, int64 ``[E, C]``.

    Raises:
        ValueError: the experts do not fit.
    """
    num_slots = slots * len(node_C)
    if num_experts > num_slots:
        raise ValueError(f"{num_experts} experts do not fit {len(node_C)} ranks x {slots} slots")
    replicas_E = num_slots // num_experts + (np.arange(num_experts) < num_slots % num_experts)
    return placed(np.ones(num_experts), replicas_E, slots, node_C)


def expanded(
    rows_CE: np.ndarray,
    slots_EC: np.ndarray,
    node_C: np.ndarray,
    seconds: Callable[[np.ndarray], float],
) -> np.ndarray:
    """Slots that each rank gives to each expert, of those that it gave, int64 ``[E, C]``."""
    rows_E = rows_CE.sum(axis=0)
    sent_CC = sent(rows_CE, slots_EC, node_C)
    for _ in range(int(slots_EC.sum())):
        replicas_E = slots_EC.sum(axis=1)
        most = int((rows_E / replicas_E).argmax())
        least = int(np.where(replicas_E > 1, rows_E / replicas_E, np.inf).argmin())
        if least == most or replicas_E[least] == 1:
            break
        rank = np.where(slots_EC[least] > 0, sent_CC.sum(axis=0), np.inf).argmin()
        changed_EC = slots_EC.copy()
        changed_EC[most, rank] += 1
        changed_EC[least, rank] -= 1
        changed_CC = sent(rows_CE, changed_EC, node_C)
        if seconds(changed_CC) > seconds(sent_CC):
            break
        slots_EC, sent_CC = changed_EC, changed_CC
    return slots_EC


# LLEP (Nguyen et al., Salesforce, arXiv 2601.17111): after the gate, experts from most rows to
# fewest; an owner keeps what brings it to ``alpha`` times the mean; what is left goes to the rank
# with fewest rows, in no piece below ``min_rows`` unless it is the last. Not taken: that owners get
# an expert's first rows; here ranks keep rows of their own first, which is kinder to it.


def spilled(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    num_ranks: int,
    *,
    alpha: float = 1.1,
    min_rows: int = 1024,
    threshold: float = 1.3,
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``."""
    quota_EC = np.zeros((len(rows_E), num_ranks), dtype=np.int64)
    rows_C = np.zeros(num_ranks, dtype=np.int64)  # placed, and those of owners that are to come
    np.add.at(rows_C, owner_E, rows_E)
    mean = int(rows_E.sum()) // num_ranks
    if rows_C.max() < threshold * mean:
        quota_EC[np.arange(len(rows_E)), owner_E] = rows_E
        return quota_EC
    most = max(int(alpha * mean), 1)
    for expert in np.argsort(-rows_E, kind="stable").tolist():
        owner, left = owner_E[expert], int(rows_E[expert])
        over = int(np.clip(rows_C[owner] - most, 0, left))
        quota_EC[expert, owner] = left - over
        rows_C[owner] -= over
        while over:
            rank, piece = _next_piece(rows_C, owner, over, most, min_rows)
            quota_EC[expert, rank] += piece
            rows_C[rank] += piece
            over -= piece
    return quota_EC


def _next_piece(
    rows_C: np.ndarray, owner: int, left: int, most: int, min_rows: int
) -> tuple[int, int]:
    """The least loaded rank but the owner that takes a piece which is worth it, and the piece;
    where none does, the least loaded takes all."""
    order = np.argsort(rows_C, kind="stable")
    order = order[order != owner]
    piece = np.minimum(left, most - rows_C[order])
    fits = np.flatnonzero((piece > 0) & ((piece >= min_rows) | (piece == left)))
    return (int(order[fits[0]]), int(piece[fits[0]])) if len(fits) else (int(order[0]), left)


# ECHO, elastic cloning of hot experts (a draft for Megatron-LM, NVIDIA/Megatron-LM pull 2368;
# Victarry et al.): after the gate, what is above the mean spills, a rank's smallest experts stay.
# In one shot: spills and rooms, most first, along one line, the largest pieces of each rank live,
# as many as slots. In bins, for one slot a rank: ranks in that order take what one expert spills,
# from the fullest of 8 bins.


BINS = 8


def overflow(
    rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows above the mean that each expert spills ``[E]``, room of each rank ``[C]``, int64."""
    rows_C = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows_C, owner_E, rows_E)
    mean = int(rows_E.sum()) // num_ranks
    order = np.lexsort((rows_E, owner_E))
    before_C = rows_C.cumsum() - rows_C
    through_E = rows_E[order].cumsum() - before_C[owner_E[order]]
    spill_E = np.empty_like(rows_E)
    spill_E[order] = np.clip(through_E - mean, 0, rows_E[order])
    return spill_E, np.maximum(mean - rows_C, 0)


def in_one_shot(
    rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, *, slots: int
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``."""
    spill_E, room_C = overflow(rows_E, owner_E, num_ranks)
    experts, ranks = (np.argsort(-each, kind="stable") for each in (spill_E, room_C))
    spill_X1, room_R = spill_E[experts][:, None], room_C[ranks]
    end_X1, end_R = spill_X1.cumsum(axis=0), room_R.cumsum()
    overlap_XR = np.minimum(end_X1, end_R) - np.maximum(end_X1 - spill_X1, end_R - room_R)
    overlap_XR = np.maximum(overlap_XR, 0)
    too_many = np.argsort(-overlap_XR, axis=0, kind="stable")[slots:]
    np.put_along_axis(overlap_XR, too_many, 0, axis=0)
    handed_EC = np.zeros_like(overlap_XR)
    handed_EC[np.ix_(experts, ranks)] = overlap_XR
    return with_owners(handed_EC, rows_E, owner_E)


def in_bins(rows_E: np.ndarray, owner_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """The same with one slot a rank, by the other policy. Arguments as of ``overflow``."""
    spill_E, room_C = overflow(rows_E, owner_E, num_ranks)
    mean = int(rows_E.sum()) // num_ranks
    width = max(mean // (BINS - 1), 1)

    def bin_of(spilt: int) -> int:
        return 0 if spilt >= mean else min((mean - spilt) // width + 1, BINS - 1)

    order = np.argsort(-spill_E, kind="stable").tolist()
    waiting = [(bin_of(int(spill_E[e])), turn, e) for turn, e in enumerate(order) if spill_E[e]]
    heapq.heapify(waiting)
    handed_EC = np.zeros((len(rows_E), num_ranks), dtype=np.int64)
    for turn, rank in enumerate(np.argsort(-room_C, kind="stable").tolist(), len(order)):
        if not waiting or not room_C[rank]:
            break
        _, _, expert = heapq.heappop(waiting)
        handed_EC[expert, rank] = min(spill_E[expert], room_C[rank])
        spill_E[expert] -= handed_EC[expert, rank]
        if spill_E[expert]:
            heapq.heappush(waiting, (bin_of(int(spill_E[expert])), turn, expert))
    return with_owners(handed_EC, rows_E, owner_E)


def with_owners(handed_EC: np.ndarray, rows_E: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """What owners hand to replicas, and what they keep, int64 ``[E, C]``."""
    quota_EC = handed_EC.copy()
    quota_EC[np.arange(len(rows_E)), owner_E] += rows_E - handed_EC.sum(axis=1)
    return quota_EC


# LoongForge's TAOT (Zhang et al., arXiv 2608.03676, and its public planner ``sinkhorn``): ECHO's
# spill, placed by a transport plan (Sinkhorn's iterations) in which a way costs ``far`` times as
# much between nodes; then, a slot of every rank at a time, each rank with room asks for the expert
# of highest score, and each expert goes to the one of those whose score is highest. Not taken: its
# auction between senders, and that replicas travel beside rows: the table counts all of their time.


TINY = 1e-8


def transported(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    node_C: np.ndarray,
    *,
    slots: int,
    far: float = 3.0,
    iterations: int = 50,
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``."""
    spill_E, room_C = overflow(rows_E, owner_E, len(node_C))
    is_near_CC = node_C[:, None] == node_C
    surplus_C = np.bincount(owner_E, spill_E, len(node_C))
    plan_CC = _plan(surplus_C, room_C, np.where(is_near_CC, 1.0, far), iterations)
    part_CC = plan_CC / np.maximum(surplus_C, 1.0)[:, None]
    mean_expert = rows_E.sum() / len(rows_E)
    bonus_EC = mean_expert * (np.where(is_near_CC, 1.0, 1.0 / far) + 0.1 * part_CC)[owner_E]
    handed_EC = np.zeros((len(rows_E), len(node_C)), dtype=np.int64)
    for _ in range(slots):
        is_open_EC = np.broadcast_to(room_C > 0, handed_EC.shape) & (handed_EC == 0)
        while True:
            moved_EC = np.minimum(spill_E[:, None], room_C) * is_open_EC
            score_EC = np.where(moved_EC > 0, moved_EC + bonus_EC, 0.0)
            experts, ranks = _matched(score_EC)
            if not len(experts):
                break
            handed_EC[experts, ranks] = moved_EC[experts, ranks]
            spill_E[experts] -= moved_EC[experts, ranks]
            room_C[ranks] -= moved_EC[experts, ranks]
            is_open_EC[:, ranks] = False
    return with_owners(handed_EC, rows_E, owner_E)


def _plan(
    surplus_C: np.ndarray, room_C: np.ndarray, cost_CC: np.ndarray, iterations: int
) -> np.ndarray:
    """Rows from each rank to each that carry surplus to room, float ``[C, C]``."""
    kernel_CC = np.exp(-cost_CC / cost_CC.max())
    supply_C = surplus_C * min(room_C.sum() / max(surplus_C.sum(), 1.0), 1.0)
    to_C = np.ones(len(room_C))
    for _ in range(iterations):
        from_C = supply_C / np.maximum(kernel_CC @ to_C, TINY)
        to_C = room_C / np.maximum(kernel_CC.T @ from_C, TINY)
    plan_CC: np.ndarray = from_C[:, None] * kernel_CC * to_C
    return plan_CC


def _matched(score_EC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts, and the ranks that they go to: each rank asks for one, each expert takes one."""
    ranks = np.flatnonzero(score_EC.any(axis=0))
    asked = score_EC.argmax(axis=0)[ranks]
    asks_EC = np.zeros_like(score_EC)
    asks_EC[asked, ranks] = score_EC[asked, ranks]
    experts = np.unique(asked)
    return experts, asks_EC[experts].argmax(axis=1)


# UltraEP (Wei et al., arXiv 2606.04101, https://github.com/Dots-Infra/UltraEP): after the gate,
# bisection on the level to which all ranks can be brought, by a greedy trial: ranks from most rows
# to fewest, of each its experts likewise, to the rank with most room that has a free slot and no
# copy. It copies within one NVLink domain alone: the table shows each node for itself, and all
# ranks as if they were one domain. Not taken: its least 1,024 rows of a replica, and what hides its
# copies.


def quotas(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    num_ranks: int,
    *,
    slots: int,
    min_rows: int = 1,
    tolerance: float = 0.01,
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``."""

    def handed(level: int) -> np.ndarray | None:
        return _handed(rows_E, owner_E, rows_C, level, slots=slots, min_rows=min_rows)

    rows_C = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows_C, owner_E, rows_E)
    least = math.ceil((1 + tolerance) * rows_C.mean())
    levels = range(least, int(rows_C.max()))
    level = least + bisect_left(levels, True, key=lambda level: handed(level) is not None)
    handed_EC = handed(level)
    assert handed_EC is not None, "the bisection ended at a level that it did not try"
    handed_EC[np.arange(len(rows_E)), owner_E] = rows_E - handed_EC.sum(axis=1)
    return handed_EC


def _handed(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    rows_C: np.ndarray,
    level: int,
    *,
    slots: int,
    min_rows: int,
) -> np.ndarray | None:
    """Rows that owners hand to replicas so that no rank has more than the level; None if some
    has."""
    handed_EC = np.zeros((len(rows_E), len(rows_C)), dtype=np.int64)
    room_C, free_C = np.maximum(level - rows_C, 0), np.full(len(rows_C), slots)
    for rank in np.argsort(-rows_C, kind="stable").tolist():
        over = int(rows_C[rank]) - level
        experts = np.flatnonzero(owner_E == rank)
        for expert in experts[np.argsort(-rows_E[experts], kind="stable")].tolist():
            left = int(rows_E[expert]) - 1
            while over > 0 and left > 0:
                is_open_C = (free_C > 0) & (handed_EC[expert] == 0)
                piece_C = np.where(is_open_C, np.minimum(room_C, min(over, left)), 0)
                fits_C = piece_C >= max(min_rows, 1)
                if not fits_C.any():
                    break
                to = int(np.where(fits_C, room_C, 0).argmax())
                piece = int(piece_C[to])
                handed_EC[expert, to] = piece
                room_C[to] -= piece
                free_C[to] -= 1
                over -= piece
                left -= piece
        if over > 0:
            return None
    return handed_EC
