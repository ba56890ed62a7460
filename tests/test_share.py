# SPDX-License-Identifier: Apache-2.0
"""Shares against counting by hand and by loops. Pure.

Shape letters: E experts, C EP ranks, F chunks.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, Share, computed_by, pair_of
from tests.planners.plainly import LOAD_E, NODE_C, OWNER, ROWS_CE

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)


def with_replicas(owner: Placement, replicas: list[tuple[int, int]]) -> Placement:
    """Replicas of (expert, EP rank) beside the owners."""
    holds_EC = owner.holds_EC.copy()
    for expert, ep_rank in replicas:
        holds_EC[expert, ep_rank] = True
    return Placement(holds_EC)


H1 = with_replicas(OWNER, [(e, d) for e in (0, 1, 4) for d in range(4)])
H2 = with_replicas(OWNER, [(0, 2), (0, 1), (4, 0), (1, 3)])


def sent(share: Share, rows_CFE: np.ndarray) -> np.ndarray:
    """Rows of all senders, ``[C, F, E, C]``."""
    return np.stack([share.rows_from(sender, rows_FE) for sender, rows_FE in enumerate(rows_CFE)])


def to(share: Share, sender: int, expert: int) -> dict[int, int]:
    """Where the golden rows of one sender and expert go."""
    rows_C = share.rows_from(sender, ROWS_CE[sender][None])[0, expert]
    return {ep_rank: rows for ep_rank, rows in enumerate(rows_C.tolist()) if rows}


# By hand.


def test_local_else_owner() -> None:
    """Owners: experts 0, 1 in EP rank 0, experts 2, 3 in EP rank 1. Copies: 0 in EP rank 1, 3 in EP
    rank 2."""
    owner = Placement.owned_by(np.array([0, 0, 1, 1]), 3)
    share = LocalElseOwner(owner, with_replicas(owner, [(0, 1), (3, 2)]))
    rows_FE = np.array([[5, 0, 2, 7]])
    # Sender 2: 5 rows of expert 0 to EP rank 0, 2 of expert 2 to EP rank 1, 7 of expert 3 to
    # itself.
    assert share.rows_from(2, rows_FE).tolist() == [[[5, 0, 0], [0, 0, 0], [0, 2, 0], [0, 0, 7]]]
    # Sender 1 keeps those of experts 0, 2 and 3.
    assert share.rows_from(1, rows_FE).tolist() == [[[0, 5, 0], [0, 0, 0], [0, 2, 0], [0, 7, 0]]]
    # All three senders: EP rank 0 computes for itself and, of expert 0, for EP rank 2.
    assert share.computed_C(np.array([[5, 0, 2, 7]] * 3)).tolist() == [10, 25, 7]


def test_h4_examples() -> None:
    share = NearestReplica(H2, NODE_C)
    assert to(share, 0, 0) == {0: 10}  # at the owner
    assert to(share, 0, 2) == {1: 1}  # on the node
    assert to(share, 0, 5) == {2: 2}  # on the other node
    assert to(share, 1, 1) == {0: 2}
    assert to(share, 1, 4) == {0: 5}
    assert to(share, 2, 1) == {3: 3}
    assert to(share, 3, 0) == {2: 10}
    assert to(share, 3, 4) == {2: 5}
    assert to(share, 2, 2) == {1: 1}


@pytest.mark.parametrize(
    ("target", "computed", "into_nodes", "within_nodes"),
    [
        (OWNER, [50, 10, 28, 12], [30, 20], 24),
        (H2, [25, 20, 38, 17], [5, 10], 32),
        (H1, [18, 27, 26, 29], [5, 10], 7),
    ],
    ids=["EP", "H2", "H1"],
)
def test_h4_table(
    target: Placement, computed: list[int], into_nodes: list[int], within_nodes: int
) -> None:
    share = NearestReplica(target, NODE_C)
    assert ROWS_CE.sum(axis=0).tolist() == LOAD_E.tolist()
    assert share.computed_C(ROWS_CE).tolist() == computed
    moved_CC = sent(share, ROWS_CE[:, None]).sum(axis=(1, 2))
    assert moved_CC.sum(axis=0).tolist() == computed
    assert [int(moved_CC[2:, :2].sum()), int(moved_CC[:2, 2:].sum())] == into_nodes
    same_node_CC = NODE_C[:, None] == NODE_C
    np.fill_diagonal(same_node_CC, False)
    assert moved_CC[same_node_CC].sum() == within_nodes


@pytest.mark.parametrize(
    ("sender", "rows"),
    [
        (0, {4: 3, 5: 2, 6: 2}),
        (1, {4: 2, 5: 3, 6: 2}),
        (7, {4: 2, 5: 3, 6: 2}),  # on the node of the replicas
    ],
)
def test_h4_remainders_rotate(sender: int, rows: dict[int, int]) -> None:
    """2 nodes of 4; expert 0 at EP ranks 4, 5 and 6; 7 rows."""
    target = Placement(np.isin(np.arange(8), [4, 5, 6])[None])
    share = NearestReplica(target, np.arange(8) // 4)
    rows_C = share.rows_from(sender, np.array([[7]]))[0, 0]
    assert {ep_rank: count for ep_rank, count in enumerate(rows_C.tolist()) if count} == rows


# Properties.


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, Placement, np.ndarray, np.ndarray]:
    """Owners, a target, node of each EP rank (in any order), and rows ``[C, F, E]``."""
    num_experts, num_ep_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = Placement.owned_by(rng.integers(0, num_ep_ranks, num_experts), num_ep_ranks)
    density = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    target = owner.with_replicas(rng.random((num_experts, num_ep_ranks)) < density)
    node_C = rng.integers(0, draw(st.integers(1, 4)), num_ep_ranks)
    most = draw(st.sampled_from([0, 1, 7, 10**12]))
    shape = (num_ep_ranks, draw(st.integers(1, 3)), num_experts)
    return owner, target, node_C, rng.integers(0, most + 1, shape)


def nearest(target: Placement, node_C: np.ndarray, sender: int, expert: int) -> list[int]:
    """The EP ranks that rule 29 names."""
    holders = np.flatnonzero(target.holds_EC[expert]).tolist()
    on_node = [ep_rank for ep_rank in holders if node_C[ep_rank] == node_C[sender]]
    return [sender] if sender in holders else on_node or holders


def dealt(rows: int, sender: int, hosts: list[int], num_ep_ranks: int) -> list[int]:
    """Rule 30: the even split of one sender's rows."""
    quota = [0] * num_ep_ranks
    whole, rest = divmod(rows, len(hosts))
    for host in hosts:
        quota[host] = whole
    for turn in range(rest):
        quota[hosts[(sender + turn) % len(hosts)]] += 1
    return quota


@PROPERTY
@given(cases())
def test_nearest_copy_is_rules_29_and_30(
    case: tuple[Placement, Placement, np.ndarray, np.ndarray],
) -> None:
    """Exactly; so rows stay where they can, on the node if they can, and parts differ by one."""
    _, target, node_C, rows_CFE = case
    sent_CFEC = sent(NearestReplica(target, node_C), rows_CFE)
    num_ep_ranks = target.num_ep_ranks
    for sender, chunk, expert in np.ndindex(rows_CFE.shape):
        hosts = nearest(target, node_C, sender, expert)
        quota = dealt(int(rows_CFE[sender, chunk, expert]), sender, hosts, num_ep_ranks)
        assert sent_CFEC[sender, chunk, expert].tolist() == quota


@PROPERTY
@given(cases())
def test_local_else_owner_sends_only_what_it_cannot_keep(
    case: tuple[Placement, Placement, np.ndarray, np.ndarray],
) -> None:
    owner, target, _, rows_CFE = case
    sent_CFEC = sent(LocalElseOwner(owner, target), rows_CFE)
    for sender, chunk, expert in np.ndindex(rows_CFE.shape):
        holder = sender if target.holds_EC[expert, sender] else int(owner.owner_E[expert])
        quota = [0] * target.num_ep_ranks
        quota[holder] = int(rows_CFE[sender, chunk, expert])
        assert sent_CFEC[sender, chunk, expert].tolist() == quota


@PROPERTY
@given(cases())
def test_where_rows_go_is_known_beforehand_or_they_are_divided(
    case: tuple[Placement, Placement, np.ndarray, np.ndarray],
) -> None:
    owner, target, node_C, rows_CFE = case
    for share in (LocalElseOwner(owner, target), NearestReplica(target, node_C)):
        for sender, rows_FE in enumerate(rows_CFE):
            pair_E, rows_FN = pair_of(share, target, sender), share.sent_by_pair(sender, rows_FE)
            if pair_E is None:
                assert isinstance(share, NearestReplica)
                hosts = [nearest(target, node_C, sender, e) for e in range(target.num_experts)]
                assert max(map(len, hosts)) > 1
            else:
                assert target.expert_N[pair_E].tolist() == list(range(target.num_experts))
                assert np.array_equal(rows_FN[:, pair_E], rows_FE)
                assert rows_FN.sum() == rows_FE.sum()
    assert pair_of(NearestReplica(owner, node_C), target, 0) is None or owner is target


@PROPERTY
@given(cases())
def test_all_agree_on_every_row(
    case: tuple[Placement, Placement, np.ndarray, np.ndarray],
) -> None:
    """Invariant 5: sender and holder agree, nothing is lost, only holders get rows."""
    owner, target, node_C, rows_CFE = case
    for share in (LocalElseOwner(owner, target), NearestReplica(target, node_C)):
        sent_CFEC = sent(share, rows_CFE)
        assert sent_CFEC.dtype == np.int64
        assert (sent_CFEC >= 0).all()
        assert np.array_equal(sent_CFEC.sum(axis=3), rows_CFE)
        assert not sent_CFEC[:, :, ~target.holds_EC].any()
        for holder in range(target.num_ep_ranks):
            assert np.array_equal(share.rows_to(holder, rows_CFE), sent_CFEC[..., holder])
        between_CFC = sent_CFEC.sum(axis=2)
        assert np.array_equal(share.rows_between(rows_CFE), between_CFC.transpose(1, 0, 2))
        for chunk in range(rows_CFE.shape[1]):
            computed_C = share.computed_C(rows_CFE[:, chunk])
            assert computed_C.tolist() == sent_CFEC[:, chunk].sum(axis=(0, 1)).tolist()


@PROPERTY
@given(st.integers(0, 2**32 - 1))
def test_layers_planned_together_share_as_each_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ep_ranks = int(rng.integers(1, 9))
    node_C = rng.integers(0, 3, num_ep_ranks)
    targets, rows = [], []
    for num_experts in rng.integers(1, 7, 3).tolist():
        owner = Placement.owned_by(rng.integers(0, num_ep_ranks, num_experts), num_ep_ranks)
        targets.append(owner.with_replicas(rng.random((num_experts, num_ep_ranks)) < 0.3))
        rows.append(rng.integers(0, 30, (num_ep_ranks, 2, num_experts)))
    together = NearestReplica.of_layers(targets, node_C)
    alone = [NearestReplica(target, node_C) for target in targets]
    for one, other, rows_CFE in zip(together, alone, rows):
        one.prepare(0)
        for ep_rank in range(num_ep_ranks):
            sent = one.rows_from(ep_rank, rows_CFE[ep_rank])
            assert np.array_equal(sent, other.rows_from(ep_rank, rows_CFE[ep_rank]))
            assert np.array_equal(one.rows_to(ep_rank, rows_CFE), other.rows_to(ep_rank, rows_CFE))
    routed = [rows_CFE.sum(axis=1) for rows_CFE in rows]
    expected = [share.computed_C(rows_CE).tolist() for share, rows_CE in zip(alone, routed)]
    assert computed_by(together, routed).tolist() == expected
    assert computed_by(together[1:], routed[1:]).tolist() == expected[1:]


@PROPERTY
@given(st.integers(0, 2**32 - 1))
def test_layers_at_owner_are_counted_as_each_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ep_ranks = int(rng.integers(1, 9))
    shares, rows = [], []
    for num_experts in rng.integers(1, 7, 3).tolist():
        owner = Placement.owned_by(rng.integers(0, num_ep_ranks, num_experts), num_ep_ranks)
        if seed % 3 == 0:  # several owners
            owner = owner.with_replicas(rng.random((num_experts, num_ep_ranks)) < 0.3)
        shares.append(LocalElseOwner(owner, owner))
        rows.append(rng.integers(0, 30, (num_ep_ranks, num_experts)))
    expected = [share.computed_C(rows_CE).tolist() for share, rows_CE in zip(shares, rows)]
    assert computed_by(shares, rows).tolist() == expected


@PROPERTY
@given(cases())
def test_one_copy_leaves_no_choice(
    case: tuple[Placement, Placement, np.ndarray, np.ndarray],
) -> None:
    """Invariant 7: where the target is the owner, both shares are plain expert parallelism."""
    owner, _, node_C, rows_CFE = case
    plain, near = LocalElseOwner(owner, owner), NearestReplica(owner, node_C)
    assert np.array_equal(sent(plain, rows_CFE), sent(near, rows_CFE))
