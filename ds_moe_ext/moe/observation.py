# SPDX-License-Identifier: Apache-2.0
"""What a layer did: the rows that it routed, and when its tasks ran. Nothing is changed here.

``RowsSeen`` counts rows for planners and reports, ``TasksSeen`` and ``Meter`` take times, and
``Windows`` times what the host computes between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core.rows import in_32_bits
from ds_moe_ext.core.share import computed_by
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.planning.strategy import Destination
from ds_moe_ext.schedule.executor import Mark, ScheduleStreams, streams_for
from ds_moe_ext.schedule.orders import EXPERT_IDS, SCORES, X, Y
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.schedule.task import ATTENTION, ChunkRange, Task, Value


class Pass(NamedTuple):
    """Rows of one micro-batch, by sender and expert, ``[C, E]``, int32 where they fit, and where
    they went."""

    rows_CE: np.ndarray
    destination: Destination


@dataclass(frozen=True, eq=False)
class Rows:
    """What a layer routed."""

    routed_CE: np.ndarray  # rows by sender and expert, int32 where they fit, else int64
    computed_C: np.ndarray  # rows that each EP rank computed, int64
    passes: tuple[Pass, ...]  # they, micro-batch by micro-batch

    @property
    def all_stayed(self) -> bool:
        """Whether EP ranks exchanged nothing, as each had every expert in all passes."""
        return bool(self.passes) and all(one.destination.all_stay for one in self.passes)

    @cached_property
    def total_E(self) -> np.ndarray:
        total_E: np.ndarray = self.routed_CE.sum(axis=0)
        return total_E


@dataclass
class RowsSeen:
    """Rows that a layer routed since the last ``take``. Shape letters: C EP ranks, E experts, X
    those of several layers.

    A layer routes once a micro-batch. Not counted are rows of an evaluation, and what activation
    checkpointing routes again in backward. Where every rank knows its own rows alone, ``gather``
    brings together what all have, int64 ``[X]`` to ``[C, X]``; it is collective.
    """

    num_experts: int
    num_ep_ranks: int
    top_k: int = 0  # of the latest micro-batch
    is_training: bool = True  # the latest pass
    is_graded: bool = True  # likewise
    counts: bool = True  # and it is counted
    keeps_scores: bool = False  # somebody calls ``take_score``
    gather: Callable[[Tensor], Tensor] | None = None
    on_sent: Callable[[], None] = lambda: None  # called when counted rows are with their experts
    _on_host: list[Pass] = field(default_factory=list)
    _on_device: Tensor | None = None  # int64 [E], where rows end, summed; the host does not wait
    _destination: Destination | None = None  # of those
    _score: Tensor | None = None  # 0-dim, sum of all scores since ``take_score``
    # what is reported, where it is not to be heard yet
    _held: list[Callable[[], None]] | None = None

    @contextmanager
    def held(self) -> Iterator[list[Callable[[], None]]]:
        """What is reported inside the block of rows and where they are is not heard, but kept;
        whoever calls that reports it. Where a pass is recorded, it is reported in each."""
        held: list[Callable[[], None]] = []
        self._held = held
        try:
            yield held
        finally:
            self._held = None

    def begin(self, *, is_training: bool) -> None:
        """Say what the coming pass is. Call it in the thread that runs the model."""
        self.is_training, self.is_graded = is_training, torch.is_grad_enabled()
        self.counts = is_training and not in_backward()

    def __call__(self, rows: np.ndarray | SlotRows, top_k: int, destination: Destination) -> None:
        """Args: rows: ``[C, E]`` by sender and expert, int32 or int64; or by expert this rank's,
        where it does not know those of others, or its host none. destination: where they go."""
        if self._held is not None:
            self._held.append(partial(self, rows, top_k, destination))
        elif self.counts:
            self.add(rows, top_k, destination)

    def add(self, rows: np.ndarray | SlotRows, top_k: int, destination: Destination) -> None:
        """Count rows, whatever the pass is. Takes what a call takes."""
        self.top_k = top_k
        if isinstance(rows, SlotRows):
            before = 0 if self._on_device is None else self._on_device
            self._on_device, self._destination = before + rows.end_S.long(), destination
        else:
            self._on_host.append(Pass(rows, destination))

    def sent(self) -> None:
        """Say that all rows of the pass have come to their experts."""
        if self._held is not None:
            self._held.append(self.sent)
        elif self.counts:
            self.are_sent()

    def are_sent(self) -> None:
        self.on_sent()

    def saw_scores(self, score_TK: Tensor) -> None:
        """Take what weighs the coming pass's rows. The device is not waited for."""
        if self.keeps_scores and self.counts:
            total = score_TK.detach().sum(dtype=torch.float32)
            self._score = total if self._score is None else self._score + total

    def take_score(self) -> Tensor | None:
        """Sum of all scores since the last call, 0-dim float32, which is finite where all are; None
        where there were none."""
        score, self._score = self._score, None
        return score

    @property
    def knows_all(self) -> bool:
        """Whether the host knows all rows since the last ``take``."""
        return self._on_device is None

    @property
    def so_far_CE(self) -> np.ndarray:
        """Rows by sender and expert since the last ``take``, of those the host knows, int32 where
        they fit."""
        tables = [one.rows_CE for one in self._on_host]
        if len(tables) == 1:
            return tables[0]
        total_CE = np.zeros((self.num_ep_ranks, self.num_experts), dtype=np.int64)
        for rows_CE in tables:
            total_CE += rows_CE
        return in_32_bits(total_CE)

    def take(self) -> Rows:
        """Rows since the last call. Waits for the device."""
        return take_rows((self,))[0]

    def clear(self) -> None:
        self._on_host.clear()
        self._on_device = None


def take_rows(layers: Sequence[RowsSeen]) -> list[Rows]:
    """Rows of several layers of one grid since the last call. Waits for the device; collective
    where ranks know their own rows alone."""
    _bring_to_host([layer for layer in layers if not layer.knows_all])
    rows = rows_so_far(layers)
    for layer in layers:
        layer.clear()
    return rows


def rows_so_far(layers: Sequence[RowsSeen]) -> list[Rows]:
    """The same rows, of which the host must know all; they are not forgotten."""
    computed_LC = np.zeros((len(layers), layers[0].num_ep_ranks), dtype=np.int64)
    for number in range(max(len(layer._on_host) for layer in layers)):  # of the micro-batch
        seen = [at for at, layer in enumerate(layers) if number < len(layer._on_host)]
        rows, destinations = zip(*(layers[at]._on_host[number] for at in seen))
        computed_LC[seen] += computed_by([each.share for each in destinations], rows)
    return [
        Rows(layer.so_far_CE, computed_C, tuple(layer._on_host))
        for layer, computed_C in zip(layers, computed_LC)
    ]


def _bring_to_host(layers: Sequence[RowsSeen]) -> None:
    """Rows that only the device knows; layers may have unlike numbers of experts."""
    if not layers:
        return
    ends = [layer._on_device for layer in layers if layer._on_device is not None]
    rows = torch.cat([end_E.diff(prepend=end_E.new_zeros(1)) for end_E in ends])
    gather = layers[0].gather
    rows_CX = (rows[None] if gather is None else gather(rows)).cpu().numpy()
    stops = np.cumsum([layer.num_experts for layer in layers])
    for layer, rows_CE in zip(layers, np.split(rows_CX, stops[:-1], axis=1)):
        assert layer._destination is not None
        layer._on_host.append(Pass(in_32_bits(rows_CE), layer._destination))
        layer._on_device = None


@dataclass
class TasksSeen:
    """When each task of the passes since the last ``take`` began and ended in its stream; not those
    of an evaluation, whose rows are not counted either."""

    is_wanted: bool = False  # somebody takes them
    # of the layer, which know what its latest pass is; None: all are of training
    rows: RowsSeen | None = None
    _seen: list[TimedTask] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether tasks of the pass that runs are wanted."""
        rows = self.rows
        return self.is_wanted and (rows is None or rows.is_training or in_backward())

    def saw(self, task: Task, start: Mark, end: Mark, streams: ScheduleStreams) -> None:
        self._seen.append(TimedTask(task, start, end, streams))

    def issued(self, task: Task, seconds: float) -> None:
        return None

    def take(self) -> list[TimedTask]:
        """The tasks in the order in which they began, since the last call."""
        seen, self._seen = self._seen, []  # in the order in which they ended
        return sorted(seen, key=lambda timed: timed.seconds_from(seen[0]))


@dataclass
class Meter(TasksSeen):
    """The same, and how long the host took to issue each, where a device runs it."""

    _issued: list[tuple[Task, float]] = field(default_factory=list)

    def issued(self, task: Task, seconds: float) -> None:
        self._issued.append((task, seconds))

    def take_issued(self) -> list[tuple[Task, float]]:
        """Seconds of the host since the last call; of nothing that a CPU runs itself."""
        issued, self._issued = self._issued, []
        return issued


def notify(
    observers: Iterable[TasksSeen], task: Task, start: Mark, streams: ScheduleStreams
) -> None:
    """Notify those who want to know of a task that ends now, in the stream that calls."""
    end = streams.mark()
    for observer in observers:
        if observer.is_on:
            observer.saw(task, start, end, streams)


@dataclass(frozen=True)
class TimedTask:
    """A task and the moments at which its stream began and ended it."""

    task: Task
    start: Mark
    end: Mark
    streams: ScheduleStreams

    def seconds_from(self, origin: TimedTask) -> tuple[float, float]:
        """Start and end, counted from the start of another task."""
        since = self.streams.seconds_between
        return since(origin.start, self.start), since(origin.start, self.end)


# What the host computes between two MoE layers, timed: there replicas and gradients are hidden.


class Windows:
    """The windows of one layer: before it in forward, and behind it in backward."""

    def __init__(self, layer: int, observers: Sequence[TasksSeen]) -> None:
        self._layer, self._observers = layer, observers
        self._ahead: Mark | None = None  # when the block began, in forward
        self._behind: Mark | None = None  # when the layer's backward ended

    def block_begins(self, block_input: Tensor | None) -> None:
        """Call it before the layer's block computes.

        Args:
            block_input: what it computes from: its gradient ends the block's backward.
        """
        # Whether the pass is of training only the layer can say, later.
        if block_input is None or not any(observer.is_wanted for observer in self._observers):
            return
        streams = streams_for(block_input.device, overlaps=True)
        self._ahead = streams.mark()

        def ends_behind(grad: Tensor) -> None:
            if self._behind is not None:
                self._saw(self._behind, streams, adjoint_of=(0,))
                self._behind = None

        if block_input.requires_grad and torch.is_grad_enabled():
            block_input.register_hook(ends_behind)

    def layer_begins(self, x: Tensor) -> None:
        """Call it with the layer's input."""
        if self._ahead is None:
            return
        streams = streams_for(x.device, overlaps=True)
        self._saw(self._ahead, streams)
        self._ahead = None
        self._behind = None  # of an earlier pass, whose block ended with the layer

        def begins_behind(grad: Tensor) -> None:
            self._behind = streams.mark()

        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(begins_behind)

    def _saw(self, start: Mark, streams: ScheduleStreams, adjoint_of: tuple[int, ...] = ()) -> None:
        whole = ChunkRange(0, 1)
        reads: tuple[Value, ...] = (Value(Y, self._layer - 1, whole),)
        writes = tuple(Value(kind, self._layer, whole) for kind in (X, EXPERT_IDS, SCORES))
        if adjoint_of:
            reads, writes = writes, reads
        task = Task(ATTENTION, self._layer, whole, reads, writes, adjoint_of)
        notify(self._observers, task, start, streams)
