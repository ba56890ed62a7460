"""Run a schedule on real lanes: the caller's thread, worker threads, or CUDA streams."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import overrides

from ds_moe_ext.schedule.task import Lane, Schedule
from ds_moe_ext.watch import BrokenOff

Event = Any  # what a lane gives for a submitted task; only the same lanes look inside
Mark = Any  # a moment in a lane; only ``seconds_between`` of the same lanes looks inside


class OnDevice(ABC):
    """A record among the values: it says what device memory it holds."""

    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]: ...


class Lanes(Protocol):
    """In-order queues that can wait for each other."""

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Event]) -> Event:
        """Queue ``work`` behind the lane's earlier tasks and behind ``after``."""
        ...

    def join(self, events: Iterable[Event]) -> None:
        """Make the caller's next work see the results of ``events``."""
        ...

    def mark(self) -> Mark:
        """This moment, in the lane whose work calls."""
        ...

    def seconds_between(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to another. On CUDA the caller waits for ``end``."""
        ...

    def keep(self, reads: Iterable[Any]) -> None:
        """Called in a task with what it reads: the memory may be freed before the lane is done."""
        ...


def execute(schedule: Schedule, run: Callable[[int], None], lanes: Lanes) -> None:
    """Issue every task in order, then join them all. ``run`` does the task at a position."""
    events: list[Event] = []
    for position, (task, after) in enumerate(zip(schedule.tasks, schedule.after)):
        work = functools.partial(run, position)
        events.append(lanes.submit(task.lane, work, [events[w] for w in after]))
    lanes.join(events)


class InlineLanes:
    """All lanes in the caller's thread, in issue order. For CPU hosts where nothing overlaps."""

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Event]) -> Event:
        work()
        return None

    def join(self, events: Iterable[Event]) -> None:
        return None

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds_between(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def keep(self, reads: Iterable[Any]) -> None:
        return None


@dataclass(frozen=True)
class Carried:
    """State of a thread that another thread takes over: autocast, the stream on CUDA, and what
    stands between calls and torch, as a default device does.

    Attributes:
        autocasts: device, dtype and whether it is on, of each kind of device.
        stream: the current one; None without CUDA.
        modes: torch function modes, the outermost first.
    """

    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    stream: torch.cuda.Stream | None
    modes: tuple[overrides.TorchFunctionMode, ...]

    @classmethod
    def of_caller(cls) -> Carried:
        """That of the thread that calls."""
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = ("cpu", "cuda") if has_cuda else ("cpu",)
        autocasts = (
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices
        )
        stream = torch.cuda.current_stream() if has_cuda else None
        return cls(tuple(autocasts), stream, tuple(overrides._get_current_function_mode_stack()))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The thread that calls has it, inside the block."""
        with ExitStack() as stack:
            for device, dtype, is_on in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype, is_on))
            for mode in self.modes:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            self.follow()
            yield

    def follow(self) -> None:
        """Let the thread that calls issue its work where the other one does."""
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)


class ThreadLanes(InlineLanes):
    """One worker thread a lane. For CPU hosts: a collective that waits blocks its thread only."""

    def __init__(self) -> None:
        self._worker: dict[Lane, ThreadPoolExecutor] = {}

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Future]) -> Future:
        after = tuple(after)
        state = Carried.of_caller()

        def body() -> None:
            for event in after:
                event.result()  # raises here what the earlier task raised
            with state.entered():
                work()

        if lane not in self._worker:
            self._worker[lane] = ThreadPoolExecutor(
                1, lane.name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
            )
        return self._worker[lane].submit(body)

    def join(self, events: Iterable[Future]) -> None:
        events = tuple(events)
        try:
            for event in events:
                event.result()
        except BrokenOff:
            for event in events:  # what it came of, where that was in another lane
                error = event.exception() if event.done() else None
                if error is not None and not isinstance(error, BrokenOff):
                    raise error from None
            raise


class InlineCudaLanes(InlineLanes):
    """All lanes in the caller's stream, in issue order. For GPUs where nothing overlaps: no events,
    and freed memory is free at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        return _cuda_mark(self._device)

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return _cuda_seconds(start, end)


class CudaLanes:
    """One CUDA stream a lane. Work is issued by the caller's thread and runs on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: dict[Lane, torch.cuda.Stream] = {}

    def submit(
        self, lane: Lane, work: Callable[[], None], after: Iterable[torch.cuda.Event]
    ) -> torch.cuda.Event:
        if lane not in self._stream:
            self._stream[lane] = torch.cuda.Stream(self._device)
        stream = self._stream[lane]
        # The region's inputs come from the caller's stream, whatever else the task waits for.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
            return stream.record_event()

    def join(self, events: Iterable[torch.cuda.Event]) -> None:
        caller = torch.cuda.current_stream(self._device)
        for event in events:
            caller.wait_event(event)

    def mark(self) -> torch.cuda.Event:
        return _cuda_mark(self._device)

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return _cuda_seconds(start, end)

    def keep(self, reads: Iterable[Any]) -> None:
        # A value is dropped in Python when its last reader was issued, not finished; without this
        # the allocator could hand its memory to the writer's stream while the reader still runs.
        stream = torch.cuda.current_stream(self._device)
        for tensor in _tensors(reads):
            if tensor.is_cuda:
                tensor.record_stream(stream)


def _cuda_mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    # Either may be of another lane, or the later one.
    start.synchronize()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _tensors(reads: Iterable[Any]) -> Iterator[torch.Tensor]:
    for read in reads:
        if isinstance(read, torch.Tensor):
            yield read
        elif isinstance(read, tuple):
            yield from _tensors(read)
        elif isinstance(read, OnDevice):
            yield from read.tensors()


@functools.cache
def lanes_for(device: torch.device, overlaps: bool) -> Lanes:
    """The lanes of one device, shared by all its layers.

    Args:
        device: where the layers compute.
        overlaps: whether any task of the schedule may run beside another.
    """
    if device.type == "cuda":
        return CudaLanes(device) if overlaps else InlineCudaLanes(device)
    return ThreadLanes() if overlaps else InlineLanes()
