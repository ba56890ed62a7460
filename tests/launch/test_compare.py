# SPDX-License-Identifier: Apache-2.0
"""Two finished runs side by side. Pure, but for the script that reads their folders."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compare import Finished, check_comparable, comparison, largest_difference, remarks, shown_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from summary import Summary

from ds_moe_ext.report.page import write_report
from ds_moe_ext.report.record import LayerRecord, PlacementRecord, RunRecord
from ds_moe_ext.report.summary import Outcome

ROOT = Path(__file__).parents[2]


def summary(strategy: str, losses: list[float], **other: object) -> Summary:
    base = Summary(
        strategy=strategy,
        model="tiny.json",
        text="a book",
        seed=1,
        world_size=4,
        tokens_per_step=1000,
        first_step=0,
        losses=losses,
        held_out_losses={2: 4.0},
        tokens_per_s=2000.0,
        seconds_per_step_s=0.5,
        balance_by_layer={"a": 1.5},
        versions={"torch": "2.13.0"},
    )
    return dataclasses.replace(base, **other)  # type: ignore[arg-type]


def printed(first: Finished, second: Finished) -> dict[str, list[str]]:
    """Entries of the table by the name of their row."""
    text = io.StringIO()
    Console(file=text, width=120).print(comparison(first, second))
    lines = text.getvalue().replace("\u2503", "\u2502").splitlines()
    rows = [[entry.strip() for entry in line.split("\u2502")[1:-1]] for line in lines]
    return {name: entries for name, *entries in (row for row in rows if row)}


PLAIN = Finished(Path("runs/ep"), summary("ep", [5.0, 4.5, 4.0, 3.0]), Outcome(1.6, 1.6, 0.0, 0))
COPIED = Finished(
    Path("runs/fssdp"),
    summary("fssdp", [5.0, 4.25, 4.0, 3.125], tokens_per_s=2200.0, seconds_per_step_s=0.4),
    Outcome(1.5, 1.1, 12.0, 1034),
)


def test_the_table_worked_by_hand() -> None:
    assert printed(PLAIN, COPIED) == {
        "": ["ep", "fssdp", "difference"],
        "loss, step 1": ["5.0000", "5.0000", "+0.0e+00"],
        "loss, step 2": ["4.5000", "4.2500", "-2.5e-01"],
        "loss, step 4": ["3.0000", "3.1250", "+1.2e-01"],
        "largest difference, step 2": ["", "", "2.5e-01"],
        "tokens/s": ["2,000", "2,200", "+10.0 %"],
        "a step takes": ["0.500 s", "0.400 s", ""],
        "busiest cell / mean, at home only": ["1.60", "1.50", ""],
        "busiest cell / mean, as computed": ["1.60", "1.10", ""],
        "copies a step, all layers": ["0.0", "12.0", ""],
        "experts that changed homes": ["0", "1,034", ""],
    }
    text, *pages = remarks(PLAIN, COPIED)
    assert "weights of seed 1 and read a book" in text
    assert pages == [
        "Pictures of ep: runs/ep/report.html",
        "Pictures of fssdp: runs/fssdp/report.html",
    ]


def test_a_run_without_the_extension_and_one_that_was_resumed() -> None:
    runs = [
        Finished(Path("a"), dataclasses.replace(run.summary, first_step=100), outcome)
        for run, outcome in ((PLAIN, None), (COPIED, COPIED.outcome))
    ]
    table = printed(*runs)
    assert table["loss, step 101"][0] == "5.0000" and "largest difference, step 102" in table
    assert table["busiest cell / mean, as computed"] == ["-", "1.10", ""]
    assert len(remarks(*runs)) == 2


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.floats(0, 10)] * 2), min_size=1, max_size=30))
def test_nothing_is_further_apart_than_the_largest_difference(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = zip(*pairs)
    worst = largest_difference(ours, theirs)
    assert worst.loss == abs(ours[worst.step - 1] - theirs[worst.step - 1])
    assert all(abs(a - b) <= worst.loss for a, b in pairs)
    assert worst == largest_difference(theirs, ours)


@pytest.mark.parametrize(
    ("num_steps", "shown"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 3, 5]), (200, [1, 100, 200])],
)
def test_first_middle_and_last_step(num_steps: int, shown: list[int]) -> None:
    assert shown_steps(num_steps) == shown


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 2}, "seed is 1 in one run and 2 in the other"),
        ({"text": "another"}, "text is 'a book' in one run and 'another' in the other"),
        ({"tokens_per_step": 7}, "tokens_per_step is 1000 in one run and 7"),
        ({"losses": [5.0]}, "one run has 4 steps and the other 1; give both the same --steps"),
    ],
)
def test_runs_that_cannot_be_compared(other: dict[str, object], says: str) -> None:
    theirs = dataclasses.replace(COPIED.summary, **other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        check_comparable(PLAIN.summary, theirs)


def write_run(folder: Path, strategy: str) -> None:
    """What a run leaves behind: 2 steps, 1 layer of 2 experts."""
    written = summary(strategy, [5.0, 4.0])
    written.write(folder)
    assert Summary.read(folder) == written
    rows_ILE = np.array([[[6, 2]], [[4, 4]]])
    copied = PlacementRecord(np.array([[[1, 0]], [[0, 0]]]), rows_ILE, (), 1, (((), ()),))
    record = RunRecord(
        strategy=strategy,
        world_size=2,
        num_cells=2,
        layers=(LayerRecord("a", "fake", 2, 1, (0, 1), 0),),
        steps_I=(0, 1),
        rows_ILE=rows_ILE,
        cell_rows_ILC=np.array([[[4, 4]], [[4, 4]]]),
        seconds_by_kind={},
        timeline=(),
        versions={},
        placements=copied,
    )
    write_report(record, folder)


def compared(*folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch/compare.py"), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_reads_what_runs_leave_behind(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        write_run(folder, folder.name)
    assert Finished.read(first).outcome == Outcome(1.25, 1.0, 0.5, 0)
    done = compared(first, second)
    assert done.returncode == 0, done.stderr
    assert "busiest cell / mean, at home only" in done.stdout and "1.25" in done.stdout


def test_the_script_says_what_is_wrong(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "a")
    missing = compared(tmp_path / "a", tmp_path / "b")
    assert missing.returncode == 1
    assert missing.stderr == (
        f"compare: {tmp_path}/b/summary.json is not there; name the --output folder of a finished "
        "run\n"
    )
    (tmp_path / "a/summary.json").write_text("{}")
    old = compared(tmp_path / "a", tmp_path / "a")
    assert old.returncode == 1 and "is not a summary of this version" in old.stderr
