# SPDX-License-Identifier: Apache-2.0
"""A whole step of zebra parallelism on one rank: the tasks of ``schedule/stripes.py``, done.

Forward and backward of all layers and stripes are one pass, with the gradient of the loss known
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.zebra.coroutine import RandomNumbers
from ds_moe_ext.hosts.zebra.crossing import StripeCombine, StripeDispatch
from ds_moe_ext.hosts.zebra.passage import Here
from ds_moe_ext.hosts.zebra.serving import StripeExpert, TakesGradients
from ds_moe_ext.hosts.zebra.stripe import Stripe, StripeAttention, StripeHead
from ds_moe_ext.hosts.zebra.stripe_copies import StripeGather, StripeJoin
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule import task as ops
from ds_moe_ext.schedule.executor import Lanes
from ds_moe_ext.schedule.orders import WEIGHTS
from ds_moe_ext.schedule.program import Pass
from ds_moe_ext.schedule.stages import Binding, Crew, Stage
from ds_moe_ext.schedule.stripes import (
    ATTENTION,
    ATTENTION_SIDE,
    COMBINE,
    DISPATCH,
    EXPERT,
    EXPERT_SIDE,
    HEAD,
    JOIN,
    OFFLOADED,
    OFFLOADED_JOIN,
    OFFLOADED_WEIGHTS,
    REVISE,
    SHARED,
    part_of,
    picked,
    striped_step,
)
from ds_moe_ext.schedule.task import GATHER, Lane, Op, Schedule, Value


class Numbers(NamedTuple):
    """Of layers of each kind, as ``striped_step`` takes them."""

    offloaded: frozenset[int]
    copied: frozenset[int]
    revised: frozenset[int]

    @classmethod
    def of(cls, plans: Sequence[Plan], roles: Roles) -> Numbers:
        """By the plans of all layers."""
        cells = list(roles.attention_cells)
        kinds = (
            # The rows of a stripe may ask for copies anywhere.
            lambda plan: plan.revise or plan.target.holds_EC[:, cells].any(),
            lambda plan: plan.has_copies,
            lambda plan: plan.revise,
        )
        return cls(*(frozenset(n for n, plan in enumerate(plans) if has(plan)) for has in kinds))


@lru_cache(maxsize=64)
def schedule_of(
    num_layers: int, num_stripes: int, numbers: Numbers, side: Lane, *, is_graded: bool
) -> Schedule:
    """The part of one side; without its backward where there is none."""
    own = part_of(striped_step(num_layers, num_stripes, **numbers._asdict()), side)
    if is_graded:
        return own
    return picked(own, [i for i, task in enumerate(own.tasks) if not task.adjoint_of])


def _threads() -> ThreadPoolExecutor:
    """For as many coroutines as there are pieces."""
    return ThreadPoolExecutor(
        1024,
        "ds_moe_ext_stripe",
        initializer=torch.set_num_threads,
        initargs=(torch.get_num_threads(),),
    )


@dataclass(frozen=True, eq=False)
class Stack:
    """The layers of a model on one rank, and what runs them.

    Attributes:
        layers: in the order in which the model calls them.
        weights: of each layer's experts here, at present.
        roles: of the ranks of a group.
        device: where it computes.
        lanes: where its tasks run.
        recomputes: experts compute again in backward what lies between their rows.
        here: where the model finds out what it computes.
        threads: for the model.
    """

    layers: Sequence[RoutedExperts]
    weights: Callable[[int], tuple[Tensor, ...]]
    roles: Roles
    device: torch.device
    lanes: Lanes
    recomputes: bool = False
    here: Here = field(default_factory=Here)
    threads: ThreadPoolExecutor = field(default_factory=_threads)

    @property
    def is_attention(self) -> bool:
        """Whether this rank runs the model."""
        return self.roles.is_attention(self.layers[0].site.layout.rank)

    def run(
        self,
        num_stripes: int,
        stripes: Sequence[Stripe],
        sums: TakesGradients | None,
        *,
        counts: bool,
        control: dist.ProcessGroup | None = None,
    ) -> Schedule:
        """A step, or where nothing has a gradient its forward. Collective over the ZP group.

        Args:
            num_stripes: of every attention rank.
            stripes: this rank's; none on an expert rank.
            sums: takes the gradients of this rank's parameters; None for forward alone.
            counts: the rows count for the report.
            control: over which ranks compare what they have issued; None: they do not.

        Returns:
            What was done.
        """
        side = ATTENTION_SIDE if self.is_attention else EXPERT_SIDE
        is_graded = sums is not None
        numbers = Numbers.of([layer.site.plan for layer in self.layers], self.roles)
        schedule = schedule_of(len(self.layers), num_stripes, numbers, side, is_graded=is_graded)
        crews = [self._crew(layer, stripes, sums, counts=counts) for layer in self.layers]
        head = {HEAD: StripeHead(len(crews), stripes)}
        crews.append(Crew(head, crews[-1].observers, "the end"))
        try:
            given = (self._given(value, is_graded=is_graded) for value in schedule.inputs)
            binding = Binding.of(schedule, lambda task: crews[task.layer])
            one_pass = Pass(binding, self.lanes, keeps=is_graded)
            # Ranks of both roles draw one number of theirs.
            with RandomNumbers().own(), torch.no_grad():
                one_pass(given)
        finally:
            for stripe in stripes:
                for passage in stripe.passages:
                    passage.abandon()
        if control is not None:
            check_orders(schedule, control)
        return schedule

    def _crew(
        self,
        layer: RoutedExperts,
        stripes: Sequence[Stripe],
        sums: TakesGradients | None,
        *,
        counts: bool,
    ) -> Crew:
        """Who does the tasks of a layer: its own stages, stripe by stripe."""
        is_graded = sums is not None
        own = layer.crew_between_sides(self.device, counts=counts, is_graded=is_graded)
        order, dispatch, expert, combine = (
            own.stages[op] for op in (ops.ORDER, ops.DISPATCH, ops.EXPERT, ops.COMBINE)
        )
        has_copies = layer.site.plan.has_copies
        serving = StripeExpert(expert, sums, self.recomputes, has_copies)
        stages: dict[Op, Stage] = {
            ATTENTION: StripeAttention(layer.site.layer, stripes),
            DISPATCH: StripeDispatch(order, dispatch, self.device, is_graded, layer.rows_are_like),
            EXPERT: serving,
            OFFLOADED: serving,
            COMBINE: StripeCombine(combine),
        }
        if has_copies:
            assert layer.copies is not None, "its strategy uses what they travel by"
            gather, join = StripeGather(layer.copies, sums), StripeJoin(layer.copies, sums)
            stages |= {GATHER: gather, REVISE: gather, JOIN: join, OFFLOADED_JOIN: join}
        return replace(own, stages=stages)

    def _given(self, value: Value, *, is_graded: bool) -> tuple[Tensor, ...] | None:
        """What a pass begins with: weights of experts; the model has its own."""
        if value.kind not in (WEIGHTS, OFFLOADED_WEIGHTS):
            return None
        weights = self.weights(value.layer)
        return weights if is_graded else tuple(weight.detach() for weight in weights)


def check_orders(issued: Schedule, control: dist.ProcessGroup) -> None:
    """Collective. Raises RuntimeError on all ranks where they issued collectives in other orders,
    by which they would wait for each other in vain sooner or later."""
    told = gather_objects(
        "; ".join(f"{lane.name}: {issued.in_lane(lane)}" for lane in SHARED), control
    )
    if len(set(told)) > 1:
        raise RuntimeError(
            "ranks of a ZP group issued collectives in different orders: "
            + " | ".join(f"place {place} {text}" for place, text in enumerate(told))
        )
