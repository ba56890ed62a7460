# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of `pretrain_deepspeed.py` that differ in the strategy alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from summary import Summary

from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.summary import Outcome, outcome_of

SAME = ("model", "text", "seed", "world_size", "tokens_per_step", "first_step")
OUTCOMES: dict[str, Callable[[Outcome], str]] = {
    "busiest cell / mean, at home only": lambda outcome: f"{outcome.home_balance:.2f}",
    "busiest cell / mean, as computed": lambda outcome: f"{outcome.balance:.2f}",
    "copies a step, all layers": lambda outcome: f"{outcome.copies:.1f}",
    "experts that changed homes": lambda outcome: f"{outcome.num_moved:,}",
}


@dataclass(frozen=True)
class Finished:
    """A run that has ended.

    Attributes:
        folder: its results.
        summary: what the script wrote.
        outcome: what ds_moe_ext recorded of all its layers; None if it replaced none.
    """

    folder: Path
    summary: Summary
    outcome: Outcome | None

    @classmethod
    def read(cls, folder: Path) -> Finished:
        """Read the files of a run.

        Raises:
            ValueError: they are not those of a run.
        """
        summary, path = Summary.read(folder), folder / "report.json"
        if not path.is_file():
            return cls(folder, summary, None)
        return cls(folder, summary, outcome_of(RunRecord.from_json(path.read_text())))


def check_comparable(first: Summary, second: Summary) -> None:
    """Refuse runs whose losses have nothing to do with each other.

    Raises:
        ValueError: they differ in more than the strategy.
    """
    for name in SAME:
        ours, theirs = vars(first)[name], vars(second)[name]
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours!r} in one run and {theirs!r} in the other; compare runs that "
                "differ in the strategy alone"
            )
    if len(first.losses) != len(second.losses):
        raise ValueError(
            f"one run has {len(first.losses)} steps and the other {len(second.losses)}; give both "
            "the same --steps"
        )


class Difference(NamedTuple):
    """Where two loss curves are furthest apart."""

    step: int  # 1 is the first
    loss: float  # nats per byte, without sign


def largest_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The first of several as large. Pure."""
    apart = [abs(a - b) for a, b in zip(first, second)]
    largest = max(apart)
    return Difference(apart.index(largest) + 1, largest)


def shown_steps(num_steps: int) -> list[int]:
    """First, middle and last step, each once; 1 is the first. Pure."""
    return sorted({1, (1 + num_steps) // 2, num_steps})


def comparison(first: Finished, second: Finished) -> Table:
    """Both runs side by side. Pure."""
    runs = (first, second)
    ours, theirs = first.summary, second.summary
    table = Table(title="Two runs, one model, one text", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.summary.strategy, justify="right")
    table.add_column("difference", justify="right")

    for step in shown_steps(len(ours.losses)):
        losses = ours.losses[step - 1], theirs.losses[step - 1]
        name = f"loss, step {ours.first_step + step}"
        table.add_row(name, *(f"{loss:.4f}" for loss in losses), f"{losses[1] - losses[0]:+.1e}")
    worst = largest_difference(ours.losses, theirs.losses)
    where = f", step {ours.first_step + worst.step}" if worst.loss else ""
    table.add_row(f"largest difference{where}", "", "", f"{worst.loss:.1e}", end_section=True)

    rates = ours.tokens_per_s, theirs.tokens_per_s
    gain = f"{100 * (rates[1] / rates[0] - 1):+.1f} %"
    table.add_row("tokens/s", *(f"{rate:,.0f}" for rate in rates), gain)
    table.add_row("a step takes", *(f"{run.summary.seconds_per_step_s:.3f} s" for run in runs))
    table.add_section()

    outcomes = [run.outcome for run in runs]
    for name, entry in OUTCOMES.items():
        table.add_row(name, *(entry(outcome) if outcome else "-" for outcome in outcomes))
    return table


def remarks(first: Finished, second: Finished) -> list[str]:
    """What is compared, and where more is to be seen. Pure."""
    summary = first.summary
    return [
        f"Both runs began with the weights of seed {summary.seed} and read {summary.text} in the "
        "same order. Strategies add numbers up in different orders, so losses (nats per byte) need "
        "not agree bit by bit: where two experts score almost alike, the last bit decides which "
        "one a token goes to. What must agree is the curve.",
        *(
            f"Pictures of {run.summary.strategy}: {run.folder / 'report.html'}"
            for run in (first, second)
            if run.outcome
        ),
    ]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, help="results of a run, as runs/quickstart/ep")
    arguments = parser.parse_args()
    try:
        runs = Finished.read(arguments.first), Finished.read(arguments.second)
        check_comparable(*(run.summary for run in runs))
    except ValueError as error:
        sys.exit(f"compare: {error}")
    console = Console(highlight=False)
    console.print(comparison(*runs))
    for remark in remarks(*runs):
        console.print(remark, markup=False)


if __name__ == "__main__":
    main()
