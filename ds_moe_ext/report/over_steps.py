# SPDX-License-Identifier: Apache-2.0
"""A card with the lines of some values over the steps.

Shape letters: I recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ds_moe_ext.report.charts import Line, line_chart, value_scale
from ds_moe_ext.report.parts import section, thinned
from ds_moe_ext.report.summary import Bins


def over_steps(
    title: str,
    note: str,
    values: Mapping[str, np.ndarray],
    bins: Bins,
    text: Callable[[float], str],
) -> str:
    """One line for each name; nothing where nobody knows a value.

    Args:
        title: of the card.
        note: what is drawn, as HTML.
        values: by what the legend says, float ``[I]``; nan where that is not known.
        bins: of the steps.
        text: a value as a person reads it.
    """
    known = {name: value_I for name, value_I in values.items() if not np.isnan(value_I).all()}
    if not known:
        return ""
    lines = []
    for name, value_I in known.items():
        value_B = bins.known_mean(value_I)
        lines.append(Line(name, float(np.nanmean(value_I)), value_B, value_B, value_B))
    lowest = min(float(np.nanmin(line.value_B)) for line in lines)
    scale = value_scale(lowest, max(float(np.nanmax(line.value_B)) for line in lines))
    chart = line_chart(lines, bins, scale=scale, small=False, text=text)
    note += thinned(bins, "shows their mean")
    return section(title, f'<p class="note">{note}</p>{chart}')
