# SPDX-License-Identifier: Apache-2.0
"""A strategy in one file: the busiest experts of the last steps compute on every rank.
Run, it is held against a dense reference: python examples/own_strategy.py (a minute).
JSON names it "own_strategy:Busiest" (own_strategy.json), with its fields under "options".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_moe_ext import Job, NearestCopy, Placement, Plan, Rhythm, Strategy


@dataclass(frozen=True, kw_only=True)
class Busiest(Strategy):
    """Copies of the experts with most rows, everywhere.

    Attributes:
        num_copied: experts of a layer that are copied.
    """

    num_copied: int = 1

    def rhythm(self) -> Rhythm:
        """Plan for every step, by the mean of the three before."""
        return Rhythm(window=3, plan_every=1)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        """Of every layer. Pure: equal jobs give equal plans on every rank."""
        return tuple(self._plan_of(job, *layer) for layer in zip(job.homes, job.rows))

    def _plan_of(self, job: Job, home: Placement, rows_CE: np.ndarray) -> Plan:
        load_E = rows_CE.sum(axis=0)
        if not load_E.any():  # before the first step
            return Plan.at_home(home)
        holds_EC = home.holds_EC.copy()
        holds_EC[np.argsort(-load_E, kind="stable")[: self.num_copied]] = True
        target = Placement(holds_EC)
        return Plan(home, target, NearestCopy(target, job.node_C))


if __name__ == "__main__":
    from ds_moe_ext.testing import check

    check(Busiest(num_copied=2))
