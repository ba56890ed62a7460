"""A whole step of zebra parallelism on one rank: the tasks of ``schedule/stripes.py``, done.

Forward and backward of all layers and stripes are one pass, with the gradient of the loss known
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.moe.dispatch import Combine, Dispatch, Wire
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.order import Order, Seat
from ds_moe_ext.roles import Roles
from ds_moe_ext.schedule.executor import Lanes
from ds_moe_ext.schedule.stripes import (
    A2E,
    ATTENTION,
    ATTENTION_SIDE,
    COMBINE,
    DISPATCH,
    E2A,
    EXPERT,
    EXPERT_SIDE,
    HEAD,
    OFFLOADED,
    part_of,
    picked,
    striped_step,
)
from ds_moe_ext.schedule.task import Lane, Op, Schedule
from ds_moe_ext.strategy import Destination
from ds_moe_ext.zebra.crossing import CombineWork, DispatchWork
from ds_moe_ext.zebra.passage import Here
from ds_moe_ext.zebra.round_trip import Done, Work, round_trip
from ds_moe_ext.zebra.serving import ExpertWork, TakesGradients
from ds_moe_ext.zebra.stripe import AttentionWork, HeadWork, Stripe


@cache
def schedule_of(
    num_layers: int, num_stripes: int, offloaded: frozenset[int], side: Lane, is_graded: bool
) -> Schedule:
    """The part of one side; without its backward where there is none."""
    own = part_of(striped_step(num_layers, num_stripes, offloaded=offloaded), side)
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
    ) -> Done:
        """A step, or where nothing has a gradient its forward. Collective over the ZP group.

        Args:
            num_stripes: of every attention rank.
            stripes: this rank's; none on an expert rank.
            sums: takes the gradients of this rank's parameters; None for forward alone.
            counts: the rows count for the report.

        Returns:
            What was done.
        """
        side = ATTENTION_SIDE if self.is_attention else EXPERT_SIDE
        schedule = schedule_of(
            len(self.layers), num_stripes, self._offloaded, side, sums is not None
        )
        layout = self.layers[0].site.layout
        a2e, e2a = (Wire.between(layout, lane, self.device) for lane in (A2E, E2A))
        group = layout.group("ep", A2E)
        orders = [self._order(layer, counts) for layer in self.layers]
        experts = [Expert(layer.function) for layer in self.layers]
        expert_work = ExpertWork(experts, self.weights, sums, self.recomputes)
        works: dict[Op, Work] = {
            DISPATCH: DispatchWork(orders, Dispatch(a2e, e2a), group, self.device),
            COMBINE: CombineWork(Combine(e2a, a2e)),
            EXPERT: expert_work,
            OFFLOADED: expert_work,
            ATTENTION: AttentionWork(stripes),
            HEAD: HeadWork(stripes),
        }
        seen = [layer.tasks for layer in self.layers]
        try:
            names = [layer.name for layer in self.layers]
            return round_trip(schedule, works, self.lanes, seen, names)
        finally:
            for stripe in stripes:
                for passage in stripe.passages:
                    passage.abandon()

    @property
    def _offloaded(self) -> frozenset[int]:
        """Layers some of whose experts attention ranks hold."""
        cells = list(self.roles.attention_cells)
        homes = (layer.site.plan.home for layer in self.layers)
        return frozenset(n for n, home in enumerate(homes) if home.holds_EC[:, cells].any())

    def _order(self, layer: RoutedExperts, counts: bool) -> Order:
        plan, layout = layer.site.plan, layer.site.layout
        return Order(
            destination=Destination(plan.target, plan.share),
            seat=Seat(layout.index("ep")),
            group=None,
            capacity_factor=None,
            gate_may_drop=True,
            on_rows=layer.rows.add if counts else _uncounted,
        )


def _uncounted(*rows: Any) -> None:
    return None
