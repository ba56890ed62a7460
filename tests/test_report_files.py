# SPDX-License-Identifier: Apache-2.0
"""The report's files: whole or not at all, and written rarely enough."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from ds_moe_ext.files import whole_files
from ds_moe_ext.hosts.attachment.notices import or_warn
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.report_files import ReportFiles, keep_earlier, write_whole
from tests.test_report import worked


class Slow:
    """A clock, and a record that takes some seconds of it to be made."""

    def __init__(self, takes_s: float) -> None:
        self.now_s, self.takes_s, self.made_s = 0.0, takes_s, []

    made_s: list[float]

    def clock(self) -> float:
        return self.now_s

    def record(self) -> RunRecord:
        self.made_s.append(self.now_s)
        self.now_s += self.takes_s
        return worked()


def written_s(folder: Path, takes_s: float, every_s: int | None, until_s: float) -> list[float]:
    """When files are begun in a run whose steps take ten seconds."""
    slow = Slow(takes_s)
    files = ReportFiles(folder, every_s, slow.clock)
    with mock.patch("ds_moe_ext.report.report_files.page_of", return_value="<html></html>"):
        while slow.now_s < until_s:
            slow.now_s += 10.0
            files.after_step(slow.record)
    return slow.made_s


def test_files_are_written_every_so_many_seconds(tmp_path: Path) -> None:
    twice = [each for each in (300.0, 600.0, 900.0) for _ in range(2)]
    assert written_s(tmp_path, 0.0, 300, 1000.0) == twice
    assert json.loads((tmp_path / "report.json").read_text())["strategy"] == "ep"
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_what_an_earlier_run_left_is_kept(tmp_path: Path) -> None:
    assert keep_earlier(tmp_path / "none yet") == ""
    for number in (1, 2):
        (tmp_path / "report.json").write_text(str(number))
        (tmp_path / "report.html").write_text(str(number))
        assert keep_earlier(tmp_path) == (
            f"the report of an earlier run in {str(tmp_path)!r} was renamed to "
            f"report.{number}.json and report.{number}.html"
        )
    (tmp_path / "report.html").write_text("3")
    assert keep_earlier(tmp_path).endswith("was renamed to report.3.html")
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        **{f"report.{number}.json": str(number) for number in (1, 2)},
        **{f"report.{number}.html": str(number) for number in (1, 2, 3)},
    }


def test_what_takes_long_is_written_rarely(tmp_path: Path) -> None:
    made_s = written_s(tmp_path, 1.0, 300, 20_000.0)
    assert made_s[:2] == [300.0, 301.0]
    # Each file takes 1 s, so that 2,000 s pass until it is written again.
    assert all(2000.0 <= later - before <= 2020.0 for before, later in zip(made_s, made_s[2:]))
    assert len(made_s) / 20_000.0 <= 1e-3


def test_nothing_is_written_meanwhile_where_it_is_not_wanted(tmp_path: Path) -> None:
    assert written_s(tmp_path, 0.0, None, 1000.0) == []
    assert [*tmp_path.iterdir()] == []


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_whole(path, "one")
    (tmp_path / "report.json.part").mkdir()
    with pytest.raises(OSError):
        write_whole(path, "two")
    assert path.read_text() == "one"


@pytest.mark.parametrize("write", [write_whole, whole_files.write_whole])
def test_a_full_disk_keeps_no_half_of_a_file(
    write: Callable[[Path, str], None], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    write(path, "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError):
            write(path, "two" * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "one" and [*tmp_path.iterdir()] == [path]


def test_a_report_that_cannot_be_made_ends_no_training() -> None:
    stated = "the report could not be made: OverflowError"
    with pytest.warns(UserWarning, match=stated), or_warn("the report"):
        int(float("inf"))


def test_it_is_tried_again_when_it_is_due(tmp_path: Path) -> None:
    slow = Slow(0.0)
    files = ReportFiles(tmp_path / "file", 300, slow.clock)
    (tmp_path / "file").write_text("in the way")
    for _ in range(100):
        slow.now_s += 10.0
        try:
            files.after_step(slow.record)
        except OSError:
            continue
    assert slow.made_s[:4] == [300.0, 310.0, 600.0, 610.0]  # the page at the next step
    (tmp_path / "file").unlink()
    slow.now_s = 2000.0
    files.after_step(slow.record)
    assert (tmp_path / "file/report.json").exists()
