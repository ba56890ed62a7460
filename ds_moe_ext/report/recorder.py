"""Records a run as it goes: loads of every step, times of some, one timeline.

Shape letters: L layers, E experts, C cells.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ds_moe_ext.load import balance_L
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.observe import TimedTask
from ds_moe_ext.report.record import LayerRecord, RunRecord, Span

TIME_EVERY = 10  # steps: timing costs little, but not nothing
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

    @property
    def steps(self) -> range:
        """The steps; no others are timed for it."""
        ...

    def __call__(self, step: int, timed: list[TimedTask]) -> None: ...


@dataclass(frozen=True, eq=False)
class StepLoads:
    """Loads of one optimizer step.

    Attributes:
        step: its number.
        rows_LE: rows routed to each expert, int64, padded with zeros.
        cell_rows_LC: rows that each cell computed, int64.
    """

    step: int
    rows_LE: np.ndarray
    cell_rows_LC: np.ndarray


@dataclass(eq=False)
class Recorder:
    """Args:
    strategy: JSON name of the strategy.
    world_size: ranks.
    layers: what is recorded, in model order.
    trace_step: step whose tasks are kept as a timeline; None for none.
    max_steps: steps whose loads are kept; a longer run is thinned evenly.
    tracer: given the tasks of its steps.
    """

    strategy: str
    world_size: int
    layers: Sequence[Watched]
    trace_step: int | None = None
    max_steps: int = 400
    tracer: StepTracer | None = None
    _kept: list[StepLoads] = field(default_factory=list)
    _latest: StepLoads | None = None
    _every: int = 1
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _num_timed: int = 0
    _timeline: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        self._time(0)

    def after_step(self, step: int) -> None:
        """Take what the layers saw since the last step. Call it after each optimizer step.

        Args:
            step: number of the step that has ended, from 0.
        """
        self._take_loads(step)
        self._take_times(step)
        self._time(step + 1)

    def latest_balance(self) -> float:
        """Rows of the busiest cell over the mean, in the latest step, mean over layers."""
        return 1.0 if self._latest is None else float(balance_L(self._latest.cell_rows_LC).mean())

    def balance_by_layer(self) -> dict[str, float]:
        """Mean over the kept steps of the busiest cell's rows over the mean, by layer."""
        return self.record().balance_by_layer()

    def record(self) -> RunRecord:
        """The run up to now."""
        layers = tuple(layer.record() for layer in self.layers)
        num_cells = self.layers[0].routed.site.plan.target.num_cells
        num_experts = max(layer.num_experts for layer in layers)
        shape = (len(self._kept), len(layers))
        rows = [loads.rows_LE for loads in self._kept]
        cell_rows = [loads.cell_rows_LC for loads in self._kept]
        return RunRecord(
            strategy=self.strategy,
            world_size=self.world_size,
            num_cells=num_cells,
            layers=layers,
            steps_I=tuple(loads.step for loads in self._kept),
            rows_ILE=np.asarray(rows, dtype=np.int64).reshape(*shape, num_experts),
            cell_rows_ILC=np.asarray(cell_rows, dtype=np.int64).reshape(*shape, num_cells),
            seconds_by_kind={
                kind: seconds / self._num_timed for kind, seconds in self._seconds.items()
            },
            timeline=self._timeline,
            versions=versions(),
        )

    def _time(self, step: int) -> None:
        """Time the tasks of the coming step, if anybody wants to know."""
        is_sample = step % TIME_EVERY == TIME_EVERY // 2 or step == self.trace_step
        is_traced = self.tracer is not None and step in self.tracer.steps
        for layer in self.layers:
            layer.routed.tasks.is_on = is_sample or is_traced

    def _take_loads(self, step: int) -> None:
        sites = [layer.routed.site for layer in self.layers]
        num_experts = max(site.plan.target.num_experts for site in sites)
        rows_LE = np.zeros((len(sites), num_experts), dtype=np.int64)
        cell_rows_LC = np.zeros((len(sites), sites[0].plan.target.num_cells), dtype=np.int64)
        for index, (layer, site) in enumerate(zip(self.layers, sites)):
            rows_CE = layer.routed.rows.take()
            rows_LE[index, : rows_CE.shape[1]] = rows_CE.sum(axis=0)
            for cell in range(cell_rows_LC.shape[1]):
                cell_rows_LC[index, cell] = site.plan.share.rows_to(cell, rows_CE[:, None]).sum()
        self._latest = StepLoads(step, rows_LE, cell_rows_LC)
        if step % self._every == 0:
            self._kept.append(self._latest)
        if len(self._kept) > self.max_steps:
            self._every *= 2
            self._kept = [loads for loads in self._kept if loads.step % self._every == 0]

    def _take_times(self, step: int) -> None:
        timed = [task for layer in self.layers for task in layer.routed.tasks.take()]
        if not timed:
            return
        self._num_timed += 1
        for task in timed:
            start, end = task.seconds_from(task)
            self._seconds[f"{phase_of(task)}:{task.task.op.name}"] += end - start
        if step == self.trace_step:
            names = [layer.name for layer in self.layers]
            self._timeline = tuple(span_of(task, timed[0], names) for task in timed)
        if self.tracer is not None and step in self.tracer.steps:
            self.tracer(step, timed)


def phase_of(task: TimedTask) -> str:
    """ "forward" or "backward"."""
    return "backward" if task.task.adjoint_of else "forward"


def span_of(timed: TimedTask, origin: TimedTask, layer_names: Sequence[str]) -> Span:
    """A task as the page draws it, seconds from the start of ``origin``."""
    start_s, end_s = timed.seconds_from(origin)
    task = timed.task
    return Span(
        name=task.op.name,
        lane=task.lane.name,
        phase=phase_of(timed),
        layer=layer_names[task.layer],
        chunk=str(task.span),
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
