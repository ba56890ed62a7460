"""Strategies from outside the package, as a user would write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule import wires
from ds_moe_ext.schedule.orders import stage_major
from ds_moe_ext.schedule.task import INTER, PARAM, Lane, Schedule
from ds_moe_ext.share import LocalElseHome, NearestCopy
from ds_moe_ext.strategies.base import Destination, Job, Plan, Site, Strategy


@dataclass(frozen=True, kw_only=True)
class Chunked(Strategy):
    """Expert parallelism over chunks, with a degree for each direction."""

    forward: int
    backward: int

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(
            Plan(home, home, LocalElseHome(home, home), self.forward, self.backward)
            for home in job.homes
        )

    def schedules(self, site: Site, *, gated: bool) -> tuple[Schedule, Schedule]:
        plan, layer = site.plan, site.layer

        def cut(degree: int) -> Schedule:
            tasks = wires.routed_tasks(layer, num_chunks=plan.num_chunks, degree=degree)
            ordered = stage_major(tasks, wires.ROUTED_OPS)
            return wires.layer_schedule(ordered, layer, num_chunks=plan.num_chunks, gated=gated)

        forward = cut(plan.forward_degree)
        if plan.forward_degree == plan.backward_degree:
            return forward, forward.reversed()
        return forward, forward.backward_cut_as(cut(plan.backward_degree))


@dataclass(frozen=True, kw_only=True)
class Copied(Strategy):
    """Any copies that a test asks for, in chunks if it likes."""

    target: Placement | None = None
    forward: int = 1
    backward: int = 1
    rematerialize: bool = False
    revise: Callable[[np.ndarray], Destination] | None = None
    goes_home: bool = False  # what has no copy at its sender, as in Pro-Prophet

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        return (("ep", INTER), ("ep", PARAM))

    def plan(self, job: Job) -> tuple[Plan, ...]:
        (home,) = job.homes
        target = self.target or home
        plan = Plan(
            home,
            target,
            LocalElseHome(home, target) if self.goes_home else NearestCopy(target, job.node_C),
            self.forward,
            self.backward,
            self.rematerialize,
            self.revise,
        )
        return (plan,)

    def schedules(self, site: Site, *, gated: bool) -> tuple[Schedule, Schedule]:
        plan, layer = site.plan, site.layer
        chunks = plan.num_chunks

        def cut(degree: int) -> Schedule:
            tasks = wires.routed_tasks(
                layer, num_chunks=chunks, degree=degree, copied=plan.is_joined
            )
            return wires.layer_schedule(tasks, layer, num_chunks=chunks, gated=gated)

        forward = cut(plan.forward_degree)
        return forward, forward.backward_cut_as(cut(plan.backward_degree))
