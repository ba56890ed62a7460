# SPDX-License-Identifier: Apache-2.0
"""A card with the lines of some values over the steps.

Shape letters: I recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ds_moe_ext.report.charts import LINES_AXIS, Line, line_chart, value_scale
from ds_moe_ext.report.markup import Html
from ds_moe_ext.report.parts import note, section, thinned
from ds_moe_ext.report.summary import Bins


def mean_of(value_I: np.ndarray) -> float:
    """Of all."""
    return float(value_I.mean())


def over_steps(
    title: str,
    about: str,
    values: Mapping[str, np.ndarray],
    bins: Bins,
    text: Callable[[float], str],
) -> Html:
    """One line for each name; nothing where nobody knows a value.

    Args:
        title: of the card.
        about: what is drawn.
        values: by what the legend says, float ``[I]``; nan where that is not known.
        bins: of the steps.
        text: a value as a person reads it.
    """
    chart = lines_over_steps(values, bins, text)
    if not chart:
        return chart
    return section(title, note(about + thinned(bins, "shows their mean")) + chart)


def lines_over_steps(
    values: Mapping[str, np.ndarray],
    bins: Bins,
    text: Callable[[float], str],
    *,
    small: bool = False,
    axis: str = LINES_AXIS,
    whole: Callable[[np.ndarray], float] = mean_of,
) -> Html:
    """The chart of such a card.

    Args:
        values: as of ``over_steps``; likewise the next.
        bins: of the steps.
        text: a value as a person reads it.
        small: whether it stands beside others.
        axis: what the page calls the names of the columns.
        whole: what the legend gives, of the values that are known.
    """
    known = {
        name: np.where(np.isfinite(value_I), value_I, np.nan)
        for name, value_I in values.items()
        if np.isfinite(value_I).any()
    }
    if not known:
        return Html("")
    lines = []
    for name, value_I in known.items():
        value_B = bins.known_mean(value_I)
        lines.append(Line(name, whole(value_I[~np.isnan(value_I)]), value_B, value_B, value_B))
    lowest = min(float(np.nanmin(line.value_B)) for line in lines)
    scale = value_scale(lowest, max(float(np.nanmax(line.value_B)) for line in lines))
    return line_chart(lines, bins, scale=scale, small=small, text=text, axis=axis)
