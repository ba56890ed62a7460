# SPDX-License-Identifier: Apache-2.0
"""Links that only take time: what ranks of one machine send each other lasts as it would on a
network card of their own. Nothing of it needs a right that a user has not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core import comm
from ds_moe_ext.core.comm import Pairs, Parcel
from ds_moe_ext.moe import dispatch
from ds_moe_ext.schedule.executor import InlineLanes, Steps, ThreadLanes

SLICE_S = 0.002  # after which a transfer looks again who shares the card


@dataclass(eq=False)
class Card:
    """A rank's network card. Transfers of several lanes that are under way together share it
    evenly, as on a network.

    Attributes:
        bytes_per_s: each way.
        start_s: of one transfer.
    """

    bytes_per_s: float
    start_s: float
    _sharers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, sent_bytes: int, received_bytes: int) -> None:
        """Let the thread sleep for as long as this takes; both ways go on at once."""
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
def paced_links(card: Card, rank: int) -> Iterator[None]:
    """Rows and copies of experts take their time on a card inside the block, where each rank is a
    node; layers are to be built there, too. All bytes are sent besides."""
    exchanged, moved = comm.all_to_all_by_pairs, Pairs.move

    def all_to_all(
        rows_N: Tensor, sent_C: Sequence[int], received_C: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        arrived_R = exchanged(rows_N, sent_C, received_C, group)
        row_bytes, own = rows_N[:1].nbytes or arrived_R[:1].nbytes, group.rank()
        card.carry(
            row_bytes * (sum(sent_C) - sent_C[own]), row_bytes * (sum(received_C) - received_C[own])
        )
        return arrived_R

    def move(self: Pairs, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Steps[None]:
        yield from moved(self, receives, sends)
        card.carry(sum(t.nbytes for t, _ in sends), sum(t.nbytes for t, _ in receives))

    with (
        mock.patch.object(dispatch, "all_to_all_by_pairs", all_to_all),
        mock.patch.object(Pairs, "move", move),
        mock.patch.object(ThreadLanes, "begin", InlineLanes.begin),  # a card carries in a lane
        mock.patch("socket.gethostname", lambda: f"node{rank}"),
    ):
        yield
