# SPDX-License-Identifier: Apache-2.0
"""Host time of one MoE layer: what a GPU would wait for, measured without one.

`python launch/bench/host_path.py --ranks 8 64 --slots 1 8`
`... --only ep prophet --rounds 40 --json host.json`
`taskset -c 1 chrt -r 10 python launch/bench/host_path.py --ranks 8 --slots 1 8 --rounds 40`: on one
core, where cores change their speed by half within seconds; only ratios of one run count there.

One process stands for one of all ranks (`fake_world.py`), experts are tiny, layers take the way of
a GPU, and grouped GEMMs return at once, so that what is left is the processor's time to issue them.
All ways take turns, a step each, in an order that rotates; processor time, not that of a clock,
which other programs disturb less. Gates are not in it: their choices are made beforehand.

Steps of their own count what would make a GPU's host wait, copy or call its network. A tensor is
the host's if it came from numpy or from Python's numbers, was fetched, or was computed from such
tensors alone; all others stand for the device's. Methods are changed for all threads. What is the
host's is followed by a torch function mode, which the product's streams carry with them: a thread
without it may count too much, never too little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from fake_world import (
    WAYS,
    Batch,
    Ours,
    Sizes,
    as_on_cuda,
    fake_world,
    products_at_once,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rotation import NUM_WARM_UPS, rotated
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_moe_ext.core import comm

# Counts.

FETCHES = (
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "__complex__", "__contains__", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive", "bincount", "equal", "allclose", "is_nonzero",
)  # fmt: skip
"""Methods and functions for which the host waits: for values, or for how many there are."""

REPLICAS = ("tensor", "as_tensor")
"""Functions that copy what Python has, where they are notified a device."""

COLLECTIVES = (
    "all_to_all_single", "alltoall_base", "alltoall", "all_gather_single", "_allgather_base",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "_reduce_scatter_base", "barrier",
)  # fmt: skip
"""Of a process group."""

COUNTED_STEPS = 2
HERE = Path(__file__)
ROOT = HERE.parents[2]


class Place(NamedTuple):
    """A line of code."""

    what: str  # was called there
    file: str  # below the repository, or below ``site-packages``
    line: int  # in it
    function: str  # around it

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}"

    @classmethod
    def of_caller(cls, what: str, frame: FrameType | None = None) -> Place:
        """The innermost that is not torch's, numpy's or this file; from a frame on, if given."""
        frame = frame or sys._getframe(1)
        while frame.f_back is not None and _is_inner(frame.f_code.co_filename):
            frame = frame.f_back
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            name = str(path.relative_to(ROOT))
        else:
            name = str(path).rpartition("site-packages/")[2]
        return cls(what, name, frame.f_lineno, code.co_name)


def _is_inner(file: str) -> bool:
    inner = ("/site-packages/torch/", "/site-packages/numpy/", "/unittest/mock.py", "<")
    return file == str(HERE) or file.startswith("<") or any(part in file for part in inner[:-1])


@dataclass
class HostCounts:
    """By place, since counting began."""

    waits: Counter[Place] = field(default_factory=Counter)  # of the host for the device
    copies: Counter[Place] = field(default_factory=Counter)  # from the host to the device
    # calls of a communicator; one for all that is sent and received in pairs
    collectives: Counter[Place] = field(default_factory=Counter)
    parcels: int = 0  # tensors that went in pairs, of this rank


class _State(threading.local):
    """Attributes: is_inside: this thread is in a call that counts as one."""

    is_inside = False


class _Counter:
    """Counts into a record; each call counts once, whatever it calls in turn."""

    def __init__(self, counts: HostCounts) -> None:
        self.counts, self._state, self._lock = counts, _State(), threading.Lock()

    def add(self, to: Counter[Place], what: str) -> None:
        """Count the call that is made."""
        if not self._state.is_inside:
            with self._lock:
                to[Place.of_caller(what)] += 1

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Nothing in it counts."""
        before, self._state.is_inside = self._state.is_inside, True
        try:
            yield
        finally:
            self._state.is_inside = before

    def calls(
        self, to: Counter[Place], name: str, counts: Callable[..., bool], stock: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A method or function each of whose calls counts, if it does by its arguments."""

        def called(*args: Any, **named: Any) -> Any:
            if counts(*args, **named):
                self.add(to, name)
            with self.inside():
                out = stock(*args, **named)
                return _of_host(out) if name == "cpu" else out

        return called

    def to(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: Tensor, *args: Any, **named: Any) -> Any:
            given = (*args, *named.values())
            names_cpu = any(isinstance(each, str) and each == "cpu" for each in given)
            names_device = any(isinstance(each, str | torch.device | Tensor) for each in given)
            is_hosts = _is_hosts(tensor)
            if names_cpu and not is_hosts:
                self.add(self.counts.waits, "to")
            elif names_device and not names_cpu and is_hosts:
                self.add(self.counts.copies, "to")
            with self.inside():
                out = stock(tensor, *args, **named)
                if names_cpu:
                    return _of_host(out)
                return _of_device(out) if names_device and is_hosts else out

        return to

    def copy_(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def copy_(tensor: Tensor, source: Tensor, *args: Any, **named: Any) -> Any:
            if _is_hosts(source) and not _is_hosts(tensor):
                self.add(self.counts.copies, "copy_")
            elif _is_hosts(tensor) and not _is_hosts(source):
                self.add(self.counts.waits, "copy_")
            with self.inside():
                return stock(tensor, source, *args, **named)

        return copy_

    def pairs(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """What sends and receives in pairs, ours or torch's: lists of parcels are its last
        arguments."""

        def moved(*args: Any) -> Any:
            num_parcels = sum(len(each) for each in args if isinstance(each, Sequence))
            if num_parcels:
                self.add(self.counts.collectives, stock.__name__)
            with self._lock:
                self.counts.parcels += num_parcels
            with self.inside():
                return stock(*args)

        return moved


def _always(*args: Any, **named: Any) -> bool:
    return True


def _of_devices(tensor: Any, *args: Any, **named: Any) -> bool:
    return not _is_hosts(tensor)


def _names_device(*args: Any, **named: Any) -> bool:
    return named.get("device") is not None


def _is_indexed(tensor: Tensor, index: Any, *value: Any) -> bool:
    """By a mask the host must know how many are true; by one number, which."""
    return not _is_hosts(tensor) and any(map(_must_be_known, _parts(index)))


def _is_repeated(tensor: Tensor, *args: Any, **named: Any) -> bool:
    """By lengths that the host must know."""
    tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
    lengths = tensors[0] if tensors else tensor if not args and not named else None
    return lengths is not None and not _is_hosts(lengths) and "output_size" not in named


class _Following(TorchFunctionMode):
    """What is computed from the host's tensors alone is the host's; so is what is made of nothing,
    unless for a device, which is never named: a layer has a ``torch.device``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        read = [*_tensors(args), *_tensors(tuple(named.values()))]
        if all(map(_is_hosts, read)) if read else named.get("device") in (None, "cpu"):
            for tensor in _tensors(out):
                vars(tensor)[_MARK] = True
        return out


_MARK = "_is_on_host_of_bench"


def _is_hosts(value: Any) -> bool:
    return not isinstance(value, Tensor) or _MARK in vars(value)


def _of_host(tensor: Any) -> Any:
    """Another tensor of the same values, which is the host's."""
    alias = tensor.view(tensor.shape)
    vars(alias)[_MARK] = True
    return alias


def _of_device(tensor: Tensor) -> Tensor:
    alias = tensor.view(tensor.shape)
    vars(alias).pop(_MARK, None)
    return alias


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _parts(index: Any) -> Iterator[Any]:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            yield from (part.start, part.stop, part.step)
        else:
            yield part


def _must_be_known(part: Any) -> bool:
    if not isinstance(part, Tensor) or _is_hosts(part):
        return False
    return part.dtype in (torch.bool, torch.uint8) or part.dim() == 0


@contextmanager
def counted() -> Iterator[HostCounts]:
    """Count, inside the block. What a batch is made of must be made outside."""
    counter = _Counter(HostCounts())
    with ExitStack() as changed:

        def change(owner: Any, name: str, around: Callable[..., Any], *given: Any) -> None:
            new = around(*given, getattr(owner, name))
            changed.enter_context(mock.patch.object(owner, name, new))

        counts = counter.counts

        def count(owner: Any, name: str, to: Counter[Place], when: Callable[..., bool]) -> None:
            change(owner, name, counter.calls, to, name, when)

        for owner in (Tensor, torch):
            for name in FETCHES:
                if hasattr(owner, name):
                    count(owner, name, counts.waits, _of_devices)
            count(owner, "repeat_interleave", counts.waits, _is_repeated)
        for name in REPLICAS:
            count(torch, name, counts.copies, _names_device)
        for name in ("__getitem__", "__setitem__"):
            count(Tensor, name, counts.waits, _is_indexed)
        count(Tensor, "new_tensor", counts.copies, _of_devices)
        change(Tensor, "to", counter.to)
        change(Tensor, "copy_", counter.copy_)
        change(torch, "from_numpy", _from_numpy)
        for name in (*COLLECTIVES, "send", "recv"):
            count(dist.ProcessGroup, name, counts.collectives, _always)
        change(dist, "batch_isend_irecv", counter.pairs)
        change(comm.Pairs, "post", counter.pairs)
        changed.enter_context(_Following())
        yield counter.counts


def _from_numpy(stock: Callable[[np.ndarray], Tensor]) -> Callable[[np.ndarray], Tensor]:
    return lambda array: _of_host(stock(array))


# Time.


class Span(NamedTuple):
    """Processor seconds of a layer in one step."""

    caller_s: float  # of the thread that calls
    all_s: float  # of all threads


@dataclass(frozen=True)
class Step:
    """Processor time of a layer in one step."""

    forward: Span
    backward: Span
    between: Span  # from its backward to the next step, without an optimizer's

    @property
    def whole(self) -> Span:
        """All of it."""
        spans = (self.forward, self.backward, self.between)
        return Span(sum(span.caller_s for span in spans), sum(span.all_s for span in spans))


@dataclass(frozen=True)
class Counts:
    """Of a layer and step, both directions and what is between steps; see ``HostCounts``."""

    waits: float
    copies: float
    collectives: float
    parcels: float
    places: Mapping[str, float]  # of waits, copies and collectives, with how many
    waits_in_passes: Sequence[str]  # files and functions of waits in forward and backward


@dataclass(frozen=True)
class Result:
    """One way's."""

    name: str
    steps: tuple[Step, ...] = ()
    counts: Counts | None = None  # of the steps after them
    skipped: str = ""  # why it did not run


def now() -> Span:
    """Processor time so far."""
    return Span(time.thread_time(), time.process_time())


@contextmanager
def no_collector() -> Iterator[None]:
    """Garbage of one way is not collected in another one's time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Timed(Protocol):
    """Layers whose steps are timed: as ``Ours``, or a host's."""

    name: str

    @property
    def model(self) -> nn.Module: ...

    def turn(self) -> AbstractContextManager[None]: ...

    def forward(self, batch: Batch) -> Tensor: ...

    def after_step(self, number: int) -> None: ...


def passes(layers: Timed, batch: Batch, number: int) -> Iterator[Span]:
    """One step, with the moments between its parts. Collective."""
    yield now()
    y_TD = layers.forward(batch)
    yield now()
    y_TD.backward(torch.ones_like(y_TD))
    del y_TD  # the graph is freed in its own way's time
    yield now()
    layers.after_step(number)
    yield now()


def take_step(layers: Timed, batch: Batch, number: int) -> Step:
    """One step, timed. Collective."""
    layers.model.zero_grad(set_to_none=True)
    with layers.turn():
        times = list(passes(layers, batch, number))
    gc.collect()
    num_layers = len(batch.expert_LTK)
    spans = (
        Span(*((end - start) / num_layers for start, end in zip(before, after)))
        for before, after in pairwise(times)
    )
    return Step(*spans)


def counts_of(layers: Timed, sizes: Sizes, first: int) -> Counts:
    """What steps from a number on count. Collective."""
    batches = [Batch.of(sizes, first + each) for each in range(COUNTED_STEPS + 1)]
    with counted() as seen:
        for number in range(COUNTED_STEPS):
            take_step(layers, batches[number], first + number)
    num = COUNTED_STEPS * sizes.layers
    by_place: Counter[Place] = seen.waits + seen.copies + seen.collectives
    return Counts(
        waits=seen.waits.total() / num,
        copies=seen.copies.total() / num,
        collectives=seen.collectives.total() / num,
        parcels=seen.parcels / num,
        places={str(place): number / num for place, number in by_place.most_common()},
        waits_in_passes=waits_of_passes(layers, batches[-1], first + COUNTED_STEPS),
    )


def waits_of_passes(layers: Timed, batch: Batch, number: int) -> list[str]:
    """Where the host waits in forward and backward of a step. Collective."""
    found: list[Counter[Place]] = []
    layers.model.zero_grad(set_to_none=True)
    with layers.turn(), counted() as seen:
        for _ in passes(layers, batch, number):  # the third moment is after backward
            found.append(Counter(seen.waits))
    return sorted({f"{place.file} {place.function}" for place in found[2]})


@dataclass(frozen=True)
class Job:
    """What one process measures: so many rounds, in which each way takes a step that is timed."""

    ranks: int
    slots: int  # experts a rank
    sizes: Sizes
    only: Sequence[str]  # names of ways; none for all
    rounds: int
    rank: int = 0  # that the process stands for


def measure(job: Job) -> list[Result]:
    """All ways in one world, turn by turn. In a process of its own."""
    torch.set_num_threads(1)
    results, built = list[Result](), list[Ours]()
    with fake_world(job.ranks, job.rank), as_on_cuda(), products_at_once():
        for way in WAYS:
            if job.only and way.name not in job.only:
                continue
            try:
                layers = Ours(way, job.sizes)
                take_step(layers, Batch.of(job.sizes, 0), 0)
                built.append(layers)
            except Exception as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                results.append(Result(way.name, skipped=why))
        title = f"{job.ranks} ranks, {job.slots} experts each"
        results[:0] = in_turn(built, job.sizes, job.rounds, title)
    return results


def in_turn(
    built: Sequence[Timed],
    sizes: Sizes,
    rounds: int,
    title: str,
    numbered: Callable[[int], int] = lambda number: number,
) -> list[Result]:
    """Steps of all, turn by turn, and then their counts; ``numbered`` says whose batch a step
    has."""
    steps: dict[str, list[Step]] = {each.name: [] for each in built}
    after = 1 + NUM_WARM_UPS + rounds
    with no_collector():
        for number in track(range(1, after), title, console=Console(stderr=True)):
            for layers in rotated(built, number):
                step = take_step(layers, Batch.of(sizes, numbered(number)), number)
                if number > NUM_WARM_UPS:
                    steps[layers.name].append(step)
        counts = {each.name: counts_of(each, sizes, after) for each in built}
    return [Result(name, tuple(own), counts[name]) for name, own in steps.items()]


def lower_us(spans: Iterator[float]) -> float:
    """The lower quartile, in microseconds: what disturbs makes slower only."""
    return 1e6 * statistics.quantiles(spans, n=4, method="inclusive")[0]


COLUMNS = ("forward", "backward", "between", "sum", "of the caller", "x first", "quartiles")
COUNTED = ("waits", "copies", "collectives", "parcels")


def table_of(title: str, results: Sequence[Result]) -> Table:
    """Processor microseconds, ratios to the first way's that are paired by round, and counts."""
    table = Table(title=f"{title}: processor us a layer", title_justify="left")
    table.add_column("way")
    for column in (*COLUMNS, *COUNTED):
        table.add_column(column, justify="right")
    ran = [each for each in results if each.counts is not None]
    for each in ran:
        pairs = zip(each.steps, ran[0].steps)
        ratios = [own.whole.all_s / first.whole.all_s for own, first in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        cells = (
            lower_us(step.forward.all_s for step in each.steps),
            lower_us(step.backward.all_s for step in each.steps),
            lower_us(step.between.all_s for step in each.steps),
            lower_us(step.whole.all_s for step in each.steps),
            lower_us(step.whole.caller_s for step in each.steps),
        )
        counts = asdict(each.counts) if each.counts else {}
        table.add_row(
            each.name,
            *(f"{us:,.0f}" for us in cells),
            f"{middle:.2f}",
            f"{low:.2f}-{high:.2f}",
            *(f"{counts[name]:,.4g}" for name in COUNTED),
        )
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
    names = [way.name for way in WAYS]
    add(
        "--only",
        nargs="+",
        choices=names,
        default=[],
        help="all others are compared with the first",
    )
    add("--layers", type=int, default=4)
    add("--tokens", type=int, default=64, help="of a rank")
    add("--top_k", type=int, default=2)
    add("--rounds", type=int, default=24)
    add("--json", type=Path, help="JSON file for the results")
    return parser.parse_args()


def main() -> None:
    """Measure each world in a process of its own, print."""
    given = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    figures = []
    for ranks, slots in product(given.ranks, given.slots):
        sizes = Sizes(given.layers, ranks * slots, given.tokens, given.top_k)
        job = Job(ranks, slots, sizes, given.only, given.rounds, given.rank)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = process.submit(measure, job).result()
        console.print(table_of(f"{ranks} ranks, {slots} experts each", found))
        for each in found:
            if each.skipped:
                console.print(f"not run: {each.name}: {each.skipped}")
        figures += [{"ranks": ranks, "slots": slots, **asdict(each)} for each in found]
    load = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    console.print(f"{load}, torch {torch.__version__}")
    if given.json:
        given.json.write_text(json.dumps({"command": sys.argv, "load": load, "results": figures}))


if __name__ == "__main__":
    main()
