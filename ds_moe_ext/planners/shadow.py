# SPDX-License-Identifier: Apache-2.0
"""Which experts to copy everywhere: FasterMoE's shadowing, a baseline (spec section 5). Pure.

Its model knows the expert with most rows only: not what comes back to each cell from the experts
that are copied, nor what the reduction of their gradients costs. Shape letters: E experts, C cells.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ds_moe_ext.cost.block_costs import BACKWARD, FORWARD, BlockPrices, cell_rows, whole_rows
from ds_moe_ext.cost.prices import TRIPS
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.prophet_greedy import BlockPlan, Choices


def shadow_seconds(prices: BlockPrices, *, most_rows: int, num_shadows: int) -> float:
    """FasterMoE's model of a block.

    Args:
        prices: of the block; those of the scheduler and of gradients play no part.
        most_rows: rows of the hottest expert that is not copied.
        num_shadows: experts that are.
    """
    computed_s = (FORWARD + BACKWARD) * prices.row_s * most_rows
    exchanged_s = TRIPS * prices.row_bytes / prices.bytes_per_s * most_rows
    return computed_s + exchanged_s + num_shadows * prices.weight_bytes / prices.copy_bytes_per_s


def shadow_experts(
    home: Placement, rows_CE: np.ndarray, *, prices: BlockPrices, max_copied: int | None = None
) -> BlockPlan:
    """Copy the hottest experts to all cells, one more as long as that is faster by FasterMoE.

    The expert with the fewest rows is never copied. Among equals the lower index is hotter.

    Args:
        home: where each expert lives, one cell an expert.
        rows_CE: rows that each cell is expected to route to each expert; integers.
        prices: of the block.
        max_copied: experts of which a cell has memory for a copy; None: of all.

    Returns:
        The plan; its seconds are those of Pro-Prophet's model.

    Raises:
        ValueError: rows that do not fit.
    """
    rows_CE = whole_rows(home, rows_CE)
    load_E = rows_CE.sum(axis=0)
    hottest_first_E = np.argsort(-load_E, kind="stable")
    seconds = [
        shadow_seconds(prices, most_rows=rows, num_shadows=shadows)
        for shadows, rows in enumerate(load_E[hottest_first_E].tolist())
    ]
    is_gain = [after < before for before, after in pairwise(seconds)]
    num_shadows = [*is_gain[:max_copied], False].index(False)
    selected = tuple(hottest_first_E[:num_shadows].tolist())
    choices = Choices(home, rows_CE, num_excluded=0)
    return BlockPlan(choices, selected, cell_rows(home, home, rows_CE), prices)
