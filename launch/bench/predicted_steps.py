# SPDX-License-Identifier: Apache-2.0
"""What the simulator says of a step beside what it takes, where tasks only take time.

`chrt -r 10 python launch/bench/predicted_steps.py`

Layers, streams, replicas and their hooks are the product's own, so that schedules run as they do in
training; each of their tasks lasts as long as was drawn for it. Plans are drawn, too: how many
copies, in which pieces, how many chunks and slices. The same tasks are priced by ``simulate``. The
process stands for one rank of four, whose exchanges return at once (``fake_world.py``).

Shape letters: C EP ranks, E experts, T rows of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fake_world import ReplacedLayers, fake_world
from pace import Pace, PacedExperts
from rich.console import Console
from torch import Tensor, nn

from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.moe.layer import RoutedExperts, SawSlice
from ds_moe_ext.moe.replicas import Replicas
from ds_moe_ext.planning.layer_pipelines import NOWHERE, Placed
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, Plan, followers
from ds_moe_ext.schedule.executor import Event, Mark, ScheduleStreams, streams_for
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.step import whole_step
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    ETP_GATHER,
    ETP_SCATTER,
    EXPERT,
    GATHER,
    GRADIENTS,
    INTER,
    ORDER,
    PLAN,
    RESTORE,
    ChunkRange,
    Op,
    Schedule,
    Task,
)

NUM_RANKS = 4  # that a process by itself stands for one of
NUM_EXPERTS, NUM_ROWS, WIDTH = 8, 48, 4
MOST_TASKS = 1000  # of a step
CPU = torch.device("cpu")

SECONDS: Mapping[str, tuple[float, float]] = {
    ATTENTION.name: (0.005, 0.020),
    EXPERT.name: (0.005, 0.025),
    ORDER.name: (0.001, 0.002),
    DISPATCH.name: (0.004, 0.015),
    COMBINE.name: (0.004, 0.015),
    ETP_GATHER.name: (0.004, 0.012),
    ETP_SCATTER.name: (0.004, 0.012),
    RESTORE.name: (0.001, 0.002),
    GATHER.name: (0.005, 0.025),
    GRADIENTS.name: (0.002, 0.010),
    PLAN.name: (0.001, 0.005),
}
"""Of whole tasks in forward, at least and at most."""

LONGER_BACK = frozenset((ATTENTION.name, EXPERT.name))  # two gradients in place of one output
CHUNK_NOISE = (0.8, 1.25)  # of a chunk's share: chunks have unlike rows


@dataclass(frozen=True)
class Way:
    """One way to run layers."""

    name: str  # in the table
    block: Mapping[str, Any]  # of the JSON
    copied: bool = False  # experts are copied, and at most so many layers' blocks before carry them
    carried: bool = False
    freed: bool = False
    degree: int = 1  # chunks of forward; of backward as many, or one of its divisors
    sliced: bool = False  # dense gradients are reduced beside layers


def ways() -> Iterator[Way]:
    """Every strategy whose layers all ranks run alike."""
    yield Way("ep", {"strategy": "ep"})
    for degree in (1, 2, 4):
        for sliced in (False, True):
            name = f"esp, degree {degree}{', slices' if sliced else ''}"
            keys = {"degree": degree, "slice_gradients": sliced}
            block = {"strategy": "esp", "expert_sharding_size": 2, "esp": keys}
            yield Way(name, block, degree=degree, sliced=sliced)
    fssdp = {"strategy": "fssdp", "fssdp": {"reshard_interval": 0}}
    yield Way("fssdp", fssdp, copied=True)
    yield Way("fssdp, freed replicas", fssdp, copied=True, freed=True)
    prophet = {"strategy": "prophet"}
    yield Way("prophet", prophet, copied=True, carried=True)
    yield Way("prophet, freed replicas", prophet, copied=True, carried=True, freed=True)
    esp = {"esp": {"degree": 2, "slice_gradients": False}}
    over = {**esp, **fssdp, "strategy": "esp", "balance": "fssdp"}
    yield Way("esp over fssdp", over, copied=True, freed=True, degree=2)
    over = {**esp, "strategy": "esp", "balance": "prophet"}
    yield Way("esp over prophet", over, copied=True, carried=True, freed=True, degree=2)


Key = tuple[str, int, ChunkRange, bool]  # a task's op, layer and span, and whether it is an adjoint


def key_of(task: Task) -> Key:
    """By which its seconds are found."""
    return task.op.name, task.layer, task.chunk_range, bool(task.adjoint_of)


@dataclass(eq=False)
class Times:
    """How long the tasks of a step take, and those that ran, in the order in which they ended."""

    seconds: Mapping[Key, float] = field(default_factory=dict)
    ran: list[Key] = field(default_factory=list)

    def begin(self, seconds: Mapping[Key, float]) -> None:
        """Tasks take so long from now on."""
        self.seconds = seconds
        self.ran.clear()

    def hold(self, key: Key, came_s: float) -> None:
        """Let the thread sleep until the task has lasted as long as it should."""
        end_s = came_s + self.seconds[key]
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self.ran.append(key)


@dataclass(frozen=True, eq=False)
class PacedStage:
    """A stage that lasts."""

    stage: Stage
    op: Op
    layer: int
    times: Times

    def forward(
        self, chunk_range: ChunkRange, *reads: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        came_s = time.perf_counter()
        made = self.stage.forward(chunk_range, *reads)
        self.times.hold((self.op.name, self.layer, chunk_range, False), came_s)
        return made

    def backward(
        self, chunk_range: ChunkRange, saved: tuple[Any, ...], *grads: Any
    ) -> tuple[Any, ...]:
        came_s = time.perf_counter()
        made = self.stage.backward(chunk_range, saved, *grads)
        self.times.hold((self.op.name, self.layer, chunk_range, True), came_s)
        return made

    def recut(
        self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, tuple[Any, ...]]]
    ) -> tuple[Any, ...]:
        return self.stage.recut(chunk_range, pieces)


@dataclass(eq=False)
class PacedSlices:
    """Dense gradients that only take time; slice 0 has one element, slice 1 two, and so on."""

    layer: int
    times: Times
    events: list[Event] = field(default_factory=list)

    def reduce(self, elements: int) -> None:
        """The stage takes the time."""

    def begin(self, elements: int, saw: SawSlice) -> None:
        key = GRADIENTS.name, self.layer, ChunkRange(elements - 1, elements), False
        streams = streams_for(CPU, overlaps=True)
        work = lambda: self.times.hold(key, time.perf_counter())  # noqa: E731
        self.events.append(streams.submit(INTER, work, ()))


class _Attention(torch.autograd.Function):
    """Hands x on, a while later."""

    @staticmethod
    def forward(ctx: Any, times: Times, layer: int, x_TD: Tensor) -> Tensor:
        ctx.times, ctx.layer = times, layer
        times.hold((ATTENTION.name, layer, ChunkRange(0, 1), False), time.perf_counter())
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, None, Tensor]:
        ctx.times.hold((ATTENTION.name, ctx.layer, ChunkRange(0, 1), True), time.perf_counter())
        return None, None, grad_TD


class Block(nn.Module):
    """What the host computes behind the layer before, then experts beside a residual."""

    def __init__(self, layer: int, times: Times) -> None:
        super().__init__()
        self.layer, self.times = layer, times
        self.experts: nn.Module = PacedExperts(Pace(0.0, 0.0), (NUM_EXPERTS, WIDTH, WIDTH))

    def forward(self, x_TD: Tensor, expert_T1: Tensor) -> Tensor:
        if self.layer:
            x_TD = _Attention.apply(self.times, self.layer - 1, x_TD)
        return x_TD + self.experts(x_TD, expert_T1, x_TD.new_ones(expert_T1.shape))


class Model:
    """Layers under one strategy, whose tasks take as long as they are notified. Collective."""

    def __init__(self, way: Way, num_layers: int) -> None:
        self.way, self.times = way, Times()
        self._blocks = nn.ModuleList([Block(layer, self.times) for layer in range(num_layers)])
        model = nn.ModuleDict({"blocks": self._blocks})
        with paced(self.times):
            self._replaced = ReplacedLayers.of(model, way.block)
        self.layers = [each.routed for each in self._replaced.layers]
        for layer in self.layers:
            layer.slices = PacedSlices(layer.layer_context.layer, self.times)
        self._x_TD = torch.rand(NUM_ROWS, WIDTH, requires_grad=True)

    def take(self, plans: Sequence[Plan]) -> Schedule:
        """Run by these plans; what a step then is."""
        for layer, plan, following in zip(self.layers, plans, followers(plans, [0] * len(plans))):
            layer.take(plan, following)
        return whole_step([layer.schedules for layer in self.layers])

    def takes_time(self, task: Task) -> bool:
        """Whether it is work; plans of the next step are, where a stream makes them."""
        return task.op.is_work and (task.op != PLAN or self.layers[task.layer].plans_in_stream)

    def step_s(self, seconds: Mapping[Key, float]) -> float:
        """What one step takes."""
        self.times.begin(seconds)
        expert_T1 = torch.arange(NUM_ROWS)[:, None] % NUM_EXPERTS
        with paced(self.times):
            start_s = time.perf_counter()
            x_TD = self._x_TD
            for block in self._blocks:
                x_TD = block(x_TD, expert_T1)
            x_TD = _Attention.apply(self.times, len(self.layers) - 1, x_TD)
            x_TD.backward(torch.ones_like(x_TD))
            for layer in self.layers:
                slices = layer.slices
                assert isinstance(slices, PacedSlices)
                streams_for(CPU, overlaps=True).join(slices.events)
                slices.events.clear()
            end_s = time.perf_counter()
        self._replaced.planning.take_rows()
        for layer in self.layers:
            layer.after_step()
        return end_s - start_s


@contextmanager
def paced(times: Times) -> Iterator[None]:
    """All stages of layers, and all replicas, take their time inside the block."""
    stages = RoutedExperts._stages

    def paced_stages(
        self: RoutedExperts, device: torch.device, streams: ScheduleStreams
    ) -> Mapping[Op, Stage]:
        layer = self.layer_context.layer

        def stage_of(op: Op, stage: Stage) -> Stage:
            if not op.is_work or (op == PLAN and not streams.has_threads):
                return stage
            return PacedStage(stage, op, layer, times)

        return {op: stage_of(op, stage) for op, stage in stages(self, device, streams).items()}

    def paced_began(self: Replicas) -> Mark:
        return time.perf_counter()

    def paced_saw(
        self: Replicas, op: Op, start: Mark, *, is_adjoint: bool = False, piece: int = 0
    ) -> None:
        chunk_range, num_pieces = ChunkRange(piece, piece + 1), len(self.transfers.gathers)
        if not is_adjoint and (op.name, self.coordinates.layer, chunk_range, False) in times.ran:
            chunk_range = ChunkRange(0, num_pieces)  # all once more, for backward
        times.hold((op.name, self.coordinates.layer, chunk_range, is_adjoint), start)

    with (
        mock.patch.object(RoutedExperts, "_stages", paced_stages),
        mock.patch.object(Replicas, "began", paced_began),
        mock.patch.object(Replicas, "saw", paced_saw),
    ):
        yield


# What is drawn.


def drawn_plans(way: Way, model: Model, random: np.random.Generator) -> list[Plan]:
    """One a layer."""
    plans: list[Plan] = []
    for number, layer in enumerate(model.layers):
        owner = layer.layer_context.plan.owner
        plan = Plan.at_owner(owner)
        if way.copied:
            plan = _copied(way, plan, random, follows=number > 0)
        if way.degree > 1:
            divisors = [d for d in (1, 2, 4) if way.degree % d == 0]
            plan = replace(
                plan, forward_degree=way.degree, backward_degree=int(random.choice(divisors))
            )
        plans.append(replace(plan, reductions=_slices(random) if way.sliced else NOWHERE))
    return plans


def _copied(way: Way, plan: Plan, random: np.random.Generator, *, follows: bool) -> Plan:
    """With replicas of some experts in all EP ranks."""
    owner = plan.owner
    copied = random.choice(owner.num_experts, size=int(random.integers(2, 5)), replace=False)
    holds_EC = owner.holds_EC.copy()
    holds_EC[copied] = True
    target = owner.with_replicas(holds_EC)
    halves = [_halves(copied, random) for _ in range(2)]
    plan = Plan(
        owner,
        target,
        LocalElseOwner(owner, target),
        rematerialize=way.freed,
        carried=Carried(*halves) if way.carried and follows else None,
    )
    return replace(plan, successor=lambda rows_CE: plan) if way.carried else plan


def _halves(experts: np.ndarray, random: np.random.Generator) -> Split:
    at = int(random.integers(1, len(experts)))
    return Split(tuple(experts[:at].tolist()), tuple(experts[at:].tolist()))


def _slices(random: np.random.Generator) -> Placed:
    within, dense = random.integers(0, 3, size=2).tolist()
    numbers = tuple(range(1, within + dense + 1))
    return Placed(numbers[:within], numbers[within:])


def drawn_seconds(step: Schedule, random: np.random.Generator, pace: float) -> dict[Key, float]:
    """Of the tasks, times ``pace``."""
    num_chunks = {task.layer: 1 for task in step.tasks}
    for task in step.tasks:
        if task.op == DISPATCH:
            num_chunks[task.layer] = max(num_chunks[task.layer], task.chunk_range.stop)
    whole: dict[tuple[str, int, bool], float] = {}
    seconds: dict[Key, float] = {}
    for task in step.tasks:
        key = name, layer, chunk_range, is_adjoint = key_of(task)
        if not task.op.is_work or key in seconds:
            continue
        if name in (GATHER.name, GRADIENTS.name):  # by the piece
            drawn = random.uniform(*SECONDS[name]) * (chunk_range.stop - chunk_range.start)
        else:
            if (name, layer, is_adjoint) not in whole:
                times = 2 if is_adjoint and name in LONGER_BACK else 1
                whole[name, layer, is_adjoint] = times * random.uniform(*SECONDS[name])
            drawn = whole[name, layer, is_adjoint]
            part = (chunk_range.stop - chunk_range.start) / num_chunks[layer]
            if name != ATTENTION.name and part < 1:
                drawn *= part * random.uniform(*CHUNK_NOISE)
        seconds[key] = pace * drawn
    return seconds


def predicted_s(step: Schedule, seconds: Mapping[Key, float], model: Model) -> float:
    """What the simulator says."""

    def seconds_of(rank: int, task: Task) -> float:
        return seconds[key_of(task)] if model.takes_time(task) else 0.0

    def peers(rank: int, task: Task) -> Sequence[int]:
        return (rank,)

    return simulate(step, seconds_of, num_ranks=1, peers_of=peers).makespan_s


@dataclass(frozen=True)
class Result:
    """One schedule."""

    way: str  # its strategy
    predicted_s: float  # of a step, by the simulator
    executed_s: tuple[float, ...]  # as it took, each time

    @property
    def error(self) -> float:
        """By how much more is stated than the median step took, as part of it."""
        return self.predicted_s / statistics.median(self.executed_s) - 1


def results(
    way: Way, num_schedules: int, *, num_steps: int, seed: int, pace: float = 1.0
) -> Iterator[Result]:
    """One for each schedule of a way, in as many steps. Collective."""
    models: dict[int, Model] = {}
    for number in range(num_schedules):
        random = np.random.default_rng([seed, number])
        num_layers = 2 + number % 3
        if num_layers not in models:
            models[num_layers] = Model(way, num_layers)
        model = models[num_layers]
        step = model.take(drawn_plans(way, model, random))
        seconds = drawn_seconds(step, random, pace)
        model.step_s(dict.fromkeys(seconds, 0.0))  # makes programs
        took = []
        for _ in range(num_steps):
            took.append(model.step_s(seconds))
            check_ran(step, model)
        yield Result(way.name, predicted_s(step, seconds, model), tuple(took))


def check_ran(step: Schedule, model: Model) -> None:
    """Each stream did just the tasks of the schedule that take time, in its order. Slices of dense
    gradients, which a layer only begins, are handed to their stream by themselves: beside rows,
    which come first is not stated where both are there.

    Raises:
        RuntimeError: it did not.
    """
    stream_of = {key_of(task): task.stream for task in step.tasks}
    slices = {key_of(task) for task in step.tasks if task.op.name == GRADIENTS.name}
    for stream, positions in step.by_stream.items():
        tasks = [step.tasks[position] for position in positions]
        wanted = [key_of(task) for task in tasks if model.takes_time(task)]
        ran = [key for key in model.times.ran if stream_of.get(key) == stream]
        for are_slices in (False, True):
            own, its = ([k for k in keys if (k in slices) is are_slices] for keys in (wanted, ran))
            if own != its:
                raise RuntimeError(f"stream {stream.name} was to do {own}, but did {its}")


def markdown(found: Sequence[Result]) -> Iterator[str]:
    """A row for each way, and one for all."""
    columns = ("strategy", "schedules", "step, ms", "error, median", "worst", "predicted too short")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    names = dict.fromkeys(each.way for each in found)
    for name in (*names, "all"):
        own = [each for each in found if name in (each.way, "all")]
        ms = [1e3 * statistics.median(each.executed_s) for each in own]
        errors = [each.error for each in own]
        yield (
            f"| {name} | {len(own)} | {min(ms):.0f} to {max(ms):.0f} | "
            f"{statistics.median(map(abs, errors)):.1%} | {max(map(abs, errors)):.1%} | "
            f"{sum(error < 0 for error in errors)} of {len(errors)} |"
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schedules", type=int, default=20, help="of each strategy")
    add("--steps", type=int, default=3, help="of each schedule; the median counts")
    add("--only", nargs="+", default=[], help="strategies, as the table names them")
    add("--pace", type=float, default=1.0, help="times that tasks take what is drawn")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    """All strategies, one after the other."""
    given = parse_arguments()
    torch.set_num_threads(1)
    console, found = Console(highlight=False), list[Result]()
    with fake_world(NUM_RANKS):
        for way in ways():
            if not given.only or way.name in given.only:
                num, steps = given.schedules, given.steps
                found += results(way, num, num_steps=steps, seed=given.seed, pace=given.pace)
    console.print("\n".join(markdown(found)), soft_wrap=True)
    console.print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
