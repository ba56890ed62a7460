# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be read: one line that names the file, whoever reads it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_moe_ext import cli
from ds_moe_ext.commands import plan, report
from ds_moe_ext.commands.conversion import description
from ds_moe_ext.core.hardware import read_hardware
from ds_moe_ext.files.documents import parsed, read_document
from ds_moe_ext.hosts.megatron import active_settings
from tests.payloads import Payload, archive_of


def of_launch_scripts(path: Path) -> Any:
    from console import read_json

    return read_json(path, "--model")


READERS: dict[str, Callable[[Path], Any]] = {
    "settings under Megatron": active_settings.read,
    "hardware": read_hardware,
    "jobs of planners": lambda path: plan.print_plan("prophet", str(path)),
    "report": report.draw,
    "config to convert": description.read_document,
    "launch scripts": of_launch_scripts,
}


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def holding(content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return write


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "No such file"),
    "folder": (lambda path: path.parent, "Is a directory|config.json"),
    "pipe": (pipe, "it is a pipe or a device"),
    "long path": (lambda path: path.with_name("a" * 300), "File name too long"),
    "no UTF-8": (holding(b'{"name": "\xe9"}'), "'utf-8' codec can't decode byte 0xe9"),
    "deep": (holding(b'{"a":' * 100_000), "too deeply|RecursionError"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bad", BAD)
def test_files_that_cannot_be_read(reader: str, bad: str, tmp_path: Path) -> None:
    make, reason = BAD[bad]
    path = make(tmp_path / "given.json")
    with pytest.raises(ValueError, match=reason) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("reader", [each for each in READERS if each != "report"])
def test_keys_that_stand_twice(reader: str, tmp_path: Path) -> None:
    """A report is written by ourselves."""
    path = holding(b'{"ds_moe_ext": {"enabled": true, "enabled": false}}')(tmp_path / "given.json")
    with pytest.raises(ValueError, match="an object has a key twice: 'enabled'") as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)


def test_what_is_well_is_read(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, {"a": null}], "b": "\xc3\xa9"}')
    assert read_document(path) == {"a": [1, {"a": None}], "b": "é"}
    assert parsed('{"a": 1}') == parsed(b'{"a": 1}') == {"a": 1}


# A file from elsewhere, given to any command that reads one, is refused in a line, and nothing in.


ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "configs/hosts/deepspeed_zero1.json")
MODEL = str(ROOT / "configs/models/mixtral_tiny.json")
CLUSTER = str(next((ROOT / "configs/hardware").glob("*.json")))
COMMANDS = {
    "report": ("report", "FILE"),
    "compare": ("compare", "FOLDER", "FOLDER"),
    "price": ("price", "FILE", "--hardware", CLUSTER),
    "price, model": ("price", JOB, "--hardware", CLUSTER, "--model", "FILE"),
    "price, hardware": ("price", JOB, "--hardware", "FILE", "--model", MODEL),
    "price, loads": ("price", JOB, "--hardware", CLUSTER, "--model", MODEL, "--loads", "FILE"),
    "loads": ("loads", "FILE"),
    "plan": ("plan", "--in", "FILE", "prophet"),
    "doctor": ("doctor", "--model", "FILE"),
}
ENDINGS = {"report": ".json", "loads": ".npz", "price, loads": ".npz"}


def written(path: Path, kind: str, marker: Path) -> None:
    payload = Payload(marker)
    if kind == "arrays":
        with path.open("wb") as file:
            np.savez(file, rows=np.array([payload], dtype=object))
    else:
        path.write_bytes(pickle.dumps(payload) if kind == "pickle" else archive_of(payload))


@pytest.mark.parametrize("kind", ["pickle", "archive", "arrays"])
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_of_a_file_is_run(
    command: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    marker = tmp_path / "marker"
    file = tmp_path / ("report.json" if command in ("report", "compare") else "given.json")
    file = file.with_suffix(ENDINGS.get(command, ".json"))
    written(file, kind, marker)
    places = {"FILE": str(file), "FOLDER": str(tmp_path)}
    words = [places.get(word, word) for word in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["ds-moe-ext", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not marker.exists()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith("ds-moe-ext: ") and file.name in printed and printed.count("\n") == 1
    ), printed


def test_the_payload_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    """So that the test above says something."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()
