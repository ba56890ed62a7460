# SPDX-License-Identifier: Apache-2.0
"""Figures of a day on GPUs: how each is read from what a command left in its folder."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_moe_ext.commands.cluster_profile import links, products
from ds_moe_ext.core.hardware import read_hardware

JSON = "figures.json"
PRINTED = "printed.txt"
MIB = 2**20
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
TEST = re.compile(r"\btests/\S+::.*?(?= (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b|$)")
BAD = ("FAILED", "ERROR")
ITERATION_MS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        what: it is.
        value: the median where there are several; a text where nothing was measured.
        unit: of the value.
        low: the least.
        high: the largest.
        count: values behind it.
    """

    what: str
    value: float | str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    count: int = 1


Reader = Callable[[Path], Iterable[Figure]]
"""Figures from the folder of a row."""


def spread(what: str, values: Sequence[float], unit: str, scale: float = 1.0) -> Figure:
    """Median, least and largest of values, each multiplied by a scale."""
    three = min(values), statistics.median(values), max(values)
    low, middle, high = (float(f"{scale * each:.5g}") for each in three)
    return Figure(what, middle, unit, low, high, len(values))


def _left_out(skipped: Mapping[str, str]) -> Iterator[Figure]:
    for name, reason in skipped.items():
        yield Figure(name, f"not run: {reason}")


def _known(values: Sequence[float]) -> bool:
    return not any(map(math.isnan, values))


def _document(folder: Path, name: str = JSON) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def nothing(folder: Path) -> Iterator[Figure]:
    """For what is only printed."""
    yield from ()


def texts(folder: Path) -> Iterator[Figure]:
    """Names and values, as of versions."""
    for name, text in _document(folder).items():
        yield Figure(name, text)


def tests(folder: Path) -> Iterator[Figure]:
    """Outcomes of pytest, from its lines, which are there for a run that was stopped, too."""
    found, bad = Counter[str](), []
    for line in (folder / PRINTED).read_text("utf-8", "replace").splitlines():
        test, outcome = TEST.search(line), OUTCOME.search(line)
        if line.startswith(("FAILED ", "ERROR ")) or test is None or outcome is None:
            continue  # the summary names them again
        found[outcome[1]] += 1
        if outcome[1] in BAD:
            bad.append(test[0].strip())
    for name, number in found.items():
        yield Figure(name.lower(), number, "tests")
    for name in bad:
        yield Figure("failed", name)


def engines(folder: Path) -> Iterator[Figure]:
    """Steps of contenders that take turns (``bench/rotation.py``)."""
    document = _document(folder)
    seconds, tokens = document["seconds_a_step"], document["tokens_a_step"]
    first = next(iter(seconds))
    for name, own in seconds.items():
        yield spread(f"{name}: a step", own, "ms", 1e3)
        yield spread(f"{name}: speed", [tokens / each for each in own], "tokens/s")
        if name != first:
            ratios = [each / ours for each, ours in zip(own, seconds[first])]
            yield spread(f"{name}: a step over that of {first}", ratios, "x")
        if document.get("busy"):
            yield Figure(f"{name}: device busy", round(document["busy"][name], 4), "of a step")
    yield from _left_out(document["skipped"])


def layers(folder: Path) -> Iterator[Figure]:
    """One layer (``bench/layer_speed.py``)."""
    for result in _document(folder)["results"]:
        measured = result["measured"]
        first = next(iter(measured))
        for name, own in measured.items():
            yield spread(f"{name}: forward and backward", own["device_s"], "ms", 1e3)
            if name != first:
                ratios = [a / b for a, b in zip(own["device_s"], measured[first]["device_s"])]
                yield spread(f"{name}: over {first}", ratios, "x")
            if own["peak_bytes"] is not None:
                yield Figure(f"{name}: memory", round(own["peak_bytes"] / MIB, 1), "MiB")
        yield from _left_out(result["skipped"])


def devices(folder: Path) -> Iterator[Figure]:
    """Whether a GPU waits for its host (``bench/device_path.py``)."""
    for result in _document(folder)["results"]:
        for name, own in result["found"].items():
            wall_ms, issued_ms, kernels_ms = own["wall_ms"], own["issued_ms"], own["kernels_ms"]
            yield spread(f"{name}: a layer", wall_ms, "ms")
            yield spread(f"{name}: host issues it in", issued_ms, "ms")
            yield spread(f"{name}: between steps", own["between_ms"], "ms")
            if not math.isnan(kernels_ms):
                busy = [kernels_ms / wall for wall in wall_ms]
                yield Figure(f"{name}: kernels run", round(kernels_ms, 4), "ms")
                yield spread(f"{name}: device busy", busy, "of a step")
                waits = statistics.median(issued_ms) > kernels_ms
                yield Figure(f"{name}: bound by", "host" if waits else "device")
        yield from _left_out(result["skipped"])


def exchanges(folder: Path) -> Iterator[Figure]:
    """Rows and copies by size (``bench/exchange_speed.py``)."""
    document = _document(folder)
    for result in document["results"]:
        what = f"{result['way']} of {result['bytes'] / MIB:.4g} MiB"
        yield spread(f"{what}: time", result["seconds"], "ms", 1e3)
        rates = [result["bytes"] / each for each in result["seconds"]]
        yield spread(f"{what}: rate", rates, "GB/s", 1e-9)
    yield from _left_out(document["skipped"])


def cluster(folder: Path) -> Iterator[Figure]:
    """Lines that ``ds-moe-ext profile`` fitted; r² stands for the spread."""
    hardware = read_hardware(folder / "hardware.json")
    for where, what, link in links(hardware):
        fit = "" if link.r_squared is None else f", r² {link.r_squared:.4f}"
        yield Figure(f"{what} {where}: rate{fit}", link.bytes_per_s / 1e9, "GB/s")
        yield Figure(f"{what} {where}: latency", link.latency_s * 1e6, "us")
    for what, product in products(hardware):
        yield Figure(what, 2 * product.multiply_adds_per_s / 1e12, "TFLOP/s")
    if hardware.device.memory_bytes_per_s is not None:
        yield Figure("memory, read and written", hardware.device.memory_bytes_per_s / 1e9, "GB/s")


NUM_WARM_UPS = 12
"""Steps of a run in which costs are measured and kernels are made."""


def trained(folder: Path) -> Iterator[Figure]:
    """A run of ``pretrain_deepspeed.py``, beside what ``ds-moe-ext price`` says of it."""
    summary = _document(folder, "run/summary.json")
    seconds, peak_bytes = summary["seconds_s"][NUM_WARM_UPS:], summary["peak_bytes"]
    yield spread("a step, measured", seconds, "ms", 1e3)
    speeds = [summary["tokens_per_step"] / each for each in seconds]
    yield spread("speed, measured", speeds, "tokens/s")
    yield Figure("memory of the fullest rank, measured", peak_bytes / 2**30, "GiB")
    yield Figure("loss, first step", summary["losses"][0], "nats")
    yield Figure("loss, last step", summary["losses"][-1], "nats")
    balances = list(summary["balance_by_layer"].values())
    if balances:
        yield spread("rows of the busiest rank over the mean, by layer", balances, "x")
    path = folder / "price.json"
    if path.is_file():
        own = next((way for way in _document(folder, path.name)["ways"] if way["is_own"]), None)
        if own is not None:
            yield Figure("a step, priced", 1e3 * own["step_s"], "ms")
            ratio = own["step_s"] / statistics.median(seconds)
            yield Figure("a step, priced over measured", round(ratio, 4), "x")
            parts = own["memory_bytes"]
            priced_bytes = parts["total"] - parts["runtime"]  # which torch does not count
            yield Figure("memory of the fullest rank, priced", priced_bytes / 2**30, "GiB")
            ratio = priced_bytes / peak_bytes
            yield Figure("memory, priced over measured", round(ratio, 4), "x")


def pretrain_gpt(folder: Path) -> Iterator[Figure]:
    """Iterations that Megatron-LM's script printed."""
    printed = (folder / PRINTED).read_text("utf-8", "replace")
    times_ms = [float(found) for found in ITERATION_MS.findall(printed)][NUM_WARM_UPS:]
    if times_ms:
        yield spread("an iteration", times_ms, "ms")
