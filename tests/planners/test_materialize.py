# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: the spec's golden tests, and against the algorithm written down line by line.

Shape letters: L layers, E experts, C cells, T hot experts.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.fssdp_planner import materialize, slot_quotas
from tests.planners.plainly import (
    HOME,
    LOAD_E,
    NODE_C,
    PROPERTY,
    clusters,
    holdings,
    layer_loads,
    materialized,
    model_homes,
)


def golden(t: int, m: int) -> Placement:
    (target,) = materialize([HOME], [LOAD_E], overlap_degree=t, copies_per_cell=m, node_C=NODE_C)
    return target


def received(target: Placement) -> list[int]:
    return (target.holds_EC & ~HOME.holds_EC).sum(axis=0).tolist()


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
    copies = [(0, 2), (0, 1), (0, 3), (4, 0), (4, 1), (4, 3), (1, 2), (5, 0)]
    copies_EC = np.zeros_like(HOME.holds_EC)
    copies_EC[tuple(np.transpose(copies))] = True
    assert golden(t=4, m=2).describe() == HOME.with_copies(copies_EC).describe()
    # The line-by-line version places them in the spec's order.
    assert materialized(HOME.holds_EC, LOAD_E.tolist(), 4, 2, NODE_C.tolist())[1] == copies


@pytest.mark.parametrize(("t", "m"), [(0, 4), (4, 0), (0, 0)])
def test_no_copies_is_plain_expert_parallelism(t: int, m: int) -> None:
    assert np.array_equal(golden(t, m).holds_EC, HOME.holds_EC)


def test_a_layer_without_rows_gets_no_copies() -> None:
    targets = materialize(
        [HOME, HOME],
        [np.zeros(8, dtype=np.int64), LOAD_E],
        overlap_degree=3,
        copies_per_cell=3,
        node_C=NODE_C,
    )
    assert np.array_equal(targets[0].holds_EC, HOME.holds_EC)
    assert holdings(targets[1]) == holdings(golden(3, 3))


def test_no_layers() -> None:
    assert materialize([], [], overlap_degree=1, copies_per_cell=1, node_C=NODE_C) == ()


def test_nodes_must_be_those_of_the_cells() -> None:
    with pytest.raises(ValueError, match="layer 0 lies on 4 cells"):
        materialize([HOME], [LOAD_E], overlap_degree=1, copies_per_cell=1, node_C=NODE_C[:3])


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray]:
    """Homes, loads and nodes; homes may have copies already, as in calibration."""
    node_C, loads = draw(clusters()), draw(layer_loads())
    homes = draw(model_homes([len(load) for load in loads], len(node_C)))
    density = draw(st.sampled_from([0.0, 0.0, 0.3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    homes = tuple(home.with_copies(rng.random(home.holds_EC.shape) < density) for home in homes)
    return homes, loads, node_C


@PROPERTY
@given(models(), st.data())
def test_as_the_algorithm_reads(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray], data: st.DataObject
) -> None:
    """Equal to the plain version, and within the bounds that the spec derives (invariants 1, 3)."""
    homes, loads, node_C = model
    numbers = st.lists(st.integers(0, 8), min_size=len(homes), max_size=len(homes))
    t_L, m_L = np.array(data.draw(numbers)), np.array(data.draw(numbers))
    targets = materialize(homes, loads, overlap_degree=t_L, copies_per_cell=m_L, node_C=node_C)
    for home, target, load_E, t, m in zip(homes, targets, loads, t_L.tolist(), m_L.tolist()):
        expected, _ = materialized(home.holds_EC, load_E.tolist(), t, m, node_C.tolist())
        assert np.array_equal(target.holds_EC, expected)
        assert (target.holds_EC >= home.holds_EC).all()
        new_EC = target.holds_EC & ~home.holds_EC
        assert new_EC.sum(axis=0).max() <= min(m, t)
        assert new_EC.any(axis=1).sum() <= t
        assert new_EC.sum() <= len(node_C) * m


@PROPERTY
@given(models(), st.integers(0, 5), st.integers(0, 5), st.integers(2, 1000))
def test_only_ratios_of_loads_count(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray], t: int, m: int, factor: int
) -> None:
    """So that the sum of a window may stand for its mean."""
    homes, loads, node_C = model
    once, often = (
        materialize(homes, scaled, overlap_degree=t, copies_per_cell=m, node_C=node_C)
        for scaled in (loads, [factor * load_E for load_E in loads])
    )
    assert [p.describe() for p in once] == [p.describe() for p in often]


def test_a_large_model_as_the_algorithm_reads() -> None:
    """64 cells on 8 nodes, 128 experts: copies in every number, from none to everywhere."""
    rng = np.random.default_rng(0)
    node_C, home = np.arange(64) // 8, Placement.block(128, 64)
    load_E = rng.permutation((1e6 / np.arange(1, 129) ** 1.5).astype(np.int64))
    (target,) = materialize([home], [load_E], overlap_degree=40, copies_per_cell=4, node_C=node_C)
    expected, _ = materialized(home.holds_EC, load_E.tolist(), 40, 4, node_C.tolist())
    assert np.array_equal(target.holds_EC, expected)
    assert target.holds_EC.sum(axis=1).max() == 64
