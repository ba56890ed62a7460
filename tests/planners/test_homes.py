# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2: the spec's golden tests, and against the algorithm written down line by line.

Shape letters: L layers, E experts, C cells.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement, even_homes
from ds_moe_ext.planning.fssdp_planner import shard
from tests.planners.plainly import (
    NODE_C,
    PROPERTY,
    clusters,
    holdings,
    layer_loads,
    model_homes,
    sharded,
)


def test_h5() -> None:
    loads = [np.array([50, 20, 20, 10]), np.array([30, 40, 25, 5])]
    homes = shard(loads, overlap_degree=1, node_C=NODE_C)
    assert [home.owner_E.tolist() for home in homes] == [[1, 2, 0, 3], [0, 1, 2, 3]]


def test_h6_cells_own_different_numbers_of_a_layer() -> None:
    loads = [np.array([60, 12, 10, 8, 4, 3, 2, 1]), np.array([20, 18, 16, 14, 12, 10, 6, 4])]
    homes = shard(loads, overlap_degree=2, node_C=NODE_C)
    assert holdings(homes[0]) == [[0, 5, 7], [1, 2], [4, 6], [3]]
    assert holdings(homes[1]) == [[2], [5, 6], [0, 3], [1, 4, 7]]


def test_hot_experts_stay_at_home_if_there_is_a_slot() -> None:
    """As in H6, whose cold experts leave each cell one slot; experts 0 and 1 are hot."""
    loads = [np.array([60, 12, 10, 8, 4, 3, 2, 1]), np.array([20, 18, 16, 14, 12, 10, 6, 4])]
    present = tuple(
        Placement.owned_by(np.array([*hot, 3, 3, 3, 3, 3, 3]), 4) for hot in ((0, 0), (1, 3))
    )
    homes = shard(loads, overlap_degree=2, node_C=NODE_C, homes=present)
    # Cell 0 has room for one of its two; the other takes what those who stay leave: cell 2.
    assert homes[0].owner_E[:2].tolist() == [0, 2]
    assert homes[1].owner_E[:2].tolist() == [1, 3]
    # The cold ones are where H6 puts them.
    assert homes[0].owner_E[2:].tolist() == [1, 3, 2, 0, 2, 0]


@st.composite
def models(
    draw: st.DrawFn,
) -> tuple[list[np.ndarray], np.ndarray, tuple[Placement, ...] | None]:
    """Loads, nodes and present homes."""
    node_C, loads = draw(clusters()), draw(layer_loads())
    sizes = [len(load) for load in loads]
    homes = draw(st.none() | model_homes(sizes, len(node_C)))
    return loads, node_C, homes


@PROPERTY
@given(models(), st.integers(0, 6))
def test_as_the_algorithm_reads(
    model: tuple[list[np.ndarray], np.ndarray, tuple[Placement, ...] | None], t: int
) -> None:
    loads, node_C, present = model
    homes = shard(loads, overlap_degree=t, node_C=node_C, homes=present)
    owners = None if present is None else [home.owner_E.tolist() for home in present]
    expected = sharded([load_E.tolist() for load_E in loads], t, node_C.tolist(), owners)
    assert [home.owner_E.tolist() for home in homes] == expected


@PROPERTY
@given(models(), st.data())
def test_every_expert_has_one_home_and_cells_own_equally_many(
    model: tuple[list[np.ndarray], np.ndarray, tuple[Placement, ...] | None], data: st.DataObject
) -> None:
    """Invariant 2, with a degree for each layer; totals are those of the first homes."""
    loads, node_C, present = model
    t_L = np.array([data.draw(st.integers(0, 6)) for _ in loads])
    homes = shard(loads, overlap_degree=t_L, node_C=node_C, homes=present)
    assert all((home.holds_EC.sum(axis=1) == 1).all() for home in homes)
    assert [home.num_experts for home in homes] == [len(load_E) for load_E in loads]
    total_C = sum(home.holds_EC.sum(axis=0) for home in homes)
    first = even_homes([len(load_E) for load_E in loads], len(node_C))
    assert total_C.tolist() == sum(home.holds_EC.sum(axis=0) for home in first).tolist()
    assert total_C.max() - total_C.min() <= 1


def test_what_does_not_fit() -> None:
    assert shard([], overlap_degree=1, node_C=NODE_C) == ()
    with pytest.raises(ValueError, match="one load an expert"):
        shard([np.array([1, 2])], overlap_degree=0, node_C=NODE_C, homes=even_homes([3], 4))
    with pytest.raises(ValueError, match="whole rows"):
        shard([np.array([1.5, 2])], overlap_degree=0, node_C=NODE_C)
