# SPDX-License-Identifier: Apache-2.0
"""Timelines as Chrome/Perfetto JSON: open the file at ui.perfetto.dev or chrome://tracing. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ds_moe_ext.schedule.task import COMPUTE, HOST, INTER, INTRA, PARAM

LANES = tuple(lane.name for lane in (PARAM, COMPUTE, INTER, INTRA, HOST))
"""Those of weights and of rows on either side of the one that computes; the host's; others last."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Box:
    """One task on the timeline.

    Attributes:
        name: as profilers show it: ``Task.label``.
        rank: row group.
        lane: row.
        start_s: seconds from the origin.
        end_s: likewise.
        category: kind of task, for colours.
        bound_by: of the boxes of its rank, the position of the one that it waited for last.
        told: more, by name.
    """

    name: str
    rank: int
    lane: str
    start_s: float
    end_s: float
    category: str
    bound_by: int | None = None
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    """Numbers that hold from a moment on, until the next of this name.

    Attributes:
        name: what is counted.
        rank: where.
        at_s: seconds from the origin.
        numbers: by what they are of.
    """

    name: str
    rank: int
    at_s: float
    numbers: Mapping[str, int]


def in_order(lanes: Iterable[str]) -> list[str]:
    """Lanes as they are drawn, from the top."""
    seen = dict.fromkeys(lanes)
    return [lane for lane in LANES if lane in seen] + [lane for lane in seen if lane not in LANES]


def chrome_trace(
    boxes: Iterable[Box],
    ranks: Mapping[int, str] = MappingProxyType({}),
    counts: Iterable[Count] = (),
) -> str:
    """Trace Event Format: a process a rank, a thread a lane, microseconds.

    Args:
        boxes: of the timeline.
        ranks: names of row groups, where they have some.
        counts: of rows and the like.
    """
    boxes = list(boxes)
    lanes = {lane: number for number, lane in enumerate(in_order(box.lane for box in boxes))}
    events = [*_names(boxes, lanes, ranks)]
    events += [_drawn(box, lanes[box.lane]) for box in boxes]
    events += _arrows(boxes, lanes)
    events += [
        {"ph": "C", "name": c.name, "pid": c.rank, "ts": c.at_s * 1e6, "args": dict(c.numbers)}
        for c in counts
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(
    boxes: Sequence[Box], lanes: Mapping[str, int], ranks: Mapping[int, str]
) -> Iterator[Event]:
    """Of processes and threads, and the order in which they stand."""
    for rank in sorted({box.rank for box in boxes} | ranks.keys()):
        yield _name("process_name", rank, name=ranks.get(rank, f"rank {rank}"))
        yield _name("process_sort_index", rank, sort_index=rank)
    for rank, lane in dict.fromkeys((box.rank, box.lane) for box in boxes):
        yield {**_name("thread_name", rank, name=lane), "tid": lanes[lane]}
        yield {**_name("thread_sort_index", rank, sort_index=lanes[lane]), "tid": lanes[lane]}


def _name(what: str, rank: int, **told: object) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "args": told}


def _drawn(box: Box, thread: int) -> Event:
    return {
        "ph": "X",
        "name": box.name,
        "cat": box.category,
        "pid": box.rank,
        "tid": thread,
        "ts": box.start_s * 1e6,
        "dur": max(box.end_s - box.start_s, 0.0) * 1e6,
        "args": dict(box.told),
    }


def _arrows(boxes: Sequence[Box], lanes: Mapping[str, int]) -> Iterator[Event]:
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
        yield {"ph": "s", **alike, "tid": lanes[by.lane], "ts": middle_s * 1e6}
        yield {"ph": "f", "bp": "e", **alike, "tid": lanes[box.lane], "ts": box.start_s * 1e6}
