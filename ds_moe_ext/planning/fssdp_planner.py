# SPDX-License-Identifier: Apache-2.0
"""HECATE's planners: replicas of hot experts for the next step, and new owners for experts. Pure.

``materialize`` is Algorithm 1 (spec rules 16 to 20): all layers are planned at once, and a turn of
its loop places one expert of each. ``guarded`` keeps the replicas that pay, ``calibrate`` adds some
once rows are known. ``shard`` is Algorithm 2 (rules 23 to 26); ``swap_owners``, ours, moves experts
where that gains more than the move costs. Shape letters: L
layers, E experts of one layer, X experts of all layers, T hot experts of a layer, C EP ranks, N
nodes, G EP ranks of a node, P places in the table of ``N`` times ``G``, I replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.loads import check_loads, hottest_first, per_layer
from ds_moe_ext.planning.prices import (
    NUM_EXCHANGES,
    Prices,
    RoutedRows,
    RowFlow,
    busiest_link,
    flow_seconds,
    seconds_saved,
    step_seconds,
)

NEVER = np.int32(np.iinfo(np.int32).max)  # sorts behind every place that is open


def materialize(
    owners: Sequence[Placement],
    loads: Sequence[np.ndarray],
    *,
    overlap_degree: np.ndarray | int,
    replicas_per_ep_rank: np.ndarray | int,
    node_C: np.ndarray,
) -> tuple[Placement, ...]:
    """Choose where the hot experts of each layer compute, beside their owners.

    The hot experts are the ``t`` with most rows, the lower index first among equals. If an EP rank
    has memory for all of them, they go everywhere. If not, the ``C * m`` slots are shared among
    them by load, and the replicas of each are spread over nodes, then EP ranks, more free slots
    first. A layer without any rows gets no replicas: nothing is known of it yet (spec rule 15).

    Costs a sort of each layer's loads, and a sort of ``[L, C]`` for each hot expert.

    Args:
        owners: of each layer. Replicas that are there already are kept (spec rule 21).
        loads: rows of each expert, int64 ``[E]`` a layer; only their ratios count.
        overlap_degree: ``t``, experts whose replicas can be sent behind attention; one for all
            layers, or ``[L]``.
        replicas_per_ep_rank: ``m``, replicas that an EP rank has memory for; likewise.
        node_C: node of each EP rank.

    Returns:
        One placement a layer, owners included. No EP rank receives more than ``min(m, t)``
        replicas.
    """
    if not owners:
        return ()
    for layer, owner in enumerate(owners):
        if node_C.shape != (owner.num_ep_ranks,):
            raise ValueError(
                f"layer {layer} lies on {owner.num_ep_ranks} EP ranks, but node_C names the nodes "
                f"of {node_C.shape}; name one node an EP rank"
            )
    num_experts_L = np.array([owner.num_experts for owner in owners])
    check_loads(loads, num_experts_L.tolist(), factor=len(node_C) * num_experts_L.max())
    degree_L = np.minimum(per_layer(overlap_degree, len(owners)), num_experts_L)
    order_LE, rows_LE = hottest_first(loads)
    degree_L = np.where(rows_LE[:, 0] > 0, degree_L, 0)
    replicas_L = np.minimum(per_layer(replicas_per_ep_rank, len(owners)), degree_L)

    # The hot experts of each layer, by index among those of all layers, and their rows; 0 where a
    # layer has fewer than the most.
    is_one_LT = np.arange(degree_L.max()) < degree_L[:, None]
    first_L1 = (num_experts_L.cumsum() - num_experts_L)[:, None]
    expert_LT = (order_LE[:, : is_one_LT.shape[1]] + first_L1) * is_one_LT
    rows_LT = rows_LE[:, : is_one_LT.shape[1]] * is_one_LT
    all_fit_L = degree_L <= replicas_L
    holds_XC = np.concatenate([owner.holds_EC for owner in owners])
    holds_XC[expert_LT[all_fit_L][is_one_LT[all_fit_L]]] = True
    if not all_fit_L.all():
        few = [each[~all_fit_L] for each in (expert_LT, rows_LT, is_one_LT, replicas_L)]
        expert_LT, rows_LT, is_one_LT, replicas_L = few
        lacks_LT = (~holds_XC[expert_LT]).sum(axis=2) * is_one_LT
        quota_LT = slot_quotas(rows_LT, replicas_L * len(node_C), lacks_LT)
        _spread(holds_XC, expert_LT, quota_LT, replicas_L, node_C)
    by_layer = np.split(holds_XC, num_experts_L.cumsum()[:-1])
    return tuple(owner.with_replicas(holds_EC) for owner, holds_EC in zip(owners, by_layer))


def slot_quotas(rows_LT: np.ndarray, slots_L: np.ndarray, most_LT: np.ndarray) -> np.ndarray:
    """Share slots among experts by load: largest remainders, capped (spec rule 18, choice B6).

    Slots that remain are dealt one by one, largest remainder first, then most rows, round after
    round, until none is left or no expert can take one.
    """
    total_L1 = np.maximum(rows_LT.sum(axis=1, keepdims=True), 1)
    whole_LT, rest_LT = np.divmod(slots_L[:, None] * rows_LT, total_L1)
    quota_LT = np.minimum(whole_LT, most_LT)
    order_LT = np.argsort(-rest_LT, axis=1, kind="stable")
    room_LT = np.take_along_axis(most_LT - quota_LT, order_LT, axis=1)
    left_L1 = (slots_L - quota_LT.sum(axis=1))[:, None]
    dealt_LT = np.zeros_like(room_LT)
    while True:
        takes_LT = dealt_LT < room_LT
        takes_LT &= takes_LT.cumsum(axis=1) <= left_L1
        if not takes_LT.any():
            break
        dealt_LT += takes_LT
        left_L1 = left_L1 - takes_LT.sum(axis=1, keepdims=True)
    filled_LT = np.take_along_axis(quota_LT, order_LT, axis=1) + dealt_LT
    np.put_along_axis(quota_LT, order_LT, filled_LT, axis=1)
    return quota_LT


def _spread(
    holds_XC: np.ndarray,
    hot_LT: np.ndarray,
    quota_LT: np.ndarray,
    replicas_L: np.ndarray,
    node_C: np.ndarray,
) -> None:
    """Put the replicas into ``holds_XC``, expert by expert, hottest first (spec rule 19)."""
    # Experts that get replicas first, so that no turn is spent on the others.
    order_LT = np.argsort(quota_LT == 0, axis=1, kind="stable")
    hot_TL = np.take_along_axis(hot_LT, order_LT, axis=1).T
    quota_TL = np.take_along_axis(quota_LT, order_LT, axis=1).T
    turns = list(zip(hot_TL, quota_TL))[: (quota_LT > 0).sum(axis=1).max()]
    _, row_C, size_N = np.unique(node_C, return_inverse=True, return_counts=True)
    if len(size_N) == 1:
        _spread_on_one_node(holds_XC, turns, replicas_L)
        return
    # EP ranks in a table with a row a node, -1 where a short row is padded.
    ep_rank_NG = np.full((len(size_N), size_N.max()), -1)
    order_C = np.argsort(row_C, kind="stable")
    column_C = np.arange(len(node_C)) - np.repeat(size_N.cumsum() - size_N, size_N)
    ep_rank_NG[row_C[order_C], column_C] = order_C
    free_LNG = np.where(ep_rank_NG < 0, 0, replicas_L[:, None, None]).astype(np.int32)
    for expert_L, quota_L in turns:
        held_LNG = holds_XC[expert_L[:, None, None], ep_rank_NG] & (ep_rank_NG >= 0)
        layer_I, node_I, column_I = _best_places(held_LNG, free_LNG, quota_L)
        free_LNG[layer_I, node_I, column_I] -= 1
        holds_XC[expert_L[layer_I], ep_rank_NG[node_I, column_I]] = True


def _spread_on_one_node(
    holds_XC: np.ndarray, turns: Sequence[tuple[np.ndarray, np.ndarray]], replicas_L: np.ndarray
) -> None:
    """The same where there is one node: the EP ranks with most free slots, the first among
    equals."""
    num_ep_ranks, most = holds_XC.shape[1], replicas_L.max()
    # Slots taken and EP rank as one number, by which EP ranks are ordered; who has no slot comes
    # last.
    key_LC = (most - replicas_L)[:, None] * num_ep_ranks + np.arange(num_ep_ranks)
    for expert_L, quota_L in turns:
        open_LC = np.where(holds_XC[expert_L], NEVER, key_LC)
        open_LC.sort(axis=1)
        is_chosen_LC = (open_LC < most * num_ep_ranks) & (
            np.arange(num_ep_ranks) < quota_L[:, None]
        )
        layer_I = np.nonzero(is_chosen_LC)[0]
        ep_rank_I = open_LC[is_chosen_LC] % num_ep_ranks
        key_LC[layer_I, ep_rank_I] += num_ep_ranks
        holds_XC[expert_L[layer_I], ep_rank_I] = True


def _best_places(
    held_LNG: np.ndarray, free_LNG: np.ndarray, quota_L: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Layer, node and column of every replica of one expert of each layer.

    One by one, a replica goes to the node that has none yet; among those, that has most free slots;
    then, that comes first. In the node it goes to the EP rank with most free slots, then the first.
    A replica takes a slot from its node, so a node's replica number ``j`` competes as a node with
    ``j`` free slots less and, from ``j = 1`` on, as one that has a replica. So the replicas of an
    expert are the places with the smallest keys, and one sort finds all of them.
    """
    num_layers, num_nodes, size = held_LNG.shape
    column_G = np.arange(size, dtype=np.int32)
    most_free = np.int32(free_LNG.max())
    is_open_LNG = (free_LNG > 0) & ~held_LNG
    closed = (most_free + 1) * size
    # Sorted: column j shows the EP rank that the node's replica number j goes to.
    ep_rank_LNG = np.sort(np.where(is_open_LNG, (most_free - free_LNG) * size + column_G, closed))

    waits_LNG = held_LNG.any(axis=2, keepdims=True) | (column_G > 0)
    fewer_LNG = most_free * size - free_LNG.sum(axis=2, keepdims=True, dtype=np.int32) + column_G
    key_LNG = (waits_LNG * closed + fewer_LNG) * num_nodes
    key_LNG += np.arange(num_nodes, dtype=np.int32)[:, None]
    key_LNG[ep_rank_LNG == closed] = NEVER
    sorted_LP = np.sort(key_LNG.reshape(num_layers, -1))
    last_L = np.where(quota_L > 0, sorted_LP[np.arange(num_layers), quota_L - 1], -1)
    is_chosen_LNG = (key_LNG <= last_L[:, None, None]) & (key_LNG < NEVER)
    layer_I, node_I, _ = np.nonzero(is_chosen_LNG)
    return layer_I, node_I, ep_rank_LNG[is_chosen_LNG] % size


def shard(
    loads: Sequence[np.ndarray],
    *,
    overlap_degree: np.ndarray | int,
    node_C: np.ndarray,
    owners: Sequence[Placement] | None = None,
) -> tuple[Placement, ...]:
    """Choose every expert's owner, so that the cold ones, which are never copied, are balanced.

    The layer whose hottest cold expert has most rows goes first. Its cold experts, most rows first,
    go to the node with fewest rows of this layer so far, and there to the EP rank with fewest;
    among equals to the one with fewer slots left, then the first. The hot experts, in order of
    layer and rows, fill the slots that remain: those whose owner has one stay, the others go to the
    EP rank with most slots left, then the first.

    An EP rank has ``floor(experts of all layers / C)`` slots. Where that leaves experts over, the
    first EP ranks have a slot more, as in ``placement.even_owners`` (spec choice B13).

    Costs two heap operations for each expert.

    Args:
        loads: rows of each expert, int64 ``[E]`` a layer.
        overlap_degree: ``t`` of Algorithm 1 (spec choice B16); one for all layers, or ``[L]``.
        node_C: node of each EP rank.
        owners: the present ones, where hot experts stay if they can; None lets none stay.

    Returns:
        One placement a layer. Over all layers, no EP rank owns more than one expert more than
        another.
    """
    if len(loads) == 0:
        return ()
    num_experts = (
        [owner.num_experts for owner in owners] if owners else [len(load) for load in loads]
    )
    check_loads(loads, num_experts, factor=max(num_experts))
    degrees = np.minimum(per_layer(overlap_degree, len(loads)), num_experts).tolist()
    order = [order_E[:count] for order_E, count in zip(hottest_first(loads)[0], num_experts)]
    hot = [order_E[:degree] for order_E, degree in zip(order, degrees)]
    cold = [order_E[degree:] for order_E, degree in zip(order, degrees)]
    cold_rows = [load_E[cold_E].tolist() for load_E, cold_E in zip(loads, cold)]

    least, over = divmod(sum(num_experts), len(node_C))
    slots = [least + (ep_rank < over) for ep_rank in range(len(node_C))]
    nodes = [np.flatnonzero(node_C == node).tolist() for node in np.unique(node_C)]
    new_owners = [np.empty(count, dtype=np.int64) for count in num_experts]
    for layer in sorted(range(len(loads)), key=lambda layer: -max(cold_rows[layer], default=0)):
        new_owners[layer][cold[layer]] = _deal(cold_rows[layer], slots, nodes)
    _fill(new_owners, hot, slots, owners)
    return tuple(Placement.owned_by(owner_E, len(node_C)) for owner_E in new_owners)


def _deal(rows: list[int], slots: list[int], nodes: list[list[int]]) -> list[int]:
    """The EP rank of each cold expert of one layer; takes their slots."""
    # A heap's key is rows, slots left and index in one integer, so that it grows by addition.
    per_slot = len(slots)
    per_row = (sum(slots) + 1) * per_slot
    open_ep_ranks = [
        [slots[ep_rank] * per_slot + ep_rank for ep_rank in ep_ranks if slots[ep_rank]]
        for ep_ranks in nodes
    ]
    open_nodes = [
        sum(slots[ep_rank] for ep_rank in ep_ranks) * per_slot + node
        for node, ep_ranks in enumerate(nodes)
        if open_ep_ranks[node]
    ]
    for heap in (open_nodes, *open_ep_ranks):
        heapify(heap)
    chosen = []
    for count in rows:
        growth = count * per_row - per_slot
        ep_ranks = open_ep_ranks[open_nodes[0] % per_slot]
        ep_rank = ep_ranks[0] % per_slot
        chosen.append(ep_rank)
        slots[ep_rank] -= 1
        if slots[ep_rank]:
            heapreplace(ep_ranks, ep_ranks[0] + growth)
        else:
            heappop(ep_ranks)
        if ep_ranks:
            heapreplace(open_nodes, open_nodes[0] + growth)
        else:
            heappop(open_nodes)
    return chosen


def _fill(
    new_owners: list[np.ndarray],
    hot: list[np.ndarray],
    slots: list[int],
    owners: Sequence[Placement] | None,
) -> None:
    """Write the new owners of the hot experts, which take all slots that are left (line 16)."""
    moving = []
    for layer, hot_T in enumerate(hot):
        for expert in hot_T.tolist():
            owner = int(owners[layer].owner_E[expert]) if owners else -1
            if owner >= 0 and slots[owner]:
                new_owners[layer][expert] = owner
                slots[owner] -= 1
            else:
                moving.append((layer, expert))
    roomiest = [(-count, ep_rank) for ep_rank, count in enumerate(slots)]
    heapify(roomiest)
    for layer, expert in moving:
        count, ep_rank = roomiest[0]
        new_owners[layer][expert] = ep_rank
        heapreplace(roomiest, (count + 1, ep_rank))


ROUNDS = 16  # of trying, at most; each layer takes one step in each
PARTNERS = 4  # EP ranks with least to do, with each of which the busiest tries a swap


@dataclass(frozen=True, eq=False)
class ReplicaRules:
    """How layers run by any owners: Algorithm 1 plans their replicas, and the guard stands behind
    it."""

    routed: RoutedRows  # rows of each layer
    overlap_degree_L: np.ndarray  # ``t`` of Algorithm 1, int64
    replicas_L: np.ndarray  # ``m``, likewise
    prices: Prices  # of the layers, whose experts are alike
    flow_of: Callable[[Sequence[Placement], RoutedRows], RowFlow]  # how rows go to replicas

    def seconds(self, owners: Sequence[Placement]) -> float:
        """Of all layers in a step, by owners of each."""
        return math.fsum(self.run(range(len(owners)), owners).seconds_L)

    def run(self, layers: Sequence[int], owners: Sequence[Placement]) -> Runs:
        """Layers by owners, each as often as it is named."""
        totals = self.routed.totals
        routed = self.routed.of_layers(layers)
        targets = materialize(
            owners,
            [totals[layer] for layer in layers],
            overlap_degree=self.overlap_degree_L[list(layers)],
            replicas_per_ep_rank=self.replicas_L[list(layers)],
            node_C=routed.node_C,
        )
        alone, copied = (self.flow_of(placements, routed) for placements in (owners, targets))
        alone_L, copied_L = (flow_seconds(flow, prices=self.prices) for flow in (alone, copied))
        pays_L = copied_L < alone_L
        busy_LC = np.where(pays_L[:, None], self._busy_LC(copied), self._busy_LC(alone))
        in_force = [t if pays else owner for t, owner, pays in zip(targets, owners, pays_L)]
        per_holder = [totals[layer] / t.num_holders_E for layer, t in zip(layers, in_force)]
        return Runs(owners, per_holder, busy_LC, np.minimum(alone_L, copied_L))

    def _busy_LC(self, flow: RowFlow) -> np.ndarray:
        """Seconds that each EP rank and its links are busy, and its node's."""
        prices = self.prices
        row_bytes = NUM_EXCHANGES * prices.row_bytes
        ep_rank_LC = (
            np.maximum(flow.sent_LC, flow.received_LC) * row_bytes / prices.intra_bytes_per_s
        )
        node_LN = np.maximum(flow.out_LN, flow.in_LN) * row_bytes / prices.inter_bytes_per_s
        busy_LC: np.ndarray = prices.row_s * flow.computed_LC + ep_rank_LC
        return busy_LC + node_LN[:, self.routed.node_C]

    @property
    def row_s(self) -> float:
        """Seconds that a row keeps an EP rank and its link busy."""
        return (
            self.prices.row_s
            + NUM_EXCHANGES * self.prices.row_bytes / self.prices.intra_bytes_per_s
        )


class Runs(NamedTuple):
    """What came of layers by some owners."""

    owners: Sequence[Placement]  # of each
    # of each expert's holders, ``[E]`` a layer, as if they shared them evenly
    rows: Sequence[np.ndarray]
    busy_LC: np.ndarray  # seconds that each EP rank is busy
    seconds_L: np.ndarray  # that each layer takes


@dataclass(frozen=True)
class MoveCosts:
    """What experts that move must gain."""

    expert_s: float  # seconds in which a link carries one, with all that is kept of it
    num_steps: int  # for which new owners are meant

    def seconds(
        self, old: Sequence[Placement], new: Sequence[Placement], node_C: np.ndarray
    ) -> float:
        """That the move takes: as long as its busiest link."""
        links = [_links_D(a.owner_E, b.owner_E, node_C) for a, b in zip(old, new)]
        return self.expert_s * int(np.sum(links, axis=0).max())


def _links_D(old_E: np.ndarray, new_E: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Experts of a layer that leave each EP rank, that come to it, and likewise of nodes; int64."""
    moves_E = old_E != new_E
    from_, to = old_E[moves_E], new_E[moves_E]
    crosses = node_C[from_] != node_C[to]
    sizes = len(node_C), int(node_C.max()) + 1
    ends = (from_, to), (node_C[from_[crosses]], node_C[to[crosses]])
    return np.concatenate(
        [np.bincount(end, minlength=n) for n, two in zip(sizes, ends) for end in two]
    )


class _Step(NamedTuple):
    """What one layer has gained by its swaps of one round."""

    layer: int
    gain_s: float
    owner: Placement


def swap_owners(
    owners: Sequence[Placement], rules: ReplicaRules, costs: MoveCosts
) -> tuple[Placement, ...]:
    """Let experts of a layer change places, as far as that gains more than it costs.

    In each round every layer pairs its busiest EP rank with the least busy, the next with the next,
    and tries to swap an expert between the first pair, the first two, four and so on, and between
    the busiest EP rank and some of the least busy; the best of these is kept, and a layer that
    gains nothing any more is left. Of all that was kept, in order of gain, so much is done that
    what ``num_steps`` steps gain less what the move takes is most. Which replicas are planned
    depends on owners in no simple way, so that nothing is concluded: all that is tried is planned
    and priced.

    Costs at most ``ROUNDS`` times the planning of some ten times the layers. A layer of which no
    expert moves has its present placement.
    """
    if not rules.row_s:  # rows cost nothing
        return tuple(owners)
    return _that_pay(owners, _steps(owners, rules, costs), costs, rules.routed.node_C)


def _steps(owners: Sequence[Placement], rules: ReplicaRules, costs: MoveCosts) -> list[_Step]:
    """What layers could gain, one after the other; of each layer in order."""
    steps: list[_Step] = []
    # What a swap adds to all links, on average.
    swap_s = 2 * costs.expert_s / (owners[0].num_ep_ranks * costs.num_steps)
    now = rules.run(range(len(owners)), owners)
    layers = list(range(len(owners)))
    for _ in range(ROUNDS):
        tried = [
            (at, layer, num_swaps, owner)
            for at, layer in enumerate(layers)
            for num_swaps, owner in _candidates(now, at, rules.row_s)
        ]
        if not tried:
            break
        ats, of_layers, counts, tried_owners = zip(*tried)
        found = rules.run(of_layers, tried_owners)
        gain = now.seconds_L[list(ats)] - found.seconds_L
        net = gain - swap_s * np.array(counts)
        best: dict[int, int] = {}
        for number, at in enumerate(ats):
            if net[number] > max(0.0, net[best[at]] if at in best else 0.0):
                best[at] = number
        kept = list(best.values())
        layers = [of_layers[number] for number in kept]
        steps += [_Step(of_layers[n], float(gain[n]), tried_owners[n]) for n in kept]
        now = Runs(
            [found.owners[n] for n in kept],
            [found.rows[n] for n in kept],
            found.busy_LC[kept],
            found.seconds_L[kept],
        )
    return steps


def _candidates(now: Runs, at: int, row_s: float) -> Iterator[tuple[int, Placement]]:
    """Owners to try in place of those of a layer, and how many swaps lead there."""
    owner, rows_E, busy_C = now.owners[at], now.rows[at], now.busy_LC[at]
    order_C = np.argsort(-busy_C, kind="stable")
    num_pairs, idle_C = owner.num_ep_ranks // 2, order_C[::-1]
    others = idle_C[1 : min(PARTNERS, owner.num_ep_ranks - 1)]
    from_Q = np.concatenate([order_C[:num_pairs], np.repeat(order_C[:1], len(others))])
    to_Q = np.concatenate([idle_C[:num_pairs], others])
    given_Q, taken_Q, is_one_Q = _best_swaps(
        owner, rows_E, from_Q, to_Q, (busy_C[from_Q] - busy_C[to_Q]) / (2 * row_s)
    )
    pairs = np.flatnonzero(is_one_Q[:num_pairs])
    counts = sorted({len(pairs), *(2**power for power in range(len(pairs).bit_length()))} - {0})
    chosen = [pairs[:count] for count in counts]
    chosen += [np.array([q]) for q in range(num_pairs, len(from_Q)) if is_one_Q[q]]
    for few in chosen:
        owner_E = owner.owner_E.copy()
        owner_E[given_Q[few]], owner_E[taken_Q[few]] = to_Q[few], from_Q[few]
        yield len(few), Placement.owned_by(owner_E, owner.num_ep_ranks)


def _best_swaps(
    owner: Placement,
    rows_E: np.ndarray,
    from_Q: np.ndarray,
    to_Q: np.ndarray,
    wanted_Q: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The swap between each pair of EP ranks that takes so many rows from one to the other, or
    nearly."""
    given_QS, taken_QS = owner.expert_CS[from_Q], owner.expert_CS[to_Q]
    less_QSS = rows_E[given_QS][:, :, None] - rows_E[taken_QS][:, None, :]
    off_QSS = np.abs(less_QSS - wanted_Q[:, None, None])
    off_QSS[(less_QSS <= 0) | (given_QS < 0)[:, :, None] | (taken_QS < 0)[:, None, :]] = np.inf
    all_Q = np.arange(len(from_Q))
    best_Q = off_QSS.reshape(len(from_Q), owner.num_slots**2).argmin(axis=1)
    given_Q, taken_Q = np.divmod(best_Q, owner.num_slots)
    is_one_Q = np.isfinite(off_QSS[all_Q, given_Q, taken_Q])
    return given_QS[all_Q, given_Q], taken_QS[all_Q, taken_Q], is_one_Q


def _that_pay(
    owners: Sequence[Placement], steps: Sequence[_Step], costs: MoveCosts, node_C: np.ndarray
) -> tuple[Placement, ...]:
    """The owners after so many of the steps, in order of gain, as gain most less what they cost."""
    # A step that follows on a smaller one comes behind it, so that layers take theirs in order.
    least_s: dict[int, float] = {}
    keys = []
    for step in steps:
        least_s[step.layer] = min(step.gain_s, least_s.get(step.layer, math.inf))
        keys.append(-least_s[step.layer])
    chosen, new = tuple(owners), list(owners)
    links = [_links_D(owner.owner_E, owner.owner_E, node_C) for owner in owners]  # none yet
    total_D, gain_s, most_s = np.zeros_like(links[0]), 0.0, 0.0
    for number in sorted(range(len(steps)), key=keys.__getitem__):
        layer, step_s, owner = steps[number]
        now_D = _links_D(owners[layer].owner_E, owner.owner_E, node_C)
        total_D += now_D - links[layer]
        links[layer], new[layer] = now_D, owner
        gain_s += step_s
        net_s = costs.num_steps * gain_s - costs.expert_s * int(total_D.max())
        if net_s > most_s:
            chosen, most_s = tuple(new), net_s
    return chosen


def guarded(
    owners: Sequence[Placement],
    targets: Sequence[Placement],
    routed: RoutedRows,
    *,
    prices: Prices,
) -> tuple[Placement, ...]:
    """The targets that are faster than the owners alone; the owners of the other layers.

    Rows that stay where a replica is may pile up there, so that replicas can make a layer slower
    (spec rule 32).
    """
    saved_L = seconds_saved(owners, targets, routed, prices)
    return tuple(
        target if is_faster else owner
        for owner, target, is_faster in zip(owners, targets, saved_L > 0)
    )


def calibrate(
    owner: Placement,
    target: Placement,
    rows_CE: np.ndarray,
    *,
    replicas_left: int,
    prices: Prices,
    node_C: np.ndarray,
) -> Placement:
    """Add replicas to one layer's target after its gate, if that saves more than sending them
    costs.

    Algorithm 1 runs again on the rows as they are, from the target on, with ``t = 1`` to
    ``replicas_left``; experts that already are everywhere do not compete. Sending is not hidden: it
    takes ``copy_s`` for each expert that the busiest link carries (spec rules 21 and 22). The
    target itself stays if nothing is better.
    """
    load_E = np.where(target.holds_EC.all(axis=1), 0, rows_CE.sum(axis=0))
    wider = materialize(
        [target] * replicas_left,
        [load_E] * replicas_left,
        overlap_degree=np.arange(1, replicas_left + 1),
        replicas_per_ep_rank=replicas_left,
        node_C=node_C,
    )
    choices = (target, *wider)
    seconds = step_seconds(choices, [rows_CE] * len(choices), prices=prices, node_C=node_C)
    seconds += [prices.copy_s * busiest_link(owner, target, each, node_C) for each in choices]
    return choices[int(seconds.argmin())]
