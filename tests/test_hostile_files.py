# SPDX-License-Identifier: Apache-2.0
"""A file from elsewhere, given to any command that reads one, is refused in a line, and nothing in
it is run. Of checkpoints see ``tests/convert/test_payloads.py``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_moe_ext import cli
from tests.payloads import Payload, archive_of

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
    told = capsys.readouterr().err
    assert told.startswith("ds-moe-ext: ") and file.name in told and told.count("\n") == 1, told


def test_the_payload_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    """So that the test above says something."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()
