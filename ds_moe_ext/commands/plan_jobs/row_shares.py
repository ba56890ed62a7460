# SPDX-License-Identifier: Apache-2.0
"""The priced share as a job: which rows go to which of an expert's copies.

Shape letters: C cells, E experts, N (copied expert, holder) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_moe_ext.commands.plan_jobs.job_inputs import (
    MOST_COST,
    MOST_ROWS,
    check_loads,
    check_number,
    check_size,
)
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestCopy
from ds_moe_ext.planning.priced_plans import Routed, divide, in_whole_rows, sent_rows
from ds_moe_ext.planning.prices import RowPrices


@dataclass(frozen=True, kw_only=True)
class PricedShareJob:
    """Input of the priced share, for one layer.

    Attributes:
        rows: of each sender, whole rows for each expert.
        holders: of each expert, the cells that hold it.
        node: of each cell.
        row_s: seconds to compute a row, of all cells or of each.
        local_row_s: seconds that a row takes of its cells' own links, in either direction: of all
            rows that leave or enter a cell.
        cross_row_s: seconds that a row between nodes takes of their cards, which all cells of a
            node share, in either direction.
    """

    rows: list[list[int]]
    holders: list[list[int]]
    node: list[int]
    row_s: float | list[float]
    local_row_s: float
    cross_row_s: float

    def __post_init__(self) -> None:
        num_cells, num_experts = len(self.rows), len(self.holders)
        if not num_cells or not num_experts:
            raise ValueError(
                f"rows are of {num_cells} senders and holders of {num_experts} experts; give at "
                "least one of both"
            )
        check_size(num_cells, num_experts)
        for cell, rows in enumerate(self.rows):
            check_loads(f"rows[{cell}]", rows, int)
            if len(rows) != num_experts:
                raise ValueError(
                    f"rows[{cell}] has {len(rows)} numbers, but holders are of {num_experts} "
                    "experts; give one for each"
                )
        for expert, cells in enumerate(self.holders):
            self._check_holders(expert, cells)
        for name, values in (("node", self.node), ("row_s", self.row_s)):
            if isinstance(values, list) and len(values) != num_cells:
                raise ValueError(
                    f"{name} has {len(values)} numbers, but rows are of {num_cells} cells; give "
                    "one for each"
                )
        for cell, node in enumerate(self.node):
            check_number(f"node[{cell}]", node, int, most=MOST_ROWS)
        own = self.row_s if isinstance(self.row_s, list) else [self.row_s]
        names = [f"row_s[{cell}]" for cell in range(len(own))] if len(own) > 1 else ["row_s"]
        for name, price in (
            *zip(names, own),
            ("local_row_s", self.local_row_s),
            ("cross_row_s", self.cross_row_s),
        ):
            check_number(name, price, float, most=MOST_COST)

    def _check_holders(self, expert: int, cells: list[int]) -> None:
        name = f"holders[{expert}]"
        if not cells:
            raise ValueError(f"{name} is {cells!r}; give a list of the cells that hold the expert")
        for number, cell in enumerate(cells):
            check_number(f"{name}[{number}]", cell, int, most=len(self.rows) - 1)
        if len(set(cells)) < len(cells):
            raise ValueError(f"{name} is {cells}; name each cell once")


@dataclass(frozen=True, kw_only=True)
class PricedSharePlan:
    """Output of the priced share.

    Attributes:
        sent: of each sender and expert, the rows for each holder that gets some.
        computed: rows of each cell.
        time_s: seconds of the layer: of the busiest cell and of the busiest link, together.
        time_nearest_s: the same if every row went to the nearest copy.
    """

    sent: list[list[dict[int, int]]]
    computed: list[int]
    time_s: float
    time_nearest_s: float


def priced_share(job: PricedShareJob) -> PricedSharePlan:
    """The share under which the layer takes least time."""
    rows_CE, node_C = np.array(job.rows, dtype=np.int64), np.array(job.node, dtype=np.int64)
    num_cells, num_experts = rows_CE.shape
    holds_EC = np.zeros((num_experts, num_cells), dtype=bool)
    for expert, cells in enumerate(job.holders):
        holds_EC[expert, cells] = True
    row_s_C = np.broadcast_to(np.array(job.row_s, dtype=np.float64), num_cells)
    prices = RowPrices(row_s_C, job.local_row_s, job.cross_row_s)
    routed = Routed(rows_CE, Placement(holds_EC), node_C)
    nearest_CEC = _nearest(routed)
    priced_CEC = _priced(routed, prices)
    time_s, nearest_s = (
        prices.seconds(sent_CEC.sum(axis=1), node_C) for sent_CEC in (priced_CEC, nearest_CEC)
    )
    # In whole rows the best parts may be worse, where a cell has but some rows.
    sent_CEC = priced_CEC if time_s <= nearest_s else nearest_CEC
    return PricedSharePlan(
        sent=[[_by_holder(sent_C) for sent_C in sent_EC] for sent_EC in sent_CEC],
        computed=sent_CEC.sum(axis=(0, 1)).tolist(),
        time_s=min(time_s, nearest_s),
        time_nearest_s=nearest_s,
    )


def _priced(routed: Routed, prices: RowPrices) -> np.ndarray:
    """Rows from each sender for each expert to each holder, ``[C, E, C]``."""
    holders, rows_CE = routed.holders, routed.rows_CE
    sent_CEC = np.zeros((*rows_CE.shape, len(rows_CE)), dtype=np.int64)
    sent_CEC[:, holders.expert_A, holders.cell_A] = rows_CE[:, holders.expert_A]
    sent_CN = sent_rows(in_whole_rows(divide(routed, prices), routed), routed)
    sent_CEC[:, holders.expert_X[holders.copied_N], holders.cell_N] = sent_CN
    return sent_CEC


def _nearest(routed: Routed) -> np.ndarray:
    """The same by the nearest copies."""
    share = NearestCopy(routed.target, routed.node_C)
    rows_CE = routed.rows_CE
    return np.stack([share.rows_from(cell, rows_E[None])[0] for cell, rows_E in enumerate(rows_CE)])


def _by_holder(sent_C: np.ndarray) -> dict[int, int]:
    return {cell: int(sent_C[cell]) for cell in np.flatnonzero(sent_C).tolist()}
