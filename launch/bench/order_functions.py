# SPDX-License-Identifier: Apache-2.0
"""GShard's and Tutel's order functions: tokens to one padded buffer of every expert, and back.

No strategy runs by these: ``moe/order.py`` sends the rows that there are, and pads none. They are
the papers' own, for comparison: experts get rows of one shape ``[E, B, D]`` (FSMoE's
``(E, T, M)``). Both fill the same buffer, and are differentiable.

Shape letters: T tokens, K choices a token, E experts, B rows in the buffer of each expert, D model
width, N choices of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot

from ds_moe_ext.core.comm import max_in_place
from ds_moe_ext.moe.gate import capacity_of, count


class Room(NamedTuple):
    """How many rows an expert has.

    Attributes:
        most: that it takes; what comes later is dropped.
        padded: of its buffer, ``B``.
    """

    most: int
    padded: int


def room_of(
    expert_TK: Tensor,
    num_experts: int,
    *,
    factor: float | None,
    multiple: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Room:
    """Room by a capacity factor, or for all rows.

    Padding takes no rows, so that which rows are dropped does not depend on the degrees.

    Args:
        expert_TK: chosen experts, -1 where a choice is not used.
        num_experts: ``E``.
        factor: rows that an expert takes, over the mean; None drops nothing: as many as the busiest
            expert has, of any rank of the group, and the host waits for the device to know it.
        multiple: what the buffer's length shall be a multiple of: that of both degrees.
        group: ranks whose buffers shall be alike, where nothing is dropped; then collective.
    """
    if factor is not None:
        most = capacity_of(expert_TK.numel(), num_experts, factor)
    else:
        busiest = count(expert_TK.flatten() + 1, num_experts + 1)[1:].max()
        most = int(busiest if group is None else max_in_place(busiest, group))
    return Room(most, -(-most // multiple) * multiple)


@dataclass(frozen=True, eq=False)
class Seats:
    """Which row of which expert's buffer each choice has. Integers only.

    Attributes:
        expert_TK: its expert, int64.
        row_TK: its row there; -1 where it is dropped or not used.
        num_experts: ``E``.
        num_rows: ``B``.
    """

    expert_TK: Tensor
    row_TK: Tensor
    num_experts: int
    num_rows: int

    @classmethod
    def of(cls, expert_TK: Tensor, num_experts: int, room: Room) -> Seats:
        """By a running count of each expert's rows: first choices of all tokens, then second ones,
        each in the order of tokens, until the expert has no room."""
        expert_N = expert_TK.T.flatten()
        is_of_NE = one_hot(expert_N + 1, num_experts + 1)[:, 1:]
        row_N = ((is_of_NE.cumsum(dim=0) - 1) * is_of_NE).sum(dim=1)
        is_kept_N = (expert_N >= 0) & (row_N < room.most)
        row_TK = row_N.where(is_kept_N, -1).view(expert_TK.T.shape).T
        return cls(expert_TK, row_TK, num_experts, room.padded)


class Ordering(Protocol):
    """An order function and its inverse."""

    def order(self, x_TD: Tensor, seats: Seats) -> Tensor:
        """Tokens ``[T, D]`` to their experts' buffers ``[E, B, D]``, zeros where no row is."""
        ...

    def restore(self, rows_EBD: Tensor, score_TK: Tensor, seats: Seats) -> Tensor:
        """I-Order: a token's rows, times their scores, added up: ``[T, D]``. What was dropped gives
        nothing."""
        ...


@dataclass(frozen=True)
class OneHotOrdering:
    """GShard's: a mask ``[T, E, B]`` and two einsums, ``T x E x B x D`` products each (Lepikhin et
    al. 2021, Algorithm 2)."""

    def order(self, x_TD: Tensor, seats: Seats) -> Tensor:
        expert_TKE, row_TKB = _one_hots(seats, x_TD.dtype)
        mask_TEB = torch.einsum("tke,tkb->teb", expert_TKE, row_TKB)
        return torch.einsum("teb,td->ebd", mask_TEB, x_TD)

    def restore(self, rows_EBD: Tensor, score_TK: Tensor, seats: Seats) -> Tensor:
        expert_TKE, row_TKB = _one_hots(seats, rows_EBD.dtype)
        scored_TKE = expert_TKE * score_TK.to(rows_EBD.dtype)[..., None]
        weight_TEB = torch.einsum("tke,tkb->teb", scored_TKE, row_TKB)
        return torch.einsum("teb,ebd->td", weight_TEB, rows_EBD)


def _one_hots(seats: Seats, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of experts ``[T, K, E]`` and rows ``[T, K, B]``; zeros where there is none."""
    expert_TKE = one_hot(seats.expert_TK + 1, seats.num_experts + 1)[..., 1:]
    row_TKB = one_hot(seats.row_TK + 1, seats.num_rows + 1)[..., 1:]
    return expert_TKE.to(dtype), row_TKB.to(dtype)


@dataclass(frozen=True)
class IndexOrdering:
    """Tutel's: every row is copied to its place and back (Hwang et al. 2023)."""

    def order(self, x_TD: Tensor, seats: Seats) -> Tensor:
        num_rows, width = seats.num_experts * seats.num_rows, x_TD.shape[1]
        sent_ND = x_TD[:, None].expand(-1, seats.row_TK.shape[1], -1).flatten(0, 1)
        # What is dropped goes to a row of its own behind all others.
        filled = x_TD.new_zeros(num_rows + 1, width).index_copy(0, _places(seats), sent_ND)
        return filled[:-1].view(seats.num_experts, seats.num_rows, width)

    def restore(self, rows_EBD: Tensor, score_TK: Tensor, seats: Seats) -> Tensor:
        width = rows_EBD.shape[2]
        padded = torch.cat((rows_EBD.flatten(0, 1), rows_EBD.new_zeros(1, width)))
        rows_TKD = padded.index_select(0, _places(seats)).view(*score_TK.shape, width)
        return (rows_TKD * score_TK[..., None]).sum(dim=1).to(rows_EBD.dtype)


def _places(seats: Seats) -> Tensor:
    """Where each choice lies in the flat buffers, int64 ``[N]``; behind them where it is
    dropped."""
    place_TK = seats.expert_TK * seats.num_rows + seats.row_TK
    return place_TK.where(seats.row_TK >= 0, seats.num_experts * seats.num_rows).flatten()
