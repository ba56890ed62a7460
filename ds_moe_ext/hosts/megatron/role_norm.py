# SPDX-License-Identifier: Apache-2.0
"""One norm of gradients over both roles: what Megatron clips by, and tells."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ds_moe_ext.comm import sum_in_place
from ds_moe_ext.hosts.megatron.worlds import Worlds


def join_norm(optimizer: Any, worlds: Worlds, control: dist.ProcessGroup) -> None:
    """Let both roles know one norm. Of its own role an optimizer knows it already, the same on all
    of its ranks.

    Args:
        optimizer: Megatron's, of this rank's weights.
        worlds: the ranks.
        control: all of them, over gloo.
    """
    stock = optimizer.get_grad_norm

    @wraps(stock)
    def get_grad_norm() -> float:
        own = float(stock() or 0.0)  # None where a rank has nothing to train
        square = torch.tensor(own * own if worlds.is_first else 0.0, dtype=torch.float64)
        return math.sqrt(sum_in_place(square, control))

    optimizer.get_grad_norm = get_grad_norm
