"""Gradients in ZeRO's buckets, where ranks hold unequal numbers of a layer's experts.

DeepSpeed puts gradients of dense weights and of experts into one bucket and reduces it when it is
full. With unequal experts it would be full at other moments on other ranks, and they would wait for
each other's dense gradients for ever. So experts wait until the others have been reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_IS_LAST = "ds_moe_ext_is_last"  # attribute of a parameter
_WAITING = "ds_moe_ext_waiting"  # attribute of ZeRO's optimizer


def reduce_last(parameters: Iterable[nn.Parameter]) -> None:
    """Let these wait until all others have been reduced."""
    for parameter in parameters:
        setattr(parameter, _IS_LAST, True)


def waits(optimizer: Any, parameter: nn.Parameter, group: int) -> bool:
    """Whether a parameter whose gradient is ready has to wait; it is remembered then.

    Args:
        optimizer: DeepSpeed's, of ZeRO 1 or 2.
        group: number of the parameter's group.
    """
    if not getattr(parameter, _IS_LAST, False):
        return False
    optimizer.__dict__.setdefault(_WAITING, []).append((parameter, group))
    return True


def reduce_waiting(optimizer: Any, reduce: Any) -> None:
    """Reduce what is left of the others, then what has waited.

    Args:
        reduce: DeepSpeed's own, called with optimizer, parameter and group.
    """
    waiting = optimizer.__dict__.pop(_WAITING, [])
    if not waiting:
        return
    optimizer.reduce_ipg_grads()
    for parameter, group in waiting:
        reduce(optimizer, parameter, group)
