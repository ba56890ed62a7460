"""Strategies from outside the package, as a user would write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_moe_ext.moe import wires
from ds_moe_ext.placement import Share
from ds_moe_ext.schedule.orders import stage_major
from ds_moe_ext.schedule.program import Stage
from ds_moe_ext.schedule.task import INTER, Lane, Op, Schedule
from ds_moe_ext.strategies.base import Job, Plan, Site


@dataclass(frozen=True, kw_only=True)
class Chunked:
    """Expert parallelism over chunks, with a degree for each direction."""

    forward: int
    backward: int

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        return (("ep", INTER),)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(
            Plan(home, home, Share.local_else_home(home, home), self.forward, self.backward)
            for home in job.homes
        )

    def schedules(self, plan: Plan, layer: int, *, gated: bool) -> tuple[Schedule, Schedule]:
        def cut(degree: int) -> Schedule:
            tasks = wires.routed_tasks(layer, num_chunks=plan.num_chunks, degree=degree)
            ordered = stage_major(tasks, wires.ROUTED_OPS)
            return wires.layer_schedule(ordered, layer, num_chunks=plan.num_chunks, gated=gated)

        forward = cut(plan.forward_degree)
        if plan.forward_degree == plan.backward_degree:
            return forward, forward.reversed()
        return forward, forward.backward_cut_as(cut(plan.backward_degree))

    def stages(self, site: Site) -> Mapping[Op, Stage]:
        return {}
