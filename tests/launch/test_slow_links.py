# SPDX-License-Identifier: Apache-2.0
"""Slow links between ranks on one machine, and the benchmark that runs on them."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import cluster
import numpy as np
import pytest
import slow_links
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import bare, union
from slow_links_figures import (
    Cards,
    Result,
    RowFlow,
    Travel,
    flow_of,
    markdown,
    rows_between,
    travel,
)

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseHome, NearestCopy
from ds_moe_ext.moe.observation import TimedTask
from ds_moe_ext.planning.layer_costs import cell_rows
from ds_moe_ext.planning.load_files import write_table
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.loads import Loads
from ds_moe_ext.planning.prices import Prices, flow_seconds, nearest_copy_flow, step_seconds
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.schedule.executor import InlineLanes
from ds_moe_ext.schedule.task import ATTENTION, EXPERT, GATHER, JOIN, RESTORE, Op, Span, Task
from tests.ranks import pool_of

LAUNCH = Path(cluster.__file__).parent


@functools.cache
def why_not() -> str:
    """Why this machine makes no namespaces; empty if it does."""
    try:
        cluster.isolation()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture
def _links() -> None:
    if why_not():
        pytest.skip(why_not())


def started(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(LAUNCH / "cluster.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


SPEEDS = """
    import os, pathlib, socket, time
    rank, size = int(os.environ["RANK"]), 1 << 20
    said = [socket.gethostname(), os.environ["LOCAL_RANK"]]
    if rank in (1, 2):
        sender, _ = socket.create_server(("0.0.0.0", 5000)).accept()
        while size:
            size -= len(sender.recv(1 << 16))
        sender.sendall(b"x")
    for peer in (1, 2) if rank == 0 else ():
        while True:
            try:
                receiver = socket.create_connection((f"10.77.0.{peer + 1}", 5000))
                break
            except OSError:
                time.sleep(0.02)
        start = time.perf_counter()
        receiver.sendall(bytes(size))
        receiver.recv(1)
        said.append(str(time.perf_counter() - start))
    pathlib.Path(__file__).with_name(f"said_by_{rank}").write_text(" ".join(said))
"""


@pytest.mark.usefixtures("_links")
def test_links_are_as_slow_as_told(tmp_path: Path) -> None:
    """A mebibyte over 40 Mbit/s takes 0.21 s, over 400 Mbit/s 0.021 s; a burst passes at once."""
    done = started("--inter_mbit", "40", "--intra_mbit", "400", script(tmp_path, SPEEDS))
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"said_by_{rank}").read_text().split() for rank in range(4)]
    near_s, far_s = (float(seconds) for seconds in said[0][2:])
    places = [tuple(words[:2]) for words in said]
    assert places == [("node0", "0"), ("node0", "1"), ("node1", "0"), ("node1", "1")]
    assert far_s > 0.95 * 8 * 2**20 / 40e6
    assert 0.95 * 8 * 2**20 / 400e6 < near_s < far_s


@pytest.mark.usefixtures("_links")
def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    """The others would sleep for longer than the test's patience."""
    text = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(1000)
    """
    assert started("--nodes", "3", "--ranks_per_node", "1", script(tmp_path, text)).returncode == 7


def test_a_machine_without_the_tools_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="install iproute2 and util-linux"):
        cluster.isolation()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((0, 2, 1, 1), "give 1 or more of both"), ((2, 2, 0, 1), "give both a speed above 0")],
)
def test_clusters_that_cannot_be(sizes: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cluster.Cluster(*sizes)


# The benchmark.

SMALL = (
    *("--rows", "64", "--width", "8", "--expert_rows", "4", "--experts", "8", "--layers", "2"),
    *("--attention_ms", "0.1", "--row_us", "1", "--rounds", "1", "--steps_per_round", "1"),
    *("--copies", "2", "--skews", "1.5"),
)
CHOSEN = ("ep", "m = 2", "the same, late", "prophet", "prophet, not hidden")


def compared(rank: int, world_size: int, words: tuple[str, ...]) -> list[Result]:
    given = slow_links.parse_arguments(words)
    (load,) = slow_links.loads(given, world_size)
    chosen = [way for way in slow_links.ways(given) if way.name in CHOSEN]
    contenders = slow_links.contenders(given, chosen, load)
    return slow_links.compare(contenders, load, num_rounds=1, steps_per_round=1)


@pytest.mark.slow
def test_contenders_agree_and_copies_level_the_ranks() -> None:
    """Of all links the fastest: what is timed means nothing, what is counted does."""
    results, *others = pool_of(4).run(compared, SMALL)
    for theirs in others:
        for ours, other in zip(results, theirs):
            assert (ours.remote, ours.sent_bytes) == (other.remote, other.sent_bytes)
    assert tuple(each.name for each in results) == CHOSEN
    plain, *copied, scheduled, bare = results
    assert plain.copy_bytes == 0 and plain.hidden_gather is None
    assert plain.faster == [1.0] and plain.faster_by_model == 1.0
    for each in copied:
        assert each.copy_bytes > 0
        assert each.remote < plain.remote
        assert each.balance < plain.balance
    assert copied[-1].hidden_gather == 0.0
    for each in (scheduled, bare):  # warmed up so long that their models are checked
        assert {"exchange of rows", "experts"} <= {term.name for term in each.told.terms}
    table = list(markdown(results))
    rows = [row for row in table if row.startswith("|")]
    assert len(rows) == 2 + len(results) and len({row.count("|") for row in rows}) == 1
    notes = [row for row in table if row.startswith("- prophet: ")]
    assert len(notes) == 1 and " off (" in notes[0]


def test_contenders_of_the_command_line() -> None:
    """Without copies given, HECATE's strategy finds its own."""
    chosen = slow_links.parse_arguments(("--strategies", "fssdp", "--copies"))
    measured = "fssdp, t and m measured", "the same, paper share"
    assert [way.name for way in slow_links.ways(chosen)] == ["ep", *measured]
    names = [way.name for way in slow_links.ways(slow_links.parse_arguments(()))]
    assert len(set(names)) == len(names) == 17


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
HOME = Placement.block(4, 4)


def with_a_copy() -> Placement:
    """Expert 3, whose home is rank 3, on rank 0 too."""
    holds_EC = HOME.holds_EC.copy()
    holds_EC[3, 0] = True
    return Placement(holds_EC)


def test_seconds_of_an_exchange() -> None:
    """Two nodes of two; each rank is home to one expert."""
    rows_CE = np.array([[9, 9, 0, 9], [0, 9, 2, 1], [4, 0, 9, 0], [5, 0, 3, 9]])
    cards = Cards(row_bytes=10, inter_bytes_per_s=100.0, intra_bytes_per_s=1000.0)

    def seconds(plan: Plan) -> float:
        (exchange_s,) = cards.seconds(rows_between([plan], [rows_CE]), NODE_C)
        return float(exchange_s)

    # Between nodes rank 3 receives 9 + 1 rows; with the copy rank 0 still receives 4 + 5.
    copied = with_a_copy()
    assert seconds(Plan(HOME, HOME, LocalElseHome(HOME, HOME))) == pytest.approx(10 * 10 / 100)
    assert seconds(Plan(HOME, copied, NearestCopy(copied, NODE_C))) == pytest.approx(10 * 9 / 100)


def test_rows_go_as_the_plan_shares_them() -> None:
    """Rank 1's rows for expert 3 go to the copy on its node, or home to the other node."""
    rows_CE = np.array([[0, 0, 0, 8], [0, 0, 0, 6], [0, 0, 0, 0], [0, 0, 0, 1]])
    copied = with_a_copy()
    shares = (NearestCopy(copied, NODE_C), LocalElseHome(HOME, copied))
    nearest, home = (
        flow_of(rows_between([Plan(HOME, copied, share)], [rows_CE]), NODE_C) for share in shares
    )
    assert nearest.computed_LC.tolist() == [[14, 0, 0, 1]]
    assert nearest.out_LN.tolist() == [[0, 0]]
    assert home.computed_LC.tolist() == [[8, 0, 0, 7]]
    assert home.sent_LC.tolist() == [[0, 6, 0, 0]]
    assert home.received_LC.tolist() == [[0, 0, 0, 6]]
    assert (home.out_LN.tolist(), home.in_LN.tolist()) == ([[6, 0]], [[0, 6]])


@given(st.integers(0, 10**6))
@settings(deadline=None, derandomize=True)
def test_flow_is_that_of_the_planners(seed: int) -> None:
    """Exact where rows are not split; else within a row for each sender and expert."""
    random = np.random.default_rng(seed)
    num_cells, num_experts = 4, 8
    rows_CE = random.integers(0, 50, (num_cells, num_experts))
    home = Placement.block(num_experts, num_cells)
    target = home.with_copies(random.random((num_experts, num_cells)) < 0.3)

    def flow(plan: Plan) -> RowFlow:
        return flow_of(rows_between([plan], [rows_CE]), NODE_C)

    local = flow(Plan(home, target, LocalElseHome(home, target)))
    cells = cell_rows(home, target, rows_CE)
    assert np.array_equal(local.computed_LC, [cells.computed_C])
    assert np.array_equal(local.received_LC, [cells.received_C])

    nearest = flow(Plan(home, target, NearestCopy(target, NODE_C)))
    planned = nearest_copy_flow([target], [rows_CE], NODE_C)
    for name, values in vars(nearest).items():
        assert (abs(values - vars(planned)[name]) <= rows_CE.size).all()
    assert np.array_equal(nearest.sent_LC, planned.sent_LC)
    assert np.array_equal(nearest.out_LN, planned.out_LN)

    prices = Prices(
        row_s=1.0, row_bytes=2.0, copy_s=0.0, inter_bytes_per_s=3.0, intra_bytes_per_s=5.0
    )
    plain = flow(Plan(home, home, LocalElseHome(home, home)))
    expected_L = step_seconds([home], [rows_CE], prices=prices, node_C=NODE_C)
    assert flow_seconds(plain, prices=prices) == pytest.approx(expected_L)


def timed(op: Op, start_s: float, end_s: float, *, is_adjoint: bool = False) -> TimedTask:
    task = Task(op, 0, Span(0, 1), (), (), adjoint_of=(0,) if is_adjoint else ())
    return TimedTask(task, start_s, end_s, InlineLanes())


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
def test_union_of_spans(given_spans: list[tuple[int, int]]) -> None:
    """The same whole seconds are covered, once each."""
    spans = [(float(start), float(start + length)) for start, length in given_spans]
    apart = union(spans)
    assert all(end < later for (_, end), (later, _) in pairwise(apart))
    covered = {s for start, end in spans for s in range(int(start), int(end))}
    assert bare(0.0, 40.0, apart) == 40 - len(covered)
