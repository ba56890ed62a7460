"""The thread in which a process plans, beside the lanes in which its layers run."""

from __future__ import annotations

import functools
import os
from concurrent.futures import Executor, ThreadPoolExecutor


@functools.cache
def worker() -> Executor:
    """One thread for all models of this process: what it is given is done in order."""
    return ThreadPoolExecutor(1, "planning")


# A child of a fork would wait in vain for its parent's thread.
os.register_at_fork(after_in_child=worker.cache_clear)
