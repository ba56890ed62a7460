"""Copies of experts for one step: under way before they are needed, their gradients summed at home.

A *flight* is the copies of one pass. They travel in pieces, each launched when the strategy says
so; whoever needs them launches what is left and waits. Copies are no parameters: the host's
optimizer never sees them. ``join`` has the moments at which a pass meets its flight. Shape letters:
C cells, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ds_moe_ext.comm import Traffic, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.moe.copies.slab import Slab, Weights
from ds_moe_ext.moe.copies.trips import Piece, Place, Trips
from ds_moe_ext.moe.observation import TasksSeen, tell
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.executor import Event, Lanes, Mark, lanes_for
from ds_moe_ext.schedule.task import GATHER, PARAM, Op, Span, Task, Value
from ds_moe_ext.schedule.wires import TARGET_WEIGHTS, WEIGHTS
from ds_moe_ext.strategy import Plan
from ds_moe_ext.transfer import Part

T = TypeVar("T")


class Copies:
    """One layer's copies on this rank.

    Args:
        place: where this rank stands.
        plan: the present plan.
        like: weights of any one expert, for their shapes, type and device.
        observers: told when copies and gradients travelled.

    Attributes:
        is_last_pass: whether the pass that runs is the last before the optimizer's step; gradients
            of copies wait for it.
        before: the copies of the layer whose backward pass follows this one's.
        after: those of the layer whose forward pass follows. Where there is none, copies are not
            freed between forward and backward.
        coming: the pass that has begun in forward, until its program takes it on.
        returning: the pass whose gradients are not all on their way home.
        plan: the present plan.
        trips: its transfers.
        traffic: payload of this rank so far.
    """

    def __init__(
        self, place: Place, plan: Plan, like: Weights, observers: tuple[TasksSeen, ...] = ()
    ) -> None:
        self.place, self.like, self._observers = place, like, observers
        self.is_last_pass: Callable[[], bool] = lambda: True
        self.before: Copies | None = None
        self.after: Copies | None = None
        self.coming: Flight | None = None
        self.returning: Flight | None = None
        self.traffic = Traffic()
        self._slab = Slab()  # of the plan's copies, kept over the micro-batches of a step
        self._is_current = False  # the weights at home have not changed since it began to be filled
        self._to_gather: deque[Piece] = deque()  # what it still lacks
        self._waiting: dict[int, Weights] = {}  # gradients of copies from earlier micro-batches
        self._released: list[Flight] = []  # passes whose backward is still to come
        self._returns: Flight | None = None  # the pass whose backward began last
        self._outstanding: list[Event] = []  # of this step, also those that no pass came to join
        self.plan = plan
        self.trips = self._prepared = Trips.of(place, plan)

    def by_expert(self, tensors: Sequence[T], placement: Placement) -> dict[int, tuple[T, ...]]:
        """What lies by slot, one for each weight, by the experts that a placement has here."""
        size = len(self.like)
        experts = placement.experts_of(self.place.cell).tolist()
        return {expert: tuple(tensors[i * size :][:size]) for i, expert in enumerate(experts)}

    def take(self, plan: Plan) -> None:
        """Copy by a new plan from now on. Call it between steps, on every rank."""
        self.forget()
        self.prepare(plan)
        self.plan, self.trips = plan, self._prepared

    def prepare(self, plan: Plan) -> None:
        """Work out what a plan asks for, so that it is soon taken."""
        if not self._prepared.serve(plan):
            self._prepared = Trips.of(self.place, plan)

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
        self.coming = self.returning = self._returns = None  # of a pass that failed

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

    def saw(self, op: Op, start: Mark, *, is_adjoint: bool = False, piece: int = 0) -> None:
        """Tell the observers of a task that ends now."""
        layer = self.place.layer
        reads, writes = (Value(WEIGHTS, layer),), (Value(TARGET_WEIGHTS, layer),)
        span = Span(piece, piece + 1)
        task = Task(op, layer, span, reads, writes)
        if is_adjoint:
            task = Task(op, layer, span, writes, reads, adjoint_of=(0,))
        tell(self._observers, task, start, self.lanes)

    def begin(self, weights: Weights, *, is_training: bool) -> Flight:
        """Begin a pass; its gather is launched piece by piece.

        Args:
            weights: by slot, of the experts at home on this rank.
            is_training: the copies may serve later micro-batches of the step.
        """
        own = self.by_expert([weight.detach() for weight in weights], self.plan.home)
        if self.plan.rematerialize or not is_training:
            # Outside of training a user may have put other weights in for a while.
            self.coming = Flight(self, Slab(), own, deque(self.trips.gathers))
            return self.coming
        if not self._is_current:
            self._slab.clear()
            self._to_gather = deque(self.trips.gathers)
            self._is_current = True
        self.coming = Flight(self, self._slab, own, self._to_gather)
        return self.coming

    def taken(self) -> Flight:
        """The pass that has begun in forward, which the program now takes on."""
        assert self.coming is not None, "no pass has begun"
        flight, self.coming = self.coming, None
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

    def launch_following(self) -> None:
        """Launch the next piece of the gather for the layer after this one."""
        if self.after is not None and self.after.coming is not None:
            self.after.coming.launch()

    def send_home(self, piece: int) -> None:
        """Send gradients of copies home: the first piece of this layer's, the second one of those
        of the layer after it."""
        copies = self.after if piece else self
        if copies is not None and copies.returning is not None:
            copies.returning.send()

    def recall_before(self) -> None:
        """Gather again for the layer before this one, if its copies were freed: those of the same
        pass, as a pipeline has several under way; of the latest where this layer's were kept."""
        released = [] if self.before is None else self.before._released
        if released:
            same = None if self._returns is None else self._returns.preceding
            (same if same in released else released[-1]).recall()

    def release(self, flight: Flight) -> None:
        self._released.append(flight)

    def recalled(self, flight: Flight) -> None:
        self._returns = flight
        if flight in self._released:
            self._released.remove(flight)


def in_order(layers: Iterable[Copies]) -> None:
    """Tell the copies of a model's layers, given in forward order, which come before and after."""
    before = None
    for copies in layers:
        copies.before, copies.after = before, None
        if before is not None:
            before.after = copies
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
        to_gather: what has to travel, piece by piece; the flight takes from it what it launches.

    Attributes:
        target: who holds what in this pass: the plan's target, and more if the rows asked for it.
        preceding: of the layer before, in the same pass, if its copies were freed.
    """

    def __init__(
        self, copies: Copies, slab: Slab, own: Mapping[int, Weights], to_gather: deque[Piece]
    ) -> None:
        self.copies, self.target = copies, copies.plan.target
        self._slab, self._own = slab, own
        self._to_gather = to_gather
        self._added = slab  # where copies lie that the rows asked for
        self._to_send: deque[tuple[Piece, Mapping[int, Weights]]] = deque()
        self._reductions: list[Event] = []
        self._arrived: dict[int, Weights] = {}
        self.preceding: Flight | None = None

    # Forward.

    def launch(self) -> None:
        """Launch the next piece of the gather, if one is left."""
        if self._to_gather:
            piece = self._to_gather.popleft()
            room = self._slab.make_room(piece.part.received, self.copies.like)
            self._launch(piece.part, self._slab, room, number=piece.number)

    def launch_rest(self) -> None:
        """Launch all that is left of the gather."""
        while self._to_gather:
            self.launch()

    def joined(self, target: Placement) -> Weights:
        """Weights of all experts that compute here in this pass, by slot. Waits for the copies.

        Args:
            target: who holds what; more than was launched if the rows asked for it.
        """
        self.launch_rest()
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
        before = self.copies.before
        if before is not None and before._released:
            self.preceding = before._released[-1]
        if has_backward and self.copies.after is None:
            return
        self._slab.release()
        if has_backward:
            self.copies.release(self)

    # Backward.

    def recall(self) -> None:
        """Launch another gather of the same copies, if they are not there."""
        if self._slab.is_released:
            part = self.copies.trips.part_to(self.target)
            self._launch(part, self._slab, self._slab.restore(), refills=True)

    def have_again(self) -> None:
        """Wait for the copies. Called just before the layer's backward."""
        self.recall()
        self.copies.recalled(self)
        self._wait()

    def collect(self, grads: Weights) -> tuple[Tensor | None, ...] | None:
        """Have gradients of the copies ready to be sent; those that are known here now.

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
        if copies.is_last_pass() or copies.plan.rematerialize:
            waiting = copies.all_waiting(of_copies)
            for piece in copies.trips.pieces_home(self.target):
                some = {expert: own for expert, own in waiting.items() if expert in piece.experts}
                self._to_send.append((piece, some))
        else:
            planned = self._copied(copies.plan.target)
            copies.let_wait({expert: of_copies.pop(expert) for expert in planned})
            if self.target is not copies.plan.target:
                part = copies.trips.part_beyond_plan(self.target)
                self._to_send.append((Piece(part, of_copies), of_copies))
        copies.returning = self
        if copies.plan.rematerialize:
            self._slab.release()
        own = (grad for expert in self._own for grad in by_expert[expert])
        return *own, None

    def send(self) -> None:
        """Send the next piece of the gradients home, if one is left."""
        if self._to_send:
            piece, grads = self._to_send.popleft()
            self._reduce(grads, piece)

    def come_home(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The finished gradients of the experts at home. Waits for all that was sent.

        Args:
            grads: as ``collect`` gave them, without the ticket's.
        """
        while self._to_send:
            self.send()
        self.copies.returning = None
        if not self._reductions:
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
        number: int = 0,
    ) -> None:
        copies, chunks = self.copies, {**self._own, **(held or {})}
        if not part.rounds:
            return

        def work() -> None:
            lanes, group = copies.lanes, copies.place.group
            start = lanes.mark()
            tensors = tuple(tensor for own in buffers.values() for tensor in own)
            lanes.keep(tensors)
            with torch.no_grad(), _unnoticed(tensors) if refills else nullcontext():
                copies.traffic += sparse_all_gather(part, chunks, buffers, group)
            copies.saw(GATHER, start, piece=number)

        slab.gathers.append(copies.submit(work))

    def _wait(self) -> None:
        lanes = self.copies.lanes
        lanes.join((*self._slab.gathers, *self._added.gathers))
        lanes.keep((*self._slab.tensors, *self._added.tensors))

    def _reduce(self, grads: Mapping[int, Weights], piece: Piece) -> None:
        copies, part = self.copies, piece.part
        if not part.rounds:
            return

        def work() -> None:
            lanes = copies.lanes
            start = lanes.mark()
            lanes.keep(tuple(tensor for own in grads.values() for tensor in own))
            with torch.no_grad():
                arrived = sparse_reduce_scatter(part, {**self._own, **grads}, copies.place.group)
            copies.traffic += arrived.traffic
            self._arrived.update(arrived.grads)
            copies.saw(GATHER, start, is_adjoint=True, piece=piece.number)

        self._reductions.append(copies.submit(work))

    def _arrived_grads(self) -> Mapping[int, Weights]:
        self.copies.lanes.join(self._reductions)
        arrived, self._arrived = self._arrived, {}
        return arrived
