# SPDX-License-Identifier: Apache-2.0
"""Fully sharded sparse data parallelism: HECATE.

Before each step ``plan`` copies hot experts (Algorithm 1, ``_wanted``), as many as are hidden
behind attention (``Gathers``) and fit into memory. By the paper's share these are its plans
(``_by_paper``); else replicas divide rows by time (``_divided``), and present plans stay as long as
they take what was planned (``_staying``). Now and then experts get new ``owners``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import numpy as np

from ds_moe_ext.core.placement import Placement, even_owners, most_replicas
from ds_moe_ext.core.share import LevelShare, NearestReplica
from ds_moe_ext.planning.fssdp_planner import (
    MoveCosts,
    ReplicaRules,
    calibrate,
    guarded,
    materialize,
    shard,
    swap_owners,
)
from ds_moe_ext.planning.loads import STEADY_STEPS
from ds_moe_ext.planning.priced_plans import TOLERANCE, is_as_planned
from ds_moe_ext.planning.prices import (
    Prices,
    RowFlow,
    flow_seconds,
    least_flow,
    nearest_flow,
    replicas_that_fit,
)
from ds_moe_ext.planning.strategy import (
    CostGroup,
    Destination,
    Intervals,
    Job,
    Keys,
    Plan,
    register,
)
from ds_moe_ext.strategies.shares import (
    PAPER,
    REPAIR,
    STEADY,
    Copying,
    repaired,
    rule_seconds,
    saves,
    shared_by_time,
    swapped,
)
from ds_moe_ext.strict import all_at_least, in_json, one_of

WHERE = "ds_moe_ext.fssdp"
NEAREST = "nearest"  # the paper's share, by a name of its own
GAIN = "gain"  # a way to choose new owners, by its JSON name
RESHARD_INTERVAL = 100  # steps, where nobody says
ENOUGH = 1.01  # times the least seconds of any division, at which dividing rows is not worth it
DRAWS = 64  # of all EP ranks: on more EP ranks fewer, where chance evens out


class Gathers:
    """What the replicas of a layer's hot experts take, and how many are hidden: ``t``.

    The paper divides what the links between nodes carry by an expert's bytes (spec rules 11 and
    50), as if all links were busy all the time. Where it is known what a gather takes by who sends
    what to whom, ``t`` is how many experts one gets through. Which experts will be hot is not known
    when ``t`` is asked for, and where they live decides which cards are busiest: seconds are the
    mean of some draws.
    """

    def __init__(
        self,
        cost_group: CostGroup,
        num_experts: int,
        replicas_per_ep_rank: int,
        nodes: tuple[int, ...],
    ) -> None:
        self._cost_group, self._replicas_per_ep_rank = cost_group, max(replicas_per_ep_rank, 1)
        self._node_C = np.array(nodes)
        (self._owner,) = even_owners([num_experts], len(nodes))
        drawn = np.random.default_rng(0)
        num_draws = max(DRAWS // len(nodes), 2)
        self._loads = [drawn.permutation(num_experts) + 1 for _ in range(num_draws)]
        self._seconds: dict[int, float] = {}

    def hidden(self, window_s: float) -> int:
        """Experts whose replicas come within so many seconds of other work: attention's forward."""
        return bisect_right(range(1, self._owner.num_experts + 1), window_s, key=self.seconds)

    def seconds(self, num_copied: int) -> float:
        """That a gather of so many experts takes, in the mean; by the paper where it is not known
        what links carry."""
        cost_group = self._cost_group
        if cost_group.links is None:
            travel_s = cost_group.travelling_bytes / cost_group.linked_bytes_per_s
            return cost_group.copy_latency_s + num_copied * travel_s
        if num_copied not in self._seconds:
            targets = materialize(
                [self._owner] * len(self._loads),
                self._loads,
                overlap_degree=num_copied,
                replicas_per_ep_rank=self._replicas_per_ep_rank,
                node_C=self._node_C,
            )
            each = [cost_group.replicas_s(self._owner, target, self._node_C) for target in targets]
            self._seconds[num_copied] = sum(each) / len(each)
        return self._seconds[num_copied]


gathers_of = lru_cache(maxsize=64)(Gathers)
"""The same ones every time, so that none is priced twice."""


@register("fssdp")
@dataclass(frozen=True, kw_only=True)
class FullySharded(Copying):
    """HECATE's two planners and its calibration (sections 4 and 5 of the paper)."""

    # experts of a layer that are copied at most (t); null: as many as can be sent while attention
    # computes, measured
    overlap_degree: int | None = None
    # replicas of a layer that a rank holds at most (m); null: as many as fit
    replicas_per_rank: int | None = None
    # steps whose mean load predicts the next step's; null: the last one or the mean of the last
    # five, whichever would have predicted the latest step better
    window: int | None = None
    # steps between plans; null: one as soon as loads have moved since the last, by more than they
    # differ between two steps, and every 10
    plan_interval: int | None = None
    # add replicas when the rows are known, if they pay at once, as many as a rank has room for; by
    # Algorithm 1 under the paper's share, as ``repair`` does under others
    calibrate: bool = False
    # free the replicas after forward and gather them again for backward
    rematerialize: bool = False
    # steps between new owners; 0 is never; null: 100 where every expert has one owner in the world,
    # else never
    reshard_interval: int | None = None
    # which experts get new owners: "gain", those whose move gains more until the next than it
    # costs, by what rows are predicted to cost; or "paper", by Algorithm 2
    resharding: str = GAIN
    heterogeneous_sharding: bool = True  # owners may change. False keeps the first, even ones.
    # memory of a rank for replicas; null: most of what is free, and on a CPU as much as the rank's
    # own experts and their gradients take, one of each layer at least
    replica_bytes: int | None = None

    has_uneven_owners = True

    def __post_init__(self) -> None:
        self._check_share(WHERE, NEAREST)
        one_of(f"{WHERE}.resharding", self.resharding, (GAIN, PAPER))
        all_at_least(WHERE, self, overlap_degree=0, replicas_per_rank=0, reshard_interval=0)
        all_at_least(WHERE, self, replica_bytes=0, window=1, plan_interval=1)

    @property
    def _repair(self) -> int:
        """Replicas of a rank that are left to be added once rows are known."""
        return self.repairs(0 if self.calibrate else REPAIR)  # calibration adds what fits

    def with_owners_that_stay(self) -> FullySharded:
        return replace(self, reshard_interval=self.reshard_interval or 0)

    @property
    def keys(self) -> Keys:
        return Keys(owners=f"{WHERE}.reshard_interval")

    def intervals(self) -> Intervals:
        every = RESHARD_INTERVAL if self.reshard_interval is None else self.reshard_interval
        return Intervals(
            window=self.window,
            plan_every=self.plan_interval or 1,
            steady_every=STEADY_STEPS if self.plan_interval is None else 0,
            shard_every=every if self.heterogeneous_sharding else 0,
        )

    @property
    def expected(self) -> str:
        return (
            "hot experts get replicas for one step; tokens are divided by share "
            f"{self.share!r}; expect a gain when the busiest rank has well over the mean load, "
            "none when loads are even"
        )

    def plan(self, job: Job) -> tuple[Plan, ...]:
        if self.is_papers:
            return self._by_paper(job, self._wanted(job))
        stay = self._staying(job)
        others = [layer for layer in range(len(job.owners)) if layer not in stay]
        return _merged(stay, others, self._priced(job.of(others)) if others else ())

    def _wanted(self, job: Job, halvings: int = 0) -> tuple[Placement, ...]:
        """Algorithm 1, with at most so many replicas of each layer in an EP rank; or half as
        many, and so on. The present target where that is alike: what was worked out of it serves
        again."""
        degree_L, fits_L = self._overlap_degrees(job), self._replicas_planned(job)
        wanted = materialize(
            job.owners,
            job.routed.totals,
            overlap_degree=degree_L,
            replicas_per_ep_rank=np.minimum(fits_L, degree_L) >> halvings if halvings else fits_L,
            node_C=job.node_C,
        )
        if not job.present:
            return wanted
        pairs = zip(wanted, job.present)
        return tuple(plan.target if new.is_like(plan.target) else new for new, plan in pairs)

    def _by_paper(self, job: Job, wanted: Sequence[Placement]) -> tuple[Plan, ...]:
        """Plans whose rows go to the nearest replica, where replicas that were chosen pay."""
        prices: dict[int, Prices] = {}
        targets = list(wanted)
        for cost_group in job.cost_groups:
            chosen = guarded(
                [job.owners[layer] for layer in cost_group.layers],
                [wanted[layer] for layer in cost_group.layers],
                job.routed.of_layers(cost_group.layers),
                prices=cost_group.prices,
            )
            for layer, target in zip(cost_group.layers, chosen):
                owner = job.owners[layer]
                is_owner = np.array_equal(target.holds_EC, owner.holds_EC)
                targets[layer] = owner if is_owner else target
                prices[layer] = cost_group.prices
        shares: Sequence[NearestReplica] = [
            plan.share for plan in job.present if isinstance(plan.share, NearestReplica)
        ]
        # Where all targets are the present ones their shares are, with what they have prepared.
        is_present = all(share.target is target for share, target in zip(shares, targets))
        if len(shares) < len(targets) or not is_present:
            shares = NearestReplica.of_layers(targets, job.node_C)
        fits_L, plans = self._replicas_that_fit(job), []
        for layer, (owner, share, rows_CE) in enumerate(zip(job.owners, shares, job.rows)):
            left = int(fits_L[layer]) - most_replicas(owner, share.target)
            calibrated = partial(_calibrated, owner, share, prices[layer], left)
            plans.append(
                Plan(
                    owner,
                    share.target,
                    share,
                    rematerialize=self.rematerialize,
                    revise=calibrated if self.calibrate and left > 0 else None,
                    predicted_CE=rows_CE,
                )
            )
        return tuple(plans)

    def _staying(self, job: Job) -> dict[int, Plan]:
        """Present plans of replicas by which the predicted rows take as long as those that they
        were made for, hardly more or less; by layer."""
        stay: dict[int, Plan] = {}
        near: dict[int, np.ndarray] = {}  # the rows that plans of the nearest replica were made for
        for layer, plan in enumerate(job.present):
            if plan.target is plan.owner or plan.predicted_CE is None:
                continue
            if isinstance(plan.share, NearestReplica):
                near[layer] = plan.predicted_CE
            elif isinstance(plan.share, LevelShare) and is_as_planned(plan.share, job.rows[layer]):
                stay[layer] = plan
        if near:
            own = job.of(list(near))
            then = replace(own, rows=tuple(near.values()))
            now_s_L, least_s_L = (
                self._seconds(own, own.present, flow) for flow in (nearest_flow, least_flow)
            )
            row_s_L = now_s_L / _num_rows_L(own)
            planned_s_L = self._seconds(then, own.present, nearest_flow) / _num_rows_L(then)
            is_like_L = np.abs(row_s_L - planned_s_L) <= TOLERANCE * planned_s_L
            pairs = zip(near, (now_s_L <= ENOUGH * least_s_L) & is_like_L)
            stay.update({layer: job.present[layer] for layer, stays in pairs if stays})
        return stay

    def _priced(self, job: Job) -> tuple[Plan, ...]:
        """Plans whose replicas divide rows by time; those of the paper where no division would take
        less."""
        wanted = self._wanted(job)
        papers = self._by_paper(job, wanted)
        nearest_s_L = self._seconds(job, papers, nearest_flow)
        is_enough_L = nearest_s_L <= ENOUGH * self._seconds(job, papers, least_flow)
        if self.calibrate or job.drift >= STEADY:  # replicas may be missing once rows are known
            is_enough_L[:] = False
        enough = {layer: papers[layer] for layer in np.flatnonzero(is_enough_L).tolist()}
        others = [layer for layer in range(len(job.owners)) if layer not in enough]
        divided = self._divided(
            job.of(others), [wanted[layer] for layer in others], [papers[layer] for layer in others]
        )
        return _merged(enough, others, divided)

    def _divided(
        self, job: Job, wanted: Sequence[Placement], papers: Sequence[Plan]
    ) -> Iterator[Plan]:
        """Plans whose replicas divide rows by time, which says itself how many replicas that takes;
        the paper's where it takes less, and none where replicas save next to nothing."""
        degree_L, fits_L = self._overlap_degrees(job), self._replicas_that_fit(job)
        planned_L = self._replicas_planned(job)

        @cache
        def targets(halvings: int) -> Sequence[Placement]:
            return self._wanted(job, halvings) if halvings else wanted

        def target(layer: int, halvings: int) -> Placement:
            return targets(halvings)[layer]

        most = int(np.minimum(planned_L, degree_L).max(initial=0))
        halved = range(most.bit_length() + 1 if job.drift < STEADY else 1)
        for layer, (owner, rows_CE) in enumerate(zip(job.owners, job.rows)):
            cost_group = job.cost_group_of(layer)
            each = map(partial(target, layer), halved)
            most_s = rule_seconds(papers[layer].share, rows_CE, job.node_C, cost_group)
            share = shared_by_time(each, rows_CE, job.node_C, cost_group, self.share, most_s=most_s)
            share = swapped(
                owner,
                share,
                rows_CE,
                cost_group,
                halved=partial(target, layer, 1),
                most_replicas=int(planned_L[layer]),
                most_experts=int(degree_L[layer]),
            )
            replicas_EC = share.levels.target.holds_EC & ~owner.holds_EC
            if not (replicas_EC.any() and saves(share, owner, rows_CE, or_s=most_s)):
                plan, share = Plan.at_owner(owner), share.alone(owner, rows_CE)
            elif most_s < share.planned_s:
                plan = papers[layer]
            else:
                plan = Plan(owner, share.levels.target, share)
            plan = replace(
                plan,
                predicted_CE=rows_CE,
                by_paper=partial(NearestReplica, node_C=job.node_C),
                rematerialize=self.rematerialize,
            )
            if self.calibrate or plan.share is share:
                room = int(fits_L[layer]) - most_replicas(owner, plan.target)
                plan = repaired(
                    plan, share, cost_group, room if self.calibrate else min(self._repair, room)
                )
            yield plan

    def _seconds(self, job: Job, plans: Sequence[Plan], flow: Callable[..., RowFlow]) -> np.ndarray:
        """That the rows of each layer take under its plan's target, ``[L]``; nan before costs have
        been measured."""
        seconds_L = np.full(len(plans), np.nan)
        for cost_group in job.measured_cost_groups:
            layers = list(cost_group.layers)
            targets, rows = [plans[n].target for n in layers], job.routed.of_layers(layers)
            seconds_L[layers] = flow_seconds(flow(targets, rows), prices=cost_group.prices)
        return seconds_L

    def owners(self, job: Job) -> tuple[Placement, ...]:
        """By gain, of experts whose costs have been measured, or Algorithm 2; cost group by cost
        group."""
        degree_L = self._overlap_degrees(job)
        owners = dict(enumerate(job.owners))
        for cost_group in job.cost_groups if self.resharding == PAPER else job.measured_cost_groups:
            layers = list(cost_group.layers)
            present = [job.owners[layer] for layer in layers]
            if self.resharding == PAPER:
                new = shard(
                    [job.rows[layer].sum(axis=0) for layer in layers],
                    overlap_degree=degree_L[layers],
                    node_C=job.node_C,
                    owners=present,
                )
            else:
                new = swap_owners(
                    present, self._rules(job, cost_group), self._move_costs(cost_group)
                )
            owners.update(zip(layers, new))
        return tuple(owners[layer] for layer in range(len(job.owners)))

    def _rules(self, job: Job, cost_group: CostGroup) -> ReplicaRules:
        """How the layers of a cost group run by any owners."""
        layers = list(cost_group.layers)
        return ReplicaRules(
            job.routed.of_layers(layers),
            self._overlap_degrees(job)[layers],
            self._replicas_planned(job)[layers],
            cost_group.prices,
            # Planned shares divide rows so well that owners matter to experts without replicas
            # alone.
            nearest_flow if self.is_papers else least_flow,
        )

    def _move_costs(self, cost_group: CostGroup) -> MoveCosts:
        # By the links that replicas take, but as it is: no codec rounds what is kept for good.
        byte_s = cost_group.copied_s / cost_group.travelling_bytes
        return MoveCosts(
            expert_s=cost_group.copy_latency_s + byte_s * cost_group.state_bytes,
            num_steps=self.intervals().shard_every,
        )

    def notices(self, job: Job) -> tuple[str, ...]:
        asked = {"overlap_degree": self.overlap_degree, "replicas_per_rank": self.replicas_per_rank}
        unknown = " and ".join(key for key, value in asked.items() if value is None)
        nothing = (key for key in (*asked, "replica_bytes") if vars(self)[key] == 0)
        stated = [f"no replicas are made, because {WHERE}.{key} is 0" for key in nothing]
        if not unknown:
            stated.append(self._idle_calibration(job))
        elif self.calibrate:
            stated.append(
                "calibrate adds replicas only if a rank has memory for more of them (m) than "
                f"are prefetched (t); measurements decide that ({WHERE} has null {unknown}); "
                "to be sure, set overlap_degree below replicas_per_rank"
            )
        if self.overlap_degree is not None:
            stated.append(self._idle_sharding(job))
        stated += self.idle_repair(WHERE)
        return tuple(filter(None, stated))

    def describe(self, job: Job) -> str:
        degree_L, fits_L = self._overlap_degrees(job), self._replicas_planned(job)
        window_L = np.array(job.window_s) * 1e3
        each_s = [gathers.seconds(int(degree_L[layer])) for layer, gathers in self._gathers(job)]
        text = (
            f"up to {_range_text(degree_L)} experts of a layer get replicas (overlap_degree); "
            f"their transfer takes {_range_text(np.array(each_s) * 1e3, 'ms')}, hidden by "
            f"{_range_text(window_L, 'ms')} of attention; a rank holds up to "
            f"{_range_text(fits_L)} replicas of a layer (replicas_per_rank)"
        )
        if self._repair and self._replicas_that_fit(job).any():
            text += f", and up to {self._repair} more when a forecast fails (repair)"
        idle = self._idle_calibration(job), self._idle_sharding(job)
        return "; ".join(filter(None, (text, *self._never_copied(job), *idle)))

    def describe_owners(self, job: Job, owners: Sequence[Placement]) -> str:
        cost_groups, num_steps = job.measured_cost_groups, self.intervals().shard_every
        if not cost_groups:
            return ""
        before_s = after_s = cost_s = 0.0
        for cost_group in cost_groups:
            rules = self._rules(job, cost_group)
            old, new = (
                [each[layer] for layer in cost_group.layers] for each in (job.owners, owners)
            )
            before_s, after_s = before_s + rules.seconds(old), after_s + rules.seconds(new)
            cost_s += self._move_costs(cost_group).seconds(old, new, rules.routed.node_C)
        now = f"predicted expert time {_ms(before_s)} a step"
        if all(np.array_equal(a.owner_E, b.owner_E) for a, b in zip(job.owners, owners)):
            stays = (
                f"no expert moves to a new owner: {now}, and no move would save more in "
                f"{num_steps} steps than it costs"
            )
            return stays if self.resharding == GAIN else ""
        gained = f"{_ms(num_steps * (before_s - after_s))} in {num_steps} steps"
        return f"{now} before, {_ms(after_s)} now: {gained}, for {_ms(cost_s)} of transfers"

    def _never_copied(self, job: Job) -> Iterator[str]:
        """Layers of which nothing is copied, as t or m came out 0, and what to set."""
        degree_L, fits_L = self._overlap_degrees(job), self._replicas_planned(job)
        if self.overlap_degree is None and not degree_L.all():
            yield (
                f"no replicas for {_some(degree_L == 0)}: attention is too short to hide the "
                "transfer of an expert (t is 0); to make replicas anyway, set "
                f"{in_json(f'{WHERE}.overlap_degree', 1)}"
            )
        if self.replicas_per_rank is None and not fits_L.all():
            yield (
                f"no replicas for {_some(fits_L == 0)}: a rank has no memory for one (m is 0); "
                f"to free memory, set {self._room(job)}"
            )

    def _room(self, job: Job) -> str:
        """What gives every layer room for a copy."""
        if self.replica_bytes is not None:
            layers = sum(self._layers_in_memory(job))
            least = layers * max(cost_group.expert_bytes for cost_group in job.measured_cost_groups)
            return in_json(f"{WHERE}.replica_bytes", least)
        if not self.rematerialize:
            return in_json(f"{WHERE}.rematerialize", True)
        return in_json(f"{WHERE}.replicas_per_rank", 1)

    def _idle_calibration(self, job: Job) -> str:
        """That ``calibrate`` can add nothing in any layer, for a person; else empty."""
        degree_L, fits_L = self._overlap_degrees(job), self._replicas_that_fit(job)
        experts_L = np.array([owner.num_experts for owner in job.owners])
        if not self.calibrate or (degree_L < np.minimum(fits_L, experts_L)).any():
            return ""
        return (
            f"calibrate cannot add replicas: {_range_text(degree_L)} of "
            f"{_range_text(experts_L)} experts are prefetched already (t), and a rank has "
            f"memory for {_range_text(fits_L)} (m); set {WHERE}.overlap_degree below "
            "replicas_per_rank"
        )

    def _idle_sharding(self, job: Job) -> str:
        """That no expert ever moves, for a person; else empty."""
        degree_L = self._overlap_degrees(job)
        experts_L = np.array([owner.num_experts for owner in job.owners])
        is_by_gain = self.resharding == GAIN or not self.intervals().shard_every
        if is_by_gain or (degree_L < experts_L).any():
            return ""
        return (
            "heterogeneous_sharding moves no expert: it balances experts that never get "
            f"replicas, but all {_range_text(experts_L)} of a layer may get some (t); set "
            f'{WHERE}.overlap_degree lower, or {WHERE}.resharding to "{GAIN}"'
        )

    def _overlap_degrees(self, job: Job) -> np.ndarray:
        """``t`` of each layer, int64 ``[L]``."""
        if self.overlap_degree is not None:
            return np.full(len(job.owners), self.overlap_degree)
        degree_L = np.zeros(len(job.owners), dtype=np.int64)
        for layer, gathers in self._gathers(job):
            degree_L[layer] = gathers.hidden(job.window_s[layer])
        return degree_L

    def _gathers(self, job: Job) -> Iterator[tuple[int, Gathers]]:
        """Of each layer whose experts' costs have been measured."""
        fits_L, nodes = self._replicas_planned(job), tuple(job.node_C.tolist())
        for cost_group in job.measured_cost_groups:
            for layer in cost_group.layers:
                num_experts, fits = job.owners[layer].num_experts, int(fits_L[layer])
                yield layer, gathers_of(cost_group, num_experts, fits, nodes)

    def _replicas_planned(self, job: Job) -> np.ndarray:
        """``m`` of each layer, int64 ``[L]``: what fits; but where loads move, so that forecasts
        fail, less what is left to be added once rows are known, at most half of it."""
        fits_L = self._replicas_that_fit(job)
        if self.replicas_per_rank is not None:
            return np.full_like(fits_L, self.replicas_per_rank)
        kept = self._repair if job.drift >= STEADY else 0
        planned_L: np.ndarray = fits_L - np.minimum(kept, fits_L // 2)
        return planned_L

    def _replicas_that_fit(self, job: Job) -> np.ndarray:
        """Replicas that an EP rank has room for in each layer, int64 ``[L]``."""
        num_layers = len(job.owners)
        if self.replicas_per_rank is not None:
            return np.full(num_layers, self.replicas_per_rank + self._repair)
        layers_held, layers_reduced = self._layers_in_memory(job)
        fits_L = np.zeros(num_layers, dtype=np.int64)
        for cost_group in job.measured_cost_groups:
            fits_L[list(cost_group.layers)] = replicas_that_fit(
                job.free_bytes if self.replica_bytes is None else self.replica_bytes,
                expert_bytes=cost_group.expert_bytes,
                layers_held=layers_held,
                layers_reduced=layers_reduced,
            )
        return fits_L

    def _layers_in_memory(self, job: Job) -> tuple[int, int]:
        """At once: those whose replicas are, and those whose replicas' gradients are."""
        at_once = min(job.layers_at_once, job.num_layers)
        layers_held = at_once if self.rematerialize else job.num_layers
        # Gradients of replicas wait for the last micro-batch, those of all layers.
        return layers_held, layers_held if job.accumulates else 1


def _num_rows_L(job: Job) -> np.ndarray:
    """Of each layer, int64 ``[L]``; 1 where there are none."""
    return np.array([max(rows_CE.sum(), 1) for rows_CE in job.rows])


def _merged(
    some: Mapping[int, Plan], others: Sequence[int], plans: Iterable[Plan]
) -> tuple[Plan, ...]:
    """Plans of all layers: of some by their numbers, and of the others in order."""
    all_plans = {**some, **dict(zip(others, plans))}
    return tuple(all_plans[layer] for layer in range(len(all_plans)))


def _calibrated(
    owner: Placement, share: NearestReplica, prices: Prices, replicas_left: int, rows_CE: np.ndarray
) -> Destination:
    """Where the rows of a pass go, now that they are known: replicas are added where they pay."""
    better = calibrate(
        owner,
        share.target,
        rows_CE,
        replicas_left=replicas_left,
        prices=prices,
        node_C=share.node_C,
    )
    return Destination(better, NearestReplica(better, share.node_C))


def _ms(seconds: float) -> str:
    """For a person, with three digits."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:{',.0f' if abs(milliseconds) >= 100 else '.3g'}} ms"


def _some(is_meant_L: np.ndarray) -> str:
    """All layers, or how many of them."""
    if is_meant_L.all():
        return "any layer"
    return f"{is_meant_L.sum()} of {is_meant_L.size} layers"


def _range_text(values: np.ndarray, unit: str = "") -> str:
    """The smallest and the largest, or the one value of all."""
    low, high = (f"{value:.3g}" for value in (values.min(), values.max()))
    return f"{low if low == high else f'{low} to {high}'} {unit}".rstrip()
