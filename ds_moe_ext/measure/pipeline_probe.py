# SPDX-License-Identifier: Apache-2.0
"""What a run's own pipeline costs: a quick look at its communicators and its experts.

Shape letters: N sizes, R rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.all_to_all import Carrier, Channel
from ds_moe_ext.cost.lines import FREE, Line
from ds_moe_ext.cost.pipeline_lines import PipelineLines
from ds_moe_ext.measure.bench import Bench, Sweep, clock_of
from ds_moe_ext.measure.fit import fit_straight
from ds_moe_ext.measure.probe import (
    Level,
    SweepOf,
    all_gather_sweep,
    all_reduce_sweep,
    all_to_all_sweep,
    reduce_scatter_sweep,
)

STEPS = (1, 2, 4, 8)  # sizes, as multiples of the least


@dataclass(frozen=True, eq=False)
class Paths:
    """This rank's communicators; None where there is one rank, then on every rank.

    Attributes:
        cells: one rank of each cell.
        cell: the ranks of one cell.
        dense: those that reduce the same dense gradients.
        scatters: each of those keeps a part of the sums, else all.
    """

    cells: Channel | None
    cell: Channel | None
    dense: dist.ProcessGroup | None
    scatters: bool = False


@dataclass(frozen=True)
class Payload:
    """What travels at most; the same on every rank.

    Attributes:
        num_rows: rows that a rank sends in one dispatch; as many arrive if they are even.
        width: elements of a row.
        row_dtype: of rows.
        num_elements: of one reduction of dense gradients.
        gradient_dtype: of these.
    """

    num_rows: int
    width: int
    row_dtype: torch.dtype
    num_elements: int
    gradient_dtype: torch.dtype


def quick_bench(device: torch.device, group: dist.ProcessGroup | None = None) -> Bench:
    """Few repetitions, by all ranks of a group, or of the run: all groups are active at once."""
    clock = clock_of(device)
    return Bench(clock, device, num_warm_ups=1, num_repeats=9, budget_s=0.15, group=group)


def measure_pipeline(
    paths: Paths, payload: Payload, forward: Callable[[int], object], bench: Bench
) -> PipelineLines:
    """The lines of a run. Collective, over all ranks.

    They are the same on every rank, by the slowest one's times: whoever needs rows waits for the
    rank that sends them last. Each is laid through sizes from an eighth of the payload up to all of
    it, since that is into how many chunks it may be cut.

    Args:
        paths: what rows and gradients travel over.
        payload: how much of them.
        forward: runs this rank's part of the experts on a number of rows; without gradients.
        bench: times it; ``quick_bench``.
    """
    row = torch.zeros(payload.width, dtype=payload.row_dtype, device=bench.device)
    element = torch.zeros((), dtype=payload.gradient_dtype, device=bench.device)
    cells, cell = _level("between cells", paths.cells), _level("inside a cell", paths.cell)
    dense = _level("of gradients", Channel(paths.dense) if paths.dense else None)
    num_cells, cell_size, num_dense = (
        level.num_members if level else 1 for level in (cells, cell, dense)
    )

    def line(sweep: Sweep) -> Line:
        fit = bench.fit(sweep, fit_straight)
        return Line(alpha_s=fit.fixed_s, beta_s=fit.unit_s, r_squared=fit.r_squared)

    def shared(sweep_of: SweepOf, level: Level | None, most: int, like: Tensor) -> Line:
        return line(sweep_of(level, _steps(most), like)) if level else FREE

    if paths.scatters:
        sums = shared(reduce_scatter_sweep, dense, payload.num_elements // num_dense, element)
    else:
        sums = shared(all_reduce_sweep, dense, payload.num_elements, element)
    return PipelineLines(
        all_to_all=shared(all_to_all_sweep, cells, payload.num_rows // num_cells, row),
        all_gather=shared(all_gather_sweep, cell, payload.num_rows, row),
        reduce_scatter=shared(reduce_scatter_sweep, cell, payload.num_rows, row),
        expert=line(forward_sweep(forward, _steps(payload.num_rows * cell_size))),
        all_reduce=replace(sums, beta_s=element.itemsize * sums.beta_s),
    )


def measure_carrier(carrier: Carrier, num_cells: int, payload: Payload, bench: Bench) -> Line:
    """The line of even all-to-alls by a carrier; see ``measure_pipeline``. Collective.

    Args:
        carrier: between the cells.
        num_cells: how many.
        payload: what travels at most.
        bench: times it.
    """
    row = torch.zeros(payload.width, dtype=payload.row_dtype, device=bench.device)
    num_rows_N = _steps(payload.num_rows // num_cells)
    trips = [carrier.trip(np.full((num_cells,) * 2, num), bench.device) for num in num_rows_N]
    works = [
        partial(trip.out, row.new_zeros(num_cells * num, *row.shape))
        for trip, num in zip(trips, num_rows_N)
    ]
    num_bytes_N = [num_cells * num * row.nbytes for num in num_rows_N]
    fit = bench.fit(Sweep("all-to-all by a carrier", num_bytes_N, works), fit_straight)
    return Line(alpha_s=fit.fixed_s, beta_s=fit.unit_s, r_squared=fit.r_squared)


def forward_sweep(forward: Callable[[int], object], num_rows_N: Sequence[int]) -> Sweep:
    """A rank's experts forward, without gradients; units are rows."""

    def work(num_rows: int) -> None:
        with torch.no_grad():
            forward(num_rows)

    return Sweep("experts forward", num_rows_N, [partial(work, rows) for rows in num_rows_N])


def _level(name: str, channel: Channel | None) -> Level | None:
    """None where there is one rank."""
    if channel is None or channel.group.size() == 1:
        return None
    group = channel.group
    node_C = np.zeros(group.size(), np.int64)
    return Level(name, group, group.rank(), node_C, num_sharers=1, exchange=channel.all_to_all)


def _steps(most: int) -> list[int]:
    """Growing sizes up to ``most``, or a few more where that is next to nothing."""
    return [max(1, most // STEPS[-1]) * step for step in STEPS]
