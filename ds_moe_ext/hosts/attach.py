"""From a model and the settings to replaced layers: the same for every host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ds_moe_ext.comm import connect, gather_texts
from ds_moe_ext.hardware import Hardware, read_hardware
from ds_moe_ext.hosts.found import Adopted, ExpertShape, Found, Hosted, Wanted
from ds_moe_ext.layout import Grid, ParallelLayout
from ds_moe_ext.moe.copies import in_order
from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.placement import Placement, even_homes
from ds_moe_ext.report.record import LayerRecord
from ds_moe_ext.schedule.task import INTER, PARAM
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.strategies.base import Job, Pool, Site, Strategy

CPU = torch.device("cpu")

Finder = Callable[[nn.Module, Wanted], Iterable[Found]]


@dataclass(frozen=True, eq=False)
class AttachedLayer:
    """One replaced layer.

    Attributes:
        name: dotted module name.
        kind: what was there.
        hosted: what has taken its place.
        bytes_before: bytes of expert weights that the rank held before.
    """

    name: str
    kind: str
    hosted: Hosted
    bytes_before: int

    @property
    def routed(self) -> RoutedExperts:
        """Its program."""
        return self.hosted.routed

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The expert weights of this rank."""
        return tuple(parameter for slot in self.hosted.slots() for parameter in slot.parameters)

    @classmethod
    def of(cls, found: Found, adopted: Adopted) -> AttachedLayer:
        before = {p for sources in adopted.sources.values() for p in sources}
        return cls(
            found.name,
            found.kind,
            adopted.hosted,
            bytes_of(before.union(adopted.discarded)),
        )

    def record(self) -> LayerRecord:
        """What the report says of it."""
        home = self.routed.site.plan.home
        return LayerRecord(
            name=self.name,
            kind=self.kind,
            num_experts=home.num_experts,
            top_k=self.routed.rows.top_k,
            home_E=tuple(int(cell) for cell in home.owner_E),
            expert_bytes=bytes_of(self.parameters),
        )


def bytes_of(weights: Iterable[Tensor]) -> int:
    """Bytes of all weights."""
    return sum(weight.nbytes for weight in weights)


@dataclass(frozen=True, eq=False)
class Blueprint:
    """What will be replaced, by what, on which grid. Made before any process group.

    Attributes:
        settings: the block.
        strategy: the chosen strategy.
        grid: the ranks.
        found: the layers, in model order.
        hardware: the cluster, if the settings name a file.
    """

    settings: Settings
    strategy: Strategy
    grid: Grid
    found: tuple[Found, ...]
    hardware: Hardware | None

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Layers whose experts are alike."""
        layers: dict[ExpertShape, list[int]] = {}
        for layer, found in enumerate(self.found):
            layers.setdefault(found.expert, []).append(layer)
        return tuple(Pool(layers=tuple(numbers)) for numbers in layers.values())

    @property
    def moves_experts(self) -> bool:
        """Whether experts may change their homes."""
        return self.strategy.rhythm().shard_every > 0

    def homes(self) -> tuple[Placement, ...]:
        """Where the experts of each layer live at first."""
        homes: dict[int, Placement] = {}
        for pool in self.pools:
            counts = [self.found[layer].num_experts for layer in pool.layers]
            homes.update(zip(pool.layers, even_homes(counts, self.grid.num_cells)))
        return tuple(homes[layer] for layer in range(len(self.found)))


def draw(
    settings: Settings,
    strategy: Strategy,
    model: nn.Module,
    finders: Iterable[Finder],
    world_size: int,
) -> Blueprint:
    """Find the layers and check that they fit the ranks. Pure but for reading the model.

    Raises:
        ValueError: there is nothing to replace, or sizes do not divide.
    """
    pattern = re.compile(settings.moe_layer_pattern or "")
    found = [layer for finder in finders for layer in finder(model, pattern.search)]
    if not found:
        raise ValueError(
            f"{BLOCK} is enabled, but {type(model).__name__} has no MoE layer that it knows"
            + (f" and that matches {pattern.pattern!r}" if settings.moe_layer_pattern else "")
            + "; known are the MoE blocks of Hugging Face transformers 5, deepspeed.moe.layer.MoE "
            "and classes given to ds_moe_ext.register_experts; 'ds-moe-ext doctor' tells more"
        )
    largest = world_size if strategy.has_uneven_homes else _largest_fit(found, world_size)
    num_cells = settings.expert_parallel_size or largest
    if world_size % num_cells:
        raise ValueError(
            f"{BLOCK}.expert_parallel_size is {num_cells}, which does not divide the world size "
            f"{world_size}; choose one of {_divisors(world_size)}"
        )
    if num_cells < world_size and strategy.rhythm().shard_every:
        raise ValueError(
            f"{BLOCK}.expert_parallel_size is {num_cells} of {world_size} ranks, but strategy "
            f"{settings.strategy} moves experts to new homes, which needs one home an expert in "
            f"the whole world; leave expert_parallel_size out, or set reshard_interval to 0"
        )
    for layer in found:
        if layer.num_experts % num_cells and not strategy.has_uneven_homes:
            raise ValueError(
                f"{BLOCK}.expert_parallel_size is {num_cells}, which does not divide the "
                f"{layer.num_experts} experts of {layer.name}; choose one of "
                f"{_divisors(np.gcd(layer.num_experts, world_size))}"
            )
        if layer.num_cells not in (1, num_cells):
            raise ValueError(
                f"{BLOCK}.expert_parallel_size is {num_cells}, but the model built {layer.name} "
                f"with ep_size {layer.num_cells}; make them equal, or build it with ep_size 1"
            )
    hardware = _hardware(settings, num_cells if strategy.rhythm().plan_every else 1)
    blueprint = Blueprint(settings, strategy, Grid(world_size, num_cells), tuple(found), hardware)
    for pool in blueprint.pools:
        names = [found[layer].name for layer in pool.layers]
        count = sum(found[layer].num_experts for layer in pool.layers)
        if count < num_cells:
            raise ValueError(
                f"{BLOCK}.expert_parallel_size is {num_cells}, but {', '.join(names)} have only "
                f"{count} experts of their shape: some ranks would have none; choose one of "
                f"{[size for size in _divisors(world_size) if size <= count]}"
            )
    return blueprint


def _hardware(settings: Settings, num_cells: int) -> Hardware | None:
    """The cluster of the settings, if they name one; it must say how copies reach all cells."""
    if settings.hardware is None:
        return None
    try:
        hardware = read_hardware(settings.hardware)
        if num_cells > 1:
            hardware.copy_link(num_cells)
    except ValueError as error:
        raise ValueError(f"{BLOCK}.hardware is {settings.hardware!r}, but {error}") from error
    return hardware


def _largest_fit(found: Iterable[Found], world_size: int) -> int:
    """As many cells as divide everything; what the model was built with, if it was."""
    found = list(found)
    built = {layer.num_cells for layer in found} - {1}
    if built:
        return built.pop()
    return int(np.gcd.reduce([world_size, *(layer.num_experts for layer in found)]))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, int(number) + 1) if number % d == 0]


def build(blueprint: Blueprint, device: torch.device = CPU) -> list[tuple[AttachedLayer, Adopted]]:
    """Replace the layers. Collective: it makes the layout's process groups.

    Args:
        device: where this rank's experts will compute.
    """
    strategy = blueprint.strategy
    hardware = blueprint.hardware
    ranks_per_node = None if hardware is None else hardware.ranks_per_node
    layout = ParallelLayout.build(blueprint.grid, strategy.uses(), ranks_per_node)
    if ("ep", PARAM) in strategy.uses():
        connect(layout.group("ep", PARAM), device)
    homes = blueprint.homes()
    plans = strategy.plan(Job.at_start(homes, layout.node_C, blueprint.pools))
    attached = []
    planned = zip(blueprint.found, homes, plans, (*plans[1:], None))
    for index, (found, home, plan, following) in enumerate(planned):
        held = torch.from_numpy(home.experts_of(layout.index("ep")))
        site = Site(plan, layout, index, following)
        adopted = found.adopt(held, _factory(blueprint, found, site))
        attached.append((AttachedLayer.of(found, adopted), adopted))
    if ("ep", PARAM) in strategy.uses():
        _allow_copies(blueprint.pools, [layer for layer, _ in attached])
    return attached


def _allow_copies(pools: Iterable[Pool], layers: Sequence[AttachedLayer]) -> None:
    for pool in pools:
        slots = (slot for layer in pool.layers for slot in layers[layer].hosted.slots())
        like = next(slots).parameters
        for layer in pool.layers:
            layers[layer].routed.allow_copies(like)
    in_order(layer.routed.copies for layer in layers if layer.routed.copies is not None)


def check_agreement(layers: Iterable[AttachedLayer], rank: int) -> None:
    """Collective. A plan or an issue order that differs between ranks would hang them later.

    Raises:
        RuntimeError: on every rank, naming its own digest and those of the others.
    """
    for layer in layers:
        text = layer.routed.describe()
        group = layer.routed.site.layout.group("ep", INTER)
        digests = gather_texts(hashlib.sha256(text.encode()).hexdigest()[:8], group)
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"{BLOCK}: ranks disagree on {layer.name}: digests {digests} of the grid's ranks; "
                f"rank {rank} has\n{text}"
            )


def _factory(
    blueprint: Blueprint, found: Found, site: Site
) -> Callable[[ExpertFunction], RoutedExperts]:
    options = LayerOptions(
        capacity_factor=blueprint.settings.capacity_factor, gate_may_drop=found.may_drop
    )
    return lambda function: RoutedExperts(blueprint.strategy, site, function, options=options)
