# SPDX-License-Identifier: Apache-2.0
"""The benchmark of slow links."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import slow_links
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import Pace, bare, union
from slow_links import Result, Routed, Travel, markdown, rows_between, travel

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica
from ds_moe_ext.moe.observation import TimedTask
from ds_moe_ext.planning.load_files import write_table
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.loads import Loads
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule.executor import InlineStreams
from ds_moe_ext.schedule.task import ATTENTION, EXPERT, GATHER, JOIN, RESTORE, ChunkRange, Op, Task
from tests.ranks import pool_of

SMALL = (
    *("--rows", "64", "--width", "8", "--expert_rows", "4", "--experts", "8", "--layers", "2"),
    *("--attention_ms", "0.1", "--row_us", "1", "--rounds", "1", "--steps_per_round", "1"),
    *("--replicas", "2", "--skews", "1.5", "--inter_mbit", "1e6", "--start_us", "0"),
)
CHOSEN = ("ep", "m = 2", "the same, late", "prophet", "prophet, not hidden")


def compared(rank: int, world_size: int, words: tuple[str, ...]) -> list[Result]:
    given = slow_links.parse_arguments(words)
    (load,) = slow_links.loads(given, world_size)
    chosen = [way for way in slow_links.ways(given) if way.name in CHOSEN]
    return slow_links.compared(given, chosen, load)


@pytest.mark.slow
def test_contenders_agree_and_replicas_level_the_ranks() -> None:
    """Of all links the fastest: what is timed means nothing, what is counted does."""
    results, *others = pool_of(4).run(compared, SMALL)
    for theirs in others:
        for ours, other in zip(results, theirs):
            assert (ours.remote, ours.sent_bytes) == (other.remote, other.sent_bytes)
    assert tuple(each.name for each in results) == CHOSEN
    plain, *copied, scheduled, bare = results
    assert plain.replica_bytes == 0 and plain.hidden_gather is None
    assert plain.faster == [1.0]
    for each in copied:
        assert each.replica_bytes > 0
        assert each.remote < plain.remote
        assert each.balance < plain.balance
    assert copied[-1].hidden_gather == 0.0
    for each in (scheduled, bare):  # warmed up so long that their models are checked
        assert {"exchange of rows", "experts"} <= {term.name for term in each.reported.terms}
    table = list(markdown(results))
    rows = [row for row in table if row.startswith("|")]
    assert len(rows) == 2 + len(results) and len({row.count("|") for row in rows}) == 1
    notes = [row for row in table if row.startswith("- prophet: ")]
    assert len(notes) == 1 and " off (" in notes[0]


def test_loads_of_a_trace(tmp_path: Path) -> None:
    """8 ranks in 4 groups; layers 0, 2 and 4 of 5."""
    rows_ILCE = zipf_loads((6, 5, 8, 12), rows=300, skew=1.0)
    write_table(tmp_path / "loads.npz", Loads(rows_ILCE, np.arange(6), "a test"))
    words = ("--trace", str(tmp_path / "loads.npz"), "--layers", "3", "--rows", "600")
    (load,) = slow_links.loads(slow_links.parse_arguments(words), 4)
    assert np.array_equal(load.rows_ILCE, rows_ILCE[:, ::2].reshape(6, 3, 4, 2, 12).sum(axis=3))
    with pytest.raises(ValueError, match="5 layers on 8 ranks"):
        list(slow_links.loads(slow_links.parse_arguments(words), 3))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20).filter(any), st.integers(0, 5000))
@settings(deadline=None, derandomize=True)
def test_scaled_rows(rows: list[int], total: int) -> None:
    """The total is exact, and no expert is off by a row or more."""
    rows_E = np.array(rows)
    scaled_E = slow_links.scaled(rows_E, total)
    assert scaled_E.sum() == total
    assert (abs(scaled_E - rows_E * total / rows_E.sum()) < 1).all()


NODE_C = np.array([0, 0, 1, 1])
OWNER = Placement.block(4, 4)


def with_a_replica() -> Placement:
    """Expert 3, whose owner is rank 3, on rank 0 too."""
    holds_EC = OWNER.holds_EC.copy()
    holds_EC[3, 0] = True
    return Placement(holds_EC)


def test_rows_go_as_the_plan_shares_them() -> None:
    """Rank 1's rows for expert 3 go to the copy on its node, or owning the other node."""
    rows_CE = np.array([[0, 0, 0, 8], [0, 0, 0, 6], [0, 0, 0, 0], [0, 0, 0, 1]])
    copied = with_a_replica()
    nearest, owner = (
        Routed.of(rows_between([Plan(OWNER, copied, share)], [rows_CE]), NODE_C, Pace(1.0, 0.1))
        for share in (NearestReplica(copied, NODE_C), LocalElseOwner(OWNER, copied))
    )
    assert (nearest.remote, nearest.abroad) == (6 / 15, 0.0)
    assert (owner.remote, owner.abroad) == (6 / 15, 6 / 15)
    assert (nearest.balance, owner.balance) == (14 / 15 * 4, 8 / 15 * 4)
    assert nearest.limit_s == owner.limit_s == pytest.approx(3 * (1.0 + 0.1 * 15 / 4))


def timed(op: Op, start_s: float, end_s: float, *, is_adjoint: bool = False) -> TimedTask:
    task = Task(op, 0, ChunkRange(0, 1), (), (), adjoint_of=(0,) if is_adjoint else ())
    return TimedTask(task, start_s, end_s, InlineStreams())


def test_what_computing_hides() -> None:
    """Of any layer; a wait is no computing, and observed attention may end with a wait."""
    tasks = [
        timed(ATTENTION, 0, 40),
        timed(GATHER, 1, 6),  # held until 4: 2 bare
        timed(JOIN, 4, 8),
        timed(EXPERT, 8, 12),
        timed(RESTORE, 12, 13),
        timed(GATHER, 9, 15),  # of the layer after it, beside experts: 2 bare
        timed(EXPERT, 20, 24, is_adjoint=True),
        timed(GATHER, 19, 30, is_adjoint=True),  # 1 before the experts, then 5 of which 3 are held
    ]
    held = [(0.0, 4.0), (26.0, 29.0), (27.0, 28.0)]
    assert travel(tasks, held) == Travel(
        gather_s=5 + 6, gather_bare_s=2 + 2, reduction_s=11, reduction_bare_s=1 + 2 + 1
    )
    assert travel([timed(RESTORE, 0, 1)], []) == Travel()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8))
@settings(deadline=None, derandomize=True)
def test_union_of_chunk_ranges(given_chunk_ranges: list[tuple[int, int]]) -> None:
    """The same whole seconds are covered, once each."""
    chunk_ranges = [(float(start), float(start + length)) for start, length in given_chunk_ranges]
    apart = union(chunk_ranges)
    assert all(end < later for (_, end), (later, _) in pairwise(apart))
    covered = {s for start, end in chunk_ranges for s in range(int(start), int(end))}
    assert bare(0.0, 40.0, apart) == 40 - len(covered)
