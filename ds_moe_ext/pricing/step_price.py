# SPDX-License-Identifier: Apache-2.0
"""What a step of a model takes under the plans of its layers: the schedule that runs, priced. Pure.

The tasks are those that the layers issue (``strategy.layer_tasks``), the order and the waits those
that the executor obeys (``schedule.step``), the seconds those of the rows that came. Cells stand
for their ranks, which do the same. Shape letters: L layers, C cells, E experts, K classes of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_moe_ext.cost.block_costs import BACKWARD, FORWARD
from ds_moe_ext.layout import Grid, ParallelLayout
from ds_moe_ext.pricing.issue import ISSUE, NO_HOST, HostTimes, Issued, with_host
from ds_moe_ext.pricing.layer_seconds import Flow, LayerSeconds, TaskCosts, layer_seconds
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
from ds_moe_ext.strategy import Job, Plan, Site, Strategy, followers, layer_tasks

CLASSES = 4  # of cells, where there are more
NO_COSTS = TaskCosts()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a job does not say of how its steps run.

    Attributes:
        grid: the ranks.
        tasks: what tasks cost that the job's prices leave out.
        host: what the host takes to issue them.
        head_s: forward of what follows the last layer, its loss with it.
        end_s: of a step, behind the last backward: gradients that nothing hid, the optimizer.
        micro_batches: of a step.
        classes: of cells, where there are more.
    """

    grid: Grid
    tasks: TaskCosts = NO_COSTS
    host: HostTimes = NO_HOST
    head_s: float = 0.0
    end_s: float = 0.0
    micro_batches: int = 1
    classes: int = CLASSES


@dataclass(frozen=True, eq=False)
class StepPrice:
    """Seconds of one step, and where they go: the four parts and the end are the whole.

    Attributes:
        step_s: all.
        computed_s: what ranks compute if rows are even.
        imbalance_s: what the busiest cell of each layer computes beyond that.
        exposed_s: communication that nothing hides.
        host_s: what devices wait for the host to issue.
        end_s: behind the last backward.
        balance: rows of the busiest cell over the mean, mean of the layers.
        schedule: of one micro-batch.
        timeline: its tasks on each class of cells.
    """

    step_s: float
    computed_s: float
    imbalance_s: float
    exposed_s: float
    host_s: float
    end_s: float
    balance: float
    schedule: Schedule
    timeline: Timeline


class _Run(NamedTuple):
    """Seconds of one micro-batch, and how they came."""

    schedule: Schedule
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return self.timeline.makespan_s


def price_step(
    strategy: Strategy,
    plans: Sequence[Plan],
    job: Job,
    rows: Sequence[np.ndarray],
    conditions: Conditions,
) -> StepPrice:
    """A step of all layers.

    Args:
        strategy: whose plans they are.
        plans: of each layer.
        job: with what rows, copies and what lies between layers cost.
        rows: that come in one micro-batch, of each layer, int64 ``[C, E]``.
        conditions: of the run.
    """
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
    micro_s = whole.seconds + (number - 1) * later.seconds
    device_s = number * device.seconds - (number - 1) * (whole.seconds - later.seconds)
    return StepPrice(
        step_s=micro_s + conditions.end_s,
        computed_s=number * computed_s,
        imbalance_s=number * imbalance_s,
        exposed_s=max(device_s - number * (computed_s + imbalance_s), 0.0),
        host_s=max(micro_s - device_s, 0.0),
        end_s=conditions.end_s,
        balance=float(np.mean([f.computed_C.max() / f.computed_C.mean() for f in flows])),
        schedule=whole.schedule,
        timeline=whole.timeline,
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
    """Seconds of all tasks of a step.

    Attributes:
        layers: of each layer.
        job: with what lies between them.
        conditions: of the run.
    """

    layers: Sequence[LayerSeconds]
    job: Job
    conditions: Conditions

    def run(self, step: Issued) -> _Run:
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
        return _Run(schedule, timeline)

    def _between(self, task: Task) -> float:
        """What the host computes behind a layer, before the next."""
        following = task.layer + 1
        if following == len(self.layers):
            return self.conditions.head_s * (BACKWARD if task.adjoint_of else FORWARD)
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
        again = self.conditions.tasks.backward_rounds
        rounds = FORWARD + again
        even_s = rounds * sum(layer.mean_expert_s for layer in self.layers)
        most_s = rounds * sum(max(layer.expert_s_K) for layer in self.layers)
        restored_s = again * sum(layer.restore_s for layer in self.layers)
        head_s = (FORWARD + BACKWARD) * self.conditions.head_s
        return between_s + head_s + even_s + restored_s, most_s - even_s


# Ops and lanes by their names: an op may stand in another lane than its own.
_OF_ROWS = frozenset(op.name for op in (DISPATCH, COMBINE))
_MET = _OF_ROWS | {ORDER.name, GATHER.name}
_SHARED = frozenset(lane.name for lane in (INTER, PARAM))


def _meets(task: Task) -> bool:
    """Whether all cells must come to it."""
    return task.op.name in _MET
