# SPDX-License-Identifier: Apache-2.0
"""Closed forms of zebra and its rivals where nothing travels and nothing idles. Pure.

HeterMoE's spec, 6.4, rule 2: bounds by computing alone, of any number of layers and stripes. A unit
is as many tokens as one likes; rates are of a whole group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Units in a second, from what a unit costs one rank.

    Attributes:
        new_ranks: ranks of the class that attention is fast on, ``M``.
        old_ranks: the others, ``N``.
        attention_s: all but the experts, on a new rank: ``a``.
        expert_s: the experts, on a new rank: ``e``.
        attention_slowdown: how many times as long an old rank attends: ``s``.
        expert_slowdown: how many times as long it computes experts: ``q``.
    """

    new_ranks: int
    old_ranks: int
    attention_s: float
    expert_s: float
    attention_slowdown: float
    expert_slowdown: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and above 0")

    @property
    def _new_s(self) -> float:
        return self.attention_s + self.expert_s

    @property
    def _old_s(self) -> float:
        return self.attention_slowdown * self.attention_s + self.expert_slowdown * self.expert_s

    @property
    def ep(self) -> float:
        """Expert parallelism over all ranks alike: they wait for the old ones."""
        return (self.new_ranks + self.old_ranks) / self._old_s

    @property
    def ep_ideal(self) -> float:
        """Each class by itself, added."""
        return self.new_ranks / self._new_s + self.old_ranks / self._old_s

    @property
    def dist_ep(self) -> float:
        """Attention here and experts there, one side at a time."""
        expert_s = self.expert_slowdown * self.expert_s
        return 1 / (self.attention_s / self.new_ranks + expert_s / self.old_ranks)

    @property
    def zebra(self) -> float:
        """Both sides at once; where experts are slower, any fraction of them moves back."""
        attention = self.new_ranks / self.attention_s
        experts = self.old_ranks / (self.expert_slowdown * self.expert_s)
        if experts >= attention:
            return attention
        return (self.new_ranks + self.old_ranks / self.expert_slowdown) / self._new_s
