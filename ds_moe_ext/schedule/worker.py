"""The thread in which a process plans, beside the lanes in which its layers run."""

from __future__ import annotations

import functools
from concurrent.futures import Executor, ThreadPoolExecutor


@functools.cache
def worker() -> Executor:
    """One thread for all models of this process: what it is given is done in order."""
    return ThreadPoolExecutor(1, "planning")
