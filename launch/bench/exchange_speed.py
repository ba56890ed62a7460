# SPDX-License-Identifier: Apache-2.0
"""What rows and copies of experts reach between the ranks at hand, by size.

`torchrun --nproc_per_node 8 launch/bench/exchange_speed.py --mib 1 4 16 64 --expert_mib 9`

Ways take turns, repetition by repetition; the slowest rank's time counts. Rates are of the bytes
that a rank sends to others (rows), takes in from others (copies), or sends to their homes
(gradients of copies).

- all-to-all: even exchanges of rows in bfloat16 by the backend (NCCL, or gloo on a CPU);
- DeepEP: the same rows there, where the package is installed and takes these ranks;
- copies: one expert of each rank to all others, as strategies copy them;
- gradients: of those copies, summed at their homes.

Shape letters: N rows, C ranks, W numbers of a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rotation import rotated

from ds_moe_ext.commands.profile_ranks import device_of
from ds_moe_ext.core.comm import all_to_all_rows, connect, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.core.layout import Grid, ParallelLayout, world
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import Cargo, gather_rounds
from ds_moe_ext.hosts.attachment.startup_check import Launched
from ds_moe_ext.moe.dispatch import DeepEp, why_not
from ds_moe_ext.planning.bench import Bench, clock_of
from ds_moe_ext.schedule.executor import to_the_end
from ds_moe_ext.schedule.task import INTER

MIB = 2**20
NUM_WARM_UPS = 2


class Work(NamedTuple):
    """One exchange.

    Attributes:
        way: its name.
        num_bytes: that a rank gives or takes, see the module.
        run: does it. Collective.
    """

    way: str
    num_bytes: int
    run: Callable[[], object]


def row_works(
    layout: ParallelLayout, device: torch.device, mib: float, width: int
) -> tuple[list[Work], str]:
    """Even exchanges of rows, and why DeepEP is not among them. Collective."""
    group = layout.group("ep", INTER)
    num_ranks = group.size()
    num_each = max(1, round(mib * MIB / (2 * width * num_ranks)))
    rows_NW = torch.ones(num_each * num_ranks, width, dtype=torch.bfloat16, device=device)
    even_C = [num_each] * num_ranks
    sent = rows_NW.nbytes * (num_ranks - 1) // num_ranks
    works = [
        Work("all-to-all", sent, partial(all_to_all_rows, rows_NW, even_C, even_C, group)),
    ]
    reason = why_not(layout, device)
    if not reason:
        trip = DeepEp.of(group).trip(np.full((num_ranks, num_ranks), num_each), device)
        works.append(Work("DeepEP", sent, partial(trip.out, rows_NW)))
    return works, reason


def copy_works(group: dist.ProcessGroup, rank: int, device: torch.device, mib: float) -> list[Work]:
    """An expert of each rank to all, and the gradients of the copies home."""
    num_ranks, numbers = group.size(), max(1, round(mib * MIB / 2))
    home = Placement.owned_by(np.arange(num_ranks), num_ranks)
    everywhere = Placement(np.ones_like(home.holds_EC))
    cargo = Cargo(2 * numbers)
    part = gather_rounds(home, everywhere, np.zeros(num_ranks, np.int64), cargo).part_of(rank)
    weights = torch.ones(num_ranks, numbers, dtype=torch.bfloat16, device=device)
    slots = {expert: (own,) for expert, own in enumerate(weights)}
    others = 2 * numbers * (num_ranks - 1)
    return [
        Work("copies", others, lambda: to_the_end(sparse_all_gather(part, slots, slots, group))),
        Work("gradients", others, lambda: to_the_end(sparse_reduce_scatter(part, slots, group))),
    ]


def measure(works: list[Work], bench: Bench, repetitions: int) -> list[list[float]]:
    """Seconds of each work on the slowest rank, by repetition. Collective."""
    ready = torch.zeros(1, device=bench.device)
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(-NUM_WARM_UPS, repetitions):
        for number in rotated(range(len(works)), turn):
            own = bench.clock.seconds(partial(dist.all_reduce, ready), works[number].run)
            if turn >= 0:
                seconds[number].append(float(bench.over_ranks(np.array([own])).max()))
    return seconds


def main() -> None:
    """Measure all sizes, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--mib", type=float, nargs="+", default=[1.0, 4.0, 16.0, 64.0], help="rows of a rank")
    add("--expert_mib", type=float, nargs="+", default=[9.0], help="weights of an expert")
    add("--width", type=int, default=2048, help="numbers of a row")
    add("--repetitions", type=int, default=20)
    add("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    launched = Launched.from_environment()
    device = device_of(launched, None)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with world(backend, launched.rank, launched.world_size):
        num_ranks = launched.world_size
        layout = ParallelLayout.build(Grid(num_ranks, num_ranks), [("ep", INTER)])
        group, skipped, works = layout.group("ep", INTER), {}, list[Work]()
        connect(group, device)
        for mib in given.mib:
            added, reason = row_works(layout, device, mib, given.width)
            works += added
            if reason:
                skipped["DeepEP"] = reason
        for mib in given.expert_mib:
            works += copy_works(group, launched.rank, device, mib)
        bench = Bench(clock_of(device), device, num_warm_ups=NUM_WARM_UPS, num_repeats=1)
        start_s = time.perf_counter()
        seconds = measure(works, bench, given.repetitions)
        if launched.rank == 0:
            title = f"{num_ranks} ranks, {backend}, {time.perf_counter() - start_s:.0f} s"
            table = Table(title=title, title_justify="left")
            for heading in ("what", "MiB", "ms", "GB/s"):
                table.add_column(heading)
            results = []
            for work, own in zip(works, seconds):
                middle, mib = statistics.median(own), work.num_bytes / MIB
                rate = work.num_bytes / middle / 1e9
                table.add_row(work.way, f"{mib:.2f}", f"{1e3 * middle:.3f}", f"{rate:.2f}")
                results.append({"way": work.way, "bytes": work.num_bytes, "seconds": own})
            Console().print(table)
            for name, reason in skipped.items():
                print(f"not run: {name}: {reason}")
            if given.json:
                document = {"backend": backend, "ranks": num_ranks, "results": results}
                given.json.write_text(json.dumps({**document, "skipped": skipped}))


if __name__ == "__main__":
    main()
