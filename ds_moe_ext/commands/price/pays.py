# SPDX-License-Identifier: Apache-2.0
"""From what skew and how many tokens a way pays, against plain expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from ds_moe_ext.commands.price.cases import Case, Market
from ds_moe_ext.commands.price.words import grid_text
from ds_moe_ext.planning.candidates import Way, price_way

SKEWS = (0.0, 0.3, 0.6, 0.9, 1.2)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
PAYS = 1.01  # times as fast, at least


@dataclass(frozen=True)
class _Point:
    """One thing that is tried: what a person calls it, and all there is to price."""

    name: str
    case: Case
    loads: str


def told_of_scans(market: Market, loads: str, to: Console) -> list[str]:
    """From where the fastest way and the job's own pay, a line each.

    Each is priced on its own grid against the best plain expert parallelism on its grid.

    Args:
        market: what was priced.
        loads: a name or a path.
        to: where progress is shown.
    """
    base = market.base
    ways = [each.way for _, each in market.named if each is not base]
    if base is None or not ways:
        return []
    points = [_Point(f"zipf {skew:g}", market.case, f"zipf:{skew:g}") for skew in SKEWS]
    points += [_Point(f"{tokens:,}", market.case.with_tokens(tokens), loads) for tokens in TOKENS]
    with Progress(console=to, transient=True) as progress:
        tried = progress.track(points, description="from where it pays")
        gains = [_gains(point, base.way, ways) for point in tried]
    names, told = [point.name for point in points], []
    for way, gain in zip(ways, zip(*gains)):
        by_skew = _words(names[: len(SKEWS)], gain[: len(SKEWS)])
        by_tokens = _words(names[len(SKEWS) :], gain[len(SKEWS) :])
        told.append(
            f"{way.name} on {grid_text(way.grid)} pays, by loads: {by_skew}; by tokens of a rank "
            f"in a pass: {by_tokens}"
        )
    return told


def _gains(point: _Point, base: Way, ways: Sequence[Way]) -> list[float | None]:
    """Of each way over the base; None where it cannot be."""
    rows = point.case.rows(point.loads).rows_ILCE

    def seconds(way: Way) -> float | None:
        try:
            return price_way(way, point.case.run(way.grid), rows, num_priced=1).step_s
        except ValueError:
            return None

    base_s = seconds(base)
    found = map(seconds, ways)
    return [base_s / each if base_s is not None and each is not None else None for each in found]


def _words(names: Sequence[str], gains: Sequence[float | None]) -> str:
    pays = [gain is not None and gain >= PAYS for gain in gains]
    listed = ", ".join(
        f"{name}: {'cannot be' if gain is None else f'{gain:.2f} x'}"
        for name, gain in zip(names, gains)
    )
    if not any(pays):
        return f"nowhere ({listed})"
    first = pays.index(True)
    if all(pays):
        return f"everywhere ({listed})"
    if all(pays[first:]):
        return f"from {names[first]} ({listed})"
    where = ", ".join(name for name, does in zip(names, pays) if does)
    return f"at {where} ({listed})"
