# SPDX-License-Identifier: Apache-2.0
"""Long runs of small models: memory, threads, files and communicators stay as many, steps as quick.

`torchrun --nproc_per_node 2 launch/bench/soak.py --strategy fssdp --steps 2000`
`torchrun --nproc_per_node 2 launch/bench/soak.py --host megatron --strategy "esp over prophet"`

A fifth of the steps warms up; then the run is looked at twenty times. What is told is the growth
from the first half of these looks to the second, by medians, of the rank that grew most.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from small_runs import HOSTS, STRATEGIES, SmallRun, made

NUM_LOOKS = 20


@dataclass(frozen=True)
class Look:
    """At one rank.

    Attributes:
        rss_bytes: resident, of the process.
        python_bytes: allocated by Python, by tracemalloc.
        tensors: that gc knows.
        threads, files: of the process.
        communicators: of torch.distributed.
        step_s: processor time of a step, median since the last look: others may use the cores.
    """

    rss_bytes: int
    python_bytes: int
    tensors: int
    threads: int
    files: int
    communicators: int
    step_s: float


def look(step_s: Sequence[float]) -> Look:
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
        step_s=statistics.median(step_s),
    )


def looks_at(run: SmallRun, num_steps: int, num_looks: int = NUM_LOOKS) -> list[Look]:
    """Take all steps; looks at the last four fifths of them. Collective."""
    between, found = max(num_steps * 4 // 5 // num_looks, 1), []
    for _ in range(num_steps - between * num_looks):
        run.step()
    tracemalloc.start()
    for _ in range(num_looks):
        step_s = []
        for _ in range(between):
            begun_s = time.process_time()
            run.step()
            step_s.append(time.process_time() - begun_s)
        found.append(look(step_s))
    tracemalloc.stop()
    return found


def growth(looks: Sequence[Look], name: str) -> float:
    """From the first half of the looks to the second, by medians."""
    values = [float(asdict(each)[name]) for each in looks]
    half = len(values) // 2
    return statistics.median(values[half:]) - statistics.median(values[:half])


def main() -> None:
    """Train, look, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", choices=HOSTS, default="deepspeed")
    parser.add_argument("--strategy", choices=STRATEGIES, default="fssdp")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write all looks of all ranks here")
    given = parser.parse_args()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = looks_at(made(given.host, given.strategy), given.steps)
        told: list[list[Look]] = [[]] * dist.get_world_size()
        dist.all_gather_object(told, own)
    if dist.get_rank() == 0:
        names = list(asdict(own[0]))
        print(
            f"{given.host}, {given.strategy}, {given.steps} steps:",
            json.dumps({name: max(growth(each, name) for each in told) for name in names}),
            "of",
            json.dumps({name: asdict(own[0])[name] for name in names}),
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps([[asdict(x) for x in each] for each in told]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
