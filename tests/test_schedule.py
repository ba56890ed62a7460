# SPDX-License-Identifier: Apache-2.0
"""Schedules as text, and what they cost by hand. Pure: nothing runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.schedule import orders
from ds_moe_ext.schedule.orders import stage_major
from ds_moe_ext.schedule.simulator import Box, Count, Timeline, chrome_trace, simulate
from ds_moe_ext.schedule.task import (
    COMPUTE,
    INTER,
    ChunkRange,
    Cut,
    Kind,
    Op,
    Schedule,
    Task,
    Value,
    chunk_ranges,
)
from tests.flows import before, flow, flows
from tests.trace_rules import assert_sound, of


def layer(num_chunks: int, degree: int, *, gated: bool = True) -> Schedule:
    tasks = orders.routed_tasks(0, num_chunks=num_chunks, degree=degree)
    ordered = stage_major(tasks, orders.ROUTED_OPS)
    return orders.layer_schedule(ordered, 0, num_chunks=num_chunks, gated=gated)


def words(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]


# Spans and cuts.


def test_chunk_ranges() -> None:
    assert chunk_ranges(6, 3) == (ChunkRange(0, 2), ChunkRange(2, 4), ChunkRange(4, 6))
    assert chunk_ranges(6, 1) == (ChunkRange(0, 6),)
    assert words(chunk_ranges(6, 2)) == ["0-2", "3-5"]
    assert words(chunk_ranges(2, 2)) == ["0", "1"]
    with pytest.raises(ValueError, match="degree 4 does not divide 6 finest chunks"):
        chunk_ranges(6, 4)


def test_chunk_ranges_overlap_where_they_share_a_chunk() -> None:
    assert ChunkRange(0, 3).overlaps(ChunkRange(2, 4))
    assert ChunkRange(2, 4).overlaps(ChunkRange(0, 3))
    assert ChunkRange(1, 2).overlaps(ChunkRange(0, 3))
    assert not ChunkRange(0, 2).overlaps(ChunkRange(2, 4))


def test_cut() -> None:
    cut = Cut.equal(11, 4)  # 3 + 3 + 3 + 2
    assert cut.bounds == (0, 3, 6, 9, 11)
    assert cut.num_chunks == 4
    assert (cut.first(ChunkRange(1, 3)), cut.length(ChunkRange(1, 3))) == (3, 6)
    assert (cut.first(ChunkRange(2, 4)), cut.length(ChunkRange(2, 4))) == (6, 5)
    assert Cut.equal(2, 4).bounds == (0, 1, 2, 2, 2)
    assert Cut.equal(0, 2).bounds == (0, 0, 0)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_chunks_are_as_equal_as_can_be(num_tokens: int, num_chunks: int) -> None:
    cut = Cut.equal(num_tokens, num_chunks)
    lengths = [cut.length(chunk_range) for chunk_range in chunk_ranges(num_chunks, num_chunks)]
    assert sum(lengths) == num_tokens
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


# Who waits for whom.


def test_one_chunk_reversed() -> None:
    backward = layer(1, 1).reversed()
    assert str(backward) == "restore'[0,0] combine'[0,0] expert'[0,0] dispatch'[0,0] gate'[0,0]"
    assert words(backward.inputs) == ["y[0,0]", "gate_losses[0]"]
    assert words(backward.outputs) == ["x[0,0]", "gate_weights[0]", "weights[0]"]
    assert [task.adjoint_of for task in backward.tasks] == [(5,), (4,), (3,), (2,), (0,)]
    # The gate's adjoint needs the scores' gradient only, which restore wrote.
    assert backward.after == ((), (0,), (1,), (2,), (0,))
    # It may run beside the rows' way back.
    assert not backward.is_chain
    assert words(backward.tasks[0].reads) == ["y[0,0]"]
    assert words(backward.tasks[0].writes) == ["returned[0,0]", "scores[0,0]"]


def test_a_template_with_other_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no task for gate'\[0,0\] to be the adjoint of"):
        layer(1, 1, gated=False).backward_cut_as(layer(1, 1))


def test_reading_before_it_is_written() -> None:
    schedule = flow("a compute", "c compute b", "b compute a")
    with pytest.raises(ValueError, match=r"task 1, c\[0,0\], reads b\[0\] before it is written"):
        _ = schedule.after


def test_reading_what_is_written_in_part() -> None:
    rows, whole = Kind("rows", by_token=True), ChunkRange(0, 3)

    def write(chunk_range: ChunkRange) -> Task:
        return Task(Op("write", COMPUTE), 0, chunk_range, (), (Value(rows, 0, chunk_range),))

    read = Task(Op("read", INTER), 0, whole, (Value(rows, 0, whole),), ())
    first, second, third = (write(chunk_range) for chunk_range in chunk_ranges(3, 3))
    assert Schedule((first, third, second, read), (), ()).after == ((), (), (), (0, 1, 2))
    for tasks in ((first, third, read, second), (second, third, read), (read,)):
        with pytest.raises(ValueError, match=r"reads rows\[0,0-2\] before it is written in full"):
            _ = Schedule(tasks, (), ()).after
    # What is given counts as written, and nobody is waited for.
    given_ = Schedule((third, read), (Value(rows, 0, ChunkRange(0, 2)),), ())
    assert given_.after == ((), (0,))
    # Another layer's value and an uncut one are other values.
    for other in (Value(rows, 1, whole), Value(rows, 0)):
        with pytest.raises(ValueError, match="before it is written in full"):
            _ = Schedule((read,), (other,), ()).after


@given(flows())
def test_tasks_wait_for_all_that_they_read(schedule: Schedule) -> None:
    for position, waits in enumerate(before(schedule)):
        after = set(schedule.after[position])
        stream = {
            i for i in waits - after if schedule.tasks[i].stream == schedule.tasks[position].stream
        }
        assert waits == after | stream
    is_chain = all(i - 1 in waits for i, waits in enumerate(before(schedule)) if i)
    assert schedule.is_chain == is_chain


# What a schedule costs.


def timeline(
    schedule: Schedule, seconds: Mapping[str, float], links: Mapping[str, str] | None = None
) -> dict[str, tuple[float, float]]:
    """Start and end of each task on one rank."""
    links = links or {}
    result = simulate(
        schedule,
        lambda rank, task: seconds[task.op.name],
        link_of=lambda rank, task: links.get(task.op.name),
    )
    names = [task.op.name for task in schedule.tasks]
    return {name: (result.start_s[0][i], result.end_s[0][i]) for i, name in enumerate(names)}


def ranks(
    schedule: Schedule,
    seconds: Sequence[Mapping[str, float]],
    groups: Mapping[str, list[list[int]]],
) -> Timeline:
    """Each rank with seconds of its own; tasks named in ``groups`` are collectives."""

    def peers_of(rank: int, task: Task) -> list[int]:
        return next((g for g in groups.get(task.op.name, []) if rank in g), [rank])

    return simulate(
        schedule,
        lambda rank, task: seconds[rank][task.op.name],
        num_ranks=len(seconds),
        peers_of=peers_of,
    )


def test_a_collective_waits_for_its_last_peer() -> None:
    schedule = flow("e compute", "a inter e", "f compute", "r compute a")
    result = ranks(
        schedule,
        [{"e": 1, "a": 2, "f": 1, "r": 1}, {"e": 4, "a": 3, "f": 1, "r": 1}],
        {"a": [[0, 1]]},
    )
    # Rank 0: e 0-1, f 1-2 meanwhile; the exchange starts at 4 when rank 1 comes, and each rank is
    # through with it in its own time.
    assert result.start_s == [[0, 4, 1, 6], [0, 4, 4, 7]]
    assert result.end_s == [[1, 6, 2, 7], [4, 7, 5, 8]]
    assert result.makespan_s == 8


def test_groups_do_not_wait_for_each_other() -> None:
    schedule = flow("e compute", "a inter e")
    result = ranks(
        schedule,
        [{"e": seconds, "a": 1} for seconds in (1, 2, 5, 9)],
        {"a": [[0, 1], [2, 3]]},
    )
    assert [ends[1] for ends in result.end_s] == [3, 3, 10, 10]


def test_a_late_rank_delays_two_collectives_once() -> None:
    """Rank 1 computes 3 s longer; both exchanges follow each other without a further wait."""
    schedule = flow("e compute", "a inter e", "b inter")
    result = ranks(
        schedule,
        [{"e": 1, "a": 2, "b": 2}, {"e": 4, "a": 2, "b": 2}],
        {"a": [[0, 1]], "b": [[0, 1]]},
    )
    assert result.end_s == [[1, 6, 8], [4, 6, 8]]


def test_peers_that_do_not_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\[0,0\] of rank 1 would wait forever"):
        simulate(
            flow("a inter"),
            lambda rank, task: 1.0,
            num_ranks=2,
            peers_of=lambda rank, task: [[0], [0, 1]][rank],
        )


def test_two_streams_on_one_link_take_the_sum() -> None:
    schedule = flow("a inter", "b param")
    seconds = {"a": 2.0, "b": 2.0}
    assert timeline(schedule, seconds) == {"a": (0, 2), "b": (0, 2)}
    # At half the rate each.
    assert timeline(schedule, seconds, {"a": "nic", "b": "nic"}) == {"a": (0, 4), "b": (0, 4)}
    assert timeline(schedule, seconds, {"a": "nic", "b": "nvlink"}) == {"a": (0, 2), "b": (0, 2)}
    # 1 s of a takes 2 s; b has then 3 - 1 left and the link for itself.
    assert timeline(schedule, {"a": 1.0, "b": 3.0}, {"a": "nic", "b": "nic"}) == {
        "a": (0, 2),
        "b": (0, 4),
    }


def test_a_link_is_shared_only_while_both_are_under_way() -> None:
    """b starts at 3: a has 1 s left, which takes 2; then b has 4 - 1 left."""
    schedule = flow("a inter", "w compute", "b param w")
    times = timeline(schedule, {"a": 4.0, "w": 3.0, "b": 4.0}, {"a": "nic", "b": "nic"})
    assert times == {"a": (0, 5), "w": (0, 3), "b": (3, 8)}


def test_ranks_share_a_link_of_one_name() -> None:
    def makespan(link: str) -> float:
        return simulate(
            flow("a inter"),
            lambda rank, task: 1.5,
            num_ranks=4,
            link_of=lambda rank, task: link.format(rank=rank, node=rank // 2),
        ).makespan_s

    assert makespan("nic {rank}") == 1.5
    assert makespan("node {node}") == 3.0
    assert makespan("switch") == 6.0


def test_tasks_of_no_seconds() -> None:
    schedule = flow("a compute", "z inter a", "y compute z", "b compute", "x inter b")
    times = timeline(schedule, {"a": 1, "z": 0, "y": 0, "b": 2, "x": 0}, {"z": "nic", "x": "nic"})
    assert times == {"a": (0, 1), "z": (1, 1), "y": (1, 1), "b": (1, 3), "x": (3, 3)}
    nothing = simulate(schedule, lambda rank, task: 0.0, num_ranks=3)
    assert nothing.makespan_s == 0
    assert nothing.end_s == [[0.0] * 5] * 3


def longest_path(schedule: Schedule, seconds: Sequence[float]) -> float:
    """Along the edges of the rule: streams and values."""
    ends: list[float] = []
    for position, waits in enumerate(before(schedule)):
        ends.append(seconds[position] + max((ends[w] for w in waits), default=0))
    return max(ends)


@given(flows(), st.data())
def test_makespan_is_the_longest_path(schedule: Schedule, data: st.DataObject) -> None:
    size = len(schedule.tasks)
    seconds = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    of = dict(zip(schedule.tasks, seconds))
    result = simulate(schedule, lambda rank, task: of[task])
    assert result.makespan_s == longest_path(schedule, seconds)
    for position, waits in enumerate(before(schedule)):
        start = max((result.end_s[0][w] for w in waits), default=0)
        assert result.start_s[0][position] == start
        assert result.end_s[0][position] == start + seconds[position]


@given(flows(max_tasks=8), st.integers(1, 3), st.data())
def test_bounds_of_the_makespan(schedule: Schedule, num_ranks: int, data: st.DataObject) -> None:
    """Whatever ranks wait for and links share: no less than any rank's longest stream and path, no
    more than everything one after the other."""
    size = len(schedule.tasks)
    draw_seconds = st.lists(st.sampled_from((0.0, 0.1, 1.0, 7.5)), min_size=size, max_size=size)
    seconds = [data.draw(draw_seconds) for _ in range(num_ranks)]
    collective = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    link = data.draw(
        st.lists(st.sampled_from((None, "nic", "switch")), min_size=size, max_size=size)
    )
    place = {task: position for position, task in enumerate(schedule.tasks)}
    everyone = list(range(num_ranks))
    result = simulate(
        schedule,
        lambda rank, task: seconds[rank][place[task]],
        num_ranks=num_ranks,
        peers_of=lambda rank, task: everyone if collective[place[task]] else [rank],
        link_of=lambda rank, task: link[place[task]],
    )
    assert not any(math.isnan(end) for ends in result.end_s for end in ends)
    tolerance = 1e-9
    for rank in everyone:
        busy = dict.fromkeys((task.stream for task in schedule.tasks), 0.0)
        for task, s in zip(schedule.tasks, seconds[rank]):
            busy[task.stream] += s
        assert result.makespan_s >= max(busy.values()) - tolerance
        assert result.makespan_s >= longest_path(schedule, seconds[rank]) - tolerance
    assert result.makespan_s <= sum(map(sum, seconds)) + tolerance


# Traces.


def test_chrome_trace() -> None:
    boxes = [
        Box("expert[0,0]", 0, "compute", 0.0, 0.5, "expert", reported={"layer": "m.0"}),
        Box("dispatch[0,1]", 0, "inter", 0.5, 0.75, "dispatch", bound_by=0),
        Box("expert[0,0]", 3, "compute", 1.0, 1.000002, "expert"),
        Box("gather", 3, "param", 1.000001, 1.000003, "gather"),
        Box("mine", 3, "other", 1.000003, 1.000003, "mine", bound_by=1),
    ]
    counts = [Count("rows", 3, 1.0, {"sent": 5, "arrived": 0})]
    trace = json.loads(chrome_trace(iter(boxes), {3: "rank 3 (EP rank 1)"}, counts))
    events = trace["traceEvents"]
    assert_sound(events)
    drawn = of(events, "X")
    # Microseconds.
    assert [(e["name"], e["cat"], e["pid"], e["ts"]) for e in drawn[:3]] == [
        ("expert[0,0]", "expert", 0, 0),
        ("dispatch[0,1]", "dispatch", 0, 500_000),
        ("expert[0,0]", "expert", 3, 1_000_000),
    ]
    assert [round(e["dur"], 3) for e in drawn[:3]] == [500_000, 250_000, 2]
    assert drawn[0]["args"] == {"layer": "m.0"}
    # Every row that is drawn on has the name of its stream, and streams stand as on the page.
    rows = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in of(events, "M")
        if e["name"] == "thread_name"
    }
    assert [rows[e["pid"], e["tid"]] for e in drawn] == [box.stream for box in boxes]
    named = {rows[e["pid"], e["tid"]]: e["tid"] for e in drawn}
    assert sorted(named, key=lambda stream: named[stream]) == ["param", "compute", "inter", "other"]
    names = {e["pid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "process_name"}
    assert names == {0: "rank 0", 3: "rank 3 (EP rank 1)"}
    # Arrows by the boxes of a rank.
    arrows = zip(of(events, "s"), of(events, "f"))
    assert [(s["pid"], rows[s["pid"], s["tid"]], rows[f["pid"], f["tid"]]) for s, f in arrows] == [
        (0, "compute", "inter"),
        (3, "param", "other"),
    ]
    assert [e["args"] for e in of(events, "C")] == [{"sent": 5, "arrived": 0}]
