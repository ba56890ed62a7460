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

from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import ratio_text, round_steps, seconds_text

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
) -> Html:
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
    tick_text = text or "{:.3g}".format
    legend = joined(
        Html("<span>{} {}</span>").format(
            key(slot, Html("<b>{}</b>").format(line.name)), (text or ratio_text)(line.mean)
        )
        for slot, line in enumerate(lines)
    )
    if marks and not small:
        legend += Html('<span><i class="mark"></i>homes changed</span>')
    return Html(
        '<figure class="lines" data-values="{values}" data-notes="{notes}" data-axis="{axis}">'
        '<figcaption class="legend">{legend}</figcaption>'
        '<div class="axes"><div class="marks">{names}</div><svg class="plot" '
        'height="{height}" role="img" aria-label="{what} over steps">{grid}{happened}'
        '<svg width="100%" height="100%" viewBox="0 0 {num_bins} {units}" '
        'preserveAspectRatio="none">{drawn}</svg></svg>{step_axis}</div></figure>'
    ).format(
        values=json.dumps([_listed(line.value_B, text) for line in lines]),
        notes=json.dumps(marks or {}),
        axis=axis,
        legend=legend,
        names=joined(tick_label(tick_text(tick), scale.height(tick)) for tick in ticks),
        height=_SMALL if small else _TALL,
        what="values" if text else "balance",
        grid=joined(_grid_line(scale.height(tick)) for tick in ticks),
        happened=joined(_mark_line(column, bins) for column in marks or ()),
        num_bins=len(bins),
        units=_UNITS,
        drawn=joined(_drawn(line, scale, slot) for slot, line in enumerate(lines)),
        step_axis=step_axis(bins, max_labels=3 if small else 5),
    )


def tick_label(text: str, height: float) -> Html:
    """Text beside a drawing, at a height of 0 to 1."""
    return Html('<span style="top:{:.4g}%">{}</span>').format(100 * (1 - height), text)


def _listed(value_B: np.ndarray, text: Callable[[float], str] | None) -> list[float | str | None]:
    """For the script: in words, but for balances, of which there are many."""
    return [
        None if math.isnan(value) else text(value) if text else round(value, 3)
        for value in value_B.tolist()
    ]


def step_axis(bins: Bins, *, max_labels: int) -> Html:
    """Step numbers under a drawing whose width is the bins."""
    last = len(bins) - 1
    at = sorted({round(i * last / (max_labels - 1)) for i in range(max_labels)})
    names = [bins.steps_I[bins.start_B[i]] for i in at[:-1]] + [bins.steps_I[-1]]
    lefts = [100 * (i + 0.5) / (last + 1) for i in at]
    return axis_labels([f"{name}" for name in names], lefts)


def axis_labels(names: Sequence[str], lefts: Sequence[float]) -> Html:
    """Text under a drawing at percents of its width; labels near an edge stay inside it."""
    spans = []
    for name, left in zip(names, lefts):
        edge = _FIRST if left < 3 else _LAST if left > 97 else ""
        spans.append(Html('<span{} style="left:{:.4g}%">{}</span>').format(edge, left, name))
    return Html('<div class="steps" aria-hidden="true">{}</div>').format(joined(spans))


_FIRST, _LAST = Html(' class="first"'), Html(' class="last"')


def bars(rows: Sequence[Bar], classes: dict[str, str], *, longest: float, total: float) -> Html:
    """Horizontal bars, longest first, each with its seconds and its percent of ``total``."""
    ordered = sorted(rows, key=lambda row: (-row.seconds, row.kind))
    drawn = joined(
        Html(
            '<b>{kind}</b><svg height="18" role="img" aria-label="{kind}">'
            '<rect class="{style}" height="18" rx="3" width="{width:.3f}%"/></svg>'
            "<span>{seconds}</span><span>{share:.1f} %</span>"
        ).format(
            kind=row.kind,
            style=classes[row.kind],
            width=100 * row.seconds / max(longest, 1e-12),
            seconds=seconds_text(row.seconds),
            share=100 * row.seconds / max(total, 1e-12),
        )
        for row in ordered
    )
    return Html('<div class="bars">{}</div>').format(drawn)


@dataclass(frozen=True)
class Stack:
    """One bar of several parts, one behind the other.

    Attributes:
        name: text or markup.
        parts: lengths, in the order of the colours.
        told: what stands at its end.
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
) -> Html:
    """Bars of the same parts below each other, on one scale.

    Args:
        stacks: one a bar.
        names: of the parts, for the legend and for who points at one.
        text: a length as a person reads it.
        limit: a length that is marked, and what it is; the scale shows it.
    """
    longest = max([sum(each.parts) for each in stacks] + [limit[0] if limit else 0.0]) or 1.0
    legend = joined(_boxed(f"s{slot}", name) for slot, name in enumerate(names))
    if limit is not None:
        legend += Html('<span><i class="mark"></i>{}</span>').format(limit[1])
    drawn = joined(
        Html(
            '<div{faint}><b>{name}</b><svg height="18" role="img" aria-label="{label}">'
            "{parts}{limit}</svg><span>{told}</span></div>"
        ).format(
            faint=_FAINT * each.is_faint,
            name=each.name,
            label=_told(each, names, text),
            parts=_stacked(each, names, text, longest),
            limit="" if limit is None else _upright(100 * limit[0] / longest),
            told=each.told,
        )
        for each in stacks
    )
    return Html('<p class="legend">{}</p><div class="stacked">{}</div>').format(legend, drawn)


_FAINT = Html(' class="faint"')


def _boxed(style: str, name: str) -> Html:
    """A name behind its colour."""
    return Html('<span><i class="box {}"></i>{}</span>').format(style, name)


def _told(stack: Stack, names: Sequence[str], text: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {text(part)}" for name, part in zip(names, stack.parts))


def _stacked(
    stack: Stack, names: Sequence[str], text: Callable[[float], str], longest: float
) -> Html:
    ends = np.cumsum([0.0, *stack.parts]) / longest * 100
    return joined(
        Html(
            '<rect class="s{}" x="{:.3f}%" height="18" width="{:.3f}%"><title>{} {}</title></rect>'
        ).format(slot, ends[slot], ends[slot + 1] - ends[slot], name, text(part))
        for slot, (name, part) in enumerate(zip(names, stack.parts))
        if part > 0
    )


def key(slot: int, name: str) -> Html:
    """A name, in the colour of its line or bar."""
    return Html('<i class="dash s{}"></i>{}').format(slot, name)


def thin_bars(name: str, bars: Sequence[tuple[int, float]], longest: float) -> Html:
    """A bar below the other for each colour and length, the longest of all as wide as there is
    room."""
    rects = joined(
        Html('<rect class="s{}" y="{}" height="{}" rx="2" width="{:.3f}%"/>').format(
            slot, place * (_BAR + _APART), _BAR, 100 * length / max(longest, 1e-12)
        )
        for place, (slot, length) in enumerate(bars)
        if length > 0
    )
    high = len(bars) * (_BAR + _APART) - _APART
    return Html('<svg height="{}" role="img" aria-label="{}">{}</svg>').format(high, name, rects)


def kind_legend(classes: dict[str, str]) -> Html:
    """The colour of each kind of task."""
    items = joined(_boxed(style, kind) for kind, style in classes.items())
    return Html('<p class="legend">{}</p>').format(items)


def _grid_line(height: float) -> Html:
    floor = "" if height else Html(' class="floor"')
    line = Html('<line{floor} x1="0" x2="100%" y1="{y:.4g}%" y2="{y:.4g}%"/>')
    return line.format(floor=floor, y=100 * (1 - height))


def _mark_line(column: int, bins: Bins) -> Html:
    return _upright(100 * column / len(bins))


def _upright(left: float) -> Html:
    """A line from top to bottom at a percent of the width."""
    line = Html('<line class="mark" x1="{x:.4g}%" x2="{x:.4g}%" y1="0" y2="100%"/>')
    return line.format(x=left)


def _drawn(line: Line, scale: Scale, slot: int) -> Html:
    band = Html("")
    if (line.high_B > line.low_B).any():
        there, back = _points(line.high_B, scale), _points(line.low_B, scale)
        band = Html('<path class="band" d="M{}Z"/>').format("L".join(there + back[::-1]))
    return Html('<g class="s{}">{}{}</g>').format(slot, band, path(_points(line.value_B, scale)))


def path(points: Sequence[str]) -> Html:
    """A line through points, each ``x y``."""
    return Html('<path class="line" d="M{}"/>').format("L".join(points))


def _points(value_B: np.ndarray, scale: Scale) -> list[str]:
    known = np.flatnonzero(~np.isnan(value_B)).tolist()
    at_y = [round(_UNITS * (1 - scale.height(float(value_B[i])))) for i in known]
    if len(value_B) == 1:  # one step has no direction: a level line over the whole width
        return [f"0 {at_y[0]}", f"1 {at_y[0]}"]
    return [f"{i + 0.5} {y}" for i, y in zip(known, at_y)]
