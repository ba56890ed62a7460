# SPDX-License-Identifier: Apache-2.0
"""Replicas among the expert ranks of a ZP group: plans of a strategy that knows no roles.

It plans for the expert ranks as if they were all there are (``side_job``), and what it chose is
widened to the group: attention ranks send all rows and get no replicas, and what they own stays.
Shape letters: C ranks of a ZP group, E experts; of these N expert ranks and F experts that live
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import SWEEPS, LevelShare, LocalElseOwner, NearestReplica, Rule
from ds_moe_ext.planning.strategy import CostGroup, Destination, Job, Plan
from ds_moe_ext.strategies.shares import levels_by


@dataclass(frozen=True, eq=False)
class ExpertSide:
    """The expert ranks of a ZP group in one layer."""

    owner: Placement  # of all experts, on all ranks
    ep_ranks: tuple[int, ...]  # the expert ranks, ascending

    @cached_property
    def experts_F(self) -> np.ndarray:
        """Experts that live there."""
        return np.flatnonzero(self.owner.holds_EC[:, list(self.ep_ranks)].any(axis=1))

    @cached_property
    def own(self) -> Placement:
        """Where, among them alone."""
        return Placement(self.owner.holds_EC[np.ix_(self.experts_F, np.array(self.ep_ranks))])

    def rows(self, rows_CE: np.ndarray) -> np.ndarray:
        """Rows of these experts, int64 ``[N, F]``, dealt evenly to the expert ranks as senders:
        prices look for senders among those who compute, and all rows come from elsewhere."""
        place_N1 = np.arange(len(self.ep_ranks))[:, None]
        rows_NF: np.ndarray = (rows_CE[:, self.experts_F].sum(axis=0) + place_N1) // len(place_N1)
        return rows_NF

    def widened(self, target: Placement) -> Placement:
        """A target among the expert ranks as one of all ranks; the owner where that is alike."""
        if np.array_equal(target.holds_EC, self.own.holds_EC):
            return self.owner
        holds_EC = np.zeros_like(self.owner.holds_EC)
        holds_EC[np.ix_(self.experts_F, np.array(self.ep_ranks))] = target.holds_EC
        return self.owner.with_replicas(holds_EC)


side_of = lru_cache(maxsize=1024)(ExpertSide)
"""The same one every time, so that its placements are the same, too."""


@dataclass(frozen=True, eq=False)
class SidePlan(Plan):
    """Of a layer whose replicas are on expert ranks."""

    own: Plan = field(kw_only=True)  # as it was planned, among these alone
    ep_ranks: tuple[int, ...] = field(kw_only=True)  # they

    def may_copy_to(self, ep_rank: int) -> bool:
        return ep_rank in self.ep_ranks


@dataclass(frozen=True, eq=False)
class Widening:
    """From plans among the expert ranks to plans of the group, for one layer."""

    side: ExpertSide
    node_C: np.ndarray  # node of each rank of the group
    cost_group: CostGroup  # with what the layer's rows cost

    def plan(self, own: Plan, rows_CE: np.ndarray) -> SidePlan:
        """For rows that are predicted, int64 ``[C, E]``. No block before need carry replicas: their
        stream runs ahead of the stripes by itself."""
        planned = self._destination(own.destination, rows_CE, own.share)
        return SidePlan(
            self.side.owner,
            *planned,
            rematerialize=own.rematerialize,
            revise=own.revise and partial(self._revised, own, planned),
            successor=own.successor and partial(self._next, own.successor),
            predicted_CE=None if own.predicted_CE is None else rows_CE,
            own=own,
            ep_ranks=self.side.ep_ranks,
        )

    def _destination(self, own: Destination, rows_CE: np.ndarray, planned: Rule) -> Destination:
        """Of these targets, with a share that knows who sends: nearest replicas stay so, and all
        other shares divide rows by time, as the planned one does."""
        owner, target = self.side.owner, self.side.widened(own.target)
        if target is owner:
            return Destination(owner, LocalElseOwner(owner, owner))
        if isinstance(own.share, NearestReplica):
            return Destination(target, NearestReplica(target, self.node_C))
        levels = levels_by(self.cost_group, self.node_C)(target)
        sweeps = planned.sweeps if isinstance(planned, LevelShare) else SWEEPS
        return Destination(target, LevelShare.planned(levels, rows_CE, sweeps=sweeps))

    def _revised(self, own: Plan, planned: Destination, rows_CE: np.ndarray) -> Destination:
        found = own.destination_of(self.side.rows(rows_CE))
        if found.target is own.target:
            return planned
        return self._destination(found, np.ascontiguousarray(rows_CE, np.int64), own.share)

    def _next(self, successor: Callable[[np.ndarray], Plan], rows_CE: np.ndarray) -> Plan:
        return self.plan(successor(self.side.rows(rows_CE)), rows_CE)


def _sides(job: Job, ep_ranks: tuple[int, ...]) -> dict[int, ExpertSide]:
    """Of the layers some of whose experts live on expert ranks."""
    sides = {layer: side_of(owner, ep_ranks) for layer, owner in enumerate(job.owners)}
    return {layer: side for layer, side in sides.items() if side.experts_F.size}


def side_job(job: Job, ep_ranks: tuple[int, ...]) -> Job:
    """What a planner of the expert ranks may know, of the layers that have experts there."""
    sides = _sides(job, ep_ranks)
    its, places = job.of(list(sides)), list(ep_ranks)
    present = [plan.own for plan in its.present if isinstance(plan, SidePlan)]
    return replace(
        its,
        rows=tuple(side.rows(rows_CE) for side, rows_CE in zip(sides.values(), its.rows)),
        owners=tuple(side.own for side in sides.values()),
        node_C=job.node_C[places],
        cost_groups=tuple(
            replace(each, row_s_C=tuple(each.row_s_C[place] for place in places if each.row_s_C))
            for each in its.cost_groups
        ),
        present=tuple(present) if len(present) == len(sides) else (),
        layers_at_once=2,
    )


def plans_by(
    plan: Callable[[Job], Sequence[Plan]], job: Job, ep_ranks: tuple[int, ...]
) -> tuple[Plan, ...]:
    """Of all layers, by what plans for the expert ranks; present plans that stay are the same."""
    sides, plans = _sides(job, ep_ranks), list(map(Plan.at_owner, job.owners))
    for (layer, side), own in zip(sides.items(), plan(side_job(job, ep_ranks)) if sides else ()):
        present = job.present[layer] if job.present else None
        if isinstance(present, SidePlan) and present.own is own:
            plans[layer] = present
        else:
            widening = Widening(side, job.node_C, job.cost_group_of(layer))
            plans[layer] = widening.plan(own, job.rows[layer])
    return tuple(plans)
