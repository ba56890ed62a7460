# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine learns by the way of a GPU what stock does by a CPU's, to the last digits.

Kernels and NCCL are not in it. What is: which operations a layer chooses there, what they leave in
memory, and what streams wait for. ``pytest -m slow`` goes through all configurations.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests import ranks
from tests.gpu.way import by_the_way_of_a_gpu
from tests.hosts import copied_runs, test_configurations
from tests.hosts.copied_runs import Step
from tests.hosts.jobs import Job, Result
from tests.ranks import pool_of

ranks.preload("tests.gpu.way")

QUICK = {
    "prophet by time kept 2 ranks",
    "varied sharded 2 ranks all cells reentrant False",
    "fssdp by time freed 2 ranks",
    "esp over fssdp sharded",
    "static capacity mixtral",
}


def _train(rank: int, world_size: int, job: Job, late_s: float) -> tuple[Result | None, list[Step]]:
    with by_the_way_of_a_gpu():
        return copied_runs.train_watched(rank, world_size, job, late_s)


def _run(world_size: int, job: Job, late_s: float = 0.0) -> tuple[Result, list[Step]]:
    result, steps = pool_of(world_size).run(_train, job, late_s)[0]
    return result, steps


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if row.name in QUICK else [pytest.mark.slow])
        for row in test_configurations.ROWS
    ],
)
def test_learns_what_stock_does(row: test_configurations.Row, tmp_path: Path) -> None:
    with mock.patch.object(test_configurations, "run", _run):
        test_configurations.test_equals_stock(row, tmp_path)
