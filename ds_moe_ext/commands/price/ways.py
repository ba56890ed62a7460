# SPDX-License-Identifier: Apache-2.0
"""Which strategies and grids ``ds-moe-ext price`` sets beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Priced, Way, grids_for
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.strict import nearest_and_all

BASE = "ep"
OVER = " over "
ALL = (BASE, "fssdp", "prophet", "esp", f"esp{OVER}fssdp", f"esp{OVER}prophet")
EVERY, SEVERAL, OWN = "all", ",", ":"


class Chosen(NamedTuple):
    """A strategy that is priced.

    Attributes:
        name: of it, for a person.
        strategy: with the keys of its block.
        sizes: of cells and of their ranks, where they are given.
        is_own: it is what the job's file says.
    """

    name: str
    strategy: Strategy
    sizes: tuple[int | None, int | None]
    is_own: bool


def chosen_strategies(document: Mapping[str, Any], asked: str) -> list[Chosen]:
    """The strategies to price: what the file says, what plain expert parallelism would do, and
    those that were asked for.

    Args:
        document: with our block.
        asked: ``"all"``, or names with commas between; ``"esp over fssdp"`` lays a pipeline over
            another, ``"my_package.my_module:MyStrategy"`` is one of the user's own.

    Raises:
        ValueError: an unknown name, a class that cannot be, or what is wrong in the block.
    """
    block = document.get(BLOCK) or {}
    settings, _ = read_settings(document)
    own = settings.strategy
    if settings.balance is not None:
        own = f"{settings.strategy}{OVER}{settings.balance}"
    names = list(ALL) if asked == EVERY else [name.strip() for name in asked.split(SEVERAL)]
    for name in names:
        if name not in (*ALL, own) and OWN not in name:
            raise ValueError(
                f"--strategies has {name!r}, which is not priced; {nearest_and_all(name, ALL)}, or "
                "a class of your own, as my_package.my_module:MyStrategy"
            )
    chosen = []
    for name in dict.fromkeys((own, BASE, *names)):
        strategy = _strategy(document, block, name, is_own=name == own)
        if strategy.has_roles:
            continue
        given = settings.expert_parallel_size, settings.expert_sharding_size
        sizes = given if name == own else (None, None)
        chosen.append(Chosen(name, strategy, sizes, name == own and bool(block)))
    return chosen


def _strategy(
    document: Mapping[str, Any], block: Mapping[str, Any], name: str, *, is_own: bool
) -> Strategy:
    laid, _, over = name.partition(OVER)
    changed = {**block, "enabled": True, "strategy": laid, "balance": over or None}
    if not is_own:
        changed.pop("options", None)  # keys of the file's own class
    strategy = read_settings({**document, BLOCK: changed})[1]
    assert strategy is not None
    return strategy


def ways_of(
    chosen: Sequence[Chosen],
    hardware: Hardware,
    num_ranks: int,
    num_experts: int,
    *,
    every_grid: bool,
) -> Iterator[tuple[Chosen, Way]]:
    """Each strategy on the grids that it is to be tried on.

    Args:
        chosen: strategies.
        hardware: of all ranks.
        num_ranks: of them, those that run the same layers.
        num_experts: of a layer.
        every_grid: all that there are; else, where none is given, experts spread within a node and
            over as many ranks as there can be, whole and split by the ranks of a node.
    """
    for each in chosen:
        grids = list(grids_for(each.strategy, hardware, num_ranks, num_experts))
        if not every_grid:
            grids = _few(grids, min(hardware.ranks_per_node, num_ranks))
        own = _given(each.sizes, grids, num_ranks)
        for grid in own:
            if grid.num_cells > 1 or OVER not in each.name:  # in one cell there is nothing to copy
                yield each, Way(each.name, each.strategy, grid)


def _given(
    sizes: tuple[int | None, int | None], grids: Sequence[Grid], num_ranks: int
) -> Sequence[Grid]:
    """Those of given sizes; where both are given, that one."""
    num_cells, cell_size = sizes
    if num_cells is not None:
        return [Grid(num_ranks, num_cells, cell_size or 1)]
    if cell_size is not None:
        return [grid for grid in grids if grid.cell_size == cell_size]
    return grids


def _few(grids: Sequence[Grid], on_node: int) -> list[Grid]:
    """The largest within a node, and the largest there are; experts whole, and split by a node."""
    kept = []
    for cell_size in sorted({grid.cell_size for grid in grids} & {1, on_node}):
        alike = [grid for grid in grids if grid.cell_size == cell_size]
        within = [grid for grid in alike if grid.size <= on_node]
        kept += within[-1:]
        if alike[-1] not in kept:
            kept.append(alike[-1])
    return kept


def by_other_shares(priced: Sequence[Priced]) -> Iterator[Way]:
    """The fastest way of each strategy that copies, by other ways for copies to divide rows: the
    paper's, or by price.

    Args:
        priced: ways, the fastest first.
    """
    fastest: dict[str, Way] = {}
    for each in priced:
        fastest.setdefault(each.way.name, each.way)
    for way in fastest.values():
        for name, strategy in way.strategy.by_share.items() if way.grid.num_cells > 1 else ():
            if strategy != way.strategy:
                yield replace(way, name=way.name + name, strategy=strategy)
