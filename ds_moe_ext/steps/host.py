# SPDX-License-Identifier: Apache-2.0
"""What a training framework must give, and the start that follows from it: the same for every host.

``docs/hosts.md`` has it as a page, with how one more is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.attachment import block_hooks, frozen_experts, replacement
from ds_moe_ext.attachment.host_layer import Adopted, Found
from ds_moe_ext.attachment.meeting import Description, start_of
from ds_moe_ext.attachment.priced_cluster import device_name
from ds_moe_ext.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.attachment.router_gates import routers_of
from ds_moe_ext.comm import gather_objects
from ds_moe_ext.layout import Grid
from ds_moe_ext.moe.copies.accumulation import Accumulation
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.steps.cost_checks import Checks
from ds_moe_ext.steps.costs import Costs
from ds_moe_ext.steps.expert_moves import ExpertMover
from ds_moe_ext.steps.optimizer_states import States
from ds_moe_ext.steps.pipeline_costs import DenseGradients, Pipelines
from ds_moe_ext.steps.planning import Planning
from ds_moe_ext.steps.training_run import Run, teller
from ds_moe_ext.steps.unequal_passes import join_generate
from ds_moe_ext.strategy import Job, Strategy
from ds_moe_ext.watch import ALIKE, WATCH

Built = Sequence[tuple[AttachedLayer, Adopted]]
"""The replaced layers of this rank, in model order; none where a pipeline stage has none."""


class Seats(NamedTuple):
    """Which ranks run the same layers.

    Attributes:
        own: this rank's grid.
        beside: those of all ranks, where they do not all run the same layers; else none.
        alike: what the ranks of a grid must have in common, as texts that they compare.
        why: what was chosen where the settings leave sizes open, for a person; else empty.
    """

    own: Grid
    beside: tuple[Grid, ...]
    alike: Description
    why: str = ""


class Host(Protocol):
    """A training framework as one model of it starts; ``run_on`` asks in the order of the methods.

    What outlives the start (callables that layers keep) must not keep the host's engine alive: the
    report of a run is written when that goes. Methods run on every rank alike; those that may talk
    to other ranks say "Collective".

    Attributes:
        name: of the call that starts, for a person: ``"deepspeed.initialize"``.
        remedy: what a person does where ranks call the model unequally: ``watch.JOINED`` where
            ``ds_moe_ext.joined`` knows its carrier, else ``watch.ALIKE``.
        device: where this rank's experts compute.
        dtype: in which the model computes.
        micro_batch: samples that each rank calls the model with; None where nobody said.
        num_micro_batches: of an optimizer step.
        carrier: the object with which the run ends.
    """

    @property
    def name(self) -> str: ...

    @property
    def remedy(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def micro_batch(self) -> int | None: ...

    @property
    def num_micro_batches(self) -> int: ...

    @property
    def carrier(self) -> object: ...

    def devices(self) -> Sequence[str]:
        """Name of each rank's device, for strategies that choose by it. Collective."""
        ...

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        """Refuse what it cannot do: a ``Refusal`` names the value, the reason and the remedy. What
        a person did not ask for is not refused but left out (``defaults.settle``).

        Returns:
            The same; or without what was left out, of which ``Start.settled`` has lines.

        Raises:
            ValueError: it was asked for what cannot be done.
        """
        ...

    def find(self, settings: Settings) -> Sequence[Found]:
        """The MoE layers of the model that the settings ask for, in model order.

        Raises:
            ValueError: one cannot be replaced, or there must be some and are none.
        """
        ...

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> Seats:
        """Which ranks run the same layers, in cells of which sizes. Collective.

        Raises:
            ValueError: sizes do not divide, or are not the host's.
        """
        ...

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        """What it wants done before layers are replaced; ranks agree by now. Collective.

        Returns:
            What will be built, and what layers call in the place of their experts alone, as
            ``replacement.build`` takes it.
        """
        ...

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        """Let the framework know what has been replaced: which weights are experts', so that it
        reduces, clips and saves them over the right ranks. Collective."""
        ...

    def last_pass(self, layer: AttachedLayer) -> Callable[[], bool]:
        """Tells whether the pass that runs through a layer is the last before the optimizer steps:
        gradients of copies travel home in it. Always true is right, and slower."""
        ...

    def accumulation(self, layer: AttachedLayer) -> Accumulation:
        """Tells whether it still has what passes that were not the last have left of a layer's
        experts: gradients of copies that wait are dropped with them."""
        ...

    def optimizer_states(self) -> Callable[[], States]:
        """Finds the states of the optimizer as it is when asked: experts that move take theirs
        along. It may be asked first when there have been steps."""
        ...

    def dense_gradients(
        self, blueprint: Blueprint, layers: Sequence[AttachedLayer]
    ) -> DenseGradients:
        """What is reduced beside the layers, by which they are planned. Where the strategy
        ``slices_gradients``, layers are given what reduces them in slices, in ``routed.slices``.
        Collective."""
        ...

    def watch_steps(self, run: Run) -> None:
        """The run has begun: carry it, in ``training_run.Record``, and have ``run.after_step``
        called on every rank when weights have changed. Collective."""
        ...


def device_names(device: torch.device) -> list[str]:
    """Name of each rank's device, in the order of the ranks. Collective, over the world."""
    return gather_objects(device_name(device), None)


def of_stage(settings: Settings, number: int) -> Settings:
    """With a report and a trace of a pipeline stage's own."""
    report, trace, stage = settings.report, settings.trace, f"stage_{number}"
    if report.path is not None:
        report = replace(report, path=str(Path(report.path) / stage))
    if trace.path is not None:
        path = Path(trace.path)
        trace = replace(trace, path=str(path.parent / stage / path.name))
    return replace(settings, report=report, trace=trace)


def run_on(host: Host, model: nn.Module, settings: Settings, strategy: Strategy) -> Run | None:
    """Replace a model's MoE layers, and plan and record its steps from now on. Collective, over all
    ranks that the start is of; they compared what they were asked for.

    Args:
        host: of the model.
        model: changed in place.
        settings: the block.
        strategy: the chosen one.

    Returns:
        The run; None on a rank without MoE layers.

    Raises:
        ValueError: on all ranks: the model or the ranks do not suit the settings.
    """
    start = start_of(host.name)
    tell = start.settled.append
    start.settled.clear()  # of what was looked at before the ranks were known
    WATCH.patience = settings.waits
    WATCH.remedy = host.remedy if strategy.roles is None else ALIKE
    strategy = strategy.settled(host.devices, host.micro_batch)
    settings, strategy = host.refuse(settings, strategy)
    found = tuple(host.find(settings))
    seats = host.grid(settings, strategy, found)
    start.agree(seats.alike, first=int(seats.own.ranks.min()))
    with start.together():
        routers = routers_of(model, found, settings.gate)
        blueprint = replacement.on_grid(settings, strategy, found, seats.own, routers, tell=tell)
        blueprint, around = host.prepare(replace(blueprint, why_grid=seats.why))
        if blueprint.why_together:
            WATCH.remedy = ALIKE
    built = replacement.build(blueprint, host.device, around, seats.beside)
    layers = [layer for layer, _ in built]
    blueprint = frozen_experts.settled(blueprint, layers, tell)
    host.mark(blueprint, built)
    if not layers:
        with start.together():  # where the others are about to plan
            return None
    gradients = host.dense_gradients(blueprint, layers)
    hooks: tuple[RemovableHandle, ...] = ()
    with start.together():
        if blueprint.strategy.roles is None:  # else the schedule of a step has tasks for it
            measures = blueprint.strategy.rhythm().measures
            hooks = block_hooks.launch_with_blocks(model, layers, measures=measures)
        for layer in layers:
            if layer.routed.copies is not None:
                layer.routed.copies.is_last_pass = host.last_pass(layer)
                layer.routed.copies.accumulation = host.accumulation(layer)
        mover = ExpertMover(host.optimizer_states(), layers, blueprint.pools)
        pipelines = _pipelines(host, blueprint, layers, gradients)
        costs = Costs(
            layers,
            blueprint.pools,
            blueprint.hardware,
            blueprint.strategy.rhythm(),
            pipelines,
            host.num_micro_batches > 1,
        )
    planning = _planning(host, blueprint, layers, costs, mover)
    run = Run.start(
        blueprint,
        layers,
        planning,
        mover,
        host.carrier,
        device=host.device,
        block_hooks=hooks,
    )
    for line in start.settled:
        run.planning.tell(line)
    host.watch_steps(run)
    join_generate(model, run, host.device)
    return run


def _planning(
    host: Host,
    blueprint: Blueprint,
    layers: Sequence[AttachedLayer],
    costs: Costs,
    mover: ExpertMover,
) -> Planning:
    """Plans the steps. Collective where the settings say ``debug``."""
    layout = layers[0].routed.site.layout
    homes = [layer.routed.site.plan.home for layer in layers]
    job = Job.at_start(homes, layout.node_C, blueprint.pools, blueprint.stacks)
    return Planning(
        strategy=blueprint.strategy,
        layers=layers,
        job=replace(job, accumulates=host.num_micro_batches > 1),
        costs=costs,
        checks=Checks(blueprint.strategy, layers),
        mover=mover,
        debug=blueprint.settings.debug,
        rank=layout.rank,
        tell=teller(blueprint.settings, layout.place),
    )


def _pipelines(
    host: Host, blueprint: Blueprint, layers: Sequence[AttachedLayer], gradients: DenseGradients
) -> Pipelines | None:
    """What measures them, where the strategy plans by it.

    Raises:
        ValueError: a hardware file lacks what the strategy plans by.
    """
    if not blueprint.strategy.rhythm().measures:
        return None
    pools, hardware = blueprint.pools, blueprint.hardware
    pipelines = Pipelines(layers, pools, hardware, gradients, host.num_micro_batches, host.device)
    try:
        pipelines.check(host.dtype)
    except ValueError as error:
        named = blueprint.settings.hardware
        raise ValueError(f"{BLOCK}.hardware is {named!r}, but {error}") from error
    return pipelines
