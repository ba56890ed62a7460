# SPDX-License-Identifier: Apache-2.0
"""Timelines as Chrome/Perfetto JSON: open the file at ui.perfetto.dev or chrome://tracing. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Box:
    """One task on the timeline.

    Attributes:
        name: as ``dispatch[0,1]``.
        rank: row group.
        lane: row.
        start_s: seconds from the origin.
        end_s: likewise.
        category: kind of task, for colours.
    """

    name: str
    rank: int
    lane: str
    start_s: float
    end_s: float
    category: str


def chrome_trace(boxes: Iterable[Box], ranks: Mapping[int, str] = MappingProxyType({})) -> str:
    """Trace Event Format: a process a rank, a thread a lane, microseconds.

    Args:
        boxes: of the timeline.
        ranks: names of row groups, where they have some.
    """
    boxes = list(boxes)
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(box.lane for box in boxes))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
        for rank in sorted({box.rank for box in boxes})
        for lane, number in lanes.items()
    ]
    names += [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for rank, name in ranks.items()
    ]
    events = [
        {
            "ph": "X",
            "name": box.name,
            "cat": box.category,
            "pid": box.rank,
            "tid": lanes[box.lane],
            "ts": box.start_s * 1e6,
            "dur": (box.end_s - box.start_s) * 1e6,
        }
        for box in boxes
    ]
    return json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"})
