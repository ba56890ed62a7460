"""The benchmark of what happens between steps, on few ranks; and how long plans stay."""

from __future__ import annotations

import pytest
from load_traces import zipf_steps
from planning_time import BLOCKS, NUM_WARM_UPS, OneRank, Parts, Sizes, measured, strategy_of

from ds_moe_ext.strategy import Plan

SIZES = Sizes(ranks=8, ranks_per_node=4, layers=3, experts=16, rows=4096, skew=1.0)
COPIED = {"overlap_degree": 4, "copies_per_rank": 2, "reshard_interval": 0}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_strategy_is_taken_apart(name: str) -> None:
    rank = OneRank(strategy_of(name, {"fssdp": COPIED}), SIZES, Parts())
    figures = measured(rank, SIZES, 2)
    assert figures.wall_ms.keys() == figures.cpu_ms.keys()
    assert sum(figures.wall_ms.values()) > 0
    assert (figures.copies > 0) == (name != "ep")


def plans_of_steps(num_steps: int, **keys: int) -> list[tuple[Plan, ...]]:
    """Behind each step of one rank under ``fssdp``."""
    rank = OneRank(strategy_of("fssdp", {"fssdp": {**COPIED, **keys}}), SIZES, Parts())
    loads = zipf_steps((SIZES.layers, SIZES.ranks, SIZES.experts), rows=SIZES.rows, skew=SIZES.skew)
    plans = []
    for step, rows_LCE in zip(range(num_steps), loads):
        rank.route(rows_LCE)
        rank.after_step(step)
        plans.append(tuple(layer.routed.site.plan for layer in rank.layers))
    return plans


def test_a_plan_stays_for_its_interval_and_is_then_what_it_would_be() -> None:
    every, third = (
        plans_of_steps(NUM_WARM_UPS + 3),
        plans_of_steps(NUM_WARM_UPS + 3, plan_interval=3),
    )
    for step in range(NUM_WARM_UPS, NUM_WARM_UPS + 3):
        if (step + 1) % 3:
            assert third[step] == third[step - 1]  # the same objects
            continue
        pairs = zip(every[step], third[step])
        assert all((one.target.holds_EC == other.target.holds_EC).all() for one, other in pairs)
        assert third[step] != third[step - 1]
