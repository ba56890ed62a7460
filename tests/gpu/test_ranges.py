# SPDX-License-Identifier: Apache-2.0
"""Tasks by their names in the traces of ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ds_moe_ext.schedule.executor import ScheduleStreams
from tests.gpu.layers import CPU, CUDA, DEVICES, Case, Runner, one_by_one, side_by_side

CASE = Case(degrees=(2, 4))
OPS = {"gate": 1, "order": 1, "dispatch": 2, "expert": 2, "combine": 2, "restore": 2}
"""Forward tasks of each."""
ADJOINTS = {op: 4 for op in ("dispatch", "expert", "combine", "restore")} | {"gate": 1}
EXPECTED = {f"layer 0 {op}": number for op, number in OPS.items()}
EXPECTED |= {f"layer 0 {op}'": number for op, number in ADJOINTS.items()}


def profiled(
    device: torch.device, streams: ScheduleStreams, *, all_threads: bool
) -> list[FunctionEvent]:
    """The ranges of a step."""
    runner = Runner.of(CASE, device, streams)
    x, grad = (tensor.to(device) for tensor in CASE.tokens())
    runner.step(x, grad)
    activities = [ProfilerActivity.CPU]
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=activities, experimental_config=config) as found:
        runner.step(x, grad)
    return [event for event in found.events() if event.name.startswith("layer ")]


def counts(events: Iterable[FunctionEvent]) -> dict[str, int]:
    names = [event.name for event in events]
    return {name: names.count(name) for name in names}


@DEVICES
@pytest.mark.parametrize("all_threads", [True, False])
def test_tasks_have_their_names(device: torch.device, all_threads: bool) -> None:
    events = profiled(device, one_by_one(device), all_threads=all_threads)
    assert counts(events) == EXPECTED


def test_worker_threads_show_theirs_where_all_threads_are_profiled() -> None:
    events = profiled(CPU, side_by_side(CPU), all_threads=True)
    assert counts(events) == EXPECTED
    of_stream = {name: set[int]() for name in ("inter", "compute")}
    for event in events:
        is_sent = event.name.rstrip("'").endswith(("order", "dispatch", "combine"))
        of_stream["inter" if is_sent else "compute"].add(event.thread)
    assert {name: len(threads) for name, threads in of_stream.items()} == {"inter": 1, "compute": 1}
    assert of_stream["inter"] != of_stream["compute"]


@pytest.mark.gpu
def test_streams_show_theirs_in_the_callers_thread() -> None:
    assert counts(profiled(CUDA, side_by_side(CUDA), all_threads=False)) == EXPECTED


def test_no_profiler_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", fails)
    x, grad = CASE.tokens()
    Runner.of(CASE, CPU, side_by_side(CPU)).step(x, grad)
