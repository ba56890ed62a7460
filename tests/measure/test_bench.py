# SPDX-License-Identifier: Apache-2.0
"""Timing on all ranks together, by a clock of the test's own: nothing here depends on real time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from ds_moe_ext.planning.bench import Bench, HostClock, Sweep, clock_of
from tests.ranks import pool_of

CPU = torch.device("cpu")
SIZES_N = tuple(2**power for power in range(12, 24, 2))


class PacedClock:
    """Time stands still, except where paced work lets it pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        ready()
        start_s = self.now_s
        work()
        return self.now_s - start_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def paced(rank: int, world_size: int, seed: int) -> tuple[float, float, float]:
    """Work of 0.3 ms and 2 GB/s, on later ranks slower, with noise that differs by rank."""
    clock, noise = PacedClock(), np.random.default_rng(seed + rank)

    def work(size: int) -> None:
        clock.wait((1 + rank) * (3e-4 + size / 2e9) * noise.uniform(0.99, 1.01))

    sweep = Sweep("paced", SIZES_N, [partial(work, size) for size in SIZES_N])
    fit = Bench(clock, CPU, num_warm_ups=1, num_repeats=9).fit(sweep)
    return fit.fixed_s, fit.unit_s, fit.r_squared


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_slowest_ranks_line_is_found_by_all(num_ranks: int) -> None:
    found = pool_of(num_ranks).run(paced, 7)
    assert found == [found[0]] * num_ranks, "ranks plan by these numbers: they must be equal"
    fixed_s, unit_s, r_squared = found[0]
    assert fixed_s == pytest.approx(num_ranks * 3e-4, rel=0.03)
    assert unit_s == pytest.approx(num_ranks / 2e9, rel=0.03)
    assert r_squared > 0.999


def repeated(rank: int, world_size: int, budget_s: float, hiccup_s: float) -> tuple[int, float]:
    """Runs of one work of 10 ms, one of which takes longer; and what was measured."""
    clock, runs = PacedClock(), []

    def work() -> None:
        runs.append(1)
        clock.wait(0.01 + (hiccup_s if len(runs) == 5 else 0.0))

    bench = Bench(clock, CPU, num_warm_ups=2, num_repeats=11, budget_s=budget_s)
    (seconds,) = bench.seconds([work])
    return len(runs), float(seconds)


@pytest.mark.parametrize(("budget_s", "num_counted"), [(60.0, 11), (0.0551, 5), (0.0, 3)])
def test_repetitions_stay_within_the_budget(budget_s: float, num_counted: int) -> None:
    num_runs, seconds = pool_of(1).run(repeated, budget_s, 0.0)[0]
    assert num_runs == 2 + num_counted
    assert seconds == pytest.approx(0.01)


def test_one_late_run_does_not_count() -> None:
    assert pool_of(1).run(repeated, 60.0, 5.0)[0] == (13, pytest.approx(0.01))


def turns(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    clock, order, told = PacedClock(), [], []

    def work(size: int) -> None:
        order.append(size)
        clock.wait(size)

    sweep = Sweep("sizes", (1, 2, 3), [partial(work, size) for size in (1, 2, 3)])
    Bench(clock, CPU, 1, 3, begins=told.append).fit(sweep)
    return order, told


def test_sizes_take_turns_and_the_name_is_told() -> None:
    assert pool_of(1).run(turns)[0] == ([1, 2, 3] * 4, ["sizes"])


def test_the_hosts_clock_times_the_work_and_not_what_comes_before() -> None:
    done: list[str] = []
    seconds = clock_of(CPU).seconds(lambda: done.append("ready"), lambda: done.append("work"))
    assert isinstance(clock_of(CPU), HostClock)
    assert done == ["ready", "work"]
    assert 0 <= seconds < 60
