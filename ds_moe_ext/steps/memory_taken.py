# SPDX-License-Identifier: Apache-2.0
"""What steps under a choice take of a rank's memory: for who chooses by prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class MemoryTaken:
    """By how much fuller the device was at its fullest moment. That is known of a choice under
    which it became fuller than it had ever been; nobody's peaks are reset.

    Attributes:
        spare: bytes that this rank had left at the fullest moment so far; None where nothing tells.
        most: of all ranks' numbers. Collective.
        taken: bytes more than before anything was copied, by the name of a choice, of the rank
            where that is most; the same on all ranks.
    """

    spare: Callable[[], int | None]
    most: Callable[[int], int]
    taken: Mapping[str, int] = field(default_factory=dict, init=False)
    _free: int = field(default=0, init=False)  # where nothing is copied
    _latest: int | None = field(default=None, init=False)  # spare behind the step before
    _since: int = field(default=0, init=False)  # spare as the present choice began
    _name: str = field(default="", init=False)

    def begin(self, free: int) -> None:
        """Forget what was seen: this rank has so many bytes where nothing is copied."""
        self._free, self._latest, self._name = free, self.spare(), ""
        self.taken = {}

    def after_step(self, name: str, *, is_due: bool) -> None:
        """Look. Collective where it is due.

        Args:
            name: of the choice by which the step ran; empty for none.
            is_due: ranks tell each other.
        """
        before, now = self._latest, self.spare()
        if before is None or now is None:  # nothing tells, or nothing was measured yet
            return
        if name != self._name:
            self._name, self._since = name, before
        self._latest = now
        if is_due and name:
            took = self.most(self._free - now if now < self._since else 0)
            if took > 0:
                self.taken = {**self.taken, name: took}
