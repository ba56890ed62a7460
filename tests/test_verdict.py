# SPDX-License-Identifier: Apache-2.0
"""The sentence that says whether a run gained: by records as runs of each kind leave them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.record import DeviceRecord, PaceRecord, RunRecord
from ds_moe_ext.report.summary import verdict
from ds_moe_ext.report.two_runs import Shown, page_beside
from tests.test_report import checked, copied, sound, worked
from tests.test_time_saved import EXPERTS, REPLICAS, UNKNOWN, pace, ranks

BALANCES = "the busiest EP rank had 1.39 times the mean without replicas and 1.32 with them"


def steps_of(seconds: float) -> PaceRecord:
    return pace(step_s_G=[seconds] * 5)


def run(
    seconds: Mapping[str, Sequence[float]], step_s: float, base: RunRecord | None = None
) -> RunRecord:
    """With one replica a step that saves 250 ms, where no other record is given."""
    reported = ranks(seconds, steps_of(step_s))
    return dataclasses.replace(copied() if base is None else base, ranks=reported)


def waiting(seconds: float) -> Mapping[str, Sequence[float]]:
    """Ranks wait so long for replicas, which travel for a second."""
    return {**EXPERTS, "forward:gather": (1.0, 1.0), "forward:join": (seconds, seconds)}


def test_a_gain() -> None:
    """250 ms less waiting and 50 ms for replicas: a step of 1 s would have taken 1.2 s."""
    assert verdict(run(waiting(0.05), 1.0)) == (
        f"1.20 times as fast as ep would have been, estimated: {BALANCES}"
    )


def test_replicas_that_cost_more_than_they_saved() -> None:
    """350 ms: the step would have taken 0.9 s."""
    assert verdict(run(waiting(0.35), 1.0)) == (
        f"no gain here: {BALANCES}; replicas cost more than they saved (0.90 times as fast as "
        "ep would have been, estimated)"
    )


def test_a_gain_that_hardly_counts() -> None:
    assert verdict(run(waiting(0.2), 100.0)) == (
        f"no gain here: {BALANCES}; that is negligible in a step (1.00 times as fast as ep "
        "would have been, estimated)"
    )


def test_replicas_that_relieved_nobody() -> None:
    worse = dataclasses.replace(
        copied(), ep_rank_rows_ILC=np.array([[[8, 0], [5, 5]], [[2, 2], [9, 1]]])
    )
    assert verdict(run(waiting(0.1), 1.0, worse)).startswith(
        "no gain here: the busiest EP rank had 1.39 times the mean without replicas and 1.45 "
        "with them; replicas did not reduce its load ("
    )


@pytest.mark.parametrize(
    ("waited_s", "begins", "expected"),
    [
        (0.05, "200 ms less a step than ep would have, estimated: ", ""),
        (0.35, "no gain here: ", "(100 ms more a step than ep would have, estimated)"),
    ],
)
def test_steps_whose_seconds_nobody_knows(waited_s: float, begins: str, expected: str) -> None:
    reported = verdict(run(waiting(waited_s), UNKNOWN))
    assert reported.startswith(begins) and reported.endswith(expected) and "nan" not in reported


def test_what_lies_over_another_is_held_against_itself_without_replicas() -> None:
    over = dataclasses.replace(run(waiting(0.05), 1.0), strategy="esp over fssdp")
    assert verdict(over).startswith("1.20 times as fast as esp would have been, estimated: ")


@pytest.mark.parametrize("reported", [None, ranks(EXPERTS, steps_of(1.0)), ranks({})])
def test_replicas_that_were_not_timed(reported: object) -> None:
    """In a very short run, whose ranks have exchanged reports nothing, too."""
    seen = dataclasses.replace(copied(), ranks=reported)
    assert verdict(seen) == (
        f"gain unknown, because no step with replicas was timed in 2 recorded steps: {BALANCES}"
    )


def plain(strategy: str = "ep") -> RunRecord:
    return dataclasses.replace(worked(), strategy=strategy)


def test_plain_expert_parallelism_says_what_replicas_could_gain() -> None:
    """Experts take 4 s on average, the busiest rank 1.325 times as much: 1.3 s are waited."""
    balance = float(worked().balance_IL().mean())
    assert balance == pytest.approx(1.325)
    assert verdict(run(EXPERTS, 6.5, plain())) == (
        "replicas could gain, a step at most 1.25 times as fast, estimated, if they cost "
        "nothing: the busiest EP rank had 1.32 times the mean"
    )
    assert verdict(run(EXPERTS, 130.0, plain())) == (
        "replicas have little to gain: the busiest EP rank had 1.32 times the mean; with "
        "perfect balance a step would be at most 1.01 times as fast, estimated"
    )


@pytest.mark.parametrize("step_s", [UNKNOWN, 1.0], ids=["unknown", "less than was waited"])
def test_plain_expert_parallelism_that_was_not_timed(step_s: float) -> None:
    unknown = (
        "gain of replicas unknown, because no time was measured in 2 recorded steps: the "
        "busiest EP rank had 1.32 times the mean"
    )
    assert verdict(run(EXPERTS, step_s, plain())) == verdict(plain()) == unknown


@pytest.mark.parametrize("strategy", ["esp", "zebra", "fssdp", "auto"])
def test_what_copied_nothing(strategy: str) -> None:
    reported = verdict(run(EXPERTS, 8.0, plain(strategy)))
    assert reported == (
        "no gain from replicas, because none was made in 2 recorded steps: the busiest EP "
        f"rank had 1.32 times the mean; to see what else {strategy} gained, run with ep "
        "and use ds-moe-ext compare"
    )


def test_nothing_recorded() -> None:
    empty = dataclasses.replace(
        worked(),
        steps_I=(),
        rows_ILE=worked().rows_ILE[:0],
        ep_rank_rows_ILC=worked().ep_rank_rows_ILC[:0],
    )
    assert verdict(empty) == "nothing to compare: no step was recorded"
    bare = dataclasses.replace(empty, layers=())
    assert verdict(bare) == "nothing to compare: no layer was replaced"


def test_a_cpu_is_no_measure() -> None:
    """Where seconds are predicted."""
    timed = ranks({**EXPERTS, **REPLICAS}, steps_of(1.0), device=DeviceRecord("cpu", 1))
    caveat = "; seconds on a CPU do not predict a cluster: shared cores"
    assert verdict(dataclasses.replace(copied(), ranks=timed)).endswith(caveat)
    assert verdict(dataclasses.replace(plain(), ranks=timed)).endswith("had 1.32 times the mean")
    slow = dataclasses.replace(timed, pace=steps_of(8.0))
    assert verdict(dataclasses.replace(plain(), ranks=slow)).endswith(caveat)


def test_pages_say_the_same() -> None:
    """It opens the page of a run, in large type, and stands on that of two."""
    seen = run(waiting(0.05), 1.0)
    page = checked(seen)
    assert page == page_of(seen)
    assert page.count('<p class="verdict">') == 1
    opened = f'<p class="verdict">1{verdict(seen)[1:]}.</p>'
    assert opened in page and page.index(opened) < page.index(
        "ranks waited 250 ms less".capitalize()
    )
    both = sound(page_beside(Shown("ours", seen), Shown("theirs", plain())))
    assert f"ours: {verdict(seen)}. theirs: {verdict(plain())}." in both
