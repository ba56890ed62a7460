# SPDX-License-Identifier: Apache-2.0
"""Pro-Prophet's planner as a job, and FasterMoE's. A cell is one rank here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_moe_ext.commands.plan_jobs.job_inputs import (
    MOST_COST,
    check_home,
    check_loads,
    check_number,
    check_size,
    holders_of,
)
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.layer_costs import BlockPrices
from ds_moe_ext.planning.prophet_planner import BlockPlan, place_experts, shadow_experts

LEAST_RATE = 1e-9  # of bytes or rows in a second


@dataclass(frozen=True, kw_only=True)
class ReplicationJob:
    """Input of Pro-Prophet's search and of FasterMoE's shadowing, for one layer.

    Shadowing copies to all ranks and has its own end: ``num_excluded`` and ``balance`` are not for
    it; what follows ``gradient_bytes`` only counts in the seconds that it reports.

    Attributes:
        rows: that each rank routes to each expert.
        home: rank that owns each expert.
        num_excluded: ranks that get no copy of an expert; null is automatic.
        balance: the spread of computed rows that is allowed, in mean rows of an expert.
        bytes_per_row: of one trip.
        bandwidth: of all transfers, in bytes per second.
        rows_per_second: that an expert computes in forward.
        parameter_bytes: of one expert.
        gradient_bytes: of one expert.
        forward_non_expert_s: seconds of the non-MoE layer's forward.
        backward_non_expert_s: seconds of its backward.
        scheduled: copies move beside the computations.
    """

    rows: list[list[int]]
    home: list[int]
    num_excluded: int | None
    balance: float
    bytes_per_row: float
    bandwidth: float
    rows_per_second: float
    parameter_bytes: float
    gradient_bytes: float
    forward_non_expert_s: float
    backward_non_expert_s: float
    scheduled: bool

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is []; give a list of rows for each rank")
        check_size(len(self.rows), len(self.home))
        for rank, rows in enumerate(self.rows):
            check_loads(f"rows[{rank}]", rows, int)
            if len(rows) != len(self.home):
                raise ValueError(
                    f"rows[{rank}] has {len(rows)} numbers, but home has {len(self.home)} ranks; "
                    "give both one for each expert"
                )
        check_home(self.home, len(self.rows))
        for name in ("bandwidth", "rows_per_second"):
            check_number(name, vars(self)[name], float, least=LEAST_RATE, most=MOST_COST)
        for name in (
            *("bytes_per_row", "parameter_bytes", "gradient_bytes", "balance"),
            *("forward_non_expert_s", "backward_non_expert_s"),
        ):
            check_number(name, vars(self)[name], float, most=MOST_COST)

    @property
    def placement(self) -> Placement:
        return Placement.owned_by(np.array(self.home), len(self.rows))

    @property
    def prices(self) -> BlockPrices:
        return BlockPrices(
            row_s=1 / self.rows_per_second,
            row_bytes=self.bytes_per_row,
            bytes_per_s=self.bandwidth,
            weight_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            copy_bytes_per_s=self.bandwidth,
            forward_gap_s=self.forward_non_expert_s,
            backward_gap_s=self.backward_non_expert_s,
            is_scheduled=self.scheduled,
        )


@dataclass(frozen=True, kw_only=True)
class ReplicationPlan:
    """Output of Pro-Prophet's search and of FasterMoE's shadowing.

    Attributes:
        holders: ranks that compute each expert, ascending, its home among them.
        selected: experts that are copied, in the order of selection.
        time_s: seconds of the layer's experts and transfers by Pro-Prophet's model.
        time_without_s: seconds without copies.
        rows_computed: by each rank.
        rows_received: by each rank, from others.
    """

    holders: list[list[int]]
    selected: list[int]
    time_s: float
    time_without_s: float
    rows_computed: list[int]
    rows_received: list[int]

    @classmethod
    def of(cls, plan: BlockPlan) -> ReplicationPlan:
        return cls(
            holders=holders_of(plan.target),
            selected=list(plan.selected),
            time_s=plan.seconds.step_s,
            time_without_s=plan.seconds_without.step_s,
            rows_computed=plan.rows.computed_C.tolist(),
            rows_received=plan.rows.received_C.tolist(),
        )


def prophet(job: ReplicationJob) -> ReplicationPlan:
    """Pro-Prophet's Algorithm 1."""
    plan = place_experts(
        job.placement,
        np.array(job.rows),
        prices=job.prices,
        num_excluded=job.num_excluded,
        balance=job.balance,
    )
    return ReplicationPlan.of(plan)


def shadow(job: ReplicationJob) -> ReplicationPlan:
    """FasterMoE's shadowing, to compare with."""
    return ReplicationPlan.of(shadow_experts(job.placement, np.array(job.rows), prices=job.prices))
