# SPDX-License-Identifier: Apache-2.0
"""What rows travel as between EP ranks: fewer bytes, at the price of an error.

A codec stands at both ends of an all-to-all, of any algorithm: rows are encoded where they leave
and decoded where they arrive. Shape letters: N rows sent, R rows received, D model width, B numbers
that a row travels as.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.older_names import accepts_older


class Coding(NamedTuple):
    """Of one direction."""

    # rows ``[N, D]`` to what travels, ``[N, ...]``: row by row, as many from every rank
    encode: Callable[[Tensor], Tensor]
    # what arrived, ``[R, ...]``, and rows like those that were sent, to ``[R, D]``
    decode: Callable[[Tensor, Tensor], Tensor]

    def around(self, travel: Callable[[Tensor], Tensor], rows_ND: Tensor) -> Tensor:
        """Encode, travel, decode: ``[N, D]`` to ``[R, D]``.

        Raises:
            ValueError: a row is lost, or comes out of other width or type.
        """
        encoded = self.encode(rows_ND)
        if encoded.shape[:1] != rows_ND.shape[:1]:
            self._refuse(f"encodes {rows_ND.shape[0]} rows as {tuple(encoded.shape)}")
        arrived = travel(encoded)
        rows_RD = self.decode(arrived, rows_ND)
        wanted = (arrived.shape[0], *rows_ND.shape[1:])
        if rows_RD.shape != wanted or rows_RD.dtype != rows_ND.dtype:
            self._refuse(
                f"decodes {rows_RD.dtype} {tuple(rows_RD.shape)} where {rows_ND.dtype} {wanted} "
                "was sent"
            )
        return rows_RD

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"codec {self.encode} {what}; it must keep the number of rows, and decode must "
            "restore shape and type"
        )


@accepts_older
@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Encodes rows that travel. A subclass is a frozen dataclass: its fields are its JSON keys.

    The adjoint is straight-through: gradients of rows are taken for gradients of what was decoded,
    as if nothing had been encoded. They travel encoded themselves, unless ``gradients`` is false;
    ``encode_grad`` and ``decode_grad`` may do it otherwise than ``encode`` and ``decode``. All are
    called in the stream of the all-to-all, on tensors that autograd does not see, and must neither
    communicate nor wait for the device.
    """

    dispatch: bool = True  # encode rows on their way to the experts
    combine: bool = True  # and on their way back
    gradients: bool = True  # and their gradients
    # within ETP groups, too: what their ranks gather and, summand by summand, what they add up
    etp: bool = False
    replicas: bool = False  # of experts, too: their weights, row by row
    # and the gradients of these, at each hop on their way to the owner, where sums are made: each
    # rounds once more
    replica_gradients: bool = False

    @abstractmethod
    def encode(self, rows_ND: Tensor) -> Tensor:
        """``[N, D]`` to what travels, ``[N, ...]`` of any type; the same rows as the same, for they
        may be encoded again for backward."""

    @abstractmethod
    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        """What arrived to ``[R, D]``, of the type and width of ``like``."""

    def encode_grad(self, rows_ND: Tensor) -> Tensor:
        """As ``encode``, of gradients, which travel once: it may round by chance."""
        return self.encode(rows_ND)

    def decode_grad(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        """As ``decode``, of gradients."""
        return self.decode(arrived_RB, like_ND)

    @property
    def of_rows(self) -> Coding:
        """How rows travel."""
        return Coding(self.encode, self.decode)

    @property
    def of_gradients(self) -> Coding | None:
        """How their gradients do."""
        return Coding(self.encode_grad, self.decode_grad) if self.gradients else None


@dataclass(frozen=True, kw_only=True)
class BFloat16(Codec):
    """Rows travel as bfloat16: half of float32's bytes. A number is off by up to 1/256 of itself,
    which is half of the last of its 8 bits."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.to(torch.bfloat16)

    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return arrived_RB.to(like_ND.dtype)


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """Rows travel as int8 with one float32 scale each: ``D + 4`` bytes, of float32's ``4 D``. A
    number is off by up to 1/254 of the largest of its row. What is not finite stays so."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        exact = torch.promote_types(rows_ND.dtype, torch.float32)
        largest_N1 = rows_ND.abs().amax(dim=1, keepdim=True).to(exact)
        scale_N1 = (largest_N1 / MOST).float().clamp(min=torch.finfo(torch.float32).tiny)
        steps_ND = (rows_ND.to(exact) / scale_N1).round_().clamp_(-MOST, MOST)
        return torch.cat((steps_ND.to(torch.int8), scale_N1.view(torch.int8)), dim=1)

    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        exact = torch.promote_types(like_ND.dtype, torch.float32)
        steps_RD, scale_RB = arrived_RB.split((like_ND.shape[1], SCALE_BYTES), dim=1)
        # A replica: as a view, scales need not begin where a float32 may.
        scale_R1 = scale_RB.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (steps_RD.to(exact) * scale_R1).to(like_ND.dtype)


MOST = 127  # of int8, on both sides of 0
SCALE_BYTES = 4
