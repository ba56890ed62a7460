# SPDX-License-Identifier: Apache-2.0
"""Run a schedule on real lanes: the caller's thread, worker threads, or CUDA streams.

``Lanes`` are in-order queues that wait for each other as ``Schedule.awaits`` says. ``InlineLanes``
do all in the caller's thread, ``ThreadLanes`` have a thread for each lane, ``CudaLanes`` a stream;
``lanes_for`` gives those of a device, which all its layers share. What is queued apart from a
schedule (``submit``, ``begin``) comes behind what its lane was given before.
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

from ds_moe_ext.schedule.task import COMPUTE, HOST, Lane, Schedule
from ds_moe_ext.schedule.watch import BrokenOff

Event = Any  # what a lane gives for a submitted task; only the same lanes look inside
Mark = Any  # a moment in a lane; only ``seconds_between`` of the same lanes looks inside


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


class Lanes(Protocol):
    """In-order queues that can wait for each other."""

    has_threads: bool  # what the host works out in one lane does not keep it from issuing another's
    issues: bool  # a device runs what a task has issued
    is_late: bool  # in a lane of its own, so that what it reads may have been freed by then

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        """Do every task, by its position, and make the caller's next work see the results.

        Of errors the first one in issue order is raised; no task runs that waits for one that did
        not end well.
        """
        ...

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Event]) -> Event:
        """Queue ``work`` behind the lane's earlier tasks and behind ``after``."""
        ...

    def begin(self, lane: Lane, steps: Steps[None], *, may_pause: bool = True) -> Event:
        """The same of work in steps. Where it may pause, once, the caller may do it up to there,
        and the rest when somebody joins."""
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
    issues = False
    is_late = False

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        for position in range(len(schedule.tasks)):
            do(position)

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Event]) -> Event:
        work()
        return None

    def begin(self, lane: Lane, steps: Steps[None], *, may_pause: bool = True) -> Event:
        return self.submit(lane, functools.partial(to_the_end, steps), ())

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
    stream on CUDA, and what stands between calls and torch, as a default device does."""

    records: bool  # whether autograd does
    infers: bool  # inference mode is on
    # device, dtype and whether it is on, of each kind of device
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    stream: torch.cuda.Stream | None  # the current one; None without CUDA
    modes: tuple[overrides.TorchFunctionMode, ...]  # torch function modes, the outermost first

    @classmethod
    def of_caller(cls) -> Carried:
        has_cuda = torch.cuda.is_initialized()
        devices = ("cpu", "cuda") if has_cuda else ("cpu",)
        autocasts = (
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices
        )
        stream = torch.cuda.current_stream() if has_cuda else None
        modes = tuple(overrides._get_current_function_mode_stack())
        infers = torch.is_inference_mode_enabled()
        return cls(torch.is_grad_enabled(), infers, tuple(autocasts), stream, modes)

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
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)


@dataclass(eq=False)
class _ThreadRun:
    """A schedule that several threads do, each its lane."""

    schedule: Schedule  # which
    do: Callable[[int], None]  # a task, by its position
    # of the tasks that another lane waits for: locked until they have ended
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

    def raise_first(self) -> None:
        """When all lanes are done: of errors, the first one in issue order."""
        if self.errors:
            raise _first([self.errors[position] for position in sorted(self.errors)])


class Workers:
    """A thread for each lane that asked for one; they stay."""

    def __init__(self) -> None:
        self._of: dict[Lane, ThreadPoolExecutor] = {}
        self._latest: dict[Lane, Future] = {}

    def submit(self, lane: Lane, work: Callable[..., None], *arguments: Any) -> Future:
        """Queue work behind what the lane was given before."""
        if lane not in self._of:
            self._of[lane] = ThreadPoolExecutor(
                1, lane.name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
            )
        self._latest[lane] = self._of[lane].submit(work, *arguments)
        return self._latest[lane]

    def are_done(self, lane: Lane) -> bool:
        """Whether a lane has ended all that it was given."""
        return lane not in self._latest or self._latest[lane].done()


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


class ThreadLanes(InlineLanes):
    """Computation in the caller's thread, a worker thread for any other lane. For CPU hosts: a
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
            self._workers.submit(lane, work, positions)
            for lane, positions in schedule.by_lane.items()
            if lane != COMPUTE
        ]
        shared.run(schedule.by_lane.get(COMPUTE, ()))
        for other in others:
            other.result()
        shared.raise_first()

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Future]) -> Future:
        after = tuple(after)
        state = Carried.of_caller()

        def body() -> None:
            for event in after:
                event.result()  # raises here what the earlier task raised
            with state.entered():
                work()

        return self._workers.submit(lane, body)

    def begin(self, lane: Lane, steps: Steps[None], *, may_pause: bool = True) -> Future:
        # To wake a thread takes longer than to post a message or two. In the order of the lane, in
        # which other ranks expect them.
        if may_pause and self._workers.are_done(lane):
            return _Begun(steps)
        return self.submit(lane, functools.partial(to_the_end, steps), ())

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

    def made_for(self, lane: Lane) -> Any: ...

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        """The thread that calls issues its work there, inside the block."""
        ...

    def enter(self, stream: Any) -> None:
        """From now on, in such a block of the same device."""
        ...


@dataclass(frozen=True)
class CudaStreams:
    device: torch.device

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # of a device it asks for longer

    def made_for(self, lane: Lane) -> torch.cuda.Stream:
        # Blocks of a stream that goes first are the next to find room, however many of an expert's
        # wait; streams of the default priority have 0.
        return torch.cuda.Stream(self.device, priority=-1 if lane.sends else 0)

    def entered(self, stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(stream)
        return context

    def enter(self, stream: Any) -> None:
        torch.cuda.set_stream(stream)


class _Issued(NamedTuple):
    """Tasks of a schedule, by position, as streams need to know them."""

    by_caller: tuple[int, ...]  # all but those of lane HOST
    # of each lane but the caller's. These, and not the streams, are what a run waits for: tasks may
    # have begun more behind them.
    last: tuple[int, ...]
    awaited: frozenset[int]  # those whose ends somebody waits for

    @classmethod
    def of(cls, schedule: Schedule) -> _Issued:
        by_caller = tuple(p for p, task in enumerate(schedule.tasks) if task.lane != HOST)
        last = tuple(own[-1] for lane, own in schedule.by_lane.items() if lane != COMPUTE)
        return cls(by_caller, last, frozenset(last).union(*schedule.awaits))


class _Run(NamedTuple):
    """A schedule on streams."""

    schedule: Schedule  # which
    do: Callable[[int], None]  # a task, by its position
    make: Streams  # of the streams
    caller: Any  # the stream of who calls
    streams: Mapping[Lane, Any]  # of each lane
    awaited: frozenset[int]  # see ``_Issued``
    ends: dict[int, Any]  # of those, by position

    def issue(self, positions: Iterable[int]) -> None:
        """Tasks in order; to be called where the caller's stream is the current one."""
        at = self.caller
        try:
            for position in positions:
                stream = self.streams[self.schedule.tasks[position].lane]
                for other in self.schedule.awaits[position]:
                    stream.wait_event(self.ends[other])
                if stream is not at:
                    self.make.enter(stream)
                    at = stream
                self.do(position)
                if position in self.awaited:
                    self.ends[position] = stream.record_event()
        finally:
            if at is not self.caller:
                self.make.enter(self.caller)


class CudaLanes:
    """Computation in the caller's stream, a stream for any other lane. Work is issued by the
    caller's thread and runs on the device; what the host itself works out (lane HOST) by a worker
    thread, so that the caller's goes on issuing."""

    has_threads = False
    issues = is_late = True

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._make: Streams = streams or CudaStreams(device)
        self._streams: dict[Lane, Any] = {}
        self._last_caller: Any = None
        self._workers = Workers()

    def run(self, schedule: Schedule, do: Callable[[int], None]) -> None:
        caller = self._make.current()
        streams = {
            lane: caller if lane == COMPUTE else self._stream(lane) for lane in schedule.by_lane
        }
        issued = schedule.once(_Issued.of)
        run = _Run(schedule, do, self._make, caller, streams, issued.awaited, {})
        others = [stream for stream in streams.values() if stream is not caller]
        if not others:
            run.issue(issued.by_caller)
            return
        self._let_follow(others, caller)
        try:
            with self._make.entered(caller):  # once, for its device: it is the current one
                if HOST in schedule.by_lane:
                    self._run_beside(issued, run)
                else:
                    run.issue(issued.by_caller)
        except BaseException:
            with suppress(RuntimeError):  # of a device that is lost
                for stream in others:  # who goes on may get what they have yet to read
                    caller.wait_stream(stream)
            raise
        for position in issued.last:
            caller.wait_event(run.ends[position])

    def _let_follow(self, streams: Iterable[Any], caller: Any) -> None:
        """They come behind what the caller's has to do: from there come inputs, and there was read
        what may be freed by now. So was it by the caller before, where that was another one."""
        ends = [caller.record_event()]
        if self._last_caller is not None and self._last_caller != caller:
            ends.append(self._last_caller.record_event())
        self._last_caller = caller
        for stream in streams:
            for end in ends:
                stream.wait_event(end)

    def _run_beside(self, issued: _Issued, run: _Run) -> None:
        """The tasks of lane HOST in the worker thread, all others in the caller's.

        Where one thread needs what the other does, it waits until that is issued or worked out:
        then the events are there for which the streams wait. So what a task of lane HOST reads on
        the host is known, and what it does on the device comes behind what wrote it.
        """
        state, of_host = Carried.of_caller(), run.schedule.by_lane[HOST]
        shared = _ThreadRun(run.schedule, lambda position: run.issue((position,)))

        def work() -> None:
            with state.entered():
                shared.run(of_host)

        beside = self._workers.submit(HOST, work)
        shared.run(issued.by_caller)
        beside.result()
        shared.raise_first()

    def submit(
        self, lane: Lane, work: Callable[[], None], after: Iterable[torch.cuda.Event]
    ) -> torch.cuda.Event:
        stream = self._stream(lane)
        # The region's inputs come from the caller's stream, whatever else the task waits for.
        stream.wait_stream(self._make.current())
        for event in after:
            stream.wait_event(event)
        with self._make.entered(stream):
            work()
            event = stream.record_event()
        return event

    def begin(self, lane: Lane, steps: Steps[None], *, may_pause: bool = True) -> torch.cuda.Event:
        return self.submit(lane, functools.partial(to_the_end, steps), ())

    def _stream(self, lane: Lane) -> Any:
        if lane not in self._streams:
            self._streams[lane] = self._make.made_for(lane)
        return self._streams[lane]

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
        # the allocator could hand its memory to the writer's stream while the reader still runs.
        stream: Any = self._make.current()
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
    lanes among it, is the host's too. What it takes to look is not counted."""

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


# The thread in which a process plans, beside the lanes in which its layers run.


def worker() -> Executor:
    """One thread for all models of this process: what it is given is done in order."""
    return _worker_of(os.getpid())


@functools.cache
def _worker_of(process: int) -> Executor:
    """The child of a fork has none of its parent's threads."""
    return ThreadPoolExecutor(1, "planning")
