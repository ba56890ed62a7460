# SPDX-License-Identifier: Apache-2.0
"""Plans of replicas among the expert ranks of a ZP group. What they make of rows is held against
one process in ``test_striped.py`` and ``hosts/test_configurations.py``.

Shape letters: C ranks of a group, E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.share import LevelShare, NearestReplica
from ds_moe_ext.planning.prices import Prices
from ds_moe_ext.planning.strategy import CostGroup, Job, Plan
from ds_moe_ext.schedule.task import PARAM
from ds_moe_ext.strategies.expert_side import SidePlan, side_job
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.strategies.zebra import Zebra

NUM_EXPERTS, ATTENTION, EXPERT = 8, (0, 2), (1, 3)
PRICES = Prices(
    row_s=1e-4, row_bytes=512, copy_s=1e-5, inter_bytes_per_s=1e9, intra_bytes_per_s=1e10
)
NO_EXPERTS = [0, 1, 4]  # moved of each layer; in the last expert ranks have none


def zebra(balance: str | None, **keys: Any) -> Zebra:
    sizes = {"attention_size": 2, "expert_size": 2, "attention_ep_ranks": list(ATTENTION)}
    block = {"enabled": True, "strategy": "zebra", "zebra": {**sizes, "moved": NO_EXPERTS}}
    if balance is not None:
        block |= {"balance": balance, balance: keys}
    _, strategy = read_settings({BLOCK: block})
    assert isinstance(strategy, Zebra)
    return strategy


def measured(strategy: Zebra, seed: int = 0) -> Job:
    """Loads of which the first experts, all of one rank, have most; costs are known."""
    owners = strategy.first_owners([NUM_EXPERTS] * 3, [], 4)
    job = Job.at_start(owners, np.array([0, 0, 1, 1]))
    drawn = np.random.default_rng(seed)
    part_E = 1 / np.arange(1, NUM_EXPERTS + 1) ** 1.2
    rows_CE = np.zeros((4, NUM_EXPERTS), dtype=np.int64)
    rows_CE[list(ATTENTION)] = drawn.multinomial(1000, part_E / part_E.sum(), size=2)
    known = CostGroup(
        layers=(0, 1, 2),
        prices=PRICES,
        expert_bytes=10_000,
        state_bytes=30_000,
        row_bytes_per_s=1e9,
        copy_bytes_per_s=1e9,
    )
    window_s = (0.1,) * 3
    return replace(
        job,
        rows=(rows_CE,) * 3,
        cost_groups=(known,),
        window_s=window_s,
        back_window_s=window_s,
        free_bytes=10**7,
    )


BALANCES: dict[str, tuple[str, dict[str, Any]]] = {
    "fssdp": ("fssdp", {"overlap_degree": 4, "replicas_per_rank": 2}),
    "fssdp, nearest": ("fssdp", {"share": "nearest"}),
    "fssdp, measured": ("fssdp", {}),
    "fssdp, freed": ("fssdp", {"overlap_degree": 4, "rematerialize": True}),
    "prophet": ("prophet", {}),
    "prophet, planned": ("prophet", {"share": "planned", "scheduler": False}),
}


def computed(plan: Plan, rows_CE: np.ndarray) -> np.ndarray:
    """Rows of each rank, ``[C]``."""
    return plan.destination_of(rows_CE).share.of_rows(rows_CE).computed_C(rows_CE)


@pytest.mark.parametrize("name", BALANCES)
def test_expert_ranks_are_balanced_and_attention_ranks_get_no_replicas(name: str) -> None:
    balance, keys = BALANCES[name]
    strategy = zebra(balance, **keys)
    job = measured(strategy)
    *others, last = strategy.plan(job)
    assert not last.has_replicas
    kind = NearestReplica if "nearest" in name else LevelShare
    for plan, owner, rows_CE in zip(others, job.owners, job.rows):
        assert isinstance(plan.share, kind) and plan.owner is owner and plan.carried is None
        assert plan.rematerialize == ("freed" in name)
        held_EC, owned_EC = (each.holds_EC[:, list(ATTENTION)] for each in (plan.target, owner))
        np.testing.assert_array_equal(held_EC, owned_EC)
        alone_C, now_C = computed(Plan.at_owner(owner), rows_CE), computed(plan, rows_CE)
        np.testing.assert_array_equal(now_C[list(ATTENTION)], alone_C[list(ATTENTION)])
        assert now_C.sum() == rows_CE.sum()
        busiest, mean = now_C[list(EXPERT)].max(), now_C[list(EXPERT)].mean()
        assert busiest < 1.06 * mean < alone_C[list(EXPERT)].max()


def test_replicas_that_are_added_are_on_expert_ranks() -> None:
    strategy = zebra("fssdp", overlap_degree=1, replicas_per_rank=1)
    job = measured(strategy)
    plan, *_ = strategy.plan(job)
    rows_CE = np.zeros_like(job.rows[0])
    rows_CE[list(ATTENTION), 5] = 1000  # nobody predicted that
    target, _ = plan.destination_of(rows_CE)
    assert target.holds_EC[5].tolist() == [False, True, False, True]
    assert not any(map(plan.may_copy_to, ATTENTION)) and all(map(plan.may_copy_to, EXPERT))
    assert computed(plan, rows_CE).tolist() == [0, 1000, 0, 1000]
    none_CE = np.zeros_like(rows_CE)
    assert plan.destination_of(none_CE).target is plan.target
    assert computed(plan, none_CE).tolist() == [0, 0, 0, 0]


def test_plans_that_stay_are_the_same() -> None:
    strategy = zebra("fssdp")
    job = measured(strategy)
    plans = strategy.plan(job)
    again = strategy.plan(replace(measured(strategy, 1), present=plans))
    assert [new is old for new, old in zip(again, plans)] == [True, True, False]


def test_a_plan_says_the_next_one() -> None:
    strategy = zebra("prophet")
    job = measured(strategy)
    plan, *_ = strategy.plan(job)
    rows_CE = job.rows[0][:, ::-1].copy()
    assert plan.successor is not None
    following = plan.successor(rows_CE)
    assert isinstance(following, SidePlan) and following.predicted_CE is rows_CE
    busiest_C = computed(following, rows_CE)[list(EXPERT)]
    assert busiest_C.max() < 1.06 * busiest_C.mean()


def test_what_its_planner_knows() -> None:
    """All rows that go to expert ranks, though these send none; of unlike ranks the right ones."""
    strategy = zebra("fssdp")
    job = measured(strategy)
    (known,) = job.cost_groups
    job = replace(job, cost_groups=(replace(known, row_s_C=(1.0, 2.0, 3.0, 4.0)),))
    its = side_job(job, EXPERT)
    assert its.node_C.tolist() == [0, 1] and its.cost_groups[0].row_s_C == (2.0, 4.0)
    assert its.cost_groups[0].layers == (0, 1)
    for rows_NF, rows_CE, owner in zip(its.rows, job.rows, job.owners):
        there_E = owner.holds_EC[:, list(EXPERT)].any(axis=1)
        np.testing.assert_array_equal(rows_NF.sum(axis=0), rows_CE.sum(axis=0)[there_E])
        assert np.ptp(rows_NF, axis=0).max() <= 1


def test_without_a_balance_it_uses_no_communicator_for_replicas() -> None:
    plain, copying = zebra(None), zebra("fssdp")
    assert set(copying.uses()) - set(plain.uses()) == {("ep", PARAM)}
    assert not plain.intervals().weighs_replicas and copying.intervals().weighs_replicas
    assert not copying.intervals().shard_every
