"""The page a run leaves behind: one HTML file that needs nothing else to be read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from ds_moe_ext.report import charts, heatmap, timeline
from ds_moe_ext.report.charts import Bar, Line
from ds_moe_ext.report.colours import LINES, classes_of, style_rules
from ds_moe_ext.report.headline import header, tiles
from ds_moe_ext.report.record import RunRecord, Span
from ds_moe_ext.report.skin import CSS, SCRIPT
from ds_moe_ext.report.summary import Bins, Summary, gather_steps, summarize
from ds_moe_ext.report.timeline import Pass
from ds_moe_ext.report.units import (
    EN_DASH,
    bytes_text,
    counted,
    dotted,
    escaped,
    ratio_text,
    seconds_text,
    short_names,
)

_LINE_BINS = 240  # columns of a line chart
_LINE_POINTS = 8_000  # of all line charts together
_HEAT_BINS = 240  # columns of a heatmap
_HEAT_PIXELS = 1_000_000  # experts x columns of all heatmaps together
_FEWEST_BINS = 24
_OPEN = 12  # small charts, or rows of the table, that are shown unasked


@dataclass(frozen=True)
class Panel:
    """One entry of a selector, and what it shows."""

    name: str
    remark: str
    body: str


def page_of(record: RunRecord) -> str:
    """One self-contained HTML page about ``record``. Pure.

    Long runs are drawn in fewer columns than they have steps, always the same ones, and the page
    says so; all numbers in words and tables are of every recorded step.
    """
    summary = summarize(record)
    num_layers = max(len(record.layers), 1)
    line_bins = _bins(record, most=_LINE_BINS, budget=_LINE_POINTS // num_layers)
    num_experts = max(sum(layer.num_experts for layer in record.layers), 1)
    heat_bins = _bins(record, most=_HEAT_BINS, budget=_HEAT_PIXELS // num_experts)
    labels = json.dumps({"lines": line_bins.labels(), "heat": heat_bins.labels()})
    parts = [header(record, summary)]
    if summary is not None:
        parts += [tiles(record, summary), _layers(record, summary)]
        parts += [_balance(record, summary, line_bins), _loads(record, summary, heat_bins)]
    else:
        parts += [_layers(record, None), _nothing_recorded()]
    parts += [_seconds(record), _timeline(record)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>MoE run: {escaped(record.strategy)}</title>"
        f"<style>{CSS}{style_rules()}</style></head><body><main>\n"
        + "\n".join(parts)
        + f'\n</main><script type="application/json" id="steps">{labels}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _bins(record: RunRecord, *, most: int, budget: int) -> Bins:
    return gather_steps(record.steps_I, max_bins=max(_FEWEST_BINS, min(most, budget)))


def _layers(record: RunRecord, summary: Summary | None) -> str:
    if not record.layers:
        return _section("Replaced layers", "<p>No layer was replaced.</p>")
    rows = "".join(
        f"<tr><td><code>{dotted(layer.name)}</code></td><td>{escaped(layer.kind)}</td>"
        f"<td>{layer.num_experts}</td><td>{layer.top_k or 'unknown'}</td>"
        f"<td>{bytes_text(layer.expert_bytes)}</td>"
        f"<td>{ratio_text(float(summary.mean_L[index])) if summary else EN_DASH}</td></tr>"
        for index, layer in enumerate(record.layers)
    )
    table = (
        '<div class="wide"><table><thead><tr><th>layer</th><th>kind</th><th>experts</th>'
        "<th>top k</th><th>expert weights here</th><th>mean balance</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )
    if len(record.layers) > _OPEN:
        number = counted(len(record.layers), "layer")
        table = f"<details><summary>{number}</summary>{table}</details>"
    return _section("Replaced layers", table)


def _nothing_recorded() -> str:
    return _section(
        "Balance and loads",
        "<p>No steps of a replaced layer were recorded, so there is nothing to draw.</p>",
    )


def _balance(record: RunRecord, summary: Summary, bins: Bins) -> str:
    """Balance over the steps: one chart for few layers, a band and small charts for many."""
    scale = charts.balance_scale(float(summary.balance_IL.max()))
    lines = [
        Line(
            layer.name,
            float(summary.mean_L[index]),
            bins.mean(summary.balance_IL[:, index]),
            bins.lowest(summary.balance_IL[:, index]),
            bins.highest(summary.balance_IL[:, index]),
        )
        for index, layer in enumerate(record.layers)
    ]
    note = _thinned(bins, "shows their mean and, as a band, the smallest and the largest")
    if len(lines) <= len(LINES):
        body = charts.line_chart(lines, bins, scale=scale, small=False)
    else:
        everything = Line(
            "mean of the layers, and a band from the lowest to the highest",
            summary.mean,
            bins.mean(summary.balance_IL.mean(axis=1)),
            bins.lowest(summary.balance_IL.min(axis=1)),
            bins.highest(summary.balance_IL.max(axis=1)),
        )
        body = charts.line_chart([everything], bins, scale=scale, small=False)
        body += _small_charts(sorted(lines, key=lambda line: -line.mean), bins, scale=scale)
    return _section(
        "Balance over the steps",
        '<p class="note">Rows of the busiest cell over the mean cell, at each recorded step.'
        f"{note}</p>"
        f"{body}",
    )


def _small_charts(lines: Sequence[Line], bins: Bins, *, scale: charts.Scale) -> str:
    short = short_names([line.name for line in lines])
    lines = [dataclasses.replace(line, name=short[line.name]) for line in lines]
    drawn = [charts.line_chart([line], bins, scale=scale, small=True) for line in lines]
    first = "".join(drawn[:_OPEN])
    shown = f'<h3>Each layer, worst first</h3><div class="multiples">{first}</div>'
    if len(drawn) <= _OPEN:
        return shown
    rest = "".join(drawn[_OPEN:])
    number = counted(len(drawn) - _OPEN, "more layer")
    return (
        f'{shown}<details><summary>{number}</summary><div class="multiples">{rest}</div></details>'
    )


def _loads(record: RunRecord, summary: Summary, bins: Bins) -> str:
    octaves = heatmap.octaves_of(record, bins)
    panels = [
        Panel(
            layer.name,
            f"balance {ratio_text(float(summary.mean_L[index]))}",
            heatmap.heatmap(record, index, bins=bins, octaves=octaves),
        )
        for index, layer in enumerate(record.layers)
    ]
    note = _thinned(bins, "adds up their rows")
    return _section(
        "Load of the experts",
        f'<p class="note">Which experts drew the rows, step by step.{note}</p>'
        f"{heatmap.legend(octaves)}{_selectable('heat', panels, first=summary.worst_layer)}",
    )


def _thinned(bins: Bins, what: str) -> str:
    if not bins.is_thinned:
        return ""
    return (
        f" The {len(bins.steps_I):,} recorded steps are drawn in {len(bins)} columns: each takes "
        f"{len(bins.steps_I) // len(bins)} or {-(-len(bins.steps_I) // len(bins))} neighbouring "
        f"steps and {what}."
    )


def _seconds(record: RunRecord) -> str:
    title = "Seconds by kind of task"
    if not record.seconds_by_kind:
        return _section(title, "<p>No task was timed.</p>")
    by_phase: dict[str, list[Bar]] = {}
    for key, seconds in record.seconds_by_kind.items():
        phase, kind = _phase_and_kind(key)
        by_phase.setdefault(phase, []).append(Bar(kind, seconds))
    classes = _classes(record)
    total = sum(record.seconds_by_kind.values())
    longest = max(record.seconds_by_kind.values())
    blocks = "".join(
        f"<div>{_phase_head(phase, by_phase[phase], total)}"
        f"{charts.bars(by_phase[phase], classes, longest=longest, total=total)}</div>"
        for phase in sorted(by_phase, reverse=True)  # forward, then backward
    )
    return _section(
        title,
        '<p class="note">Time that this rank spent in tasks, a step on average, waiting included. '
        "Lanes may overlap, so these are not seconds on the clock. Percents are of all "
        f"{seconds_text(total)}.</p>"
        f'<div class="bars-of">{blocks}</div>',
    )


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
        return _section(
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
    note = (
        f" The {len(drawn):,} longest of {len(record.timeline):,} tasks are drawn layer by layer; "
        "the overview has all."
        if left_out
        else ""
    )
    return _section(
        title,
        '<p class="note">Tasks of this rank, a row a lane, with the percent of the time that the '
        f"lane was busy.{note}</p>"
        f"{charts.kind_legend({k: c for k, c in classes.items() if k in traced})}"
        f"<h3>The whole step</h3>{timeline.overview(record.timeline, classes)}"
        f"{_selectable('passes', panels, first=0)}",
    )


def _pass_panel(
    layer: str, passes: list[Pass], *, classes: dict[str, str], drawn: frozenset[Span]
) -> Panel:
    length_s = max(one.length_s for one in passes)
    body = "".join(
        timeline.pass_chart(one, classes, length_s=length_s, drawn=drawn) for one in passes
    )
    return Panel(layer, seconds_text(sum(one.length_s for one in passes)), body)


def _selectable(name: str, panels: Sequence[Panel], *, first: int) -> str:
    """Panels of which the script shows one at a time; without it all stand in a row."""
    options = "".join(
        f"<option{' selected' if index == first else ''}>{escaped(panel.name)} "
        f"({escaped(panel.remark)})</option>"
        for index, panel in enumerate(panels)
    )
    picker = f'<label class="pick">Layer <select name="{name}">{options}</select></label>'
    return (picker if len(panels) > 1 else "") + "".join(
        f'<div data-panel="{name}"><h3><code>{escaped(panel.name)}</code></h3>{panel.body}</div>'
        for panel in panels
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"
