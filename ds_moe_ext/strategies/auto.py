# SPDX-License-Identifier: Apache-2.0
"""Whichever of the other strategies the coming steps are priced lowest under: ``auto``.

Plans come from one of them at a time. Every ``interval`` steps each plans the latest step by what
was known before it, and is priced on the rows that came, by the tasks that its layers would run
(``pricing``). A price is held against what steps have taken under a strategy, where it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.described_run import copied_bytes_C
from ds_moe_ext.planning.layer_seconds import TaskCosts
from ds_moe_ext.planning.loads import STEADY_STEPS
from ds_moe_ext.planning.step_price import Conditions, price_step
from ds_moe_ext.planning.strategy import (
    Choice,
    Choosing,
    Forecast,
    Intervals,
    Job,
    Keys,
    Plan,
    Strategy,
    register,
)
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet
from ds_moe_ext.strategies.shares import SHARES
from ds_moe_ext.strict import NOT_A_KEY, all_at_least, nearest

KEY = "ds_moe_ext.auto"
BASE = "ep"
OVER = " over "
PIPELINE = "esp"
_DEFAULTS: Mapping[str, Callable[[], Strategy]] = {
    BASE: ExpertParallel,
    PIPELINE: ExpertParallel,  # that it lies over by itself
    "fssdp": FullySharded,
    "prophet": ProProphet,
}
USUAL = ("ep", "fssdp", "prophet", "esp", "esp over fssdp", "esp over prophet")
COPYING = tuple(name for name in USUAL if name.endswith(("fssdp", "prophet")))
NAMES = (*USUAL, *(name + share for share in SHARES for name in COPYING))
SAMPLED = 8  # layers that are priced, of more; evenly among them
CLASSES = 4  # of EP ranks


def _made(name: str, blocks: Mapping[str, Strategy]) -> Strategy:
    """A candidate by its name; a pipeline leaves dense gradients to the host."""
    whole, comma, share = name.partition(", ")
    laid, _, over = whole.partition(OVER)
    strategy = blocks.get(over or (BASE if laid == PIPELINE else laid)) or _DEFAULTS[over or laid]()
    if share:
        strategy = strategy.by_share[comma + share]
    if laid != PIPELINE:
        return strategy
    esp = blocks.get(PIPELINE)
    pipeline = esp if isinstance(esp, ExpertSharding) else ExpertSharding()
    return pipeline.without_slices().over(strategy)


@register("auto")
@dataclass(frozen=True, kw_only=True)
class Auto(Choosing):
    """Chooses between strategies while a run goes on; the loss is the same under all of them."""

    # names of those to choose from, some of ``NAMES``; null: ``USUAL``, whose keys are those of
    # their own blocks. Others have the paper's share, or the priced one.
    candidates: list[str] | None = None
    interval: int = 50  # steps between choices
    # part of a step by which another strategy must be faster, to be taken in place of the present
    # one
    margin: float = 0.02
    # strategies with the keys of their own blocks, by name
    blocks: Mapping[str, Strategy] = field(default_factory=dict, hash=False, metadata=NOT_A_KEY)

    has_uneven_owners = True

    def __post_init__(self) -> None:
        all_at_least(KEY, self, interval=1)
        if not 0 <= self.margin < 1:
            raise ValueError(f"{KEY}.margin is {self.margin}; it must be at least 0 and below 1")
        for name in self.candidates or ():
            if name not in NAMES:
                raise ValueError(
                    f"{KEY}.candidates has {name!r}, which is unknown; {nearest(name, NAMES)}"
                )
        if self.candidates == []:
            names = ", ".join(map(repr, NAMES))  # some have commas
            raise ValueError(f"{KEY}.candidates is empty; name some of {names}, or null")

    def among(self, blocks: Mapping[str, Strategy]) -> Auto:
        ep, esp = blocks.get(BASE), blocks.get(PIPELINE)
        if ep is not None and ep != ExpertParallel():
            raise ValueError(
                f"{KEY} runs 'ep' without its keys, because its candidates share one way of "
                "sending tokens; leave out the block ds_moe_ext.ep, or choose strategy 'ep'"
            )
        if isinstance(esp, ExpertSharding):
            for key, only in (("schedule", ("fsmoe",)), ("all_to_all", (None, "direct"))):
                if vars(esp)[key] not in only:
                    raise ValueError(
                        f"ds_moe_ext.esp.{key} is {vars(esp)[key]!r}, but {KEY} runs all its "
                        "candidates with one schedule and one all-to-all; leave it out, or "
                        "choose strategy 'esp'"
                    )
        return replace(self, blocks=blocks)

    @cached_property
    def strategies(self) -> Mapping[str, Strategy]:
        """Those that are named, and the usual ones."""
        names = dict.fromkeys((*USUAL, *(self.candidates or ())))
        return {name: _made(name, self.blocks) for name in names}

    @property
    def contenders(self) -> dict[str, Strategy]:
        """Those to choose from, by name."""
        names = USUAL if self.candidates is None else self.candidates
        return {name: self.strategies[name] for name in names}

    # What the candidates say together.

    def intervals(self) -> Intervals:
        each_intervals = [each.intervals() for each in self.contenders.values()]
        return Intervals(
            window=None,
            plan_every=1,
            steady_every=STEADY_STEPS,
            costs=True,
            measures=any(intervals.measures for intervals in each_intervals),
            choose_every=self.interval,
        )

    @property
    def sums_replicas_in_float32(self) -> bool:
        return any(each.sums_replicas_in_float32 for each in self.contenders.values())

    @property
    def keys(self) -> Keys:
        return Keys(owners="ds_moe_ext.fssdp.reshard_interval")

    def forecast(self, job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
        if plan.choice is None:
            return None
        return self.strategies[plan.choice.name].forecast(job, layer, plan, rows_CE)

    # Plans.

    @property
    def expected(self) -> str:
        return (
            "experts compute at their owners until costs are measured; then auto picks the "
            f"strategy with the lowest predicted step time among {', '.join(self.contenders)}, "
            f"again every {self.interval} steps"
        )

    def plan(self, job: Job) -> tuple[Plan, ...]:
        # where costs have not been measured
        if not all(cost_group.expert_bytes for cost_group in job.cost_groups):
            return self.strategies[BASE].plan(job)
        choice, plans = self._chosen(job)
        # What follows is asked of all layers together, step by step: it may come from another.
        return tuple(replace(plan, successor=None, choice=choice) for plan in plans)

    def _chosen(self, job: Job) -> tuple[Choice, tuple[Plan, ...]]:
        """The present choice, or another where it is time; and its plans."""
        past = job.past
        if past is not None and past.choice is not None and past.step % self.interval:
            return past.choice, self.strategies[past.choice.name].plan(job)
        job = replace(job, present=())  # which are one candidate's
        num_layers = len(job.owners)
        sample = job
        if num_layers > SAMPLED:
            places = np.linspace(0, num_layers - 1, SAMPLED)
            sample = job.of(sorted({round(place) for place in places}))
        scale = num_layers / len(sample.owners)
        priced = {name: scale * _price(each, sample) for name, each in self.contenders.items()}
        present = None if past is None or past.choice is None else past.choice.name
        ratios = {} if past is None else past.ratios
        usual = ratios.get(present or "", 1.0)
        expected = {name: ratios.get(name, usual) * seconds for name, seconds in priced.items()}
        others = sorted(expected.items(), key=lambda item: item[1])
        text = ", ".join(f"{1e3 * seconds:.3g} under {name}" for name, seconds in others)
        best, plans, left_out = self._that_fits(job, expected, present)
        if best not in priced:
            priced[best] = scale * _price(self.strategies[best], sample)
        why = f"auto uses {best}: predicted step time {text} (ms, without the optimizer)"
        return Choice(
            best,
            priced[best],
            reported="; ".join((why, *left_out.values())),
            left_out=tuple(left_out),
            among_s=tuple(others),
        ), plans

    def _that_fits(
        self, job: Job, expected: Mapping[str, float], present: str | None
    ) -> tuple[str, tuple[Plan, ...], Mapping[str, str]]:
        """The cheapest that a rank has memory for, its plans, and why cheaper ones are left out; of
        equals, nearly, the present one. What copies nothing fits in any case."""
        remaining, left_out = dict(expected), dict[str, str]()
        while remaining:
            best = min(remaining, key=lambda name: remaining[name])
            if present in remaining:
                enough_s = (1 - self.margin) * remaining[present]
                best = best if remaining[best] <= enough_s else present
            plans = self.strategies[best].plan(job)
            wanted = _wanted_bytes(best, plans, job)
            if wanted <= job.free_bytes:
                return best, plans, left_out
            left_out[best] = (
                f"{best} is left out: its replicas need {wanted / 1e6:,.0f} MB on a rank, but "
                f"only {job.free_bytes / 1e6:,.0f} MB are free"
            )
            del remaining[best]
        return BASE, self.strategies[BASE].plan(job), left_out


def _price(strategy: Strategy, job: Job) -> float:
    """Seconds of a step like the latest, planned by what was known before it."""
    known, came = job, job.rows
    if job.past is not None:
        known, came = replace(job, rows=job.past.predicted), job.past.came
    plans = strategy.plan(known)
    num_ep_ranks = len(job.node_C)
    conditions = Conditions(
        grid=Grid(num_ep_ranks, num_ep_ranks), tasks=_costs(job), classes=CLASSES
    )
    return price_step(strategy, plans, known, came, conditions).step_s


def _wanted_bytes(name: str, plans: Sequence[Plan], job: Job) -> int:
    """What replicas take of a rank's memory: as the plans hold it, and as it was seen, where they
    ran."""
    each = [job.cost_group_of(layer).expert_bytes for layer in range(len(plans))]
    held = int(copied_bytes_C(plans, each, accumulates=job.accumulates).max())
    seen = 0 if job.past is None else job.past.taken.get(name, 0)
    return max(held, seen) if held else 0


def _costs(job: Job) -> TaskCosts:
    """What tasks cost besides rows and replicas, as far as it was measured."""
    start_s = max(cost_group.copy_latency_s for cost_group in job.cost_groups)
    if job.pipelines is None:
        return TaskCosts(exchange_start_s=start_s)
    costs = job.pipelines.layers[0].costs
    return TaskCosts(
        exchange_start_s=costs.all_to_all.alpha_s,
        expert_start_s=costs.expert.alpha_s,
        all_reduce=job.pipelines.all_reduce,
    )
