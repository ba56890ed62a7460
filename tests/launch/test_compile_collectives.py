# SPDX-License-Identifier: Apache-2.0
"""What a person is told while DeepSpeed's CPU collectives are compiled."""

from __future__ import annotations

from pathlib import Path

import compile_collectives
import pytest

from ds_moe_ext.hosts.deepspeed.op_lock import OP


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a compilation leaves."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compile_collectives, "TOLD_EVERY_S", 0.05)
    folder = tmp_path / "py311_cpu" / OP
    folder.mkdir(parents=True)
    return folder / f"{OP}.so"


def test_it_says_that_it_goes_on_and_is_silent_from_then_on(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(made)!r}).touch()"
    monkeypatch.setattr(compile_collectives, "BUILD", build)
    compile_collectives.main()
    first, *others = capsys.readouterr().out.splitlines()
    assert "compiling DeepSpeed's CPU collectives" in first
    assert others and all("still compiling" in line for line in others)
    compile_collectives.main()
    assert capsys.readouterr().out == ""


def test_it_says_that_nothing_came_of_it(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_collectives, "BUILD", "raise SystemExit(1)")
    compile_collectives.main()
    assert "that failed" in capsys.readouterr().out
