"""Plain expert parallelism: one copy of each expert, at home. The base case of all strategies."""

from __future__ import annotations

from dataclasses import dataclass

from ds_moe_ext.schedule.task import INTER, Lane
from ds_moe_ext.strategy import Job, Keys, Plan, Strategy, register
from ds_moe_ext.strict import at_least

KEY = "ds_moe_ext.ep"


@register("ep")
@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Strategy):
    """Nothing is planned.

    Attributes:
        static_capacity: rows that each rank sends to each expert in every pass: fewer are padded
            with zeros, more are dropped. No counts travel then, and the host waits for nothing.
            Null sends the rows that there are.
    """

    static_capacity: int | None = None

    def __post_init__(self) -> None:
        at_least(f"{KEY}.static_capacity", self.static_capacity, 1)

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        return (("ep", INTER),)  # no copies

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(Plan.at_home, job.homes))

    @property
    def keys(self) -> Keys:
        return Keys(static_capacity=f"{KEY}.static_capacity")

    def remarks(self, job: Job) -> tuple[str, ...]:
        if self.static_capacity is None:
            return ()
        sent = [self.static_capacity * home.num_experts for home in job.homes]
        return (
            f"static capacity: in every pass each rank sends {self.static_capacity} rows to each "
            f"expert, at most {max(sent):,} a layer, with zeros where it has fewer; rows over it "
            "are dropped",
        )
