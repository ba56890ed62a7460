# SPDX-License-Identifier: Apache-2.0
"""Recipes of quantization: dataclasses of pydantic there, which ignore fields that they lack."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any


class Format(Enum):
    """Types forward and backward, by their largest numbers."""

    E2M1 = SimpleNamespace(max_fwd=6, max_bwd=6)
    E4M3 = SimpleNamespace(max_fwd=448, max_bwd=448)
    E5M2 = SimpleNamespace(max_fwd=57344, max_bwd=57344)
    HYBRID = SimpleNamespace(max_fwd=448, max_bwd=57344)


class Recipe:
    """Base of all; ``block``, which is not of the real ones: numbers of a row to a scale."""

    margin, fp8_format, fp8_dpa, fp8_mha = 0, Format.E4M3, False, False
    block: int | None = None

    def __init__(self, **named: Any) -> None:
        vars(self).update({key: value for key, value in named.items() if hasattr(type(self), key)})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)


class DelayedScaling(Recipe):
    fp8_format, amax_history_len, amax_compute_algo, reduce_amax = Format.HYBRID, 1024, "max", True


class Float8CurrentScaling(Recipe):
    fp8_format = Format.HYBRID


class MXFP8BlockScaling(Recipe):
    block = 32


class Float8BlockScaling(Recipe):
    block = 128


class NVFP4BlockScaling(Recipe):
    block = 16
