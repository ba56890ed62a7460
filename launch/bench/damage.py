# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: each must be refused by the file's name, or be loaded as it was saved.

`torchrun --nproc_per_node 2 launch/bench/damage.py --host deepspeed --cases 500`
`torchrun --nproc_per_node 2 launch/bench/damage.py --host megatron --cases 500 --json damage.json`

Four checkpoints are made: one that is damaged, one of the run's next step, and two of another run,
whose state the ranks have before each case: what loads nothing, or only a part, is then found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from small_runs import HOSTS, STRATEGIES, SmallRun, made

SUMS_FILE = "ds_moe_ext_files.json"  # of Megatron's
BY_NAME, EQUAL = "refused by the file's name", "loaded, equal"
REFUSED, RAW, WRONG = "refused, no file named", "raw error", "silent wrong state"


@dataclass(frozen=True)
class Damage:
    """What is done to one checkpoint.

    Attributes:
        tag: the folder with its files.
        file: that it is done to, chosen for this case.
        of_next_step, of_other_run: folders of other saves, with files of the same names.
        draw: of the case.
    """

    tag: Path
    file: Path
    of_next_step: Path
    of_other_run: Path
    draw: random.Random


def flipped(damage: Damage) -> None:
    """A bit, anywhere."""
    whole = bytearray(damage.file.read_bytes())
    whole[damage.draw.randrange(len(whole))] ^= 1 << damage.draw.randrange(8)
    damage.file.write_bytes(whole)


def cut(damage: Damage) -> None:
    """To a part of its bytes."""
    whole = damage.file.read_bytes()
    damage.file.write_bytes(whole[: damage.draw.randrange(len(whole))])


def missing(damage: Damage) -> None:
    """No file."""
    damage.file.unlink()


def other_contents(damage: Damage) -> None:
    """Another file of the same folder in its place."""
    others = [p for p in sorted(damage.file.parent.iterdir()) if p.is_file() and p != damage.file]
    shutil.copy(damage.draw.choice(others), damage.file)


def of_the_next_step(damage: Damage) -> None:
    """That of the run's next step."""
    shutil.copy(damage.of_next_step / damage.file.relative_to(damage.tag), damage.file)


def of_another_run(damage: Damage) -> None:
    """That of the same step of another run."""
    shutil.copy(damage.of_other_run / damage.file.relative_to(damage.tag), damage.file)


def half_written(damage: Damage) -> None:
    """As a kill leaves it: files as far as they were written, in the order of their times, the last
    one cut."""
    files = sorted(_files(damage.tag), key=lambda path: path.stat().st_mtime_ns)
    last = damage.draw.randrange(len(files))
    whole = files[last].read_bytes()
    files[last].write_bytes(whole[: damage.draw.randrange(len(whole))])
    for path in files[last + 1 :]:
        path.unlink()


DAMAGES: Mapping[str, Callable[[Damage], None]] = {
    "a bit flipped": flipped,
    "cut": cut,
    "missing": missing,
    "another file's contents": other_contents,
    "of the next step": of_the_next_step,
    "of another run": of_another_run,
    "half written": half_written,
}


def _files(tag: Path) -> list[Path]:
    return sorted(path for path in tag.rglob("*") if path.is_file())


def state_of(run: SmallRun) -> str:
    """A digest of all that all ranks have. Collective."""
    digest = hashlib.sha256()
    for tensor in run.tensors():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, digest.hexdigest())
    return " ".join(told)


class Tries:
    """Ranks that try to load damaged checkpoints. All collective.

    Args:
        host: of ``HOSTS``.
        strategy: of ``STRATEGIES``.
        folder: of all ranks, for checkpoints.
        has_sums: keep their checksums.
    """

    def __init__(self, host: str, strategy: str, folder: Path, has_sums: bool) -> None:
        self._folder, self._case = folder, folder / "case"
        other = made(host, strategy, seed=1)
        other.step()
        other.step()
        self._of_other_run = other.save(folder / "other")
        self._run = made(host, strategy)
        self._run.step()
        self._run.step()
        self._tag, self._whole = self._run.save(folder / "whole"), state_of(self._run)
        self._run.step()
        self._next = self._run.save(folder / "next")
        if dist.get_rank() == 0 and not has_sums:
            for path in folder.rglob(SUMS_FILE):
                path.unlink()
        dist.barrier()
        self._run.load(folder / "other")
        self._before = state_of(self._run)
        assert self._before != self._whole

    def outcome(self, kind: str, seed: int) -> tuple[str, str]:
        """Damage, load, compare; then all is as it was.

        Returns:
            What became of it, and the message.
        """
        draw = random.Random(seed)
        tag = self._case / self._tag.name
        if dist.get_rank() == 0:
            shutil.rmtree(self._case, ignore_errors=True)
            shutil.copytree(self._folder / "whole", self._case)
            file = draw.choice(_files(tag))
            DAMAGES[kind](Damage(tag, file, self._next, self._of_other_run, draw))
        dist.barrier()
        error: BaseException | None = None
        try:
            self._run.load(self._case)
        except BaseException as raised:  # torch's CheckpointException is no Exception
            error = raised
        found = self._judged(error), f"{type(error).__name__}: {error}" if error else ""
        told: list[tuple[str, str]] = [found] * dist.get_world_size()
        dist.all_gather_object(told, found)
        state = state_of(self._run)
        worst = max(told, key=lambda each: (BY_NAME, EQUAL, REFUSED, RAW, WRONG).index(each[0]))
        if worst[0] == EQUAL and state != self._whole:
            worst = WRONG, worst[1]
        elif worst[0] != EQUAL and state != self._before:
            worst = WRONG, f"changed by what was refused: {worst[1]}"
        if state != self._before:
            self._run.load(self._folder / "other")
            assert state_of(self._run) == self._before
        return worst

    def _judged(self, error: BaseException | None) -> str:
        if error is None:
            return EQUAL
        names = {path.name for path in _files(self._folder / "whole")}
        is_megatrons = type(error).__name__ == "CheckpointingException"
        is_told = (isinstance(error, ValueError) or is_megatrons) and "\n" not in str(error)
        if is_told and any(name in str(error) for name in names):
            return BY_NAME
        return REFUSED if is_told else RAW


def main() -> None:
    """Damage, load, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", choices=HOSTS, default="deepspeed")
    parser.add_argument("--strategy", choices=STRATEGIES, default="fssdp")
    parser.add_argument("--cases", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_sums", action="store_true", help="as stock Megatron writes them")
    parser.add_argument("--json", type=Path, help="write the counts and what was told here")
    given = parser.parse_args()
    launch = os.environ["MASTER_PORT"]  # the same on all ranks, and no other launch's
    folder = f"{tempfile.gettempdir()}/damage_{launch}"
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in DAMAGES}
    told = []
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun_s = time.monotonic()
        tries = Tries(given.host, given.strategy, Path(folder), not given.no_sums)
        for number in range(given.cases):
            kind = list(DAMAGES)[number % len(DAMAGES)]
            outcome, message = tries.outcome(kind, given.seed + number)
            counts[kind][outcome] += 1
            told.append({"case": number, "kind": kind, "outcome": outcome, "message": message})
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        _show(given, counts, time.monotonic() - begun_s)
        if given.json:
            given.json.write_text(json.dumps(told, indent=1))
    dist.destroy_process_group()


def _show(given: argparse.Namespace, counts: dict[str, Counter[str]], seconds_s: float) -> None:
    outcomes = (BY_NAME, EQUAL, REFUSED, RAW, WRONG)
    table = Table(title=f"{given.host}, {given.strategy}, {given.cases} cases, {seconds_s:.0f} s")
    for name in ("damage", *outcomes):
        table.add_column(name)
    for kind, counter in counts.items():
        table.add_row(kind, *(str(counter[outcome]) for outcome in outcomes))
    table.add_row("all", *(str(sum(c[outcome] for c in counts.values())) for outcome in outcomes))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
