# SPDX-License-Identifier: Apache-2.0
"""What pre-training scripts show and tell a person, whatever the host: a bar or lines while they
train, a table at the end, and what was wrong with the command line in one line.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from summary import Summary

from ds_moe_ext import read_settings
from ds_moe_ext.files.documents import bytes_of, parsed
from ds_moe_ext.hosts.attachment.startup_check import is_first
from ds_moe_ext.report.recorder import Recorder

LINE_EVERY = 10
SECONDS_FOR_RANK_0_S = 5.0


def read_json(path: Path | None, argument: str) -> dict[str, Any]:
    """Read a JSON object from the file that a command-line argument names."""
    try:
        text = bytes_of(path or "")
    except ValueError as error:
        raise ValueError(
            f"{argument} {path} is not a file that can be read ({error}); name a JSON file, see "
            "configs/"
        ) from error
    try:
        content = parsed(text)
    except ValueError as error:
        raise ValueError(f"{argument} {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{argument} {path} must hold a JSON object: start it with a brace")
    return content


@dataclass(frozen=True)
class Named:
    """What a run is called, and where its results go.

    Attributes:
        strategy: of ds_moe_ext; "plain" without an enabled block.
        output: folder for results.
    """

    strategy: str
    output: Path


def named(document: dict[str, Any], output: Path | None, root: Path) -> Named:
    """By a document's ds_moe_ext block; its report goes where the results go.

    Args:
        document: that may have a block; it is completed in place.
        output: as the command line says; None for a folder of the strategy's name.
        root: of such folders.

    Raises:
        ValueError: the block is malformed.
    """
    read_settings(document)
    block = document.get("ds_moe_ext") or {}
    is_enabled = block.get("enabled", False)
    strategy = str(block.get("strategy", "default")) if is_enabled else "plain"
    output = output or root / strategy.replace(":", ".")
    report = block.get("report") or {}
    if is_enabled and report.get("path") is None:
        block["report"] = {**report, "path": str(output)}
    return Named(strategy, output)


@contextmanager
def plain_errors(script: str, *also: type[Exception]) -> Iterator[None]:
    """Show what a user got wrong once, without a traceback from every rank.

    Args:
        script: name of the script, as the line begins.
        also: what a host raises of wrong settings, besides ValueError.
    """
    wrong: tuple[type[Exception], ...] = (ValueError, *also)
    try:
        yield
    except wrong as error:
        # The launcher ends all ranks when one ends, so the others let rank 0 speak first; where
        # only they fail (a file missing on their node), they speak too.
        if not is_first():
            time.sleep(SECONDS_FOR_RANK_0_S)
        raised = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(raised.filename).name}:{raised.lineno}"
        print(f"{script}: {error} ({place})", file=sys.stderr, flush=True)
        sys.exit(2)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int  # 1 is the first
    loss: float  # nats per byte, without the load-balancing loss, mean over ranks and micro-steps
    seconds_s: float
    tokens_per_s: float
    balance: float | None  # most loaded rank's rows over the mean rank's; None: not recorded


class Display:
    """Rank 0's view of the run: a bar on a terminal, elsewhere a line every tenth step."""

    def __init__(self, *, first_step: int, num_steps: int) -> None:
        self.num_steps = num_steps
        is_shown = dist.get_rank() == 0
        self.console = Console(quiet=not is_shown, highlight=False)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self.has_bar = is_shown and self.console.is_terminal
        self.bar = Progress(*columns, console=self.console, disable=not self.has_bar)
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)

    def show(self, record: StepRecord) -> None:
        """Show a finished step."""
        line = (
            f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s  "
            f"balance {format_balance(record.balance)}"
        )
        self.bar.update(self.task, completed=record.step, description=line)
        is_due = record.step % LINE_EVERY == 0 or record.step in (1, self.num_steps)
        if is_due and not self.has_bar:
            self.console.print(f"step {record.step:>5}/{self.num_steps}  {line}", soft_wrap=True)

    def show_held_out(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        self.console.print(f"step {step:>5}  held-out loss {loss:.3f}")


def format_balance(balance: float | None) -> str:
    """Give a balance two digits, or a dash if there is none."""
    return "-" if balance is None else f"{balance:.2f}"


def seconds_per_step(records: Sequence[StepRecord]) -> float:
    """Mean seconds of a step, without the first, which builds groups, buffers and kernels. Pure."""
    steady = records[1:] or records
    return sum(record.seconds_s for record in steady) / len(steady)


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the packages named."""
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class Trained(Protocol):
    """A trainer of either host, when it has trained."""

    run: Any  # its strategy, text and dtype
    arguments: Any  # its model and seed
    recorder: Recorder | None
    held_out_losses: dict[int, float]

    @property
    def device(self) -> torch.device: ...

    @property
    def tokens_per_step(self) -> int: ...


def summarize(trainer: Trained, records: Sequence[StepRecord], packages: Sequence[str]) -> Summary:
    """Condense the steps of a run. Collective.

    Args:
        packages: whose versions matter.
    """
    seconds_per_step_s, recorder = seconds_per_step(records), trainer.recorder
    return Summary(
        strategy=trainer.run.strategy,
        model=str(trainer.arguments.model),
        text=trainer.run.text.source,
        seed=trainer.arguments.seed,
        dtype=trainer.run.dtype,
        device=_name_of(trainer.device),
        cores=os.cpu_count() or 1,
        world_size=dist.get_world_size(),
        tokens_per_step=trainer.tokens_per_step,
        first_step=records[0].step - 1,
        losses=[record.loss for record in records],
        held_out_losses=trainer.held_out_losses,
        tokens_per_s=trainer.tokens_per_step / seconds_per_step_s,
        seconds_per_step_s=seconds_per_step_s,
        seconds_s=[record.seconds_s for record in records],
        peak_bytes=most_bytes(trainer.device),
        balance_by_layer={} if recorder is None else recorder.balance_by_layer(),
        versions=versions_of(packages),
    )


def most_bytes(device: torch.device) -> int:
    """Bytes of the fullest rank so far: allocated on its GPU, or resident on a CPU. Collective."""
    if device.type == "cuda":
        own = torch.cuda.max_memory_allocated(device)
    else:
        own = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def leave_summary(display: Display, summary: Summary, output: Path, saved: Path | None) -> None:
    """Write it into a folder and show it, with the files that the run leaves."""
    path = summary.write(output)
    files = [path] if saved is None else [path, saved]
    display.console.print(summary_table(summary, files))


def summary_table(summary: Summary, files: Sequence[Path]) -> Table:
    """Lay a summary out for reading."""
    steps = f"step {summary.first_step + 1}", f"step {summary.first_step + len(summary.losses)}"
    table = Table("", "", title="Summary", show_header=False)
    table.add_row("strategy", f"{summary.strategy}, {summary.world_size} ranks, {summary.model}")
    for step, loss in zip(steps, (summary.losses[0], summary.losses[-1])):
        table.add_row(f"loss, {step}", f"{loss:.3f} nats per byte, without that of routers")
    if not summary.balance_by_layer:  # else the report that follows has speed and balance
        table.add_row("speed, mean", f"{summary.tokens_per_s:,.0f} tokens/s")
        table.add_row("a step takes, mean", f"{summary.seconds_per_step_s:.2f} s")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in summary.versions.items()))
    table.add_row("files", "\n".join(map(str, files)))
    return table
