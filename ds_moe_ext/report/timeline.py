# SPDX-License-Identifier: Apache-2.0
"""The tasks of one step: an overview of the whole step, then each layer, forward and backward."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.report.charts import axis_labels
from ds_moe_ext.report.markup import Html, in_script, joined
from ds_moe_ext.report.record import Span
from ds_moe_ext.report.units import counted, round_steps, seconds_text, short_names
from ds_moe_ext.schedule.simulator import in_order
from ds_moe_ext.schedule.task import (
    COMPUTE,
    GRADIENTS,
    HAVE_AGAIN,
    HOST,
    INTER,
    INTRA,
    JOIN,
    PARAM,
    PLAN,
)

_WAITS = (JOIN.name, HAVE_AGAIN.name)  # no work, in the lane of what is computed
HOST_WORK = "rest of the model"
_LEAST_SHARE = 0.01  # of the critical path, of a kind that is named
MAX_TASKS = 6000  # told to the script
_MOST_STRETCHES = 1000
MAX_BOXES = 2500  # tasks drawn as boxes of their own, with tooltips
_FINE = 2000  # horizontal resolution of the overview
_ROW = 26  # pixels a lane
_BOX = 20  # pixels a box is high
_LETTER = 0.65  # percent of a wide page that a letter of a label takes


@dataclass(frozen=True)
class Window:
    """The stretch of the step that a drawing shows, in seconds from the start of the step."""

    start_s: float
    length_s: float

    def percent(self, time_s: float) -> float:
        """Where ``time_s`` lies, 0 at the left edge and 100 at the right."""
        return 100 * (time_s - self.start_s) / self.length_s


@dataclass(frozen=True)
class Pass:
    """The tasks of one layer in one phase."""

    layer: str
    phase: str
    spans: tuple[Span, ...]

    @property
    def start_s(self) -> float:
        return min(span.start_s for span in self.spans)

    @property
    def end_s(self) -> float:
        return max(span.end_s for span in self.spans)

    @property
    def length_s(self) -> float:
        """From the first start to the last end."""
        return self.end_s - self.start_s

    @property
    def own(self) -> Pass:
        """Of its own tasks, as ``stretches`` has them."""
        return replace(self, spans=tuple(_own(self.spans)))


def passes_of(timeline: Iterable[Span]) -> list[Pass]:
    """The timeline by layer and phase, in the order in which they start."""
    held: dict[tuple[str, str], list[Span]] = {}
    for span in timeline:
        held.setdefault((span.layer, span.phase), []).append(span)
    passes = [Pass(layer, phase, tuple(spans)) for (layer, phase), spans in held.items()]
    return sorted(passes, key=lambda one: one.start_s)


def stretches(timeline: Sequence[Span]) -> list[Pass]:
    """Which layer was at work when, in one phase: what is done in a row of its own tasks, in the
    order in which they begin. A layer comes once a micro-batch; where tasks of many layers take
    turns, once."""
    held: list[list[Span]] = []
    for span in sorted(_own(timeline), key=lambda span: span.start_s):
        if held and (held[-1][0].layer, held[-1][0].phase) == (span.layer, span.phase):
            held[-1].append(span)
        else:
            held.append([span])
    if len(held) > _MOST_STRETCHES:
        return [one.own for one in passes_of(timeline)]
    return [Pass(spans[0].layer, spans[0].phase, tuple(spans)) for spans in held]


def _own(spans: Sequence[Span]) -> Sequence[Span]:
    """Without what may happen while another layer is at work: weights travel, and the host
    plans."""
    return tuple(s for s in spans if s.lane not in (PARAM.name, HOST.name)) or spans


def boxed(timeline: Sequence[Span]) -> frozenset[Span]:
    """The spans that get a box: the longest ``MAX_BOXES``; the earlier of two as long."""
    ordered = sorted(timeline, key=lambda span: (span.start_s - span.end_s, span.start_s))
    return frozenset(ordered[:MAX_BOXES])


def hidden(timeline: Sequence[Span]) -> Html:
    """How long copies travelled, dense gradients were reduced in slices and the next step was
    planned, and how much of each was hidden; nothing of what there was none of."""
    computed = [s for s in timeline if s.lane == COMPUTE.name and s.name not in _WAITS]
    sent = [span for span in timeline if span.lane in (INTER.name, INTRA.name)]
    told = Html("")
    if travels := [span for span in timeline if span.lane == PARAM.name]:
        told += Html(
            " Weights and gradients of copies travelled for {} this rank computed. They may travel "
            "while another layer is at work; a layer's drawing has them all."
        ).format(_beside(travels, computed))
    if slices := [span for span in timeline if span.name == GRADIENTS.name]:
        told += (
            " Slices of the dense gradients were reduced for "
            f"{_beside(slices, computed)} this rank computed."
        )
    if plans := [span for span in timeline if span.name == PLAN.name]:
        told += (
            f" The host planned the next step for {_beside(plans, sent)} rows were on their way."
        )
    return told


def _beside(spans: Sequence[Span], others: Iterable[Span]) -> str:
    """How long some spans took, and which share of that others ran beside them."""
    total_s = sum(span.end_s - span.start_s for span in spans)
    busy_s = _Busy(others)
    beside_s = sum(busy_s(span.end_s) - busy_s(span.start_s) for span in spans)
    share = 100 * beside_s / max(total_s, 1e-12)
    return f"{seconds_text(total_s)}, during {share:.0f} % of which"


class _Busy:
    """Seconds until a moment during which any of some spans ran."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._at_s, self._busy_s = [0.0], [0.0]
        for span in sorted(spans, key=lambda span: span.start_s):
            start_s = max(span.start_s, self._at_s[-1])
            length_s = max(span.end_s - start_s, 0.0)
            self._at_s += [start_s, start_s + length_s]
            self._busy_s += [self._busy_s[-1], self._busy_s[-1] + length_s]

    def __call__(self, time_s: float) -> float:
        return float(np.interp(time_s, self._at_s, self._busy_s))


@dataclass(frozen=True)
class Step:
    """What is drawn of a step.

    Attributes:
        spans: the tasks of one rank.
        length_s: from the start of the step to its end; 0 if that is not known.
        shown_s: what is drawn at least, to compare it with another.
    """

    spans: Sequence[Span]
    length_s: float = 0.0
    shown_s: float = 0.0

    @property
    def window(self) -> Window:
        """From its start, or that of the first task, to its end, or that of the last."""
        start_s = 0.0 if self.length_s else min(span.start_s for span in self.spans)
        end_s = max(self.length_s, *(span.end_s for span in self.spans))
        return _window(start_s, max(end_s - start_s, self.shown_s))

    def others(self) -> list[Span]:
        """What the model does when no layer of ours is at work; none where nobody knows how long
        the step was."""
        if not self.length_s:
            return []
        ordered = sorted(self.spans, key=lambda span: span.start_s)
        lanes = in_order(span.lane for span in ordered)
        lane = COMPUTE.name if COMPUTE.name in lanes else lanes[0]
        before, ended_s, found = None, 0.0, []
        for after in (*ordered, None):
            start_s = self.length_s if after is None else after.start_s
            if start_s > ended_s and _differ(before, after):
                told = _between(before, after)
                found.append(Span(HOST_WORK, lane, "", told, "", ended_s, start_s))
            if after is not None and after.end_s > ended_s:
                before, ended_s = after, after.end_s
        return found


def _differ(before: Span | None, after: Span | None) -> bool:
    if before is None or after is None:
        return True
    return (before.layer, before.phase) != (after.layer, after.phase)


def _between(before: Span | None, after: Span | None) -> str:
    if after is None:
        return "behind the last layer: gradients, optimizer"
    if before is None:
        return "before the first layer: data, embedding"
    if before.layer == after.layer:
        return f"between {before.phase} and {after.phase} of {after.layer}"
    return f"between {before.layer} and {after.layer}, {after.phase}"


def overview(step: Step, classes: dict[str, str]) -> Html:
    """The whole step: which layer was at work, every task of every lane, and the rest of the model.

    The script draws the same by what it is told of the tasks, nearer and with who waited for whom.
    """
    window, others = step.window, step.others()
    lanes = in_order(span.lane for span in step.spans)
    height = _ROW * len(lanes)
    short = short_names(list(dict.fromkeys(span.layer for span in step.spans)))
    rows = joined(_pass_box(one, window, short=short[one.layer]) for one in stretches(step.spans))
    everything = [*step.spans, *others]
    styles = {**classes, HOST_WORK: "kh"}
    paths = joined(
        Html('<path class="{}" d="{}"/>').format(
            styles[kind], _merged(everything, window, lanes=lanes, kind=kind)
        )
        for kind in sorted({span.name for span in everything})
    )
    return Html(
        '<figure class="timeline"><div class="axes time">'
        '<div class="lanes" style="height:{whole}px"><span>layer</span>{lanes}</div>'
        '<svg class="plot" height="{whole}" role="img" aria-label="the whole step">'
        '{grid}{rows}<svg y="{row}" width="100%" height="{height}" '
        'viewBox="0 0 {fine} {height}" preserveAspectRatio="none">{paths}</svg></svg>'
        '{axis}</div><script type="application/json">{told}</script></figure>'
    ).format(
        whole=height + _ROW,
        lanes=_lane_names(lanes, step.spans, window.length_s),
        grid=_time_grid(window),
        rows=rows,
        row=_ROW,
        height=height,
        fine=_FINE,
        paths=paths,
        axis=_time_axis(window),
        told=_told(step, others, lanes, styles, short),
    )


def _told(
    step: Step,
    others: Sequence[Span],
    lanes: Sequence[str],
    styles: Mapping[str, str],
    short: Mapping[str, str],
) -> Html:
    """The longest tasks for the script, microseconds from the left edge."""
    spans, start_s = step.spans, step.window.start_s
    kept = sorted(range(len(spans)), key=lambda at: spans[at].start_s - spans[at].end_s)[:MAX_TASKS]
    drawn = [(spans[at], at) for at in kept] + [(span, -1) for span in others]
    drawn.sort(key=lambda each: each[0].start_s)
    new = {old: at for at, (_, old) in enumerate(drawn)}
    kinds, places = _Numbers(), _Numbers()
    tasks = [
        (
            kinds(span.name),
            lanes.index(span.lane),
            places(f"{span.layer} {span.phase}".strip()),
            span.chunk,
            _microseconds(span.start_s - start_s),
            _microseconds(span.end_s - span.start_s),
            None if span.bound_by is None else new.get(span.bound_by),
        )
        for span, _ in drawn
    ]
    passes = [
        (
            short[one.layer],
            one.phase,
            places(f"{one.layer} {one.phase}"),
            _microseconds(one.start_s - start_s),
            _microseconds(one.length_s),
        )
        for one in stretches(spans)
    ]
    told = {
        "kinds": [(kind, styles[kind]) for kind in kinds],
        "places": list(places),
        "numLanes": len(lanes),
        "passes": passes,
        "tasks": tasks,
        "last": new.get(_last(spans)),
        "length": max(_microseconds(step.window.length_s), 0.1),
    }
    return in_script(json.dumps(told, separators=(",", ":")))


class _Numbers(dict[str, int]):
    """Texts, each with its number."""

    def __call__(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _last(spans: Sequence[Span]) -> int:
    """Position of the task that ended last."""
    return max(range(len(spans)), key=lambda at: spans[at].end_s)


def _chain(spans: Sequence[Span]) -> Iterator[Span]:
    """The last task, the one that it waited for last, and so on."""
    at: int | None = _last(spans)
    while at is not None:
        yield spans[at]
        at = spans[at].bound_by


def critical(spans: Sequence[Span]) -> str:
    """What the step spent its time on, from its last task back, each to the one that it waited for
    last; nothing where that is not known."""
    if all(span.bound_by is None for span in spans):
        return ""
    chain = list(_chain(spans))
    seconds: dict[str, float] = defaultdict(float)
    for span in chain:
        seconds[span.name] += span.end_s - span.start_s
    total_s = max(chain[0].end_s - chain[-1].start_s, 1e-12)
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    parts = [
        f"{name} {100 * own_s / total_s:.0f} %"
        for name, own_s in longest
        if own_s >= _LEAST_SHARE * total_s
    ]
    idle_s = total_s - sum(seconds.values())
    return (
        " From the last task back, each to the one that it waited for last, "
        f"{seconds_text(total_s)} went by: {', '.join(parts)}; none of these was at work for "
        f"{100 * max(idle_s, 0.0) / total_s:.0f} %."
    )


def pass_chart(
    one: Pass, classes: dict[str, str], *, length_s: float, drawn: frozenset[Span]
) -> Html:
    """The tasks of one layer in one phase, on a scale of ``length_s`` seconds."""
    window = _window(one.start_s, length_s)
    lanes = in_order(span.lane for span in one.spans)
    height = _ROW * len(lanes)
    boxes = joined(
        _box(span, window, row=lanes.index(span.lane), style=classes[span.name])
        for span in one.spans
        if span in drawn
    )
    busy_s = sum(span.end_s - span.start_s for span in one.spans)
    return Html(
        '<figure class="pass"><figcaption><b>{phase}</b> {tasks} in {length}, from {start} into '
        "the step; {busy:.2f} lanes at work on average</figcaption>"
        '<div class="axes time"><div class="lanes" style="height:{height}px">{lanes}</div>'
        '<svg class="plot" height="{height}" role="img" aria-label="{phase} tasks">'
        "{grid}{boxes}</svg>{axis}</div></figure>"
    ).format(
        phase=one.phase,
        tasks=counted(len(one.spans), "task"),
        length=seconds_text(one.length_s),
        start=seconds_text(one.start_s),
        busy=busy_s / max(one.length_s, 1e-12),
        height=height,
        lanes=_lane_names(lanes, one.spans, one.length_s),
        grid=_time_grid(window),
        boxes=boxes,
        axis=_time_axis(window),
    )


def _window(start_s: float, length_s: float) -> Window:
    return Window(start_s, max(length_s, 1e-9))


def _lane_names(lanes: list[str], spans: Sequence[Span], length_s: float) -> Html:
    busy_s = dict.fromkeys(lanes, 0.0)
    for span in spans:
        busy_s[span.lane] += span.end_s - span.start_s
    return joined(
        Html("<span><b>{}</b> {:.0f} %</span>").format(
            lane, 100 * busy_s[lane] / max(length_s, 1e-12)
        )
        for lane in lanes
    )


def _box(span: Span, window: Window, *, row: int, style: str) -> Html:
    length_s = span.end_s - span.start_s
    x, width = window.percent(span.start_s), 100 * length_s / window.length_s
    y = row * _ROW + (_ROW - _BOX) // 2
    title = (
        f"{span.name}, chunk {span.chunk}, lane {span.lane}\n{_stamp(span.start_s)} to "
        f"{_stamp(span.end_s)}, {seconds_text(length_s)}"
    )
    rect = Html(
        '<rect class="{} task" x="{:.3f}%" y="{}" width="{:.3f}%" height="{}" '
        'rx="2"><title>{}</title></rect>'
    ).format(style, x, y, width, _BOX, title)
    labels = (f"{span.name} {span.chunk}", span.chunk)
    label = next((label for label in labels if _fits(label, width)), None)
    if label is None:
        return rect
    ink = style.replace("k", "t")
    return rect + Html(
        '<svg x="{:.3f}%" y="{}" width="{:.3f}%" height="{}">'
        '<text class="{}" x="5" y="14">{}</text></svg>'
    ).format(x, y, width, _BOX, ink, label)


def _pass_box(one: Pass, window: Window, *, short: str) -> Html:
    """A box of the overview's top row: when a layer was at work in a phase."""
    x, width = window.percent(one.start_s), 100 * one.length_s / window.length_s
    title = f"{one.layer}, {one.phase}\n{_stamp(one.start_s)} to {_stamp(one.end_s)}"
    labels = (f"{short} {one.phase}", short)
    label = next((label for label in labels if _fits(label, width)), "")
    return Html(
        '<svg x="{:.3f}%" y="3" width="{:.3f}%" height="{}"><rect class="pass-box" '
        'width="100%" height="100%" rx="2"><title>{}</title></rect>'
        '<text x="5" y="14">{}</text></svg>'
    ).format(x, width, _BOX, title, label)


def _fits(label: str, width: float) -> bool:
    """Whether a label fits a box of ``width`` percent on a wide page; elsewhere it is clipped."""
    return _LETTER * (len(label) + 1) <= width


def _merged(timeline: Sequence[Span], window: Window, *, lanes: list[str], kind: str) -> str:
    """One path with the tasks of a kind; tasks that fall on the same pixels are drawn once."""
    ends = [0] * len(lanes)
    parts = []
    for span in sorted(timeline, key=lambda span: span.start_s):
        if span.name != kind:
            continue
        row = lanes.index(span.lane)
        start = max(round(window.percent(span.start_s) * _FINE / 100), ends[row])
        end = max(round(window.percent(span.end_s) * _FINE / 100), ends[row])
        end = min(max(end, start + 1), _FINE) if end >= start else end
        if end > start:
            parts.append(f"M{start} {row * _ROW + 3}h{end - start}v{_BOX}h{start - end}z")
            ends[row] = end
    return "".join(parts)


def _time_ticks(window: Window) -> list[float]:
    step = round_steps(window.length_s, max_ticks=6)
    return [i * step for i in range(int(window.length_s / step * 1.0001) + 1)]


def _time_grid(window: Window) -> Html:
    return joined(
        Html('<line x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="100%"/>').format(
            x=100 * tick / window.length_s
        )
        for tick in _time_ticks(window)
    )


def _time_axis(window: Window) -> Html:
    ticks = _time_ticks(window)
    return axis_labels(
        [seconds_text(tick) for tick in ticks], [100 * tick / window.length_s for tick in ticks]
    )


def _stamp(time_s: float) -> str:
    """Milliseconds into the step, fine enough to tell neighbours apart."""
    return f"{1e3 * time_s:.3f} ms"
