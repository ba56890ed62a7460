# SPDX-License-Identifier: Apache-2.0
"""All-to-alls by way of the nodes: the plans by simulating every rank, then real ranks.

Shape letters: P ranks, V nodes, G ranks of a node, N rows sent, R rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.core.all_to_all import (
    Channel,
    Hop,
    Itinerary,
    Planner,
    Relay,
    by_leaders,
    by_places,
    direct,
)
from ds_moe_ext.core.comm import AllToAll, all_to_all_by_pairs, all_to_all_rows
from ds_moe_ext.core.layout import Nodes, Reach
from tests.marks import slow
from tests.ranks import pool_of

SIZES = [(1, 4), (2, 2), (3, 4), (4, 2), (4, 1)]  # nodes, ranks of each
PLANNERS = [direct, by_leaders, by_places]


def in_turn(num_nodes: int, node_size: int) -> Nodes:
    """Neighbours in rank share a node."""
    return Nodes(np.arange(num_nodes).repeat(node_size))


def plans(planner: Planner, nodes: Nodes, counts_PP: np.ndarray) -> list[Itinerary]:
    return [planner(nodes, counts_PP, rank) for rank in range(nodes.node_P.size)]


def num_messages(itinerary: Itinerary, nodes: Nodes) -> int:
    """Messages to other nodes."""
    own = nodes.node_P[itinerary.rank]
    return sum(
        sent > 0 and nodes.node_P[member] != own
        for hop in itinerary.hops
        for member, sent in zip(hop.member_C, hop.sent_C)
    )


# By simulation.


def rows_between(counts_PP: np.ndarray, sender: int, receiver: int) -> list[tuple[int, int, int]]:
    return [(sender, receiver, number) for number in range(counts_PP[sender, receiver])]


def take(rows: list[tuple[int, int, int]], taken: np.ndarray | None) -> list[tuple[int, int, int]]:
    return rows if taken is None else [rows[n] for n in taken]


def simulate(itineraries: list[Itinerary], counts_PP: np.ndarray) -> list[list[tuple[int, ...]]]:
    """What each rank ends with. A group exchanges once all of its members have come to it."""
    everyone = range(len(itineraries))
    rows_of = [[row for d in everyone for row in rows_between(counts_PP, s, d)] for s in everyone]
    hops_of = [list(itinerary.hops) for itinerary in itineraries]
    while any(hops_of):
        meeting = next(hops[0].member_C for hops in hops_of if hops and is_met(hops_of, hops[0]))
        assert list(meeting) == sorted(meeting), "as a communicator numbers its members"
        hop_of = {rank: hops_of[rank].pop(0) for rank in meeting}
        parcels = {}
        for rank, hop in hop_of.items():
            ready = take(rows_of[rank], hop.taken_N)
            assert len(ready) == len(rows_of[rank]) == sum(hop.sent_C)
            ends = np.cumsum(hop.sent_C)
            for member, sent, end in zip(meeting, hop.sent_C, ends):
                parcels[rank, member] = ready[end - sent : end]
        for rank, hop in hop_of.items():
            came = [parcels[member, rank] for member in meeting]
            assert tuple(map(len, came)) == hop.received_C
            rows_of[rank] = [row for parcel in came for row in parcel]
    return [take(rows, it.taken_R) for rows, it in zip(rows_of, itineraries)]


def is_met(hops_of: list[list[Hop]], hop: Hop) -> bool:
    nexts = [hops_of[rank][0] if hops_of[rank] else None for rank in hop.member_C]
    return all(n and (n.reach, n.member_C) == (hop.reach, hop.member_C) for n in nexts)


@dataclass(frozen=True, eq=False)
class Case:
    """Ragged counts of ranks that are in turn, or anyhow, on nodes of any numbers."""

    sizes: tuple[int, int]
    seed: int
    in_turn: bool
    density: float

    def draw(self) -> tuple[Nodes, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        node_P = in_turn(*self.sizes).node_P
        nodes = Nodes(node_P if self.in_turn else 7 - rng.permutation(node_P))
        shape = (node_P.size, node_P.size)
        return nodes, rng.integers(1, 5, shape) * (rng.random(shape) < self.density)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_row_arrives_in_the_order_of_the_senders(
    sizes: tuple[int, int], planner: Planner
) -> None:
    @settings(deadline=None, derandomize=True, max_examples=40)
    @given(st.builds(Case, st.just(sizes), st.integers(0), st.booleans(), st.floats(0, 1)))
    def check(case: Case) -> None:
        nodes, counts_PP = case.draw()
        ranks = range(nodes.node_P.size)
        itineraries = plans(planner, nodes, counts_PP)
        assert simulate(itineraries, counts_PP) == [
            [row for s in ranks for row in rows_between(counts_PP, s, d)] for d in ranks
        ]
        crossing = [num_messages(itinerary, nodes) for itinerary in itineraries]
        assert all(np.less_equal(crossing, most_messages(planner, nodes)))

    check()


def most_messages(planner: Planner, nodes: Nodes) -> list[int]:
    """To other nodes, of each rank, where every rank has rows for every other."""
    num_nodes, node_size = nodes.ranks_VG.shape
    leads_P = np.isin(np.arange(nodes.node_P.size), nodes.ranks_VG[:, 0])
    most_P = {
        direct: np.full(leads_P.size, (num_nodes - 1) * node_size),  # P - G
        by_leaders: (num_nodes - 1) * leads_P,
        by_places: np.full(leads_P.size, num_nodes - 1),
    }[planner]
    return most_P.tolist()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_to_other_nodes(sizes: tuple[int, int], planner: Planner) -> None:
    nodes = in_turn(*sizes)
    counts_PP = np.ones((nodes.node_P.size,) * 2, dtype=np.int64)
    itineraries = plans(planner, nodes, counts_PP)
    assert [num_messages(it, nodes) for it in itineraries] == most_messages(planner, nodes)


def hops(itinerary: Itinerary) -> list[tuple[Reach, tuple[int, ...], tuple[int, ...]]]:
    return [(hop.reach, hop.member_C, hop.sent_C) for hop in itinerary.hops]


def test_blocks_of_a_message() -> None:
    nodes, counts_PP = in_turn(3, 4), np.ones((12, 12), dtype=np.int64)
    # By places: V blocks to each of the node, then G to each of equal place.
    assert hops(by_places(nodes, counts_PP, 5)) == [
        (Reach.WITHIN, (4, 5, 6, 7), (3, 3, 3, 3)),
        (Reach.BETWEEN, (1, 5, 9), (4, 4, 4)),
    ]
    # By leaders: all to the first of the node, G * G between those, P to each of the node.
    assert hops(by_leaders(nodes, counts_PP, 5)) == [
        (Reach.WITHIN, (4, 5, 6, 7), (12, 0, 0, 0)),
        (Reach.WITHIN, (4, 5, 6, 7), (0, 0, 0, 0)),
    ]
    assert hops(by_leaders(nodes, counts_PP, 4)) == [
        (Reach.WITHIN, (4, 5, 6, 7), (12, 0, 0, 0)),
        (Reach.BETWEEN, (0, 4, 8), (16, 16, 16)),
        (Reach.WITHIN, (4, 5, 6, 7), (12, 12, 12, 12)),
    ]


def test_rows_of_a_small_case() -> None:
    # Rank 0 of nodes {0, 1} and {2, 3} has rows 0 for rank 0, 1 and 2 for 1, 3 for 2, 4 and 5 for
    # 3. Its place 0 is to get those for 0 and 2, place 1 those for 1 and 3.
    counts_PP = np.array([[1, 2, 1, 2], [0, 5, 2, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    itinerary = by_places(in_turn(2, 2), counts_PP, 0)
    within, between = itinerary.hops
    assert within.taken_N.tolist() == [0, 3, 1, 2, 4, 5]
    assert (within.sent_C, within.received_C) == ((2, 4), (2, 2))
    # It then has a row for itself, one for rank 2 and, from rank 1, two more for 2: as they lie.
    assert between.taken_N is None
    assert (between.sent_C, between.received_C) == ((1, 3), (1, 1))
    assert itinerary.taken_R is None


@pytest.mark.parametrize("planner", [by_leaders, by_places])
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (1, 1)], ids=str)
def test_flat_nodes_go_the_direct_way(sizes: tuple[int, int], planner: Planner) -> None:
    nodes = in_turn(*sizes)
    num_ranks = nodes.node_P.size
    counts_PP = np.arange(num_ranks**2).reshape(num_ranks, num_ranks)
    for rank in range(num_ranks):
        itinerary = planner(nodes, counts_PP, rank)
        (hop,) = itinerary.hops
        assert hop.reach is Reach.ALL
        assert hop.member_C == tuple(range(num_ranks))
        assert hop.sent_C == tuple(counts_PP[rank])
        assert hop.received_C == tuple(counts_PP[:, rank])
        assert hop.taken_N is None and itinerary.taken_R is None


def test_groups() -> None:
    nodes = Nodes(np.array([5, 3, 3, 5]))
    assert nodes.groups(Reach.ALL) == [[0, 1, 2, 3]]
    assert nodes.groups(Reach.WITHIN) == [[0, 3], [1, 2]]
    assert nodes.groups(Reach.BETWEEN) == [[0, 1], [2, 3]]


def test_unlike_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes of \[2, 1\] ranks; .*equally many.*; use the dir"):
        Nodes(np.array([0, 0, 1]))


@pytest.mark.parametrize("planner", PLANNERS)
def test_counts_of_other_ranks_are_refused(planner: Planner) -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3\) for 4 ranks; give .*\(4, 4\)"):
        planner(in_turn(2, 2), np.ones((4, 3), dtype=np.int64), 0)


@pytest.mark.parametrize("num_rows", [7, 9])
def test_other_rows_than_counted_are_refused(num_rows: int) -> None:
    itinerary = by_places(in_turn(2, 2), np.full((4, 4), 2), 1)
    relay = Relay.of(itinerary, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{num_rows} rows of rank 1, whose counts say 8; plan"):
        relay.run(torch.zeros(num_rows, 3), {})


# By real ranks.


def channels_of(rank: int, nodes: Nodes, between: AllToAll) -> dict[Reach, Channel]:
    channels = {}
    for reach in Reach:
        made = [(ranks, dist.new_group(ranks)) for ranks in nodes.groups(reach)]
        group = next(group for ranks, group in made if rank in ranks)
        channels[reach] = Channel(group, all_to_all_rows if reach is Reach.WITHIN else between)
    return channels


def drawn_counts(num_ranks: int) -> list[np.ndarray]:
    """Ragged, with empty pairs; everyone to one; one sends nothing; none at all."""
    rng = np.random.default_rng(num_ranks)
    ragged = rng.integers(0, 9, (num_ranks, num_ranks)) * (rng.random((num_ranks,) * 2) < 0.6)
    to_one, silent = np.zeros_like(ragged), ragged.copy()
    to_one[:, 1] = rng.integers(1, 9, num_ranks)
    silent[num_ranks - 1] = 0
    return [ragged, to_one, silent, np.zeros_like(ragged)]


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _exchange(
    rank: int, world_size: int, layouts: Sequence[Sequence[int]], between: AllToAll
) -> list[tuple[float, float]]:
    """The scalar products of each float64 case's both sides: of what is sent, of what arrives."""
    products = []
    for layout in layouts:
        nodes = Nodes(np.array(layout))
        channels = channels_of(rank, nodes, between)
        for planner in (by_leaders, by_places):
            for counts_PP in drawn_counts(world_size):
                out = Relay.of(planner(nodes, counts_PP, rank), torch.device("cpu"))
                take_back = Relay.of(planner(nodes, counts_PP.T, rank), torch.device("cpu"))
                for dtype in (torch.float64, torch.bfloat16):
                    torch.manual_seed(rank)
                    x_ND = torch.randn(int(counts_PP[rank].sum()), 3, dtype=dtype)
                    x_ND[:1] = float("nan")
                    x_ND[1:2] = -0.0
                    arrived_RD = out.run(x_ND, channels)
                    expected_RD = all_to_all_rows(
                        x_ND,
                        counts_PP[rank].tolist(),
                        counts_PP[:, rank].tolist(),
                        dist.group.WORLD,
                    )
                    assert arrived_RD.dtype == dtype
                    assert arrived_RD.shape == (counts_PP[:, rank].sum(), 3)
                    assert torch.equal(bits(arrived_RD), bits(expected_RD))
                    assert torch.equal(bits(take_back.run(arrived_RD, channels)), bits(x_ND))
                # Integers, whose products are exact.
                sent_N = torch.randint(-9, 9, (x_ND.shape[0],)).double()
                grad_R = torch.randint(-9, 9, (arrived_RD.shape[0],)).double()
                ours = float(out.run(sent_N, channels) @ grad_R)
                products.append((float(sent_N @ take_back.run(grad_R, channels)), ours))
    return products


CASES = [
    (4, [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 2, 3]], all_to_all_rows),
    (4, [[0, 0, 1, 1]], all_to_all_by_pairs),
    slow(8, [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 3, 2, 1, 0]], all_to_all_by_pairs),
]


@pytest.mark.parametrize(("world_size", "layouts", "between"), CASES)
def test_bit_for_bit_as_the_direct_way_and_back(
    world_size: int, layouts: Sequence[Sequence[int]], between: AllToAll
) -> None:
    products = np.array(pool_of(world_size).run(_exchange, layouts, between))
    assert products.shape == (world_size, len(layouts) * 2 * 4, 2)
    sent, arrived = products.sum(axis=0).T
    assert np.array_equal(sent, arrived), "<A x, g> = <x, A' g>, with A' of the transposed counts"
    assert np.count_nonzero(sent) >= len(layouts) * 4
