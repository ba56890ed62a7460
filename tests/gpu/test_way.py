# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine learns by the way of a GPU what stock does by a CPU's, to the last digits.

Kernels and NCCL are not in it. What is: which operations a layer chooses there, what they leave in
memory, and, in the slow ones, what streams wait for. ``pytest -m slow`` goes through all
configurations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import ranks
from tests.gpu.stream_order import QueuedStreams, Queues
from tests.gpu.way import held_against_books, on_this_way
from tests.hosts import copied_runs, test_configurations
from tests.hosts.copied_runs import Step
from tests.hosts.jobs import Job, Result
from tests.hosts.test_configurations import Row
from tests.ranks import pool_of

ranks.preload("tests.gpu.way")

BOOKED = {
    "fssdp by time freed 2 ranks",
    "static capacity mixtral",
    "prophet by time kept 2 ranks",
    "varied sharded native",
    "esp over prophet",
}
"""Books take ten times as long as what is in them."""

ROUNDING = 4
"""Products are others, and Adam makes much of what they leave of a gradient that is nearly none."""


def _train(rank: int, world_size: int, job: Job, books: bool) -> tuple[Result | None, list[Step]]:
    with held_against_books() if books else on_this_way(QueuedStreams(Queues())):
        return copied_runs.train_watched(rank, world_size, job)


@pytest.mark.slow  # test_stream_order.py has the same streams, quickly
@pytest.mark.parametrize(
    ("row", "books"),
    [
        pytest.param(row, books, id=f"{row.name}{', booked' * books}")
        for row in test_configurations.ROWS
        for books in ((False, True) if row.name in BOOKED else (False,))
    ],
)
def test_learns_what_stock_does(row: Row, books: bool, tmp_path: Path) -> None:
    def run(world_size: int, job: Job) -> Any:
        return pool_of(world_size).run(_train, job, books)[0]

    if row.close.weights is not None:
        row = replace(row, close=replace(row.close, weights=ROUNDING * row.close.weights))
    with mock.patch.object(test_configurations, "run", run):
        test_configurations.test_equals_stock(row, tmp_path)
