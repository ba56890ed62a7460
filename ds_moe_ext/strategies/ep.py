"""Plain expert parallelism: one copy of each expert, at home. The base case of all strategies."""

from __future__ import annotations

from dataclasses import dataclass

from ds_moe_ext.schedule.task import INTER, Lane
from ds_moe_ext.strategy import Job, Plan, Strategy, register


@register("ep")
@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Strategy):
    """No keys: nothing is planned."""

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        return (("ep", INTER),)  # no copies

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(Plan.at_home, job.homes))
