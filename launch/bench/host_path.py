# SPDX-License-Identifier: Apache-2.0
"""Host time of one MoE layer: what a GPU would wait for, measured without one.

`python launch/bench/host_path.py --ranks 8 64 --slots 1 8`
`... --only ep prophet --rounds 40 --json host.json`
`... --kernels`, with Triton on ``PYTHONPATH`` (`no_device.py`)

One process stands for one of all ranks (`fake_world.py`), experts are tiny, layers take the way of
a GPU, and grouped GEMMs return at once, so that what is left is the processor's time to issue them.
The contenders take turns, a step each, in an order that rotates; processor time, not that of a
clock, which other programs disturb less. In the measured span are, of every contender alike, order,
dispatch, experts, combine and restore with their backward; gates are not: their choices are made
beforehand. Beside that, in steps of their own and by the clock: what lies between a wait and the
exchange that follows it (`host_windows.py`).
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice, pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from fake_world import as_on_cuda, fake_world, products_at_once
from host_counts import Place, counted
from host_path_contenders import OURS, Batch, Builder, Contender, Sizes
from host_path_peers import PEERS
from host_windows import windows
from no_device import kernels_nowhere
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rotation import NUM_WARM_UPS, rotated

from ds_moe_ext.core.kernels import HAS_TRITON

BUILDERS: Mapping[str, Builder] = {**OURS, **PEERS}
"""All contenders by name; the first is what the others are compared with."""

COUNTED_STEPS = 2
CALLS = frozenset(("call", "c_call"))  # events of sys.setprofile


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
class Counts:
    """Of a layer and step, both directions and what is between steps.

    Attributes:
        waits: of the host for the device.
        copies: from the host to the device.
        collectives: calls of a communicator; one for all that is sent and received in pairs.
        parcels: tensors that went in pairs.
        calls: of Python's and of built-in functions, by the thread that calls.
        calls_after_waits: those of them in forward from a wait to the exchange that follows.
        kept_blocks: of Python's memory that forward leaves to backward.
        places: of waits, copies and collectives, with how many.
        waits_in_passes: files and functions of waits in forward and backward.
    """

    waits: float
    copies: float
    collectives: float
    parcels: float
    calls: float
    calls_after_waits: float
    kept_blocks: float
    places: Mapping[str, float]
    waits_in_passes: Sequence[str]


@dataclass(frozen=True)
class Result:
    """One contender's.

    Attributes:
        ranks: of the world.
        slots: experts that a rank is home to.
        name: of the contender.
        steps: those that were timed, in rounds.
        counts: of the steps after them.
        after_waits_s: of a layer in each of more steps, in forward from a wait to the exchange that
            follows; see ``host_windows.py``.
        skipped: why it did not run; empty if it did.
    """

    ranks: int
    slots: int
    name: str
    steps: tuple[Step, ...] = ()
    counts: Counts | None = None
    after_waits_s: tuple[float, ...] = ()
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


def passes(contender: Contender, batch: Batch, number: int) -> Iterator[Span]:
    """One step of a contender, with the moments between its parts. Collective."""
    yield now()
    y_TD = contender.forward(batch)
    yield now()
    y_TD.backward(torch.ones_like(y_TD))
    del y_TD  # the graph is freed in its own contender's time
    yield now()
    contender.after_step(number)
    yield now()


def take_step(contender: Contender, batch: Batch, number: int) -> Step:
    """One step of a contender, timed. Collective."""
    contender.model.zero_grad(set_to_none=True)
    with contender.turn():
        times = list(passes(contender, batch, number))
    gc.collect()
    num_layers = len(batch.expert_LTK)
    spans = (
        Span(*((end - start) / num_layers for start, end in zip(before, after)))
        for before, after in pairwise(times)
    )
    return Step(*spans)


def counts_of(contender: Contender, sizes: Sizes, first: int) -> Counts:
    """What steps from a number on count. Collective."""
    batches = [Batch.of(sizes, first + each) for each in range(COUNTED_STEPS + 4)]
    with counted() as seen:
        for number in range(COUNTED_STEPS):
            take_step(contender, batches[number], first + number)
    num = COUNTED_STEPS * sizes.layers
    waits = Counter({p: n for p, n in seen.waits.items() if p.function not in contender.cpu_only})
    by_place: Counter[Place] = waits + seen.copies + seen.collectives
    *_, one, two, three, four = batches
    after = first + COUNTED_STEPS
    where = waits_of_passes(contender, one, after)
    return Counts(
        waits=waits.total() / num,
        copies=seen.copies.total() / num,
        collectives=seen.collectives.total() / num,
        parcels=seen.parcels / num,
        calls=calls_of(contender, two, after + 1) / sizes.layers,
        calls_after_waits=calls_after_waits(contender, three, after + 2, where) / sizes.layers,
        kept_blocks=kept_blocks(contender, four, after + 3) / sizes.layers,
        places={str(place): number / num for place, number in by_place.most_common()},
        waits_in_passes=where,
    )


def waits_of_passes(contender: Contender, batch: Batch, number: int) -> list[str]:
    """Where the host waits in forward and backward of a step. Collective."""
    found: list[Counter[Place]] = []
    contender.model.zero_grad(set_to_none=True)
    with contender.turn(), counted() as seen:
        for _ in passes(contender, batch, number):  # the third moment is after backward
            found.append(Counter(seen.waits))
    places = {place for place in found[2] if place.function not in contender.cpu_only}
    return sorted({f"{place.file} {place.function}" for place in places})


def calls_of(contender: Contender, batch: Batch, number: int) -> int:
    """Of functions, Python's and built-in ones, by this thread in a step. Collective."""
    contender.model.zero_grad(set_to_none=True)
    with contender.turn():
        return _calls_in(passes(contender, batch, number), lambda: True)


def calls_after_waits(contender: Contender, batch: Batch, number: int, waits: Sequence[str]) -> int:
    """Those of them in forward from a wait to the exchange that follows. Collective."""
    contender.model.zero_grad(set_to_none=True)
    with contender.turn(), windows(waits) as seen:
        step = passes(contender, batch, number)
        found = _calls_in(islice(step, 2), lambda: seen.since_s is not None)
        deque(step, maxlen=0)
    return found


def _calls_in(step: Iterator[Span], is_counted: Callable[[], bool]) -> int:
    """Of functions, in parts of a step."""
    found = 0

    def saw(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in CALLS and is_counted()

    sys.setprofile(saw)
    try:
        deque(step, maxlen=0)
    finally:
        sys.setprofile(None)
    return found


def after_waits(contender: Contender, batch: Batch, number: int, waits: Sequence[str]) -> float:
    """Seconds of a layer in forward from a wait to the exchange that follows. Collective."""
    contender.model.zero_grad(set_to_none=True)
    with contender.turn(), windows(waits) as seen:
        step = passes(contender, batch, number)
        deque(islice(step, 2), maxlen=0)
        seconds = sum(seen.seconds)
        deque(step, maxlen=0)
    return seconds / len(batch.expert_LTK)


def kept_blocks(contender: Contender, batch: Batch, number: int) -> int:
    """Of Python's memory, that forward leaves to backward, in the step of a number. Collective."""
    contender.model.zero_grad(set_to_none=True)
    with contender.turn():
        before, after, *_ = [sys.getallocatedblocks() for _ in passes(contender, batch, number)]
    return after - before


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        ranks: of the world.
        slots: experts a rank.
        sizes: of the model.
        only: names of the contenders; none for all.
        rounds: in which each takes a step that is timed.
        rank: that the process stands for.
        launches: layers of ours launch Triton's kernels, see ``no_device.py``; else torch's
            operations stand in for them.
    """

    ranks: int
    slots: int
    sizes: Sizes
    only: Sequence[str]
    rounds: int
    rank: int = 0
    launches: bool = False


def build(job: Job) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run, and why the others cannot. Collective."""
    contenders, skipped = [], {}
    for name, builder in BUILDERS.items():
        if job.only and name not in job.only:
            continue
        try:
            contender = builder(job.sizes)
            take_step(contender, Batch.of(job.sizes, 0), 0)
            contenders.append(contender)
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return contenders, skipped


def measure(job: Job) -> list[Result]:
    """All contenders in one world, turn by turn. In a process of its own."""
    torch.set_num_threads(1)
    console = Console(stderr=True)
    launches = kernels_nowhere() if job.launches else nullcontext()
    with fake_world(job.ranks, job.rank), as_on_cuda(), products_at_once(), launches:
        contenders, skipped = build(job)
        steps: dict[str, list[Step]] = {each.name: [] for each in contenders}
        title = f"{job.ranks} ranks, {job.slots} experts each"
        rounds = range(1, 1 + NUM_WARM_UPS + job.rounds)
        with no_collector():
            for number in track(rounds, title, console=console):
                for contender in rotated(contenders, number):
                    step = take_step(contender, Batch.of(job.sizes, number), number)
                    if number > NUM_WARM_UPS:
                        steps[contender.name].append(step)
            after = 1 + NUM_WARM_UPS + job.rounds
            counts = {each.name: counts_of(each, job.sizes, after) for each in contenders}
            after_waits_s: dict[str, list[float]] = {each.name: [] for each in contenders}
            first = after + COUNTED_STEPS + 4
            for number in range(first, first + job.rounds):
                for each in rotated(contenders, number):
                    waits = counts[each.name].waits_in_passes
                    took = after_waits(each, Batch.of(job.sizes, number), number, waits)
                    after_waits_s[each.name].append(took)
    where = job.ranks, job.slots
    return [
        *(
            Result(*where, name, tuple(found), counts[name], tuple(after_waits_s[name]))
            for name, found in steps.items()
        ),
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
        "after waits",
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
            lower_us(iter(each.after_waits_s)),
        )
        table.add_row(
            each.name, *(f"{us:,.0f}" for us in cells), f"{middle:.2f}", f"{low:.2f}-{high:.2f}"
        )
    return table


COUNTED = (
    "waits", "copies", "collectives", "parcels", "calls", "calls_after_waits", "kept_blocks",
)  # fmt: skip


def counts_table(results: Sequence[Result]) -> Table:
    """Those of one world."""
    table = Table(title="a layer and step", title_justify="left")
    table.add_column("contender")
    for column in COUNTED:
        table.add_column(column.replace("_", " "), justify="right")
    for each in results:
        if each.counts is not None:
            figures = asdict(each.counts)
            table.add_row(each.name, *(f"{figures[column]:,.4g}" for column in COUNTED))
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[8])
    add("--slots", type=int, nargs="+", default=[1, 8], help="experts a rank")
    add("--rank", type=int, default=0, help="for which of them the process stands")
    add(
        "--only",
        nargs="+",
        choices=BUILDERS,
        default=[],
        help="the first is compared with the others",
    )
    add("--layers", type=int, default=4)
    add("--tokens", type=int, default=64, help="of a rank")
    add("--top_k", type=int, default=2)
    add("--rounds", type=int, default=24)
    add("--kernels", action="store_true", help="launch Triton's, on no device; needs Triton")
    add("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    if given.kernels and not HAS_TRITON:
        parser.error(
            "--kernels, but there is no Triton: pip install --target FOLDER triton, then "
            "PYTHONPATH=FOLDER"
        )
    return given


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
        job = Job(ranks, slots, sizes, given.only, given.rounds, given.rank, given.kernels)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = process.submit(measure, job).result()
        console.print(table_of(found))
        console.print(counts_table(found))
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
