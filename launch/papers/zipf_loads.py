# SPDX-License-Identifier: Apache-2.0
"""Rows of a skewed gate whose load drifts: what papers show as colours stands here as a law. Pure.

Expert loads fall by Zipf's law and lie shuffled over the experts; each sender has its own mixture
of them; from step to step every share takes a small random walk. Shape letters: L layers, C EP
ranks, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ZipfLoads:
    """A model's gates.

    Attributes:
        exponents: of Zipf's law, one a layer; each layer has a shuffle of its own.
        num_experts: of a layer.
        num_ep_ranks: senders.
        rows: that each sender routes, in one layer and step.
        picks: experts of a token where the law is that of the first; the second is another one by
            the same law. 1: the law is that of all rows.
        drift: of the logarithm of each share, standard deviation of a step.
        own: how much senders are alike: concentration of a Dirichlet distribution around the shares
            of all; infinite where all are.
        seed: of shuffles, walks and draws.
    """

    exponents: tuple[float, ...]
    num_experts: int
    num_ep_ranks: int
    rows: int
    picks: int = 1
    drift: float = 0.02
    own: float = np.inf
    seed: int = 0

    def steps(self, wanted: Sequence[int]) -> Iterator[tuple[np.ndarray, ...]]:
        """Rows of each layer, int64 ``[C, E]``, of some steps in ascending order, the first 0."""
        draw = np.random.default_rng(self.seed)
        log_rank_E = np.log(np.arange(1, self.num_experts + 1))
        log_LE = np.array([-each * draw.permutation(log_rank_E) for each in self.exponents])
        step = 0
        for number in wanted:
            # Of so many steps together, the walk is as far as one that is longer.
            log_LE += self.drift * np.sqrt(number - step) * draw.standard_normal(log_LE.shape)
            step = number
            yield tuple(self._drawn(draw, np.exp(log_E)) for log_E in log_LE)

    def _drawn(self, draw: np.random.Generator, share_E: np.ndarray) -> np.ndarray:
        share_E = share_E / share_E.sum()
        if self.picks == 2:
            share_E = (share_E + second_shares(share_E)) / 2
        if np.isinf(self.own):
            return draw.multinomial(self.rows, share_E, size=self.num_ep_ranks)
        share_CE = draw.dirichlet(self.own * share_E, size=self.num_ep_ranks)
        return draw.multinomial(self.rows, share_CE)


def second_shares(share_E: np.ndarray) -> np.ndarray:
    """Of the second choice, where that is drawn like the first from the experts that remain."""
    odds_E = share_E / (1 - share_E)
    second_E: np.ndarray = share_E * (odds_E.sum() - odds_E)
    return second_E
