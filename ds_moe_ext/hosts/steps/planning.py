# SPDX-License-Identifier: Apache-2.0
"""The plans of the next step (``Planning``): by forecasts of loads, beside the step or after it,
with new owners when due; and what the strategy's model of costs predicted, checked against what
steps took (``Checks``)."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, check_agreement
from ds_moe_ext.hosts.steps.costs import (
    CHECKED,
    TRIED,
    Correction,
    Costs,
    Seen,
    exchange_s,
    of_all_ranks,
)
from ds_moe_ext.moe.observation import Rows, RowsSeen, rows_so_far, take_rows
from ds_moe_ext.planning.exchange_costs import exchange_fit_of
from ds_moe_ext.planning.loads import LoadWindow, Outcome
from ds_moe_ext.planning.prices import NUM_EXCHANGES
from ds_moe_ext.planning.strategy import (
    Choice,
    Forecast,
    Intervals,
    Job,
    Past,
    Plan,
    Strategy,
    followers,
)
from ds_moe_ext.report.record import TermRecord
from ds_moe_ext.schedule.executor import worker

# Brings experts from old owners to new ones, a placement a layer each, with all that the host's
# optimizer keeps of them. Collective.
Mover = Callable[[Sequence[Placement], Sequence[Placement]], None]


@dataclass(frozen=True, eq=False)
class SincePlan:
    """Where a run stands between two plans. A function of rows alone: ranks need not agree."""

    step: int = 0  # number of the step that goes on, if steps go on as they do
    age: int = 0  # of the present plans, in steps
    # rows of each expert in the newest step that was known when they were made; None: in none
    planned_Y: np.ndarray | None = None


@dataclass
class LoadForecasts:
    """Of all steps so far."""

    num_steps: int = 0  # that something was predicted for
    num_by_last: int = 0  # of these, those for which it was the step before alone
    most: int = 0  # steps whose mean a forecast was, at most
    astray: int = 0  # rows that went to other experts than was predicted, of all these steps
    rows: int = 0  # all of theirs

    def add(self, outcome: Outcome | None) -> None:
        """Of one step more; None where nothing was known before it."""
        if outcome is None:
            return
        self.num_steps += 1
        self.num_by_last += outcome.num_steps == 1
        self.most = max(self.most, outcome.num_steps)
        self.astray += outcome.astray
        self.rows += outcome.rows

    def __str__(self) -> str:
        """A line; empty where nothing was predicted."""
        if not self.rows:
            return ""
        by = f"the mean of the last {self.most} steps"
        if self.num_by_last == self.num_steps:
            by = "the last step"
        elif self.num_by_last > 1:  # the first forecast can be no other
            by = f"the last step in {self.num_by_last} of {self.num_steps} steps, else by {by}"
        share = 100 * self.astray / self.rows
        return f"loads were predicted by {by}; {share:.1f} % of the tokens went to other experts"


@dataclass(frozen=True, eq=False)
class Ahead:
    """What was made of a step's rows before the step ended."""

    step: int  # its number, if steps went on as they did
    job: Job  # what was known before it
    rows: list[Rows]  # what each layer routed in it
    window: LoadWindow  # with them
    # of the next step, by what was known before; None where none were made
    plans: tuple[Plan, ...] | None


@dataclass(eq=False)
class Planning:
    """Plans anew after each step, on every rank alike.

    Where loads are predicted, that and what follows from it alone are done beside the step, as soon
    as its rows are known; nothing but when it is done depends on that.
    """

    strategy: Strategy  # what decides
    layers: Sequence[AttachedLayer]  # in model order
    job: Job  # what is known; the owners in it are where experts live now
    costs: Costs  # measures what the job lacks
    checks: Checks  # compares what the strategy expects with what happens
    mover: Mover  # moves experts
    debug: bool  # check that all ranks made the same plans
    rank: int  # this rank
    log: Callable[[str], None]  # shows a line to a person
    # how those of loads came out; none where nothing is planned by them
    forecasts: LoadForecasts = field(default_factory=LoadForecasts, init=False)
    _window: LoadWindow = field(init=False)  # another one after each step; none is changed
    _since_plan: SincePlan = field(default=SincePlan(), init=False)
    _beside: BesideStep[Ahead | None] | None = field(default=None, init=False)
    _ahead: Ahead | None = field(default=None, init=False)
    _has_logged_stay: bool = field(default=False, init=False)  # that no expert moves

    def __post_init__(self) -> None:
        self._window = LoadWindow(self._intervals.window)
        if self._intervals.weighs_replicas and self.job.owners[0].num_ep_ranks > 1:
            made_ahead = weakref.WeakMethod(self.made_ahead)  # layers must not keep their run alive

            def make() -> Ahead | None:
                its = made_ahead()
                return None if its is None else its()

            self._beside = BesideStep(self._seen, make)
        if self.debug:
            check_agreement(self.layers, self.rank)

    @property
    def _intervals(self) -> Intervals:
        return self.strategy.intervals()

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
        plans = None  # where what is known is not enough, or layers plan for themselves
        layers = [layer.routed for layer in self.layers]
        if is_due(self._intervals.shard_every, step):
            pass
        elif self._is_plan_due(self._since_plan, step, window):
            plans = self._planned(self._informed(step, rows, window))
        elif self._follows and not any(layer.plans_in_stream for layer in layers):
            plans = tuple(r.successor(seen.routed_CE) for r, seen in zip(layers, rows))
        for layer, plan in zip(layers, plans or ()):
            layer.prepare(plan)
        return Ahead(step, job, rows, window, plans)

    def _informed(self, step: int, rows: Sequence[Rows], window: LoadWindow) -> Job:
        """The job by the steps that are remembered, the latest with them."""
        past = None
        if self._intervals.choose_every and any(rows_CE.any() for rows_CE in self.job.rows):
            came = tuple(each.routed_CE for each in rows)
            ratios, taken = self.costs.times.ratios, self.costs.memory.taken
            past = Past(step + 1, self.job.rows, came, self._choice, ratios, taken)
        return replace(self.job, rows=window.predicted(), drift=window.drift, past=past)

    @property
    def _choice(self) -> Choice | None:
        """By which the present plans were made."""
        return self.layers[0].routed.layer_context.plan.choice

    def _planned(self, job: Job) -> tuple[Plan, ...]:
        """By a job of the costs and owners that the present plans were made of."""
        present = tuple(layer.routed.layer_context.plan for layer in self.layers)
        return self.strategy.plan(replace(job, present=present))

    def _is_plan_due(self, since: SincePlan, step: int, window: LoadWindow) -> bool:
        """Whether all layers are planned anew after a step, which the window knows: every so many
        steps, or as soon as loads have moved."""
        intervals = self._intervals
        if self._follows or not is_due(intervals.plan_every, step):
            return False
        is_old = since.age + 1 >= intervals.steady_every or is_due(intervals.choose_every, step)
        return is_old or since.planned_Y is None or window.has_moved(since.planned_Y)

    @property
    def _follows(self) -> bool:
        """Whether plans say which come after them."""
        return any(layer.routed.layer_context.plan.successor is not None for layer in self.layers)

    def after_step(self, step: int, rows: Sequence[Rows]) -> None:
        """Plan the next step, by what each layer routed in the one that has ended, as ``take_rows``
        gave it; steps count from 0. Collective."""
        ahead, self._ahead = self._ahead, None
        since = self._since_plan
        self._since_plan = replace(since, step=step + 1, age=since.age + 1)
        if ahead is not None and (
            ahead.step != step or ahead.job is not self.job or ahead.rows is not rows
        ):
            ahead = None
        for layer in self.layers:
            layer.routed.after_step()
        if not (self._intervals.weighs_replicas or self._intervals.measures):
            return
        self._remember(rows, ahead)
        measured = self.costs.after_step(step, rows, self._choice)
        if self.costs.are_new:
            self.checks.begin_anew()
        self.checks.after_step(step, self.job, rows, self.costs.seen)
        if self.checks.correction is not None:
            measured = self.costs.corrected(self.checks.correction)
        self.job = replace(self.job, **measured)
        is_shard_due = is_due(self._intervals.shard_every, step)
        is_plan_due = self._is_plan_due(since, step, self._window)
        if self.costs.are_new or is_shard_due or is_plan_due:
            self.job = self._informed(step, rows, self._window)
        if self.costs.are_new:
            self.log(self.strategy.describe(self.job))
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
        if self._intervals.plan_every:
            self.forecasts.add(self._window.outcome)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the strategy says of its keys, by what is known now."""
        return self.strategy.notices(self.job)

    def plan(self) -> None:
        """Plan by what is known now."""
        self._take(self.strategy.plan(self.job))

    def _take(self, plans: Sequence[Plan]) -> None:
        planned_Y = self._window.newest_Y if len(self._window) else None
        self._since_plan = replace(self._since_plan, age=0, planned_Y=planned_Y)
        choice, before = plans[0].choice, self._choice
        if choice is not None and not choice.is_like(before):
            self.log(choice.reported)
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
        as replicas serve its later micro-batches."""
        is_between_steps = not any(seen.so_far_CE.any() for seen in self._seen)
        if is_between_steps and self._intervals.plan_every == 1 and not self._follows:
            self.plan()
        return self.remembered_ILCE

    def resume(self, owners: Sequence[Placement], remembered_ILCE: np.ndarray) -> None:
        """Plan as a run did that was saved: the experts of each layer live there now, and these
        steps are remembered; none to begin anew. Between steps, on every rank alike."""
        self._window, self._ahead = LoadWindow(self._intervals.window), None
        if self._intervals.plan_every:
            counts = [owner.num_experts for owner in owners]
            for rows_LCE in remembered_ILCE:
                self._window = self._window.after(
                    [rows_CE[:, :E] for rows_CE, E in zip(rows_LCE, counts)]
                )
        rows = tuple(np.zeros_like(rows_CE) for rows_CE in self.job.rows)
        self.job = replace(self.job, owners=tuple(owners), rows=rows)
        if len(self._window):
            predicted, drift = self._window.predicted(), self._window.drift
            self.job = replace(self.job, rows=predicted, drift=drift, past=None)
        self.plan()

    def _moved(self) -> bool:
        owners = self.strategy.owners(self.job)
        pairs = zip(self.job.owners, owners)
        num_moved = sum(int((old.owner_E != new.owner_E).sum()) for old, new in pairs)
        stated = self.strategy.describe_owners(self.job, owners)
        if not num_moved:
            if not self._has_logged_stay:
                self.log(stated)
            self._has_logged_stay = self._has_logged_stay or bool(stated)
            return False
        began_s = time.perf_counter()
        self.mover(self.job.owners, owners)
        took_ms = 1e3 * (time.perf_counter() - began_s)
        text = f"{num_moved} experts have moved to new owners, within {took_ms:,.0f} ms"
        self.log("; ".join(filter(None, (text, stated))))
        self.job = replace(self.job, owners=owners)
        return True


def is_due(every: int, step: int) -> bool:
    """What is done every so many steps, 0 for never, behind a step."""
    return every > 0 and (step + 1) % every == 0


Made = TypeVar("Made")


class BesideStep(Generic[Made]):
    """Begins to make something when as many tables of rows were sent as in the step before."""

    def __init__(self, layers: Sequence[RowsSeen], make: Callable[[], Made]) -> None:
        self._make = make
        self._lock = threading.Lock()  # layers may send rows in several streams
        self._num_expected = self._num_sent = 0
        self._made: Future[Made] | None = None
        for layer in layers:
            layer.on_sent = self._sent

    def _sent(self) -> None:
        with self._lock:
            self._num_sent += 1
            is_all = self._num_sent == self._num_expected
        if is_all:
            self._made = worker().submit(self._make)

    def taken(self) -> Made | None:
        """What was made of the rows that were sent since the last call; None where it was not
        begun, or rows came after it had. Call it between steps: it waits for the thread, and raises
        what failed there."""
        made, self._made = self._made, None
        is_of_all = self._num_sent == self._num_expected
        self._num_expected, self._num_sent = self._num_sent, 0
        if made is None:
            return None
        found = made.result()
        return found if is_of_all else None


# Of each term of a model its name in ``Forecast``, one for a person, and the seconds of a layer and
# step, by what each rank saw.
TERMS: dict[str, tuple[str, Callable[[Sequence[Seen]], float]]] = {
    "exchange_s": ("exchange of rows", exchange_s),
    "expert_s": ("experts", lambda ranks: max(seen.expert_s for seen in ranks)),
    "gather_s": ("replicas", lambda ranks: mean(seen.gather_s for seen in ranks)),
    "reduce_s": ("their gradients", lambda ranks: mean(seen.reduce_s for seen in ranks)),
}


class Times(NamedTuple):
    """Of one term of the model, float ``[I, L]``."""

    predicted_IL: np.ndarray
    found_IL: np.ndarray


@dataclass(eq=False)
class Checks:
    """How good a strategy's model of costs is: what it predicted of some steps beside what they
    took."""

    strategy: Strategy
    layers: Sequence[AttachedLayer]
    # what layers make of links, just after the last of the steps in which the model is tried; else
    # None
    correction: Correction | None = field(default=None, init=False)
    # what came out, once all steps to be checked have ended
    terms: tuple[TermRecord, ...] = field(default=(), init=False)
    _is_tried: bool = field(default=False, init=False)
    _steps: list[int] = field(default_factory=list, init=False)
    _pairs: list[list[tuple[Forecast, Seen]]] = field(default_factory=list, init=False)

    def begin_anew(self) -> None:
        """Try the model once more: what it reckons with has been measured again. Terms that came
        out stay."""
        self._is_tried = False
        self._steps.clear()
        self._pairs.clear()

    def after_step(self, step: int, job: Job, rows: Sequence[Rows], seen: Sequence[Seen]) -> None:
        """Take a step that was looked at, by what the strategy knew, what each layer routed and
        what this rank saw of it, if somebody looked; the layers still have the plans it ran by.
        Collective."""
        self.correction = None
        if not seen or job.accumulates:  # how often replicas travel is then another matter
            return
        plans = [layer.routed.layer_context.plan for layer in self.layers]
        forecasts = [
            self.strategy.forecast(job, layer, plan, layer_rows.routed_CE)
            for layer, (plan, layer_rows) in enumerate(zip(plans, rows))
        ]
        known = [(stated, its) for stated, its in zip(forecasts, seen) if stated is not None]
        if len(known) < len(seen):
            return
        self._steps.append(step)
        self._pairs.append(known)
        if len(self._pairs) < len(CHECKED if self._is_tried else TRIED):
            return
        times = self._times()
        if self._is_tried:
            self.terms = self.terms or tuple(
                replace(term_of(name, *times[key]), steps=tuple(self._steps))
                for key, (name, _) in TERMS.items()
                if times[key].found_IL.any()
            )
        else:
            replicas, exchanges = (times["gather_s"], times["reduce_s"]), times["exchange_s"]
            predicted_s = sum(float(each.predicted_IL.sum()) for each in replicas)
            found_s = sum(float(each.found_IL.sum()) for each in replicas)
            copy_speed = predicted_s / found_s if predicted_s and found_s else None
            # Of one of the exchanges of a layer and step.
            predicted_N, found_N = (each.ravel() / NUM_EXCHANGES for each in exchanges)
            exchange_fit = exchange_fit_of(predicted_N.tolist(), found_N.tolist())
            self._is_tried, self.correction = True, Correction(copy_speed, exchange_fit)
        self._steps.clear()
        self._pairs.clear()

    def _times(self) -> Mapping[str, Times]:
        """What was predicted and found of each term."""
        routed = self.layers[0].routed
        assert routed.replicas is not None
        layout, device = routed.layer_context.layout, routed.replicas.like[0].device
        steps = [of_all_ranks([seen for _, seen in step], layout, device) for step in self._pairs]

        return {
            key: Times(
                np.array([[vars(stated)[key] for stated, _ in step] for step in self._pairs]),
                np.array([[found_s(ranks) for ranks in zip(*step)] for step in steps]),
            )
            for key, (_, found_s) in TERMS.items()
        }


def term_of(name: str, predicted_IL: np.ndarray, found_IL: np.ndarray) -> TermRecord:
    """One term of a model, from seconds predicted and found, float ``[I, L]``; layers in which
    nothing was found do not count."""
    counts_IL = found_IL > 0
    error_N = np.abs(predicted_IL[counts_IL] - found_IL[counts_IL]) / found_IL[counts_IL]
    return TermRecord(
        name=name,
        predicted_s=float(predicted_IL[counts_IL].mean()),
        found_s=float(found_IL[counts_IL].mean()),
        error=float(error_N.mean()),
    )
