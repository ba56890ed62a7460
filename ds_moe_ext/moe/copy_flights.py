# SPDX-License-Identifier: Apache-2.0
"""What this rank does so that a plan's copies come to be, and their gradients come home.

Worked out from plans alone, so that it can be done beforehand. Shape letters: C cells, E experts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import Traffic, add_each, max_in_place, sparse_reduce_scatter
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import one_of_each, restacked
from ds_moe_ext.core.transfer import SMALL, Cargo, Move, Part, part_of, star_of
from ds_moe_ext.moe.copy_memory import (
    AS_THEY_ARE,
    Accumulation,
    Codecs,
    KeptMeanwhile,
    Slab,
    Weights,
    are_stacked,
    by_slot,
    copy_bytes,
    gathered,
    packing_of,
    whole,
)
from ds_moe_ext.moe.observation import TasksSeen, tell
from ds_moe_ext.moe.turns import DTYPES
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Destination, Plan
from ds_moe_ext.schedule.executor import Event, Lanes, Mark, Steps, lanes_for
from ds_moe_ext.schedule.orders import TARGET_WEIGHTS, WEIGHTS
from ds_moe_ext.schedule.task import GATHER, PARAM, Op, Span, Task, Value


@dataclass(frozen=True, eq=False)
class Place:
    """Where this rank stands among those that hold a layer's experts."""

    layer: int  # number of the layer
    cell: int  # this rank's cell
    node_C: np.ndarray  # node of each cell
    group: dist.ProcessGroup  # the cells, in a communicator that only the parameter lane uses
    # sums of gradients on their way home are kept so; the same in all cells
    in_float32: bool = False
    broadcasts: bool = False  # what goes to all cells travels by broadcasts
    cargo: Cargo = SMALL  # how large an expert is

    @property
    def has_stars(self) -> bool:
        """Whether what goes to all cells needs no trees. A star brings home all gradients at once,
        so that their sums could not be kept in 32 bits."""
        return self.broadcasts and not self.in_float32

    def part(self, held: Placement, wanted: Placement) -> Part:
        """What this cell does for the others to get their copies."""
        if self.has_stars:
            star = star_of(held, wanted, self.node_C, self.cell)
            if star is not None:
                return star
        return part_of(held, wanted, self.node_C, self.cell, self.cargo)

    def experts(self, placement: Placement) -> Sequence[int]:
        """Experts that a placement has in this cell, by slot."""
        experts: list[int] = placement.experts_of(self.cell).tolist()
        return experts


class Piece(NamedTuple):
    """Some of the transfers of a plan."""

    part: Part  # what this cell does of them
    experts: Collection[int]  # whose copies these are
    number: int = 0  # of the piece, for traces


@dataclass(frozen=True, eq=False)
class Trips:
    """The transfers of one plan."""

    place: Place  # where this rank stands
    plan: Plan  # whose they are
    whole: Part  # of all copies at once
    gathers: Sequence[Piece]  # the pieces in which they travel
    reductions: Sequence[Piece]  # the pieces in which their gradients do
    slots: Mapping[int, int]  # of the experts at home here
    planned: Sequence[int]  # experts that compute here, by slot
    copied: Sequence[int]  # those of them that are at home elsewhere
    are_behind: bool  # the slots of copies come behind those of the experts at home

    @classmethod
    def of(cls, place: Place, plan: Plan, before: Trips | None = None) -> Trips:
        """Work them out; the costly part of taking a plan.

        Args:
            place: where this rank stands.
            plan: whose they are.
            before: of an earlier plan.
        """
        home, target = plan.home, plan.target
        whole = place.part(home, target)
        own = before.experts_here(home) if before is not None else place.experts(home)
        slots = {expert: slot for slot, expert in enumerate(own)}
        planned = place.experts(target)
        copied = [expert for expert in planned if expert not in slots]
        here = slots, planned, copied, [*planned] == [*own, *copied]
        if plan.carried is None:
            whole.prepare()
            all_ = [Piece(whole, range(home.num_experts))]
            return cls(place, plan, whole, all_, all_, *here)
        moved = frozenset(np.flatnonzero((target.holds_EC > home.holds_EC).any(axis=1)).tolist())
        parts = {moved: whole}  # splits have often the same pieces, or one with all
        gathers, reductions = (_pieces(place, plan, split, parts, whole) for split in plan.carried)
        for part in parts.values():
            part.prepare()
        return cls(place, plan, whole, gathers, reductions, *here)

    def experts_here(self, placement: Placement) -> Sequence[int]:
        """Experts that a placement has here, by slot."""
        if placement is self.plan.target:
            return self.planned
        return [*self.slots] if placement is self.plan.home else self.place.experts(placement)

    def serve(self, plan: Plan) -> bool:
        """Whether another plan asks for the same."""
        mine = self.plan
        return plan.carried == mine.carried and all(
            one.is_like(other)
            for one, other in ((plan.home, mine.home), (plan.target, mine.target))
        )

    def part_to(self, target: Placement) -> Part:
        """For copies to come from the homes, also where a target has more than the plan's."""
        if target is self.plan.target:
            return self.whole
        return self.place.part(self.plan.home, target)

    def pieces_home(self, target: Placement) -> Sequence[Piece]:
        """In which gradients of the copies go home."""
        if target is self.plan.target:
            return self.reductions
        return [Piece(self.part_to(target), range(target.num_experts))]


def _pieces(
    place: Place, plan: Plan, split: Split, parts: dict[frozenset[int], Part], whole: Part
) -> list[Piece]:
    """Args: parts: by the experts whose copies they bring; it gains those that it lacks. whole: of
    all copies."""
    home, target = plan.home, plan.target
    pieces = []
    for number, split_experts in enumerate(split):
        experts = frozenset(split_experts)
        if experts not in parts and place.has_stars and whole.everywhere:
            parts[experts] = _of_star(whole, experts)
        elif experts not in parts:
            some_EC = np.zeros_like(target.holds_EC)
            some_EC[list(experts)] = target.holds_EC[list(experts)]
            parts[experts] = place.part(home, home.with_copies(some_EC))
        pieces.append(Piece(parts[experts], experts, number))
    return pieces


def _of_star(star: Part, experts: frozenset[int]) -> Part:
    """What ``star_of`` says of some of its experts."""

    def of_these(moves: Sequence[Move]) -> tuple[Move, ...]:
        return tuple([move for move in moves if move.expert in experts])

    rounds = (
        replace(each, sends=of_these(each.sends), receives=of_these(each.receives))
        for each in star.rounds
    )
    everywhere = of_these(star.everywhere)
    return replace(star, rounds=tuple(rounds) if everywhere else (), everywhere=everywhere)


# What the flights of one layer share: where they go, the lane they go in, what waits for them.


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

    def keep_shapes(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Go by what the weights are like now, for their host will take their memory between
        passes.

        Args:
            device: where they will be computed.
            dtype: that their host is going to cast them to; None leaves them as they are.
        """
        self.like = tuple(
            w.detach()
            .new_empty((), device=device, dtype=dtype)
            .expand(w.shape)
            .requires_grad_(w.requires_grad)
            for w in self.like
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


# A flight: the copies of experts for one pass, there and, as gradients, back.


class Flight:
    """The copies of one pass, from launch to the gradients' return.

    Attributes:
        target: who holds what in this pass: the plan's target, and more if the rows asked for it.
        preceding: of the layer before, in the same pass, if its copies were freed.
        start: gives the node of autograd by which gradients come home, while it is there.
    """

    def __init__(
        self, copies: Airfield, slab: Slab, home: Weights, to_gather: deque[Piece]
    ) -> None:
        self.copies, self.target = copies, copies.plan.target
        self._slab, self._home = slab, home
        self._is_home_stacked = are_stacked(home, copies.like)
        self._to_gather = to_gather
        self._added = slab  # where copies lie that the rows asked for
        self._to_send: deque[tuple[Piece, Mapping[int, Weights]]] = deque()
        self._reductions: list[Event] = []
        self._arrived: dict[int, Weights] = {}
        self.preceding: Flight | None = None
        self.start: Callable[[], Any] = lambda: None

    def _at_home(self, experts: Iterable[int]) -> dict[int, Weights]:
        """Weights of those of them that are at home here."""
        slots, size = self.copies.trips.slots, len(self.copies.like)
        here = [(expert, slots[expert]) for expert in experts if expert in slots]
        if self._is_home_stacked:
            return {expert: tuple([own[slot] for own in self._home]) for expert, slot in here}
        return {expert: self._home[slot * size : (slot + 1) * size] for expert, slot in here}

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

    def weights(self, target: Placement) -> Weights:
        """Weights of all experts that compute here in this pass, by slot; or stacked, those at home
        and then the copies, where both are. Waits for the copies.

        Args:
            target: who holds what; more than was launched if the rows asked for it.
        """
        self.launch_rest()
        copies = self.copies
        if target is not self.target:
            is_there = False
            if not copies.plan.rematerialize:
                self._added, is_there = copies.added(target)
            if not is_there:
                part = copies.place.part(self.target, target)
                held = {**self._slab.held}
                copies.join(self._slab.gathers)  # which may be passed on
                room = self._added.make_room(part.received, copies.like)
                self._launch(part, self._added, room, held)
            self.target = target
        self._wait()
        if self._computes_stacks:
            return tuple([stack.detach() for stack in (*self._home, *self._slab.stacks)])
        experts = copies.trips.experts_here(target)
        there = {**self._added.held, **self._slab.held, **self._at_home(experts)}
        return tuple([weight.detach() for expert in experts for weight in there[expert]])

    @property
    def _computes_stacks(self) -> bool:
        """Whether all that computes here is stacked: those at home, and as planned the copies."""
        copies = self.copies
        is_planned = self.target is copies.plan.target and copies.trips.are_behind
        return self._is_home_stacked and is_planned

    def release(self) -> None:
        """Free the copies; backward has them again."""
        self._slab.release()

    # Backward.

    @property
    def comes_home(self) -> bool:
        """Whether the backward pass that runs wants gradients of experts: where a user asks for
        those of inputs alone, as ``torch.autograd.grad`` has it, nobody adds them up."""
        node = self.start()
        return node is not None and bool(torch._C._will_engine_execute_node(node))

    def recall(self) -> None:
        """Launch another gather of the same copies, if they are not there."""
        if self._slab.is_released:
            part = self.copies.trips.part_to(self.target)
            self._launch(part, self._slab, _unnoticed(self._slab.restore()))

    def have_again(self) -> None:
        """Wait for the copies."""
        self.recall()
        self._wait()

    def collect(self, grads: Weights) -> tuple[Tensor | None, ...]:
        """Have gradients of the copies ready to be sent; those that are known here now.

        Args:
            grads: of all experts that computed here, as ``weights`` gave theirs.

        Returns:
            Those of the experts at home, as their weights came, and of the ticket.
        """
        copies = self.copies
        own, of_copies = self._apart(grads)
        is_last = copies.is_last_pass() or copies.plan.rematerialize
        waiting = copies.accumulate(of_copies, is_last=is_last)
        if is_last:
            widest = copies.widest(self.target)
            if widest is not self.target:  # of a pass whose backward may never have come
                nothing = whole([None] * len(copies.like), copies.like)
                here = set(copies.trips.experts_here(widest)).difference(copies.trips.slots)
                waiting = {**dict.fromkeys(here, nothing), **waiting}
            for piece in copies.trips.pieces_home(widest):
                some = {expert: own for expert, own in waiting.items() if expert in piece.experts}
                self._to_send.append((piece, some))
        if copies.plan.rematerialize:
            self._slab.release()
        return *own, copies.nothing

    def _apart(
        self, grads: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], dict[int, Weights]]:
        """Gradients at home, as their weights came, and those of the copies, by expert."""
        copies, num_names = self.copies, len(self.copies.like)
        if self._computes_stacks:
            copied, stacks = copies.trips.copied, grads[num_names:]
            like = self._slab.stacks
            return grads[:num_names], dict(zip(copied, by_slot(whole(stacks, like))))
        by_expert = copies.by_expert(grads, self.target)
        slots = copies.trips.slots
        own = [grad for expert in slots for grad in by_expert[expert]]
        if self._is_home_stacked:
            own = [_restacked(own[number::num_names]) for number in range(num_names)]
        return own, {
            expert: whole(found, copies.like)
            for expert, found in by_expert.items()
            if expert not in slots
        }

    def send(self) -> None:
        """Send the next piece of the gradients home, if one is left."""
        if self._to_send:
            piece, grads = self._to_send.popleft()
            if piece.part.rounds:
                reduction = self._reduce(grads, piece)
                self._reductions.append(self.copies.submit(piece.part, reduction))

    def come_home(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The finished gradients of the experts at home. Waits for all that was sent.

        Args:
            grads: as ``collect`` gave them, without the ticket's.
        """
        while self._to_send:
            self.send()
        if not self._reductions:
            return list(grads)
        arrived = self._arrived_grads()
        self.copies.lanes.keep(one_of_each(arrived.values()))
        if self._is_home_stacked:
            return self._with_sums(grads, arrived)
        finished: list[Tensor] = []
        totals: list[Tensor] = []
        more: list[Tensor] = []
        for expert, own in self.copies.by_expert(grads, self.copies.plan.home).items():
            sums = arrived.get(expert)
            if sums is not None:  # into the sum, which is ours, and not into autograd's
                totals += sums
                more += own
            finished += own if sums is None else sums
        add_each(totals, more)
        return finished

    def _with_sums(self, stacks: Sequence[Tensor], arrived: Mapping[int, Weights]) -> list[Tensor]:
        """Stacks of gradients at home, to which the sums of copies are added where they lie: the
        program made them for this alone."""
        finished = [stack.contiguous() for stack in stacks]
        slots = self.copies.trips.slots
        totals = [stack[slots[expert]] for expert in arrived for stack in finished]
        add_each(totals, [total for sums in arrived.values() for total in sums])
        return finished

    def _launch(
        self,
        part: Part,
        slab: Slab,
        buffers: Mapping[int, Weights],
        held: Mapping[int, Weights] | None = None,
        *,
        number: int = 0,
    ) -> None:
        if part.rounds:
            chunks = {**self._at_home(part.sent), **(held or {})}
            gather = self._gather(part, slab, chunks, buffers, number=number)
            slab.gathers.append(self.copies.submit(part, gather))

    def _gather(
        self,
        part: Part,
        slab: Slab,
        chunks: Mapping[int, Weights],
        buffers: Mapping[int, Weights],
        *,
        number: int,
    ) -> Steps[None]:
        # In the parameter lane: the buffers were made in the thread that calls, so the lane's
        # stream must keep them from being used again before it has passed.
        copies, start = self.copies, self.copies.began()
        copies.lanes.keep((slab,))
        group, codec = copies.place.group, copies.codecs.weights
        copies.moved((yield from gathered(part, chunks, buffers, group, codec)))
        copies.saw(GATHER, start, piece=number)

    def _wait(self) -> None:
        copies, slabs = self.copies, dict.fromkeys((self._slab, self._added))
        copies.join([event for slab in slabs for event in slab.gathers])
        copies.lanes.keep(slabs)

    def _reduce(self, grads: Mapping[int, Weights], piece: Piece) -> Steps[None]:
        copies, start, part = self.copies, self.copies.began(), piece.part
        copies.lanes.keep(one_of_each(grads.values()))
        arrived = yield from sparse_reduce_scatter(
            part,
            {**dict.fromkeys(part.sent, copies.like), **grads},
            copies.place.group,
            in_float32=copies.place.in_float32,
            packing=packing_of(copies.codecs),
        )
        copies.moved(arrived.traffic)
        self._arrived.update(arrived.grads)
        copies.saw(GATHER, start, is_adjoint=True, piece=piece.number)

    def _arrived_grads(self) -> Mapping[int, Weights]:
        self.copies.join(self._reductions)
        arrived, self._arrived = self._arrived, {}
        return arrived


def _restacked(grads_S: Sequence[Tensor | None]) -> Tensor | None:
    """Of a weight, all of whose slots have gradients, or none."""
    given_S = [grad for grad in grads_S if grad is not None]
    return restacked(given_S) if given_S else None


def _unnoticed(room: Mapping[int, Weights]) -> dict[int, Weights]:
    """The same memory. Autograd does not take what is written to these tensors for a change of
    those that it has saved: the values are the same."""
    return {expert: tuple(weight.data for weight in own) for expert, own in room.items()}
