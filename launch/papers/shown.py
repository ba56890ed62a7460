# SPDX-License-Identifier: Apache-2.0
"""What ``ds-moe-ext reproduce`` prints: tables and figures of the four papers beside ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ds_moe_ext.report.units import wide_console
from papers.figure import Figure, Paper, met_of
from papers.figure_page import Reproduced, page_of
from papers.fsmoe_figures import FSMOE
from papers.hecate_figures import HECATE
from papers.hetermoe_figures import HETERMOE
from papers.prophet_figures import PROPHET

PAPERS = {"hecate": HECATE, "prophet": PROPHET, "fsmoe": FSMOE, "hetermoe": HETERMOE}


def reproduce(names: Sequence[str], page: Path | None, *, as_json: bool) -> int:
    """Work out all figures of some papers and show them.

    Args:
        names: of papers.
        page: HTML file to write, if any.
        as_json: print one document in place of tables.

    Raises:
        ValueError: the page cannot be written.
    """
    if page is not None and not page.resolve().parent.is_dir():
        raise ValueError(f"--html is {str(page)!r}, whose folder does not exist; make it first")
    console = wide_console(stderr=as_json)
    results = [_shown(PAPERS[name], console, as_json=as_json) for name in dict.fromkeys(names)]
    if as_json:
        json.dump([document_of(*result) for result in results], sys.stdout, indent=2)
        print()
    if page is not None:
        page.write_text(page_of(results), encoding="utf-8")
        console.print(f"wrote {page}", markup=False)
    return 0


def _shown(paper: Paper, console: Console, *, as_json: bool) -> Reproduced:
    """Its figures, each shown when it is ready."""
    if not as_json:
        _show_inputs(paper, console)
    figures = []
    with console.status("") as status:
        for number, make in enumerate(paper.figures, 1):
            status.update(f"{paper.name}: figure {number} of {len(paper.figures)}")
            figures.append(make())
            if not as_json:
                _show(figures[-1], console)
    console.print(f"{paper.name}: {met_of(figures)}\n")
    return paper, figures


def _show_inputs(paper: Paper, console: Console) -> None:
    console.print(f"[bold]{escape(paper.name)}[/bold]: {escape(paper.title)}")
    lists = (
        ("taken from the paper", paper.inputs),
        ("assumed", paper.assumed),
        ("fitted", paper.fitted),
        ("left out", paper.left_out),
    )
    for name, texts in lists:
        console.print(f"  {name}:")
        for text in texts:
            console.print(f"  - {text}", markup=False, highlight=False)
    console.print()


def _show(figure: Figure, console: Console) -> None:
    table = Table(title=escape(f"{figure.name}: {figure.title}"), title_justify="left")
    table.add_column("")
    for heading in ("paper", "ours", "off by", ""):
        table.add_column(heading, justify="right")
    for row in figure.rows:
        table.add_row(
            escape(row.name),
            "" if row.paper is None else f"{row.paper:.4g}",
            f"{row.ours:.4g}",
            "" if row.miss is None else f"{100 * row.miss:+.1f} %",
            "missed" if figure.is_beyond(row) else "",
        )
    console.print(table)
    for text in reported(figure):
        console.print(f"  {text}", markup=False, highlight=False)
    console.print()


def reported(figure: Figure) -> Iterator[str]:
    """What is stated under a figure."""
    yield figure.verdict
    for claim in figure.claims:
        yield f"{'so' if claim.holds else 'not so'}: {claim.text}"
    for text in figure.assumed:
        yield f"assumed: {text}"
    if figure.because and not figure.is_met:
        yield f"missed because {figure.because}"


def document_of(paper: Paper, figures: Sequence[Figure]) -> dict[str, Any]:
    """A paper in JSON."""
    return {
        "name": paper.name,
        "title": paper.title,
        "inputs": paper.inputs,
        "assumed": paper.assumed,
        "fitted": paper.fitted,
        "left_out": paper.left_out,
        "figures": [
            {**asdict(figure), "is_met": figure.is_met, "verdict": figure.verdict}
            for figure in figures
        ],
    }
