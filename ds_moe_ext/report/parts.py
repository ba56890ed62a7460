# SPDX-License-Identifier: Apache-2.0
"""What the sections of the page are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import counted, escaped

OPEN = 12  # small charts, or rows of a table, that are shown unasked


@dataclass(frozen=True)
class Panel:
    """One entry of a selector, and what it shows."""

    name: str
    remark: str
    body: str


def section(title: str, body: str) -> str:
    """A card of the page."""
    return f"<section><h2>{title}</h2>{body}</section>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All entries are HTML."""
    body = "".join(_row(row, "td") for row in rows)
    return (
        f'<div class="wide"><table><thead>{_row(headings, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(entries: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{entry}</{tag}>' for entry in entries)}</tr>"


def multiples(title: str, charts: Sequence[str]) -> str:
    """Small charts side by side; those beyond the first ones are folded away."""
    shown = f'<h3>{title}</h3><div class="multiples">{"".join(charts[:OPEN])}</div>'
    rest = "".join(charts[OPEN:])
    if not rest:
        return shown
    more = counted(len(charts) - OPEN, "more layer")
    return f'{shown}<details><summary>{more}</summary><div class="multiples">{rest}</div></details>'


def selectable(name: str, panels: Sequence[Panel], *, first: int) -> str:
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


def thinned(bins: Bins, what: str) -> str:
    """That a column stands for several steps, and ``what`` it does with them."""
    if not bins.is_thinned:
        return ""
    return (
        f" The {len(bins.steps_I):,} recorded steps are drawn in {len(bins)} columns: each takes "
        f"{len(bins.steps_I) // len(bins)} or {-(-len(bins.steps_I) // len(bins))} neighbouring "
        f"steps and {what}."
    )
