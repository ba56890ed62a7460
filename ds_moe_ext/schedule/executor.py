# SPDX-License-Identifier: Apache-2.0
"""Run a schedule on real streams: the caller's thread, worker threads, or CUDA streams.

``ScheduleStreams`` are in-order queues that wait for each other as ``Schedule.awaits`` says.
``InlineStreams`` do all in the caller's thread, ``ThreadStreams`` have a thread for each stream,
``DeviceStreams`` a CUDA stream; ``streams_for`` gives those of a device, which all its layers
share. What is queued apart from a schedule (``submit``, ``begin``) comes behind what its stream was
given before.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import overrides
from torch.autograd import profiler

from ds_moe_ext.schedule.task import COMPUTE, HOST, Schedule, Stream
from ds_moe_ext.schedule.watch import BrokenOff

Event = Any  # what a stream gives for a submitted task; only the same streams look inside
Mark = Any  # a moment in a stream; only ``seconds_between`` of the same streams looks inside


T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that pauses while what it has begun is under way, and then waits for that; its result."""


def to_the_end(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


class OnDevice(ABC):
    """A record among the values: it says what device memory it holds."""

    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]: ...


class ScheduleStreams(Protocol):
    """In-order queues that can wait for each other."""

    # what the host works out in one stream does not keep it from issuing another's
    has_threads: bool
    issues: bool  # a device runs what a task has issued
    is_late: bool  # in a stream of its own, so that what it reads may have been freed by then

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        """Do every task, by its position, and make the caller's next work see the results.

        Of errors the first one in issue order is raised; no task runs that waits for one that did
        not end well.
        """
        ...

    def submit(self, stream: Stream, work: Callable[[], None], after: Iterable[Event]) -> Event:
        """Queue ``work`` behind the stream's earlier tasks and behind ``after``."""
        ...

    def begin(self, stream: Stream, steps: Steps[None], *, may_pause: bool = True) -> Event:
        """The same of work in steps. Where it may pause, once, the caller may do it up to there,
        and the rest when somebody joins."""
        ...

    def join(self, events: Iterable[Event]) -> None:
        """Make the caller's next work see the results of ``events``."""
        ...

    def mark(self) -> Mark:
        """This moment, in the stream whose work calls."""
        ...

    def seconds_between(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to another. On CUDA the caller waits for ``end``."""
        ...

    def keep(self, reads: Iterable[Any]) -> None:
        """Called in a task with what it reads: the memory may be freed before the stream is
        done."""
        ...


class InlineStreams:
    """All streams in the caller's thread, in issue order. For CPU hosts where nothing overlaps."""

    has_threads = False
    issues = False
    is_late = False

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        for position in range(len(schedule.tasks)):
            do(position)

    def submit(self, stream: Stream, work: Callable[[], None], after: Iterable[Event]) -> Event:
        work()
        return None

    def begin(self, stream: Stream, steps: Steps[None], *, may_pause: bool = True) -> Event:
        return self.submit(stream, functools.partial(to_the_end, steps), ())

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
    current stream on CUDA, and what stands between calls and torch, as a default device does."""

    records: bool  # whether autograd does
    infers: bool  # inference mode is on
    # device, dtype and whether it is on, of each kind of device
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    cuda_stream: torch.cuda.Stream | None  # the current one; None without CUDA
    modes: tuple[overrides.TorchFunctionMode, ...]  # torch function modes, the outermost first

    @classmethod
    def of_caller(cls) -> Carried:
        has_cuda = torch.cuda.is_initialized()
        devices = ("cpu", "cuda") if has_cuda else ("cpu",)
        autocasts = (
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices
        )
        cuda_stream = torch.cuda.current_stream() if has_cuda else None
        modes = tuple(overrides._get_current_function_mode_stack())
        infers = torch.is_inference_mode_enabled()
        return cls(torch.is_grad_enabled(), infers, tuple(autocasts), cuda_stream, modes)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The thread that calls has it, inside the block."""
        with ExitStack() as stack:
            if self.infers:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.records))
            for device, dtype, is_on in self.autocasts:
                here = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
                if here != (dtype, is_on):  # to enter one takes longer than to ask
                    stack.enter_context(torch.autocast(device, dtype, is_on))
            for mode in self.modes:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            self.follow()
            yield

    def follow(self) -> None:
        """Let the thread that calls issue its work where the other one does."""
        if self.cuda_stream is not None:
            torch.cuda.set_device(self.cuda_stream.device)
            torch.cuda.set_stream(self.cuda_stream)


@dataclass(eq=False)
class _ThreadRun:
    """A schedule that several threads do, each its stream."""

    schedule: Schedule  # which
    do: Callable[[int], None]  # a task, by its position
    # of the tasks that another stream waits for: locked until they have ended
    ends: dict[int, threading.Lock] = field(init=False)
    # by position, of the tasks that failed
    errors: dict[int, BaseException] = field(default_factory=dict)
    # tasks that failed, or have not run, for one that they need did not end well
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ends = {w: threading.Lock() for awaits in self.schedule.awaits for w in awaits}
        for end in self.ends.values():
            end.acquire()

    def run(self, positions: Sequence[int]) -> None:
        """A stream's tasks, until one fails or waits in vain."""
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

    def raise_first(self) -> None:
        """When all streams are done: of errors, the first one in issue order."""
        if self.errors:
            raise _first([self.errors[position] for position in sorted(self.errors)])


class Workers:
    """A thread for each stream that asked for one; they stay."""

    def __init__(self) -> None:
        self._of: dict[Stream, ThreadPoolExecutor] = {}
        self._latest: dict[Stream, Future] = {}

    def submit(self, stream: Stream, work: Callable[..., None], *arguments: Any) -> Future:
        """Queue work behind what the stream was given before."""
        if stream not in self._of:
            self._of[stream] = ThreadPoolExecutor(
                1,
                stream.name,
                initializer=torch.set_num_threads,
                initargs=(torch.get_num_threads(),),
            )
        self._latest[stream] = self._of[stream].submit(work, *arguments)
        return self._latest[stream]

    def are_done(self, stream: Stream) -> bool:
        """Whether a stream has ended all that it was given."""
        return stream not in self._latest or self._latest[stream].done()


class _Begun(Future):
    """Work whose first step its caller has done: whoever asks for its end does the rest."""

    def __init__(self, steps: Steps[None]) -> None:
        super().__init__()
        next(steps, None)
        self._steps = steps

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            try:
                self.set_result(to_the_end(self._steps))
            except BaseException as error:
                self.set_exception(error)
        super().result(timeout)


class ThreadStreams(InlineStreams):
    """Computation in the caller's thread, a worker thread for any other stream. For CPU hosts: a
    collective that waits blocks its thread only."""

    has_threads = True

    def __init__(self) -> None:
        self._workers = Workers()

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        shared = _ThreadRun(schedule, do)
        state = Carried.of_caller()

        def work(positions: Sequence[int]) -> None:
            with state.entered():
                shared.run(positions)

        others = [
            self._workers.submit(stream, work, positions)
            for stream, positions in schedule.by_stream.items()
            if stream != COMPUTE
        ]
        shared.run(schedule.by_stream.get(COMPUTE, ()))
        for other in others:
            other.result()
        shared.raise_first()

    def submit(self, stream: Stream, work: Callable[[], None], after: Iterable[Future]) -> Future:
        after = tuple(after)
        state = Carried.of_caller()

        def body() -> None:
            for event in after:
                event.result()  # raises here what the earlier task raised
            with state.entered():
                work()

        return self._workers.submit(stream, body)

    def begin(self, stream: Stream, steps: Steps[None], *, may_pause: bool = True) -> Future:
        # To wake a thread takes longer than to post a message or two. In the order of the stream,
        # in which other ranks expect them.
        if may_pause and self._workers.are_done(stream):
            return _Begun(steps)
        return self.submit(stream, functools.partial(to_the_end, steps), ())

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
    in another stream."""
    causes = (error for error in errors if not isinstance(error, BrokenOff))
    return next(causes, errors[0])


class InlineDeviceStreams(InlineStreams):
    """All streams in the caller's CUDA stream, in issue order. For GPUs where nothing overlaps: no
    events, and freed memory is free at once."""

    issues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        return _cuda_mark(self._device)

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return _cuda_seconds(start, end)


class Streams(Protocol):
    """Where a device's streams come from; each is like a ``torch.cuda.Stream``."""

    def current(self) -> Any:
        """In which the thread that calls issues its work."""
        ...

    def made_for(self, stream: Stream) -> Any: ...

    def entered(self, cuda_stream: Any) -> AbstractContextManager[object]:
        """The thread that calls issues its work there, inside the block."""
        ...

    def enter(self, cuda_stream: Any) -> None:
        """From now on, in such a block of the same device."""
        ...


@dataclass(frozen=True)
class CudaStreams:
    device: torch.device

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # of a device it asks for longer

    def made_for(self, stream: Stream) -> torch.cuda.Stream:
        # Blocks of a CUDA stream that goes first are the next to find room, however many of an
        # expert's wait; streams of the default priority have 0.
        return torch.cuda.Stream(self.device, priority=-1 if stream.sends else 0)

    def entered(self, cuda_stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(cuda_stream)
        return context

    def enter(self, cuda_stream: Any) -> None:
        torch.cuda.set_stream(cuda_stream)


class _Issued(NamedTuple):
    """Tasks of a schedule, by position, as streams need to know them."""

    by_caller: tuple[int, ...]  # all but those of stream HOST
    # of each stream but the caller's. These, and not the CUDA streams, are what a run waits for:
    # tasks may have begun more behind them.
    last: tuple[int, ...]
    awaited: frozenset[int]  # those whose ends somebody waits for

    @classmethod
    def of(cls, schedule: Schedule) -> _Issued:
        by_caller = tuple(p for p, task in enumerate(schedule.tasks) if task.stream != HOST)
        last = tuple(own[-1] for stream, own in schedule.by_stream.items() if stream != COMPUTE)
        return cls(by_caller, last, frozenset(last).union(*schedule.awaits))


class _Run(NamedTuple):
    """A schedule on CUDA streams."""

    schedule: Schedule  # which
    do: Callable[[int], None]  # a task, by its position
    make: Streams  # of the streams
    caller: Any  # the CUDA stream of who calls
    cuda_streams: Mapping[Stream, Any]  # of each stream
    awaited: frozenset[int]  # see ``_Issued``
    ends: dict[int, Any]  # of those, by position

    def issue(self, positions: Iterable[int]) -> None:
        """Tasks in order; to be called where the caller's CUDA stream is the current one."""
        at = self.caller
        try:
            for position in positions:
                cuda_stream = self.cuda_streams[self.schedule.tasks[position].stream]
                for other in self.schedule.awaits[position]:
                    cuda_stream.wait_event(self.ends[other])
                if cuda_stream is not at:
                    self.make.enter(cuda_stream)
                    at = cuda_stream
                self.do(position)
                if position in self.awaited:
                    self.ends[position] = cuda_stream.record_event()
        finally:
            if at is not self.caller:
                self.make.enter(self.caller)


class DeviceStreams:
    """Computation in the caller's CUDA stream, a CUDA stream for any other stream. Work is issued
    by the caller's thread and runs on the device; what the host itself works out (stream HOST) by a
    worker thread, so that the caller's goes on issuing."""

    has_threads = False
    issues = is_late = True

    def __init__(self, device: torch.device, cuda_streams: Streams | None = None) -> None:
        self._device = device
        self._make: Streams = cuda_streams or CudaStreams(device)
        self._cuda_streams: dict[Stream, Any] = {}
        self._last_caller: Any = None
        self._workers = Workers()

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        caller = self._make.current()
        cuda_streams = {
            stream: caller if stream == COMPUTE else self._cuda_stream(stream)
            for stream in schedule.by_stream
        }
        issued = schedule.once(_Issued.of)
        run = _Run(schedule, do, self._make, caller, cuda_streams, issued.awaited, {})
        others = [cuda_stream for cuda_stream in cuda_streams.values() if cuda_stream is not caller]
        if not others:
            run.issue(issued.by_caller)
            return
        self._let_follow(others, caller)
        try:
            with self._make.entered(caller):  # once, for its device: it is the current one
                if HOST in schedule.by_stream:
                    self._run_beside(issued, run)
                else:
                    run.issue(issued.by_caller)
        except BaseException:
            with suppress(RuntimeError):  # of a device that is lost
                for cuda_stream in others:  # who goes on may get what they have yet to read
                    caller.wait_stream(cuda_stream)
            raise
        for position in issued.last:
            caller.wait_event(run.ends[position])

    def _let_follow(self, cuda_streams: Iterable[Any], caller: Any) -> None:
        """They come behind what the caller's has to do: from there come inputs, and there was read
        what may be freed by now. So was it by the caller before, where that was another one."""
        ends = [caller.record_event()]
        if self._last_caller is not None and self._last_caller != caller:
            ends.append(self._last_caller.record_event())
        self._last_caller = caller
        for cuda_stream in cuda_streams:
            for end in ends:
                cuda_stream.wait_event(end)

    def _run_beside(self, issued: _Issued, run: _Run) -> None:
        """The tasks of stream HOST in the worker thread, all others in the caller's.

        Where one thread needs what the other does, it waits until that is issued or worked out:
        then the events are there for which the streams wait. So what a task of stream HOST reads on
        the host is known, and what it does on the device comes behind what wrote it.
        """
        state, of_host = Carried.of_caller(), run.schedule.by_stream[HOST]
        shared = _ThreadRun(run.schedule, lambda position: run.issue((position,)))

        def work() -> None:
            with state.entered():
                shared.run(of_host)

        beside = self._workers.submit(HOST, work)
        shared.run(issued.by_caller)
        beside.result()
        shared.raise_first()

    def submit(
        self, stream: Stream, work: Callable[[], None], after: Iterable[torch.cuda.Event]
    ) -> torch.cuda.Event:
        cuda_stream = self._cuda_stream(stream)
        # The region's inputs come from the caller's CUDA stream, whatever else the task waits for.
        cuda_stream.wait_stream(self._make.current())
        for event in after:
            cuda_stream.wait_event(event)
        with self._make.entered(cuda_stream):
            work()
            event = cuda_stream.record_event()
        return event

    def begin(
        self, stream: Stream, steps: Steps[None], *, may_pause: bool = True
    ) -> torch.cuda.Event:
        return self.submit(stream, functools.partial(to_the_end, steps), ())

    def _cuda_stream(self, stream: Stream) -> Any:
        if stream not in self._cuda_streams:
            self._cuda_streams[stream] = self._make.made_for(stream)
        return self._cuda_streams[stream]

    def join(self, events: Iterable[torch.cuda.Event]) -> None:
        caller = self._make.current()
        for event in events:
            caller.wait_event(event)

    def mark(self) -> torch.cuda.Event:
        return _cuda_mark(self._device)

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return _cuda_seconds(start, end)

    def keep(self, reads: Iterable[Any]) -> None:
        # A value is dropped in Python when its last reader was issued, not finished; without this
        # the allocator could hand its memory to the writer's CUDA stream while the reader still
        # runs.
        cuda_stream: Any = self._make.current()
        for tensor in _tensors(reads):
            if tensor.is_cuda:
                tensor.record_stream(cuda_stream)


def _cuda_mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    # Either may be of another stream, or the later one.
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
def streams_for(device: torch.device, overlaps: bool) -> ScheduleStreams:
    """The streams of one device, shared by all its layers."""
    if device.type == "cuda":
        return DeviceStreams(device) if overlaps else InlineDeviceStreams(device)
    return ThreadStreams() if overlaps else InlineStreams()


# Ranges for profilers: what a task computes, issues or waits for stands under its name.


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


# What the thread that issues a pass takes for each task, where a device runs them later.


class Issuing:
    """One pass's. A task lasts until the next one begins: what lies between them, waits for other
    streams among it, is the host's too. What it takes to look is not counted."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, float]] = []
        self._aside_s = 0.0

    def begins(self, position: int) -> None:
        self._begun.append((position, self._now()))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside the block takes no time."""
        begin_s = time.perf_counter()
        yield
        self._aside_s += time.perf_counter() - begin_s

    def seconds(self) -> list[tuple[int, float]]:
        """Of each task, by position, when the last one has ended."""
        ends = [*(begun_s for _, begun_s in self._begun[1:]), self._now()]
        return [(position, end - begun) for (position, begun), end in zip(self._begun, ends)]

    def _now(self) -> float:
        return time.perf_counter() - self._aside_s


# The thread in which a process plans, beside the streams in which its layers run.


def worker() -> Executor:
    """One thread for all models of this process: what it is given is done in order."""
    return _worker_of(os.getpid())


@functools.cache
def _worker_of(process: int) -> Executor:
    """The child of a fork has none of its parent's threads."""
    return ThreadPoolExecutor(1, "planning")
