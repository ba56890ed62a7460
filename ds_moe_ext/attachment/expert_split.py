# SPDX-License-Identifier: Apache-2.0
"""How experts that a model was built with can be split over the ranks of a cell.

A host does not say which dim of which weight is the experts' hidden width, or whether gate and up
lie behind each other or in turns. So it is tried: the outputs of the parts must add up to that of
the whole. Shape letters: R rows, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.moe.expert import ExpertFunction, on_shard
from ds_moe_ext.moe.sharding import WHOLE, Along, Shard
from ds_moe_ext.moe.slot_rows import SlotRows

NUM_ROWS = 3
TOLERANCE = 1e-3  # of the largest output; a wrong way is wrong by about all of it

MATRIX = (Along(0, 2), Along(0), Along(1), Along(1, 2))
VECTOR = (Along(0, 2), Along(0), Along(0, adds=True))


def ways_to_split(
    name: str, function: ExpertFunction, weights: Sequence[Tensor], num_shards: int
) -> tuple[Along, ...]:
    """How each weight of an expert is split.

    Args:
        name: of the layer, for errors.
        function: what its experts compute.
        weights: of one of them, whole; values are drawn for biases, and for weights that are a
            shape alone.
        num_shards: parts.

    Raises:
        ValueError: no way does it.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(weight.shape, generator=generator, device="cpu").to(
            "cpu" if weight.is_meta else weight.device, _dtype(weight)
        )
        if weight.dim() == 1 or _is_shape_alone(weight)
        else weight.detach().to(_dtype(weight))
        for weight in weights
    ]
    for width in dict.fromkeys(size for weight in weights for size in weight.shape):
        rows_RD = torch.randn(NUM_ROWS, width, generator=generator).to(drawn[0])
        whole = _output(function, WHOLE, rows_RD, drawn)
        if whole is None or whole.shape != rows_RD.shape or not whole.isfinite().all():
            continue
        for alongs in _candidates(drawn, num_shards):
            shards = [Shard(alongs, index, num_shards) for index in range(num_shards)]
            parts = [_output(function, shard, rows_RD, drawn) for shard in shards]
            if _adds_up(parts, whole):
                return alongs
    shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
    raise ValueError(
        f"ds_moe_ext.expert_sharding_size is {num_shards}, but the experts of {name}, with weights "
        f"of shapes {shapes}, cannot be split into {num_shards} parts whose outputs add up: their "
        f"hidden width must be a multiple of {num_shards}, and nothing may stand between that and "
        "the output but sums; set it to 1, or leave the layer out with ds_moe_ext.moe_layer_pattern"
    )


def _candidates(weights: Sequence[Tensor], num_shards: int) -> Iterator[tuple[Along, ...]]:
    """Ways in which every weight divides, the likely ones first."""
    choices = [
        [
            along
            for along in (VECTOR if weight.dim() == 1 else MATRIX)
            if weight.shape[along.dim] % (along.num_blocks * num_shards) == 0
        ]
        for weight in weights
    ]
    return iter(product(*choices))


def _output(
    function: ExpertFunction, shard: Shard, rows_RD: Tensor, weights: Sequence[Tensor]
) -> Tensor | None:
    """Of the expert's part; None where shapes do not fit."""
    slots = SlotRows.of(np.array([rows_RD.shape[0]]), rows_RD.device)
    parts = tuple(shard.of(number, weight) for number, weight in enumerate(weights))
    try:
        with torch.no_grad():
            return on_shard(function, shard)(rows_RD, slots, parts)
    except (RuntimeError, ValueError, IndexError):
        return None


def _adds_up(parts: Sequence[Tensor | None], whole: Tensor) -> bool:
    given = [part for part in parts if part is not None and part.shape == whole.shape]
    if len(given) < len(parts):
        return False
    error = (torch.stack(given).sum(dim=0) - whole).abs().max()
    return bool(error <= TOLERANCE * whole.abs().max()) and bool(whole.abs().max() > 0)


def _is_shape_alone(weight: Tensor) -> bool:
    """Whether all elements are one, as of weights that a host has elsewhere. These would add up
    however they are split; so do biases, which often start as zeros."""
    return weight.is_meta or not any(weight.stride())


def _dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
