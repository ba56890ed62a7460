# SPDX-License-Identifier: Apache-2.0
"""From a model and the settings to replaced layers: the same for every host.

``found_in`` asks the host's finders (``Finder``) for layers, each a ``Found`` (``host_layer.py``):
its experts' shapes, and ``adopt``, which puts ours in their place. ``grid_of`` (``grid.py``) says
over how many ranks they are spread, ``on_grid`` checks that they fit and draws the ``Blueprint``;
until then nothing has changed, and no process group was made. ``build`` makes the groups, connects
them, and replaces layer by layer: each becomes an ``AttachedLayer`` with the program of its
strategy (``moe.layer.RoutedExperts``), and takes the gate of the settings (``router_gates.py``).
What a person should know of the outcome is reported by ``way_line``, ``owners_line`` and
``warn_of_what_stays``.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import connect, gather_objects, take_first
from ds_moe_ext.core.hardware import Hardware, read_hardware
from ds_moe_ext.core.layout import GRID, NODE_AXES, Grid, ParallelLayout, divisors
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.grid import NOTHING, Needs, grid_of, sizes_with_owners
from ds_moe_ext.hosts.attachment.host_layer import (
    Adopted,
    ExpertShape,
    Facts,
    Found,
    Hosted,
    Slot,
    Wanted,
    facts_of,
)
from ds_moe_ext.hosts.attachment.modules import check_not_tied, unknown_experts, warn_of_unknown
from ds_moe_ext.hosts.attachment.notices import OWNERS, Log, Refusal, check_outputs, settle
from ds_moe_ext.hosts.attachment.router_gates import Router, host, routers_of, warn_if_causal
from ds_moe_ext.hosts.attachment.startup_check import start_of
from ds_moe_ext.moe import dispatch
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.moe.joined_passes import DTYPES
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.moe.replica_memory import Weights, check_repeats
from ds_moe_ext.moe.replicas import in_order
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.planning.exchange_costs import BY_NODES, Way
from ds_moe_ext.planning.strategy import (
    CostGroup,
    Job,
    LayerContext,
    Strategy,
    followers,
    replicates,
)
from ds_moe_ext.report.record import LayerRecord
from ds_moe_ext.schedule.task import INTER, INTRA, PARAM
from ds_moe_ext.strategies.settings import BLOCK, Settings
from ds_moe_ext.strict import in_json

CPU = torch.device("cpu")

Around = Callable[[int, Hosted], RunRows]  # see ``build``
Finder = Callable[[nn.Module, Wanted], Iterable[Found]]


@dataclass(frozen=True, eq=False)
class AttachedLayer:
    """One replaced layer."""

    name: str  # dotted module name
    kind: str  # what was there
    hosted: Hosted  # what has taken its place
    bytes_before: int  # bytes of expert weights that the rank held before
    stack: int  # see ``Found``
    # of expert weights that it holds now; a host that shards them later leaves less to look at
    expert_bytes: int
    num_factors: int = 0  # see ``Found``
    # how it routes; without the number of choices where no attribute says it
    routing: Facts = field(default_factory=dict)

    @property
    def routed(self) -> RoutedExperts:
        return self.hosted.routed

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The expert weights of this rank, as the model has them: slot by slot, or stacked."""
        return parameters_of(self.hosted)

    def computed(self, slot: Slot) -> tuple[nn.Parameter, ...]:
        """Of an expert's weights those that it computes with; adapters change them before."""
        return slot.parameters[: len(slot.parameters) - self.num_factors]

    def record(self) -> LayerRecord:
        """What the report says of it."""
        owner = self.routed.layer_context.plan.owner
        return LayerRecord(
            name=self.name,
            kind=self.kind,
            num_experts=owner.num_experts,
            top_k=self.routed.rows.top_k,
            owner_E=tuple(int(ep_rank) for ep_rank in owner.owner_E),
            expert_bytes=self.expert_bytes,
        )


def parameters_of(hosted: Hosted) -> tuple[nn.Parameter, ...]:
    """See ``AttachedLayer.parameters``."""
    return hosted.stacks or tuple(p for slot in hosted.slots() for p in slot.parameters)


def bytes_of(weights: Iterable[Tensor]) -> int:
    """Bytes of all weights that have elements."""
    return sum(weight.nbytes for weight in weights if not weight.is_meta)


@dataclass(frozen=True, eq=False)
class Blueprint:
    """What will be replaced, by what, on which grid. Made before any process group."""

    settings: Settings  # the block
    strategy: Strategy  # the chosen strategy
    grid: Grid  # the ranks
    found: tuple[Found, ...]  # the layers, in model order
    hardware: Hardware | None  # the cluster, if the settings name a file
    routers: tuple[Router, ...] = ()  # of the layers, where the settings have a gate; else none
    # what was chosen where the settings leave sizes open, for a person; else empty
    why_grid: str = ""
    why_together: str = ""  # why all ranks must call the model together, for a person; else empty
    # of a model on the meta device how its weights were made, for a person; else empty
    made: str = ""

    @property
    def cost_groups(self) -> tuple[CostGroup, ...]:
        """Layers of a stack whose experts are alike. Between stacks none move: the host expects
        gradients of each at other times."""
        layers: dict[tuple[ExpertShape, int], list[int]] = {}
        for layer, found in enumerate(self.found):
            layers.setdefault((found.expert, found.stack), []).append(layer)
        return tuple(CostGroup(layers=tuple(numbers)) for numbers in layers.values())

    @property
    def stacks(self) -> tuple[int, ...]:
        return tuple(found.stack for found in self.found)

    @property
    def moves_experts(self) -> bool:
        """Whether experts may change their owners."""
        return self.strategy.intervals().shard_every > 0

    @property
    def replicas_by_grid(self) -> bool:
        """Whether several grids copy experts, each by plans of its own."""
        return self.grid.size < self.grid.world_size and replicates(self.strategy)

    def owners(self) -> tuple[Placement, ...]:
        """Where the experts of each layer live at first."""
        num_experts = [found.num_experts for found in self.found]
        return self.strategy.first_owners(num_experts, self.cost_groups, self.grid.num_ep_ranks)


def wanted(settings: Settings) -> Wanted:
    """Which layers the settings ask for."""
    return re.compile(settings.moe_layer_pattern or "").search


def draw(
    settings: Settings,
    strategy: Strategy,
    model: nn.Module,
    finders: Iterable[Finder],
    world_size: int,
    *,
    needs: Needs = NOTHING,
) -> Blueprint:
    """Find the layers and check that they fit the ranks. Pure but for reading the model. Raises
    ValueError where there is nothing to replace, or sizes do not divide."""
    found = found_in(model, finders, settings)
    grid, why = grid_of(settings, strategy, found, world_size, needs=needs)
    routers = routers_of(model, found, settings.gate)
    return replace(on_grid(settings, strategy, found, grid, routers), why_grid=why)


def found_in(model: nn.Module, finders: Iterable[Finder], settings: Settings) -> list[Found]:
    """The layers that the settings ask for. Raises ValueError where there are none, or weights are
    tied."""
    found = [layer for finder in finders for layer in finder(model, wanted(settings))]
    if not found:
        pattern = settings.moe_layer_pattern
        unknown = unknown_experts(model, (), wanted(settings))
        raise ValueError(
            f"{BLOCK} is enabled, but {type(model).__name__} has no known MoE layer"
            + (f" whose name matches {pattern!r}" if pattern else "")
            + (
                "; supported are the MoE blocks of Hugging Face transformers 5, "
                "deepspeed.moe.layer.MoE and classes registered with "
                "ds_moe_ext.register_experts; 'ds-moe-ext doctor' shows more"
            )
            + (f". These look like experts: {', '.join(unknown)}" if unknown else "")
        )
    check_not_tied(model, found)
    return found


def ignored(_: str) -> None:
    """Takes a line that nobody reads."""


def _several_owners(grid: Grid) -> str:
    num_owners = grid.world_size // grid.size
    return f"each expert has {num_owners} owners here" if num_owners > 1 else ""


# Of a grid, where experts move.
SEVERAL_OWNERS = Refusal(
    "expert_parallel_size (under Megatron: --expert-model-parallel-size) by which each expert has "
    "several owners",
    _several_owners,
    "an expert that moves has one",
    "leave expert_parallel_size out (under Megatron: raise --expert-model-parallel-size)",
)


def on_grid(
    settings: Settings,
    strategy: Strategy,
    found: Sequence[Found],
    grid: Grid,
    routers: tuple[Router, ...] = (),
    *,
    log: Log = ignored,
) -> Blueprint:
    """Check that layers fit ranks; ``log`` is given what was left out of defaults, a line each.
    Pure but for reading a hardware file, and logging. Raises ValueError where they do not fit."""
    if grid.num_ep_ranks == 1:
        log = ignored  # of what there is to leave out: every EP rank has all experts
    strategy = settle(OWNERS, strategy, (SEVERAL_OWNERS,), grid, log)
    hardware = _hardware(settings, grid.size if strategy.intervals().weighs_replicas else 1)
    blueprint = Blueprint(settings, strategy, grid, tuple(found), hardware, routers)
    num_ranks = grid.world_size
    for cost_group in blueprint.cost_groups:
        names = [found[layer].name for layer in cost_group.layers]
        count = sum(found[layer].num_experts for layer in cost_group.layers)
        if count < grid.num_ep_ranks and strategy.roles is None:
            raise ValueError(
                f"{BLOCK}.expert_parallel_size is {grid.num_ep_ranks}, but {', '.join(names)} "
                f"have only {count} experts: some ranks would have none; choose one of "
                f"{[size for size in divisors(num_ranks // grid.etp_size) if size <= count]}"
            )
    blueprint.owners()  # so that what the strategy refuses is refused now
    return blueprint


def _hardware(settings: Settings, num_ranks: int) -> Hardware | None:
    """The cluster of the settings, if they name one; it must say how replicas reach all ranks."""
    if settings.hardware is None:
        return None
    try:
        hardware = read_hardware(settings.hardware)
        if num_ranks > 1:
            hardware.copy_link(num_ranks)
    except ValueError as error:
        raise ValueError(f"{BLOCK}.hardware is {settings.hardware!r}, but {error}") from error
    return hardware


def build(
    blueprint: Blueprint,
    device: torch.device = CPU,
    around: Around | None = None,
    beside: Sequence[Grid] = (),
) -> list[tuple[AttachedLayer, Adopted]]:
    """Replace the layers, whose experts will compute on the device. Collective: it makes the
    layout's process groups, those of grids ``beside`` too, on whose ranks there may be no layer.
    ``around`` makes what a layer calls from its number and its module, whose ``run`` are the
    experts alone."""
    is_first = dist.get_rank() == blueprint.grid.ranks.flat[0]
    check_outputs(blueprint.settings, writes=is_first and bool(blueprint.found))
    strategy, hardware = blueprint.strategy, blueprint.hardware
    ranks_per_node = None if hardware is None else hardware.ranks_per_node
    layout = ParallelLayout.build(blueprint.grid, strategy.uses(), ranks_per_node, beside)
    start, has_layers = start_of("attachment.build"), bool(blueprint.found)
    with start.together():
        if has_layers:
            _check_way(blueprint, layout, device)
    uses = strategy.uses() if has_layers else ()
    # Connect ranks where not all take part in each transfer.
    if ("ep", PARAM) in uses:
        connect(layout.group("ep", PARAM), device)
    if has_layers and layout.grid.etp_size > 1:
        connect(layout.group("esp", INTRA), device)
    for axis in NODE_AXES:
        if (axis, INTER) in uses and not layout.why_flat:
            connect(layout.group(axis, INTER), device)
    with start.together():
        return _adopted(blueprint, layout, around, device) if has_layers else []


def stays_in_slots(blueprint: Blueprint) -> bool:
    """Whether the experts of each layer lie in the same slots of every rank for good."""
    strategy, owners = blueprint.strategy, blueprint.owners()
    has_all = all(owner.is_everywhere for owner in owners)
    return has_all and not blueprint.moves_experts and strategy.roles is None


def _check_way(blueprint: Blueprint, layout: ParallelLayout, device: torch.device) -> None:
    """Raises ValueError where rows cannot travel as asked for."""
    if Way.DEEP_EP in blueprint.strategy.ways and (reason := dispatch.why_not(layout, device)):
        raise ValueError(
            f"{blueprint.strategy.keys.ways} is {Way.DEEP_EP.value!r}, but {reason}; choose "
            "another, or leave it out"
        )
    if layout.place == 0:
        _warn_of_idle_codecs(blueprint)


def _adopted(
    blueprint: Blueprint, layout: ParallelLayout, around: Around | None, device: torch.device
) -> list[tuple[AttachedLayer, Adopted]]:
    strategy, settings = blueprint.strategy, blueprint.settings
    owners, stacks = blueprint.owners(), blueprint.stacks
    plans = strategy.plan(Job.at_start(owners, layout.node_C, blueprint.cost_groups, stacks))
    attached = []
    planned = zip(blueprint.found, owners, plans, followers(plans, stacks))
    for index, (found, owner, plan, following) in enumerate(planned):
        held = torch.from_numpy(owner.experts_of(layout.index("ep")))
        layer_context = LayerContext(plan, layout, index, following)
        router = blueprint.routers[index] if blueprint.routers else None
        may_drop = found.may_drop if router is None else router.gate.may_drop
        size = layout.grid.etp_size
        options = LayerOptions(
            capacity_factor=settings.capacity_factor,
            gate_may_drop=may_drop,
            hooks=settings.hooks,
            name=found.name,
        )
        adopted = found.adopt(
            held,
            WHOLE if size == 1 else Shard(found.split(size), layout.index("esp"), size),
            partial(RoutedExperts, strategy, layer_context, options=options),
        )
        if around is not None:
            adopted.hosted.run = around(index, adopted.hosted)
        gate = None if router is None else router.gate
        before = {p for sources in adopted.sources.values() for p in sources}
        layer = AttachedLayer(
            name=found.name,
            kind=found.kind,
            hosted=adopted.hosted,
            bytes_before=bytes_of(before.union(adopted.discarded)),
            stack=found.stack,
            expert_bytes=bytes_of(parameters_of(adopted.hosted)),
            num_factors=found.num_factors,
            routing=facts_of(found.routing, gate, settings, strategy),
        )
        attached.append((layer, adopted if router is None else host(router, adopted)))
    if replicates(strategy):
        _allow_replicas(blueprint, [layer for layer, _ in attached], device)
    return attached


def take_first_ranks_experts(
    model: nn.Module,
    blueprint: Blueprint,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give all ranks of the group the first one's experts, before layers are replaced: ranks may
    have drawn or loaded their own. Collective."""
    for found in blueprint.found if blueprint.grid.world_size > 1 else ():
        if found.num_ep_ranks > 1:
            continue  # the model was built with other experts on each rank
        for parameter in model.get_submodule(found.name).parameters():
            if parameter.is_meta:
                continue  # each rank will draw its own, as the others would
            parameter.data.copy_(take_first(parameter.data.to(device).contiguous(), group))


def warn_of_what_stays(model: nn.Module, blueprint: Blueprint) -> None:
    """Report, on rank 0, what was not found, and a gate that looks at later tokens."""
    if dist.get_rank() == 0:
        warn_if_causal(blueprint.settings.gate, model)
        names = [found.name for found in blueprint.found]
        warn_of_unknown(unknown_experts(model, names, wanted(blueprint.settings)))


def way_line(strategy: Strategy, layout: ParallelLayout) -> str:
    """That the way which was asked for is the direct one here, for a person; else empty."""
    ways = strategy.ways
    if Way.DIRECT in ways or BY_NODES.isdisjoint(ways) or not layout.why_flat:
        return ""
    return f"{ways[0].value} all-to-alls are direct here: {layout.why_flat}"


EP_RANKS = f"{BLOCK}.expert_parallel_size"


def owners_line(
    blueprint: Blueprint,
    key: str = EP_RANKS,
    resize: Callable[[int], str] = lambda size: f"set {in_json(EP_RANKS, size)}",
) -> str:
    """That owners leave a strategy nothing to do, or ranks without experts; else empty. ``key`` is
    by which the user says how many EP ranks there are, ``resize`` shows what gives so many."""
    strategy, grid = blueprint.strategy, blueprint.grid
    max_ep_ranks = grid.world_size // grid.etp_size
    if grid.num_ep_ranks == 1 and max_ep_ranks > 1 and strategy.intervals().weighs_replicas:
        divide = (
            np.gcd.reduce([max_ep_ranks, *(found.num_experts for found in blueprint.found)]) > 1
        )
        remedy = f"raise {key}" if divide or strategy.has_uneven_owners else "choose other ranks"
        return (
            f"every rank has all experts, so there are no replicas; {remedy} for "
            f"{blueprint.settings.placing} to have an effect"
        )
    pairs = zip(blueprint.found, blueprint.owners())
    bare = [found for found, owner in pairs if not owner.is_everywhere]
    if not bare or strategy.roles is not None:
        return ""
    least = min(bare, key=lambda found: found.num_experts)
    others = "" if len(bare) == 1 else f" (of {len(bare)} layers likewise)"
    size = sizes_with_owners(least.num_experts, max_ep_ranks)[-1]
    return (
        f"some of the {grid.num_ep_ranks} EP ranks own no expert of {least.name}, which has "
        f"{least.num_experts}{others}: they compute only on replicas; to give every EP rank "
        f"experts, {resize(size)}"
    )


def _warn_of_idle_codecs(blueprint: Blueprint) -> None:
    is_split = blueprint.grid.etp_size > 1
    codecs, lines = blueprint.settings.hooks.codecs, list[str]()
    idle = [c for c in codecs if not (c.etp and is_split)]
    if idle and blueprint.grid.num_ep_ranks == 1:
        lines.append(
            f"{', '.join(map(str, idle))}, which has no effect: there is one EP rank, so no "
            "tokens are sent between EP ranks; leave it out, or raise expert_parallel_size"
        )
    in_etp_groups = [c for c in codecs if c.etp]
    if in_etp_groups and not is_split:
        lines.append(
            f"'etp' of {', '.join(map(str, in_etp_groups))}, which has no effect: no ranks split "
            "experts; leave it out, or raise expert_sharding_size"
        )
    of_replicas = [c for c in codecs if c.replicas or c.replica_gradients]
    if of_replicas and not blueprint.strategy.intervals().weighs_replicas:
        lines.append(
            f"'replicas' or 'replica_gradients' of {', '.join(map(str, of_replicas))}, which "
            f"have no effect: strategy {blueprint.settings.placing!r} makes no replicas; leave "
            "them out, or choose one that does"
        )
    for what in lines:
        warnings.warn(f"{BLOCK}.hooks has {what}", stacklevel=3)


def _allow_replicas(
    blueprint: Blueprint, layers: Sequence[AttachedLayer], device: torch.device
) -> None:
    for cost_group in blueprint.cost_groups:
        hosted, first = [layers[layer].hosted for layer in cost_group.layers], cost_group.layers[0]
        slot = next((slot for each in hosted for slot in each.slots()), None)
        if slot is None:
            some = _like_none(blueprint.found[first].expert, device)
        else:
            some = slot.parameters
        like = some[: len(blueprint.found[first].computed)]
        try:  # replicas of experts must be the same each time they travel
            check_repeats(blueprint.settings.hooks.of_replicas, like, device)
        except ValueError as error:
            raise ValueError(f"{BLOCK}.hooks: {error}") from error
        for each in hosted:
            each.routed.allow_replicas(like, parameters_of(each) or some, device)
    for _, stack in groupby(layers, key=lambda layer: layer.stack):
        in_order(layer.routed.replicas for layer in stack if layer.routed.replicas is not None)


def _like_none(expert: ExpertShape, device: torch.device) -> Weights:
    """What an expert's weights are like, on a rank of another role that has none; without memory.
    Of what type they will be when they are copied, the others know."""
    dtypes = {str(dtype): dtype for dtype in DTYPES}
    return tuple(
        torch.empty((), dtype=dtypes[dtype], device=device).expand(shape).requires_grad_(trained)
        for _, shape, dtype, trained in expert
    )


def check_agreement(layers: Iterable[AttachedLayer], rank: int) -> None:
    """A plan or an issue order that differs between ranks would hang them later: raises
    RuntimeError on every rank, naming its own digest and those of the others. Collective."""
    for layer in layers:
        text = layer.routed.describe()
        group = layer.routed.layer_context.layout.group(GRID, INTER)
        digests = gather_objects(hashlib.sha256(text.encode()).hexdigest()[:8], group)
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"{BLOCK}: ranks disagree on {layer.name}: digests {digests} of the grid's ranks; "
                f"rank {rank} has\n{text}"
            )
