# SPDX-License-Identifier: Apache-2.0
"""The top of the page: what ran, how balanced it was in words, and its headline numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ds_moe_ext.report.glossary import legend
from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.summary import Drift, Summary, outcome_of, scores_line, took_line
from ds_moe_ext.report.time_saved import choice_line, saved_line
from ds_moe_ext.report.units import (
    bytes_text,
    counted,
    dotted,
    ratio_text,
    short_count,
)
from ds_moe_ext.report.verdict import verdict

_SAME = 0.03  # balances that differ by a smaller share are called the same


def header(record: RunRecord, summary: Summary | None) -> Html:
    """Strategy, sizes, versions, the verdict, and below it what it rests on."""
    facts = [
        counted(record.world_size, "rank"),
        counted(record.num_cells, "EP rank"),
        counted(len(record.layers), "MoE layer"),
        _steps_fact(record),
    ]
    versions = [f"{name} {text}" for name, text in record.versions.items()]
    opened = verdict(record)
    balances = Html('<p class="note">{}</p>').format(_balances(record, summary)) if summary else ""
    return Html(
        '<header><h1>MoE run with <code>{}</code></h1>{}{}<p class="verdict">{}.</p>{}{}{}</header>'
    ).format(
        record.strategy,
        facts_line(facts),
        facts_line(versions),
        opened[0].upper() + opened[1:],
        _in_time(record),
        balances,
        legend(),
    )


def facts_line(facts: Iterable[str]) -> Html:
    """What a header says in short, below its title."""
    spans = joined(Html("<span>{}</span>").format(fact) for fact in facts)
    return Html('<p class="facts">{}</p>').format(spans)


def _steps_fact(record: RunRecord) -> str:
    if not record.steps_I:
        return "no recorded steps"
    first, last = record.steps_I[0], record.steps_I[-1]
    which = f"{first:,} to {last:,}" if last > first else f"{first:,}"
    return f"{counted(len(record.steps_I), 'recorded step')}, {which}"


def _in_time(record: RunRecord) -> Html:
    """What steps took, in words, and what copies and choices did for that."""
    lines = [
        line for told in (scores_line, saved_line, took_line, choice_line) if (line := told(record))
    ]
    told = " ".join(f"{line[:1].upper()}{line[1:]}." for line in lines)
    return Html('<p class="note">{}</p>').format(told) if told else Html("")


def _balances(record: RunRecord, summary: Summary) -> Html:
    """How balanced the run was, in words."""
    idle = 1 - 1 / summary.mean
    worst = record.layers[summary.worst_layer].name
    where = Html("; layer <code>{}</code> was worst, with <b>{:.2f}</b>").format(
        dotted(worst), summary.mean_L[summary.worst_layer]
    )
    return Html(
        "The busiest EP rank (cell) computed <b>{:.2f} times the mean</b> on average{}. An average "
        "one waited for the busiest during {:.0f} % of the expert time.{}{}"
    ).format(
        summary.mean,
        where if len(record.layers) > 1 else "",
        100 * idle,
        _placements(record),
        _drift(summary.drift),
    )


def _placements(record: RunRecord) -> Html:
    if record.placements is None:
        return Html("")
    outcome = outcome_of(record)
    moved = f", and homes changed {counted(outcome.num_moved, 'time')}"
    added = record.placements.added
    late = "" if added is None else f", {_a_step(added.copies_ILE):.1f} of them made after the gate"
    return Html(
        " With every expert at its home only it would have computed <b>{:.2f} times the mean</b>. "
        "There were {:.1f} copies a step{}{}."
    ).format(outcome.home_balance, outcome.copies, late, moved if outcome.num_moved else "")


def _a_step(copies_ILE: np.ndarray) -> float:
    return float(copies_ILE.sum(axis=(1, 2)).mean())


def _drift(drift: Drift | None) -> str:
    if drift is None:
        return ""
    change = drift.last - drift.first
    if abs(change) < _SAME * drift.first:
        return f" This ratio was about {drift.last:.2f} in the first and in the last quarter."
    verb = "improved" if change < 0 else "grew worse"
    return (
        f" Over the run this ratio {verb}, from {drift.first:.2f} in the first quarter to "
        f"{drift.last:.2f} in the last."
    )


def tiles(record: RunRecord, summary: Summary) -> Html:
    """The headline numbers of a run with steps."""
    worst = record.layers[summary.worst_layer].name
    weights = sum(layer.expert_bytes for layer in record.layers)
    shown = [
        ("mean balance", ratio_text(summary.mean), "1 is perfect"),
        ("worst layer", ratio_text(float(summary.mean_L[summary.worst_layer])), worst),
        (
            "worst moment",
            ratio_text(summary.moment.ratio),
            f"step {summary.moment.step:,}, {summary.moment.layer}",
        ),
        (
            "busiest expert",
            ratio_text(summary.hot.ratio),
            f"the mean expert: {summary.hot.expert} of {summary.hot.layer}",
        ),
        ("rows computed", short_count(summary.num_rows), "in the recorded steps"),
        ("expert weights", bytes_text(weights), "on this rank"),
    ]
    if record.placements is not None:
        outcome = outcome_of(record)
        shown[1:1] = [("at home only", ratio_text(outcome.home_balance), "without copies")]
        moved = f"{outcome.num_moved:,} changed their homes"
        shown[-2:-2] = [("copies", f"{outcome.copies:.1f}", f"a step; {moved}")]
    drawn = joined(
        Html("<div><span>{}</span><b>{}</b><span>{}</span></div>").format(
            name, value, dotted(remark)
        )
        for name, value, remark in shown
    )
    return Html('<div class="tiles" style="--columns:{}">{}</div>').format(
        4 if record.placements else 6, drawn
    )
