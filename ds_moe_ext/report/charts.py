# SPDX-License-Identifier: Apache-2.0
"""Drawings of the pages, by matplotlib: SVG in an ``<img>``, where nothing that it holds can run.

Each has a text that says what it shows, with its numbers, for who does not see it; where a drawing
cannot be made the text stands in its place, so that a run ends well without matplotlib. Nothing of
it is imported before a page is drawn, there is no pyplot and no display, and the same record makes
the same bytes. Shape letters: B columns of steps, E experts, C EP ranks.
"""

from __future__ import annotations

import base64
import html
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ds_moe_ext.report.markup import Html, in_words, note, shown_text
from ds_moe_ext.report.record import TracedTask
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import TIMES, ratio_text, seconds_text
from ds_moe_ext.schedule.simulator import in_order

LINES = ("#2a62b5", "#d9541e", "#1a8f63", "#a64ca6", "#b07d00", "#4d5766")
"""Of lines that share a chart, and of bars that stand below each other."""
_KINDS = {
    "gate": "#2fb573",
    "order": "#a5dbd6",
    "dispatch": "#e8a61c",
    "expert": "#2a62b5",
    "combine": "#b03a2e",
    "restore": "#c6a6ee",
    "gather": "#f2e660",
    "reduction": "#d655b5",
    "join": "#d3d3cb",
    "plan": "#7b6bf2",
    "etp_gather": "#dae198",
    "attention": "#3b7f86",
    "gradients": "#7a4a99",
    "etp_scatter": "#4340e2",
}
"""Of kinds of tasks: those that touch, of one stream, stay apart best for who sees no red or no
green."""
_OTHER = "#a8a8a3"
_NEUTRAL, _SOFT, _INK = "#f2f2ef", "#5d5d58", "#1b1b19"
_LOADS = ("#092e68", "#3e82c3", "#9ec6e6", _NEUTRAL, "#f7b88d", "#d14e34", "#62041e")
_REPLICAS = (_NEUTRAL, "#abd9b0", "#2c8d69", "#043d35")
_HOLDERS = {"nobody": _NEUTRAL, "owner": _LOADS[1], "copy": "#2c8d69", "late": "#d14e34"}

WIDE, HALF, SMALL = 1200, 570, 280  # pixels
_PIXEL = 1 / 96  # inches
_LINE = 17  # pixels of a line of text
_LETTER = 6.6  # pixels of a letter, about
_LONGEST = 48  # letters of a name in a drawing
_ROW = 26  # pixels of a stream
_MOST_BARS = 120  # drawn as they are; more are drawn as an image
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ds_moe_ext",
    "text.parse_math": False,  # names of files may hold dollars
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "legend.fontsize": 9,
    "axes.edgecolor": "#b9b9b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#ecece7",
    "text.color": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "image.interpolation": "none",
    "path.simplify_threshold": 0.3,
}

# An image in the page.


def drawn(text: str, draw: Callable[[Any], None], *, wide: int, tall: int, name: str = "") -> Html:
    """A drawing for the page, so many pixels ``wide`` and ``tall``, or the ``text`` of what is seen
    on it where it cannot be made; ``name`` ends that of its file, behind the headings above it."""
    try:
        picture = _svg(draw, wide, tall)
    except ImportError:  # the page says so once
        return note(text)
    except Exception as error:  # a page without a chart is better than none
        return note(f"{text} (not drawn: {error!r})")
    return Html(
        '<img class="chart" src="{}{}" alt="{}" data-name="{}" width="{}" height="{}">'
    ).format(_URI, base64.b64encode(picture.encode()).decode("ascii"), text, name, wide, tall)


_URI = "data:image/svg+xml;base64,"


def _svg(draw: Callable[[Any], None], wide: int, tall: int) -> str:
    import matplotlib.style  # where a page is drawn, and nowhere else
    from matplotlib.figure import Figure

    held = io.BytesIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its font lacks
        figure = Figure(figsize=(wide * _PIXEL, tall * _PIXEL))
        draw(figure)
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(held, format="svg", transparent=True, dpi=144, metadata=metadata)
    picture = held.getvalue().decode("utf-8")
    for found, instead in _REDUNDANT:
        picture = re.sub(found, instead, picture)
    picture = re.sub(r'data:image/png;base64,([^"]*)', _with_palette, picture)
    return re.sub(r' d="[^"<]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), picture)


_REDUNDANT = (
    (r"^(?s:.*?)(?=<svg)", ""),
    (r"\n\s*", " "),
    (r'<g id="[\w.]*">', "<g>"),
    (r' transform="rotate\(-0 [-\d. ]*\)"', ""),
    (r"font-family: 'DejaVu Sans', sans-serif; ", ""),
    (r'<style type="text/css">', "<style>text{font-family:'DejaVu Sans',sans-serif}"),
)
"""Half of a drawing, of which pages have hundreds. Also digits behind a tenth of a point."""


def _with_palette(found: re.Match[str]) -> str:
    """An image of few colours, which matplotlib has in four channels."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(found[1])))
    if image.getcolors(256) is None or image.getchannel("A").getextrema() != (255, 255):
        return found[0]
    held = io.BytesIO()
    image.convert("RGB").quantize(256).save(held, format="png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode('ascii')}"


def why_none() -> str:
    """Why pages have no charts; empty where they have."""
    try:
        import matplotlib.style  # noqa: F401
    except ImportError as error:
        return (
            f"Charts are not drawn because matplotlib is not installed ({error}); pip install "
            "matplotlib"
        )
    return ""


def chart_files(page: str) -> dict[str, str]:
    """The SVG of each chart of a page, by a name made of the headings above it. Pure."""
    found: dict[str, str] = {}
    headings: dict[str, str] = {}
    for tag, heading, source, name in _HEADING_OR_CHART.findall(page):
        if tag:
            headings = {each: text for each, text in headings.items() if each < tag}
            headings[tag] = html.unescape(re.sub("<[^>]*>", "", heading))
            continue
        titles = [text.partition(":")[0] for text in headings.values()]
        title = in_words(" ".join([*titles, html.unescape(name)]))[:120] or "chart"
        numbered = (title if number == 1 else f"{title}-{number}" for number in count(1))
        picture = base64.b64decode(source).decode("utf-8")
        found[next(each for each in numbered if each not in found)] = picture
    return found


_HEADING_OR_CHART = re.compile(
    rf'<(h[234])[^>]*>(.*?)</h[234]>|<img class="chart" src="{re.escape(_URI)}([^"]*)" alt="[^"]*"'
    ' data-name="([^"]*)"',
    re.DOTALL,
)


# What drawings share.


def colours_of(kinds: Iterable[str]) -> dict[str, str]:
    """A colour for each kind of task; unknown kinds get the free ones, then grey."""
    kinds = set(kinds)
    free = [colour for name, colour in _KINDS.items() if name not in kinds]
    unknown = dict(zip(sorted(kinds - _KINDS.keys()), free))
    known = {name: colour for name, colour in _KINDS.items() if name in kinds} | unknown
    return known | dict.fromkeys(sorted(kinds - known.keys()), _OTHER)


def _name(text: str) -> str:
    """Text of a file for a drawing: in one line, and not too long."""
    text = shown_text(" ".join(text.split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _legend_rows(names: Sequence[str], wide: int) -> int:
    return -(-len(names) // _columns(names, wide)) if names else 0


def _columns(names: Sequence[str], wide: int) -> int:
    longest = max(len(_name(name)) for name in names)
    return max(1, min(len(names), int(wide // (_LETTER * longest + 44))))


def _add_legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Above the axes, in the order of reading."""
    wide, tall = figure.get_size_inches() / _PIXEL
    columns = _columns(names, int(wide))
    rows = -(-len(names) // columns)
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    order = [place for place in order if place < len(names)]
    figure.legend(
        [handles[place] for place in order],
        [f"\u200a{_name(names[place])}" for place in order],  # a name may begin as hidden ones do
        loc="upper left",
        bbox_to_anchor=(0, 1 + 2 / tall),
        ncols=columns,
        frameon=False,
        borderaxespad=0,
        handlelength=1.2,
        labelspacing=0.25,
        columnspacing=1.5,
    )


def _axes(figure: Any, left: float, top: float, *, right: float = 14, bottom: float = 24) -> Any:
    """Axes between margins in pixels."""
    wide, tall = figure.get_size_inches() / _PIXEL
    box = (left / wide, bottom / tall, 1 - (left + right) / wide, 1 - (top + bottom) / tall)
    return figure.add_axes(box)


# Lines over steps.


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart."""

    name: str  # in the legend
    mean: float | None  # of all steps, for the legend
    value_B: np.ndarray  # float [B]; nan where that is not known
    low_B: np.ndarray | None = None  # lower edge of the band around it
    high_B: np.ndarray | None = None


def line_chart(
    lines: Sequence[Line],
    steps: Sequence[float],
    *,
    what: str,
    small: bool = False,
    text: Callable[[float], str] = ratio_text,
    least: float | None = None,
    most: float | None = None,
    moved_at: Sequence[int] = (),
    names: Sequence[str] = (),
) -> Html:
    """Values over the steps, on one scale.

    Args:
        lines: what is drawn.
        steps: where the points lie.
        what: they are.
        small: whether it stands beside others.
        text: a value as a person reads it; of balances if none is given.
        least: where the scale begins; None for where it shows most.
        most: where it ends, at least.
        moved_at: steps before which owners changed.
        names: of the points, where they are no steps.
    """
    wide = SMALL if small else WIDE
    legend = [
        line.name if line.mean is None else f"{line.name} {text(line.mean)}" for line in lines
    ]
    if moved_at and not small:
        legend.append("owners changed")
    top = _LINE * _legend_rows(legend, wide) + 10

    def draw(figure: Any) -> None:
        axes = _axes(figure, 66 if small else 70, top)
        handles = []
        for line, colour in zip(lines, LINES * (1 + len(lines))):
            known = ~np.isnan(line.value_B)
            at = np.asarray(steps, dtype=np.float64)[known]
            mark = "o" if len(at) == 1 else None
            handles += axes.plot(
                at, line.value_B[known], color=colour, lw=1.6, marker=mark, markersize=3
            )
            if line.low_B is not None and line.high_B is not None:
                axes.fill_between(
                    at, line.low_B[known], line.high_B[known], color=colour, alpha=0.16, lw=0
                )
        for step in moved_at:
            marked = axes.axvline(step, color=_SOFT, lw=0.8, ls=(0, (2, 3)))
            handles = [*handles[: len(lines)], marked]
        low, high = axes.get_ylim()
        low = low if least is None else least
        axes.set_ylim(low, max(high, low + 1e-12 if most is None else most))
        axes.grid(True)
        axes.locator_params(axis="y", nbins=3 if small else 5)
        if names:
            axes.set_xticks(steps, [_name(name) for name in names])
        else:
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=4 if small else 9)
            axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: text(value))
        _add_legend(figure, handles[: len(legend)], legend)

    reported = f"{what} over the steps: {', '.join(legend)}"
    if names:
        values = (zip(names, line.value_B.tolist()) for line in lines)
        points = (", ".join(f"{at} {text(value)}" for at, value in each) for each in values)
        reported = f"{what}: {'; '.join(f'{n}: {each}' for n, each in zip(legend, points))}"
    return drawn(reported, draw, wide=wide, tall=(84 if small else 220) + top + 24)


def value_chart(
    values: Mapping[str, np.ndarray],
    bins: Bins,
    text: Callable[[float], str],
    *,
    what: str,
    small: bool = False,
    whole: Callable[[np.ndarray], float] = lambda value: float(value.mean()),
) -> Html:
    """One line for each name; nothing where nobody knows a value."""
    lines = []
    for name, given_I in values.items():
        value_I = np.where(np.isfinite(given_I), given_I, np.nan)
        if (known := value_I[~np.isnan(value_I)]).size:
            lines.append(Line(name, whole(known), bins.known_mean(value_I)))
    if not lines:
        return Html("")
    lowest = min(float(np.nanmin(line.value_B)) for line in lines)
    highest = max(float(np.nanmax(line.value_B)) for line in lines)
    least = 0.0 if 0 <= lowest <= 0.5 * highest else None
    return line_chart(lines, bins.first_steps, what=what, small=small, text=text, least=least)


# Bars.


def thin_bars(bars: Sequence[tuple[int, float]], longest: float) -> Html:
    """For an entry of a table: a bar below the other for each colour and length, the longest of
    all as wide as there is room."""
    return Html("").join(
        Html('<i class="bar" style="width:{:.3f}%;background:{}"></i>').format(
            100 * length / max(longest, 1e-12), LINES[slot]
        )
        for slot, length in bars
        if length > 0
    )


def key(slot: int, name: str) -> Html:
    """A name, behind the colour of its line or bar."""
    return Html('<i class="dash" style="background:{}"></i>{}').format(LINES[slot], name)


@dataclass(frozen=True)
class Stack:
    """One bar of several parts, one behind the other."""

    name: str
    parts: Sequence[float]  # lengths, in the order of the colours
    reported: str  # what stands at its end
    is_faint: bool = False  # it is shown, but cannot be


def stacked_bars(
    stacks: Sequence[Stack],
    names: Sequence[str],
    text: Callable[[float], str],
    *,
    limit: tuple[float, str] | None = None,
) -> Html:
    """Bars of the same parts below each other, on one scale."""
    legend = [*names, *([limit[1]] if limit else [])]
    top = _LINE * _legend_rows(legend, WIDE) + 8

    def draw(figure: Any) -> None:
        axes = _axes(figure, 330, top, right=110, bottom=4)
        rows = np.arange(len(stacks))
        faint = [0.45 if stack.is_faint else 1.0 for stack in stacks]
        left, handles = np.zeros(len(stacks)), []
        for place in range(len(names)):
            width = np.array([stack.parts[place] for stack in stacks])
            bars = axes.barh(rows, width, 0.66, left, color=LINES[place])
            for bar, alpha in zip(bars, faint):
                bar.set_alpha(alpha)
            handles.append(bars[0])
            left += width
        for row, stack in enumerate(stacks):
            axes.text(left[row], row, f" {_name(stack.reported)}", va="center", alpha=faint[row])
        if limit is not None:
            handles.append(axes.axvline(limit[0], color=_INK, lw=1, ls=(0, (2, 3))))
        axes.set_yticks(rows, [_name(stack.name) for stack in stacks], color=_INK)
        axes.set_ylim(len(stacks) - 0.5, -0.5)
        axes.set_xlim(0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        _add_legend(figure, handles, legend)

    reported = "; ".join(
        f"{stack.name}: {', '.join(f'{n} {text(p)}' for n, p in zip(names, stack.parts))}"
        for stack in stacks
    )
    return drawn(reported, draw, wide=WIDE, tall=top + 4 + 24 * len(stacks))


# One number for every expert at every step.


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of one layer, those at their owners in one EP rank together."""

    order_E: np.ndarray  # their ids from top to bottom
    owner_E: np.ndarray  # of each of these
    load_C: Mapping[int, float]  # rows drawn by an EP rank's experts over the mean of all EP ranks
    columns: Sequence[str]  # names of the steps

    @classmethod
    def of(
        cls, owner_E: Sequence[int], rows_E: np.ndarray, num_ep_ranks: int, columns: Sequence[str]
    ) -> Experts:
        """Args: owner_E: of each expert. rows_E: over the run. num_ep_ranks: EP ranks. columns: of
        the drawing."""
        owners = np.asarray(owner_E, dtype=np.int64)
        order_E = np.argsort(owners, kind="stable")
        mean = rows_E.sum() / max(num_ep_ranks, 1)
        load_C = {
            int(ep_rank): float(rows_E[owners == ep_rank].sum() / mean) if mean else 1.0
            for ep_rank in np.unique(owners)
        }
        return cls(order_E, owners[order_E], load_C, columns)

    @property
    def high(self) -> int:
        """Pixels of an expert, so that a layer is not too high, and an expert at least one."""
        return int(np.clip(560 // max(len(self.order_E), 1), 1, 18))


def load_octaves(ratios: Iterable[np.ndarray]) -> int:
    """Doublings that the colours of loads span each way: 99 % of hot entries fit, 1 to 4."""
    hot = [ratio[ratio > 1] for ratio in ratios]
    every = np.concatenate(hot) if hot else np.ones(0)
    high = float(np.percentile(every, 99)) if every.size else 1.0
    return int(np.clip(np.ceil(np.log2(high) - 1e-9), 1, 4))


def load_heatmap(
    experts: Experts,
    ratio_BE: np.ndarray,
    *,
    octaves: int,
    replicas_BE: np.ndarray | None = None,
    most_replicas: int = 1,
    kind_EC: np.ndarray | None = None,
    half: bool = False,
) -> Html:
    """Loads of a layer's experts over the steps; beside them their replicas, and who held them in
    the last step."""
    num_experts, wide = ratio_BE.shape[1], HALF if half else WIDE
    text = f"loads of {num_experts} experts over the steps"
    logs_EB = np.log2(np.clip(ratio_BE, 2.0**-octaves, 2.0**octaves)).T
    loads = _Image(logs_EB, "loads", (-octaves, octaves), experts.columns, (132, 14))
    images, top = {"": loads}, 6
    if replicas_BE is not None and kind_EC is not None:
        text += ", their replicas, and the EP ranks that held them in the last step"
        copied = (0, max(most_replicas, 1))
        ep_ranks = [f"{ep_rank}" for ep_rank in range(kind_EC.shape[1])]
        images, top = (
            {
                "loads": loads._replace(sides=(132, 626)),
                "replicas": _Image(
                    replicas_BE.T, "replicas", copied, experts.columns, (wide - 610, 204)
                ),
                "held by EP ranks, last step": _Image(
                    kind_EC, "holders", (0, 3), ep_ranks, (wide - 188, 14)
                ),
            },
            22,
        )

    def draw(figure: Any) -> None:
        for title, image in images.items():
            axes = _axes(figure, image.sides[0], top, right=image.sides[1])
            _add_image(axes, image, title, experts)
            if image.colours == "loads":
                _name_experts(axes, experts)

    ranks = ", ".join(
        f"EP rank {ep_rank} {ratio_text(load)}" for ep_rank, load in experts.load_C.items()
    )
    tall = experts.high * num_experts + top + 24
    return drawn(f"{text}; {ranks}", draw, wide=wide, tall=tall)


NOBODY, OWNER, REPLICA, LATE = range(len(_HOLDERS))
"""What an EP rank is to an expert: without it, its owner, with a planned replica, with one that was
made after the gate."""


class _Image(NamedTuple):
    """A number for each expert in each column."""

    value_EX: np.ndarray
    colours: str  # of ``_colour_map``
    ends: tuple[float, float]  # of these
    columns: Sequence[str]
    sides: tuple[float, float]  # pixels on its left and right


def _colour_map(name: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours, number = {
        "loads": (_LOADS, 41),
        "replicas": (_REPLICAS, 120),
        "holders": ([*_HOLDERS.values()], 4),
    }[name]
    return LinearSegmentedColormap.from_list(name, colours, number)


def _add_image(axes: Any, image: _Image, title: str, experts: Experts) -> None:
    """A pixel for each entry, stretched; lines between EP ranks. Ticks would take most of its
    time."""
    value_EX, (least, most) = image.value_EX[experts.order_E], image.ends
    axes.set_axis_off()
    axes.imshow(value_EX, aspect="auto", cmap=_colour_map(image.colours), vmin=least, vmax=most)
    for row in np.flatnonzero(np.diff(experts.owner_E)):
        axes.axhline(row + 0.5, color="#ffffff", lw=2)
    last = value_EX.shape[1] - 1
    below = len(value_EX) - 0.5 + 5 / experts.high
    for at in sorted({0, round(last / 3), round(2 * last / 3), last}):
        side = "left" if not at else "right" if at == last else "center"
        x = at + {"left": -0.5, "right": 0.5}.get(side, 0.0)
        axes.text(x, below, image.columns[at], ha=side, va="top", fontsize=8.5, color=_SOFT)
    if title:
        axes.text(-0.5, -0.5 - 5 / experts.high, title, va="bottom", fontsize=9)


def _name_experts(axes: Any, experts: Experts) -> None:
    """EP ranks with their loads, and experts where there is room."""
    from matplotlib.transforms import ScaledTranslation

    def beside(pixels: float) -> Any:
        return axes.transData + ScaledTranslation(-pixels * _PIXEL, 0, axes.figure.dpi_scale_trans)

    free_from = -np.inf
    for ep_rank, load in experts.load_C.items():
        middle = float(np.flatnonzero(experts.owner_E == ep_rank).mean())
        if middle >= free_from:
            free_from = middle + 13 / experts.high
            name = f"EP rank {ep_rank}  {ratio_text(load)}"
            axes.text(
                -0.5, middle, name, transform=beside(128), va="center", fontsize=8.5, color=_SOFT
            )
    if experts.high >= 11:
        for row, expert in enumerate(experts.order_E):
            axes.text(
                -0.5, row, f"{expert}", transform=beside(6), ha="right", va="center", fontsize=7.5
            )


def load_scale(octaves: int, most_replicas: int | None, *, has_late: bool = False) -> Html:
    """What the colours of such drawings mean."""
    ticks = {
        k: (f"{2**k}" if k >= 0 else f"1/{2**-k}") + TIMES for k in range(-octaves, octaves + 1)
    }
    about = "routed tokens of an expert over its layer's mean (log scale, clipped at both ends)"
    text = f"{about}: {', '.join(ticks.values())}"
    kinds = {"owner": "owner", "copy": "planned replica" if has_late else "replica"}
    kinds |= {"late": "replica made after the gate"} if has_late else {}
    if most_replicas is not None:
        text += f"; replicas of an expert beside its owner: 0 to {most_replicas}"

    def draw(figure: Any) -> None:
        from matplotlib.patches import Patch

        def add(name: str, left: float, right: float, ends: tuple[float, float], what: str) -> Any:
            axes = _axes(figure, left, 20, right=WIDE - right)
            shades = np.linspace(0, 1, 41 if name == "loads" else 99)[None]
            axes.imshow(shades, aspect="auto", cmap=_colour_map(name), extent=(*ends, 0, 1))
            axes.set_title(what, loc="left", fontsize=8.5)
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            return axes

        axes = add("loads", 20, 540, (-1, 1), about)
        axes.set_xticks([k / octaves for k in ticks], list(ticks.values()))
        if most_replicas is not None:
            most = max(most_replicas, 1)
            axes = add("replicas", 600, 820, (0, most), "replicas of an expert beside its owner")
            axes.set_xticks(range(0, most + 1, -(-most // 8)))
            patches = [Patch(color=_HOLDERS[kind], label=name) for kind, name in kinds.items()]
            figure.legend(handles=patches, loc="center right", frameon=False)

    return drawn(text, draw, wide=WIDE, tall=58, name="colours")


# Tasks over the time of a step.

HOST_WORK = "rest of the model"
_PALE = "#e3e3dd"


@dataclass(frozen=True)
class Box:
    """In the top row of a drawing: when a layer was at work."""

    name: str
    start_s: float
    end_s: float


def task_chart(
    traced_tasks: Sequence[TracedTask],
    colours: Mapping[str, str],
    *,
    start_s: float,
    length_s: float,
    what: str,
    boxes: Sequence[Box] = (),
    lengths_s: Mapping[str, float] = MappingProxyType({}),
) -> Html:
    """The tasks of some streams, a row each."""
    streams = in_order(task.stream for task in traced_tasks if task.name != HOST_WORK) or [""]
    busy_s = dict.fromkeys(streams, 0.0)
    by_kind: dict[str, list[TracedTask]] = {}
    for task in traced_tasks:
        by_kind.setdefault(task.name, []).append(task)
        if task.name != HOST_WORK:
            busy_s[task.stream] += task.length_s
    names = [
        f"{stream} {100 * busy_s[stream] / max(lengths_s.get(stream, length_s), 1e-12):.0f} %"
        for stream in streams
    ]
    rows = [*(["layer"] if boxes else []), *names]
    kinds = sorted(by_kind, key=[*colours, HOST_WORK].index)
    top = _LINE * _legend_rows(kinds, WIDE) + 6

    def draw(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = _axes(figure, 20 + _LETTER * max(len(_name(row)) for row in rows), top)
        scale = 1e3 if length_s < 1 else 1.0
        first = len(rows) - len(streams)
        for kind in kinds:
            colour = colours.get(kind, _PALE)
            for row, stream in enumerate(streams, start=first):
                at = [
                    (scale * (task.start_s - start_s), scale * task.length_s)
                    for task in by_kind[kind]
                    if task.stream == stream
                ]
                if at:
                    axes.broken_barh(
                        at,
                        (row - 0.39, 0.78),
                        facecolors=colour,
                        edgecolors="#ffffff",
                        linewidth=0.4 if len(traced_tasks) <= _MOST_BARS else 0,
                        rasterized=len(traced_tasks) > _MOST_BARS,
                    )
        letters = 1000 / (_LETTER * scale * length_s)  # that fit into a second
        for box in boxes:
            left, width = scale * (box.start_s - start_s), scale * (box.end_s - box.start_s)
            axes.broken_barh(
                [(left, width)], (-0.39, 0.78), facecolors=_NEUTRAL, edgecolors=_SOFT, linewidth=0.4
            )
            names_of = (_name(box.name), _name(box.name).partition(" ")[0])
            fits = next((each for each in names_of if len(each) + 1 <= letters * width), "")
            axes.text(left, 0, f" {fits}", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [_name(row) for row in rows], color=_INK)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, scale * length_s)
        axes.xaxis.set_major_formatter(lambda value, _: seconds_text(value / scale))
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        patches = [Patch(color=colours.get(kind, _PALE)) for kind in kinds]
        _add_legend(figure, patches, kinds)

    text = f"{what}: {', '.join(names)} busy; tasks: {', '.join(kinds)}"
    return drawn(text, draw, wide=WIDE, tall=top + _ROW * len(rows) + 24)
