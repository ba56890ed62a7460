# SPDX-License-Identifier: Apache-2.0
"""Transfers of replicas: who sends what by a plan, where it arrives, and what it travels as.

Replicas are no parameters. Autograd may save views of them, so that the memory can be freed and had
again behind its back, as long as the same values are put in (see ``ReplicaMemory.release``). Shape
letters: C EP ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.core.comm import Traffic, sparse_all_gather
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import SMALL, Move, Part, TransferSize, part_of, star_of
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule.executor import Event, OnDevice, Steps

Weights = tuple[Tensor, ...]  # of one expert, in the order of their names


def are_stacked(weights: Weights, like: Weights) -> bool:
    """Whether each is of all slots, ``[S, ...]``, a name each, and not one after the other of the
    first slot, then of the second and so on."""
    return bool(weights) and weights[0].dim() > like[0].dim()


def whole(grads: Sequence[Tensor | None], like: Weights) -> Weights:
    """Zeros for weights that an expert does not use: every replica sends all."""
    if all(grad is not None for grad in grads):
        return cast(Weights, grads)
    return tuple(torch.zeros_like(w) if g is None else g for g, w in zip(grads, like))


@dataclass(frozen=True, eq=False)
class LayerCoordinates:
    """Where this rank stands among those that hold a layer's experts."""

    layer: int  # number of the layer
    ep_rank: int  # this rank's EP rank
    node_C: np.ndarray  # node of each EP rank
    group: dist.ProcessGroup  # the EP ranks, in a communicator that only the parameter stream uses
    # sums of gradients on their way to the owner are kept so; the same in all EP ranks
    in_float32: bool = False
    broadcasts: bool = False  # what goes to all EP ranks travels by broadcasts
    transfer_size: TransferSize = SMALL  # how large an expert is

    @property
    def has_stars(self) -> bool:
        """Whether what goes to all EP ranks needs no trees. A star brings to the owner all
        gradients at once, so that their sums could not be kept in 32 bits."""
        return self.broadcasts and not self.in_float32

    def part(self, held: Placement, wanted: Placement) -> Part:
        """What this EP rank does for the others to get their replicas."""
        if self.has_stars:
            star = star_of(held, wanted, self.node_C, self.ep_rank)
            if star is not None:
                return star
        return part_of(held, wanted, self.node_C, self.ep_rank, self.transfer_size)

    def experts(self, placement: Placement) -> Sequence[int]:
        """Experts that a placement has in this EP rank, by slot."""
        experts: list[int] = placement.experts_of(self.ep_rank).tolist()
        return experts


class Piece(NamedTuple):
    """Some of the transfers of a plan."""

    part: Part  # what this EP rank does of them
    experts: Collection[int]  # whose replicas these are
    number: int = 0  # of the piece, for traces


@dataclass(frozen=True, eq=False)
class Transfers:
    """What this rank sends and receives by one plan; worked out from the plan alone, so that it can
    be done beforehand."""

    coordinates: LayerCoordinates
    plan: Plan
    whole: Part  # of all replicas at once
    gathers: Sequence[Piece]  # the pieces in which they travel
    reductions: Sequence[Piece]  # the pieces in which their gradients do
    slots: Mapping[int, int]  # of the experts at their owners here
    planned: Sequence[int]  # experts that compute here, by slot
    copied: Sequence[int]  # those of them that are owned elsewhere
    are_behind: bool  # the slots of replicas come behind those of the experts at their owners

    @classmethod
    def of(
        cls, coordinates: LayerCoordinates, plan: Plan, before: Transfers | None = None
    ) -> Transfers:
        """The costly part of taking a plan.

        Args:
            before: of an earlier plan, which may know the experts at their owners.
        """
        owner, target = plan.owner, plan.target
        whole = coordinates.part(owner, target)
        own = before.experts_here(owner) if before is not None else coordinates.experts(owner)
        slots = {expert: slot for slot, expert in enumerate(own)}
        planned = coordinates.experts(target)
        copied = [expert for expert in planned if expert not in slots]
        here = slots, planned, copied, [*planned] == [*own, *copied]
        if plan.carried is None:
            whole.prepare()
            all_ = [Piece(whole, range(owner.num_experts))]
            return cls(coordinates, plan, whole, all_, all_, *here)
        moved = frozenset(np.flatnonzero((target.holds_EC > owner.holds_EC).any(axis=1)).tolist())
        parts = {moved: whole}  # both splits have often the same pieces, or one with all

        def piece(number: int, experts: frozenset[int]) -> Piece:
            if experts not in parts and coordinates.has_stars and whole.everywhere:
                parts[experts] = _of_star(whole, experts)
            elif experts not in parts:
                some_EC = np.zeros_like(target.holds_EC)
                some_EC[list(experts)] = target.holds_EC[list(experts)]
                parts[experts] = coordinates.part(owner, owner.with_replicas(some_EC))
            return Piece(parts[experts], experts, number)

        gathers, reductions = (
            [piece(number, frozenset(experts)) for number, experts in enumerate(split)]
            for split in plan.carried
        )
        for part in parts.values():
            part.prepare()
        return cls(coordinates, plan, whole, gathers, reductions, *here)

    def experts_here(self, placement: Placement) -> Sequence[int]:
        """Experts that a placement has here, by slot."""
        if placement is self.plan.target:
            return self.planned
        return (
            [*self.slots] if placement is self.plan.owner else self.coordinates.experts(placement)
        )

    def serve(self, plan: Plan) -> bool:
        """Whether another plan asks for the same."""
        mine = self.plan
        return plan.carried == mine.carried and all(
            one.is_like(other)
            for one, other in ((plan.owner, mine.owner), (plan.target, mine.target))
        )

    def part_to(self, target: Placement) -> Part:
        """For replicas to come from the owners, also where a target has more than the plan's."""
        if target is self.plan.target:
            return self.whole
        return self.coordinates.part(self.plan.owner, target)

    def pieces_to_owner(self, target: Placement) -> Sequence[Piece]:
        """In which gradients of the replicas go to the owner."""
        if target is self.plan.target:
            return self.reductions
        return [Piece(self.part_to(target), range(target.num_experts))]


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


class ReplicaMemory(OnDevice):
    """Memory for this rank's replicas of one layer, which can be filled anew or freed.

    Args:
        planned: experts that are to be copied, by slot.

    Attributes:
        held: replicas, by expert.
        gathers: what fills it; whoever reads a replica joins them first.
        is_released: the memory was freed, if there was any: what other ranks copy from here is
            gathered again all the same.
        stacks: of each name all replicas that were planned, ``[S, ...]``; none before there is
            room.
    """

    def __init__(self, planned: Sequence[int] = ()) -> None:
        self._planned = planned
        self._blocks: list[Weights] = []  # of some slots each, slot first; first of the planned
        self._slots: list[Weights] = []  # of the first block
        self._room: dict[int, Weights] = {}
        self.held: dict[int, Weights] = {}
        self._sizes: list[int] = []  # of the freed memory, in bytes
        self.gathers: list[Event] = []
        self.is_released = False
        self.stacks: Weights = ()

    def clear(self, planned: Sequence[int]) -> None:
        """Forget whose replicas they are; the memory stays, if it is enough for those planned
        now."""
        self.held.clear()
        self.gathers.clear()
        if planned is self._planned:  # their slots wait for them
            return
        self._planned = planned
        if len(planned) > len(self._slots):
            self._blocks, self._slots = [], []
        self._reserve()

    def make_room(self, experts: Sequence[int], like: Weights) -> dict[int, Weights]:
        """Where the replicas of these experts go, besides those that are there."""
        if self._planned and not self._blocks:
            self._slots = self._make(len(self._planned), like)
            self._reserve()
        more = sorted(expert for expert in experts if expert not in self._room)
        if more:
            self._room |= zip(more, self._make(len(more), like))
        room = {expert: self._room[expert] for expert in experts}
        self.held |= room
        return room

    def _make(self, num_slots: int, like: Weights) -> list[Weights]:
        block = tuple(tensor.detach().new_empty(num_slots, *tensor.shape) for tensor in like)
        self._blocks.append(block)
        return list(zip(*(tensor.unbind() for tensor in block)))

    def _reserve(self) -> None:
        """The first slots for what is planned."""
        planned = self._planned
        self._room = dict(zip(planned, self._slots))
        has_room = bool(planned and self._blocks)
        self.stacks = tuple(own[: len(planned)] for own in self._blocks[0]) if has_room else ()

    def tensors(self) -> Weights:
        return tuple(tensor for block in self._blocks for tensor in block)

    def release(self) -> None:
        """Free the memory; whoever has saved a view of it will find the same values after
        ``restore`` and another gather."""
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        self._sizes = [storage.nbytes() for storage in storages]
        self.is_released = True
        for storage in storages:
            storage.resize_(0)
        self.gathers.clear()

    def restore(self) -> dict[int, Weights]:
        """Have the memory again; where the replicas go. Autograd does not take what is written to
        ``data`` for a change of what it has saved: the values are the same."""
        for tensor, size in zip(self.tensors(), self._sizes):
            tensor.untyped_storage().resize_(size)
        self._sizes, self.is_released = [], False
        return {expert: tuple([w.data for w in own]) for expert, own in self.held.items()}


# Replicas of experts that travel encoded: packed at the owner, handed on so, unpacked on arrival.


def gathered(
    part: Part,
    chunks: Mapping[int, Sequence[Tensor]],
    buffers: Mapping[int, Sequence[Tensor]],
    group: dist.ProcessGroup,
    codec: Codec | None,
) -> Steps[Traffic]:
    """As ``sparse_all_gather``, through a codec: buffers have what it makes of the holders' bits.

    The owner computes with its own weights as they are, and its replicas with decoded ones.
    """
    if codec is None or not part.rounds:
        return (yield from sparse_all_gather(part, chunks, buffers, group))
    rooms = {expert: packed(buffers[expert], codec) for expert in part.received}  # for their shapes
    own = {expert: packed(chunks[expert], codec) for expert in part.sent if expert not in rooms}
    traffic = yield from sparse_all_gather(part, own, rooms, group)
    for expert, room in rooms.items():
        _unpack(room, buffers[expert], codec)
    return traffic


@torch.no_grad()
def _unpack(room: Sequence[Tensor], buffers: Sequence[Tensor], codec: Codec) -> None:
    for arrived, buffer in zip(room, buffers):
        decoded_ND = codec.decode(arrived, _rows(buffer))
        buffer.detach().copy_(decoded_ND.reshape(buffer.shape))


@torch.no_grad()
def packed(weights: Sequence[Tensor], codec: Codec) -> Weights:
    """What the weights of an expert travel as: row by row of each, a vector as one row."""
    return tuple(codec.encode(_rows(weight)).contiguous() for weight in weights)


def _rows(weight: Tensor) -> Tensor:
    """``[N, D]``."""
    weight = weight.detach()
    return weight[None] if weight.dim() == 1 else weight.flatten(0, -2)


def check_repeats(codec: Codec | None, like: Weights, device: torch.device) -> None:
    """A pass must have the same replicas forward and backward, for which they may be encoded twice:
    where they were freed in between, or layers run again.

    Raises:
        ValueError: it does not encode the same rows as the same.
    """
    if codec is None:
        return
    for width, dtype in dict.fromkeys((weight.shape[-1], weight.dtype) for weight in like):
        drawn_ND = torch.randn(ASKED, width, generator=torch.Generator().manual_seed(0))
        rows_ND = drawn_ND.to(device, dtype)
        first, again = (codec.encode(rows_ND.clone()).contiguous() for _ in range(2))
        if not torch.equal(first.view(torch.uint8), again.view(torch.uint8)):
            raise ValueError(
                f"{codec} has 'replicas' and encodes the same rows in two ways, so backward "
                "might use other replica weights than forward; make encode deterministic "
                "(random numbers only from its own seed), or set 'replicas' to false"
            )


ASKED = 8  # rows that a codec is to encode as the same


@dataclass(frozen=True)
class GradientPacking:
    """Sums of gradients by a codec."""

    codec: Codec

    def pack(self, tensors: Sequence[Tensor]) -> Weights:
        return tuple(self.codec.encode_grad(_rows(each)).contiguous() for each in tensors)

    def unpack(self, arrived: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for each, room in zip(arrived, into):
            room.copy_(self.codec.decode_grad(each, _rows(room)).reshape(room.shape))


class Codecs(NamedTuple):
    weights: Codec | None = None  # of replicas on their way to their EP ranks; None: as they are
    gradients: Codec | None = None  # of their gradients on their way to the owner; likewise

    @property
    def packing(self) -> GradientPacking | None:
        return None if self.gradients is None else GradientPacking(self.gradients)


AS_THEY_ARE = Codecs()


def replica_bytes(like: Weights, codecs: Codecs) -> float:
    """Bytes of one expert on its way: the mean of its weights' and their gradients'."""
    there = None if codecs.weights is None else codecs.weights.encode
    back = None if codecs.gradients is None else codecs.gradients.encode_grad
    return sum(_bytes(weight, there) + _bytes(weight, back) for weight in like) / 2


def _bytes(weight: Tensor, encode: Callable[[Tensor], Tensor] | None) -> int:
    """As one of its rows says, for all are encoded alike."""
    if encode is None:
        return weight.nbytes
    width = weight.shape[-1]
    return weight.numel() // width * encode(weight.detach().new_zeros(1, width)).nbytes


# Whether a host still has what earlier backward passes of a step left of experts' gradients.


class Accumulation(Protocol):
    """What a host has of one layer's experts that this rank owns."""

    def begin(self) -> None:
        """The first pass of a step is about to leave gradients with the host."""
        ...

    def is_kept(self) -> bool:
        """Whether the host still has what passes have left since ``begin``.

        Raises:
            RuntimeError: it has something else.
        """
        ...


class KeptMeanwhile:
    """Of a host that says when it drops what it has: a number is then another."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number, self._begun = number, number()

    def begin(self) -> None:
        self._begun = self._number()

    def is_kept(self) -> bool:
        return self._number() == self._begun


class KeptInGrad:
    """Of a host that accumulates in ``.grad``, which a user may set to None or to zeros.

    The weight that got a gradient last stands for all of the layer's: users drop all or nothing.
    Where none owned here got any, nothing is known, and nothing is dropped.

    Args:
        layer: its number, for a person.
        weights: gives the parameters that this rank owns, as they are when it is asked.
    """

    def __init__(self, layer: int, weights: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._layer, self._weights = layer, weights
        self._watched: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []  # of these
        self._seen: tuple[Tensor, int] | None = None  # it, and the version of its gradient

    def begin(self) -> None:
        """Experts may have moved since the last step."""
        self._seen = None
        weights = [weight for weight in self._weights() if weight.requires_grad]
        if [*map(id, weights)] != [*map(id, self._watched)]:
            for hook in self._hooks:
                hook.remove()
            self._watched = weights
            self._hooks = [w.register_post_accumulate_grad_hook(self._saw) for w in weights]

    def _saw(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._seen = weight, weight.grad._version

    def is_kept(self) -> bool:
        """It waits for the device only where gradients were changed."""
        if self._seen is None:
            return True
        weight, version = self._seen
        if weight.grad is None:
            return False
        if weight.grad._version == version:
            return True
        if any(bool(w.grad.any()) for w in self._weights() if w.grad is not None):
            raise RuntimeError(
                f"gradients of experts of layer {self._layer} were changed between the "
                "backward passes of a step, but gradients of replicas stay on other ranks "
                "until the last one: scale losses instead, or change gradients after the last "
                "backward pass"
            )
        return False
