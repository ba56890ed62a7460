# SPDX-License-Identifier: Apache-2.0
"""The papers' algorithms written down line by line, one layer and one replica at a time, to compare
with: HECATE's, Pro-Prophet's and FasterMoE's.

Also the topology and loads of the specs' golden tests. Shape letters: L layers, E experts, C EP
ranks.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.planning.layer_costs import BlockPrices

PROPERTY = settings(deadline=None, derandomize=True, max_examples=75)

# Topology T: 2 nodes of 2 devices, 8 experts, 2 on each device.
NODE_C = np.array([0, 0, 1, 1])
OWNER = Placement.block(8, 4)
LOAD_E = np.array([40, 10, 6, 4, 20, 8, 7, 5])
ROWS_CE = np.array(
    [
        [10, 3, 1, 1, 5, 2, 2, 1],
        [10, 2, 2, 1, 5, 2, 2, 1],
        [10, 3, 1, 1, 5, 2, 1, 2],
        [10, 2, 2, 1, 5, 2, 2, 1],
    ]
)

# Pro-Prophet's golden tests: 4 devices, one expert each.
GATING_CE = np.array([[10, 2, 3, 1], [8, 4, 2, 2], [9, 1, 4, 2], [7, 3, 3, 3]])
ONE_EACH = Placement.block(4, 4)
BLOCK_PRICES = BlockPrices(
    row_s=0.5,
    row_bytes=1.0,
    bytes_per_s=1.0,
    weight_bytes=8.0,
    gradient_bytes=8.0,
    copy_bytes_per_s=1.0,
    forward_gap_s=4.0,
    backward_gap_s=8.0,
)


def holdings(placement: Placement) -> list[list[int]]:
    """The experts of each EP rank."""
    return [
        sorted(placement.experts_of(ep_rank).tolist()) for ep_rank in range(placement.num_ep_ranks)
    ]


def materialized(
    holds_EC: np.ndarray, load: list[int], t: int, m: int, node: list[int]
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Algorithm 1 (rules 16 to 19): who holds what; the sparse branch's replicas in order."""
    holds_EC = holds_EC.copy()
    num_experts, num_ep_ranks = holds_EC.shape
    t = min(t, num_experts) if any(load) else 0
    m = min(m, t)
    hot = sorted(range(num_experts), key=lambda e: (-load[e], e))[:t]
    if t <= m:
        holds_EC[hot] = True
        return holds_EC, []
    quota = quotas(
        [load[e] for e in hot],
        num_ep_ranks * m,
        [num_ep_ranks - int(holds_EC[e].sum()) for e in hot],
    )
    free = [m] * num_ep_ranks
    placed = []
    for e, count in zip(hot, quota):
        for _ in range(count):
            open_ep_ranks = [d for d in range(num_ep_ranks) if free[d] > 0 and not holds_EC[e, d]]
            if not open_ep_ranks:
                break

            def key(d: int, e: int = e) -> tuple[bool, int, int, int, int]:
                ep_ranks = [c for c in range(num_ep_ranks) if node[c] == node[d]]
                has_replica = any(holds_EC[e, c] for c in ep_ranks)
                return has_replica, -sum(free[c] for c in ep_ranks), node[d], -free[d], d

            best = min(open_ep_ranks, key=key)
            holds_EC[e, best] = True
            free[best] -= 1
            placed.append((e, best))
    return holds_EC, placed


def quotas(load: list[int], slots: int, most: list[int]) -> list[int]:
    """Largest remainders with a cap; what is left is dealt in turns (rule 18)."""
    total = sum(load)
    exact = [Fraction(slots * rows, total) for rows in load]
    quota = [min(int(share), cap) for share, cap in zip(exact, most)]
    turns = sorted(range(len(load)), key=lambda i: (-(exact[i] - int(exact[i])), -load[i], i))
    left = slots - sum(quota)
    while left and any(quota[i] < most[i] for i in turns):
        for i in turns:
            if left and quota[i] < most[i]:
                quota[i] += 1
                left -= 1
    return quota


def sharded(
    loads: list[list[int]], t: int, node: list[int], owners: list[list[int]] | None
) -> list[list[int]]:
    """Algorithm 2 (rules 23 to 25): the owner of each expert of each layer."""
    num_ep_ranks, num_experts = len(node), sum(map(len, loads))
    slots = [
        num_experts // num_ep_ranks + (d < num_experts % num_ep_ranks) for d in range(num_ep_ranks)
    ]
    order = [sorted(range(len(load)), key=lambda e: (-load[e], e)) for load in loads]
    hot, cold = [o[:t] for o in order], [o[t:] for o in order]
    owner = [[-1] * len(load) for load in loads]

    def hottest_cold(layer: int) -> int:
        return max((loads[layer][e] for e in cold[layer]), default=0)

    for layer in sorted(range(len(loads)), key=lambda layer: (-hottest_cold(layer), layer)):
        rows = [0] * num_ep_ranks
        for e in cold[layer]:
            open_ep_ranks = [d for d in range(num_ep_ranks) if slots[d]]

            def node_key(n: int, rows: list[int] = rows) -> tuple[int, int, int]:
                ep_ranks = [d for d in range(num_ep_ranks) if node[d] == n]
                return sum(rows[d] for d in ep_ranks), sum(slots[d] for d in ep_ranks), n

            best_node = min({node[d] for d in open_ep_ranks}, key=node_key)
            best = min(
                (d for d in open_ep_ranks if node[d] == best_node),
                key=lambda d, rows=rows: (rows[d], slots[d], d),  # type: ignore[misc]
            )
            owner[layer][e] = best
            slots[best] -= 1
            rows[best] += loads[layer][e]
    for layer, experts in enumerate(hot):  # those that can stay
        for e in experts:
            if owners is not None and slots[owners[layer][e]]:
                owner[layer][e] = owners[layer][e]
                slots[owners[layer][e]] -= 1
    for layer, experts in enumerate(hot):
        for e in experts:
            if owner[layer][e] < 0:
                owner[layer][e] = max(range(num_ep_ranks), key=lambda d: (slots[d], -d))
                slots[owner[layer][e]] -= 1
    return owner


class Turn(NamedTuple):
    """One turn of Pro-Prophet's loop."""

    expert: int
    holders: list[int]
    computed: list[int]
    received: list[int]
    seconds: float


def prophesied(
    rows: list[list[int]],
    own: list[int],
    prices: BlockPrices,
    *,
    n: int | None = 0,
    alpha: float = 1.0,
) -> tuple[list[Turn], int]:
    """Pro-Prophet's Algorithm 1 (spec 2.4, choice 8): its turns, and how many it returns."""
    ep_ranks, experts = range(len(rows)), range(len(own))
    holders: dict[int, list[int]] = {}
    turns: list[Turn] = []
    computed, received = owner_loads(rows, own, holders)
    fastest, count = block_time(prices, rows, own, holders), 0
    while not max(computed) - min(computed) < alpha * sum(map(sum, rows)) / len(own):
        i = min(ep_ranks, key=lambda d: (-computed[d], d))  # type: ignore[misc]
        unused = [e for e in experts if own[e] == i and e not in holders]
        if not unused:
            break
        e = min(unused, key=lambda e: (-sum(row[e] for row in rows), e))
        others = sorted((d for d in ep_ranks if d != i), key=lambda d: (rows[d][e], d))  # type: ignore[misc]
        num_excluded = sum(rows[d][e] == 0 for d in others) if n is None else n
        holders[e] = sorted([i, *others[num_excluded:]])
        computed, received = owner_loads(rows, own, holders)
        seconds = block_time(prices, rows, own, holders)
        turns.append(Turn(e, holders[e], computed, received, seconds))
        if seconds < fastest:
            fastest, count = seconds, len(turns)
    return turns, count


def owner_loads(
    rows: list[list[int]], own: list[int], holders: dict[int, list[int]]
) -> tuple[list[int], list[int]]:
    """H and R (spec 2.2), row by row."""
    computed, received = [0] * len(rows), [0] * len(rows)
    for d, row in enumerate(rows):
        for e, count in enumerate(row):
            stays = d in holders.get(e, [own[e]])
            computed[d if stays else own[e]] += count
            if not stays:
                received[own[e]] += count
    return computed, received


def block_time(
    prices: BlockPrices, rows: list[list[int]], own: list[int], holders: dict[int, list[int]]
) -> float:
    """Equation (6) or (8), with choices 3 and 4, and latencies."""
    computed, received = owner_loads(rows, own, holders)
    moved = sum(len(ep_ranks) for ep_ranks in holders.values() if len(ep_ranks) > 1) / len(rows)
    a2a = prices.exchange_start_s + max(received) * prices.row_bytes / prices.bytes_per_s
    fec, bec = max(computed) * prices.row_s, 2 * (max(computed) * prices.row_s)
    starts = prices.copy_latency_s if moved else 0.0
    trans = starts + moved * prices.weight_bytes / prices.copy_bytes_per_s
    agg = starts + moved * prices.gradient_bytes / prices.copy_bytes_per_s
    if prices.gathers_again:
        agg += trans
    if prices.is_scheduled:
        trans = max(0.0, trans - fec - prices.forward_gap_s)
        agg = max(0.0, agg - bec - prices.backward_gap_s)
    return 4 * a2a + 3 * fec + trans + agg


def shadowed(rows: list[list[int]], prices: BlockPrices) -> tuple[list[int], list[float]]:
    """FasterMoE's policy (spec section 5): its shadows and all the costs that it looked at."""
    counts = [sum(column) for column in zip(*rows)]
    order = sorted(range(len(counts)), key=lambda e: (-counts[e], e))
    per_row = 3 * prices.row_s + 4 * prices.row_bytes / prices.bytes_per_s
    costs, shadows = [per_row * counts[order[0]]], []
    shadow_time = 0.0
    for e, following in pairwise(order):
        shadow_time += prices.weight_bytes / prices.copy_bytes_per_s
        costs.append(per_row * counts[following] + shadow_time)
        if not costs[-1] < costs[-2]:
            break
        shadows.append(e)
    return shadows, costs


class Block(NamedTuple):
    """One layer, what is routed there, and what that costs."""

    owner: Placement
    rows_CE: np.ndarray
    prices: BlockPrices


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Any owners; skewed or flat rows, with ties and zeros; prices in binary fractions."""
    num_ep_ranks, num_experts = draw(st.integers(2, 8)), draw(st.integers(1, 16))
    (owner,) = draw(model_owners([num_experts], num_ep_ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most, power = draw(st.sampled_from([5000, 40, 3])), draw(st.sampled_from([1, 4]))
    share_CE = rng.random((num_ep_ranks, num_experts)) * rng.random(num_experts) ** power
    alive_CE = rng.random(share_CE.shape) < draw(st.sampled_from([1.0, 0.5, 0.2]))
    prices = BlockPrices(
        row_s=draw(st.sampled_from([1.0, 0.25, 0.0])),
        row_bytes=draw(st.sampled_from([3.0, 1.0, 0.0])),
        bytes_per_s=draw(st.sampled_from([1.0, 4.0])),
        weight_bytes=draw(st.sampled_from([4.0, 64.0, 0.0])),
        gradient_bytes=draw(st.sampled_from([4.0, 128.0, 0.0])),
        copy_bytes_per_s=draw(st.sampled_from([8.0, 0.5])),
        exchange_start_s=draw(st.sampled_from([0.0, 2.0])),
        copy_latency_s=draw(st.sampled_from([0.0, 8.0])),
        forward_gap_s=draw(st.sampled_from([0.0, 16.0])),
        backward_gap_s=draw(st.sampled_from([0.0, 32.0])),
        is_scheduled=draw(st.booleans()),
        gathers_again=draw(st.booleans()),
    )
    return Block(owner, np.rint(most * share_CE * alive_CE).astype(np.int64), prices)


@st.composite
def clusters(draw: st.DrawFn) -> np.ndarray:
    """Node of each EP rank: even, uneven, and in any order."""
    num_ep_ranks = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    node_C = rng.integers(0, draw(st.integers(1, 4)), num_ep_ranks)
    return node_C if draw(st.booleans()) else np.sort(node_C)


@st.composite
def layer_loads(draw: st.DrawFn) -> list[np.ndarray]:
    """Loads of some layers, of different numbers of experts; with ties and zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    most, alive = draw(st.sampled_from([1, 9, 1000])), draw(st.sampled_from([0.0, 0.5, 1.0]))
    return [rng.integers(0, most + 1, size) * (rng.random(size) < alive) for size in sizes]


@st.composite
def model_owners(
    draw: st.DrawFn, num_experts: list[int], num_ep_ranks: int
) -> tuple[Placement, ...]:
    """Owners of all layers: the first ones, or any."""
    if draw(st.booleans()):
        return even_owners(num_experts, num_ep_ranks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return tuple(
        Placement.owned_by(rng.integers(0, num_ep_ranks, count), num_ep_ranks)
        for count in num_experts
    )


class SmallModel(NamedTuple):
    """Some layers on some EP ranks."""

    owners: tuple[Placement, ...]
    sizes: list[int]
    node_C: np.ndarray
    rng: np.random.Generator


@st.composite
def small_models(draw: st.DrawFn) -> SmallModel:
    """Few layers of few experts, anywhere."""
    node_C = draw(clusters())
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    owners = draw(model_owners(sizes, len(node_C)))
    return SmallModel(owners, sizes, node_C, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
