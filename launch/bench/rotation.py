# SPDX-License-Identifier: Apache-2.0
"""Contenders that take turns in the same processes, a few steps each, in an order that rotates, so
that a machine whose speed drifts slows them alike; ratios are paired by round. And what a
device did in a step, by torch's profiler.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ds_moe_ext.hosts.steps.costs import CHECKED, STEPS

NUM_WARM_UPS = max(STEPS[-1] + 4, CHECKED[-1] + 1)
"""Steps after which costs are known, models are checked, and the window has seen the loads."""

T = TypeVar("T")
Skipped = dict[str, str]
"""Names of contenders that do not run, and why."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One of those that are compared."""

    name: str  # in the table
    step: Callable[[int], object]  # one optimizer step on the batches of a step number. Collective


def rotated(contenders: Sequence[T], number: int) -> list[T]:
    """All of them, in the order of the round of a number."""
    turn = number % len(contenders)
    return [*contenders[turn:], *contenders[:turn]]


def measure(contenders: list[Contender], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of each contender, by round; the first round is not counted. Collective."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(rounds + 1):
        for each in rotated(contenders, number):
            dist.barrier()
            start = time.perf_counter()
            for step in range(steps):
                each.step(number * steps + step)
            dist.barrier()
            if number:
                seconds[each.name].append((time.perf_counter() - start) / steps)
    return seconds


def build_each(builders: Mapping[str, Callable[[], Contender]]) -> tuple[list[Contender], Skipped]:
    """The contenders that take a first step here, and why the others do not. Collective.

    A contender is left out where any rank fails: all ranks must build the same.
    """
    contenders, skipped = list[Contender](), Skipped()
    for name, build in builders.items():
        why = ""
        try:
            contender = build()
            contender.step(0)
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        reasons = list[str | None]([None] * dist.get_world_size())
        dist.all_gather_object(reasons, why)
        if why := next(filter(None, reasons), ""):
            skipped[name] = why
        else:
            contenders.append(contender)
    if not contenders:
        raise RuntimeError(f"no contender runs: {skipped}")
    return contenders, skipped


def show(
    seconds: dict[str, list[float]],
    tokens: int,
    title: str,
    path: Path | None,
    skipped: Mapping[str, str],
    **also: object,
) -> None:
    """Print the table and, where a path is given, write the figures there, and what else there
    is."""
    console = Console()
    console.print(table_of(seconds, tokens, title))
    for name, why in skipped.items():
        console.print(f"not run: {name}: {why}", markup=False)
    if path is not None:
        document = {"title": title, "tokens_a_step": tokens, "seconds_a_step": seconds}
        path.write_text(json.dumps({**document, "skipped": skipped, **also}))


def table_of(seconds: dict[str, list[float]], tokens: int, title: str) -> Table:
    """Medians, and ratios of the others to the first, paired by round."""
    first = next(iter(seconds))
    table = Table(title=title, title_justify="left")
    for heading in (
        "contender",
        "tokens/s",
        "ms a step",
        "the first is faster by",
        "of rounds won",
    ):
        table.add_column(heading)
    for name, each in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(each, seconds[first])]
        won = sum(ratio > 1 for ratio in ratios)
        table.add_row(
            name,
            f"{tokens / statistics.median(each):,.0f}",
            f"{1e3 * statistics.median(each):.1f}",
            "" if name == first else f"{statistics.median(ratios):.3f}",
            "" if name == first else f"{won}/{len(ratios)}",
        )
    return table


def kernels_of(step: Callable[[], object]) -> list[FunctionEvent]:
    """What ran on the device in a step. It must have ended when the step returns."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
    # Ranges of tasks have places on the device's time line, too.
    events = (event for event in found.events() if event.device_type == DeviceType.CUDA)
    return [event for event in events if not event.name.startswith("layer ")]


def covered_us(events: Iterable[FunctionEvent]) -> float:
    """Time in which at least one ran."""
    total = last = 0.0
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
