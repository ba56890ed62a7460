# SPDX-License-Identifier: Apache-2.0
"""A run with replaced layers: what the host's engine carries, and what a person is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.attachment.outputs import ENDINGS, or_warn, say
from ds_moe_ext.attachment.replacement import AttachedLayer, Blueprint, bytes_of, told_way
from ds_moe_ext.layout import Grid
from ds_moe_ext.moe.observation import TimedTask
from ds_moe_ext.report.division import division_line
from ds_moe_ext.report.page import write_report
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.recorder import Recorder, spans_of
from ds_moe_ext.report.summary import outcomes_by_layer
from ds_moe_ext.report.units import bytes_text, seconds_text
from ds_moe_ext.schedule.trace import Box, chrome_trace
from ds_moe_ext.settings import Settings
from ds_moe_ext.steps.expert_moves import ExpertMover
from ds_moe_ext.steps.load_forecasts import LoadForecasts
from ds_moe_ext.steps.planning import Planning

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


@dataclass(frozen=True, eq=False)
class Run:
    """One engine's replaced layers.

    Attributes:
        blueprint: what was asked for.
        layers: what was replaced, in model order.
        planning: plans the steps.
        mover: moves experts between the ranks.
        recorder: what has happened.
        rank: this rank's place among those that run the same layers.
        block_hooks: by which copies are launched as blocks begin.
    """

    blueprint: Blueprint
    layers: tuple[AttachedLayer, ...]
    planning: Planning
    mover: ExpertMover
    recorder: Recorder
    rank: int
    block_hooks: tuple[RemovableHandle, ...]

    @classmethod
    def start(
        cls,
        blueprint: Blueprint,
        layers: Sequence[AttachedLayer],
        planning: Planning,
        mover: ExpertMover,
        lives_with: object,
        *,
        block_hooks: tuple[RemovableHandle, ...],
    ) -> Run:
        """Begin to record, and tell a person what was replaced.

        Args:
            lives_with: the host's engine, which carries the run: it ends with it, or with the
                process.
            block_hooks: see ``Run``.
        """
        settings, layout = blueprint.settings, layers[0].routed.site.layout
        rank, report, trace = layout.place, settings.report, settings.trace
        tracer = None
        if rank == 0 and trace.path is not None:
            steps = range(trace.first_step, trace.first_step + trace.num_steps)
            tracer = _Tracer(Path(trace.path), steps, [layer.name for layer in layers])
        recorder = Recorder(
            strategy=_strategy(settings),
            world_size=blueprint.grid.world_size,
            layers=layers,
            trace_step=report.trace_step,
            max_steps=report.max_steps,
            tracer=tracer,
        )
        run = cls(blueprint, tuple(layers), planning, mover, recorder, rank, block_hooks)
        if rank == 0 and report.enabled:
            Console().print(start_table(run))
            leave_report(recorder, report.path, lives_with, planning.forecasts)
        way = told_way(blueprint.strategy, layout)
        for line in (way, settings.hooks.rule, *planning.remarks, blueprint.why_grid):
            planning.tell(line)
        return run

    def after_step(self, step: int) -> None:
        """Record the optimizer step that has been taken, and plan the next. Collective."""
        rows = self.planning.take_rows()
        self.recorder.after_step(step, rows)
        self.planning.after_step(step, rows)
        self.recorder.terms = self.planning.checks.terms


def leave_report(
    recorder: Recorder, path: str | None, lives_with: object, forecasts: LoadForecasts
) -> None:
    """Let a report be there behind a run, also where SIGTERM ends it.

    Args:
        recorder: of the run.
        path: folder; None writes no files.
        lives_with: as ``Run.start`` takes it.
        forecasts: of the run's loads.
    """

    def write() -> None:
        record = recorder.record()
        if path is not None and record.steps_I:
            write_report(record, Path(path))
            say(f"wrote {path}/report.html and {path}/report.json at SIGTERM")

    def end() -> None:
        try:
            finish(recorder, path, str(forecasts))
        finally:
            ENDINGS.remove(write)

    if path is not None:
        ENDINGS.add(write)
    weakref.finalize(lives_with, end)


def finish(recorder: Recorder, path: str | None, forecasts: str = "") -> None:
    """Tell a person what a run was like and how its forecasts came out, and write the report if a
    folder was named."""
    record = recorder.record()
    if not record.steps_I:
        return
    console = Console()
    console.print(end_table(record))
    if line := division_line(record):
        console.print(f"ds_moe_ext: {line}", soft_wrap=True, highlight=False)
    if record.seconds_by_kind:
        console.print(time_table(record))
    if record.terms:
        console.print(terms_table(record))
    if forecasts:
        console.print(f"ds_moe_ext: {forecasts}", soft_wrap=True, highlight=False)
    if path is not None:
        with or_warn(f"the report in {path!r}"):
            write_report(record, Path(path))
            console.print(f"ds_moe_ext: wrote {path}/report.html and {path}/report.json")


def teller(settings: Settings, rank: int) -> Callable[[str], None]:
    """Shows lines to a person, on rank 0 where the report is enabled."""

    def tell(line: str) -> None:
        if line and rank == 0 and settings.report.enabled:
            Console().print(f"ds_moe_ext: {line}", soft_wrap=True, highlight=False)

    return tell


class _Tracer:
    """Writes the tasks of some steps as one Chrome trace."""

    def __init__(self, path: Path, steps: range, layer_names: Sequence[str]) -> None:
        self._path, self.steps, self._layer_names = path, steps, layer_names
        self._origin: TimedTask | None = None
        self._boxes: list[Box] = []

    def __call__(self, step: int, timed: list[TimedTask]) -> None:
        self._origin = self._origin or timed[0]
        for span in spans_of(timed, self._origin, self._layer_names):
            name = f"{span.name} {span.layer} [{span.chunk}] {span.phase}"
            self._boxes.append(Box(name, 0, span.lane, span.start_s, span.end_s, span.name))
        if step == self.steps[-1]:
            with or_warn(f"the trace {str(self._path)!r}"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(chrome_trace(self._boxes))


def start_table(run: Run) -> Table:
    """What was replaced, by what, and what it costs."""
    table = Table(title=f"ds_moe_ext: {_told(run.blueprint)}", title_justify="left")
    table.add_column("layer", no_wrap=True, overflow="fold")
    for heading in ("was", "experts", "a cell", "bytes a rank", "before"):
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


def _strategy(settings: Settings) -> str:
    """What was chosen, by name."""
    over = "" if settings.balance is None else f" over {settings.balance}"
    return f"{settings.strategy}{over}"


def _told(blueprint: Blueprint) -> str:
    """How the layers will run."""
    grid, settings = blueprint.grid, blueprint.settings
    copies = grid.world_size // (grid.num_cells * grid.cell_size)
    roles = blueprint.strategy.roles
    split = "" if grid.cell_size == 1 else f" of {grid.cell_size} ranks"
    drops = "dropless" if settings.capacity_factor is None else f"x{settings.capacity_factor}"
    gate = "" if settings.gate is None else f", gate {settings.gate}"
    cells = f"{grid.num_cells} cells{split}" if roles is None else f"({roles})"
    return f"strategy {_strategy(settings)}, {_ranks(grid)} = {copies} x {cells}, {drops}{gate}"


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
    table.add_column("busiest cell / mean", justify="right")
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
    """Where the time of rank 0's layers went; what runs beside something else is counted too."""
    table = Table(title="ds_moe_ext: rank 0, mean of the timed steps", title_justify="left")
    table.add_column("task")
    for heading in ("ms a step", "share"):
        table.add_column(heading, justify="right")
    total = sum(record.seconds_by_kind.values())
    for kind, seconds in sorted(record.seconds_by_kind.items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{seconds * 1e3:.2f}", f"{100 * seconds / total:.0f} %")
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
