# SPDX-License-Identifier: Apache-2.0
"""Kinds of numbers that a ``report.json`` holds, each with the rule that a file is read by. Pure.

As types of a record's fields they go to ``strict.read_record``. Numbers end at the largest integer
of an array, so that sums of a few stay finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from ds_moe_ext.strict import MOST


def _integer(least: int) -> Callable[[Any, str], int]:
    def read(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= MOST:
            raise ValueError(f"{where} is {value!r}, but must be an integer from {least} to {MOST}")
        return value

    return read


def _number(least: float) -> Callable[[Any, str], float]:
    def read(value: Any, where: str) -> float:
        if type(value) not in (int, float) or not least <= value <= MOST:
            raise ValueError(f"{where} is {value!r}, but must be a number from {least:g} to {MOST}")
        return float(value)

    return read


Read = Callable[[Any, str], np.ndarray]


def _integers(nested: Any, where: str) -> np.ndarray:
    value = _array(nested, where)
    if value.size and not np.issubdtype(value.dtype, np.signedinteger):
        raise ValueError(f"{where} has numbers that are no integers of 64 bits, or no numbers")
    _refuse(value, value < 0, where, f"an integer from 0 to {MOST}")
    if value.sum(dtype=np.float64) >= MOST:
        raise ValueError(f"{where} adds up to {MOST} or more")
    return value.astype(np.int64)


def _numbers(*, may_lack: bool = False, may_be_any: bool = False) -> Read:
    """Null and NaN stand for what is not known, where numbers ``may_lack``."""

    def read(nested: Any, where: str) -> np.ndarray:
        value = _array(nested, where)
        if value.dtype == object:
            flat = [math.nan if each is None else each for each in value.flat]
            if any(type(each) not in (int, float) for each in flat):
                raise ValueError(f"{where} has entries that are no numbers")
            value = np.array(flat, dtype=np.float64).reshape(value.shape)
        if not np.issubdtype(value.dtype, np.number):
            raise ValueError(f"{where} has entries that are no numbers")
        is_right = (value >= 0) & (value <= MOST) | may_be_any
        rule = f"a number from 0 to {MOST}{', or null' if may_lack else ''}"
        _refuse(value, ~(is_right | (np.isnan(value) & may_lack)), where, rule)
        return value.astype(np.float64)

    return read


def _array(nested: Any, where: str) -> np.ndarray:
    if not isinstance(nested, list):
        raise ValueError(f"{where} is {nested!r}, but must be a list")
    try:
        return np.array(nested)
    except ValueError as error:
        raise ValueError(f"{where} has lists of different lengths") from error


def _refuse(value: np.ndarray, is_wrong: np.ndarray, where: str, rule: str) -> None:
    if is_wrong.any():
        at = tuple(np.argwhere(is_wrong)[0].tolist())
        index = "".join(f"[{place}]" for place in at)
        raise ValueError(f"{where}{index} is {value[at]}, but must be {rule}")


Count = Annotated[int, _integer(0)]
Positive = Annotated[int, _integer(1)]
Amount = Annotated[float, _number(0.0)]  # seconds, or a ratio
Moment = Annotated[float, _number(-float(MOST))]  # seconds from a start
Counts = Annotated[np.ndarray, _integers]
Amounts = Annotated[np.ndarray, _numbers()]
KnownAmounts = Annotated[np.ndarray, _numbers(may_lack=True)]
Losses = Annotated[np.ndarray, _numbers(may_lack=True, may_be_any=True)]
