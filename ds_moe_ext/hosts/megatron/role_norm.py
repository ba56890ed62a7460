# SPDX-License-Identifier: Apache-2.0
"""One norm of gradients over both roles, by which Megatron clips and which it tells; and where it
looks for numbers that are none, one answer."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ds_moe_ext.core.comm import max_in_place, sum_in_place
from ds_moe_ext.hosts.megatron.worlds import Worlds


def join_norm(optimizer: Any, worlds: Worlds, control: dist.ProcessGroup) -> None:
    """Let both roles know one norm, and skip a step together. Of its own role an optimizer knows
    both already, the same on all of its ranks.

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
    if optimizer.config.loss_scale:  # else nothing is looked for
        _join_skips(optimizer, control)


def _join_skips(optimizer: Any, control: dist.ProcessGroup) -> None:
    """A role that alone skipped a step would leave the other to wait for its norm."""
    stock = optimizer.prepare_grads

    @wraps(stock)
    def prepare_grads() -> bool:
        found = torch.tensor(int(stock()))
        return bool(max_in_place(found, control))

    optimizer.prepare_grads = prepare_grads
