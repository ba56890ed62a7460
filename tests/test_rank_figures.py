# SPDX-License-Identifier: Apache-2.0
"""What ranks report to each other, worked out by hand. Pure: no ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.moe.observation import Pass, Rows
from ds_moe_ext.planning.strategy import Destination
from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.rank_figures import (
    MOST_POINTS,
    NAN,
    Exchanged,
    Memory,
    OwnSteps,
    RankFigures,
    RanksSeen,
    exchanges_s,
    exposed_s,
)
from ds_moe_ext.report.record import BadScores, RanksRecord, RunRecord, TracedTask
from ds_moe_ext.report.summary import ranks_line, scores_line
from tests.test_report import worked


def traced_task(
    name: str, stream: str, start_s: float, end_s: float, phase: str = "forward"
) -> TracedTask:
    return TracedTask(name, stream, phase, "m.0", "0", start_s, end_s)


STEP = (
    traced_task("gate", "compute", 0.0, 1.0),
    traced_task("dispatch", "inter", 1.0, 3.0),  # hidden for a second
    traced_task("expert", "compute", 2.0, 4.0),
    traced_task("join", "compute", 4.0, 4.5),  # replicas were late
    traced_task("gather", "param", 0.0, 4.5),  # beside all of it
    traced_task("combine", "inter", 5.0, 6.0),
    traced_task("etp_gather", "intra", 5.5, 7.0),  # beside that
    traced_task("gradients", "inter", 8.0, 9.0, "backward"),  # the host computes meanwhile
)


def test_communication_that_nothing_hides() -> None:
    assert exposed_s(STEP) == pytest.approx(1.0 + 0.5 + 2.0)
    assert exposed_s(STEP[:1]) == exposed_s(()) == 0.0


def test_exchanges_are_in_the_order_of_their_stream() -> None:
    later = traced_task("dispatch", "inter", 0.5, 0.75)
    assert exchanges_s((*STEP, later)) == pytest.approx((0.25, 2.0, 1.0))


@pytest.mark.parametrize(("copied", "stayed"), [([], False), ([0], False), ([0, 1], True)])
def test_rows_stay_where_all_have_all(copied: list[int], stayed: bool) -> None:
    owner = Placement.block(2, 2)
    target = owner.with_replicas(np.stack([np.isin([0, 1], copied)] * 2, axis=1))
    nothing_CE = np.zeros((2, 2), dtype=np.int64)
    passes = tuple(
        Pass(nothing_CE, Destination(each, LocalElseOwner(owner, each)))
        for each in (target, Placement(np.ones((2, 2), dtype=bool)))
    )
    assert Rows(nothing_CE, np.zeros(2, dtype=np.int64), passes).all_stayed == stayed
    assert not Rows(nothing_CE, np.zeros(2, dtype=np.int64), ()).all_stayed


def test_where_nothing_is_exchanged_nobody_comes_last() -> None:
    other = dataclasses.replace(traced_task("dispatch", "inter", 7.0, 7.5), layer="m.1")
    assert exchanges_s((*STEP, other), {"m.0"}) == pytest.approx((0.5,))
    own = OwnSteps(0)
    own.saw_tasks(STEP, {"m.0"})
    assert own.reported(1.0).exchanges_s == ()


def figures(rank: int, exchanges: Sequence[float] = (), **other: object) -> RankFigures:
    base = RankFigures(rank, 2.0, 64.0, NAN, Memory(0, 0, 1), {}, 0.0, tuple(exchanges))
    return dataclasses.replace(base, **other)  # type: ignore[arg-type]


def test_who_comes_last_waits_least() -> None:
    # Ranks 4 and 6 exchange rows, and 5 with 7. To the first exchange rank 6 came 3 s late, to the
    # second rank 4 did 1 s late; 7 was always the last.
    lines = [
        figures(4, (5.0, 1.0)),
        figures(5, (3.0, 3.0)),
        figures(6, (2.0, 2.0)),
        figures(7, (1.0, 1.0)),
    ]
    waited_s_R, sent_s_R, num_last_R = Exchanged.of(lines, [[4, 6], [5, 7]])
    assert waited_s_R.tolist() == [3.0, 4.0, 1.0, 0.0]
    assert sent_s_R.tolist() == [3.0, 2.0, 3.0, 2.0]
    assert num_last_R.tolist() == [1, 0, 1, 2]


def test_ranks_that_saw_unlike_exchanges_are_not_compared() -> None:
    lines = [figures(0, (1.0, 1.0)), figures(1, (1.0,)), figures(2, (4.0,))]
    for partners in ([[0, 1]], [[2]], [[2, 3]]):
        assert not any(each.any() for each in Exchanged.of(lines, partners))


class Clock:
    """Steps take a second; every fifth, at which a run saves, takes a minute."""

    def __init__(self) -> None:
        self.now_s, self.calls = 0.0, 0

    def __call__(self) -> float:
        self.calls += 1
        self.now_s += 60.0 if self.calls % 5 == 0 else 1.0
        return self.now_s


def run_of(num_steps: int) -> RanksSeen:
    """Of rank 1, beside a rank 0 that is half as fast."""

    def gather(own: RankFigures) -> list[RankFigures]:
        slow = dataclasses.replace(own, rank=0, step_s=2 * own.step_s, loss=NAN, tokens=32.0)
        return [own, dataclasses.replace(slow, memory=Memory(3, 4, 5), seconds={})]

    seen = RanksSeen(OwnSteps(1, Clock()), [[0, 1]], gather)
    for step in range(num_steps):
        seen.own.saw_loss(torch.tensor(float(step)))
        seen.own.saw_loss(torch.tensor(step + 1.0))
        if step % 10 == 5:
            seen.own.saw_tasks(STEP)
        seen.after_step(step, 64.0)
    return seen


def record_of(num_steps: int) -> RanksRecord:
    record = run_of(num_steps).record()
    assert record is not None
    return record


def test_a_run_of_two_ranks() -> None:
    assert run_of(9).record() is None and run_of(9).latest is None
    ranks = record_of(29)
    assert ranks.ranks_R == (0, 1) and ranks.pace.steps_G == (9, 19)
    assert ranks.pace.step_s_G.tolist() == [2.0, 2.0]
    assert ranks.pace.tokens_per_s_G.tolist() == [48.0, 48.0]
    assert ranks.pace.loss_G.tolist() == [9.5, 19.5]
    assert ranks.allocated_R.tolist() == [3, 0] and ranks.reserved_R.tolist() == [4, 0]
    assert ranks.pace.reserved_G.tolist() == [4.0, 4.0] and ranks.ep_rank_R == (0, 1)
    assert ranks.resident_R[0] == 5 and ranks.resident_R[1] > 1 << 20
    row = ranks.kinds_K.index("forward:expert")
    assert ranks.seconds_KR[row].tolist() == [0.0, 2.0]
    assert ranks.exposed_s_R.tolist() == [3.5, 3.5]
    assert ranks.num_exchanges == 4 and ranks.num_last_R.tolist() == [4, 0]
    assert ranks.sent_s_R.tolist() == [3.0, 3.0] and not ranks.waited_s_R.any()


def test_an_infinite_loss_is_none() -> None:
    """As of fp16, which leaves out the step: pages and JSON have no place for it."""
    seen = run_of(9)
    seen.own.saw_loss(torch.tensor(float("inf")))
    seen.after_step(9, 64.0)
    record = seen.record()
    assert record is not None and np.isnan(record.pace.loss_G).all()
    run = dataclasses.replace(worked(), ranks=record)
    assert "Infinity" not in run.to_json() and page_of(run)


def test_a_long_run_has_few_points() -> None:
    steps = record_of(40_000).pace.steps_G
    assert MOST_POINTS // 2 <= len(steps) <= MOST_POINTS
    assert len({later - step for step, later in pairwise(steps)}) == 1


def with_ranks() -> RunRecord:
    return dataclasses.replace(worked(), ranks=record_of(20))


def test_a_run_that_has_just_gone_on() -> None:
    """Its first step is one behind which ranks report to each other: nobody knows how long it
    took."""
    seen = RanksSeen(OwnSteps(0), [[0]], lambda own: [own])
    seen.after_step(159, 64.0)
    ranks = seen.record()
    assert ranks is not None and np.isnan(ranks.pace.step_s_G).all()
    run = RunRecord.from_json(dataclasses.replace(worked(), ranks=ranks).to_json())
    assert ranks_line(run).startswith("rank 0 uses the most memory, ")


def test_the_first_scores_that_are_no_numbers() -> None:
    """Of all ranks, in the order of steps and layers; later ones are not reported."""
    good, bad = torch.tensor(3.0), torch.tensor(torch.inf)
    ranks = [OwnSteps(0), OwnSteps(1)]
    lines: list[BadScores] = []
    seen = RanksSeen(
        ranks[0],
        [[0, 1]],
        lambda own: [own, ranks[1].reported(1.0)],
        on_bad_scores=lines.append,
    )
    for step in range(20):
        ranks[0].saw_scores(step, [good, None, bad if step > 5 else good])
        ranks[1].saw_scores(step, [good, bad * 0 if step >= 5 else good, good])
        seen.after_step(step, 1.0)
    assert lines == [BadScores(step=5, layer=1, rank=1)]
    ranks_record = seen.record()
    assert ranks_record is not None and ranks_record.bad_scores == lines[0]
    run = RunRecord.from_json(dataclasses.replace(worked(), ranks=ranks_record).to_json())
    assert run.ranks is not None and run.ranks.bad_scores == lines[0]
    assert scores_line(run).startswith(
        "router scores of m.1.a were not finite (NaN or inf) in step 5"
    )
    assert scores_line(worked()) == ""
    hostile = run.to_json().replace('"bad_scores": [5, 1, 1]', '"bad_scores": [5, 2, 1]')
    with pytest.raises(ValueError, match="names layer 2 of 2"):
        RunRecord.from_json(hostile)


def test_one_point_has_one_loss() -> None:
    record = with_ranks()
    ranks = record.ranks
    assert ranks is not None
    loss_G = np.where(np.arange(len(ranks.pace.loss_G)) == 0, ranks.pace.loss_G, np.nan)
    pace = dataclasses.replace(ranks.pace, loss_G=loss_G)
    one = dataclasses.replace(record, ranks=dataclasses.replace(ranks, pace=pace))
    assert "loss 9.5 in step 9, counted from 0; " in ranks_line(one)
