# SPDX-License-Identifier: Apache-2.0
"""The page of two runs, one beside the other, over the steps that both recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.report import charts, timeline
from ds_moe_ext.report.charts import key, value_chart
from ds_moe_ext.report.markup import (
    Html,
    Panel,
    facts_line,
    joined,
    legend,
    note,
    section,
    selectable,
    table,
)
from ds_moe_ext.report.over_steps import heat_bins, line_bins, pace_charts, paces_of, thinned
from ds_moe_ext.report.page import (
    html_document,
    kind_table,
    layer_loads,
    octaves_of,
    seconds_by_phase,
)
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.summary import Bins, no_measure_of, outcome_of, step_s_of, verdict
from ds_moe_ext.report.timeline import Step
from ds_moe_ext.report.units import EN_DASH, counted, ratio_text, seconds_text


@dataclass(frozen=True, eq=False)
class Shown:
    """A run, as the page calls it."""

    name: str
    record: RunRecord

    @property
    def heading(self) -> Html:
        """With its strategy, unless it is called by that."""
        if self.name == self.record.strategy:
            return Html.escape(self.name)
        return Html("{} <small>({})</small>").format(self.name, self.record.strategy)

    @property
    def tasks_s(self) -> float:
        return sum(self.record.seconds_by_kind.values())


def page_beside(first: Shown, second: Shown) -> Html:
    """One self-contained HTML page about two runs. Pure.

    Raises:
        ValueError: no step was recorded of both.
    """
    common = sorted(set(first.record.steps_I) & set(second.record.steps_I))
    if not common:
        raise ValueError(
            f"{first.name} and {second.name} have no recorded step in common; name two runs that "
            "trained through the same steps"
        )
    runs = [replace(each, record=at_steps(each.record, common)) for each in (first, second)]
    paces = paces_of({each.name: each.record for each in runs})
    parts = [_header(runs), _figures(runs), pace_charts(paces)]
    parts += [_balance(runs, line_bins(runs[0].record)), _loads(runs, heat_bins(runs[0].record))]
    parts += [_seconds(runs), _timelines(runs)]
    return html_document(f"{first.name} beside {second.name}", parts)


def at_steps(record: RunRecord, steps: Sequence[int]) -> RunRecord:
    """The record of some of its steps only; the rest of it is of all."""
    at, placements = np.searchsorted(record.steps_I, steps), record.placements
    if placements is not None:
        added = placements.added
        placements = replace(
            placements,
            replicas_ILE=placements.replicas_ILE[at],
            owner_ep_rank_rows_ILC=placements.owner_ep_rank_rows_ILC[at],
            added=None if added is None else replace(added, replicas_ILE=added.replicas_ILE[at]),
        )
    return replace(
        record,
        steps_I=tuple(steps),
        rows_ILE=record.rows_ILE[at],
        ep_rank_rows_ILC=record.ep_rank_rows_ILC[at],
        placements=placements,
        looks=None,
    )


def _header(runs: Sequence[Shown]) -> Html:
    first, second = runs
    ours, theirs = (float(each.record.balance_IL().mean()) for each in runs)
    if abs(ours - theirs) < 0.005:
        text = Html(
            "were equally balanced; the busiest EP rank had <b>{:.2f} times the mean</b>"
        ).format(ours)
    else:
        better = first if ours < theirs else second
        text = Html(
            "had their busiest EP rank at <b>{:.2f}</b> and <b>{:.2f} times the mean</b>; "
            "with {} experts take <b>{:.0f} %</b> of the other's time (estimated: expert "
            "seconds scale with tokens)"
        ).format(ours, theirs, better.name, 100 * min(ours, theirs) / max(ours, theirs))
    times = Html("")
    steps_s = [step_s_of(each.record) for each in runs]
    if not np.isnan(steps_s).any():
        times = Html(
            " A step took {} and {}: <b>{:.2f} times</b> as fast with {} (medians, measured)."
        ).format(*map(seconds_text, steps_s), steps_s[0] / steps_s[1], second.name)
    elif first.tasks_s and second.tasks_s:
        times = Html(
            " Layer tasks of a rank took {} and {} a step: <b>{:.2f} times</b> (measured)."
        ).format(
            seconds_text(first.tasks_s),
            seconds_text(second.tasks_s),
            first.tasks_s / second.tasks_s,
        )
    if why := next(filter(None, (no_measure_of(each.record) for each in runs)), ""):
        times += f" On a CPU these times do not predict a cluster: {why}."
    alone = " ".join(f"{each.name}: {verdict(each.record)}." for each in runs)
    steps = first.record.steps_I
    facts = (
        f"{first.record.world_size} and {counted(second.record.world_size, 'rank')}",
        f"{len(first.record.layers)} and {counted(len(second.record.layers), 'MoE layer')}",
        f"{counted(len(steps), 'common step')}, {steps[0]:,} to {steps[-1]:,}",
    )
    return Html(
        '<header><h1>{} beside {}</h1>{}<p class="verdict">{} and {} {}.{}</p>'
        '<p class="note">{}</p>{}</header>'
    ).format(
        first.heading,
        second.heading,
        facts_line(facts),
        first.name,
        second.name,
        text,
        times,
        alone,
        legend(),
    )


def _figures(runs: Sequence[Shown]) -> Html:
    outcomes = [outcome_of(each.record) for each in runs]
    rows = [
        ["mean balance", *(ratio_text(one.balance) for one in outcomes)],
        ["without replicas", *(ratio_text(one.owner_balance) for one in outcomes)],
        ["replicas a step", *(f"{one.replicas:.1f}" for one in outcomes)],
        ["experts that changed owners", *(f"{one.num_moved:,}" for one in outcomes)],
        ["rows computed", *(f"{int(each.record.rows_ILE.sum()):,}" for each in runs)],
        ["a step, median", *(_known(step_s_of(each.record)) for each in runs)],
        ["in tasks, a step", *(_known(each.tasks_s) for each in runs)],
        ["the traced step", *(_known(each.record.traced_s) for each in runs)],
    ]
    names = (key(slot, each.name) for slot, each in enumerate(runs))
    return section("In figures", table(["", *names], rows))


def _known(seconds: float) -> str:
    return EN_DASH if not seconds or np.isnan(seconds) else seconds_text(seconds)


def _balance(runs: Sequence[Shown], bins: Bins) -> Html:
    values = {each.name: each.record.balance_IL().mean(axis=1) for each in runs}
    about = (
        "Routed tokens of the busiest EP rank over the mean, averaged over layers, at each "
        "common step."
    )
    chart = value_chart(values, bins, ratio_text, what="balance")
    return section(
        "Balance over the steps", note(about + thinned(bins, "shows their mean")) + chart
    )


def _loads(runs: Sequence[Shown], bins: Bins) -> Html:
    octaves = octaves_of((each.record for each in runs), bins)
    panels = []
    for index, (ours, theirs) in enumerate(zip(*(each.record.layers for each in runs))):
        names = dict.fromkeys((ours.name, theirs.name))
        drawn = joined(
            Html("<div><h4>{}</h4>{}</div>").format(
                each.heading, layer_loads(each.record, index, bins, octaves=octaves, half=True)
            )
            for each in runs
        )
        ratios = (float(each.record.balance_IL()[:, index].mean()) for each in runs)
        notice = f"balance {' and '.join(map(ratio_text, ratios))}"
        panels.append(Panel(" and ".join(names), notice, _TWO.format(drawn)))
    body = charts.load_scale(octaves, None) + selectable("heat", panels, first=0)
    return section("Load of the experts", body)


_TWO = Html('<div class="two">{}</div>')


def _seconds(runs: Sequence[Shown]) -> Html:
    by_phase = [seconds_by_phase(each.record) for each in runs]
    every = [seconds for each in runs for seconds in each.record.seconds_by_kind.values()]
    if not every:
        return Html("")
    drawn = joined(
        Html("<div><h3>{}, {}: {}</h3>{}</div>").format(
            each.name,
            phase,
            seconds_text(sum(kinds.values())),
            kind_table(kinds, longest=max(every), total=each.tasks_s),
        )
        for phase in ("forward", "backward")
        for each, phases in zip(runs, by_phase)
        if (kinds := phases.get(phase, {}))
    )
    about = note("Time of a rank in tasks per step, on average, on one scale.")
    return section("Seconds by kind of task", about + _TWO.format(drawn))


def _timelines(runs: Sequence[Shown]) -> Html:
    traced = [each for each in runs if each.record.timeline]
    if not traced:
        return Html("")
    colours = charts.colours_of(task.name for each in traced for task in each.record.timeline)
    steps = [Step(each.record.timeline, each.record.traced_s) for each in traced]
    shown_s = max(step.window[1] for step in steps)
    body = joined(
        Html("<h3>{}</h3>{}{}").format(
            each.heading,
            note(timeline.hidden(step.traced_tasks) + timeline.critical(step.traced_tasks)),
            timeline.overview(replace(step, shown_s=shown_s), colours),
        )
        for each, step in zip(traced, steps)
    )
    return section("Timeline of one step", body)
