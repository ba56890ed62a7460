# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2: the spec's golden tests, and against the algorithm written down line by line.

Shape letters: L layers, E experts, C EP ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.planning.fssdp_planner import (
    MoveCosts,
    ReplicaRules,
    materialize,
    shard,
    swap_owners,
)
from ds_moe_ext.planning.prices import Prices, RoutedRows, least_flow, nearest_flow, step_seconds
from tests.planners.plainly import (
    NODE_C,
    PROPERTY,
    clusters,
    holdings,
    layer_loads,
    model_owners,
    sharded,
    small_models,
)


def test_h5() -> None:
    loads = [np.array([50, 20, 20, 10]), np.array([30, 40, 25, 5])]
    owners = shard(loads, overlap_degree=1, node_C=NODE_C)
    assert [owner.owner_E.tolist() for owner in owners] == [[1, 2, 0, 3], [0, 1, 2, 3]]


def test_h6_ep_ranks_own_different_numbers_of_a_layer() -> None:
    loads = [np.array([60, 12, 10, 8, 4, 3, 2, 1]), np.array([20, 18, 16, 14, 12, 10, 6, 4])]
    owners = shard(loads, overlap_degree=2, node_C=NODE_C)
    assert holdings(owners[0]) == [[0, 5, 7], [1, 2], [4, 6], [3]]
    assert holdings(owners[1]) == [[2], [5, 6], [0, 3], [1, 4, 7]]


def test_hot_experts_stay_at_owner_if_there_is_a_slot() -> None:
    """As in H6, whose cold experts leave each EP rank one slot; experts 0 and 1 are hot."""
    loads = [np.array([60, 12, 10, 8, 4, 3, 2, 1]), np.array([20, 18, 16, 14, 12, 10, 6, 4])]
    present = tuple(
        Placement.owned_by(np.array([*hot, 3, 3, 3, 3, 3, 3]), 4) for hot in ((0, 0), (1, 3))
    )
    owners = shard(loads, overlap_degree=2, node_C=NODE_C, owners=present)
    # EP rank 0 has room for one of its two; the other takes what those who stay leave: EP rank 2.
    assert owners[0].owner_E[:2].tolist() == [0, 2]
    assert owners[1].owner_E[:2].tolist() == [1, 3]
    # The cold ones are where H6 puts them.
    assert owners[0].owner_E[2:].tolist() == [1, 3, 2, 0, 2, 0]


@st.composite
def models(
    draw: st.DrawFn,
) -> tuple[list[np.ndarray], np.ndarray, tuple[Placement, ...] | None]:
    """Loads, nodes and present owners."""
    node_C, loads = draw(clusters()), draw(layer_loads())
    sizes = [len(load) for load in loads]
    owners = draw(st.none() | model_owners(sizes, len(node_C)))
    return loads, node_C, owners


@PROPERTY
@given(models(), st.integers(0, 6))
def test_as_the_algorithm_reads(
    model: tuple[list[np.ndarray], np.ndarray, tuple[Placement, ...] | None], t: int
) -> None:
    loads, node_C, present = model
    owners = shard(loads, overlap_degree=t, node_C=node_C, owners=present)
    new_owners = None if present is None else [owner.owner_E.tolist() for owner in present]
    expected = sharded([load_E.tolist() for load_E in loads], t, node_C.tolist(), new_owners)
    assert [owner.owner_E.tolist() for owner in owners] == expected


@PROPERTY
@given(models(), st.data())
def test_every_expert_has_one_owner_and_ep_ranks_own_equally_many(
    model: tuple[list[np.ndarray], np.ndarray, tuple[Placement, ...] | None], data: st.DataObject
) -> None:
    """Invariant 2, with a degree for each layer; totals are those of the first owners."""
    loads, node_C, present = model
    t_L = np.array([data.draw(st.integers(0, 6)) for _ in loads])
    owners = shard(loads, overlap_degree=t_L, node_C=node_C, owners=present)
    assert all((owner.holds_EC.sum(axis=1) == 1).all() for owner in owners)
    assert [owner.num_experts for owner in owners] == [len(load_E) for load_E in loads]
    total_C = sum(owner.holds_EC.sum(axis=0) for owner in owners)
    first = even_owners([len(load_E) for load_E in loads], len(node_C))
    assert total_C.tolist() == sum(owner.holds_EC.sum(axis=0) for owner in first).tolist()
    assert total_C.max() - total_C.min() <= 1


def test_what_does_not_fit() -> None:
    assert shard([], overlap_degree=1, node_C=NODE_C) == ()
    with pytest.raises(ValueError, match="one load an expert"):
        shard([np.array([1, 2])], overlap_degree=0, node_C=NODE_C, owners=even_owners([3], 4))
    with pytest.raises(ValueError, match="whole rows"):
        shard([np.array([1.5, 2])], overlap_degree=0, node_C=NODE_C)


# New owners by gain: by hand, and what holds of any layers. Pure.


COMPUTING = Prices(
    row_s=1.0, row_bytes=0.0, copy_s=0.0, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
)
FREE = MoveCosts(expert_s=0.0, num_steps=1)
TWO_NODES = np.array([0, 0, 1, 1])
# Of each of 4 senders: experts 0 and 1 live together, and have most rows; all others have few.
TOGETHER_CE = np.tile([10, 10, 1, 2, 1, 3, 1, 4], (4, 1))


def rules_of(
    *rows: np.ndarray, t: int = 0, m: int = 0, node_C: np.ndarray = TWO_NODES
) -> ReplicaRules:
    each = np.ones(len(rows), dtype=np.int64)
    return ReplicaRules(RoutedRows.of(rows, node_C), t * each, m * each, COMPUTING, nearest_flow)


def new_owners(owners: tuple[Placement, ...]) -> list[list[int]]:
    return [owner.owner_E.tolist() for owner in owners]


def test_two_hot_experts_part() -> None:
    """EP rank 0 computes 80 of 128 rows, EP ranks 1 to 3 12, 16 and 20. No EP rank can do with less
    than 40 and the smallest of the others, 4: a second later than that there is nothing to gain."""
    rules = rules_of(TOGETHER_CE)
    (owner,) = owners = swap_owners(even_owners([8], 4), rules, FREE)
    assert owner.owner_E[0] != owner.owner_E[1]
    assert rules.seconds(even_owners([8], 4)) == 80
    assert rules.seconds(owners) == 44


@pytest.mark.parametrize(("expert_s", "moves"), [(11.9, True), (12.1, False)])
def test_a_move_must_gain_more_than_it_costs(expert_s: float, moves: bool) -> None:
    """Two EP ranks, of 28 and 4 rows. The best swap leaves 16 at each and gains 12 seconds a step;
    each of the two EP ranks sends one expert and gets one."""
    rules = rules_of(np.array([[8, 6, 0, 2], [8, 6, 0, 2]]), node_C=np.array([0, 0]))
    owner = Placement.owned_by(np.array([0, 0, 1, 1]), 2)
    assert rules.seconds([owner]) == 28
    costs = MoveCosts(expert_s=expert_s, num_steps=1)
    (new,) = swap_owners((owner,), rules, costs)
    assert (new is not owner) == moves
    # Meant for twice as many steps it pays at twice the price.
    (new,) = swap_owners((owner,), rules, MoveCosts(expert_s=2 * expert_s, num_steps=2))
    assert (new is not owner) == moves


def test_links_carry_moves_at_the_same_time() -> None:
    """Each layer can gain 12 seconds by a swap, between EP ranks 0 and 1, and 2 and 3. A move of
    both takes as long as one."""
    one_CE, other_CE = (
        np.tile(load_E, (4, 1)) for load_E in ([4, 3, 0, 1, 2, 2, 2, 2], [2, 2, 2, 2, 4, 3, 0, 1])
    )
    owners, one_node, costs = (
        even_owners([8, 8], 4),
        np.zeros(4, dtype=np.int64),
        MoveCosts(20.0, 1),
    )
    both = swap_owners(owners, rules_of(one_CE, other_CE, node_C=one_node), costs)
    assert all(new is not old for new, old in zip(both, owners))
    assert costs.seconds(owners, both, one_node) == 20
    (alone,) = swap_owners(owners[:1], rules_of(one_CE, node_C=one_node), costs)
    assert alone is owners[0]


def test_cards_of_nodes_carry_what_their_ep_ranks_send() -> None:
    owners, costs = even_owners([8, 8], 4), MoveCosts(expert_s=1.0, num_steps=1)
    far = replace_owner(owners[0], 0, 2), replace_owner(owners[1], 2, 3)  # from EP ranks 0 and 1
    assert costs.seconds(owners, far, TWO_NODES) == 2
    assert costs.seconds(owners, far, np.zeros(4, dtype=np.int64)) == 1
    assert costs.seconds(owners, owners, TWO_NODES) == 0


def replace_owner(owner: Placement, expert: int, ep_rank: int) -> Placement:
    owner_E = owner.owner_E.copy()
    owner_E[expert] = ep_rank
    return Placement.owned_by(owner_E, owner.num_ep_ranks)


def test_nothing_moves_that_copies_mend() -> None:
    """Both hot experts are copied to all EP ranks: what is left is not worth a move."""
    rules = rules_of(TOGETHER_CE, t=2, m=2)
    owners = even_owners([8], 4)
    assert rules.seconds(owners) == 20 + 20
    costs = MoveCosts(expert_s=9.0, num_steps=1)
    assert swap_owners(owners, rules, costs)[0] is owners[0]
    assert swap_owners(owners, rules_of(TOGETHER_CE), costs)[0] is not owners[0]


def test_rows_that_cost_nothing_or_are_not_there() -> None:
    owners = even_owners([8], 4)
    free = replace(rules_of(TOGETHER_CE), prices=replace(COMPUTING, row_s=0.0))
    assert swap_owners(owners, free, FREE) == owners
    assert swap_owners(owners, rules_of(0 * TOGETHER_CE), FREE) == owners


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[Placement, ...], ReplicaRules, MoveCosts]:
    owners, sizes, node_C, rng = draw(small_models())
    rows = [(500 * rng.random((len(node_C), size)) ** 4).astype(np.int64) for size in sizes]
    prices = Prices(
        row_s=draw(st.sampled_from([1e-6, 1e-5])),
        row_bytes=draw(st.sampled_from([0.0, 1024.0])),
        copy_s=1e-4,
        inter_bytes_per_s=1e9,
        intra_bytes_per_s=draw(st.sampled_from([1e9, 1e11])),
    )
    limits = [rng.integers(0, most, len(sizes)) for most in (6, 4)]
    flow_of = draw(st.sampled_from([nearest_flow, least_flow]))
    rules = ReplicaRules(RoutedRows.of(rows, node_C), *limits, prices, flow_of)
    costs = MoveCosts(draw(st.sampled_from([0.0, 1e-4, 1e-2])), draw(st.sampled_from([1, 100])))
    return owners, rules, costs


@PROPERTY
@given(jobs())
def test_moves_pay_and_ep_ranks_keep_their_numbers(
    job: tuple[tuple[Placement, ...], ReplicaRules, MoveCosts],
) -> None:
    owners, rules, costs = job
    new = swap_owners(owners, rules, costs)
    for before, after in zip(owners, new):
        assert (after.holds_EC.sum(axis=1) == 1).all()
        assert after.holds_EC.sum(axis=0).tolist() == before.holds_EC.sum(axis=0).tolist()
    gain_s = costs.num_steps * (rules.seconds(owners) - rules.seconds(new))
    cost_s = costs.seconds(owners, new, rules.routed.node_C)
    assert new_owners(new) == new_owners(owners) or gain_s > cost_s
    assert new_owners(swap_owners(owners, rules, costs)) == new_owners(new)


@PROPERTY
@given(jobs())
def test_seconds_are_those_of_the_replicas_that_will_be_planned(
    job: tuple[tuple[Placement, ...], ReplicaRules, MoveCosts],
) -> None:
    owners, rules, _ = job
    rules = replace(rules, flow_of=nearest_flow)
    node_C = rules.routed.node_C
    rows = np.split(rules.routed.rows_CY, rules.routed.first_L1[1:-1], axis=1)
    targets = materialize(
        owners,
        rules.routed.totals,
        overlap_degree=rules.overlap_degree_L,
        replicas_per_ep_rank=rules.replicas_L,
        node_C=node_C,
    )
    alone_L, copied_L = (
        step_seconds(each, rows, prices=rules.prices, node_C=node_C) for each in (owners, targets)
    )
    assert rules.seconds(owners) == pytest.approx(np.minimum(alone_L, copied_L).sum(), rel=1e-12)
    # No share of the same replicas can take less than what is least.
    least = replace(rules, flow_of=least_flow)
    assert least.seconds(owners) <= rules.seconds(owners) * (1 + 1e-9)


@PROPERTY
@given(jobs(), st.data())
def test_layers_that_are_named_several_times(
    job: tuple[tuple[Placement, ...], ReplicaRules, MoveCosts], data: st.DataObject
) -> None:
    _, rules, _ = job
    routed = rules.routed
    layers = data.draw(st.lists(st.integers(0, routed.num_layers - 1), min_size=1, max_size=6))
    rows = np.split(routed.rows_CY, routed.first_L1[1:-1], axis=1)
    found, expected = (
        routed.of_layers(layers),
        RoutedRows.of([rows[layer] for layer in layers], routed.node_C),
    )
    for name in ("rows_CY", "first_L1", "node_C", "sent_LC", "of_nodes_NY"):
        assert vars(found)[name].tolist() == vars(expected)[name].tolist()
