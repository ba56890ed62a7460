# SPDX-License-Identifier: Apache-2.0
"""What a step of a model takes under the plans of its layers: the schedule that runs, priced. Pure.

``price_passes`` simulates one micro-batch through some layers, with ``layer_seconds`` of each task;
``Passes.step`` is a step of them, ``pipeline_step`` one of the passes of all pipeline stages, in
Megatron's order (1F1B): a stage runs some forward passes, then a forward and a backward one by
turns, then the backward passes that are left. With several chunks a stage, passes through them
interleave: as many micro-batches as there are stages go through the first chunk, then the same ones
through the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
    LayerSeconds,
    TaskCosts,
    layer_seconds,
    with_host,
)
from ds_moe_ext.planning.model_shape import ModelParallel
from ds_moe_ext.planning.strategy import Job, LayerContext, Plan, Strategy, followers, layer_tasks
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


class StagePass(NamedTuple):
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
    stage_passes = [each for pair in zip(passes[ahead:], back) for each in pair]
    return (*passes[:ahead], *stage_passes, *back[len(back) - ahead :])


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
) -> list[StagePass]:
    """When all stages run their passes.

    A stage sends what a pass gives before it goes on; where chunks interleave it goes on meanwhile,
    as Megatron does in both.
    """
    stages = range(parallel.pipeline)
    last = parallel.chunks * parallel.pipeline - 1  # of the places in the order of the model
    left = [list(reversed(order_of(stage, parallel, micro_batches))) for stage in stages]
    free_s = [0.0] * parallel.pipeline
    come_s: dict[tuple[int, Pass], float] = {}  # when a pass has what it needs of another stage
    stage_passes: list[StagePass] = []
    while any(left):
        for stage in stages:
            while left[stage]:
                each = left[stage][-1]
                place = each.chunk * parallel.pipeline + stage
                begins = place == (last if each.is_back else 0)  # it needs nothing of other stages
                come = 0.0 if begins else come_s.get((stage, each))
                if come is None:
                    break
                left[stage].pop()
                start_s = max(free_s[stage], come)
                free_s[stage] = end_s = start_s + seconds_of(stage, each)
                after = place - 1 if each.is_back else place + 1
                if 0 <= after <= last:
                    chunk, following = divmod(after, parallel.pipeline)
                    come_s[following, each._replace(chunk=chunk)] = end_s + send_s
                    if parallel.chunks == 1:
                        free_s[stage] = end_s = end_s + send_s
                stage_passes.append(StagePass(stage, each, start_s, end_s))
    return stage_passes


CLASSES = 4  # of EP ranks, where there are more
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
    classes: int = CLASSES  # of EP ranks, where there are more

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
    imbalance_s: float  # what the busiest EP rank of each layer computes beyond that
    exposed_s: float  # communication that nothing hides
    host_s: float  # what devices wait for the host to issue
    end_s: float  # behind the last backward
    balance: float  # rows of the busiest EP rank over the mean, mean of the layers
    schedule: Schedule  # of one micro-batch; in a pipeline through the chunk that takes longest
    timeline: Timeline  # its tasks on each class of EP ranks
    bubble_s: float = 0.0  # that stage waits for others
    stage: int = 0  # number of it
    stage_passes: Sequence[StagePass] = ()  # what stages do, in a pipeline
    layers_before: int = 0  # MoE layers before the first of the schedule


class PassRun(NamedTuple):
    """One micro-batch as it passes."""

    schedule: Schedule
    timeline: Timeline

    @property
    def seconds(self) -> PassSeconds:
        """Forward ends when all have what they hand on."""
        tasks = self.schedule.tasks
        stage_pass = next(place for place, task in enumerate(tasks) if task.adjoint_of)
        last = max(place for place in range(stage_pass) if tasks[place].op.name == ATTENTION.name)
        forward_s = max(ends[last] for ends in self.timeline.end_s)
        return PassSeconds(self.timeline.makespan_s, forward_s)


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch."""

    seconds: float  # forward and backward
    forward_s: float  # forward

    @property
    def backward_s(self) -> float:
        return self.seconds - self.forward_s


@dataclass(frozen=True, eq=False)
class Passes:
    """All passes of a step through the same layers, which follow each other on the same ranks."""

    first: PassSeconds  # with the replicas that the step moves, there and back
    later: PassSeconds  # without
    number: int  # of them
    end_s: float  # behind them; as of ``Conditions``
    computed_s: float  # as of ``StepPrice``, of all
    imbalance_s: float  # likewise
    device_s: float  # of all, were the host no matter
    balance_L: tuple[float, ...] = ()  # of each layer, rows of the busiest EP rank over the mean
    run: PassRun | None = None  # the first, as it passes; None without experts

    @classmethod
    def without_experts(cls, conditions: Conditions) -> Passes:
        """Of layers that have none; the host is no matter."""
        forward_s = conditions.behind_s(is_back=False)
        both_s = forward_s + conditions.behind_s(is_back=True)
        each, number = PassSeconds(both_s, forward_s), conditions.micro_batches
        computed_s = number * conditions.head_computed_s
        return cls(each, each, number, conditions.end_s, computed_s, 0.0, number * both_s)

    @property
    def seconds(self) -> float:
        """Of all, one after the other."""
        return self.first.seconds + (self.number - 1) * self.later.seconds

    @property
    def exposed_s(self) -> float:
        # A host that comes late may keep tasks from crowding a link, and so help.
        passed_s = min(self.device_s, self.seconds)
        return max(passed_s - (self.computed_s + self.imbalance_s), 0.0)

    @property
    def host_s(self) -> float:
        return max(self.seconds - self.device_s, 0.0)

    @property
    def step(self) -> StepPrice:
        """A step of these passes and what is behind them."""
        assert self.run is not None
        return StepPrice(
            step_s=self.seconds + self.end_s,
            computed_s=self.computed_s,
            imbalance_s=self.imbalance_s,
            exposed_s=self.exposed_s,
            host_s=self.host_s,
            end_s=self.end_s,
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
    return price_passes(strategy, plans, job, rows, conditions).step


def price_passes(
    strategy: Strategy,
    plans: Sequence[Plan],
    job: Job,
    rows: Sequence[np.ndarray],
    conditions: Conditions,
) -> Passes:
    """The passes of a step through some layers that follow each other."""
    cost_groups = {
        layer: cost_group for cost_group in job.cost_groups for layer in cost_group.layers
    }
    flows, layers = [], []
    for layer, (plan, rows_CE) in enumerate(zip(plans, rows)):
        flows.append(Flow.of(plan, rows_CE, job.node_C, cost_groups[layer]))
        layers.append(
            layer_seconds(
                plan,
                flows[layer],
                cost_groups[layer],
                conditions.tasks,
                node_C=job.node_C,
                etp_size=conditions.grid.etp_size,
                classes=conditions.classes,
            )
        )
    schedule = step_of(strategy, plans, conditions.grid, job.stacks)
    by_host = with_host(schedule, conditions.host)
    device = _passed(schedule, {}, layers, job, conditions)
    whole = device
    if not conditions.host.is_nothing:
        whole = _passed(*by_host, layers, job, conditions)
    number, later = conditions.micro_batches, whole
    moves = any(any(pieces) for each in layers for pieces in each.by_piece.values())
    if number > 1 and moves:  # replicas are there, and no gradient travels before the last
        unmoved = [replace(each, by_piece={}) for each in layers]
        later = _passed(*by_host, unmoved, job, conditions)
    device_s, whole_s = device.timeline.makespan_s, whole.timeline.makespan_s
    # All compute the mean of experts and what lies between these; the busiest EP ranks more.
    again = conditions.tasks.backward_rounds
    between_s = sum(job.window_s) + sum(job.back_window_s) - conditions.window_sent_s
    even_s = (FORWARD + again) * sum(layer.mean_expert_s for layer in layers)
    most_s = (FORWARD + again) * sum(max(layer.expert_s_K) for layer in layers)
    restored_s = again * sum(layer.restore_s for layer in layers)
    return Passes(
        first=whole.seconds,
        later=later.seconds,
        number=number,
        end_s=conditions.end_s,
        computed_s=number * (between_s + conditions.head_computed_s + even_s + restored_s),
        imbalance_s=number * (most_s - even_s),
        device_s=number * device_s - (number - 1) * (whole_s - later.timeline.makespan_s),
        balance_L=tuple(float(f.computed_C.max() / f.computed_C.mean()) for f in flows),
        run=whole,
    )


def step_of(
    strategy: Strategy, plans: Sequence[Plan], grid: Grid, stacks: Sequence[int] = ()
) -> Schedule:
    """The schedule of one micro-batch: of all layers, with what leads to the first."""
    layout = ParallelLayout(grid, rank=0)
    pairs = enumerate(zip(plans, followers(plans, stacks or [0] * len(plans))))
    sites = (LayerContext(plan, layout, layer, after) for layer, (plan, after) in pairs)
    return whole_step(
        [layer_tasks(strategy, layer_context, gated=False) for layer_context in sites], leads=True
    )


# Ops and streams by their names: an op may stand in another stream than its own.
_OF_ROWS = frozenset(op.name for op in (DISPATCH, COMBINE))
_MET = _OF_ROWS | {ORDER.name, GATHER.name}  # to which all EP ranks must come
_SHARED = frozenset(stream.name for stream in (INTER, PARAM))


def _passed(
    schedule: Schedule,
    host_s: Mapping[int, float],
    layers: Sequence[LayerSeconds],
    job: Job,
    conditions: Conditions,
) -> PassRun:
    """A micro-batch as it passes; ``host_s`` are seconds of what the host issues, by the tasks'
    ``id``."""
    has_measured_links = any(cost_group.links is not None for cost_group in job.cost_groups)
    spans_nodes = bool(job.node_C.max() != job.node_C.min())
    grid, everyone = conditions.grid, range(max(len(layer.expert_s_K) for layer in layers))

    def seconds_of(place: int, task: Task) -> float:
        if task.op is ISSUE:
            return host_s[id(task)]
        if task.op.name != ATTENTION.name:
            return layers[task.layer].seconds(place, task)
        following = task.layer + 1  # what the host computes behind a layer, before the next
        if following == len(layers):
            return conditions.behind_s(is_back=bool(task.adjoint_of))
        return (job.back_window_s if task.adjoint_of else job.window_s)[following]

    def link_of(place: int, task: Task) -> str | None:
        """What rows and replicas that are under way together share; measured links have that in
        them."""
        if task.stream.name not in _SHARED or has_measured_links:
            return None
        is_far = spans_nodes
        if task.op.name in _OF_ROWS:
            is_far = layers[task.layer].is_far_K[place]
        elif task.op.name == GRADIENTS.name:  # of all ranks, not of one grid's
            is_far = is_far or grid.world_size > grid.size
        return f"{'far' if is_far else 'near'} {place}"

    timeline = simulate(
        schedule,
        seconds_of,
        num_ranks=len(everyone),
        peers_of=lambda place, task: everyone if task.op.name in _MET else (place,),
        link_of=link_of,
    )
    return PassRun(schedule, timeline)


def pipeline_step(
    stages: Sequence[Sequence[Passes]],
    parallel: ModelParallel,
    micro_batches: int,
    send_s: float,
) -> StepPrice:
    """A step of all stages, ``[stage][chunk]``.

    The first forward pass of a chunk moves replicas there, its last backward pass brings their
    gradients to the owner. A step ends when the last stage has done what is behind its passes.
    """

    def seconds_of(stage: int, each: Pass) -> float:
        passes = stages[stage][each.chunk]
        if each.is_back:
            is_last = each.micro_batch == micro_batches - 1
            return (passes.first if is_last else passes.later).backward_s
        return (passes.later if each.micro_batch else passes.first).forward_s

    stage_passes = run_passes(parallel, micro_batches, seconds_of, send_s)
    done_s = {stage_pass.stage: stage_pass.end_s for stage_pass in stage_passes}
    end_s = [sum(chunk.end_s for chunk in chunks) for chunks in stages]
    step_s = max(done_s[stage] + end_s[stage] for stage in range(len(stages)))

    def busy_s(stage: int) -> float:
        return sum(chunk.seconds for chunk in stages[stage]) + sent_s(stage)

    def sent_s(stage: int) -> float:
        """Where it waits for what it sends, forward and backward."""
        sends = (stage > 0) + (stage < parallel.pipeline - 1)
        return micro_batches * sends * send_s if parallel.chunks == 1 else 0.0

    busiest = max(range(len(stages)), key=busy_s)
    own = stages[busiest]
    # In the order of the model: all first chunks, then all second ones.
    ordered = list(chain.from_iterable(zip(*stages)))
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
        stage_passes=stage_passes,
        layers_before=layers_before,
    )
