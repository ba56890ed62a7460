# SPDX-License-Identifier: Apache-2.0
"""Copies of experts at the service of stripes: gathered once a step, and what stripes add to them.

Gradients of copies are summed over the stripes where they compute, and go home together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_moe_ext.core.comm import sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import one_of_each
from ds_moe_ext.hosts.zebra.serving import TakesGradients
from ds_moe_ext.moe.copy_memory import Slab, Weights, whole
from ds_moe_ext.moe.layer_copies import Copies
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.executor import OnDevice, to_the_end
from ds_moe_ext.schedule.stages import Saved, Uncut
from ds_moe_ext.schedule.task import Span


@dataclass(frozen=True, eq=False)
class Held(OnDevice):
    """The copies of a layer.

    Attributes:
        target: who holds which experts by now, at home or as copies.
        copies: this rank's, by expert.
    """

    target: Placement
    copies: Mapping[int, Weights]

    def tensors(self) -> Iterable[Tensor]:
        return (tensor for copy in self.copies.values() for tensor in copy)


@dataclass(frozen=True, eq=False)
class StripeGather:
    """Reads the weights at home, and what is held and a stripe's route where rows are known; writes
    what is held then. Collective over the ZP group; a rank without a part returns at once.

    Attributes:
        copies: of the layer.
        sums: takes the gradients of its weights; None where there are none.
    """

    copies: Copies
    sums: TakesGradients | None

    def forward(self, span: Span, weights: Weights, *given: Any) -> tuple[tuple[Any, ...], Saved]:
        copies, plan = self.copies, self.copies.plan
        if given:
            held, route = given
            wanted = held.target.with_copies(route.target.holds_EC)
            part = copies.place.part(held.target, wanted)
        else:
            copies.learn_types(weights)
            held, wanted, part = Held(plan.home, {}), plan.target, copies.trips.whole
        room = Slab().make_room(part.received, copies.like)
        there = {**copies.by_expert(weights, plan.home), **held.copies}
        copies.moved(to_the_end(sparse_all_gather(part, there, room, copies.place.group)))
        return (Held(wanted, {**held.copies, **room}),), (weights, wanted)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, Saved]]) -> Saved:
        """That of the last one, which holds what all have gathered."""
        return pieces[-1][1]

    def backward(self, span: Span, saved: Saved, *told: Any) -> tuple[Any, ...]:
        """Sum the gradients of all copies at home."""
        copies, (weights, target) = self.copies, saved
        if not copies.is_trained:
            return (None,)
        own, waiting = copies.by_expert(weights, copies.plan.home), copies.all_waiting({})
        copies.lanes.keep(one_of_each(waiting.values()))
        part, place = copies.trips.part_to(target), copies.place
        reduction = sparse_reduce_scatter(
            part, {**own, **waiting}, place.group, in_float32=place.in_float32
        )
        arrived = to_the_end(reduction)
        copies.moved(arrived.traffic)
        for expert, grads in arrived.grads.items():
            add_grads(self.sums, own[expert], grads)
        return (None,)


@dataclass(frozen=True, eq=False)
class StripeJoin(Uncut):
    """Reads the weights at home, what is held and the route of a stripe; writes the weights of all
    that compute here, by slot.

    Attributes:
        copies: of the layer.
        sums: as of ``StripeGather``.
    """

    copies: Copies
    sums: TakesGradients | None

    def forward(
        self, span: Span, weights: Weights, held: Held, route: LayerRoute
    ) -> tuple[tuple[Any, ...], Saved]:
        copies = self.copies
        there = {**copies.by_expert(weights, copies.plan.home), **held.copies}
        experts = route.target.experts_of(copies.place.cell).tolist()
        # A rank that is home to none of them has gradients, too.
        learns, some = self.sums is not None, copies.some_are_trained
        joined = tuple(
            weight.detach().requires_grad_(learns and (some or like.requires_grad))
            for expert in experts
            for weight, like in zip(there[expert], copies.like)
        )
        return (joined,), (weights, route.target)

    def backward(self, span: Span, saved: Saved, grads: Weights) -> tuple[Any, ...]:
        copies, (weights, target) = self.copies, saved
        own = copies.by_expert(weights, copies.plan.home)
        for expert, found in copies.by_expert(grads, target).items() if copies.is_trained else ():
            if expert in own:
                add_grads(self.sums, own[expert], found)
            else:
                copies.let_wait({expert: whole(found, copies.like)})
        return None, ()  # not None: every rank that computes takes part in the way home


def add_grads(
    sums: TakesGradients | None, parameters: Weights, grads: Iterable[Tensor | None]
) -> None:
    """Those of an expert's weights; frozen ones have none."""
    assert sums is not None
    for parameter, grad in zip(parameters, grads):
        if grad is not None and parameter.requires_grad:
            sums.add(parameter, grad)
