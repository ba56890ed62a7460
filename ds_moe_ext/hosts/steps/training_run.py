# SPDX-License-Identifier: Apache-2.0
"""One training run, whatever the host (``Run``): what its layers saw, its report and what a person
is reported, its end, the routing of its checkpoints, its monitor and its trace."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.hardware import read_hardware, shipped_for
from ds_moe_ext.core.layout import ParallelLayout, divisors
from ds_moe_ext.hosts.attachment.host_layer import TOP_K, TOP_KS, Facts, differences
from ds_moe_ext.hosts.attachment.notices import ENDINGS, Default, Refusal, log_line, or_warn, settle
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, Blueprint, bytes_of, way_line
from ds_moe_ext.hosts.steps.expert_moves import ExpertMover
from ds_moe_ext.hosts.steps.planning import Planning
from ds_moe_ext.moe.joined_passes import HostLag
from ds_moe_ext.moe.observation import Rows, TimedTask
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.report.rank_figures import OwnSteps, Point, RanksSeen
from ds_moe_ext.report.record import DeviceRecord, RunRecord
from ds_moe_ext.report.recorder import Recorder, scalars_of, traced_tasks_of
from ds_moe_ext.report.report_files import NAMES, ReportFiles, keep_earlier
from ds_moe_ext.report.summary import (
    bad_scores_line,
    choice_line,
    division_line,
    outcomes_by_layer,
    ranks_line,
    saved_line,
    scores_line,
    verdict,
)
from ds_moe_ext.report.units import bytes_text, counted, seconds_text, wide_console
from ds_moe_ext.schedule.executor import Mark, ScheduleStreams, streams_for
from ds_moe_ext.schedule.graphs import GraphUse
from ds_moe_ext.schedule.simulator import Box, Count, chrome_trace
from ds_moe_ext.schedule.task import ORDER
from ds_moe_ext.strategies.settings import BLOCK, Settings

RECORD = "ds_moe_ext"  # the one attribute of ours that a host's object has


@dataclass(eq=False)
class Record:
    """What is known of a host's engine or optimizer; a host may know more."""

    run: Run | None = None  # that it carries; None before it has begun


def run_of(carrier: Any) -> Run | None:
    """The run of a DeepSpeed engine, a Megatron optimizer or what ``ds_moe_ext.attach`` gave; None
    where ds_moe_ext is not enabled there, and on a pipeline stage without MoE layers."""
    record: Record | None = getattr(carrier, RECORD, None)
    return None if record is None else record.run


def recorder_of(carrier: Any) -> Recorder | None:
    """The recorder of a DeepSpeed engine or a Megatron optimizer; None where there is no run."""
    run = run_of(carrier)
    return None if run is None else run.recorder


@dataclass(eq=False)
class Run:
    """One engine's replaced layers."""

    blueprint: Blueprint  # what was asked for, but for defaults that were left out
    layers: tuple[AttachedLayer, ...]  # what was replaced, in model order
    planning: Planning  # plans the steps
    mover: ExpertMover  # moves experts between the ranks
    recorder: Recorder  # what has happened
    rank: int  # this rank's place among those that run the same layers
    monitor: Monitor  # what the host's own shows meanwhile
    files: ReportFiles | None  # written meanwhile; None on a rank that writes none
    block_hooks: tuple[RemovableHandle, ...]  # by which replicas are launched as blocks begin
    routing: SavedRouting  # held against that of checkpoints

    @classmethod
    def start(
        cls,
        blueprint: Blueprint,
        layers: Sequence[AttachedLayer],
        planning: Planning,
        mover: ExpertMover,
        lives_with: object,
        *,
        device: torch.device,
        block_hooks: tuple[RemovableHandle, ...],
    ) -> Run:
        """Begin to record, and report to a person what was replaced. It ends with the host's
        engine, which carries the run, or with the process. Collective."""
        settings, layout = blueprint.settings, layers[0].routed.layer_context.layout
        rank, report, trace = layout.place, settings.report, settings.trace
        tracer, streams = None, streams_for(device, overlaps=True)
        if trace.path is not None:
            steps = range(trace.first_step, trace.first_step + trace.num_steps)
            tracer = Tracer(Path(trace.path), steps, layers, streams)
            weakref.finalize(lives_with, tracer.end)
        notify_all = partial(gather_objects, group=layout.everyone)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        # Whether each rank reports, which it may say otherwise than others, and its device.
        enabled, devices = zip(*notify_all((report.enabled, name)))
        recorder = Recorder(
            strategy=_strategy(settings),
            world_size=blueprint.grid.world_size,
            layers=layers,
            trace_step=report.trace_step,
            max_steps=report.max_steps,
            tracer=tracer,
            ranks=RanksSeen(
                OwnSteps(layout.rank),
                layout.grid.along("ep"),
                notify_all,
                DeviceRecord(name, os.cpu_count() or 1),
                is_on=any(enabled),
                on_bad_scores=lambda bad: planning.log(
                    bad_scores_line(bad, [layer.name for layer in layers])
                ),
            ),
            streams=streams,
        )
        monitor, files = Monitor(report.enabled and report.monitor), None
        if rank == 0 and report.enabled and report.path is not None:
            files = ReportFiles(Path(report.path), report.write_every_s)
            with or_warn(f"the report of an earlier run in {report.path!r}"):
                planning.log(keep_earlier(files.folder))
        routing = SavedRouting(layers, is_first=rank == 0)
        replaced = blueprint, tuple(layers)
        run = cls(*replaced, planning, mover, recorder, rank, monitor, files, block_hooks, routing)
        if rank == 0 and report.enabled:
            wide_console().print(start_table(run))
            lags, forecasts = [layer.routed.lag for layer in layers], planning.forecasts
            uses = [layer.routed.graph_use for layer in layers]

            def notices() -> Sequence[str]:
                return str(forecasts), str(HostLag.of_all(lags)), str(GraphUse.of_all(uses))

            leave_report(recorder, report.path, lives_with, notices)
        reported = (
            expected_line(blueprint),
            way_line(blueprint.strategy, layout),
            settings.hooks.rule,
            kinds_line(blueprint.strategy, devices, {e.num_experts for e in blueprint.found}),
        )
        for line in (*reported, *planning.notices, blueprint.why_grid, blueprint.made):
            planning.log(line)
        return run

    def settle(self, default: Default, refusals: Iterable[Refusal], given: Any) -> None:
        """Leave out a default by what is known only now; see ``notices.settle``. On all ranks
        alike, before the first step."""
        planning, blueprint = self.planning, self.blueprint
        strategy = settle(default, blueprint.strategy, refusals, given, planning.log)
        self.blueprint = replace(blueprint, strategy=strategy)
        planning.strategy = strategy

    def after_step(self, step: int) -> None:
        """Record the optimizer step that has been taken, and plan the next. Collective."""
        rows = self.planning.take_rows()
        self.routing.after_step()
        self.recorder.after_step(step, rows)
        self.planning.after_step(step, rows)
        self.recorder.terms = self.planning.checks.terms
        if self.files is not None:
            with or_warn(f"the report in {str(self.files.folder)!r}"):
                self.files.after_step(self.recorder.record)


def leave_report(
    recorder: Recorder,
    path: str | None,
    lives_with: object,
    notices: Callable[[], Sequence[str]],
) -> None:
    """Let a report be there behind a run, also where SIGTERM ends it."""

    def write() -> None:
        record = recorder.record()
        if path is not None and record.steps_I:
            ReportFiles(Path(path)).write(record)
            log_line(f"{_wrote(path)} at SIGTERM")

    def end() -> None:
        try:
            finish(recorder, path, notices())
        finally:
            ENDINGS.remove(write)

    if path is not None:
        ENDINGS.add(write)
    weakref.finalize(lives_with, end)


def finish(recorder: Recorder, path: str | None, notices: Sequence[str] = ()) -> None:
    """Report to a person what a run was like, with notices, write the report if a folder was named,
    and end on the verdict."""
    record, console = recorder.record(), wide_console()
    if record.steps_I:
        console.print(end_table(record))
        for reported in (division_line, ranks_line, scores_line, saved_line, choice_line):
            _print_line(console, reported(record))
        if record.seconds_by_kind:
            console.print(time_table(record))
        if record.terms:
            console.print(terms_table(record))
        for notice in notices:
            _print_line(console, notice)
        if path is not None:
            with or_warn(f"the report in {path!r}"):
                ReportFiles(Path(path)).write(record)
                _print_line(console, _wrote(path))
    _print_line(console, verdict(record))


def _wrote(folder: str) -> str:
    """What to report of the report's files."""
    return f"wrote {' and '.join(str(Path(folder) / name) for name in reversed(NAMES))}"


def line_logger(settings: Settings, rank: int) -> Callable[[str], None]:
    """Shows lines to a person, each once, on rank 0 where the report is enabled."""
    reported: set[str] = set()

    def log(line: str) -> None:
        if line and rank == 0 and settings.report.enabled and line not in reported:
            reported.add(line)
            _print_line(wide_console(), line)

    return log


def _print_line(console: Console, line: str) -> None:
    if line:
        console.print(f"ds_moe_ext: {line}", soft_wrap=True, highlight=False)


def start_table(run: Run) -> Table:
    """What was replaced, by what, and what it costs."""
    table = Table(title=f"ds_moe_ext: {_reported(run.blueprint)}", title_justify="left")
    table.add_column("layer", no_wrap=True, overflow="fold")
    for heading in ("was", "experts", "an EP rank", "bytes a rank", "before"):
        table.add_column(heading)
    for layer in run.layers:
        owner = layer.routed.layer_context.plan.owner
        table.add_row(
            layer.name,
            layer.kind,
            str(owner.num_experts),
            str(owner.num_slots),
            bytes_text(bytes_of(layer.parameters)),
            bytes_text(layer.bytes_before),
        )
    return table


def _strategy(settings: Settings) -> str:
    """What was chosen, by name."""
    over = "" if settings.balance is None else f" over {settings.balance}"
    return f"{settings.strategy}{over}"


def expected_line(blueprint: Blueprint) -> str:
    """What was chosen, and what a person may expect of it; empty where the strategy does not say.
    Pure."""
    expected = blueprint.strategy.expected
    return f"{_strategy(blueprint.settings)}: {expected}" if expected else ""


def kinds_line(strategy: Strategy, devices: Sequence[str], num_experts: Collection[int]) -> str:
    """Where ranks have two kinds of device, but no roles: the block that gives them roles, in the
    largest groups whose expert ranks divide the layers' experts, and what says whether it pays."""
    kinds = sorted(set(devices), key=lambda kind: (-_speed(kind), kind))
    if strategy.roles is not None or len(kinds) != 2:
        return ""
    new, old = map(list(devices).count, kinds)
    groups = divisors(math.gcd(new, old))
    fitting = (n for n in groups if not any(number % (old // n) for number in num_experts))
    if (num_groups := next(fitting, None)) is None:
        return ""
    sizes = {"attention_size": new // num_groups, "expert_size": old // num_groups}
    zebra = {"attention_device": kinds[0], **sizes}
    block = {"enabled": True, "strategy": "zebra", "zebra": zebra}
    other = "" if all(map(_speed, kinds)) else f" (exchange roles if {kinds[1]} is faster)"
    return (
        f"ranks have {' and '.join(kinds)}: zebra may be faster, which gives them roles at start: "
        f"{json.dumps({BLOCK: block})}{other}, and the hosts in an order in which each kind's "
        "follow each other; ds-moe-ext plan mixed-cluster prices it before, with stripes and moved"
    )


def _speed(device: str) -> float:
    """Of a device with a shipped hardware file, in half precision; else 0."""
    file = shipped_for(device)
    line = None if file is None else read_hardware(file).device.product("fp16")
    return 0.0 if line is None else line.multiply_adds_per_s


def _reported(blueprint: Blueprint) -> str:
    grid, settings = blueprint.grid, blueprint.settings
    replicas = grid.world_size // (grid.num_ep_ranks * grid.etp_size)
    roles = blueprint.strategy.roles
    split = "" if grid.etp_size == 1 else f" x {grid.etp_size} ranks"
    drops = "dropless" if settings.capacity_factor is None else f"x{settings.capacity_factor}"
    gate = "" if settings.gate is None else f", gate {settings.gate}"
    cells = f"{counted(grid.num_ep_ranks, 'EP rank')}{split}" if roles is None else f"({roles})"
    groups = f"{replicas} x" if roles is not None else f"{counted(replicas, 'EP group')} x"
    is_part = grid.members and not (roles and roles.order)
    first = f" from {min(grid.members)}" if is_part else ""
    ranks = f"{grid.world_size} ranks{first}"
    return f"strategy {_strategy(settings)}, {ranks} = {groups} {cells}, {drops}{gate}"


def end_table(record: RunRecord) -> Table:
    """How balanced the layers were."""
    table = Table(
        title=f"ds_moe_ext: {len(record.steps_I)} recorded steps with {record.strategy}",
        title_justify="left",
    )
    table.add_column("layer")
    table.add_column("busiest EP rank / mean", justify="right")
    has_placements = record.placements is not None
    for heading in (
        ("without replicas", "replicas a step", "changed owners") if has_placements else ()
    ):
        table.add_column(heading, justify="right")
    for layer, outcome in zip(record.layers, outcomes_by_layer(record)):
        cells = [layer.name, f"{outcome.balance:.2f}"]
        if has_placements:
            cells += [f"{outcome.owner_balance:.2f}", f"{outcome.replicas:.1f}"]
            cells.append(str(outcome.num_moved))
        table.add_row(*cells)
    return table


def time_table(record: RunRecord) -> Table:
    """Where the time of rank 0's layers went, and of all ranks', where they have reported; what
    runs beside something else is counted too."""
    table = Table(
        title="ds_moe_ext: rank 0, mean of the timed steps; share of the time of all tasks",
        title_justify="left",
    )
    table.add_column("task")
    ranks = record.ranks
    others = {} if ranks is None else dict(zip(ranks.kinds_K, ranks.seconds_KR))
    of_all = ("mean of all ranks", "largest, of rank") if others else ()
    for heading in ("ms a step", "share", *of_all):
        table.add_column(heading, justify="right")
    total = sum(record.seconds_by_kind.values())
    for kind, seconds in sorted(record.seconds_by_kind.items(), key=lambda item: -item[1]):
        cells = [kind, f"{seconds * 1e3:.2f}", f"{100 * seconds / total:.0f} %"]
        if ranks is not None and kind in others:
            seconds_R = others[kind]
            largest = int(seconds_R.argmax())
            text = f"{1e3 * seconds_R[largest]:.2f}, {ranks.ranks_R[largest]}"
            cells += [f"{1e3 * seconds_R.mean():.2f}", text]
        table.add_row(*cells)
    return table


def terms_table(record: RunRecord) -> Table:
    """How good the strategy's model of costs was."""
    table = Table(
        title=f"ds_moe_ext: expected and measured time of a layer with {record.strategy}",
        title_justify="left",
    )
    table.add_column("term")
    for heading in ("expected", "took", "mean error"):
        table.add_column(heading, justify="right")
    for term in record.terms:
        times = seconds_text(term.predicted_s), seconds_text(term.found_s)
        table.add_row(term.name, *times, f"{100 * term.error:.0f} %")
    return table


class SavedRouting:
    """How layers route, held against a checkpoint's; the first rank warns. Where no attribute of
    the host says how many choices a token has, the first pass shows it: then it is compared behind
    the first step."""

    def __init__(self, layers: Sequence[AttachedLayer], *, is_first: bool) -> None:
        self._layers, self._is_first = layers, is_first
        self._awaited: Mapping[str, Facts] = {}
        self._where = ""

    def facts(self) -> dict[str, Facts]:
        """Of each layer, by its name; what is not known yet is left out."""
        found = {layer.name: layer.routing for layer in self._layers}
        for layer in self._layers:
            seen = layer.routed.rows.top_k  # 0 before the first pass
            if seen and not any(name in layer.routing for name in TOP_KS):
                found[layer.name] = {**layer.routing, TOP_K: seen}
        return found

    def compare(self, saved: Mapping[str, Facts] | None, where: str) -> None:
        """Behind a load from there; None where the checkpoint does not say."""
        own, self._where = self.facts(), where
        known = {name: theirs for name, theirs in (saved or {}).items() if name in own}
        self._awaited = {
            name: {TOP_K: theirs[TOP_K]}
            for name, theirs in known.items()
            if TOP_K in theirs and TOP_K not in own[name]
        }
        self._warn(differences(known, own))

    def after_step(self) -> None:
        """Compare what is known by now and was not when the checkpoint was loaded."""
        if self._awaited:
            awaited, self._awaited = self._awaited, {}
            self._warn(differences(awaited, self.facts()))

    def _warn(self, reported: str) -> None:
        if reported and self._is_first:
            warnings.warn(
                f"{self._where} was saved by a model that routes tokens differently: "
                f"{reported}; the loss may jump; build the model as it was saved, or ignore "
                "this if the change is intended",
                stacklevel=2,
            )


Event = tuple[str, float, int]  # name, value, and where on the axis of steps or samples
WriteEvents = Callable[[Sequence[Event]], object]  # a monitor, as DeepSpeed's ``write_events``
MONITORED = 10  # steps between two writings where the host says nothing: one of them is timed


@dataclass(eq=False)
class Monitor:
    """Gives scalars of a run to the monitor of whoever trains: DeepSpeed's, Megatron's, or a
    user's."""

    is_on: bool  # the settings want it
    _shown: Point | None = field(default=None, init=False)
    _has_failed: bool = field(default=False, init=False)

    def show(self, recorder: Recorder, write: WriteEvents, at: int) -> None:
        """Write the scalars of the latest step, at this place of the host's axis. No error of a
        monitor ends a training: the first is a warning."""
        point = None if recorder.ranks is None else recorder.ranks.latest
        news, self._shown = None if point is self._shown else point, point
        events = [(name, value, at) for name, value in scalars_of(recorder, news).items()]
        try:
            write(events)
        except Exception as error:
            if not self._has_failed:
                warnings.warn(f"ds_moe_ext: the monitor has failed: {error!r}", stacklevel=2)
            self._has_failed = True


_CLOCK_ROUNDS = 9
Gather = Callable[[Any], list[Any]]


@dataclass(eq=False)
class Tracer:
    """Writes the tasks of some steps, of all ranks that run the same layers, as one Chrome trace. A
    run that ends within these steps leaves what the first rank has: the others may be gone. Seconds
    begin as the ranks meet before the first step. Ranks of one machine have one clock; that of
    another is set by the median of several meetings, which all leave at nearly one moment."""

    path: Path
    steps: range
    layers: Sequence[AttachedLayer]
    streams: ScheduleStreams
    _gather: Gather | None = None  # of the ranks in it; None: of those that run the same layers
    _origin: Mark | None = None
    _later_s: float = 0.0  # than when seconds begin
    _boxes: list[Box] = field(default_factory=list)
    _counts: list[Count] = field(default_factory=list)

    def meet_by(self, gather: Gather) -> None:
        """Let other ranks be in the trace: those that this gathers from. Collective over them."""
        self._gather, has_begun, self._origin = gather, self._origin is not None, None
        if has_begun:
            self.begin()

    def begin(self) -> None:
        """Let the ranks meet, and set this one's clock; once. A run that was loaded may come to the
        steps behind the first of them. Collective."""
        if self._origin is not None:
            return
        left_s = []
        for _ in range(_CLOCK_ROUNDS):
            self._reported(None)
            left_s.append(time.perf_counter())
        # Nothing is under way on a device that has just reported what it gathered.
        self._origin, now_s = self.streams.mark(), time.perf_counter()
        here = socket.gethostname()
        there, first_s = self._reported((here, left_s))[0]
        ahead_s = [own_s - other_s for own_s, other_s in zip(left_s, first_s)]
        self._later_s = now_s - first_s[0] - (0.0 if there == here else median(ahead_s))

    def __call__(self, step: int, timed: list[TimedTask], rows: Sequence[Rows]) -> None:
        """Keep a step, and write the file behind the last. Collective."""
        if timed:
            origin = replace(timed[0], start=self._origin)
            self._keep(origin, timed)
            self._count(origin, timed, rows)
        if step == self.steps[-1]:
            found = self._reported((self._name, self._boxes, self._counts))
            self._boxes, self._counts = [], []
            if self._layout.rank == min(rank for (rank, _), *_ in found):
                self._write(found)

    def end(self) -> None:
        """Write what the first rank has of steps behind which nothing was written."""
        if self._boxes and self._layout.place == 0 and self._gather is None:
            self._write([(self._name, self._boxes, self._counts)])

    def _reported(self, own: Any) -> list[Any]:
        if self._gather is not None:
            return self._gather(own)
        return gather_objects(own, self._layout.everyone)

    @property
    def _layout(self) -> ParallelLayout:
        return self.layers[0].routed.layer_context.layout

    @property
    def _name(self) -> tuple[int, str]:
        rank, ep_rank = self._layout.rank, self._layout.index("ep")
        return rank, f"rank {rank} (EP rank {ep_rank}, node {self._layout.node_C[ep_rank]})"

    def _keep(self, origin: TimedTask, timed: Sequence[TimedTask]) -> None:
        names, before = [layer.name for layer in self.layers], len(self._boxes)
        ordered = sorted(timed, key=lambda each: each.seconds_from(origin)[0])
        for each, task in zip(ordered, traced_tasks_of(ordered, origin, names, has_waits=True)):
            self._boxes.append(
                Box(
                    name=each.task.label,
                    rank=self._layout.rank,
                    stream=task.stream,
                    start_s=self._later_s + task.start_s,
                    end_s=self._later_s + task.end_s,
                    category=task.name,
                    bound_by=None if task.bound_by is None else before + task.bound_by,
                    reported={"layer": task.layer, "chunk": task.chunk, "phase": task.phase},
                )
            )

    def _count(self, origin: TimedTask, timed: Sequence[TimedTask], rows: Sequence[Rows]) -> None:
        """Rows and bytes, from when a layer knows them."""
        ordered = [each for each in timed if each.task.op == ORDER]
        for layer, seen in zip(self.layers, rows):
            routed = layer.routed
            own = [each for each in ordered if each.task.layer == routed.layer_context.layer]
            if len(own) != len(seen.passes):  # some were routed again, or by somebody else
                continue
            rank, ep_rank = self._layout.rank, self._layout.index("ep")
            for each, one in zip(own, seen.passes):
                at_s = self._later_s + each.seconds_from(origin)[1]
                of_rows = one.destination.share.of_rows(one.rows_CE)
                between_CC = of_rows.rows_between(one.rows_CE[:, None])[0]
                computed, stayed = (
                    int(between_CC[:, ep_rank].sum()),
                    int(between_CC[ep_rank, ep_rank]),
                )
                moved = {
                    "sent": int(between_CC[ep_rank].sum()) - stayed,
                    "arrived": computed - stayed,
                }
                reported = {"computed here": computed, **moved}
                num_bytes = {n: int(num * routed.row_bytes.between) for n, num in moved.items()}
                self._counts.append(Count("rows", rank, at_s, reported))
                self._counts.append(Count("bytes", rank, at_s, num_bytes))

    def _write(self, found: Sequence[tuple[tuple[int, str], list[Box], list[Count]]]) -> None:
        with or_warn(f"the trace {str(self.path)!r}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            boxes = (box for _, boxes, _ in found for box in boxes)
            counts = (count for _, _, counts in found for count in counts)
            names = dict(name for name, _, _ in found)
            self.path.write_text(chrome_trace(boxes, names, counts), "utf-8")
