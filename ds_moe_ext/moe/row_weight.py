# SPDX-License-Identifier: Apache-2.0
"""What a row weighs on its way, by the hooks that change it: planners and prices are told.

Shape letters: D numbers of a row as the experts have it.
"""

from __future__ import annotations

from torch import Tensor

from ds_moe_ext.cost.row_bytes import RowBytes
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.moe.hooks import Hooked
from ds_moe_ext.moe.transforms import (
    AFTER_COMBINE,
    AFTER_DISPATCH,
    BEFORE_COMBINE,
    BEFORE_DISPATCH,
    applied,
    placed,
)


def row_bytes(hooks: Hooked, row_1D: Tensor) -> RowBytes:
    """Of rows like one that is given.

    Raises:
        ValueError: experts, or tokens, would get rows of other width or type than they have.
    """
    plain = float(row_1D.nbytes)
    if not hooks.codecs and not hooks.transforms:
        return RowBytes(plain, plain)
    there_1B = _on_its_way(hooks, row_1D, BEFORE_DISPATCH, AFTER_DISPATCH)
    back_1B = _on_its_way(hooks, row_1D, BEFORE_COMBINE, AFTER_COMBINE)
    of_dispatch, of_combine = hooks.of_dispatch, hooks.of_combine
    between = _mean(of_dispatch, there_1B) + _mean(of_combine, back_1B)
    # What ranks of a cell computed is transformed once it is added up.
    within = _mean(hooks.of_gather, there_1B) + _mean(hooks.of_scatter, row_1D)
    return RowBytes(between / 2, within / 2)


def _on_its_way(hooks: Hooked, row_1D: Tensor, before: str, after: str) -> Tensor:
    """The row between two places, ``[1, B]``."""
    leaves, comes = placed(hooks.transforms, before), placed(hooks.transforms, after)
    there_1B = applied(leaves, row_1D)
    back_1D = applied(comes, there_1B)
    if (back_1D.shape, back_1D.dtype) != (row_1D.shape, row_1D.dtype):
        names = " and ".join(map(str, (*leaves, *comes)))
        raise ValueError(
            f"hooks: by {names} rows of {row_1D.shape[1]} numbers in {row_1D.dtype} are "
            f"{back_1D.shape[1]} in {back_1D.dtype} behind {after}; they must be as they were "
            f"before {before}: add what makes them so to {before} or {after}"
        )
    return there_1B


def _mean(codec: Codec | None, row_1B: Tensor) -> float:
    """Of a row and its gradient."""
    if codec is None:
        return float(row_1B.nbytes)
    own = codec.encode(row_1B).nbytes
    return (own + (codec.encode_grad(row_1B) if codec.gradients else row_1B).nbytes) / 2
