# SPDX-License-Identifier: Apache-2.0
"""The Chrome trace of a run: every rank keeps its tasks of some steps, the first writes all."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ds_moe_ext.attachment.outputs import or_warn
from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.comm import gather_objects
from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.moe.observation import Pass, Rows, TimedTask
from ds_moe_ext.report.recorder import spans_of
from ds_moe_ext.schedule.executor import Lanes, Mark
from ds_moe_ext.schedule.task import ORDER
from ds_moe_ext.schedule.trace import Box, Count, chrome_trace

_MEETINGS = 9
Gather = Callable[[Any], list[Any]]


@dataclass(eq=False)
class Tracer:
    """Writes the tasks of some steps, of all ranks that run the same layers, as one Chrome trace. A
    run that ends within these steps leaves what the first rank has: the others may be gone.

    Seconds begin as the ranks meet before the first step. Ranks of one machine have one clock; that
    of another is set by the median of several meetings, which all leave at nearly one moment.

    Args:
        path: of the file.
        steps: in it.
        layers: of the run.
        lanes: of this rank's device.
    """

    path: Path
    steps: range
    layers: Sequence[AttachedLayer]
    lanes: Lanes
    _gather: Gather | None = None  # of the ranks in it; None: of those that run the same layers
    _origin: Mark | None = None
    _later_s: float = 0.0  # than when seconds begin
    _boxes: list[Box] = field(default_factory=list)
    _counts: list[Count] = field(default_factory=list)

    def meet_by(self, gather: Gather) -> None:
        """Let other ranks be in the trace: those that this gathers from. Collective over them."""
        self._gather, has_begun, self._origin = gather, self._origin is not None, None
        if has_begun:
            self.begin()

    def begin(self) -> None:
        """Let the ranks meet, and set this one's clock; once. A run that was loaded may come to the
        steps behind the first of them. Collective."""
        if self._origin is not None:
            return
        left_s = []
        for _ in range(_MEETINGS):
            self._told(None)
            left_s.append(time.perf_counter())
        # Nothing is under way on a device that has just told what it gathered.
        self._origin, now_s = self.lanes.mark(), time.perf_counter()
        here = socket.gethostname()
        there, first_s = self._told((here, left_s))[0]
        ahead_s = [own_s - other_s for own_s, other_s in zip(left_s, first_s)]
        self._later_s = now_s - first_s[0] - (0.0 if there == here else median(ahead_s))

    def __call__(self, step: int, timed: list[TimedTask], rows: Sequence[Rows]) -> None:
        """Keep a step, and write the file behind the last. Collective."""
        if timed:
            self._keep(replace(timed[0], start=self._origin), timed)
            self._count(replace(timed[0], start=self._origin), timed, rows)
        if step == self.steps[-1]:
            found = self._told((self._name, self._boxes, self._counts))
            self._boxes, self._counts = [], []
            if self._layout.rank == min(rank for (rank, _), *_ in found):
                self._write(found)

    def end(self) -> None:
        """Write what the first rank has of steps behind which nothing was written."""
        if self._boxes and self._layout.place == 0 and self._gather is None:
            self._write([(self._name, self._boxes, self._counts)])

    def _told(self, own: Any) -> list[Any]:
        """What each rank gives, the first's first. Collective."""
        if self._gather is not None:
            return self._gather(own)
        return gather_objects(own, self._layout.everyone)

    @property
    def _layout(self) -> ParallelLayout:
        return self.layers[0].routed.site.layout

    @property
    def _name(self) -> tuple[int, str]:
        rank, cell = self._layout.rank, self._layout.index("ep")
        return rank, f"rank {rank} (EP rank {cell}, node {self._layout.node_C[cell]})"

    def _keep(self, origin: TimedTask, timed: Sequence[TimedTask]) -> None:
        names, before = [layer.name for layer in self.layers], len(self._boxes)
        ordered = sorted(timed, key=lambda each: each.seconds_from(origin)[0])
        for each, span in zip(ordered, spans_of(ordered, origin, names, has_waits=True)):
            self._boxes.append(
                Box(
                    name=each.task.label,
                    rank=self._layout.rank,
                    lane=span.lane,
                    start_s=self._later_s + span.start_s,
                    end_s=self._later_s + span.end_s,
                    category=span.name,
                    bound_by=None if span.bound_by is None else before + span.bound_by,
                    told={"layer": span.layer, "chunk": span.chunk, "phase": span.phase},
                )
            )

    def _count(self, origin: TimedTask, timed: Sequence[TimedTask], rows: Sequence[Rows]) -> None:
        """Rows and bytes, from when a layer knows them."""
        ordered = [each for each in timed if each.task.op == ORDER]
        for layer, seen in zip(self.layers, rows):
            routed = layer.routed
            own = [each for each in ordered if each.task.layer == routed.site.layer]
            if len(own) != len(seen.passes):  # some were routed again, or by somebody else
                continue
            row_bytes = routed.row_bytes.between
            for each, one in zip(own, seen.passes):
                at_s = self._later_s + each.seconds_from(origin)[1]
                self._counts += self._numbers(at_s, one, row_bytes)

    def _numbers(self, at_s: float, one: Pass, row_bytes: float) -> Iterator[Count]:
        rank, cell, share = self._layout.rank, self._layout.index("ep"), one.destination.share
        between_CC = share.of_rows(one.rows_CE).rows_between(one.rows_CE[:, None])[0]
        computed, stayed = int(between_CC[:, cell].sum()), int(between_CC[cell, cell])
        rows = {
            "computed here": computed,
            "sent": int(between_CC[cell].sum()) - stayed,
            "arrived": computed - stayed,
        }
        yield Count("rows", rank, at_s, rows)
        travelled = {name: int(rows[name] * row_bytes) for name in ("sent", "arrived")}
        yield Count("bytes", rank, at_s, travelled)

    def _write(self, found: Sequence[tuple[tuple[int, str], list[Box], list[Count]]]) -> None:
        with or_warn(f"the trace {str(self.path)!r}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            boxes = (box for _, boxes, _ in found for box in boxes)
            counts = (count for _, _, counts in found for count in counts)
            names = dict(name for name, _, _ in found)
            self.path.write_text(chrome_trace(boxes, names, counts), "utf-8")
