# SPDX-License-Identifier: Apache-2.0
"""What a device did in a step, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile


def kernels_of(step: Callable[[], object]) -> list[FunctionEvent]:
    """What ran on the device in a step. It must have ended when the step returns."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
    # Ranges of tasks have places on the device's time line, too.
    events = (event for event in found.events() if event.device_type == DeviceType.CUDA)
    return [event for event in events if not event.name.startswith("layer ")]


def covered_us(events: Iterable[FunctionEvent]) -> float:
    """Time in which at least one ran."""
    total = last = 0.0
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
