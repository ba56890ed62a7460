# SPDX-License-Identifier: Apache-2.0
"""The grid of ranks (``grid_of``): how many split an expert, and over how many EP ranks the experts
of a layer are spread, as given, or chosen by the predicted step time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import prod
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.core.layout import Grid, Roles, divisors
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.startup_check import REMEDY, UNKNOWN, Cluster, ranks_on_this_node
from ds_moe_ext.moe.hooked import on_its_way
from ds_moe_ext.moe.hooks import NO_HOOKS, Hooked
from ds_moe_ext.planning.candidates import PRICED, Reached, Way, price_way
from ds_moe_ext.planning.described_run import DescribedRun
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.model_shape import GATED, ModelShape, OnItsWay, Training
from ds_moe_ext.planning.strategy import Choosing, Strategy, names_with
from ds_moe_ext.strategies.settings import BLOCK, Settings
from ds_moe_ext.strict import in_json


class Sized(NamedTuple):
    """The ranks, and what was chosen where the settings leave it open."""

    grid: Grid
    why: str = ""  # for a person; else empty


class Needs(NamedTuple):
    """What a host needs of sizes that the settings leave open."""

    # why all EP ranks must have equally many experts of a layer, for a person; else empty
    even: str = ""
    whole: str = ""  # why no rank may have a part of an expert, likewise


NOTHING = Needs()


class _Market(NamedTuple):
    """A cluster, and prices on it."""

    hardware: Hardware
    prices: Callable[[tuple[int, ...], Grid], list[GridPrice]]  # of numbers of EP ranks; made once


def grid_of(
    settings: Settings,
    strategy: Strategy,
    found: Sequence[Found],
    world_size: int,
    cluster: Cluster = UNKNOWN,
    *,
    needs: Needs = NOTHING,
) -> Sized:
    """The grid that the settings ask for, or the best for the model: open sizes are chosen by
    prices on the cluster, and by a rule where it is not known. Raises ValueError where sizes do not
    divide."""
    if strategy.roles is not None:
        return Sized(_grid_of_roles(settings, strategy.roles, found, world_size))
    etp_size = _etp_size(settings, strategy, found, world_size)
    is_open, is_split = settings.expert_sharding_size is None and etp_size > 1, ""
    if is_open and needs.whole:
        etp_size, is_open, is_split = 1, False, f"experts stay whole, because {needs.whole}"
    hardware, market = cluster.hardware, None
    if hardware is not None:
        prices = partial(prices_of_ep_ranks, strategy, found, hardware, hooks=settings.hooks)
        market = _Market(hardware, cache(prices))
    if is_open:
        is_split = f"the {etp_size} ranks of a node split each expert"
        if market is not None:
            etp_size, reported = _split(
                settings, strategy, found, Grid(world_size, 1, etp_size), market, needs=needs
            )
            is_split = reported or is_split
    max_ep_ranks = world_size // etp_size
    num_ep_ranks, why = settings.expert_parallel_size, ""
    if num_ep_ranks is None:
        grid = Grid(world_size, 1, etp_size)
        num_ep_ranks, why, is_number_open = _num_ep_ranks(strategy, found, grid, market, needs)
        is_open = is_open or is_number_open
    if max_ep_ranks % num_ep_ranks:
        ep_ranks = "" if etp_size == 1 else f" in EP ranks of {etp_size} ranks"
        raise ValueError(
            f"{BLOCK}.expert_parallel_size is {num_ep_ranks}, which does not divide the world size "
            f"{world_size}{ep_ranks}; choose one of {divisors(max_ep_ranks)}"
        )
    for layer in found:
        if layer.num_experts % num_ep_ranks and not strategy.has_uneven_owners:
            raise ValueError(
                f"{BLOCK}.expert_parallel_size is {num_ep_ranks}, which does not divide the "
                f"{layer.num_experts} experts of {layer.name}; choose one of "
                f"{divisors(np.gcd(layer.num_experts, max_ep_ranks))}"
            )
        if layer.num_ep_ranks not in (1, num_ep_ranks):
            raise ValueError(
                f"{BLOCK}.expert_parallel_size is {num_ep_ranks}, but the model built {layer.name} "
                f"with ep_size {layer.num_ep_ranks}; make them equal, or build it with ep_size 1"
            )
    grid = Grid(world_size, num_ep_ranks, etp_size)
    if world_size == 1:
        return Sized(grid)
    reported = _reported(settings, grid, is_split, why)
    return Sized(
        grid,
        f"{reported}; {cluster.reported}; {REMEDY}" if is_open and cluster.reported else reported,
    )


def _reported(settings: Settings, grid: Grid, is_split: str, why: str) -> str:
    """What was chosen, in one line."""
    chosen = [f"expert_sharding_size is null: {is_split}"] if is_split else []
    if settings.expert_parallel_size is None:
        chosen.append(f"expert_parallel_size is null: {why}")
    num_owners = grid.world_size // grid.size
    if chosen and num_owners > 1:
        chosen.append(f"each expert has {num_owners} owners")
    return "; ".join(chosen)


def _grid_of_roles(
    settings: Settings, roles: Roles, found: Sequence[Found], world_size: int
) -> Grid:
    """An EP rank for each rank of a group."""
    for key, only in (("expert_parallel_size", roles.size), ("expert_sharding_size", 1)):
        asked = getattr(settings, key)
        if asked not in (None, only):
            raise ValueError(
                f"{BLOCK}.{key} is {asked}, but strategy {settings.strategy!r} has "
                f"groups of {roles}, by the keys of its own block; leave it out"
            )
    if world_size % roles.size:
        raise ValueError(
            f"{BLOCK}.{settings.strategy} makes groups of {roles}, which do not divide the "
            f"{world_size} ranks of the run; choose sizes whose sum divides {world_size}"
        )
    if len(roles.order) not in (0, world_size):
        raise ValueError(
            f"{BLOCK}.{settings.strategy} makes groups of {roles} by device, of ranks of "
            f"{len(roles.order)} that are no neighbours, but a pipeline stage has {world_size} of "
            "them; order the hostfile so that the ranks of a group are neighbours"
        )
    for layer in found:
        if layer.num_ep_ranks != 1:
            raise ValueError(
                f"{BLOCK}.strategy is {settings.strategy!r}, but the model built {layer.name} with "
                f"ep_size {layer.num_ep_ranks}, so that no rank has all experts; build it with "
                "ep_size 1"
            )
    return Grid(world_size, roles.size, members=roles.order)


def sizes_with_owners(fewest: int, max_ep_ranks: int) -> list[int]:
    """Numbers of EP ranks at which each can own one of so many experts, ascending."""
    return [size for size in divisors(max_ep_ranks) if size <= max(fewest, 1)]


def _num_ep_ranks(
    strategy: Strategy, found: Sequence[Found], grid: Grid, market: _Market | None, needs: Needs
) -> tuple[int, str, bool]:
    """The best for the model, why, and whether prices may choose: what it was built with, if it
    was; else what costs least on the cluster that is described; else as many as leave no rank
    without experts, in a node if there are several."""
    max_ep_ranks = grid.world_size // grid.etp_size
    built = {layer.num_ep_ranks for layer in found} - {1}
    if built:
        num_ep_ranks = built.pop()
        return num_ep_ranks, f"{_ep_ranks(num_ep_ranks)}, as the model was built", False
    if strategy.with_owners_that_stay().intervals().shard_every:
        return (
            max_ep_ranks,
            f"all {_ep_ranks(max_ep_ranks)}, because experts that move have one owner",
            False,
        )
    sizes, why = _owners(strategy, found, max_ep_ranks, needs)
    on_node = ranks_on_this_node() or grid.world_size
    tried = _filling(sizes, on_node if market is None else market.hardware.ranks_per_node, grid)
    is_open, unreported = len(tried) > 1, ""
    if market is not None:
        try:
            return *_cheapest(market, tried, grid), is_open
        except ValueError as error:
            unreported = f"; {market.hardware.name} cannot price other sizes: {error}"
    is_spread = strategy.has_uneven_owners and grid.etp_size == 1
    in_nodes = [size for size in sizes if is_spread and on_node % size == 0]
    if 1 < max(in_nodes, default=1) < sizes[-1]:
        larger = in_json(f"{BLOCK}.expert_parallel_size", sizes[-1])
        why = (
            f"{_ep_ranks(in_nodes[-1])}, so that tokens and replicas stay in a node of "
            f"{on_node} ranks (to spread experts over more, set {larger}){unreported}"
        )
        return in_nodes[-1], why, is_open
    return sizes[-1], f"{_ep_ranks(sizes[-1])}, {why}{unreported}", is_open


def _owners(
    strategy: Strategy, found: Sequence[Found], max_ep_ranks: int, needs: Needs
) -> tuple[Sequence[int], str]:
    """Numbers of EP ranks that may own all layers' experts, ascending, and why no more."""
    if needs.even or not strategy.has_uneven_owners:
        numbers = [max_ep_ranks, *(layer.num_experts for layer in found)]
        why = "the largest that divides ranks and experts"
        if strategy.has_uneven_owners:
            why += f", because {needs.even}"
        return divisors(np.gcd.reduce(numbers)), why
    smallest = min(found, key=lambda layer: layer.num_experts)
    return sizes_with_owners(smallest.num_experts, max_ep_ranks), (
        f"the largest at which each owns experts of all layers ({smallest.name} has "
        f"{smallest.num_experts})"
    )


def _cheapest(market: _Market, tried: tuple[int, ...], grid: Grid) -> tuple[int, str]:
    """What a layer takes least time with, and what the others would lose."""
    if len(tried) == 1:
        return tried[0], f"{_ep_ranks(tried[0])}, the largest possible"
    best, *others = market.prices(tried, grid)
    lost = ", ".join(
        f"{_ep_ranks(each.num_ep_ranks)} {each.layer_s / best.layer_s:.3g} times" for each in others
    )
    return best.num_ep_ranks, (
        f"{_ep_ranks(best.num_ep_ranks)}, by the predicted cost of a layer on "
        f"{market.hardware.name}: it takes {1e3 * best.layer_s:.3g} ms a step, with {lost} as "
        f"long ({TOKENS:,} tokens a rank, loads {LOADS})"
    )


def _filling(sizes: Sequence[int], per_node: int, grid: Grid) -> tuple[int, ...]:
    """Numbers of EP ranks that fill a node at least, as far as there are so many."""
    in_node = [size for size in sizes if per_node % (size * grid.etp_size) == 0]
    return tuple(size for size in sizes if size >= max(in_node, default=sizes[0]))


def _split(
    settings: Settings,
    strategy: Strategy,
    found: Sequence[Found],
    grid: Grid,
    market: _Market,
    *,
    needs: Needs,
) -> tuple[int, str]:
    """Whether the ranks of a node split experts, by what a layer costs on the cluster that is
    described; and why, for a person."""
    given, best_s = settings.expert_parallel_size, []
    for size in (1, grid.etp_size):
        each = replace(grid, etp_size=size)
        sizes, _ = _owners(strategy, found, grid.world_size // size, needs)
        per_node = market.hardware.ranks_per_node
        tried = _filling(sizes, per_node, each) if given is None else (given,)
        try:
            best_s.append(market.prices(tried, each)[0].layer_s)
        except ValueError:
            return grid.etp_size, ""
    whole_s, split_s = best_s
    if split_s < whole_s:
        return grid.etp_size, (
            f"{grid.etp_size} ranks of a node split each expert; with whole experts a layer "
            f"takes {whole_s / split_s:.3g} times as long"
        )
    return 1, (
        f"experts stay whole, by the predicted cost of a layer on {market.hardware.name}: it "
        f"takes {split_s / whole_s:.3g} times as long where the {grid.etp_size} ranks of a "
        "node split each"
    )


def _ep_ranks(number: int) -> str:
    return f"{number} EP rank{'s' if number > 1 else ''}"


def _etp_size(
    settings: Settings, strategy: Strategy, found: Sequence[Found], world_size: int
) -> int:
    """As asked for; else, where there are several nodes, the ranks of a node if all experts can be
    split by them and as many EP ranks as were asked for are left (FSMoE's own layout)."""
    asked = settings.expert_sharding_size
    if asked is None:
        size, num_ep_ranks = ranks_on_this_node() or 1, settings.expert_parallel_size or 1
        spans_nodes = size < world_size and world_size % (size * num_ep_ranks) == 0
        fits = strategy.splits_experts and spans_nodes and _can_split(found, size)
        return size if fits else 1
    if asked == 1:
        return 1
    if not strategy.splits_experts:
        placed = f", with {BLOCK}.balance {settings.strategy!r} to place experts that way"
        if isinstance(strategy, Choosing):  # it cannot be a balance
            placed = ""
        raise ValueError(
            f"{BLOCK}.expert_sharding_size is {asked}, but strategy {settings.strategy!r} keeps "
            "every expert whole on one rank; set it to 1 or null, or use strategy "
            f"{names_with('splits_experts')}{placed}"
        )
    if world_size % asked:
        raise ValueError(
            f"{BLOCK}.expert_sharding_size is {asked}, which does not divide the world size "
            f"{world_size}; choose one of {divisors(world_size)}"
        )
    for layer in found:
        if layer.num_ep_ranks > 1:
            raise ValueError(
                f"{BLOCK}.expert_sharding_size is {asked}, but the model built {layer.name} with "
                f"ep_size {layer.num_ep_ranks}, so that a rank lacks experts of its EP rank; build "
                "it with ep_size 1"
            )
        layer.split(asked)
    return asked


def _can_split(found: Sequence[Found], num_shards: int) -> bool:
    try:
        for layer in found:
            layer.split(num_shards)
    except ValueError:
        return False
    return all(layer.num_ep_ranks == 1 for layer in found)


TOKENS = 4096  # of a rank in a pass
TOP_K = 2
LOADS = "zipf:0.6"
LAYERS = 4  # that are priced
STEPS = 3 + PRICED
TYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclass(frozen=True)
class GridPrice:
    """What a number of EP ranks comes to."""

    num_ep_ranks: int  # which
    # seconds of a layer in a step of one pass, gradients summed over owners with it, but not the
    # host; to three digits, so that ranks of unlike processors agree
    layer_s: float


def prices_of_ep_ranks(
    strategy: Strategy,
    found: Sequence[Found],
    hardware: Hardware,
    sizes: Iterable[int],
    grid: Grid,
    *,
    hooks: Hooked = NO_HOOKS,
) -> list[GridPrice]:
    """Prices of some numbers of EP ranks, the lowest first; of equals the fewest EP ranks. Pure."""
    reached = Reached()
    nodes = -(-grid.world_size // hardware.ranks_per_node)  # of the run, whatever the file has
    hardware = reached.of(replace(hardware, num_nodes=nodes))
    shape, number_type = _shape(found)
    training = Training(num_ranks=grid.world_size, length=TOKENS, number_type=number_type)
    weights = _on_its_way(hooks, shape, number_type, grid.etp_size)
    rows_ILRE = _rows(grid.world_size, shape.num_experts, shape.top_k)
    prices = []
    for num_ep_ranks in sizes:
        run = DescribedRun(
            hardware=hardware,
            shape=shape,
            training=training,
            grid=replace(grid, num_ep_ranks=num_ep_ranks),
            passes=reached.passes,
            on_its_way=weights,
        )
        priced = price_way(Way("", strategy, run.grid), run, rows_ILRE)
        layers_s = priced.step_s - priced.mean("host_s")
        prices.append(GridPrice(num_ep_ranks, float(f"{layers_s / LAYERS:.2e}")))
    return sorted(prices, key=lambda price: (price.layer_s, price.num_ep_ranks))


def _on_its_way(
    hooks: Hooked, shape: ModelShape, number_type: str, etp_size: int
) -> OnItsWay | None:
    """None, which is as in memory, where hooks cannot be asked: a run that starts does so on a CPU,
    and its rows may yet be of another width."""
    try:
        return on_its_way(hooks, shape, number_type, etp_size)
    except Exception:  # whatever a user's own raise
        return None


@lru_cache(maxsize=1)  # grids with and without split experts have the same
def _rows(num_ranks: int, num_experts: int, top_k: int) -> np.ndarray:
    """Of all steps, int64 ``[I, L, R, E]``."""
    return read_loads(
        LOADS,
        ranks=num_ranks,
        experts=num_experts,
        layers=LAYERS,
        tokens=TOKENS,
        top_k=top_k,
        steps=STEPS,
    ).rows_ILCE


def _shape(found: Sequence[Found]) -> tuple[ModelShape, str]:
    """A model of layers like the first, and the type of its numbers."""
    first = found[0]
    matrices = [(shape, dtype) for _, shape, dtype, _ in first.computed if len(shape) > 1]
    weights = sum(prod(shape) for shape, _ in matrices)
    # The model's width is that of rows there and back, so that all matrices have it.
    common = set(matrices[0][0]).intersection(*(shape for shape, _ in matrices))
    width = min(common or matrices[0][0])
    shape = ModelShape(
        name=first.name,
        num_layers=LAYERS,
        moe_layers=tuple(range(LAYERS)),
        width=width,
        attention_weights=4 * width * width,
        head_width=(width, width),
        dense_width=0,
        products=GATED,
        num_experts=first.num_experts,
        top_k=min(TOP_K, first.num_experts),
        expert_width=max(weights // (GATED * width), 1),
    )
    return shape, TYPES.get(matrices[0][1], "fp32")
