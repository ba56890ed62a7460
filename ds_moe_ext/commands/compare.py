# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext compare``: two runs that differ in the strategy alone, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from ds_moe_ext.commands.report import read_report
from ds_moe_ext.files.documents import read_document
from ds_moe_ext.report.record import DeviceRecord, PaceRecord, RanksRecord, RunRecord
from ds_moe_ext.report.summary import ON_CPU, Outcome, no_measure, outcome_of, typical, verdict
from ds_moe_ext.report.units import bytes_text, seconds_text

REPORT, SUMMARY = "report.json", "summary.json"
SAME = ("model", "text", "seed", "dtype", "tokens_per_step", "first_step")
STEP = "a step takes"
EQUAL = 1e-5  # nats: losses that sums in another order explain


def add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", help="compare two runs that differ only in the strategy"
    )
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, help="folder of a run's results, with report.json")
    parser.set_defaults(run=lambda given: compare(given.first, given.second))


def compare(first: Path, second: Path) -> int:
    """Print two runs side by side, what is compared, and where more is to be seen."""
    runs = Finished.read(first), Finished.read(second)
    check_comparable(*runs)
    console = Console(highlight=False)
    console.print(comparison(*runs))
    for notice in notices(*runs):
        console.print(notice, markup=False)
    return 0


# What runs leave behind.


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What a training script reported of its run in `summary.json`; None where it reported
    nothing."""

    strategy: str | None = None  # its name
    model: str | None = None  # what was trained
    text: str | None = None  # what was read
    seed: int | None = None  # of weights and of the order of the text
    dtype: str | None = None  # number type of the weights in forward
    device: str | None = None  # what ranks computed on
    cores: int | None = None  # of a CPU, that all ranks shared
    world_size: int | None = None  # ranks
    tokens_per_step: int | None = None  # of all ranks
    first_step: int = 0  # steps that a resumed checkpoint had behind it
    losses: tuple[float, ...] = ()  # one a step, nats
    tokens_per_s: float | None = None  # of all ranks, without the first step
    seconds_per_step_s: float | None = None  # likewise

    @classmethod
    def read(cls, path: Path) -> Reported:
        """Read a file, which may report more."""
        try:
            document = read_document(path)
            if not isinstance(document, Mapping):
                raise ValueError("it is not a JSON object")
            names = {each.name for each in fields(cls)}
            known = {name: value for name, value in document.items() if name in names}
            return cls(**{**known, "losses": tuple(map(float, known.get("losses", ())))})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a summary of a run ({error}); run the training again"
            ) from error


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    folder: Path  # its results
    reported: Reported  # by the training script
    record: RunRecord | None  # by ds_moe_ext; None if it replaced no layers

    @classmethod
    def read(cls, folder: Path) -> Finished:
        """Read the files of a run."""
        summary, report = folder / SUMMARY, folder / REPORT
        if not summary.is_file() and not report.is_file():
            raise ValueError(
                f"{folder} has neither {REPORT} nor {SUMMARY}; name the folder of a run's "
                'results, set by "report": {"path": FOLDER} or --output FOLDER'
            )
        reported = Reported.read(summary) if summary.is_file() else Reported()
        return cls(folder, reported, read_report(report) if report.is_file() else None)

    @property
    def name(self) -> str:
        known = (self.reported.strategy, self.record and self.record.strategy, str(self.folder))
        return next(name for name in known if name)

    @property
    def outcome(self) -> Outcome | None:
        return None if self.record is None else outcome_of(self.record)

    @property
    def world_size(self) -> int | None:
        return self.reported.world_size if self.record is None else self.record.world_size

    @property
    def device(self) -> DeviceRecord | None:
        if self.reported.device is not None:
            return DeviceRecord(self.reported.device, self.reported.cores or 1)
        return None if self.ranks is None else self.ranks.device

    @property
    def ranks(self) -> RanksRecord | None:
        """What these reported to each other."""
        return None if self.record is None else self.record.ranks

    @property
    def pace(self) -> PaceRecord | None:
        """Of the ranks, over the steps."""
        return None if self.ranks is None else self.ranks.pace

    def losses_reported(self) -> Mapping[int, float]:
        """By the script, by step; 1 is the first."""
        return dict(enumerate(self.reported.losses, start=self.reported.first_step + 1))

    def losses_found(self) -> Mapping[int, float]:
        """By the ranks, by step: what gradients are made of, with losses of routers."""
        if self.pace is None:
            return {}
        losses = zip(self.pace.steps_G, self.pace.loss_G.tolist())
        return {step + 1: loss for step, loss in losses if not math.isnan(loss)}


def check_comparable(first: Finished, second: Finished) -> None:
    """Refuse runs whose figures have nothing to do with each other. What one of them does not
    report is not asked of the other.
    """
    ours, theirs = _facts(first), _facts(second)
    for name in ours:
        if None not in (ours[name], theirs[name]) and ours[name] != theirs[name]:
            raise ValueError(
                f"{name} is {ours[name]!r} in {first.folder} and {theirs[name]!r} in "
                f"{second.folder}; compare runs that differ in the strategy alone"
            )
    num_steps = len(first.reported.losses), len(second.reported.losses)
    if all(num_steps) and num_steps[0] != num_steps[1]:
        raise ValueError(
            f"{first.folder} has {num_steps[0]} steps and {second.folder} {num_steps[1]}; give "
            "both the same number of steps"
        )


def _facts(run: Finished) -> Mapping[str, Any]:
    layers = run.record and tuple((each.name, each.num_experts) for each in run.record.layers)
    device = run.device and run.device.name
    found = {"device": device, "world_size": run.world_size, "replaced layers": layers}
    return {**{name: vars(run.reported)[name] for name in SAME}, **found}


# Losses.


class Difference(NamedTuple):
    """Where two loss curves are furthest apart."""

    step: int  # 1 is the first
    loss: float  # nats, without sign


def largest_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The first of several as large. Pure."""
    apart = [abs(a - b) for a, b in zip(first, second)]
    largest = max(apart)
    return Difference(apart.index(largest) + 1, largest)


def equal_steps(first: Sequence[float], second: Sequence[float]) -> int:
    """Steps before the first whose losses differ by more than `EQUAL`. Pure."""
    apart = (step for step, (a, b) in enumerate(zip(first, second)) if abs(a - b) > EQUAL)
    return next(apart, len(first))


class CommonLosses(NamedTuple):
    """Of the steps whose losses both runs report, nats."""

    steps: Sequence[int]  # 1 is the first
    first: Sequence[float]
    second: Sequence[float]


def common_losses(first: Finished, second: Finished) -> CommonLosses:
    """What scripts reported, if both did, else what ranks found; none where one of them knows none.
    Pure."""
    for losses in (Finished.losses_reported, Finished.losses_found):
        ours, theirs = losses(first), losses(second)
        if steps := [step for step in ours if step in theirs]:
            return CommonLosses(steps, [ours[at] for at in steps], [theirs[at] for at in steps])
    return CommonLosses((), (), ())


def shown_steps(num_steps: int) -> list[int]:
    """First, middle and last step, each once; 1 is the first. Pure."""
    return sorted({1, (1 + num_steps) // 2, num_steps}) if num_steps else []


# The table.


@dataclass(frozen=True)
class Figure:
    """A line of the table; one that neither run knows is left out."""

    name: str  # of the line
    of: Callable[[Finished], float | None]  # a run's, None where it is not known
    shown: Callable[[float], str]  # as text
    is_speed: bool = False  # it says how fast the run was, which some machines cannot show
    # the same by the ranks of a run, for runs whose scripts do not report
    found: Callable[[Finished], float | None] | None = None

    def of_both(self, runs: Sequence[Finished]) -> list[float | None]:
        """From where more is known: one run's mean is not held against another's median."""
        sources = [[of(run) for run in runs] for of in (self.found, self.of) if of is not None]
        return max(sources, key=lambda values: sum(value is not None for value in values))


def _of_outcome(value: Callable[[Outcome], float]) -> Callable[[Finished], float | None]:
    return lambda run: None if run.outcome is None else value(run.outcome)


def _expert_bytes(run: Finished) -> float | None:
    return None if run.record is None else sum(layer.expert_bytes for layer in run.record.layers)


def _of_pace(value: Callable[[PaceRecord], np.ndarray]) -> Callable[[Finished], float | None]:
    return lambda run: None if run.pace is None else _known(typical(value(run.pace)))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _most(of: Callable[[RanksRecord], np.ndarray]) -> Callable[[Finished], float | None]:
    """Of the fullest rank; None where there is no such memory."""

    def most(run: Finished) -> float | None:
        return None if run.ranks is None else float(of(run.ranks).max()) or None

    return most


FIGURES = (
    Figure(
        "tokens/s",
        lambda run: run.reported.tokens_per_s,
        "{:,.0f}".format,
        is_speed=True,
        found=_of_pace(lambda pace: pace.tokens_per_s_G),
    ),
    Figure(
        STEP,
        lambda run: run.reported.seconds_per_step_s,
        "{:.3f} s".format,
        is_speed=True,
        found=_of_pace(lambda pace: pace.step_s_G),
    ),
    Figure("balance, no replicas", _of_outcome(lambda each: each.owner_balance), "{:.2f}".format),
    Figure("balance, as computed", _of_outcome(lambda each: each.balance), "{:.2f}".format),
    Figure("replicas a step", _of_outcome(lambda each: each.replicas), "{:.1f}".format),
    Figure("owners moved", _of_outcome(lambda each: each.num_moved), "{:,.0f}".format),
    Figure("expert weights, rank 0", _expert_bytes, bytes_text),
    Figure("allocated, fullest rank", _most(lambda ranks: ranks.allocated_R), bytes_text),
    Figure("reserved, fullest rank", _most(lambda ranks: ranks.reserved_R), bytes_text),
    Figure("host memory, fullest rank", _most(lambda ranks: ranks.resident_R), bytes_text),
)


def comparison(first: Finished, second: Finished) -> Table:
    """Both runs side by side. Pure."""
    runs = (first, second)
    table = Table(title="Two runs side by side", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_column("difference", justify="right")

    steps, ours, theirs = common_losses(first, second)
    if steps:
        for at in shown_steps(len(steps)):
            losses = ours[at - 1], theirs[at - 1]
            shown = (f"{loss:.6f}" for loss in losses)
            table.add_row(f"loss, step {steps[at - 1]}", *shown, f"{losses[1] - losses[0]:+.1e}")
        worst = largest_difference(ours, theirs)
        where = f", step {steps[worst.step - 1]}" if worst.loss else ""
        name = f"largest difference{where}"
        table.add_row(name, "", "", f"{worst.loss:.1e}", end_section=True)

    for figure in FIGURES:
        values = figure.of_both(runs)
        if any(value is not None for value in values):
            entries = ("-" if value is None else figure.shown(value) for value in values)
            table.add_row(figure.name, *entries, _gain(runs, *values) if figure.is_speed else "")
    return table


def _gain(runs: Sequence[Finished], ours: float | None, theirs: float | None) -> str:
    first, second = runs
    if why := no_measure(first.device or second.device, first.world_size or 1):
        return f"not comparable: {why}"
    return f"{100 * (theirs / ours - 1):+.1f} %" if ours and theirs else ""


def _took(first: Finished, second: Finished) -> str:
    """What the second gained; empty where one of them does not know its seconds."""
    ours, theirs = next(each for each in FIGURES if each.name == STEP).of_both((first, second))
    if not ours or not theirs:
        return ""
    return (
        f"Result: the step time is {seconds_text(ours)} with {first.name} and "
        f"{seconds_text(theirs)} with {second.name}, {ours / theirs:.2f} times as fast "
        "(measured in both runs)."
    )


def notices(first: Finished, second: Finished) -> list[str]:
    """What is compared, and where more is to be seen. Pure."""
    steps, *losses = common_losses(first, second)
    lines = []
    if steps:
        alike = equal_steps(*losses)
        until = "all steps" if alike == len(steps) else f"the first {alike} steps"
        if not all(run.reported.losses for run in (first, second)):
            until = f"the first {alike} of {len(steps)} steps that both reports cover"
        lines.append(
            f"Losses (nats a token) are equal within {EQUAL:.0e} in {until}. Strategies add "
            "the same numbers in different orders, so the last bits differ. Where two experts "
            "have almost equal scores, such a bit eventually decides which of them a token "
            "goes to; the curves then diverge slightly, and sooner with fewer bits per number."
        )
    device = first.device or second.device
    if device is not None and device.name == ON_CPU:
        lines.append(
            f"Speeds on a CPU ({device.num_cores} cores here) do not predict a cluster: a "
            "waiting rank leaves its core to the busy ones, and there is no network time that "
            "replicas could save, so they only add cost."
        )
    elif took := _took(first, second):
        lines.append(took)
    lines.append(
        "Balance: routed tokens of the busiest rank over the mean. All other ranks wait for "
        "it; 1 is perfect."
    )
    lines += [
        f"{run.name} by its own report: {verdict(run.record)}."
        for run in (first, second)
        if run.record is not None
    ]
    pages = (run.folder / "report.html" for run in (first, second) if run.record is not None)
    lines += [f"Pictures: {page}" for page in pages]
    return lines
