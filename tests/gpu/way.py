# SPDX-License-Identifier: Apache-2.0
"""The way of a GPU, on a CPU: one thread issues all streams into streams; experts compute at once
where they can; what goes everywhere is broadcast; and new memory is never zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from fake_world import as_on_cuda, on_streams

from ds_moe_ext.core import comm
from ds_moe_ext.schedule.executor import ScheduleStreams
from tests.gpu.stream_order import BookedStreams, Books, Queues


@contextmanager
def on_this_way(streams: ScheduleStreams) -> Iterator[None]:
    """All that is built and run inside the block goes this way, on streams that are given."""
    with ExitStack() as changed:
        changed.enter_context(on_streams(streams))
        changed.enter_context(copied_from_the_host())
        changed.enter_context(as_on_cuda())
        changed.enter_context(by_broadcasts())
        changed.enter_context(nothing_in_new_memory())
        yield


@contextmanager
def held_against_books() -> Iterator[None]:
    """The same on streams that keep books, which must have found nothing."""
    queues = Queues()
    books = Books(queues)
    with on_this_way(BookedStreams(queues, books)), books:
        yield
    assert not books.mistakes, books.mistakes[:5]


@contextmanager
def copied_from_the_host() -> Iterator[None]:
    """What the host has made is copied inside the block, as to a device."""
    from_numpy = torch.from_numpy
    with mock.patch.object(torch, "from_numpy", lambda array: from_numpy(array).clone()):
        yield


@contextmanager
def nothing_in_new_memory() -> Iterator[None]:
    """Not even zeros, which a test may find there by chance: numbers are none, others the largest
    there are."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def by_broadcasts() -> Iterator[None]:
    """What NCCL calls at once is called one by one, for gloo."""
    with mock.patch.object(comm, "_coalescing_manager", _one_after_the_other):
        yield


@contextmanager
def _one_after_the_other(
    group: dist.ProcessGroup, device: torch.device, async_ops: bool
) -> Iterator[SimpleNamespace]:
    works: list[dist.Work] = []

    def recorded(function: Callable[..., dist.Work]) -> Callable[..., None]:
        return lambda *args, **kwargs: works.append(function(*args, **kwargs))

    own = dist.ProcessGroup
    with mock.patch.multiple(own, broadcast=recorded(own.broadcast), reduce=recorded(own.reduce)):
        yield SimpleNamespace(wait=lambda: [work.wait() for work in works])
