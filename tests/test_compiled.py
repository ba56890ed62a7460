# SPDX-License-Identifier: Apache-2.0
"""Code in C: compiled once where it can be kept, by many processes at once, and else by each."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core import compiled, row_levels
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import RowLevels, WholePrices
from ds_moe_ext.strategies.settings import read_settings
from tests.ranks import forkserver

SHARES = {"fssdp": "nearest", "prophet": "local"}
"""The papers' own."""


def anew() -> ctypes.CDLL:
    """The library, looked for as by a process that has not loaded it."""
    return compiled.library.__wrapped__("row_levels")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept; not there yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions" / "ds_moe_ext"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def own_compiler(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``CC`` be a script, which has ``$to`` where the library is to lie."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\nto=$(echo "$*" | sed "s/.*-o //; s/ .*//")\n{lines}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


def divided(_: int = 0) -> list[int]:
    """Rows of two holders, by a library that is looked for anew."""
    compiled.library.cache_clear()
    row_levels.is_compiled.cache_clear()
    prices = WholePrices.of(np.ones(2), 0.0, 0.0)
    levels = RowLevels(Placement(np.ones((1, 2), dtype=bool)), np.zeros(2, dtype=np.int64), prices)
    rows_N = levels.divided(np.array([[9], [1]]), None, sweeps=2).rows_N
    return [int(rows) for rows in rows_N]


def _come(all_are_there: Barrier, extensions: Path) -> None:
    """A process that keeps libraries there."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    all_are_there.wait()


@pytest.mark.slow
def test_processes_that_compile_at_once_all_have_it(kept: Path) -> None:
    """As the ranks of a node do. One library is left, and nothing beside it."""
    context = forkserver()
    all_are_there = context.Barrier(4)
    with context.Pool(4, _come, (all_are_there, kept.parent)) as processes:
        assert processes.map(divided, range(4), chunksize=1) == [[5, 5]] * 4
    (library,) = kept.iterdir()
    assert re.fullmatch(r"row_levels-[0-9a-f]{16}\.so", library.name)


def test_what_is_kept_is_not_compiled_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anew()
    (library,) = kept.iterdir()
    before = library.stat().st_mtime_ns
    monkeypatch.setattr("subprocess.run", None)
    anew()
    assert library.stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_written_to(
    kept: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a container, of another user, on a full disk: the process compiles for itself."""
    kept.parent.write_text("not a folder")
    assert anew().tables_size
    assert not list(temporary.iterdir())
    kept.parent.unlink()
    full = f'case "$to" in {kept}*) echo "no space left" >&2; exit 1;; *) exec cc "$@";; esac'
    own_compiler(temporary.parent, full, monkeypatch)
    assert anew().tables_size
    assert not list(kept.iterdir()) and not list(temporary.iterdir())


def test_a_library_that_cannot_be_loaded(kept: Path, temporary: Path) -> None:
    """Cut off, or where nothing may be run from: the process compiles for itself."""
    anew()
    (library,) = kept.iterdir()
    library.unlink()  # whoever has loaded it has that file
    library.write_bytes(b"\x7fELF")
    assert anew().tables_size
    assert library.read_bytes() == b"\x7fELF" and not list(temporary.iterdir())


def read(strategy: str, share: str) -> str:
    """What is warned as a run of a strategy starts, in a process that has compiled nothing yet; by
    its settings alone nothing is compiled."""
    block = {"enabled": True, "strategy": strategy, strategy: {"share": share}}
    compiled.library.cache_clear()
    row_levels.is_compiled.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = read_settings({"ds_moe_ext": block})[1]
            assert (
                chosen is not None and not caught and not row_levels.is_compiled.cache_info().misses
            )
            chosen.settled(list, None)
    finally:
        compiled.library.cache_clear()
        row_levels.is_compiled.cache_clear()
    return "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize("strategy", SHARES)
def test_shares_say_at_start_what_they_lack(
    strategy: str, kept: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what to do; the papers' own need nothing."""
    assert read(strategy, "priced") == ""
    (library,) = kept.iterdir()
    library.unlink()
    own_compiler(temporary.parent, 'echo "no space left" >&2; exit 1', monkeypatch)
    reported = read(strategy, "priced")
    assert all(part in reported for part in ("no space left", str(kept), str(temporary)))
    assert "let TORCH_EXTENSIONS_DIR name a folder" in reported
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("PATH", "/nowhere")
    assert compiled.compiler() is None
    reported = read(strategy, "planned")
    assert reported.count("row_levels.c needs a C compiler, and there is none") == 1
    assert read(strategy, SHARES[strategy]) == ""


@pytest.mark.parametrize("strategy", SHARES)
def test_unknown_shares(strategy: str) -> None:
    for share, answer in (("price", "did you mean 'priced'?"), ("even", SHARES[strategy])):
        match = rf"^ds_moe_ext\.{strategy}\.share is '{share}'.*{re.escape(answer)}"
        with pytest.raises(ValueError, match=match):
            read(strategy, share)


# The same on every rank.


def test_no_float_comes_to_the_code() -> None:
    """Sums and products of floats may differ in the last bit between processors."""
    source = (Path(compiled.__file__).with_name("row_levels.c")).read_text()
    code = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    assert not re.search(r"\b(float|double|pow|exp|sqrt|math)\b|\d\.\d", code)
    fields: dict[str, Any] = dict(row_levels._Tables._fields_)
    assert set(fields.values()) == {ctypes.c_int64, ctypes.c_void_p}
    rng = np.random.default_rng(0)
    prices = WholePrices.of(rng.random(4), 0.3, 0.7, worth_s=1e-3)
    levels = RowLevels(Placement(rng.random((6, 4)) < 2), np.array([0, 0, 1, 1]), prices)
    layer = levels._layer
    given = (layer.node_C, layer.speed_C, layer.price_C)
    assert {array.dtype for array in given} == {np.dtype(np.int64)}
    assert {type(n) for n in (prices.local, prices.cross, prices.worth)} == {int}


def test_prices_are_rounded_one_by_one() -> None:
    """By a division and a rounding each, which are the same on every processor."""
    rng = np.random.default_rng(1)
    for size in (1, 3, 8, 64):
        row_s_C = np.exp(rng.normal(-10, 1, size))
        whole = WholePrices.of(row_s_C, 2e-5, 7e-5, worth_s=1e-4)
        unit = max(*row_s_C.tolist(), 2e-5, 7e-5) / row_levels.HIGHEST
        assert whole.unit_s == unit
        assert whole.row_C.tolist() == [round(row_s / unit) for row_s in row_s_C.tolist()]
        assert (whole.local, whole.cross) == (round(2e-5 / unit), round(7e-5 / unit))
        assert whole.worth == round(1e-4 / unit)
        fastest = row_s_C.min()
        speeds = [round(row_levels.PARTS * fastest / row_s) for row_s in row_s_C.tolist()]
        assert whole.speed_C.tolist() == [max(each, row_levels.SLOWEST) for each in speeds]


# It keeps to its own memory.

WATCHED = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
OF_THE_CODE = ("row_levels", "row_levels_twin", "row_splits", "row_tables", "order")
TOO_SHORT = """
import numpy as np
from ds_moe_ext import row_tables
from ds_moe_ext.core.rows import place_of
rows, ends = np.ones((1, 1, 4), dtype=np.int64), np.empty({length}, dtype=np.int32)
reported = 1, 1, 4, 0, place_of(rows), True, 0, None, None, True, place_of(ends)
print(row_tables._code()(*reported), ends[-1])
"""


def of_gcc(name: str) -> str:
    asked = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_memory_of_others_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of the code, where the compiler has each access to memory and each sum watched."""
    libraries = [of_gcc(name) for name in ("libasan.so", "libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("this gcc has no sanitizers")
    own_compiler(tmp_path, f'exec gcc {WATCHED} "$@"', monkeypatch)
    watched = {
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # Python leaves memory behind
    }

    def run(*reported: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *reported]
        environment = {**os.environ, **watched}
        root = Path(__file__).parents[1]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, cwd=root
        )

    assert run("-c", TOO_SHORT.format(length=4)).stdout.split() == ["0", "4"]
    assert "heap-buffer-overflow" in run("-c", TOO_SHORT.format(length=3)).stderr
    files = [f"tests/test_{name}.py" for name in OF_THE_CODE]
    done = run("-m", "pytest", "-p", "no:cacheprovider", *files)
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    made = {file.name.partition("-")[0] for file in tmp_path.glob("extensions/ds_moe_ext/*.so")}
    assert made == {"row_levels", "row_splits", "row_tables"}
