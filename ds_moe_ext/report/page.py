# SPDX-License-Identifier: Apache-2.0
"""The page a run leaves behind: one HTML file that needs nothing else to be read.

``html_document`` makes any page of ours, ``page_of`` that of a run, of the sections below it, in
their order. Its style sheet lies beside this file; nothing in a page runs.

Shape letters: I recorded steps, B columns of them, L layers, E experts, C EP ranks, G points at
which ranks exchanged reports, R ranks.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ds_moe_ext.report import charts, timeline
from ds_moe_ext.report.charts import key, thin_bars
from ds_moe_ext.report.markup import (
    OPEN,
    Html,
    Panel,
    barred,
    dotted,
    facts_line,
    folded,
    joined,
    legend,
    note,
    section,
    selectable,
    style_sheet,
    table,
)
from ds_moe_ext.report.over_steps import (
    balance,
    division,
    gain,
    heat_bins,
    line_bins,
    pace_charts,
    paces_of,
    thinned,
    waited_for,
)
from ds_moe_ext.report.record import PlacementRecord, RunRecord
from ds_moe_ext.report.summary import (
    BASE,
    NAN,
    Bins,
    Summary,
    choice_line,
    found_s,
    outcome_of,
    outcomes_by_layer,
    saved_line,
    scores_line,
    summarize,
    took_line,
    verdict,
)
from ds_moe_ext.report.timeline import Pass
from ds_moe_ext.report.units import (
    EN_DASH,
    bytes_text,
    counted,
    ratio_text,
    seconds_text,
    short_count,
)

_SAME = 0.03  # balances that differ by a smaller share are called the same


def page_of(record: RunRecord) -> Html:
    """One self-contained HTML page about ``record``. Pure.

    Long runs are drawn in fewer columns than they have steps, always the same ones, and the page
    says so; all numbers in words and tables are of every recorded step.
    """
    summary = summarize(record)
    lines = line_bins(record)
    parts = [_header(record, summary)]
    if summary is not None:
        parts += [_tiles(record, summary), pace_charts(paces_of({record.strategy: record}))]
        parts += [_layers(record, summary)]
        if record.placements is not None:
            parts.append(gain(record, record.placements, lines))
        if record.looks is not None:
            parts.append(division(record, record.looks))
        parts += [balance(record, lines), _loads(record, summary, heat_bins(record))]
    else:
        nothing = "No step of a replaced layer was recorded, so there is nothing to draw."
        parts += [
            _layers(record, None),
            section("Balance and loads", Html("<p>{}</p>").format(nothing)),
        ]
    parts += [_chosen(record), _seconds(record), waited_for(record.ranks), _expected(record)]
    parts.append(_timeline(record))
    return html_document(f"MoE run: {record.strategy}", parts)


def html_document(title: str, parts: Sequence[Html]) -> Html:
    """A page with our style, in which no script runs."""
    style = Html("\n{}").format(style_sheet())
    why = charts.why_none()
    missing = note(f"{why} and draw the page again by ds-moe-ext report.") if why else Html("")
    return Html(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>{title}</title><style>{style}</style></head><body><main>\n{missing}{parts}\n"
        "</main></body></html>\n"
    ).format(
        policy=_POLICY.format(style=_sha256(style)),
        title=title,
        style=style,
        missing=missing,
        parts=Html("\n").join(parts),
    )


_POLICY = Html(
    "default-src 'none'; style-src-elem '{style}'; style-src-attr 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Behind the escaping, for browsers: no script, our style sheet by its sum, and images that lie in
the page. Attributes ``style`` give bars their widths."""


def _sha256(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# The top of the page.


def _header(record: RunRecord, summary: Summary | None) -> Html:
    """Strategy, sizes, versions, the verdict, and below it what it rests on."""
    steps = "no recorded steps"
    if record.steps_I:
        first, last = record.steps_I[0], record.steps_I[-1]
        which = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        steps = f"{counted(len(record.steps_I), 'recorded step')}, {which}"
    facts = [
        counted(record.world_size, "rank"),
        counted(record.num_ep_ranks, "EP rank"),
        counted(len(record.layers), "MoE layer"),
        steps,
    ]
    lines = (line(record) for line in (scores_line, saved_line, took_line, choice_line))
    in_time = " ".join(f"{line[:1].upper()}{line[1:]}." for line in lines if line)
    opened = verdict(record)
    return Html(
        '<header><h1>MoE run with <code>{}</code></h1>{}{}<p class="verdict">{}.</p>{}{}{}</header>'
    ).format(
        record.strategy,
        facts_line(facts),
        facts_line(f"{name} {text}" for name, text in record.versions.items()),
        opened[0].upper() + opened[1:],
        note(in_time) if in_time else "",
        note(_in_balance(record, summary)) if summary else "",
        legend(),
    )


def _in_balance(record: RunRecord, summary: Summary) -> Html:
    """How balanced the run was, in words."""
    where = Html("; layer <code>{}</code> was worst, with <b>{:.2f}</b>").format(
        dotted(record.layers[summary.worst_layer].name), summary.mean_L[summary.worst_layer]
    )
    text = Html(
        "The busiest EP rank computed <b>{:.2f} times the mean</b> on average{}. The average "
        "EP rank waited for it during {:.0f} % of the expert time."
    ).format(summary.mean, where if len(record.layers) > 1 else "", 100 * (1 - 1 / summary.mean))
    if record.placements is not None:
        outcome, added = outcome_of(record), record.placements.added
        late = ""
        if added is not None:
            late = f", {added.replicas_ILE.sum(axis=(1, 2)).mean():.1f} of them made after the gate"
        moved = f", and owners changed {counted(outcome.num_moved, 'time')}"
        text += Html(
            " Without replicas it would have computed <b>{:.2f} times the mean</b>. There "
            "were {:.1f} replicas a step{}{}."
        ).format(outcome.owner_balance, outcome.replicas, late, moved if outcome.num_moved else "")
    if summary.drift is None:
        return text
    first, last = summary.drift
    if abs(last - first) < _SAME * first:
        return text + f" This ratio was about {last:.2f} in the first and in the last quarter."
    verb = "improved" if last < first else "grew worse"
    return text + (
        f" Over the run this ratio {verb}, from {first:.2f} in the first quarter to {last:.2f} in "
        "the last."
    )


def _tiles(record: RunRecord, summary: Summary) -> Html:
    """The headline numbers of a run with steps."""
    worst = record.layers[summary.worst_layer].name
    weights = sum(layer.expert_bytes for layer in record.layers)
    moment, hot = summary.moment, summary.hot
    shown = [
        ("mean balance", ratio_text(summary.mean), "1 is perfect"),
        ("worst layer", ratio_text(float(summary.mean_L[summary.worst_layer])), worst),
        ("worst moment", ratio_text(moment.ratio), f"step {moment.at:,}, {moment.layer}"),
        ("busiest expert", ratio_text(hot.ratio), f"the mean expert: {hot.at} of {hot.layer}"),
        ("rows computed", short_count(summary.num_rows), "in the recorded steps"),
        ("expert weights", bytes_text(weights), "on this rank"),
    ]
    if record.placements is not None:
        outcome = outcome_of(record)
        shown[1:1] = [
            ("without replicas", ratio_text(outcome.owner_balance), "experts at their owners")
        ]
        moved = f"{outcome.num_moved:,} changed their owners"
        shown[-2:-2] = [("replicas", f"{outcome.replicas:.1f}", f"a step; {moved}")]
    drawn = joined(
        Html("<div><span>{}</span><b>{}</b><span>{}</span></div>").format(name, value, dotted(more))
        for name, value, more in shown
    )
    columns = 4 if record.placements else 6
    return Html('<div class="tiles" style="--columns:{}">{}</div>').format(columns, drawn)


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
        headings += ["without replicas", "replicas a step", "changed owners"]
        for row, outcome in zip(rows, outcomes_by_layer(record)):
            row += [ratio_text(outcome.owner_balance), f"{outcome.replicas:.1f}"]
            row += [f"{outcome.num_moved:,}"]
    body = table(headings, rows)
    if len(record.layers) > OPEN:
        body = folded(counted(len(record.layers), "layer"), body)
    return section("Replaced layers", body)


# Loads of the experts, and their replicas.


def _loads(record: RunRecord, summary: Summary, bins: Bins) -> Html:
    octaves, most_replicas = octaves_of([record], bins), None
    about = f"Routed tokens of each expert, step by step.{thinned(bins, 'adds up their tokens')}"
    title, placements = "Load of the experts", record.placements
    if placements is not None:
        title, most_replicas = f"{title}, and their replicas", most_replicas_of(placements)
        about += (
            " Next to them: how many replicas each expert had, and on which EP ranks in step "
            f"{placements.last_step:,}, the last one. Experts are listed under their owner of "
            "that step."
        )
        if placements.added is not None:
            about += " Replicas made after the gate are counted if any pass of the step had them."
    scale = charts.load_scale(
        octaves, most_replicas, has_late=placements is not None and placements.added is not None
    )
    panels = [
        Panel(
            layer.name,
            f"balance {ratio_text(float(summary.mean_L[index]))}",
            layer_loads(record, index, bins, octaves=octaves),
        )
        for index, layer in enumerate(record.layers)
    ]
    shown = selectable("heat", panels, first=summary.worst_layer)
    return section(title, note(about) + scale + note(_DOWN) + shown)


_DOWN = (
    "Rows: experts, grouped by their owner, with the owner's load over the mean. Columns: "
    "recorded steps."
)


def octaves_of(records: Iterable[RunRecord], bins: Bins) -> int:
    """What the colours of loads span in some runs."""
    return charts.load_octaves(
        _ratio(record, index, bins) for record in records for index in range(len(record.layers))
    )


def most_replicas_of(placements: PlacementRecord) -> int:
    """Of any expert at any step."""
    return int(placements.all_replicas_ILE.max(initial=0))


def _ratio(record: RunRecord, index: int, bins: Bins) -> np.ndarray:
    """Rows of each expert of a layer over its mean expert, float ``[B, E]``; 1 where no rows came
    at all."""
    rows_ILE = record.rows_ILE[:, index, : record.layers[index].num_experts]
    rows_BE = bins.total(rows_ILE).astype(np.float64)
    mean_B1 = rows_BE.mean(axis=1, keepdims=True)
    return np.where(mean_B1 > 0, rows_BE / np.maximum(mean_B1, 1e-12), 1.0)


def layer_loads(
    record: RunRecord, index: int, bins: Bins, *, octaves: int, half: bool = False
) -> Html:
    """Loads of one layer over the steps, and in a page of one run its replicas."""
    layer, placements = record.layers[index], None if half else record.placements
    rows_E = record.rows_ILE[:, index, : layer.num_experts].sum(axis=0)
    experts = charts.Experts.of(layer.owner_E, rows_E, record.num_ep_ranks, bins.labels())
    ratio_BE = _ratio(record, index, bins)
    if placements is None:
        drawn = charts.load_heatmap(experts, ratio_BE, octaves=octaves, half=half)
    else:
        drawn = charts.load_heatmap(
            experts,
            ratio_BE,
            octaves=octaves,
            replicas_BE=bins.mean(placements.all_replicas_ILE[:, index, : layer.num_experts]),
            most_replicas=most_replicas_of(placements),
            kind_EC=holders(record, placements, index),
        )
    empty = record.num_ep_ranks - len(experts.load_C)
    return drawn + (
        note(f"{counted(empty, 'EP rank')} have no expert of this layer.") if empty else ""
    )


def holders(record: RunRecord, placements: PlacementRecord, index: int) -> np.ndarray:
    """What each EP rank was to each expert of a layer in the last step, ``[E, C]``."""
    layer = record.layers[index]
    kind_EC = np.full((layer.num_experts, record.num_ep_ranks), charts.NOBODY)
    kind_EC[np.arange(layer.num_experts), np.asarray(layer.owner_E, dtype=np.int64)] = charts.OWNER
    for expert, ep_ranks in enumerate(placements.copied_to[index]):
        kind_EC[expert, list(ep_ranks)] = charts.REPLICA
    if placements.added is not None:
        for expert, late in enumerate(placements.added.to[index]):
            kind_EC[expert, [ep_rank for ep_rank, _ in late]] = charts.LATE
    return kind_EC


# Which strategy planned from which step on, and what plans expected.


def _chosen(record: RunRecord) -> Html:
    """A line for each change; nothing of a run that had no choice."""
    if not record.choices:
        return Html("")
    about = (
        "One strategy was active at a time. Until costs had been measured, experts computed "
        "at their owners."
    )
    lines = joined(
        Html("<li>From step {:,}: <strong>{}</strong>. {}</li>").format(
            each.step, each.name, each.reported
        )
        for each in record.choices
    )
    body = Html("{}<ul>{}</ul>").format(note(about), lines)
    if any(each.expected_s for each in record.choices):  # not of a file of an earlier version
        headings = [
            "from step",
            "ran",
            f"{BASE} (estimated)",
            "active strategy (estimated)",
            "measured",
        ]
        rows = []
        for index, each in enumerate(record.choices):
            seconds = [each.expected_s.get(name, NAN) for name in (BASE, each.name)]
            seconds.append(found_s(record, index))
            reported = (EN_DASH if math.isnan(one) else seconds_text(one) for one in seconds)
            rows.append([f"{each.step:,}", each.name, *reported])
        body += table(headings, rows)
    return section("Strategy chosen by auto", body)


def _expected(record: RunRecord) -> Html:
    """What the strategy's model of costs predicted of the layers, beside what they took; nothing of
    a run whose model was not checked."""
    if not record.terms:
        return Html("")
    longest_s = max(max(term.predicted_s, term.found_s) for term in record.terms)
    rows = [
        [
            term.name,
            thin_bars([(0, term.predicted_s), (1, term.found_s)], longest_s),
            seconds_text(term.predicted_s),
            seconds_text(term.found_s),
            f"{100 * term.error:,.1f} %",
        ]
        for term in record.terms
    ]
    which, steps = "A few early steps were checked.", record.terms[0].steps
    if steps:
        first, last = steps[0], steps[-1]
        which = f"Steps {first:,} to {last:,} were" if last > first else f"Step {first:,} was"
        which += " checked, soon after costs had been measured."
    about = (
        f'{which} "Expected" applies the measured costs to the tokens that arrived and to the '
        "transfers of tokens, replicas and gradients. Seconds are of one layer in one step, "
        "forward and backward, on average. An all-to-all counts as on its last rank, which "
        "does not wait; experts count where they took longest; replicas and gradients count "
        "as on the mean rank. The Pro-Prophet paper claims a mean error of less than 5 % on "
        "its cluster."
    )
    headings = ["term", "", key(0, "expected"), key(1, "took"), "mean error"]
    return section("Expected and measured cost", barred(about, table(headings, rows)))


# Where the time of a step went.


def _seconds(record: RunRecord) -> Html:
    title = "Seconds by kind of task"
    if not record.seconds_by_kind:
        return section(title, Html("<p>No task was timed.</p>"))
    total = sum(record.seconds_by_kind.values())
    longest = max(record.seconds_by_kind.values())
    blocks = joined(
        Html("<div><h3>{}: {}, {:.1f} %</h3>{}</div>").format(
            phase,
            seconds_text(sum(kinds.values())),
            100 * sum(kinds.values()) / max(total, 1e-12),
            kind_table(kinds, longest=longest, total=total),
        )
        for phase, kinds in sorted(seconds_by_phase(record).items(), reverse=True)  # forward first
    )
    about = (
        "Time that this rank spent in tasks per step, on average, including waiting. Streams "
        "may overlap, so the sum exceeds the step time. Percentages are of all "
        f"{seconds_text(total)}."
    )
    return section(title, Html('{}<div class="two">{}</div>').format(note(about), blocks))


def seconds_by_phase(record: RunRecord) -> dict[str, dict[str, float]]:
    """Seconds of each kind of task, forward and backward."""
    by_phase: dict[str, dict[str, float]] = {}
    for name, seconds in record.seconds_by_kind.items():
        phase, _, kind = name.rpartition(":")
        by_phase.setdefault(phase or "all", {})[kind] = seconds
    return by_phase


def kind_table(kinds: Mapping[str, float], *, longest: float, total: float) -> Html:
    """Kinds of task, longest first, each with its seconds and its percent of ``total``."""
    rows = [
        [
            kind,
            thin_bars([(0, seconds)], longest),
            seconds_text(seconds),
            f"{100 * seconds / max(total, 1e-12):.1f} %",
        ]
        for kind, seconds in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Html('<div class="barred">{}</div>').format(table(["", "", "", ""], rows))


def _timeline(record: RunRecord) -> Html:
    title = "Timeline of one step"
    if not record.timeline:
        return section(
            title,
            Html(
                "<p>No step was traced; set <code>report.trace_step</code> to the step to "
                "trace.</p>"
            ),
        )
    colours = charts.colours_of(traced_task.name for traced_task in record.timeline)
    held: dict[str, list[Pass]] = {}
    for one in timeline.passes_of(record.timeline):
        held.setdefault(one.layer, []).append(one)
    panels = []
    for layer, passes in held.items():
        took_s = sum(one.length_s for one in passes)
        panels.append(Panel(layer, seconds_text(took_s), timeline.layer_chart(passes, colours)))
    about = (
        "Tasks of this rank, one line per stream, with the percentage of time that the stream "
        f"was busy.{timeline.hidden(record.timeline)}{timeline.critical(record.timeline)}"
    )
    body = Html("{}<h3>The whole step</h3>{}{}").format(
        note(about),
        timeline.overview(timeline.Step(record.timeline, record.traced_s), colours),
        selectable("passes", panels, first=0),
    )
    return section(title, body)
