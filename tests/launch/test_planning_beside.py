# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what planning costs the thread that issues, on few ranks."""

from __future__ import annotations

import numpy as np
import pytest
from planning_beside import GAPS_MS, measured, spin
from planning_time import OneRank, Parts, Sizes, strategy_of

SIZES = Sizes(ranks=8, ranks_per_node=4, layers=3, experts=16, rows=4096, skew=1.0)


@pytest.mark.parametrize("name", ["fssdp", "prophet"])
def test_plans_are_made_while_the_loop_runs(name: str) -> None:
    keys = {"fssdp": {"overlap_degree": 4, "copies_per_rank": 2, "reshard_interval": 0}}
    rank = OneRank(strategy_of(name, keys), SIZES, Parts())
    cost = measured(rank, SIZES, 2)
    assert cost.cpu_ms > 0
    assert max(cost.longest_ms, cost.loop_ms) <= cost.lasts_ms
    assert len(cost.gaps) == len(GAPS_MS) and sorted(cost.gaps, reverse=True) == list(cost.gaps)
    assert all(layer.routed.site.plan.has_copies for layer in rank.layers)


def test_a_gap_is_one_turn() -> None:
    turns = iter([False, False, True])
    gaps_G = spin(lambda: next(turns))
    assert gaps_G.shape == (3,) and np.all(gaps_G > 0)
