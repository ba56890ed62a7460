# SPDX-License-Identifier: Apache-2.0
"""Steps of every strategy run as the simulator takes them to: stream by stream, and no faster.

How much slower they are is measured, not tested: see docs/results.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from fake_world import fake_world
from predicted_steps import NUM_RANKS, Result, results, ways

from tests.ranks import forkserver


def executed() -> Mapping[str, Sequence[Result]]:
    """In a process of its own, of tasks that take next to nothing."""
    torch.set_num_threads(1)
    with fake_world(NUM_RANKS):
        return {way.name: list(results(way, 2, num_steps=1, seed=2, pace=0.02)) for way in ways()}


@pytest.fixture(scope="module")
def found() -> Mapping[str, Sequence[Result]]:
    with ProcessPoolExecutor(1, mp_context=forkserver()) as pool:
        return pool.submit(executed).result()


@pytest.mark.parametrize("name", [way.name for way in ways()])
def test_a_step_runs_as_it_is_priced(found: Mapping[str, Sequence[Result]], name: str) -> None:
    """Each stream does the tasks of the schedule in its order, or there would be no result."""
    for result in found[name]:
        assert 0 < result.predicted_s <= min(result.executed_s)
