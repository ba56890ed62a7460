# SPDX-License-Identifier: Apache-2.0
"""HeterMoE's planner as a job: which layers' experts move back to attention ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ds_moe_ext.commands.plan_jobs.job_inputs import MOST_COST, check_number
from ds_moe_ext.planning.zebra_costs import LayerTimes
from ds_moe_ext.planning.zebra_planner import VARIANTS, Chunk, ZebraGroup, assign_experts
from ds_moe_ext.strict import one_of

MOST_LAYERS = 2**10
MOST_EXPERTS = 2**20  # of a layer, and ranks


@dataclass(frozen=True, kw_only=True)
class AsymmetricJob:
    """Input of asymmetric expert assignment. Seconds may be any other unit of time.

    Attributes:
        num_experts: of a layer.
        num_layers: with experts.
        attention_ranks: number of them; it divides ``expert_ranks`` or is a multiple.
        expert_ranks: number of them; it divides ``num_experts``.
        attention_s: forward of one layer but for its experts, one micro-batch, attention rank.
        expert_s: forward of one expert rank's experts in one layer, one micro-batch.
        expert_on_attention_s: the same rows on an attention rank.
        min_moved: experts, of all layers, that the expert ranks together cannot hold.
        max_moved: experts, of all layers, that each attention rank can hold; null: any.
        variant: "corrected", or "printed" for the paper's listing as it stands.
    """

    num_experts: int
    num_layers: int
    attention_ranks: int
    expert_ranks: int
    attention_s: float
    expert_s: float
    expert_on_attention_s: float
    min_moved: int
    max_moved: int | None
    variant: str = "corrected"

    def __post_init__(self) -> None:
        for name in ("num_experts", "attention_ranks", "expert_ranks"):
            check_number(name, vars(self)[name], int, least=1, most=MOST_EXPERTS)
        check_number("num_layers", self.num_layers, int, least=1, most=MOST_LAYERS)
        for name in ("attention_s", "expert_s", "expert_on_attention_s"):
            check_number(name, vars(self)[name], float, most=MOST_COST)
        check_number("min_moved", self.min_moved, int)
        if self.max_moved is not None:
            check_number("max_moved", self.max_moved, int)
        one_of("variant", self.variant, VARIANTS)

    @property
    def group(self) -> ZebraGroup:
        return ZebraGroup(
            num_experts=self.num_experts,
            num_layers=self.num_layers,
            attention_ranks=self.attention_ranks,
            expert_ranks=self.expert_ranks,
        )

    @property
    def times(self) -> LayerTimes:
        return LayerTimes(
            attention_s=self.attention_s,
            expert_s=self.expert_s,
            expert_on_attention_s=self.expert_on_attention_s,
        )


@dataclass(frozen=True, kw_only=True)
class AsymmetricPlan:
    """Output of asymmetric expert assignment.

    Attributes:
        moved_per_expert_rank: experts that each expert rank gives up, layer by layer.
        chunk: experts move in such chunks.
    """

    moved_per_expert_rank: list[int]
    chunk: Chunk


def asymmetric_assignment(job: AsymmetricJob) -> AsymmetricPlan:
    """HeterMoE's Algorithm 1."""
    plan = assign_experts(
        job.group,
        job.times,
        min_moved=job.min_moved,
        max_moved=job.max_moved,
        squeeze=VARIANTS[job.variant],
    )
    return AsymmetricPlan(moved_per_expert_rank=list(plan.moved_L), chunk=plan.chunk)
