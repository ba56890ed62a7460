# SPDX-License-Identifier: Apache-2.0
"""Stripes on streams that keep books, on ranks over gloo: nothing is read before it is written, and
no memory is handed out while somebody may still read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ds_moe_ext.hosts.zebra import stripe_pass
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.schedule.executor import Carried
from tests import test_striped
from tests.gpu.stream_order import BookedStreams, Books, Queue, Queues
from tests.gpu.way import on_this_way
from tests.marks import slow
from tests.ranks import pool_of
from tests.test_striped import (
    CASES,
    ONCE,
    PADDED,
    WITH_REPLICAS,
    Case,
    Copied,
    CopiedAndRevised,
    CopiedEverywhere,
    Freed,
    Revised,
)


@dataclass(frozen=True)
class CarriedBooks:
    """What a thread takes over from another, and on which of the queues it works; it keeps books
    of its own accord, for modes of torch are a thread's."""

    carried: Carried
    queues: Queues
    queue: Queue
    books: Books

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self.carried.entered(), self.books:
            self.queues.enter(self.queue)
            yield

    def follow(self) -> None:
        self.queues.enter(self.queue)


class Carrying(NamedTuple):
    """In place of the class."""

    queues: Queues
    books: Books

    def of_caller(self) -> CarriedBooks:
        return CarriedBooks(Carried.of_caller(), self.queues, self.queues.current(), self.books)


def mistakes_of(rank: int, world_size: int, case: Case, dtype: torch.dtype) -> list[str]:
    """Of a step on this rank."""
    queues = Queues()
    books = Books(queues)
    streams, model = BookedStreams(queues, books), Case.model
    with (
        on_this_way(streams),
        mock.patch.object(test_striped, "_streams", lambda: streams),
        mock.patch.object(Case, "model", lambda case: model(case).to(dtype)),
        mock.patch.object(stripe_pass, "Carried", Carrying(queues, books)),
        books,
    ):
        test_striped.run_case(rank, world_size, case)
    return books.mistakes


def found(case: Case, dtype: torch.dtype) -> list[str]:
    return [each for own in pool_of(case.roles.size).run(mistakes_of, case, dtype) for each in own]


COPYING: Mapping[str, tuple[str, type[Strategy], torch.dtype]] = {
    "sums in 32 bits": ("two layers", Copied, torch.bfloat16),
    "one stripe's own": ("one stripe", Copied, torch.float64),
    "as rows ask": ("offloaded", CopiedAndRevised, torch.float64),
    "everywhere": ("attention ranks last", CopiedEverywhere, torch.float64),
    "two steps": ("two steps", Copied, torch.bfloat16),
    "no gradients": ("no gradients", Revised, torch.float64),
    "computed again": ("computed again", CopiedAndRevised, torch.bfloat16),
    "freed": ("four layers", Freed, torch.float64),
}


STEPS = {**CASES, "forward alone": Case(1, 1, (0, 0, 0), 3, is_graded=False)}
STEPS |= {f"padded, {name}": case for name, case in PADDED.items()}
STEPS |= {f"once, {name}": case for name, case in ONCE.items()}
QUICK = {"one stripe", "more expert ranks", "forward alone", "sums in 32 bits", "one stripe's own"}


def with_slow(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else slow(name) for name in names]


@pytest.mark.parametrize("name", with_slow(STEPS))
def test_stripes_wait_for_what_they_read(name: str) -> None:
    assert found(STEPS[name], torch.float64) == []


@pytest.mark.parametrize("name", with_slow(COPYING))
def test_so_do_replicas(name: str) -> None:
    case, strategy, dtype = COPYING[name]
    assert found(WITH_REPLICAS[case]._replace(strategy=strategy), dtype) == []
