# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: the spec's golden tests, and against the algorithm written down line by line.

Shape letters: L layers, E experts, C EP ranks, T hot experts.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.planning.fssdp_planner import calibrate, guarded, materialize, slot_quotas
from ds_moe_ext.planning.prices import Prices, RoutedRows, busiest_link, step_seconds
from tests.planners.plainly import (
    LOAD_E,
    NODE_C,
    OWNER,
    PROPERTY,
    clusters,
    holdings,
    layer_loads,
    materialized,
    model_owners,
    small_models,
)


def golden(t: int, m: int) -> Placement:
    (target,) = materialize(
        [OWNER], [LOAD_E], overlap_degree=t, replicas_per_ep_rank=m, node_C=NODE_C
    )
    return target


def received(target: Placement) -> list[int]:
    return (target.holds_EC & ~OWNER.holds_EC).sum(axis=0).tolist()


def test_h1_all_hot_experts_fit() -> None:
    target = golden(t=3, m=4)
    assert holdings(target) == [[0, 1, 4], [0, 1, 2, 3, 4], [0, 1, 4, 5], [0, 1, 4, 6, 7]]
    assert received(target) == [1, 3, 2, 3]


def test_h2_slots_are_shared() -> None:
    target = golden(t=3, m=1)
    assert holdings(target) == [[0, 1, 4], [0, 2, 3], [0, 4, 5], [1, 6, 7]]
    assert received(target) == [1, 1, 1, 1]


def test_h3_quotas_are_capped() -> None:
    # 8 slots for loads 40, 20, 10, 8: 4.10, 2.05, 1.03, 0.82. Expert 0 can take 3; the largest
    # remainder, 0.82, takes the next slot, and then, expert 0 being full, 0.05.
    quota_LT = slot_quotas(np.array([[40, 20, 10, 8]]), np.array([8]), np.array([[3, 3, 3, 3]]))
    assert quota_LT.tolist() == [[3, 3, 1, 1]]
    replicas = [(0, 2), (0, 1), (0, 3), (4, 0), (4, 1), (4, 3), (1, 2), (5, 0)]
    replicas_EC = np.zeros_like(OWNER.holds_EC)
    replicas_EC[tuple(np.transpose(replicas))] = True
    assert golden(t=4, m=2).describe() == OWNER.with_replicas(replicas_EC).describe()
    # The line-by-line version places them in the spec's order.
    assert materialized(OWNER.holds_EC, LOAD_E.tolist(), 4, 2, NODE_C.tolist())[1] == replicas


@pytest.mark.parametrize(("t", "m"), [(0, 4), (4, 0), (0, 0)])
def test_no_replicas_is_plain_expert_parallelism(t: int, m: int) -> None:
    assert np.array_equal(golden(t, m).holds_EC, OWNER.holds_EC)


def test_a_layer_without_rows_gets_no_replicas() -> None:
    targets = materialize(
        [OWNER, OWNER],
        [np.zeros(8, dtype=np.int64), LOAD_E],
        overlap_degree=3,
        replicas_per_ep_rank=3,
        node_C=NODE_C,
    )
    assert np.array_equal(targets[0].holds_EC, OWNER.holds_EC)
    assert holdings(targets[1]) == holdings(golden(3, 3))


def test_no_layers() -> None:
    assert materialize([], [], overlap_degree=1, replicas_per_ep_rank=1, node_C=NODE_C) == ()


def test_nodes_must_be_those_of_the_ep_ranks() -> None:
    with pytest.raises(ValueError, match="layer 0 lies on 4 EP ranks"):
        materialize([OWNER], [LOAD_E], overlap_degree=1, replicas_per_ep_rank=1, node_C=NODE_C[:3])


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray]:
    """Owners, loads and nodes; owners may have replicas already, as in calibration."""
    node_C, loads = draw(clusters()), draw(layer_loads())
    owners = draw(model_owners([len(load) for load in loads], len(node_C)))
    density = draw(st.sampled_from([0.0, 0.0, 0.3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owners = tuple(
        owner.with_replicas(rng.random(owner.holds_EC.shape) < density) for owner in owners
    )
    return owners, loads, node_C


@PROPERTY
@given(models(), st.data())
def test_as_the_algorithm_reads(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray], data: st.DataObject
) -> None:
    """Equal to the plain version, and within the bounds that the spec derives (invariants 1, 3)."""
    owners, loads, node_C = model
    numbers = st.lists(st.integers(0, 8), min_size=len(owners), max_size=len(owners))
    t_L, m_L = np.array(data.draw(numbers)), np.array(data.draw(numbers))
    targets = materialize(
        owners, loads, overlap_degree=t_L, replicas_per_ep_rank=m_L, node_C=node_C
    )
    for owner, target, load_E, t, m in zip(owners, targets, loads, t_L.tolist(), m_L.tolist()):
        expected, _ = materialized(owner.holds_EC, load_E.tolist(), t, m, node_C.tolist())
        assert np.array_equal(target.holds_EC, expected)
        assert (target.holds_EC >= owner.holds_EC).all()
        new_EC = target.holds_EC & ~owner.holds_EC
        assert new_EC.sum(axis=0).max() <= min(m, t)
        assert new_EC.any(axis=1).sum() <= t
        assert new_EC.sum() <= len(node_C) * m


@PROPERTY
@given(models(), st.integers(0, 5), st.integers(0, 5), st.integers(2, 1000))
def test_only_ratios_of_loads_count(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray], t: int, m: int, factor: int
) -> None:
    """So that the sum of a window may stand for its mean."""
    owners, loads, node_C = model
    once, often = (
        materialize(owners, scaled, overlap_degree=t, replicas_per_ep_rank=m, node_C=node_C)
        for scaled in (loads, [factor * load_E for load_E in loads])
    )
    assert [p.describe() for p in once] == [p.describe() for p in often]


def test_a_large_model_as_the_algorithm_reads() -> None:
    """64 EP ranks on 8 nodes, 128 experts: replicas in every number, from none to everywhere."""
    rng = np.random.default_rng(0)
    node_C, owner = np.arange(64) // 8, Placement.block(128, 64)
    load_E = rng.permutation((1e6 / np.arange(1, 129) ** 1.5).astype(np.int64))
    (target,) = materialize(
        [owner], [load_E], overlap_degree=40, replicas_per_ep_rank=4, node_C=node_C
    )
    expected, _ = materialized(owner.holds_EC, load_E.tolist(), 40, 4, node_C.tolist())
    assert np.array_equal(target.holds_EC, expected)
    assert target.holds_EC.sum(axis=1).max() == 64


# The guard and the calibration: the spec's golden test, and what they promise. Pure.


# Golden test H8: every device has these counts; the forecast copied expert 0 everywhere.
H8_ROWS_CE = np.array([[2, 2, 1, 1, 3, 2, 12, 1]] * 4)
FORECAST = OWNER.with_replicas(np.arange(8)[:, None] == np.zeros(4))


def only_compute(copy_s: float) -> Prices:
    """1 us a row; the all-to-all costs nothing."""
    return Prices(
        row_s=1e-6, row_bytes=0.0, copy_s=copy_s, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
    )


def test_h8() -> None:
    assert NearestReplica(OWNER, NODE_C).computed_C(H8_ROWS_CE).tolist() == [16, 8, 20, 52]
    assert NearestReplica(FORECAST, NODE_C).computed_C(H8_ROWS_CE).tolist() == [10, 10, 22, 54]
    accepted = calibrate(
        OWNER, FORECAST, H8_ROWS_CE, replicas_left=1, prices=only_compute(15e-6), node_C=NODE_C
    )
    assert holdings(accepted) == [[0, 1, 6], [0, 2, 3, 6], [0, 4, 5, 6], [0, 6, 7]]
    assert NearestReplica(accepted, NODE_C).computed_C(H8_ROWS_CE).tolist() == [22, 22, 34, 18]
    # The peak falls from 54 to 34: 20 us.
    assert busiest_link(OWNER, FORECAST, accepted, NODE_C) == 1
    refused = calibrate(
        OWNER, FORECAST, H8_ROWS_CE, replicas_left=1, prices=only_compute(25e-6), node_C=NODE_C
    )
    assert refused is FORECAST


def test_h8_without_memory_left() -> None:
    assert (
        calibrate(
            OWNER, FORECAST, H8_ROWS_CE, replicas_left=0, prices=only_compute(0), node_C=NODE_C
        )
        is FORECAST
    )


def test_experts_that_are_everywhere_do_not_compete() -> None:
    """Here the forecast was right about expert 0, the hottest: the next one gets the memory."""
    rows_CE = np.array([[20, 2, 1, 1, 3, 2, 12, 1]] * 4)
    target = calibrate(
        OWNER, FORECAST, rows_CE, replicas_left=1, prices=only_compute(0), node_C=NODE_C
    )
    assert target.holds_EC[6].all()


def test_guard_by_hand() -> None:
    """One sender has all rows: of an expert of EP rank 1, and of one that EP rank 0 holds
    already."""
    owner = Placement.owned_by(np.array([0, 1]), 2)
    everywhere = Placement(np.ones((2, 2), dtype=bool))
    all_stay_CE = np.array([[10, 10], [0, 0]])  # the copy makes EP rank 0 compute all 20 rows
    all_meet_CE = np.array([[0, 10], [0, 10]])  # the copy splits the 20 rows
    node_C = np.array([0, 0])
    targets = guarded(
        (owner, owner),
        (everywhere, everywhere),
        RoutedRows.of((all_stay_CE, all_meet_CE), node_C),
        prices=only_compute(0),
    )
    assert targets == (owner, everywhere)
    # Where the all-to-all is what takes time, keeping all rows is the faster way.
    wired = Prices(
        row_s=1e-6, row_bytes=1.0, copy_s=0, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
    )
    (target,) = guarded(
        (owner,), (everywhere,), RoutedRows.of((all_stay_CE,), node_C), prices=wired
    )
    assert target is everywhere


@st.composite
def prices(draw: st.DrawFn) -> Prices:
    def one_of(*values: float) -> float:
        return draw(st.sampled_from(values))

    return Prices(
        row_s=one_of(0.0, 1e-6),
        row_bytes=one_of(0.0, 1024.0),
        copy_s=one_of(0.0, 1e-5, 1e-3),
        inter_bytes_per_s=one_of(1e9, 1e12),
        intra_bytes_per_s=one_of(1e9, 1e12),
    )


@st.composite
def models_of_calibrate(
    draw: st.DrawFn,
) -> tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray]:
    """Owners, skewed rows of each layer, nodes."""
    owners, sizes, node_C, rng = draw(small_models())
    rows = [(500 * rng.random((len(node_C), size)) ** 6).astype(np.int64) for size in sizes]
    return owners, rows, node_C


@PROPERTY
@given(
    models_of_calibrate(),
    prices(),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_guarded_replicas_never_make_a_layer_slower(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray],
    costs: Prices,
    t: int,
    m: int,
) -> None:
    """Invariant 11; and a layer with replicas is faster by the model."""
    owners, rows, node_C = model
    loads = [rows_CE.sum(axis=0) for rows_CE in rows]
    targets = materialize(owners, loads, overlap_degree=t, replicas_per_ep_rank=m, node_C=node_C)
    kept = guarded(owners, targets, RoutedRows.of(rows, node_C), prices=costs)
    alone_L = step_seconds(owners, rows, prices=costs, node_C=node_C)
    kept_L = step_seconds(kept, rows, prices=costs, node_C=node_C)
    for owner, target, each, alone, now in zip(owners, targets, kept, alone_L, kept_L):
        assert each is owner or (each is target and now < alone)


@PROPERTY
@given(models_of_calibrate(), prices(), st.integers(0, 4), st.integers(0, 3))
def test_calibration_pays_for_its_replicas(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray],
    costs: Prices,
    m: int,
    replicas_left: int,
) -> None:
    """Invariant 1, and what is added saves more than it costs."""
    owners, rows, node_C = model
    (target,) = materialize(
        owners[:1],
        [rows[0][0]],  # a forecast of sorts: what one sender has
        overlap_degree=m,
        replicas_per_ep_rank=m,
        node_C=node_C,
    )
    after = calibrate(
        owners[0], target, rows[0], replicas_left=replicas_left, prices=costs, node_C=node_C
    )
    assert (after.holds_EC >= target.holds_EC).all()
    new_EC = after.holds_EC & ~target.holds_EC
    assert new_EC.sum(axis=0).max() <= replicas_left
    if after is not target:
        before_s, after_s = (
            step_seconds([p], rows[:1], prices=costs, node_C=node_C)[0] for p in (target, after)
        )
        sent_s = costs.copy_s * busiest_link(owners[0], target, after, node_C)
        assert before_s - after_s > sent_s - 1e-15
    else:
        assert not new_EC.any()


@pytest.mark.parametrize(
    ("replicas", "busiest"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (0, 2), (0, 3)], 1),  # EP rank 0 sends one expert, however many want it
        ([(0, 2), (1, 2)], 2),  # both are received by EP rank 2
        ([(0, 2), (2, 3), (3, 2)], 3),  # all three enter node 1
        ([(0, 1), (2, 0), (4, 3), (6, 2)], 1),  # no node's border is crossed
    ],
)
def test_the_busiest_link(replicas: list[tuple[int, int]], busiest: int) -> None:
    replicas_EC = np.zeros_like(OWNER.holds_EC)
    for expert, ep_rank in replicas:
        replicas_EC[expert, ep_rank] = True
    assert busiest_link(OWNER, OWNER, OWNER.with_replicas(replicas_EC), NODE_C) == busiest
