# SPDX-License-Identifier: Apache-2.0
"""Text that is HTML or SVG, apart from all other text, which is escaped where the two meet.

Builders of pages write ``Html("<b>{}</b>").format(name)``. Only literals stand in ``Html(...)``
(``tests/test_house.py``), so what a file says becomes markup nowhere: where ``format`` is
forgotten, the page shows escaped tags.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from markupsafe import Markup

if TYPE_CHECKING:
    from typing_extensions import Self

_HERE = Path(__file__).parent


class Html(Markup):
    """Markup; ``format``, ``join`` and ``+`` escape what is none."""

    __slots__ = ()

    @classmethod
    def escape(cls, s: Any, /) -> Self:
        """``s`` for element content and quoted attributes of HTML and SVG.

        Characters that XML forbids become U+FFFD.
        """
        if isinstance(s, Markup):
            return cls(s)
        text = str(s)
        if not text.isprintable():
            text = "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)
        return cls(html.escape(text, quote=True))


def joined(parts: Iterable[str]) -> Html:
    """The parts in a row, escaped where they are no markup."""
    return Html("").join(parts)


def in_script(json_text: str) -> Html:
    """JSON for a ``<script type="application/json">``: no string in it ends the element."""
    return Html(json_text.replace("<", "\\u003c"))


def of_element(element: ET.Element) -> Html:
    """An element with all that is in it."""
    return Html(ET.tostring(element, encoding="unicode"))


def own_file(name: str) -> Html:
    """A style sheet or script that lies beside this file."""
    return Html((_HERE / name).read_text("utf-8"))
