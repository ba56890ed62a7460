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
    """Rows of each expert that a layer routed since the last ``take``. Shape letters: E experts.

    A layer routes once a micro-batch; what activation checkpointing routes again in backward is not
    counted twice.
    """

    num_experts: int
    _rows: list[np.ndarray | SlotRows] = field(default_factory=list)

    def __call__(self, rows: np.ndarray | SlotRows) -> None:
        """Args: rows: int64 ``[C, E]`` by sender and expert, or rows by slot where one cell holds
        all experts and the host does not know them yet."""
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            self._rows.append(rows)

    def take(self) -> np.ndarray:
        """Rows by expert, int64 ``[E]``, since the last call. Waits for the device."""
        total = np.zeros(self.num_experts, dtype=np.int64)
        for rows in self._rows:
            total += np.asarray(rows.on_host()) if isinstance(rows, SlotRows) else rows.sum(axis=0)
        self._rows.clear()
        return total


@dataclass
class TasksSeen:
    """When each task of the passes since the last ``take`` began and ended in its lane."""

    is_on: bool = False
    _marks: list[tuple[Task, Mark, Mark, Lanes]] = field(default_factory=list)

    def saw(self, task: Task, start: Mark, end: Mark, lanes: Lanes) -> None:
        self._marks.append((task, start, end, lanes))

    def take(self, origin: Mark) -> list[tuple[Task, float, float]]:
        """Tasks with start and end, seconds from ``origin``, a mark of the same lanes."""
        marks, self._marks = self._marks, []
        return [
            (task, lanes.seconds_between(origin, start), lanes.seconds_between(origin, end))
            for task, start, end, lanes in marks
        ]
