# SPDX-License-Identifier: Apache-2.0
"""Lines through times: exact ones, flat beginnings, noise, and what is no line. Pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_moe_ext.planning.bench import LinearFit, fit_line, fit_straight

SIZES_N = 2.0 ** np.arange(10, 25)


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
        assert fit.seconds(units) == pytest.approx(seconds, rel=1e-6)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)


@settings(deadline=None, derandomize=True)
@given(st.integers(2, 9), st.floats(1e-11, 1e-8), st.floats(0, 0.9))
def test_a_flat_beginning_is_set_apart(num_flat: int, unit_s: float, share: float) -> None:
    fixed_s = share * unit_s * SIZES_N[0]
    floor_s = fixed_s + 0.99 * unit_s * SIZES_N[num_flat]
    seconds_N = np.maximum(floor_s, fixed_s + unit_s * SIZES_N)
    fit = fit_line(SIZES_N, seconds_N)
    assert fit.unit_s == pytest.approx(unit_s, rel=1e-6)
    assert fit.floor_s == pytest.approx(floor_s, rel=1e-9)
    assert [fit.seconds(size) for size in SIZES_N] == pytest.approx(seconds_N, rel=1e-6)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(0, 10**6), st.floats(1e-5, 1e-3), st.floats(1e-11, 1e-8))
def test_noise_in_proportion_to_the_times(seed: int, fixed_s: float, unit_s: float) -> None:
    noise_N = np.random.default_rng(seed).normal(1, 0.02, SIZES_N.size)
    fit = fit_line(SIZES_N, (fixed_s + unit_s * SIZES_N) * noise_N)
    assert fit.seconds(SIZES_N[-1]) == pytest.approx(fixed_s + unit_s * SIZES_N[-1], rel=0.08)
    assert fit.seconds(SIZES_N[0]) == pytest.approx(fixed_s + unit_s * SIZES_N[0], rel=0.08)


def test_a_line_from_below_zero_goes_through_zero() -> None:
    """What a burst of 100 kB sends for nothing (GROUND, section 1.1)."""
    units_N = np.array([2.0**18, 2.0**20, 2.0**22])
    fit = fit_line(units_N, (units_N - 1e5) / 50e6)
    assert fit.fixed_s == 0.0
    assert 50e6 < 1 / fit.unit_s < 75e6
    assert fit.floor_s == 0.0


def test_one_slow_sample_in_the_middle_is_no_floor() -> None:
    seconds_N = 1e-3 + 1e-9 * SIZES_N
    seconds_N[5] *= 1.3
    assert fit_line(SIZES_N, seconds_N).floor_s == 0.0


def test_r_squared_of_a_known_set() -> None:
    """Through (1, 1), (2, 2), (3, 4), weighted by 1 / seconds²: 24/21 x - 5/21 is refitted."""
    fit = fit_line(np.array([1, 2, 3]), np.array([1.0, 2.0, 4.0]))
    slope = (1 + 1 + 3 / 4) / (1 + 1 + 9 / 16)
    rest = (1 - slope) ** 2 + (2 - 2 * slope) ** 2 + (4 - 3 * slope) ** 2
    assert fit == LinearFit(0.0, pytest.approx(slope), pytest.approx(1 - rest / (14 / 3)))


@pytest.mark.parametrize("seconds", [[3.0, 2.0, 1.0], [2.0, 2.0, 2.0], [0.3, 0.3, 0.3]])
def test_times_that_do_not_grow_give_the_largest_and_no_good_fit(seconds: list[float]) -> None:
    fit = fit_line(np.array([10, 20, 40]), np.array(seconds))
    assert (fit.fixed_s, fit.unit_s) == (0.0, seconds[-1] / 40)
    assert fit.r_squared <= 0


@pytest.mark.parametrize(
    ("units", "seconds", "says"),
    [
        ([1], [1.0], "two growing sizes or more"),
        ([1, 1], [1.0, 2.0], "two growing sizes or more"),
        ([2, 1], [1.0, 2.0], "two growing sizes or more"),
        ([1, 2], [0.0, 2.0], "times above 0"),
        ([1, 2], [float("nan"), 2.0], "times above 0"),
    ],
)
def test_no_line(units: list[int], seconds: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_line(np.array(units), np.array(seconds))


# Of what is cut into parts.


@settings(deadline=None, derandomize=True)
@given(st.floats(0, 1e-1), st.floats(1e-10, 1e-5))
def test_a_straight_line_is_found(fixed_s: float, unit_s: float) -> None:
    assume(unit_s * np.ptp(SIZES_N) > 1e-4 * fixed_s)
    fit = fit_straight(SIZES_N, fixed_s + unit_s * SIZES_N)
    assert fit.fixed_s == pytest.approx(fixed_s, rel=1e-6, abs=1e-9 * unit_s * SIZES_N[-1])
    assert fit.unit_s == pytest.approx(unit_s, rel=1e-6)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)


def test_a_flat_beginning_is_a_start() -> None:
    """A part pays it, however small: 1 ms up to the sixth size."""
    seconds_N = np.maximum(1e-3, 1e-3 / SIZES_N[5] * SIZES_N)
    straight, bent = fit_straight(SIZES_N, seconds_N), fit_line(SIZES_N, seconds_N)
    assert bent.fixed_s < 1e-6
    assert straight.fixed_s > 0.5e-3
    assert straight.floor_s == 0.0


def test_times_that_do_not_grow_are_all_start() -> None:
    fit = fit_straight(SIZES_N[:4], np.array([2.0, 1.9, 2.1, 1.9]))
    assert fit.fixed_s == pytest.approx(2, rel=0.05)
    assert (fit.unit_s, fit.r_squared, fit.floor_s) == (0, 0, 0)


def test_a_straight_line_from_below_zero_goes_through_zero() -> None:
    fit = fit_straight(np.array([1, 2, 4]), np.array([0.5, 1.5, 3.5]))
    assert fit.fixed_s == 0.0
    assert 0.5 < fit.unit_s < 1


def test_a_straight_line_needs_two_growing_sizes() -> None:
    with pytest.raises(ValueError, match="give two growing sizes or more, with times above 0"):
        fit_straight(np.array([2, 2]), np.array([1.0, 2.0]))
