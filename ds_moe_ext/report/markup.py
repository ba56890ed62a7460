# SPDX-License-Identifier: Apache-2.0
"""Text that is HTML, apart from all other text, and what the sections of a page are made of.

Builders of pages write ``Html("<b>{}</b>").format(name)``: what is formatted is escaped where it is
no markup itself. Only literals stand in ``Html(...)`` (``tests/test_house.py``), so what a file
says becomes markup nowhere: where ``format`` is forgotten, the page shows escaped tags.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ds_moe_ext.report.units import counted

if TYPE_CHECKING:
    from typing_extensions import Self

OPEN = 12  # small charts, or rows of a table, that are shown unasked


class Html(Markup):
    """Markup; ``format``, ``join`` and ``+`` escape what is none."""

    __slots__ = ()

    @classmethod
    def escape(cls, s: Any, /) -> Self:
        """``s`` for element content and quoted attributes."""
        return cls(s) if isinstance(s, Markup) else cls(html.escape(shown_text(str(s)), quote=True))


def shown_text(text: str) -> str:
    """With U+FFFD for the characters that XML forbids, and others that nobody sees."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def joined(parts: Iterable[str]) -> Html:
    """The parts in a row, escaped where they are no markup."""
    return Html("").join(parts)


def style_sheet() -> Html:
    """That of our pages, which lies beside this file."""
    return Html((Path(__file__).parent / "page.css").read_text("utf-8"))


def dotted(name: str) -> Html:
    """``name``, free to be broken after its dots."""
    return Html(".<wbr>").join(name.split("."))


def in_words(text: str) -> str:
    """For the name of a file: its letters and digits, with dashes between words."""
    return "-".join(re.findall("[a-z0-9]+", text.lower()))


# Sections.


def section(title: str, body: Html) -> Html:
    """A card of the page."""
    return Html("<section><h2>{}</h2>{}</section>").format(title, body)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """Entries are text or markup."""
    head = joined(Html("<th>{}</th>").format(entry) for entry in headings)
    body = joined(
        Html("<tr>{}</tr>").format(joined(Html("<td>{}</td>").format(entry) for entry in row))
        for row in rows
    )
    return Html(
        '<div class="wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(head, body)


def folded(summary: str, body: Html) -> Html:
    """What opens at a click."""
    return Html("<details><summary>{}</summary>{}</details>").format(summary, body)


def note(text: str) -> Html:
    """A paragraph in small print."""
    return Html('<p class="note">{}</p>').format(text)


def barred(about: str, body: Html) -> Html:
    """A table whose second column has bars."""
    return Html('{}<div class="barred">{}</div>').format(note(about), body)


def facts_line(facts: Iterable[str]) -> Html:
    """What a header says in short, below its title."""
    shown = joined(Html("<span>{}</span>").format(fact) for fact in facts)
    return Html('<p class="facts">{}</p>').format(shown)


def multiples(title: str, charts: Sequence[Html]) -> Html:
    """Small charts side by side; those beyond the first ones are folded away."""
    beside = Html('<div class="multiples">{}</div>')
    shown = Html("<h3>{}</h3>{}").format(title, beside.format(joined(charts[:OPEN])))
    if len(charts) <= OPEN:
        return shown
    rest = beside.format(joined(charts[OPEN:]))
    return shown + folded(counted(len(charts) - OPEN, "more layer"), rest)


@dataclass(frozen=True)
class Panel:
    """One entry of a selector, and what it shows."""

    name: str
    notice: str
    body: Html


def selectable(name: str, panels: Sequence[Panel], *, first: int) -> Html:
    """Panels that open at a click, of one ``name`` one at a time; the first one unasked."""
    panel = Html(
        '<details name="{}"{}><summary><code>{}</code> ({})</summary><h3 class="hidden">{}</h3>{}'
        "</details>"
    )
    return joined(
        panel.format(
            name, Html(" open") if at == first else "", each.name, each.notice, each.name, each.body
        )
        for at, each in enumerate(panels)
    )


WORDS = (
    ("EP rank", "a rank of the expert-parallel group, or an ETP group"),
    ("routed token", "one (token, expert) pair, as it is dispatched"),
    ("balance", "routed tokens of the busiest EP rank over the mean; 1 is perfect"),
    ("owner", "the EP rank with an expert's weights and optimizer state"),
    ("replica", "an expert's weights on another EP rank, for one step"),
    ("stream", "a queue of tasks: a CUDA stream, or a thread on a CPU"),
)
"""Our words beside those that users of the hosts know; docs/style.md has more."""


def legend() -> Html:
    """The words of the page, folded."""
    items = joined(Html("<dt>{}</dt><dd>{}</dd>").format(word, what) for word, what in WORDS)
    return Html('<details class="words"><summary>Words</summary><dl>{}</dl></details>').format(
        items
    )
