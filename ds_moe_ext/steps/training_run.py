# SPDX-License-Identifier: Apache-2.0
"""A run with replaced layers: what the host's engine carries, and what a person is told."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.attachment.defaults import Default, settle
from ds_moe_ext.attachment.outputs import ENDINGS, or_warn, say
from ds_moe_ext.attachment.refusal import Refusal
from ds_moe_ext.attachment.replacement import AttachedLayer, Blueprint, bytes_of, told_way
from ds_moe_ext.comm import gather_objects
from ds_moe_ext.files.console import wide_console
from ds_moe_ext.layout import Grid
from ds_moe_ext.moe.host_lag import HostLag
from ds_moe_ext.report.division import division_line
from ds_moe_ext.report.rank_figures import OwnSteps, RanksSeen
from ds_moe_ext.report.record import DeviceRecord, RunRecord
from ds_moe_ext.report.recorder import Recorder
from ds_moe_ext.report.report_files import NAMES, ReportFiles, keep_earlier
from ds_moe_ext.report.summary import bad_scores_line, outcomes_by_layer, ranks_line, scores_line
from ds_moe_ext.report.time_saved import choice_line, saved_line
from ds_moe_ext.report.units import bytes_text, counted, seconds_text
from ds_moe_ext.report.verdict import verdict
from ds_moe_ext.schedule.executor import lanes_for
from ds_moe_ext.schedule.graphs import GraphUse
from ds_moe_ext.settings import Settings
from ds_moe_ext.steps.expert_moves import ExpertMover
from ds_moe_ext.steps.monitor import Monitor
from ds_moe_ext.steps.planning import Planning
from ds_moe_ext.steps.saved_routing import SavedRouting
from ds_moe_ext.steps.tracer import Tracer

RECORD = "ds_moe_ext"  # the one attribute of ours that a host's object has


@dataclass(eq=False)
class Record:
    """What is known of a host's engine or optimizer; a host may know more.

    Attributes:
        run: that it carries; None before it has begun.
    """

    run: Run | None = None


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
    """One engine's replaced layers.

    Attributes:
        blueprint: what was asked for, but for defaults that were left out.
        layers: what was replaced, in model order.
        planning: plans the steps.
        mover: moves experts between the ranks.
        recorder: what has happened.
        rank: this rank's place among those that run the same layers.
        monitor: what the host's own shows meanwhile.
        files: written meanwhile; None on a rank that writes none.
        block_hooks: by which copies are launched as blocks begin.
        routing: held against that of checkpoints.
    """

    blueprint: Blueprint
    layers: tuple[AttachedLayer, ...]
    planning: Planning
    mover: ExpertMover
    recorder: Recorder
    rank: int
    monitor: Monitor
    files: ReportFiles | None
    block_hooks: tuple[RemovableHandle, ...]
    routing: SavedRouting

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
        """Begin to record, and tell a person what was replaced. Collective.

        Args:
            lives_with: the host's engine, which carries the run: it ends with it, or with the
                process.
            device: where this rank's experts compute.
            block_hooks: see ``Run``.
        """
        settings, layout = blueprint.settings, layers[0].routed.site.layout
        rank, report, trace = layout.place, settings.report, settings.trace
        tracer, lanes = None, lanes_for(device, overlaps=True)
        if trace.path is not None:
            steps = range(trace.first_step, trace.first_step + trace.num_steps)
            tracer = Tracer(Path(trace.path), steps, layers, lanes)
            weakref.finalize(lives_with, tracer.end)
        tell_all = partial(gather_objects, group=layout.everyone)
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
                tell_all,
                _device_of(device),
                is_on=any(tell_all(report.enabled)),  # each rank may say otherwise
                on_bad_scores=lambda bad: planning.tell(
                    bad_scores_line(bad, [layer.name for layer in layers])
                ),
            ),
            lanes=lanes,
        )
        monitor, files = Monitor(report.enabled and report.monitor), None
        if rank == 0 and report.enabled and report.path is not None:
            files = ReportFiles(Path(report.path), report.write_every_s)
            with or_warn(f"the report of an earlier run in {report.path!r}"):
                planning.tell(keep_earlier(files.folder))
        run = cls(
            blueprint,
            tuple(layers),
            planning,
            mover,
            recorder,
            rank,
            monitor,
            files,
            block_hooks,
            SavedRouting(layers, is_first=rank == 0),
        )
        if rank == 0 and report.enabled:
            wide_console().print(start_table(run))
            lags, forecasts = [layer.routed.lag for layer in layers], planning.forecasts
            uses = [layer.routed.graph_use for layer in layers]
            leave_report(
                recorder,
                report.path,
                lives_with,
                lambda: (str(forecasts), str(HostLag.of_all(lags)), str(GraphUse.of_all(uses))),
            )
        way = told_way(blueprint.strategy, layout)
        for line in (
            expected_line(blueprint),
            way,
            settings.hooks.rule,
            *planning.remarks,
            blueprint.why_grid,
            blueprint.made,
        ):
            planning.tell(line)
        return run

    def settle(self, default: Default, refusals: Iterable[Refusal], given: Any) -> None:
        """Leave out a default by what is known only now; see ``defaults.settle``. On all ranks
        alike, before the first step.

        Raises:
            ValueError: a key asks for what cannot be done.
        """
        planning, blueprint = self.planning, self.blueprint
        strategy = settle(default, blueprint.strategy, refusals, given, planning.tell)
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
    remarks: Callable[[], Sequence[str]],
) -> None:
    """Let a report be there behind a run, also where SIGTERM ends it.

    Args:
        recorder: of the run.
        path: folder; None writes no files.
        lives_with: as ``Run.start`` takes it.
        remarks: what else is to be told at the end; some may be empty.
    """

    def write() -> None:
        record = recorder.record()
        if path is not None and record.steps_I:
            ReportFiles(Path(path)).write(record)
            say(f"{_wrote(path)} at SIGTERM")

    def end() -> None:
        try:
            finish(recorder, path, remarks())
        finally:
            ENDINGS.remove(write)

    if path is not None:
        ENDINGS.add(write)
    weakref.finalize(lives_with, end)


def finish(recorder: Recorder, path: str | None, remarks: Sequence[str] = ()) -> None:
    """Tell a person what a run was like, with remarks, write the report if a folder was named, and
    end on the verdict."""
    record, console = recorder.record(), wide_console()
    if record.steps_I:
        _tell(record, console, path, remarks)
    console.print(f"ds_moe_ext: {verdict(record)}", soft_wrap=True, highlight=False)


def _tell(record: RunRecord, console: Console, path: str | None, remarks: Sequence[str]) -> None:
    """What the verdict rests on, and the files."""
    console.print(end_table(record))
    for told in (division_line, ranks_line, scores_line, saved_line, choice_line):
        if line := told(record):
            console.print(f"ds_moe_ext: {line}", soft_wrap=True, highlight=False)
    if record.seconds_by_kind:
        console.print(time_table(record))
    if record.terms:
        console.print(terms_table(record))
    for remark in filter(None, remarks):
        console.print(f"ds_moe_ext: {remark}", soft_wrap=True, highlight=False)
    if path is not None:
        with or_warn(f"the report in {path!r}"):
            ReportFiles(Path(path)).write(record)
            console.print(f"ds_moe_ext: {_wrote(path)}", soft_wrap=True, highlight=False)


def _wrote(folder: str) -> str:
    """What to tell of the report's files."""
    return f"wrote {' and '.join(str(Path(folder) / name) for name in reversed(NAMES))}"


def teller(settings: Settings, rank: int) -> Callable[[str], None]:
    """Shows lines to a person, each once, on rank 0 where the report is enabled."""
    told: set[str] = set()

    def tell(line: str) -> None:
        if line and rank == 0 and settings.report.enabled and line not in told:
            told.add(line)
            wide_console().print(f"ds_moe_ext: {line}", soft_wrap=True, highlight=False)

    return tell


def start_table(run: Run) -> Table:
    """What was replaced, by what, and what it costs."""
    table = Table(title=f"ds_moe_ext: {_told(run.blueprint)}", title_justify="left")
    table.add_column("layer", no_wrap=True, overflow="fold")
    for heading in ("was", "experts", "an EP rank", "bytes a rank", "before"):
        table.add_column(heading)
    for layer in run.layers:
        home = layer.routed.site.plan.home
        table.add_row(
            layer.name,
            layer.kind,
            str(home.num_experts),
            str(home.num_slots),
            bytes_text(bytes_of(layer.parameters)),
            bytes_text(layer.bytes_before),
        )
    return table


def _device_of(device: torch.device) -> DeviceRecord:
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    return DeviceRecord(name, os.cpu_count() or 1)


def _strategy(settings: Settings) -> str:
    """What was chosen, by name."""
    over = "" if settings.balance is None else f" over {settings.balance}"
    return f"{settings.strategy}{over}"


def expected_line(blueprint: Blueprint) -> str:
    """What was chosen, and what a person may expect of it; empty where the strategy does not say.
    Pure."""
    expected = blueprint.strategy.expected
    return f"{_strategy(blueprint.settings)}: {expected}" if expected else ""


def _told(blueprint: Blueprint) -> str:
    """How the layers will run."""
    grid, settings = blueprint.grid, blueprint.settings
    copies = grid.world_size // (grid.num_cells * grid.cell_size)
    roles = blueprint.strategy.roles
    split = "" if grid.cell_size == 1 else f" x {grid.cell_size} ranks"
    drops = "dropless" if settings.capacity_factor is None else f"x{settings.capacity_factor}"
    gate = "" if settings.gate is None else f", gate {settings.gate}"
    cells = f"{counted(grid.num_cells, 'EP rank')}{split}" if roles is None else f"({roles})"
    groups = f"{copies} x" if roles is not None else f"{counted(copies, 'EP group')} x"
    return f"strategy {_strategy(settings)}, {_ranks(grid)} = {groups} {cells}, {drops}{gate}"


def _ranks(grid: Grid) -> str:
    """Which these are, where they are not all."""
    if not grid.members:
        return f"{grid.world_size} ranks"
    return f"{grid.world_size} ranks from {min(grid.members)}"


def end_table(record: RunRecord) -> Table:
    """How balanced the layers were."""
    table = Table(
        title=f"ds_moe_ext: {len(record.steps_I)} recorded steps with {record.strategy}",
        title_justify="left",
    )
    table.add_column("layer")
    table.add_column("busiest EP rank / mean", justify="right")
    has_placements = record.placements is not None
    for heading in ("at home only", "copies a step", "changed homes") if has_placements else ():
        table.add_column(heading, justify="right")
    for layer, outcome in zip(record.layers, outcomes_by_layer(record)):
        cells = [layer.name, f"{outcome.balance:.2f}"]
        if has_placements:
            cells += [
                f"{outcome.home_balance:.2f}",
                f"{outcome.copies:.1f}",
                str(outcome.num_moved),
            ]
        table.add_row(*cells)
    return table


def time_table(record: RunRecord) -> Table:
    """Where the time of rank 0's layers went, and of all ranks', where they have told; what runs
    beside something else is counted too."""
    table = Table(
        title="ds_moe_ext: rank 0, mean of the timed steps; share of all tasks' time",
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
            told = f"{1e3 * seconds_R[largest]:.2f}, {ranks.ranks_R[largest]}"
            cells += [f"{1e3 * seconds_R.mean():.2f}", told]
        table.add_row(*cells)
    return table


def terms_table(record: RunRecord) -> Table:
    """How good the strategy's model of costs was."""
    table = Table(
        title=f"ds_moe_ext: what {record.strategy} expected of a layer, and what it took",
        title_justify="left",
    )
    table.add_column("term")
    for heading in ("expected", "took", "mean error"):
        table.add_column(heading, justify="right")
    for term in record.terms:
        times = seconds_text(term.said_s), seconds_text(term.found_s)
        table.add_row(term.name, *times, f"{100 * term.error:.0f} %")
    return table
