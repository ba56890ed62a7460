# SPDX-License-Identifier: Apache-2.0
"""What a step costs by measured prices beside what it takes, of every strategy, on slow links.

`python launch/bench/cluster.py --inter_mbit 400 launch/bench/priced_steps.py --skews 1.2`

Layers and arguments are those of ``slow_links.py``. Once first steps have shown what rows and
copies cost, each further one is priced by its rows and plans alone: ``simulate`` runs the schedules
with what links carry (``planning/exchange_costs.py``), computing as long as it is paced, and what
is left of a layer as long as it took in the warm-up. A step is from the start of forward to the
end of backward on the last rank; planning between steps is not in it. It is taken several times
with its plans and rows as they are, and the median counts: four ranks share this machine's cores.

Shape letters: L layers, C ranks, E experts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from pace import BACKWARD
from replaced_layers import ReplacedLayers
from rich.console import Console
from rotation import NUM_WARM_UPS
from slow_links import Load, contenders, loads, parse_arguments, ways
from slow_links_contenders import Contender
from slow_links_figures import rows_between

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import Cargo, gather_rounds
from ds_moe_ext.hosts.attachment.replacement import bytes_of
from ds_moe_ext.hosts.steps.costs import Links
from ds_moe_ext.moe.observation import Rows, TimedTask
from ds_moe_ext.planning.exchange_costs import LinkPrices, trip_through
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule.orders import LayerTasks
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.step import whole_step
from ds_moe_ext.schedule.task import (
    ATTENTION,
    CELL_GATHER,
    CELL_SCATTER,
    COMBINE,
    DISPATCH,
    EXPERT,
    GATHER,
    INTER,
    ORDER,
    PARAM,
    RESTORE,
    Task,
)

NUM_SEEN = 6  # last steps of the warm-up, which tell what layers add to links
NUM_PRICED = 8
NUM_TAKEN = 3  # each of those

Span = tuple[str, int, bool]  # a task's op and layer, and whether it is an adjoint
REST = (ORDER.name, RESTORE.name, CELL_GATHER.name, CELL_SCATTER.name)


class Ran(NamedTuple):
    """A task on one rank, by moments of ``time.perf_counter``."""

    name: str
    layer: int
    is_adjoint: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Step:
    """One step, as all ranks saw it.

    Attributes:
        plans: of each layer.
        layers: what ran of each.
        rows_LCC: that each cell sends to each.
        start_s: when the first rank began it.
        end_s: when the last one's backward ended.
        ran: tasks of each rank.
    """

    plans: Sequence[Plan]
    layers: Sequence[LayerTasks]
    rows_LCC: np.ndarray
    start_s: float
    end_s: float
    ran: Sequence[Sequence[Ran]]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def by_rank(self, span: Span) -> list[float]:
        """Seconds of all tasks of a kind, on each rank."""
        return [
            sum(r.end_s - r.start_s for r in own if (r.name, r.layer, r.is_adjoint) == span)
            for own in self.ran
        ]


class Watched:
    """A contender whose steps are looked at. Collective."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self.layers = contender._layers
        for layer in self.layers:
            layer.routed.meter.is_wanted = True

    def step(self, number: int, rows_LCE: np.ndarray, *, plans_next: bool = True) -> Step:
        """One step of all ranks' rows, int64 ``[L, C, E]``; the next one has its plans, too, where
        it shall not plan."""
        plans = [layer.routed.site.plan for layer in self.layers]
        layers = [layer.routed.schedules for layer in self.layers]
        seen: list[TimedTask] = []
        ended: list[float] = []
        plan = ReplacedLayers.after_step

        def after_step(replaced: ReplacedLayers, number: int) -> list[Rows]:
            ended.append(time.perf_counter())
            for layer in self.layers:
                seen.extend(layer.routed.tasks.take())
            return plan(replaced, number) if plans_next else replaced.planning.take_rows()

        dist.barrier()
        start_s = time.perf_counter()
        with mock.patch.object(ReplacedLayers, "after_step", after_step):
            self._contender.step(number, rows_LCE[:, dist.get_rank()])
        own = [
            Ran(t.task.op.name, t.task.layer, bool(t.task.adjoint_of), t.start, t.end) for t in seen
        ]
        starts, ends, ran = zip(*gather_objects((start_s, ended[0], own), None))
        cell_size = dist.get_world_size() // plans[0].home.num_cells
        by_cell = rows_LCE.reshape(len(plans), -1, cell_size, rows_LCE.shape[-1]).sum(axis=2)
        rows_LCC = rows_between(plans, list(by_cell))
        return Step(plans, layers, rows_LCC, min(starts), max(ends), ran)


# What it is priced at.


@dataclass(frozen=True, eq=False)
class Pricing:
    """By which a contender's steps are priced.

    Attributes:
        links: what rows and copies wait for.
        node_C: node of each cell.
        row_bytes: of a row.
        expert_bytes: of an expert's copy.
        attention_s: forward, of a layer.
        row_s: forward, of an expert on a row.
        rest_s: of other tasks of a layer, by kind.
        host_s: of a step, between tasks.
    """

    links: LinkPrices
    node_C: np.ndarray
    row_bytes: int
    expert_bytes: int
    attention_s: float
    row_s: float
    rest_s: Mapping[Span, float]
    host_s: float = 0.0

    def learned(self, steps: Sequence[Step]) -> Pricing:
        """With what layers added to links in these steps, and what the rest took."""
        said, found, factors = [], [], list[float]()
        rest: dict[Span, list[float]] = defaultdict(list)
        for step in steps:
            for layer, plan in enumerate(step.plans):
                for is_back in (False, True):
                    for op in (DISPATCH, COMBINE):
                        said.append(self.trip_s(step, layer, is_back))
                        found.append(min(step.by_rank((op.name, layer, is_back))))
                    for name in REST:
                        span = name, layer, is_back
                        rest[span].append(min(step.by_rank(span)))
                pieces = [plan.target] if plan.carried is None else plan.pieces_of(plan.carried[1])
                said_s = sum(float(self.copies_s_C(plan, piece).mean()) for piece in pieces)
                found_s = statistics.mean(step.by_rank((GATHER.name, layer, True)))
                if min(said_s, found_s) > 0:
                    factors.append(found_s / said_s)
        learned = replace(
            self,
            links=replace(
                self.links,
                trip=trip_through(said, found),
                copy_factor=statistics.median(factors or [1.0]),
            ),
            rest_s={span: statistics.median(seconds) for span, seconds in rest.items()},
        )
        host_s = statistics.median(step.seconds - learned.seconds(step) for step in steps)
        return replace(learned, host_s=max(host_s, 0.0))

    def trip_s(self, step: Step, layer: int, is_back: bool) -> float:
        """Of an exchange, all chunks together."""
        plan = step.plans[layer]
        degree = plan.backward_degree if is_back else plan.forward_degree
        bytes_CC = self.row_bytes * step.rows_LCC[layer]
        return self.links.exchange_s(bytes_CC, self.node_C, degree)

    def copies_s_C(self, plan: Plan, target: Placement) -> np.ndarray:
        """Of copies on each cell."""
        cargo = Cargo(self.expert_bytes)
        transfers = gather_rounds(plan.home, target, self.node_C, cargo)
        return self.links.copies_s_C(transfers, self.expert_bytes)

    def seconds(self, step: Step) -> float:
        """Of a step with its plans and rows, whatever it took."""
        tasks = whole_step(step.layers)
        num_ranks, num_cells = len(step.ran), len(self.node_C)
        cell_size = num_ranks // num_cells
        computed_LC = step.rows_LCC.sum(axis=1)

        def copied_s(task: Task) -> np.ndarray:
            plan = step.plans[task.layer]
            if plan.carried is None or task.span.stop - task.span.start > 1:
                return self.copies_s_C(plan, plan.target)
            split = plan.carried[1 if task.adjoint_of else 0]
            return self.copies_s_C(plan, plan.pieces_of(split)[task.span.start])

        def of_cells(task: Task) -> np.ndarray:
            """Seconds on each cell; attention comes before each layer, as here behind one."""
            layer, is_back, name = task.layer, bool(task.adjoint_of), task.op.name
            plan, times = step.plans[layer], BACKWARD if is_back else 1.0
            degree = plan.backward_degree if is_back else plan.forward_degree
            seconds = 0.0
            if name == ATTENTION.name and layer < len(step.layers) - 1:
                seconds = times * self.attention_s
            elif name == EXPERT.name:
                return times * self.row_s / cell_size * computed_LC[layer] / degree
            elif name in (DISPATCH.name, COMBINE.name):
                seconds = self.trip_s(step, layer, is_back) / degree
            elif name in REST:
                is_cut = name != ORDER.name
                seconds = self.rest_s[name, layer, is_back] / (degree if is_cut else 1)
            elif name == GATHER.name:
                own_s_C = copied_s(task)
                beside_s = times * self.attention_s if layer == 0 and plan.carried is None else 0.0
                return np.maximum(own_s_C - beside_s, 0.0)  # of the first layer's attention
            return np.full(num_cells, seconds)

        known = {id(task): of_cells(task) for task in tasks.tasks}

        def peers_of(rank: int, task: Task) -> Sequence[int]:
            if task.op.name in (DISPATCH.name, COMBINE.name):
                return range(rank % cell_size, num_ranks, cell_size)
            if task.op.name in (CELL_GATHER.name, CELL_SCATTER.name):
                first = rank // cell_size * cell_size
                return range(first, first + cell_size)
            return range(num_ranks) if task.op.name == ORDER.name else (rank,)

        simulated = simulate(
            tasks,
            lambda rank, task: float(known[id(task)][rank // cell_size]),
            num_ranks=num_ranks,
            peers_of=peers_of,
        )
        first_s = (1 + BACKWARD) * self.attention_s  # before the first layer
        return self.host_s + first_s + simulated.makespan_s


class Result(NamedTuple):
    """Steps of one contender, in seconds."""

    name: str
    said_s: Sequence[float]
    took_s: Sequence[float]


def priced(contender: Contender, load: Load, given: argparse.Namespace) -> Result:
    """Warm up, learn, then price each step. Collective."""
    watched = Watched(contender)
    site = watched.layers[0].routed.site
    rows_ILCE = load.rows_ILCE

    def step(number: int, *, plans_next: bool = True) -> Step:
        return watched.step(number, rows_ILCE[number % len(rows_ILCE)], plans_next=plans_next)

    warm = [step(number) for number in range(NUM_WARM_UPS + NUM_SEEN)]
    expert = (torch.zeros(given.expert_rows // site.layout.grid.cell_size, given.width),)
    row_bytes = 4 * given.width
    expert_bytes = bytes_of(expert)
    peer_bytes = given.rows * row_bytes // site.layout.grid.num_cells
    layout = ParallelLayout.build(site.layout.grid, [("ep", INTER), ("ep", PARAM)])
    measured = Links.measured(layout, expert, peer_bytes).prices
    pricing = Pricing(
        measured,
        site.layout.node_C,
        row_bytes,
        expert_bytes,
        given.attention_ms / 1e3,
        given.row_us / 1e6,
        {},
    ).learned(warm[-NUM_SEEN:])
    said_s, took_s = [], []
    for number in range(len(warm), len(warm) + NUM_PRICED):
        taken = [step(number, plans_next=turn == NUM_TAKEN - 1) for turn in range(NUM_TAKEN)]
        said_s.append(pricing.seconds(taken[-1]))
        took_s.append(statistics.median(each.seconds for each in taken))
    return Result(contender.name, said_s, took_s)


def markdown(title: str, found: Sequence[Result]) -> Iterator[str]:
    """A row for each contender, and one for all."""
    yield f"\n{title}\n"
    yield "| contender | step, ms | said, ms | error, median | worst |"
    yield "|---|---|---|---|---|"
    said = [said_s for each in found for said_s in each.said_s]
    took = [took_s for each in found for took_s in each.took_s]
    for name, said_s, took_s in (*found, Result("all", said, took)):
        errors = [abs(said / took - 1) for said, took in zip(said_s, took_s)]
        yield (
            f"| {name} | {1e3 * statistics.median(took_s):.0f} | "
            f"{1e3 * statistics.median(said_s):.0f} | {statistics.median(errors):.1%} | "
            f"{max(errors):.1%} |"
        )


def main() -> None:
    """Every contender of the command line under each load."""
    given = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    chosen = [way for way in ways(given) if way.is_early]  # as the product launches copies
    for load in loads(given, dist.get_world_size()):
        found = [priced(each, load, given) for each in contenders(given, chosen, load)]
        console.print("\n".join(markdown(load.title, found)), soft_wrap=True)
    console.print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
