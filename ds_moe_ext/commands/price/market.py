# SPDX-License-Identifier: Apache-2.0
"""What is priced, and what came out.

A ``Case`` is a job on a cluster. ``chosen_strategies`` and ``ways_of`` say under which strategies
and grids it is tried, ``priced_market`` prices each such way, and a ``Market`` holds what came out,
for the tables, the page and the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from multiprocessing import get_context
from pickle import PicklingError
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.moe.hooks import NO_HOOKS, Hooked
from ds_moe_ext.planning.candidates import (
    PRICED,
    Priced,
    Reached,
    Refused,
    Way,
    grids_for,
    price_way,
)
from ds_moe_ext.planning.described_run import DescribedRun
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.loads import Loads
from ds_moe_ext.planning.model_shape import ModelShape, OnItsWay, Training
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.planning.zebra_price import ZebraPrice, joined, price_zebra
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.strict import nearest_and_all

SEEN = 3  # steps that plans go by, before those that are priced
ALIKE = 1e-3  # part of a step, by which two shares must differ to be shown both

BASE = "ep"
OVER = " over "
ALL = (BASE, "fssdp", "prophet", "esp", f"esp{OVER}fssdp", f"esp{OVER}prophet")
EVERY, SEVERAL, OWN = "all", ",", ":"


@dataclass(frozen=True, eq=False)
class Case:
    """A job on a cluster.

    Raises:
        ValueError: pipeline stages on unlike clusters, or hooks that make no rows of the model's.
    """

    clusters: tuple[Hardware, ...]  # by their files, side by side
    shape: ModelShape  # of the model
    training: Training  # how it is trained
    reached: Reached = field(default_factory=Reached)  # of datasheets
    hooks: Hooked = NO_HOOKS  # of its block, by which rows and replicas travel

    def __post_init__(self) -> None:
        if self.training.parallel.pipeline > 1 and len(self._device_names) > 1:
            raise ValueError(
                f"pipeline stages on {' and '.join(sorted(self._device_names))} are not "
                "priced; give clusters with one device type, or no pipeline parallelism"
            )
        self._on_its_way(etp_size=1)  # so that hooks which do not fit are refused at once

    def _on_its_way(self, etp_size: int) -> OnItsWay | None:
        if self.hooks == NO_HOOKS:
            return None
        from ds_moe_ext.moe.hooked import on_its_way  # with torch

        return on_its_way(self.hooks, self.shape, self.training.number_type, etp_size)

    @property
    def _device_names(self) -> set[str]:
        return {each.device.name for each in self.clusters}

    @cached_property
    def hardware(self) -> Hardware:
        """The cluster, as its files say."""
        return joined(self.clusters)

    @cached_property
    def _mixed(self) -> tuple[Hardware, ...]:
        return tuple(map(self.reached.of, self.clusters))

    @property
    def has_two_kinds(self) -> bool:
        """Whether it is two clusters of unlike devices, to which zebra would give roles."""
        return len(self.clusters) == len(self._device_names) == 2

    def zebra(
        self, rows: Loads, *, is_megatron: bool = False, sends_once: Sequence[bool] = (False,)
    ) -> ZebraPrice | str:
        """What zebra would take, or why it cannot be; the rest as of ``price_zebra``."""
        if self.hooks.transforms:
            return "roles exclude transforms of tokens"
        if self.training.zero_stage > 2:
            return "roles exclude ZeRO 3; use stage 0, 1 or 2"
        try:
            return price_zebra(
                self._mixed,
                self.shape,
                self.training,
                rows.rows_ILCE[-1].sum(axis=1),
                passes=self.reached.passes,
                on_its_way=self._on_its_way(etp_size=1),
                is_megatron=is_megatron,
                sends_once=sends_once,
            )
        except ValueError as error:
            return str(error)

    def trained_as(self, training: Training | None) -> Case:
        """The same, trained otherwise; None: as it is."""
        return self if training is None else replace(self, training=training)

    def run(self, grid: Grid) -> DescribedRun:
        """The model on the cluster by one grid."""
        return DescribedRun(
            hardware=joined(self._mixed),
            shape=self.shape,
            training=self.training,
            grid=grid,
            passes=self.reached.passes,
            on_its_way=self._on_its_way(grid.etp_size),
            mixed=self._mixed,
        )

    def rows(self, loads: str) -> Loads:
        """Rows of its passes, by a name or a path: of those steps that plans go by and of those
        that are priced."""
        return read_loads(
            loads,
            ranks=self.training.stage_ranks,
            experts=self.shape.num_experts,
            layers=len(self.shape.moe_layers),
            tokens=self.training.tokens,
            top_k=self.shape.top_k,
            steps=SEEN + PRICED,
        )

    def with_tokens(self, tokens: int) -> Case:
        """The same with so many tokens of a rank in a pass: shorter samples, or more of them."""
        shared = tokens * self.training.parallel.sharers
        length = min(shared, self.training.length)
        training = replace(self.training, length=length, micro_batch=max(shared // length, 1))
        return replace(self, training=training)


# Which strategies and grids are tried.


class Chosen(NamedTuple):
    """A strategy that is priced."""

    name: str  # for a person
    strategy: Strategy  # with the keys of its block
    sizes: tuple[int | None, int | None]  # of EP ranks and of their ranks, where they are given
    is_own: bool  # it is what the job's file says


def chosen_strategies(document: Mapping[str, Any], asked: str) -> list[Chosen]:
    """The strategies to price: what the file says, what plain expert parallelism would do, and
    those that were asked for."""
    block = document.get(BLOCK) or {}
    settings, _ = read_settings(document)
    own = settings.strategy
    if settings.balance is not None:
        own = f"{settings.strategy}{OVER}{settings.balance}"
    names = list(ALL) if asked == EVERY else [name.strip() for name in asked.split(SEVERAL)]
    for name in names:
        if name not in (*ALL, own) and OWN not in name:
            raise ValueError(
                f"strategies have {name!r}, which is not priced; {nearest_and_all(name, ALL)}, or "
                "a class of your own, as my_package.my_module:MyStrategy"
            )
    chosen = []
    for name in dict.fromkeys((own, BASE, *names)):
        laid, _, over = name.partition(OVER)
        changed = {**block, "enabled": True, "strategy": laid, "balance": over or None}
        if name != own:
            changed.pop("options", None)  # keys of the file's own class
        strategy = read_settings({**document, BLOCK: changed})[1]
        assert strategy is not None
        if not strategy.has_roles:
            given = settings.expert_parallel_size, settings.expert_sharding_size
            sizes = given if name == own else (None, None)
            chosen.append(Chosen(name, strategy, sizes, name == own and bool(block)))
    return chosen


def ways_of(
    chosen: Sequence[Chosen],
    hardware: Hardware,
    num_ranks: int,
    num_experts: int,
    *,
    every_grid: bool,
) -> Iterator[tuple[Chosen, Way]]:
    """Each strategy on the grids that it is tried on, of ``num_ranks`` that run the same layers.

    These are all that there are where ``every_grid`` is asked for; else, where none is given,
    experts spread within a node and over as many ranks as there can be, whole and split by the
    ranks of a node.
    """
    for each in chosen:
        grids = list(grids_for(each.strategy, hardware, num_ranks, num_experts))
        if not every_grid:
            grids = _few(grids, min(hardware.ranks_per_node, num_ranks))
        num_ep_ranks, etp_size = each.sizes
        if num_ep_ranks is not None:
            grids = [Grid(num_ranks, num_ep_ranks, etp_size or 1)]
        elif etp_size is not None:
            grids = [grid for grid in grids if grid.etp_size == etp_size]
        for grid in grids:
            # in one EP rank there is nothing to copy
            if grid.num_ep_ranks > 1 or OVER not in each.name:
                yield each, Way(each.name, each.strategy, grid)


def _few(grids: Sequence[Grid], on_node: int) -> list[Grid]:
    """The largest within a node, and the largest there are; experts whole, and split by a node."""
    kept = []
    for etp_size in sorted({grid.etp_size for grid in grids} & {1, on_node}):
        alike = [grid for grid in grids if grid.etp_size == etp_size]
        within = [grid for grid in alike if grid.size <= on_node]
        kept += within[-1:]
        if alike[-1] not in kept:
            kept.append(alike[-1])
    return kept


def _by_other_shares(priced: Sequence[Priced]) -> Iterator[Way]:
    """The fastest way of each strategy that copies, by other ways for replicas to divide rows: the
    paper's, or by price."""
    fastest: dict[str, Way] = {}
    for each in priced:
        fastest.setdefault(each.way.name, each.way)
    for way in fastest.values():
        for name, strategy in way.strategy.by_share.items() if way.grid.num_ep_ranks > 1 else ():
            if strategy != way.strategy:
                yield replace(way, name=way.name + name, strategy=strategy)


HOST_BOUND = 0.03
"""Part of a step that devices wait for their host, from which larger micro-batches are tried."""
SIZES = (2, 4, 8)
"""Times the job's micro-batch; a step has as many fewer of them."""


def _by_other_training(market: Market) -> Iterator[Way]:
    """Larger micro-batches of the strategies whose steps wait for the host; and what makes those
    fit that do not: layers that run again in backward, or smaller micro-batches."""
    training, stages = market.case.training, market.case.training.parallel
    fewest = stages.pipeline if stages.chunks > 1 else 1
    fastest_s: dict[str, float] = {}
    for each in market.priced:
        way, name = each.way, each.way.name
        is_first = name not in fastest_s
        fastest_s.setdefault(name, each.step_s)
        if not market.fits(each):
            if is_first and not training.recomputes:
                again = replace(training, recomputes=True)
                yield replace(way, training=again, trained=", recomputation")
            for by in SIZES if is_first else ():
                if training.micro_batch % by == 0:
                    yield _sized(way, training, training.micro_batch // by)
        elif market.host_bound(each) and each.step_s - each.mean("host_s") < fastest_s[name]:
            for by in SIZES:
                if training.micro_batches % (by * fewest) == 0:
                    yield _sized(way, training, training.micro_batch * by)


def _sized(way: Way, training: Training, micro_batch: int) -> Way:
    """The same step in micro-batches of another size."""
    samples = training.micro_batch * training.micro_batches
    other = replace(training, micro_batch=micro_batch, micro_batches=samples // micro_batch)
    return replace(way, training=other, trained=f"{SIZED}{micro_batch}")


SIZED = ", micro-batch "
"""How a way's ``trained`` begins, where micro-batches have another size."""


# What came out.


@dataclass(frozen=True, eq=False)
class Market:
    """All that was priced."""

    case: Case  # what was priced
    loads: str  # where they are from
    own: str  # name of the strategy that the job's file says; empty for one that is not priced
    priced: Sequence[Priced]  # ways that can be, the fastest first
    refused: Sequence[Refused]  # ways that cannot
    # what it would take, or why it cannot be; None where devices are alike
    zebra: ZebraPrice | str | None = None
    asked: str = ""  # name of the only strategy that was asked for; empty if there are several
    # gains of the fastest way of each strategy over plain expert parallelism under other loads, by
    # the loads' name and the way's
    under: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    def fits(self, priced: Priced) -> bool:
        """Whether a rank has memory for it."""
        has = self.case.hardware.device.memory_bytes
        return has is None or priced.memory.total <= has

    @property
    def base(self) -> Priced | None:
        """The fastest of plain expert parallelism; of those that fit, if any does."""
        return self._fastest_of(BASE)

    def flops_per_s(self, priced: Priced) -> float:
        """Of the model, of one device: what runs again in backward is not counted."""
        training = self.case.training
        flops = self.case.shape.flops(training.length) * priced.tokens_per_s
        return flops / training.num_ranks

    def mfu(self, priced: Priced) -> float | None:
        """Part of the device's peak that the model's products come to; None where no datasheet says
        the peak."""
        peak = vars(self.case.hardware.device.flops_per_s)[self.case.training.number_type]
        return None if peak is None else self.flops_per_s(priced) / peak

    def host_bound(self, priced: Priced) -> bool:
        """Whether devices wait for their host for more than a small part of the step."""
        return priced.mean("host_s") > HOST_BOUND * priced.step_s

    @property
    def best(self) -> Priced | None:
        """The fastest of those that fit; None where none does."""
        return next(filter(self.fits, self.priced), None)

    @property
    def too_large(self) -> Priced | None:
        """The fastest, where it does not fit."""
        return next((each for each in self.priced[:1] if not self.fits(each)), None)

    @property
    def own_best(self) -> Priced | None:
        """The fastest of the job's own strategy; of those that fit, if any does."""
        return self._fastest_of(self.own)

    @property
    def traced(self) -> Priced | None:
        """The fastest of the only strategy that was asked for, else of all; likewise."""
        return self._fastest_of(self.asked) or self.best or next(iter(self.priced), None)

    @property
    def best_of_each(self) -> list[Priced]:
        """The fastest way of each strategy, of those that fit if any does."""
        names = dict.fromkeys(each.way.name.partition(", ")[0] for each in self.priced)
        found = (self._fastest_of(name) for name in names)
        return [each for each in found if each is not None]

    @property
    def named(self) -> list[tuple[str, Priced]]:
        """The fastest, the job's own and the best plain expert parallelism, each way once, and what
        a person calls it."""
        named = (
            ("the fastest", self.best),
            ("yours", self.own_best),
            ("the best plain expert parallelism", self.base),
        )
        names: dict[int, list[str]] = {}
        ways: dict[int, Priced] = {}
        for name, each in named:
            if each is not None:
                ways[id(each)] = each
                names.setdefault(id(each), []).append(name)
        return [(" and ".join(names[key]), each) for key, each in ways.items()]

    def gain(self, priced: Priced) -> float | None:
        """Speed over the best plain expert parallelism; None where there is none."""
        return None if self.base is None else self.base.step_s / priced.step_s

    def _fastest_of(self, name: str) -> Priced | None:
        named = [each for each in self.priced if each.way.name == name]
        return next(filter(self.fits, named), None) or next(iter(named), None)


def priced_market(
    case: Case,
    loads: str,
    chosen: Sequence[Chosen],
    *,
    every_grid: bool,
    is_quick: bool = False,
    to: Console,
) -> Market:
    """Price every way; ``to`` shows progress. Quick: whole experts, at the job's own micro-batch
    and loads."""
    by_tokens = cache(lambda tokens, loads: case.with_tokens(tokens).rows(loads))

    def rows_of(training: Training | None, loads: str) -> Loads:
        return by_tokens((training or case.training).tokens, loads)

    rows, num_experts = rows_of(None, loads), case.shape.num_experts
    ranks = case.training.stage_ranks
    ways = list(ways_of(chosen, case.hardware, ranks, num_experts, every_grid=every_grid))
    own = next((each.name for each in chosen if each.is_own), "")
    if is_quick:
        ways = [(each, way) for each, way in ways if each.is_own or way.grid.etp_size == 1]
    zebra = case.zebra(rows) if case.has_two_kinds else None
    with Progress(console=to, transient=True) as progress:

        def price_all(ways: Sequence[Way], about: str, loads: str) -> list[Priced | Refused]:
            found = priced_ways(case, lambda training: rows_of(training, loads), ways)
            return list(progress.track(found, total=len(ways), description=about))

        def market_of(found: Sequence[Priced | Refused]) -> Market:
            priced = [each for each in found if isinstance(each, Priced)]
            priced.sort(key=lambda each: each.step_s)
            refused = [each for each in found if isinstance(each, Refused)]
            return Market(case, rows.source, own, tuple(priced), tuple(refused), zebra)

        found = price_all([way for _, way in ways], "pricing", loads)
        market = market_of(found)
        if every_grid:
            others = price_all([*_by_other_shares(market.priced)], "by other shares", loads)
            known_s = {(each.way.name, each.way.grid): each.step_s for each in market.priced}
            for each in others:
                if isinstance(each, Priced):
                    alike_s = known_s[each.way.name.partition(", ")[0], each.way.grid]
                    if abs(each.step_s - alike_s) <= ALIKE * alike_s:
                        continue
                found.append(each)
            market = market_of(found)
        if is_quick:
            return market
        trained = price_all([*_by_other_training(market)], "other micro-batches", loads)
        market = market_of([*found, *_better(market, trained)])
        shown = [each.way for each in market.best_of_each]
        under = {}
        for other in OTHER_LOADS:
            if other != loads:
                alike = price_all(shown, f"under {other}", other)
                under[other] = _gains([each for each in alike if isinstance(each, Priced)], market)
        return replace(market, under=under)


def _better(market: Market, trained: Sequence[Priced | Refused]) -> list[Priced]:
    """Of each strategy the fastest other training that fits, where it is faster than the job's."""
    before_s = {each.way.name: each.step_s for each in reversed(market.priced) if market.fits(each)}
    better: dict[str, Priced] = {}
    fitting = (each for each in trained if isinstance(each, Priced) and market.fits(each))
    for each in sorted(fitting, key=lambda each: each.step_s):
        if each.step_s < before_s.get(each.way.name, math.inf):
            better.setdefault(each.way.name, each)
    return [*better.values()]


OTHER_LOADS = ("balanced", "zipf:0.6")
"""What gains are also shown under: nobody knows the loads of a run that has not begun."""


def _gains(priced: Sequence[Priced], market: Market) -> dict[str, float | None]:
    base = market.base
    seconds = {each.way.shown: each.step_s for each in priced}
    base_s = None if base is None else seconds.get(base.way.shown)
    return {name: base_s and base_s / step_s for name, step_s in seconds.items()}


# In a process that is forked to price: what prices the way of a number.
_PRICE: list[Callable[[int], Priced | Refused]] = []


def priced_ways(
    case: Case, rows_of: Callable[[Training | None], Loads], ways: Sequence[Way]
) -> Iterator[Priced | Refused]:
    """Each way in its order, by all cores; ``rows_of`` gives those of a way's training, and keeps
    them."""

    def price(number: int) -> Priced | Refused:
        way = ways[number]
        try:
            run = case.trained_as(way.training).run(way.grid)
            return price_way(way, run, rows_of(way.training).rows_ILCE)
        except ValueError as error:
            return Refused(way, str(error))

    cores = min(len(os.sched_getaffinity(0)), len(ways))
    if cores <= 1:
        yield from map(price, range(len(ways)))
        return
    for training in {way.training for way in ways}:
        with suppress(ValueError):  # which those ways are refused by
            rows_of(training)  # once, before there are several processes
    with ProcessPoolExecutor(cores, get_context("fork"), _PRICE.append, (price,)) as pool:
        found = [pool.submit(_price_here, number) for number in range(len(ways))]
        for number, each in enumerate(found):
            try:
                yield each.result()
            except (AttributeError, TypeError, PicklingError) as error:
                if "pickle" not in str(error):
                    raise
                yield price(number)  # by a strategy of a user's own


def _price_here(number: int) -> Priced | Refused:
    return _PRICE[-1](number)
