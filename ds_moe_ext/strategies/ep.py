"""Plain expert parallelism: one copy of each expert, at home. The base case of all strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_moe_ext.moe import wires
from ds_moe_ext.placement import Share
from ds_moe_ext.schedule.program import Stage
from ds_moe_ext.schedule.task import INTER, Lane, Op, Schedule
from ds_moe_ext.strategies.base import Job, Plan, Site, register


@register("ep")
@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """No keys: nothing is planned."""

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        return (("ep", INTER),)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(Plan(home, home, Share.local_else_home(home, home)) for home in job.homes)

    def schedules(self, plan: Plan, layer: int, *, gated: bool) -> tuple[Schedule, Schedule]:
        tasks = wires.routed_tasks(layer, num_chunks=1, degree=1)
        forward = wires.layer_schedule(tasks, layer, num_chunks=1, gated=gated)
        return forward, forward.reversed()

    def stages(self, site: Site) -> Mapping[Op, Stage]:
        return {}
