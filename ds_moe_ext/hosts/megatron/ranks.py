# SPDX-License-Identifier: Apache-2.0
"""Megatron's parallel ranks as grids of cells: one for each pipeline stage.

Expert model parallelism is the axis of cells, expert tensor parallelism the ranks of a cell, expert
data parallelism the copies of the grid. Other dims (tensor, context, data) say which ranks have
which tokens; rows may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.strategies.settings import BLOCK, Settings


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


@dataclass(frozen=True)
class Place:
    """This rank in one of its groups."""

    rank: int
    size: int


_STATED: Mapping[str, tuple[Callable[[], int], Callable[[], int]]] = {
    "pp": (
        parallel_state.get_pipeline_model_parallel_rank,
        parallel_state.get_pipeline_model_parallel_world_size,
    ),
    "tp": (
        parallel_state.get_tensor_model_parallel_rank,
        parallel_state.get_tensor_model_parallel_world_size,
    ),
    "ep": (
        parallel_state.get_expert_model_parallel_rank,
        parallel_state.get_expert_model_parallel_world_size,
    ),
    "expt_tp": (
        parallel_state.get_expert_tensor_parallel_rank,
        parallel_state.get_expert_tensor_parallel_world_size,
    ),
    "expt_dp": (
        parallel_state.get_expert_data_parallel_rank,
        parallel_state.get_expert_data_parallel_world_size,
    ),
}
"""By the name of the group in a ``ProcessGroupCollection``: what ``parallel_state`` says of it."""


def collection_of(model: nn.Module) -> Any:
    """The ``ProcessGroupCollection`` that a model was built with; None where it tells of none."""
    told = (getattr(module, "pg_collection", None) for module in model.modules())
    return next((collection for collection in told if collection is not None), None)


def place_in(collection: Any, name: str) -> Place:
    """Where this rank is in a group: by a collection that was given to Megatron, where it has the
    group; else by ``parallel_state``.

    Args:
        collection: a ``ProcessGroupCollection``, or None.
        name: of the group in it.

    Raises:
        ValueError: neither knows the group.
    """
    group = getattr(collection, name, None)
    if group is not None:
        return Place(group.rank(), group.size())
    if parallel_state.is_initialized():
        rank, size = _STATED[name]
        return Place(rank(), size())
    if name == "pp":  # who has no pipeline need not say so
        return Place(0, 1)
    raise ValueError(
        f"{BLOCK} is enabled, but the model's ProcessGroupCollection has no group {name!r}, and "
        "megatron.core.parallel_state is not initialized; give the collection that group, or call "
        "initialize_model_parallel"
    )


def grids(model: nn.Module) -> Grids:
    """Of the groups that a model was built with. Collective, over the world."""
    collection = collection_of(model)
    pp, edp, ep, esp = (place_in(collection, name) for name in ("pp", "expt_dp", "ep", "expt_tp"))
    own = Seat(pp.rank, edp.rank, ep.rank, esp.rank, dist.get_rank())
    told = gather_objects(" ".join(map(str, own)), None)
    seats = sorted(Seat(*map(int, text.split())) for text in told)
    stages = [tuple(s.rank for s in of) for _, of in groupby(seats, key=lambda seat: seat.stage)]
    made = [Grid(len(ranks), ep.size, esp.size, ranks) for ranks in stages]
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
        asked = getattr(settings, key)
        if asked not in (None, size):
            raise ValueError(
                f"{BLOCK}.{key} is {asked}, but Megatron was given {flag} {size}; make them equal, "
                f"or leave {key} out"
            )
