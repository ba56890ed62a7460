# SPDX-License-Identifier: Apache-2.0
"""Records a run as it goes: loads of every step, times of some, one timeline.

Shape letters: L layers, E experts, C EP ranks.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.observation import Rows, TimedTask
from ds_moe_ext.planning.loads import balance_L
from ds_moe_ext.planning.strategy import Choice, Plan
from ds_moe_ext.report.rank_figures import NAN, Point, RanksSeen
from ds_moe_ext.report.record import (
    AddedRecord,
    ChoiceRecord,
    LayerRecord,
    LooksRecord,
    Move,
    PlacementRecord,
    RunRecord,
    TermRecord,
    TracedRecord,
    TracedTask,
)
from ds_moe_ext.report.summary import REDUCTION
from ds_moe_ext.report.timeline import bound_by, seen_after
from ds_moe_ext.schedule.executor import Mark, ScheduleStreams
from ds_moe_ext.schedule.task import COMPUTE, GATHER, GRADIENTS, PARAM

HEAD_NAME = "head"  # what follows the last layer, where a step is one pass
TIME_EVERY = 10  # steps: timing costs little, but not nothing
FAMILY = "ds_moe_ext"  # of scalars
PACKAGES = ("torch", "deepspeed", "transformers", "ds-moe-ext")


class Watched(Protocol):
    """A layer, as the recorder sees it."""

    @property
    def name(self) -> str: ...

    @property
    def routed(self) -> RoutedExperts: ...

    def record(self) -> LayerRecord: ...


class StepTracer(Protocol):
    """Wants the tasks of some steps."""

    def begin(self) -> None:
        """Called before each of them. Collective before the first that the run comes to."""
        ...

    @property
    def steps(self) -> range:
        """The steps; no others are timed for it."""
        ...

    def __call__(self, step: int, timed: list[TimedTask], rows: Sequence[Rows]) -> None:
        """Called after each of them, by all ranks, with what each layer routed. Collective."""
        ...


# Looks at some layers in each step: what was predicted of their rows, and where these went. A look
# reads whole tables of rows, while nothing else goes on. So layers take turns: all are looked at in
# each step where they are few and small, else some, each as often as the others.

MOST_LAYERS = 4  # in a step
MOST_ENTRIES = 64 * 256  # of their tables: one layer of 64 EP ranks and 256 experts


class Look(NamedTuple):
    """At one layer in one step."""

    # rows that each EP rank would have computed by the plan, had the rows come that it was made
    # for, int64; None where it was made for none
    predicted_C: np.ndarray | None
    # rows that each would have computed of those that came, by the same replicas and the paper's
    # own rule, int64; None where no other was followed
    by_paper_C: np.ndarray | None
    num_left: int  # rows that another EP rank computed than they came from
    num_crossed: int  # and one on another node

    @classmethod
    def at(cls, plan: Plan, seen: Rows, node_C: np.ndarray) -> Look:
        """Args: plan: that the layer ran by. seen: what it routed. node_C: node of each EP rank."""
        between_CC = np.zeros((len(node_C), len(node_C)), dtype=np.int64)
        for rows_CE, (_, share) in seen.passes:
            between_CC += share.of_rows(rows_CE).rows_between(rows_CE[:, None])[0]
        predicted_CE, by_paper = plan.predicted_CE, plan.by_paper
        predicted_C = by_paper_C = None
        if predicted_CE is not None and predicted_CE.any():
            predicted_C = plan.share.of_rows(predicted_CE).computed_C(predicted_CE)
        if by_paper is not None:
            by_paper_C = np.zeros(len(node_C), dtype=np.int64)
            for rows_CE, (target, _) in seen.passes:
                by_paper_C += by_paper(target).computed_C(rows_CE)
        return cls(
            predicted_C,
            by_paper_C,
            num_left=int(between_CC.sum() - between_CC.trace()),
            num_crossed=int(between_CC[node_C[:, None] != node_C].sum()),
        )


def in_turn(step: int, rows: Sequence[Rows]) -> range:
    """The layers whose turn it is in a step; ``rows`` are of each layer."""
    size = sum(one.rows_CE.size for seen in rows for one in seen.passes)
    rounds = max(-(-len(rows) // MOST_LAYERS), -(-size // MOST_ENTRIES))
    rounds |= 1  # odd: records are thinned to every second step, and all layers stay in it
    return range(step % rounds, len(rows), rounds)


def looks_record(
    looks_I: Sequence[Mapping[int, Look]],
    num_layers: int,
    owners: Sequence[int],
    node_C: np.ndarray,
) -> LooksRecord:
    predicted_IL, by_paper_IL, left_IL, crossed_IL = np.full((4, len(looks_I), num_layers), np.nan)
    for index, looks in enumerate(looks_I):
        for layer, look in looks.items():
            at = index, layer
            left_IL[at], crossed_IL[at] = look.num_left, look.num_crossed
            if look.predicted_C is not None:
                predicted_IL[at] = balance_L(look.predicted_C[owners])
            if look.by_paper_C is not None:
                by_paper_IL[at] = balance_L(look.by_paper_C[owners])
    num_nodes = len(np.unique(node_C))
    return LooksRecord(predicted_IL, by_paper_IL, left_IL, crossed_IL, num_nodes)


# Loads, choices and times.


@dataclass(frozen=True, eq=False)
class StepLoads:
    """Loads of one optimizer step."""

    step: int  # its number
    rows_LE: np.ndarray  # rows routed to each expert, int64, padded with zeros
    ep_rank_rows_LC: np.ndarray  # rows that each EP rank computed, int64
    owner_ep_rank_rows_LC: np.ndarray  # rows that each would have computed without replicas, int64
    # replicas of each expert beside its owner, as planned, int16, padded with zeros
    replicas_LE: np.ndarray
    added_LE: np.ndarray  # others that were there in any pass, likewise
    num_passes: int  # micro-batches
    looks: Mapping[int, Look]  # at some of the layers

    @classmethod
    def of(
        cls,
        step: int,
        plans: Sequence[Plan],
        rows: Sequence[Rows],
        added: Mapping[int, np.ndarray],
        looks: Mapping[int, Look],
    ) -> StepLoads:
        """Of what each layer ran by and routed; ``added`` as ``added_EC`` says, by layer."""
        num_experts = max(plan.owner.num_experts for plan in plans)
        num_layers, num_ep_ranks = len(plans), plans[0].owner.num_ep_ranks
        rows_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        replicas_LE = np.zeros((num_layers, num_experts), dtype=np.int16)
        added_LE = np.zeros_like(replicas_LE)
        for index, passes_EC in added.items():
            added_LE[index, : len(passes_EC)] = (passes_EC > 0).sum(axis=1)
        for index, (plan, seen) in enumerate(zip(plans, rows)):
            own = slice(plan.owner.num_experts)
            rows_LE[index, own] = seen.total_E
            if plan.target is not plan.owner:
                replicas_LE[index, own] = plan.target.num_holders_E - plan.owner.num_holders_E
        owners = [plan.owner.owner_E + num_ep_ranks * index for index, plan in enumerate(plans)]
        routed = [rows_E[: len(owner)] for rows_E, owner in zip(rows_LE, owners)]
        # Sums in float64: whole numbers, and exact.
        size = num_layers * num_ep_ranks
        owner_ep_rank_rows = np.bincount(np.concatenate(owners), np.concatenate(routed), size)
        return cls(
            step=step,
            rows_LE=rows_LE,
            ep_rank_rows_LC=np.stack([seen.computed_C for seen in rows]),
            owner_ep_rank_rows_LC=owner_ep_rank_rows.astype(np.int64).reshape(
                num_layers, num_ep_ranks
            ),
            replicas_LE=replicas_LE,
            added_LE=added_LE,
            num_passes=max(len(seen.passes) for seen in rows),
            looks=looks,
        )


@dataclass(eq=False)
class _Times:
    """Of the timed steps."""

    # of all, by phase and task
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_steps: int = 0  # how many there were
    traced: TracedRecord = field(default_factory=TracedRecord)  # one of them
    began: Mark | None = None  # when that step did; None if that is not known


@dataclass(eq=False)
class _Kept:
    """Steps of a run, thinned evenly."""

    most: int  # that are kept
    steps: list[StepLoads] = field(default_factory=list)  # they
    every: int = 1  # how many of a run's steps each of them stands for

    def wants(self, step: int) -> bool:
        """Whether it is one of those that are kept."""
        return self.kept_before(step) == step

    def kept_before(self, step: int) -> int:
        """Number of the last one that is kept up to a step."""
        return step - step % self.every

    def add(self, loads: StepLoads) -> bool:
        """Keep a step, which may be one too many; whether fewer are kept than before."""
        self.steps.append(loads)
        if len(self.steps) <= self.most:
            return False
        self.every *= 2
        self.steps = [one for one in self.steps if self.wants(one.step)]
        return True


@dataclass(eq=False)
class _Changes:
    """Of owners, and of the strategy that plans."""

    # experts with new owners, by step and layer
    moved: Counter[tuple[int, int]] = field(default_factory=Counter)
    choices: list[ChoiceRecord] = field(default_factory=list)  # of the strategy
    latest: Choice | None = None  # of these

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(Move(*at, num_experts) for at, num_experts in sorted(self.moved.items()))

    def thin(self, kept: _Kept) -> None:
        """Count moves of steps that are kept no longer with those of the last one before."""
        moved, self.moved = self.moved, Counter()
        for (step, layer), num_experts in moved.items():
            self.moved[kept.kept_before(step), layer] += num_experts

    def add_choice(self, step: int, choice: Choice | None) -> None:
        """By which a step ran, if a person would call it another than before."""
        if choice is not None and not choice.is_like(self.latest):
            self.latest, expected_s = choice, dict(choice.among_s)
            self.choices.append(ChoiceRecord(step, choice.name, choice.reported, expected_s))


@dataclass(eq=False)
class Recorder:
    """Args:
    strategy: JSON name of the strategy.
    world_size: ranks.
    layers: what is recorded, in model order.
    trace_step: step whose tasks are kept as a timeline; None for none.
    max_steps: steps whose loads are kept; a longer run is thinned evenly.
    tracer: given the tasks of its steps.
    terms: how good the strategy's model of costs is, once that is known.
    beside: adds what another rank did in a timed step; collective over the two.
    ranks: what all ranks take and need; None where nobody asks them.
    streams: report when the traced step began and ended; None: nobody knows.
    """

    strategy: str
    world_size: int
    layers: Sequence[Watched]
    trace_step: int | None = None
    max_steps: int = 400
    tracer: StepTracer | None = None
    terms: tuple[TermRecord, ...] = ()
    beside: Callable[[list[TracedTask]], list[TracedTask]] | None = None
    ranks: RanksSeen | None = None
    streams: ScheduleStreams | None = None
    _kept: _Kept = field(init=False)
    _latest: StepLoads | None = None
    _plans: tuple[Plan, ...] = ()  # by which the latest step ran
    # by layer, the replicas in it that were not planned
    _added: Mapping[int, np.ndarray] = field(default_factory=dict)
    _changes: _Changes = field(default_factory=_Changes)
    _times: _Times = field(default_factory=_Times)

    def __post_init__(self) -> None:
        self._kept = _Kept(self.max_steps)
        if self.ranks is not None:
            for layer in self.layers:
                layer.routed.rows.keeps_scores = self.ranks.is_on
        self._time(0)

    def after_step(self, step: int, rows: Sequence[Rows]) -> None:
        """Take what the layers saw since the last step. Call it after each optimizer step, while
        the layers still have the plans that the step ran by. Collective where ``ranks`` is given.

        Args:
            step: number of the step that has ended, from 0.
            rows: what each layer routed since the last step.
        """
        ended = self._mark(step)
        self._take_plans(step)
        self._take_loads(step, rows)
        self._take_times(step, rows, ended)
        if self.ranks is not None:
            if self.ranks.is_on:
                scores = [layer.routed.rows.take_score() for layer in self.layers]
                self.ranks.own.saw_scores(step, scores)
            self.ranks.after_step(step, self._tokens(rows))
        self._time(step + 1)

    def latest_balance(self) -> float:
        """Rows of the busiest EP rank over the mean of those that own experts, in the latest
        step, mean over layers."""
        return float(self.latest_balance_L().mean())

    def latest_balance_L(self) -> np.ndarray:
        """The same of each layer, float ``[L]``."""
        if self._latest is None:
            return np.ones(len(self.layers))
        owners = np.unique(np.concatenate([plan.owner.owner_E for plan in self._plans]))
        return balance_L(self._latest.ep_rank_rows_LC[:, owners])

    def latest_replicas(self) -> int:
        """Replicas of experts beside their owners in the latest step, of all layers."""
        latest = self._latest
        return 0 if latest is None else int(latest.replicas_LE.sum() + latest.added_LE.sum())

    def latest_choice(self) -> Choice | None:
        """By which the latest step ran, where one strategy chooses between several."""
        return self._plans[0].choice if self._plans else None

    def _tokens(self, rows: Sequence[Rows]) -> float:
        """That came from this rank in a step, by the rows of the first layer; nan where nobody
        stated how many a token makes."""
        layer = self.layers[0].routed
        layout, top_k = layer.layer_context.layout, layer.rows.top_k
        if not top_k:
            return NAN
        sent = int(rows[0].routed_CE[layout.index("ep")].sum())
        return sent / (top_k * layout.grid.etp_size)

    def balance_by_layer(self) -> dict[str, float]:
        """Mean over the kept steps of the busiest EP rank's rows over the mean, by layer."""
        return self.record().balance_by_layer()

    def record(self) -> RunRecord:
        layers = tuple(layer.record() for layer in self.layers)
        if self._plans:  # the layers may already have the owners of the next step
            owners = (tuple(plan.owner.owner_E.tolist()) for plan in self._plans)
            layers = tuple(
                replace(layer, owner_E=owner_E) for layer, owner_E in zip(layers, owners)
            )
        num_ep_ranks = self.layers[0].routed.layer_context.plan.owner.num_ep_ranks
        num_experts = max(layer.num_experts for layer in layers)
        kept = self._kept.steps
        shape_IL = len(kept), len(layers)
        return RunRecord(
            strategy=self.strategy,
            world_size=self.world_size,
            num_ep_ranks=num_ep_ranks,
            layers=layers,
            steps_I=tuple(loads.step for loads in kept),
            rows_ILE=_stacked([loads.rows_LE for loads in kept], (*shape_IL, num_experts)),
            ep_rank_rows_ILC=_stacked(
                [loads.ep_rank_rows_LC for loads in kept], (*shape_IL, num_ep_ranks)
            ),
            seconds_by_kind={
                kind: seconds / self._times.num_steps
                for kind, seconds in self._times.seconds.items()
            },
            versions=versions(),
            placements=None if self._latest is None else self._placements(self._latest),
            terms=self.terms,
            looks=looks_record(
                [loads.looks for loads in kept],
                len(layers),
                sorted({ep_rank for layer in layers for ep_rank in layer.owner_E}),
                self._node_C,
            ),
            choices=tuple(self._changes.choices),
            ranks=None if self.ranks is None else self.ranks.record(),
            traced=self._times.traced,
        )

    @cached_property
    def _node_C(self) -> np.ndarray:
        return self.layers[0].routed.layer_context.layout.node_C

    def _placements(self, latest: StepLoads) -> PlacementRecord | None:
        """Where experts were, if any was ever copied or moved."""
        kept = self._kept.steps
        seen = (*kept, latest)
        has_added = any(loads.added_LE.any() for loads in seen)
        has_replicas = has_added or any(loads.replicas_LE.any() for loads in seen)
        if not self._changes.moved and not has_replicas:
            return None
        shape_ILE, added = (len(kept), *latest.replicas_LE.shape), None
        if has_added:
            added = AddedRecord(
                replicas_ILE=_stacked([loads.added_LE for loads in kept], shape_ILE),
                num_passes=latest.num_passes,
                to=tuple(
                    tuple(map(_named, self._added.get(index, np.zeros_like(plan.owner.holds_EC))))
                    for index, plan in enumerate(self._plans)
                ),
            )
        shape_ILC = len(kept), *latest.owner_ep_rank_rows_LC.shape
        return PlacementRecord(
            replicas_ILE=_stacked([loads.replicas_LE for loads in kept], shape_ILE),
            owner_ep_rank_rows_ILC=_stacked(
                [loads.owner_ep_rank_rows_LC for loads in kept], shape_ILC
            ),
            moves=self._changes.moves,
            last_step=latest.step,
            copied_to=tuple(
                tuple(tuple(np.flatnonzero(copied_C).tolist()) for copied_C in copied_EC(plan))
                for plan in self._plans
            ),
            added=added,
        )

    def _time(self, step: int) -> None:
        """Time the tasks of the coming step, if anybody wants to know."""
        is_traced = self.tracer is not None and step in self.tracer.steps
        if self.tracer is not None and is_traced:
            self.tracer.begin()
        self._times.began = self._mark(step)
        for layer in self.layers:
            layer.routed.tasks.is_wanted = self._is_sample(step) or is_traced

    def _mark(self, step: int) -> Mark | None:
        """This moment, if the step is traced for the page."""
        return self.streams.mark() if self.streams is not None and step == self.trace_step else None

    def _is_sample(self, step: int) -> bool:
        """Whether the tasks of a step are timed, by all ranks."""
        return step % TIME_EVERY == TIME_EVERY // 2 or step == self.trace_step

    def _take_plans(self, step: int) -> None:
        plans = tuple(layer.routed.layer_context.plan for layer in self.layers)
        for index, (before, plan) in enumerate(zip(self._plans, plans)):
            if plan.owner is before.owner:
                continue
            num_moved = int((plan.owner.owner_E != before.owner.owner_E).sum())
            if num_moved:
                self._changes.moved[self._kept.kept_before(step), index] += num_moved
        self._plans = plans
        self._changes.add_choice(step, plans[0].choice)

    def _take_loads(self, step: int, rows: Sequence[Rows]) -> None:
        is_kept, plans = self._kept.wants(step), self._plans
        self._added = {
            index: added_EC(plan, seen)
            for index, (plan, seen) in enumerate(zip(plans, rows))
            if plan.revise is not None
        }
        looked_at = in_turn(step, rows) if is_kept else ()
        looks = {n: Look.at(plans[n], rows[n], self._node_C) for n in looked_at}
        self._latest = StepLoads.of(step, plans, rows, self._added, looks)
        if is_kept and self._kept.add(self._latest):
            self._changes.thin(self._kept)

    def _take_times(self, step: int, rows: Sequence[Rows], ended: Mark | None) -> None:
        timed = [task for layer in self.layers for task in layer.routed.tasks.take()]
        if self.tracer is not None and step in self.tracer.steps:
            self.tracer(step, timed, rows)
        is_traced, names = step == self.trace_step, [layer.name for layer in self.layers]
        origin = timed[0] if timed else None
        if origin is not None and self._times.began is not None:
            origin = replace(origin, start=self._times.began)
        traced_tasks = (
            [] if origin is None else traced_tasks_of(timed, origin, names, has_waits=is_traced)
        )
        if self._is_sample(step):  # also of a rank that timed nothing: others wait for it
            if self.ranks is not None:
                apart = {name for name, seen in zip(names, rows) if seen.all_stayed}
                self.ranks.own.saw_tasks(traced_tasks, apart)
            if self.beside is not None:
                traced_tasks = self.beside(traced_tasks)
        if not traced_tasks:
            return
        self._times.num_steps += 1
        for traced in traced_tasks:
            self._times.seconds[f"{traced.phase}:{traced.name}"] += traced.length_s
        if is_traced:
            length_s = 0.0
            if ended is not None and origin is not None:
                length_s = replace(origin, end=ended).seconds_from(origin)[1]
            self._times.traced = TracedRecord(tuple(traced_tasks), length_s)


def copied_EC(plan: Plan) -> np.ndarray:
    """Where experts have replicas beside their owners, bool ``[E, C]``."""
    copied: np.ndarray = plan.target.holds_EC & ~plan.owner.holds_EC
    return copied


def added_EC(plan: Plan, seen: Rows) -> np.ndarray:
    """In how many passes each EP rank had a replica of each expert that was not planned, int64
    ``[E, C]``."""
    passes_EC = np.zeros(plan.target.holds_EC.shape, dtype=np.int64)
    for _, (target, _) in seen.passes:
        if target is not plan.target:
            passes_EC += target.holds_EC & ~plan.target.holds_EC
    return passes_EC


def _named(passes_C: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The EP ranks that had a replica, and in how many passes."""
    return tuple((int(ep_rank), int(passes_C[ep_rank])) for ep_rank in np.flatnonzero(passes_C))


def _stacked(arrays: Sequence[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    return np.asarray(arrays, dtype=np.int64).reshape(shape)


def traced_tasks_of(
    timed: Iterable[TimedTask],
    origin: TimedTask,
    layer_names: Sequence[str],
    *,
    has_waits: bool = False,
) -> list[TracedTask]:
    """Tasks as the page draws them, in the order in which they began.

    Weights may be gathered for backward too. That is nobody's adjoint: it belongs to the phase of
    what this rank computes next."""
    found = [(traced_task_of(task, origin, layer_names), task.task) for task in timed]
    found.sort(key=lambda each: each[0].start_s)
    traced_tasks = [traced for traced, _ in found]
    phase = None
    for position in reversed(range(len(traced_tasks))):
        traced = traced_tasks[position]
        if traced.stream == COMPUTE.name:
            phase = traced.phase
        elif (traced.name, traced.stream) == (
            GATHER.name,
            PARAM.name,
        ) and phase is not None:
            traced_tasks[position] = replace(traced, phase=phase)
    if has_waits:
        tasks, moments = [task for _, task in found], [(s.start_s, s.end_s) for s in traced_tasks]
        bound = bound_by(tasks, seen_after(tasks), moments)
        traced_tasks = [replace(traced, bound_by=by) for traced, by in zip(traced_tasks, bound)]
    return traced_tasks


def traced_task_of(timed: TimedTask, origin: TimedTask, layer_names: Sequence[str]) -> TracedTask:
    """One task, seconds from the start of ``origin``."""
    (start_s, end_s), task = timed.seconds_from(origin), timed.task
    is_reduction = task.op == GATHER and task.adjoint_of
    # Dense gradients are nobody's adjoint, but made in backward.
    is_back = bool(task.adjoint_of) or task.op == GRADIENTS
    return TracedTask(
        name=REDUCTION if is_reduction else task.op.name,
        stream=task.stream.name,
        phase="backward" if is_back else "forward",
        layer=HEAD_NAME if task.layer == len(layer_names) else layer_names[task.layer],
        chunk=str(task.chunk_range),
        start_s=start_s,
        end_s=end_s,
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def scalars_of(recorder: Recorder, news: Point | None) -> dict[str, float]:
    """What is known of the latest step.

    Args:
        recorder: of the run.
        news: what ranks have reported to each other since the last time; None for nothing.
    """
    balance_L = recorder.latest_balance_L()
    found = {
        "balance/mean": float(balance_L.mean()),
        "balance/busiest_layer": float(balance_L.max()),
        **{
            f"balance/of/{layer.name}": float(balance)
            for layer, balance in zip(recorder.layers, balance_L)
        },
        "replicas": float(recorder.latest_replicas()),
    }
    choice = recorder.latest_choice()
    if choice is not None:
        found |= {"expected_step_s": choice.expected_s}
    if news is not None:
        found |= {
            "step_s": news.step_s,
            "tokens_per_s": news.tokens_per_s,
            "exposed_s": news.exposed_s,
            "exposed_share": news.exposed_s / news.step_s,
            "waited_s": news.waited_s,
            "sent_s": news.sent_s,
        }
    return {f"{FAMILY}/{name}": value for name, value in found.items() if math.isfinite(value)}
