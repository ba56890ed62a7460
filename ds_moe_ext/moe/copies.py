# SPDX-License-Identifier: Apache-2.0
"""Copies of experts for one step: gathered from their homes, their gradients summed there.

``Copies`` are those of one layer: what the passes of a step share, and what is begun for its
neighbours. ``Prefetch`` is one pass of the layer: its copies on their way here, and their
gradients on their way home.

All transfers of a model run in the lane of parameters, in the order in which they were begun,
which is the same on all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ds_moe_ext.core.comm import Traffic, add_each, max_in_place, sparse_reduce_scatter
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import one_of_each, restacked
from ds_moe_ext.core.transfer import Part
from ds_moe_ext.moe.copy_memory import (
    AS_THEY_ARE,
    Accumulation,
    Codecs,
    CopyMemory,
    KeptMeanwhile,
    Piece,
    Place,
    Transfers,
    Weights,
    are_stacked,
    copy_bytes,
    gathered,
    whole,
)
from ds_moe_ext.moe.observation import TasksSeen, tell
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.moe.turns import DTYPES
from ds_moe_ext.planning.strategy import Destination, Plan
from ds_moe_ext.schedule.executor import Event, Lanes, Mark, Steps, lanes_for
from ds_moe_ext.schedule.orders import TARGET_WEIGHTS, WEIGHTS
from ds_moe_ext.schedule.stages import Done, Saved, SavesAlike
from ds_moe_ext.schedule.task import GATHER, PARAM, Op, Span, Task, Value

T = TypeVar("T")
BYTES = 2  # of an element, as experts mostly travel


class Copies:
    """One layer's copies on this rank.

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
        transfers: of the present plan.
        traffic: payload of this rank so far.
        learns: see ``RoutedExperts.allow_copies``.
        some_are_trained: of the layer's experts some are, on whatever rank, and some are not.
        before: the copies of the layer whose backward pass follows this one's.
        after: those of the layer whose forward pass follows.
        coming: the pass that has begun in forward, until its program takes it on.
        returning: the pass whose gradients are not all on their way home.
        released: passes whose copies were freed and whose backward is still to come.
        latest_back: the pass whose backward came last to its join.
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
        self.plan, self.like, self._observers = plan, like, observers
        self.transfers = self._prepared = Transfers.of(self.place, plan)
        self.learns: Weights | None = None
        self.some_are_trained = False
        self._knows_types = False
        self.is_last_pass: Callable[[], bool] = lambda: True
        self.accumulation: Accumulation = KeptMeanwhile(lambda: 0)
        self.before: Copies | None = None
        self.after: Copies | None = None
        self.traffic = Traffic()
        self._counting = threading.Lock()  # the lane's thread ends some, and its caller others
        self._nothing: Tensor | None = None
        # Of a step; the copies of its micro-batches lie in one memory.
        self._memory = CopyMemory()
        self._is_current = False  # the weights at home have not changed since it began to be filled
        self._versions = 0  # of these, added up
        self._to_gather: deque[Piece] = deque()  # what it still lacks
        self._waiting: dict[int, Weights] = {}  # gradients of copies from earlier micro-batches
        self._outstanding: list[Event] = []  # what nobody has joined, and maybe no pass will
        self._kept: Destination | None = None  # with copies that a micro-batch added
        self._kept_memory: CopyMemory | None = None  # where these lie, once they were asked for
        # Of passes that are under way.
        self.coming: Prefetch | None = None
        self.returning: Prefetch | None = None
        self.released: list[Prefetch] = []
        self.latest_back: Prefetch | None = None

    def take(self, plan: Plan) -> None:
        """Copy by a new plan from now on. Call it between steps, on every rank."""
        self.forget()
        self.prepare(plan)
        self.plan, self.transfers = plan, self._prepared

    def prepare(self, plan: Plan) -> None:
        """Work out what a plan asks for, so that it is soon taken."""
        before = self._prepared
        serve = before.serve(plan)
        self._prepared = (
            replace(before, plan=plan) if serve else Transfers.of(self.place, plan, before)
        )

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
        self._kept = self._kept_memory = None
        self.released.clear()
        self.coming = self.returning = self.latest_back = None  # of a pass that failed

    def begin(self, weights: Weights, *, is_training: bool) -> Prefetch:
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
            memory = CopyMemory(self.transfers.copied)
            self.coming = Prefetch(self, memory, home, deque(self.transfers.gathers))
            return self.coming
        # Micro-batches of one step share the memory and what it still lacks: the first gathers.
        versions = sum([weight._version for weight in home])
        if not self._is_current:
            self._memory.clear(self.transfers.copied)
            self._to_gather = deque(self.transfers.gathers)
            self._is_current, self._versions = True, versions
        elif versions != self._versions and self.plan.has_copies:
            raise RuntimeError(
                f"weights of experts of layer {self.place.layer} were changed between two passes "
                "of a step, but copies of experts are made once a step, and are of the old ones; "
                "change weights in the optimizer's step alone, have copies gathered for each pass "
                "(key rematerialize of strategies that copy), or use strategy 'ep'"
            )
        self.coming = Prefetch(self, self._memory, home, self._to_gather)
        return self.coming

    # Copies that the rows of a pass ask for, besides those of the plan.

    def serving(self, destination: Destination) -> Destination:
        """Where the rows of a training pass go that asks for more copies than were planned: those
        that an earlier micro-batch of the step has added, or else these, which serve later ones.
        So a pass that is computed again goes where it went."""
        if self.plan.rematerialize or torch.is_inference_mode_enabled():
            return destination
        self._kept = self._kept or destination
        return self._kept

    def added(self, target: Placement) -> tuple[CopyMemory, bool]:
        """Where copies lie that a pass adds to the plan's, and whether they are there already, or
        on their way."""
        if self._kept is None or self._kept.target is not target:
            return CopyMemory(), False
        memory, is_there = self._kept_memory or CopyMemory(), self._kept_memory is not None
        self._kept_memory = memory
        return memory, is_there

    def widest(self, target: Placement) -> Placement:
        """Of a pass's target and that of the step's other passes the one with more copies."""
        return target if self._kept is None else self._kept.target

    # What the tasks of this layer begin for its neighbours.

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
        released = [] if self.before is None else self.before.released
        if released:
            same = None if self.latest_back is None else self.latest_back.preceding
            (same if same in released else released[-1]).recall()

    # Gradients that wait for the last micro-batch.

    def let_wait(self, grads: Mapping[int, Weights]) -> None:
        """Keep gradients of copies until they are asked for; summed in 32 bits at least."""
        for expert, own in grads.items():
            before = self._waiting.get(expert)
            if before is None:
                self._waiting[expert] = tuple(map(_own_sum, own))
            else:
                for total, grad in zip(before, own):
                    total.add_(grad)

    def let_wait_for_more(self, grads: Mapping[int, Weights]) -> None:
        """The same, of a pass that others of the step follow."""
        if not self._waiting:
            self.accumulation.begin()
        self.let_wait(grads)

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

    def drop_what_the_host_dropped(self) -> None:
        """Of earlier micro-batches nothing waits that their host keeps no more."""
        if self._waiting and not self.accumulation.is_kept():
            self._waiting.clear()

    # The lane of parameters, and who wants to know what travels there.

    @property
    def lanes(self) -> Lanes:
        return lanes_for(self.like[0].device, overlaps=True)

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
        with self._counting:
            self.traffic += traffic

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
        layer, span = self.place.layer, Span(piece, piece + 1)
        reads, writes = (Value(WEIGHTS, layer),), (Value(TARGET_WEIGHTS, layer),)
        task = Task(op, layer, span, reads, writes)
        if is_adjoint:
            task = Task(op, layer, span, writes, reads, adjoint_of=(0,))
        tell(self._observers, task, start, self.lanes)

    # What the weights are like.

    def by_expert(self, tensors: Sequence[T], placement: Placement) -> dict[int, tuple[T, ...]]:
        """What lies by slot, one for each weight, by the experts that a placement has here."""
        size = len(self.like)
        experts = self.transfers.experts_here(placement)
        return {
            expert: tuple(tensors[i * size : (i + 1) * size]) for i, expert in enumerate(experts)
        }

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


def _own_sum(grad: Tensor) -> Tensor:
    """A sum to add to: autograd may give one tensor to several, or one element many times."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)


def in_order(layers: Iterable[Copies]) -> None:
    """Tell the copies of a model's layers, given in forward order, which come before and after."""
    before = None
    for copies in layers:
        copies.before, copies.after = before, None
        if before is not None:
            before.after = copies
        before = copies


class Prefetch:
    """The copies of one pass, from launch to the gradients' return.

    Attributes:
        target: who holds what in this pass: the plan's target, and more if the rows asked for it.
        preceding: of the layer before, in the same pass, if its copies were freed.
        start: gives the node of autograd by which gradients come home, while it is there.
    """

    def __init__(
        self, copies: Copies, memory: CopyMemory, home: Weights, to_gather: deque[Piece]
    ) -> None:
        self.copies, self.target = copies, copies.plan.target
        self.memory, self._home = memory, home
        self._is_home_stacked = are_stacked(home, copies.like)
        self._to_gather = to_gather
        self._added = memory  # where copies lie that the rows asked for
        self._to_send: deque[tuple[Piece, Mapping[int, Weights]]] = deque()
        self._reductions: list[Event] = []
        self._arrived: dict[int, Weights] = {}  # sums of gradients, by expert at home
        self.preceding: Prefetch | None = None
        self.start: Callable[[], Any] = lambda: None

    # Forward.

    def launch(self) -> None:
        """Launch the next piece of the gather, if one is left."""
        if self._to_gather:
            piece = self._to_gather.popleft()
            room = self.memory.make_room(piece.part.received, self.copies.like)
            self._gather(piece.part, self.memory, room, number=piece.number)

    def launch_rest(self) -> None:
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
                held = {**self.memory.held}
                copies.join(self.memory.gathers)  # which may be passed on
                room = self._added.make_room(part.received, copies.like)
                self._gather(part, self._added, room, held)
            self.target = target
        self._wait()
        if self._computes_stacks:
            return tuple([stack.detach() for stack in (*self._home, *self.memory.stacks)])
        experts = copies.transfers.experts_here(target)
        there = {**self._added.held, **self.memory.held, **self._at_home(experts)}
        return tuple([weight.detach() for expert in experts for weight in there[expert]])

    def replicas(self) -> dict[int, Weights]:
        """Weights of the experts that compute here and are at home elsewhere, as planned. Waits for
        them."""
        self.launch_rest()
        self._wait()
        return {expert: self.memory.held[expert] for expert in self.copies.transfers.copied}

    @property
    def _computes_stacks(self) -> bool:
        """Whether all that computes here is stacked: those at home, and as planned the copies."""
        copies = self.copies
        is_planned = self.target is copies.plan.target and copies.transfers.are_behind
        return self._is_home_stacked and is_planned

    def _at_home(self, experts: Iterable[int]) -> dict[int, Weights]:
        """Weights of those of them that are at home here."""
        slots, size = self.copies.transfers.slots, len(self.copies.like)
        here = [(expert, slots[expert]) for expert in experts if expert in slots]
        if self._is_home_stacked:
            return {expert: tuple([own[slot] for own in self._home]) for expert, slot in here}
        return {expert: self._home[slot * size : (slot + 1) * size] for expert, slot in here}

    def _gather(
        self,
        part: Part,
        memory: CopyMemory,
        room: Mapping[int, Weights],
        held: Mapping[int, Weights] | None = None,
        *,
        number: int = 0,
    ) -> None:
        """Begin to fill the room with copies; what is ``held`` here besides may be passed on."""
        if not part.rounds:
            return
        copies, chunks = self.copies, {**self._at_home(part.sent), **(held or {})}

        def steps() -> Steps[None]:
            # In the parameter lane: the room was made in the thread that calls, so the lane's
            # stream must keep it from being used again before it has passed.
            start = copies.began()
            copies.lanes.keep((memory,))
            group, codec = copies.place.group, copies.codecs.weights
            copies.moved((yield from gathered(part, chunks, room, group, codec)))
            copies.saw(GATHER, start, piece=number)

        memory.gathers.append(copies.submit(part, steps()))

    def _wait(self) -> None:
        copies, memories = self.copies, dict.fromkeys((self.memory, self._added))
        copies.join([event for memory in memories for event in memory.gathers])
        copies.lanes.keep(memories)

    # Backward.

    def release(self) -> None:
        """Free the copies until this pass's backward, which has them again."""
        self.memory.release()
        self.copies.released.append(self)

    def recall(self) -> None:
        """Launch another gather of the same copies, if they are not there."""
        if self.memory.is_released:
            part = self.copies.transfers.part_to(self.target)
            # Autograd does not take what is written to ``data`` for a change of what it has saved:
            # the values are the same.
            room = {
                expert: tuple(weight.data for weight in own)
                for expert, own in self.memory.restore().items()
            }
            self._gather(part, self.memory, room)

    def have_again(self) -> None:
        """Wait for the copies, as backward comes now."""
        if self in self.copies.released:
            self.copies.released.remove(self)
        self.recall()
        self._wait()

    def collect(self, grads: Weights) -> tuple[Tensor | None, ...] | None:
        """Have gradients of the copies ready to be sent; those that are known here now.

        Args:
            grads: of all experts that computed here, as ``weights`` gave theirs.

        Returns:
            Those of the experts at home, as their weights came, and of the ticket. None if no
            expert is trained, or none in this backward pass: where a user asks for gradients of
            inputs alone, as ``torch.autograd.grad`` has it, nobody adds those of experts up.
        """
        copies, node = self.copies, self.start()
        copies.latest_back = self
        if not copies.is_trained or node is None or not torch._C._will_engine_execute_node(node):
            return None
        own, of_copies = self._apart(grads)
        copies.drop_what_the_host_dropped()
        if copies.is_last_pass() or copies.plan.rematerialize:
            self._make_ready(copies.all_waiting(of_copies))
        else:
            copies.let_wait_for_more(of_copies)
        if copies.plan.rematerialize:
            self.memory.release()
        copies.returning = self
        return *own, copies.nothing

    def _apart(
        self, grads: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], dict[int, Weights]]:
        """Gradients at home, as their weights came, and those of the copies, by expert."""
        copies, num_names = self.copies, len(self.copies.like)
        if self._computes_stacks:
            stacks = whole(grads[num_names:], self.memory.stacks)
            by_slot = zip(*(stack.unbind() for stack in stacks))
            return grads[:num_names], dict(zip(copies.transfers.copied, by_slot))
        by_expert = copies.by_expert(grads, self.target)
        slots = copies.transfers.slots
        own = [grad for expert in slots for grad in by_expert[expert]]
        if self._is_home_stacked:
            own = [_restacked(own[number::num_names]) for number in range(num_names)]
        return own, {
            expert: whole(found, copies.like)
            for expert, found in by_expert.items()
            if expert not in slots
        }

    def _make_ready(self, grads: Mapping[int, Weights]) -> None:
        """Divide a step's gradients of copies into the pieces in which they are sent."""
        copies = self.copies
        widest = copies.widest(self.target)
        if widest is not self.target:  # of a pass whose backward may never have come
            nothing = whole([None] * len(copies.like), copies.like)
            here = set(copies.transfers.experts_here(widest)).difference(copies.transfers.slots)
            grads = {**dict.fromkeys(here, nothing), **grads}
        for piece in copies.transfers.pieces_home(widest):
            some = {expert: own for expert, own in grads.items() if expert in piece.experts}
            self._to_send.append((piece, some))

    def send(self) -> None:
        """Send the next piece of the gradients home, if one is left."""
        if self._to_send:
            piece, grads = self._to_send.popleft()
            if piece.part.rounds:
                reduction = self._reduce(grads, piece)
                self._reductions.append(self.copies.submit(piece.part, reduction))

    def _reduce(self, grads: Mapping[int, Weights], piece: Piece) -> Steps[None]:
        copies, start, part = self.copies, self.copies.began(), piece.part
        copies.lanes.keep(one_of_each(grads.values()))
        arrived = yield from sparse_reduce_scatter(
            part,
            {**dict.fromkeys(part.sent, copies.like), **grads},
            copies.place.group,
            in_float32=copies.place.in_float32,
            packing=copies.codecs.packing,
        )
        copies.moved(arrived.traffic)
        self._arrived.update(arrived.grads)
        copies.saw(GATHER, start, is_adjoint=True, piece=piece.number)

    def send_back(self, grads: Mapping[int, Weights]) -> None:
        """Send gradients of ``replicas`` home: of all passes of a step, in the last of these."""
        self._make_ready(grads)
        while self._to_send:
            self.send()

    def sums(self) -> dict[int, Weights]:
        """What has come of ``send_back`` from all replicas, by expert at home. Waits for it."""
        copies = self.copies
        copies.join(self._reductions)
        arrived, self._arrived, self._reductions = self._arrived, {}, []
        copies.lanes.keep(one_of_each(arrived.values()))
        return arrived

    def come_home(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The finished gradients of the experts at home. Waits for all that was sent.

        Args:
            grads: as ``collect`` gave them, without the ticket's.
        """
        copies = self.copies
        copies.returning = None
        while self._to_send:
            self.send()
        if not self._reductions:
            return list(grads)
        copies.join(self._reductions)
        arrived, self._arrived = self._arrived, {}
        copies.lanes.keep(one_of_each(arrived.values()))
        if self._is_home_stacked:
            # Added where they lie: the program made these stacks for this alone.
            stacks, slots = [stack.contiguous() for stack in grads], copies.transfers.slots
            own_sums = [stack[slots[expert]] for expert in arrived for stack in stacks]
            add_each(own_sums, [total for sums in arrived.values() for total in sums])
            return stacks
        finished: list[Tensor] = []
        totals: list[Tensor] = []
        more: list[Tensor] = []
        for expert, own in copies.by_expert(grads, copies.plan.home).items():
            sums = arrived.get(expert)
            if sums is not None:  # into the sum, which is ours, and not into autograd's
                totals += sums
                more += own
            finished += own if sums is None else sums
        add_each(totals, more)
        return finished


def _restacked(grads_S: Sequence[Tensor | None]) -> Tensor | None:
    """Of a weight, all of whose slots have gradients, or none."""
    given_S = [grad for grad in grads_S if grad is not None]
    return restacked(given_S) if given_S else None


# Where a pass meets its copies: an autograd node before the program, and two of its stages.


def started(prefetch: Prefetch, weights: Weights) -> Weights:
    """The weights of the experts at home as the program wants them.

    Args:
        prefetch: of the pass.
        weights: of the experts at home on this rank, by slot or stacked.

    Returns:
        They, and a ticket: an empty tensor that makes every rank take part in backward.
    """
    copies = prefetch.copies
    ticket = copies.nothing.detach().requires_grad_(copies.is_trained)
    started: Weights = _Start.apply(prefetch, ticket, *weights)
    return started


class _Start(torch.autograd.Function):
    """Its backward ends the pass. Not a task of the program: it comes when the host's block ends,
    so that gradients have until then to come home."""

    @staticmethod
    def forward(ctx: Any, prefetch: Prefetch, ticket: Tensor, *weights: Tensor) -> Weights:
        ctx.prefetch = prefetch
        prefetch.start = ref(ctx)  # the node itself
        return tuple([weight.detach() for weight in (*weights, ticket)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.prefetch.come_home(grads[:-1])


@dataclass(frozen=True, eq=False)
class Join(SavesAlike):
    """Reads the weights at home and the route; writes the weights of all that compute here."""

    copies: Copies

    def forward(self, span: Span, weights: Weights, layer_route: LayerRoute) -> Done:
        copies = self.copies
        assert copies.coming is not None, "no pass has begun"
        prefetch, copies.coming = copies.coming, None
        if copies.before is not None and copies.before.released:
            prefetch.preceding = copies.before.released[-1]
        return (prefetch.weights(layer_route.target),), (prefetch,)

    def backward(self, span: Span, saved: Saved, grads: Weights) -> tuple[Any, ...]:
        return (saved[0].collect(grads),)


class HaveAgain(SavesAlike):
    """In backward, by what ``Join`` saved of the pass; in forward nothing was freed yet."""

    def forward(self, span: Span, *reads: Any) -> Done:
        return (None,), ()

    def backward(self, span: Span, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        saved[0].have_again()
        return ()
