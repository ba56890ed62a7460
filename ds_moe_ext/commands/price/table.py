# SPDX-License-Identifier: Apache-2.0
"""How a person reads what was priced: tables, and plans in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ds_moe_ext.commands.price.cases import Market
from ds_moe_ext.commands.price.words import (
    about,
    assumed,
    block_words,
    grid_text,
    plan_words,
    verdict,
    zebra_words,
)

GIB = 2**30
PARTS = {
    "computed": "computed_s",
    "imbalance": "imbalance_s",
    "sending": "exposed_s",
    "host": "host_s",
    "end": "end_s",
}
"""Where the time of a step goes: heading, and number of ``StepPrice``."""
BUBBLE = {"bubble": "bubble_s"}
"""And where there are pipeline stages."""
FULL = 150
"""Columns of a terminal that all of these want."""
BRIEF = ("step", "gain", "balance", "GiB a rank")
"""What is shown on fewer."""
MEMORY = ("weights", "gradients", "optimizer", "activations", "copies", "runtime")
"""What a rank needs memory for: numbers of ``MemoryUse``."""


def parts_of(market: Market) -> dict[str, str]:
    """Where the time of this market's steps goes."""
    return PARTS | BUBBLE if market.case.training.parallel.pipeline > 1 else PARTS


def print_market(market: Market, pays: Sequence[str], to: Console) -> None:
    """The tables, the plans in words, and what all rests on.

    Args:
        market: what was priced.
        pays: from what skew and how many tokens ways pay, in words.
        to: where.
    """
    to.print(about(market), highlight=False)
    if market.priced:
        to.print(_seconds(market, to.width))
        to.print(_memory(market))
    told = [verdict(market), *block_words(market)]
    told += [f"{name}: {plan_words(each)}" for name, each in market.named]
    told += [*zebra_words(market), *pays]
    told += [
        f"{each.way.name} on {grid_text(each.way.grid)} cannot be: {each.why}"
        for each in market.refused
    ]
    told += assumed(market)
    for line in told:
        to.print(line, soft_wrap=True, markup=False, highlight=False)


def _seconds(market: Market, width: int) -> Table:
    table = Table(title="a step, ms", title_justify="left")
    parts = parts_of(market)
    headings = ("step", "tokens/s", "gain", *parts, "balance", "copies", "GiB a rank")
    shown = [each for each in headings if width >= FULL or each in BRIEF]
    for heading in ("", "strategy", "grid"):
        table.add_column(heading)
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in market.priced:
        marks = ">" if each is market.best else ""
        gain = market.gain(each)
        memory = f"{each.memory.total / GIB:,.0f}"
        cells = (
            f"{1e3 * each.step_s:,.1f}",
            f"{each.tokens_per_s:,.0f}",
            "" if gain is None else f"{gain:.2f} x",
            *(f"{1e3 * each.mean(part):,.1f}" for part in parts.values()),
            f"{each.mean('balance'):.2f}",
            f"{each.copies:.1f}",
            memory if market.fits(each) else f"{memory} too much",
        )
        by_heading = dict(zip(headings, cells))
        table.add_row(
            f"{marks} yours".strip() if each.way.name == market.own else marks,
            each.way.name,
            grid_text(each.way.grid),
            *(by_heading[heading] for heading in shown),
            style=None if market.fits(each) else "dim",
        )
    if len(shown) < len(headings):
        table.caption = f"where the time goes: from {FULL} columns on, by --html or --json"
    return table


def _memory(market: Market) -> Table:
    has = market.case.hardware.device.memory_bytes
    of_device = "" if has is None else f" of {has / GIB:,.0f}"
    table = Table(title=f"memory of the fullest rank, GiB{of_device}", title_justify="left")
    table.add_column("")
    for _, each in market.named:
        table.add_column(f"{each.way.name}, {grid_text(each.way.grid)}", justify="right")
    used = [each.memory for _, each in market.named]
    for name in MEMORY:
        table.add_row(name, *(f"{vars(memory)[name] / GIB:,.1f}" for memory in used))
    table.add_row("all", *(f"{memory.total / GIB:,.1f}" for memory in used))
    return table
