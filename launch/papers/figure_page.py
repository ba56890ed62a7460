# SPDX-License-Identifier: Apache-2.0
"""Papers' figures beside ours as one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from ds_moe_ext.report.charts import Line, key, line_chart, thin_bars
from ds_moe_ext.report.markup import Html, joined, note, section, table
from ds_moe_ext.report.page import html_document
from ds_moe_ext.report.units import EN_DASH
from papers.figure import Curve, Figure, Paper, Row

PAPERS, OURS = 0, 1  # colours

Reproduced = tuple[Paper, Sequence[Figure]]


def page_of(papers: Sequence[Reproduced]) -> Html:
    """All figures of some papers. Pure."""
    parts = [
        Html("<h1>The papers' figures, and ours</h1>"),
        Html(
            '<p class="facts">Ours come from the planners, prices and simulator of ds-moe-ext; no '
            "device was used.</p>"
        ),
    ]
    for paper, figures in papers:
        parts += [_inputs(paper), *map(_figure, figures)]
    return html_document(" and ".join(paper.name for paper, _ in papers), parts)


def _inputs(paper: Paper) -> Html:
    lists = {
        "Taken from the paper": paper.inputs,
        "Assumed": paper.assumed,
        "Fitted": paper.fitted,
        "Left out": paper.left_out,
    }
    body = joined(
        Html("<h3>{}</h3>{}").format(name, _listed(texts)) for name, texts in lists.items()
    )
    return section(paper.name, Html("<p>{}</p>{}").format(paper.title, body))


def _listed(texts: Sequence[str]) -> Html:
    return Html("<ul>{}</ul>").format(joined(Html("<li>{}</li>").format(text) for text in texts))


def _figure(figure: Figure) -> Html:
    longest = max((max(row.ours, row.paper or 0.0) for row in figure.rows), default=0.0)
    rows = table(
        ["", "", key(PAPERS, "paper"), key(OURS, "ours"), "off by", ""],
        [_row(figure, row, longest) for row in figure.rows],
    )
    lines = [note(f"{figure.verdict}."), Html('<div class="barred">{}</div>').format(rows)]
    lines.append(_listed([f"{'' if c.holds else 'not so: '}{c.text}" for c in figure.claims]))
    if figure.assumed:
        lines.append(Html("<p>Assumed: {}.</p>").format("; ".join(figure.assumed)))
    if figure.because and not figure.is_met:
        lines.append(Html("<p>Missed because {}.</p>").format(figure.because))
    lines += [_chart(list(curves)) for _, curves in groupby(figure.curves, lambda curve: curve.at)]
    return section(f"{figure.name}: {figure.title}", joined(lines))


def _row(figure: Figure, row: Row, longest: float) -> list[str]:
    bars = [(OURS, row.ours)] if row.paper is None else [(PAPERS, row.paper), (OURS, row.ours)]
    return [
        row.name,
        thin_bars(bars, longest),
        EN_DASH if row.paper is None else f"{row.paper:.4g}",
        f"{row.ours:.4g}",
        EN_DASH if row.miss is None else f"{100 * row.miss:+.1f} %",
        "missed" if figure.is_beyond(row) else "",
    ]


def _chart(curves: Sequence[Curve]) -> Html:
    """Ours over an axis that all of them share."""
    lines = [Line(curve.name, None, np.array(curve.ours)) for curve in curves]
    names = curves[0].at
    return line_chart(
        lines, range(len(names)), what="ours", text="{:.3g}".format, least=0.0, names=names
    )
