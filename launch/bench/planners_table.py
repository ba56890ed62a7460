"""What the planners of HECATE, Pro-Prophet and FasterMoE do with real loads, a table in markdown.

Every planner plans each logged step twice: on the rows to come, and on those of the step before.
HECATE's plans are guarded. No device and no process group is needed::

    python launch/bench/planners_table.py --trace loads.npz > table.md

A trace holds ``rows_ILCE`` and ``steps_I``, as ``load_traces.write_loads`` writes them, or
``counts_IRLE`` and ``iteration_I``. Shape letters: I logged steps, L layers, C cells (ranks), E
experts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from load_traces import read_trace
from rich.console import Console
from rich.progress import track
from trace_replay import A100, Planner, PricedCluster, Score, score, to_nearest

from ds_moe_ext.cost.prices import RoutedRows
from ds_moe_ext.hardware import read_hardware
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.calibrate import calibrate, guarded
from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.planners.prophet_greedy import BlockPlan, place_experts
from ds_moe_ext.planners.shadow import shadow_experts


def materialized(
    homes: Sequence[Placement],
    planned_LCE: np.ndarray,
    actual_LCE: np.ndarray,
    cluster: PricedCluster,
    *,
    degree: int,
    copies: int,
    calibrates: bool = False,
) -> tuple[Placement, ...]:
    """HECATE's targets, guarded.

    Args:
        homes: of each layer.
        planned_LCE: rows planned on.
        actual_LCE: rows to come, which calibration knows.
        cluster: that plans are made for.
        degree: ``t``.
        copies: ``m``, of which calibration keeps one for itself.
        calibrates: adds copies when the rows are known.
    """
    prices, node_C = cluster.prices, cluster.node_C
    targets = materialize(
        homes,
        list(planned_LCE.sum(axis=1)),
        overlap_degree=degree,
        copies_per_cell=copies - calibrates,
        node_C=node_C,
    )
    targets = guarded(homes, targets, RoutedRows.of(list(planned_LCE), node_C), prices=prices)
    if not calibrates:
        return targets
    return tuple(
        calibrate(
            home,
            target,
            rows_CE,
            copies_left=copies - int((target.holds_EC & ~home.holds_EC).sum(axis=0).max()),
            prices=prices,
            node_C=node_C,
        )
        for home, target, rows_CE in zip(homes, targets, actual_LCE)
    )


def replicated(
    homes: Sequence[Placement],
    planned_LCE: np.ndarray,
    actual_LCE: np.ndarray,
    cluster: PricedCluster,
    *,
    search: Callable[..., BlockPlan],
    is_scheduled: bool = False,
) -> tuple[Placement, ...]:
    """What Pro-Prophet's planner, or FasterMoE's, finds; by equation (8) if scheduled, else (6)."""
    prices = replace(cluster.block, is_scheduled=is_scheduled)
    return tuple(
        search(home, rows_CE, prices=prices).target for home, rows_CE in zip(homes, planned_LCE)
    )


def at_home(homes: Sequence[Placement], *_: object) -> tuple[Placement, ...]:
    """No copies."""
    return tuple(homes)


EP = Planner("ep", at_home)


def replicating(excluded: Sequence[int | None], balances: Sequence[float]) -> Iterator[Planner]:
    """FasterMoE's and Pro-Prophet's rows."""
    yield Planner("shadow", partial(replicated, search=shadow_experts))
    for num_excluded, balance, is_scheduled in itertools.product(excluded, balances, (False, True)):
        search = partial(place_experts, num_excluded=num_excluded, balance=balance)
        n = "auto" if num_excluded is None else num_excluded
        yield Planner(
            f"prophet eq. {8 if is_scheduled else 6}, n = {n}, alpha = {balance:g}",
            partial(replicated, search=search, is_scheduled=is_scheduled),
        )


def fully_sharded(degrees: Sequence[int], copies: Sequence[int]) -> Iterator[Planner]:
    """HECATE's rows."""
    yield Planner("fssdp, sharding alone", at_home, shard_degree=0)
    for degree, count in itertools.product(degrees, copies):
        targets = partial(materialized, degree=degree, copies=count)
        sizes = f"t = {degree}, m = {count}"
        yield Planner(f"fssdp, copies alone, {sizes}", targets, to_nearest)
        yield Planner(f"fssdp, both, {sizes}", targets, to_nearest, degree)
        calibrated = partial(targets, calibrates=True)
        yield Planner(f"fssdp, both, calibrated, {sizes}", calibrated, to_nearest, degree)


COLUMNS = (
    *("planner", "max/mean", "RB", "remote rows", "to other nodes", "copies a rank"),
    *("eq. (6)", "eq. (8)", "planning, ms a layer"),
)


def line(planner: Planner, exact: Score, ahead: Score, alone: Score) -> str:
    """A row of the table: of plans on the exact rows, and on predicted ones.

    RB and the equations' figures are times less than without copies: the standard deviation of the
    ranks' rows, and seconds.
    """
    columns = zip(_cells(exact, alone), _cells(ahead, alone))
    pairs = [f"{of_exact} / {of_ahead}" for of_exact, of_ahead in columns]
    return f"| {planner.name} | {' | '.join(pairs)} | {1e3 * ahead.plan_s:.2f} |"


def _cells(score: Score, alone: Score) -> tuple[str, ...]:
    return (
        f"{score.balance:.2f}",
        f"{alone.spread / score.spread:.2f}" if score.spread else "",
        f"{score.remote:.0%}",
        f"{score.abroad:.0%}",
        f"{score.copies:.2f}",
        f"{alone.plain_s / score.plain_s:.2f}",
        f"{alone.hidden_s / score.hidden_s:.2f}",
    )


def count_or_auto(text: str) -> int | None:
    """``n`` of Pro-Prophet's planner; None is automatic."""
    return None if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--trace", type=Path, required=True)
    add("--run", type=int, help="only this one of the trace's runs of evenly spaced steps, from 0")
    add("--nodes", type=int, default=2, help="the ranks lie on so many")
    add("--hardware", type=Path, help="a file of configs/hardware; without, A100 nodes")
    add("--width", type=int, default=768, help="of the model; that of GPT-MoE-S")
    add("--window", type=int, default=1, help="logged steps whose mean predicts the next")
    add("--degrees", type=int, nargs="+", default=[8], help="t")
    add("--copies", type=int, nargs="+", default=[1, 2, 4, 8], help="m")
    add("--excluded", type=count_or_auto, nargs="+", default=[0], help="n, or auto")
    add("--balances", type=float, nargs="+", default=[1.0], help="alpha")
    add("--shard_every", type=int, default=10, help="logged steps between new homes")
    given = parser.parse_args()
    for name in ("nodes", "width", "window", "shard_every"):
        if vars(given)[name] < 1:
            parser.error(f"--{name} is {vars(given)[name]}; give 1 or more")
    runs = read_trace(given.trace)
    if given.run is not None and not 0 <= given.run < len(runs):
        parser.error(
            f"--run is {given.run}, but the trace has {len(runs)}; give 0 to {len(runs) - 1}"
        )
    runs = runs if given.run is None else [runs[given.run]]
    num_ranks = runs[0].shape[2]
    if num_ranks % given.nodes:
        parser.error(f"--nodes is {given.nodes}, which does not divide {num_ranks} ranks")
    try:
        hardware = read_hardware(given.hardware) if given.hardware else A100
        cluster = PricedCluster.of(
            replace(hardware, num_nodes=given.nodes, ranks_per_node=num_ranks // given.nodes),
            rows=float(np.concatenate(runs).sum(axis=3).mean()),
            width=given.width,
        )
    except ValueError as error:
        parser.error(str(error))
    planners = [
        EP,
        *replicating(given.excluded, given.balances),
        *fully_sharded(given.degrees, given.copies),
    ]
    run = partial(score, runs=runs, cluster=cluster)
    alone = run(EP, window=0, shard_every=1)
    print(f"{cluster.text} `ep` takes {1e3 * alone.plain_s:.3g} ms a layer.\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for planner in track(planners, console=Console(stderr=True), description="planning"):
        exact = run(planner, window=0, shard_every=1)
        ahead = run(planner, window=given.window, shard_every=given.shard_every)
        print(line(planner, exact, ahead, alone), flush=True)


if __name__ == "__main__":
    main()
