# SPDX-License-Identifier: Apache-2.0
"""A flight: the copies of experts for one pass, there and, as gradients, back.

They travel in pieces, each launched when the strategy says so; whoever needs them launches what is
left and waits. Copies are no parameters: the host's optimizer never sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.comm import add_each, sparse_reduce_scatter
from ds_moe_ext.moe.copies.airfield import Airfield
from ds_moe_ext.moe.copies.packing import gathered, packing_of
from ds_moe_ext.moe.copies.slab import Slab, Weights, are_stacked, by_slot, whole
from ds_moe_ext.moe.copies.trips import Piece
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.executor import Event, Steps
from ds_moe_ext.schedule.task import GATHER
from ds_moe_ext.side_by_side import one_of_each, restacked
from ds_moe_ext.transfer import Part


class Flight:
    """The copies of one pass, from launch to the gradients' return.

    Args:
        copies: what it shares with the layer's other flights.
        slab: where those of the plan lie.
        home: weights of the experts at home on this rank, by slot or stacked.
        to_gather: what has to travel, piece by piece; the flight takes from it what it launches.

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
