# SPDX-License-Identifier: Apache-2.0
"""What all ranks took and needed over the steps, and for whom of them the others waited.

Shape letters: G points, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ds_moe_ext.report.charts import thin_bars
from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.over_steps import lines_over_steps
from ds_moe_ext.report.parts import OPEN, folded, note, section, table
from ds_moe_ext.report.record import PaceRecord, RanksRecord, RunRecord
from ds_moe_ext.report.summary import gather_steps, typical
from ds_moe_ext.report.units import bytes_text, counted, seconds_text, short_count

AXIS = "told"  # of charts over the steps behind which ranks told each other


class _Value(NamedTuple):
    """One line of a chart of one run."""

    chart: str
    name: str
    of: Callable[[PaceRecord], np.ndarray]
    text: Callable[[float], str]
    whole: Callable[[np.ndarray], float] = typical


def _last(value_G: np.ndarray) -> float:
    return float(value_G[-1])


def _bytes(value: float) -> str:
    return bytes_text(round(value))


_VALUES = (
    _Value("Seconds of a step", "slowest rank", lambda pace: pace.step_s_G, seconds_text),
    _Value("Tokens a second", "all ranks", lambda pace: pace.tokens_per_s_G, short_count),
    _Value("Loss", "mean of the ranks", lambda pace: pace.loss_G, "{:.4g}".format, _last),
    _Value("Memory", "allocated", lambda pace: pace.allocated_G, _bytes, _last),
    _Value("Memory", "reserved", lambda pace: pace.reserved_G, _bytes, _last),
    _Value("Memory", "of the host", lambda pace: pace.resident_G, _bytes, _last),
    _Value("Communication", "exposed", lambda pace: pace.exposed_s_G, seconds_text),
    _Value("Communication", "waiting", lambda pace: pace.waited_s_G, seconds_text),
    _Value("Communication", "sending", lambda pace: pace.sent_s_G, seconds_text),
)
_NOTE = (
    "Points are steps behind which ranks told each other. Memory is the most so far, on the "
    "fullest rank: in tensors on its device, held there by torch, and of its process on the host. "
    "Communication is of one timed step, mean of the ranks: what nothing hides; and exchanges of "
    "rows, until the last rank came (waiting) and from then on (sending). Legends give medians, of "
    "loss and memory the last."
)


def paces_of(runs: Mapping[str, RunRecord]) -> dict[str, PaceRecord]:
    """Of runs whose ranks told each other, at the steps that all of them have; by name. Empty where
    one of them does not know."""
    paces = {name: run.ranks.pace for name, run in runs.items() if run.ranks is not None}
    steps = set.intersection(*(set(pace.steps_G) for pace in paces.values())) if paces else set()
    if not steps or len(paces) < len(runs):
        return {}
    return {name: _at(pace, sorted(steps)) for name, pace in paces.items()}


def _at(pace: PaceRecord, steps: list[int]) -> PaceRecord:
    at = np.searchsorted(pace.steps_G, steps)
    values = (value_G[at] for value_G in list(vars(pace).values())[1:])
    return PaceRecord(tuple(steps), *values)


def pace_labels(paces: Mapping[str, PaceRecord]) -> list[str]:
    """Names of the columns of its charts."""
    return [f"{step}" for pace in list(paces.values())[:1] for step in pace.steps_G]


def pace_charts(paces: Mapping[str, PaceRecord]) -> Html:
    """A chart for each kind of value of one run, or for each value with a line a run; nothing of
    what is not known, of all runs.

    Args:
        paces: what ``paces_of`` says.
    """
    charts: dict[str, dict[str, np.ndarray]] = {}
    kinds: dict[str, _Value] = {}
    for value in _VALUES:
        for run, pace in paces.items():
            is_alone = len(paces) == 1
            title = value.chart if is_alone else f"{value.chart}, {value.name}"
            charts.setdefault(title, {})[value.name if is_alone else run] = value.of(pace)
            kinds[title] = value
    drawn = []
    for title, lines in charts.items():
        if len(paces) > 1 and any(np.isnan(value_G).all() for value_G in lines.values()):
            continue
        bins = gather_steps(next(iter(paces.values())).steps_G, max_bins=len(pace_labels(paces)))
        text, whole = kinds[title].text, kinds[title].whole
        chart = lines_over_steps(lines, bins, text, small=True, axis=AXIS, whole=whole)
        drawn += [Html("<div><h3>{}</h3>{}</div>").format(title, chart)] if chart else []
    if not drawn:
        return Html("")
    body = Html('{}<div class="two">{}</div>').format(note(_NOTE), joined(drawn))
    return section("Time, loss and memory over the steps", body)


def waited_for(ranks: RanksRecord | None) -> Html:
    """A row for each rank, those first that came last most often; nothing where rows were not
    exchanged, or that is not known."""
    if ranks is None or not ranks.num_last_R.any():
        return Html("")
    order = np.argsort(-ranks.num_last_R, kind="stable")
    most = float(ranks.num_last_R.max())
    rows = [
        [
            rank_name(ranks, at),
            thin_bars(rank_name(ranks, at), [(0, float(ranks.num_last_R[at]))], most),
            f"{ranks.num_last_R[at]:,}",
            f"{100 * ranks.num_last_R[at] / ranks.num_exchanges:.0f} %",
            *(seconds_text(float(each_R[at])) for each_R in (ranks.waited_s_R, ranks.sent_s_R)),
            bytes_text(int((ranks.allocated_R if has_device(ranks) else ranks.resident_R)[at])),
        ]
        for at in order.tolist()
    ]
    memory = "memory of the device" if has_device(ranks) else "memory of the host"
    headings = ["", "", "came last", "of its exchanges", "waited", "sent", memory]
    body = table(headings, rows[:OPEN])
    if len(rows) > OPEN:
        more = counted(len(rows) - OPEN, "more rank")
        body += folded(more, table(headings, rows[OPEN:]))
    about = (
        f"Of {ranks.num_exchanges:,} exchanges of rows that each rank had in timed steps, to how "
        "many it came last: for it the others of its exchange waited. Seconds are of a step, on "
        "average; who waits least is waited for. Memory is the most so far."
    )
    shown = Html('{}<div class="division">{}</div>').format(note(about), body)
    return section("Who the others waited for", shown)


def rank_name(ranks: RanksRecord, at: int) -> str:
    """By its place among those that it exchanges rows with, and its number where that is
    another."""
    rank = ranks.ranks_R[at]
    ep_rank = ranks.ep_rank_R[at] if ranks.ep_rank_R else None
    if ep_rank is None:
        return f"rank {rank}"
    return f"EP rank {ep_rank}" if ep_rank == rank else f"EP rank {ep_rank} (rank {rank})"


def has_device(ranks: RanksRecord) -> bool:
    """Whether ranks have memory of a device."""
    return bool(ranks.allocated_R.any())
