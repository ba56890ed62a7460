# SPDX-License-Identifier: Apache-2.0
"""A layer's copies of experts for one step: which flights are under way, and what neighbours do.

Shape letters: C cells, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ds_moe_ext.moe.copy_flights import Airfield, Flight, Piece, Place, Trips
from ds_moe_ext.moe.copy_memory import AS_THEY_ARE, Codecs, Slab, Weights
from ds_moe_ext.moe.observation import TasksSeen
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule.stages import SavesAlike
from ds_moe_ext.schedule.task import Span


class Copies(Airfield):
    """One layer's copies on this rank.

    Attributes:
        before: the copies of the layer whose backward pass follows this one's.
        after: those of the layer whose forward pass follows.
        coming: the pass that has begun in forward, until its program takes it on.
        returning: the pass whose gradients are not all on their way home.
    """

    def __init__(
        self,
        place: Place,
        plan: Plan,
        like: Weights,
        observers: tuple[TasksSeen, ...] = (),
        codecs: Codecs = AS_THEY_ARE,
    ) -> None:
        super().__init__(place, plan, like, observers, codecs)
        self.before: Copies | None = None
        self.after: Copies | None = None
        self.coming: Flight | None = None
        self.returning: Flight | None = None
        self._slab = Slab()  # of the plan's copies, kept over the micro-batches of a step
        self._is_current = False  # the weights at home have not changed since it began to be filled
        self._versions = 0  # of these, added up
        self._to_gather: deque[Piece] = deque()  # what it still lacks
        self._released: list[Flight] = []  # passes whose backward is still to come
        self._returns: Flight | None = None  # the pass whose backward came last to its join
        self._prepared = self.trips

    def take(self, plan: Plan) -> None:
        """Copy by a new plan from now on. Call it between steps, on every rank."""
        self.forget()
        self.prepare(plan)
        self.plan, self.trips = plan, self._prepared

    def prepare(self, plan: Plan) -> None:
        """Work out what a plan asks for, so that it is soon taken."""
        before = self._prepared
        serve = before.serve(plan)
        self._prepared = replace(before, plan=plan) if serve else Trips.of(self.place, plan, before)

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
        self.join(self._outstanding)
        self._is_current = False
        self._kept = self._kept_slab = None
        self._released.clear()
        self.coming = self.returning = self._returns = None  # of a pass that failed

    def begin(self, weights: Weights, *, is_training: bool) -> Flight:
        """Begin a pass; its gather is launched piece by piece.

        Args:
            weights: of the experts at home on this rank, by slot or stacked.
            is_training: the copies may serve later micro-batches of the step.

        Raises:
            RuntimeError: the weights were changed since an earlier micro-batch of the step.
        """
        home = tuple(weight.detach() for weight in weights)
        if self.plan.rematerialize or not is_training or torch.is_inference_mode_enabled():
            # Outside of training a user may have put other weights in for a while; and what is made
            # in inference mode is of no use to others.
            slab = Slab(self.trips.copied)
            self.coming = Flight(self, slab, home, deque(self.trips.gathers))
            return self.coming
        # Micro-batches of one step share the slab and what it still lacks: the first gathers.
        versions = sum([weight._version for weight in home])
        if not self._is_current:
            self._slab.clear(self.trips.copied)
            self._to_gather = deque(self.trips.gathers)
            self._is_current, self._versions = True, versions
        elif versions != self._versions and self.plan.has_copies:
            raise RuntimeError(
                f"weights of experts of layer {self.place.layer} were changed between two passes "
                "of a step, but copies of experts are made once a step, and are of the old ones; "
                "change weights in the optimizer's step alone, have copies gathered for each pass "
                "(key rematerialize of strategies that copy), or use strategy 'ep'"
            )
        self.coming = Flight(self, self._slab, home, self._to_gather)
        return self.coming

    def taken(self) -> Flight:
        """The pass that has begun in forward, which the program now takes on."""
        assert self.coming is not None, "no pass has begun"
        flight, self.coming = self.coming, None
        if self.before is not None and self.before._released:
            flight.preceding = self.before._released[-1]
        return flight

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

    # What autograd comes by; see ``join``.

    def release(self, flight: Flight) -> None:
        """Free the copies of a pass until its backward."""
        flight.release()
        self._released.append(flight)

    def have_again(self, flight: Flight) -> None:
        """Have the copies of a pass whose backward comes now."""
        if flight in self._released:
            self._released.remove(flight)
        flight.have_again()

    def collect(self, flight: Flight, grads: Weights) -> tuple[Tensor | None, ...] | None:
        """See ``Flight.collect``; None if no expert is trained, or none of them in this pass."""
        self._returns = flight
        if not self.is_trained or not flight.comes_home:
            return None
        at_home = flight.collect(grads)
        self.returning = flight
        return at_home

    def come_home(self, flight: Flight, grads: Sequence[Tensor]) -> list[Tensor]:
        """See ``Flight.come_home``."""
        self.returning = None
        return flight.come_home(grads)


def in_order(layers: Iterable[Copies]) -> None:
    """Tell the copies of a model's layers, given in forward order, which come before and after."""
    before = None
    for copies in layers:
        copies.before, copies.after = before, None
        if before is not None:
            before.after = copies
        before = copies


# Where a pass meets its copies, by the tasks of ``schedule/orders.py``::


def started(copies: Copies, flight: Flight, weights: Weights) -> Weights:
    """The weights of the experts at home as the program wants them.

    Args:
        copies: of the layer.
        flight: of the pass.
        weights: of the experts at home on this rank, by slot or stacked.

    Returns:
        They, and a ticket: an empty tensor that makes every rank take part in backward.
    """
    ticket = copies.nothing.detach().requires_grad_(copies.is_trained)
    started: Weights = _Start.apply(copies, flight, ticket, *weights)
    return started


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies: Copies, flight: Flight, ticket: Tensor, *weights: Tensor
    ) -> Weights:
        ctx.copies, ctx.flight = copies, flight
        flight.start = ref(ctx)  # the node itself
        return tuple([weight.detach() for weight in (*weights, ticket)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.copies.come_home(ctx.flight, grads[:-1])


@dataclass(frozen=True, eq=False)
class Join(SavesAlike):
    """Reads the weights at home and the route; writes the weights of all that compute here."""

    copies: Copies

    def forward(
        self, span: Span, weights: Weights, layer_route: LayerRoute
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        flight = self.copies.taken()
        return (flight.weights(layer_route.target),), (flight,)

    def backward(self, span: Span, saved: tuple[Any, ...], grads: Weights) -> tuple[Any, ...]:
        return (self.copies.collect(saved[0], grads),)


@dataclass(frozen=True, eq=False)
class HaveAgain(SavesAlike):
    """In backward, by what ``Join`` saved of the pass; in forward nothing was freed yet."""

    copies: Copies

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (None,), ()

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        self.copies.have_again(saved[0])
        return ()
