# SPDX-License-Identifier: Apache-2.0
"""A strategy that plans at random, and anew in every step: what a run must not depend on.

Named in JSON as ``tests.hosts.varied:Varied``. Shape letters: C cells, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestCopy
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, Destination, Job, Plan, Pool, Rhythm, Strategy

VARIED = f"{__name__}:Varied"
IN_SLOTS = f"{__name__}:VariedInSlots"


@dataclass(frozen=True, kw_only=True)
class Varied(Strategy):
    """Copies, further copies once the rows are known, and homes by chance."""

    layers: float = 0.8
    copies: float = 0.4
    revised: float = 0.0
    rematerialized: float = 0.0
    carried: float = 0.0
    plan_every: int = 1
    shard_every: int = 0
    seed: int = 0

    @property
    def has_uneven_homes(self) -> bool:
        return True

    def rhythm(self) -> Rhythm:
        return Rhythm(plan_every=self.plan_every, shard_every=self.shard_every)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        rng = self._chance(job)
        plans = [self._plan_of(home, job.node_C, rng) for home in job.homes]
        # The first layer of a stack has nobody who could carry its copies.
        follows = map(job.follows, range(len(plans)))
        return tuple(self._carried(p, rng) if has else p for p, has in zip(plans, follows))

    def homes(self, job: Job) -> tuple[Placement, ...]:
        rng = self._chance(job)
        homes = dict(enumerate(job.homes))
        for pool in job.pools:
            homes.update(zip(pool.layers, _shuffled(pool, job.homes, rng)))
        return tuple(homes[layer] for layer in range(len(homes)))

    def _chance(self, job: Job) -> np.random.Generator:
        """The same on every rank, and another in every step."""
        return np.random.default_rng([self.seed, *_digits(np.concatenate(job.rows, axis=1))])

    def _plan_of(self, home: Placement, node_C: np.ndarray, rng: np.random.Generator) -> Plan:
        is_copied = rng.random() < self.layers
        copied_EC = is_copied & (rng.random(home.holds_EC.shape) < self.copies)
        target = home.with_copies(copied_EC) if copied_EC.any() else home
        is_revised = rng.random() < self.revised
        revise = partial(_wider, target, node_C=node_C) if is_revised else None
        return Plan(
            home,
            target,
            NearestCopy(target, node_C),
            rematerialize=bool(rng.random() < self.rematerialized),
            revise=revise,
        )

    def _carried(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """The plan with its copies in two pieces, somehow, if chance says so."""
        if rng.random() >= self.carried:
            return plan
        copied_E = (plan.target.holds_EC & ~plan.home.holds_EC).any(axis=1)
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
    """Homes stay, and every rank has as many experts."""

    @property
    def has_uneven_homes(self) -> bool:
        return False


def _digits(table: np.ndarray) -> list[int]:
    """Numbers that tell tables of whole numbers apart."""
    flat = table.ravel().astype(np.uint64)
    return [int(flat.sum()), int((flat * np.arange(1, flat.size + 1, dtype=np.uint64)).sum())]


def _wider(planned: Placement, rows_CE: np.ndarray, node_C: np.ndarray) -> Destination:
    """Copies in places that the rows name."""
    rng = np.random.default_rng(_digits(rows_CE))
    target = planned.with_copies(rng.random(planned.holds_EC.shape) < 0.4)
    return Destination(target, NearestCopy(target, node_C))


def _shuffled(
    pool: Pool, homes: tuple[Placement, ...], rng: np.random.Generator
) -> list[Placement]:
    """The experts of a pool on other cells, each of which keeps its number of them."""
    given = [homes[layer] for layer in pool.layers]
    owners = rng.permutation(np.concatenate([home.owner_E for home in given]))
    ends = np.cumsum([home.num_experts for home in given])[:-1]
    return [Placement.owned_by(owner_E, given[0].num_cells) for owner_E in np.split(owners, ends)]
