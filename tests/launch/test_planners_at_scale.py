# SPDX-License-Identifier: Apache-2.0
"""The table of what planning takes."""

from __future__ import annotations

import sys

import planners_at_scale
import pytest


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a policy, a column a number of ranks, the fewest first; fewer experts than ranks."""
    given = ("--ranks", "32", "16", "--experts", "16", "--rows", "100", "--limit_s", "60")
    monkeypatch.setattr(sys, "argv", ["planners_at_scale.py", *given])
    planners_at_scale.main()
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "| ms a layer | 16 ranks | 32 ranks |"
    names = [row.split(" | ")[0].strip("| ") for row in rows]
    assert names[:5] == ["eplb, +1", "eplb, +2", "laer, +1", "laer, +2", "llep, alpha = 1.1"]
    assert len(names) == len(set(names)) == 25
    assert all(float(cell) >= 0 for row in rows for cell in row.strip("|").split("|")[1:])


def test_who_takes_too_long_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--ranks", "16", "24", "--experts", "16", "--rows", "100", "--limit_s", "-1")
    monkeypatch.setattr(sys, "argv", ["planners_at_scale.py", *given])
    planners_at_scale.main()
    for row in capsys.readouterr().out.splitlines()[2:]:
        assert row.strip("|").split("|")[1:] == ["  ", "  "]


def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["planners_at_scale.py", "--ranks", "64", "12"])
    with pytest.raises(SystemExit):
        planners_at_scale.main()
    assert "--ranks has 12; give multiples of 8" in capsys.readouterr().err
