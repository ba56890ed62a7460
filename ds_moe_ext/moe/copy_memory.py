# SPDX-License-Identifier: Apache-2.0
"""Memory for copies of experts: slots that are used again from step to step.

Copies are no parameters. Autograd may save views of them, so that the memory can be freed and had
again behind its back, as long as the same values are put in (see ``Slab.release``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.core.comm import Traffic, sparse_all_gather
from ds_moe_ext.core.transfer import Part
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.schedule.executor import Event, OnDevice, Steps

Weights = tuple[Tensor, ...]  # of one expert, in the order of their names


def are_stacked(weights: Weights, like: Weights) -> bool:
    """Whether each is of all slots, ``[S, ...]``, a name each, and not one after the other of the
    first slot, then of the second and so on."""
    return bool(weights) and weights[0].dim() > like[0].dim()


def by_slot(stacks: Weights) -> list[Weights]:
    """What is stacked, slot by slot."""
    return list(zip(*(stack.unbind() for stack in stacks)))


def whole(grads: Sequence[Tensor | None], like: Weights) -> Weights:
    """Zeros for weights that an expert does not use: every copy sends all."""
    if all(grad is not None for grad in grads):
        return cast(Weights, grads)
    return tuple(torch.zeros_like(w) if g is None else g for g, w in zip(grads, like))


class Slab(OnDevice):
    """Memory for this rank's copies of one layer, which can be filled anew or freed.

    Args:
        planned: experts that are to be copied, by slot.

    Attributes:
        held: copies, by expert.
        gathers: what fills it; whoever reads a copy joins them first.
        is_released: the memory was freed, if there was any: what other ranks copy from here is
            gathered again all the same.
        stacks: of each name all copies that were planned, ``[S, ...]``; none before there is room.
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
        """Forget whose copies they are; the memory stays, if it is enough for those planned now."""
        self.held.clear()
        self.gathers.clear()
        if planned is self._planned:  # their slots wait for them
            return
        self._planned = planned
        if len(planned) > len(self._slots):
            self._blocks, self._slots = [], []
        self._reserve()

    def make_room(self, experts: Sequence[int], like: Weights) -> dict[int, Weights]:
        """Where the copies of these experts go, besides those that are there."""
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
        """A block; its slots."""
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
        """Have the memory again; where the copies go."""
        for tensor, size in zip(self.tensors(), self._sizes):
            tensor.untyped_storage().resize_(size)
        self._sizes, self.is_released = [], False
        return {**self.held}


# Copies of experts that travel encoded: packed at home, handed on so, unpacked on arrival.


def gathered(
    part: Part,
    chunks: Mapping[int, Sequence[Tensor]],
    buffers: Mapping[int, Sequence[Tensor]],
    group: dist.ProcessGroup,
    codec: Codec | None,
) -> Steps[Traffic]:
    """As ``sparse_all_gather``, through a codec: buffers have what it makes of the holders' bits.

    The home computes with its own weights as they are, and its copies with decoded ones.
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
    """A pass must have the same copies forward and backward, for which they may be encoded twice:
    where they were freed in between, or layers run again.

    Args:
        codec: of copies.
        like: weights of an expert, for their widths and types.
        device: where they will be encoded.

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
                f"{codec} has 'copies' and encodes the same rows in two ways, so that backward "
                "might have other copies of experts than forward had; let encode give the same for "
                "the same rows (no random numbers but those of a seed of its own), or set 'copies' "
                "to false"
            )


ASKED = 8  # rows that a codec is to encode as the same


class Codecs(NamedTuple):
    """What copies travel as."""

    weights: Codec | None = None  # to their cells; None: as they are
    gradients: Codec | None = None  # home; likewise


AS_THEY_ARE = Codecs()


@dataclass(frozen=True)
class GradientPacking:
    """Sums of gradients by a codec."""

    codec: Codec

    def pack(self, tensors: Sequence[Tensor]) -> Weights:
        return tuple(self.codec.encode_grad(_rows(each)).contiguous() for each in tensors)

    def unpack(self, arrived: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for each, room in zip(arrived, into):
            room.copy_(self.codec.decode_grad(each, _rows(room)).reshape(room.shape))


def packing_of(codecs: Codecs) -> GradientPacking | None:
    """Of gradients on their way home."""
    return None if codecs.gradients is None else GradientPacking(codecs.gradients)


def copy_bytes(like: Weights, codecs: Codecs) -> float:
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
    """What a host has of one layer's experts that are at home on this rank."""

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
    """Of a host that says when it drops what it has: a number is then another.

    Args:
        number: tells it.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number, self._begun = number, number()

    def begin(self) -> None:
        """See ``Accumulation``."""
        self._begun = self._number()

    def is_kept(self) -> bool:
        """See ``Accumulation``."""
        return self._number() == self._begun


class KeptInGrad:
    """Of a host that accumulates in ``.grad``, which a user may set to None or to zeros.

    The weight that got a gradient last stands for all of the layer's: users drop all or nothing.
    Where none at home here got any, nothing is known, and nothing is dropped.

    Args:
        layer: its number, for a person.
        weights: gives the parameters that are at home, as they are when it is asked.
    """

    def __init__(self, layer: int, weights: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._layer, self._weights = layer, weights
        self._watched: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []  # of these
        self._seen: tuple[Tensor, int] | None = None  # it, and the version of its gradient

    def begin(self) -> None:
        """See ``Accumulation``. Experts may have moved since the last step."""
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
        """See ``Accumulation``. It waits for the device only where gradients were changed."""
        if self._seen is None:
            return True
        weight, version = self._seen
        if weight.grad is None:
            return False
        if weight.grad._version == version:
            return True
        if any(bool(w.grad.any()) for w in self._weights() if w.grad is not None):
            raise RuntimeError(
                f"gradients of experts of layer {self._layer} were changed in the midst of a step "
                "of several backward passes, but those of copied experts wait on other ranks for "
                "the last one, and would not be changed alike: scale losses instead, or change "
                "gradients behind the last backward pass"
            )
        return False
