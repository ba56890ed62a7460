# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext loads``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ds_moe_ext import cli
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.loads import Loads, figures_of


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["ds-moe-ext", "loads", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(str(ended.value))


def test_loads_are_shown_and_converted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = ("--ranks", "4", "--experts", "16", "--tokens", "64", "--steps", "2", "--layers", "1")
    table, trace = str(tmp_path / "hot.npz"), str(tmp_path / "hot.jsonl")
    assert run(monkeypatch, "hot_rank", *sizes, "--seed", "2", "--out", table) == 0
    said = capsys.readouterr().out
    assert "hot_rank: 2 steps, 1 layers, 4 ranks of 64 tokens, 16 experts, 2 a token" in said
    assert said.count("3.250") == 6 and f"wrote {table}" in said
    assert run(monkeypatch, table, "--ranks", "8", "--out", trace) == 0
    assert "8 ranks of 32 tokens" in capsys.readouterr().out
    loads, divided = read_loads(table), read_loads(trace)
    assert np.array_equal(divided.rows_ILCE.sum(axis=2), loads.rows_ILCE.sum(axis=2))
    assert run(monkeypatch, "hot_rank", "--out", str(tmp_path / "hot.txt")) == 2
    shown, said = capsys.readouterr()
    assert "let it end on .npz or .jsonl" in said and not shown  # before loads are made


def test_figures() -> None:
    rows_IE = np.array([[6, 2, 0, 0], [2, 2, 2, 2], [2, 2, 2, 2], [0, 0, 0, 8]])
    rows_ILCE = np.stack([rows_IE, rows_IE], axis=1)[:, None]
    figures = figures_of(Loads(rows_ILCE, np.array([1, 2, 3, 9]), "a test"))
    assert figures.by_rank_IL[:, 0].tolist() == [2, 1, 1, 2]
    assert figures.hottest_IL[:, 0].tolist() == [3, 1, 1, 4]
    assert figures.unused_IL[:, 0].tolist() == [0.5, 0, 0, 0.75]
    assert figures.moved_L[:, 0].tolist() == [0.5, 0]  # the last step is too far off
