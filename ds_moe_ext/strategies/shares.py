"""How copies divide rows, as strategies take it from their JSON."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial

import numpy as np

from ds_moe_ext.cost.prices import Prices
from ds_moe_ext.cost.row_prices import RowPrices
from ds_moe_ext.planned_share import from_told
from ds_moe_ext.planners.priced_share import planned_parts
from ds_moe_ext.strategy import BetterShare, Plan
from ds_moe_ext.strict import nearest

PLANNED = "planned"


def check_share(key: str, value: str, papers: str) -> None:
    """Raises ValueError for a share that a strategy does not know.

    Args:
        key: as a person writes it.
        value: what is there.
        papers: the name of the paper's own.
    """
    known = (papers, PLANNED)
    if value not in known:
        raise ValueError(f"{key} is {value!r}, which is unknown; {nearest(value, known)}")
    if value == PLANNED and importlib.util.find_spec("scipy") is None:
        raise ValueError(
            f"{key} is {PLANNED!r}, which needs SciPy, and that is not installed; pip install "
            f"scipy, or take {papers!r}"
        )


def divided_by_time(plan: Plan, rows_CE: np.ndarray, node_C: np.ndarray, prices: Prices) -> Plan:
    """The plan, whose copies shall divide rows so that the layer takes least time; as it is where
    it has none.

    Args:
        plan: with the paper's share, which holds until the parts are known.
        rows_CE: that are predicted, int64 ``[C, E]``.
        node_C: node of each cell.
        prices: of rows.
    """
    if plan.target is plan.home:
        return plan
    row_prices = RowPrices.of(prices, plan.home.num_cells)
    solve = partial(planned_parts, rows_CE, plan.target, node_C, row_prices)
    share = partial(from_told, target=plan.target, node_C=node_C)
    return replace(plan, better=BetterShare(solve, share))
