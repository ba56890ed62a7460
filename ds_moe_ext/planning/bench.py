# SPDX-License-Identifier: Apache-2.0
"""Times operations on all ranks together, and lays straight lines through the times.

A ``Sweep`` is one operation at growing sizes, a ``Bench`` says where and how often it is run, and
``Bench.fit`` gives the ``Line`` through its times, the same on every rank. Shape letter: N
samples, by growing size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from ds_moe_ext.core.comm import all_gather_counts, sum_in_place
from ds_moe_ext.planning.prices import Line

LEAST_FLAT = 2  # samples that show a floor
LEAST_RISING = 3  # samples that show a line
LEAST_GROWTH = 1e-6  # of the largest time, below which times do not grow


def fit_line(units_N: np.ndarray, seconds_N: np.ndarray) -> Line:
    """Least squares of the relative error, apart from a flat beginning, as buffers and bursts hide
    small sizes: ``least_s``.

    Noise grows with what is timed, so errors count by their share of the time. The first samples
    are taken for a floor if that halves the squared error or more. A line that starts below zero is
    laid through zero, and its slope fitted anew. Times that do not grow with the sizes give the
    line from zero to the largest; its ``r_squared`` shows.
    """
    units_N, seconds_N = _samples(units_N, seconds_N)

    def squared_error(fit: Line | None) -> float:
        if fit is None:
            return np.inf
        predicted_N = np.maximum(fit.least_s, fit.alpha_s + fit.beta_s * units_N)
        return float(np.sum((predicted_N / seconds_N - 1) ** 2))

    lengths = range(LEAST_FLAT, units_N.size - LEAST_RISING + 1)
    fits = [_fit(units_N, seconds_N, num_flat) for num_flat in (0, *lengths)]
    errors = list(map(squared_error, fits))
    best = int(np.argmin(errors))
    fit = fits[best] if errors[best] <= errors[0] / 2 else fits[0]
    if fit is not None and fit.beta_s * units_N[-1] > LEAST_GROWTH * seconds_N[-1]:
        return fit
    unit_s = seconds_N[-1] / units_N[-1]
    return Line(0.0, float(unit_s), _r_squared(unit_s * units_N, seconds_N))


def fit_straight(units_N: np.ndarray, seconds_N: np.ndarray) -> Line:
    """Least squares of the relative error of all samples, for work that is cut: a start that hides
    in a flat beginning would be paid once a part.

    A line that starts below zero is laid through zero. Times that do not grow give a level line
    with ``r_squared`` 0: nothing is gained by cutting. Arguments and errors as of ``fit_line``.
    """
    units_N, seconds_N = _samples(units_N, seconds_N)
    fit = _fit(units_N, seconds_N, 0)
    level_s = np.sum(1 / seconds_N) / np.sum(1 / seconds_N**2)
    return fit or Line(float(level_s), r_squared=0.0)


def _samples(units_N: np.ndarray, seconds_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    units_N, seconds_N = np.asarray(units_N, float), np.asarray(seconds_N, float)
    if units_N.size < 2 or not np.all(np.diff(units_N) > 0) or not np.all(seconds_N > 0):
        raise ValueError(
            f"no line goes through sizes {units_N.tolist()} and seconds {seconds_N.tolist()}; give "
            "two growing sizes or more, with times above 0"
        )
    return units_N, seconds_N


def _fit(units_N: np.ndarray, seconds_N: np.ndarray, num_flat: int) -> Line | None:
    """None where times do not rise behind the flat beginning."""
    floor_s = float(seconds_N[:num_flat].mean()) if num_flat else 0.0
    x, y = units_N[num_flat:] / units_N[-1], seconds_N[num_flat:]
    (fixed_s, slope_s), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones_like(y))
    if fixed_s < 0:
        fixed_s, slope_s = 0.0, np.sum(x / y) / np.sum((x / y) ** 2)
    if slope_s <= 0:
        return None
    r_squared = _r_squared(fixed_s + slope_s * x, y)
    return Line(float(fixed_s), float(slope_s / units_N[-1]), r_squared, floor_s)


def _r_squared(predicted_N: np.ndarray, seconds_N: np.ndarray) -> float:
    rest = np.sum((seconds_N - predicted_N) ** 2)
    spread = np.sum((seconds_N - seconds_N.mean()) ** 2)
    return float(1 - rest / spread) if spread > 0 else 0.0


LineThrough = Callable[[np.ndarray, np.ndarray], Line]
"""Of sizes and seconds, both ``[N]``."""

LEAST_REPEATS = 3
AHEAD_CYCLES = 2_000_000  # about 1 ms in which the host issues work while the device spins


@dataclass(frozen=True)
class HostClock:
    """For work that the host waits for."""

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        """From the end of ``ready`` to the end of ``work``."""
        ready()
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s


@dataclass(frozen=True)
class DeviceClock:
    """For work on the current CUDA stream. The device spins first, so that the host is ahead of it
    and the time to issue does not count."""

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        ready()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    """The clock for a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, eq=False)
class Sweep:
    """One operation at growing sizes, the same on all ranks."""

    name: str  # of the operation, for a person
    units_N: Sequence[int]  # sizes, growing: bytes, rows or operations
    works_N: Sequence[Callable[[], object]]  # the operation at each size


def silent(name: str) -> None:
    """Report to nobody which sweep begins."""


@dataclass(frozen=True)
class Bench:
    """Where and how often is measured."""

    clock: Clock  # times the works
    device: torch.device  # of this rank
    num_warm_ups: int  # runs of each work that do not count
    num_repeats: int  # runs of each work that do, at most; their median is taken
    # seconds that a sweep's repetitions may take; a few are made in any case
    budget_s: float = 60.0
    group: dist.ProcessGroup | None = None  # the ranks that measure together; None for all
    begins: Callable[[str], object] = silent  # given the name of each sweep

    def fit(self, sweep: Sweep, line_through: LineThrough = fit_line) -> Line:
        """The line through a sweep's times, the same on every rank. Collective."""
        self.begins(sweep.name)
        return line_through(np.array(sweep.units_N), self.seconds(sweep.works_N))

    def seconds(self, works_N: Sequence[Callable[[], object]]) -> np.ndarray:
        """Of each work on the slowest rank, float64 ``[N]``. Works take turns, so that a load from
        outside that comes and goes is shared by all sizes. Collective."""
        ready = partial(sum_in_place, torch.zeros(1, device=self.device), self.group)
        for work in list(works_N) * self.num_warm_ups:
            work()

        def turn() -> np.ndarray:
            own_N = [self.clock.seconds(ready, work) for work in works_N]
            return self.over_ranks(np.array(own_N)).max(axis=0)

        seconds_IN = [turn()]
        num_affordable = int(self.budget_s / max(seconds_IN[0].sum(), 1e-9))
        num_turns = min(max(num_affordable, LEAST_REPEATS), self.num_repeats)
        seconds_IN += [turn() for _ in range(num_turns - 1)]
        return np.asarray(np.median(seconds_IN, axis=0))

    def over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Every rank's values, ``[C, ...]``. Collective."""
        gathered = all_gather_counts(torch.as_tensor(values, device=self.device), self.group)
        return gathered.cpu().numpy()
