# SPDX-License-Identifier: Apache-2.0
"""How many experts are copied behind attention, by what a gather takes; and plans that stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LevelShare, NearestReplica
from ds_moe_ext.planning.exchange_costs import LinkPrices
from ds_moe_ext.planning.fssdp_planner import materialize
from ds_moe_ext.planning.prices import Prices, overlap_degree
from ds_moe_ext.planning.strategy import CostGroup, Job, Plan
from ds_moe_ext.strategies.fssdp import FullySharded, gathers_of

NODES = np.array([0, 0, 1, 1])
EXPERTS = 16
OWNER = Placement.block(EXPERTS, 4)
PRICES = Prices(
    row_s=1e-5,
    row_bytes=1024,
    copy_s=2e-3,
    inter_bytes_per_s=1e8,
    intra_bytes_per_s=5e8,
    cards=2.0,
)
LINKS = LinkPrices(near_bytes_per_s=5e8, far_bytes_per_s=5e7, node_bytes_per_s=1e8, start_s=1e-3)
POOL = CostGroup(
    layers=(0, 1), prices=PRICES, expert_bytes=1 << 18, copy_latency_s=1e-3, links=LINKS
)


# How many.


@pytest.mark.parametrize("replicas", [2, EXPERTS])
def test_as_many_as_come_in_time(replicas: int) -> None:
    gathers = gathers_of(POOL, EXPERTS, replicas, (0, 0, 1, 1))
    assert gathers is gathers_of(POOL, EXPERTS, replicas, tuple(NODES.tolist()))
    found = [gathers.hidden(window_s) for window_s in np.linspace(0, 0.06, 31)]
    assert found[0] == 0 and found == sorted(found) and len(set(found)) > 4
    for window_s, degree in zip(np.linspace(0, 0.06, 31), found):
        assert not degree or gathers.seconds(degree) <= window_s
        assert degree == EXPERTS or gathers.seconds(degree + 1) > window_s
    assert gathers.hidden(1e9) == EXPERTS


def test_seconds_are_the_mean_over_who_may_be_hot() -> None:
    """Near that of other draws."""
    drawn, found = np.random.default_rng(9), []
    for _ in range(200):
        (target,) = materialize(
            [OWNER],
            [drawn.permutation(EXPERTS) + 1],
            overlap_degree=6,
            replicas_per_ep_rank=6,
            node_C=NODES,
        )
        found.append(POOL.replicas_s(OWNER, target, NODES))
    seconds = gathers_of(POOL, EXPERTS, 6, (0, 0, 1, 1)).seconds(6)
    assert seconds == pytest.approx(np.mean(found), rel=0.1)


def test_by_the_paper_where_links_have_not_been_measured() -> None:
    cost_group = replace(POOL, links=None)
    found = gathers_of(cost_group, EXPERTS, 4, (0, 0, 1, 1)).hidden(0.0123)
    assert (
        found
        == 5
        == overlap_degree(
            0.0123,
            bytes_per_s=POOL.linked_bytes_per_s,
            expert_bytes=POOL.expert_bytes,
            num_experts=EXPERTS,
            latency_s=POOL.copy_latency_s,
        )
    )


@pytest.mark.parametrize("given", [None, 7])
def test_what_is_copied_and_what_that_takes_is_reported(given: int | None) -> None:
    """Also of a number that is given, which may be too high."""
    strategy = strategy_of(overlap_degree=given, replicas_per_rank=6)
    gathers = gathers_of(POOL, EXPERTS, 6, (0, 0, 1, 1))
    degree = gathers.hidden(0.02) if given is None else given
    reported = strategy.describe(job_of(rows(0), rows(1)))
    takes = f"{1e3 * gathers.seconds(degree):.3g} ms, hidden by 20 ms of attention"
    assert f"up to {degree} experts of a layer get replicas" in reported and takes in reported
    nothing = strategy_of(overlap_degree=None, replicas_per_rank=0).plan(job_of(rows(0), rows(1)))
    assert not any(plan.has_replicas for plan in nothing)


# Plans that stay.


def rows(seed: int, skew: float = 1.2) -> np.ndarray:
    """Of one layer, ``[C, E]``."""
    rng = np.random.default_rng(seed)
    part_E = rng.permutation((1.0 + np.arange(EXPERTS)) ** -skew)
    return np.stack([rng.multinomial(2000, part_E / part_E.sum()) for _ in NODES])


def job_of(*rows_L: np.ndarray, present: tuple[Plan, ...] = ()) -> Job:
    job = Job.at_start([OWNER, OWNER], NODES, (POOL,))
    return replace(job, rows=rows_L, drift=0.0, window_s=(0.02, 0.02), present=present)


def strategy_of(**keys: Any) -> FullySharded:
    given = {"overlap_degree": 4, "replicas_per_rank": 1, "share": "priced"}
    return FullySharded(**{**given, **keys})


@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("share", ["planned", "priced"])
def test_a_plan_stays_while_it_keeps_what_it_promised(share: str, calibrate: bool) -> None:
    strategy = strategy_of(share=share, calibrate=calibrate, replicas_per_rank=1 + calibrate)
    first = strategy.plan(job_of(rows(0), rows(1)))
    assert all(isinstance(plan.share, LevelShare) for plan in first)
    again = strategy.plan(job_of(rows(0) + 1, rows(2), present=first))
    assert again[0] is first[0]  # rows hardly differ
    anew = strategy.plan(job_of(rows(0) + 1, rows(2)))
    assert again[1].share.describe() == anew[1].share.describe() != first[1].share.describe()
    twice = strategy.plan(job_of(2 * rows(0), 2 * rows(1), present=first))
    assert twice == first  # it is in proportion


def test_a_plan_goes_where_less_would_do() -> None:
    """Rows have become even: replicas are of no use, though the layer takes less than planned."""
    strategy, even = strategy_of(), np.full((4, EXPERTS), 125)
    first = strategy.plan(job_of(rows(0), rows(1)))
    found = strategy.plan(job_of(even, rows(1), present=first))
    assert not found[0].has_replicas and found[1] is first[1]
    back = strategy.plan(job_of(rows(0), rows(1), present=found))
    assert back[0].share.describe() == first[0].share.describe()


def test_the_nearest_copy_stays_while_it_is_enough() -> None:
    strategy = strategy_of(overlap_degree=EXPERTS, replicas_per_rank=EXPERTS)
    first = strategy.plan(job_of(rows(0), rows(1)))
    assert all(isinstance(plan.share, NearestReplica) for plan in first)
    again = strategy.plan(job_of(rows(0) + 1, rows(1, skew=0.1), present=first))
    assert again[0] is first[0] and isinstance(again[1].share, NearestReplica)
    lopsided = np.zeros((4, EXPERTS), dtype=np.int64)
    lopsided[0] = 2000
    changed = strategy.plan(job_of(lopsided, rows(1), present=first))
    assert changed[0] is not first[0] and changed[1] is first[1]


def test_a_target_as_before_is_the_one_before() -> None:
    strategy = strategy_of(share="nearest")
    first = strategy.plan(job_of(rows(0), rows(1)))
    others = job_of(rows(2), rows(1) + 1)
    anew, changed = strategy.plan(others), strategy.plan(replace(others, present=first))
    assert changed[0].target.is_like(anew[0].target)
    assert not changed[0].target.is_like(first[0].target)
    assert changed[1].target is first[1].target and changed[1].target.is_like(anew[1].target)
    assert [plan.share.describe() for plan in changed] == [plan.share.describe() for plan in anew]
