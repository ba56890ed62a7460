# SPDX-License-Identifier: Apache-2.0
"""Lanes obey the rule of time: a task starts when the task before it in its lane and every task
that writes what it reads have finished; and it takes as long as the simulator says."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.moe.expert import Local
from ds_moe_ext.schedule.executor import (
    CudaLanes,
    InlineLanes,
    Lanes,
    Steps,
    ThreadLanes,
)
from ds_moe_ext.schedule.orders import stage_major
from ds_moe_ext.schedule.program import Program
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.stages import Crew
from ds_moe_ext.schedule.task import (
    COMBINE,
    COMPUTE,
    DISPATCH,
    EXPERT,
    HOST,
    PARAM,
    Kind,
    Lane,
    Op,
    Schedule,
    Span,
    Task,
    Value,
    spans,
)
from ds_moe_ext.schedule.watch import BrokenOff
from tests.flows import LANES, before, flow, flows

THREADS = ThreadLanes()  # shared, as layers share them; every test leaves them usable
BOTH = pytest.mark.parametrize("lanes", [InlineLanes(), THREADS], ids=["inline", "threads"])
PATIENCE_S = 20.0


class Log:
    """What began and ended, in order: a list's append is atomic."""

    def __init__(self, pauses: Sequence[float] = ()) -> None:
        self.events: list[tuple[str, int]] = []
        self._pauses = pauses

    def __call__(self, position: int) -> None:
        self.events.append(("begin", position))
        if self._pauses:
            time.sleep(self._pauses[position])
        self.events.append(("end", position))

    def order(self, what: str) -> list[int]:
        return [position for event, position in self.events if event == what]


@BOTH
@settings(deadline=None, max_examples=50)
@given(schedule=flows(), data=st.data())
def test_every_dependency_is_respected(
    lanes: Lanes, schedule: Schedule, data: st.DataObject
) -> None:
    size = len(schedule.tasks)
    pauses = data.draw(st.lists(st.sampled_from((0, 0, 1e-3)), min_size=size, max_size=size))
    log = Log(pauses)
    lanes.run(schedule, log)
    assert sorted(log.order("end")) == list(range(size))  # each once, all when execute returns
    for position, waits in enumerate(before(schedule)):
        begin = log.events.index(("begin", position))
        assert all(log.events.index(("end", other)) < begin for other in waits)


@given(flows())
def test_inline_lanes_run_in_issue_order_in_the_callers_thread(schedule: Schedule) -> None:
    seen: list[tuple[int, int]] = []
    InlineLanes().run(schedule, lambda i: seen.append((i, threading.get_ident())))
    assert seen == [(i, threading.get_ident()) for i in range(len(schedule.tasks))]


def test_lanes_run_at_the_same_time() -> None:
    """Three tasks that each wait for the other two: only three lanes can pass."""
    meeting = threading.Barrier(3)
    THREADS.run(flow("a compute", "b inter", "c param"), lambda i: _meet(meeting))
    assert not meeting.broken


def _meet(meeting: threading.Barrier) -> None:
    meeting.wait(PATIENCE_S)


def test_what_one_lane_wrote_the_other_sees() -> None:
    schedule = flow(
        "t0 compute", *(f"t{i} {('inter', 'compute')[i % 2]} t{i - 1}" for i in range(1, 40))
    )
    total = [0]

    def add(position: int) -> None:
        total[0] += position

    for _ in range(20):
        THREADS.run(schedule, add)
    assert total == [20 * sum(range(40))]


class Broken(Exception):
    """Raised by a task."""


def failing(at: Iterable[int], then: Callable[[int], None]) -> Callable[[int], None]:
    at = set(at)

    def run(position: int) -> None:
        if position in at:
            raise Broken(position)
        then(position)

    return run


@BOTH
@settings(deadline=None, max_examples=50)
@given(schedule=flows(), data=st.data())
def test_nothing_hangs_whatever_fails(
    lanes: Lanes, schedule: Schedule, data: st.DataObject
) -> None:
    nothing_hangs(lanes, schedule, data)


def nothing_hangs(lanes: Lanes, schedule: Schedule, data: st.DataObject) -> None:
    """Whatever tasks fail: the first one's error comes out, and nothing runs that needs them."""
    positions = st.integers(0, len(schedule.tasks) - 1)
    broken = data.draw(st.sets(positions, min_size=1))
    log = Log()
    caught: list[Any] = []

    def call() -> None:
        try:
            lanes.run(schedule, failing(broken, log))
        except Broken as error:
            caught.append(error.args)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(PATIENCE_S)
    assert not caller.is_alive()
    assert caught == [(min(broken),)]
    # Nothing ran that reads, however indirectly, what was never written.
    lost = set(broken)
    for position, after in enumerate(schedule.after):
        if lost & set(after):
            lost.add(position)
    assert not lost & set(log.order("begin"))


@BOTH
def test_a_default_device_is_taken_to_the_lanes(lanes: Lanes) -> None:
    schedule = flow("a compute", "b inter a")
    seen: list[str] = []
    with torch.device("meta"):
        lanes.run(schedule, lambda position: seen.append(torch.ones(1).device.type))
    lanes.run(schedule, lambda position: seen.append(torch.ones(1).device.type))
    assert seen == ["meta", "meta", "cpu", "cpu"]


@BOTH
def test_autocast_is_taken_to_the_lanes(lanes: Lanes) -> None:
    schedule = flow("a compute", "b inter a")
    a = torch.randn(4, 4)
    seen: list[tuple[bool, torch.dtype]] = []

    def run(position: int) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), (a @ a).dtype))

    lanes.run(schedule, run)
    with torch.autocast("cpu", torch.bfloat16):
        lanes.run(schedule, run)
        with torch.autocast("cpu", enabled=False):
            lanes.run(schedule, run)
    with torch.autocast("cpu", torch.float16):
        lanes.run(schedule, run)
    lanes.run(schedule, run)
    assert seen == [
        *[(False, torch.float32)] * 2,
        *[(True, torch.bfloat16)] * 2,
        *[(False, torch.float32)] * 2,
        *[(True, torch.float16)] * 2,
        *[(False, torch.float32)] * 2,
    ]


@BOTH
def test_marks_measure_seconds(lanes: Lanes) -> None:
    marks: dict[int, Any] = {}

    def run(position: int) -> None:
        time.sleep(0.01)
        marks[position] = lanes.mark()

    lanes.run(flow("a compute", "b inter a"), run)
    assert 0.01 <= lanes.seconds_between(marks[0], marks[1]) < PATIENCE_S
    assert lanes.seconds_between(marks[1], marks[0]) == -lanes.seconds_between(marks[0], marks[1])


# Work that pauses.


class Told(list[str]):
    """What was done, and in which thread: the caller's or another."""

    def __init__(self) -> None:
        self.caller = threading.get_ident()

    def add(self, what: str) -> None:
        self.append(f"{what} {'here' if threading.get_ident() == self.caller else 'there'}")

    def pausing(self, error: Exception | None = None) -> Steps[None]:
        self.add("first")
        yield
        self.add("rest")
        if error is not None:
            raise error


def test_the_caller_begins_and_who_joins_ends() -> None:
    told = Told()
    begun = THREADS.begin(PARAM, told.pausing())
    assert told == ["first here"]
    for _ in range(2):
        THREADS.join([begun])
        assert told == ["first here", "rest here"]


def test_a_lane_that_is_busy_does_all_in_its_order() -> None:
    told, goes_on = Told(), threading.Event()
    before = THREADS.submit(PARAM, lambda: told.add(f"before {goes_on.wait(PATIENCE_S)}"), ())
    begun = THREADS.begin(PARAM, told.pausing())
    assert not told
    goes_on.set()
    THREADS.join([begun])
    assert told == ["before True there", "first there", "rest there"]
    THREADS.join([before])
    assert [THREADS.begin(PARAM, told.pausing()) and told[-1]] == ["first here"], "it is done now"


def test_work_that_pauses_is_behind_a_schedule_of_its_lane() -> None:
    """What is begun amid a schedule does not overtake that lane's tasks."""
    told, goes_on = Told(), threading.Event()
    a, b = (Task(Op("a", lane), 0, Span(0, 1), (), ()) for lane in (PARAM, COMPUTE))
    events = []

    def do(position: int) -> None:
        if position == 0:
            told.add(f"task {goes_on.wait(PATIENCE_S)}")
        else:
            events.append(THREADS.begin(PARAM, told.pausing()))
            goes_on.set()

    THREADS.run(Schedule((a, b), (), ()), do)
    THREADS.join(events)
    assert told == ["task True there", "first there", "rest there"]


def test_what_fails_after_its_pause_reaches_everyone_who_joins() -> None:
    told = Told()
    begun = THREADS.begin(PARAM, told.pausing(Broken()))
    for _ in range(2):
        with pytest.raises(Broken):
            THREADS.join([begun])
    assert told == ["first here", "rest here"]


def test_an_exchange_that_is_broken_off_tells_of_what_failed() -> None:
    failed = THREADS.begin(PARAM, Told().pausing(Broken()))
    with pytest.raises(Broken):
        THREADS.join([failed])
    with pytest.raises(Broken):
        THREADS.join([THREADS.begin(PARAM, Told().pausing(BrokenOff())), failed])


# Streams, without a device: what is issued runs later, in threads in place of streams.


class FakeStream:
    """A queue of work, as ``torch.cuda.Stream`` is one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue = ThreadPoolExecutor(1, name)

    def issue(self, work: Callable[[], object]) -> None:
        self._queue.submit(work)

    def record_event(self) -> threading.Event:
        event = threading.Event()
        self.issue(event.set)
        return event

    def wait_event(self, event: threading.Event) -> None:
        self.issue(functools.partial(event.wait, PATIENCE_S))

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())


class FakeStreams(threading.local):
    """Of one device, whose caller has a stream; each thread issues where it has entered."""

    caller = FakeStream("caller")
    made: ClassVar[dict[Lane, FakeStream]] = {}
    _current: FakeStream | None = None

    def current(self) -> FakeStream:
        return self._current or self.caller

    def made_for(self, lane: Lane) -> FakeStream:
        return self.made.setdefault(lane, FakeStream(lane.name))

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def enter(self, stream: FakeStream) -> None:
        self._current = stream


STREAMS = FakeStreams()
ON_STREAMS = CudaLanes(torch.device("cpu"), STREAMS)


@pytest.mark.parametrize("lanes", [InlineLanes(), ON_STREAMS], ids=["inline", "streams"])
def test_other_lanes_do_not_pause(lanes: Lanes) -> None:
    told = Told()
    lanes.join([lanes.begin(PARAM, told.pausing())])
    assert told == ["first here", "rest here"]


WITH_HOST = (*LANES, "host")
WHOLE = Span(0, 1)


@settings(deadline=None, max_examples=50)
@given(schedule=flows(lanes=WITH_HOST), data=st.data())
def test_streams_and_the_host_beside_them_respect_every_dependency(
    schedule: Schedule, data: st.DataObject
) -> None:
    """A task of the host comes after what it needs is issued; one of a device that needs it is
    issued after it, and runs after what else it needs."""
    size = len(schedule.tasks)
    pauses = data.draw(st.lists(st.sampled_from((0, 0, 1e-3)), min_size=size, max_size=size))
    issued, done = Log(), Log(pauses)
    is_of_host = [task.lane == HOST for task in schedule.tasks]

    def do(position: int) -> None:
        issued(position)
        lane = schedule.tasks[position].lane
        assert STREAMS.current().name == ("caller" if lane == COMPUTE else lane.name)
        if is_of_host[position]:
            done(position)
        else:
            STREAMS.current().issue(functools.partial(done, position))

    ON_STREAMS.run(schedule, do)
    end = STREAMS.caller.record_event()  # the caller's next work
    assert end.wait(PATIENCE_S)
    assert sorted(done.order("end")) == list(range(size))
    for position, waits in enumerate(before(schedule)):
        for other in waits:
            log = issued if is_of_host[position] or is_of_host[other] else done
            begin = log.events.index(("begin", position))
            assert log.events.index(("end", other)) < begin
    for position in range(size):
        if is_of_host[position]:  # its own work, and not only its being issued, comes first
            readers = (p for p, waits in enumerate(before(schedule)) if position in waits)
            end_of_it = done.events.index(("end", position))
            assert all(end_of_it < done.events.index(("begin", p)) for p in readers)


def test_the_host_works_in_a_thread_of_its_own_while_the_caller_issues() -> None:
    schedule = flow("a compute", "b host a", "c inter a", "d compute b c", "e host b")
    threads: dict[int, int] = {}
    goes_on = threading.Event()

    def do(position: int) -> None:
        threads[position] = threading.get_ident()
        if position == 1:
            assert goes_on.wait(PATIENCE_S)  # c is issued meanwhile
        if position == 2:
            goes_on.set()

    ON_STREAMS.run(schedule, do)
    here = threading.get_ident()
    assert [threads[position] == here for position in range(5)] == [True, False, True, True, False]
    assert threads[1] == threads[4]
    latest = threads[4]
    ON_STREAMS.run(schedule, do)
    assert threads[4] == latest  # it stays


def test_a_program_runs_with_the_host_beside_it() -> None:
    """Forward and backward; the host's task makes nothing that has a gradient."""
    x, y, told = (Value(kind, 0, WHOLE) for kind in (X, Y, Kind("told", has_gradient=False)))
    asked = Task(Op("ask", HOST), 0, WHOLE, (x,), (told,))
    made = Task(EXPERT, 0, WHOLE, (x, told), (y,))
    forward = Schedule((asked, made), (x,), (y,))
    threads: list[int] = []

    def ask(x: Tensor) -> tuple[int]:
        threads.append(threading.get_ident())
        return (len(x),)

    stages = {asked.op: Local(ask, graded=(False,)), EXPERT: Local(lambda x, told: (x * told,))}
    program = Program(forward, forward.reversed(), Crew(stages), ON_STREAMS)
    given = torch.ones(5, requires_grad=True)
    (out,) = program(given)
    out.sum().backward()
    assert out.tolist() == [5.0] * 5
    assert given.grad is not None
    assert given.grad.tolist() == [5.0] * 5
    assert threads and threading.get_ident() not in threads


def test_the_hosts_thread_has_the_callers_state() -> None:
    seen: list[tuple[str, bool]] = []

    def do(position: int) -> None:
        seen.append((torch.ones(1).device.type, torch.is_grad_enabled()))

    with torch.device("meta"), torch.no_grad():
        ON_STREAMS.run(flow("a compute", "b host a"), do)
    assert seen == [("meta", False)] * 2


@settings(deadline=None, max_examples=50)
@given(schedule=flows(lanes=WITH_HOST), data=st.data())
def test_nothing_hangs_beside_the_streams_whatever_fails(
    schedule: Schedule, data: st.DataObject
) -> None:
    nothing_hangs(ON_STREAMS, schedule, data)


# What the simulator predicts is what happens.

GATHER = Op("gather", PARAM)
X = Kind("x", by_token=True)
COPIES = Kind("copies")
ARRIVED = Kind("arrived", by_token=True)
COMPUTED = Kind("computed", by_token=True)
Y = Kind("y", by_token=True)
W = Kind("w", by_token=True)

SECONDS = {
    ("gather", False): 0.030,
    ("dispatch", False): 0.020,
    ("expert", False): 0.030,
    ("combine", False): 0.025,
    ("gather", True): 0.040,
    ("dispatch", True): 0.025,
    ("expert", True): 0.040,
    ("combine", True): 0.020,
}
"""Of each op, forward and backward, on one of ``degree`` spans."""


def seconds_of(rank: int, task: Task) -> float:
    return SECONDS[task.op.name, bool(task.adjoint_of)]


@dataclass(frozen=True)
class Paced:
    """Doubles its first read, and takes a given time over it. Other reads have gradients of one."""

    op: Op

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        self._hold(False)
        return (reads[0] * 2,), reads[1:]

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        self._hold(True)
        return (grads[0] * 2, *map(torch.ones_like, saved))

    def recut(self, span: Span, pieces: Sequence[Any]) -> tuple[Any, ...]:
        return pieces[0][1]

    def _hold(self, is_backward: bool) -> None:
        time.sleep(SECONDS[self.op.name, is_backward])


def paced_layer(num_chunks: int, degree: int) -> Schedule:
    """Rows out, computed and back in chunks, while copies of the weights arrive in a third lane."""
    whole = Span(0, num_chunks)
    x, y, w, copies = Value(X, 0, whole), Value(Y, 0, whole), Value(W, 0, whole), Value(COPIES, 0)
    tasks = []
    for s in spans(num_chunks, degree):
        arrived, computed = Value(ARRIVED, 0, s), Value(COMPUTED, 0, s)
        tasks += [
            Task(DISPATCH, 0, s, (Value(X, 0, s),), (arrived,)),
            Task(EXPERT, 0, s, (arrived, copies), (computed,)),
            Task(COMBINE, 0, s, (computed,), (Value(Y, 0, s),)),
        ]
    gather = Task(GATHER, 0, whole, (w,), (copies,))
    ordered = stage_major(tasks, (DISPATCH, EXPERT, COMBINE))
    return Schedule((gather, *ordered), (x, w), (y,))


STAGES: Mapping[Op, Paced] = {op: Paced(op) for op in (GATHER, DISPATCH, EXPERT, COMBINE)}


def executed_s(program: Program) -> tuple[float, float]:
    """Seconds of one forward and one backward pass."""
    x, w = (torch.ones(12, 1, requires_grad=True) for _ in range(2))
    start = time.perf_counter()
    (y,) = program(x, w)
    middle = time.perf_counter()
    y.sum().backward()
    end = time.perf_counter()
    assert y.unique().tolist() == [8.0]  # doubled three times
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.unique().tolist() == [8.0]
    num_experts_run = sum(task.op == EXPERT for task in program.backward.tasks)
    assert w.grad.unique().tolist() == [2.0 * num_experts_run]
    return middle - start, end - middle


DEGREES = [(1, 1), (4, 4), (3, 2)]


@pytest.mark.parametrize(("forward_degree", "backward_degree"), DEGREES)
def test_the_same_schedule_takes_the_simulated_time(
    forward_degree: int, backward_degree: int
) -> None:
    num_chunks = max(forward_degree, 6 if backward_degree == 2 else backward_degree)
    forward = paced_layer(num_chunks, forward_degree)
    backward = forward.backward_cut_as(paced_layer(num_chunks, backward_degree))
    program = Program(forward, backward, Crew(STAGES), THREADS, num_chunks)
    simulated = [simulate(schedule, seconds_of).makespan_s for schedule in (forward, backward)]
    assert_takes(simulated, lambda: executed_s(program))


def assert_takes(simulated: Sequence[float], run: Callable[[], Sequence[float]]) -> None:
    """Within 10 %. A busy machine only ever adds: the best repetition counts, and ends it."""
    best = [float("inf")] * len(simulated)
    for _ in range(40):
        best = [min(pair) for pair in zip(best, run())]
        if all(abs(b / s - 1) <= 0.1 for b, s in zip(best, simulated)):
            return
    raise AssertionError(f"simulated {simulated} s, executed {best} s")
