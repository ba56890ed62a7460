# SPDX-License-Identifier: Apache-2.0
"""``auto``: what it chooses, when it changes its mind, and that it says so."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_moe_ext.settings import read_settings
from ds_moe_ext.steps.step_times import SETTLING, StepTimes
from ds_moe_ext.strategies.auto import SAMPLED, USUAL, Auto
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategy import Choice, Job, Past, Rhythm, Strategy

sys.path.insert(0, str(Path(__file__).parents[1] / "launch/bench"))

from auto_scenarios import SCENARIOS, Scenario, run

from ds_moe_ext.loads.sources import read_loads


def rows_of(scenario: Scenario, num_layers: int = 8) -> np.ndarray:
    return read_loads(
        scenario.loads,
        ranks=8,
        experts=scenario.experts,
        layers=num_layers,
        tokens=4096,
        top_k=2,
        steps=3,
    ).rows_ILCE


def job_of(
    scenario: Scenario,
    *,
    step: int = 1,
    present: str = "",
    ratios: Mapping[str, float] | None = None,
) -> Job:
    """After some steps, of which the latest was planned by the one before it."""
    before_LCE, came_LCE, _ = rows_of(scenario)
    choice = Choice(present, 1.0, "it was") if present else None
    past = Past(step, tuple(before_LCE), tuple(came_LCE), choice, ratios or {})
    return replace(scenario.job, rows=tuple(came_LCE), drift=0.02, past=past)


SKEWED, BALANCED = SCENARIOS["skewed, fast net"], SCENARIOS["balanced, slow net"]


def chosen(auto: Auto, job: Job) -> Choice:
    (choice,) = {plan.choice for plan in auto.plan(job)}
    assert choice is not None
    return choice


def test_it_ends_at_the_best_strategy() -> None:
    """By the simulator, where fixed strategies differ much: within 3 % of the best."""
    auto = Auto(interval=3, candidates=["ep", "fssdp", "prophet"])
    for scenario in (SKEWED, BALANCED):
        least_s = min(
            run(auto.strategies[name], scenario, 4)[0][-1] for name in auto.candidates or ()
        )
        assert run(auto, scenario, 4)[0][-1] <= 1.03 * least_s


def test_plans_are_those_of_the_strategy_that_was_chosen() -> None:
    auto, job = Auto(), job_of(SKEWED)
    plans = auto.plan(job)
    name = chosen(auto, job).name
    assert name != "ep"
    for own, theirs in zip(plans, auto.strategies[name].plan(job)):
        assert np.array_equal(own.target.holds_EC, theirs.target.holds_EC)
        assert (own.forward_degree, own.backward_degree) == (
            theirs.forward_degree,
            theirs.backward_degree,
        )
        assert own.successor is None  # the next may come from another strategy
    assert any(plan.has_copies for plan in plans)


def test_until_costs_are_known_experts_compute_at_home() -> None:
    pools = (replace(SKEWED.job.pools[0], expert_bytes=0),)
    plans = Auto().plan(replace(job_of(SKEWED), pools=pools))
    assert all(plan.target is plan.home and plan.choice is None for plan in plans)


def test_a_choice_stays_until_the_next_is_due() -> None:
    auto = Auto(interval=10)
    kept = job_of(SKEWED, step=19, present="ep")
    assert chosen(auto, kept) == Choice("ep", 1.0, "it was")
    due = chosen(auto, job_of(SKEWED, step=20, present="ep"))
    assert due.name != "ep"
    assert due.told.startswith(f"auto takes {due.name}: a step is expected to take ")
    assert all(name in due.told for name in USUAL)


def test_the_present_one_stays_where_another_gains_too_little() -> None:
    free = chosen(Auto(margin=0.0), job_of(SKEWED, step=50, present="ep"))
    assert free.name != "ep"
    kept = chosen(Auto(margin=0.9), job_of(SKEWED, step=50, present="ep"))
    assert kept.name == "ep"


def test_what_steps_took_counts_beside_prices() -> None:
    """A strategy that was slower than its price, is chosen no more."""
    first = chosen(Auto(), job_of(SKEWED, step=50, present="ep"))
    disappointing = {"ep": 1.0, **dict.fromkeys((first.name,), 5.0)}
    job = job_of(SKEWED, step=100, present=first.name, ratios=disappointing)
    assert chosen(Auto(candidates=["ep", first.name]), job).name == "ep"


def test_prices_are_of_the_rows_that_came_by_plans_made_before() -> None:
    """Loads that turn at once make copies worthless, which plans for what came would not show."""
    job = job_of(SKEWED, step=50, present="ep")
    assert job.past is not None
    turned = tuple(rows_CE[:, ::-1].copy() for rows_CE in job.past.predicted)
    fooled = replace(job, rows=turned, past=replace(job.past, came=turned))
    auto = Auto(candidates=["fssdp"])
    assert chosen(auto, fooled).expected_s > 1.3 * chosen(auto, job).expected_s


def test_of_many_layers_some_are_priced() -> None:
    before_LCE, came_LCE, _ = rows_of(SKEWED, num_layers=24)
    job = job_of(SKEWED, step=50)
    one = job.pools[0]
    homes = (job.homes * 3)[:24]
    assert job.past is not None
    assert job.pipelines is not None
    long = replace(
        job,
        rows=tuple(came_LCE),
        homes=homes,
        pools=(
            replace(one, layers=tuple(range(12))),
            replace(one, layers=tuple(range(12, 24))),
        ),
        window_s=job.window_s * 3,
        back_window_s=job.back_window_s * 3,
        free_bytes=3 * job.free_bytes,
        pipelines=replace(job.pipelines, layers=job.pipelines.layers * 3),
        past=replace(job.past, predicted=tuple(before_LCE), came=tuple(came_LCE)),
    )
    assert len(homes) > SAMPLED
    assert len(Auto().plan(long)) == 24
    # Loads of layers differ: what some stand for is about what all take.
    assert chosen(Auto(), long).expected_s == pytest.approx(
        3 * chosen(Auto(), job).expected_s, rel=0.1
    )


# Its keys.


def read(**block: Any) -> Strategy:
    strategy = read_settings({"ds_moe_ext": {"enabled": True, "strategy": "auto", **block}})[1]
    assert strategy is not None
    return strategy


def test_candidates_have_the_keys_of_their_own_blocks() -> None:
    auto = read(fssdp={"copies_per_rank": 3}, esp={"max_degree": 2})
    assert isinstance(auto, Auto)
    assert auto.strategies["fssdp"] == FullySharded(copies_per_rank=3)
    over = auto.strategies["esp over fssdp"]
    assert isinstance(over, ExpertSharding)
    assert over.placing == FullySharded(copies_per_rank=3)
    assert over.max_degree == 2
    assert not over.slices_gradients
    assert auto.strategies["ep"] == ExpertParallel()
    assert "fssdp, priced share" not in auto.strategies  # it would be compiled
    names = ["ep", "esp over fssdp, priced share"]
    priced = read(fssdp={"copies_per_rank": 3}, auto={"candidates": names})
    assert isinstance(priced, Auto)
    laid = priced.strategies[names[1]]
    assert isinstance(laid, ExpertSharding)
    assert laid.placing == FullySharded(copies_per_rank=3, share="priced")


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"auto": {"candidates": ["ep", "fssd"]}}, r"candidates has 'fssd'.*did you mean 'fssdp'"),
        ({"auto": {"candidates": []}}, r"candidates is empty; name some of ep, fssdp"),
        ({"auto": {"interval": 0}}, r"interval is 0; it must be at least 1"),
        ({"auto": {"margin": 1.0}}, r"margin is 1.0; it must be at least 0 and below 1"),
        ({"esp": {"schedule": "tutel"}}, r"esp.schedule is 'tutel', but ds_moe_ext.auto lets all"),
        ({"esp": {"all_to_all": "2dh"}}, r"esp.all_to_all is '2dh', but ds_moe_ext.auto lets all"),
        ({"ep": {"send_once": True}}, r"knows 'ep' without its keys.*leave out the block"),
        ({"strategy": "esp", "balance": "auto"}, r"balance is 'auto', which does not place"),
    ],
)
def test_bad_keys_are_refused(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(**block)


def test_pipelines_are_measured_only_where_one_is_a_candidate() -> None:
    assert Auto().rhythm().measures
    assert not Auto(candidates=["ep", "fssdp"]).rhythm().measures


# The clock.


def times_of(every: int, seconds: list[float]) -> StepTimes:
    ends_s = iter(np.cumsum(seconds).tolist())
    return StepTimes(every, lambda own_s: own_s, clock=lambda: next(ends_s))


def test_steps_are_held_against_what_they_were_expected_to_take() -> None:
    times = times_of(8, [9.0] * (SETTLING + 1) + [2.0] * 4)
    for step in range(7):
        times.after_step(step, Choice("fssdp", 4.0, ""))
    assert times.ratios == {"fssdp": 0.5}
    assert not times.has_drifted


def test_another_choice_begins_anew() -> None:
    times = times_of(8, [1.0] * 7)
    for step in range(7):
        times.after_step(step, Choice("ep" if step < 4 else "fssdp", 1.0, ""))
    assert times.ratios == {}  # too few of its own


def test_steps_that_take_much_longer_are_told() -> None:
    times = times_of(8, [1.0] * 8 + [1.5] * 8)
    drifted = []
    for step in range(16):
        times.after_step(step, None)
        drifted.append(times.has_drifted)
    assert drifted.index(True) == 14
    assert sum(drifted) == 1


def test_strategies_that_plan_nothing_are_not_looked_at() -> None:
    assert StepTimes.of(Rhythm(), torch.device("cpu"), None).every == 0
    assert StepTimes.of(Auto(interval=7).rhythm(), torch.device("cpu"), None).every == 7
