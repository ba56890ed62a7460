# SPDX-License-Identifier: Apache-2.0
"""Scalars for a monitor, by name. Pure: no ranks."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ds_moe_ext.hosts.steps.training_run import Monitor
from ds_moe_ext.moe.observation import Pass, Rows
from ds_moe_ext.planning.strategy import Choice
from ds_moe_ext.report.rank_figures import NAN, Point
from ds_moe_ext.report.recorder import Recorder, scalars_of
from tests.test_recorder import FakeLayer, plan_of

NEWS = Point(9, 2.0, 96.0, 4.5, exposed_s=0.5, waited_s=0.25, sent_s=0.125)


def recorded(choice: Choice | None = None) -> Recorder:
    """After a step of two layers: the copy of the first balances it, the second has none."""
    copied = plan_of([0, 1], [[0, 1], [0, 0]])
    plain = plan_of([0, 1], [[0, 0], [0, 0]])
    plans = [dataclasses.replace(plan, choice=choice) for plan in (copied, plain)]
    layers: list[Any] = [FakeLayer(f"m.{index}", plan) for index, plan in enumerate(plans)]
    recorder = Recorder("fssdp", 2, layers)
    rows_CE = np.array([[4, 0], [4, 0]])
    rows = [
        Rows(rows_CE, plan.share.computed_C(rows_CE), (Pass(rows_CE, plan.destination),))
        for plan in plans
    ]
    recorder.after_step(0, rows)
    return recorder


def test_scalars_of_a_step() -> None:
    own = {
        "ds_moe_ext/balance/mean": 1.5,
        "ds_moe_ext/balance/busiest_layer": 2.0,
        "ds_moe_ext/balance/of/m.0": 1.0,
        "ds_moe_ext/balance/of/m.1": 2.0,
        "ds_moe_ext/replicas": 1.0,
    }
    assert scalars_of(recorded(), None) == own
    assert scalars_of(recorded(Choice("fssdp", 1.75, "it is cheaper")), NEWS) == {
        **own,
        "ds_moe_ext/expected_step_s": 1.75,
        "ds_moe_ext/step_s": 2.0,
        "ds_moe_ext/tokens_per_s": 96.0,
        "ds_moe_ext/exposed_s": 0.5,
        "ds_moe_ext/exposed_share": 0.25,
        "ds_moe_ext/waited_s": 0.25,
        "ds_moe_ext/sent_s": 0.125,
    }


def test_what_is_not_known_is_not_shown() -> None:
    found = scalars_of(recorded(), NEWS._replace(tokens_per_s=NAN))
    assert "ds_moe_ext/tokens_per_s" not in found and "ds_moe_ext/step_s" in found


def test_a_monitor_has_news_once_and_warns_once() -> None:
    recorder, monitor, write = recorded(), Monitor(is_on=True), mock.Mock()
    recorder.ranks = mock.Mock(latest=NEWS)
    for at in (10, 20):
        monitor.show(recorder, write, at)
    (first,), (second,) = (call.args for call in write.mock_calls)
    assert ("ds_moe_ext/step_s", 2.0, 10) in first
    assert ("ds_moe_ext/replicas", 1.0, 20) in second
    assert all(not name.endswith("step_s") for name, _, _ in second)
    fails = mock.Mock(side_effect=OSError("no space left"))
    with pytest.warns(UserWarning, match="the monitor has failed: OSError"):
        monitor.show(recorder, fails, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.show(recorder, fails, 40)
    assert len(fails.mock_calls) == 2
