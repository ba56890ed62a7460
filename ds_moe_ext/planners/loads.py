"""Loads of experts as planners take them: whole rows, hottest first. Pure.

Ranks must agree on every plan, so planners count in integers, in which no order of summation and no
rounding can differ. Shape letters: L layers, E experts of a layer (of the largest, where layers
differ).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def check_loads(loads: Sequence[np.ndarray], num_experts: Sequence[int], *, factor: int) -> None:
    """Refuse loads that planners cannot count with.

    Args:
        loads: rows of each expert, ``[E]`` a layer.
        num_experts: of each layer.
        factor: the planner multiplies rows by no more than this.

    Raises:
        ValueError: other than a whole number of rows, from 0, for each expert.
    """
    if [load_E.shape for load_E in loads] != [(count,) for count in num_experts]:
        raise ValueError(
            f"loads have shapes {[load_E.shape for load_E in loads]}, but the layers have "
            f"{list(num_experts)} experts; give each layer one load an expert"
        )
    most = np.iinfo(np.int64).max // factor
    for layer, load_E in enumerate(loads):
        if load_E.dtype.kind not in "iu":
            raise ValueError(
                f"the loads of layer {layer} are {load_E.dtype}, but planners count whole rows; "
                "give the sum over a window of steps, not its mean"
            )
        if load_E.size and not 0 <= load_E.min() <= load_E.max() <= most:
            raise ValueError(
                f"the loads of layer {layer} go from {load_E.min()} to {load_E.max()}; give rows "
                f"from 0 to {most}"
            )


def hottest_first(loads: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each layer by falling load, the lower index first among equals.

    Returns:
        Experts and their rows, int64 ``[L, E]``; -1 rows where a layer has fewer experts.
    """
    rows_LE = np.full((len(loads), max(map(len, loads))), -1, dtype=np.int64)
    for layer, load_E in enumerate(loads):
        rows_LE[layer, : len(load_E)] = load_E
    order_LE = np.argsort(-rows_LE, axis=1, kind="stable")
    return order_LE, np.take_along_axis(rows_LE, order_LE, axis=1)


def per_layer(number: np.ndarray | int, num_layers: int) -> np.ndarray:
    """One number for all layers or one each, as int64 ``[L]``; refuses negative ones."""
    number_L = np.broadcast_to(number, num_layers)
    if number_L.min() < 0:
        raise ValueError(f"{number_L.min()} experts cannot be copied; give 0 or more")
    return number_L
