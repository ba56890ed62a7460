# SPDX-License-Identifier: Apache-2.0
"""A day on GPUs: rows end once, go on from a replica, and their figures are read; all of it as a
rehearsal (slow)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import day_stages
import gpu_day
import pytest
import results
import torch
import wheelhouse
from day_stages import GPU_TESTS, LIMIT_S, STAGES, Figure, Place, Row, rows_of
from gpu_day import CUT, DONE, FAILED, LEFT_OUT, Day, page_of, run_rows
from shared_gpus import share_gpus

from tests.conftest import ROOT, pytest_collection_modifyitems

REHEARSAL, ALONE, EIGHT = Place(0, 2), Place(1, 1), Place(8, 8)


def counted(folder: Path) -> Iterator[Figure]:
    yield Figure("lines", float(len((folder / "printed.txt").read_text().splitlines())))


GOOD = Row(
    "a",
    "good",
    'echo one; cat $HERE/given.json; echo " $OUT"',
    counted,
    documents={"given.json": 1},
)
BAD = Row("a", "bad", "echo last words; exit 3")
NEEDY = Row("b", "needy", "exit 1", needs=[lambda place: "", lambda place: "no such thing"])
NO_FIGURES = Row("b", "no figures", "true", day_stages.read_engines)
ROWS = (GOOD, BAD, NEEDY, NO_FIGURES)


def a_day(folder: Path, place: Place = REHEARSAL) -> Day:
    folder.mkdir(exist_ok=True)
    return Day(folder, folder.parent / "work", place)


def states(day: Day) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads(day.path.read_text())["rows"]}


def test_rows_end_once_and_a_copy_goes_on(tmp_path: Path) -> None:
    day = a_day(tmp_path / "day")
    assert run_rows(day, ROWS, None, again=False) == 0
    wanted = {"good": DONE, "bad": FAILED, "needy": LEFT_OUT, "no figures": FAILED}
    assert states(day) == wanted
    good, bad, needy, none = (day.records[row.id] for row in ROWS)
    assert good["figures"][0]["value"] == 2 and good["last_lines"] == []
    assert (bad["why"], bad["last_lines"]) == ("exit status 3", ["last words"])
    assert (needy["why"], needy["figures"]) == ("no such thing", [])
    assert none["why"].startswith("no figures: FileNotFoundError")
    assert {path.name for path in day.folder.iterdir()} == {
        *("gpu_day.json", "gpu_day.html", "printed.zip"),
    }
    with zipfile.ZipFile(day.folder / "printed.zip") as prints:
        (name,) = (each for each in prints.namelist() if each.startswith("a/good."))
        assert prints.read(name).decode() == f"one\n1 {day.folder}\n"
    copied = tmp_path / "copied"
    shutil.copytree(day.folder, copied)
    shutil.rmtree(tmp_path / "work")
    later = a_day(copied)
    with mock.patch.object(Day, "take", side_effect=AssertionError("it has ended")):
        assert run_rows(later, ROWS, None, again=False) == 0
    assert states(later) == wanted
    run_rows(later, [GOOD], None, again=True)
    assert later.records[GOOD.id]["figures"] == good["figures"]
    assert "last words" in (copied / "gpu_day.html").read_text()


@pytest.mark.slow  # by a clock: a busy machine would fail it
def test_a_budget_cuts_a_row_that_then_has_all_of_it(tmp_path: Path) -> None:
    """With as little time it is not tried again; alone it may use all, and fails if that is too
    little. What it had started ends with it."""
    quick = Row("a", "quick", "true")
    long = Row("a", "long", "(sleep 61; echo late) & echo begun; sleep 62")
    day = a_day(tmp_path / "day")
    with mock.patch.object(gpu_day, "LEAST_S", 0.1), mock.patch.object(gpu_day, "GRACE_S", 1.0):
        assert run_rows(day, [quick, long], 2.0, again=False) == 1
        assert states(day) == {"quick": DONE, "long": CUT}
        other = Row("a", "other", "true")
        assert run_rows(day, [other, long], 2.0, again=False) == 1
        assert states(day) == {"quick": DONE, "other": DONE, "long": CUT}
        assert run_rows(day, [long], 2.0, again=False) == 0
    record = day.records[long.id]
    assert record["state"] == FAILED and record["why"].startswith("stopped after 2 s")
    assert record["last_lines"] == ["begun"]
    alive = subprocess.run(["pgrep", "-f", "sleep 6[12]$"], capture_output=True, check=False)
    assert alive.returncode == 1


def test_a_rows_own_limit_is_its_end(tmp_path: Path) -> None:
    day = a_day(tmp_path / "day")
    row = Row("a", "endless", "sleep 60", limit_s=0.5)
    with mock.patch.object(gpu_day, "GRACE_S", 1.0):
        assert run_rows(day, [GOOD, row], None, again=False) == 0
    assert states(day)["endless"] == FAILED


@pytest.mark.parametrize("place", [REHEARSAL, ALONE, EIGHT])
def test_rows_of_places(place: Place) -> None:
    rows = rows_of(place)
    assert len({row.id for row in rows}) == len(rows)
    assert {row.stage for row in rows} == set(STAGES)
    assert all(row.limit_s <= LIMIT_S for row in rows)
    for row in rows:  # commands that bash can read, of files that are there
        subprocess.run(["bash", "-n", "-c", row.command], check=True)
        for path in re.findall(r"(?<![\w/$])(?:launch|tests|configs)/[\w./]+", row.command):
            assert (ROOT / path).is_file(), path
    left_out = {row.stage for row in rows if any(need(place) for need in row.needs)}
    assert left_out >= {"transformer_engine", "apex"}
    assert ("slow_parity" in left_out) == place.is_rehearsal


def test_all_gpu_tests_are_in() -> None:
    """Every file of tests/gpu that has tests for a device."""
    files = {path.stem: path.read_text() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    emulated = {"test_stream_order", "test_stripe_streams", "test_way"}
    assert {f"test_{name}" for name in GPU_TESTS} == set(files) - emulated


def test_several_machines_have_a_launcher_of_their_own() -> None:
    given = gpu_day.parse_arguments(["--ranks", "64", "--launch", "srun torchrun"])
    place = gpu_day.place_of(given)
    assert place.ranks == 64
    (command,) = (row.command for row in rows_of(place) if row.id == "links/hardware")
    assert command.startswith("srun torchrun launch/shared_gpus.py -m ds_moe_ext.profile_run")
    with pytest.raises(SystemExit):
        gpu_day.parse_arguments(["--ranks", "64"])


# Figures.


def test_a_strangers_file_becomes_a_section(tmp_path: Path) -> None:
    day = a_day(tmp_path / "day", ALONE)
    odd = Row("a", "<b>|odd", "echo one", counted)
    run_rows(day, [odd, BAD], None, again=False)
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(day.path, folder / "somebody.json")
    text = results.page(folder)
    assert "### somebody\n" in text and "```bash\necho one\n```" in text
    assert "| lines | 1 |  |  |  |" in text
    assert r"**\<b\>\|odd**: done" in text
    assert "&lt;b&gt;|odd" in page_of(json.loads(day.path.read_text()))
    rehearsed = a_day(tmp_path / "rehearsed")
    run_rows(rehearsed, [GOOD], None, again=False)
    shutil.copy(rehearsed.path, folder / "other.json")
    with pytest.raises(ValueError, match=r"other\.json is a rehearsal"):
        results.page(folder)


def test_the_page_of_results() -> None:
    assert results.PAGE.read_text() == results.page(), "run: python docs/results.py"


# What it rests on.


@pytest.mark.parametrize(("num_devices", "shares"), [(1, True), (4, False)])
def test_a_rank_names_a_host_of_its_own_where_gpus_are_shared(
    num_devices: int, shares: bool
) -> None:
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(torch.cuda, "device_count", lambda: num_devices),
        mock.patch.object(torch.cuda, "set_device") as chosen,
    ):
        os.environ.pop("NCCL_HOSTID", None)
        device = share_gpus(2, 4)
        assert (os.environ.get("NCCL_HOSTID") == "rank 2") == shares
        assert device.index == 2 % num_devices == int(os.environ["LOCAL_RANK"])
    chosen.assert_called_once_with(2 % num_devices)


def test_parts_of_tests_are_all_of_them() -> None:
    taken = []
    for part in ("1/3", "2/3", "3/3"):
        items = list("abcdefgh")
        config = SimpleNamespace(getoption=lambda name, part=part: part, hook=mock.Mock())
        pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        taken.append("".join(items))
    assert taken == ["adg", "beh", "cf"]


def test_wheels_are_what_torch_does_not_bring(tmp_path: Path) -> None:
    needs = {
        "deepspeed": ["torch", "hjson", 'winonly; sys_platform == "win32"', "numpy"],
        "torch": ["sympy"],
        "sympy": ["mpmath"],
        "numpy": [],
        "mpmath": [],
        "hjson": ["mpmath", "Some.Name"],
        "some-name": [],
        "winonly": [],
    }
    found = [
        {"metadata": {"name": name, "version": "1", "requires_dist": requires}}
        for name, requires in needs.items()
    ]
    left = list(wheelhouse.left(found, ["deepspeed==1"], "3.12"))
    assert left == ["deepspeed==1", "hjson==1", "some-name==1"]
    assert set(wheelhouse.pins()) == set(wheelhouse.NEEDED)
    wheelhouse.stand_in(tmp_path, "2.11.0")
    with zipfile.ZipFile(tmp_path / "torch-2.11.0-py3-none-any.whl") as wheel:
        metadata = wheel.read("torch-2.11.0.dist-info/METADATA").decode()
    assert "Version: 2.11.0\n" in metadata and "Requires-Dist: sympy\n" in metadata


# All of it.


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_rehearsal(tmp_path: Path) -> None:
    """Every stage runs without a GPU, or says why not; a second start has nothing to do."""
    command = ["bash", "launch/gpu_day.sh", "--output", str(tmp_path / "day")]
    command += ["--work", str(tmp_path / "work")]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {**os.environ, **path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    document = json.loads((tmp_path / "day/gpu_day.json").read_text())
    bad = [row for row in document["rows"] if row["state"] not in (DONE, LEFT_OUT)]
    assert not bad, bad
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = {row["stage"] for row in document["rows"] if row["state"] == LEFT_OUT}
    assert left_out == {"megatron", "transformer_engine", "apex", "slow_parity"}
    for row in document["rows"]:
        if row["state"] == DONE and row["name"] not in ("doctor", "collectives"):
            assert row["figures"], row
    named = {figure["what"] for row in document["rows"] for figure in row["figures"]}
    assert named >= {"a step, priced over measured", "memory, priced over measured"}
    assert named >= {"DeepEP", "memory, read and written", "passed"}
    again = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert ": done in" not in again.stdout
