# SPDX-License-Identifier: Apache-2.0
"""A strategy in one file: the busiest experts of the last steps compute on every rank.
Run, it is held against a dense reference: python examples/own_strategy.py (a minute).
JSON names it "own_strategy:Busiest" (own_strategy.json), with its fields under "options".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_moe_ext import Intervals, Job, NearestReplica, Placement, Plan, Strategy


@dataclass(frozen=True, kw_only=True)
class Busiest(Strategy):
    """Replicas of the experts with most rows, everywhere.

    Attributes:
        num_copied: experts of a layer that are copied.
    """

    num_copied: int = 1

    def intervals(self) -> Intervals:
        """Plan for every step, by the mean of the three before."""
        return Intervals(window=3, plan_every=1)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        """Of every layer. Pure: equal jobs give equal plans on every rank."""
        return tuple(self._plan_of(job, *layer) for layer in zip(job.owners, job.rows))

    def _plan_of(self, job: Job, owner: Placement, rows_CE: np.ndarray) -> Plan:
        load_E = rows_CE.sum(axis=0)
        if not load_E.any():  # before the first step
            return Plan.at_owner(owner)
        holds_EC = owner.holds_EC.copy()
        holds_EC[np.argsort(-load_E, kind="stable")[: self.num_copied]] = True
        target = Placement(holds_EC)
        return Plan(owner, target, NearestReplica(target, job.node_C))


if __name__ == "__main__":
    from ds_moe_ext.testing import check

    check(Busiest(num_copied=2))
