# SPDX-License-Identifier: Apache-2.0
"""Fully sharded sparse data parallelism: HECATE.

Before each step ``plan`` copies hot experts (Algorithm 1, ``_wanted``), as many as are hidden
behind attention (``Gathers``) and fit into memory. By the paper's share these are its plans
(``_by_paper``); else copies divide rows by time (``_divided``), and present plans stay as long as
they take what was planned (``_staying``). Now and then experts get new ``homes``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import numpy as np

from ds_moe_ext.core.placement import Placement, even_homes
from ds_moe_ext.core.share import LevelShare, NearestCopy
from ds_moe_ext.planning.fssdp_planner import (
    CopyRules,
    MoveCosts,
    calibrate,
    guarded,
    materialize,
    shard,
    swap_homes,
)
from ds_moe_ext.planning.loads import STEADY_STEPS
from ds_moe_ext.planning.priced_plans import TOLERANCE, is_as_planned
from ds_moe_ext.planning.prices import (
    Prices,
    RowFlow,
    copies_that_fit,
    flow_seconds,
    least_flow,
    nearest_flow,
)
from ds_moe_ext.planning.strategy import (
    Destination,
    Job,
    Keys,
    Plan,
    Pool,
    Rhythm,
    register,
)
from ds_moe_ext.strategies.shares import (
    PAPER,
    REPAIR,
    STEADY,
    Copying,
    most_copies,
    repaired,
    rule_seconds,
    saves,
    shared_by_time,
    swapped,
)
from ds_moe_ext.strict import all_at_least, in_json, one_of

WHERE = "ds_moe_ext.fssdp"
NEAREST = "nearest"  # the paper's share, by a name of its own
GAIN = "gain"  # a way to choose new homes, by its JSON name
RESHARD_INTERVAL = 100  # steps, where nobody says
ENOUGH = 1.01  # times the least seconds of any division, at which dividing rows is not worth it
DRAWS = 64  # of all cells: on more cells fewer, where chance evens out


class Gathers:
    """What the copies of a layer's hot experts take, and how many are hidden: ``t``.

    The paper divides what the links between nodes carry by an expert's bytes (spec rules 11 and
    50), as if all links were busy all the time. Where it is known what a gather takes by who sends
    what to whom, ``t`` is how many experts one gets through. Which experts will be hot is not known
    when ``t`` is asked for, and where they live decides which cards are busiest: seconds are the
    mean of some draws.
    """

    def __init__(
        self, pool: Pool, num_experts: int, copies_per_cell: int, nodes: tuple[int, ...]
    ) -> None:
        self._pool, self._copies_per_cell = pool, max(copies_per_cell, 1)
        self._node_C = np.array(nodes)
        (self._home,) = even_homes([num_experts], len(nodes))
        drawn = np.random.default_rng(0)
        num_draws = max(DRAWS // len(nodes), 2)
        self._loads = [drawn.permutation(num_experts) + 1 for _ in range(num_draws)]
        self._seconds: dict[int, float] = {}

    def hidden(self, window_s: float) -> int:
        """Experts whose copies come within so many seconds of other work: attention's forward."""
        return bisect_right(range(1, self._home.num_experts + 1), window_s, key=self.seconds)

    def seconds(self, num_copied: int) -> float:
        """That a gather of so many experts takes, in the mean; by the paper where it is not known
        what links carry."""
        pool = self._pool
        if pool.links is None:
            travel_s = pool.travelling_bytes / pool.linked_bytes_per_s
            return pool.copy_latency_s + num_copied * travel_s
        if num_copied not in self._seconds:
            targets = materialize(
                [self._home] * len(self._loads),
                self._loads,
                overlap_degree=num_copied,
                copies_per_cell=self._copies_per_cell,
                node_C=self._node_C,
            )
            each = [pool.copies_s(self._home, target, self._node_C) for target in targets]
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
    # copies of a layer that a rank holds at most (m); null: as many as fit
    copies_per_rank: int | None = None
    # steps whose mean load predicts the next step's; null: the last one or the mean of the last
    # five, whichever would have predicted the latest step better
    window: int | None = None
    # steps between plans; null: one as soon as loads have moved since the last, by more than they
    # differ between two steps, and every 10
    plan_interval: int | None = None
    # add copies when the rows are known, if they pay at once, as many as a rank has room for; by
    # Algorithm 1 under the paper's share, as ``repair`` does under others
    calibrate: bool = False
    rematerialize: bool = False  # free the copies after forward and gather them again for backward
    # steps between new homes; 0 is never; null: 100 where every expert has one home in the world,
    # else never
    reshard_interval: int | None = None
    # which experts get new homes: "gain", those whose move gains more until the next than it costs,
    # by what rows are predicted to cost; or "paper", by Algorithm 2
    resharding: str = GAIN
    heterogeneous_sharding: bool = True  # homes may change. False keeps the first, even ones.
    # memory of a rank for copies; null: most of what is free, and on a CPU as much as the rank's
    # own experts and their gradients take, one of each layer at least
    copy_bytes: int | None = None

    has_uneven_homes = True

    def __post_init__(self) -> None:
        self._check_share(WHERE, NEAREST)
        one_of(f"{WHERE}.resharding", self.resharding, (GAIN, PAPER))
        all_at_least(WHERE, self, overlap_degree=0, copies_per_rank=0, reshard_interval=0)
        all_at_least(WHERE, self, copy_bytes=0, window=1, plan_interval=1)

    @property
    def _repair(self) -> int:
        """Copies of a rank that are left to be added once rows are known."""
        return self.repairs(0 if self.calibrate else REPAIR)  # calibration adds what fits

    def with_homes_that_stay(self) -> FullySharded:
        return replace(self, reshard_interval=self.reshard_interval or 0)

    @property
    def keys(self) -> Keys:
        return Keys(homes=f"{WHERE}.reshard_interval")

    def rhythm(self) -> Rhythm:
        every = RESHARD_INTERVAL if self.reshard_interval is None else self.reshard_interval
        return Rhythm(
            window=self.window,
            plan_every=self.plan_interval or 1,
            steady_every=STEADY_STEPS if self.plan_interval is None else 0,
            shard_every=every if self.heterogeneous_sharding else 0,
        )

    @property
    def expected(self) -> str:
        return (
            f"busy experts are copied for a step, by share {self.share!r}; a gain is "
            "expected where the busiest rank has well over the mean's rows, none where loads are "
            "even"
        )

    def plan(self, job: Job) -> tuple[Plan, ...]:
        if self.is_papers:
            return self._by_paper(job, self._wanted(job))
        stay = self._staying(job)
        others = [layer for layer in range(len(job.homes)) if layer not in stay]
        return _merged(stay, others, self._priced(job.of(others)) if others else ())

    def _wanted(self, job: Job, halvings: int = 0) -> tuple[Placement, ...]:
        """Algorithm 1, with at most so many copies of each layer in a cell; or half as many, and so
        on. The present target where that is alike: what was worked out of it serves again."""
        degree_L, fits_L = self._overlap_degrees(job), self._copies_planned(job)
        wanted = materialize(
            job.homes,
            job.routed.totals,
            overlap_degree=degree_L,
            copies_per_cell=np.minimum(fits_L, degree_L) >> halvings if halvings else fits_L,
            node_C=job.node_C,
        )
        if not job.present:
            return wanted
        pairs = zip(wanted, job.present)
        return tuple(plan.target if new.is_like(plan.target) else new for new, plan in pairs)

    def _by_paper(self, job: Job, wanted: Sequence[Placement]) -> tuple[Plan, ...]:
        """Plans whose rows go to the nearest copy, where copies that were chosen pay."""
        prices: dict[int, Prices] = {}
        targets = list(wanted)
        for pool in job.pools:
            chosen = guarded(
                [job.homes[layer] for layer in pool.layers],
                [wanted[layer] for layer in pool.layers],
                job.routed.of_layers(pool.layers),
                prices=pool.prices,
            )
            for layer, target in zip(pool.layers, chosen):
                home = job.homes[layer]
                is_home = np.array_equal(target.holds_EC, home.holds_EC)
                targets[layer] = home if is_home else target
                prices[layer] = pool.prices
        shares: Sequence[NearestCopy] = [
            plan.share for plan in job.present if isinstance(plan.share, NearestCopy)
        ]
        # Where all targets are the present ones their shares are, with what they have prepared.
        is_present = all(share.target is target for share, target in zip(shares, targets))
        if len(shares) < len(targets) or not is_present:
            shares = NearestCopy.of_layers(targets, job.node_C)
        fits_L, plans = self._copies_that_fit(job), []
        for layer, (home, share, rows_CE) in enumerate(zip(job.homes, shares, job.rows)):
            left = int(fits_L[layer]) - most_copies(home, share.target)
            calibrated = partial(_calibrated, home, share, prices[layer], left)
            plans.append(
                Plan(
                    home,
                    share.target,
                    share,
                    rematerialize=self.rematerialize,
                    revise=calibrated if self.calibrate and left > 0 else None,
                    predicted_CE=rows_CE,
                )
            )
        return tuple(plans)

    def _staying(self, job: Job) -> dict[int, Plan]:
        """Present plans of copies by which the predicted rows take as long as those that they were
        made for, hardly more or less; by layer."""
        stay: dict[int, Plan] = {}
        near: dict[int, np.ndarray] = {}  # the rows that plans of the nearest copy were made for
        for layer, plan in enumerate(job.present):
            if plan.target is plan.home or plan.predicted_CE is None:
                continue
            if isinstance(plan.share, NearestCopy):
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
        """Plans whose copies divide rows by time; those of the paper where no division would take
        less."""
        wanted = self._wanted(job)
        papers = self._by_paper(job, wanted)
        nearest_s_L = self._seconds(job, papers, nearest_flow)
        is_enough_L = nearest_s_L <= ENOUGH * self._seconds(job, papers, least_flow)
        if self.calibrate or job.drift >= STEADY:  # copies may be missing once rows are known
            is_enough_L[:] = False
        enough = {layer: papers[layer] for layer in np.flatnonzero(is_enough_L).tolist()}
        others = [layer for layer in range(len(job.homes)) if layer not in enough]
        divided = self._divided(
            job.of(others), [wanted[layer] for layer in others], [papers[layer] for layer in others]
        )
        return _merged(enough, others, divided)

    def _divided(
        self, job: Job, wanted: Sequence[Placement], papers: Sequence[Plan]
    ) -> Iterator[Plan]:
        """Plans whose copies divide rows by time, which says itself how many copies that takes;
        the paper's where it takes less, and none where copies save next to nothing."""
        degree_L, fits_L = self._overlap_degrees(job), self._copies_that_fit(job)
        planned_L = self._copies_planned(job)

        @cache
        def targets(halvings: int) -> Sequence[Placement]:
            return self._wanted(job, halvings) if halvings else wanted

        def target(layer: int, halvings: int) -> Placement:
            return targets(halvings)[layer]

        most = int(np.minimum(planned_L, degree_L).max(initial=0))
        halved = range(most.bit_length() + 1 if job.drift < STEADY else 1)
        for layer, (home, rows_CE) in enumerate(zip(job.homes, job.rows)):
            pool = job.pool_of(layer)
            each = map(partial(target, layer), halved)
            most_s = rule_seconds(papers[layer].share, rows_CE, job.node_C, pool)
            share = shared_by_time(each, rows_CE, job.node_C, pool, self.share, most_s=most_s)
            share = swapped(
                home,
                share,
                rows_CE,
                pool,
                halved=partial(target, layer, 1),
                most_copies=int(planned_L[layer]),
                most_experts=int(degree_L[layer]),
            )
            copies_EC = share.levels.target.holds_EC & ~home.holds_EC
            if not (copies_EC.any() and saves(share, home, rows_CE, or_s=most_s)):
                plan, share = Plan.at_home(home), share.alone(home, rows_CE)
            elif most_s < share.planned_s:
                plan = papers[layer]
            else:
                plan = Plan(home, share.levels.target, share)
            plan = replace(
                plan,
                predicted_CE=rows_CE,
                by_paper=partial(NearestCopy, node_C=job.node_C),
                rematerialize=self.rematerialize,
            )
            if self.calibrate or plan.share is share:
                room = int(fits_L[layer]) - most_copies(home, plan.target)
                plan = repaired(
                    plan, share, pool, room if self.calibrate else min(self._repair, room)
                )
            yield plan

    def _seconds(self, job: Job, plans: Sequence[Plan], flow: Callable[..., RowFlow]) -> np.ndarray:
        """That the rows of each layer take under its plan's target, ``[L]``; nan before costs have
        been measured."""
        seconds_L = np.full(len(plans), np.nan)
        for pool in job.measured_pools:
            layers = list(pool.layers)
            targets, rows = [plans[n].target for n in layers], job.routed.of_layers(layers)
            seconds_L[layers] = flow_seconds(flow(targets, rows), prices=pool.prices)
        return seconds_L

    def homes(self, job: Job) -> tuple[Placement, ...]:
        """By gain, of experts whose costs have been measured, or Algorithm 2; pool by pool."""
        degree_L = self._overlap_degrees(job)
        homes = dict(enumerate(job.homes))
        for pool in job.pools if self.resharding == PAPER else job.measured_pools:
            layers = list(pool.layers)
            present = [job.homes[layer] for layer in layers]
            if self.resharding == PAPER:
                new = shard(
                    [job.rows[layer].sum(axis=0) for layer in layers],
                    overlap_degree=degree_L[layers],
                    node_C=job.node_C,
                    homes=present,
                )
            else:
                new = swap_homes(present, self._rules(job, pool), self._move_costs(pool))
            homes.update(zip(layers, new))
        return tuple(homes[layer] for layer in range(len(job.homes)))

    def _rules(self, job: Job, pool: Pool) -> CopyRules:
        """How the layers of a pool run by any homes."""
        layers = list(pool.layers)
        return CopyRules(
            job.routed.of_layers(layers),
            self._overlap_degrees(job)[layers],
            self._copies_planned(job)[layers],
            pool.prices,
            # Planned shares divide rows so well that homes matter to experts without copies alone.
            nearest_flow if self.is_papers else least_flow,
        )

    def _move_costs(self, pool: Pool) -> MoveCosts:
        # By the links that copies take, but as it is: no codec rounds what is kept for good.
        byte_s = pool.copied_s / pool.travelling_bytes
        return MoveCosts(
            expert_s=pool.copy_latency_s + byte_s * pool.state_bytes,
            num_steps=self.rhythm().shard_every,
        )

    def remarks(self, job: Job) -> tuple[str, ...]:
        asked = {"overlap_degree": self.overlap_degree, "copies_per_rank": self.copies_per_rank}
        unknown = " and ".join(key for key, value in asked.items() if value is None)
        nothing = (key for key in (*asked, "copy_bytes") if vars(self)[key] == 0)
        said = [f"no expert is ever copied, for {WHERE}.{key} is 0" for key in nothing]
        if not unknown:
            said.append(self._idle_calibration(job))
        elif self.calibrate:
            said.append(
                f"calibrate adds copies only where a rank has room for more (m) than are copied "
                f"anyway (t), which {unknown} of {WHERE}, null, leave to measurements; to be sure, "
                "set overlap_degree below copies_per_rank"
            )
        if self.overlap_degree is not None:
            said.append(self._idle_sharding(job))
        said += self.idle_repair(WHERE)
        return tuple(filter(None, said))

    def describe(self, job: Job) -> str:
        degree_L, fits_L = self._overlap_degrees(job), self._copies_planned(job)
        window_L = np.array(job.window_s) * 1e3
        each_s = [gathers.seconds(int(degree_L[layer])) for layer, gathers in self._gathers(job)]
        told = (
            f"up to {_span(degree_L)} experts of a layer are copied (overlap_degree), which takes "
            f"{_span(np.array(each_s) * 1e3, 'ms')}, behind {_span(window_L, 'ms')} of attention; "
            f"a rank holds up to {_span(fits_L)} copies of a layer (copies_per_rank)"
        )
        if self._repair and self._copies_that_fit(job).any():
            told += f", and up to {self._repair} more where a forecast fails (repair)"
        idle = self._idle_calibration(job), self._idle_sharding(job)
        return "; ".join(filter(None, (told, *self._never_copied(job), *idle)))

    def describe_homes(self, job: Job, homes: Sequence[Placement]) -> str:
        pools, num_steps = job.measured_pools, self.rhythm().shard_every
        if not pools:
            return ""
        before_s = after_s = cost_s = 0.0
        for pool in pools:
            rules = self._rules(job, pool)
            old, new = ([each[layer] for layer in pool.layers] for each in (job.homes, homes))
            before_s, after_s = before_s + rules.seconds(old), after_s + rules.seconds(new)
            cost_s += self._move_costs(pool).seconds(old, new, rules.routed.node_C)
        now = f"rows are expected to take {_ms(before_s)} a step"
        if all(np.array_equal(a.owner_E, b.owner_E) for a, b in zip(job.homes, homes)):
            stays = (
                f"no expert moves to a new home: {now}, and no move would gain more in {num_steps} "
                "steps than it costs"
            )
            return stays if self.resharding == GAIN else ""
        gained = f"{_ms(num_steps * (before_s - after_s))} in {num_steps} steps"
        return f"{now} before, {_ms(after_s)} now: {gained}, for {_ms(cost_s)} of transfers"

    def _never_copied(self, job: Job) -> Iterator[str]:
        """Layers of which nothing is copied, as t or m came out 0, and what to set."""
        degree_L, fits_L = self._overlap_degrees(job), self._copies_planned(job)
        if self.overlap_degree is None and not degree_L.all():
            yield (
                f"nothing is copied of {_some(degree_L == 0)}, for no expert can be sent within so "
                f"little attention (t is 0); to copy all the same, set "
                f"{in_json(f'{WHERE}.overlap_degree', 1)}"
            )
        if self.copies_per_rank is None and not fits_L.all():
            yield (
                f"nothing is copied of {_some(fits_L == 0)}, for a rank has no room for a copy "
                f"(m is 0); to make room, set {self._room(job)}"
            )

    def _room(self, job: Job) -> str:
        """What gives every layer room for a copy."""
        if self.copy_bytes is not None:
            layers = sum(self._layers_in_memory(job))
            least = layers * max(pool.expert_bytes for pool in job.measured_pools)
            return in_json(f"{WHERE}.copy_bytes", least)
        if not self.rematerialize:
            return in_json(f"{WHERE}.rematerialize", True)
        return in_json(f"{WHERE}.copies_per_rank", 1)

    def _idle_calibration(self, job: Job) -> str:
        """That ``calibrate`` can add nothing in any layer, for a person; else empty."""
        degree_L, fits_L = self._overlap_degrees(job), self._copies_that_fit(job)
        experts_L = np.array([home.num_experts for home in job.homes])
        if not self.calibrate or (degree_L < np.minimum(fits_L, experts_L)).any():
            return ""
        return (
            f"calibrate can add no copies, for {_span(degree_L)} of {_span(experts_L)} experts are "
            f"copied anyway (t), and a rank has room for {_span(fits_L)} (m); set "
            f"{WHERE}.overlap_degree below copies_per_rank"
        )

    def _idle_sharding(self, job: Job) -> str:
        """That no expert ever moves, for a person; else empty."""
        degree_L = self._overlap_degrees(job)
        experts_L = np.array([home.num_experts for home in job.homes])
        is_by_gain = self.resharding == GAIN or not self.rhythm().shard_every
        if is_by_gain or (degree_L < experts_L).any():
            return ""
        return (
            "heterogeneous_sharding moves no expert, for it balances those that are never copied, "
            f"and all {_span(experts_L)} of a layer may be (t); set {WHERE}.overlap_degree lower, "
            f'or {WHERE}.resharding to "{GAIN}"'
        )

    def _overlap_degrees(self, job: Job) -> np.ndarray:
        """``t`` of each layer, int64 ``[L]``."""
        if self.overlap_degree is not None:
            return np.full(len(job.homes), self.overlap_degree)
        degree_L = np.zeros(len(job.homes), dtype=np.int64)
        for layer, gathers in self._gathers(job):
            degree_L[layer] = gathers.hidden(job.window_s[layer])
        return degree_L

    def _gathers(self, job: Job) -> Iterator[tuple[int, Gathers]]:
        """Of each layer whose experts' costs have been measured."""
        fits_L, nodes = self._copies_planned(job), tuple(job.node_C.tolist())
        for pool in job.measured_pools:
            for layer in pool.layers:
                num_experts, fits = job.homes[layer].num_experts, int(fits_L[layer])
                yield layer, gathers_of(pool, num_experts, fits, nodes)

    def _copies_planned(self, job: Job) -> np.ndarray:
        """``m`` of each layer, int64 ``[L]``: what fits; but where loads move, so that forecasts
        fail, less what is left to be added once rows are known, at most half of it."""
        fits_L = self._copies_that_fit(job)
        if self.copies_per_rank is not None:
            return np.full_like(fits_L, self.copies_per_rank)
        kept = self._repair if job.drift >= STEADY else 0
        planned_L: np.ndarray = fits_L - np.minimum(kept, fits_L // 2)
        return planned_L

    def _copies_that_fit(self, job: Job) -> np.ndarray:
        """Copies that a cell has room for in each layer, int64 ``[L]``."""
        num_layers = len(job.homes)
        if self.copies_per_rank is not None:
            return np.full(num_layers, self.copies_per_rank + self._repair)
        layers_held, layers_reduced = self._layers_in_memory(job)
        fits_L = np.zeros(num_layers, dtype=np.int64)
        for pool in job.measured_pools:
            fits_L[list(pool.layers)] = copies_that_fit(
                job.free_bytes if self.copy_bytes is None else self.copy_bytes,
                expert_bytes=pool.expert_bytes,
                layers_held=layers_held,
                layers_reduced=layers_reduced,
            )
        return fits_L

    def _layers_in_memory(self, job: Job) -> tuple[int, int]:
        """At once: those whose copies are, and those whose copies' gradients are."""
        layers_held = 1 if self.rematerialize else job.num_layers
        # Gradients of copies wait for the last micro-batch, those of all layers.
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
    home: Placement, share: NearestCopy, prices: Prices, copies_left: int, rows_CE: np.ndarray
) -> Destination:
    """Where the rows of a pass go, now that they are known: copies are added where they pay."""
    better = calibrate(
        home,
        share.target,
        rows_CE,
        copies_left=copies_left,
        prices=prices,
        node_C=share.node_C,
    )
    return Destination(better, NearestCopy(better, share.node_C))


def _ms(seconds: float) -> str:
    """For a person, with three digits."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:{',.0f' if abs(milliseconds) >= 100 else '.3g'}} ms"


def _some(is_meant_L: np.ndarray) -> str:
    """All layers, or how many of them."""
    if is_meant_L.all():
        return "any layer"
    return f"{is_meant_L.sum()} of {is_meant_L.size} layers"


def _span(values: np.ndarray, unit: str = "") -> str:
    """The smallest and the largest, or the one value of all."""
    low, high = (f"{value:.3g}" for value in (values.min(), values.max()))
    return f"{low if low == high else f'{low} to {high}'} {unit}".rstrip()
