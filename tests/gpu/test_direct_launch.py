# SPDX-License-Identifier: Apache-2.0
"""Direct launches of all kernels are those that Triton makes itself; needs Triton, and no GPU.

``pip install --target FOLDER triton``, then ``PYTHONPATH=FOLDER pytest`` this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_moe_ext.core import kernels
from ds_moe_ext.core.kernels import Kernel
from tests.launch.no_device import nowhere
from tests.ranks import forkserver

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not kernels.HAS_TRITON or INTERPRETS, reason="needs Triton, which compiles"
)

ROWS, TOP_K, WIDTH = 128, 8, 256
LAUNCHES: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "silu_product": lambda rows, row: kernels.silu_product(rows),
    "its gradient": lambda rows, row: kernels.silu_product_grad(rows, rows[:, ::2].contiguous()),
    "sums": lambda rows, row: kernels.sums_by_token(rows, row, None, TOP_K),
    "weighed sums": lambda rows, row: kernels.sums_by_token(rows, row, weights(rows), TOP_K),
    "their gradients": lambda rows, row: kernels.sums_by_token_grads(
        rows, row, row, weights(rows), rows[::TOP_K].contiguous()
    ),
    "index": lambda rows, row: kernels.index_of_blocks(row.int(), 5, ROWS),
}


def weights(rows: Tensor) -> Tensor:
    return torch.zeros(ROWS // TOP_K, TOP_K, dtype=rows.dtype)


def plain(launched: tuple[Any, ...]) -> list[Any]:
    """Of each launch, but for what Triton makes in each anew: what a tensor is like, or the thing
    itself."""
    return [
        (each.shape, each.dtype) if isinstance(each, Tensor) else str(each)
        for each in launched
        if type(each).__name__ != "LazyDict"  # reported to its profiler
    ]


def _both_ways(name: str, dtype: torch.dtype) -> tuple[list[Any], list[Any], bool]:
    """In a process of its own: what Triton compiled for no device it would launch on one, too."""
    rows, row = torch.zeros(ROWS, WIDTH, dtype=dtype), torch.arange(ROWS)
    with nowhere(keeps=True) as launches:
        LAUNCHES[name](rows, row)
        with mock.patch.object(type(kernels._silu_product), "__getitem__", None):
            LAUNCHES[name](rows, row)
    own, direct = map(plain, launches)
    return own, direct, Kernel.is_direct


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_tritons_own(name: str, dtype: torch.dtype) -> None:
    with ProcessPoolExecutor(1, forkserver()) as process:
        own, direct, is_direct = process.submit(_both_ways, name, dtype).result()
    assert own == direct and is_direct
