# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts for one step: gathered from their owners, their gradients summed there.

``Replicas`` are those of one layer: what the passes of a step share, and what is begun for its
neighbours. ``Prefetch`` is one pass of the layer: its replicas on their way here, and their
gradients on their way to the owner.

All transfers of a model run in the stream of parameters, in the order in which they were begun,
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
from ds_moe_ext.moe.joined_passes import DTYPES
from ds_moe_ext.moe.observation import TasksSeen, notify
from ds_moe_ext.moe.replica_memory import (
    AS_THEY_ARE,
    Accumulation,
    Codecs,
    KeptMeanwhile,
    LayerCoordinates,
    Piece,
    ReplicaMemory,
    Transfers,
    Weights,
    are_stacked,
    gathered,
    replica_bytes,
    whole,
)
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.planning.strategy import Destination, Plan
from ds_moe_ext.schedule.executor import Event, Mark, ScheduleStreams, Steps, streams_for
from ds_moe_ext.schedule.orders import TARGET_WEIGHTS, WEIGHTS
from ds_moe_ext.schedule.stages import Done, Saved, SavesAlike
from ds_moe_ext.schedule.task import GATHER, PARAM, ChunkRange, Op, Task, Value

T = TypeVar("T")
BYTES = 2  # of an element, as experts mostly travel


class Replicas:
    """One layer's replicas on this rank.

    Args:
        coordinates: where this rank stands.
        plan: the present plan.
        like: weights of any one expert, for their shapes, type and device.
        observers: notified when replicas and gradients travelled.
        codecs: what replicas travel as.

    Attributes:
        is_last_pass: whether the pass that runs is the last before the optimizer's step; gradients
            of replicas wait for it.
        accumulation: shows whether the host has dropped what earlier passes of a step left.
        transfers: of the present plan.
        traffic: payload of this rank so far.
        learns: see ``RoutedExperts.allow_replicas``.
        some_are_trained: of the layer's experts some are, on whatever rank, and some are not.
        before: the replicas of the layer whose backward pass follows this one's.
        after: those of the layer whose forward pass follows.
        coming: the pass that has begun in forward, until its program takes it on.
        returning: the pass whose gradients are not all on their way to the owner.
        released: passes whose replicas were freed and whose backward is still to come.
        latest_back: the pass whose backward came last to its join.
    """

    def __init__(
        self,
        coordinates: LayerCoordinates,
        plan: Plan,
        like: Weights,
        observers: tuple[TasksSeen, ...] = (),
        codecs: Codecs = AS_THEY_ARE,
    ) -> None:
        self.codecs = codecs
        # By elements, since not all ranks know the type yet; see ``learn_types``. Whole where sums
        # are in float32 or encoded: along a chain each rank adds two numbers and rounds, whatever
        # the type, and a codec wants rows.
        is_whole = coordinates.in_float32 or codecs.gradients is not None
        expert_bytes = 0 if is_whole else BYTES * sum(weight.numel() for weight in like)
        self.coordinates = replace(
            coordinates, transfer_size=replace(coordinates.transfer_size, expert_bytes=expert_bytes)
        )
        self.plan, self.like, self._observers = plan, like, observers
        self.transfers = self._prepared = Transfers.of(self.coordinates, plan)
        self.learns: Weights | None = None
        self.some_are_trained = False
        self._knows_types = False
        self.is_last_pass: Callable[[], bool] = lambda: True
        self.accumulation: Accumulation = KeptMeanwhile(lambda: 0)
        self.before: Replicas | None = None
        self.after: Replicas | None = None
        self.traffic = Traffic()
        self._counting = threading.Lock()  # the stream's thread ends some, and its caller others
        self._nothing: Tensor | None = None
        # Of a step; the replicas of its micro-batches lie in one memory.
        self._memory = ReplicaMemory()
        # the weights at their owners have not changed since it began to be filled
        self._is_current = False
        self._versions = 0  # of these, added up
        self._to_gather: deque[Piece] = deque()  # what it still lacks
        self._waiting: dict[int, Weights] = {}  # gradients of replicas from earlier micro-batches
        self._outstanding: list[Event] = []  # what nobody has joined, and maybe no pass will
        self._kept: Destination | None = None  # with replicas that a micro-batch added
        self._kept_memory: ReplicaMemory | None = None  # where these lie, once they were asked for
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
            replace(before, plan=plan) if serve else Transfers.of(self.coordinates, plan, before)
        )

    def discard(self) -> None:
        """Other weights have been put in: what earlier micro-batches left is of no use."""
        self._waiting.clear()
        self.forget()

    def forget(self) -> None:
        """The weights at their owners have changed, so that the replicas are stale. Call it after
        each step.

        Raises:
            RuntimeError: gradients of replicas are still waiting for a last micro-batch.
        """
        if self._waiting:
            raise RuntimeError(left_behind(f"layer {self.coordinates.layer}", self._waiting))
        self.join(self._outstanding)
        self._is_current = False
        self._kept = self._kept_memory = None
        self.released.clear()
        self.coming = self.returning = self.latest_back = None  # of a pass that failed

    def begin(self, weights: Weights, *, is_training: bool) -> Prefetch:
        """Begin a pass; its gather is launched piece by piece.

        Args:
            weights: of the experts at their owners on this rank, by slot or stacked.
            is_training: the replicas may serve later micro-batches of the step.

        Raises:
            RuntimeError: the weights were changed since an earlier micro-batch of the step.
        """
        owner = tuple(weight.detach() for weight in weights)
        if self.plan.rematerialize or not is_training or torch.is_inference_mode_enabled():
            # Outside of training a user may have put other weights in for a while; and what is made
            # in inference mode is of no use to others.
            memory = ReplicaMemory(self.transfers.copied)
            self.coming = Prefetch(self, memory, owner, deque(self.transfers.gathers))
            return self.coming
        # Micro-batches of one step share the memory and what it still lacks: the first gathers.
        versions = sum([weight._version for weight in owner])
        if not self._is_current:
            self._memory.clear(self.transfers.copied)
            self._to_gather = deque(self.transfers.gathers)
            self._is_current, self._versions = True, versions
        elif versions != self._versions and self.plan.has_replicas:
            raise RuntimeError(
                f"weights of experts of layer {self.coordinates.layer} were changed between "
                "two passes of a step, but replicas are made once a step and have the old "
                "weights; change weights only in the optimizer's step, gather replicas for "
                "each pass (key rematerialize of strategies with replicas), or use strategy "
                "'ep'"
            )
        self.coming = Prefetch(self, self._memory, owner, self._to_gather)
        return self.coming

    # Replicas that the rows of a pass ask for, besides those of the plan.

    def serving(self, destination: Destination) -> Destination:
        """Where the rows of a training pass go that asks for more replicas than were planned: those
        that an earlier micro-batch of the step has added, or else these, which serve later ones.
        So a pass that is computed again goes where it went."""
        if self.plan.rematerialize or torch.is_inference_mode_enabled():
            return destination
        self._kept = self._kept or destination
        return self._kept

    def added(self, target: Placement) -> tuple[ReplicaMemory, bool]:
        """Where replicas lie that a pass adds to the plan's, and whether they are there already, or
        on their way."""
        if self._kept is None or self._kept.target is not target:
            return ReplicaMemory(), False
        memory, is_there = self._kept_memory or ReplicaMemory(), self._kept_memory is not None
        self._kept_memory = memory
        return memory, is_there

    def widest(self, target: Placement) -> Placement:
        """Of a pass's target and that of the step's other passes the one with more replicas."""
        return target if self._kept is None else self._kept.target

    # What the tasks of this layer begin for its neighbours.

    def launch_following(self) -> None:
        """Launch the next piece of the gather for the layer after this one."""
        if self.after is not None and self.after.coming is not None:
            self.after.coming.launch()

    def send_to_owner(self, piece: int) -> None:
        """Send gradients of replicas to the owner: the first piece of this layer's, the second one
        of those of the layer after it."""
        replicas = self.after if piece else self
        if replicas is not None and replicas.returning is not None:
            replicas.returning.send()

    def recall_before(self) -> None:
        """Gather again for the layer before this one, if its replicas were freed: those of the same
        pass, as a pipeline has several under way; of the latest where this layer's were kept."""
        released = [] if self.before is None else self.before.released
        if released:
            same = None if self.latest_back is None else self.latest_back.preceding
            (same if same in released else released[-1]).recall()

    # Gradients that wait for the last micro-batch.

    def let_wait(self, grads: Mapping[int, Weights]) -> None:
        """Keep gradients of replicas until they are asked for; summed in 32 bits at least."""
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
        """Gradients of replicas with those of earlier micro-batches, which wait no longer."""
        if not self._waiting:
            return {**grads}
        self.let_wait(grads)
        waiting, self._waiting = self._waiting, {}
        self.streams.keep(one_of_each(waiting.values()))  # which another stream may have summed
        return {
            expert: tuple(total.to(weight.dtype) for total, weight in zip(totals, self.like))
            for expert, totals in waiting.items()
        }

    def drop_what_the_host_dropped(self) -> None:
        """Of earlier micro-batches nothing waits that their host keeps no more."""
        if self._waiting and not self.accumulation.is_kept():
            self._waiting.clear()

    # The stream of parameters, and who wants to know what travels there.

    @property
    def streams(self) -> ScheduleStreams:
        return streams_for(self.like[0].device, overlaps=True)

    def submit(self, part: Part, steps: Steps[None]) -> Event:
        """Queue what moves a part of the transfers in the stream of parameters."""
        # What is passed on at once cannot pause, and what is watched is there when it ends.
        may_pause = len(part.rounds) == 1 and not self.is_watched
        event = self.streams.begin(PARAM, steps, may_pause=may_pause)
        self._outstanding.append(event)
        return event

    def join(self, events: Sequence[Event]) -> None:
        """Make the caller's next work see what was queued."""
        self.streams.join(events)
        self._outstanding = [event for event in self._outstanding if event not in events]

    def moved(self, traffic: Traffic) -> None:
        with self._counting:
            self.traffic += traffic

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to know when replicas and gradients travel."""
        return any([each.is_on for each in self._observers])

    def began(self) -> Mark | None:
        """This moment in the stream that calls; None if nobody wants to know: marks cost a
        little."""
        return self.streams.mark() if self.is_watched else None

    def saw(self, op: Op, start: Mark | None, *, is_adjoint: bool = False, piece: int = 0) -> None:
        """Notify the observers of a task that began then and ends now."""
        if start is None:
            return
        layer, chunk_range = self.coordinates.layer, ChunkRange(piece, piece + 1)
        reads, writes = (Value(WEIGHTS, layer),), (Value(TARGET_WEIGHTS, layer),)
        task = Task(op, layer, chunk_range, reads, writes)
        if is_adjoint:
            task = Task(op, layer, chunk_range, writes, reads, adjoint_of=(0,))
        notify(self._observers, task, start, self.streams)

    # What the weights are like.

    def by_expert(self, tensors: Sequence[T], placement: Placement) -> dict[int, tuple[T, ...]]:
        """What lies by slot, one for each weight, by the experts that a placement has here."""
        size = len(self.like)
        experts = self.transfers.experts_here(placement)
        return {
            expert: tuple(tensors[i * size : (i + 1) * size]) for i, expert in enumerate(experts)
        }

    def learn_types(self, weights: Weights) -> None:
        """Those of weights, of which a rank may own none: a host may have cast them since
        it was last given. Collective over the EP ranks, the first time."""
        if self._knows_types:
            return
        self._knows_types = True
        like = self.like
        own = [DTYPES.index(weight.dtype) for weight in weights[: len(like)]] or [0] * len(like)
        reported = torch.tensor(own, device=like[0].device)
        dtypes = [
            DTYPES[number] for number in max_in_place(reported, self.coordinates.group).tolist()
        ]
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
    def replica_bytes(self) -> float:
        """Of one expert on its way, the mean of there and, as gradients, back."""
        return replica_bytes(self.like, self.codecs)

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


def left_behind(layer: str, experts: Iterable[int]) -> str:
    """That gradients of replicas of a layer are still here as its optimizer steps."""
    return (
        f"{layer} has gradients of replicas of experts {sorted(experts)} that were not sent to "
        "the owner before the optimizer's step: the last micro-batch did not pass through it; "
        "let every micro-batch use every MoE layer"
    )


def _own_sum(grad: Tensor) -> Tensor:
    """A sum to add to: autograd may give one tensor to several, or one element many times."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)


def in_order(layers: Iterable[Replicas]) -> None:
    """Let the replicas of a model's layers, given in forward order, know which come before and
    after."""
    before = None
    for replicas in layers:
        replicas.before, replicas.after = before, None
        if before is not None:
            before.after = replicas
        before = replicas


class Prefetch:
    """The replicas of one pass, from launch to the gradients' return.

    Attributes:
        target: who holds what in this pass: the plan's target, and more if the rows asked for it.
        preceding: of the layer before, in the same pass, if its replicas were freed.
        start: gives the node of autograd by which gradients come to the owner, while it is there.
    """

    def __init__(
        self, replicas: Replicas, memory: ReplicaMemory, owner: Weights, to_gather: deque[Piece]
    ) -> None:
        self.replicas, self.target = replicas, replicas.plan.target
        self.memory, self._owner = memory, owner
        self._is_owner_stacked = are_stacked(owner, replicas.like)
        self._to_gather = to_gather
        self._added = memory  # where replicas lie that the rows asked for
        self._to_send: deque[tuple[Piece, Mapping[int, Weights]]] = deque()
        self._reductions: list[Event] = []
        self._arrived: dict[int, Weights] = {}  # sums of gradients, by expert owned here
        self.preceding: Prefetch | None = None
        self.start: Callable[[], Any] = lambda: None

    # Forward.

    def launch(self) -> None:
        """Launch the next piece of the gather, if one is left."""
        if self._to_gather:
            piece = self._to_gather.popleft()
            room = self.memory.make_room(piece.part.received, self.replicas.like)
            self._gather(piece.part, self.memory, room, number=piece.number)

    def launch_rest(self) -> None:
        while self._to_gather:
            self.launch()

    def weights(self, target: Placement) -> Weights:
        """Weights of all experts that compute here in this pass, by slot; or stacked, those at
        their owners and then the replicas, where both are. Waits for the replicas.

        Args:
            target: who holds what; more than was launched if the rows asked for it.
        """
        self.launch_rest()
        replicas = self.replicas
        if target is not self.target:
            is_there = False
            if not replicas.plan.rematerialize:
                self._added, is_there = replicas.added(target)
            if not is_there:
                part = replicas.coordinates.part(self.target, target)
                held = {**self.memory.held}
                replicas.join(self.memory.gathers)  # which may be passed on
                room = self._added.make_room(part.received, replicas.like)
                self._gather(part, self._added, room, held)
            self.target = target
        self._wait()
        if self._computes_stacks:
            return tuple([stack.detach() for stack in (*self._owner, *self.memory.stacks)])
        experts = replicas.transfers.experts_here(target)
        there = {**self._added.held, **self.memory.held, **self._at_owner(experts)}
        return tuple([weight.detach() for expert in experts for weight in there[expert]])

    def gathered(self) -> dict[int, Weights]:
        """Weights of the experts that compute here and are owned elsewhere, as planned.
        Waits for them."""
        self.launch_rest()
        self._wait()
        return {expert: self.memory.held[expert] for expert in self.replicas.transfers.copied}

    @property
    def _computes_stacks(self) -> bool:
        """Whether all that computes here is stacked: those at their owners, and as planned the
        replicas."""
        replicas = self.replicas
        is_planned = self.target is replicas.plan.target and replicas.transfers.are_behind
        return self._is_owner_stacked and is_planned

    def _at_owner(self, experts: Iterable[int]) -> dict[int, Weights]:
        """Weights of those of them that are owned here."""
        slots, size = self.replicas.transfers.slots, len(self.replicas.like)
        here = [(expert, slots[expert]) for expert in experts if expert in slots]
        if self._is_owner_stacked:
            return {expert: tuple([own[slot] for own in self._owner]) for expert, slot in here}
        return {expert: self._owner[slot * size : (slot + 1) * size] for expert, slot in here}

    def _gather(
        self,
        part: Part,
        memory: ReplicaMemory,
        room: Mapping[int, Weights],
        held: Mapping[int, Weights] | None = None,
        *,
        number: int = 0,
    ) -> None:
        """Begin to fill the room with replicas; what is ``held`` here besides may be passed on."""
        if not part.rounds:
            return
        replicas, chunks = self.replicas, {**self._at_owner(part.sent), **(held or {})}

        def steps() -> Steps[None]:
            # In the parameter stream: the room was made in the thread that calls, so the stream's
            # stream must keep it from being used again before it has passed.
            start = replicas.began()
            replicas.streams.keep((memory,))
            group, codec = replicas.coordinates.group, replicas.codecs.weights
            replicas.moved((yield from gathered(part, chunks, room, group, codec)))
            replicas.saw(GATHER, start, piece=number)

        memory.gathers.append(replicas.submit(part, steps()))

    def _wait(self) -> None:
        replicas, memories = self.replicas, dict.fromkeys((self.memory, self._added))
        replicas.join([event for memory in memories for event in memory.gathers])
        replicas.streams.keep(memories)

    # Backward.

    def release(self) -> None:
        """Free the replicas until this pass's backward, which has them again."""
        self.memory.release()
        self.replicas.released.append(self)

    def recall(self) -> None:
        """Launch another gather of the same replicas, if they are not there."""
        if self.memory.is_released:
            part = self.replicas.transfers.part_to(self.target)
            self._gather(part, self.memory, self.memory.restore())

    def have_again(self) -> None:
        """Wait for the replicas, as backward comes now."""
        if self in self.replicas.released:
            self.replicas.released.remove(self)
        self.recall()
        self._wait()

    def collect(self, grads: Weights) -> tuple[Tensor | None, ...] | None:
        """Have gradients of the replicas ready to be sent; those that are known here now.

        Args:
            grads: of all experts that computed here, as ``weights`` gave theirs.

        Returns:
            Those of the experts at their owners, as their weights came, and of the ticket. None if
            no expert is trained, or none in this backward pass: where a user asks for gradients of
            inputs alone, as ``torch.autograd.grad`` has it, nobody adds those of experts up.
        """
        replicas, node = self.replicas, self.start()
        replicas.latest_back = self
        if not replicas.is_trained or node is None or not torch._C._will_engine_execute_node(node):
            return None
        own, of_replicas = self._apart(grads)
        replicas.drop_what_the_host_dropped()
        if replicas.is_last_pass() or replicas.plan.rematerialize:
            self._make_ready(replicas.all_waiting(of_replicas))
        else:
            replicas.let_wait_for_more(of_replicas)
        if replicas.plan.rematerialize:
            self.memory.release()
        replicas.returning = self
        return *own, replicas.nothing

    def _apart(
        self, grads: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], dict[int, Weights]]:
        """Gradients at their owners, as their weights came, and those of the replicas, by
        expert."""
        replicas, num_names = self.replicas, len(self.replicas.like)
        if self._computes_stacks:
            stacks = whole(grads[num_names:], self.memory.stacks)
            by_slot = zip(*(stack.unbind() for stack in stacks))
            return grads[:num_names], dict(zip(replicas.transfers.copied, by_slot))
        by_expert = replicas.by_expert(grads, self.target)
        slots = replicas.transfers.slots
        own = [grad for expert in slots for grad in by_expert[expert]]
        if self._is_owner_stacked:
            own = [_restacked(own[number::num_names]) for number in range(num_names)]
        return own, {
            expert: whole(found, replicas.like)
            for expert, found in by_expert.items()
            if expert not in slots
        }

    def _make_ready(self, grads: Mapping[int, Weights]) -> None:
        """Divide a step's gradients of replicas into the pieces in which they are sent."""
        replicas = self.replicas
        widest = replicas.widest(self.target)
        if widest is not self.target:  # of a pass whose backward may never have come
            nothing = whole([None] * len(replicas.like), replicas.like)
            here = set(replicas.transfers.experts_here(widest)).difference(replicas.transfers.slots)
            grads = {**dict.fromkeys(here, nothing), **grads}
        for piece in replicas.transfers.pieces_to_owner(widest):
            some = {expert: own for expert, own in grads.items() if expert in piece.experts}
            self._to_send.append((piece, some))

    def send(self) -> None:
        """Send the next piece of the gradients to the owner, if one is left."""
        if self._to_send:
            piece, grads = self._to_send.popleft()
            if piece.part.rounds:
                reduction = self._reduce(grads, piece)
                self._reductions.append(self.replicas.submit(piece.part, reduction))

    def _reduce(self, grads: Mapping[int, Weights], piece: Piece) -> Steps[None]:
        replicas, start, part = self.replicas, self.replicas.began(), piece.part
        replicas.streams.keep(one_of_each(grads.values()))
        arrived = yield from sparse_reduce_scatter(
            part,
            {**dict.fromkeys(part.sent, replicas.like), **grads},
            replicas.coordinates.group,
            in_float32=replicas.coordinates.in_float32,
            packing=replicas.codecs.packing,
        )
        replicas.moved(arrived.traffic)
        self._arrived.update(arrived.grads)
        replicas.saw(GATHER, start, is_adjoint=True, piece=piece.number)

    def send_back(self, grads: Mapping[int, Weights]) -> None:
        """Send gradients of ``replicas`` back: of all passes of a step, in the last of these."""
        self._make_ready(grads)
        while self._to_send:
            self.send()

    def sums(self) -> dict[int, Weights]:
        """What has come of ``send_back`` from all replicas, by expert owned here. Waits for
        it."""
        replicas = self.replicas
        replicas.join(self._reductions)
        arrived, self._arrived, self._reductions = self._arrived, {}, []
        replicas.streams.keep(one_of_each(arrived.values()))
        return arrived

    def arrive_at_owner(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The finished gradients of the experts at their owners. Waits for all that was sent.

        Args:
            grads: as ``collect`` gave them, without the ticket's.
        """
        replicas = self.replicas
        replicas.returning = None
        while self._to_send:
            self.send()
        if not self._reductions:
            return list(grads)
        arrived = self.sums()
        if self._is_owner_stacked:
            # Added where they lie: the program made these stacks for this alone.
            stacks, slots = [stack.contiguous() for stack in grads], replicas.transfers.slots
            own_sums = [stack[slots[expert]] for expert in arrived for stack in stacks]
            add_each(own_sums, [total for sums in arrived.values() for total in sums])
            return stacks
        finished: list[Tensor] = []
        totals: list[Tensor] = []
        more: list[Tensor] = []
        for expert, own in replicas.by_expert(grads, replicas.plan.owner).items():
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


# Where a pass meets its replicas: an autograd node before the program, and two of its stages.


def started(prefetch: Prefetch, weights: Weights) -> Weights:
    """The weights of the experts at their owners as the program wants them.

    Args:
        prefetch: of the pass.
        weights: of the experts at their owners on this rank, by slot or stacked.

    Returns:
        They, and a ticket: an empty tensor that makes every rank take part in backward.
    """
    replicas = prefetch.replicas
    ticket = replicas.nothing.detach().requires_grad_(replicas.is_trained)
    started: Weights = _Start.apply(prefetch, ticket, *weights)
    return started


class _Start(torch.autograd.Function):
    """Its backward ends the pass. Not a task of the program: it comes when the host's block ends,
    so that gradients have until then to come to the owner."""

    @staticmethod
    def forward(ctx: Any, prefetch: Prefetch, ticket: Tensor, *weights: Tensor) -> Weights:
        ctx.prefetch = prefetch
        prefetch.start = ref(ctx)  # the node itself
        return tuple([weight.detach() for weight in (*weights, ticket)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.prefetch.arrive_at_owner(grads[:-1])


@dataclass(frozen=True, eq=False)
class Join(SavesAlike):
    """Reads the weights at their owners and the route; writes the weights of all that compute
    here."""

    replicas: Replicas

    def forward(self, chunk_range: ChunkRange, weights: Weights, layer_route: LayerRoute) -> Done:
        replicas = self.replicas
        assert replicas.coming is not None, "no pass has begun"
        prefetch, replicas.coming = replicas.coming, None
        if replicas.before is not None and replicas.before.released:
            prefetch.preceding = replicas.before.released[-1]
        return (prefetch.weights(layer_route.target),), (prefetch,)

    def backward(self, chunk_range: ChunkRange, saved: Saved, grads: Weights) -> tuple[Any, ...]:
        return (saved[0].collect(grads),)


class HaveAgain(SavesAlike):
    """In backward, by what ``Join`` saved of the pass; in forward nothing was freed yet."""

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> Done:
        return (None,), ()

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        saved[0].have_again()
        return ()
