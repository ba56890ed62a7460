"""The thread in which a process plans, beside the lanes in which its layers run."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SWITCH_S = 1e-4
"""After so long who waits for Python's lock gets it. Python's own 5 ms are many launches of
kernels, and until then the thread that issues is woken in vain each time numpy lets go of it."""


def worker() -> Executor:
    """One thread for all models of this process: what it is given is done in order."""
    return _worker_of(os.getpid())


@functools.cache
def _worker_of(process: int) -> Executor:
    """The child of a fork has none of its parent's threads."""
    return ThreadPoolExecutor(1, "planning")


def giving_way(work: Callable[[], T]) -> T:
    """What some work comes to; meanwhile other threads get Python's lock soon."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, SWITCH_S))
    try:
        return work()
    finally:
        sys.setswitchinterval(before_s)
