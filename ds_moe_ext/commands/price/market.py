# SPDX-License-Identifier: Apache-2.0
"""What a job was priced at, under every strategy and grid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from ds_moe_ext.commands.price.cases import Case, Market
from ds_moe_ext.commands.price.files import write_json, write_trace
from ds_moe_ext.commands.price.inputs import read_clusters, read_job, read_model, training_of
from ds_moe_ext.commands.price.market_page import write_page
from ds_moe_ext.commands.price.pays import told_of_scans
from ds_moe_ext.commands.price.table import print_market
from ds_moe_ext.commands.price.ways import (
    EVERY,
    SEVERAL,
    Chosen,
    by_other_shares,
    chosen_strategies,
    ways_of,
)
from ds_moe_ext.files.console import wide_console
from ds_moe_ext.planning.candidates import Priced, Refused, Way, price_way
from ds_moe_ext.planning.loads import Loads
from ds_moe_ext.planning.zebra_price import ZebraPrice
from ds_moe_ext.strategies.settings import read_settings

ALIKE = 1e-3  # part of a step, by which two shares must differ to be shown both


def price(given: argparse.Namespace) -> int:
    """Price a job and show what came out. 0, or 1 if no way can be."""
    sys.path.insert(0, "")  # as the interpreter itself has it: for a strategy of the user's own
    asked = read_job(given.job)
    clusters = read_clusters(given.hardware, given.nodes)
    shape = asked.shape if given.model is None else read_model(given.model)
    if shape is None:
        raise ValueError(
            f"{str(given.job)!r} does not say the model's sizes; name its config.json with --model"
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
    to = wide_console()
    market = priced_market(case, given.loads, chosen, every_grid=given.grids == EVERY, to=to)
    if given.strategies != EVERY and SEVERAL not in given.strategies:
        market = replace(market, asked=given.strategies)
    pays = told_of_scans(market, given.loads, to) if given.pays else ()
    print_market(market, pays, to)
    if not market.priced:
        return 1
    writers = (given.html, write_page), (given.trace, write_trace), (given.json, write_json)
    for path, write in writers:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, market, pays)
            to.print(f"wrote {path}", soft_wrap=True, markup=False, highlight=False)
    return 0


def priced_market(
    case: Case, loads: str, chosen: Sequence[Chosen], *, every_grid: bool, to: Console
) -> Market:
    """Price every way.

    Args:
        case: what is priced.
        loads: a name or a path.
        chosen: strategies.
        every_grid: as of ``ways_of``.
        to: where progress is shown.
    """
    rows = case.rows(loads)
    ranks = case.training.stage_ranks
    ways = list(
        ways_of(chosen, case.hardware, ranks, case.shape.num_experts, every_grid=every_grid)
    )
    refused = list[Refused]()

    def price_all(ways: Sequence[Way], about: str, progress: Progress) -> list[Priced]:
        found = list[Priced]()
        for way in progress.track(ways, description=about):
            try:
                run = case.run(way.grid)
                found.append(price_way(way, run, rows.rows_ILCE, num_priced=case.num_priced))
            except ValueError as error:
                refused.append(Refused(way, str(error)))
        return sorted(found, key=lambda each: each.step_s)

    with Progress(console=to, transient=True) as progress:
        priced = price_all([way for _, way in ways], "pricing", progress)
        others = price_all(list(by_other_shares(priced)), "by other shares", progress)
    own = next((each.name for each in chosen if each.is_own), "")
    known_s = {(each.way.name, each.way.grid): each.step_s for each in priced}
    for each in others:
        alike_s = known_s[each.way.name.partition(", ")[0], each.way.grid]
        if abs(each.step_s - alike_s) > ALIKE * alike_s:
            priced.append(each)
    priced.sort(key=lambda each: each.step_s)
    market = Market(case, rows.source, own, tuple(priced), tuple(refused))
    return replace(market, zebra=_zebra(case, rows)) if case.has_two_kinds else market


def _zebra(case: Case, rows: Loads) -> ZebraPrice | str:
    try:
        return case.zebra(rows)
    except ValueError as error:
        return str(error)
