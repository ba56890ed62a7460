# SPDX-License-Identifier: Apache-2.0
"""The sections of a page that follow the steps: time and memory of all ranks, and balance.

Shape letters: I recorded steps, B columns of them, L layers, G points at which ranks reported each
other, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ds_moe_ext.report.charts import LINES, Line, key, line_chart, thin_bars, value_chart
from ds_moe_ext.report.markup import (
    OPEN,
    Html,
    barred,
    dotted,
    folded,
    joined,
    multiples,
    note,
    section,
    table,
)
from ds_moe_ext.report.record import (
    LooksRecord,
    PaceRecord,
    PlacementRecord,
    RanksRecord,
    RunRecord,
)
from ds_moe_ext.report.summary import (
    Bins,
    Division,
    division_of,
    gather_steps,
    predicted_steps,
    typical,
    whole_division,
)
from ds_moe_ext.report.units import (
    EN_DASH,
    bytes_text,
    counted,
    ratio_text,
    seconds_text,
    short_count,
    short_names,
)

_MOST_COLUMNS, _FEWEST_COLUMNS = 240, 24  # of a drawing over the steps
_MOST_POINTS = 4_000  # of all line charts together
_MOST_ENTRIES = 1_000_000  # experts x columns of all heatmaps together


def line_bins(record: RunRecord) -> Bins:
    """Columns of line charts."""
    return _bins(record, _MOST_POINTS // max(len(record.layers), 1))


def heat_bins(record: RunRecord) -> Bins:
    """Columns of heatmaps."""
    num_experts = sum(layer.num_experts for layer in record.layers)
    return _bins(record, _MOST_ENTRIES // max(num_experts, 1))


def _bins(record: RunRecord, budget: int) -> Bins:
    most = max(_FEWEST_COLUMNS, min(_MOST_COLUMNS, budget))
    return gather_steps(record.steps_I, max_bins=most)


def thinned(bins: Bins, what: str) -> str:
    """That a column stands for several steps, and ``what`` it does with them."""
    if not bins.is_thinned:
        return ""
    return (
        f" The {len(bins.steps_I):,} recorded steps are drawn in {len(bins)} columns: each "
        f"takes {len(bins.steps_I) // len(bins)} or {-(-len(bins.steps_I) // len(bins))} "
        f"consecutive steps and {what}."
    )


# What all ranks took and needed over the steps, and for whom of them the others waited.


class _Value(NamedTuple):
    """One line of a chart of one run."""

    chart: str
    name: str
    of: Callable[[PaceRecord], np.ndarray]
    text: Callable[[float], str]
    whole: Callable[[np.ndarray], float] = typical


def _last(value_G: np.ndarray) -> float:
    return float(value_G[-1])


_VALUES = (
    _Value("Seconds of a step", "slowest rank", lambda pace: pace.step_s_G, seconds_text),
    _Value("Tokens a second", "all ranks", lambda pace: pace.tokens_per_s_G, short_count),
    _Value("Loss", "mean of the ranks", lambda pace: pace.loss_G, "{:.4g}".format, _last),
    _Value("Memory", "allocated", lambda pace: pace.allocated_G, bytes_text, _last),
    _Value("Memory", "reserved", lambda pace: pace.reserved_G, bytes_text, _last),
    _Value("Memory", "of the host", lambda pace: pace.resident_G, bytes_text, _last),
    _Value("Communication", "exposed", lambda pace: pace.exposed_s_G, seconds_text),
    _Value("Communication", "waiting", lambda pace: pace.waited_s_G, seconds_text),
    _Value("Communication", "sending", lambda pace: pace.sent_s_G, seconds_text),
)
_ABOUT_PACE = (
    "Points are the steps after which ranks exchanged reports. Memory is the peak so far on "
    "the fullest rank: tensors on the device, memory reserved by torch, and host memory of "
    "the process. Communication is of one timed step, averaged over ranks: the exposed part; "
    "and token all-to-alls, split into waiting for the last rank and sending. Legends give "
    "medians; for loss and memory, the last value."
)


def paces_of(runs: Mapping[str, RunRecord]) -> dict[str, PaceRecord]:
    """Of runs whose ranks exchanged reports, at the steps that all of them have; by name. Empty
    where one of them does not know."""
    paces = {name: run.ranks.pace for name, run in runs.items() if run.ranks is not None}
    steps = set.intersection(*(set(pace.steps_G) for pace in paces.values())) if paces else set()
    if not steps or len(paces) < len(runs):
        return {}
    found = {}
    for name, pace in paces.items():
        at = np.searchsorted(pace.steps_G, sorted(steps))
        values = (value_G[at] for value_G in list(vars(pace).values())[1:])
        found[name] = PaceRecord(tuple(sorted(steps)), *values)
    return found


def pace_charts(paces: Mapping[str, PaceRecord]) -> Html:
    """A chart for each kind of value of one run, or for each value with a line a run; nothing of
    what is not known, of all runs."""
    drawn: dict[str, tuple[_Value, dict[str, np.ndarray]]] = {}
    for value in _VALUES:
        for run, pace in paces.items():
            is_alone = len(paces) == 1
            title = value.chart if is_alone else f"{value.chart}, {value.name}"
            _, lines = drawn.setdefault(title, (value, {}))
            lines[value.name if is_alone else run] = value.of(pace)
    shown = []
    for title, (value, lines) in drawn.items():
        if len(paces) > 1 and any(np.isnan(value_G).all() for value_G in lines.values()):
            continue
        steps = next(iter(paces.values())).steps_G
        bins = gather_steps(steps, max_bins=len(steps))
        chart = value_chart(lines, bins, value.text, what=title, small=True, whole=value.whole)
        shown += [Html("<div><h3>{}</h3>{}</div>").format(title, chart)] if chart else []
    if not shown:
        return Html("")
    body = Html('{}<div class="multiples">{}</div>').format(note(_ABOUT_PACE), joined(shown))
    return section("Step time, loss and memory over the steps", body)


def waited_for(ranks: RanksRecord | None) -> Html:
    """A row for each rank, those first that came last most often; nothing where rows were not
    exchanged, or that is not known."""
    if ranks is None or not ranks.num_last_R.any():
        return Html("")
    most, has_device = float(ranks.num_last_R.max()), bool(ranks.allocated_R.any())
    memory_R = ranks.allocated_R if has_device else ranks.resident_R
    rows = [
        [
            rank_name(ranks, at),
            thin_bars([(0, float(ranks.num_last_R[at]))], most),
            f"{ranks.num_last_R[at]:,}",
            f"{100 * ranks.num_last_R[at] / ranks.num_exchanges:.0f} %",
            *(seconds_text(float(each_R[at])) for each_R in (ranks.waited_s_R, ranks.sent_s_R)),
            bytes_text(int(memory_R[at])),
        ]
        for at in np.argsort(-ranks.num_last_R, kind="stable").tolist()
    ]
    memory = "memory of the device" if has_device else "memory of the host"
    headings = ["", "", "came last", "of its all-to-alls", "waited", "sent", memory]
    body = table(headings, rows[:OPEN])
    if len(rows) > OPEN:
        more = counted(len(rows) - OPEN, "more rank")
        body += folded(more, table(headings, rows[OPEN:]))
    about = (
        f"How many of the {ranks.num_exchanges:,} token all-to-alls of the timed steps each "
        "rank entered last, so that the others waited for it. Seconds are per step, on "
        "average; the rank that waits least is the slowest. Memory is the peak so far."
    )
    return section("Slowest ranks", barred(about, body))


def rank_name(ranks: RanksRecord, at: int) -> str:
    """By its place among those that it exchanges rows with, and its number where that is
    another."""
    rank = ranks.ranks_R[at]
    if not ranks.ep_rank_R:
        return f"rank {rank}"
    ep_rank = ranks.ep_rank_R[at]
    return f"EP rank {ep_rank}" if ep_rank == rank else f"EP rank {ep_rank} (rank {rank})"


# Balance over the steps: of each layer, and what replicas and new owners did for it.

_ROWS = "Routed tokens of the busiest EP rank over the mean, at each recorded step."
_KNOWN = " The prediction is drawn where it is known for all layers of a chart."
_THINNED = "shows their mean and, as a band, the smallest and the largest"


def balance(record: RunRecord, bins: Bins) -> Html:
    """One chart for few layers, a band and small charts for many; a run with replicas has these
    above."""
    balance_IL = record.balance_IL()
    lines = [
        _line(layer.name, balance_IL[:, [index]], bins) for index, layer in enumerate(record.layers)
    ]
    drawn = lines
    if len(lines) > len(LINES):
        every = "mean of the layers, and a band from the lowest to the highest"
        drawn = [_line(every, balance_IL, bins)]
    most = float(balance_IL.max())

    def chart(shown: Sequence[Line], *, small: bool = False) -> Html:
        steps = bins.first_steps
        return line_chart(shown, steps, what="balance", small=small, least=1.0, most=most)

    body = chart(drawn)
    if len(lines) > len(LINES) and record.placements is None:
        small = [chart([line], small=True) for line in lines]
        body += _each_layer("worst first", record, balance_IL.mean(axis=0), small)
    return section("Balance over the steps", note(_ROWS + thinned(bins, _THINNED)) + body)


def _each_layer(order: str, record: RunRecord, worth_L: np.ndarray, drawn: Sequence[Html]) -> Html:
    """A small chart of each layer, those with most first."""
    short = short_names([layer.name for layer in record.layers])
    named = [
        Html("<div><h4>{}</h4>{}</div>").format(dotted(short[layer.name]), chart)
        for layer, chart in zip(record.layers, drawn)
    ]
    places = np.argsort(-worth_L, kind="stable").tolist()
    return multiples(f"Each layer, {order}", [named[place] for place in places])


def gain(record: RunRecord, placements: PlacementRecord, bins: Bins) -> Html:
    """Balance as computed beside that without replicas: of all layers together, and of each."""
    owner_IL, balance_IL = record.owner_balance_IL(), record.balance_IL()
    looks, every = record.looks, range(len(record.layers))
    known = {}
    if looks is not None:
        known = {"predicted": looks.predicted_IL, "by the paper's rule": looks.by_paper_IL}
    tables = (owner_IL, balance_IL, *known.values())
    most = max(float(np.nanmax(table_IL, initial=1.0)) for table_IL in tables)

    def chart(layers: Sequence[int], *, small: bool) -> Html:
        lines = [
            _line("as computed", balance_IL[:, layers], bins),
            _line("without replicas", owner_IL[:, layers], bins),
        ]
        for name, known_IL in known.items():
            value_B = bins.known_mean(known_IL[:, layers]).mean(axis=1)
            if not np.isnan(value_B).all():
                lines.append(Line(name, float(np.nanmean(known_IL[:, layers])), value_B))
        last = record.steps_I[-1]
        moved_at = sorted({min(m.step, last) for m in placements.moves if m.layer in layers})
        return line_chart(
            lines,
            bins.first_steps,
            what="balance",
            small=small,
            least=1.0,
            most=most,
            moved_at=moved_at,
        )

    body = chart(every, small=False)
    if len(every) > 1:
        small = [chart([index], small=True) for index in every]
        saved_L = (owner_IL - balance_IL).mean(axis=0)
        body += _each_layer("largest gain first", record, saved_L, small)
    band = " The line is the mean of the layers; the band reaches from the lowest to the highest."
    is_predicted = looks is not None and not np.isnan(looks.predicted_IL).all()
    more = (
        f"{band if len(every) > 1 else ''}{thinned(bins, _THINNED)}{_KNOWN if is_predicted else ''}"
    )
    about = f'{_ROWS} "Without replicas": the same tokens, every expert at its owner.{more}'
    return section("Balance with replicas, and without", note(about) + body)


def _line(name: str, balance_IL: np.ndarray, bins: Bins) -> Line:
    """The mean of some layers, and a band around it."""
    return Line(
        name,
        float(balance_IL.mean()),
        bins.mean(balance_IL.mean(axis=1)),
        bins.lowest(balance_IL.min(axis=1)),
        bins.highest(balance_IL.max(axis=1)),
    )


# Balance as it was predicted and as it came, and which rows left where they came from.


class _Kind(NamedTuple):
    """Of balance, by the colour that it has in all charts."""

    slot: int
    name: str
    of: Callable[[Division], float]


_KINDS = (
    _Kind(1, "without replicas", lambda one: one.owner_balance),
    _Kind(2, "predicted", lambda one: one.predicted),
    _Kind(0, "reached", lambda one: one.balance),
    _Kind(3, Html("by the paper's rule"), lambda one: one.by_paper),
)


def division(record: RunRecord, looks: LooksRecord) -> Html:
    """A row for all layers together and one for each, with bars of the balances; nothing of a run
    that was not looked at."""
    whole = whole_division(record)
    if whole is None:
        return Html("")
    each = [division_of(record, looks, [index]) for index in range(len(record.layers))]
    shown = [kind for kind in _KINDS if not np.isnan(kind.of(whole))]
    longest = max([0.0, *(kind.of(one) - 1 for kind in shown for one in each)])

    def row(name: str, one: Division) -> list[str]:
        ratios = [kind.of(one) for kind in shown]
        bars = [(kind.slot, ratio - 1) for kind, ratio in zip(shown, ratios)]
        parts = (one.left, one.crossed) if looks.num_nodes > 1 else (one.left,)
        lines = [EN_DASH if np.isnan(ratio) else ratio_text(ratio) for ratio in ratios]
        lines += [EN_DASH if np.isnan(part) else f"{100 * part:.1f} %" for part in parts]
        return [dotted(name), *([thin_bars(bars, longest)] if bars else []), *lines]

    headings = ["layer", *([""] if shown else []), *(key(slot, name) for slot, name, _ in shown)]
    headings += ["left their EP rank", "crossed nodes"][: min(looks.num_nodes, 2)]
    first = row("all layers", whole)
    rows = [row(layer.name, one) for layer, one in zip(record.layers, each)]
    body = table(headings, [first, *rows] if len(rows) > 1 else rows)
    if len(rows) > OPEN:
        number = counted(len(rows), "layer")
        body = table(headings, [first]) + folded(number, table(headings, rows))
    lines: list[str] = []
    if shown:
        lines.append(
            '"Predicted": the balance of the plan for the predicted tokens. "Reached": its '
            "balance for the tokens that arrived. Bars begin at 1. This covers "
            f"{predicted_steps(looks)}; the balance at the top of the page covers all steps."
        )
    if len(shown) == len(_KINDS):
        lines.append(
            Html(
                "By the paper's rule: the balance of the same replicas if they shared the "
                "tokens as the paper does."
            )
        )
    lines.append("A routed token left its EP rank if another EP rank computed it.")
    seen = int((~np.isnan(looks.left_IL)).sum())
    if seen < looks.left_IL.size:
        lines.append(
            f"Layers were sampled in turn: this covers {seen:,} of {looks.left_IL.size:,} "
            "pairs of a recorded step and a layer."
        )
    title = "Balance predicted and reached" if shown else "Where tokens went"
    return section(title, barred(Html(" ").join(lines), body))
