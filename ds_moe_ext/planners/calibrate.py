# SPDX-License-Identifier: Apache-2.0
"""Whether copies pay, by the model of ``prices``: the guard, and HECATE's calibration. Pure.

Shape letters: E experts, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_moe_ext.cost.prices import (
    Prices,
    RoutedRows,
    busiest_link,
    seconds_saved,
    step_seconds,
)
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.materialize import materialize


def guarded(
    homes: Sequence[Placement],
    targets: Sequence[Placement],
    routed: RoutedRows,
    *,
    prices: Prices,
) -> tuple[Placement, ...]:
    """The targets that are faster than the homes alone; the homes of the other layers.

    Rows that stay where a copy is may pile up there, so that copies can make a layer slower (spec
    rule 32).

    Args:
        homes: of each layer.
        targets: of each layer, homes included.
        routed: rows of each layer.
        prices: of the cluster.
    """
    saved_L = seconds_saved(homes, targets, routed, prices)
    return tuple(
        target if is_faster else home
        for home, target, is_faster in zip(homes, targets, saved_L > 0)
    )


def calibrate(
    home: Placement,
    target: Placement,
    rows_CE: np.ndarray,
    *,
    copies_left: int,
    prices: Prices,
    node_C: np.ndarray,
) -> Placement:
    """Add copies to one layer's target after its gate, if that saves more than sending them costs.

    Algorithm 1 runs again on the rows as they are, from the target on, with ``t = 1`` to
    ``copies_left``; experts that already are everywhere do not compete. Sending is not hidden: it
    takes ``copy_s`` for each expert that the busiest link carries (spec rules 21 and 22).

    Args:
        home: where the experts live.
        target: where they compute by the plan made on predicted loads.
        rows_CE: rows that each sender routes to each expert, int64.
        copies_left: further copies that a cell has memory for.
        prices: of the cluster.
        node_C: node of each cell.

    Returns:
        The best placement; the target itself if none is better.
    """
    load_E = np.where(target.holds_EC.all(axis=1), 0, rows_CE.sum(axis=0))
    wider = materialize(
        [target] * copies_left,
        [load_E] * copies_left,
        overlap_degree=np.arange(1, copies_left + 1),
        copies_per_cell=copies_left,
        node_C=node_C,
    )
    choices = (target, *wider)
    seconds = step_seconds(choices, [rows_CE] * len(choices), prices=prices, node_C=node_C)
    seconds += [prices.copy_s * busiest_link(home, target, each, node_C) for each in choices]
    return choices[int(seconds.argmin())]
