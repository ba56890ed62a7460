# SPDX-License-Identifier: Apache-2.0
"""Copies of experts that travel encoded: packed at home, handed on so, unpacked on arrival.

Shape letters: N rows of a weight, D numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import Traffic, sparse_all_gather
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.moe.copies.slab import Weights
from ds_moe_ext.schedule.executor import Steps
from ds_moe_ext.transfer import Part


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
    """What copies travel as.

    Attributes:
        weights: to their cells; None: as they are.
        gradients: home; likewise.
    """

    weights: Codec | None = None
    gradients: Codec | None = None


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
