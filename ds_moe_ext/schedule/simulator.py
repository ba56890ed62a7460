# SPDX-License-Identifier: Apache-2.0
"""Price a schedule: the executor's rule with seconds in place of work. Pure."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from ds_moe_ext.schedule.task import COMPUTE, HOST, INTER, INTRA, PARAM, Schedule, Task

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


@dataclass(slots=True, eq=False)
class _Sharing:
    """A task under way on one rank, which others may slow."""

    rank: int
    position: int
    link: str | None  # that it occupies
    left_s: float  # of work, alone, at ``since_s``
    since_s: float
    slowed: float = 1.0  # times its seconds alone, from then on


_UNDER_WAY, _ENDED = -1, -2  # in place of how many tasks one waits for


class _Simulation:
    """A heap of ends over (rank, position); time jumps from one to the next.

    A task waits for what it reads and for the one before it in its stream, and is ready once all of
    these have ended. Its end is known when it begins, unless it shares a link or is crowded: then
    it is put off, or brought forward, whenever another task begins or ends beside it, and its older
    ends in the heap no longer count.
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
        self._crowding_of, self._is_crowded = crowding_of, crowding_of is not not_crowded
        self._start = [[math.nan] * len(self._tasks) for _ in self._ranks]
        self._end = [[math.nan] * len(self._tasks) for _ in self._ranks]
        self._streams = schedule.by_stream.values()
        self._followers, num_awaited = schedule.once(_awaiting)
        self._num_awaited = [list(num_awaited) for _ in self._ranks]
        self._ends: list[tuple[float, int, int]] = []  # seconds, rank, position
        # Of those that may slow each other, by link; where ranks are crowded, all under None.
        self._beside: dict[str | None, dict[tuple[int, int], _Sharing]] = defaultdict(dict)
        self._group_of: dict[tuple[int, int], str | None] = {}
        self._now = 0.0

    def run(self) -> Timeline:
        first = [position for position, number in enumerate(self._num_awaited[0]) if not number]
        for rank in self._ranks:
            for position in first:
                self._start_with_peers(rank, position)
        while self._ends:
            end_s, rank, position = heappop(self._ends)
            awaited = self._num_awaited[rank]
            if awaited[position] != _UNDER_WAY or self._end[rank][position] != end_s:
                continue
            self._now, awaited[position] = end_s, _ENDED
            if (rank, position) in self._group_of:
                group = self._beside[self._group_of[rank, position]]
                del group[rank, position]
                self._put_off(group)
            for follower in self._followers[position]:
                awaited[follower] -= 1
                if not awaited[follower]:
                    self._start_with_peers(rank, follower)
        self._check_that_all_ran()
        return Timeline(self._start, self._end)

    def _check_that_all_ran(self) -> None:
        stuck = [
            f"{self._tasks[left[0]]} of rank {rank}"
            for rank in self._ranks
            for stream in self._streams
            if (left := [each for each in stream if self._num_awaited[rank][each] != _ENDED])
        ]
        if stuck:
            raise ValueError(
                f"{', '.join(stuck)} would wait forever; give peers that all wait for each other"
            )

    def _start_with_peers(self, rank: int, position: int) -> None:
        peers = self._peers_of(rank, self._tasks[position])
        for peer in peers:
            if self._num_awaited[peer][position]:
                return  # the last peer to be ready starts all
        for peer in peers:
            self._begin(peer, position)

    def _begin(self, rank: int, position: int) -> None:
        task, now = self._tasks[position], self._now
        self._num_awaited[rank][position] = _UNDER_WAY
        self._start[rank][position] = now
        link, seconds = self._link_of(rank, task), self._seconds_of(rank, task)
        if link is None and not self._is_crowded:
            self._end[rank][position] = end_s = now + seconds
            heappush(self._ends, (end_s, rank, position))
            return
        key = None if self._is_crowded else link
        self._group_of[rank, position] = key
        self._beside[key][rank, position] = _Sharing(rank, position, link, seconds, now)
        self._put_off(self._beside[key])

    def _put_off(self, group: Mapping[tuple[int, int], _Sharing]) -> None:
        """The ends of tasks that may slow each other, after one of them has begun or ended."""
        for each in group.values():
            done_s = (self._now - each.since_s) / each.slowed
            each.left_s, each.since_s = max(each.left_s - done_s, 0.0), self._now
            each.slowed = self._slowed(each, group)
            end_s = self._now + each.left_s * each.slowed
            self._end[each.rank][each.position] = end_s
            heappush(self._ends, (end_s, each.rank, each.position))

    def _slowed(self, each: _Sharing, group: Mapping[tuple[int, int], _Sharing]) -> float:
        """Times the seconds alone of a task: it shares its link with all that are on it, and its
        rank with all that are there."""
        if not self._is_crowded:
            return float(len(group))
        beside = group.values()
        shared = 1 if each.link is None else sum(other.link == each.link for other in beside)
        of_rank = [self._tasks[other.position] for other in beside if other.rank == each.rank]
        return shared * self._crowding_of(self._tasks[each.position], of_rank)


def _awaiting(schedule: Schedule) -> tuple[list[list[int]], list[int]]:
    """Of each task, those that wait for it, and how many it waits for: all that write what it
    reads, and the one before it in its stream."""
    awaited = [set(after) for after in schedule.after]
    for stream in schedule.by_stream.values():
        for before, position in pairwise(stream):
            awaited[position].add(before)
    followers: list[list[int]] = [[] for _ in awaited]
    for position, after in enumerate(awaited):
        for before in after:
            followers[before].append(position)
    return followers, list(map(len, awaited))


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
    """Trace Event Format: a process a rank, a thread a stream, microseconds."""
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
