# SPDX-License-Identifier: Apache-2.0
"""What the thread that issues a pass takes for each task, where a device runs them later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Issuing:
    """One pass's. A task lasts until the next one begins: what lies between them, waits for other
    lanes among it, is the host's too. What it takes to look is not counted."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, float]] = []
        self._aside_s = 0.0

    def begins(self, position: int) -> None:
        """The task of a position does now."""
        self._begun.append((position, self._now()))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside the block takes no time."""
        begin_s = time.perf_counter()
        yield
        self._aside_s += time.perf_counter() - begin_s

    def seconds(self) -> list[tuple[int, float]]:
        """Of each task, by position, when the last one has ended."""
        ends = [*(begun_s for _, begun_s in self._begun[1:]), self._now()]
        return [(position, end - begun) for (position, begun), end in zip(self._begun, ends)]

    def _now(self) -> float:
        return time.perf_counter() - self._aside_s
