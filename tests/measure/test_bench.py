# SPDX-License-Identifier: Apache-2.0
"""Timing on all ranks together, by a clock of the test's own: nothing here depends on real time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_moe_ext.planning.bench import (
    Bench,
    HostClock,
    Sweep,
    clock_of,
    fit_line,
    fit_straight,
)
from ds_moe_ext.planning.prices import Line
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
    return fit.alpha_s, fit.beta_s, fit.r_squared


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
    clock, order, reported = PacedClock(), [], []

    def work(size: int) -> None:
        order.append(size)
        clock.wait(size)

    sweep = Sweep("sizes", (1, 2, 3), [partial(work, size) for size in (1, 2, 3)])
    Bench(clock, CPU, 1, 3, begins=reported.append).fit(sweep)
    return order, reported


def test_sizes_take_turns_and_the_name_is_reported() -> None:
    assert pool_of(1).run(turns)[0] == ([1, 2, 3] * 4, ["sizes"])


def test_the_hosts_clock_times_the_work_and_not_what_comes_before() -> None:
    done: list[str] = []
    seconds = clock_of(CPU).seconds(lambda: done.append("ready"), lambda: done.append("work"))
    assert isinstance(clock_of(CPU), HostClock)
    assert done == ["ready", "work"]
    assert 0 <= seconds < 60


# Lines through times: exact ones, flat beginnings, noise, and what is no line. Pure.


SIZES_N_FIT = 2.0 ** np.arange(10, 25)


def seconds_by(fit: Line, num_units: float) -> float:
    return max(fit.least_s, fit.alpha_s + fit.beta_s * num_units)


@settings(deadline=None, derandomize=True)
@given(
    st.floats(0, 1e-1),
    st.floats(1e-13, 1e-5),
    st.lists(st.integers(1, 10**9), min_size=2, max_size=20, unique=True),
)
def test_a_line_is_found(fixed_s: float, unit_s: float, sizes: list[int]) -> None:
    units_N = np.sort(np.array(sizes))
    assume(unit_s * np.ptp(units_N) > 1e-4 * fixed_s)
    fit = fit_line(units_N, fixed_s + unit_s * units_N)
    for units, seconds in zip(units_N, fixed_s + unit_s * units_N):
        assert seconds_by(fit, units) == pytest.approx(seconds, rel=1e-6)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)


@settings(deadline=None, derandomize=True)
@given(st.integers(2, 9), st.floats(1e-11, 1e-8), st.floats(0, 0.9))
def test_a_flat_beginning_is_set_apart(num_flat: int, unit_s: float, share: float) -> None:
    fixed_s = share * unit_s * SIZES_N_FIT[0]
    floor_s = fixed_s + 0.99 * unit_s * SIZES_N_FIT[num_flat]
    seconds_N = np.maximum(floor_s, fixed_s + unit_s * SIZES_N_FIT)
    fit = fit_line(SIZES_N_FIT, seconds_N)
    assert fit.beta_s == pytest.approx(unit_s, rel=1e-6)
    assert fit.least_s == pytest.approx(floor_s, rel=1e-9)
    assert [seconds_by(fit, size) for size in SIZES_N_FIT] == pytest.approx(seconds_N, rel=1e-6)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(0, 10**6), st.floats(1e-5, 1e-3), st.floats(1e-11, 1e-8))
def test_noise_in_proportion_to_the_times(seed: int, fixed_s: float, unit_s: float) -> None:
    noise_N = np.random.default_rng(seed).normal(1, 0.02, SIZES_N_FIT.size)
    fit = fit_line(SIZES_N_FIT, (fixed_s + unit_s * SIZES_N_FIT) * noise_N)
    assert seconds_by(fit, SIZES_N_FIT[-1]) == pytest.approx(
        fixed_s + unit_s * SIZES_N_FIT[-1], rel=0.08
    )
    assert seconds_by(fit, SIZES_N_FIT[0]) == pytest.approx(
        fixed_s + unit_s * SIZES_N_FIT[0], rel=0.08
    )


def test_a_line_from_below_zero_goes_through_zero() -> None:
    """What a burst of 100 kB sends for nothing (GROUND, section 1.1)."""
    units_N = np.array([2.0**18, 2.0**20, 2.0**22])
    fit = fit_line(units_N, (units_N - 1e5) / 50e6)
    assert fit.alpha_s == 0.0
    assert 50e6 < 1 / fit.beta_s < 75e6
    assert fit.least_s == 0.0


def test_one_slow_sample_in_the_middle_is_no_floor() -> None:
    seconds_N = 1e-3 + 1e-9 * SIZES_N_FIT
    seconds_N[5] *= 1.3
    assert fit_line(SIZES_N_FIT, seconds_N).least_s == 0.0


def test_r_squared_of_a_known_set() -> None:
    """Through (1, 1), (2, 2), (3, 4), weighted by 1 / seconds²: 24/21 x - 5/21 is refitted."""
    fit = fit_line(np.array([1, 2, 3]), np.array([1.0, 2.0, 4.0]))
    slope = (1 + 1 + 3 / 4) / (1 + 1 + 9 / 16)
    rest = (1 - slope) ** 2 + (2 - 2 * slope) ** 2 + (4 - 3 * slope) ** 2
    known = 0.0, pytest.approx(slope), pytest.approx(1 - rest / (14 / 3))
    assert (fit.alpha_s, fit.beta_s, fit.r_squared) == known


@pytest.mark.parametrize("seconds", [[3.0, 2.0, 1.0], [2.0, 2.0, 2.0], [0.3, 0.3, 0.3]])
def test_times_that_do_not_grow_give_the_largest_and_no_good_fit(seconds: list[float]) -> None:
    fit = fit_line(np.array([10, 20, 40]), np.array(seconds))
    assert (fit.alpha_s, fit.beta_s) == (0.0, seconds[-1] / 40)
    assert fit.r_squared <= 0


@pytest.mark.parametrize(
    ("units", "seconds", "expected"),
    [
        ([1], [1.0], "two growing sizes or more"),
        ([1, 1], [1.0, 2.0], "two growing sizes or more"),
        ([2, 1], [1.0, 2.0], "two growing sizes or more"),
        ([1, 2], [0.0, 2.0], "times above 0"),
        ([1, 2], [float("nan"), 2.0], "times above 0"),
    ],
)
def test_no_line(units: list[int], seconds: list[float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        fit_line(np.array(units), np.array(seconds))


# Of what is cut into parts.


@settings(deadline=None, derandomize=True)
@given(st.floats(0, 1e-1), st.floats(1e-10, 1e-5))
def test_a_straight_line_is_found(fixed_s: float, unit_s: float) -> None:
    assume(unit_s * np.ptp(SIZES_N_FIT) > 1e-4 * fixed_s)
    fit = fit_straight(SIZES_N_FIT, fixed_s + unit_s * SIZES_N_FIT)
    assert fit.alpha_s == pytest.approx(fixed_s, rel=1e-6, abs=1e-9 * unit_s * SIZES_N_FIT[-1])
    assert fit.beta_s == pytest.approx(unit_s, rel=1e-6)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)


def test_a_flat_beginning_is_a_start() -> None:
    """A part pays it, however small: 1 ms up to the sixth size."""
    seconds_N = np.maximum(1e-3, 1e-3 / SIZES_N_FIT[5] * SIZES_N_FIT)
    straight, bent = fit_straight(SIZES_N_FIT, seconds_N), fit_line(SIZES_N_FIT, seconds_N)
    assert bent.alpha_s < 1e-6
    assert straight.alpha_s > 0.5e-3
    assert straight.least_s == 0.0


def test_times_that_do_not_grow_are_all_start() -> None:
    fit = fit_straight(SIZES_N_FIT[:4], np.array([2.0, 1.9, 2.1, 1.9]))
    assert fit.alpha_s == pytest.approx(2, rel=0.05)
    assert (fit.beta_s, fit.r_squared, fit.least_s) == (0, 0, 0)


def test_a_straight_line_from_below_zero_goes_through_zero() -> None:
    fit = fit_straight(np.array([1, 2, 4]), np.array([0.5, 1.5, 3.5]))
    assert fit.alpha_s == 0.0
    assert 0.5 < fit.beta_s < 1


def test_a_straight_line_needs_two_growing_sizes() -> None:
    with pytest.raises(ValueError, match="give two growing sizes or more, with times above 0"):
        fit_straight(np.array([2, 2]), np.array([1.0, 2.0]))
