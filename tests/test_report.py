# SPDX-License-Identifier: Apache-2.0
"""The record of a run and its page. Pure: no ranks, no torch."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.report import charts
from ds_moe_ext.report.charts import chart_files, value_chart
from ds_moe_ext.report.page import holders, page_of
from ds_moe_ext.report.record import (
    AddedRecord,
    LayerRecord,
    LooksRecord,
    Move,
    PlacementRecord,
    RunRecord,
    TermRecord,
    TracedRecord,
    TracedTask,
)
from ds_moe_ext.report.summary import (
    division_line,
    division_of,
    gather_steps,
    outcome_of,
    outcomes_by_layer,
    summarize,
)
from ds_moe_ext.report.timeline import Step, critical, critical_path, stretches
from ds_moe_ext.report.two_runs import Shown, at_steps, page_beside
from ds_moe_ext.report.units import EN_DASH, TIMES, bytes_text, seconds_text, short_names

VOID = {"meta", "img", "wbr", "br", "link"}
NASTY = "a<b>&\"c'</script>"


def layer(name: str, owner_E: tuple[int, ...]) -> LayerRecord:
    return LayerRecord(name, "MixtralExperts", len(owner_E), 2, owner_E, 3 << 20)


def at_owner(layers: tuple[LayerRecord, ...], rows_ILE: np.ndarray) -> np.ndarray:
    """Rows of each EP rank when every expert computes at the owner, ``[I, L, 2 or more]``."""
    num_ep_ranks = max([2, *(1 + max(layer.owner_E) for layer in layers)])
    rows = np.zeros((*rows_ILE.shape[:2], num_ep_ranks), dtype=np.int64)
    for index, layer in enumerate(layers):
        for expert, ep_rank in enumerate(layer.owner_E):
            rows[:, index, ep_rank] += rows_ILE[:, index, expert]
    return rows


def record(layers: tuple[LayerRecord, ...], rows_ILE: np.ndarray, **other: object) -> RunRecord:
    base = RunRecord(
        strategy="ep",
        world_size=2,
        num_ep_ranks=2,
        layers=layers,
        steps_I=tuple(range(10, 10 + 10 * len(rows_ILE), 10)),
        rows_ILE=rows_ILE,
        ep_rank_rows_ILC=at_owner(layers, rows_ILE),
        seconds_by_kind={"forward:expert": 3.0, "backward:expert": 6.0, "forward:dispatch": 1.0},
        versions={"torch": "2.13.0"},
    )
    return dataclasses.replace(base, **other)


def worked() -> RunRecord:
    """Two EP ranks; layer a has 4 experts, layer b has 2 and is padded with zeros."""
    rows_ILE = np.array(
        [
            [[4, 2, 1, 1], [5, 5, 0, 0]],
            [[1, 1, 1, 1], [9, 1, 0, 0]],
        ],
        dtype=np.int64,
    )
    return record((layer("m.0.a", (0, 0, 1, 1)), layer("m.1.a", (0, 1))), rows_ILE)


def copied() -> RunRecord:
    """``worked``, had experts 0 and 3 of layer a been copied to the other EP rank in the last step,
    and expert 2 moved from EP rank 0 before it."""
    run = worked()
    placements = PlacementRecord(
        replicas_ILE=np.array([[[0, 0, 0, 0], [0] * 4], [[1, 0, 0, 1], [0] * 4]]),
        owner_ep_rank_rows_ILC=np.array([[[7, 1], [5, 5]], [[2, 2], [9, 1]]]),
        moves=(Move(20, 0, 1),),
        last_step=20,
        copied_to=(((1,), (), (), (0,)), ((), ())),
    )
    return dataclasses.replace(run, strategy="fssdp", placements=placements)


def added() -> RunRecord:
    """``copied``, had expert 1 of layer a been copied after the gate in one of two passes of the
    last step, and expert 2 in both."""
    run = copied()
    assert run.placements is not None
    found = AddedRecord(
        replicas_ILE=np.array([[[0] * 4, [0] * 4], [[0, 1, 1, 0], [0] * 4]]),
        num_passes=2,
        to=(((), ((1, 1),), ((0, 2),), ()), ((), ())),
    )
    return dataclasses.replace(run, placements=dataclasses.replace(run.placements, added=found))


UNKNOWN = float("nan")


def looked_at() -> RunRecord:
    """``copied``, of whose second step something was predicted, and by a share of its own in layer
    a; layer b was not looked at then."""
    looks = LooksRecord(
        predicted_IL=np.array([[UNKNOWN, UNKNOWN], [1.25, UNKNOWN]]),
        by_paper_IL=np.array([[UNKNOWN, UNKNOWN], [1.5, UNKNOWN]]),
        left_IL=np.array([[4.0, 5.0], [1.0, UNKNOWN]]),
        crossed_IL=np.array([[2.0, 0.0], [0.0, UNKNOWN]]),
        num_nodes=2,
    )
    return dataclasses.replace(copied(), looks=looks)


TERMS = (
    TermRecord("exchange of rows", 3e-3, 4e-3, 0.25, (6, 7, 8)),
    TermRecord("experts", 1e-3, 1e-3, 0.046, (6, 7, 8)),
)


def traced(num_tasks: int, name: str = "expert") -> tuple[TracedTask, ...]:
    return tuple(
        TracedTask(
            name,
            "compute",
            ("forward", "backward")[i % 2],
            "m.0.a",
            f"{i}",
            i * 1e-3,
            (i + 1) * 1e-3,
        )
        for i in range(num_tasks)
    )


class Balance(HTMLParser):
    """Collects the text, and fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(run: RunRecord) -> str:
    """The page, after it was parsed whole and found to need nothing from outside."""
    return sound(page_of(run))


def sound(page: str) -> str:
    """Likewise, of a page, in whose drawings nothing runs."""
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "(not drawn" not in page
    for drawing in chart_files(page).values():
        names = {each.tag.rpartition("}")[2] for each in ET.fromstring(drawing).iter()}
        assert not names & {"script", "foreignObject", "a", "animate", "set"}
    assert "<link" not in page and "@import" not in page and "url(" not in page
    assert "<script" not in page
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', page))
    assert "nan" not in " ".join(parser.text).lower().split()
    return page


def pictures(page: str) -> list[str]:
    """What its drawings show, in words."""
    return [html.unescape(text) for text in re.findall(r'<img [^>]*alt="([^"]*)"', page)]


def words_in(drawing: str) -> str:
    return " ".join(text.strip() for text in ET.fromstring(drawing).itertext() if text.strip())


def test_balance_worked_by_hand() -> None:
    run = worked()
    # Layer a: EP ranks hold 6 and 2, mean 4; then 2 and 2. Layer b: 5 and 5; then 9 and 1, mean 5.
    assert run.ep_rank_rows_ILC.tolist() == [[[6, 2], [5, 5]], [[2, 2], [9, 1]]]
    np.testing.assert_allclose(run.balance_IL(), [[1.5, 1.0], [1.0, 1.8]])
    assert run.balance_by_layer() == pytest.approx({"m.0.a": 1.25, "m.1.a": 1.4})


def test_steps_without_rows_are_balanced() -> None:
    run = record((layer("a", (0, 1)),), np.zeros((3, 1, 2), dtype=np.int64))
    np.testing.assert_array_equal(run.balance_IL(), np.ones((3, 1)))
    checked(run)


def test_json_of_an_earlier_version() -> None:
    data = json.loads(worked().to_json())
    del data["placements"], data["terms"], data["looks"], data["ranks"]
    again = RunRecord.from_json(json.dumps(data))
    assert again.placements is again.looks is again.ranks is None and again.terms == ()
    assert page_of(again) == page_of(worked()) and division_line(again) == ""
    data = json.loads(copied().to_json())
    del data["placements"]["added"], data["looks"]
    again = RunRecord.from_json(json.dumps(data))
    assert again.placements is not None and again.placements.added is None
    assert page_of(again) == page_of(copied())


def test_json_round_trip_without_steps() -> None:
    run = record((layer("a", (0, 1)),), np.zeros((0, 1, 2), dtype=np.int64))
    assert RunRecord.from_json(run.to_json()).rows_ILE.shape == (0, 1, 2)


def test_summary_worked_by_hand() -> None:
    summary = summarize(worked())
    assert summary is not None
    assert summary.mean == pytest.approx(1.325)
    assert summary.worst_layer == 1
    assert (summary.moment.layer, summary.moment.at) == ("m.1.a", 20)
    # Layer a: 5, 3, 2, 2 rows, mean 3; layer b: 14 and 6 over a mean of 10.
    assert (summary.hot.layer, summary.hot.at) == ("m.0.a", 0)
    assert summary.hot.ratio == pytest.approx(5 / 3)
    assert summary.drift is None and summary.num_rows == 32


def test_outcomes_worked_by_hand() -> None:
    # At the owner, layer a: 7 over 4, then 2 over 2; layer b as it was computed.
    first, second = outcomes_by_layer(copied())
    assert first == (pytest.approx((1.75 + 1.0) / 2), pytest.approx(1.25), 1.0, 1)
    assert second == (pytest.approx(1.4), pytest.approx(1.4), 0.0, 0)
    assert outcome_of(copied()) == (pytest.approx(1.3875), pytest.approx(1.325), 1.0, 1)


def test_outcome_without_replicas_or_steps() -> None:
    assert outcome_of(worked()) == (pytest.approx(1.325), pytest.approx(1.325), 0.0, 0)
    nothing = record((layer("a", (0, 1)),), np.zeros((0, 1, 2), dtype=np.int64))
    assert outcome_of(nothing) == (1.0, 1.0, 0.0, 0)
    assert outcome_of(record((), np.zeros((0, 0, 0), dtype=np.int64))) == (1.0, 1.0, 0.0, 0)


def test_divisions_worked_by_hand() -> None:
    run = looked_at()
    assert run.looks is not None
    # Something was predicted of layer a in step 20 alone, when its EP ranks had 2 and 2 rows. Of
    # the 8 + 10 + 4 rows that were looked at 10 left their EP rank, and 2 their node.
    whole = division_of(run, run.looks, [0, 1])
    assert whole == (1.0, 1.25, 1.0, 1.5, pytest.approx(10 / 22), pytest.approx(2 / 22))
    assert division_line(run) == (
        "balance 1.00 without replicas -> 1.25 predicted -> 1.00 reached (1.50 by the paper's "
        "rule), in 1 of 2 recorded steps, those with a prediction; replicas did not help, and the "
        "plan predicted no gain; 45.5 % of routed tokens left their EP rank, 9.1 % crossed "
        "nodes"
    )
    second = division_of(run, run.looks, [1])
    assert (second.left, second.crossed) == (0.5, 0.0)
    assert np.isnan(second[:4]).all()


def test_one_node_is_not_crossed() -> None:
    looks = dataclasses.replace(
        looked_at().looks, num_nodes=1, predicted_IL=np.full((2, 2), UNKNOWN)
    )
    run = dataclasses.replace(worked(), looks=looks)
    assert division_line(run) == "45.5 % of routed tokens left their EP rank"
    page = checked(run)
    assert "Where tokens went" in page and "crossed nodes" not in page


def test_drift_compares_quarters() -> None:
    rows_ILE = np.array([[[3, 1]]] * 4 + [[[1, 1]]] * 4)
    run = record((layer("a", (0, 1)),), rows_ILE)
    summary = summarize(run)
    assert summary is not None and summary.drift is not None
    assert summary.drift == (1.5, 1.0)
    assert "improved, from 1.50 in the first quarter to 1.00 in the last" in page_of(run)


def test_page_of_a_run_with_replicas() -> None:
    page = checked(copied())
    assert "Without replicas it would have computed <b>1.39 times the mean</b>" in page
    assert "There were 1.0 replicas a step, and owners changed 1 time." in page
    assert "Balance with replicas, and without" in page
    assert "of the experts, and their replicas" in page
    assert "on which EP ranks in step 20, the last" in page
    assert sum("owners changed" in reported for reported in pictures(page)) == 1
    (drawn,) = (
        reported for reported in pictures(page) if reported.startswith("loads of 4 experts")
    )
    assert "their replicas, and the EP ranks that held them" in drawn
    assert f"EP rank 0 1.33{TIMES}, EP rank 1 0.67{TIMES}" in drawn


def test_page_of_a_run_with_replicas_made_after_the_gate() -> None:
    page = checked(added())
    assert "There were 2.0 replicas a step, 1.0 of them made after the gate, and owners" in page
    assert "counted if any pass of the step had them" in page
    assert "replica made after the gate" in words_in(
        chart_files(page)["load-of-the-experts-and-their-replicas-colours"]
    )
    run = added()
    assert run.placements is not None
    owner, copy, late = charts.OWNER, charts.REPLICA, charts.LATE
    assert holders(run, run.placements, 0).tolist() == [
        [owner, copy],
        [owner, late],
        [late, owner],
        [copy, owner],
    ]


def test_no_steps_no_tasks_no_layers() -> None:
    page = checked(record((layer("a", (0, 1)),), np.zeros((0, 1, 2), dtype=np.int64)))
    assert "no step was recorded." in page and "report.trace_step" in page
    nothing = record((), np.zeros((0, 0, 0), dtype=np.int64), seconds_by_kind={}, versions={})
    page = checked(nothing)
    assert "no layer was replaced." in page and "No task was timed" in page


def streams_of(page: str) -> list[str]:
    """Rows of the drawing of the whole step, from the top."""
    (reported,) = (
        reported for reported in pictures(page) if reported.startswith("the whole step: ")
    )
    names = reported.partition(": ")[2].partition(" busy")[0].split(", ")
    return [name.partition(" ")[0] for name in names]


def test_the_host_plans_while_rows_are_on_their_way() -> None:
    def traced_task(name: str, stream: str, start_s: float, end_s: float) -> TracedTask:
        return TracedTask(name, stream, "forward", "m.0.a", "0", start_s, end_s)

    tasks = (
        traced_task("dispatch", "inter", 0.0, 2.0),
        traced_task(
            "plan", "host", 1.0, 5.0
        ),  # 1 of 4 seconds under dispatch, 2 under the sum in an ETP group
        traced_task("expert", "compute", 2.0, 6.0),
        traced_task("sum", "intra", 3.0, 8.0),
        traced_task("mine", "other", 4.0, 5.0),
    )
    page = checked(dataclasses.replace(worked(), traced=TracedRecord(tasks)))
    assert streams_of(page) == ["compute", "inter", "intra", "host", "other"]
    assert "The host planned the next step for 4 s, during 75 % of which token" in page
    assert "planned" not in checked(dataclasses.replace(worked(), traced=TracedRecord(tasks[:1])))


def test_a_layer_is_at_work_when_its_own_tasks_are() -> None:
    def traced_task(layer: str, name: str, stream: str, start_s: float, end_s: float) -> TracedTask:
        return TracedTask(name, stream, "forward", layer, "0", start_s, end_s)

    tasks = (
        traced_task("m.0", "expert", "compute", 0.0, 4.0),
        traced_task("m.1", "gather", "param", 1.0, 3.0),  # beside the layer before
        traced_task("m.0", "plan", "host", 3.0, 5.0),  # beside the layer behind
        traced_task("m.1", "expert", "compute", 4.0, 8.0),
        traced_task("m.2", "gather", "param", 5.0, 6.0),  # of a layer without any others
    )
    assert [(one.start_s, one.end_s) for one in stretches(tasks)] == [(0.0, 4.0), (4.0, 8.0)]
    again = dataclasses.replace(tasks[0], start_s=8.0, end_s=9.0)  # in another micro-batch
    assert [one.layer for one in stretches([*tasks, again])] == ["m.0", "m.1", "m.0"]
    (alone,) = stretches(tasks[4:])
    assert (alone.start_s, alone.end_s) == (5.0, 6.0)
    page = checked(dataclasses.replace(worked(), traced=TracedRecord(tasks)))
    assert "2 tasks in 7 s, from 1 s into the step" in page


def timed(
    name: str, stream: str, start_s: float, end_s: float, by: int | None, **other: str
) -> TracedTask:
    given = {"phase": "forward", "layer": "m.0.a", "chunk": "0", **other}
    return TracedTask(name, stream, start_s=start_s, end_s=end_s, bound_by=by, **given)


def step_of_two_layers() -> tuple[TracedTask, ...]:
    """A step of 10 s in which tasks of two layers run from 1 s to 7 s."""
    return (
        timed("dispatch", "inter", 1.0, 2.0, None),
        timed("expert", "compute", 2.0, 4.0, 0),
        timed("expert", "compute", 5.0, 6.0, 1, layer="m.1.a"),
        timed("gather", "param", 5.0, 5.5, None, layer="m.1.a"),
        timed("expert", "compute", 6.5, 7.0, 2, layer="m.1.a", phase="backward"),
    )


def test_the_rest_of_the_model_lies_between_the_layers() -> None:
    traced_tasks = step_of_two_layers()
    assert [(one.start_s, one.end_s, one.layer) for one in Step(traced_tasks, 10.0).others()] == [
        (0.0, 1.0, "before the first layer: data, embedding"),
        (4.0, 5.0, "between m.0.a and m.1.a, forward"),
        (6.0, 6.5, "between forward and backward of m.1.a"),
        (7.0, 10.0, "after the last layer: gradients, optimizer"),
    ]
    assert Step(traced_tasks).others() == []  # of a file that does not say how long the step was
    page = checked(dataclasses.replace(worked(), traced=TracedRecord(traced_tasks, 10.0)))
    assert "rest of the model" in page


def test_the_critical_path_in_words_and_drawn() -> None:
    # Its tasks take 1, 2, 1 and 0.5 of 6 seconds.
    traced_tasks = step_of_two_layers()
    assert [
        (traced_task.name, traced_task.start_s) for traced_task in critical_path(traced_tasks)
    ] == [
        ("expert", 6.5),
        ("expert", 5.0),
        ("expert", 2.0),
        ("dispatch", 1.0),
    ]
    reported = critical(traced_tasks)
    assert "6 s in all: expert 58 %, dispatch 17 %; idle 25 %." in reported
    assert critical(traced(3)) == "" and critical_path(traced(3)) == []
    page = checked(dataclasses.replace(worked(), traced=TracedRecord(traced_tasks, 10.0)))
    (shown,) = (reported for reported in pictures(page) if reported.startswith("the whole step: "))
    assert "critical path 45 %" in shown and "rest of the model" in shown


def test_a_page_without_charts_has_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where matplotlib is not installed, or fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    page = checked(dataclasses.replace(copied(), traced=TracedRecord(step_of_two_layers(), 10.0)))
    assert page.count("matplotlib is not installed") == 1 and "<img" not in page
    assert f"balance over the steps: m.0.a 1.25{TIMES}, m.1.a 1.40{TIMES}</p>" in page
    monkeypatch.undo()

    def fails(*_: object) -> str:
        raise RuntimeError("no <font>")

    monkeypatch.setattr(charts, "_svg", fails)
    page = page_of(worked())
    assert "not drawn: RuntimeError(&#x27;no &lt;font&gt;&#x27;)" in page


def test_drawings_do_not_depend_on_a_script_s_own_style() -> None:
    import matplotlib as mpl

    before = page_of(worked())
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": False}):
        assert page_of(worked()) == before


def test_two_runs_are_compared_over_the_steps_of_both() -> None:
    run = dataclasses.replace(copied(), traced=TracedRecord(step_of_two_layers(), 10.0))
    short = at_steps(worked(), [20])
    page = sound(page_beside(Shown("ours", run), Shown(NASTY, short)))
    assert "1 common step, 20 to 20" in page and "a<b>" not in page
    # In step 20 layers have 1.00 and 1.80, in both runs.
    assert "were equally balanced; the busiest EP rank had <b>1.40 times" in page
    drawn = pictures(page)
    assert f"balance over the steps: ours 1.40{TIMES}, {NASTY} 1.40{TIMES}" in drawn
    assert sum(reported.startswith("loads of ") for reported in drawn) == 4
    assert sum(reported.startswith("the whole step") for reported in drawn) == 1
    assert chart_files(page).keys() >= {"balance-over-the-steps", "timeline-of-one-step-ours-fssdp"}
    moved = dataclasses.replace(worked(), steps_I=(11, 21))
    with pytest.raises(ValueError, match="ours and theirs have no recorded step in common; name"):
        page_beside(Shown("ours", run), Shown("theirs", moved))


def test_values_of_any_kind_are_drawn_over_the_steps() -> None:
    bins = gather_steps((0, 10, 20), max_bins=9)
    values = {"ours": np.array([1.0, UNKNOWN, 3.0]), "unknown": np.full(3, UNKNOWN)}
    (reported,) = pictures(value_chart(values, bins, seconds_text, what="seconds"))
    assert reported == "seconds over the steps: ours 2 s"
    lacking = {"unknown": np.full(3, UNKNOWN)}
    assert value_chart(lacking, bins, seconds_text, what="seconds") == ""
    for flat in ([95.0, 99.0, 97.0], [0.0, 0.0, 0.0], [3.0, 3.0, 3.0]):
        sound(value_chart({"ours": np.array(flat)}, bins, seconds_text, what="seconds"))


def test_tasks_without_length() -> None:
    checked(
        dataclasses.replace(
            worked(), traced=TracedRecord((TracedTask("gate", "c", "f", "m", "0", 1.0, 1.0),))
        )
    )


def test_large_record_with_replicas_stays_small() -> None:
    rng = np.random.default_rng(0)
    num_steps, num_layers, num_experts, num_ep_ranks = 400, 6, 256, 32
    rows_ILE = rng.geometric(0.02, size=(num_steps, num_layers, num_experts))
    owner_E = tuple(int(ep_rank) for ep_rank in np.arange(num_experts) // 8)
    layers = tuple(layer(f"model.layers.{i}.mlp", owner_E) for i in range(num_layers))
    run = record(layers, rows_ILE, num_ep_ranks=num_ep_ranks)
    placements = PlacementRecord(
        replicas_ILE=rng.integers(0, num_ep_ranks, rows_ILE.shape)
        * (rng.random(rows_ILE.shape) < 0.1),
        owner_ep_rank_rows_ILC=run.ep_rank_rows_ILC,
        moves=tuple(Move(step, i, 3) for step in range(10, 4000, 100) for i in range(num_layers)),
        last_step=4000,
        copied_to=tuple(
            tuple(tuple(range(expert % num_ep_ranks)) for expert in range(num_experts))
            for _ in layers
        ),
    )
    page = checked(dataclasses.replace(run, placements=placements))
    assert len(page.encode()) < 1_500_000


def test_bins_share_the_steps_evenly() -> None:
    bins = gather_steps(tuple(range(5, 75, 10)), max_bins=3)  # 7 steps: 2, 2 and 3
    assert bins.labels() == [f"5{EN_DASH}15", f"25{EN_DASH}35", f"45{EN_DASH}65"]
    values = np.arange(7)
    assert bins.total(values).tolist() == [1, 5, 15]
    assert bins.mean(values).tolist() == [0.5, 2.5, 5.0]
    assert bins.highest(values).tolist() == [1, 3, 6]
    assert not gather_steps((1, 2), max_bins=3).is_thinned


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 GiB",
    ]
    assert [seconds_text(s) for s in (0, 2e-6, 1.5e-3, 12.34)] == [
        "0 s",
        "2 µs",
        "1.5 ms",
        "12.3 s",
    ]
    assert [seconds_text(s) for s in (200, 7260)] == ["3 min 20 s", "2 h 1 min"]
    names = ["model.layers.3.mlp", "model.layers.14.mlp"]
    assert list(short_names(names).values()) == ["layers.3", "layers.14"]
    assert short_names(["only"]) == {"only": "only"}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_small_record_makes_a_sound_page(data: st.DataObject) -> None:
    num_ep_ranks = data.draw(st.integers(1, 4))
    owners = st.lists(st.integers(0, num_ep_ranks - 1), min_size=1, max_size=6).map(tuple)
    names = st.text(max_size=8).filter(lambda name: "nan" not in name.lower())
    layers = tuple(
        layer(data.draw(names), owner_E) for owner_E in data.draw(st.lists(owners, max_size=8))
    )
    num_experts = max((one.num_experts for one in layers), default=0)
    rows_ILE = np.zeros((data.draw(st.integers(0, 9)), len(layers), num_experts), dtype=np.int64)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for index, one in enumerate(layers):
        loads = rng.poisson(rng.choice([0.0, 1.0, 50.0]), (len(rows_ILE), one.num_experts))
        rows_ILE[:, index, : one.num_experts] = loads
    traced_tasks = tuple(
        dataclasses.replace(traced_task, name=data.draw(names), stream=data.draw(names))
        for traced_task in traced(data.draw(st.integers(0, 4)))
    )
    run = record(layers, rows_ILE, num_ep_ranks=num_ep_ranks, traced=TracedRecord(traced_tasks))
    placements = data.draw(st.none() | st.just(any_placements(run, rng)))
    looks = data.draw(st.none() | st.just(any_looks(run, rng)))
    seconds = st.floats(0, 1e6)
    terms = data.draw(st.lists(st.builds(TermRecord, names, seconds, seconds, seconds), max_size=3))
    checked(dataclasses.replace(run, placements=placements, looks=looks, terms=tuple(terms)))


def any_placements(run: RunRecord, rng: np.random.Generator) -> PlacementRecord:
    """Replicas and moves that need not have anything to do with the run but its shape."""
    ep_ranks = np.arange(run.num_ep_ranks)
    return PlacementRecord(
        replicas_ILE=rng.integers(0, run.num_ep_ranks, run.rows_ILE.shape),
        owner_ep_rank_rows_ILC=rng.poisson(3.0, run.ep_rank_rows_ILC.shape),
        moves=tuple(Move(int(rng.integers(0, 99)), index, 1) for index in range(len(run.layers))),
        last_step=99,
        copied_to=tuple(
            tuple(
                tuple(ep_ranks[(rng.random(run.num_ep_ranks) < 0.3) & (ep_ranks != owner)].tolist())
                for owner in one.owner_E
            )
            for one in run.layers
        ),
        added=None if rng.random() < 0.5 else any_added(run, rng),
    )


def any_added(run: RunRecord, rng: np.random.Generator) -> AddedRecord:
    """Likewise."""
    replicas_ILE = rng.integers(0, run.num_ep_ranks, run.rows_ILE.shape)
    to = (((int(rng.integers(run.num_ep_ranks)), 1),) for one in run.layers for _ in one.owner_E)
    return AddedRecord(
        replicas_ILE, 2, tuple(tuple(next(to) for _ in one.owner_E) for one in run.layers)
    )


def any_looks(run: RunRecord, rng: np.random.Generator) -> LooksRecord:
    """Likewise, at some layers in some steps."""
    shape_IL = run.rows_ILE.shape[:2]
    tables = [rng.uniform(1, 4, shape_IL) for _ in range(4)]
    for table_IL in tables:
        table_IL[rng.random(shape_IL) < rng.choice([0.0, 0.5, 1.0])] = UNKNOWN
    return LooksRecord(*tables, num_nodes=int(rng.integers(1, 4)))


@pytest.mark.parametrize(
    ("predicted", "copied_experts", "reported"),
    [
        (1.25, True, ""),
        (1.25, False, "replicas did not help: the expert load differed from the prediction"),
        (1.5, False, "replicas did not help, and the plan predicted no gain"),
    ],
)
def test_replicas_that_did_not_help_say_why(
    predicted: float, copied_experts: bool, reported: str
) -> None:
    base = copied()
    assert base.placements is not None
    computed = base.ep_rank_rows_ILC if copied_experts else base.placements.owner_ep_rank_rows_ILC
    shape_IL = computed.shape[:2]
    looks = LooksRecord(*np.full((4, *shape_IL), UNKNOWN), 1)
    looks = dataclasses.replace(
        looks, predicted_IL=np.full(shape_IL, predicted), left_IL=np.zeros(shape_IL)
    )
    line = division_line(dataclasses.replace(base, ep_rank_rows_ILC=computed, looks=looks))
    assert f"in {shape_IL[0]} of {shape_IL[0]} recorded steps, those with a prediction" in line
    assert reported in line and ("did not help" in line) == bool(reported)
