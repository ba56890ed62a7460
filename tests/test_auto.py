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

from ds_moe_ext.hosts.steps.costs import SETTLING, StepTimes
from ds_moe_ext.planning.described_run import copied_bytes_C
from ds_moe_ext.planning.strategy import Choice, Intervals, Job, Past, Strategy
from ds_moe_ext.strategies.auto import SAMPLED, USUAL, Auto
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.settings import read_settings

sys.path.insert(0, str(Path(__file__).parents[1] / "launch/bench"))

from auto_scenarios import SCENARIOS, Scenario, run

from ds_moe_ext.planning.load_files import read_loads


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
    assert any(plan.has_replicas for plan in plans)


def test_until_costs_are_known_experts_compute_at_owner() -> None:
    cost_groups = (replace(SKEWED.job.cost_groups[0], expert_bytes=0),)
    plans = Auto().plan(replace(job_of(SKEWED), cost_groups=cost_groups))
    assert all(plan.target is plan.owner and plan.choice is None for plan in plans)


def test_a_choice_stays_until_the_next_is_due() -> None:
    auto = Auto(interval=10)
    kept = job_of(SKEWED, step=19, present="ep")
    assert chosen(auto, kept) == Choice("ep", 1.0, "it was")
    due = chosen(auto, job_of(SKEWED, step=20, present="ep"))
    assert due.name != "ep"
    assert due.reported.startswith(f"auto uses {due.name}: predicted step time ")
    assert all(name in due.reported for name in USUAL)
    assert {name for name, _ in due.among_s} == {*USUAL}


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
    """Loads that turn at once make replicas worthless, which plans for what came would not show."""
    job = job_of(SKEWED, step=50, present="ep")
    assert job.past is not None
    turned = tuple(rows_CE[:, ::-1].copy() for rows_CE in job.past.predicted)
    fooled = replace(job, rows=turned, past=replace(job.past, came=turned))
    auto = Auto(candidates=["fssdp"], blocks={"fssdp": FullySharded(repair=0)})
    assert chosen(auto, fooled).expected_s > 1.3 * chosen(auto, job).expected_s


def test_of_many_layers_some_are_priced() -> None:
    before_LCE, came_LCE, _ = rows_of(SKEWED, num_layers=24)
    job = job_of(SKEWED, step=50)
    one = job.cost_groups[0]
    owners = (job.owners * 3)[:24]
    assert job.past is not None
    assert job.pipelines is not None
    long = replace(
        job,
        rows=tuple(came_LCE),
        owners=owners,
        cost_groups=(
            replace(one, layers=tuple(range(12))),
            replace(one, layers=tuple(range(12, 24))),
        ),
        window_s=job.window_s * 3,
        back_window_s=job.back_window_s * 3,
        free_bytes=3 * job.free_bytes,  # of all layers together
        pipelines=replace(job.pipelines, layers=job.pipelines.layers * 3),
        past=replace(job.past, predicted=tuple(before_LCE), came=tuple(came_LCE)),
    )
    assert len(owners) > SAMPLED
    assert len(Auto().plan(long)) == 24
    # Loads of layers differ: what some stand for is about what all take.
    assert chosen(Auto(), long).expected_s == pytest.approx(
        3 * chosen(Auto(), job).expected_s, rel=0.1
    )


# Memory.


def of_much(**more: Any) -> Auto:
    """With a candidate that copies as much as it is asked, whatever is free."""
    much = FullySharded(replicas_per_rank=8, overlap_degree=8, rematerialize=True)
    return Auto(blocks={"fssdp": much}, **more)


def without(job: Job, free_bytes: int, **taken: int) -> Job:
    assert job.past is not None
    return replace(job, free_bytes=free_bytes, past=replace(job.past, taken=taken))


def test_replicas_that_do_not_fit_are_left_out_and_reported() -> None:
    auto, job = of_much(candidates=["ep", "fssdp"]), job_of(SKEWED)
    assert chosen(auto, job).name == "fssdp"
    plans = auto.strategies["fssdp"].plan(job)
    expert_bytes = job.cost_groups[0].expert_bytes
    wanted = int(copied_bytes_C(plans, [expert_bytes] * 8, accumulates=False).max())
    most = max(int((p.target.holds_EC & ~p.owner.holds_EC).sum(axis=0).max()) for p in plans)
    assert wanted == 2 * most * expert_bytes  # one layer's, and their gradients
    assert chosen(auto, without(job, wanted)).name == "fssdp"
    tight = chosen(auto, without(job, wanted - 1))
    assert (tight.name, tight.left_out) == ("ep", ("fssdp",))
    assert tight.reported.endswith(
        "(ms, without the optimizer); fssdp is left out: its replicas need "
        f"{wanted / 1e6:,.0f} MB on a rank, but only {(wanted - 1) / 1e6:,.0f} MB are free"
    )
    # It is reported again where others are left out, though the same runs.
    assert not tight.is_like(tight._replace(left_out=()))
    assert tight.is_like(tight._replace(reported="", expected_s=2.0))


def test_gradients_that_wait_for_the_last_micro_batch_count() -> None:
    auto = Auto(blocks={"fssdp": FullySharded(replicas_per_rank=2, overlap_degree=8)})
    job = job_of(SKEWED)
    plans, each = auto.strategies["fssdp"].plan(job), [job.cost_groups[0].expert_bytes] * 8
    once, summed = (
        int(copied_bytes_C(plans, each, accumulates=accumulates).max())
        for accumulates in (False, True)
    )
    assert summed == pytest.approx(16 / 9 * once, rel=0.01)  # 8 layers' and 1, or 8 layers' twice
    asked = replace(auto, candidates=["fssdp"])
    job = without(job, (once + summed) // 2)
    assert chosen(asked, job).name == "fssdp"
    assert chosen(asked, replace(job, accumulates=True)).name == "ep"


def test_what_was_seen_counts_where_that_is_more() -> None:
    auto, job = of_much(candidates=["ep", "fssdp"]), job_of(SKEWED)
    much = 10**12
    assert chosen(auto, without(job, much, fssdp=much)).name == "fssdp"
    seen = chosen(auto, without(job, much, fssdp=much + 10**6))
    assert (seen.name, seen.left_out) == ("ep", ("fssdp",))
    assert (
        "its replicas need 1,000,001 MB on a rank, but only 1,000,000 MB are free"
    ) in seen.reported
    assert chosen(auto, without(job, much, ep=2 * much)).name == "fssdp"


def test_the_present_one_goes_where_it_fits_no_more_and_owner_is_left() -> None:
    auto = of_much(candidates=["fssdp"], margin=0.9)
    job = job_of(SKEWED, step=50, present="fssdp")
    assert chosen(auto, job).name == "fssdp"
    owner = chosen(auto, without(job, 0))
    assert (owner.name, owner.left_out) == ("ep", ("fssdp",))
    assert owner.expected_s > chosen(auto, job).expected_s


def test_of_many_layers_replicas_are_planned_by_what_is_free_for_all() -> None:
    """Where they are freed after forward, as much as in a run of few layers."""
    auto, job = Auto(candidates=["prophet"]), job_of(SKEWED)
    job = replace(job, free_bytes=8 * job.cost_groups[0].expert_bytes)  # two replicas of a layer
    few = chosen(auto, job).expected_s
    assert few < 0.99 * chosen(Auto(candidates=["ep"]), job).expected_s
    assert few > 1.01 * chosen(auto, replace(job, free_bytes=10**12)).expected_s
    assert job.past is not None
    thrice = replace(
        job,
        rows=job.rows * 3,
        owners=job.owners * 3,
        cost_groups=(replace(job.cost_groups[0], layers=tuple(range(24))),),
        window_s=job.window_s * 3,
        back_window_s=job.back_window_s * 3,
        pipelines=None,  # nothing but what esp is planned by
        past=replace(job.past, predicted=job.past.predicted * 3, came=job.past.came * 3),
    )
    assert chosen(auto, thrice).expected_s == pytest.approx(3 * few, rel=0.1)


# Its keys.


def read(**block: Any) -> Strategy:
    strategy = read_settings({"ds_moe_ext": {"enabled": True, "strategy": "auto", **block}})[1]
    assert strategy is not None
    return strategy


def test_candidates_have_the_keys_of_their_own_blocks() -> None:
    auto = read(fssdp={"replicas_per_rank": 3}, esp={"max_degree": 2})
    assert isinstance(auto, Auto)
    assert auto.strategies["fssdp"] == FullySharded(replicas_per_rank=3)
    over = auto.strategies["esp over fssdp"]
    assert isinstance(over, ExpertSharding)
    assert over.placing == FullySharded(replicas_per_rank=3)
    assert over.max_degree == 2
    assert not over.slices_gradients
    assert auto.strategies["ep"] == ExpertParallel()
    names = ["ep", "esp over fssdp, paper share", "fssdp, priced share"]
    both = read(fssdp={"replicas_per_rank": 3, "share": "planned"}, auto={"candidates": names})
    assert isinstance(both, Auto)
    laid = both.strategies[names[1]]
    assert isinstance(laid, ExpertSharding)
    assert laid.placing == FullySharded(replicas_per_rank=3, share="paper")
    assert both.strategies[names[2]] == FullySharded(replicas_per_rank=3, share="priced")


@pytest.mark.parametrize(
    ("block", "stated"),
    [
        ({"auto": {"candidates": ["ep", "fssd"]}}, r"candidates has 'fssd'.*did you mean 'fssdp'"),
        ({"auto": {"candidates": []}}, r"candidates is empty; name some of 'ep', 'fssdp'"),
        (
            {"auto": {"candidates": ["mine"]}},
            r"has 'mine', which is unknown; known: 'ep', 'esp', 'e",
        ),
        ({"auto": {"interval": 0}}, r"interval is 0; it must be at least 1"),
        ({"auto": {"margin": 1.0}}, r"margin is 1.0; it must be at least 0 and below 1"),
        ({"esp": {"schedule": "tutel"}}, r"esp.schedule is 'tutel', but ds_moe_ext.auto runs all"),
        ({"esp": {"all_to_all": "2dh"}}, r"esp.all_to_all is '2dh', but ds_moe_ext.auto runs all"),
        ({"ep": {"send_once": True}}, r"runs 'ep' without its keys.*leave out the block"),
        ({"strategy": "esp", "balance": "auto"}, r"balance is 'auto', which cannot place"),
    ],
)
def test_bad_keys_are_refused(block: dict[str, Any], stated: str) -> None:
    with pytest.raises(ValueError, match=stated):
        read(**block)


def test_pipelines_are_measured_only_where_one_is_a_candidate() -> None:
    assert Auto().intervals().measures
    assert not Auto(candidates=["ep", "fssdp"]).intervals().measures


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


def test_steps_that_take_much_longer_are_reported() -> None:
    times = times_of(8, [1.0] * 8 + [1.5] * 8)
    drifted = []
    for step in range(16):
        times.after_step(step, None)
        drifted.append(times.has_drifted)
    assert drifted.index(True) == 14
    assert sum(drifted) == 1


def test_strategies_that_plan_nothing_are_not_looked_at() -> None:
    assert StepTimes.of(Intervals(), torch.device("cpu"), None).every == 0
    assert StepTimes.of(Auto(interval=7).intervals(), torch.device("cpu"), None).every == 7
