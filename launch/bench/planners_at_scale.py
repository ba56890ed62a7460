# SPDX-License-Identifier: Apache-2.0
"""What planning takes on many ranks, by every policy of the table of planners.

Processor time of a layer, all parts that come before the step for policies that plan on predicted
rows. Loads are Zipf's. Policies of others are numpy of ours: theirs are compiled, or PyTorch::

    python launch/bench/planners_at_scale.py --ranks 64 1024

Shape letters: L layers, C cells (ranks), E experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from planners_table import late, line, ours, redundant, relaid
from priced_cluster import A100, PricedCluster
from row_ways import by_optimum, by_priced, evenly, evenly_on_node
from trace_replay import Planner

from ds_moe_ext.core.placement import even_homes
from ds_moe_ext.planning.load_models import zipf_steps

NODE = 8  # ranks of one


def planners(num_ranks: int, num_experts: int, degree: int) -> Iterator[Planner]:
    """Those of the table but for those that take their time after the gate; slots of others
    are so many more of a rank than ``ep`` needs."""
    least = -(-num_experts // num_ranks)
    for more in (1, 2):
        yield Planner(f"eplb, +{more}", partial(redundant, more=more, num_groups=1), evenly)
    for more in (1, 2):
        yield Planner(f"laer, +{more}", partial(relaid, slots=least + more), evenly_on_node)
    yield from late((1.1,), (1, 2))
    too_late = by_optimum, by_priced
    yield from (each for each in ours((degree,), (1, 2), (1.0,)) if each.way not in too_late)


def described(num_ranks: int, rows: int) -> PricedCluster:
    """A100 nodes, of so many rows a rank and layer."""
    hardware = replace(A100, num_nodes=num_ranks // NODE, ranks_per_node=NODE)
    return PricedCluster.of(hardware, rows=rows, width=768)


def seconds(planner: Planner, cluster: PricedCluster, rows_LCE: np.ndarray) -> float:
    """Of planning a layer."""
    num_layers, num_ranks, num_experts = rows_LCE.shape
    homes = even_homes([num_experts] * num_layers, num_ranks)
    started = time.process_time()
    layouts = planner.layouts(homes, rows_LCE, rows_LCE, cluster)
    for home, layout, rows_CE in zip(homes, layouts, rows_LCE):
        planner.way(home, layout, rows_CE, cluster)
    return (time.process_time() - started) / num_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[64, 1024])
    add("--experts", type=int, default=256)
    add("--layers", type=int, default=2)
    add("--rows", type=int, default=32768, help="of a rank and layer")
    add("--skew", type=float, default=1.0, help="of loads, Zipf's exponent")
    add("--degree", type=int, default=16, help="t of fssdp")
    add("--limit_s", type=float, default=0.2, help="who takes longer is not asked on more ranks")
    given = parser.parse_args()
    wrong = [count for count in given.ranks if count < NODE or count % NODE]
    if wrong:
        parser.error(f"--ranks has {wrong[0]}; give multiples of {NODE}, the ranks of a node")
    found: dict[str, list[str]] = {}
    too_long = set()
    for count in (NODE, *sorted(given.ranks)):  # the first is not told: all is loaded there
        cluster = described(count, given.rows)
        shape = given.layers, count, given.experts
        rows_LCE = next(zipf_steps(shape, rows=given.rows, skew=given.skew))
        for planner in planners(count, given.experts, given.degree):
            cells = found.setdefault(planner.name, [])
            if planner.name in too_long:
                cells.append("")
                continue
            taken_s = seconds(planner, cluster, rows_LCE)
            cells.append(f"{1e3 * taken_s:,.1f}")
            if taken_s > given.limit_s:
                too_long.add(planner.name)
    titles = ["ms a layer", *(f"{count:,} ranks" for count in sorted(given.ranks))]
    print(f"{line(titles)}\n|{'---|' * len(titles)}")
    for name, cells in found.items():
        print(line([name, *cells[1:]]))


if __name__ == "__main__":
    main()
