"""Copies of experts for one step: under way before they are needed, their gradients summed at home.

A pass through a layer with copies has these moments, in the order of autograd::

    start   before attention            forward: launch the gather
                                        backward: wait for what came home, add it to the home's own
    join    in the program, before the  forward: wait for the gather
            experts                     backward: launch the reduction
    finish  after the program, where    forward: free the copies
            they are rematerialized     backward: have them again

Autograd runs backward in reverse order of creation, so that attention's backward lies between the
two moments of the reduction, as attention's forward lies between those of the gather (HECATE, spec
rules 34 and 35). Copies are no parameters: the host's optimizer never sees them. Shape letters: C
cells, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import Arrived, Traffic, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.moe.observe import TasksSeen
from ds_moe_ext.moe.order import LayerRoute
from ds_moe_ext.moe.slab import Slab, Weights
from ds_moe_ext.moe.wires import TARGET_WEIGHTS, WEIGHTS
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.execute import Event, Lanes, Mark, lanes_for
from ds_moe_ext.schedule.task import ATTENTION, GATHER, PARAM, Op, Span, Task, Value
from ds_moe_ext.strategies.base import Plan
from ds_moe_ext.transfer import Part, gather_rounds

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Place:
    """Where this rank stands among those that hold a layer's experts.

    Attributes:
        layer: number of the layer.
        cell: this rank's cell.
        node_C: node of each cell.
        group: the cells, in a communicator that only the parameter lane uses.
    """

    layer: int
    cell: int
    node_C: np.ndarray
    group: dist.ProcessGroup

    def part(self, held: Placement, wanted: Placement) -> Part:
        """What this cell does for the others to get their copies."""
        return gather_rounds(held, wanted, self.node_C).part_of(self.cell)


class Copies:
    """One layer's copies on this rank.

    Args:
        place: where this rank stands.
        plan: the present plan.
        like: weights of any one expert, for their shapes, type and device.
        observers: told when copies and gradients travelled.

    Attributes:
        reduces_now: whether the backward pass that runs is the last before the optimizer's step;
            gradients of copies wait for it.
        before: the copies of the layer whose backward pass follows this one's.
        is_last: no layer follows in forward: its copies are not freed between forward and backward.
        traffic: payload of this rank so far.
    """

    def __init__(
        self, place: Place, plan: Plan, like: Weights, observers: tuple[TasksSeen, ...] = ()
    ) -> None:
        self.place, self.like, self._observers = place, like, observers
        self.reduces_now: Callable[[], bool] = lambda: True
        self.before: Copies | None = None
        self.is_last = True
        self.traffic = Traffic()
        self._slab = Slab()  # of the plan's copies, kept over the micro-batches of a step
        self._is_current = False  # the weights at home have not changed since it was filled
        self._waiting: dict[int, Weights] = {}  # gradients of copies from earlier micro-batches
        self._released: list[Flight] = []  # passes whose backward is still to come
        self._outstanding: list[Event] = []  # of this step, also those that no pass came to join
        self._flight: Flight | None = None
        self.take(plan)

    def part_to(self, target: Placement) -> Part:
        """What this cell does for copies to come from the homes."""
        if target is self.plan.target:
            return self._part
        return self.place.part(self.plan.home, target)

    def part_beyond_plan(self, target: Placement) -> Part:
        """The same for the copies that the plan does not have."""
        home, planned = self.plan.home, self.plan.target
        return self.place.part(home, home.with_copies(target.holds_EC & ~planned.holds_EC))

    def by_expert(self, tensors: Sequence[T], placement: Placement) -> dict[int, tuple[T, ...]]:
        """What lies by slot, one for each weight, by the experts that a placement has here."""
        size = len(self.like)
        experts = placement.experts_of(self.place.cell).tolist()
        return {expert: tuple(tensors[i * size :][:size]) for i, expert in enumerate(experts)}

    def take(self, plan: Plan) -> None:
        """Copy by a new plan from now on. Call it between steps, on every rank."""
        self.forget()
        self.plan = plan
        self._part = self.place.part(plan.home, plan.target)

    def discard(self) -> None:
        """Other weights have been put in: what earlier micro-batches left is of no use."""
        self._waiting.clear()
        self.forget()

    def forget(self) -> None:
        """The weights at home have changed, so that the copies are stale. Call it after each step.

        Raises:
            RuntimeError: gradients of copies are still waiting for a last micro-batch.
        """
        if self._waiting:
            raise RuntimeError(
                f"layer {self.place.layer} has gradients of copied experts {sorted(self._waiting)} "
                "that were not sent home before the optimizer's step: the last micro-batch did not "
                "pass through it; let every micro-batch use every MoE layer"
            )
        self.lanes.join(self._outstanding)
        self._outstanding.clear()
        self._is_current = False
        self._released.clear()

    def submit(self, work: Callable[[], None]) -> Event:
        """Queue work in the lane of parameters."""
        event = self.lanes.submit(PARAM, work, ())
        self._outstanding.append(event)
        return event

    @property
    def lanes(self) -> Lanes:
        return lanes_for(self.like[0].device, overlaps=True)

    @property
    def is_trained(self) -> bool:
        """Whether the experts have gradients, here and on all other ranks."""
        return any(weight.requires_grad for weight in self.like)

    @property
    def is_watched(self) -> bool:
        return any(observer.is_on for observer in self._observers)

    def saw(self, op: Op, start: Mark, *, is_adjoint: bool = False) -> None:
        """Tell the observers of a task that ends now."""
        layer = self.place.layer
        reads, writes = (Value(WEIGHTS, layer),), (Value(TARGET_WEIGHTS, layer),)
        task = Task(op, layer, Span(0, 1), reads, writes)
        if is_adjoint:
            task = Task(op, layer, Span(0, 1), writes, reads, adjoint_of=(0,))
        end = self.lanes.mark()
        for observer in self._observers:
            if observer.is_on:
                observer.saw(task, start, end, self.lanes)

    def start(self, weights: Weights, *, is_training: bool) -> Weights:
        """Launch the gather, and give the weights of the experts at home as the program wants them.

        Args:
            weights: by slot, of the experts at home on this rank.
            is_training: the copies may serve later micro-batches of the step.

        Returns:
            The same, and a ticket: an empty tensor that makes every rank take part in backward.
        """
        flight = self._begun(weights, is_training)
        self._flight = flight
        ticket = torch.zeros(0, device=self.like[0].device, requires_grad=self.is_trained)
        started: Weights = _Start.apply(flight, ticket, *weights)
        return started

    @property
    def flight(self) -> Flight:
        """The pass that is under way in forward."""
        assert self._flight is not None, "no pass was started"
        return self._flight

    def taken_flight(self) -> Flight:
        """The pass that is under way in forward, which the program now takes on."""
        flight, self._flight = self.flight, None
        return flight

    def finish(self, flight: Flight, y: Tensor) -> Tensor:
        """The pass has ended in forward; free its copies until backward, where the plan says so."""
        is_recomputed = torch._C._current_graph_task_id() != -1  # its backward comes next
        if not self.plan.rematerialize or is_recomputed:
            return y
        flight.release(has_backward=y.requires_grad)
        finished: Tensor = _Finish.apply(flight, y) if y.requires_grad else y
        return finished

    def _begun(self, weights: Weights, is_training: bool) -> Flight:
        own = self.by_expert([weight.detach() for weight in weights], self.plan.home)
        if self.plan.rematerialize or not is_training:
            # Outside of training a user may have put other weights in for a while.
            flight = Flight(self, Slab(), own)
        else:
            flight = Flight(self, self._slab, own)
            if self._is_current:
                return flight
            self._slab.clear()
            self._is_current = True
        flight.gather(self._part)
        return flight

    def all_waiting(self, grads: Mapping[int, Weights]) -> dict[int, Weights]:
        """Gradients of copies with those of earlier micro-batches, which wait no longer."""
        if not self._waiting:
            return dict(grads)
        self.let_wait(grads)
        waiting, self._waiting = self._waiting, {}
        return {
            expert: tuple(total.to(weight.dtype) for total, weight in zip(totals, self.like))
            for expert, totals in waiting.items()
        }

    def let_wait(self, grads: Mapping[int, Weights]) -> None:
        """Keep gradients of copies until the last micro-batch; summed in 32 bits at least."""
        for expert, own in grads.items():
            before = self._waiting.get(expert)
            if before is None:
                self._waiting[expert] = tuple(map(_own_sum, own))
            else:
                for total, grad in zip(before, own):
                    total.add_(grad)

    def release(self, flight: Flight) -> None:
        self._released.append(flight)

    def recall_latest(self) -> None:
        """Gather again for the pass whose backward comes next."""
        if self._released:
            self._released[-1].recall()

    def recalled(self, flight: Flight) -> None:
        if flight in self._released:
            self._released.remove(flight)


def in_order(layers: Iterable[Copies]) -> None:
    """Tell the copies of a model's layers, given in forward order, which layer comes before."""
    before = None
    for copies in layers:
        copies.before, copies.is_last = before, True
        if before is not None:
            before.is_last = False
        before = copies


def _unnoticed(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Autograd does not take what is written to tensors for a change: the values are the same."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def _whole(grads: Sequence[Tensor | None], like: Weights) -> Weights:
    """Zeros for weights that an expert does not use: every copy sends all."""
    return tuple(torch.zeros_like(w) if g is None else g for g, w in zip(grads, like))


def _own_sum(grad: Tensor) -> Tensor:
    """A sum to add to: autograd may give one tensor to several, or one element many times."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)


class Flight:
    """The copies of one pass, from launch to the gradients' return.

    Args:
        copies: of the layer.
        slab: where those of the plan lie.
        own: weights of the experts at home on this rank, by expert.

    Attributes:
        target: who holds what in this pass: the plan's target, and more if the rows asked for it.
    """

    def __init__(self, copies: Copies, slab: Slab, own: Mapping[int, Weights]) -> None:
        self.copies, self.target = copies, copies.plan.target
        self._slab, self._own = slab, own
        self._added = slab  # where copies lie that the rows asked for
        self._reduction: Event | None = None
        self._arrived: Arrived | None = None
        self._begun: Mark | None = None  # when attention's backward began, if anybody asks

    # Forward.

    def gather(self, part: Part) -> None:
        """Launch the gather of the plan's copies."""
        self._launch(part, self._slab, self._slab.make_room(part.received, self.copies.like))

    def joined(self, target: Placement) -> Weights:
        """Weights of all experts that compute here in this pass, by slot. Waits for the copies.

        Args:
            target: who holds what; more than was launched if the rows asked for it.
        """
        copies = self.copies
        if target is not self.target:
            if not copies.plan.rematerialize:
                self._added = Slab()  # the next micro-batch may ask for others
            part = copies.place.part(self.target, target)
            held = {expert: self._slab[expert] for expert in self._copied(self.target)}
            room = self._added.make_room(part.received, copies.like)
            self._launch(part, self._added, room, held)
            self.target = target
        self._wait()
        return tuple(
            weight.detach()
            for expert in target.experts_of(copies.place.cell).tolist()
            for weight in self._weights(expert)
        )

    def _weights(self, expert: int) -> Weights:
        for holder in (self._own, self._slab, self._added):
            if expert in holder:
                return holder[expert]
        raise KeyError(expert)

    def release(self, *, has_backward: bool) -> None:
        """Free the copies until backward, unless it is next."""
        if has_backward and self.copies.is_last:
            return
        self._slab.release()
        if has_backward:
            self.copies.release(self)

    # Backward.

    def recall(self) -> None:
        """Launch another gather of the same copies, if they are not there."""
        if self._slab.is_released:
            part = self.copies.part_to(self.target)
            self._launch(part, self._slab, self._slab.restore(), refills=True)

    def have_again(self) -> None:
        """Wait for the copies. Called just before the layer's backward."""
        self.recall()
        self.copies.recalled(self)
        self._wait()

    def sent_home(self, grads: Weights) -> tuple[Tensor | None, ...] | None:
        """Launch the reduction; the gradients that are known here now.

        Args:
            grads: of all experts that computed here, by slot.

        Returns:
            Those of the experts at home, by slot, and of the ticket; None if none is trained.
        """
        copies = self.copies
        if not copies.is_trained:
            return None
        by_expert = copies.by_expert(grads, self.target)
        of_copies = {
            expert: _whole(by_expert[expert], copies.like) for expert in self._copied(self.target)
        }
        if copies.reduces_now() or copies.plan.rematerialize:
            self._reduce(copies.all_waiting(of_copies), copies.part_to(self.target))
        else:
            planned = self._copied(copies.plan.target)
            copies.let_wait({expert: of_copies.pop(expert) for expert in planned})
            if self.target is not copies.plan.target:
                self._reduce(of_copies, copies.part_beyond_plan(self.target))
        if copies.plan.rematerialize:
            self._slab.release()
            if copies.before is not None:
                copies.before.recall_latest()
        self._begun = copies.lanes.mark() if copies.is_watched else None
        own = (grad for expert in self._own for grad in by_expert[expert])
        return *own, None

    def come_home(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The finished gradients of the experts at home. Waits for the reduction.

        Args:
            grads: as ``sent_home`` gave them, without the ticket's.
        """
        if self._begun is not None:
            self.copies.saw(ATTENTION, self._begun, is_adjoint=True)
        if self._reduction is None:
            return list(grads)
        lanes, arrived = self.copies.lanes, self._arrived_grads()
        lanes.keep(tuple(tensor for own in arrived.values() for tensor in own))
        finished: list[Tensor] = []
        for expert, own in self.copies.by_expert(grads, self.copies.plan.home).items():
            sums = arrived.get(expert)
            # Into the sum, which is ours, and not into autograd's.
            finished += own if sums is None else [s.add_(grad) for grad, s in zip(own, sums)]
        return finished

    def _copied(self, target: Placement) -> list[int]:
        """Experts that compute here and are at home elsewhere."""
        experts: list[int] = target.experts_of(self.copies.place.cell).tolist()
        return [expert for expert in experts if expert not in self._own]

    def _launch(
        self,
        part: Part,
        slab: Slab,
        buffers: Mapping[int, Weights],
        held: Mapping[int, Weights] | None = None,
        *,
        refills: bool = False,
    ) -> None:
        copies, chunks = self.copies, {**self._own, **(held or {})}

        def work() -> None:
            lanes, group = copies.lanes, copies.place.group
            start = lanes.mark()
            tensors = tuple(tensor for own in buffers.values() for tensor in own)
            lanes.keep(tensors)
            with torch.no_grad(), _unnoticed(tensors) if refills else nullcontext():
                copies.traffic += sparse_all_gather(part, chunks, buffers, group)
            copies.saw(GATHER, start)

        slab.gathers.append(copies.submit(work))

    def _wait(self) -> None:
        lanes = self.copies.lanes
        lanes.join((*self._slab.gathers, *self._added.gathers))
        lanes.keep((*self._slab.tensors, *self._added.tensors))

    def _reduce(self, grads: Mapping[int, Weights], part: Part) -> None:
        copies = self.copies

        def work() -> None:
            lanes = copies.lanes
            start = lanes.mark()
            lanes.keep(tuple(tensor for own in grads.values() for tensor in own))
            with torch.no_grad():
                arrived = sparse_reduce_scatter(part, {**self._own, **grads}, copies.place.group)
            copies.traffic += arrived.traffic
            self._arrived = arrived
            copies.saw(GATHER, start, is_adjoint=True)

        self._reduction = copies.submit(work)

    def _arrived_grads(self) -> Mapping[int, Weights]:
        self.copies.lanes.join([self._reduction])
        assert self._arrived is not None
        arrived, self._arrived = self._arrived.grads, None
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, ticket: Tensor, *weights: Tensor) -> Weights:
        ctx.flight = flight
        return (*(weight.view_as(weight) for weight in weights), ticket.view_as(ticket))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.flight.come_home(grads[:-1])


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, y: Tensor) -> Tensor:
        ctx.flight = flight
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.flight.have_again()
        return None, grad


@dataclass(frozen=True, eq=False)
class Join:
    """Reads the weights at home and the route; writes the weights of all that compute here."""

    copies: Copies

    def forward(
        self, span: Span, weights: Weights, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        flight = self.copies.taken_flight()
        return (flight.joined(layer_route.target),), (flight,)

    def backward(self, span: Span, saved: tuple[Any, ...], grads: Weights) -> tuple[Any, ...]:
        return (saved[0].sent_home(grads),)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        return pieces[0][1]
