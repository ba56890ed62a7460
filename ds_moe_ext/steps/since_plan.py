# SPDX-License-Identifier: Apache-2.0
"""When all layers are planned anew: every so many steps, or as soon as loads have moved.

A plan costs every host some milliseconds, which the thread that issues layers feels (they share
Python's lock). What a new one gains depends on how far loads have moved since the present one was
made, and that is known in each step. Shape letter: Y experts of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.load import LoadWindow
from ds_moe_ext.strategy import Rhythm


@dataclass(frozen=True, eq=False)
class SincePlan:
    """Where a run stands between two plans. A function of rows alone: ranks need not agree.

    Attributes:
        step: number of the step that goes on, if steps go on as they do.
        age: of the present plans, in steps.
        planned_Y: rows of each expert in the newest step that was known when they were made; None:
            in none.
    """

    step: int = 0
    age: int = 0
    planned_Y: np.ndarray | None = None

    def is_due(self, rhythm: Rhythm, step: int, window: LoadWindow) -> bool:
        """Whether plans are made behind a step, which the window knows."""
        if not is_due(rhythm.plan_every, step):
            return False
        is_old = self.age + 1 >= rhythm.steady_every or is_due(rhythm.choose_every, step)
        return is_old or self.planned_Y is None or window.has_moved(self.planned_Y)

    def went_on(self, step: int) -> SincePlan:
        """A step has ended."""
        return replace(self, step=step + 1, age=self.age + 1)

    def planned(self, window: LoadWindow) -> SincePlan:
        """Plans have been made, or taken, by what the window knows."""
        return replace(self, age=0, planned_Y=window.newest_Y if len(window) else None)


def is_due(every: int, step: int) -> bool:
    """What is done every so many steps, 0 for never, behind a step."""
    return every > 0 and (step + 1) % every == 0
