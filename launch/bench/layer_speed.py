# SPDX-License-Identifier: Apache-2.0
"""Time one MoE layer, forward and backward, beside what a user has today.

One process, one device; all contenders take turns, repetition by repetition::

    python launch/bench/layer_speed.py --shapes small --dtype fp32          # a laptop, seconds
    python launch/bench/layer_speed.py --shapes mixtral_8x7b qwen3_30b_a3b  # a GPU
    python launch/bench/layer_speed.py --what gates orders --dtype fp32     # parts of a layer

Before anything is timed, contenders that compute the same function get the same weights, and their
outputs and input gradients are compared. Shape letters: T tokens, K choices a token, E experts,
D model width, F expert width.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from layer_contenders import (
    BUILDERS,
    CEILING,
    GATE_BUILDERS,
    ORDER_BUILDERS,
    SHAPES,
    Builder,
    Contender,
    Problem,
    reason_to_leave_out,
)
from layer_megatron import MEGATRON
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rotation import rotated
from torch import Tensor

WHAT: Mapping[str, Mapping[str, Builder]] = {
    "layer": {**BUILDERS, **MEGATRON},
    "gates": GATE_BUILDERS,
    "orders": ORDER_BUILDERS,
}
"""Each list begins with what the others are compared with."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
PACKAGES = ("torch", "transformers", "deepspeed", "megatron-core", "transformer-engine", "triton")
FLUSH_BYTES = 256 * 2**20  # more than any GPU's L2 cache
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
AHEAD_CYCLES = 20_000_000  # about 10 ms in which the host issues work while the device spins


def step(contender: Contender, x_TD: Tensor, grad_TD: Tensor) -> Tensor:
    """Forward and backward; gradients end up in ``.grad``."""
    y = contender.layer(x_TD)
    y.backward(grad_TD[:, : y.shape[-1]].expand_as(y))  # scores of a gate are narrower than rows
    return y.detach()


def cleared(contender: Contender, problem: Problem) -> Tensor:
    """Free all gradients and give a fresh input."""
    for parameter in contender.parameters:
        parameter.grad = None
    return problem.x_TD.detach().requires_grad_()


@dataclass(frozen=True)
class Measured:
    """One contender's times, in seconds, and what its gradients and outputs are worth.

    Attributes:
        device_s: forward and backward on the device, each repetition.
        host_s: until the host has issued them; on a CPU the processor time of all threads, which
            other programs on the machine disturb less.
        peak_bytes: allocated at the peak, beyond what was there before the step; None on a CPU.
        y_error: largest difference from the first's over its largest value; None where not
            comparable.
        x_grad_error: likewise, of the input gradient.
    """

    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    peak_bytes: int | None
    y_error: float | None
    x_grad_error: float | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.device_s)

    def over(self, other: Measured) -> tuple[float, float, float]:
        """Its time over another's, turn by turn: the three quartiles."""
        ratios = [own / others for own, others in zip(self.device_s, other.device_s)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high


class Clock:
    """Times work on one device.

    On CUDA the device spins first, so that the host is ahead of it: what counts is how long the
    device takes, with the gaps that a contender's own waits for the device tear.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object]) -> tuple[float, float]:
        """Of the device, and of the host."""
        if not self.is_cuda:
            start_s, start_of_threads_s = time.perf_counter(), time.process_time()
            work()
            return time.perf_counter() - start_s, time.process_time() - start_of_threads_s
        self._flush.zero_()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        start_s = time.perf_counter()
        work()
        host_s = time.perf_counter() - start_s
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host_s

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        """Memory allocated at the peak of ``work``, beyond what was allocated before."""
        if not self.is_cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@contextmanager
def reasons(name: str, skipped: dict[str, str]) -> Iterator[None]:
    """Note why a contender cannot run, and go on with the others."""
    try:
        yield
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        skipped[name] = f"{type(error).__name__}: {first_line}"


def gather(
    builders: Mapping[str, Builder], problem: Problem
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run here, each warmed up once, and why the others cannot."""
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    for name, build in builders.items():
        reason = reason_to_leave_out(name, problem)
        if reason is not None:
            skipped[name] = reason
            continue
        with reasons(name, skipped):
            contender = build(problem)
            step(contender, cleared(contender, problem), problem.grad_TD)
            cleared(contender, problem)
            contenders.append(contender)
    first = next(iter(builders))
    if first in skipped:
        raise RuntimeError(f"{first} cannot run: {skipped[first]}")
    return contenders, skipped


def errors(contenders: Sequence[Contender], problem: Problem) -> dict[str, tuple[float, float]]:
    """Differences of outputs and input gradients from the first's, over the largest value."""
    found: dict[str, tuple[float, float]] = {}
    reference: tuple[Tensor, Tensor] | None = None
    for contender in contenders:
        if not contender.is_exact:
            continue
        x = cleared(contender, problem)
        y = step(contender, x, problem.grad_TD)
        assert x.grad is not None
        reference = reference or (y, x.grad)
        y_error, x_error = (_error(a, b) for a, b in zip((y, x.grad), reference))
        found[contender.name] = (y_error, x_error)
        cleared(contender, problem)
    return found


def _error(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).abs().max() / reference.abs().max())


def measure(
    contenders: Sequence[Contender], problem: Problem, repetitions: int, console: Console
) -> dict[str, Measured]:
    """Let contenders take turns; each turn starts with another one."""
    clock = Clock(problem.x_TD.device)
    differences = errors(contenders, problem)
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contenders}
    peaks: dict[str, int | None] = {}
    for turn in track(range(-2, repetitions), "repetitions", console=console, transient=True):
        for contender in rotated(contenders, turn):
            x = cleared(contender, problem)
            work = partial(step, contender, x, problem.grad_TD)
            if turn == -2:
                peaks[contender.name] = clock.peak_bytes(work)
            elif turn >= 0:
                times[contender.name].append(clock.seconds(work))
            else:
                work()
            cleared(contender, problem)
    measured = {}
    for contender in contenders:
        device_s, host_s = zip(*times[contender.name])
        y_error, x_error = differences.get(contender.name, (None, None))
        measured[contender.name] = Measured(
            device_s, host_s, peaks[contender.name], y_error, x_error
        )
    return measured


def table_of(title: str, measured: Mapping[str, Measured], num_flops: float) -> Table:
    """The results as a person reads them; those that say something of experts where there are
    some."""
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for column in (
        "median ms", "min", "max", "host ms", "x first", "quartiles", "of ceiling", "TFLOP/s",
        "peak MiB", "y error", "x.grad error",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    first = next(iter(measured.values()))
    ceiling_s = measured[CEILING].median_s if CEILING in measured else None
    for name, m in measured.items():
        low, middle, high = m.over(first)
        table.add_row(
            name,
            *(f"{s * 1e3:.2f}" for s in (m.median_s, min(m.device_s), max(m.device_s))),
            f"{statistics.median(m.host_s) * 1e3:.2f}",
            f"{middle:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{ceiling_s / m.median_s:.0%}" if ceiling_s else "-",
            f"{num_flops / m.median_s / 1e12:.2f}" if ceiling_s else "-",
            f"{m.peak_bytes / 2**20:,.0f}" if m.peak_bytes is not None else "-",
            *("-" if e is None else f"{e:.1e}" for e in (m.y_error, m.x_grad_error)),
        )
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--what", nargs="+", choices=WHAT, default=["layer"])
    add("--shapes", nargs="+", choices=SHAPES, default=["small"])
    add(
        "--only",
        nargs="+",
        help="contenders, by their names in the table; the first is always there",
    )
    add("--tokens", type=int, help="tokens in the batch; default: 8192, for small 1024")
    add("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    add("--repetitions", type=int, default=20)
    add("--routing", choices=("uniform", "skewed"), default="uniform")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="file for the results")
    return parser.parse_args()


def _chosen(builders: Mapping[str, Builder], only: Sequence[str] | None) -> Mapping[str, Builder]:
    first = next(iter(builders))
    unknown = [name for name in only or () if name not in builders]
    if unknown:
        raise SystemExit(f"--only {unknown[0]!r} is none of: {', '.join(builders)}")
    return {name: own for name, own in builders.items() if not only or name in (first, *only)}


def start_one_rank(device: torch.device) -> None:
    """A world of one rank: DeepSpeed's layers and our layout ask for groups."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        import deepspeed
    except ImportError:
        return  # its contenders will say so
    with redirect_stdout(sys.stderr):
        deepspeed.init_distributed(backend, auto_mpi_discovery=False)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as CUDA's allocator does: else chance decides who pays for
    pages that are given back to the system and asked for again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)


def versions() -> dict[str, str]:
    """Of what is measured."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> int:
    """Measure each shape; 1 if contenders of the same function disagree."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    if device.type == "cpu":
        keep_freed_memory()
    start_one_rank(device)
    console, results, disagree = Console(width=None if sys.stdout.isatty() else 150), [], []
    for what, name in product(arguments.what, arguments.shapes):
        shape = SHAPES[name]
        num_tokens = arguments.tokens or shape.num_tokens
        skew = 1.0 if arguments.routing == "skewed" else 0.0
        problem = Problem.of(shape, num_tokens, skew=skew, device=device, dtype=dtype)
        contenders, skipped = gather(_chosen(WHAT[what], arguments.only), problem)
        measured = measure(contenders, problem, arguments.repetitions, console)
        title = (
            f"{what}: {name}, {num_tokens} tokens, {arguments.routing} routing, {dtype}, {device}"
        )
        console.print(table_of(title, measured, shape.num_flops(num_tokens)))
        for contender, reason in skipped.items():
            console.print(f"[yellow]not run: {contender}: {reason}[/]")
        disagree += [
            f"{what}: {name}: {contender}: y {m.y_error:.1e}, x.grad {m.x_grad_error:.1e}"
            for contender, m in measured.items()
            if m.y_error is not None and max(m.y_error, m.x_grad_error or 0) > TOLERANCES[dtype]
        ]
        rows = {contender: asdict(m) for contender, m in measured.items()}
        about = {"what": what, "shape": name, "tokens": num_tokens}
        results.append({**about, "measured": rows, "skipped": skipped})
    if arguments.json:
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        setup = {"command": sys.argv, "device": device_name, "versions": versions()}
        arguments.json.write_text(json.dumps({**setup, "dtype": str(dtype), "results": results}))
    for line in disagree:
        console.print(
            f"[red]differs from the first by more than {TOLERANCES[dtype]:.0e}: {line}[/]"
        )
    dist.destroy_process_group()
    return int(bool(disagree))


if __name__ == "__main__":
    sys.exit(main())
