"""Which steps the recorder times: samples, the drawn step, the traced ones; and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ds_moe_ext.moe.observe import TasksSeen
from ds_moe_ext.report.recorder import Recorder


def is_timed(**wanted: Any) -> bool:
    """Whether the first step, number 0, is timed."""
    tasks = TasksSeen()
    layer: Any = SimpleNamespace(routed=SimpleNamespace(tasks=tasks))
    Recorder("ep", 1, [layer], **wanted)
    return tasks.is_on


def test_the_first_step_is_timed_if_it_is_wanted() -> None:
    assert is_timed(trace_step=0)
    assert is_timed(tracer=SimpleNamespace(steps=range(2)))
    assert not is_timed(trace_step=3)
    assert not is_timed(tracer=SimpleNamespace(steps=range(1, 3)))
