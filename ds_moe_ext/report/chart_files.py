# SPDX-License-Identifier: Apache-2.0
"""Every chart of a page as an SVG file of its own, with its labels, legend and colours.

On the page labels are HTML around a drawing that stretches; here they are put in their places on a
sheet of one width. In a browser the page's own script saves what is seen (``save.js``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

from ds_moe_ext.report.colours import file_rules
from ds_moe_ext.report.markup import Html, of_element

CHARTS = ("lines", "heat", "map", "bars", "stacked", "timeline", "pass")
"""Classes of elements that are charts; as ``save.js`` has them."""

_WIDE, _MARGIN = 960.0, 12.0  # pixels
_LINE = 18.0  # a line of text
_LETTER = 6.4  # of it, wide
_LEFT = {"lines": 60.0}  # for labels beside a drawing
_LEFT_ELSE = 132.0
_HEADINGS, _CAPTION, _INNER, _IMAGE = ("h2", "h3", "h4"), "figcaption", "i", "img"
_DRAWINGS = ("svg", _IMAGE)
_VOID = {"meta", _IMAGE, "wbr", "br", "link"}


def chart_files(page: str) -> dict[str, str]:
    """SVG of each chart of a page, by a name made of the headings above it. Pure."""
    found: dict[str, str] = {}
    for name, chart in _charts(_tree(page)):
        numbered = (name if number == 1 else f"{name}-{number}" for number in range(1, 10**6))
        sheet = _Sheet()
        sheet.add(chart)
        found[next(each for each in numbered if each not in found)] = sheet.file()
    return found


class _Tree(HTMLParser):
    """An element tree of HTML that closes what it opens."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = ET.Element("page")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {_CASED.get(name, name): value or "" for name, value in attrs}
        made = ET.SubElement(self._open[-1], tag, given)
        if tag not in _VOID:
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        here = self._open[-1]
        if len(here):
            here[-1].tail = (here[-1].tail or "") + data
        else:
            here.text = (here.text or "") + data


_CASED = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}
"""Attributes of SVG, which HTML's parser makes small."""


def _tree(page: str) -> ET.Element:
    tree = _Tree()
    tree.feed(page)
    tree.close()
    return tree.root


def _charts(page: ET.Element) -> Iterator[tuple[str, ET.Element]]:
    """Charts in their order, each with a name for a file."""
    above: dict[str, str] = {}
    for element in page.iter():
        if element.tag in _HEADINGS:
            above = {tag: text for tag, text in above.items() if tag < element.tag}
            above[element.tag] = _text(element).partition(":")[0]
        elif not _classes(element).isdisjoint(CHARTS):
            phase = _text(element.find("figcaption/b")) if "pass" in _classes(element) else ""
            told = "map" if "map" in _classes(element) else phase
            words = re.findall("[a-z0-9]+", " ".join([*above.values(), told]).lower())
            yield "-".join(words)[:120] or "chart", element


def _classes(element: ET.Element) -> set[str]:
    return set(element.get("class", "").split())


def _text(element: ET.Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def _place(element: ET.Element, side: str, whole: float) -> float:
    """Where a label is put by its style, in pixels of ``whole``."""
    found = re.search(rf"\b{side}:([-\d.e]+)(%?)", element.get("style", ""))
    assert found is not None
    return float(found[1]) * (whole / 100 if found[2] else 1)


class _Sheet:
    """A chart that grows downwards."""

    def __init__(self) -> None:
        self._parts: list[Html] = []
        self._height = 0.0

    def file(self) -> Html:
        """The SVG."""
        return Html(
            '<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            'viewBox="{edge:g} {edge:g} {width:g} {height:g}"><style>{rules}</style>'
            '<rect class="sheet" x="{edge:g}" y="{edge:g}" width="100%" height="100%"/>\n'
            "{parts}\n</svg>\n"
        ).format(
            width=_WIDE + 2 * _MARGIN,
            height=self._height + 2 * _MARGIN,
            edge=-_MARGIN,
            rules=file_rules(),
            parts=Html("\n").join(self._parts),
        )

    def add(self, element: ET.Element) -> None:
        """A chart, or a part of one."""
        draws: Mapping[str, Callable[[ET.Element], None]] = {
            "axes": self._add_axes,
            "legend": self._add_legend,
            "bars": self._add_bars,
            "stacked": self._add_stacks,
        }
        own = next((name for name in draws if name in _classes(element)), None)
        if own is not None:
            draws[own](element)
        elif element.tag == _CAPTION:
            self._add_words(_text(element))
        else:
            left = _LEFT.get(element.get("class", ""), _LEFT_ELSE)
            for child in element:
                child.set("data-left", f"{left}")
                self.add(child)

    def _write(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._parts.append(
            Html('<text x="{:.4g}" y="{:.5g}" text-anchor="{}">{}</text>').format(
                x, y, anchor, text
            )
        )

    def _add_words(self, text: str) -> None:
        most = int(_WIDE / _LETTER)
        for line in re.findall(rf".{{1,{most}}}(?:\s|$)", text):
            self._write(0, self._height + 13, line.strip())
            self._height += _LINE

    def _add_legend(self, legend: ET.Element) -> None:
        x = 0.0
        for item in legend:
            text = _text(item)
            width = 36 + _LETTER * len(text)
            if x and x + width > _WIDE:
                x, self._height = 0.0, self._height + _LINE
            for icon in item.iter("i"):
                style = " ".join(_classes(icon) - {"box", "dash", "mark"})
                high = 12 if "box" in _classes(icon) else 3
                self._parts.append(
                    Html('<rect class="{}" x="{:.4g}" y="{:.5g}" width="14" height="{}"/>').format(
                        style or "soft", x, self._height + 9 - high / 2, high
                    )
                )
            self._write(x + 20, self._height + 13, text)
            x += width
        self._height += _LINE + 4

    def _add_axes(self, axes: ET.Element) -> None:
        left, top = float(axes.get("data-left", _LEFT_ELSE)), self._height
        names, *others = axes
        drawn = next(element for element in axes.iter() if element.tag in _DRAWINGS)
        width = float(drawn.get("width", _WIDE - left))
        height = self._add_drawing(drawn, left, width)
        for place, name in enumerate(names):
            if "lanes" in _classes(names):
                self._write(0, top + 26 * place + 17, _text(name))
            else:
                is_inner = name.tag == _INNER or "marks" in _classes(names)
                x, anchor = (left - 8, "end") if is_inner else (0.0, "start")
                self._write(x, top + _place(name, "top", height) + 4, _text(name), anchor)
        for steps in (each for other in others for each in other.iter("div")):
            for name in steps.iterfind("span"):
                ends = {"first": "start", "last": "end"}
                anchor = ends.get(name.get("class", ""), "middle")
                x = left + _place(name, "left", width)
                self._write(x, top + height + 16, _text(name), anchor)
        self._height += 24

    def _add_drawing(self, drawn: ET.Element, x: float, width: float) -> float:
        """An image or a nested drawing; its height."""
        high = drawn.get("height") or f"{_place(drawn, 'height', 0)}"
        if drawn.tag == _IMAGE:
            self._parts.append(
                Html(
                    '<image x="{:g}" y="{:g}" width="{:g}" height="{}" preserveAspectRatio="none" '
                    'style="image-rendering:pixelated" href="{}"/>'
                ).format(x, self._height, width, high, drawn.get("src", ""))
            )
        else:
            place = {"x": f"{x:g}", "y": f"{self._height:g}", "width": f"{width:g}"}
            placed = ET.Element(drawn.tag, {**place, **drawn.attrib})
            placed.text = drawn.text
            placed.extend(drawn)
            self._parts.append(of_element(placed))
        self._height += float(high)
        return float(high)

    def _add_bars(self, bars: ET.Element) -> None:
        cells = iter(bars)
        for name, bar, *told in zip(cells, cells, cells, cells):
            self._add_bar(name, bar, "  ".join(_text(each) for each in told))

    def _add_stacks(self, stacks: ET.Element) -> None:
        for name, bar, told in stacks:
            self._add_bar(name, bar, _text(told))

    def _add_bar(self, name: ET.Element, bar: ET.Element, told: str) -> None:
        left, right = 240.0, 130.0
        self._write(0, self._height + 13, _text(name))
        self._write(_WIDE, self._height + 13, told, "end")
        self._add_drawing(bar, left, _WIDE - left - right)
        self._height += 7
