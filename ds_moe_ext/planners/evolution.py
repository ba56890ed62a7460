# SPDX-License-Identifier: Apache-2.0
"""Step 2 of the gradient partition as the paper solves it: SciPy's differential evolution. Pure.

To compare with the exact solution (``partition.partition_gradients``), which needs no library, is
faster and is never slower than what evolution finds. Shape letters: I layers, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_moe_ext.cost.lines import AllReduce
from ds_moe_ext.planners.partition import BackwardLayer, HiddenSlices

GENERATIONS = 300
SEED = 0  # the same on every rank


def evolved(
    layers: Sequence[BackwardLayer],
    hidden: HiddenSlices,
    all_reduce: AllReduce,
    tail_elements: int,
    num_quanta: int,
) -> tuple[int, ...]:
    """Elements moved into each layer's MoE part; arguments as of ``partition.Step2``.

    A candidate names elements for each layer; what is not ready by then, or hidden by a later
    layer, counts for nothing, and what is left for the tail.

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        from scipy.optimize import differential_evolution
    except ImportError as error:
        raise ImportError(
            "solver 'paper' needs SciPy, which is not installed; pip install scipy, or take solver "
            "'exact', which needs nothing and finds no slower partition"
        ) from error

    # What a layer moves, the windows of later ones must be able to do without (as in ``_move``).
    movable = np.minimum.accumulate(hidden.left[::-1])[::-1].tolist()

    def taken(wanted_IN: np.ndarray) -> np.ndarray:
        """Whole elements, as many as are ready, int64 ``[I, N]``."""
        moved_N = np.zeros(wanted_IN.shape[1], dtype=np.int64)
        taken_IN = np.zeros(wanted_IN.shape, dtype=np.int64)
        for own_N, wanted_N, most in zip(taken_IN, wanted_IN, movable):
            own_N[:] = np.minimum(np.rint(wanted_N).astype(np.int64), most - moved_N)
            moved_N += own_N
        return taken_IN

    def cost(wanted_IN: np.ndarray) -> np.ndarray:
        taken_IN = taken(wanted_IN)
        tail_N = tail_elements + hidden.left[-1] - taken_IN.sum(axis=0)
        total_N = all_reduce.seconds_of_each(tail_N)
        for layer, moe, own_N in zip(layers, hidden.moe, taken_IN):
            total_N = total_N + layer.moe_seconds(all_reduce.seconds_of_each(moe + own_N))
        return total_N

    found = differential_evolution(
        cost,
        bounds=[(0, most) for most in movable],
        maxiter=GENERATIONS,
        rng=SEED,
        vectorized=True,
        updating="deferred",
        polish=False,
    )
    return tuple(taken(found.x[:, None])[:, 0].tolist())
