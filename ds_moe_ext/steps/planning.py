# SPDX-License-Identifier: Apache-2.0
"""Between two steps: what the layers saw, the plans of the next step, and new homes when due.

Shape letters: L layers, C cells, E experts.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypedDict

import numpy as np

from ds_moe_ext.attachment.replacement import AttachedLayer, check_agreement
from ds_moe_ext.load import LoadWindow
from ds_moe_ext.moe.observation import Rows, RowsSeen, rows_so_far, take_rows
from ds_moe_ext.placement import Placement
from ds_moe_ext.steps.beside import BesideStep
from ds_moe_ext.steps.cost_checks import Checks
from ds_moe_ext.steps.costs import Costs
from ds_moe_ext.steps.load_forecasts import LoadForecasts
from ds_moe_ext.steps.since_plan import SincePlan, is_due
from ds_moe_ext.strategy import Choice, Job, Past, Plan, Rhythm, Strategy, followers


class Mover(Protocol):
    """Brings experts to new homes, with all that the host's optimizer keeps of them."""

    def __call__(self, old: Sequence[Placement], new: Sequence[Placement]) -> None:
        """Collective. Both give a placement a layer."""
        ...


@dataclass(frozen=True, eq=False)
class Ahead:
    """What was made of a step's rows before the step ended.

    Attributes:
        step: its number, if steps went on as they did.
        job: what was known before it.
        rows: what each layer routed in it.
        window: with them.
        plans: of the next step, by what was known before; None where none were made.
    """

    step: int
    job: Job
    rows: list[Rows]
    window: LoadWindow
    plans: tuple[Plan, ...] | None


@dataclass(eq=False)
class Planning:
    """Plans anew after each step, on every rank alike.

    Where loads are predicted, that and what follows from it alone are done beside the step, as soon
    as its rows are known; nothing but when it is done depends on that.

    Attributes:
        strategy: what decides.
        layers: in model order.
        job: what is known; the homes in it are where experts live now.
        costs: measures what the job lacks.
        checks: compares what the strategy expects with what happens.
        mover: moves experts.
        debug: check that all ranks made the same plans.
        rank: this rank.
        tell: shows a line to a person.
        forecasts: how those of loads came out; none where nothing is planned by them.
    """

    strategy: Strategy
    layers: Sequence[AttachedLayer]
    job: Job
    costs: Costs
    checks: Checks
    mover: Mover
    debug: bool
    rank: int
    tell: Callable[[str], None]
    forecasts: LoadForecasts = field(default_factory=LoadForecasts, init=False)
    _window: LoadWindow = field(init=False)  # another one after each step; none is changed
    _since_plan: SincePlan = field(default=SincePlan(), init=False)
    _beside: BesideStep[Ahead | None] | None = field(default=None, init=False)
    _ahead: Ahead | None = field(default=None, init=False)
    _has_told_stay: bool = field(default=False, init=False)  # that no expert moves

    def __post_init__(self) -> None:
        self._window = LoadWindow(self._rhythm.window)
        if self._rhythm.weighs_copies and self.job.homes[0].num_cells > 1:
            me = weakref.ref(self)  # layers must not keep alive what has them
            self._beside = BesideStep(self._seen, lambda: _made_ahead(me))
        if self.debug:
            check_agreement(self.layers, self.rank)

    @property
    def _rhythm(self) -> Rhythm:
        return self.strategy.rhythm()

    @property
    def _seen(self) -> list[RowsSeen]:
        return [layer.routed.rows for layer in self.layers]

    def take_rows(self) -> list[Rows]:
        """What each layer routed since the last call. Waits for the device, and for what is made
        beside the step; raises what failed there."""
        self._ahead = None if self._beside is None else self._beside.taken()
        if self._ahead is None:
            return take_rows(self._seen)
        for seen in self._seen:
            seen.clear()
        return self._ahead.rows

    def made_ahead(self) -> Ahead | None:
        """What can be known of the step when all its rows are; None where the host does not know
        these. It changes nothing but what layers have ready."""
        seen, step, job = self._seen, self._since_plan.step, self.job
        if not all(layer.knows_all for layer in seen):
            return None
        rows = rows_so_far(seen)
        for each in rows:
            _ = each.total_E  # the report's
        window = self._window.after([each.routed_CE for each in rows])
        plans = self._next_plans(step, rows, window)
        for layer, plan in zip(self.layers, plans or ()):
            layer.routed.prepare(plan)
        return Ahead(step, job, rows, window, plans)

    def _next_plans(
        self, step: int, rows: Sequence[Rows], window: LoadWindow
    ) -> tuple[Plan, ...] | None:
        """By what is known before a step has ended; None where that is not enough, or layers plan
        for themselves."""
        layers = [layer.routed for layer in self.layers]
        if is_due(self._rhythm.shard_every, step):
            return None
        if self._is_plan_due(self._since_plan, step, window):
            return self._planned(replace(self.job, **self._known(step, rows, window)))
        if self._follows and not any(layer.plans_in_lane for layer in layers):
            return tuple(r.successor(seen.routed_CE) for r, seen in zip(layers, rows))
        return None

    def _known(self, step: int, rows: Sequence[Rows], window: LoadWindow) -> _Known:
        """What a job knows of the steps that are remembered, the latest with them."""
        past = None
        if self._rhythm.choose_every and any(rows_CE.any() for rows_CE in self.job.rows):
            came = tuple(each.routed_CE for each in rows)
            ratios, taken = self.costs.times.ratios, self.costs.memory.taken
            past = Past(step + 1, self.job.rows, came, self._choice, ratios, taken)
        return {"rows": window.predicted(), "drift": window.drift, "past": past}

    @property
    def _choice(self) -> Choice | None:
        """By which the present plans were made."""
        return self.layers[0].routed.site.plan.choice

    def _planned(self, job: Job) -> tuple[Plan, ...]:
        """By a job of the costs and homes that the present plans were made of."""
        present = tuple(layer.routed.site.plan for layer in self.layers)
        return self.strategy.plan(replace(job, present=present))

    def _is_plan_due(self, since: SincePlan, step: int, window: LoadWindow) -> bool:
        """Whether all layers are planned anew after a step, which the window knows."""
        return not self._follows and since.is_due(self._rhythm, step, window)

    @property
    def _follows(self) -> bool:
        """Whether plans say which come after them."""
        return any(layer.routed.site.plan.successor is not None for layer in self.layers)

    def after_step(self, step: int, rows: Sequence[Rows]) -> None:
        """Plan the next step. Collective.

        Args:
            step: number of the step that has ended, from 0.
            rows: what each layer routed in it, as ``take_rows`` gave it.
        """
        ahead, self._ahead = self._ahead, None
        since, self._since_plan = self._since_plan, self._since_plan.went_on(step)
        if ahead is not None and (
            ahead.step != step or ahead.job is not self.job or ahead.rows is not rows
        ):
            ahead = None
        for layer in self.layers:
            layer.routed.after_step()
        if not (self._rhythm.weighs_copies or self._rhythm.measures):
            return
        self._remember(rows, ahead)
        measured = self.costs.after_step(step, rows, self._choice)
        if self.costs.are_new:
            self.checks.begin_anew()
        self.checks.after_step(step, self.job, rows, self.costs.seen)
        if self.checks.correction is not None:
            measured = self.costs.corrected(self.checks.correction)
        self.job = replace(self.job, **measured)
        is_shard_due = is_due(self._rhythm.shard_every, step)
        is_plan_due = self._is_plan_due(since, step, self._window)
        if self.costs.are_new or is_shard_due or is_plan_due:
            self.job = replace(self.job, **self._known(step, rows, self._window))
        if self.costs.are_new:
            self.tell(self.strategy.describe(self.job))
        has_moved = is_shard_due and self._moved()
        if has_moved or self.costs.are_new:
            self.plan()
        elif ahead is not None and ahead.plans is not None:
            self._take(ahead.plans)
        elif is_plan_due:
            self._take(self._planned(self.job))
        elif self._follows:
            pairs = zip((layer.routed for layer in self.layers), rows)
            self._take([r.successor(seen.routed_CE) for r, seen in pairs])

    def _remember(self, rows: Sequence[Rows], ahead: Ahead | None) -> None:
        if ahead is None:
            self._window = self._window.after([each.routed_CE for each in rows])
        else:
            self._window = ahead.window
        if self._rhythm.plan_every:
            self.forecasts.add(self._window.outcome)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the strategy says of its keys, by what is known now."""
        return self.strategy.remarks(self.job)

    def plan(self) -> None:
        """Plan by what is known now."""
        self._take(self.strategy.plan(self.job))

    def _take(self, plans: Sequence[Plan]) -> None:
        self._since_plan = self._since_plan.planned(self._window)
        choice, before = plans[0].choice, self._choice
        if choice is not None and not choice.is_like(before):
            self.tell(choice.told)
        stacks = [layer.stack for layer in self.layers]
        for layer, plan, following in zip(self.layers, plans, followers(plans, stacks)):
            layer.routed.take(plan, following)
        if self.debug:
            check_agreement(self.layers, self.rank)

    @property
    def remembered_ILCE(self) -> np.ndarray:
        """Rows of the steps that predict the next; see ``LoadWindow.steps``."""
        return self._window.steps()

    def remember(self) -> np.ndarray:
        """The same, for a checkpoint. Plans that stayed are made anew: a run that goes on from it
        knows rows, and not what was planned before. On every rank alike; within a step plans stay,
        as copies serve its later micro-batches."""
        is_between_steps = not any(seen.so_far_CE.any() for seen in self._seen)
        if is_between_steps and self._rhythm.plan_every == 1 and not self._follows:
            self.plan()
        return self.remembered_ILCE

    def resume(self, homes: Sequence[Placement], remembered_ILCE: np.ndarray) -> None:
        """Plan as a run did that was saved: the experts live there now, and these steps are
        remembered. Between steps, on every rank alike.

        Args:
            homes: of each layer.
            remembered_ILCE: as ``remembered_ILCE`` was; no steps to begin anew.
        """
        self._window, self._ahead = LoadWindow(self._rhythm.window), None
        if self._rhythm.plan_every:
            counts = [home.num_experts for home in homes]
            for rows_LCE in remembered_ILCE:
                self._window = self._window.after(
                    [rows_CE[:, :E] for rows_CE, E in zip(rows_LCE, counts)]
                )
        rows = tuple(np.zeros_like(rows_CE) for rows_CE in self.job.rows)
        self.job = replace(self.job, homes=tuple(homes), rows=rows)
        if len(self._window):
            predicted, drift = self._window.predicted(), self._window.drift
            self.job = replace(self.job, rows=predicted, drift=drift, past=None)
        self.plan()

    def _moved(self) -> bool:
        homes = self.strategy.homes(self.job)
        pairs = zip(self.job.homes, homes)
        num_moved = sum(int((old.owner_E != new.owner_E).sum()) for old, new in pairs)
        said = self.strategy.describe_homes(self.job, homes)
        if not num_moved:
            if not self._has_told_stay:
                self.tell(said)
            self._has_told_stay = self._has_told_stay or bool(said)
            return False
        began_s = time.perf_counter()
        self.mover(self.job.homes, homes)
        took_ms = 1e3 * (time.perf_counter() - began_s)
        told = f"{num_moved} experts have moved to new homes, within {took_ms:,.0f} ms"
        self.tell("; ".join(filter(None, (told, said))))
        self.job = replace(self.job, homes=homes)
        return True


class _Known(TypedDict):
    """What changes in a job with each step."""

    rows: tuple[np.ndarray, ...]
    drift: float
    past: Past | None


def _made_ahead(planning: weakref.ref[Planning]) -> Ahead | None:
    """Of a run that may have ended by now."""
    found = planning()
    return None if found is None else found.made_ahead()
