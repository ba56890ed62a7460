# SPDX-License-Identifier: Apache-2.0
"""Papers' figures beside ours as one HTML page that needs no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from ds_moe_ext.papers.figure import Curve, Figure, Paper, Row
from ds_moe_ext.report.charts import axis_labels, key, thin_bars
from ds_moe_ext.report.page import html_document
from ds_moe_ext.report.parts import section, table
from ds_moe_ext.report.units import EN_DASH, escaped, round_steps

PAPERS, OURS = 0, 1  # colours
_UNITS = 1000  # of a chart's viewBox, to either side
_TALL = 180  # pixels

Reproduced = tuple[Paper, Sequence[Figure]]


def page_of(papers: Sequence[Reproduced]) -> str:
    """All figures of some papers. Pure."""
    parts = [
        "<h1>The papers' figures, and ours</h1>",
        '<p class="facts">Ours come from the planners, prices and simulator of ds-moe-ext; no '
        "device was used.</p>",
    ]
    for paper, figures in papers:
        parts += [_inputs(paper), *map(_figure, figures)]
    return html_document(" and ".join(paper.name for paper, _ in papers), parts)


def _inputs(paper: Paper) -> str:
    lists = {
        "Taken from the paper": paper.inputs,
        "Assumed": paper.assumed,
        "Fitted": paper.fitted,
        "Left out": paper.left_out,
    }
    body = "".join(f"<h3>{name}</h3>{_listed(texts)}" for name, texts in lists.items())
    return section(escaped(paper.name), f"<p>{escaped(paper.title)}</p>{body}")


def _listed(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(text)}</li>' for text in texts)}</ul>"


def _figure(figure: Figure) -> str:
    longest = max((max(row.ours, row.paper or 0.0) for row in figure.rows), default=0.0)
    rows = table(
        ["", "", key(PAPERS, "paper"), key(OURS, "ours"), "off by", ""],
        [_row(figure, row, longest) for row in figure.rows],
    )
    told = [f'<p class="note">{escaped(figure.verdict)}.</p>', f'<div class="terms">{rows}</div>']
    told.append(_listed([f"{'' if c.holds else 'not so: '}{c.text}" for c in figure.claims]))
    if figure.assumed:
        told.append(f"<p>Assumed: {escaped('; '.join(figure.assumed))}.</p>")
    if figure.because and not figure.is_met:
        told.append(f"<p>Missed because {escaped(figure.because)}.</p>")
    told += [_chart(list(curves)) for _, curves in groupby(figure.curves, lambda curve: curve.at)]
    return section(f"{escaped(figure.name)}: {escaped(figure.title)}", "".join(told))


def _row(figure: Figure, row: Row, longest: float) -> list[str]:
    bars = [(OURS, row.ours)] if row.paper is None else [(PAPERS, row.paper), (OURS, row.ours)]
    return [
        escaped(row.name),
        thin_bars(row.name, bars, longest),
        EN_DASH if row.paper is None else f"{row.paper:.4g}",
        f"{row.ours:.4g}",
        EN_DASH if row.miss is None else f"{100 * row.miss:+.1f} %",
        "missed" if figure.is_beyond(row) else "",
    ]


def _chart(curves: Sequence[Curve]) -> str:
    """Ours over an axis that all of them share."""
    highest = max(value for curve in curves for value in curve.ours)
    highest = highest if highest > 1e-9 else 1.0
    step = round_steps(highest, max_ticks=4)
    top = step * math.ceil(highest / step)
    ticks = [step * tick for tick in range(round(top / step) + 1)]
    grid = "".join(
        f'<line x1="0" x2="100%" y1="{100 * (1 - tick / top):.4g}%" '
        f'y2="{100 * (1 - tick / top):.4g}%"/>'
        for tick in ticks
    )
    marks = "".join(
        f'<span style="top:{100 * (1 - tick / top):.4g}%">{tick:.3g}</span>' for tick in ticks
    )
    count = len(curves[0].at)
    lefts = [100 * (place + 0.5) / count for place in range(count)]
    lines = "".join(
        f'<g class="s{slot}"><path class="line" d="M{"L".join(_points(curve, lefts, top))}"/></g>'
        for slot, curve in enumerate(curves)
    )
    legend = "".join(
        f"<span>{key(slot, escaped(curve.name))}</span>" for slot, curve in enumerate(curves)
    )
    return (
        f'<figure class="lines"><figcaption class="legend">{legend}</figcaption>'
        f'<div class="axes"><div class="marks">{marks}</div>'
        f'<svg class="plot" height="{_TALL}" role="img" aria-label="ours">{grid}'
        f'<svg width="100%" height="100%" viewBox="0 0 {_UNITS} {_UNITS}" '
        f'preserveAspectRatio="none">{lines}</svg></svg>'
        f"{axis_labels([escaped(name) for name in curves[0].at], lefts)}</div></figure>"
    )


def _points(curve: Curve, lefts: Sequence[float], top: float) -> list[str]:
    return [
        f"{_UNITS * left / 100:.0f} {_UNITS * (1 - value / top):.0f}"
        for left, value in zip(lefts, curve.ours)
    ]
