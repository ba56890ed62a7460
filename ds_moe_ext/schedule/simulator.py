"""Price a schedule: the executor's rule with seconds in place of work. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_moe_ext.schedule.task import Lane, Schedule, Task

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
    """Start every task as early as its lane, its inputs and its peers allow.

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


class _Simulation:
    """An event queue over (rank, position); time jumps from one finished task to the next."""

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
        self._tasks, self._after = schedule.tasks, schedule.after
        self._seconds_of, self._peers_of, self._link_of = seconds_of, peers_of, link_of
        self._crowding_of = crowding_of
        self._ranks = range(num_ranks)
        self._start = [[math.nan] * len(self._tasks) for _ in self._ranks]
        self._end = [[math.nan] * len(self._tasks) for _ in self._ranks]
        self._queue = [self._lanes() for _ in self._ranks]
        self._left: dict[tuple[int, int], float] = {}  # seconds of work left of what is under way
        self._now = 0.0

    def _lanes(self) -> dict[Lane, list[int]]:
        lanes: dict[Lane, list[int]] = {}
        for position in reversed(range(len(self._tasks))):
            lanes.setdefault(self._tasks[position].lane, []).append(position)
        return lanes

    def run(self) -> Timeline:
        while True:
            self._start_what_can()
            if not self._left:
                self._check_that_all_ran()
                return Timeline(self._start, self._end)
            self._advance()

    def _check_that_all_ran(self) -> None:
        stuck = [
            f"{self._tasks[lane[-1]]} of rank {rank}"
            for rank in self._ranks
            for lane in self._queue[rank].values()
            if lane
        ]
        if stuck:
            raise ValueError(
                f"{', '.join(stuck)} would wait for ever; give peers that all wait for each other"
            )

    def _ready(self, rank: int, position: int) -> bool:
        lane = self._queue[rank][self._tasks[position].lane]
        in_turn = bool(lane) and lane[-1] == position
        done = all(not math.isnan(self._end[rank][w]) for w in self._after[position])
        busy = any(
            r == rank and self._tasks[p].lane == self._tasks[position].lane for r, p in self._left
        )
        return in_turn and done and not busy

    def _start_what_can(self) -> None:
        for rank in self._ranks:
            for lane in self._queue[rank].values():
                if not lane:
                    continue
                position = lane[-1]
                peers = self._peers_of(rank, self._tasks[position])
                if all(self._ready(peer, position) for peer in peers):
                    for peer in peers:
                        self._begin(peer, position)

    def _begin(self, rank: int, position: int) -> None:
        task = self._tasks[position]
        self._queue[rank][task.lane].pop()
        self._start[rank][position] = self._now
        self._left[rank, position] = self._seconds_of(rank, task)

    def _advance(self) -> None:
        """To the end of the next task."""
        slowed = self._slowed()
        step = min(left * by for left, by in zip(self._left.values(), slowed))
        self._now += step
        for (rank, position), by in zip(list(self._left), slowed):
            self._left[rank, position] -= step / by
            if self._left[rank, position] <= 1e-12:
                del self._left[rank, position]
                self._end[rank][position] = self._now

    def _slowed(self) -> list[float]:
        """Times the seconds alone of each task under way: it shares its link with all that are on
        it, and its rank with all that are there."""
        links = [self._link_of(rank, self._tasks[position]) for rank, position in self._left]
        beside: dict[int, list[Task]] = {rank: [] for rank, _ in self._left}
        for rank, position in self._left:
            beside[rank].append(self._tasks[position])
        return [
            (1 if link is None else links.count(link))
            * self._crowding_of(self._tasks[position], beside[rank])
            for link, (rank, position) in zip(links, self._left)
        ]
