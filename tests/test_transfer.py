# SPDX-License-Identifier: Apache-2.0
"""Rounds of transfers: what the trees promise, on random placements and by hand.

Shape letters: E experts, C EP ranks, V nodes, N transfers.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import (
    MOST_SEGMENTS,
    Move,
    Part,
    Round,
    Segment,
    Transfers,
    TransferSize,
    gather_rounds,
    part_of,
    star_of,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


def widened(held: Placement, replicas: list[tuple[int, int]]) -> Placement:
    """The same with (expert, EP rank) besides."""
    holds_EC = held.holds_EC.copy()
    for expert, ep_rank in replicas:
        holds_EC[expert, ep_rank] = True
    return Placement(holds_EC)


@st.composite
def grids(draw: st.DrawFn, one_owner: bool = False) -> tuple[Placement, Placement, np.ndarray]:
    """What is held, what is wanted and the node of each EP rank, EP ranks of nodes in any order."""
    num_experts, num_ep_ranks = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    num_nodes = draw(st.integers(1, num_ep_ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    node_C = rng.permutation(
        np.r_[:num_nodes, rng.integers(0, num_nodes, num_ep_ranks - num_nodes)]
    )
    held = Placement.owned_by(rng.integers(0, num_ep_ranks, num_experts), num_ep_ranks)
    shape = (num_experts, num_ep_ranks)
    if not one_owner:
        held = Placement(held.holds_EC | (rng.random(shape) < draw(st.sampled_from([0.0, 0.2]))))
    density_E1 = rng.choice([0.0, 0.3, 1.0], (num_experts, 1))
    return held, Placement(held.holds_EC | (rng.random(shape) < density_E1)), node_C


TRANSFER_SIZES = st.builds(
    TransferSize,
    expert_bytes=st.sampled_from([0, 0, 100, 10_000, 1_000_000]),
    start_bytes=st.sampled_from([1, 1_000]),
)


def num_rounds(transfers: Transfers) -> int:
    return int(transfers.round_N.max(initial=-1)) + 1


def moves(transfers: Transfers) -> list[tuple[int, int, int, int]]:
    """(round, expert, sender, receiver) of every transfer."""
    columns = (transfers.round_N, transfers.expert_N, transfers.sender_N, transfers.receiver_N)
    return list(zip(*(column.tolist() for column in columns)))


def log2_up(count: int) -> int:
    return math.ceil(math.log2(count))


@PROPERTY
@given(grids(), TRANSFER_SIZES)
def test_after_the_rounds_every_wanted_copy_has_arrived_once(
    grid: tuple[Placement, Placement, np.ndarray], transfer_size: TransferSize
) -> None:
    held, wanted, node_C = grid
    has_EC = held.holds_EC.copy()
    transfers = gather_rounds(held, wanted, node_C, transfer_size)
    for number in range(num_rounds(transfers)):
        before_EC = has_EC.copy()
        for _, expert, sender, receiver in (m for m in moves(transfers) if m[0] == number):
            assert before_EC[expert, sender] and not has_EC[expert, receiver]
            has_EC[expert, receiver] = True
    assert (has_EC == wanted.holds_EC).all()


@PROPERTY
@given(grids(), TRANSFER_SIZES)
def test_an_expert_crosses_into_a_node_once_and_only_if_it_must(
    grid: tuple[Placement, Placement, np.ndarray], transfer_size: TransferSize
) -> None:
    held, wanted, node_C = grid
    transfers = gather_rounds(held, wanted, node_C, transfer_size)
    crossings = [
        (expert, int(node_C[receiver]))
        for _, expert, sender, receiver in moves(transfers)
        if node_C[sender] != node_C[receiver]
    ]
    nodes = range(int(node_C.max()) + 1)
    needed = [
        (expert, node)
        for expert in range(held.num_experts)
        for node in nodes
        if wanted.holds_EC[expert, node_C == node].any()
        and not held.holds_EC[expert, node_C == node].any()
    ]
    assert sorted(crossings) == needed


@PROPERTY
@given(grids())
def test_counted_volume_keeps_to_equation_1(grid: tuple[Placement, Placement, np.ndarray]) -> None:
    """HECATE, eq. (1): no EP rank receives more experts than cross EP ranks at all."""
    held, wanted, node_C = grid
    transfers = gather_rounds(held, wanted, node_C)
    replicas_EC = wanted.holds_EC & ~held.holds_EC
    assert transfers.received_C.tolist() == replicas_EC.sum(axis=0).tolist()
    assert transfers.num_moved == replicas_EC.any(axis=1).sum()
    assert transfers.received_C.max() <= transfers.num_moved
    assert transfers.sent_C.sum() == replicas_EC.sum()
    assert transfers.sent_C.max() <= 2 * num_rounds(transfers) * transfers.num_moved


@PROPERTY
@given(grids())
def test_rounds_and_sends_of_an_expert_are_logarithmic(
    grid: tuple[Placement, Placement, np.ndarray],
) -> None:
    held, wanted, node_C = grid
    transfers = gather_rounds(held, wanted, node_C)
    num_ep_ranks_V = np.bincount(node_C)
    most = log2_up(len(num_ep_ranks_V)) + log2_up(int(num_ep_ranks_V.max()))
    assert num_rounds(transfers) <= most + 1, "one more, where another EP rank takes it out"
    at_once = Counter(
        (number, expert, sender, node_C[sender] == node_C[receiver])
        for number, expert, sender, receiver in moves(transfers)
    )
    assert set(at_once.values()) <= {1}, (
        "an EP rank sends an expert once a round in its node, and out"
    )


@PROPERTY
@given(grids(), TRANSFER_SIZES)
def test_parts_are_the_two_sides_of_the_same_transfers(
    grid: tuple[Placement, Placement, np.ndarray], transfer_size: TransferSize
) -> None:
    held, wanted, node_C = grid
    transfers, again = (gather_rounds(held, wanted, node_C, transfer_size) for _ in range(2))
    assert moves(transfers) == moves(again)
    parts = [transfers.part_of(ep_rank) for ep_rank in range(held.num_ep_ranks)]
    sent = {
        (m.expert, part.ep_rank, m.ep_rank, m.segment)
        for part in parts
        for r in part.rounds
        for m in r.sends
    }
    received = {
        (m.expert, m.ep_rank, part.ep_rank, m.segment)
        for part in parts
        for r in part.rounds
        for m in r.receives
    }
    assert (
        sent
        == received
        == {
            (*move[1:], Segment(number, count))
            for move, count in zip(moves(transfers), transfers.num_segments_N.tolist())
            for number in range(count)
        }
    )
    for part in parts:
        assert Counter(part.received) == Counter(
            np.flatnonzero(
                wanted.holds_EC[:, part.ep_rank] & ~held.holds_EC[:, part.ep_rank]
            ).tolist()
        )
        for round_ in part.rounds:
            assert round_.sends or round_.receives
            assert round_.sends == tuple(sorted(round_.sends))
            assert round_.receives == tuple(sorted(round_.receives))


@PROPERTY
@given(grids() | grids(one_owner=True), TRANSFER_SIZES)
def test_a_part_alone_is_that_of_the_whole(
    grid: tuple[Placement, Placement, np.ndarray], transfer_size: TransferSize
) -> None:
    transfers = gather_rounds(*grid, transfer_size)
    for ep_rank in range(len(grid[2])):
        assert part_of(*grid, ep_rank, transfer_size) == transfers.part_of(ep_rank)


# Segments.


@PROPERTY
@given(grids(), TRANSFER_SIZES)
def test_in_a_chain_an_ep_rank_passes_an_expert_on_once_into_its_node_and_once_out_of_it(
    grid: tuple[Placement, Placement, np.ndarray], transfer_size: TransferSize
) -> None:
    held, _, node_C = grid
    transfers = gather_rounds(*grid, transfer_size)
    first = {(expert, ep_rank): -1 for expert, ep_rank in np.argwhere(held.holds_EC).tolist()}
    ways = Counter()
    for (number, expert, sender, receiver), count in zip(
        moves(transfers), transfers.num_segments_N.tolist()
    ):
        if count > 1:
            assert 2 <= count <= MOST_SEGMENTS
            first[expert, receiver] = number
            assert number == first[expert, sender] + 1, "as soon as a segment has come"
            ways[expert, sender, bool(node_C[sender] == node_C[receiver])] += 1
    assert set(ways.values()) <= {1}


@PROPERTY
@given(st.integers(0, 1 << 30), st.integers(1, 1 << 24), st.integers(0, 300), st.integers(0, 16))
def test_the_number_of_segments_is_the_best(
    expert_bytes: int, start_bytes: int, num_leaders: int, num_others: int
) -> None:
    """Against all numbers: what a chain takes in so many rounds, link by link, and a tree."""
    if num_leaders + num_others == 0:
        return
    near = expert_bytes / 8

    def chain(count: int) -> float:
        out, within = start_bytes + expert_bytes / count, start_bytes + near / count
        slowest = out if num_leaders else within
        return num_leaders * out + num_others * within + (count - 1) * slowest

    tree = num_leaders.bit_length() * (start_bytes + expert_bytes)
    tree += num_others.bit_length() * (start_bytes + near)
    count = TransferSize(expert_bytes, start_bytes).num_segments(num_leaders, num_others)
    best = min(map(chain, range(2, MOST_SEGMENTS + 1)))
    ours = tree if count == 1 else chain(count)
    assert ours <= 1.06 * min(best, tree) + 8


@PROPERTY
@given(grids() | grids(one_owner=True))
def test_a_star_sends_and_receives_what_the_trees_bring(
    grid: tuple[Placement, Placement, np.ndarray],
) -> None:
    transfers = gather_rounds(*grid)
    goes_everywhere = transfers.everywhere or not transfers.num_moved
    stars = [star_of(*grid, ep_rank) for ep_rank in range(len(grid[2]))]
    if not goes_everywhere:
        assert stars == [None] * len(stars)
        return
    for ep_rank, star in enumerate(stars):
        assert star is not None
        tree = transfers.part_of(ep_rank)
        assert star.everywhere == tree.everywhere
        assert sorted(star.received) == sorted(tree.received)
        assert len(star.rounds) == bool(transfers.num_moved)
        roots = {each.expert for each in tree.everywhere if each.ep_rank == ep_rank}
        assert {move.expert for round_ in star.rounds for move in round_.sends} == roots


def test_a_star_of_experts_that_all_ep_ranks_get() -> None:
    owner = Placement.owned_by(np.array([1, 0, 1]), 3)
    wanted = widened(owner, [(0, ep_rank) for ep_rank in range(3)])
    node_C = np.zeros(3, dtype=np.int64)
    assert star_of(owner, wanted, node_C, 1) == Part(
        1, (Round((Move(0, 0), Move(0, 2)), ()),), (Move(0, 1),)
    )
    assert star_of(owner, wanted, node_C, 2) == Part(2, (Round((), (Move(0, 1),)),), (Move(0, 1),))
    assert star_of(owner, widened(owner, [(0, 0)]), node_C, 1) is None
    assert star_of(owner, owner, node_C, 1) == Part(1, (), ())
    with pytest.raises(ValueError, match="a gather only adds"):
        star_of(wanted, owner, node_C, 1)


@PROPERTY
@given(grids(one_owner=True))
def test_broadcasts_serve_if_all_that_moves_goes_everywhere(
    grid: tuple[Placement, Placement, np.ndarray],
) -> None:
    held, wanted, node_C = grid
    transfers = gather_rounds(held, wanted, node_C)
    moved = sorted(set(transfers.expert_N.tolist()))
    if wanted.holds_EC[moved].all():
        assert transfers.everywhere == tuple(Move(e, int(held.owner_E[e])) for e in moved)
        assert all(
            transfers.part_of(ep_rank).rounds for ep_rank in range(held.num_ep_ranks) if moved
        )
    else:
        assert transfers.everywhere == ()
    assert transfers.part_of(0).everywhere == transfers.everywhere


TWO_BY_TWO = np.array([0, 0, 1, 1])
EIGHT_ON_FOUR = Placement.block(8, 4)


def test_hot_experts_everywhere() -> None:
    """HECATE, golden test H1: experts 0, 4 and 1 go to all four EP ranks."""
    hot = [(expert, ep_rank) for expert in (0, 4, 1) for ep_rank in range(4)]
    transfers = gather_rounds(EIGHT_ON_FOUR, widened(EIGHT_ON_FOUR, hot), TWO_BY_TWO)
    assert transfers.num_moved == 3
    assert transfers.received_C.tolist() == [1, 3, 2, 3]
    assert transfers.everywhere == (Move(0, 0), Move(1, 0), Move(4, 2))
    crossing = [(r, s) for _, _, s, r in moves(transfers) if TWO_BY_TWO[s] != TWO_BY_TWO[r]]
    assert sorted(int(TWO_BY_TWO[receiver]) for receiver, _ in crossing) == [0, 1, 1]


def test_sparse_replicas() -> None:
    """HECATE, golden test H2."""
    wanted = widened(EIGHT_ON_FOUR, [(0, 2), (0, 1), (4, 0), (1, 3)])
    transfers = gather_rounds(EIGHT_ON_FOUR, wanted, TWO_BY_TWO)
    assert transfers.num_moved == 3
    assert transfers.received_C.tolist() == [1, 1, 1, 1]
    assert transfers.everywhere == ()
    # EP rank 0 has two experts for the other node: EP rank 1, which gets expert 0, takes it out.
    # All that leave a node do so when it has it.
    assert moves(transfers) == [(0, 0, 0, 1), (1, 0, 1, 2), (1, 1, 0, 3), (1, 4, 2, 0)]


@pytest.mark.parametrize(("size", "volume"), [(2, 5.0), (4, 7.5), (8, 8.75), (32, 9.6875)])
def test_gather_and_reduce_cost_what_all_reduces_cost(size: int, volume: float) -> None:
    """HECATE, golden test H10: eq. (2) with 64 experts of size 1, five of them on 2 to 32 EP
    ranks."""
    owners = Placement.owned_by(np.arange(64) % 32, 32)
    groups = [(expert, (expert + step) % 32) for expert in range(5) for step in range(size)]
    transfers = gather_rounds(owners, widened(owners, groups), np.arange(32) // 8)
    there_and_back = 2 * transfers.received_C.sum()
    assert there_and_back / size == pytest.approx(volume), "per member of a group"


@PROPERTY
@given(grids(one_owner=True))
def test_no_card_takes_more_out_of_its_node_than_its_owner_has_for_others(
    grid: tuple[Placement, Placement, np.ndarray],
) -> None:
    owners, wanted, node_C = grid
    leaving_EC = (wanted.holds_EC > owners.holds_EC) & (node_C != node_C[owners.owner_E, None])
    transfers = gather_rounds(owners, wanted, node_C)
    assert gates(transfers).max() <= experts_of(owners, leaving_EC.any(axis=1)).max()


def gates(transfers: Transfers) -> np.ndarray:
    """Experts that each EP rank is the first to take out of a node, int64 ``[C]``."""
    node_C = transfers.node_C
    leaves_N = node_C[transfers.sender_N] != node_C[transfers.receiver_N]
    _, first_M = np.unique(transfers.expert_N[leaves_N], return_index=True)  # in order of rounds
    return np.bincount(transfers.sender_N[leaves_N][first_M], minlength=node_C.size)


def experts_of(owners: Placement, which_E: np.ndarray) -> np.ndarray:
    """Such experts that each EP rank has, int64 ``[C]``."""
    return np.bincount(owners.owner_E[which_E], minlength=owners.num_ep_ranks)


def test_mates_take_out_what_one_owner_has_and_each_takes_in_alike() -> None:
    owners = Placement.owned_by(np.zeros(4, dtype=np.int64), 4)
    wanted = widened(owners, [(expert, ep_rank) for expert in range(4) for ep_rank in range(4)])
    transfers = gather_rounds(owners, wanted, TWO_BY_TWO)
    assert gates(transfers).tolist() == [2, 2, 0, 0]
    crossing_N = transfers.round_N <= 1
    entered = transfers.receiver_N[crossing_N & (TWO_BY_TWO[transfers.sender_N] == 0)]
    assert np.bincount(entered, minlength=4)[2:].tolist() == [2, 2]


def test_leaders_take_turns() -> None:
    owners = Placement.owned_by(np.array([0, 1]), 4)
    wanted = widened(owners, [(0, 2), (0, 3), (1, 2), (1, 3)])
    transfers = gather_rounds(owners, wanted, TWO_BY_TWO)
    # EP rank 2 leads for expert 0 and passes it on; so EP rank 3 leads for expert 1.
    assert moves(transfers) == [(0, 0, 0, 2), (0, 1, 1, 3), (1, 0, 2, 3), (1, 1, 3, 2)]


def test_the_nearest_holder_sends() -> None:
    held = widened(Placement.owned_by(np.array([0]), 6), [(0, 2), (0, 4)])
    node_C = np.arange(6) // 2
    transfers = gather_rounds(held, widened(held, [(0, 1), (0, 3), (0, 5)]), node_C)
    assert moves(transfers) == [(0, 0, 0, 1), (0, 0, 2, 3), (0, 0, 4, 5)]


def test_holders_share_the_sends() -> None:
    held = widened(Placement.owned_by(np.array([0]), 6), [(0, 2)])
    transfers = gather_rounds(held, widened(held, [(0, 4), (0, 5)]), np.array([0, 0, 1, 1, 2, 3]))
    assert moves(transfers) == [(0, 0, 0, 4), (0, 0, 2, 5)]


def test_nothing_to_move() -> None:
    transfers = gather_rounds(EIGHT_ON_FOUR, EIGHT_ON_FOUR, TWO_BY_TWO)
    assert (num_rounds(transfers), transfers.num_moved) == (0, 0)
    assert transfers.part_of(3) == Part(3, (), ())
    assert moves(transfers) == []


def test_a_copy_taken_away() -> None:
    wider = widened(EIGHT_ON_FOUR, [(5, 0)])
    with pytest.raises(ValueError, match=r"\[\[5, 0\]\] is held and not wanted"):
        gather_rounds(wider, EIGHT_ON_FOUR, TWO_BY_TWO)


@pytest.mark.parametrize(
    ("wanted", "node_C"), [(Placement.block(8, 2), TWO_BY_TWO), (EIGHT_ON_FOUR, np.zeros(3))]
)
def test_grids_that_differ(wanted: Placement, node_C: np.ndarray) -> None:
    with pytest.raises(ValueError, match="one grid"):
        gather_rounds(EIGHT_ON_FOUR, wanted, node_C)
