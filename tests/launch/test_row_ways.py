# SPDX-License-Identifier: Apache-2.0
"""Ways of rows: each row goes once, to a holder; what each way promises.

Shape letters: L layers, C EP ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import rival_planners as row_ways
from rival_planners import A100, Layer, Layout, PricedCluster

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, Share
from ds_moe_ext.planning.load_models import zipf_loads

STEPS_LCE = zipf_loads((2, 10, 4, 8), rows=1000, skew=1.0)
"""Rows planned on, and rows to come."""
CLUSTER = PricedCluster.of(replace(A100, ranks_per_node=2), rows=1000, width=64)
OWNER = Placement.block(8, 4)
WAYS = (
    *(
        row_ways.to_nearest,
        row_ways.to_owner,
        row_ways.by_planned_parts,
        row_ways.by_priced,
        row_ways.by_optimum,
    ),
    *(row_ways.evenly, row_ways.evenly_on_node),
)


def layouts() -> list[Layout]:
    """Random replicas of a layer; two of some in one rank's slots."""
    random = np.random.default_rng(0)
    return [
        Layout.of_slots(OWNER.holds_EC + random.integers(-2, 2, (8, 4)).clip(0)) for _ in range(10)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_every_row_goes_once_to_a_holder(way: row_ways.Way) -> None:
    for layout, planned_CE, rows_CE in zip(layouts(), *STEPS_LCE):
        sent_CEC = way(Layer(OWNER, layout, planned_CE, CLUSTER))(rows_CE)
        assert sent_CEC.dtype == np.int64
        assert sent_CEC.min() >= 0
        assert np.array_equal(sent_CEC.sum(axis=2), rows_CE)
        assert not sent_CEC[:, ~layout.target.holds_EC].any()


@pytest.mark.parametrize("way", WAYS)
def test_without_replicas_rows_go_to_their_owner(way: row_ways.Way) -> None:
    sent_CEC = way(Layer(OWNER, Layout.of(OWNER), STEPS_LCE[0, 0], CLUSTER))(STEPS_LCE[1, 0])
    assert np.array_equal(sent_CEC, STEPS_LCE[1, 0][..., None] * OWNER.holds_EC)


@pytest.mark.parametrize(
    ("way", "share"),
    [
        (row_ways.to_nearest, lambda target: NearestReplica(target, CLUSTER.node_C)),
        (row_ways.to_owner, lambda target: LocalElseOwner(OWNER, target)),
    ],
)
def test_the_papers_ways(way: row_ways.Way, share: Callable[[Placement], Share]) -> None:
    """As the shares send rows."""
    for layout, rows_CE in zip(layouts(), STEPS_LCE[1]):
        sent_CC = way(Layer(OWNER, layout, rows_CE, CLUSTER))(rows_CE).sum(axis=1)
        expected_CC = share(layout.target).rows_between(rows_CE[:, None])[0]
        assert np.array_equal(sent_CC, expected_CC)


def test_the_optimum_is_best() -> None:
    """No way is faster by more than whole rows are, whether sending has a price or not."""
    free = replace(CLUSTER.row_prices, local_row_s=0.0, cross_row_s=0.0)
    for cluster in (CLUSTER, replace(CLUSTER, row_prices=free)):
        for layout, rows_CE in zip(layouts(), STEPS_LCE[1]):
            best_s, *others_s = (
                cluster.row_prices.seconds(
                    way(Layer(OWNER, layout, rows_CE, cluster))(rows_CE).sum(axis=1), cluster.node_C
                )
                for way in (row_ways.by_optimum, *WAYS)
            )
            assert best_s <= 1.01 * min(others_s)


def test_even_parts_by_hand() -> None:
    """Two slots of rank 0, one of rank 1, one of rank 3; senders begin at unlike places."""
    layout = Layout.of_slots(np.array([[2, 1, 0, 1]]))
    rows_C1 = np.array([[4], [8], [5], [0]])
    sent = row_ways.evenly(Layer(OWNER, layout, rows_C1, CLUSTER))(rows_C1)[:, 0].tolist()
    assert sent == [[2, 1, 0, 1], [4, 2, 0, 2], [3, 1, 0, 1], [0] * 4]
    # Ranks 0 and 1 are a node, 2 and 3 the other.
    sent = row_ways.evenly_on_node(Layer(OWNER, layout, rows_C1, CLUSTER))(rows_C1)[:, 0].tolist()
    assert sent == [[2, 2, 0, 0], [5, 3, 0, 0], [0, 0, 0, 5], [0] * 4]


def test_a_layout_of_quotas() -> None:
    """Two ranks; the second expert, which has no rows yet, is at the owner as before."""
    owner = Placement.block(2, 2)
    layout = Layout.of_quotas(owner, np.array([[6, 3], [0, 0]]))
    assert layout.target.holds_EC.tolist() == [[True, True], [False, True]]
    assert layout.weight_EC.tolist() == [[6, 3], [0, 1]]
    assert layout.at_gate is owner
    assert Layout.of(owner).at_gate is owner
    rows_CE = np.array([[6, 0], [3, 2]])
    sent_CEC = row_ways.evenly(Layer(owner, layout, rows_CE, CLUSTER))(rows_CE)
    assert sent_CEC.tolist() == [[[4, 2], [0, 0]], [[2, 1], [0, 2]]]


def test_in_turn_by_hand() -> None:
    """Rank 0 computes 6 rows, rank 2 computes 9: both keep their own; rank 1 fills rank 0."""
    layout = Layout(Placement(np.array([[True, False, True, False]])), np.array([[6, 0, 9, 0]]))
    rows_C1 = np.array([[4], [3], [7], [1]])
    sent = row_ways.in_turn(Layer(OWNER, layout, rows_C1, CLUSTER))(rows_C1)[:, 0].tolist()
    assert sent == [[4, 0, 0, 0], [2, 0, 1, 0], [0, 0, 7, 0], [0, 0, 1, 0]]


def test_in_turn_meets_quotas() -> None:
    random = np.random.default_rng(1)
    for rows_CE in STEPS_LCE[1]:
        quota_EC = np.stack([random.multinomial(rows, [0.5, 0.5, 0, 0]) for rows in rows_CE.sum(0)])
        layout = Layout(Placement(np.ones((8, 4), dtype=bool)), quota_EC)
        sent_CEC = row_ways.in_turn(Layer(OWNER, layout, rows_CE, CLUSTER))(rows_CE)
        assert np.array_equal(sent_CEC.sum(axis=2), rows_CE)
        assert np.array_equal(sent_CEC.sum(axis=0), quota_EC)
        own_CE = sent_CEC[np.arange(4), :, np.arange(4)]
        assert np.array_equal(own_CE, np.minimum(rows_CE, quota_EC.T))
