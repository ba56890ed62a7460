# SPDX-License-Identifier: Apache-2.0
"""Over how many cells experts are spread where nobody says, by what a described cluster costs.

As a run starts its batches are not known, nor its dense layers: both are taken to be usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from ds_moe_ext.attachment.host_layer import Found
from ds_moe_ext.hardware import Hardware
from ds_moe_ext.layout import Grid
from ds_moe_ext.loads.sources import read_loads
from ds_moe_ext.moe.described_weight import on_its_way
from ds_moe_ext.moe.hooks import NO_HOOKS, Hooked
from ds_moe_ext.pricing.candidates import PRICED, Way, price_way
from ds_moe_ext.pricing.described_run import DescribedRun
from ds_moe_ext.pricing.model_shape import GATED, ModelShape
from ds_moe_ext.pricing.on_its_way import OnItsWay
from ds_moe_ext.pricing.reached import Reached
from ds_moe_ext.pricing.training_shape import Training
from ds_moe_ext.strategy import Strategy

TOKENS = 4096  # of a rank in a pass
TOP_K = 2
LOADS = "zipf:0.6"
LAYERS = 4  # that are priced
STEPS = 3 + PRICED
TYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclass(frozen=True)
class CellsPrice:
    """What a number of cells comes to.

    Attributes:
        num_cells: which.
        layer_s: seconds of a layer in a step of one pass, gradients summed over homes with it, but
            not the host; to three digits, so that ranks of unlike processors agree.
    """

    num_cells: int
    layer_s: float


def prices_of_cells(
    strategy: Strategy,
    found: Sequence[Found],
    hardware: Hardware,
    sizes: Iterable[int],
    grid: Grid,
    *,
    hooks: Hooked = NO_HOOKS,
) -> list[CellsPrice]:
    """Prices of some numbers of cells, the lowest first; of equals the fewest cells. Pure.

    Args:
        strategy: that runs.
        found: layers; the first stands for all.
        hardware: the cluster.
        sizes: numbers of cells.
        grid: with all ranks and the ranks of a cell.
        hooks: by which rows and copies travel.

    Raises:
        ValueError: what the hardware file does not say.
    """
    reached = Reached()
    nodes = -(-grid.world_size // hardware.ranks_per_node)  # of the run, whatever the file has
    hardware = reached.of(replace(hardware, num_nodes=nodes))
    shape, number_type = _shape(found)
    training = Training(num_ranks=grid.world_size, length=TOKENS, number_type=number_type)
    weights = _on_its_way(hooks, shape, number_type, grid.cell_size)
    rows_ILRE = _rows(grid.world_size, shape.num_experts, shape.top_k)
    prices = []
    for num_cells in sizes:
        run = DescribedRun(
            hardware=hardware,
            shape=shape,
            training=training,
            grid=replace(grid, num_cells=num_cells),
            passes=reached.passes,
            on_its_way=weights,
        )
        priced = price_way(Way("", strategy, run.grid), run, rows_ILRE)
        layers_s = priced.step_s - priced.mean("host_s")
        prices.append(CellsPrice(num_cells, float(f"{layers_s / LAYERS:.2e}")))
    return sorted(prices, key=lambda price: (price.layer_s, price.num_cells))


def _on_its_way(
    hooks: Hooked, shape: ModelShape, number_type: str, cell_size: int
) -> OnItsWay | None:
    """None, which is as in memory, where hooks cannot be asked: a run that starts does so on a CPU,
    and its rows may yet be of another width."""
    try:
        return on_its_way(hooks, shape, number_type, cell_size)
    except Exception:  # whatever a user's own raise
        return None


@lru_cache(maxsize=1)  # grids with and without split experts have the same
def _rows(num_ranks: int, num_experts: int, top_k: int) -> np.ndarray:
    """Of all steps, int64 ``[I, L, R, E]``."""
    return read_loads(
        LOADS,
        ranks=num_ranks,
        experts=num_experts,
        layers=LAYERS,
        tokens=TOKENS,
        top_k=top_k,
        steps=STEPS,
    ).rows_ILCE


def _shape(found: Sequence[Found]) -> tuple[ModelShape, str]:
    """A model of layers like the first, and the type of its numbers."""
    first = found[0]
    matrices = [(shape, dtype) for _, shape, dtype, _ in first.computed if len(shape) > 1]
    weights = sum(prod(shape) for shape, _ in matrices)
    # The model's width is that of rows there and back, so that all matrices have it.
    common = set(matrices[0][0]).intersection(*(shape for shape, _ in matrices))
    width = min(common or matrices[0][0])
    shape = ModelShape(
        name=first.name,
        num_layers=LAYERS,
        moe_layers=tuple(range(LAYERS)),
        width=width,
        attention_weights=4 * width * width,
        head_width=(width, width),
        dense_width=0,
        products=GATED,
        num_experts=first.num_experts,
        top_k=min(TOP_K, first.num_experts),
        expert_width=max(weights // (GATED * width), 1),
    )
    return shape, TYPES.get(matrices[0][1], "fp32")
