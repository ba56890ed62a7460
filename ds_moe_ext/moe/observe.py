"""Hooks: who is told what a layer does. Observers see; they change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ds_moe_ext.moe.order import SlotRows
from ds_moe_ext.schedule.execute import Lanes, Mark
from ds_moe_ext.schedule.task import Task


@dataclass
class RowsSeen:
    """Rows that a layer routed since the last ``take``. Shape letters: C senders, E experts.

    A layer routes once a micro-batch; what activation checkpointing routes again in backward is not
    counted twice.
    """

    num_experts: int
    is_on: bool = True  # off in evaluation
    top_k: int = 0  # of the latest micro-batch
    _rows: list[np.ndarray | SlotRows] = field(default_factory=list)

    def __call__(self, rows: np.ndarray | SlotRows, top_k: int) -> None:
        """Args: rows: int64 ``[C, E]`` by sender and expert, or rows by slot where one cell holds
        all experts and the host does not know them yet."""
        self.top_k = top_k
        recomputes = torch._C._current_graph_task_id() != -1  # inside a backward pass
        if self.is_on and not recomputes:
            self._rows.append(rows)

    def take(self) -> np.ndarray:
        """Rows by sender and expert, int64 ``[C, E]``, since the last call. Waits for the device."""
        seen, self._rows = self._rows, []
        total = np.zeros((1, self.num_experts), dtype=np.int64)
        for rows in seen:
            total = total + (np.asarray(rows.on_host()) if isinstance(rows, SlotRows) else rows)
        return total


@dataclass
class TasksSeen:
    """When each task of the passes since the last ``take`` began and ended in its lane."""

    is_on: bool = False
    _seen: list[TimedTask] = field(default_factory=list)

    def saw(self, task: Task, start: Mark, end: Mark, lanes: Lanes) -> None:
        self._seen.append(TimedTask(task, start, end, lanes))

    def take(self) -> list[TimedTask]:
        """The tasks in the order in which they began, since the last call."""
        seen, self._seen = self._seen, []  # in the order in which they ended
        return sorted(seen, key=lambda timed: timed.seconds_from(seen[0]))


@dataclass(frozen=True)
class TimedTask:
    """A task and the moments at which its lane began and ended it."""

    task: Task
    start: Mark
    end: Mark
    lanes: Lanes

    def seconds_from(self, origin: TimedTask) -> tuple[float, float]:
        """Start and end, counted from the start of another task."""
        since = self.lanes.seconds_between
        return since(origin.start, self.start), since(origin.start, self.end)
