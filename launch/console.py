# SPDX-License-Identifier: Apache-2.0
"""What pre-training scripts read and show, whatever the host.

They read real text as bytes, and draw windows of it that any number of ranks find without talking;
without a path the text is the running interpreter's standard library: some 30 MB of sources and
documentation that every machine already has. They show a bar or lines while they train, a table at
the end, and what was wrong with the command line in one line. Shape letters: B windows in a
micro-batch, T positions of a window, W windows of the text.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import sysconfig
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

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
    """What a run is called, and where its results go."""

    strategy: str  # of ds_moe_ext; "plain" without an enabled block
    output: Path  # folder for results


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


@dataclass(frozen=True)
class Summary:
    """What a run leaves behind for people and for `ds-moe-ext compare`: `summary.json`."""

    strategy: str
    model: str
    text: str  # what was read
    seed: int
    dtype: str  # of weights in forward
    device: str  # "cpu", or the name of a GPU
    cores: int  # of this machine's CPU
    world_size: int
    tokens_per_step: int  # all ranks
    first_step: int  # steps that a resumed checkpoint had behind it
    losses: list[float]  # one a step, nats per byte
    held_out_losses: dict[int, float]  # by step
    tokens_per_s: float  # all ranks, without the first step
    seconds_per_step_s: float
    seconds_s: list[float]  # one a step
    peak_bytes: int  # of the fullest rank: allocated on its GPU, or resident on a CPU
    balance_by_layer: dict[str, float]
    versions: dict[str, str]

    def write(self, folder: Path) -> Path:
        """Write it into `folder`, and reports where."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "summary.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path


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


# Text.

VOCABULARY_SIZE = 256
SUFFIXES = (".py", ".txt", ".rst", ".md")
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages"})
HELD_OUT_FRACTION = 1 / 20


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to train on and bytes to evaluate on, both uint8."""

    training: np.ndarray
    held_out: np.ndarray
    source: str  # what errors and summaries call it


class Batch(NamedTuple):
    """Windows and, for each position, the byte that follows it: both int64 ``[B, T]``."""

    input_ids: Tensor
    labels: Tensor


def read_text(path: Path | None) -> Text:
    """Read a file (memory-mapped), a folder (its text files, joined), or the standard library.

    The last twentieth is held out.

    Args:
        path: None means the standard library's `*.py`, `*.txt` and `*.rst` files.

    Raises:
        ValueError: nothing is there, or it holds no text.
    """
    if path is None:
        return _split(_read_folder(Path(sysconfig.get_path("stdlib"))), "the standard library")
    if path.is_file() and path.stat().st_size > 0:
        return _split(np.memmap(path, dtype=np.uint8, mode="r"), str(path))
    if path.is_file():
        raise ValueError(f"--data {path} is an empty file; name one that holds text")
    if path.is_dir():
        return _split(_read_folder(path), str(path))
    raise ValueError(
        f"--data {path} does not exist; name a file or a folder of text, "
        "or leave --data out to train on the standard library"
    )


def _split(text: np.ndarray, source: str) -> Text:
    num_training = len(text) - int(len(text) * HELD_OUT_FRACTION)
    return Text(text[:num_training], text[num_training:], source)


def _read_folder(folder: Path) -> np.ndarray:
    parts = [np.fromfile(file, dtype=np.uint8) for file in _text_files(folder)]
    if sum(len(part) for part in parts) == 0:
        raise ValueError(
            f"--data {folder} holds no text: no file in it ends in {' '.join(SUFFIXES)}, "
            "or all are empty; name a file, or a folder with such files"
        )
    return np.concatenate(parts)


def _text_files(folder: Path) -> Sequence[Path]:
    names = [
        path.relative_to(folder)
        for suffix in SUFFIXES
        for path in folder.rglob(f"*{suffix}")
        if path.is_file() and EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts)
    ]
    # By checksum of the name, the same on every machine: the held-out end is a fair sample.
    names.sort(key=lambda name: (zlib.crc32(name.as_posix().encode()), name.as_posix()))
    return [folder / name for name in names]


@dataclass(frozen=True, eq=False)
class WindowSampler:
    """Which windows each rank sees at each micro-step.

    The text is cut into W windows of T bytes; every epoch pairs them in another random order.
    Ranks and micro-steps of a step take neighbours in that order, so within an epoch no window is
    seen twice, whatever the number of ranks, and a resumed run sees what it would have seen.
    """

    text: np.ndarray  # uint8
    source: str
    sequence_length: int
    micro_batch_size: int
    num_micro_steps: int
    num_ranks: int
    seed: int

    def __post_init__(self) -> None:
        if self._num_windows < self._windows_per_step:
            raise ValueError(
                f"{self.source} holds {self._num_windows} windows of {self.sequence_length} bytes "
                f"({len(self.text)} bytes), and one step takes {self._windows_per_step} "
                f"({self.num_ranks} ranks x {self.num_micro_steps} micro-steps x "
                f"{self.micro_batch_size}); give --data more text, or lower --sequence_length "
                "or the batch size"
            )

    @property
    def _num_windows(self) -> int:
        # The last window needs one byte more, its last label.
        return max(0, len(self.text) - 1) // self.sequence_length

    @property
    def _windows_per_step(self) -> int:
        return self.num_ranks * self.num_micro_steps * self.micro_batch_size

    def batch(self, step: int, micro_step: int, rank: int) -> Batch:
        """Give one rank's windows of one micro-step. Pure.

        Args:
            step: optimizer steps before this one.
            micro_step: 0 to `num_micro_steps` - 1.
            rank: 0 to `num_ranks` - 1.
        """
        steps_per_epoch = self._num_windows // self._windows_per_step
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        place = (step_of_epoch * self.num_micro_steps + micro_step) * self.num_ranks + rank
        first = place * self.micro_batch_size
        order_W = _shuffled(self.seed, epoch, self._num_windows)
        starts_B = order_W[first : first + self.micro_batch_size] * self.sequence_length
        length = self.sequence_length + 1
        windows = np.stack([self.text[start : start + length] for start in starts_B])
        windows_BT = torch.from_numpy(windows.astype(np.int64))
        return Batch(
            input_ids=windows_BT[:, :-1].contiguous(), labels=windows_BT[:, 1:].contiguous()
        )


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, num_windows: int) -> np.ndarray:
    order_W = np.random.default_rng((seed, epoch)).permutation(num_windows)
    order_W.flags.writeable = False
    return order_W
