# SPDX-License-Identifier: Apache-2.0
"""Host time: what each strategy makes the host wait for, copy and call in a layer, and its counter.

Counts, never times. A change that lowers a count lowers its limit here.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_world import WAYS, Batch, Ours, Sizes, as_on_cuda, fake_world, products_at_once
from host_path import COLLECTIVES, FETCHES, Job, Place, Result, counted, measure, passes, take_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_moe_ext.core import comm
from tests.ranks import forkserver


class Most(NamedTuple):
    """Of a layer and step, on 8 ranks with 2 experts each."""

    waits: int
    copies: int
    collectives: int


WAIT = "ds_moe_ext/core/comm.py ready"
MOST: Mapping[str, Most] = {
    "ep": Most(1, 1, 5),
    "ep, static capacity": Most(1, 1, 5),  # between steps, for all layers at once
    "ep, send once": Most(1, 2, 7),
    "esp, degree 1": Most(1, 1, 5),
    "esp, degree 2": Most(1, 1, 9),
    "esp, degree 4": Most(1, 1, 17),
    "esp, degree 8": Most(1, 1, 33),
    "fssdp": Most(1, 1, 11),
    # Counts, and of each of two weights what each of 8 owners broadcasts and what comes back to it.
    "fssdp, all everywhere": Most(1, 2, 33),
    "fssdp, nothing copied": Most(1, 1, 5),  # as ep
    "fssdp, paper share": Most(1, 1, 11),
    # Which experts it copies depends on what the machine's first steps took.
    "prophet": Most(1, 2, 16),
    "prophet, freed": Most(1, 2, 20),
    "prophet, paper share": Most(1, 2, 16),
    "esp, degree 2, over fssdp": Most(1, 1, 15),
    "esp, degree 2, over prophet": Most(1, 3, 20),
    "esp, degree 2, threads": Most(1, 1, 9),
    "fssdp, threads": Most(1, 1, 11),
    "prophet, threads": Most(1, 2, 16),
}


@pytest.fixture(scope="module")
def results() -> Mapping[str, Result]:
    sizes = Sizes(layers=2, experts=16, tokens=64, top_k=2)
    # Amid the others: it has replicas of experts before and behind its own.
    job = Job(8, 2, sizes, tuple(MOST), rounds=0, rank=3)
    # What it has loaded is not looked through for garbage after each step.
    with ProcessPoolExecutor(1, forkserver(), initializer=gc.freeze) as process:
        return {each.name: each for each in process.submit(measure, job).result()}


def test_every_strategy_has_a_limit() -> None:
    assert list(MOST) == [way.name for way in WAYS]


@pytest.mark.parametrize("name", MOST)
def test_counts_do_not_grow(name: str, results: Mapping[str, Result]) -> None:
    counts = results[name].counts
    assert counts is not None, results[name].skipped
    found = counts.waits, counts.copies, counts.collectives
    is_within = [number <= most for number, most in zip(found, MOST[name])]
    assert all(is_within), (found, counts.places)


@pytest.mark.parametrize("name", MOST)
def test_passes_wait_in_one_place(name: str, results: Mapping[str, Result]) -> None:
    counts = results[name].counts
    assert counts is not None, results[name].skipped
    where = [] if name == "ep, static capacity" else [WAIT]
    assert counts.waits_in_passes == where


class Window:
    """Is open from the end of a wait for the device to the next call of a communicator."""

    def __init__(self) -> None:
        self.is_open, self.num_closed = False, 0

    def after(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method or function for which the host may wait."""

        def fetched(*args: Any, **named: Any) -> Any:
            place = Place.of_caller(name, sys._getframe(1))
            out = stock(*args, **named)
            self.is_open |= f"{place.file} {place.function}" == WAIT
            return out

        return fetched

    def before(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method that calls a communicator."""

        def called(*args: Any, **named: Any) -> Any:
            self.num_closed += self.is_open
            self.is_open = False
            return stock(*args, **named)

        return called


@contextmanager
def watched() -> Iterator[Window]:
    """Watch, inside the block."""
    found = Window()
    with ExitStack() as changed:

        def change(owner: Any, name: str, around: Callable[..., Any], *told: str) -> None:
            if hasattr(owner, name):
                new = around(*told, getattr(owner, name))
                changed.enter_context(mock.patch.object(owner, name, new))

        for name in FETCHES:
            change(Tensor, name, found.after, name)
            change(torch, name, found.after, name)
        for name in COLLECTIVES:
            change(dist.ProcessGroup, name, found.before)
        change(comm.Pairs, "post", found.before)
        yield found


class _Launched(TorchDispatchMode):
    """Operations of torch while a window is open, but views."""

    def __init__(self, seen: Window) -> None:
        super().__init__()
        self._seen = seen
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._seen.is_open and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _launched_after_waits(names: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """By contender, in a step of one layer, in the forward pass."""
    sizes = Sizes(layers=1, experts=16, tokens=64, top_k=2)
    ways = {way.name: way for way in WAYS}
    found: dict[str, Sequence[str]] = {}
    with fake_world(8, 3), as_on_cuda(), products_at_once():
        for name in names:
            contender = Ours(ways[name], sizes)
            for number in range(3):
                take_step(contender, Batch.of(sizes, number), number)
            with contender.turn(), watched() as seen:
                step = passes(contender, Batch.of(sizes, 3), 3)
                with _Launched(seen) as launched:
                    deque(islice(step, 2), maxlen=0)
                deque(step, maxlen=0)
            assert seen.num_closed == 1, name
            found[name] = launched.names
    return found


KNOWN_AHEAD = ("ep", "esp, degree 1", "esp, degree 4", "prophet, paper share")
"""Where rows are in send order before the ranks have exchanged reports how many they are."""


@pytest.mark.slow  # how much the host does in all is above
def test_nothing_stands_between_the_wait_and_the_exchange() -> None:
    """But the memory in which rows arrive: rows are packed while the host waits."""
    with ProcessPoolExecutor(1, forkserver()) as process:
        found = process.submit(_launched_after_waits, (*KNOWN_AHEAD, "fssdp")).result()
    assert all(found[name] == ["new_empty"] for name in KNOWN_AHEAD), found
    # Which copy computes a row is known by the counts alone.
    assert found["fssdp"].count("index_select") == 2


def _in_thread(device: Tensor) -> None:
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(device.tolist()))
    thread.start()
    thread.join()


WAITS: Mapping[str, Callable[[Tensor], object]] = {
    "item": lambda device: device.item(),
    "numpy": lambda device: device.numpy(),
    "cpu": lambda device: device.cpu(),
    "to": lambda device: device.to("cpu"),
    "int": lambda device: int(device) + 1,
    "if": lambda device: not device.sum(),
    "index": lambda device: [4, 5, 6, 7][device],
    "nonzero": lambda device: torch.nonzero(device)[0],
    "mask": lambda device: device[device > 2],
    "number": lambda device: device[device.argmax()],
    "lengths": lambda device: device.repeat_interleave(device),
    "in a thread": _in_thread,
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted_once_with_its_place(name: str) -> None:
    device = torch.tensor([3]) + 0
    with counted() as counts:
        WAITS[name](device)
    assert counts.waits.total() == 1 and not counts.copies
    (place,) = counts.waits
    assert place.file == "tests/launch/test_host_path.py"


def test_replicas_are_counted_and_the_hosts_own_work_is_not() -> None:
    device = torch.arange(4)
    with counted() as counts:
        host = torch.from_numpy(np.arange(4)).cumsum(0)
        assert host.tolist() == [0, 1, 3, 6] and bool(host[host > 0].sum() == torch.tensor(10))
        assert device.cpu().diff().tolist() == [1, 1, 1]
        there = host.to(device.device)
        torch.tensor([1], device=device.device)
    assert counts.waits.total() == 1 and counts.copies.total() == 2
    with counted() as counts:
        there.sum().item()
        device.repeat_interleave(device, output_size=6)
        device[there.clamp(max=3)]
    assert counts.waits.total() == 1 and not counts.copies
