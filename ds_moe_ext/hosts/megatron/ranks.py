"""Megatron's parallel ranks as grids of cells: one for each pipeline stage.

Expert model parallelism is the axis of cells, expert tensor parallelism the ranks of a cell, expert
data parallelism the copies of the grid. Other dims (tensor, context, data) say which ranks have
which tokens; rows may come from anywhere.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from ds_moe_ext.comm import gather_texts
from ds_moe_ext.layout import Grid
from ds_moe_ext.settings import BLOCK, Settings


class Seat(NamedTuple):
    """Where a rank stands: in which stage, in which copy of the grid, in which cell and where
    there."""

    stage: int
    edp: int
    ep: int
    esp: int
    rank: int


class Grids(NamedTuple):
    """Of all ranks.

    Attributes:
        own: this rank's.
        beside: of all stages, in their order; none where there is one.
        stage: number of this rank's stage.
    """

    own: Grid
    beside: tuple[Grid, ...]
    stage: int


def grids() -> Grids:
    """As ``parallel_state`` was initialized. Collective, over the world."""
    own = Seat(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        dist.get_rank(),
    )
    told = gather_texts(" ".join(map(str, own)), None)
    seats = sorted(Seat(*map(int, text.split())) for text in told)
    num_cells = parallel_state.get_expert_model_parallel_world_size()
    cell_size = parallel_state.get_expert_tensor_parallel_world_size()
    stages = [tuple(s.rank for s in of) for _, of in groupby(seats, key=lambda seat: seat.stage)]
    made = [Grid(len(ranks), num_cells, cell_size, ranks) for ranks in stages]
    if len(made) == 1:
        return Grids(made[0], (), 0)
    return Grids(made[own.stage], tuple(made), own.stage)


def check_sizes(settings: Settings, grid: Grid) -> None:
    """Compare the block's sizes with Megatron's.

    Raises:
        ValueError: they say different things.
    """
    for key, size, flag in (
        ("expert_parallel_size", grid.num_cells, "--expert-model-parallel-size"),
        ("expert_sharding_size", grid.cell_size, "--expert-tensor-parallel-size"),
    ):
        asked = vars(settings)[key]
        if asked not in (None, size):
            raise ValueError(
                f"{BLOCK}.{key} is {asked}, but Megatron was given {flag} {size}; make them equal, "
                f"or leave {key} out"
            )
