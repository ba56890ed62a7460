# SPDX-License-Identifier: Apache-2.0
"""A tensor in 64 numbers, by which two runs are compared without either keeping its tensors.

Each element is added, with a sign, to one of 64 sums; sum and sign follow from its index alone (a
count sketch). So the sketch of a sum is the sum of the sketches, and the norm of a difference of
two sketches is about that of the difference of the tensors: within a tenth, as a rule. What is
equal has equal sketches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_moe_ext.verification.rank_record import SIZE

CHUNK = 1 << 22  # elements at once, for the sake of memory


def sketch(values: Tensor) -> Tensor:
    """Of a dense tensor of any shape: float64 ``[64]``, on its device."""
    flat = values.detach().reshape(-1)
    total = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        index = torch.arange(start, start + part.numel(), device=flat.device)
        _add(total, index, part)
    return total


def sketch_at(index: Tensor, values: Tensor) -> Tensor:
    """Of a tensor that is zero but at these places.

    Args:
        index: int64, places in the flat tensor.
        values: as many.
    """
    total = torch.zeros(SIZE, dtype=torch.float64, device=values.device)
    _add(total, index.reshape(-1), values.detach().reshape(-1))
    return total


def _add(total: Tensor, index: Tensor, values: Tensor) -> None:
    mixed = (index * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    signs = 1.0 - 2.0 * ((mixed >> 25) & 1).double()
    total.index_add_(0, mixed >> 26, values.double() * signs)
