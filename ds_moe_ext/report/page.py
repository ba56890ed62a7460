# SPDX-License-Identifier: Apache-2.0
"""The page a run leaves behind: one HTML file that needs nothing else to be read.

Its style sheet and its scripts, which it reads well without, lie beside this file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ds_moe_ext.report import charts, copy_map, heatmap, timeline
from ds_moe_ext.report.balance import balance, gain
from ds_moe_ext.report.charts import Bar
from ds_moe_ext.report.choices import chosen
from ds_moe_ext.report.colours import classes_of, style_rules
from ds_moe_ext.report.division import division
from ds_moe_ext.report.headline import header, tiles
from ds_moe_ext.report.markup import Html, in_script, joined, own_file
from ds_moe_ext.report.pace import AXIS, pace_charts, pace_labels, paces_of, waited_for
from ds_moe_ext.report.parts import (
    OPEN,
    Panel,
    folded,
    note,
    section,
    selectable,
    table,
    thinned,
)
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
    ratio_text,
    seconds_text,
)

_LINE_BINS = 240  # columns of a line chart
_LINE_POINTS = 8_000  # of all line charts together
_HEAT_BINS = 240  # columns of a heatmap
_HEAT_PIXELS = 1_000_000  # experts x columns of all heatmaps together
_FEWEST_BINS = 24

_SCRIPTS = (
    "page.js",
    "timeline.js",
    "save.js",
)  # one after the other: the first has what others use

NO_STEPS = MappingProxyType({charts.LINES_AXIS: (), "heat": (), AXIS: ()})
"""Of a page without line charts and heatmaps over steps."""


def page_of(record: RunRecord) -> Html:
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
    title: str, parts: Sequence[Html], steps: Mapping[str, Sequence[str]] = NO_STEPS
) -> Html:
    """A page with our style and script, which is told to run no other.

    Args:
        title: of the window, as text.
        parts: from top to bottom.
        steps: names of the columns of line charts, of heatmaps and of charts of all ranks.
    """
    style = Html("\n{}{}").format(own_file("page.css"), style_rules())
    script = Html("\n(()=>{{\n{}}})();\n").format(joined(map(own_file, _SCRIPTS)))
    return Html(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>{title}</title><style>{style}</style></head><body><main>\n{parts}\n</main>"
        '<script type="application/json" id="steps">{steps}</script>'
        "<script>{script}</script></body></html>\n"
    ).format(
        policy=_POLICY.format(script=_sha256(script), style=_sha256(style)),
        title=title,
        style=style,
        parts=Html("\n").join(parts),
        steps=in_script(json.dumps(dict(steps))),
        script=script,
    )


_POLICY = Html(
    "default-src 'none'; script-src '{script}'; style-src-elem '{style}'; "
    "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
"""Behind the escaping, for browsers: our script and style sheet by their sums, and images that lie
in the page. Attributes ``style`` place labels and bars."""


def _sha256(text: str) -> str:
    """A source of the policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def line_bins(record: RunRecord) -> Bins:
    """Columns of line charts."""
    return _bins(record, most=_LINE_BINS, budget=_LINE_POINTS // max(len(record.layers), 1))


def heat_bins(record: RunRecord) -> Bins:
    """Columns of heatmaps."""
    num_experts = max(sum(layer.num_experts for layer in record.layers), 1)
    return _bins(record, most=_HEAT_BINS, budget=_HEAT_PIXELS // num_experts)


def _bins(record: RunRecord, *, most: int, budget: int) -> Bins:
    return gather_steps(record.steps_I, max_bins=max(_FEWEST_BINS, min(most, budget)))


def _layers(record: RunRecord, summary: Summary | None) -> Html:
    if not record.layers:
        return section("Replaced layers", Html("<p>No layer was replaced.</p>"))
    headings = ["layer", "kind", "experts", "top k", "expert weights here", "mean balance"]
    rows = [
        [
            Html("<code>{}</code>").format(dotted(layer.name)),
            layer.kind,
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
        body = folded(counted(len(record.layers), "layer"), body)
    return section("Replaced layers", body)


def _nothing_recorded() -> Html:
    return section(
        "Balance and loads",
        Html("<p>No steps of a replaced layer were recorded, so there is nothing to draw.</p>"),
    )


def _loads(record: RunRecord, summary: Summary, bins: Bins) -> Html:
    octaves = heatmap.load_octaves(record, bins)
    loads = [
        heatmap.load_heatmap(record, index, bins=bins, octaves=octaves)
        for index in range(len(record.layers))
    ]
    about = f"Which experts drew the rows, step by step.{thinned(bins, 'adds up their rows')}"
    title, scales, bodies = "Load of the experts", heatmap.load_scale(octaves), loads
    if record.placements is not None:
        placements, ramp = record.placements, copy_map.ramp_of(record.placements)
        title = "Load of the experts, and their copies"
        about += (
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
    body = Html('{}<div class="scales">{}</div>{}').format(
        note(about), scales, selectable("heat", panels, first=summary.worst_layer)
    )
    return section(title, body)


def _seconds(record: RunRecord) -> Html:
    title = "Seconds by kind of task"
    if not record.seconds_by_kind:
        return section(title, Html("<p>No task was timed.</p>"))
    by_phase = bars_by_phase(record)
    classes = _classes(record)
    total = sum(record.seconds_by_kind.values())
    longest = max(record.seconds_by_kind.values())
    blocks = joined(
        Html("<div>{}{}</div>").format(
            _phase_head(phase, by_phase[phase], total),
            charts.bars(by_phase[phase], classes, longest=longest, total=total),
        )
        for phase in sorted(by_phase, reverse=True)  # forward, then backward
    )
    about = (
        "Time that this rank spent in tasks, a step on average, waiting included. Lanes may "
        "overlap, so these are not seconds on the clock. Percents are of all "
        f"{seconds_text(total)}."
    )
    return section(title, Html('{}<div class="bars-of">{}</div>').format(note(about), blocks))


def bars_by_phase(record: RunRecord) -> dict[str, list[Bar]]:
    """Seconds of each kind of task, forward and backward."""
    by_phase: dict[str, list[Bar]] = {}
    for key, seconds in record.seconds_by_kind.items():
        phase, kind = _phase_and_kind(key)
        by_phase.setdefault(phase, []).append(Bar(kind, seconds))
    return by_phase


def _phase_head(phase: str, bars: Sequence[Bar], total: float) -> Html:
    seconds = sum(bar.seconds for bar in bars)
    percent = 100 * seconds / max(total, 1e-12)
    return Html("<h3>{}: {}, {:.1f} %</h3>").format(phase, seconds_text(seconds), percent)


def _phase_and_kind(key: str) -> tuple[str, str]:
    phase, _, kind = key.rpartition(":")
    return phase or "all", kind


def _classes(record: RunRecord) -> dict[str, str]:
    timed = (_phase_and_kind(key)[1] for key in record.seconds_by_kind)
    return classes_of((*timed, *(span.name for span in record.timeline)))


def _timeline(record: RunRecord) -> Html:
    title = "Timeline of one step"
    if not record.timeline:
        return section(
            title,
            Html(
                "<p>Nothing was traced; set <code>report.trace_step</code> to the step to trace."
                "</p>"
            ),
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
    drawn_of = (
        f" The {len(drawn):,} longest of {len(record.timeline):,} tasks are drawn layer by layer; "
        "the overview has all."
        if left_out
        else ""
    )
    about = Html(
        "Tasks of this rank, a row a lane, with the percent of the time that the lane was busy."
        "{}{}{}"
    ).format(timeline.hidden(record.timeline), timeline.critical(record.timeline), drawn_of)
    body = Html("{}{}<h3>The whole step</h3>{}{}").format(
        note(about),
        charts.kind_legend(legend),
        timeline.overview(step, classes),
        selectable("passes", panels, first=0),
    )
    return section(title, body)


def _pass_panel(
    layer: str, passes: list[Pass], *, classes: dict[str, str], drawn: frozenset[Span]
) -> Panel:
    length_s = max(one.length_s for one in passes)
    body = joined(
        timeline.pass_chart(one, classes, length_s=length_s, drawn=drawn) for one in passes
    )
    return Panel(layer, seconds_text(sum(one.length_s for one in passes)), body)
