# SPDX-License-Identifier: Apache-2.0
"""Whether a device waits for its host, for a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST = 0.5  # of the passes, in which a device may be idle without a word


@dataclass
class HostLag:
    """How often a device had done all that was issued, when the host came to ask it for a layer's
    counts of rows: nothing is issued ahead of it then.

    Attributes:
        num_passes: of layers, in forward.
        num_idle: of these, those in which it had.
    """

    num_passes: int = 0
    num_idle: int = 0

    def add(self, is_idle: bool) -> None:
        """Of one pass more."""
        self.num_passes += 1
        self.num_idle += is_idle

    @classmethod
    def of_all(cls, lags: Iterable[HostLag]) -> HostLag:
        """Of all layers."""
        passes, idle = zip(*((lag.num_passes, lag.num_idle) for lag in lags))
        return cls(sum(passes), sum(idle))

    def __str__(self) -> str:
        """A line; empty where no device waits."""
        if self.num_idle <= MOST * self.num_passes:
            return ""
        share = self.num_idle / self.num_passes
        return (
            f"in {share:.0%} of the layers' passes this rank's device had done all that its host "
            "had issued: it waits for the host, which takes as long for few rows as for many; more "
            "tokens a micro-batch, fewer chunks or none, or a strategy that copies no experts give "
            "it more to do at once"
        )
