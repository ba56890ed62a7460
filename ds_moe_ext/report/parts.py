# SPDX-License-Identifier: Apache-2.0
"""What the sections of the page are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import counted

OPEN = 12  # small charts, or rows of a table, that are shown unasked


@dataclass(frozen=True)
class Panel:
    """One entry of a selector, and what it shows."""

    name: str
    remark: str
    body: Html


def section(title: str, body: Html) -> Html:
    """A card of the page."""
    return Html("<section><h2>{}</h2>{}</section>").format(title, body)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """Entries are text or markup."""
    head = _row(headings, Html("<th>{}</th>"))
    body = joined(_row(row, Html("<td>{}</td>")) for row in rows)
    return Html('<div class="wide"><table><thead>{}</thead><tbody>{}</tbody></table></div>').format(
        head, body
    )


def _row(entries: Sequence[str], cell: Html) -> Html:
    return Html("<tr>{}</tr>").format(joined(cell.format(entry) for entry in entries))


def folded(summary: str, body: Html) -> Html:
    """What opens at a click."""
    return Html("<details><summary>{}</summary>{}</details>").format(summary, body)


def note(text: str) -> Html:
    """A paragraph in small print."""
    return Html('<p class="note">{}</p>').format(text)


def multiples(title: str, charts: Sequence[Html]) -> Html:
    """Small charts side by side; those beyond the first ones are folded away."""
    beside = Html('<div class="multiples">{}</div>')
    shown = Html("<h3>{}</h3>{}").format(title, beside.format(joined(charts[:OPEN])))
    rest = joined(charts[OPEN:])
    if not rest:
        return shown
    return shown + folded(counted(len(charts) - OPEN, "more layer"), beside.format(rest))


def selectable(name: str, panels: Sequence[Panel], *, first: int) -> Html:
    """Panels of which the script shows one at a time; without it all stand in a row."""
    options = joined(
        Html("<option{}>{} ({})</option>").format(
            Html(" selected") if index == first else "", panel.name, panel.remark
        )
        for index, panel in enumerate(panels)
    )
    picker = Html('<label class="pick">Layer <select name="{}">{}</select></label>')
    shown = joined(
        Html('<div data-panel="{}"><h3><code>{}</code></h3>{}</div>').format(
            name, panel.name, panel.body
        )
        for panel in panels
    )
    return picker.format(name, options) + shown if len(panels) > 1 else shown


def thinned(bins: Bins, what: str) -> str:
    """That a column stands for several steps, and ``what`` it does with them."""
    if not bins.is_thinned:
        return ""
    return (
        f" The {len(bins.steps_I):,} recorded steps are drawn in {len(bins)} columns: each takes "
        f"{len(bins.steps_I) // len(bins)} or {-(-len(bins.steps_I) // len(bins))} neighbouring "
        f"steps and {what}."
    )
