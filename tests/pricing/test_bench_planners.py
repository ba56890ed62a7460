# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext bench-planners``, from a shell."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds_moe_ext.planning.load_files import read_loads, write_loads
from ds_moe_ext.planning.loads import Loads, balance_L
from tests.commands import done

ROOT = Path(__file__).parents[2]
OWN = "benched_own:Busiest"
SIZES = ("--ranks", "4", "--experts", "8", "--layers", "2", "--steps", "4")


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command beside a strategy of the user's own: its exit status, and what it states."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(ROOT / "examples/own_strategy.py", "benched_own.py")

    def run(*arguments: str) -> tuple[int, str]:
        ended = done(monkeypatch, capsys, "bench-planners", *arguments)
        return ended.returncode, ended.stdout + ended.stderr

    return run


def table(text: str) -> dict[str, list[str]]:
    """Cells behind the name of each planner."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_table(bench: Callable[..., tuple[int, str]]) -> None:
    """Loads of a file in two runs of steps: the first of each is only planned by."""
    loads = read_loads("zipf:1.2", ranks=4, experts=8, layers=2, steps=6)
    apart = Loads(loads.rows_ILCE, np.array([1, 2, 3, 20, 21, 22]), "a test", loads.top_k)
    write_loads(Path("loads.npz"), apart)
    status, text = bench(OWN, "prophet", "--loads", "loads.npz")
    assert status == 0
    rows = table(text)
    assert list(rows) == ["ep", "fssdp", "prophet", OWN]
    rows_ILC = loads.rows_ILCE[[1, 2, 4, 5]].sum(axis=2).reshape(4, 2, 4, 2).sum(axis=-1)
    balance, replicas, link, _, _, _, gain = rows["ep"]
    assert balance == f"{balance_L(rows_ILC).mean():.2f}"
    assert (replicas, link, gain) == ("0.00", "0 B", "1.00 x")
    gains = {name: float(cells[-1].split()[0]) for name, cells in rows.items()}
    assert gains["fssdp"] == max(gains.values()) > gains[OWN] > 1
    assert float(rows[OWN][1]) > 0  # replicas
    assert text.startswith(f"by predicted layer time: fssdp is 1 of 4, {gains['fssdp']:.2f} x ep's")
    assert f"{OWN} is 3 of 4, {gains[OWN]:.2f} x ep's speed" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((OWN, *SIZES, "--steps", "1"), "has no two steps in a row .* give loads of more steps"),
        ((OWN, *SIZES, "--ranks", "12"), "12 ranks, which are no whole nodes of 8; give another"),
        (("fsdp", *SIZES), "'fsdp', which is not priced; did you mean 'fssdp'"),
        (("benched_own:Nothing", *SIZES), "'benched_own:Nothing', which"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: tuple[str, ...], expected: str, bench: Callable[..., tuple[int, str]]
) -> None:
    status, text = bench(*arguments)
    assert status == 2
    assert re.search(expected, text), text
