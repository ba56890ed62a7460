"""Host time of one MoE layer: what a GPU would wait for, measured without one.

`python launch/bench/host_path.py --ranks 8 64 --slots 1 8`
`... --only ep prophet --rounds 40 --json host.json`

One process stands for the first of all ranks (`fake_world.py`), experts are tiny, and layers take
the way of a GPU, so that what is left is the processor's time to issue them. The contenders take
turns, a step each, in an order that rotates; processor time, not that of a clock, which other
programs disturb less. In the measured span are, of every contender alike, order, dispatch, experts,
combine and restore with their backward; gates are not: their choices are made beforehand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from fake_world import as_on_cuda, fake_world
from host_path_contenders import Batch, Contender, Sizes, builders
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rotation import rotated

from ds_moe_ext.steps.costs import CHECKED, STEPS

NUM_WARM_UPS = max(STEPS[-1] + 4, CHECKED[-1] + 1)
"""Costs are known, models are checked."""


class Span(NamedTuple):
    """Processor seconds of a layer in one step.

    Attributes:
        caller_s: of the thread that calls.
        all_s: of all threads.
    """

    caller_s: float
    all_s: float


@dataclass(frozen=True)
class Step:
    """Processor time of a layer in one step.

    Attributes:
        forward: through the layer.
        backward: likewise.
        between: from its backward to the next step, without an optimizer's.
    """

    forward: Span
    backward: Span
    between: Span

    @property
    def all_s(self) -> float:
        """Of all threads."""
        return self.forward.all_s + self.backward.all_s + self.between.all_s


@dataclass(frozen=True)
class Result:
    """One contender's.

    Attributes:
        ranks: of the world.
        slots: experts that a rank is home to.
        name: of the contender.
        steps: those that were timed, in rounds.
        skipped: why it did not run; empty if it did.
    """

    ranks: int
    slots: int
    name: str
    steps: tuple[Step, ...] = ()
    skipped: str = ""


def now() -> Span:
    """Processor time so far."""
    return Span(time.thread_time(), time.process_time())


@contextmanager
def no_collector() -> Iterator[None]:
    """Garbage of one contender is not collected in another one's time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def take_step(contender: Contender, sizes: Sizes, number: int) -> Step:
    """One step of a contender. Collective."""
    batch = Batch.of(sizes, number)
    contender.model.zero_grad(set_to_none=True)
    with contender.turn():
        times = [now()]
        y_TD = contender.forward(batch)
        times.append(now())
        y_TD.backward(torch.ones_like(y_TD))
        times.append(now())
        contender.after_step(number)
        times.append(now())
    del y_TD
    gc.collect()
    spans = (
        Span(*((end - start) / sizes.layers for start, end in zip(before, after)))
        for before, after in pairwise(times)
    )
    return Step(*spans)


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        ranks: of the world.
        slots: experts a rank.
        sizes: of the model.
        only: names of the contenders; none for all.
        rounds: in which each takes a step that is timed.
    """

    ranks: int
    slots: int
    sizes: Sizes
    only: Sequence[str]
    rounds: int


def build(job: Job) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run, and why the others cannot. Collective."""
    contenders, skipped = [], {}
    for name, builder in builders():
        if job.only and name not in job.only:
            continue
        try:
            contender = builder(job.sizes)
            take_step(contender, job.sizes, 0)
            contenders.append(contender)
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return contenders, skipped


def measure(job: Job) -> list[Result]:
    """All contenders in one world, turn by turn. In a process of its own."""
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with fake_world(job.ranks), as_on_cuda():
        contenders, skipped = build(job)
        steps: dict[str, list[Step]] = {each.name: [] for each in contenders}
        title = f"{job.ranks} ranks, {job.slots} experts each"
        rounds = range(1, 1 + NUM_WARM_UPS + job.rounds)
        with no_collector():
            for number in track(rounds, title, console=console):
                for contender in rotated(contenders, number):
                    step = take_step(contender, job.sizes, number)
                    if number > NUM_WARM_UPS:
                        steps[contender.name].append(step)
    where = job.ranks, job.slots
    return [
        *(Result(*where, name, tuple(found)) for name, found in steps.items()),
        *(Result(*where, name, skipped=reason) for name, reason in skipped.items()),
    ]


def lower_us(seconds: Iterator[float]) -> float:
    """The lower quartile, in microseconds: what disturbs makes slower only."""
    return 1e6 * statistics.quantiles(seconds, n=4, method="inclusive")[0]


def ratios(result: Result, first: Result) -> list[float]:
    """Quartiles of its time over the first's, paired by round."""
    pairs = zip(result.steps, first.steps)
    return statistics.quantiles([a.all_s / b.all_s for a, b in pairs], n=4, method="inclusive")


def table_of(results: Sequence[Result]) -> Table:
    """Those of one world."""
    ran = [each for each in results if each.steps]
    first = ran[0]
    table = Table(
        title=f"{first.ranks} ranks, {first.slots} experts each: processor us a layer",
        title_justify="left",
    )
    table.add_column("contender")
    for column in (
        "forward",
        "backward",
        "between",
        "sum",
        "of the caller",
        "x first",
        "quartiles",
    ):
        table.add_column(column, justify="right")
    for each in ran:
        low, middle, high = ratios(each, first)
        cells = (
            lower_us(step.forward.all_s for step in each.steps),
            lower_us(step.backward.all_s for step in each.steps),
            lower_us(step.between.all_s for step in each.steps),
            lower_us(step.all_s for step in each.steps),
            lower_us(
                step.forward.caller_s + step.backward.caller_s + step.between.caller_s
                for step in each.steps
            ),
        )
        table.add_row(
            each.name, *(f"{us:,.0f}" for us in cells), f"{middle:.2f}", f"{low:.2f}-{high:.2f}"
        )
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [name for name, _ in builders()]
    add("--ranks", type=int, nargs="+", default=[8])
    add("--slots", type=int, nargs="+", default=[1, 8], help="experts a rank")
    add(
        "--only", nargs="+", choices=names, default=[], help="the first is compared with the others"
    )
    add("--layers", type=int, default=4)
    add("--tokens", type=int, default=64, help="of a rank")
    add("--top_k", type=int, default=2)
    add("--rounds", type=int, default=24)
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def machine() -> Mapping[str, str]:
    """On which it was measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    cores = f"{len(os.sched_getaffinity(0))} cores"
    load = f"load {os.getloadavg()[0]:.1f}"
    return {"cpu": cpu, "cores": cores, "load": load, "torch": torch.__version__}


def main() -> None:
    """Measure each world in a process of its own, print."""
    given = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: list[Result] = []
    for ranks, slots in product(given.ranks, given.slots):
        sizes = Sizes(given.layers, ranks * slots, given.tokens, given.top_k)
        job = Job(ranks, slots, sizes, given.only, given.rounds)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = process.submit(measure, job).result()
        console.print(table_of(found))
        for each in found:
            if each.skipped:
                console.print(f"not run: {each.name}: {each.skipped}")
        results += found
    told = machine()
    console.print(", ".join(told.values()))
    if given.json:
        figures = [asdict(each) for each in results]
        about = {"command": sys.argv, "machine": told}
        given.json.write_text(json.dumps({**about, "results": figures}))


if __name__ == "__main__":
    main()
