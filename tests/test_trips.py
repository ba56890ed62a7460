# SPDX-License-Identifier: Apache-2.0
"""The pieces in which a plan's copies travel are what each would be alone."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseHome
from ds_moe_ext.moe.copy_flights import Place, Trips
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, Plan


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("num_cells", [2, 3, 8])
@pytest.mark.parametrize("everywhere", [False, True])
def test_pieces_are_those_of_their_experts_alone(
    everywhere: bool, num_cells: int, broadcasts: bool
) -> None:
    rng = np.random.default_rng(num_cells)
    node_C, nobody = np.arange(num_cells) // 2, cast(Any, None)
    for _ in range(20):
        home = Placement.owned_by(rng.integers(0, num_cells, 6), num_cells)
        copied = tuple(rng.permutation(6)[: rng.integers(1, 6)].tolist())
        copies_EC = np.zeros_like(home.holds_EC)
        copies_EC[list(copied)] = everywhere or rng.random((len(copied), num_cells)) < 0.7
        target = home.with_copies(copies_EC)
        splits = [Split(copied[:at], copied[at:]) for at in rng.integers(0, len(copied) + 1, 2)]
        plan = Plan(home, target, LocalElseHome(home, target), carried=Carried(*splits))
        for cell in range(num_cells):
            place = Place(0, cell, node_C, nobody, broadcasts=broadcasts)
            trips = Trips.of(place, plan)
            assert trips.whole == place.part(home, target)
            for pieces, split in zip((trips.gathers, trips.reductions), splits):
                assert [piece.number for piece in pieces] == [0, 1]
                for piece, experts in zip(pieces, split):
                    some_EC = np.zeros_like(copies_EC)
                    some_EC[list(experts)] = copies_EC[list(experts)]
                    assert piece.experts == frozenset(experts)
                    assert piece.part == place.part(home, home.with_copies(some_EC))
