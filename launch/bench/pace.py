# SPDX-License-Identifier: Apache-2.0
"""A model whose computing only takes time, and links that only do, so that few cores stand for any
number of devices.

Attention and experts hold their thread until their time has passed, in proportion to rows. Shape
letters: T rows of a rank, R rows that arrive, S experts of a rank, F and D the shape of an expert's
weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core import comm
from ds_moe_ext.core.comm import Pairs, Parcel
from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, register_experts
from ds_moe_ext.moe import dispatch
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.schedule.executor import InlineStreams, Steps, ThreadStreams

BACKWARD = 2.0  # times as long as forward
Moments = tuple[float, float]  # start and end


class Held(NamedTuple):
    """Computing that was stood in for, by moments of ``time.perf_counter``."""

    start_s: float  # when it began
    end_s: float  # when it ended
    late_s: float  # by how much the machine let it last longer


@dataclass(frozen=True)
class Pace:
    """How long computing takes, forward."""

    attention_s: float  # of a layer
    row_s: float  # an expert on one row
    _held: list[Held] = field(default_factory=list, init=False)

    def hold(self, start_s: float, seconds: float) -> None:
        """Let the thread sleep until so long after a moment of ``time.perf_counter``."""
        while (left_s := start_s + seconds - time.perf_counter()) > 0:
            time.sleep(left_s)
        self._held.append(Held(start_s, start_s + seconds - left_s, -left_s))

    def take(self) -> list[Held]:
        """What was held since the last call."""
        held = list(self._held)
        self._held.clear()
        return held


def union(chunk_ranges: Iterable[Moments]) -> list[Moments]:
    """Moments in any of the chunk ranges, as chunk ranges that are apart."""
    apart: list[Moments] = []
    for start, end in sorted(chunk_ranges):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(apart[-1][1], end)
        else:
            apart.append((start, end))
    return apart


def bare(start: float, end: float, apart: Sequence[Moments]) -> float:
    """Seconds between two moments that none of the chunk ranges covers, which are apart."""
    covered = (max(min(end, its_end) - max(start, its_start), 0.0) for its_start, its_end in apart)
    return end - start - sum(covered)


class PacedAttention(torch.autograd.Function):
    """Hands x on, a while later: x is a share of the batch whose attention is paced."""

    @staticmethod
    def forward(ctx: Any, pace: Pace, x_TD: Tensor, share: float = 1.0) -> Tensor:
        ctx.pace, ctx.seconds = pace, share * pace.attention_s
        pace.hold(time.perf_counter(), ctx.seconds)
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, Tensor, None]:
        ctx.pace.hold(time.perf_counter(), BACKWARD * ctx.seconds)
        return None, grad_TD, None


class _Experts(torch.autograd.Function):
    """Multiplies each row by the mean row of its expert's weights ``[F, D]``; or, with a part of
    those, by its share of that, which takes its share of the time."""

    @staticmethod
    def forward(
        ctx: Any,
        pace: Pace,
        length: int,
        rows_RD: Tensor,
        rows_S: tuple[int, ...],
        *weights_S: Tensor,
    ) -> Tensor:
        start_s = time.perf_counter()
        ctx.pace, ctx.length, ctx.rows_S = pace, length, rows_S
        ctx.save_for_backward(rows_RD, *weights_S)
        parts = zip(rows_RD.split(rows_S), weights_S)
        computed_RD = torch.cat([rows * (weight.sum(dim=0) / length) for rows, weight in parts])
        ctx.row_s = pace.row_s * weights_S[0].shape[0] / length
        pace.hold(start_s, rows_RD.shape[0] * ctx.row_s)
        return computed_RD

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        start_s = time.perf_counter()
        rows_RD, *weights_S = ctx.saved_tensors
        parts = list(zip(grad_RD.split(ctx.rows_S), rows_RD.split(ctx.rows_S), weights_S))
        length = ctx.length
        back_RD = torch.cat([grad * (weight.sum(dim=0) / length) for grad, _, weight in parts])
        grads = [
            ((grad * rows).sum(dim=0) / length).expand_as(weight).contiguous()
            for grad, rows, weight in parts
        ]
        ctx.pace.hold(start_s, BACKWARD * grad_RD.shape[0] * ctx.row_s)
        return None, None, back_RD, None, *grads


class PacedExperts(nn.Module):
    """Experts as a host would have them; the product replaces them."""

    def __init__(self, pace: Pace, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.pace = pace
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(shape, generator=generator))


@register_experts(PacedExperts)
def describe(experts: nn.Module) -> ExpertsDescription:
    """What the product has to know of them."""
    assert isinstance(experts, PacedExperts)
    pace, length = experts.pace, experts.weight.shape[1]

    def function(rows_RD: Tensor, slots: SlotRows, weights: tuple[Tensor, ...]) -> Tensor:
        if not weights:
            return rows_RD.clone()
        computed_RD: Tensor = _Experts.apply(pace, length, rows_RD, slots.on_host(), *weights)
        return computed_RD

    return ExpertsDescription(len(experts.weight), ("weight",), function)


class Block(nn.Module):
    """A transformer's block: attention, then experts beside a residual."""

    def __init__(self, pace: Pace, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.pace = pace
        self.experts: nn.Module = PacedExperts(pace, shape)

    def forward(self, x_TD: Tensor, expert_T1: Tensor) -> Tensor:
        x_TD = PacedAttention.apply(self.pace, x_TD)
        return x_TD + self.experts(x_TD, expert_T1, x_TD.new_ones(expert_T1.shape))


# Links.

SLICE_S = 0.002  # after which a transfer looks again who shares the card


@dataclass(eq=False)
class Card:
    """A rank's network card. Transfers of several streams that are under way together share it
    evenly, as on a network."""

    bytes_per_s: float  # each way
    start_s: float  # of one transfer
    sent_bytes: int = 0  # so far
    _sharers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, sent_bytes: int, received_bytes: int) -> None:
        """Let the thread sleep for as long as this takes; both ways go on at once."""
        self.sent_bytes += sent_bytes
        left = float(max(sent_bytes, received_bytes))
        if not left:
            return
        time.sleep(self.start_s)
        self._count(1)
        now_s = time.perf_counter()
        while left > 0:
            rate, since_s = self.bytes_per_s / self._sharers, now_s
            time.sleep(min(left / rate, SLICE_S))
            now_s = time.perf_counter()
            left -= rate * (now_s - since_s)
        self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._sharers += more


@contextmanager
def paced_links(card: Card, ranks_per_node: int = 1) -> Iterator[None]:
    """Rows and replicas of experts that go to other nodes take their time on a card inside the
    block; layers are to be built there, too. All bytes are sent besides: nothing of it needs a
    right that a user has not."""
    exchanged, moved = comm.all_to_all_by_pairs, Pairs.move
    own_node = dist.get_rank() // ranks_per_node

    def is_far(group: dist.ProcessGroup, peer: int) -> bool:
        return dist.get_global_rank(group, peer) // ranks_per_node != own_node

    def all_to_all(
        rows_N: Tensor, sent_C: Sequence[int], received_C: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        arrived_R = exchanged(rows_N, sent_C, received_C, group)
        row_bytes = rows_N[:1].nbytes or arrived_R[:1].nbytes
        far = [peer for peer in range(group.size()) if is_far(group, peer)]
        card.carry(
            row_bytes * sum(sent_C[peer] for peer in far),
            row_bytes * sum(received_C[peer] for peer in far),
        )
        return arrived_R

    def move(self: Pairs, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Steps[None]:
        yield from moved(self, receives, sends)
        card.carry(
            sum(tensor.nbytes for tensor, peer in sends if is_far(self.group, peer)),
            sum(tensor.nbytes for tensor, peer in receives if is_far(self.group, peer)),
        )

    with (
        mock.patch.object(dispatch, "all_to_all_by_pairs", all_to_all),
        mock.patch.object(Pairs, "move", move),
        mock.patch.object(
            ThreadStreams, "begin", InlineStreams.begin
        ),  # a card carries in a stream
        mock.patch("socket.gethostname", lambda: f"node{own_node}"),
    ):
        yield
