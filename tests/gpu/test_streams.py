# SPDX-License-Identifier: Apache-2.0
"""Streams against threads against one cuda_stream: the same program, the same numbers.

On a CPU the same bodies run on worker threads, so that the tests themselves are tested.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.moe.observation import TasksSeen
from ds_moe_ext.moe.slot_rows import SlotSortings
from ds_moe_ext.schedule.executor import (
    CudaStreams,
    InlineStreams,
    OnDevice,
    ThreadStreams,
    streams_for,
)
from ds_moe_ext.schedule.program import Program
from ds_moe_ext.schedule.stages import Saved, Stage
from ds_moe_ext.schedule.task import COMPUTE, HOST, INTER, INTRA, PARAM, ChunkRange, Op, Stream
from ds_moe_ext.testing import relative_error
from tests.flows import flow
from tests.gpu.layers import (
    CPU,
    CUDA,
    DEVICES,
    Case,
    Runner,
    all_equal,
    one_by_one,
    side_by_side,
)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
DEGREES = [(1, 1), (2, 2), (3, 2), (1, 4), (4, 1)]
BIG = Case(num_tokens=768, width=128, expert_width=256)


def big(device: torch.device) -> Case:
    """On a CPU, where streams are threads, few tokens show the same."""
    return BIG if device.type == "cuda" else replace(BIG, num_tokens=96)


SLEEP_CYCLES = 2_000_000  # about a millisecond


def inputs(case: Case, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, grad = case.tokens(seed)
    return x.to(device), grad.to(device)


@DEVICES
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_streams_equal_threads(
    device: torch.device, dtype: torch.dtype, degrees: tuple[int, int]
) -> None:
    case = Case(degrees=degrees, dtype=dtype, hot=1.0)
    ours = Runner.of(case, device, side_by_side(device)).step(*inputs(case, device))
    for streams in (ThreadStreams(), InlineStreams()):
        reference = Runner.of(case, CPU, streams).step(*inputs(case, CPU))
        errors = [relative_error(a.cpu(), b) for a, b in zip(ours, reference)]
        assert max(errors) <= TOLERANCES[dtype], errors


@DEVICES
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_streams_equal_one_stream_bit_by_bit(
    device: torch.device, degrees: tuple[int, int]
) -> None:
    case = replace(big(device), degrees=degrees)
    x, grad = inputs(case, device)
    reference = Runner.of(case, device, one_by_one(device)).step(x, grad)
    runner = Runner.of(case, device, side_by_side(device))
    for _ in range(5):
        assert all_equal(runner.step(x, grad), reference)


# Memory: a value is freed when its last reader was issued, and the reader may run much later.


def late(device: torch.device) -> None:
    """Let this stream fall behind the others."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    else:
        time.sleep(1e-3)


def tensors_in(parts: Any) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, tuple):
            yield from tensors_in(part)
        elif isinstance(part, OnDevice):
            yield from part.tensors()


def overwrite_what_is_free(like: Sequence[Tensor]) -> None:
    """Fill blocks that this stream's cuda_stream may allocate, of the sizes that values have."""
    # All are held before any is freed, so that each gets another block.
    filler = [torch.empty_like(tensor) for tensor in like for _ in range(3)]
    for block in filler:
        block.fill_(torch.nan if block.is_floating_point() else 0)


@dataclass(frozen=True, eq=False)
class Hostile:
    """A stage whose stream comes late or not, and which overwrites all memory that looks free."""

    stage: Stage
    device: torch.device
    is_late: bool

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> tuple[tuple[Any, ...], Saved]:
        return self._surrounded(reads, functools.partial(self.stage.forward, chunk_range, *reads))

    def backward(self, chunk_range: ChunkRange, saved: Saved, *grads: Any) -> tuple[Any, ...]:
        parts = (*saved, *grads)
        return self._surrounded(
            parts, functools.partial(self.stage.backward, chunk_range, saved, *grads)
        )

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        return self.stage.recut(chunk_range, pieces)

    def _surrounded(self, parts: Any, work: Any) -> Any:
        like = list(tensors_in(parts))
        overwrite_what_is_free(like)
        if self.is_late:
            late(self.device)
        result = work()
        overwrite_what_is_free(like)
        return result


def hostile(program: Program, device: torch.device, late_stream: Stream) -> Program:
    stages: Mapping[Op, Stage] = {
        op: Hostile(stage, device, op.stream == late_stream)
        for op, stage in program.layer_stages.stages.items()
    }
    return replace(program, layer_stages=replace(program.layer_stages, stages=stages))


@DEVICES
@pytest.mark.parametrize("late_stream", [COMPUTE, INTER], ids=lambda stream: stream.name)
@pytest.mark.parametrize("degrees", [(1, 1), (4, 4), (3, 2), (2, 4)], ids=str)
def test_freed_memory_is_not_reused_too_early(
    device: torch.device, degrees: tuple[int, int], late_stream: Stream
) -> None:
    case = replace(big(device), degrees=degrees)
    num_passes = 20 if device.type == "cuda" else 2
    reference = Runner.of(case, device, one_by_one(device))
    change = functools.partial(hostile, device=device, late_stream=late_stream)
    runner = Runner.of(case, device, side_by_side(device), change)
    batches = [inputs(case, device, seed) for seed in range(min(num_passes, 3))]
    expected = [reference.step(x, grad) for x, grad in batches]
    # Nothing waits for the device between passes: each finds the memory of the last one.
    results = [runner.step(*batches[i % 3]) for i in range(num_passes)]
    for i, result in enumerate(results):
        assert all_equal(result, expected[i % 3]), f"pass {i}"


@DEVICES
@pytest.mark.parametrize("late_stream", [COMPUTE, INTER], ids=lambda stream: stream.name)
def test_freed_memory_is_not_reused_too_early_without_gradients(
    device: torch.device, late_stream: Stream
) -> None:
    """No backward pass holds values back: they are freed much sooner."""
    case = replace(BIG, degrees=(4, 4))
    change = functools.partial(hostile, device=device, late_stream=late_stream)
    runner = Runner.of(case, device, side_by_side(device), change)
    reference = Runner.of(case, device, one_by_one(device))
    batches = [inputs(case, device, seed)[0] for seed in range(3)]
    with torch.no_grad():
        expected = [reference(x) for x in batches]
        results = [runner(batches[i % 3]) for i in range(20 if device.type == "cuda" else 3)]
    for i, result in enumerate(results):
        assert all_equal(result, expected[i % 3]), f"pass {i}"


@DEVICES
def test_callers_stream_is_waited_for_and_waits(device: torch.device) -> None:
    """Inputs are late on the caller's cuda_stream, which is not the default one; what it gets it
    uses at once and overwrites."""
    case = replace(BIG, degrees=(3, 2))
    x, grad = inputs(case, device)
    reference = Runner.of(case, device, one_by_one(device)).step(x, grad)
    runner = Runner.of(case, device, side_by_side(device))
    cuda_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if cuda_stream is not None:
        cuda_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(cuda_stream):  # None: does nothing
        for _ in range(5):
            late_x, late_grad = torch.zeros_like(x), torch.zeros_like(grad)
            late(device)
            late_x.copy_(x)
            late_grad.copy_(grad)
            result = runner.step(late_x, late_grad)
            used = [tensor.clone() for tensor in result]
            for tensor in (*result, late_x, late_grad):
                tensor.fill_(torch.nan)
            assert all_equal(used, reference)


@DEVICES
@pytest.mark.parametrize("degrees", [(1, 1), (3, 2)], ids=str)
def test_recomputed_in_backward(device: torch.device, degrees: tuple[int, int]) -> None:
    case = replace(big(device), degrees=degrees)
    x, grad = inputs(case, device)
    reference = Runner.of(case, device, one_by_one(device)).step(x, grad)
    runner = Runner.of(case, device, side_by_side(device))
    x = x.requires_grad_()
    y, _ = checkpoint(runner, x, use_reentrant=False)
    y.backward(grad)
    assert torch.equal(y, reference[0])
    assert x.grad is not None
    # The losses took no part here: only what does not come through the gate is compared.
    assert all_equal(runner.expert_grads(), reference[-2:])


@DEVICES
def test_the_host_works_beside_the_streams(device: torch.device) -> None:
    """It sees on the device what was written before it, and what it writes there is seen."""
    schedule = flow("a inter", "b host a", "c compute a", "d compute b c", "e host d")
    streams = side_by_side(device)
    written = torch.zeros(4, device=device)
    threads: dict[int, int] = {}
    made: list[Tensor] = []
    sums: list[float] = []

    def do(position: int) -> None:
        threads[position] = threading.get_ident()
        if position == 0:
            late(device)
            written.fill_(3.0)
        elif position == 1:
            late(device)
            made.append(written * 2)
            sums.append(float(made[0].sum()))  # waits for the device: the caller does not
        elif position == 3:
            late(device)
            made[0] += written
        elif position == 4:
            sums.append(float(made[0].sum()))

    for _ in range(5):
        made.clear()
        streams.run(schedule, do)
        written.zero_()  # the caller's next work comes after all that
    assert sums == [24.0, 36.0] * 5
    assert threads[2] == threads[3] == threading.get_ident()
    assert threads[1] == threads[4] != threading.get_ident()


# Marks and streams.


@DEVICES
@pytest.mark.parametrize("overlaps", [True, False])
def test_tasks_are_timed(device: torch.device, overlaps: bool) -> None:
    case = replace(BIG, degrees=(2, 2))
    streams = side_by_side(device) if overlaps else one_by_one(device)
    seen = TasksSeen(is_wanted=True)

    def watched(program: Program) -> Program:
        return replace(program, layer_stages=replace(program.layer_stages, observers=(seen,)))

    runner = Runner.of(case, device, streams, watched)
    runner.step(*inputs(case, device))
    timed = seen.take()
    program = runner.program
    assert len(timed) == len(program.forward.tasks) + len(program.backward.tasks)
    for one in timed:
        start_s, end_s = one.seconds_from(timed[0])
        assert 0.0 <= start_s <= end_s


@pytest.mark.gpu
def test_streams_of_a_device_that_overlap_are_other_ones() -> None:
    assert type(streams_for(CUDA, True)) is not type(streams_for(CUDA, False))
    assert streams_for(CUDA, True) is streams_for(CUDA, True)


@pytest.mark.gpu
def test_streams_that_send_go_first() -> None:
    cuda_streams = CudaStreams(CUDA)
    assert [cuda_streams.made_for(stream).priority for stream in (INTER, INTRA, PARAM)] == [-1] * 3
    assert cuda_streams.made_for(HOST).priority == 0
    assert cuda_streams.current().priority == 0


@pytest.mark.gpu
def test_nothing_stays_allocated() -> None:
    """Nor waits for a garbage collection."""
    case = replace(BIG, degrees=(3, 2))
    runner = Runner.of(case, CUDA, side_by_side(CUDA))
    x, grad = inputs(case, CUDA)
    runner.step(x, grad)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        for _ in range(5):
            runner.step(x, grad)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
    finally:
        gc.enable()


@DEVICES
def test_routes_go_with_their_pass(device: torch.device) -> None:
    """What they have on the device does not wait for Python's collector of circles."""
    case = replace(big(device), degrees=(3, 2))
    runner = Runner.of(case, device, side_by_side(device))
    x, grad = inputs(case, device)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            runner.step(x, grad)
        assert not [thing for thing in gc.get_objects() if isinstance(thing, SlotSortings)]
    finally:
        gc.enable()


@dataclass(frozen=True, eq=False)
class Late:
    """A stage that takes several milliseconds on the device, much longer than it takes the host."""

    stage: Stage

    def forward(self, chunk_range: ChunkRange, *reads: Any) -> tuple[tuple[Any, ...], Saved]:
        torch.cuda._sleep(5 * SLEEP_CYCLES)
        return self.stage.forward(chunk_range, *reads)


@pytest.mark.gpu
def test_streams_overlap() -> None:
    """Late dispatches of later chunks run beside the late experts of earlier ones."""
    case = replace(BIG, degrees=(4, 4))
    x, _ = inputs(case, CUDA)

    def both_late(program: Program) -> Program:
        own = program.layer_stages.stages
        stages = {op: Late(stage) for op, stage in own.items()}
        return replace(program, layer_stages=replace(program.layer_stages, stages=stages))

    def seconds(streams: Any) -> float:
        runner = Runner.of(case, CUDA, streams, both_late)
        found_s = []
        for _ in range(6):  # at first memory is allocated, for which the device may wait
            with torch.no_grad():
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                runner(x)
                torch.cuda.synchronize()
            found_s.append(time.perf_counter() - start_s)
        return min(found_s)

    assert seconds(side_by_side(CUDA)) < 0.8 * seconds(one_by_one(CUDA))
