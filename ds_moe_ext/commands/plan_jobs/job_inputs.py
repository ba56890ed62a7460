# SPDX-License-Identifier: Apache-2.0
"""What several jobs of planners check alike."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_moe_ext.core.placement import Placement

MOST_ROWS = 2**32
MOST_PAIRS = 2**20  # of expert and rank; rows in parts times these fit into 64 bits
MOST_COST = 1e18  # bytes, seconds, or either's rate: products of these stay finite


def check_cluster(num_ranks: int, ranks_per_node: int, num_experts: int) -> None:
    check_number("num_ranks", num_ranks, int, least=1)
    check_number("ranks_per_node", ranks_per_node, int, least=1)
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"num_ranks is {num_ranks}, which ranks_per_node, {ranks_per_node}, does not divide; "
            "all nodes must have equally many ranks"
        )
    check_size(num_ranks, num_experts)


def check_size(num_ranks: int, num_experts: int) -> None:
    if num_ranks * num_experts > MOST_PAIRS:
        raise ValueError(
            f"{num_experts} experts times {num_ranks} ranks are more than {MOST_PAIRS}; plan for "
            "fewer ranks or layers at once"
        )


def check_home(home: Sequence[Any], num_ranks: int) -> None:
    for index, rank in enumerate(home):
        check_number(f"home[{index}]", rank, int, most=num_ranks - 1)


def check_loads(name: str, load: Sequence[float], kind: type = float) -> None:
    if not load:
        raise ValueError(f"{name} is {reprlib.repr(load)}; give a list of rows for each expert")
    for index, rows in enumerate(load):
        check_number(f"{name}[{index}]", rows, kind, most=MOST_ROWS)


def check_number(
    name: str, value: Any, kind: type, *, least: float = 0, most: float | None = None
) -> None:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not least <= value <= (math.inf if most is None else most):
        what = "an integer" if kind is int else "a number"
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {what} {limit}")


def holders_of(target: Placement) -> list[list[int]]:
    """Ranks of each expert, ascending."""
    return [np.flatnonzero(holds_C).tolist() for holds_C in target.holds_EC]
