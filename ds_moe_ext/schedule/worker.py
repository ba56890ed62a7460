# SPDX-License-Identifier: Apache-2.0
"""The thread in which a process plans, beside the lanes in which its layers run."""

from __future__ import annotations

import functools
import os
from concurrent.futures import Executor, ThreadPoolExecutor


def worker() -> Executor:
    """One thread for all models of this process: what it is given is done in order."""
    return _worker_of(os.getpid())


@functools.cache
def _worker_of(process: int) -> Executor:
    """The child of a fork has none of its parent's threads."""
    return ThreadPoolExecutor(1, "planning")
