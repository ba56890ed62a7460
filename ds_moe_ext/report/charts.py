# SPDX-License-Identifier: Apache-2.0
"""Lines over steps, and bars of seconds, as HTML around inline SVG.

Drawings stretch with the page: SVG lengths are percents or lie in a viewBox that does not keep its
aspect, and all text that must not be stretched is HTML beside it. Shape letters: B bins of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import escaped, ratio_text, round_steps, seconds_text

_UNITS = 1000  # of a line chart's viewBox, from top to bottom
_TALL, _SMALL = 220, 84  # pixels of a line chart
LINES_AXIS = "lines"  # of charts over the recorded steps
_BAR, _APART = 9, 2  # pixels a thin bar is high, and between two


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart.

    Attributes:
        name: what the legend says.
        mean: over all steps, for the legend.
        value_B: balance, float ``[B]``; nan where that is not known.
        low_B: lower edge of the band around it.
        high_B: upper edge.
    """

    name: str
    mean: float
    value_B: np.ndarray
    low_B: np.ndarray
    high_B: np.ndarray


@dataclass(frozen=True)
class Bar:
    """One kind of task in one phase."""

    kind: str
    seconds: float


@dataclass(frozen=True)
class Scale:
    """The vertical scale of a line chart: from ``floor``, which is 1 for balances, to ``top``, with
    a tick each ``step``."""

    top: float
    step: float
    floor: float = 1.0

    def height(self, value: float) -> float:
        """Where ``value`` lies, 0 at the bottom and 1 at the top."""
        return min(max((value - self.floor) / (self.top - self.floor), 0.0), 1.0)

    def ticks(self) -> list[float]:
        """The floor, and the round values above it that leave it room."""
        multiples = (i * self.step for i in range(1, round(self.top / self.step) + 1))
        lowest = self.floor + (0.5 - 1e-9) * self.step
        return [self.floor, *(tick for tick in multiples if tick >= lowest)]


def balance_scale(highest: float) -> Scale:
    """The scale with round ticks that shows ``highest``."""
    step = round_steps(max(highest - 1, 0.05), max_ticks=4)
    return Scale(step * max(math.ceil(highest / step - 1e-9), round(1 / step) + 1), step)


def value_scale(lowest: float, highest: float) -> Scale:
    """The scale with round ticks that shows both, from 0 unless that would waste most of it."""
    is_flat = lowest > 0.5 * highest
    step = round_steps(highest - lowest if is_flat and highest > lowest else highest, max_ticks=4)
    floor = step * math.floor(lowest / step) if is_flat or lowest < 0 else 0.0
    return Scale(max(step * math.ceil(highest / step - 1e-9), floor + step), step, floor)


def line_chart(
    lines: Sequence[Line],
    bins: Bins,
    *,
    scale: Scale,
    small: bool,
    marks: Mapping[int, str] | None = None,
    text: Callable[[float], str] | None = None,
    axis: str = LINES_AXIS,
) -> str:
    """Values over the steps: lines on one scale, and a legend that gives their means.

    Args:
        lines: what is drawn.
        bins: of the steps.
        scale: from bottom to top.
        small: whether it stands beside others.
        marks: which homes changed before some columns, in words.
        text: a value as a person reads it; None: they are balances.
        axis: what the page calls the names of the columns.
    """
    ticks = scale.ticks()
    grid = "".join(_grid_line(scale.height(tick)) for tick in ticks)
    tick_text = text or "{:.3g}".format
    names = "".join(
        f'<span style="top:{100 * (1 - scale.height(tick)):.4g}%">{tick_text(tick)}</span>'
        for tick in ticks
    )
    drawn = "".join(_drawn(line, scale, slot) for slot, line in enumerate(lines))
    legend = "".join(
        f'<span><i class="dash s{slot}"></i><b>{escaped(line.name)}</b> '
        f"{(text or ratio_text)(line.mean)}</span>"
        for slot, line in enumerate(lines)
    )
    if marks and not small:
        legend += '<span><i class="mark"></i>homes changed</span>'
    happened = "".join(_mark_line(column, bins) for column in marks or ())
    notes = escaped(json.dumps(marks or {}))
    values = escaped(json.dumps([_listed(line.value_B, text) for line in lines]))
    return (
        f'<figure class="lines" data-values="{values}" data-notes="{notes}" data-axis="{axis}">'
        f'<figcaption class="legend">{legend}</figcaption>'
        f'<div class="axes"><div class="marks">{names}</div><svg class="plot" '
        f'height="{_SMALL if small else _TALL}" role="img" '
        f'aria-label="{"values" if text else "balance"} over steps">{grid}{happened}'
        f'<svg width="100%" height="100%" viewBox="0 0 {len(bins)} {_UNITS}" '
        f'preserveAspectRatio="none">{drawn}</svg></svg>'
        f"{step_axis(bins, max_labels=3 if small else 5)}</div></figure>"
    )


def _listed(value_B: np.ndarray, text: Callable[[float], str] | None) -> list[float | str | None]:
    """For the script: in words, but for balances, of which there are many."""
    return [
        None if math.isnan(value) else text(value) if text else round(value, 3)
        for value in value_B.tolist()
    ]


def step_axis(bins: Bins, *, max_labels: int) -> str:
    """Step numbers under a drawing whose width is the bins."""
    last = len(bins) - 1
    at = sorted({round(i * last / (max_labels - 1)) for i in range(max_labels)})
    names = [bins.steps_I[bins.start_B[i]] for i in at[:-1]] + [bins.steps_I[-1]]
    lefts = [100 * (i + 0.5) / (last + 1) for i in at]
    return axis_labels([f"{name}" for name in names], lefts)


def axis_labels(names: Sequence[str], lefts: Sequence[float]) -> str:
    """Text under a drawing at percents of its width; labels near an edge stay inside it."""
    spans = []
    for name, left in zip(names, lefts):
        edge = ' class="first"' if left < 3 else ' class="last"' if left > 97 else ""
        spans.append(f'<span{edge} style="left:{left:.4g}%">{name}</span>')
    return f'<div class="steps" aria-hidden="true">{"".join(spans)}</div>'


def bars(rows: Sequence[Bar], classes: dict[str, str], *, longest: float, total: float) -> str:
    """Horizontal bars, longest first, each with its seconds and its percent of ``total``."""
    ordered = sorted(rows, key=lambda row: (-row.seconds, row.kind))
    return (
        '<div class="bars">'
        + "".join(
            f"<b>{escaped(row.kind)}</b>"
            f'<svg height="18" role="img" aria-label="{escaped(row.kind)}">'
            f'<rect class="{classes[row.kind]}" height="18" rx="3" '
            f'width="{100 * row.seconds / max(longest, 1e-12):.3f}%"/></svg>'
            f"<span>{seconds_text(row.seconds)}</span>"
            f"<span>{100 * row.seconds / max(total, 1e-12):.1f} %</span>"
            for row in ordered
        )
        + "</div>"
    )


@dataclass(frozen=True)
class Stack:
    """One bar of several parts, one behind the other.

    Attributes:
        name: HTML.
        parts: lengths, in the order of the colours.
        told: what stands at its end, HTML.
        is_faint: it is shown, but cannot be.
    """

    name: str
    parts: Sequence[float]
    told: str
    is_faint: bool = False


def stacked_bars(
    stacks: Sequence[Stack],
    names: Sequence[str],
    text: Callable[[float], str],
    *,
    limit: tuple[float, str] | None = None,
) -> str:
    """Bars of the same parts below each other, on one scale.

    Args:
        stacks: one a bar.
        names: of the parts, for the legend and for who points at one.
        text: a length as a person reads it.
        limit: a length that is marked, and what it is; the scale shows it.
    """
    longest = max([sum(each.parts) for each in stacks] + [limit[0] if limit else 0.0]) or 1.0
    legend = "".join(
        f'<span><i class="box s{slot}"></i>{escaped(name)}</span>'
        for slot, name in enumerate(names)
    )
    if limit is not None:
        legend += f'<span><i class="mark"></i>{escaped(limit[1])}</span>'
    drawn = "".join(
        f"<div{_FAINT * each.is_faint}><b>{each.name}</b>"
        f'<svg height="18" role="img" aria-label="{escaped(_told(each, names, text))}">'
        f"{_stacked(each, names, text, longest)}{_limit_line(limit, longest)}</svg>"
        f"<span>{each.told}</span></div>"
        for each in stacks
    )
    return f'<p class="legend">{legend}</p><div class="stacked">{drawn}</div>'


_FAINT = ' class="faint"'


def _told(stack: Stack, names: Sequence[str], text: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {text(part)}" for name, part in zip(names, stack.parts))


def _stacked(
    stack: Stack, names: Sequence[str], text: Callable[[float], str], longest: float
) -> str:
    ends = np.cumsum([0.0, *stack.parts]) / longest * 100
    return "".join(
        f'<rect class="s{slot}" x="{ends[slot]:.3f}%" height="18" '
        f'width="{ends[slot + 1] - ends[slot]:.3f}%"><title>{escaped(name)} {text(part)}</title>'
        "</rect>"
        for slot, (name, part) in enumerate(zip(names, stack.parts))
        if part > 0
    )


def _limit_line(limit: tuple[float, str] | None, longest: float) -> str:
    if limit is None:
        return ""
    x = f"{100 * limit[0] / longest:.4g}%"
    return f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="100%"/>'


def key(slot: int, name: str) -> str:
    """A name, in the colour of its line or bar."""
    return f'<i class="dash s{slot}"></i>{name}'


def thin_bars(name: str, bars: Sequence[tuple[int, float]], longest: float) -> str:
    """A bar below the other for each colour and length, the longest of all as wide as there is
    room."""
    rects = "".join(
        f'<rect class="s{slot}" y="{place * (_BAR + _APART)}" height="{_BAR}" rx="2" '
        f'width="{100 * length / max(longest, 1e-12):.3f}%"/>'
        for place, (slot, length) in enumerate(bars)
        if length > 0
    )
    high = len(bars) * (_BAR + _APART) - _APART
    return f'<svg height="{high}" role="img" aria-label="{escaped(name)}">{rects}</svg>'


def kind_legend(classes: dict[str, str]) -> str:
    """The colour of each kind of task."""
    items = (
        f'<span><i class="box {name}"></i>{escaped(kind)}</span>' for kind, name in classes.items()
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _grid_line(height: float) -> str:
    y = f"{100 * (1 - height):.4g}%"
    floor = "" if height else ' class="floor"'
    return f'<line{floor} x1="0" x2="100%" y1="{y}" y2="{y}"/>'


def _mark_line(column: int, bins: Bins) -> str:
    x = f"{100 * column / len(bins):.4g}%"
    return f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="100%"/>'


def _drawn(line: Line, scale: Scale, slot: int) -> str:
    band = ""
    if (line.high_B > line.low_B).any():
        there, back = _points(line.high_B, scale), _points(line.low_B, scale)
        band = f'<path class="band" d="M{"L".join(there + back[::-1])}Z"/>'
    path = f'<path class="line" d="M{"L".join(_points(line.value_B, scale))}"/>'
    return f'<g class="s{slot}">{band}{path}</g>'


def _points(value_B: np.ndarray, scale: Scale) -> list[str]:
    known = np.flatnonzero(~np.isnan(value_B)).tolist()
    at_y = [round(_UNITS * (1 - scale.height(float(value_B[i])))) for i in known]
    if len(value_B) == 1:  # one step has no direction: a level line over the whole width
        return [f"0 {at_y[0]}", f"1 {at_y[0]}"]
    return [f"{i + 0.5} {y}" for i, y in zip(known, at_y)]
