# SPDX-License-Identifier: Apache-2.0
"""Which ways to run a job are priced, and what each comes to. Pure.

A way is a strategy on a grid. It plans by the steps before and meets the rows of the next, as in a
run; what is told is the mean of some steps. Shape letters: I steps, L MoE layers, R ranks, C cells,
E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from ds_moe_ext.hardware import Hardware
from ds_moe_ext.layout import Grid, divisors
from ds_moe_ext.load import LoadWindow
from ds_moe_ext.placement import Placement
from ds_moe_ext.pricing.described_run import DescribedRun
from ds_moe_ext.pricing.memory import MemoryUse
from ds_moe_ext.pricing.step_price import StepPrice, price_step
from ds_moe_ext.strategy import Job, Plan, Strategy

PRICED = 2  # steps of the loads whose price is taken; those before them are what plans go by


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run a job.

    Attributes:
        name: of the strategy, for a person.
        strategy: with its keys.
        grid: of the ranks.
    """

    name: str
    strategy: Strategy
    grid: Grid


@dataclass(frozen=True, eq=False)
class Priced:
    """What a way comes to.

    Attributes:
        way: which.
        steps: each step that was priced.
        plans: of the last of these.
        memory: of the fullest rank, copies with it.
        told: by the strategy, of what it makes of the costs; empty if nothing.
        tokens: of a step, of all ranks.
    """

    way: Way
    steps: tuple[StepPrice, ...]
    plans: tuple[Plan, ...]
    memory: MemoryUse
    told: str
    tokens: int

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.mean("step_s")

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.step_s

    def mean(self, name: str) -> float:
        """Of one of ``StepPrice``'s numbers."""
        return fmean(vars(each)[name] for each in self.steps)

    @property
    def copies(self) -> float:
        """Copies of a layer on the cell that holds most, mean of the layers."""
        return fmean(map(most_copies, self.plans))


@dataclass(frozen=True)
class Refused:
    """A way that cannot be.

    Attributes:
        way: which.
        why: in one sentence.
    """

    way: Way
    why: str


def price_way(
    way: Way, run: DescribedRun, rows_ILRE: np.ndarray, *, num_priced: int = PRICED
) -> Priced:
    """Price one way.

    Args:
        way: of the run's grid.
        run: the model on the cluster.
        rows_ILRE: rows of each rank in one pass, integers.
        num_priced: steps of them that are priced, the last ones; plans go by those before.

    Raises:
        ValueError: what the strategy, or the hardware file, refuses.
    """
    strategy, grid = way.strategy, way.grid
    if grid.world_size > grid.size:
        strategy = strategy.with_homes_that_stay()
        if strategy.rhythm().shard_every:
            raise ValueError(
                f"{strategy.keys.homes} moves experts to new homes, which needs one home an "
                f"expert, but here each has {grid.world_size // grid.size}; set it to null or 0, "
                "or leave this grid out"
            )
    cells_ILCE = cells_of(rows_ILRE, grid)
    num_layers, num_experts = cells_ILCE.shape[1], cells_ILCE.shape[3]
    passes = run.training.micro_batches  # plans go by the rows of a step, all its passes together
    before = [list(step_LCE) for step_LCE in cells_ILCE[:-num_priced]]
    homes = strategy.first_homes([num_experts] * num_layers, (run.pool,), grid.num_cells)
    used = run.memory(_most_rows(homes, before[-1]))
    rhythm = strategy.rhythm()
    window = LoadWindow(rhythm.window)
    for rows in before:
        window.push([passes * rows_CE for rows_CE in rows])
    job = replace(run.job(homes, used), pipelines=run.pipelines(before[-1]))
    if rhythm.shard_every:
        job = replace(job, homes=strategy.homes(_seen(job, window)))
    prices, plans = list[StepPrice](), tuple[Plan, ...]()
    for step_LCE in cells_ILCE[-num_priced:]:
        job = _seen(job, window)
        plans = strategy.plan(job)
        rows = list(step_LCE)
        prices.append(price_step(strategy, plans, job, rows, run.conditions(sliced(plans))))
        window.push([passes * rows_CE for rows_CE in rows])
    return Priced(
        way,
        tuple(prices),
        plans,
        replace(used, copies=copied_bytes(plans, run)),
        strategy.describe(job),
        run.training.tokens_of_step,
    )


def _seen(job: Job, window: LoadWindow) -> Job:
    return replace(job, rows=window.predicted(), drift=window.drift)


def sliced(plans: Sequence[Plan]) -> int:
    """Elements of dense gradients that are reduced beside layers."""
    return sum(sum(map(sum, plan.reductions)) for plan in plans)


def most_copies(plan: Plan) -> int:
    """Copies on the cell that holds most."""
    return int((plan.target.holds_EC & ~plan.home.holds_EC).sum(axis=0).max())


def copied_bytes(plans: Sequence[Plan], run: DescribedRun) -> float:
    """Of copies and their gradients on the cell that holds most: of all layers, or of two at a time
    where they are freed after forward."""
    copies_L = [most_copies(plan) for plan in plans]
    at_once = sum(copies_L)
    if all(plan.rematerialize for plan, copies in zip(plans, copies_L) if copies):
        at_once = sum(sorted(copies_L)[-2:])
    gradients = at_once if run.training.micro_batches > 1 else max(copies_L)
    return (at_once + gradients) * run.expert_bytes


def cells_of(rows_ILRE: np.ndarray, grid: Grid) -> np.ndarray:
    """Rows of the cells of one grid, int64 ``[I, L, C, E]``: of the one whose busiest cells are
    busiest, where there are several, for all wait for it at the end of a step."""
    num_steps, num_layers, _, num_experts = rows_ILRE.shape
    shape = (num_steps, num_layers, -1, grid.num_cells, grid.cell_size, num_experts)
    grids = rows_ILRE.reshape(shape).sum(axis=4, dtype=np.int64)
    if grids.shape[2] == 1:
        only: np.ndarray = grids[:, :, 0]
        return only
    per_cell = num_experts // grid.num_cells or 1
    whole = per_cell * grid.num_cells
    at_home = grids.sum(axis=3)[..., : min(whole, num_experts)]
    if at_home.shape[-1] == whole:
        at_home = at_home.reshape(*at_home.shape[:-1], grid.num_cells, per_cell).sum(axis=-1)
    busiest: np.ndarray = grids[:, :, int(at_home.max(axis=-1).sum(axis=(0, 1)).argmax())]
    return busiest


def _most_rows(homes: Sequence[Placement], rows: Sequence[np.ndarray]) -> float:
    """Rows of the busiest cell where nothing is copied, mean of the layers."""
    return fmean(
        float(np.bincount(home.owner_E, rows_CE.sum(axis=0), home.num_cells).max())
        for home, rows_CE in zip(homes, rows)
    )


# Grids.


def grids_for(
    strategy: Strategy, hardware: Hardware, num_ranks: int, num_experts: int
) -> Iterator[Grid]:
    """All that a strategy can run on, small ones first; experts within a node are always among
    them, where there are as many.

    Cells that split experts are parts of a node.
    """
    on_node = min(hardware.ranks_per_node, num_ranks)
    sizes = divisors(on_node) if strategy.splits_experts else [1]
    for cell_size in sizes:
        for num_cells in divisors(num_ranks // cell_size):
            divides = num_experts % num_cells == 0
            has_home = num_cells <= num_experts
            if has_home and (divides or strategy.has_uneven_homes) and num_cells * cell_size > 1:
                yield Grid(num_ranks, num_cells, cell_size)
