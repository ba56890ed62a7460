# SPDX-License-Identifier: Apache-2.0
"""Balance over the steps: of each layer, and what copies and new homes did for it.

Shape letters: I recorded steps, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ds_moe_ext.report.charts import Line, Scale, balance_scale, line_chart
from ds_moe_ext.report.colours import LINES
from ds_moe_ext.report.markup import Html
from ds_moe_ext.report.parts import multiples, note, section, thinned
from ds_moe_ext.report.record import Move, PlacementRecord, RunRecord
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import counted, dotted, short_names

_ROWS = "Rows of the busiest EP rank over the mean, at each recorded step."
_KNOWN = " What was predicted is drawn where that is known of all layers of a chart."
_THINNED = "shows their mean and, as a band, the smallest and the largest"


def balance(record: RunRecord, bins: Bins) -> Html:
    """One chart for few layers, a band and small charts for many."""
    balance_IL = record.balance_IL()
    scale = balance_scale(float(balance_IL.max()))
    lines = [
        _line(layer.name, balance_IL[:, [index]], bins) for index, layer in enumerate(record.layers)
    ]
    if len(lines) <= len(LINES):
        body = line_chart(lines, bins, scale=scale, small=False)
    else:
        name = "mean of the layers, and a band from the lowest to the highest"
        body = line_chart([_line(name, balance_IL, bins)], bins, scale=scale, small=False)
        body += _worst_first(lines, bins, scale=scale)
    about = note(_ROWS + thinned(bins, _THINNED))
    return section("Balance over the steps", about + body)


def gain(record: RunRecord, placements: PlacementRecord, bins: Bins) -> Html:
    """Balance as computed beside that without copies: of all layers together, and of each."""
    home_IL, balance_IL = record.home_balance_IL(), record.balance_IL()
    looks, every = record.looks, range(len(record.layers))
    known = {}
    if looks is not None:
        known = {"predicted": looks.predicted_IL, "by the paper's rule": looks.by_paper_IL}
    highest = [
        np.nanmax(table_IL, initial=1.0) for table_IL in (home_IL, balance_IL, *known.values())
    ]
    scale = balance_scale(float(max(highest)))

    def chart(layers: Sequence[int], *, small: bool) -> Html:
        lines = [
            _line("as computed", balance_IL[:, layers], bins),
            _line("at home only", home_IL[:, layers], bins),
        ]
        for name, known_IL in known.items():
            value_B = bins.known_mean(known_IL[:, layers]).mean(axis=1)
            if not np.isnan(value_B).all():
                mean = float(np.nanmean(known_IL[:, layers]))
                lines.append(Line(name, mean, value_B, value_B, value_B))
        moves = [move for move in placements.moves if move.layer in layers]
        return line_chart(lines, bins, scale=scale, small=small, marks=_marks(moves, bins))

    body = chart(every, small=False)
    if len(every) > 1:
        short = short_names([layer.name for layer in record.layers])
        saved_L = (home_IL - balance_IL).mean(axis=0)
        body += multiples(
            "Each layer, largest gain first",
            [
                Html("<div><h4>{}</h4>{}</div>").format(
                    dotted(short[record.layers[index].name]), chart([index], small=True)
                )
                for index in sorted(every, key=lambda index: -saved_L[index])
            ],
        )
    band = " The line is the mean of the layers; the band reaches from the lowest to the highest."
    about = (
        f"{_ROWS} At home only is what the same rows would have come to, had every expert computed "
        f"at its home of that step.{band if len(every) > 1 else ''}{thinned(bins, _THINNED)}"
        f"{_KNOWN if looks is not None and not np.isnan(looks.predicted_IL).all() else ''}"
    )
    return section("Balance with copies, and at home only", note(about) + body)


def _line(name: str, balance_IL: np.ndarray, bins: Bins) -> Line:
    """The mean of some layers, and a band around it."""
    return Line(
        name,
        float(balance_IL.mean()),
        bins.mean(balance_IL.mean(axis=1)),
        bins.lowest(balance_IL.min(axis=1)),
        bins.highest(balance_IL.max(axis=1)),
    )


def _worst_first(lines: Sequence[Line], bins: Bins, *, scale: Scale) -> Html:
    short = short_names([line.name for line in lines])
    drawn = [
        line_chart(
            [dataclasses.replace(line, name=short[line.name])], bins, scale=scale, small=True
        )
        for line in sorted(lines, key=lambda line: -line.mean)
    ]
    return multiples("Each layer, worst first", drawn)


def _marks(moves: Iterable[Move], bins: Bins) -> dict[int, str]:
    """How many experts changed their homes before each column, where some did."""
    moved: dict[int, int] = {}
    for move in moves:
        column = bins.column_of(move.step)
        moved[column] = moved.get(column, 0) + move.num_experts
    return {column: f"{counted(number, 'home')} changed" for column, number in moved.items()}
