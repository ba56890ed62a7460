# SPDX-License-Identifier: Apache-2.0
"""What may be done while a CUDA graph is captured: a graph reads memory of its own, or such as
stays, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar, cast

import torch
from torch import Tensor

Made = TypeVar("Made", bound=Callable[..., Tensor])


class NotInGraphs(RuntimeError):
    """What a pass does cannot be recorded; says why, for a person."""


def is_captured() -> bool:
    """Whether what the caller tells a GPU becomes a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def remembered(most: int) -> Callable[[Made], Made]:
    """A function gives again what it made for these arguments, up to ``most`` tensors; but makes a
    new one while a graph is captured: what a graph reads must not be forgotten."""

    def around(make: Made) -> Made:
        known = lru_cache(most)(make)

        @wraps(make)
        def given(*args: Hashable) -> Tensor:
            return (make if is_captured() else known)(*args)

        return cast(Made, given)

    return around
