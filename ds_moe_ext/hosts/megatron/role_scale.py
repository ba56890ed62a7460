# SPDX-License-Identifier: Apache-2.0
"""Gradients of an expert rank are scaled where they lie in Megatron's buffers, in full precision,
and once, however many schedules add to them before they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class ScaledOnce:
    """The gradients of a model, each schedule behind the other.

    Args:
        chunk: the model in its DDP.
        factor: of its gradients, as they are between two schedules.
    """

    def __init__(self, chunk: Any, factor: float) -> None:
        self._chunk, self._factor = chunk, factor
        self._is_scaled = False
        zero: Callable[[], None] = chunk.zero_grad_buffer

        @wraps(zero)
        def zero_grad_buffer() -> None:
            zero()
            self._is_scaled = False

        chunk.zero_grad_buffer = zero_grad_buffer

    def begin(self) -> None:
        """More is about to be added: what is there becomes as it came. Somebody may have made it
        zero otherwise than Megatron does, which changes nothing."""
        if self._is_scaled:
            self._scale(1 / self._factor)
        self._is_scaled = False

    def end(self) -> None:
        """All of a schedule has been added."""
        self._scale(self._factor)
        self._is_scaled = True

    def _scale(self, factor: float) -> None:
        if factor != 1:
            self._chunk.scale_gradients(factor)
