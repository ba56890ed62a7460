# SPDX-License-Identifier: Apache-2.0
"""Copies divide rows so that a layer takes least time, by the rows of all senders as they are.

Ours; docs/priced_share.md has the idea, ``row_levels.py`` the division. Pure. Shape letters: E
experts, C cells, F chunks, S experts of one cell, N (copied expert, holder) pairs, P pairs of all
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.placement import Placement
from ds_moe_ext.row_levels import Division, RowLevels

SWEEPS = 6
"""Over the copied experts of a layer, once its rows are known."""
PLANNED_SWEEPS = 16  # more, when there is time


@dataclass(frozen=True, eq=False)
class LevelShare:
    """A ``Rule``: the parts that were planned, or a division anew where rows are not as predicted.

    Attributes:
        levels: what divides.
        plan: of the rows that were predicted.
        sweeps: of a division anew; with 0 the plan's parts hold.
    """

    levels: RowLevels
    plan: Division
    sweeps: int

    @classmethod
    def planned(cls, levels: RowLevels, rows_CE: np.ndarray, *, sweeps: int) -> LevelShare:
        """For the rows that are predicted, int64 ``[C, E]``."""
        return cls(levels, levels.divided(rows_CE, None, sweeps=PLANNED_SWEEPS), sweeps)

    def alone(self, home: Placement, rows_CE: np.ndarray) -> LevelShare:
        """Of the same rows where nothing is copied."""
        return LevelShare.planned(replace(self.levels, target=home), rows_CE, sweeps=self.sweeps)

    @property
    def planned_s(self) -> float:
        """Seconds of the layer by the plan, as ``cost/prices.py`` counts them."""
        return self.plan.price * self.levels.prices.unit_s

    def prepare(self, cell: int) -> None:
        self.levels.target.prepare(cell)
        self.levels.prepare()

    def of_rows(self, rows_CE: np.ndarray) -> DividedRows:
        rows_CE = np.ascontiguousarray(rows_CE, dtype=np.int64)
        rows_N = self.levels.divided(rows_CE, self.plan, sweeps=self.sweeps).rows_N
        return DividedRows(self.levels, rows_CE, rows_N)

    def describe(self) -> str:
        plan, levels = self.plan, self.levels
        steps = plan.leave, plan.cross, plan.toll, self.sweeps
        known = f"{plan.part_N.tolist()} {steps} {plan.mean} {plan.price}"
        return f"levels {known}\n{levels.prices}\n{levels.node_C}\n{levels.target.describe()}"


@dataclass(frozen=True, eq=False)
class DividedRows:
    """The ``Share`` of one pass.

    Attributes:
        levels: what has divided.
        rows_CE: of all chunks and of each cell, int64.
        rows_N: that each holder computes, int64.
    """

    levels: RowLevels
    rows_CE: np.ndarray
    rows_N: np.ndarray

    @property
    def target(self) -> Placement:
        """Where experts compute."""
        return self.levels.target

    def prepare(self, cell: int) -> None:
        self.target.prepare(cell)

    def of_rows(self, rows_CE: np.ndarray) -> DividedRows:
        return self

    def sent_by_pair(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        """See ``share.sent_by_pair``."""
        return self.levels.sent(self.rows_CE, self.rows_N, sender, rows_FE)

    def received_by_slot(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        """See ``share.received_by_slot``."""
        return self.levels.received(self.rows_CE, self.rows_N, holder, rows_CFE)

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, self.target.flat_N] = self.sent_by_pair(sender, rows_FE)
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        rows = np.zeros_like(rows_CFE)
        rows[..., self.target.experts_of(holder)] = self.received_by_slot(holder, rows_CFE)
        return rows

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        sent = (self.sent_by_pair(sender, rows_FE) for sender, rows_FE in enumerate(rows_CFE))
        # Sums of whole numbers below 2**53: exact.
        between_CFC = np.stack([sent_FP.astype(np.float64) @ self._is_at_PC for sent_FP in sent])
        return between_CFC.astype(np.int64).swapaxes(0, 1)

    @property
    def _is_at_PC(self) -> np.ndarray:
        """1 where a cell is the holder of a pair, float64."""
        is_at_PC = self.target.holder_N[:, None] == np.arange(self.target.num_cells)
        return is_at_PC.astype(np.float64)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        computed_C: np.ndarray = self.levels.computed_EC(self.rows_CE, self.rows_N).sum(axis=0)
        return computed_C

    def describe(self) -> str:
        return f"rows {self.rows_N.tolist()}\n{self.target.describe()}"
