"""What HECATE's planners do with a trace of real loads, as a table in markdown.

All plans with copies are guarded. No device and no process group is needed::

    python launch/table_of_planners.py --trace loads.npz > table.md

A trace holds ``rows_ILCE`` and ``steps_I``, as ``ds_moe_ext.load.write_loads`` writes them, or
``counts_IRLE`` and ``iteration_I``. Shape letters: I logged steps, L layers, C cells (ranks), E
experts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from ds_moe_ext.load import LoadWindow, balance_L, read_loads
from ds_moe_ext.placement import Placement, even_homes
from ds_moe_ext.planners.calibrate import calibrate, guarded
from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.planners.prices import Prices, nearest_copy_flow, step_seconds
from ds_moe_ext.planners.shard import shard
from ds_moe_ext.share import NearestCopy

WINDOW = 5  # logged steps whose mean predicts the next
WIDTH = 768  # of GPT-MoE-S: an expert has 4 * WIDTH ** 2 weights
PRICES = Prices(  # A100 nodes with 400 Gb/s, at 35 % of the device's peak, in 16 bits
    row_s=3 * 8 * WIDTH**2 / (0.35 * 312e12),
    row_bytes=2 * WIDTH,
    copy_s=2 * 4 * WIDTH**2 / 50e9,
    inter_bytes_per_s=50e9,
    intra_bytes_per_s=300e9,
)


@dataclass(frozen=True)
class Planner:
    """One row of the table.

    Attributes:
        name: as printed.
        shards: re-shards by Algorithm 2.
        degree: ``t`` of both algorithms.
        copies: ``m``, of which calibration keeps one for itself.
        calibrates: adds copies when the rows are known.
    """

    name: str
    shards: bool = False
    degree: int = 0
    copies: int = 0
    calibrates: bool = False

    def target(
        self,
        homes: Sequence[Placement],
        planned_LCE: np.ndarray,
        actual_LCE: np.ndarray,
        node_C: np.ndarray,
    ) -> tuple[Placement, ...]:
        """Where experts compute in one step."""
        targets = materialize(
            homes,
            planned_LCE.sum(axis=1),
            overlap_degree=self.degree,
            copies_per_cell=self.copies - self.calibrates,
            node_C=node_C,
        )
        if self.copies:
            targets = guarded(homes, targets, list(planned_LCE), prices=PRICES, node_C=node_C)
        if self.calibrates:
            received = [
                int((t.holds_EC & ~h.holds_EC).sum(axis=0).max()) for h, t in zip(homes, targets)
            ]
            targets = tuple(
                calibrate(
                    home,
                    target,
                    rows_CE,
                    copies_left=self.copies - used,
                    prices=PRICES,
                    node_C=node_C,
                )
                for home, target, rows_CE, used in zip(homes, targets, actual_LCE, received)
            )
        return targets


@dataclass(frozen=True)
class Score:
    """Means over steps and layers.

    Attributes:
        balance: rows of the busiest rank over the mean.
        remote: share of rows that leave their rank.
        abroad: share of rows that leave their node.
        copies: copies that a rank holds in a layer.
        seconds: of the experts and all-to-alls of a layer by the cost model.
        plan_s: processor seconds of planning a step, all layers.
    """

    balance: float
    remote: float
    abroad: float
    copies: float
    seconds: float
    plan_s: float


def read_trace(path: Path) -> list[np.ndarray]:
    """Rows ``[I, L, C, E]`` of each run of evenly spaced steps."""
    with np.load(path) as file:
        is_other = "counts_IRLE" in file
        if is_other:
            rows_ILCE = file["counts_IRLE"].transpose(0, 2, 1, 3).astype(np.int64)
            steps_I = file["iteration_I"]
    if not is_other:
        rows_ILCE, steps_I = read_loads(path)
    gaps = np.diff(steps_I)
    return np.split(rows_ILCE, np.flatnonzero(gaps > np.median(gaps)) + 1)


def planned_steps(
    runs: Sequence[np.ndarray], *, predicts: bool
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Number in its run, rows planned on and rows to come of every step, ``[L, C, E]``.

    The first step of a run, of which nothing can be predicted, is left out.
    """
    for rows_ILCE in runs:
        window = LoadWindow(WINDOW)
        for step, rows_LCE in enumerate(rows_ILCE):
            if step:
                total_LCE = np.rint(window.predicted() * len(window)).astype(np.int64)
                yield step, total_LCE if predicts else rows_LCE, rows_LCE
            window.push(rows_LCE)


def score(
    planner: Planner,
    runs: Sequence[np.ndarray],
    node_C: np.ndarray,
    *,
    predicts: bool,
    shard_every: int,
) -> Score:
    """Plan every step of the trace, and route its rows by the plan.

    Args:
        planner: one row of the table.
        runs: as ``read_trace`` gives them.
        node_C: node of each rank.
        predicts: plan on the window's mean instead of the rows to come.
        shard_every: logged steps from one choice of homes to the next.
    """
    scores = []
    first = even_homes([runs[0].shape[3]] * runs[0].shape[1], len(node_C))
    homes = first
    for step, planned_LCE, rows_LCE in planned_steps(runs, predicts=predicts):
        started = time.process_time()
        if step == 1:
            homes = first
        if planner.shards and (step - 1) % shard_every == 0:
            loads = planned_LCE.sum(axis=1)
            homes = shard(loads, overlap_degree=planner.degree, node_C=node_C, homes=homes)
        targets = planner.target(homes, planned_LCE, rows_LCE, node_C)
        plan_s = time.process_time() - started
        scores.append(_score_of_step(homes, targets, rows_LCE, node_C, plan_s))
    return Score(*np.mean([list(vars(each).values()) for each in scores], axis=0).tolist())


def _score_of_step(
    homes: Sequence[Placement],
    targets: Sequence[Placement],
    rows_LCE: np.ndarray,
    node_C: np.ndarray,
    plan_s: float,
) -> Score:
    rows = list(rows_LCE)
    computed_LC = np.stack(
        [NearestCopy(target, node_C).computed_C(rows_CE) for target, rows_CE in zip(targets, rows)]
    )
    traffic = nearest_copy_flow(targets, rows, node_C)
    num_copies = sum(int(t.holds_EC.sum()) - t.num_experts for t in targets)
    return Score(
        balance=float(balance_L(computed_LC).mean()),
        remote=float(traffic.sent_LC.sum() / rows_LCE.sum()),
        abroad=float(traffic.out_LN.sum() / rows_LCE.sum()),
        copies=num_copies / computed_LC.size,
        seconds=float(step_seconds(targets, rows, prices=PRICES, node_C=node_C).mean()),
        plan_s=plan_s,
    )


def planners(degrees: Sequence[int], copies: Sequence[int]) -> Iterator[Planner]:
    """The rows of the table."""
    yield Planner("plain expert parallelism")
    yield Planner("sharding alone", shards=True)
    for degree, count in itertools.product(degrees, copies):
        both = Planner("both", shards=True, degree=degree, copies=count)
        yield replace(both, name="materialization alone", shards=False)
        yield both
        yield replace(both, name="both, calibrated", calibrates=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=2, help="the ranks lie on so many")
    parser.add_argument("--degrees", type=int, nargs="+", default=[8], help="t")
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 4, 8], help="m")
    parser.add_argument(
        "--shard_every", type=int, default=10, help="logged steps between new homes"
    )
    given = parser.parse_args()
    runs = read_trace(given.trace)
    num_ranks = runs[0].shape[2]
    if given.nodes < 1 or num_ranks % given.nodes:
        parser.error(f"--nodes is {given.nodes}, which does not divide {num_ranks} ranks")
    node_C = np.arange(num_ranks) // (num_ranks // given.nodes)
    run = partial(score, runs=runs, node_C=node_C)

    print(
        "| planner | t | m | max/mean: exact | predicted | remote rows | to other nodes | "
        "copies a rank | model: exact | predicted | planning, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    alone_s = None
    rows = list(planners(given.degrees, given.copies))
    for planner in track(rows, console=Console(stderr=True), description="planning"):
        exact = run(planner, predicts=False, shard_every=1)
        ahead = run(planner, predicts=True, shard_every=given.shard_every)
        alone_s = alone_s or exact.seconds
        print(
            f"| {planner.name} | {planner.degree or ''} | {planner.copies or ''} "
            f"| {exact.balance:.2f} | {ahead.balance:.2f} | {ahead.remote:.0%} "
            f"| {ahead.abroad:.0%} | {ahead.copies:.2f} | {alone_s / exact.seconds:.2f} "
            f"| {alone_s / ahead.seconds:.2f} | {1e3 * ahead.plan_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
