# SPDX-License-Identifier: Apache-2.0
"""Small runs leave nothing behind: memory, threads, files and communicators stay as many.

A fifth of the steps warms up; then the run is looked at a few times. Growth is from the first half
of these looks to the second, by medians.
"""

from __future__ import annotations

import gc
import os
import statistics
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from damage import SmallRun, made

from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

NUM_STEPS = 50


@dataclass(frozen=True)
class Look:
    """At one rank."""

    rss_bytes: int
    python_bytes: int
    tensors: int
    threads: int
    files: int
    communicators: int


def look() -> Look:
    """At this process; Python's garbage is collected first."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Look(
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        python_bytes=tracemalloc.get_traced_memory()[0],
        tensors=sum(type(thing) is torch.Tensor for thing in gc.get_objects()),
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
        communicators=len(dist.distributed_c10d._world.pg_map),
    )


def looks_at(run: SmallRun, num_steps: int, num_looks: int) -> list[Look]:
    """Take all steps; looks at the last four fifths of them. Collective."""
    between, found = max(num_steps * 4 // 5 // num_looks, 1), []
    for _ in range(num_steps - between * num_looks):
        run.step()
    tracemalloc.start()
    for _ in range(num_looks):
        for _ in range(between):
            run.step()
        found.append(look())
    tracemalloc.stop()
    return found


def growth(looks: Sequence[Look], name: str) -> float:
    """From the first half of the looks to the second, by medians."""
    values = [float(asdict(each)[name]) for each in looks]
    half = len(values) // 2
    return statistics.median(values[half:]) - statistics.median(values[:half])


def looks(rank: int, world_size: int, strategy: str) -> list[Look]:
    """Of a rank."""
    return looks_at(made("deepspeed", strategy), NUM_STEPS, num_looks=6)


@pytest.mark.parametrize(
    "strategy", ["fssdp", slow("zebra"), slow("esp over fssdp"), slow("esp over prophet")]
)
def test_steps_leave_nothing_behind(strategy: str) -> None:
    for own in pool_of(2).run(looks, strategy):
        for name in ("threads", "files", "communicators"):
            assert growth(own, name) == 0, (name, own)
        assert abs(growth(own, "tensors")) < 5, own  # some replicas are under way
        assert growth(own, "python_bytes") < 300e3, own
        assert growth(own, "rss_bytes") < 8e6, own
