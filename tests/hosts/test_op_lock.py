# SPDX-License-Identifier: Apache-2.0
"""The lock of a compilation that was killed is named before a run waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_moe_ext.hosts.deepspeed.guard import QUIET_S, old_lock

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a killed compilation leaves it, beside what it had compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    for name in ("build.ninja", "lock"):
        (folder / name).touch()
        age(folder / name, 2 * QUIET_S)
    return folder / "lock"


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_an_old_lock_is_found(lock: Path) -> None:
    assert old_lock() == lock


def test_a_compiler_at_work_is_not(lock: Path) -> None:
    (lock.parent / "shm.o").touch()
    assert old_lock() is None


def test_no_lock_no_word(lock: Path) -> None:
    lock.unlink()
    assert old_lock() is None


def test_the_default_folder(lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "torch_extensions" / "py311_cpu"
    folder.mkdir(parents=True)
    lock.parent.rename(folder / lock.parent.name)
    assert old_lock() == folder / lock.parent.name / "lock"


STARTS = """
import os, torch, deepspeed
from tests.hosts import families
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
config = {"train_batch_size": 1, "ds_moe_ext": {"enabled": True}}
deepspeed.initialize(model=families.build("mixtral"), config=config)
"""


@pytest.mark.slow
def test_a_run_names_it(lock: Path) -> None:
    """Then it waits for it, as it would without us: whether somebody compiles, nobody can know."""
    run = subprocess.Popen(
        [sys.executable, "-c", STARTS],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert run.stdout is not None
    try:
        reported = next((line for line in run.stdout if line.startswith("ds_moe_ext:")), "")
    finally:
        run.kill()
        run.wait()
    assert f"{lock} was left by an interrupted compilation" in reported
    assert f"rm {lock}" in reported


def test_the_quickstart_stops(lock: Path) -> None:
    """The part of the script that looks for it, as it stands there."""
    script = (ROOT / "launch" / "quickstart.sh").read_text()
    start = script.index('if [[ "${DS_ACCELERATOR:-}" == cpu ]]')
    looks = "set -euo pipefail\n" + script[start : script.index("\nfi\n", start) + 4]
    done = subprocess.run(
        ["bash", "-c", looks],
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"quickstart: {lock} was left by an interrupted compilation" in done.stderr
