# SPDX-License-Identifier: Apache-2.0
"""How the forecasts of loads came out that plans were made by, for a person."""

from __future__ import annotations

from dataclasses import dataclass

from ds_moe_ext.load import Outcome


@dataclass
class LoadForecasts:
    """Of all steps so far.

    Attributes:
        num_steps: that something was predicted for.
        num_by_last: of these, those for which it was the step before alone.
        most: steps whose mean a forecast was, at most.
        astray: rows that went to other experts than was predicted, of all these steps.
        rows: all of theirs.
    """

    num_steps: int = 0
    num_by_last: int = 0
    most: int = 0
    astray: int = 0
    rows: int = 0

    def add(self, outcome: Outcome | None) -> None:
        """Of one step more; None where nothing was known before it."""
        if outcome is None:
            return
        self.num_steps += 1
        self.num_by_last += outcome.num_steps == 1
        self.most = max(self.most, outcome.num_steps)
        self.astray += outcome.astray
        self.rows += outcome.rows

    def __str__(self) -> str:
        """A line; empty where nothing was predicted."""
        if not self.rows:
            return ""
        by = f"the mean of the last {self.most} steps"
        if self.num_by_last == self.num_steps:
            by = "the last step"
        elif self.num_by_last > 1:  # the first forecast can be no other
            by = f"the last step in {self.num_by_last} of {self.num_steps} steps, else by {by}"
        share = 100 * self.astray / self.rows
        return f"loads were predicted by {by}; {share:.1f} % of the rows went to other experts"
