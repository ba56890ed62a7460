# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext price``: what a job would take under every strategy, before a GPU hour is spent.

``inputs`` reads what is asked, ``market`` prices it, ``words`` and ``market_page`` say what came
out. ``scans`` prices other skews and token counts, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from ds_moe_ext.commands.price.inputs import read_clusters, read_job, read_model, training_of
from ds_moe_ext.commands.price.market import (
    EVERY,
    OVER,
    SEVERAL,
    Case,
    Market,
    chosen_strategies,
    priced_market,
)
from ds_moe_ext.commands.price.market_page import write_page
from ds_moe_ext.commands.price.words import grid_text, print_market, write_json, write_trace
from ds_moe_ext.planning.candidates import Way, price_way
from ds_moe_ext.report.units import say, wide_console
from ds_moe_ext.strategies.settings import read_settings

SKEWS = (0.0, 0.3, 0.6, 0.9, 1.2)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
PAYS = 1.01  # times as fast, at least


def price(given: argparse.Namespace) -> int:
    """Price a job and show what came out. 0, or 1 if no way can be."""
    sys.path.insert(0, "")  # as the interpreter itself has it: for a strategy of the user's own
    asked = read_job(given.job)
    clusters = read_clusters(given.hardware, given.nodes)
    shape = asked.shape if given.model is None else read_model(given.model)
    if shape is None:
        raise ValueError(
            f"{str(given.job)!r} does not have the model's sizes; name its config.json with --model"
        )
    sizes = {
        "length": given.length,
        "micro_batch": given.micro_batch,
        "micro_batches": given.micro_batches,
        "recomputes": given.recomputes,
    }
    num_ranks = sum(each.num_ranks for each in clusters)
    training = training_of(asked, shape, num_ranks, sizes)
    settings, _ = read_settings(asked.document)
    case = Case(tuple(clusters), shape, training, hooks=settings.hooks)
    chosen = chosen_strategies(asked.document, given.strategies)
    if given.quick:
        chosen = [each for each in chosen if each.is_own or OVER not in each.name]
    to = wide_console()
    market = priced_market(
        case,
        given.loads,
        chosen,
        every_grid=given.grids == EVERY,
        is_quick=given.quick,
        to=to,
    )
    if given.strategies != EVERY and SEVERAL not in given.strategies:
        market = replace(market, asked=given.strategies)
    pays = scans(market, given.loads, to) if given.pays else ()
    print_market(market, pays, to)
    if not market.priced:
        return 1
    writers = (given.html, write_page), (given.trace, write_trace), (given.json, write_json)
    for path, write in writers:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, market, pays)
            say(to, f"wrote {path}")
    return 0


def scans(market: Market, loads: str, to: Console) -> list[str]:
    """From what skew and how many tokens the fastest way and the job's own pay, a line each: each
    on its own grid against the best plain expert parallelism on its grid."""
    base = market.base
    ways = [each.way for _, each in market.named if each is not base]
    if base is None or not ways:
        return []
    points = [(f"zipf {skew:g}", market.case, f"zipf:{skew:g}") for skew in SKEWS]
    points += [(f"{tokens:,}", market.case.with_tokens(tokens), loads) for tokens in TOKENS]
    with Progress(console=to, transient=True) as progress:
        tried = progress.track(points, description="where it pays")
        gains = [_gains(case, of_loads, base.way, ways) for _, case, of_loads in tried]
    names, lines = [name for name, _, _ in points], []
    for way, gain in zip(ways, zip(*gains)):
        by_skew = _from_where(names[: len(SKEWS)], gain[: len(SKEWS)])
        by_tokens = _from_where(names[len(SKEWS) :], gain[len(SKEWS) :])
        lines.append(
            f"{way.shown} on {grid_text(way.grid)} pays by load: {by_skew}; by tokens of a rank "
            f"in a pass: {by_tokens}"
        )
    return lines


def _gains(case: Case, loads: str, base: Way, ways: Sequence[Way]) -> list[float | None]:
    """Of each way over the base; None where it cannot be."""
    rows = case.rows(loads).rows_ILCE

    def seconds(way: Way) -> float | None:
        try:
            return price_way(way, case.run(way.grid), rows, num_priced=1).step_s
        except ValueError:
            return None

    base_s = seconds(base)
    found = map(seconds, ways)
    return [base_s / each if base_s is not None and each is not None else None for each in found]


def _from_where(names: Sequence[str], gains: Sequence[float | None]) -> str:
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
