# SPDX-License-Identifier: Apache-2.0
"""What strategies that plan do between two steps, and how long that takes one rank.

`python launch/bench/planning_time.py --ranks 64 --layers 58 --experts 256`
`... launch/bench/planning_time.py --ranks 1024 --layers 58 --experts 256 --settled`

One process stands for one rank of many: no process group is needed, for nothing here talks to
another rank. Rows are drawn in place of routed; all that follows is the product's own, as
``Run.after_step`` does it, and then the programs of the next step are made. Parts "beside" are
those of the thread that plans while the step goes on; here the caller does them, so that they can
be distinguished.

Shape letters: L layers, C ranks, E experts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast
from unittest import mock

import numpy as np
import torch
from fake_world import inline
from rich.console import Console
from rich.table import Table

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica
from ds_moe_ext.hosts.attachment.host_layer import Hosted
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer
from ds_moe_ext.hosts.steps import planning
from ds_moe_ext.hosts.steps.costs import STEPS, Costs, Measured
from ds_moe_ext.hosts.steps.planning import Checks, Planning
from ds_moe_ext.moe import layer as moe_layer
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.moe.replicas import Replicas, in_order
from ds_moe_ext.planning.load_models import TRAINED, zipf_rows, zipf_steps
from ds_moe_ext.planning.loads import LoadWindow
from ds_moe_ext.planning.loads import Sizes as DrawnSizes
from ds_moe_ext.planning.prices import Prices
from ds_moe_ext.planning.strategy import CostGroup, Job, LayerContext, Strategy, followers
from ds_moe_ext.report.recorder import Recorder
from ds_moe_ext.schedule.task import INTER, PARAM
from ds_moe_ext.strategies.settings import BLOCK, read_settings

CPU = torch.device("cpu")
T = TypeVar("T")
BESIDE = "beside: "
NUM_WARM_UPS = STEPS[-1] + 4  # costs are known, and the window has seen these loads
EXPERT_BYTES = 9_437_184  # of Qwen3-30B-A3B, in 16 bits
PRICES = Prices(
    row_s=1.5e-7,
    row_bytes=4096,
    copy_s=EXPERT_BYTES / 50e9,
    inter_bytes_per_s=400e9,
    intra_bytes_per_s=400e9,
)
WINDOW_S = 1e-3  # of attention, forward
TOP_K = 8

ESP = {"degree": 2, "slice_gradients": False, "all_to_all": "direct"}
BLOCKS: dict[str, dict[str, Any]] = {
    "ep": {"strategy": "ep"},
    "fssdp": {"strategy": "fssdp"},
    "prophet": {"strategy": "prophet"},
    "esp_fssdp": {"strategy": "esp", "balance": "fssdp", "esp": ESP},
    "esp_prophet": {"strategy": "esp", "balance": "prophet", "esp": ESP},
}


@dataclass
class Parts:
    """CPU seconds of each part, without what parts within it take."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    where: str = ""  # stands before the names of parts
    _within: list[float] = field(default_factory=lambda: [0.0])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what the block takes."""
        start_s = time.process_time()
        self._within.append(0.0)
        yield
        whole_s = time.process_time() - start_s
        self.spent[f"{self.where}{name}"] += whole_s - self._within.pop()
        self._within[-1] += whole_s

    def watch(self, owner: type, method: str, name: str) -> None:
        """Counts what the calls of a method take."""
        watched: Callable[..., Any] = getattr(owner, method)

        @wraps(watched)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return watched(*args, **kwargs)

        setattr(owner, method, timed)


class Beside(Executor):
    """In place of the thread: the caller does at once what that would do beside the step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._parts.where = BESIDE
        with self._parts.part("strategy's plan, and the rest"):
            future.set_result(work(*args, **kwargs))
        self._parts.where = ""
        return future


WATCHED: tuple[tuple[type, str, str], ...] = (
    (Recorder, "after_step", "report"),
    (LoadWindow, "after", "prediction"),
    (LoadWindow, "predicted", "prediction"),
    (Costs, "after_step", "costs"),
    (Planning, "take_rows", "rows"),
    (RoutedExperts, "take", "layers take plans"),
    (RoutedExperts, "program", "programs"),
    (RoutedExperts, "successor", "search"),
    (Replicas, "prepare", "exchanges"),
    (NearestReplica, "prepare", "shares"),
    (LocalElseOwner, "prepare", "shares"),
)


class KnownCosts(Costs):
    """Costs that no step has to show."""

    def _agreed(self, rows: Sequence[Rows]) -> Measured:
        cost_groups = (
            replace(p, prices=PRICES, expert_bytes=EXPERT_BYTES, state_bytes=6 * EXPERT_BYTES)
            for p in self.cost_groups
        )
        windows_s = (WINDOW_S,) * len(self.layers)
        return Measured(
            cost_groups=tuple(cost_groups),
            window_s=windows_s,
            back_window_s=windows_s,
            free_bytes=1 << 40,
            pipelines=None,
        )


@dataclass(frozen=True)
class Sizes:
    """Of a run."""

    ranks: int  # of the grid, an EP rank each
    ranks_per_node: int  # of these
    layers: int  # MoE layers
    experts: int  # of a layer
    rows: int  # of a rank and layer
    skew: float  # of the experts' loads, an exponent of Zipf's
    # loads are those of a run that has settled, whatever the skew: a plan is not looked for in each
    # step, so that figures are means, where others are medians
    settled: bool = False

    def loads(self, num_steps: int) -> Iterable[np.ndarray]:
        """Of so many steps, ``[L, C, E]`` each."""
        shape = self.layers, self.ranks, self.experts
        if not self.settled:
            steps = zipf_steps(shape, rows=self.rows, skew=self.skew)
            return itertools.islice(steps, num_steps)
        drawn = DrawnSizes(
            ranks=self.ranks,
            experts=self.experts,
            layers=self.layers,
            tokens=self.rows // TOP_K,
            top_k=TOP_K,
            steps=num_steps,
        )
        return zipf_rows(drawn, 0, TRAINED)

    def middle(self, values: Any, axis: int | None = None) -> Any:
        """Of what steps took."""
        return np.mean(values, axis) if self.settled else np.median(values, axis)

    def layout(self) -> ParallelLayout:
        """Of rank 0; the communicators are nobody's."""
        nodes = tuple(rank // self.ranks_per_node for rank in range(self.ranks))
        nobody = {("ep", stream): cast(Any, None) for stream in (INTER, PARAM)}
        return ParallelLayout(Grid(self.ranks, self.ranks), 0, nodes, _groups=nobody)


class OneRank:
    """What one rank does between steps, and how long its parts take."""

    def __init__(self, strategy: Strategy, sizes: Sizes, parts: Parts) -> None:
        self.parts = parts
        self._beside = Beside(parts)
        layout = sizes.layout()
        cost_groups = (CostGroup(layers=tuple(range(sizes.layers))),)
        owners = strategy.first_owners([sizes.experts] * sizes.layers, cost_groups, sizes.ranks)
        job = Job.at_start(owners, layout.node_C, cost_groups)
        self.layers = _layers(strategy, job, layout)
        self.recorder = Recorder("", sizes.ranks, self.layers)
        self.planning = Planning(
            strategy=strategy,
            layers=self.layers,
            job=replace(job, accumulates=True),  # so that no forecasts are checked
            costs=KnownCosts(self.layers, cost_groups, None, strategy.intervals()),
            checks=Checks(strategy, self.layers),
            mover=_stay,
            debug=False,
            rank=0,
            log=lambda line: None,
        )
        for layer in self.layers:
            layer.routed.tasks.is_wanted = False

    def route(self, rows_LCE: np.ndarray) -> None:
        """Let the layers see rows, and plan beside the step: here and now."""
        with mock.patch.object(planning, "worker", lambda: self._beside):
            self.count(rows_LCE)

    def balance_L(self, rows_LCE: np.ndarray) -> list[float]:
        """Rows of the busiest rank over the mean, if these come under the present plans."""
        plans = (layer.routed.layer_context.plan for layer in self.layers)
        computed = (
            plan.share.of_rows(rows_CE).computed_C(rows_CE)
            for plan, rows_CE in zip(plans, rows_LCE)
        )
        return [float(rows_C.max() / rows_C.mean()) for rows_C in computed]

    def count(self, rows_LCE: np.ndarray) -> None:
        """Let the layers see rows; the last ones begin the planning."""
        for each, rows_CE in zip(self.layers, rows_LCE):
            each.routed.rows(rows_CE, 1, each.routed.layer_context.plan.destination)
            each.routed.rows.sent()

    def after_step(self, step: int) -> None:
        """As ``Run.after_step``; and the programs of the next step, as on CUDA."""
        rows = self.planning.take_rows()
        self.recorder.after_step(step, rows)
        self.planning.after_step(step, rows)
        with inline():
            for layer in self.layers:
                layer.routed.program(CPU)


def _stay(old: Sequence[Placement], new: Sequence[Placement]) -> None:
    """Experts have nothing here that moves."""


def _layers(strategy: Strategy, job: Job, layout: ParallelLayout) -> list[AttachedLayer]:
    plans = strategy.plan(job)
    stacks = [0] * len(plans)
    layers = []
    for index, (plan, following) in enumerate(zip(plans, followers(plans, stacks))):
        layer_context = LayerContext(plan, layout, index, following)
        routed = RoutedExperts(strategy, layer_context, lambda rows_RD, slots, weights: rows_RD)
        if ("ep", PARAM) in strategy.uses():
            routed.allow_replicas((torch.zeros(1, 1),))
        hosted = cast(Hosted, SimpleNamespace(routed=routed, slots=list))
        layers.append(AttachedLayer(f"layer {index}", "", hosted, 0, 0, 0))
    in_order(layer.routed.replicas for layer in layers if layer.routed.replicas is not None)
    return layers


def held_bytes(rank: OneRank) -> int:
    """Bytes of all counts by sender and expert that a rank holds: of a step as it came, of those
    that predict the next, and of sums and plans made of them; each table once."""
    planning_ = rank.planning
    ahead, window, job = planning_._beside, planning_._window, planning_.job
    made = None if ahead is None or ahead._made is None else ahead._made.result()
    windows = [window] if made is None else [window, made.window]
    tables = [one.rows_CE for layer in rank.layers for one in layer.routed.rows._on_host]
    for each in windows:
        tables += itertools.chain(each._totals, each._predicted or (), *each._steps)
    tables += job.rows
    if "routed" in vars(job):
        tables.append(job.routed.rows_CY)
    plans = [layer.routed.layer_context.plan for layer in rank.layers]
    plans += () if made is None or made.plans is None else made.plans
    tables += [plan.predicted_CE for plan in plans if plan.predicted_CE is not None]
    return sum({table.ctypes.data: table.nbytes for table in tables}.values())


def strategy_of(name: str, keys: dict[str, dict[str, Any]]) -> Strategy:
    """One of ``BLOCKS``, with the keys of the strategies that it names."""
    strategy = read_settings({BLOCK: {"enabled": True, **keys, **BLOCKS[name]}})[1]
    assert strategy is not None
    return strategy


class Figures(NamedTuple):
    """What one strategy takes a step."""

    cpu_ms: dict[str, float]  # of each part
    replicas: float  # of the experts of one layer, mean
    # rows of the busiest rank over the mean, of what came to each layer under the plans that were
    # made before it did; mean
    balance: float
    held_mb: float  # of ``held_bytes``, the most

    def total_ms(self, is_beside: bool) -> float:
        """Of the parts beside the step, or of those between steps."""
        of_thread = sum(ms for name, ms in self.cpu_ms.items() if name.startswith(BESIDE))
        return of_thread if is_beside else sum(self.cpu_ms.values()) - of_thread


def measured(rank: OneRank, sizes: Sizes, num_steps: int) -> Figures:
    """The middle of some steps."""
    loads = sizes.loads(NUM_WARM_UPS + num_steps)
    steps: list[dict[str, float]] = []
    balance_L: list[float] = []  # of all steps, one behind the other
    held = 0
    for step, rows_LCE in enumerate(loads):
        if step >= NUM_WARM_UPS:
            balance_L += rank.balance_L(rows_LCE)
        rank.parts.spent.clear()
        rank.route(rows_LCE.astype(np.int32))
        held = max(held, held_bytes(rank))
        with rank.parts.part("strategy's plan, and the rest"):
            rank.after_step(step)
        steps.append(dict(rank.parts.spent))
    steps = steps[NUM_WARM_UPS:]
    names = sorted({name for step in steps for name in step})
    seconds = {name: [step.get(name, 0.0) for step in steps] for name in names}
    cpu_ms = {name: 1e3 * float(sizes.middle(own)) for name, own in seconds.items()}
    plans = [layer.routed.layer_context.plan for layer in rank.layers]
    replicas = np.mean([(p.target.holds_EC & ~p.owner.holds_EC).sum() for p in plans])
    return Figures(cpu_ms, float(replicas), float(np.mean(balance_L)), held / 1e6)


def shown(figures: dict[str, Figures]) -> Table:
    """CPU ms a step by part, a column a strategy."""
    table = Table(title="between two steps, CPU ms", title_justify="left")
    table.add_column("part")
    for name in figures:
        table.add_column(name, justify="right")
    parts = sorted({part for each in figures.values() for part in each.cpu_ms})
    for part in parts:
        table.add_row(part, *(f"{each.cpu_ms.get(part, 0.0):.2f}" for each in figures.values()))
    for title, is_beside in (("all beside", True), ("all between", False)):
        table.add_row(title, *(f"{each.total_ms(is_beside):.2f}" for each in figures.values()))
    table.add_row("replicas a layer", *(f"{each.replicas:.1f}" for each in figures.values()))
    table.add_row("counts held, MB", *(f"{each.held_mb:.1f}" for each in figures.values()))
    table.add_row("max/mean of ranks", *(f"{each.balance:.3f}" for each in figures.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=64)
    add("--ranks_per_node", type=int, default=8)
    add("--layers", type=int, default=58)
    add("--experts", type=int, default=256)
    add("--rows", type=int, default=32768, help="of a rank and layer")
    add("--skew", type=float, default=0.6, help="of loads, Zipf's exponent")
    add("--settled", action="store_true", help="loads of a run that has settled; means of steps")
    add("--strategies", nargs="+", default=["ep", "fssdp", "prophet"], choices=BLOCKS)
    add("--overlap_degree", type=int, default=8, help="t of fssdp")
    add("--replicas_per_rank", type=int, default=2, help="m of fssdp")
    add("--steps", type=int, default=20, help="that are timed")
    add("--each_step", action="store_true", help="plan in every step")
    add("--broadcasts", action="store_true", help="transfers as on CUDA, without trees")
    given = parser.parse_args()
    sizes = Sizes(**{name: vars(given)[name] for name in Sizes.__dataclass_fields__})
    copied = {"overlap_degree": given.overlap_degree, "replicas_per_rank": given.replicas_per_rank}
    keys: dict[str, dict[str, Any]] = {"fssdp": {**copied, "reshard_interval": 0}}
    if given.each_step:
        keys = {"fssdp": {**keys["fssdp"], "plan_interval": 1}, "prophet": {"frequency": 1}}
    parts = Parts()
    for watched in WATCHED:
        parts.watch(*watched)
    figures = {}
    for name in given.strategies:
        with mock.patch.object(moe_layer, "can_broadcast", lambda device: given.broadcasts):
            rank = OneRank(strategy_of(name, keys), sizes, parts)
        figures[name] = measured(rank, sizes, given.steps)
    Console().print(shown(figures))


if __name__ == "__main__":
    main()
