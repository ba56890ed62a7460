# SPDX-License-Identifier: Apache-2.0
"""How uneven loads are, and how they move.

Shape letters: I steps, L layers, C senders (ranks), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_moe_ext.load import balance_L
from ds_moe_ext.loads.loads import Loads


@dataclass(frozen=True, eq=False)
class Figures:
    """Of every step and layer, float.

    Attributes:
        by_rank_IL: rows of the busiest rank over the mean, experts at home in index order, equally
            many on each rank or one more; 1 is perfect.
        hottest_IL: rows of the hottest expert over the mean.
        unused_IL: part of the experts without rows.
        moved_L: total variation from each step to the next, ``[..., L]``, of steps as far apart as
            most are; empty where there is one.
    """

    by_rank_IL: np.ndarray
    hottest_IL: np.ndarray
    unused_IL: np.ndarray
    moved_L: np.ndarray


def figures_of(loads: Loads) -> Figures:
    """Those of loads, summed over senders."""
    rows_ILE = loads.rows_ILCE.sum(axis=2)
    _, _, num_ranks, num_experts = loads.rows_ILCE.shape
    rank_E = np.arange(num_experts) * num_ranks // num_experts
    by_rank_ILC = rows_ILE @ (rank_E[:, None] == np.arange(num_ranks)).astype(np.int64)
    share_ILE = rows_ILE / np.maximum(rows_ILE.sum(axis=-1, keepdims=True), 1)
    ends = np.cumsum([len(run) for run in loads.runs()])[:-1]
    moved = [np.abs(np.diff(run, axis=0)).sum(axis=-1) / 2 for run in np.split(share_ILE, ends)]
    return Figures(
        balance_L(by_rank_ILC),
        balance_L(rows_ILE),
        (rows_ILE == 0).mean(axis=-1),
        np.concatenate(moved),
    )
