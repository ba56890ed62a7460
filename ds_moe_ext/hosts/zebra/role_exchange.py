# SPDX-License-Identifier: Apache-2.0
"""The tasks of a striped step, done: what attention ranks compute, rows between them and expert
ranks, experts that serve, and replicas of experts. See ``schedule/stripes.py``.

What is done is done by the stages of the layer; here they are laid to the tasks of a step, where a
rank may have no tokens, or no experts. Replicas are gathered once a step, or again for backward
where they are freed in between; gradients of replicas are summed over the stripes where they
compute, and go to the owner together. Shape letters: T tokens, N rows sent, R rows received, D
model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.core.comm import sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import one_of_each
from ds_moe_ext.hosts.zebra.stripe_pass import (
    AddGrad,
    Answer,
    Grads,
    Question,
    RandomState,
    Seed,
    Stripe,
)
from ds_moe_ext.moe.replica_memory import ReplicaMemory, Weights
from ds_moe_ext.moe.replica_memory import whole as whole_grads
from ds_moe_ext.moe.replicas import Replicas
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.schedule.executor import OnDevice, streams_for, to_the_end
from ds_moe_ext.schedule.stages import Saved, Stage, Uncut
from ds_moe_ext.schedule.task import ChunkRange

STRIPE = ChunkRange(0, 1)  # of a stripe all tokens travel at once

Written = tuple[tuple[Any, ...], Saved]


@dataclass(eq=False)
class GradientSums:
    """Gradients of parameters, summed over the stripes in their order."""

    _sums: dict[Tensor, Tensor] = field(default_factory=dict)
    _own: set[Tensor] = field(default_factory=set)  # whose sum is a buffer of ours

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """One more."""
        if parameter not in self._sums:
            self._sums[parameter] = grad
        elif parameter in self._own:
            self._sums[parameter] += grad
        else:
            first = self._sums[parameter]
            streams_for(first.device, overlaps=True).keep((first,))  # another may have made it
            self._sums[parameter] = first + grad
            self._own.add(parameter)

    def has(self, parameter: Tensor) -> bool:
        """Whether there is one."""
        return parameter in self._sums

    def reach(self, parameters: Iterable[Tensor]) -> None:
        """Turn those of weights that are computed from parameters, as with adapters, into
        theirs."""
        if computed := [weight for weight in self._sums if weight.grad_fn is not None]:
            some = [parameter for parameter in parameters if parameter.requires_grad]
            sums = [self._sums.pop(weight) for weight in computed]
            grads = torch.autograd.grad(computed, some, sums, allow_unused=True)
            for parameter, grad in zip(some, grads):
                if grad is not None:
                    self.add(parameter, grad)

    def take(self, parameter: Tensor, factor: Tensor) -> Tensor | None:
        """The sum times a scalar, rounded once; None where there is none. It is forgotten."""
        total = self._sums.pop(parameter, None)
        if total is None:
            return None
        wide = torch.promote_types(total.dtype, torch.float32)
        if total.dtype == wide and parameter in self._own:
            return total.mul_(factor.to(wide))
        return (total.to(wide) * factor.to(wide)).to(total.dtype)


# Attention ranks.


@dataclass(frozen=True, eq=False)
class StripeAttention(Uncut):
    """All that the model computes between two layers' experts; ``layer`` is the second one."""

    layer: int
    stripes: Sequence[Stripe]  # of this rank

    def forward(self, chunk_range: ChunkRange, _: Any, returned: Any, *rest: Any) -> Written:
        question = self.stripes[chunk_range.start].forward(self.layer, returned)
        return (None, question), ()

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, _: Any, grads: Grads
    ) -> tuple[Any, ...]:
        return None, self.stripes[chunk_range.start].backward(self.layer, grads)


@dataclass(frozen=True, eq=False)
class StripeHead(Uncut):
    """What follows the last layer's experts, and the gradients of the losses."""

    num_layers: int
    stripes: Sequence[Stripe]  # of this rank

    def forward(self, chunk_range: ChunkRange, _: Any, returned: Any, *rest: Any) -> Written:
        stripe = self.stripes[chunk_range.start]
        stripe.finish(self.num_layers, returned)
        return (tuple(stripe.seeds),), ()

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, seeds: Sequence[Seed]
    ) -> tuple[Any, ...]:
        return None, self.stripes[chunk_range.start].turn_around(self.num_layers - 1, seeds)


# Rows there and back.


@dataclass(frozen=True, eq=False)
class StripeDispatch(Uncut):
    """Rows to the experts; before, all ranks learn how many. Reads a ``Question`` or nothing."""

    order: Stage  # of the layer
    dispatch: Stage  # likewise
    device: torch.device  # of the rows
    is_graded: bool  # gradients will come
    notify: Callable[[Tensor], None]  # what rows are like
    sends_once: bool  # each token's row once to an EP rank or node, where its scores go, too

    def forward(self, chunk_range: ChunkRange, question: Question | None) -> Written:
        if question is None:
            nothing = torch.zeros(0, 1, dtype=torch.int64, device=self.device)
            own, x_TD = (nothing, nothing), None
        else:
            own, x_TD = (question.expert_TK, question.score_TK), question.x_TD
        asked = own if self.sends_once else own[:1]
        (route, *scores), counted = self.order.forward(STRIPE, *asked, x_TD)
        x_TD = route.none_0D if x_TD is None else x_TD
        self.notify(x_TD)
        (arrived_RD,), saved = self.dispatch.forward(STRIPE, x_TD, route)
        # Whether the other side wants gradients nobody knows here; it takes them in any case.
        return (arrived_RD.requires_grad_(self.is_graded), *scores, route), (counted, saved)

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, grad_RD: Tensor | None, *rest: Any
    ) -> tuple[Any, ...]:
        (*grad_scores, route), (counted, sent) = rest, saved
        (grad_TD,) = self.dispatch.backward(STRIPE, sent, _or_none(grad_RD, route))
        if not grad_scores:
            return ((grad_TD, None),)
        return ((grad_TD, *self.order.backward(STRIPE, counted, *grad_scores)),)


@dataclass(frozen=True, eq=False)
class StripeCombine(Uncut):
    """Rows of experts back to their tokens, with how they were sent: an ``Answer``. Rows that were
    sent once are weighed at the experts, and added up."""

    combine: Stage
    sends_once: bool

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Written:
        *computed, route = reads
        if self.sends_once:
            score_R = computed.pop()
            own_RD = _or_none(next((rows for rows in computed if rows is not None), None), route)
            (returned_UD,), saved = self.combine.forward(STRIPE, own_RD, score_R, route)
            y_TD = route.on(STRIPE).sum_by_token(returned_UD)
            return (Answer(y_TD, None),), (len(computed), *saved)
        own_RD = next((rows for rows in computed if rows is not None), None)
        (returned_ND,), saved = self.combine.forward(STRIPE, _or_none(own_RD, route), route)
        own = route.on(STRIPE)
        if own.is_full:
            _ = own.row_N  # made in this stream, in which the adjoint of the dispatch reads it
        return (Answer(returned_ND, own),), (len(computed), *saved)

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, grad_ND: Tensor | None, route: LayerRoute
    ) -> tuple[Any, ...]:
        given: Any = _or_none(grad_ND, route)
        if self.sends_once:
            given = route.on(STRIPE).of_tokens(given)
        grad_RD, *grad_scores = self.combine.backward(STRIPE, saved[1:], given)
        return *(grad_RD,) * int(saved[0]), *grad_scores


def _or_none(rows: Tensor | None, route: LayerRoute) -> Tensor | None:
    """Rows that the other side has are none here."""
    return route.none_0D if rows is None else rows


# Experts.


@dataclass(frozen=True, eq=False)
class StripeExpert(Uncut):
    """Rows of a stripe through the experts of this rank."""

    expert: Stage  # of the layer
    add_grad: AddGrad | None  # takes the gradients of its weights; None where there are none
    recomputes: bool = False  # forward keeps its rows alone, and backward computes the rest again
    # weights are joined from owners and replicas; so their gradients go there
    is_joined: bool = False

    def forward(
        self,
        chunk_range: ChunkRange,
        rows_RD: Tensor,
        route: LayerRoute,
        weights: tuple[Tensor, ...],
    ) -> Written:
        if self.add_grad is None or not self.recomputes:
            written, saved = self.expert.forward(STRIPE, rows_RD, route, weights)
            return written, (weights, *saved)
        state, frozen = RandomState.now(), tuple(weight.detach() for weight in weights)
        written, _ = self.expert.forward(STRIPE, rows_RD.detach(), route, frozen)
        return written, (weights, rows_RD, route, state)

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, grad_RD: Tensor, *recalled: Any
    ) -> tuple[Any, ...]:
        weights, kept = saved[0], saved[1:]
        if self.recomputes:
            rows_RD, route, state = kept
            with state.again():
                _, kept = self.expert.forward(STRIPE, rows_RD, route, weights)
        grad_rows_RD, grads = self.expert.backward(STRIPE, kept, grad_RD)
        if self.is_joined:
            return grad_rows_RD, grads
        assert self.add_grad is not None
        for weight, grad in zip(weights, grads):
            if grad is not None:
                self.add_grad(weight, grad)
        return (grad_rows_RD,)


# Replicas of experts.


@dataclass(frozen=True, eq=False)
class Held(OnDevice):
    """The replicas of a layer: who holds which experts by now, at the owner or as replicas; and the
    replicas of this rank, by expert."""

    target: Placement
    replicas: Mapping[int, Weights]
    memory: ReplicaMemory  # where these lie, and those that later stripes ask for

    def tensors(self) -> Iterable[Tensor]:
        return (tensor for copy in self.replicas.values() for tensor in copy)


@dataclass(frozen=True, eq=False)
class StripeGather:
    """Reads the weights at their owners, and what is held and a stripe's route where rows are
    known; writes what is held then. Collective over the ZP group; a rank without a part returns at
    once."""

    replicas: Replicas  # of the layer
    add_grad: AddGrad | None  # takes the gradients of its weights; None where there are none

    def forward(self, chunk_range: ChunkRange, weights: Weights, *given: Any) -> Written:
        replicas, plan = self.replicas, self.replicas.plan
        if given:
            held, route = given
            wanted = held.target.with_replicas(route.target.holds_EC)
            part = replicas.coordinates.part(held.target, wanted)
        else:
            replicas.learn_types(weights)
            held = Held(plan.owner, {}, ReplicaMemory())
            wanted, part = plan.target, replicas.transfers.whole
        room = held.memory.make_room(part.received, replicas.like)
        there = {**replicas.by_expert(weights, plan.owner), **held.replicas}
        replicas.moved(to_the_end(sparse_all_gather(part, there, room, replicas.coordinates.group)))
        return (Held(wanted, {**held.replicas, **room}, held.memory),), (weights, wanted)

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        """That of the last one, which holds what all have gathered."""
        return pieces[-1][1]

    def backward(self, chunk_range: ChunkRange, saved: Saved, *reported: Any) -> tuple[Any, ...]:
        """Sum the gradients of all replicas at the owner."""
        replicas, (weights, target) = self.replicas, saved
        if not replicas.is_trained:
            return (None,)
        own, waiting = replicas.by_expert(weights, replicas.plan.owner), replicas.all_waiting({})
        replicas.streams.keep(one_of_each(waiting.values()))
        part, coordinates = replicas.transfers.part_to(target), replicas.coordinates
        reduction = sparse_reduce_scatter(
            part, {**own, **waiting}, coordinates.group, in_float32=coordinates.in_float32
        )
        arrived = to_the_end(reduction)
        replicas.moved(arrived.traffic)
        for expert, grads in arrived.grads.items():
            _add_grads(self.add_grad, own[expert], grads)
        return (None,)


@dataclass(frozen=True, eq=False)
class StripeFree(Uncut):
    """Frees the replicas of a layer, when it has computed with them. Its adjoint reads the weights
    at their owners and gathers the same replicas where they were; collective over the ZP group."""

    replicas: Replicas  # of the layer

    def forward(self, chunk_range: ChunkRange, held: Held, *used: Any) -> Written:
        held.memory.release()
        return (), (held,)

    def backward(self, chunk_range: ChunkRange, saved: Saved, weights: Weights) -> tuple[Any, ...]:
        replicas, (held,) = self.replicas, saved
        part, room = replicas.transfers.part_to(held.target), held.memory.restore()
        own, group = replicas.by_expert(weights, replicas.plan.owner), replicas.coordinates.group
        replicas.moved(to_the_end(sparse_all_gather(part, own, room, group)))
        return (None,)


@dataclass(frozen=True, eq=False)
class StripeJoin(Uncut):
    """Reads the weights at their owners, what is held and the route of a stripe; writes the weights
    of all that compute here, by slot."""

    replicas: Replicas  # of the layer
    add_grad: AddGrad | None  # as of ``StripeGather``

    def forward(
        self, chunk_range: ChunkRange, weights: Weights, held: Held, route: LayerRoute
    ) -> Written:
        replicas = self.replicas
        there = {**replicas.by_expert(weights, replicas.plan.owner), **held.replicas}
        experts = route.target.experts_of(replicas.coordinates.ep_rank).tolist()
        # A rank that owns none of them has gradients, too.
        learns, some = self.add_grad is not None, replicas.some_are_trained
        joined = tuple(
            weight.detach().requires_grad_(learns and (some or like.requires_grad))
            for expert in experts
            for weight, like in zip(there[expert], replicas.like)
        )
        return (joined,), (weights, route.target)

    def backward(self, chunk_range: ChunkRange, saved: Saved, grads: Weights) -> tuple[Any, ...]:
        replicas, (weights, target) = self.replicas, saved
        own = replicas.by_expert(weights, replicas.plan.owner)
        for expert, found in (
            replicas.by_expert(grads, target).items() if replicas.is_trained else ()
        ):
            if expert in own:
                _add_grads(self.add_grad, own[expert], found)
            else:
                replicas.let_wait({expert: whole_grads(found, replicas.like)})
        return None, ()  # not None: every rank that computes takes part in the way to the owner


def _add_grads(
    add_grad: AddGrad | None, parameters: Weights, grads: Iterable[Tensor | None]
) -> None:
    """Those of an expert's weights; frozen ones have none."""
    assert add_grad is not None
    for parameter, grad in zip(parameters, grads):
        if grad is not None and parameter.requires_grad:
            add_grad(parameter, grad)
