# SPDX-License-Identifier: Apache-2.0
"""All figures that the GPUs of this machine can give, by one command that can be taken up again.

`bash launch/gpu_day.sh --output runs/gpu_day --budget 8m`: rows run in turn until the budget is
spent; the same command goes on where it stopped, also from a copy of the folder. See
docs/gpu_day.md. Exit: 0 when all rows have ended well, 1 when some failed, 3 when some wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from day_stages import PRINTED, ROOT, STAGES, Figure, Place, Row, rows_of

from ds_moe_ext.report.markup import Html, joined, section, table
from ds_moe_ext.report.page import html_document
from ds_moe_ext.report.units import EN_DASH, seconds_text

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

from console import versions_of

# The page.

SHARED = "ranks share a GPU: results count, times do not"
REHEARSAL = "A rehearsal without a GPU, in tiny sizes: its figures mean nothing."
HEADINGS = ("figure", "median", "unit", "least to most", "values")


def page_of(document: Mapping[str, Any]) -> str:
    """One HTML file that needs no other. Pure."""
    title = "A day on GPUs"
    note = Html("<p><mark>{}</mark></p>").format(REHEARSAL) if document["is_rehearsal"] else ""
    parts = [Html("<header><h1>{}</h1>{}</header>").format(title, note)]
    for stage, rows in groupby(document["rows"], key=lambda row: row["stage"]):
        parts.append(section(stage, joined(map(_row, rows))))
    return html_document(title, parts)


def _row(row: Mapping[str, Any]) -> Html:
    facts = [row["state"], seconds_text(row["seconds"]), row["where"], row["date"], row["why"]]
    facts += [SHARED] if row["is_shared"] else []
    body = Html("<h3>{}</h3><p>{}</p>").format(row["name"], "; ".join(filter(None, facts)))
    body += _folded("command", row["command"])
    if row["last_lines"]:
        body += _folded("last lines", "\n".join(row["last_lines"]))
    if row["figures"]:
        body += table(HEADINGS, [cells(each) for each in row["figures"]])
    return body


def _folded(summary: str, text: str) -> Html:
    return Html("<details><summary>{}</summary><pre>{}</pre></details>").format(summary, text)


def cells(figure: Mapping[str, Any]) -> Sequence[str]:
    """A figure's entries under ``HEADINGS``, as text."""
    low, high = figure["low"], figure["high"]
    between = "" if low is None else f"{number(low)} {EN_DASH} {number(high)}"
    count = "" if low is None else f"{figure['count']}"
    return figure["what"], number(figure["value"]), figure["unit"], between, count


def number(value: float | str) -> str:
    """Four digits that count, or more before the point."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# The machine.

PACKAGES = (
    *("torch", "triton", "deepspeed", "megatron-core", "transformers", "accelerate", "ds_moe_ext"),
    *("transformer-engine", "apex", "deep_ep", "grouped_gemm", "numpy"),
)


def reported_by(*command: str) -> str:
    """What a program prints; empty where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def devices() -> dict[str, str]:
    """The GPUs, or the processor where there is none."""
    cores = {"cores": str(os.cpu_count()), "processor": platform.machine()}
    if not torch.cuda.is_available():
        return {"GPUs": "none", **cores}
    asked = "--query-gpu=name,memory.total,driver_version"
    listed = reported_by("nvidia-smi", asked, "--format=csv,noheader").splitlines()
    return {
        "GPUs": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "listed": "; ".join(sorted(set(listed))),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        **cores,
    }


def write_machine(path: Path) -> None:
    """What the day is measured with, printed and as JSON."""
    commit = reported_by("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    facts = {**devices(), **versions_of(PACKAGES), "commit": commit or "unknown"}
    for name, text in facts.items():
        print(f"{name}: {text}")
    print(reported_by("nvidia-smi", "topo", "-m"))
    path.write_text(json.dumps(facts, indent=1))


# The day.

DONE, FAILED, CUT, LEFT_OUT = "done", "failed", "cut", "left out"
ENDED = (DONE, FAILED)
DOCUMENT, PAGE, PRINTS = "gpu_day.json", "gpu_day.html", "printed.zip"
LAST_LINES = 15
GRACE_S = 20.0  # for ranks to end when they are asked to
LEAST_S = 30.0  # nothing is started with less
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """Of a time as ``90s``, ``8m`` or ``2h``."""
    found = re.fullmatch(r"(\d+)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time as 90s, 8m or 2h")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    code: int  # its exit status
    seconds: float  # it took
    is_stopped: bool  # it had used its time


def run_for(command: str, limit_s: float, printed: Path, environment: Mapping[str, str]) -> Ending:
    """Run a command of bash with all that it starts, for so many seconds at most."""
    start_s = time.monotonic()
    with printed.open("wb") as lines:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        is_stopped = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_stopped = True
        finally:
            # Torchrun ends its ranks when it is asked to; what is left of the session is killed.
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            _signal(process.pid, signal.SIGKILL)
    return Ending(process.wait(), round(time.monotonic() - start_s, 1), is_stopped)


def _signal(session: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(session, number)


class Day:
    """What was done so far, on disk after each row: few files, as a lent machine gives few back."""

    def __init__(self, folder: Path, work: Path, place: Place) -> None:
        self.folder, self.work, self.place = folder, work, place
        self.path = folder / DOCUMENT
        self.records: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            rows = json.loads(self.path.read_text("utf-8"))["rows"]
            self.records = {f"{row['stage']}/{row['name']}": row for row in rows}

    def take(self, row: Row, limit_s: float, *, has_all: bool) -> dict[str, Any]:
        """Run a row, and record it."""
        here = self.work / row.stage / re.sub(r"[^A-Za-z0-9_]+", "_", row.name)
        shutil.rmtree(here, ignore_errors=True)  # of an earlier try
        here.mkdir(parents=True)
        for name, document in row.documents.items():
            (here / name).write_text(json.dumps(document, indent=1))
        ending = run_for(
            row.command,
            min(limit_s, row.limit_s),
            here / PRINTED,
            self._environment(here),
        )
        state, why = (DONE, "") if ending.code == 0 else (FAILED, f"exit status {ending.code}")
        if ending.is_stopped:
            state = FAILED if has_all or limit_s >= row.limit_s else CUT
            why = f"stopped after {ending.seconds:.0f} s"
        found: list[Figure] = []
        try:
            found = list(row.read(here))
        except (OSError, ValueError, KeyError, IndexError, StopIteration) as error:
            if state == DONE:
                state, why = FAILED, f"no figures: {type(error).__name__}: {error}"
        printed = (here / PRINTED).read_text("utf-8", "replace")
        with zipfile.ZipFile(self.folder / PRINTS, "a", zipfile.ZIP_DEFLATED) as prints:
            prints.writestr(f"{row.stage}/{here.name}.{time.strftime('%m%d%H%M%S')}.txt", printed)
        return self.record(
            row,
            state=state,
            why=why,
            seconds=ending.seconds,
            figures=[asdict(figure) for figure in found],
            last_lines=[] if state == DONE else printed.splitlines()[-LAST_LINES:],
        )

    def _environment(self, here: Path) -> dict[str, str]:
        environment = {**os.environ, "OUT": str(self.folder), "HERE": str(here)}
        environment["PATH"] = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
        environment["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore::UserWarning"
        if self.place.checkout is not None:
            environment["MEGATRON_LM"] = str(self.place.checkout)
        if self.place.is_rehearsal:
            environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment

    def record(self, row: Row, **found: Any) -> dict[str, Any]:
        """Note what is known of a row, and write all of the day."""
        about = {"stage": row.stage, "name": row.name, "command": row.command}
        about |= {"where": str(self.place), "date": time.strftime("%Y-%m-%d")}
        shared = {"is_shared": row.is_shared, "documents": dict(row.documents)}
        self.records[row.id] = {**about, **shared, **found}
        order = {row.id: number for number, row in enumerate(rows_of(self.place))}
        known = sorted(self.records, key=lambda each: order.get(each, len(order)))
        document = {
            "format": 1,
            "is_rehearsal": self.place.is_rehearsal,
            "rows": [self.records[each] for each in known],
        }
        _write(self.path, json.dumps(document, indent=1))
        _write(self.folder / PAGE, page_of(document))
        return self.records[row.id]


def _write(path: Path, text: str) -> None:
    """All of it, or nothing."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, "utf-8")
    beside.replace(path)


def run_rows(day: Day, rows: Sequence[Row], budget_s: float | None, *, again: bool) -> int:
    """Take all rows that have not ended, while there is time.

    Returns:
        How many rows wait for more time.
    """
    end_s = time.monotonic() + (budget_s or float("inf"))
    num_run = num_waiting = 0
    for row in rows:
        known = day.records.get(row.id, {"state": None})
        if known["state"] in ENDED and not again:
            continue
        if why := next(filter(None, (need(day.place) for need in row.needs)), ""):
            day.record(row, state=LEFT_OUT, why=why, seconds=0.0, figures=[], last_lines=[])
            print(f"{row.id}: left out: {why}", flush=True)
            continue
        left_s = end_s - time.monotonic()
        had_s = known["seconds"] if known["state"] == CUT else 0.0
        if num_run and left_s < max(LEAST_S, had_s + GRACE_S):
            num_waiting += 1  # with as little time it would be cut again
            continue
        print(f"{row.id}: {row.command}", flush=True)
        found = day.take(row, left_s, has_all=num_run == 0)
        print(f"{row.id}: {found['state']} in {found['seconds']:.0f} s {found['why']}", flush=True)
        num_run += 1
        num_waiting += found["state"] == CUT
    return num_waiting


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/gpu_day"), help="holds all state (%(default)s)")
    add("--work", type=Path, default=ROOT / "build/gpu_day", help="for temporary files of rows")
    add(
        "--budget",
        type=seconds_of,
        help=("time limit, such as 8m; the next run resumes (default: none)"),
    )
    add("--stage", nargs="+", choices=STAGES, help="only these")
    add("--row", help="only rows whose stage/name holds this text")
    add("--again", action="store_true", help="also rows that have ended")
    add("--list", action="store_true", help="print the rows and end")
    add(
        "--machine",
        type=Path,
        metavar="FILE",
        help=("write a description of this machine there and end"),
    )
    add("--megatron", type=Path, help="a checkout of Megatron-LM, for its pretrain_gpt.py")
    add("--ranks", type=int, help="of all machines, with --launch")
    add("--launch", help="what starts --ranks ranks on all machines in place of torchrun")
    given = parser.parse_args(arguments)
    if (given.ranks is None) != (given.launch is None):
        parser.error("--ranks and --launch go together: the number, and the command that starts it")
    return given


def place_of(given: argparse.Namespace) -> Place:
    """This machine's GPUs, and what the command line says."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    checkout = given.megatron and given.megatron.resolve()
    name = torch.cuda.get_device_name() if devices else "GPU"
    return Place(devices, given.ranks or devices or 2, given.launch, checkout, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is due."""
    given = parse_arguments(arguments)
    if given.machine:
        write_machine(given.machine)
        return 0
    place = place_of(given)
    rows = [
        row
        for row in rows_of(place)
        if row.stage in (given.stage or STAGES) and (given.row or "") in row.id
    ]
    if not rows:
        raise SystemExit(f"gpu_day: no row's name holds {given.row!r}; --list prints all rows")
    if given.list:
        print("\n".join(f"{row.id}: {row.command}" for row in rows))
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    day = Day(given.output.resolve(), given.work.resolve(), place)
    if place.is_rehearsal:
        print("gpu_day: torch finds no GPU: a rehearsal in tiny sizes, whose figures mean nothing")
    num_waiting = run_rows(day, rows, given.budget, again=given.again)
    states = Counter(day.records[row.id]["state"] for row in rows if row.id in day.records)
    text = ", ".join(f"{number} {state}" for state, number in states.items())
    print(f"gpu_day: {text}, {num_waiting} waiting; {given.output / PAGE}")
    return 3 if num_waiting else int(FAILED in states)


if __name__ == "__main__":
    sys.exit(main())
