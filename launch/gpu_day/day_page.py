# SPDX-License-Identifier: Apache-2.0
"""The page of a day on GPUs: every figure, its command and its spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.page import html_document
from ds_moe_ext.report.parts import section, table
from ds_moe_ext.report.units import EN_DASH, seconds_text

SHARED = "ranks share a GPU: what is computed counts, what it takes does not"
REHEARSAL = "A rehearsal without a GPU, in tiny sizes: its figures say nothing."
HEADINGS = ("figure", "median", "unit", "least to most", "values")


def page_of(document: Mapping[str, Any]) -> str:
    """One HTML file that needs no other. Pure.

    Args:
        document: as ``gpu_day.json`` holds it.
    """
    title = "A day on GPUs"
    note = Html("<p><mark>{}</mark></p>").format(REHEARSAL) if document["is_rehearsal"] else ""
    parts = [Html("<header><h1>{}</h1>{}</header>").format(title, note)]
    for stage, rows in groupby(document["rows"], key=lambda row: row["stage"]):
        parts.append(section(stage, joined(map(_row, rows))))
    return html_document(title, parts)


def _row(row: Mapping[str, Any]) -> Html:
    facts = [row["state"], seconds_text(row["seconds"]), row["where"], row["date"], row["why"]]
    facts += [SHARED] if row["is_shared"] else []
    body = Html("<h3>{}</h3><p>{}</p>").format(row["name"], "; ".join(filter(None, facts)))
    body += _folded("command", row["command"])
    if row["last_lines"]:
        body += _folded("last lines", "\n".join(row["last_lines"]))
    if row["figures"]:
        body += table(HEADINGS, [cells(each) for each in row["figures"]])
    return body


def _folded(summary: str, text: str) -> Html:
    return Html("<details><summary>{}</summary><pre>{}</pre></details>").format(summary, text)


def cells(figure: Mapping[str, Any]) -> Sequence[str]:
    """A figure's entries under ``HEADINGS``, as text."""
    low, high = figure["low"], figure["high"]
    between = "" if low is None else f"{number(low)} {EN_DASH} {number(high)}"
    count = "" if low is None else f"{figure['count']}"
    return figure["what"], number(figure["value"]), figure["unit"], between, count


def number(value: float | str) -> str:
    """Four digits that count, or more before the point."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
