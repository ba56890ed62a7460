# SPDX-License-Identifier: Apache-2.0
"""Time operations on all ranks together.

A sweep is one operation at growing sizes. All ranks run it at once, as in training; the slowest
rank's time counts, so that all ranks get equal numbers and may plan by them.

Shape letters: N sizes, I repetitions, C ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from ds_moe_ext.comm import all_gather_counts, sum_in_place
from ds_moe_ext.measure.fit import LinearFit, fit_line

LineThrough = Callable[[np.ndarray, np.ndarray], LinearFit]
"""Of sizes and seconds, both ``[N]``."""

LEAST_REPEATS = 3
AHEAD_CYCLES = 2_000_000  # about 1 ms in which the host issues work while the device spins


class Clock(Protocol):
    """Times work."""

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        """Seconds from the end of ``ready`` to the end of ``work``."""
        ...


@dataclass(frozen=True)
class HostClock:
    """For work that the host waits for."""

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        ready()
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s


@dataclass(frozen=True)
class DeviceClock:
    """For work on the current CUDA stream.

    The device spins first, so that the host is ahead of it and the time to issue does not count.
    """

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        ready()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock for a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, eq=False)
class Sweep:
    """One operation at growing sizes, the same on all ranks.

    Attributes:
        name: of the operation, for a person.
        units_N: sizes, growing: bytes, rows or operations.
        works_N: the operation at each size.
    """

    name: str
    units_N: Sequence[int]
    works_N: Sequence[Callable[[], object]]


def silent(name: str) -> None:
    """Tell nobody which sweep begins."""


@dataclass(frozen=True)
class Bench:
    """Where and how often is measured.

    Attributes:
        clock: times the works.
        device: of this rank.
        num_warm_ups: runs of each work that do not count.
        num_repeats: runs of each work that do, at most; their median is taken.
        budget_s: seconds that a sweep's repetitions may take; a few are made in any case.
        group: the ranks that measure together; None for all.
        begins: told the name of each sweep.
    """

    clock: Clock
    device: torch.device
    num_warm_ups: int
    num_repeats: int
    budget_s: float = 60.0
    group: dist.ProcessGroup | None = None
    begins: Callable[[str], object] = silent

    def fit(self, sweep: Sweep, line_through: LineThrough = fit_line) -> LinearFit:
        """The line through a sweep's times, the same on every rank. Collective."""
        self.begins(sweep.name)
        return line_through(np.array(sweep.units_N), self.seconds(sweep.works_N))

    def seconds(self, works_N: Sequence[Callable[[], object]]) -> np.ndarray:
        """Seconds of each work on the slowest rank, float64 ``[N]``. Collective.

        Works take turns, so that a load from outside that comes and goes is shared by all sizes.
        """
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
