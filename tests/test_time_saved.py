# SPDX-License-Identifier: Apache-2.0
"""What a run says of its seconds, by numbers worked out by hand. Pure: no ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from ds_moe_ext.report.over_steps import paces_of
from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.record import (
    ChoiceRecord,
    DeviceRecord,
    PaceRecord,
    PlacementRecord,
    RanksRecord,
    RunRecord,
)
from ds_moe_ext.report.summary import (
    choice_line,
    found_s,
    no_measure,
    saved_line,
    saved_of,
    took_line,
    typical,
)
from ds_moe_ext.report.two_runs import Shown, page_beside
from tests.test_report import UNKNOWN, checked, copied, layer, pictures, record, sound, worked

EXPERTS = {"forward:expert": (2.0, 0.0), "backward:expert": (4.0, 2.0)}  # 4 s on average
REPLICAS = {
    "forward:gather": (0.5, 0.1),
    "backward:reduction": (0.3, 0.1),  # with those 0.5 s on average
    "forward:join": (0.125, 0.075),
}
STEPS = (9, 19, 29, 39, 49)


def pace(steps: Sequence[int] = STEPS, **known: Sequence[float]) -> PaceRecord:
    """Of which only some is known."""
    names = [each.name for each in dataclasses.fields(PaceRecord)][1:]
    unknown = [UNKNOWN] * len(steps)
    return PaceRecord(tuple(steps), *(np.array(known.get(name, unknown)) for name in names))


def ranks(
    seconds: Mapping[str, Sequence[float]] = EXPERTS,
    over_steps: PaceRecord | None = None,
    **other: object,
) -> RanksRecord:
    """Two of them, of which the second was the last to 6 of 8 exchanges."""
    base = RanksRecord(
        ranks_R=(0, 1),
        allocated_R=np.zeros(2, dtype=np.int64),
        reserved_R=np.zeros(2, dtype=np.int64),
        resident_R=np.array([3 << 20, 2 << 20]),
        kinds_K=tuple(seconds),
        seconds_KR=np.array([*seconds.values()]).reshape(len(seconds), 2),
        exposed_s_R=np.array([1.0, 2.0]),
        waited_s_R=np.array([0.75, 0.25]),
        sent_s_R=np.array([0.5, 0.5]),
        num_last_R=np.array([2, 6]),
        num_exchanges=8,
        pace=pace() if over_steps is None else over_steps,
    )
    return dataclasses.replace(base, **other)  # type: ignore[arg-type]


def run(
    seconds: Mapping[str, Sequence[float]] | None = None, device: DeviceRecord | None = None
) -> RunRecord:
    """With one replica a step, of balance 1.3875 at the owner and 1.325 as computed."""
    reported = ranks({**EXPERTS, **REPLICAS} if seconds is None else seconds, device=device)
    return dataclasses.replace(copied(), ranks=reported)


def test_what_replicas_saved_by_hand() -> None:
    saved = saved_of(run())
    assert saved is not None
    assert saved == pytest.approx((4.0, 1.3875, 1.325, 0.5, 0.1))
    assert saved.saved_s == pytest.approx(0.25)
    assert saved_line(run()) == (
        "ranks waited 250 ms less in each step than without replicas (strategy ep) "
        "(estimated from this run's own 4 s of expert time per rank, times balance 1.39 "
        "less 1.32); transfers of replicas and their gradients took 500 ms, of which ranks "
        "waited 100 ms in the layers (measured): if the rest were not hidden, replicas would "
        "have cost more than they saved"
    )


def test_it_is_the_waiting_of_a_rank_in_layers_whose_seconds_scale_with_rows() -> None:
    rng = np.random.default_rng(0)
    owner_LC, computed_LC = rng.integers(1, 99, (2, 5, 4)).astype(float)
    computed_LC *= owner_LC.sum() / (5 * computed_LC.sum(axis=1, keepdims=True))
    owner_LC *= computed_LC[0].sum() / owner_LC.sum(axis=1, keepdims=True)  # as many in each layer
    second_a_row = 1e-3
    waits = [
        second_a_row * (rows_LC.max(axis=1) - rows_LC.mean(axis=1)).sum()
        for rows_LC in (owner_LC, computed_LC)
    ]
    layers = tuple(layer(f"m.{index}", (0, 1, 2, 3)) for index in range(5))
    plain = record(layers, np.ones((1, 5, 4), dtype=np.int64), num_ep_ranks=4)
    placements = PlacementRecord(
        np.ones((1, 5, 4), dtype=np.int64), owner_LC[None], (), 10, (((),) * 4,) * 5
    )
    seconds_R = second_a_row * computed_LC.sum(axis=0)
    reported = dataclasses.replace(ranks(), kinds_K=("forward:expert",), seconds_KR=seconds_R[None])
    seen = dataclasses.replace(
        plain, ep_rank_rows_ILC=computed_LC[None], placements=placements, ranks=reported
    )
    saved = saved_of(seen)
    assert saved is not None
    assert saved.saved_s == pytest.approx(waits[0] - waits[1], abs=1e-12)


@pytest.mark.parametrize(
    ("travelled_s", "waited_s", "ending"),
    [
        (0.2, 0.1, "of which ranks waited 100 ms in the layers (measured)"),
        (0.5, 0.3, "in the layers (measured): replicas cost more than they saved"),
    ],
)
def test_what_replicas_cost(travelled_s: float, waited_s: float, ending: str) -> None:
    both = {"forward:gather": (travelled_s,) * 2, "forward:join": (waited_s,) * 2}
    assert saved_line(run({**EXPERTS, **both})).endswith(ending)


def test_replicas_whose_steps_were_not_timed() -> None:
    unknown = "; no step with replicas was timed, so their cost is unknown"
    assert saved_line(run(EXPERTS)).endswith(unknown)


def test_replicas_that_made_it_worse() -> None:
    seen = run()
    seen = dataclasses.replace(
        seen, ep_rank_rows_ILC=np.array([[[8, 0], [5, 5]], [[2, 2], [9, 1]]])
    )
    reported = saved_line(seen)
    assert reported.startswith("replicas did not reduce waiting for experts (estimated ")
    assert reported.endswith("(measured): replicas cost more than they saved")


def test_ranks_on_a_cpu_are_no_measure() -> None:
    assert no_measure(None, 2) == no_measure(DeviceRecord("NVIDIA H100", 1), 2) == ""
    shared, enough = DeviceRecord("cpu", 1), DeviceRecord("cpu", 2)
    assert (no_measure(shared, 2), no_measure(enough, 2)) == ("shared cores", "no network")
    caveat = "; on a CPU neither predicts a cluster: shared cores"
    assert saved_line(run(device=shared)) == saved_line(run()) + caveat
    assert "not predict a cluster" not in page_of(run())


def test_nothing_is_said_of_what_is_not_known() -> None:
    reported = dataclasses.replace(worked(), ranks=ranks())
    for seen in (worked(), reported, copied(), run({}), run({"forward:join": (1.0, 1.0)})):
        assert saved_line(seen) == took_line(seen) == choice_line(seen) == ""
        assert "Time, loss and memory" not in checked(seen)
    assert np.isnan(typical(np.array([UNKNOWN]))) and np.isnan(typical(np.array([])))


# Over the steps.

PACE = pace(
    step_s_G=[UNKNOWN, 3.0, 1.0, 2.0, 5.0],
    tokens_per_s_G=[UNKNOWN, 10.0, 30.0, 15.0, 6.0],
    loss_G=[4.0, 3.0, UNKNOWN, 2.0, 1.5],
    resident_G=[1024.0, 2048.0, 2048.0, 2048.0, 3072.0],
    waited_s_G=[1.0, 1.0, 1.0, 1.0, 2.0],
)


def with_pace(base: RunRecord, over_steps: PaceRecord = PACE) -> RunRecord:
    return dataclasses.replace(base, ranks=ranks(over_steps=over_steps))


def card(page: str) -> str:
    return page.partition("<h2>Step time, loss and memory")[2].partition("<section>")[0]


def test_two_runs_share_charts() -> None:
    other = pace((19, 39, 79), step_s_G=[1.0, 1.0, 8.0], loss_G=[3.0, 2.5, 1.0])
    shown = [Shown("ours", with_pace(worked())), Shown("theirs", with_pace(worked(), other))]
    page = sound(page_beside(*shown))
    charts = card(page)
    drawn = pictures(charts)
    assert len(drawn) == 2 and "<h3>Memory" not in charts
    assert any("ours 2.5 s, theirs 1 s" in reported for reported in drawn)
    assert "A step took 2.5 s and 1 s: <b>2.50 times</b> as fast with theirs (medians," in page
    assert paces_of({"ours": with_pace(worked()), "theirs": worked()}) == {}
    assert paces_of({"a": with_pace(worked()), "b": with_pace(worked(), pace((7,)))}) == {}
    reported = ranks(over_steps=PACE, device=DeviceRecord("cpu", 1))
    on_cpu = dataclasses.replace(worked(), ranks=reported)
    page = sound(page_beside(Shown("ours", on_cpu), shown[1]))
    assert "On a CPU these times do not predict a cluster: shared cores." in page


# What was chosen.


def chosen() -> RunRecord:
    """Steps 20 to 29 ran under ep, from step 30 on under fssdp."""
    choices = (
        ChoiceRecord(20, "ep", "why", {"ep": 1.5, "fssdp": 2.0}),
        ChoiceRecord(30, "fssdp", "why not", {"ep": 2.0, "fssdp": 1.75}),
    )
    return dataclasses.replace(with_pace(worked()), choices=choices)


def test_what_was_expected_stands_beside_what_was_found() -> None:
    assert [found_s(chosen(), index) for index in (0, 1)] == [1.0, 3.5]
    assert choice_line(chosen()) == (
        "from step 30 on auto used fssdp: predicted step time 2 s under ep and 1.75 s under "
        "fssdp (estimated, without the optimizer); measured 3.5 s (median)"
    )
    page = checked(chosen())
    body = page.partition("<h2>Strategy chosen by auto")[2].partition("</section>")[0]
    assert [ep_rank.partition("<")[0] for ep_rank in body.split("<td>")[1:]] == [
        *("20", "ep", "1.5 s", "1.5 s", "1 s"),
        *("30", "fssdp", "2 s", "1.75 s", "3.5 s"),
    ]


def test_a_choice_that_has_not_run_long_enough() -> None:
    late = (*chosen().choices, ChoiceRecord(45, "ep", "again", {"ep": 1.0}))
    seen = dataclasses.replace(chosen(), choices=late)
    assert found_s(seen, 1) == 2.0 and np.isnan(found_s(seen, 2))
    assert choice_line(seen) == (
        "from step 45 on auto used ep: predicted step time 1 s under ep (estimated, without "
        "the optimizer)"
    )
    before = dataclasses.replace(seen, choices=(ChoiceRecord(5, "ep", "of an earlier version"),))
    assert choice_line(before) == ""
    assert "measured</th>" not in checked(before)


# The file.


def test_json_of_an_earlier_version() -> None:
    data = json.loads(chosen().to_json())
    del data["ranks"]["device"], data["ranks"]["ep_rank_R"]
    for name in ("allocated_G", "reserved_G", "resident_G"):
        del data["ranks"]["pace"][name]
    for choice in data["choices"]:
        del choice["expected_s"]
    again = RunRecord.from_json(json.dumps(data))
    assert again.ranks is not None and (again.ranks.device, again.ranks.ep_rank_R) == (None, ())
    assert np.isnan(again.ranks.pace.resident_G).all() and not again.choices[0].expected_s
    assert "<h3>Memory</h3>" not in checked(again) and "<h3>Loss</h3>" in checked(again)
