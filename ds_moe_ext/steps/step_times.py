# SPDX-License-Identifier: Apache-2.0
"""What steps take on the clock: for who chooses by prices, and to see that costs have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from ds_moe_ext.comm import max_in_place
from ds_moe_ext.strategy import Choice, Rhythm

LOOKED_AT = 100  # steps, where nobody chooses anything
SETTLING = 2  # steps after a change that do not count: programs are made, libraries warm up
DRIFTED = 1.3  # times what steps took before, or were expected to: costs have changed
NO_CHOICE = Choice("", 1.0, "")


@dataclass(eq=False)
class StepTimes:
    """Median seconds of some steps, agreed upon by all ranks: of the slowest. Between some of them
    a run evaluates, or saves.

    Attributes:
        every: steps between two looks; 0 for none.
        slowest: of all ranks' seconds. Collective.
        clock: seconds now.
        ratios: seconds that steps took over those expected, by the name of a choice; the same on
            all ranks.
        has_drifted: they are others, by the latest step, than when its choice was last looked at.
    """

    every: int
    slowest: Callable[[float], float]
    clock: Callable[[], float] = time.perf_counter
    ratios: Mapping[str, float] = field(default_factory=dict, init=False)
    has_drifted: bool = field(default=False, init=False)
    _choice: Choice = field(default=NO_CHOICE, init=False)
    _ends_s: list[float] = field(default_factory=list, init=False)

    @classmethod
    def of(
        cls, rhythm: Rhythm, device: torch.device, everyone: dist.ProcessGroup | None
    ) -> StepTimes:
        """For a strategy of that rhythm.

        Args:
            rhythm: of the strategy.
            device: of this rank.
            everyone: the ranks that run the same layers; None for all.
        """

        def slowest(seconds: float) -> float:
            own = torch.tensor([seconds], dtype=torch.float64, device=device)
            return float(max_in_place(own, everyone))

        plans = rhythm.weighs_copies or rhythm.measures
        return cls(rhythm.choose_every or (LOOKED_AT if plans else 0), slowest)

    def after_step(self, step: int, choice: Choice | None) -> None:
        """Take the time. Collective in the last step but one before a look.

        Args:
            step: number of the one that has ended.
            choice: by which it ran, if there was one.
        """
        self.has_drifted = False
        if not self.every:
            return
        choice = choice or NO_CHOICE
        if choice.name != self._choice.name:
            self._ends_s.clear()
        self._choice = choice
        self._ends_s.append(self.clock())
        if self.is_due(step):
            if len(self._ends_s) > SETTLING + 1:
                self._look(choice)
            self._ends_s.clear()

    def is_due(self, step: int) -> bool:
        """Whether ranks tell each other behind a step: what is made beside the next knows of it."""
        return self.every > 0 and (step + 2) % self.every == 0

    def _look(self, choice: Choice) -> None:
        own_s = median(after - before for before, after in pairwise(self._ends_s[SETTLING:]))
        ratio = self.slowest(own_s) / choice.expected_s
        before = self.ratios.get(choice.name, ratio)
        self.has_drifted = not before / DRIFTED < ratio < before * DRIFTED
        self.ratios = {**self.ratios, choice.name: ratio}
