"""The table of planners, on synthetic loads."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import table_of_planners

from ds_moe_ext.load import balance_L, write_loads, zipf_loads


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of steps, 4 ranks on 2 nodes, 8 experts: as many rows as planners."""
    rows_ILCE = zipf_loads((8, 2, 4, 8), rows=1000, skew=1.5)
    trace = tmp_path / "loads.npz"
    write_loads(trace, rows_ILCE, [1, 2, 3, 4, 100, 101, 102, 103])
    runs = table_of_planners.read_trace(trace)
    assert [len(run) for run in runs] == [4, 4]
    np.savez(
        tmp_path / "other.npz",
        counts_IRLE=rows_ILCE.transpose(0, 2, 1, 3).astype(np.uint16),
        iteration_I=np.arange(8),
    )
    (run,) = table_of_planners.read_trace(tmp_path / "other.npz")
    assert np.array_equal(run, rows_ILCE)

    given = ["--trace", str(trace), "--nodes", "2", "--degrees", "2", "--copies", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["table_of_planners.py", *given])
    table_of_planners.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len(rows) == 2 + 2 * 3
    # Plain expert parallelism, by hand: two experts a rank; the first steps are left out.
    later_ILCE = rows_ILCE[[1, 2, 3, 5, 6, 7]]
    rank_rows_ILC = later_ILCE.sum(axis=2).reshape(6, 2, 4, 2).sum(axis=-1)
    balance = f"{balance_L(rank_rows_ILC).mean():.2f}"
    assert rows[0][:5] == ["plain expert parallelism", "", "", balance, balance]
    # Copies known to be right level the ranks.
    materialized = next(row for row in rows if row[:3] == ["materialization alone", "2", "2"])
    assert float(materialized[3]) < float(balance)


def test_nodes_must_divide_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_loads(tmp_path / "loads.npz", zipf_loads((3, 1, 4, 8), rows=9, skew=1.0), range(3))
    arguments = ["table_of_planners.py", "--trace", str(tmp_path / "loads.npz"), "--nodes", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        table_of_planners.main()
    assert "--nodes is 3, which does not divide 4 ranks" in capsys.readouterr().err
