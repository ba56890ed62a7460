# SPDX-License-Identifier: Apache-2.0
"""Pro-Prophet: replicas of busy experts where they pay, moved while the block before computes.

After each step the experts of the busiest EP ranks are copied to where their rows come from, by the
rows of that step. A layer's replicas travel in two pieces under the experts of the layer before and
under what follows those, their gradients likewise in backward; the plan of the next step is made
while rows travel (Algorithms 1 and 2 of the paper). Shape letters: C EP ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ds_moe_ext.core.placement import Placement, most_replicas
from ds_moe_ext.core.share import LevelShare, LocalElseOwner
from ds_moe_ext.planning.layer_costs import (
    BACKWARD,
    FORWARD,
    BlockPrices,
    ep_rank_rows,
    is_balanced,
    placement_seconds,
)
from ds_moe_ext.planning.loads import STEADY_STEPS, drift, has_moved
from ds_moe_ext.planning.prices import NUM_EXCHANGES, replicas_that_fit
from ds_moe_ext.planning.prophet_planner import (
    SPLITS,
    BlockPlan,
    place_experts,
    shadow_experts,
    split_backward,
    split_forward,
)
from ds_moe_ext.planning.strategy import (
    Carried,
    CostGroup,
    Forecast,
    Intervals,
    Job,
    LayerContext,
    Plan,
    register,
)
from ds_moe_ext.schedule.orders import Beside
from ds_moe_ext.strategies.shares import (
    PAPER,
    STEADY,
    Copying,
    repaired,
    rule_seconds,
    saves,
    shared_by_time,
)
from ds_moe_ext.strict import all_at_least, one_of

WHERE = "ds_moe_ext.prophet"
LOCAL = "local"  # the paper's share, by a name of its own
LINKS = "links"  # a model of costs, by its JSON name
PRICES = (LINKS, PAPER)


def _greedy(search: _Search, rows_CE: np.ndarray, most: int) -> BlockPlan:
    return place_experts(
        search.owner,
        rows_CE,
        prices=search.prices,
        num_excluded=search.strategy.num_excluded,
        balance=search.strategy.balance,
        max_copied=most,
    )


def _shadow(search: _Search, rows_CE: np.ndarray, most: int) -> BlockPlan:
    return shadow_experts(search.owner, rows_CE, prices=search.prices, max_copied=most)


PLANNERS = {"prophet": _greedy, "shadow": _shadow}


@register("prophet")
@dataclass(frozen=True, kw_only=True)
class ProProphet(Copying):
    """Pro-Prophet's planner and scheduler (sections 4 and 5 of the paper)."""

    # steps that a plan is kept, unless EP ranks become unbalanced under it; null: 10 without the
    # scheduler; with it, which hides the planning, until another is found, which under the paper's
    # share is faster by the model, looked for as soon as loads have moved since the last search, by
    # more than they differ between two steps, and every 10
    frequency: int | None = None
    # EP ranks that get no replica of a copied expert (n), those with the fewest rows for it; null:
    # those without any
    num_excluded: int | None = 0
    # rows by which the busiest EP rank may exceed the idlest, in mean rows of an expert (alpha);
    # planning ends there. With 0 none ever are balanced: all that may be copied is tried, and what
    # is fastest by the model is kept.
    balance: float = 1.0
    # hide replicas and gradients behind the block before; false sends them as the layer's own block
    # begins, and plans as if nothing hid them
    scheduler: bool = True
    # under which computation a replica travels: "fnec_first" fills the time between two layers
    # first, "half" halves
    split: str = "fnec_first"
    planner: str = "prophet"  # "prophet", or "shadow" for FasterMoE's
    # free the replicas after forward and gather them again for backward: replicas of two layers
    # take memory at a time. False keeps those of all layers until backward; null does so where a
    # rank has room for twice as many as are wanted.
    rematerialize: bool | None = None
    # by which plans are made and steps foretold: "links", by who sends what over which link, with
    # what starts cost; "paper", equations (1), (4) and (5) to the letter
    prices: str = LINKS

    def __post_init__(self) -> None:
        self._check_share(WHERE, LOCAL)
        all_at_least(WHERE, self, frequency=1, num_excluded=0)
        if not 0 <= self.balance < np.inf:
            raise ValueError(f"{WHERE}.balance is {self.balance}; it must be at least 0 and finite")
        for key, known in (("split", SPLITS), ("planner", PLANNERS), ("prices", PRICES)):
            one_of(f"{WHERE}.{key}", vars(self)[key], known)

    def notices(self, job: Job) -> tuple[str, ...]:
        return self.idle_repair(WHERE)

    def intervals(self) -> Intervals:
        return Intervals(window=1, plan_every=1)

    @property
    def expected(self) -> str:
        return (
            "hot experts get replicas if that is predicted to pay; tokens are divided by "
            f"share {self.share!r}; expect a gain when the busiest rank has well over the mean "
            "load, none when loads are even"
        )

    def plan(self, job: Job) -> tuple[Plan, ...]:
        num_ep_ranks = job.owners[0].num_ep_ranks
        if self.num_excluded is not None and self.num_excluded >= num_ep_ranks:
            raise ValueError(
                f"{WHERE}.num_excluded is {self.num_excluded}, but an expert has "
                f"{num_ep_ranks - 1} EP ranks besides its owner; give at most "
                f"{num_ep_ranks - 1}, or null"
            )
        frees = self._frees(job)
        plans = [Plan.at_owner(owner) for owner in job.owners]
        for cost_group in job.measured_cost_groups:
            for layer in cost_group.layers:
                search = self._search(job, cost_group, layer, frees=frees)
                present = job.present[layer] if job.present else None
                plans[layer] = search(job.rows[layer], present=present)
        return tuple(plans)

    def _frees(self, job: Job) -> bool:
        """Whether replicas are freed after forward. They stay where there is room for twice as many
        as the rows of this step want: those of another may want more."""
        if self.rematerialize is not None:
            return self.rematerialize
        return not all(
            self._search(job, cost_group, layer, frees=False).has_room_for_more(job.rows[layer])
            for cost_group in job.measured_cost_groups
            for layer in cost_group.layers
        )

    def _search(self, job: Job, cost_group: CostGroup, layer: int, *, frees: bool) -> _Search:
        """For plans of a layer whose costs have been measured."""
        prices = self._prices(job, cost_group, layer)
        return _Search(
            self,
            job.owners[layer],
            job.follows(layer),
            replace(prices, gathers_again=frees),
            job.node_C,
            cost_group,
            self._replicas_that_fit(job, cost_group, frees=frees),
            self.repairs(),
        )

    def describe(self, job: Job) -> str:
        cost_groups = job.measured_cost_groups
        each = [self._prices(job, cost_group, cost_group.layers[0]) for cost_group in cost_groups]
        rows_per_s = min(1 / prices.row_s for prices in each)
        row_speed = min(prices.bytes_per_s for prices in each)
        copy_speed = min(prices.copy_bytes_per_s for prices in each)
        window_s = float(np.mean(job.window_s)), float(np.mean(job.back_window_s))
        frees = self._frees(job)
        fits = min(
            self._replicas_that_fit(job, cost_group, frees=frees) for cost_group in cost_groups
        )
        has_room = fits >= max(owner.num_experts for owner in job.owners)
        room = "replicas of all experts of a layer" if has_room else f"{fits} replicas of a layer"
        hidden = "hidden behind" if self.scheduler else "not hidden, beside"
        return (
            "replicas are made if that pays by Pro-Prophet's model: a rank computes "
            f"{rows_per_s:,.0f} tokens a second, receives tokens at {row_speed / 1e6:,.0f} "
            f"MB/s and weights at {copy_speed / 1e6:,.0f} MB/s, {hidden} "
            f"{window_s[0] * 1e3:.3g} ms between two layers in forward and "
            f"{window_s[1] * 1e3:.3g} ms in backward; a rank has memory for {room}, "
            f"{'freed after forward' if frees else 'kept until backward'}"
        )

    def forecast(self, job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
        if self.prices != PAPER:
            return super().forecast(job, layer, plan, rows_CE)
        cost_group = job.cost_group_of(layer)
        if not cost_group.expert_bytes:
            return None
        prices = self._prices(job, cost_group, layer)
        seconds = placement_seconds(plan.owner, plan.target, rows_CE, prices=prices)
        gathers = 2 if plan.rematerialize and job.follows(layer + 1) else 1
        return Forecast(
            exchange_s=NUM_EXCHANGES * seconds.exchange_s,
            expert_s=(FORWARD + BACKWARD) * seconds.expert_s,
            gather_s=gathers * seconds.gather_s,
            reduce_s=seconds.reduce_s,
        )

    def beside(self, layer_context: LayerContext) -> Beside:
        beside = super().beside(layer_context)
        return beside._replace(plans=beside.plans and self.scheduler)

    @property
    def steps_kept(self) -> int:
        """Steps that a plan stays, if nothing becomes unbalanced."""
        return self.frequency or (1 if self.scheduler else 10)

    @property
    def plans_stay(self) -> bool:
        """Whether a plan stays while loads do not move."""
        return self.scheduler and self.frequency is None

    def _replicas_that_fit(self, job: Job, cost_group: CostGroup, *, frees: bool) -> int:
        """Replicas of a layer that a rank has memory for, gradients with them."""
        at_once = min(2 if self.scheduler else job.layers_at_once, job.num_layers)
        layers_held = at_once if frees else job.num_layers
        return replicas_that_fit(
            job.free_bytes,
            expert_bytes=cost_group.expert_bytes,
            layers_held=layers_held,
            layers_reduced=layers_held if job.accumulates else at_once,
        )

    def _prices(self, job: Job, cost_group: CostGroup, layer: int) -> BlockPrices:
        """Of the block of a layer whose costs have been measured, if replicas are kept."""
        starts = self.prices != PAPER
        return BlockPrices(
            row_s=cost_group.prices.row_s / (FORWARD + BACKWARD),
            row_bytes=cost_group.prices.row_bytes,
            bytes_per_s=cost_group.row_bytes_per_s or cost_group.prices.intra_bytes_per_s,
            weight_bytes=cost_group.travelling_bytes,
            gradient_bytes=cost_group.travelling_bytes,
            copy_bytes_per_s=cost_group.copy_bytes_per_s or cost_group.linked_bytes_per_s,
            exchange_start_s=cost_group.links.exchange_start_s
            if starts and cost_group.links
            else 0.0,
            copy_latency_s=cost_group.copy_latency_s if starts else 0.0,
            forward_gap_s=job.window_s[layer],
            backward_gap_s=job.back_window_s[layer],
            is_scheduled=self.scheduler,
        )


@dataclass(frozen=True, eq=False)
class _Search:
    """Plans for one layer, from the rows of a step."""

    strategy: ProProphet  # its keys
    owner: Placement  # where the experts live
    follows: bool  # whether there is a block before its own, which can carry its replicas
    prices: BlockPrices  # of its block
    node_C: np.ndarray  # node of each EP rank
    cost_group: CostGroup  # with what its rows cost
    fits: int  # replicas that an EP rank has memory for
    repair: int  # of them those that are added once rows are known, at most

    def __call__(
        self,
        rows_CE: np.ndarray,
        before_CE: np.ndarray | None = None,
        present: Plan | None = None,
    ) -> Plan:
        """The plan by the chosen planner; the present one, where that is as fast."""
        strategy, owner = self.strategy, self.owner
        is_steady = before_CE is not None and drift(before_CE.sum(0), rows_CE.sum(0)) < STEADY
        kept = 0 if is_steady else min(self.repair, self.fits // 2)  # where forecasts may fail
        most = self.fits - kept
        found = self._found(rows_CE, owner.num_experts if self._num_foreign <= most else most)
        if present is not None and self._is_as_fast(present, found, rows_CE):
            return self._followed(present, rows_CE, age=0)
        share = None
        if found.selected and not strategy.is_papers:
            found, share = self._divided(found, rows_CE, narrows=is_steady)
        if not found.selected:
            return self._followed(Plan.at_owner(owner), rows_CE, age=0)
        plan = Plan(
            owner,
            found.target,
            LocalElseOwner(owner, found.target),
            rematerialize=self.prices.gathers_again,
            carried=self._carried(found) if strategy.scheduler and self.follows else None,
        )
        return self._followed(plan, rows_CE, age=0, share=share)

    def has_room_for_more(self, rows_CE: np.ndarray) -> bool:
        """Whether twice as many experts could be copied as are wanted, or all."""
        num_wanted = len(self._found(rows_CE, self.owner.num_experts).selected)
        return min(2 * num_wanted, self._num_foreign) <= self.fits

    @cached_property
    def _num_foreign(self) -> int:
        """Experts that an EP rank does not own, in the one with fewest of its own."""
        num_own_C = self.owner.holds_EC.sum(axis=0)
        return self.owner.num_experts - int(num_own_C.min())

    def _found(self, rows_CE: np.ndarray, most: int) -> BlockPlan:
        """By the chosen planner, so many copied experts at most."""
        return PLANNERS[self.strategy.planner](self, rows_CE, most)

    def _is_as_fast(self, present: Plan, found: BlockPlan, rows_CE: np.ndarray) -> bool:
        """Whether the present replicas stay, by the model: a search ends where EP ranks are
        balanced, which may be before the layer is as fast as with more replicas."""
        strategy, is_alike = self.strategy, present.rematerialize == self.prices.gathers_again
        may_stay = strategy.plans_stay and strategy.is_papers  # whose share alone the model knows
        if present.target is self.owner or not (is_alike and may_stay):
            return False
        staying = placement_seconds(self.owner, present.target, rows_CE, prices=self.prices)
        return staying.step_s <= found.seconds.step_s

    def _divided(
        self, found: BlockPlan, rows_CE: np.ndarray, *, narrows: bool
    ) -> tuple[BlockPlan, LevelShare]:
        """A plan whose replicas divide rows by time, and how they do: as it was found, or without
        any where they save next to nothing."""
        plans = [found]
        while narrows and plans[-1].selected:
            plans.append(found.first(len(plans[-1].selected) // 2))
        papers = LocalElseOwner(self.owner, found.target)
        papers_s = rule_seconds(papers, rows_CE, self.node_C, self.cost_group)
        share = shared_by_time(
            [plan.target for plan in plans],
            rows_CE,
            self.node_C,
            self.cost_group,
            self.strategy.share,
            most_s=papers_s,
        )
        narrowed = next(plan for plan in plans if plan.target is share.levels.target)
        is_worth = saves(share, self.owner, rows_CE, or_s=papers_s)
        return (narrowed if is_worth else found.first(0)), share

    def _carried(self, found: BlockPlan) -> Carried:
        rule, num_experts = SPLITS[self.strategy.split], len(found.selected)
        return Carried(
            gathers=split_forward(
                found.selected,
                rule=rule,
                layer_s=self.prices.forward_gap_s,
                move_s=found.seconds.gather_s / num_experts,
            ),
            reductions=split_backward(
                found.selected,
                rule=rule,
                layer_s=self.prices.backward_gap_s,
                move_s=found.seconds.reduce_s / num_experts,
            ),
        )

    def _followed(
        self,
        plan: Plan,
        rows_CE: np.ndarray,
        *,
        age: int,
        found_E: np.ndarray | None = None,
        share: LevelShare | None = None,
    ) -> Plan:
        """The plan, how it is followed, and how replicas divide rows."""
        found_E = rows_CE.sum(axis=0) if found_E is None else found_E
        successor = partial(self._next, plan, found_E, rows_CE, age)
        followed = replace(plan, successor=successor, predicted_CE=rows_CE)
        if self.strategy.is_papers:
            return followed
        followed = replace(followed, by_paper=partial(LocalElseOwner, self.owner))
        if plan.target is plan.owner:
            return followed
        node_C, cost_group = self.node_C, self.cost_group
        if share is None:
            share = shared_by_time((plan.target,), rows_CE, node_C, cost_group, self.strategy.share)
        if rule_seconds(plan.share, rows_CE, node_C, cost_group) < share.planned_s:
            return followed
        room = min(self.repair, self.fits - most_replicas(self.owner, plan.target))
        return repaired(replace(followed, share=share), share, self.cost_group, room)

    def _next(
        self,
        plan: Plan,
        found_E: np.ndarray,
        before_CE: np.ndarray,
        age: int,
        rows_CE: np.ndarray,
    ) -> Plan:
        strategy = self.strategy
        if age + 1 < strategy.steps_kept:
            computed_C = ep_rank_rows(self.owner, plan.target, rows_CE).computed_C
            stays = is_balanced(computed_C, self.owner.num_experts, strategy.balance)
        else:
            is_young = strategy.plans_stay and age + 1 < STEADY_STEPS
            stays = is_young and not has_moved(found_E, before_CE.sum(0), rows_CE.sum(0))
        if stays:
            return self._followed(plan, rows_CE, age=age + 1, found_E=found_E)
        return self(rows_CE, before_CE, plan)
