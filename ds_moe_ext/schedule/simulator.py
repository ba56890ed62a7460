# SPDX-License-Identifier: Apache-2.0
"""Price a schedule: the executor's rule with seconds in place of work. Pure."""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_moe_ext.schedule.task import COMPUTE, HOST, INTER, INTRA, PARAM, Schedule, Stream, Task

ENDED_S = 1e-12  # of work left, which rounding may leave of a task that is done

Seconds = Callable[[int, Task], float]  # (rank, task) -> seconds, alone on its link
Peers = Callable[[int, Task], Sequence[int]]  # ranks that must all reach the task
Wire = Callable[[int, Task], str | None]  # link that the task's bytes cross, None for none
Crowding = Callable[[Task, Sequence[Task]], float]
"""How many times the seconds that a task takes alone, from what is under way on its rank, itself
among it."""


def alone(rank: int, task: Task) -> Sequence[int]:
    """Peers of a task that waits for nobody."""
    return (rank,)


def no_link(rank: int, task: Task) -> str | None:
    """Wire of tasks that never meet on one."""
    return None


def not_crowded(task: Task, under_way: Sequence[Task]) -> float:
    """Crowding where tasks slow each other on links only."""
    return 1.0


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task on every rank, seconds, ``[rank][position]``."""

    start_s: list[list[float]]
    end_s: list[list[float]]

    @property
    def makespan_s(self) -> float:
        return max((max(ends, default=0.0) for ends in self.end_s), default=0.0)


def simulate(
    schedule: Schedule,
    seconds_of: Seconds,
    *,
    num_ranks: int = 1,
    peers_of: Peers = alone,
    link_of: Wire = no_link,
    crowding_of: Crowding = not_crowded,
) -> Timeline:
    """Start every task as early as its stream, its inputs and its peers allow.

    All ranks run the same schedule. Tasks that are under way on one link share its rate equally;
    the others run at full speed, unless what is under way beside them on their rank slows them. A
    collective starts when its last peer is ready.

    Args:
        schedule: tasks in issue order.
        seconds_of: how long a task takes alone on its link.
        num_ranks: ranks that run it.
        peers_of: ranks (its own among them) that a task starts together with.
        link_of: the link a task occupies.
        crowding_of: by how much what is under way on a rank slows a task, besides shared links.

    Raises:
        ValueError: a task never starts, because a peer does not wait for it.
    """
    return _Simulation(
        schedule, seconds_of, num_ranks, peers_of, link_of, crowding_of=crowding_of
    ).run()


class _UnderWay(NamedTuple):
    """A task that has begun, on one rank."""

    rank: int
    position: int
    link: str | None  # that it occupies


class _Simulation:
    """An event queue over (rank, position); time jumps from one finished task to the next.

    After an end only those ranks are looked at that it may let go on: its own, and those of which a
    task was found to wait for it.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds_of: Seconds,
        num_ranks: int,
        peers_of: Peers,
        link_of: Wire,
        *,
        crowding_of: Crowding,
    ) -> None:
        self._tasks, self._ranks = schedule.tasks, range(num_ranks)
        self._seconds_of, self._peers_of, self._link_of = seconds_of, peers_of, link_of
        self._crowding_of = crowding_of
        self._start = [[math.nan] * len(self._tasks) for _ in self._ranks]
        self._end = [[math.nan] * len(self._tasks) for _ in self._ranks]
        streams = _streams(self._tasks)
        # What each stream of each rank has left to start, the next one last.
        self._queue = [[list(stream) for stream in streams.values()] for _ in self._ranks]
        self._busy = [[False] * len(streams) for _ in self._ranks]
        number = {stream: place for place, stream in enumerate(streams)}
        self._stream_of = [number[task.stream] for task in self._tasks]
        self._num_awaited = [[len(after) for after in schedule.after] for _ in self._ranks]
        self._followers: list[list[int]] = [[] for _ in self._tasks]
        for position, after in enumerate(schedule.after):
            for awaited in after:
                self._followers[awaited].append(position)
        self._held_up: list[set[int]] = [set() for _ in self._ranks]  # ranks, by each
        self._under_way: list[_UnderWay] = []
        self._left: list[float] = []  # seconds of work left of each of them
        self._now = 0.0

    def run(self) -> Timeline:
        ended = set(self._ranks)
        while True:
            self._start_what_can(ended)
            if not self._left:
                self._check_that_all_ran()
                return Timeline(self._start, self._end)
            ended = self._advance()

    def _check_that_all_ran(self) -> None:
        stuck = [
            f"{self._tasks[stream[-1]]} of rank {rank}"
            for rank in self._ranks
            for stream in self._queue[rank]
            if stream
        ]
        if stuck:
            raise ValueError(
                f"{', '.join(stuck)} would wait forever; give peers that all wait for each other"
            )

    def _ready(self, rank: int, position: int) -> bool:
        stream = self._stream_of[position]
        queue = self._queue[rank][stream]
        in_turn = bool(queue) and queue[-1] == position
        return in_turn and not self._busy[rank][stream] and not self._num_awaited[rank][position]

    def _start_what_can(self, ended: set[int]) -> None:
        again = ended.union(*(self._held_up[rank] for rank in ended))
        for rank in ended:
            self._held_up[rank].clear()
        for rank in sorted(again):
            for stream in self._queue[rank]:
                if stream and self._ready(rank, stream[-1]):
                    self._start_with_peers(rank, stream[-1])

    def _start_with_peers(self, rank: int, position: int) -> None:
        peers = self._peers_of(rank, self._tasks[position])
        for peer in peers:
            if not self._ready(peer, position):
                self._held_up[peer].add(rank)
                return
        for peer in peers:
            self._begin(peer, position)

    def _begin(self, rank: int, position: int) -> None:
        task, stream = self._tasks[position], self._stream_of[position]
        self._queue[rank][stream].pop()
        self._busy[rank][stream] = True
        self._start[rank][position] = self._now
        self._under_way.append(_UnderWay(rank, position, self._link_of(rank, task)))
        self._left.append(self._seconds_of(rank, task))

    def _advance(self) -> set[int]:
        """To the end of the next task; the ranks where one ends."""
        slowed = self._slowed()
        step = min(map(operator.mul, self._left, slowed))
        self._now += step
        left = [before - step / by for before, by in zip(self._left, slowed)]
        ended = [each for each, after in zip(self._under_way, left) if after <= ENDED_S]
        self._under_way = [each for each, after in zip(self._under_way, left) if after > ENDED_S]
        self._left = [after for after in left if after > ENDED_S]
        for rank, position, _ in ended:
            self._end[rank][position] = self._now
            self._busy[rank][self._stream_of[position]] = False
            for follower in self._followers[position]:
                self._num_awaited[rank][follower] -= 1
        return {each.rank for each in ended}

    def _slowed(self) -> list[float]:
        """Times the seconds alone of each task under way: it shares its link with all that are on
        it, and its rank with all that are there."""
        links = [each.link for each in self._under_way]
        shared = [1.0 if link is None else float(links.count(link)) for link in links]
        if self._crowding_of is not_crowded:
            return shared
        beside: dict[int, list[Task]] = defaultdict(list)
        for rank, position, _ in self._under_way:
            beside[rank].append(self._tasks[position])
        return [
            by * self._crowding_of(self._tasks[position], beside[rank])
            for by, (rank, position, _) in zip(shared, self._under_way)
        ]


def _streams(tasks: Sequence[Task]) -> dict[Stream, list[int]]:
    """What each stream does, by position, the last one first."""
    streams: dict[Stream, list[int]] = defaultdict(list)
    for position in reversed(range(len(tasks))):
        streams[tasks[position].stream].append(position)
    return streams


# Timelines as Chrome/Perfetto JSON: open the file at ui.perfetto.dev or chrome://tracing. Pure.


STREAMS = tuple(stream.name for stream in (PARAM, COMPUTE, INTER, INTRA, HOST))
"""Those of weights and of rows on either side of the one that computes; the host's; others last."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Box:
    """One task on the timeline."""

    name: str  # as profilers show it: ``Task.label``
    rank: int  # row group
    stream: str  # row
    start_s: float  # seconds from the origin
    end_s: float  # likewise
    category: str  # kind of task, for colours
    # of the boxes of its rank, the position of the one that it waited for last
    bound_by: int | None = None
    reported: Mapping[str, str] = field(default_factory=dict)  # more, by name


@dataclass(frozen=True)
class Count:
    """Numbers that hold from a moment on, until the next of this name."""

    name: str  # what is counted
    rank: int  # where
    at_s: float  # seconds from the origin
    numbers: Mapping[str, int]  # by what they are of


def in_order(streams: Iterable[str]) -> list[str]:
    seen = dict.fromkeys(streams)
    return [stream for stream in STREAMS if stream in seen] + [
        stream for stream in seen if stream not in STREAMS
    ]


def chrome_trace(
    boxes: Iterable[Box],
    ranks: Mapping[int, str] = MappingProxyType({}),
    counts: Iterable[Count] = (),
) -> str:
    """Trace Event Format: a process a rank, a thread a stream, microseconds.

    Args:
        boxes: of the timeline.
        ranks: names of row groups, where they have some.
        counts: of rows and the like.
    """
    boxes = list(boxes)
    streams = {
        stream: number for number, stream in enumerate(in_order(box.stream for box in boxes))
    }
    events = [*_names(boxes, streams, ranks)]
    events += [_drawn(box, streams[box.stream]) for box in boxes]
    events += _arrows(boxes, streams)
    events += [
        {"ph": "C", "name": c.name, "pid": c.rank, "ts": c.at_s * 1e6, "args": dict(c.numbers)}
        for c in counts
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(
    boxes: Sequence[Box], streams: Mapping[str, int], ranks: Mapping[int, str]
) -> Iterator[Event]:
    """Of processes and threads, and the order in which they stand."""
    for rank in sorted({box.rank for box in boxes} | ranks.keys()):
        yield _name("process_name", rank, name=ranks.get(rank, f"rank {rank}"))
        yield _name("process_sort_index", rank, sort_index=rank)
    for rank, stream in dict.fromkeys((box.rank, box.stream) for box in boxes):
        yield {**_name("thread_name", rank, name=stream), "tid": streams[stream]}
        yield {
            **_name("thread_sort_index", rank, sort_index=streams[stream]),
            "tid": streams[stream],
        }


def _name(what: str, rank: int, **reported: object) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "args": reported}


def _drawn(box: Box, thread: int) -> Event:
    return {
        "ph": "X",
        "name": box.name,
        "cat": box.category,
        "pid": box.rank,
        "tid": thread,
        "ts": box.start_s * 1e6,
        "dur": max(box.end_s - box.start_s, 0.0) * 1e6,
        "args": dict(box.reported),
    }


def _arrows(boxes: Sequence[Box], streams: Mapping[str, int]) -> Iterator[Event]:
    """From each task to those that waited for it last."""
    of_rank: dict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        of_rank[box.rank].append(box)
    number = 0
    for box in boxes:
        if box.bound_by is None:
            continue
        by, number = of_rank[box.rank][box.bound_by], number + 1
        # In its middle: at its very end a viewer finds the next one.
        middle_s = min((by.start_s + by.end_s) / 2, box.start_s)
        alike = {"name": "waits", "cat": "waits", "id": number, "pid": box.rank}
        yield {"ph": "s", **alike, "tid": streams[by.stream], "ts": middle_s * 1e6}
        yield {"ph": "f", "bp": "e", **alike, "tid": streams[box.stream], "ts": box.start_s * 1e6}
