# SPDX-License-Identifier: Apache-2.0
"""The table of planners, on synthetic loads.

Shape letters: I logged steps, L layers, C EP ranks, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import planners_table
import pytest
from rival_planners import A100, Layout, PricedCluster, to_owner

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.load_files import read_table, write_table
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.loads import Loads, balance_L

RUN_ILCE = zipf_loads((8, 2, 4, 8), rows=1000, skew=1.5)
"""Routed by 4 ranks to 8 experts."""


def priced(rows: float) -> PricedCluster:
    """2 nodes of 2 ranks."""
    hardware = replace(A100, ranks_per_node=2)
    return PricedCluster.of(hardware, rows=rows, width=64)


def run_main(monkeypatch: pytest.MonkeyPatch, trace: Path, *given: str) -> None:
    arguments = ["planners_table.py", "--trace", str(trace), *given]
    monkeypatch.setattr(sys, "argv", arguments)
    planners_table.main()


def write_loads(path: Path, rows_ILCE: np.ndarray, steps_I: Sequence[int]) -> None:
    write_table(path, Loads(rows_ILCE, np.asarray(steps_I), "a test"))


def test_traces(tmp_path: Path) -> None:
    """Two runs of steps; the other kind of file."""
    write_loads(tmp_path / "loads.npz", RUN_ILCE, [1, 2, 3, 4, 100, 101, 102, 103])
    runs = read_table(tmp_path / "loads.npz").runs()
    assert [len(run) for run in runs] == [4, 4]
    np.savez(
        tmp_path / "other.npz",
        counts_IRLE=RUN_ILCE.transpose(0, 2, 1, 3).astype(np.uint16),
        iteration_I=np.arange(8),
    )
    (run,) = read_table(tmp_path / "other.npz").runs()
    assert np.array_equal(run, RUN_ILCE)


def table(text: str) -> dict[str, dict[str, str]]:
    """Of each planner what stands below each title."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0][1:], row[1:])) for row in cells[2:]}


def pair(row: dict[str, str], title: str) -> tuple[float, float]:
    """On the exact rows, and stale."""
    exact, stale = (float(each.rstrip("%")) for each in row[title].split(" / "))
    return exact, stale


TWO_RUNS = (1, 2, 3, 4, 100, 101, 102, 103)


def balance_of_ep() -> float:
    """By hand: two experts a rank; the first steps are left out."""
    later_ILCE = RUN_ILCE[[1, 2, 3, 5, 6, 7]]
    computed_ILC = later_ILCE.sum(axis=2).reshape(6, 2, 4, 2).sum(axis=-1)
    return float(balance_L(computed_ILC).mean())


@pytest.mark.slow
def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of steps, 2 nodes: a row a planner and way, and what these must keep."""
    write_loads(tmp_path / "loads.npz", RUN_ILCE, TWO_RUNS)
    given = ("--width", "64", "--degrees", "4", "--replicas", "1", "2")
    run_main(monkeypatch, tmp_path / "loads.npz", *given)
    rows = table(capsys.readouterr().out)
    assert len(rows) == 1 + 1 + 2 * 4 + 2 * 2 * 4 + 2 * (1 + 5 + 4) + 2 * 6 + 5
    of_ep = f"{balance_of_ep():.3f}"
    assert rows["ep"]["max/mean"] == f"{of_ep} / {of_ep}"
    assert pair(rows["ep"], "`ep` / it, seconds") == (1, 1)
    # What plans by exact counts knows nothing else, and all of its replicas are late.
    after_gate = [name for name in rows if name.startswith(("llep", "echo", "loong", "ultraep"))]
    assert len(after_gate) == 20
    for name in after_gate:
        exact, stale = pair(rows[name], "max/mean")
        assert exact == stale < balance_of_ep()
        assert (
            rows[name]["of these after the gate"] == rows[name]["replicas a rank"] != "0.00 / 0.00"
        )
    in_open = "`ep` / it, open copies counted"
    for name, row in rows.items():
        if name in after_gate or name.endswith("as it comes"):
            assert pair(row, in_open) <= pair(row, "`ep` / it, seconds")
        else:
            assert row[in_open] == row["`ep` / it, seconds"]
            assert row["of these after the gate"] == "0.00 / 0.00"
    seconds = {name: pair(row, "`ep` / it, seconds") for name, row in rows.items()}
    replicas = {name: rows[name]["replicas a rank"] for name in rows}
    for name, own in (
        *((f"eplb, +{more}", "even") for more in (1, 2)),
        *((f"laer, {slots} slots", "even, own node") for slots in (3, 5)),
        *((f"flexmoe, {slots} slots", "even, own node") for slots in (3, 5)),
        ("fssdp, t = 4, m = 1", "nearest"),
        ("fssdp, t = 4, m = 2", "nearest"),
        ("prophet, alpha = 1", "local else owner"),
    ):
        names = own, "planned", "priced", "optimum"
        way, planned, priced, optimum = (f"{name}, {each}" for each in names)
        assert replicas[way] == replicas[planned] == replicas[priced] == replicas[optimum]
        # Best by the table's own seconds, but for whole rows; planned parts are, of exact rows.
        assert seconds[optimum][0] >= seconds[way][0] - 0.01
        assert seconds[optimum][1] >= max(seconds[way][1], seconds[planned][1]) - 0.01
        assert seconds[planned][0] == pytest.approx(seconds[optimum][0], rel=0.05)
        assert seconds[priced][0] == pytest.approx(seconds[optimum][0], rel=0.05)
        assert seconds[priced][1] >= seconds[planned][1] - 0.01
    for name in after_gate[1::2]:
        own = name.replace("optimum", "spilled")
        assert replicas[name] == replicas[own]
        assert seconds[name][0] >= seconds[own][0] - 0.01
    for name in ("fssdp, t = 4, m = 1", "fssdp, t = 4, m = 2"):
        whole, alone, nearest = (
            f"{name}, {each}" for each in ("as it comes", "without repair", "nearest")
        )
        # Both times planned on a forecast; never worse than the paper's rule by that.
        assert seconds[whole][1] >= seconds[alone][1] - 0.01
        assert seconds[alone][0] >= seconds[nearest][0] - 0.01
        assert float(replicas[alone].split()[0]) <= int(name[-1])
    as_it_comes, papers = "prophet, alpha = 1, as it comes", "prophet, alpha = 1, local else owner"
    assert seconds[as_it_comes][0] >= seconds[papers][0] - 0.01


def test_open_replicas_take_their_time_both_ways() -> None:
    """Experts 0 and 1, at the owner in rank 0, copied to ranks 1 and 2 before the gate and after
    it: the second link carries one expert, rank 0's carries two where both are late."""
    cluster, owner = priced(rows=1000), Placement.block(8, 4)
    replicas_EC = np.zeros((2, 8, 4), dtype=bool)
    replicas_EC[0, 0, 1] = replicas_EC[1, 1, 2] = True
    target = owner.with_replicas(replicas_EC.any(axis=0))
    for planned, links in ((target, 0), (owner.with_replicas(replicas_EC[0]), 1), (owner, 2)):
        planner = planners_table.Planner(
            "a test",
            lambda step, planned=planned: [Layout.of(target, planned) for _ in step.owners],
            to_owner,
        )
        found = planners_table.score(planner, [RUN_ILCE], cluster, window=0)
        assert found.replicas == 2 / 4
        assert found.late == links / 4
        expected_s = found.priced_s + links * 2 * cluster.prices.copy_s
        assert found.open_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--nodes", "3"), "--nodes is 3, which does not divide 4 ranks"),
        (("--eplb", "1", "-1"), "--eplb is -1; give 0 or more"),
        (("--late_slots", "1", "0"), "--late_slots is 0; give 1 or more"),
        (("--laer", "3", "1"), "--laer is 1, but 8 experts need 2 slots of each of 4 ranks"),
        (("--run", "1"), "--run is 1, but the trace has 1"),
        (("--window", "0"), "--window is 0; give 1 or more"),
        (("--hardware", "none.json"), "none.json' cannot be read"),
    ],
)
def test_what_is_refused(
    given: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_loads(tmp_path / "loads.npz", zipf_loads((3, 1, 4, 8), rows=9, skew=1.0), range(3))
    with pytest.raises(SystemExit):
        run_main(monkeypatch, tmp_path / "loads.npz", *given)
    assert message in capsys.readouterr().err


def test_a_cluster_that_says_too_little() -> None:
    hardware = replace(A100, inter=None)
    with pytest.raises(ValueError, match="lacks 'inter' or a rate"):
        PricedCluster.of(hardware, rows=1000, width=64)
