# SPDX-License-Identifier: Apache-2.0
"""The page a run leaves behind: one HTML file that needs nothing else to be read.

Its style sheet and its scripts, which it reads well without, lie beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ds_moe_ext.report import charts, copy_map, heatmap, timeline
from ds_moe_ext.report.balance import balance, gain
from ds_moe_ext.report.charts import Bar
from ds_moe_ext.report.choices import chosen
from ds_moe_ext.report.colours import classes_of, style_rules
from ds_moe_ext.report.division import division
from ds_moe_ext.report.headline import header, tiles
from ds_moe_ext.report.pace import AXIS, pace_charts, pace_labels, paces_of, waited_for
from ds_moe_ext.report.parts import OPEN, Panel, section, selectable, table, thinned
from ds_moe_ext.report.prediction import expected
from ds_moe_ext.report.record import RunRecord, Span
from ds_moe_ext.report.summary import (
    Bins,
    Summary,
    gather_steps,
    outcomes_by_layer,
    summarize,
)
from ds_moe_ext.report.timeline import Pass
from ds_moe_ext.report.units import (
    EN_DASH,
    bytes_text,
    counted,
    dotted,
    escaped,
    ratio_text,
    seconds_text,
)

_LINE_BINS = 240  # columns of a line chart
_LINE_POINTS = 8_000  # of all line charts together
_HEAT_BINS = 240  # columns of a heatmap
_HEAT_PIXELS = 1_000_000  # experts x columns of all heatmaps together
_FEWEST_BINS = 24

_HERE = Path(__file__).parent
_SCRIPTS = (
    "page.js",
    "timeline.js",
    "save.js",
)  # one after the other: the first has what others use

NO_STEPS = MappingProxyType({charts.LINES_AXIS: (), "heat": (), AXIS: ()})
"""Of a page without line charts and heatmaps over steps."""


def page_of(record: RunRecord) -> str:
    """One self-contained HTML page about ``record``. Pure.

    Long runs are drawn in fewer columns than they have steps, always the same ones, and the page
    says so; all numbers in words and tables are of every recorded step.
    """
    summary = summarize(record)
    lines, heat = line_bins(record), heat_bins(record)
    paces = paces_of({record.strategy: record})
    parts = [header(record, summary)]
    if summary is not None:
        parts += [tiles(record, summary), pace_charts(paces), _layers(record, summary)]
        if record.placements is not None:
            parts.append(gain(record, record.placements, lines))
        if record.looks is not None:
            parts.append(division(record, record.looks))
        parts += [balance(record, lines), _loads(record, summary, heat)]
    else:
        parts += [_layers(record, None), _nothing_recorded()]
    parts += [chosen(record), _seconds(record), waited_for(record.ranks), expected(record)]
    parts.append(_timeline(record))
    steps = {
        charts.LINES_AXIS: lines.labels(),
        "heat": heat.labels(),
        AXIS: pace_labels(paces),
    }
    return html_document(f"MoE run: {record.strategy}", parts, steps)


def html_document(
    title: str, parts: Sequence[str], steps: Mapping[str, Sequence[str]] = NO_STEPS
) -> str:
    """A page with our style and script.

    Args:
        title: of the window, as text.
        parts: HTML, from top to bottom.
        steps: names of the columns of line charts, of heatmaps and of charts of all ranks.
    """
    style, *scripts = ((_HERE / name).read_text("utf-8") for name in ("page.css", *_SCRIPTS))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title>"
        f"<style>\n{style}{style_rules()}</style></head><body><main>\n"
        + "\n".join(parts)
        + f'\n</main><script type="application/json" id="steps">{json.dumps(dict(steps))}</script>'
        f"<script>\n(()=>{{\n{''.join(scripts)}}})();\n</script></body></html>\n"
    )


def line_bins(record: RunRecord) -> Bins:
    """Columns of line charts."""
    return _bins(record, most=_LINE_BINS, budget=_LINE_POINTS // max(len(record.layers), 1))


def heat_bins(record: RunRecord) -> Bins:
    """Columns of heatmaps."""
    num_experts = max(sum(layer.num_experts for layer in record.layers), 1)
    return _bins(record, most=_HEAT_BINS, budget=_HEAT_PIXELS // num_experts)


def _bins(record: RunRecord, *, most: int, budget: int) -> Bins:
    return gather_steps(record.steps_I, max_bins=max(_FEWEST_BINS, min(most, budget)))


def _layers(record: RunRecord, summary: Summary | None) -> str:
    if not record.layers:
        return section("Replaced layers", "<p>No layer was replaced.</p>")
    headings = ["layer", "kind", "experts", "top k", "expert weights here", "mean balance"]
    rows = [
        [
            f"<code>{dotted(layer.name)}</code>",
            escaped(layer.kind),
            f"{layer.num_experts}",
            f"{layer.top_k or 'unknown'}",
            bytes_text(layer.expert_bytes),
            ratio_text(float(summary.mean_L[index])) if summary else EN_DASH,
        ]
        for index, layer in enumerate(record.layers)
    ]
    if record.placements is not None:
        headings += ["at home only", "copies a step", "changed homes"]
        for row, outcome in zip(rows, outcomes_by_layer(record)):
            row += [ratio_text(outcome.home_balance), f"{outcome.copies:.1f}"]
            row += [f"{outcome.num_moved:,}"]
    body = table(headings, rows)
    if len(record.layers) > OPEN:
        number = counted(len(record.layers), "layer")
        body = f"<details><summary>{number}</summary>{body}</details>"
    return section("Replaced layers", body)


def _nothing_recorded() -> str:
    return section(
        "Balance and loads",
        "<p>No steps of a replaced layer were recorded, so there is nothing to draw.</p>",
    )


def _loads(record: RunRecord, summary: Summary, bins: Bins) -> str:
    octaves = heatmap.load_octaves(record, bins)
    loads = [
        heatmap.load_heatmap(record, index, bins=bins, octaves=octaves)
        for index in range(len(record.layers))
    ]
    note = f"Which experts drew the rows, step by step.{thinned(bins, 'adds up their rows')}"
    title, scales, bodies = "Load of the experts", heatmap.load_scale(octaves), loads
    if record.placements is not None:
        placements, ramp = record.placements, copy_map.ramp_of(record.placements)
        title = "Load of the experts, and their copies"
        note += (
            f" Below: how many copies they had beside their homes, and where in step "
            f"{placements.last_step:,}, the last. Experts stand where their home was then."
            f"{copy_map.told_of_added(placements)}"
        )
        scales += copy_map.copies_scale(ramp)
        bodies = [
            body + copy_map.copies_of_layer(record, placements, index, ramp=ramp, bins=bins)
            for index, body in enumerate(loads)
        ]
    panels = [
        Panel(layer.name, f"balance {ratio_text(float(summary.mean_L[index]))}", bodies[index])
        for index, layer in enumerate(record.layers)
    ]
    return section(
        title,
        f'<p class="note">{note}</p><div class="scales">{scales}</div>'
        f"{selectable('heat', panels, first=summary.worst_layer)}",
    )


def _seconds(record: RunRecord) -> str:
    title = "Seconds by kind of task"
    if not record.seconds_by_kind:
        return section(title, "<p>No task was timed.</p>")
    by_phase = bars_by_phase(record)
    classes = _classes(record)
    total = sum(record.seconds_by_kind.values())
    longest = max(record.seconds_by_kind.values())
    blocks = "".join(
        f"<div>{_phase_head(phase, by_phase[phase], total)}"
        f"{charts.bars(by_phase[phase], classes, longest=longest, total=total)}</div>"
        for phase in sorted(by_phase, reverse=True)  # forward, then backward
    )
    return section(
        title,
        '<p class="note">Time that this rank spent in tasks, a step on average, waiting included. '
        "Lanes may overlap, so these are not seconds on the clock. Percents are of all "
        f"{seconds_text(total)}.</p>"
        f'<div class="bars-of">{blocks}</div>',
    )


def bars_by_phase(record: RunRecord) -> dict[str, list[Bar]]:
    """Seconds of each kind of task, forward and backward."""
    by_phase: dict[str, list[Bar]] = {}
    for key, seconds in record.seconds_by_kind.items():
        phase, kind = _phase_and_kind(key)
        by_phase.setdefault(phase, []).append(Bar(kind, seconds))
    return by_phase


def _phase_head(phase: str, bars: Sequence[Bar], total: float) -> str:
    seconds = sum(bar.seconds for bar in bars)
    percent = 100 * seconds / max(total, 1e-12)
    return f"<h3>{escaped(phase)}: {seconds_text(seconds)}, {percent:.1f} %</h3>"


def _phase_and_kind(key: str) -> tuple[str, str]:
    phase, _, kind = key.rpartition(":")
    return phase or "all", kind


def _classes(record: RunRecord) -> dict[str, str]:
    timed = (_phase_and_kind(key)[1] for key in record.seconds_by_kind)
    return classes_of((*timed, *(span.name for span in record.timeline)))


def _timeline(record: RunRecord) -> str:
    title = "Timeline of one step"
    if not record.timeline:
        return section(
            title,
            "<p>Nothing was traced; set <code>report.trace_step</code> to the step to trace.</p>",
        )
    classes = _classes(record)
    drawn = timeline.boxed(record.timeline)
    traced = {span.name for span in record.timeline}
    held: dict[str, list[Pass]] = {}
    for one in timeline.passes_of(record.timeline):
        held.setdefault(one.layer, []).append(one)
    panels = [
        _pass_panel(layer, passes, classes=classes, drawn=drawn) for layer, passes in held.items()
    ]
    left_out = len(record.timeline) - len(drawn)
    step = timeline.Step(record.timeline, record.traced_s)
    legend = {kind: name for kind, name in classes.items() if kind in traced}
    if step.length_s:
        legend[timeline.HOST_WORK] = "kh"
    note = (
        f" The {len(drawn):,} longest of {len(record.timeline):,} tasks are drawn layer by layer; "
        "the overview has all."
        if left_out
        else ""
    )
    return section(
        title,
        '<p class="note">Tasks of this rank, a row a lane, with the percent of the time that the '
        f"lane was busy.{timeline.hidden(record.timeline)}"
        f"{timeline.critical(record.timeline)}{note}</p>"
        f"{charts.kind_legend(legend)}"
        f"<h3>The whole step</h3>{timeline.overview(step, classes)}"
        f"{selectable('passes', panels, first=0)}",
    )


def _pass_panel(
    layer: str, passes: list[Pass], *, classes: dict[str, str], drawn: frozenset[Span]
) -> Panel:
    length_s = max(one.length_s for one in passes)
    body = "".join(
        timeline.pass_chart(one, classes, length_s=length_s, drawn=drawn) for one in passes
    )
    return Panel(layer, seconds_text(sum(one.length_s for one in passes)), body)
