# SPDX-License-Identifier: Apache-2.0
"""Balance as it was predicted and as it came, and which rows left where they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ds_moe_ext.report.charts import key, thin_bars
from ds_moe_ext.report.markup import Html
from ds_moe_ext.report.parts import OPEN, folded, note, section, table
from ds_moe_ext.report.record import LooksRecord, RunRecord
from ds_moe_ext.report.summary import Division, division_of, outcome_of
from ds_moe_ext.report.units import EN_DASH, counted, dotted, ratio_text


class _Balance(NamedTuple):
    """One kind, by the colour that it has in all charts."""

    slot: int
    name: str
    of: Callable[[Division], float]


_BALANCES = (
    _Balance(1, "at home only", lambda one: one.home_balance),
    _Balance(2, "predicted", lambda one: one.predicted),
    _Balance(0, "reached", lambda one: one.balance),
    _Balance(3, Html("by the paper's rule"), lambda one: one.by_paper),
)


def division_line(record: RunRecord) -> str:
    """All layers in one line, for a person; empty where nothing was looked at. Pure."""
    whole = None if record.looks is None else _whole(record, record.looks)
    if record.looks is None or whole is None:
        return ""
    crossed = f", {_percent(whole.crossed)} crossed nodes" if record.looks.num_nodes > 1 else ""
    went = f"{_percent(whole.left)} of rows left their EP rank{crossed}"
    if np.isnan(whole.predicted):
        return went
    by_paper = "" if np.isnan(whole.by_paper) else f" ({whole.by_paper:.2f} by the paper's rule)"
    return (
        f"balance {whole.home_balance:.2f} without copies -> {whole.predicted:.2f} predicted -> "
        f"{whole.balance:.2f} reached{by_paper}, in {_predicted_steps(record.looks)}"
        f"{_no_gain(record, whole)}; {went}"
    )


def _predicted_steps(looks: LooksRecord) -> str:
    """Which steps count: balances elsewhere are of all."""
    was_predicted_I = ~np.isnan(looks.predicted_IL).all(axis=1)
    number = int(was_predicted_I.sum())
    return f"{number:,} of {counted(was_predicted_I.size, 'recorded step')}, those predicted"


def _no_gain(record: RunRecord, whole: Division) -> str:
    """Why copies did not help, where balances as they are shown tell of no gain; else empty."""
    reached, predicted, at_home = (
        round(ratio, 2) for ratio in (whole.balance, whole.predicted, whole.home_balance)
    )
    if reached < at_home:
        return ""
    outcome = outcome_of(record)
    if not outcome.copies:
        none = "; no expert was copied: none paid, or there was no time or room for it"
        return "" if outcome.num_moved else none
    if predicted < at_home:
        return "; copies did not help: other rows came than were predicted"
    return "; copies did not help, and the plan predicted no gain"


def division(record: RunRecord, looks: LooksRecord) -> Html:
    """A row for all layers together and one for each, with bars of the balances; nothing of a run
    that was not looked at."""
    whole = _whole(record, looks)
    if whole is None:
        return Html("")
    each = [division_of(record, looks, [index]) for index in range(len(record.layers))]
    shown = [balance for balance in _BALANCES if not np.isnan(balance.of(whole))]
    longest = max([0.0, *(balance.of(one) - 1 for balance in shown for one in each)])

    def row(name: str, one: Division) -> list[str]:
        ratios = [balance.of(one) for balance in shown]
        bars = [(balance.slot, ratio - 1) for balance, ratio in zip(shown, ratios)]
        parts = (one.left, one.crossed) if looks.num_nodes > 1 else (one.left,)
        drawn = [thin_bars(name, bars, longest)] if bars else []
        return [dotted(name), *drawn, *map(_ratio, ratios), *map(_percent, parts)]

    headings = ["layer", *([""] if shown else []), *(key(slot, name) for slot, name, _ in shown)]
    headings += ["left their EP rank", "crossed nodes"][: min(looks.num_nodes, 2)]
    first = row("all layers", whole)
    rows = [row(layer.name, one) for layer, one in zip(record.layers, each)]
    body = table(headings, [first, *rows] if len(rows) > 1 else rows)
    if len(rows) > OPEN:
        number = counted(len(rows), "layer")
        body = table(headings, [first]) + folded(number, table(headings, rows))
    title = "Balance predicted and reached" if shown else "Where rows went"
    about = note(_about(shown, looks))
    return section(title, Html('{}<div class="division">{}</div>').format(about, body))


def _about(shown: Sequence[_Balance], looks: LooksRecord) -> Html:
    told: list[str] = []
    if shown:
        told.append(
            "Predicted is what the plan came to for the rows that it was made for, reached what "
            "it came to for those that came; bars begin at 1. This is of "
            f"{_predicted_steps(looks)}; the balance at the top of the page is of all."
        )
    if len(shown) == len(_BALANCES):
        told.append(
            Html(
                "By the paper's rule is what the same copies would have come to, had they divided "
                "the rows that came as the paper has it."
            )
        )
    told.append("A row left its EP rank if another one computed it than the one it came from.")
    seen = int((~np.isnan(looks.left_IL)).sum())
    if seen < looks.left_IL.size:
        told.append(
            f"Layers took turns: this is of {seen:,} of {looks.left_IL.size:,} pairs of a recorded "
            "step and a layer."
        )
    return Html(" ").join(told)


def _whole(record: RunRecord, looks: LooksRecord) -> Division | None:
    """Of all layers; None where no rows were seen."""
    whole = division_of(record, looks, range(len(record.layers)))
    return None if np.isnan(whole.left) else whole


def _ratio(ratio: float) -> str:
    return EN_DASH if np.isnan(ratio) else ratio_text(ratio)


def _percent(part: float) -> str:
    return EN_DASH if np.isnan(part) else f"{100 * part:.1f} %"
