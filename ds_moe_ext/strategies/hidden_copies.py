# SPDX-License-Identifier: Apache-2.0
"""How many experts can be copied while attention computes: HECATE's ``t``, by what was measured.

The paper divides what the links between nodes carry by an expert's bytes (spec rules 11 and 50), as
if all links were busy all the time. Where it is known what a gather takes by who sends what to
whom, ``t`` is how many experts one gets through. Which experts will be hot is not known when ``t``
is asked for, and where they live decides which cards are busiest: seconds are the mean of some
draws.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from ds_moe_ext.placement import even_homes
from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.strategy import Pool

DRAWS = 64  # of all cells: on more cells fewer, where chance evens out


class Gathers:
    """Of the copies of a layer's hot experts.

    Args:
        pool: of the layer.
        num_experts: that it has.
        copies_per_cell: that a cell has memory for, ``m``; with none, as if it had for one.
        node_C: node of each cell.
    """

    def __init__(
        self, pool: Pool, num_experts: int, copies_per_cell: int, node_C: np.ndarray
    ) -> None:
        self._pool, self._copies_per_cell, self._node_C = pool, max(copies_per_cell, 1), node_C
        (self._home,) = even_homes([num_experts], len(node_C))
        drawn = np.random.default_rng(0)
        num_draws = max(DRAWS // len(node_C), 2)
        self._loads = [drawn.permutation(num_experts) + 1 for _ in range(num_draws)]
        self._seconds: dict[int, float] = {}

    def hidden(self, window_s: float) -> int:
        """Experts whose copies come while other work goes on, ``t``.

        Args:
            window_s: seconds of the forward of what runs beside the copies: attention.
        """
        return bisect_right(range(1, self._home.num_experts + 1), window_s, key=self.seconds)

    def seconds(self, num_copied: int) -> float:
        """That a gather of so many experts takes, in the mean; by the paper where it is not known
        what links carry."""
        pool = self._pool
        if pool.links is None:
            travel_s = pool.travelling_bytes / pool.linked_bytes_per_s
            return pool.copy_latency_s + num_copied * travel_s
        if num_copied not in self._seconds:
            targets = materialize(
                [self._home] * len(self._loads),
                self._loads,
                overlap_degree=num_copied,
                copies_per_cell=self._copies_per_cell,
                node_C=self._node_C,
            )
            each = [pool.copies_s(self._home, target, self._node_C) for target in targets]
            self._seconds[num_copied] = sum(each) / len(each)
        return self._seconds[num_copied]


@lru_cache(maxsize=64)
def gathers_of(
    pool: Pool, num_experts: int, copies_per_cell: int, nodes: tuple[int, ...]
) -> Gathers:
    """The same ones every time, so that none is priced twice; takes what ``Gathers`` does."""
    return Gathers(pool, num_experts, copies_per_cell, np.array(nodes))
