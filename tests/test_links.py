"""Slow links between ranks on one machine, and the benchmark that runs on them."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import bench_links
import links
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paced import Pace

from ds_moe_ext.load import write_loads, zipf_loads
from ds_moe_ext.moe.observe import TimedTask
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.execute import InlineLanes
from ds_moe_ext.schedule.task import ATTENTION, GATHER, RESTORE, Op, Span, Task
from ds_moe_ext.share import NearestCopy
from ds_moe_ext.strategies.base import Plan
from tests.ranks import pool_of

LAUNCH = Path(links.__file__).parent


@functools.cache
def why_not() -> str:
    """Why this machine makes no namespaces; empty if it does."""
    try:
        links.isolation()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture
def _links() -> None:
    if why_not():
        pytest.skip(why_not())


def started(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(LAUNCH / "links.py"), *words]
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
        links.isolation()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((0, 2, 1, 1), "give 1 or more of both"), ((2, 2, 0, 1), "give both a speed above 0")],
)
def test_clusters_that_cannot_be(sizes: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        links.Cluster(*sizes)


# The benchmark.

SMALL = (
    *("--rows", "64", "--width", "8", "--expert_rows", "4", "--experts", "8", "--layers", "3"),
    *("--attention_ms", "0.1", "--row_us", "1", "--rounds", "1", "--steps_per_round", "2"),
    *("--copies", "1", "2", "--skews", "1.5"),
)


def compared(rank: int, world_size: int, words: tuple[str, ...]) -> list[bench_links.Result]:
    given = bench_links.parse_arguments(words)
    (load,) = bench_links.loads(given, world_size)
    pace = Pace(given.attention_ms / 1e3, given.row_us / 1e6)
    num_experts = load.rows_ILCE.shape[-1]
    contenders = [
        bench_links.Contender(way, pace, given, num_experts) for way in bench_links.ways(given)
    ]
    return bench_links.compare(contenders, load, given, pace)


def test_contenders_agree_and_copies_level_the_ranks() -> None:
    """Of all links the fastest: what is timed means nothing, what is counted does."""
    results, *others = pool_of(4).run(compared, SMALL)
    assert [each.name for each in results] == [
        *("ep", "m = 1", "m = 2", "the same, rematerialized", "the same, late"),
        "fssdp, t and m measured",
    ]
    for theirs in others:
        for ours, other in zip(results, theirs):
            assert (ours.remote, ours.sent_bytes) == (other.remote, other.sent_bytes)
    plain, *copied, late, _ = results
    assert plain.copy_bytes == 0 and plain.hidden_gather is None
    for each in (*copied, late):
        assert each.copy_bytes > 0
        assert each.remote < plain.remote
        assert each.balance < plain.balance
    assert late.hidden_gather == 0.0
    assert plain.faster == [1.0] and plain.faster_by_model == 1.0
    table = list(bench_links.markdown(results))
    assert len({row.count("|") for row in table[1:]}) == 1


def test_loads_of_a_trace(tmp_path: Path) -> None:
    """8 ranks in 4 groups; layers 0, 2 and 4 of 5."""
    rows_ILCE = zipf_loads((6, 5, 8, 12), rows=300, skew=1.0)
    write_loads(tmp_path / "loads.npz", rows_ILCE, range(6))
    words = ("--trace", str(tmp_path / "loads.npz"), "--layers", "3", "--rows", "600")
    (load,) = bench_links.loads(bench_links.parse_arguments(words), 4)
    assert np.array_equal(load.rows_ILCE, rows_ILCE[:, ::2].reshape(6, 3, 4, 2, 12).sum(axis=3))
    with pytest.raises(ValueError, match="5 layers on 8 ranks"):
        list(bench_links.loads(bench_links.parse_arguments(words), 3))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20).filter(any), st.integers(0, 5000))
@settings(deadline=None, derandomize=True)
def test_scaled_rows(rows: list[int], total: int) -> None:
    """The total is exact, and no expert is off by a row or more."""
    rows_E = np.array(rows)
    scaled_E = bench_links.scaled(rows_E, total)
    assert scaled_E.sum() == total
    assert (abs(scaled_E - rows_E * total / rows_E.sum()) < 1).all()


def test_seconds_of_an_exchange() -> None:
    """Two nodes of two; each rank is home to one expert, and expert 3 has a copy on rank 0."""
    rows_CE = np.array([[9, 9, 0, 9], [0, 9, 2, 1], [4, 0, 9, 0], [5, 0, 3, 9]])
    home = Placement.block(4, 4)
    node_C = np.array([0, 0, 1, 1])
    cards = bench_links.Cards(row_bytes=10, inter_bytes_per_s=100.0, intra_bytes_per_s=1000.0)

    def seconds(target: Placement) -> float:
        plan = Plan(home, target, NearestCopy(target, node_C))
        (exchange_s,) = cards.seconds([plan], [rows_CE], node_C)
        return float(exchange_s)

    # Between nodes rank 3 receives 9 + 1 rows; with the copy rank 0 still receives 4 + 5.
    assert seconds(home) == pytest.approx(10 * (9 + 1) / 100)
    copied = home.holds_EC.copy()
    copied[3, 0] = True
    assert seconds(Placement(copied)) == pytest.approx(10 * (4 + 5) / 100)


def timed(op: Op, start_s: float, end_s: float, *, is_adjoint: bool = False) -> TimedTask:
    task = Task(op, 0, Span(0, 1), (), (), adjoint_of=(0,) if is_adjoint else ())
    return TimedTask(task, start_s, end_s, InlineLanes())


def test_what_attention_hides() -> None:
    """Two layers, by hand: forward from 0 to 20, backward of layer 1 from 20 and of 0 from 30."""
    first = [
        timed(ATTENTION, 0, 4),
        timed(GATHER, 1, 6),  # 2 after attention
        timed(RESTORE, 9, 10),
        timed(GATHER, 22, 29),  # again, beside layer 1's attention: 3 after it
        timed(GATHER, 35, 36, is_adjoint=True),
        timed(ATTENTION, 34, 38, is_adjoint=True),
    ]
    second = [
        timed(ATTENTION, 10, 14),
        timed(GATHER, 10, 12),
        timed(RESTORE, 19, 20),
        timed(ATTENTION, 22, 26, is_adjoint=True),
        timed(GATHER, 24, 28, is_adjoint=True),  # 2 after attention
    ]
    assert bench_links.travel([first, second]) == bench_links.Travel(
        gather_s=5 + 7 + 2, gather_bare_s=2 + 3, reduction_s=1 + 4, reduction_bare_s=2
    )
    assert bench_links.travel([[timed(RESTORE, 0, 1)]]) == bench_links.Travel()
