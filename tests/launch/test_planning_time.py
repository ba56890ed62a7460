# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what happens between steps, on few ranks; and how long plans stay."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from planning_time import BLOCKS, CPU, NUM_WARM_UPS, OneRank, Parts, Sizes, measured, strategy_of

from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.hosts.steps.planning import BesideStep
from ds_moe_ext.moe.expert import Local
from ds_moe_ext.planning.load_models import zipf_steps
from ds_moe_ext.planning.strategy import LayerContext, Plan
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.task import EXPERT, ORDER, Op
from ds_moe_ext.strategies import prophet
from ds_moe_ext.strategies.fssdp import FullySharded

SIZES = Sizes(ranks=8, ranks_per_node=4, layers=3, experts=16, rows=4096, skew=1.0)
COPIED = {"overlap_degree": 4, "replicas_per_rank": 2, "reshard_interval": 0}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_strategy_is_taken_apart(name: str) -> None:
    rank = OneRank(strategy_of(name, {"fssdp": COPIED}), SIZES, Parts())
    figures = measured(rank, SIZES, 2)
    assert sum(figures.cpu_ms.values()) > 0
    assert (figures.replicas > 0) == (name != "ep")


def drawn() -> Iterator[np.ndarray]:
    """Loads of steps."""
    shape = SIZES.layers, SIZES.ranks, SIZES.experts
    return zipf_steps(shape, rows=SIZES.rows, skew=SIZES.skew)


def plans_of_steps(
    num_steps: int, name: str = "fssdp", loads: Iterable[np.ndarray] | None = None, **keys: int
) -> list[tuple[Plan, ...]]:
    """Behind each step of one rank."""
    given = {**COPIED, **keys} if name == "fssdp" else keys
    rank = OneRank(strategy_of(name, {name: given}), SIZES, Parts())
    loads = drawn() if loads is None else loads
    plans = []
    for step, rows_LCE in zip(range(num_steps), loads):
        rank.route(rows_LCE)
        rank.after_step(step)
        plans.append(tuple(layer.routed.layer_context.plan for layer in rank.layers))
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


def steps_with_plans(monkeypatch: pytest.MonkeyPatch, name: str, **keys: int) -> list[int]:
    """Of 26 steps behind those in which costs are measured: loads stay for 12, then move."""
    steps: list[int] = []
    first, last = NUM_WARM_UPS, NUM_WARM_UPS + 26

    def loads() -> Iterator[np.ndarray]:
        before, after = itertools.islice(drawn(), 2)
        for step in range(last):
            steps.append(step)
            yield before if step < first + 12 else after[..., ::-1]

    planned: set[int] = set()
    looked_for: Any = {"fssdp": (FullySharded, "plan"), "prophet": (prophet._Search, "_found")}
    owner, search = looked_for[name]
    real = getattr(owner, search)

    def counted(*given: Any) -> Any:
        planned.add(len(steps) - 1 - first)
        return real(*given)

    monkeypatch.setattr(owner, search, counted)
    plans_of_steps(last, name, loads(), **keys)
    return sorted(step for step in planned if step >= 0)


@pytest.mark.parametrize("name", ["fssdp", "prophet"])
def test_plans_are_looked_for_when_loads_have_moved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every ten steps; by the rows of the step in which they did."""
    *before, moved, after = steps_with_plans(monkeypatch, name)
    assert (moved, after) == (12, 22)
    assert all(later - earlier == 10 for earlier, later in itertools.pairwise(before))
    assert len(before) in (1, 2)


@pytest.mark.parametrize(
    ("name", "keys"), [("fssdp", {"plan_interval": 1}), ("prophet", {"frequency": 1})]
)
def test_plans_are_looked_for_each_step(
    name: str, keys: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a person says so."""
    assert steps_with_plans(monkeypatch, name, **keys) == [*range(26)]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fssdp", {}),
        ("fssdp", {"plan_interval": 2}),
        ("fssdp", {"reshard_interval": 3, "window": 2}),
        ("prophet", {}),
        ("prophet", {"frequency": 3}),
    ],
)
def test_plans_made_beside_the_step_are_those_made_after_it(
    name: str, keys: dict[str, int]
) -> None:
    beside = plans_of_steps(NUM_WARM_UPS + 4, name, **keys)
    with mock.patch.object(BesideStep, "taken", lambda step: None):
        after = plans_of_steps(NUM_WARM_UPS + 4, name, **keys)
    for one, other in zip(beside, after):
        for plan, same in zip(one, other):
            assert np.array_equal(plan.owner.holds_EC, same.owner.holds_EC)
            assert np.array_equal(plan.target.holds_EC, same.target.holds_EC)
            assert plan.share.describe() == same.share.describe()
            assert plan.carried == same.carried


def test_plans_that_follow_others_are_made_beside_the_step() -> None:
    """All of them, once; between steps they are only taken."""
    rank = OneRank(strategy_of("prophet", {"prophet": {"frequency": 1}}), SIZES, Parts())
    loads = drawn()
    for step, rows_LCE in zip(range(NUM_WARM_UPS), loads):
        rank.route(rows_LCE)
        rank.after_step(step)
    planner = mock.Mock(wraps=prophet.PLANNERS["prophet"])
    with mock.patch.object(prophet, "PLANNERS", {"prophet": planner}):
        rank.route(next(loads))
        assert planner.call_count == SIZES.layers
        rank.after_step(NUM_WARM_UPS)
    assert planner.call_count == SIZES.layers


def test_what_was_made_by_other_owners_or_of_other_rows_does_not_count() -> None:
    """As after a checkpoint was loaded between a pass and the end of its step."""
    rank = OneRank(strategy_of("fssdp", {"fssdp": COPIED}), SIZES, Parts())
    loads = drawn()
    for step, rows_LCE in zip(range(NUM_WARM_UPS), loads):
        rank.route(rows_LCE)
        rank.after_step(step)
    rank.route(next(loads))
    owners = [Placement(np.roll(owner.holds_EC, 1, axis=1)) for owner in rank.planning.job.owners]
    rank.planning.resume(owners, rank.planning.remembered_ILCE)
    rank.after_step(NUM_WARM_UPS)
    assert all(
        layer.routed.layer_context.plan.owner is owner for layer, owner in zip(rank.layers, owners)
    )


def reported_of_steps(num_steps: int, skew: float, **keys: Any) -> tuple[list[str], OneRank]:
    """Lines about owners, of one rank."""
    rank = OneRank(strategy_of("fssdp", {"fssdp": {**COPIED, **keys}}), SIZES, Parts())
    lines: list[str] = []
    rank.planning.log = lines.append
    loads = zipf_steps((SIZES.layers, SIZES.ranks, SIZES.experts), rows=SIZES.rows, skew=skew)
    for step, rows_LCE in zip(range(num_steps), loads):
        rank.route(rows_LCE)
        rank.after_step(step)
    return [line for line in lines if "new owner" in line], rank


def test_owners_that_change_are_reported_with_what_they_gain() -> None:
    (line,), rank = reported_of_steps(60, skew=1.0, reshard_interval=50, share="paper")
    found = re.fullmatch(
        r"(\d+) experts have moved to new owners, within \d+ ms; predicted expert time (\S+) "
        r"ms "
        r"a step before, (\S+) ms now: (\S+) ms in 50 steps, for (\S+) ms of transfers",
        line,
    )
    assert found is not None, line
    moved, before_ms, now_ms, gained_ms, cost_ms = map(float, found.groups())
    first = even_owners([SIZES.experts] * SIZES.layers, SIZES.ranks)
    owners = [layer.routed.layer_context.plan.owner for layer in rank.layers]
    assert moved == sum(int((a.owner_E != b.owner_E).sum()) for a, b in zip(first, owners)) > 0
    assert gained_ms == pytest.approx(50 * (before_ms - now_ms), rel=0.2)
    assert gained_ms > cost_ms > 0


def test_owners_that_stay_are_reported_once() -> None:
    (line,), _ = reported_of_steps(12, skew=1.0, reshard_interval=1)
    assert line.startswith("no expert moves to a new owner: predicted expert time ")
    assert line.endswith("no move would save more in 1 steps than it costs")
    by_paper, _ = reported_of_steps(12, skew=1.0, reshard_interval=1, resharding="paper")
    assert len(by_paper) > 5  # before costs are known, too: of these nothing is expected
    assert re.fullmatch(r"\d+ experts have moved to new owners, within \d+ ms", by_paper[0])
    assert "in 1 steps, for" in by_paper[-1]


@dataclass(frozen=True)
class Varied(FullySharded):
    """Layers have stages of their own while nothing is copied, if asked."""

    has_own: bool = False

    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        return (
            {EXPERT: Local(lambda x: x)}
            if self.has_own and not layer_context.plan.has_replicas
            else {}
        )


@pytest.mark.parametrize("has_own", [False, True])
def test_programs_stay_while_plans_have_one_shape(has_own: bool) -> None:
    strategy = Varied(**COPIED, has_own=has_own)
    rank = OneRank(strategy, SIZES, Parts())
    loads = drawn()
    before = None
    for step, rows_LCE in zip(range(NUM_WARM_UPS + 2), loads):
        rank.route(rows_LCE)
        rank.after_step(step)
        routed = rank.layers[0].routed
        plan, program = routed.layer_context.plan, routed.program(CPU)
        present = program.layer_stages.stages[ORDER]
        assert present.stage.destination.target is plan.target
        assert isinstance(program.layer_stages.stages[EXPERT], Local) == bool(
            strategy.stages(routed.layer_context)
        )
        if before is not None:
            had_replicas, previous = before
            stays = had_replicas == plan.has_replicas and not strategy.stages(routed.layer_context)
            assert (program is previous) == stays
        before = plan.has_replicas, program
    assert plan.has_replicas
