# SPDX-License-Identifier: Apache-2.0
"""What rows and copies of a described model weigh on their way, by the hooks of its run."""

from __future__ import annotations

import torch

from ds_moe_ext.moe.copies.packing import Codecs, copy_bytes
from ds_moe_ext.moe.hooks import Hooked
from ds_moe_ext.moe.row_weight import row_bytes
from ds_moe_ext.pricing.model_shape import ModelShape
from ds_moe_ext.pricing.on_its_way import OnItsWay

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def on_its_way(
    hooks: Hooked, shape: ModelShape, number_type: str, cell_size: int
) -> OnItsWay | None:
    """As a run would plan by.

    An expert is taken to have the weights of what it reads, gate and up, row by row of the model's
    width, and those of what it writes, row by row of its own: so most hosts have them.

    Args:
        hooks: of the run.
        shape: of the model.
        number_type: that it computes in.
        cell_size: ranks that split each expert.

    Returns:
        None where all travels as it is in memory.

    Raises:
        ValueError: as of ``row_bytes``.
    """
    if not hooks.codecs and not hooks.transforms:
        return None
    dtype, own_width = DTYPES[number_type], max(shape.expert_width // cell_size, 1)
    sizes = ((shape.products - 1) * own_width, shape.width), (shape.width, own_width)
    like = tuple(torch.empty((), dtype=dtype).expand(size) for size in sizes)  # without memory
    codecs = Codecs(hooks.of_copies, hooks.of_copy_gradients)
    row_1D = torch.zeros(1, shape.width, dtype=dtype)
    return OnItsWay(row_bytes(hooks, row_1D), copy_bytes(like, codecs))
