"""Run a schedule on real lanes: the caller's thread, worker threads, or CUDA streams."""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import overrides

from ds_moe_ext.schedule.task import COMPUTE, Lane, Schedule
from ds_moe_ext.watch import BrokenOff

Event = Any  # what a lane gives for a submitted task; only the same lanes look inside
Mark = Any  # a moment in a lane; only ``seconds_between`` of the same lanes looks inside


class OnDevice(ABC):
    """A record among the values: it says what device memory it holds."""

    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]: ...


class Lanes(Protocol):
    """In-order queues that can wait for each other.

    Attributes:
        has_threads: what the host works out in one lane does not keep it from issuing another's.
    """

    has_threads: bool

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        """Do every task, by its position, and make the caller's next work see the results.

        Of errors the first one in issue order is raised; no task runs that waits for one that did
        not end well.
        """
        ...

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


class InlineLanes:
    """All lanes in the caller's thread, in issue order. For CPU hosts where nothing overlaps."""

    has_threads = False

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        for position in range(len(schedule.tasks)):
            do(position)

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
    """State of a thread that another thread takes over: whether autograd records, autocast, the
    stream on CUDA, and what stands between calls and torch, as a default device does.

    Attributes:
        records: whether autograd does.
        autocasts: device, dtype and whether it is on, of each kind of device.
        stream: the current one; None without CUDA.
        modes: torch function modes, the outermost first.
    """

    records: bool
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
        modes = tuple(overrides._get_current_function_mode_stack())
        return cls(torch.is_grad_enabled(), tuple(autocasts), stream, modes)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The thread that calls has it, inside the block."""
        with ExitStack() as stack, torch.set_grad_enabled(self.records):
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


@dataclass(eq=False)
class _Errand:
    """A schedule that several threads do, each its lane.

    Attributes:
        schedule: which.
        do: a task, by its position.
        ends: of the tasks that another lane waits for: locked until they have ended.
        errors: by position, of the tasks that failed.
        lost: tasks that failed, or have not run, for one that they need did not end well.
    """

    schedule: Schedule
    do: Callable[[int], None]
    ends: dict[int, threading.Lock] = field(init=False)
    errors: dict[int, BaseException] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ends = {w: threading.Lock() for awaits in self.schedule.awaits for w in awaits}
        for end in self.ends.values():
            end.acquire()

    def run(self, positions: Sequence[int]) -> None:
        """A lane's tasks, until one fails or waits in vain."""
        for number, position in enumerate(positions):
            if not self._ends_well(position):
                self.lost.update(positions[number:])
                for each in positions[number:]:
                    self._end(each)
                return
            self._end(position)

    def _ends_well(self, position: int) -> bool:
        for other in self.schedule.awaits[position]:
            with self.ends[other]:
                if other in self.lost:
                    return False
        try:
            self.do(position)
        except BaseException as error:
            self.errors[position] = error
            return False
        return True

    def _end(self, position: int) -> None:
        if position in self.ends:
            self.ends[position].release()


class ThreadLanes(InlineLanes):
    """Computation in the caller's thread, a worker thread for any other lane. For CPU hosts: a
    collective that waits blocks its thread only."""

    has_threads = True

    def __init__(self) -> None:
        self._workers: dict[Lane, ThreadPoolExecutor] = {}

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        errand = _Errand(schedule, do)
        state = Carried.of_caller()

        def work(positions: Sequence[int]) -> None:
            with state.entered():
                errand.run(positions)

        others = [
            self._worker(lane).submit(work, positions)
            for lane, positions in schedule.by_lane.items()
            if lane != COMPUTE
        ]
        errand.run(schedule.by_lane.get(COMPUTE, ()))
        for other in others:
            other.result()
        if errand.errors:
            raise _first([errand.errors[position] for position in sorted(errand.errors)])

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Future]) -> Future:
        after = tuple(after)
        state = Carried.of_caller()

        def body() -> None:
            for event in after:
                event.result()  # raises here what the earlier task raised
            with state.entered():
                work()

        return self._worker(lane).submit(body)

    def _worker(self, lane: Lane) -> ThreadPoolExecutor:
        if lane not in self._workers:
            self._workers[lane] = ThreadPoolExecutor(
                1, lane.name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
            )
        return self._workers[lane]

    def join(self, events: Iterable[Future]) -> None:
        events = tuple(events)
        try:
            for event in events:
                event.result()
        except BrokenOff as broken:
            ended = (event.exception() for event in events if event.done())
            cause = _first([broken, *(error for error in ended if error is not None)])
            if cause is broken:
                raise
            raise cause from None


def _first(errors: Sequence[BaseException]) -> BaseException:
    """The first one; where that says that an exchange was broken off, what it came of, if that was
    in another lane."""
    causes = (error for error in errors if not isinstance(error, BrokenOff))
    return next(causes, errors[0])


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
    """Computation in the caller's stream, a stream for any other lane. Work is issued by the
    caller's thread and runs on the device."""

    has_threads = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {}

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        caller = torch.cuda.current_stream(self._device)
        streams = {
            lane: caller if lane == COMPUTE else self._stream(lane) for lane in schedule.by_lane
        }
        for stream in streams.values():
            if stream is not caller:  # inputs come from the caller's
                stream.wait_stream(caller)
        # The last of each lane, and not the stream: tasks may have begun more behind it.
        last = [own[-1] for lane, own in schedule.by_lane.items() if lane != COMPUTE]
        awaited = {w for awaits in schedule.awaits for w in awaits}.union(last)
        ends: dict[int, torch.cuda.Event] = {}
        for position, task in enumerate(schedule.tasks):
            stream = streams[task.lane]
            for other in schedule.awaits[position]:
                stream.wait_event(ends[other])
            with torch.cuda.stream(stream):
                do(position)
            if position in awaited:
                ends[position] = stream.record_event()
        for position in last:
            caller.wait_event(ends[position])

    def submit(
        self, lane: Lane, work: Callable[[], None], after: Iterable[torch.cuda.Event]
    ) -> torch.cuda.Event:
        stream = self._stream(lane)
        # The region's inputs come from the caller's stream, whatever else the task waits for.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
            return stream.record_event()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self._device)
        return self._streams[lane]

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
