# SPDX-License-Identifier: Apache-2.0
"""Strategies from outside the package, as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ds_moe_ext.core.layout import Roles, Striping
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica
from ds_moe_ext.moe.route import Restore, weighing_grads
from ds_moe_ext.planning.strategy import (
    Choice,
    CostGroup,
    Destination,
    Intervals,
    Job,
    LayerContext,
    Plan,
    Strategy,
)
from ds_moe_ext.schedule import orders
from ds_moe_ext.schedule.orders import stage_major
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.task import RESTORE, ChunkRange, Op, Schedule
from ds_moe_ext.strategies.auto import USUAL, Auto
from ds_moe_ext.strategies.zebra import asymmetric_owner


@dataclass(frozen=True, kw_only=True)
class Chunked(Strategy):
    """Expert parallelism over chunks, with a degree for each direction."""

    forward: int
    backward: int

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(
            Plan(owner, owner, LocalElseOwner(owner, owner), self.forward, self.backward)
            for owner in job.owners
        )

    def schedules(self, layer_context: LayerContext, *, gated: bool) -> tuple[Schedule, Schedule]:
        plan, layer = layer_context.plan, layer_context.layer

        def cut(degree: int) -> Schedule:
            tasks = orders.routed_tasks(layer, num_chunks=plan.num_chunks, degree=degree)
            ordered = stage_major(tasks, orders.ROUTED_OPS)
            return orders.layer_schedule(ordered, layer, num_chunks=plan.num_chunks, gated=gated)

        forward = cut(plan.forward_degree)
        if plan.forward_degree == plan.backward_degree:
            return forward, forward.reversed()
        return forward, forward.backward_cut_as(cut(plan.backward_degree))


@dataclass(frozen=True, kw_only=True)
class Copied(Strategy):
    """Any replicas that a test asks for, in chunks if it likes."""

    target: Placement | None = None
    forward: int = 1
    backward: int = 1
    rematerialize: bool = False
    revise: Callable[[np.ndarray], Destination] | None = None
    goes_to_owner: bool = False  # what has no copy at its sender, as in Pro-Prophet

    def plan(self, job: Job) -> tuple[Plan, ...]:
        (owner,) = job.owners
        target = self.target or owner
        plan = Plan(
            owner,
            target,
            LocalElseOwner(owner, target)
            if self.goes_to_owner
            else NearestReplica(target, job.node_C),
            self.forward,
            self.backward,
            self.rematerialize,
            self.revise,
        )
        return (plan,)


@dataclass(frozen=True)
class SineRestore:
    """The sine of what a token gets."""

    common: Restore = field(default_factory=Restore)

    def forward(
        self, chunk_range: ChunkRange, *reads: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (y_TD,), saved = self.common.forward(chunk_range, *reads)
        return (y_TD.sin(),), saved

    def backward(self, chunk_range: ChunkRange, saved: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        returned_ND, score_TK, layer_route = saved
        route = layer_route.on(chunk_range)
        y_TD = route.sum_by_token(returned_ND, score_TK)
        return weighing_grads(route, returned_ND, score_TK, grad_TD * y_TD.cos())

    def recut(self, chunk_range: ChunkRange, pieces: Any) -> tuple[Any, ...]:
        return self.common.recut(chunk_range, pieces)


@dataclass(frozen=True, kw_only=True)
class Sine(Strategy):
    """Experts at their owners, by a stage of its own; and what it was reported as the run
    started."""

    micro_batch: int | None = None
    num_devices: int = 0

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Sine:
        return replace(self, micro_batch=micro_batch, num_devices=len(devices()))

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(Plan.at_owner, job.owners))

    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        return {RESTORE: SineRestore()}


@dataclass(frozen=True, kw_only=True)
class TwoRoles(Strategy):
    """Attention ranks and expert ranks, and replicas of the busiest experts on either."""

    attention_size: int
    expert_size: int
    moved: int = 0
    on_attention: bool = False
    revises: bool = False

    @property
    def roles(self) -> Roles:
        return Roles.first(self.attention_size, self.expert_size)

    @property
    def striping(self) -> Striping:
        return Striping(2)

    @property
    def has_uneven_owners(self) -> bool:
        return True

    def first_owners(
        self, num_experts: Sequence[int], cost_groups: Iterable[CostGroup], num_ep_ranks: int
    ) -> tuple[Placement, ...]:
        moved = (self.moved, *(0 for _ in num_experts[1:]))
        return tuple(asymmetric_owner(n, self.roles, o) for n, o in zip(num_experts, moved))

    def intervals(self) -> Intervals:
        return Intervals(plan_every=1)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(self._plan_of(job, *layer) for layer in zip(job.owners, job.rows))

    def _plan_of(self, job: Job, owner: Placement, rows_CE: np.ndarray) -> Plan:
        ep_ranks = np.ones(owner.num_ep_ranks, dtype=bool)
        ep_ranks[list(self.roles.attention_ep_ranks)] = self.on_attention
        target, share = with_busiest(owner, ep_ranks, job.node_C, rows_CE)
        more = partial(with_busiest, target, ep_ranks, job.node_C)
        return Plan(owner, target, share, revise=more if self.revises else None)


def with_busiest(
    target: Placement, ep_ranks: np.ndarray, node_C: np.ndarray, rows_CE: np.ndarray
) -> Destination:
    """The busiest expert computes on all these EP ranks."""
    replicas_EC = np.zeros_like(target.holds_EC)
    replicas_EC[rows_CE.sum(axis=0).argmax()] = ep_ranks
    more = target.with_replicas(replicas_EC)
    return Destination(more, NearestReplica(more, node_C))


@dataclass(frozen=True, kw_only=True)
class Alternating(Auto):
    """Another strategy in each step, whatever it costs."""

    def _chosen(self, job: Job) -> tuple[Choice, tuple[Plan, ...]]:
        step = 0 if job.past is None else job.past.step
        choice = Choice(USUAL[-1 - step % len(USUAL)], 1.0, "its turn")
        return choice, self.strategies[choice.name].plan(job)
