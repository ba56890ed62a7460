# SPDX-License-Identifier: Apache-2.0
"""What a model of costs predicted beside what ranks saw: worked by hand, without ranks.

Shape letters: I steps, L layers, N steps and layers that count, C EP ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.hosts.steps import planning
from ds_moe_ext.hosts.steps.costs import (
    CHECKED,
    TRIED,
    Correction,
    Seen,
    _corrected,
    exchange_s,
)
from ds_moe_ext.hosts.steps.planning import Checks, term_of
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.planning.exchange_costs import BARE, ExchangeFit, LinkPrices
from ds_moe_ext.planning.strategy import ROWS_ALONE, CostGroup, Forecast, Job, LayerContext, Plan

OWNERS = tuple(Placement.owned_by(np.array([0, 1]), 2) for _ in range(2))
JOB = Job.at_start(OWNERS, np.array([0, 0]))
LAYOUT = ParallelLayout(Grid(2, 2), 0)
PLANS = tuple(Plan(owner, owner, LocalElseOwner(owner, owner)) for owner in OWNERS)

Model = Callable[[int, np.ndarray], Forecast | None]


# One term.


def test_a_term_worked_by_hand() -> None:
    term = term_of("experts", np.array([[1.0, 4.0], [9.0, 2.0]]), np.array([[2, 4], [10, 1.0]]))
    assert (term.name, term.predicted_s, term.found_s) == ("experts", 4.0, 4.25)
    assert term.error == pytest.approx((0.5 + 0.0 + 0.1 + 1.0) / 4)


TIMES = arrays(float, (3, 2), elements=st.floats(1e-6, 1e3))


@settings(deadline=None, derandomize=True)
@given(TIMES, st.floats(0, 8), arrays(bool, (3, 2)))
def test_a_model_wrong_by_one_factor_has_that_error(
    found_IL: np.ndarray, factor: float, happened_IL: np.ndarray
) -> None:
    happened_IL[0, 0] = True
    term = term_of("experts", factor * found_IL, np.where(happened_IL, found_IL, 0.0))
    assert term.error == pytest.approx(abs(factor - 1), abs=1e-9)
    assert term.predicted_s == pytest.approx(factor * term.found_s)
    assert term.found_s == pytest.approx(found_IL[happened_IL].mean())


# Steps.


class Fakes:
    """Checks of two layers on two ranks; this is rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
        self.asked: list[tuple[Job, Plan]] = []
        self.next_step = 100
        replicas = SimpleNamespace(like=(torch.zeros(1),))
        layers: Any = [
            SimpleNamespace(
                routed=SimpleNamespace(
                    layer_context=LayerContext(plan, LAYOUT, 0), replicas=replicas
                )
            )
            for plan in PLANS
        ]

        def forecast(job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
            self.asked.append((job, plan))
            return model(layer, rows_CE)

        strategy: Any = SimpleNamespace(forecast=forecast)
        self.checks = Checks(strategy, layers)
        monkeypatch.setattr(planning, "of_all_ranks", two_ranks)

    def are_tried(self) -> None:
        """The steps that come before those to be checked."""
        for _ in TRIED:
            self.step(num_rows=1, seen=[FIRST, SECOND])
        self.asked.clear()
        self.next_step = 100

    def step(self, *, num_rows: int, seen: Sequence[Seen], job: Job = JOB) -> None:
        """A step in which each layer routed so many rows from each sender to each expert."""
        rows_CE = np.full((2, 2), num_rows)
        rows = [Rows(rows_CE, rows_CE.sum(axis=0), ()) for _ in PLANS]
        self.checks.after_step(self.next_step, job, rows, seen)
        self.next_step += 1


def two_ranks(
    seen: Sequence[Seen], layout: ParallelLayout, device: torch.device
) -> list[list[Seen]]:
    """Rank 1 waits less, computes longer, and sees the same copies; no gradients come to it."""
    others = [
        replace(
            each,
            dispatch_s=each.dispatch_s / 2,
            expert_s=3 * each.expert_s,
            reduce_s=0.0,
        )
        for each in seen
    ]
    return [list(seen), others]


def by_rows(layer: int, rows_CE: np.ndarray) -> Forecast:
    """A second a row for exchanges, half of that for experts; replicas from the second layer on."""
    total = float(rows_CE.sum())
    return Forecast(total, total / 2, 6.0 * layer, 2.0 * layer)


FIRST = Seen(dispatch_s=8.0, expert_s=1.0, most_received=4, rows=8)
SECOND = Seen(dispatch_s=16.0, expert_s=2.0, gather_s=4.0, reduce_s=8.0)


def test_steps_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch, by_rows)
    fakes.are_tried()
    for number, _ in enumerate(CHECKED):
        assert fakes.checks.terms == ()  # before all steps have ended
        fakes.step(num_rows=number + 1, seen=[FIRST, SECOND])
    # Each layer has 4, 8 and 12 rows. Its exchange takes 4 and 8 s on the rank that waits less,
    # its experts 3 and 6 s on the slower one; replicas are of the second layer only.
    found = {term.name: (term.predicted_s, term.found_s, term.error) for term in fakes.checks.terms}
    assert found == {
        "exchange of rows": pytest.approx((8.0, 6.0, (0 + 1 + 2 + 0.5 + 0 + 0.5) / 6)),
        "experts": pytest.approx((4.0, 4.5, (1 / 3 + 1 / 3 + 1 + 2 / 3 + 1 / 3 + 0) / 6)),
        "replicas": pytest.approx((6.0, 4.0, 0.5)),
        "their gradients": pytest.approx((2.0, 4.0, 0.5)),
    }
    assert {term.steps for term in fakes.checks.terms} == {(100, 101, 102)}
    assert fakes.asked == [(JOB, plan) for _ in CHECKED for plan in PLANS]
    terms = fakes.checks.terms
    fakes.step(num_rows=1, seen=[FIRST, SECOND])
    assert fakes.checks.terms is terms  # they stay


def test_terms_that_never_happened_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch, lambda layer, rows_CE: Forecast(1.0, 1.0, 0.0, 5.0))
    fakes.are_tried()
    for _ in CHECKED:
        fakes.step(num_rows=1, seen=[FIRST, replace(SECOND, reduce_s=0.0)])
    # Gradients that were expected never came; replicas that the model forgot do show.
    assert [term.name for term in fakes.checks.terms] == ["exchange of rows", "experts", "replicas"]
    assert fakes.checks.terms[2].error == 1.0


def test_steps_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch, by_rows)
    fakes.are_tried()
    for _ in CHECKED:
        fakes.step(num_rows=1, seen=())  # nobody looked
        fakes.step(num_rows=1, seen=[FIRST, SECOND], job=replace(JOB, accumulates=True))
    assert fakes.checks.terms == () and fakes.asked == []
    for _ in CHECKED:
        fakes.step(num_rows=1, seen=[FIRST, SECOND])
    assert fakes.checks.terms[0].predicted_s == 4.0


@pytest.mark.parametrize("known", [[], [1]])
def test_a_model_that_does_not_know_all_layers_is_not_checked(
    known: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(layer: int, rows_CE: np.ndarray) -> Forecast | None:
        return by_rows(layer, rows_CE) if layer in known else None

    fakes = Fakes(monkeypatch, model)
    for _ in range(2 * len(CHECKED)):
        fakes.step(num_rows=1, seen=[FIRST, SECOND])
        assert fakes.checks.correction is None
    assert len(fakes.asked) == 4 * len(CHECKED) and fakes.checks.terms == ()


def test_how_fast_replicas_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated are 6 and 2 s of the second layer, found 8 and, as a mean of the ranks, 4."""
    fakes = Fakes(monkeypatch, by_rows)
    speeds = []
    for _ in range(2 * len(TRIED)):
        fakes.step(num_rows=1, seen=[FIRST, replace(SECOND, gather_s=8.0)])
        speeds.append(fakes.checks.correction and fakes.checks.correction.copy_speed)
    assert speeds == [None, None, pytest.approx(8 / 12), None, None, None]


def test_what_is_measured_again_is_corrected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch, by_rows)
    fakes.are_tried()
    for _ in CHECKED:
        fakes.step(num_rows=1, seen=[FIRST, SECOND])
    terms = fakes.checks.terms
    fakes.step(num_rows=1, seen=[FIRST, SECOND])  # of what was measured before
    fakes.checks.begin_anew()
    speeds = []
    for _ in TRIED:
        fakes.step(num_rows=1, seen=[FIRST, replace(SECOND, gather_s=20.0)])
        speeds.append(fakes.checks.correction and fakes.checks.correction.copy_speed)
    assert speeds == [None, None, pytest.approx(8 / 24)]
    assert fakes.checks.terms is terms and terms


@pytest.mark.parametrize("replica_bytes", [0.0, 100.0])
def test_replicas_are_corrected_once_however_they_travel(replica_bytes: float) -> None:
    """Plain ones weigh 400 bytes. Half as fast as was thought, they take twice as long, by links as
    without."""
    links = LinkPrices(near_bytes_per_s=10.0, far_bytes_per_s=10.0, node_bytes_per_s=10.0)
    copy_s = (replica_bytes or 400.0) / 10.0
    cost_group = CostGroup(
        layers=(0,),
        prices=replace(ROWS_ALONE, copy_s=copy_s),
        expert_bytes=400,
        replica_bytes=replica_bytes,
        links=links,
    )
    (owner, _), node_C = OWNERS, np.array([0, 1])
    everywhere = owner.with_replicas(np.ones_like(owner.holds_EC))
    found = _corrected(cost_group, Correction(0.5, BARE))
    assert found.copy_bytes_per_s == pytest.approx(5.0)
    for before, after in (
        (cost_group, found),
        (replace(cost_group, links=None), replace(found, links=None)),
    ):
        assert before.replicas_s(owner, everywhere, node_C) == pytest.approx(copy_s)
        assert after.replicas_s(owner, everywhere, node_C) == pytest.approx(2 * copy_s)


def test_what_exchanges_take_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated are 4 s for four trips of a layer; found 4 s and 8 s, where the rank took them that
    waited less: none more, and one each."""
    fakes = Fakes(monkeypatch, by_rows)
    for _ in TRIED:
        fakes.step(num_rows=1, seen=[FIRST, SECOND])
    assert fakes.checks.correction is not None
    assert fakes.checks.correction.exchange_fit == ExchangeFit(start_s=0.5)


def test_each_exchange_has_a_last_rank_of_its_own() -> None:
    first = Seen(dispatch_s=1.0, combine_s=5.0, combine_back_s=2.0, dispatch_back_s=3.0)
    other = Seen(dispatch_s=4.0, combine_s=2.0, combine_back_s=2.0, dispatch_back_s=2.5)
    assert exchange_s([first, other]) == 1.0 + 2.0 + 2.0 + 2.5


def test_without_replicas_their_speed_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch, by_rows)
    for _ in TRIED:
        fakes.step(num_rows=1, seen=[FIRST, FIRST])
    assert fakes.checks.correction is not None
    assert fakes.checks.correction.copy_speed is None


# What a person is shown.
