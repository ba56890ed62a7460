# SPDX-License-Identifier: Apache-2.0
"""A strategy that plans at random, and anew in every step: what a run must not depend on.

Named in JSON as ``tests.hosts.varied:Varied``. Shape letters: C EP ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import (
    Carried,
    CostGroup,
    Destination,
    Intervals,
    Job,
    Plan,
    Strategy,
)

VARIED = f"{__name__}:Varied"
IN_SLOTS = f"{__name__}:VariedInSlots"


@dataclass(frozen=True, kw_only=True)
class Varied(Strategy):
    """Copies, further replicas once the rows are known, and owners by chance."""

    layers: float = 0.8
    replicas: float = 0.4
    revised: float = 0.0
    rematerialized: float = 0.0
    carried: float = 0.0
    plan_every: int = 1
    shard_every: int = 0
    seed: int = 0

    @property
    def has_uneven_owners(self) -> bool:
        return True

    def intervals(self) -> Intervals:
        return Intervals(plan_every=self.plan_every, shard_every=self.shard_every)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        rng = self._chance(job)
        plans = [self._plan_of(owner, job.node_C, rng) for owner in job.owners]
        # The first layer of a stack has nobody who could carry its replicas.
        follows = map(job.follows, range(len(plans)))
        return tuple(self._carried(p, rng) if has else p for p, has in zip(plans, follows))

    def owners(self, job: Job) -> tuple[Placement, ...]:
        rng = self._chance(job)
        owners = dict(enumerate(job.owners))
        for cost_group in job.cost_groups:
            owners.update(zip(cost_group.layers, _shuffled(cost_group, job.owners, rng)))
        return tuple(owners[layer] for layer in range(len(owners)))

    def _chance(self, job: Job) -> np.random.Generator:
        """The same on every rank, and another in every step."""
        return np.random.default_rng([self.seed, *_digits(np.concatenate(job.rows, axis=1))])

    def _plan_of(self, owner: Placement, node_C: np.ndarray, rng: np.random.Generator) -> Plan:
        is_copied = rng.random() < self.layers
        copied_EC = is_copied & (rng.random(owner.holds_EC.shape) < self.replicas)
        target = owner.with_replicas(copied_EC) if copied_EC.any() else owner
        is_revised = rng.random() < self.revised
        revise = partial(_wider, target, node_C=node_C) if is_revised else None
        return Plan(
            owner,
            target,
            NearestReplica(target, node_C),
            rematerialize=bool(rng.random() < self.rematerialized),
            revise=revise,
        )

    def _carried(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """The plan with its replicas in two pieces, somehow, if chance says so."""
        if rng.random() >= self.carried:
            return plan
        copied_E = (plan.target.holds_EC & ~plan.owner.holds_EC).any(axis=1)
        experts = rng.permutation(np.flatnonzero(copied_E)).tolist()
        return replace(plan, carried=Carried(self._cut(experts, rng), self._cut(experts, rng)))

    def _cut(self, experts: list[int], rng: np.random.Generator) -> Split:
        first = int(rng.integers(0, len(experts) + 1))
        return Split(tuple(experts[:first]), tuple(experts[first:]))


@dataclass(frozen=True, kw_only=True)
class Halved(Varied):
    """Its pieces are halves."""

    def _cut(self, experts: list[int], rng: np.random.Generator) -> Split:
        half = len(experts) // 2
        return Split(tuple(experts[:half]), tuple(experts[half:]))


@dataclass(frozen=True, kw_only=True)
class VariedInSlots(Varied):
    """Owners stay, and every rank has as many experts."""

    @property
    def has_uneven_owners(self) -> bool:
        return False


def _digits(table: np.ndarray) -> list[int]:
    """Numbers that distinguish tables of whole numbers."""
    flat = table.ravel().astype(np.uint64)
    return [int(flat.sum()), int((flat * np.arange(1, flat.size + 1, dtype=np.uint64)).sum())]


def _wider(planned: Placement, rows_CE: np.ndarray, node_C: np.ndarray) -> Destination:
    """Replicas in places that the rows name."""
    rng = np.random.default_rng(_digits(rows_CE))
    target = planned.with_replicas(rng.random(planned.holds_EC.shape) < 0.4)
    return Destination(target, NearestReplica(target, node_C))


def _shuffled(
    cost_group: CostGroup, owners: tuple[Placement, ...], rng: np.random.Generator
) -> list[Placement]:
    """The experts of a pool on other EP ranks, each of which keeps its number of them."""
    given = [owners[layer] for layer in cost_group.layers]
    new_owners = rng.permutation(np.concatenate([owner.owner_E for owner in given]))
    ends = np.cumsum([owner.num_experts for owner in given])[:-1]
    return [
        Placement.owned_by(owner_E, given[0].num_ep_ranks) for owner_E in np.split(new_owners, ends)
    ]
