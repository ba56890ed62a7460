# SPDX-License-Identifier: Apache-2.0
"""What rows and replicas of experts reach between the ranks at hand, by size.

`torchrun --nproc_per_node 8 launch/bench/exchange_speed.py --mib 1 4 16 64 --expert_mib 9`

All take turns; the slowest rank's time counts. Rates are of the bytes that a rank sends to others:

- all-to-all: even exchanges of rows in bfloat16 by the backend (NCCL, or gloo on a CPU);
- DeepEP: the same rows there, where the package is installed and takes these ranks;
- copies: one expert of each rank to all others, as strategies copy them (bytes that it takes in);
- gradients: of those replicas, summed at their owners.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rotation import rotated

from ds_moe_ext.commands.profile_ranks import device_of
from ds_moe_ext.core.comm import all_to_all_rows, connect, sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.core.layout import Grid, ParallelLayout, world
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import TransferSize, gather_rounds
from ds_moe_ext.hosts.attachment.startup_check import Launched
from ds_moe_ext.moe.dispatch import DeepEp, why_not
from ds_moe_ext.planning.bench import Bench, clock_of
from ds_moe_ext.schedule.executor import to_the_end
from ds_moe_ext.schedule.task import INTER

MIB = 2**20
NUM_WARM_UPS = 2
Work = tuple[str, int, Callable[[], object]]
"""A way, the bytes that a rank gives or takes, and what does it, which is collective."""


def row_works(layout: ParallelLayout, device: torch.device, num_bytes: float) -> Iterator[Work]:
    """Even exchanges of so many bytes of a rank. Collective."""
    group, width = layout.group("ep", INTER), 2048
    num_ranks = group.size()
    num_each = max(1, round(num_bytes / (2 * width * num_ranks)))
    rows = torch.ones(num_each * num_ranks, width, dtype=torch.bfloat16, device=device)
    even_C = [num_each] * num_ranks
    sent = rows.nbytes * (num_ranks - 1) // num_ranks
    yield "all-to-all", sent, partial(all_to_all_rows, rows, even_C, even_C, group)
    if not why_not(layout, device):
        transfer = DeepEp.of(group).transfer(np.full((num_ranks, num_ranks), num_each), device)
        yield "DeepEP", sent, partial(transfer.out, rows)


def copy_works(layout: ParallelLayout, device: torch.device, num_bytes: float) -> Iterator[Work]:
    """An expert of each rank to all, and the gradients of the replicas to the owner."""
    group = layout.group("ep", INTER)
    num_ranks = group.size()
    weights = torch.ones(num_ranks, round(num_bytes / 2), dtype=torch.bfloat16, device=device)
    take_back = Placement.owned_by(np.arange(num_ranks), num_ranks)
    everywhere, transfer_size = (
        Placement(np.ones_like(take_back.holds_EC)),
        TransferSize(weights[0].nbytes),
    )
    rounds = gather_rounds(take_back, everywhere, np.zeros(num_ranks, np.int64), transfer_size)
    part, slots = rounds.part_of(group.rank()), {e: (own,) for e, own in enumerate(weights)}
    others = weights[0].nbytes * (num_ranks - 1)
    yield "replicas", others, lambda: to_the_end(sparse_all_gather(part, slots, slots, group))
    yield "gradients", others, lambda: to_the_end(sparse_reduce_scatter(part, slots, group))


def main() -> None:
    """Measure all sizes, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--mib", type=float, nargs="+", default=[1.0, 4.0, 16.0, 64.0], help="rows of a rank")
    add("--expert_mib", type=float, nargs="+", default=[9.0], help="weights of an expert")
    add("--repetitions", type=int, default=20)
    add("--json", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    launched = Launched.from_environment()
    device = device_of(launched, None)
    with world("nccl" if device.type == "cuda" else "gloo", launched.rank, launched.world_size):
        layout = ParallelLayout.build(
            Grid(launched.world_size, launched.world_size), [("ep", INTER)]
        )
        connect(layout.group("ep", INTER), device)
        works = [work for mib in given.mib for work in row_works(layout, device, mib * MIB)]
        works += [
            work for mib in given.expert_mib for work in copy_works(layout, device, mib * MIB)
        ]
        bench = Bench(clock_of(device), device, NUM_WARM_UPS, 1)
        ready = partial(dist.all_reduce, torch.zeros(1, device=device))
        seconds: list[list[float]] = [[] for _ in works]
        for turn in range(-NUM_WARM_UPS, given.repetitions):
            for number in rotated(range(len(works)), turn):
                own_s = bench.clock.seconds(ready, works[number][2])
                slowest_s = float(bench.over_ranks(np.array([own_s])).max())
                if turn >= 0:
                    seconds[number].append(slowest_s)
        reason = why_not(layout, device)
    if launched.rank:
        return
    results = []
    for (way, num_bytes, _), each in zip(works, seconds):
        middle_s = statistics.median(each)
        rate = f"{1e3 * middle_s:.3f} ms, {num_bytes / middle_s / 1e9:.2f} GB/s"
        print(f"{way} of {num_bytes / MIB:.2f} MiB: {rate}")
        results.append({"way": way, "bytes": num_bytes, "seconds": each})
    skipped = {"DeepEP": reason} if reason else {}
    print(f"not run: {skipped}")
    if given.json:
        given.json.write_text(json.dumps({"results": results, "skipped": skipped}))


if __name__ == "__main__":
    main()
