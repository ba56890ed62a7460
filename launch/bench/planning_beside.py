# SPDX-License-Identifier: Apache-2.0
"""What planning beside a step costs the thread that issues it, who shares Python's lock.

`python launch/bench/planning_beside.py --ranks 64 --layers 58 --experts 256`

In the place of a step a loop issues small operations of torch, as fast as it can: a host that the
device never waits for. The plans are those of ``planning_time.py``, made as for CUDA in the thread
that plans. A gap is one turn of the loop, four operations.

Shape letters: L layers, C ranks, E experts, G turns of the loop.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from planning_time import NUM_WARM_UPS, OneRank, Parts, Sizes, sizes_parser, strategy_of
from rich.console import Console
from rich.table import Table

from ds_moe_ext.moe import layer as moe_layer
from ds_moe_ext.schedule.executor import worker

NUM_ALONE = 2000  # turns of the loop, of which the second half tells how long one takes alone
NUM_ELEMENTS = 16384  # of an operation, some of whose time Python's lock is free
GAPS_MS = (0.1, 1.0, 4.0)


class Cost(NamedTuple):
    """Of planning one step; medians of several.

    Attributes:
        cpu_ms: of the thread that plans.
        lasts_ms: from the last rows to the plans.
        loop_ms: by which the loop is late then.
        longest_ms: gap.
        gaps: longer than each of ``GAPS_MS``, means.
    """

    cpu_ms: float
    lasts_ms: float
    loop_ms: float
    longest_ms: float
    gaps: tuple[float, ...]


def spin(is_over: Callable[[], bool]) -> np.ndarray:
    """Issue small operations, until something is over; seconds of each turn, float ``[G]``, of one
    at least."""
    one, other = torch.ones(NUM_ELEMENTS), torch.ones(NUM_ELEMENTS)
    moments = [time.perf_counter()]
    while len(moments) == 1 or not is_over():
        for _ in range(2):
            torch.add(one, other, out=other)
            torch.mul(other, 0.5, out=other)
        moments.append(time.perf_counter())
    return np.diff(moments)


def turn_alone_s() -> float:
    """Seconds of a turn while nobody plans."""
    left = iter(range(NUM_ALONE, -1, -1))
    return float(np.median(spin(lambda: next(left) == 0)[NUM_ALONE // 2 :]))


def measured(rank: OneRank, sizes: Sizes, num_steps: int) -> Cost:
    """What planning costs beside some steps."""
    steps = []
    for step, rows_LCE in enumerate(sizes.loads(NUM_WARM_UPS + num_steps)):
        alone_s = turn_alone_s()
        start = worker().submit(time.thread_time).result()
        rank.count(rows_LCE)
        end = worker().submit(time.thread_time)
        gaps_G = spin(end.done)
        rank.after_step(step)
        late_s = gaps_G.sum() - len(gaps_G) * alone_s
        longer = [(gaps_G > ms / 1e3).sum() for ms in GAPS_MS]
        steps.append((end.result() - start, gaps_G.sum(), late_s, gaps_G.max(), *longer))
    timed = np.array(steps[NUM_WARM_UPS:])
    cpu_ms, lasts_ms, loop_ms, longest_ms = (1e3 * sizes.middle(timed[:, :4], axis=0)).tolist()
    return Cost(cpu_ms, lasts_ms, loop_ms, longest_ms, tuple(timed[:, 4:].mean(axis=0).tolist()))


def shown(costs: dict[str, Cost]) -> Table:
    """A row a strategy."""
    table = Table(title="planning beside a loop of small operations", title_justify="left")
    table.add_column("")
    for name in ("its CPU, ms", "lasts, ms", "the loop is late, ms", "longest gap, ms"):
        table.add_column(name, justify="right")
    for ms in GAPS_MS:
        table.add_column(f"gaps over {ms:g} ms", justify="right")
    for name, cost in costs.items():
        table.add_row(name, *(f"{ms:.1f}" for ms in cost[:4]), *(f"{n:.1f}" for n in cost.gaps))
    return table


def main() -> None:
    """Measure each strategy, print."""
    parser = sizes_parser(__doc__, ("fssdp", "prophet"), ("fssdp", "prophet"))
    given = parser.parse_args()
    sizes = Sizes(**{name: vars(given)[name] for name in Sizes.__dataclass_fields__})
    copied = {"overlap_degree": given.overlap_degree, "copies_per_rank": given.copies_per_rank}
    torch.set_num_threads(1)
    gc.freeze()  # what was imported; full collections are no part of planning
    costs = {}
    for name in given.strategies:
        strategy = strategy_of(name, {"fssdp": {**copied, "reshard_interval": 0}})
        with mock.patch.object(moe_layer, "can_broadcast", lambda device: True):
            rank = OneRank(strategy, sizes, Parts())
        costs[name] = measured(rank, sizes, given.steps)
    Console().print(shown(costs))


if __name__ == "__main__":
    main()
