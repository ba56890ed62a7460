# SPDX-License-Identifier: Apache-2.0
"""Ranges for profilers: what a task computes, issues or waits for stands under its name.

``torch.profiler`` shows them in its trace, and under ``torch.autograd.profiler.emit_nvtx`` they are
NVTX ranges.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import profiler

from ds_moe_ext.schedule.task import Schedule


def in_ranges(schedule: Schedule, do: Callable[[int], None]) -> Callable[[int], None]:
    """What does a task of a schedule, by its position: within a range where a profiler is on, else
    as it is."""
    # Of the process: whether its callbacks are this thread's or of all, torch keeps apart.
    if not profiler._is_profiler_enabled:
        return do
    names = schedule.once(_names)

    def do_in_range(position: int) -> None:
        with profiler.record_function(names[position]):
            do(position)

    return do_in_range


def _names(schedule: Schedule) -> tuple[str, ...]:
    return tuple(task.label for task in schedule.tasks)
