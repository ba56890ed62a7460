# SPDX-License-Identifier: Apache-2.0
"""In which order the stages of a pipeline run their passes, and when: Megatron's 1F1B. Pure.

A stage runs some forward passes, then a forward and a backward one by turns, then the backward
passes that are left. With several chunks a stage, passes through them interleave: as many
micro-batches as there are stages go through the first chunk, then the same ones through the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.layer_seconds import (
    ISSUE,
    NO_HOST,
    Flow,
    HostTimes,
    Issued,
    LayerSeconds,
    TaskCosts,
    layer_seconds,
    with_host,
)
from ds_moe_ext.planning.model_shape import ModelParallel
from ds_moe_ext.planning.strategy import Job, Plan, Site, Strategy, followers, layer_tasks
from ds_moe_ext.schedule.simulator import Timeline, simulate
from ds_moe_ext.schedule.step import whole_step
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    GATHER,
    GRADIENTS,
    INTER,
    ORDER,
    PARAM,
    Schedule,
    Task,
)


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage."""

    chunk: int
    micro_batch: int
    is_back: bool


class Turn(NamedTuple):
    """When a stage runs a pass."""

    stage: int
    what: Pass
    start_s: float
    end_s: float


@lru_cache(maxsize=128)  # all ways and steps have the same
def order_of(stage: int, parallel: ModelParallel, micro_batches: int) -> tuple[Pass, ...]:
    """The passes of a stage."""
    stages, chunks = parallel.pipeline, parallel.chunks
    forward = [
        (chunk, number)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(first, min(first + stages, micro_batches))
    ]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    passes = [Pass(*each, is_back=False) for each in forward]
    back = [Pass(chunks - 1 - chunk, number, is_back=True) for chunk, number in forward]
    turns = [each for pair in zip(passes[ahead:], back) for each in pair]
    return (*passes[:ahead], *turns, *back[len(back) - ahead :])


def most_kept(order: Iterable[Pass], kept: Sequence[float]) -> float:
    """The most that a stage keeps at once between forward and backward."""
    most = now = 0.0
    for each in order:
        now += -kept[each.chunk] if each.is_back else kept[each.chunk]
        most = max(most, now)
    return most


def run_passes(
    parallel: ModelParallel,
    micro_batches: int,
    seconds_of: Callable[[int, Pass], float],
    send_s: float,
) -> list[Turn]:
    """When all stages run their passes.

    A stage sends what a pass gives before it goes on; where chunks interleave it goes on meanwhile,
    as Megatron does in both.
    """
    stages = range(parallel.pipeline)
    left = [list(reversed(order_of(stage, parallel, micro_batches))) for stage in stages]
    free_s = [0.0] * parallel.pipeline
    come_s: dict[tuple[int, Pass], float] = {}  # when a pass has what it needs of another stage
    turns: list[Turn] = []
    while any(left):
        for stage in stages:
            while left[stage]:
                each = left[stage][-1]
                come = 0.0 if _begins(stage, each, parallel) else come_s.get((stage, each))
                if come is None:
                    break
                left[stage].pop()
                start_s = max(free_s[stage], come)
                free_s[stage] = end_s = start_s + seconds_of(stage, each)
                after = _next(stage, each, parallel)
                if after is not None:
                    come_s[after] = end_s + send_s
                    if parallel.chunks == 1:
                        free_s[stage] = end_s = end_s + send_s
                turns.append(Turn(stage, each, start_s, end_s))
    return turns


def sends(stage: int, parallel: ModelParallel) -> int:
    """How often a stage sends in a pass of one micro-batch, forward and backward, and waits for
    it."""
    if parallel.chunks > 1:
        return 0
    return (stage > 0) + (stage < parallel.pipeline - 1)


def _begins(stage: int, each: Pass, parallel: ModelParallel) -> bool:
    """Whether a pass needs nothing of another stage: forward's first, and backward's, which follows
    its own forward."""
    if each.is_back:
        return stage == parallel.pipeline - 1 and each.chunk == parallel.chunks - 1
    return stage == 0 and each.chunk == 0


def _next(stage: int, each: Pass, parallel: ModelParallel) -> tuple[int, Pass] | None:
    """The pass that goes on from one, and its stage; none behind the last."""
    step = -1 if each.is_back else 1
    place = each.chunk * parallel.pipeline + stage + step
    if not 0 <= place < parallel.chunks * parallel.pipeline:
        return None
    chunk, following = divmod(place, parallel.pipeline)
    return following, each._replace(chunk=chunk)


# What a step of a model takes under the plans of its layers: the schedule that runs, priced.
# Pure.


CLASSES = 4  # of cells, where there are more
NO_COSTS = TaskCosts()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a job does not say of how its steps run."""

    grid: Grid  # the ranks
    tasks: TaskCosts = NO_COSTS  # what tasks cost that the job's prices leave out
    host: HostTimes = NO_HOST  # what the host takes to issue them
    head_s: float = 0.0  # forward of what follows the last layer, its loss with it
    # more of its backward, where layers behind the last experts run again
    head_again_s: float = 0.0
    head_sent_s: tuple[float, float] = (0.0, 0.0)  # what all that sends, forward and backward
    window_sent_s: float = 0.0  # seconds of the job's windows, both ways, in which ranks send
    # of a step, behind the last backward: gradients that nothing hid, the optimizer
    end_s: float = 0.0
    micro_batches: int = 1  # of a step
    classes: int = CLASSES  # of cells, where there are more

    def behind_s(self, *, is_back: bool) -> float:
        """What follows the last experts, computed and sent."""
        if is_back:
            return BACKWARD * self.head_s + self.head_again_s + self.head_sent_s[1]
        return FORWARD * self.head_s + self.head_sent_s[0]

    @property
    def head_computed_s(self) -> float:
        """What of it is computed, forward and backward."""
        return (FORWARD + BACKWARD) * self.head_s + self.head_again_s


@dataclass(frozen=True, eq=False)
class StepPrice:
    """Seconds of one step, and where they go: the parts are the whole. In a pipeline they are those
    of the stage whose passes take longest."""

    step_s: float  # all
    computed_s: float  # what ranks compute if rows are even
    imbalance_s: float  # what the busiest cell of each layer computes beyond that
    exposed_s: float  # communication that nothing hides
    host_s: float  # what devices wait for the host to issue
    end_s: float  # behind the last backward
    balance: float  # rows of the busiest cell over the mean, mean of the layers
    schedule: Schedule  # of one micro-batch; in a pipeline through the chunk that takes longest
    timeline: Timeline  # its tasks on each class of cells
    bubble_s: float = 0.0  # that stage waits for others
    stage: int = 0  # number of it
    turns: Sequence[Turn] = ()  # what stages do, in a pipeline
    layers_before: int = 0  # MoE layers before the first of the schedule


class PassRun(NamedTuple):
    """One micro-batch as it passes."""

    schedule: Schedule
    timeline: Timeline

    @property
    def sides(self) -> PassSeconds:
        """Forward ends when all have what they hand on."""
        tasks = self.schedule.tasks
        turn = next(place for place, task in enumerate(tasks) if task.adjoint_of)
        last = max(place for place in range(turn) if tasks[place].op.name == ATTENTION.name)
        forward_s = max(ends[last] for ends in self.timeline.end_s)
        return PassSeconds(self.timeline.makespan_s, forward_s)


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch."""

    seconds: float  # forward and backward
    forward_s: float  # forward

    @property
    def backward_s(self) -> float:
        """The rest."""
        return self.seconds - self.forward_s


@dataclass(frozen=True, eq=False)
class Passes:
    """All passes of a step through the same layers, which follow each other on the same ranks."""

    first: PassSeconds  # with the copies that the step moves, there and back
    later: PassSeconds  # without
    number: int  # of them
    computed_s: float  # as of ``StepPrice``, of all
    imbalance_s: float  # likewise
    device_s: float  # of all, were the host no matter
    balance_L: tuple[float, ...] = ()  # of each layer, rows of the busiest cell over the mean
    run: PassRun | None = None  # the first, as it passes; None without experts

    @classmethod
    def without_experts(cls, conditions: Conditions) -> Passes:
        """Of layers that have none; the host is no matter."""
        forward_s = conditions.behind_s(is_back=False)
        both_s = forward_s + conditions.behind_s(is_back=True)
        each, number = PassSeconds(both_s, forward_s), conditions.micro_batches
        computed_s = number * conditions.head_computed_s
        return cls(each, each, number, computed_s, 0.0, number * both_s)

    @property
    def seconds(self) -> float:
        """Of all, one after the other."""
        return self.first.seconds + (self.number - 1) * self.later.seconds

    @property
    def exposed_s(self) -> float:
        """As of ``StepPrice``."""
        # A host that comes late may keep tasks from crowding a link, and so help.
        passed_s = min(self.device_s, self.seconds)
        return max(passed_s - (self.computed_s + self.imbalance_s), 0.0)

    @property
    def host_s(self) -> float:
        """As of ``StepPrice``."""
        return max(self.seconds - self.device_s, 0.0)

    def then(self, end_s: float) -> StepPrice:
        """A step of these passes and what is behind them."""
        assert self.run is not None
        return StepPrice(
            step_s=self.seconds + end_s,
            computed_s=self.computed_s,
            imbalance_s=self.imbalance_s,
            exposed_s=self.exposed_s,
            host_s=self.host_s,
            end_s=end_s,
            balance=float(np.mean(self.balance_L)),
            schedule=self.run.schedule,
            timeline=self.run.timeline,
        )


def price_step(
    strategy: Strategy,
    plans: Sequence[Plan],
    job: Job,
    rows: Sequence[np.ndarray],
    conditions: Conditions,
) -> StepPrice:
    """A step of all layers. Arguments as of ``price_passes``."""
    return price_passes(strategy, plans, job, rows, conditions).then(conditions.end_s)


def price_passes(
    strategy: Strategy,
    plans: Sequence[Plan],
    job: Job,
    rows: Sequence[np.ndarray],
    conditions: Conditions,
) -> Passes:
    """The passes of a step through some layers that follow each other."""
    pools = {layer: pool for pool in job.pools for layer in pool.layers}
    flows = [
        Flow.of(plan, rows_CE, job.node_C, pools[layer])
        for layer, (plan, rows_CE) in enumerate(zip(plans, rows))
    ]
    layers = [
        layer_seconds(
            plan,
            flow,
            pools[layer],
            conditions.tasks,
            node_C=job.node_C,
            cell_size=conditions.grid.cell_size,
            classes=conditions.classes,
        )
        for layer, (plan, flow) in enumerate(zip(plans, flows))
    ]
    schedule = step_of(strategy, plans, conditions.grid, job.stacks)
    by_host = with_host(schedule, conditions.host)
    times = _Times(layers, job, conditions)
    device = times.run(with_host(schedule, NO_HOST))
    whole = device if conditions.host.is_nothing else times.run(by_host)
    computed_s, imbalance_s = times.computed()
    number = conditions.micro_batches
    later = whole
    if number > 1:
        later = replace(times, layers=[each.without_moves() for each in layers]).run(by_host)
    device_s, whole_s = device.timeline.makespan_s, whole.timeline.makespan_s
    return Passes(
        first=whole.sides,
        later=later.sides,
        number=number,
        computed_s=number * computed_s,
        imbalance_s=number * imbalance_s,
        device_s=number * device_s - (number - 1) * (whole_s - later.timeline.makespan_s),
        balance_L=tuple(float(f.computed_C.max() / f.computed_C.mean()) for f in flows),
        run=whole,
    )


def step_of(
    strategy: Strategy, plans: Sequence[Plan], grid: Grid, stacks: Sequence[int] = ()
) -> Schedule:
    """The schedule of one micro-batch: of all layers, with what leads to the first.

    Args:
        strategy: whose plans they are.
        plans: of each layer.
        grid: the ranks.
        stacks: as of ``Job``.
    """
    layout = ParallelLayout(grid, rank=0)
    pairs = enumerate(zip(plans, followers(plans, stacks or [0] * len(plans))))
    sites = (Site(plan, layout, layer, after) for layer, (plan, after) in pairs)
    return whole_step([layer_tasks(strategy, site, gated=False) for site in sites], leads=True)


@dataclass(frozen=True, eq=False)
class _Times:
    """Seconds of all tasks of a step."""

    layers: Sequence[LayerSeconds]  # of each layer
    job: Job  # with what lies between them
    conditions: Conditions  # of the run

    def run(self, step: Issued) -> PassRun:
        """As it passes."""
        schedule, host_s = step

        def seconds_of(place: int, task: Task) -> float:
            if task.op is ISSUE:
                return host_s[id(task)]
            if task.op.name == ATTENTION.name:
                return self._between(task)
            return self.layers[task.layer].seconds(place, task)

        num_classes = max(len(layer.expert_s_K) for layer in self.layers)
        everyone = range(num_classes)
        timeline = simulate(
            schedule,
            seconds_of,
            num_ranks=num_classes,
            peers_of=lambda place, task: everyone if _meets(task) else (place,),
            link_of=self._link,
        )
        return PassRun(schedule, timeline)

    def _between(self, task: Task) -> float:
        """What the host computes behind a layer, before the next."""
        following = task.layer + 1
        if following == len(self.layers):
            return self.conditions.behind_s(is_back=bool(task.adjoint_of))
        windows = self.job.back_window_s if task.adjoint_of else self.job.window_s
        return windows[following]

    def _link(self, place: int, task: Task) -> str | None:
        """What rows and copies that are under way together share; measured links have that in
        them."""
        if task.lane.name not in _SHARED or self._has_measured_links:
            return None
        grid, is_far = self.conditions.grid, self._spans_nodes
        if task.op.name in _OF_ROWS:
            is_far = self.layers[task.layer].is_far_K[place]
        elif task.op.name == GRADIENTS.name:  # of all ranks, not of one grid's
            is_far = is_far or grid.world_size > grid.size
        return f"{'far' if is_far else 'near'} {place}"

    @cached_property
    def _has_measured_links(self) -> bool:
        return any(pool.links is not None for pool in self.job.pools)

    @cached_property
    def _spans_nodes(self) -> bool:
        return bool(self.job.node_C.max() != self.job.node_C.min())

    def computed(self) -> tuple[float, float]:
        """Seconds that all compute, and those that the busiest cell of each layer computes more."""
        between_s = sum(self.job.window_s) + sum(self.job.back_window_s)
        between_s -= self.conditions.window_sent_s
        again = self.conditions.tasks.backward_rounds
        rounds = FORWARD + again
        even_s = rounds * sum(layer.mean_expert_s for layer in self.layers)
        most_s = rounds * sum(max(layer.expert_s_K) for layer in self.layers)
        restored_s = again * sum(layer.restore_s for layer in self.layers)
        head_s = self.conditions.head_computed_s
        return between_s + head_s + even_s + restored_s, most_s - even_s


# Ops and lanes by their names: an op may stand in another lane than its own.
_OF_ROWS = frozenset(op.name for op in (DISPATCH, COMBINE))
_MET = _OF_ROWS | {ORDER.name, GATHER.name}
_SHARED = frozenset(lane.name for lane in (INTER, PARAM))


def _meets(task: Task) -> bool:
    """Whether all cells must come to it."""
    return task.op.name in _MET


# What a step takes where pipeline stages pass micro-batches on to each other. Pure.


class ChunkPrice(NamedTuple):
    """What a stage runs in one piece."""

    passes: Passes  # all of a step
    end_s: float  # behind them; as of ``Conditions``


def pipeline_step(
    stages: Sequence[Sequence[ChunkPrice]],
    parallel: ModelParallel,
    micro_batches: int,
    send_s: float,
) -> StepPrice:
    """A step of all stages.

    The first forward pass of a chunk moves copies there, its last backward pass brings their
    gradients home. A step ends when the last stage has done what is behind its passes.
    """

    def seconds_of(stage: int, each: Pass) -> float:
        passes = stages[stage][each.chunk].passes
        if each.is_back:
            is_last = each.micro_batch == micro_batches - 1
            return (passes.first if is_last else passes.later).backward_s
        return (passes.later if each.micro_batch else passes.first).forward_s

    turns = run_passes(parallel, micro_batches, seconds_of, send_s)
    done_s = {turn.stage: turn.end_s for turn in turns}
    end_s = [sum(chunk.end_s for chunk in chunks) for chunks in stages]
    step_s = max(done_s[stage] + end_s[stage] for stage in range(len(stages)))

    def busy_s(stage: int) -> float:
        return sum(chunk.passes.seconds for chunk in stages[stage]) + sent_s(stage)

    def sent_s(stage: int) -> float:
        return micro_batches * sends(stage, parallel) * send_s

    busiest = max(range(len(stages)), key=busy_s)
    own = [chunk.passes for chunk in stages[busiest]]
    # In the order of the model: all first chunks, then all second ones.
    ordered = [chunk.passes for chunks in zip(*stages) for chunk in chunks]
    before = accumulate((len(each.balance_L) for each in ordered), initial=0)
    longest, layers_before = max(
        zip(ordered, before), key=lambda each: each[0].first.seconds if each[0].run else 0.0
    )
    assert longest.run is not None
    return StepPrice(
        step_s=step_s,
        computed_s=sum(each.computed_s for each in own),
        imbalance_s=sum(each.imbalance_s for each in own),
        exposed_s=sum(each.exposed_s for each in own) + sent_s(busiest),
        host_s=sum(each.host_s for each in own),
        end_s=end_s[busiest],
        balance=fmean(chain.from_iterable(each.balance_L for each in ordered)),
        schedule=longest.run.schedule,
        timeline=longest.run.timeline,
        bubble_s=max(step_s - busy_s(busiest) - end_s[busiest], 0.0),
        stage=busiest,
        turns=turns,
        layers_before=layers_before,
    )
