# SPDX-License-Identifier: Apache-2.0
"""What the flights of one layer share: where they go, the lane they go in, what waits for them.

Shape letters: C cells, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ds_moe_ext.comm import Traffic, max_in_place
from ds_moe_ext.moe.copies.accumulation import Accumulation, KeptMeanwhile
from ds_moe_ext.moe.copies.packing import AS_THEY_ARE, Codecs, copy_bytes
from ds_moe_ext.moe.copies.slab import Slab, Weights
from ds_moe_ext.moe.copies.trips import Place, Trips
from ds_moe_ext.moe.observation import TasksSeen, tell
from ds_moe_ext.moe.turns import DTYPES
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.executor import Event, Lanes, Mark, Steps, lanes_for
from ds_moe_ext.schedule.task import PARAM, Op, Span, Task, Value
from ds_moe_ext.schedule.wires import TARGET_WEIGHTS, WEIGHTS
from ds_moe_ext.side_by_side import one_of_each
from ds_moe_ext.strategy import Destination, Plan
from ds_moe_ext.transfer import Part

T = TypeVar("T")
BYTES = 2  # of an element, as experts mostly travel


class Airfield:
    """One layer's, on this rank.

    Args:
        place: where this rank stands.
        plan: the present plan.
        like: weights of any one expert, for their shapes, type and device.
        observers: told when copies and gradients travelled.
        codecs: what copies travel as.

    Attributes:
        is_last_pass: whether the pass that runs is the last before the optimizer's step; gradients
            of copies wait for it.
        accumulation: tells whether the host has dropped what earlier passes of a step left.
        plan: the present plan.
        trips: its transfers.
        traffic: payload of this rank so far.
        learns: see ``RoutedExperts.allow_copies``.
        some_are_trained: of the layer's experts some are, on whatever rank, and some are not.
    """

    def __init__(
        self,
        place: Place,
        plan: Plan,
        like: Weights,
        observers: tuple[TasksSeen, ...] = (),
        codecs: Codecs = AS_THEY_ARE,
    ) -> None:
        self.codecs = codecs
        # By elements, since not all ranks know the type yet; see ``learn_types``. Whole where sums
        # are in float32 or encoded: along a chain each rank adds two numbers and rounds, whatever
        # the type, and a codec wants rows.
        is_whole = place.in_float32 or codecs.gradients is not None
        expert_bytes = 0 if is_whole else BYTES * sum(weight.numel() for weight in like)
        self.place = replace(place, cargo=replace(place.cargo, expert_bytes=expert_bytes))
        self.like, self._observers = like, observers
        self.learns: Weights | None = None
        self.some_are_trained = False
        self._knows_types = False
        self.is_last_pass: Callable[[], bool] = lambda: True
        self.accumulation: Accumulation = KeptMeanwhile(lambda: 0)
        self.plan = plan
        self.trips = Trips.of(self.place, plan)
        self.traffic = Traffic()
        self._counting = threading.Lock()  # the lane's thread ends some, and its caller others
        self._waiting: dict[int, Weights] = {}  # gradients of copies from earlier micro-batches
        self._nothing: Tensor | None = None
        self._outstanding: list[Event] = []  # what nobody has joined, and maybe no pass will
        self._kept: Destination | None = None  # with copies that a micro-batch added
        self._kept_slab: Slab | None = None  # where these lie, once they have been asked for

    def serving(self, destination: Destination) -> Destination:
        """Where the rows of a training pass go that asks for more copies than were planned: those
        that an earlier micro-batch of the step has added, or else these, which serve later ones.
        So a pass that is computed again goes where it went."""
        if self.plan.rematerialize or torch.is_inference_mode_enabled():
            return destination
        self._kept = self._kept or destination
        return self._kept

    def added(self, target: Placement) -> tuple[Slab, bool]:
        """Where copies lie that a pass adds to the plan's, and whether they are there already, or
        on their way."""
        if self._kept is None or self._kept.target is not target:
            return Slab(), False
        slab, is_there = self._kept_slab or Slab(), self._kept_slab is not None
        self._kept_slab = slab
        return slab, is_there

    def widest(self, target: Placement) -> Placement:
        """Of a pass's target and that of the step's other passes the one with more copies."""
        return target if self._kept is None else self._kept.target

    def by_expert(self, tensors: Sequence[T], placement: Placement) -> dict[int, tuple[T, ...]]:
        """What lies by slot, one for each weight, by the experts that a placement has here."""
        size = len(self.like)
        experts = self.trips.experts_here(placement)
        return {
            expert: tuple(tensors[i * size : (i + 1) * size]) for i, expert in enumerate(experts)
        }

    def submit(self, part: Part, steps: Steps[None]) -> Event:
        """Queue what moves a part of the transfers in the lane of parameters."""
        # What is passed on at once cannot pause, and what is watched is there when it ends.
        may_pause = len(part.rounds) == 1 and not self.is_watched
        event = self.lanes.begin(PARAM, steps, may_pause=may_pause)
        self._outstanding.append(event)
        return event

    def join(self, events: Sequence[Event]) -> None:
        """Make the caller's next work see what was queued."""
        self.lanes.join(events)
        self._outstanding = [event for event in self._outstanding if event not in events]

    def moved(self, traffic: Traffic) -> None:
        """Count what has come and gone."""
        with self._counting:
            self.traffic += traffic

    def learn_types(self, weights: Weights) -> None:
        """Those of weights, of which a rank may be home to none: a host may have cast them since
        it was told. Collective over the cells, the first time.

        Args:
            weights: at home.
        """
        if self._knows_types:
            return
        self._knows_types = True
        like = self.like
        own = [DTYPES.index(weight.dtype) for weight in weights[: len(like)]] or [0] * len(like)
        told = torch.tensor(own, device=like[0].device)
        dtypes = [DTYPES[number] for number in max_in_place(told, self.place.group).tolist()]
        if dtypes != [weight.dtype for weight in like]:
            self.like = tuple(
                w.new_empty((), dtype=dtype).expand(w.shape).requires_grad_(w.requires_grad)
                for w, dtype in zip(like, dtypes)
            )

    def keep_shapes(self, device: torch.device) -> None:
        """Go by what the weights are like now, for their host will take their memory between
        passes.

        Args:
            device: where they will be computed.
        """
        self.like = tuple(
            weight.new_empty((), device=device).expand(weight.shape).requires_grad_(is_trained)
            for weight, is_trained in [(w.detach(), w.requires_grad) for w in self.like]
        )

    @property
    def copy_bytes(self) -> float:
        """Of one expert on its way, the mean of there and, as gradients, back."""
        return copy_bytes(self.like, self.codecs)

    @property
    def lanes(self) -> Lanes:
        return lanes_for(self.like[0].device, overlaps=True)

    @property
    def nothing(self) -> Tensor:
        """An empty tensor, where the weights are; always the same."""
        device = self.like[0].device
        if self._nothing is None or self._nothing.device != device:
            with torch.inference_mode(False):
                self._nothing = torch.zeros(0, device=device)
        return self._nothing

    @property
    def is_trained(self) -> bool:
        """Whether experts have gradients; the same on all ranks."""
        learns = self.learns or self.like
        return self.some_are_trained or any(weight.requires_grad for weight in learns)

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to know when copies and gradients travel."""
        return any([each.is_on for each in self._observers])

    def began(self) -> Mark | None:
        """This moment in the lane that calls; None if nobody wants to know: marks cost a little."""
        return self.lanes.mark() if self.is_watched else None

    def saw(self, op: Op, start: Mark | None, *, is_adjoint: bool = False, piece: int = 0) -> None:
        """Tell the observers of a task that began then and ends now."""
        if start is None:
            return
        layer = self.place.layer
        reads, writes = (Value(WEIGHTS, layer),), (Value(TARGET_WEIGHTS, layer),)
        span = Span(piece, piece + 1)
        task = Task(op, layer, span, reads, writes)
        if is_adjoint:
            task = Task(op, layer, span, writes, reads, adjoint_of=(0,))
        tell(self._observers, task, start, self.lanes)

    def accumulate(self, grads: Mapping[int, Weights], *, is_last: bool) -> dict[int, Weights]:
        """Take gradients of copies of a pass to those of earlier ones of the step; those that wait
        no longer, after the last one.

        Args:
            grads: of one pass, by expert.
            is_last: whether the host's optimizer steps next.
        """
        if self._waiting and not self.accumulation.is_kept():
            self._waiting.clear()
        if is_last:
            return self.all_waiting(grads)
        if not self._waiting:
            self.accumulation.begin()
        self.let_wait(grads)
        return {}

    def all_waiting(self, grads: Mapping[int, Weights]) -> dict[int, Weights]:
        """Gradients of copies with those of earlier micro-batches, which wait no longer."""
        if not self._waiting:
            return {**grads}
        self.let_wait(grads)
        waiting, self._waiting = self._waiting, {}
        self.lanes.keep(one_of_each(waiting.values()))  # which another lane may have summed
        return {
            expert: tuple(total.to(weight.dtype) for total, weight in zip(totals, self.like))
            for expert, totals in waiting.items()
        }

    def let_wait(self, grads: Mapping[int, Weights]) -> None:
        """Keep gradients of copies until they are asked for; summed in 32 bits at least."""
        for expert, own in grads.items():
            before = self._waiting.get(expert)
            if before is None:
                self._waiting[expert] = tuple(map(_own_sum, own))
            else:
                for total, grad in zip(before, own):
                    total.add_(grad)


def _own_sum(grad: Tensor) -> Tensor:
    """A sum to add to: autograd may give one tensor to several, or one element many times."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
