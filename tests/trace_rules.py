# SPDX-License-Identifier: Apache-2.0
"""What the Trace Event Format asks of a trace that viewers are to draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]

NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""Keys of an event, by its phase."""
REPORTED = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
"""What metadata says, by its name."""
ROUNDING_US = 1e-3  # that of the numbers in the file, and of a sum of two


def assert_sound(events: Sequence[Event]) -> None:
    """Assert the format's rules of phases, times, names, arrows and counters."""
    for event in events:
        assert event.keys() >= NEEDED[event["ph"]], event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, event
    _assert_named(events)
    _assert_streams(events)
    _assert_arrows(events)
    for event in of(events, "C"):
        assert event["args"] and all(number >= 0 for number in event["args"].values()), event


def of(events: Sequence[Event], phase: str) -> list[Event]:
    """The events of a phase."""
    return [event for event in events if event["ph"] == phase]


def _assert_named(events: Sequence[Event]) -> None:
    """Every process and thread has one name and one place."""
    stated = [(e["name"], e["pid"], e.get("tid")) for e in of(events, "M")]
    assert len(stated) == len(set(stated))
    assert all(REPORTED[e["name"]] in e["args"] for e in of(events, "M"))
    for event in of(events, "X"):
        for name in ("thread_name", "thread_sort_index"):
            assert (name, event["pid"], event["tid"]) in stated
        for name in ("process_name", "process_sort_index"):
            assert (name, event["pid"], None) in stated


def _assert_streams(events: Sequence[Event]) -> None:
    """Slices of a thread lie behind each other or within each other."""
    threads = defaultdict(list)
    for event in of(events, "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for slices in threads.values():
        ends: list[float] = []  # of those that are open
        for start, length in sorted(slices):
            while ends and ends[-1] <= start + ROUNDING_US:
                ends.pop()
            assert not ends or start - length <= ends[-1] + ROUNDING_US
            ends.append(start - length)


def _assert_arrows(events: Sequence[Event]) -> None:
    """An arrow has one start and one end, which lies not before it; both are on slices."""
    begun = {event["id"]: event for event in of(events, "s")}
    ended = {event["id"]: event for event in of(events, "f")}
    assert len(begun) == len(of(events, "s")) and len(ended) == len(of(events, "f"))
    assert begun.keys() == ended.keys()
    slices = defaultdict(list)
    for event in of(events, "X"):
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for number, start in begun.items():
        end = ended[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        for event in (start, end):
            on = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= stop for begin, stop in on), event
