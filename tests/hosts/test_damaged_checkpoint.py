# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is whole and of one save, or it is refused by the name of what is wrong."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ds_moe_ext.hosts.steps.training_run import run_of
from tests import payloads
from tests.hosts import jobs
from tests.hosts.checkpoints import (
    MOVING,
    Call,
    Key,
    Layout,
    Piece,
    Saved,
    as_of_format,
    assert_equal,
    edit_layout,
    edit_module,
    ep,
    held_by,
    joined,
    loaded,
    run_steps,
    saved,
)
from tests.hosts.jobs import Job
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")

LAYOUT, STATES, FOLDER = "ds_moe_ext.json", "mp_rank_00_model_states.pt", "ds_moe_ext"
FILES = (LAYOUT, STATES, f"{FOLDER}/.metadata", f"{FOLDER}/__0_0.distcp", f"{FOLDER}/__1_0.distcp")

Damage = Callable[[Path, random.Random], None]  # of a file


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(path: Path, draw: random.Random) -> None:
    """A bit, anywhere."""
    whole = bytearray(path.read_bytes())
    whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    path.write_bytes(whole)


def flip_at_the_ends(path: Path, draw: random.Random) -> None:
    """A bit of what archives begin and end with."""
    whole = bytearray(path.read_bytes())
    whole[draw.choice((1, -1)) * draw.randrange(1, min(200, len(whole)))] ^= 1 << draw.randrange(8)
    path.write_bytes(whole)


def garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((0, 1, 100, path.stat().st_size))))


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES: tuple[Damage, ...] = (truncate, flip, flip_at_the_ends, garbage, remove)


@dataclass(frozen=True)
class Case:
    """A checkpoint with something wrong."""

    folder: Path
    name: str
    what: str


class Outcome(NamedTuple):
    """What became of a try to load, on one rank: a refusal, or what the engine then holds."""

    message: str
    pieces: dict[Key, Piece]


def tried(rank: int, world_size: int, job: Job, folders: list[str]) -> list[Outcome]:
    """An engine tries each; where it is refused it is as it was. It trains on at the end."""
    engine, outcomes = jobs.engine_of(job, world_size), []
    run_steps(rank, world_size, engine, range(1))
    before = held_by(engine)
    for folder in folders:
        try:
            engine.load_checkpoint(folder)
        except ValueError as error:
            after = held_by(engine)
            assert after[1:] == before[1:], error
            assert all(
                torch.equal(piece.tensor, before.pieces[key].tensor)
                for key, piece in after.pieces.items()
            )
            outcomes.append(Outcome(str(error), {}))
        else:
            before = held_by(engine)
            outcomes.append(Outcome("", before.pieces))
    run_steps(rank, world_size, engine, range(1, 2))
    return outcomes


def check(checkpoint: Saved, layout: Layout, cases: list[Case]) -> int:
    """Each is refused by all ranks by its name, or loaded as it was."""
    folders = [str(case.folder) for case in cases]
    expected, num_refused = joined(checkpoint.ranks), 0
    ranks = pool_of(layout.world_size).run(tried, layout.job, folders)
    for case, outcomes in zip(cases, zip(*ranks, strict=True), strict=True):
        messages = {outcome.message for outcome in outcomes}
        assert len(messages) == 1, (case, messages)
        message = messages.pop()
        if message:
            num_refused += 1
            assert Path(case.name).name in message and str(case.folder) in message, (case, message)
            assert "\n" not in message
        else:
            held = [checkpoint.ranks[0]._replace(pieces=each.pieces) for each in outcomes]
            assert_equal(joined(held), expected)
    return num_refused


MOVED = Layout(2, replace(MOVING, stage=1))
ROLES = Layout(2, zebra(Job(stage=2), moved=[0, 1], num_micro_batches=1))


def copied(checkpoint: Saved, folder: Path) -> Path:
    """Its tag in a copy."""
    shutil.copytree(checkpoint.folder, folder)
    return folder / checkpoint.tag.name


@pytest.mark.parametrize("num_cases", [20, slow(150)])
def test_damaged_files_are_refused_by_name(num_cases: int, tmp_path: Path) -> None:
    checkpoint, draw, cases = saved(2, MOVED.job), random.Random(num_cases), []
    for number in range(num_cases):
        folder, name = tmp_path / str(number), FILES[number % len(FILES)]
        damage = DAMAGES[number // len(FILES) % len(DAMAGES)]
        damage(copied(checkpoint, folder) / name, draw)
        cases.append(Case(folder, name, damage.__name__))
    num_refused = check(checkpoint, MOVED, cases)
    assert num_refused >= 0.9 * num_cases  # the rest are bits of which nothing depends


@pytest.mark.parametrize("num_cases", [slow(8), slow(60)])
def test_without_checksums_too(num_cases: int, tmp_path: Path) -> None:
    """As of a checkpoint that was changed by hand, what cannot be read has its name reported."""
    checkpoint, draw, cases = saved(2, MOVED.job), random.Random(num_cases), []
    damages = (truncate, garbage, remove)
    for number in range(num_cases):
        folder, name = tmp_path / str(number), FILES[number % len(FILES)]
        damage = damages[number // len(FILES) % len(damages)]
        tag = copied(checkpoint, folder)
        edit_layout()(tag)
        damage(tag / name, draw)
        cases.append(Case(folder, name, damage.__name__))
    assert check(checkpoint, MOVED, cases) >= 0.9 * num_cases


def swapped(into: Path, other: Path, name: str) -> None:
    """One file or folder of a checkpoint is another's."""
    if (other / name).is_dir():
        shutil.rmtree(into / name)
        shutil.copytree(other / name, into / name)
    else:
        shutil.copy(other / name, into / name)


@pytest.mark.parametrize("layout", [MOVED, slow(ROLES), slow(ep(2, 0)), slow(ep(2, 2))], ids=str)
def test_parts_of_two_saves_are_refused(layout: Layout, tmp_path: Path) -> None:
    """Of another step of the run, and of the same step of another run; also where there are no
    checksums, by the id of the save."""
    checkpoint, cases = saved(2, layout.job), []
    assert set(json.loads((checkpoint.tag / LAYOUT).read_text())["files"]) == {*FILES} - {LAYOUT}
    others = [saved(2, layout.job, steps=3), saved(2, replace(layout.job, learning_rate=1e-4))]
    for number, other in enumerate(others):
        for name in (*FILES, FOLDER):
            folder = tmp_path / f"{number}_{Path(name).name}"
            swapped(copied(checkpoint, folder), other.tag, name)
            cases.append(Case(folder, name, "of another save"))
        for name in (LAYOUT, STATES, FOLDER):
            folder = tmp_path / f"{number}_{name}_unsealed"
            tag = copied(checkpoint, folder)
            swapped(tag, other.tag, name)
            edit_layout()(tag)
            cases.append(Case(folder, name, "of another save, without checksums"))
    assert check(checkpoint, layout, cases) == len(cases)


def planted(tag: Path) -> Iterable[tuple[str, Callable[[Path, Path], None]]]:
    yield f"{FOLDER}/.metadata", payloads.plant_in_table
    yield (
        f"{FOLDER}/__0_0.distcp",
        lambda path, marker: payloads.plant_as_object(path.parent, "optimizer", marker),
    )


def test_our_folder_runs_nothing(tmp_path: Path) -> None:
    """DeepSpeed's own file is read as DeepSpeed does it."""
    checkpoint, cases, marker = saved(2, MOVED.job), [], tmp_path / "marker"
    for number, (name, plant) in enumerate(planted(checkpoint.tag)):
        tag = copied(checkpoint, tmp_path / str(number))
        edit_layout()(tag)
        plant(tag / name, marker)
        cases.append(Case(tmp_path / str(number), name, "payload"))
    assert check(checkpoint, MOVED, cases) == len(cases)
    assert not marker.exists()


# Before without save ids.


def reported(rank: int, world_size: int, job: Job, folder: str) -> list[str]:
    """Lines that a person is shown while an engine loads."""
    engine, lines = jobs.engine_of(job, world_size), []
    with mock.patch.object(run_of(engine).planning, "log", lines.append):
        engine.load_checkpoint(folder)
    return lines


def test_format_3_is_read_and_said(tmp_path: Path) -> None:
    checkpoint = saved(2, MOVED.job)
    tag = copied(checkpoint, tmp_path / "3")
    as_of_format(3, tag)
    assert "save" not in json.loads((tag / LAYOUT).read_text())
    got = loaded(2, MOVED.job, Saved(tmp_path / "3", checkpoint.ranks), Call(before=1, after=2))
    assert_equal(joined(got), joined(checkpoint.ranks))
    assert got[0].losses == checkpoint.ranks[0].losses
    for lines in pool_of(2).run(reported, MOVED.job, str(tmp_path / "3")):
        assert any(re.search(r"without save ids .* save a new one", line) for line in lines)
    for lines in pool_of(2).run(reported, MOVED.job, str(checkpoint.folder)):
        assert not any("without save ids" in line for line in lines)


def test_of_format_3_what_can_be_reported_is(tmp_path: Path) -> None:
    """By the step, where the counters of DeepSpeed's file are another's; owners that are not there;
    a part with an id beside parts without."""
    checkpoint, edits = saved(2, MOVED.job), dict[str, Callable[[Path], Any]]()
    edits[STATES] = edit_module(lambda state: state.update(global_steps=7))
    edits[LAYOUT] = edit_layout(owners={})
    edits[FOLDER] = lambda tag: swapped(tag, checkpoint.tag, FOLDER)
    cases = []
    for name, edit in edits.items():
        tag = copied(checkpoint, tmp_path / name)
        as_of_format(3, tag)
        document = (tag / LAYOUT).read_text()
        edit(tag)
        if name != LAYOUT:
            (tag / LAYOUT).write_text(document)
        else:
            edited = json.loads((tag / LAYOUT).read_text())
            (tag / LAYOUT).write_text(
                json.dumps({k: v for k, v in edited.items() if k not in ("crc32", "files")})
            )
        cases.append(Case(tmp_path / name, name, "reported"))
    assert check(checkpoint, MOVED, cases) == len(cases)
