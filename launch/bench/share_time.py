# SPDX-License-Identifier: Apache-2.0
"""What dividing a layer's rows over its copies costs the host between gate and dispatch, and how
even it leaves them.

`python launch/bench/share_time.py --ranks 64 --experts 256 --copies 2 --degrees 8 32 256`

One process stands for one rank: it has the rows of all senders, as after the all-gather of counts,
and works out what it sends and what comes to it. Copies are HECATE's, planned on the rows of a step
before. Shape letters: C ranks, E experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from timeit import repeat

import numpy as np
from rich.console import Console
from rich.table import Table

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import (
    SWEEPS,
    LevelShare,
    NearestCopy,
    Rule,
    received_by_slot,
    sent_by_pair,
)
from ds_moe_ext.planning.fssdp_planner import materialize
from ds_moe_ext.planning.prices import Prices, RowPrices
from ds_moe_ext.planning.strategy import Pool
from ds_moe_ext.strategies.shares import levels_by

PRICES = Prices(
    row_s=2e-7, row_bytes=4096, copy_s=1e-4, inter_bytes_per_s=4e11, intra_bytes_per_s=4.5e11
)
"""Fine-grained experts on nodes of eight GPUs with 400 Gb/s each."""
DRIFT = 0.15  # of the logarithm of a sender's share between the steps
HERE = 1  # the rank that is looked at


def routed(num_ranks: int, num_experts: int, rows: int, zipf: float) -> tuple[np.ndarray, ...]:
    """Rows ``[C, E]`` of two steps that follow one another."""
    rng = np.random.default_rng(0)
    popularity = rng.permutation((1.0 + np.arange(num_experts)) ** -zipf)
    share_CE = popularity * np.exp(rng.normal(0, 0.4, (num_ranks, num_experts)))
    later_CE = share_CE * np.exp(rng.normal(0, DRIFT, share_CE.shape))
    return tuple(
        np.stack([rng.multinomial(rows, each / each.sum()) for each in steps])
        for steps in (share_CE, later_CE)
    )


def seconds_of(run: Callable[[], object]) -> float:
    """The least of several."""
    return min(repeat(run, number=100, repeat=7)) / 100


def planned(target: Placement, node_C: np.ndarray, rows_CE: np.ndarray, sweeps: int) -> LevelShare:
    """For the rows of the step before."""
    levels_of = levels_by(Pool(layers=(0,), prices=PRICES), node_C)
    return LevelShare.planned(levels_of(target), rows_CE, sweeps=sweeps)


def prepared(made: Callable[[], Rule]) -> None:
    """What is done between steps, or beside them."""
    made().prepare(HERE)


def divide(rule: Rule, target: Placement, rows_CE: np.ndarray) -> None:
    """What is done between gate and dispatch."""
    share = rule.of_rows(rows_CE)
    sent_by_pair(share, target, HERE, rows_CE[HERE][None])
    received_by_slot(share, target, HERE, rows_CE[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=64)
    add("--nodes", type=int, default=8)
    add("--experts", type=int, default=256)
    add("--copies", type=int, default=2, help="m")
    add("--degrees", type=int, nargs="+", default=[8, 32, 256], help="t")
    add("--rows", type=int, default=65_536, help="that a rank routes")
    add("--zipf", type=float, default=0.8)
    given = parser.parse_args()
    if given.ranks % given.nodes or given.experts % given.ranks:
        parser.error("nodes must divide ranks, and ranks experts")
    node_C = np.arange(given.ranks) * given.nodes // given.ranks
    before_CE, rows_CE = routed(given.ranks, given.experts, given.rows, given.zipf)
    home = Placement.block(given.experts, given.ranks)
    prices = RowPrices.of(PRICES, given.ranks)
    table = Table(
        *("t", "share", "us a layer", "us between steps", "max/mean", "time over nearest"),
        title=f"{given.ranks} ranks on {given.nodes} nodes, {given.experts} experts, "
        f"{given.copies} copies a rank",
    )
    for degree in given.degrees:
        (target,) = materialize(
            [home],
            [before_CE.sum(axis=0)],
            overlap_degree=degree,
            copies_per_cell=given.copies,
            node_C=node_C,
        )
        rules: dict[str, Callable[[], Rule]] = {
            "nearest": partial(NearestCopy, target, node_C),
            **{
                name: partial(planned, target, node_C, before_CE, sweeps)
                for name, sweeps in (("planned", 0), ("priced", SWEEPS))
            },
        }
        nearest_s = 0.0
        for name, made in rules.items():
            rule = made()
            rule.prepare(HERE)
            between_CC = rule.of_rows(rows_CE).rows_between(rows_CE[:, None])[0]
            load_C, layer_s = between_CC.sum(axis=0), prices.seconds(between_CC, node_C)
            nearest_s = nearest_s or layer_s
            made_s = min(repeat(partial(prepared, made), number=1, repeat=5))
            cells = (
                f"{1e6 * seconds_of(partial(divide, rule, target, rows_CE)):.0f}",
                f"{1e6 * made_s:.0f}",
                f"{load_C.max() / load_C.mean():.3f}",
                f"{layer_s / nearest_s:.3f}",
            )
            table.add_row(str(degree), name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
