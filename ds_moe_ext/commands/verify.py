# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext verify``: a job's own command, run twice, off and on: does the block change it?"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_moe_ext._autoload import VERIFY
from ds_moe_ext.files.whole_files import why_unwritable
from ds_moe_ext.verification import Compared, Comparison, Precision, RankRecord, Trial, compare

NUM_TAIL_LINES = 60
"""Of the output of a run that failed: launchers add dozens of their own."""
LOG = "output.log"


def add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="run your training command twice, with the block off and on, and compare",
        usage="ds-moe-ext verify [OPTION ...] -- COMMAND [ARGUMENT ...]",
    )
    add = parser.add_argument
    add("--steps", type=int, default=20, help="of the optimizer, in each run (20)")
    add(
        "--dtype",
        choices=[each.value for each in Precision],
        default=Precision.FLOAT32.value,
        help="of both runs; as-is keeps the dtype of the job (float32)",
    )
    add("--tolerance", type=float, help="relative, of the first step (default: by dtype)")
    add("--seed", type=int, default=1, help="of all generators, in both runs (1)")
    add("--out", type=Path, help="folder for output and records; several nodes must share it")
    add("--json", action="store_true", help="print JSON")
    add("command", nargs=argparse.REMAINDER, help="your training command, including the launcher")
    parser.set_defaults(run=verify)


def verify(given: argparse.Namespace) -> int:
    """Run twice and compare. 0 if both are equal within rounding, 1 if not."""
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise ValueError(
            "verify was given no command; put your job's behind two dashes: ds-moe-ext verify -- "
            "deepspeed train.py --deepspeed_config ds.json"
        )
    if given.steps < 1:
        raise ValueError(f"--steps is {given.steps}; give 1 or more")
    if given.tolerance is not None and not 0 <= given.tolerance < math.inf:
        raise ValueError(
            f"--tolerance is {given.tolerance}; give a relative difference, at least 0 and finite"
        )
    if given.out is not None and (
        reason := why_unwritable(given.out / "off" / LOG, makes_folders=True)
    ):
        raise ValueError(
            f"--out is {str(given.out)!r}, where nothing can be written ({reason}); name another "
            "folder, or leave it out"
        )
    folder = (given.out or Path(tempfile.mkdtemp(prefix="ds_moe_ext_verify_"))).resolve()
    precision = Precision(given.dtype)
    console = Console(stderr=given.json)
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no command {command[0]!r}; give a path or a name on PATH")
    runs = []
    for name, is_on in (("off", False), ("on", True)):
        trial = Trial(str(folder / name), is_on, given.steps, precision, given.seed)
        console.print(f"{name}: running, its output goes to {folder / name / LOG}", soft_wrap=True)
        runs.append(_ran(name, trial, command))
    off, on = runs
    if len(off) != len(on):
        raise ValueError(
            f"{len(off)} ranks trained when off and {len(on)} when on; the command must start "
            "the same number each time"
        )
    comparison = compare(off, on, precision.tolerances(given.tolerance))
    verdict = verdict_of(comparison, precision)
    if given.json:
        print(json.dumps(_in_json(comparison, verdict)))
    else:
        _show(console, comparison, verdict)
    return 0 if comparison.first is None else 1


def _ran(name: str, trial: Trial, command: Sequence[str]) -> list[RankRecord]:
    """What each rank of a run left."""
    folder = Path(trial.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank_*.npz"):
        old.unlink()
    log = folder / LOG
    lines = [f"{VERIFY}={trial.to_text()}", "PYTHONHASHSEED=0"]
    with log.open("w") as output:
        done = subprocess.run(
            ["env", *lines, *command], stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:])
        raise ValueError(
            f"the command ended with exit code {done.returncode} when {name}"
            + ("" if trial.is_on else ", as your host runs without ds_moe_ext")
            + f"; the end of {log}:\n{tail}"
        )
    records = [RankRecord.read(path) for path in sorted(folder.glob("rank_*.npz"))]
    steps = min((record.num_steps for record in records), default=0)
    if not records or not steps:
        raise ValueError(
            f"the command succeeded when {name}, but no step of deepspeed.initialize's engine, "
            "of Megatron-core under --ds-moe-ext-config or of an optimizer passed to watch() "
            "of ds_moe_ext.attach was seen; 'ds-moe-ext doctor' shows whether the package is "
            f"loaded, and {log} what the command printed"
        )
    if steps < trial.num_steps:
        raise ValueError(
            f"the command ended after {steps} of {trial.num_steps} steps when {name}; train "
            f"longer, or give --steps {steps}"
        )
    if len(records) != records[0].num_ranks:
        raise ValueError(
            f"{len(records)} of {records[0].num_ranks} ranks left a record in {folder} when "
            f"{name}; give --out a folder that all nodes share"
        )
    if not any(len(record.losses_I) for record in records):
        raise ValueError(
            f"{steps} steps were seen when {name}, but no loss: under DeepSpeed give it to "
            "engine.backward(loss), in a loop of your own call its backward()"
        )
    return records


def verdict_of(comparison: Comparison, precision: Precision) -> str:
    first = comparison.first
    if first is not None:
        factor = "" if first.factor is None else f": on is {first.factor:.4g} times off"
        where = (
            f"NOT equal: first differs in {first.stage.words}: {first.name}, by "
            f"{first.error:.1e} where {first.tolerance:.1e} is rounding{factor}"
        )
        return f"{where}. Likely cause: {first.stage.cause}."
    kind = "the types of the job" if precision is Precision.AS_IS else precision.value
    ties = ""
    if comparison.num_ties:
        ties = (
            f"; {comparison.num_ties} expert choices at equal scores differed, which is also "
            "rounding"
        )
    unseen = "; some tensors were not compared" if comparison.uncompared else ""
    return f"equal within the rounding of {kind}{ties}{unseen}"


def _show(console: Console, comparison: Comparison, verdict: str) -> None:
    losses = Table(title="loss of each step", title_justify="left")
    for heading in ("step", "off", "on", "relative difference"):
        losses.add_column(heading, justify="right")
    for step, (off, on) in enumerate(zip(comparison.off_I, comparison.on_I), 1):
        losses.add_row(str(step), f"{off:.6f}", f"{on:.6f}", f"{abs(on - off) / abs(off):.1e}")
    console.print(losses)
    table = Table(title="the first step, and the curve", title_justify="left")
    for heading in ("compared", "count", "worst", "rounding"):
        table.add_column(heading, no_wrap=True)
    table.add_column("in", overflow="fold")
    for words, count, worst in comparison.worst:
        errors = f"{worst.error:.1e}", f"{worst.tolerance:.1e}"
        table.add_row(words, str(count), *errors, worst.name if worst.error else "")
    console.print(table)
    for name in comparison.uncompared:
        console.print(f"not compared: {name}", soft_wrap=True)
    console.print(verdict, soft_wrap=True, highlight=False)


def _in_json(comparison: Comparison, verdict: str) -> dict[str, Any]:
    first = comparison.first
    return {
        "equal": first is None,
        "verdict": verdict,
        "losses_off": comparison.off_I.tolist(),
        "losses_on": comparison.on_I.tolist(),
        "first_difference": None if first is None else _row(first),
        "worst": [{"compared": words, "count": n, **_row(w)} for words, n, w in comparison.worst],
        "ties": comparison.num_ties,
        "not_compared": list(comparison.uncompared),
    }


def _row(compared: Compared) -> dict[str, Any]:
    return {
        "stage": compared.stage.words,
        "name": compared.name,
        "error": compared.error,
        "tolerance": compared.tolerance,
        "factor": compared.factor,
    }
