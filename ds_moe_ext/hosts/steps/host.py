# SPDX-License-Identifier: Apache-2.0
"""What is the same for every host: the start of a run, its passes, and what its optimizer may be.

A training framework is a ``Host``: it says what it cannot do (``refuse``), which layers it has
(``find``) and which ranks run the same ones (``grid``). ``run_on`` asks it in that order, while
ranks compare what they found: it draws the ``Blueprint``, replaces the layers
(``attachment/replacement.py``), and starts a ``Run`` (``training_run.py``) whose steps are planned
(``planning.py``) by measured costs (``costs.py``). From then on the host calls ``run.after_step``.

``Schedules`` and ``Passes`` report which pass through a layer is the last before the optimizer
steps. ``joined`` lets ranks call the model unequally often: those that are done serve the experts
of the others. ``settle_alike`` looks at the groups of an optimizer, in which experts that may
change places must be alike.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import GRID, Grid, group_among
from ds_moe_ext.hosts.attachment import block_hooks, replacement
from ds_moe_ext.hosts.attachment.block_hooks import Launch, launches
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found
from ds_moe_ext.hosts.attachment.notices import OWNERS, Refusal
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.router_gates import routers_of
from ds_moe_ext.hosts.attachment.startup_check import Description, device_name, start_of
from ds_moe_ext.hosts.steps.costs import Costs
from ds_moe_ext.hosts.steps.expert_moves import ExpertMover, States
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients, Pipelines
from ds_moe_ext.hosts.steps.planning import Checks, Planning
from ds_moe_ext.hosts.steps.training_run import Run, line_logger, run_of
from ds_moe_ext.moe.joined_passes import JoinedPasses, Serve
from ds_moe_ext.moe.replica_memory import Accumulation
from ds_moe_ext.planning.strategy import Job, Strategy
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.schedule.task import INTER
from ds_moe_ext.schedule.watch import ALIKE, WATCH, Waiting
from ds_moe_ext.strategies.settings import BLOCK, Settings

# The replaced layers of this rank, in model order; none where a pipeline stage has none.
Built = Sequence[tuple[AttachedLayer, Adopted]]


class ModelGrids(NamedTuple):
    """Which ranks run the same layers."""

    own: Grid  # this rank's grid
    # those of all ranks, where they do not all run the same layers; else none
    beside: tuple[Grid, ...]
    alike: Description  # what the ranks of a grid must have in common, as texts that they compare
    why: str = ""  # what was chosen where the settings leave sizes open, for a person; else empty


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
        micro_batch: samples that each rank calls the model with; None where nobody stated.
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
        a person did not ask for is not refused but left out (``notices.settle``), of which
        ``Start.settled`` has lines. Raises ValueError."""
        ...

    def find(self, settings: Settings) -> Sequence[Found]:
        """The MoE layers of the model that the settings ask for, in model order. Raises ValueError
        where one cannot be replaced, or there must be some and are none."""
        ...

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> ModelGrids:
        """Which ranks run the same layers, in EP ranks of which sizes. Collective. Raises
        ValueError where sizes do not divide, or are not the host's."""
        ...

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        """What it wants done before layers are replaced; ranks agree by now. Collective. Returns
        what will be built, and what layers call in the place of their experts alone."""
        ...

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        """Let the framework know what has been replaced: which weights are experts', so that it
        reduces, clips and saves them over the right ranks. Collective."""
        ...

    def last_pass(self, layer: AttachedLayer) -> Callable[[], bool]:
        """Shows whether the pass that runs through a layer is the last before the optimizer steps:
        gradients of replicas travel to the owner in it. Always true is right, and slower."""
        ...

    def accumulation(self, layer: AttachedLayer) -> Accumulation:
        """Shows whether it still has what passes that were not the last have left of a layer's
        experts: gradients of replicas that wait are dropped with them."""
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


def run_on(host: Host, model: nn.Module, settings: Settings, strategy: Strategy) -> Run | None:
    """Replace a model's MoE layers in place, and plan and record its steps from now on; None on a
    rank without MoE layers. Collective, over all ranks that the start is of; they compared what
    they were asked for. Raises ValueError on all ranks where the model or the ranks do not suit the
    settings."""
    start = start_of(host.name)
    log = start.settled.append
    start.settled.clear()  # of what was looked at before the ranks were known
    WATCH.patience = settings.waits
    WATCH.remedy = host.remedy if strategy.roles is None else ALIKE
    strategy = strategy.settled(host.devices, host.micro_batch)
    settings, strategy = host.refuse(settings, strategy)
    found = tuple(host.find(settings))
    grids = host.grid(settings, strategy, found)
    start.agree(grids.alike, first=int(grids.own.ranks.min()))
    with start.together():
        routers = routers_of(model, found, settings.gate)
        blueprint = replacement.on_grid(settings, strategy, found, grids.own, routers, log=log)
        blueprint, around = host.prepare(replace(blueprint, why_grid=grids.why))
        if blueprint.why_together:
            WATCH.remedy = ALIKE
    built = replacement.build(blueprint, host.device, around, grids.beside)
    layers = [layer for layer, _ in built]
    blueprint = block_hooks.settled(blueprint, layers, log)
    host.mark(blueprint, built)
    if not layers:
        with start.together():  # where the others are about to plan
            return None
    gradients = host.dense_gradients(blueprint, layers)
    hooks: tuple[RemovableHandle, ...] = ()
    with start.together():
        if blueprint.strategy.roles is None:  # else the schedule of a step has tasks for it
            measures = blueprint.strategy.intervals().measures
            hooks = block_hooks.launch_with_blocks(model, layers, measures=measures)
        for layer in layers:
            if layer.routed.replicas is not None:
                layer.routed.replicas.is_last_pass = host.last_pass(layer)
                layer.routed.replicas.accumulation = host.accumulation(layer)
        mover = ExpertMover(host.optimizer_states(), layers, blueprint.cost_groups)
        pipelines = _pipelines(host, blueprint, layers, gradients)
        intervals, accumulates = blueprint.strategy.intervals(), host.num_micro_batches > 1
        costs = Costs(
            layers, blueprint.cost_groups, blueprint.hardware, intervals, pipelines, accumulates
        )
    layout = layers[0].routed.layer_context.layout
    owners = [layer.routed.layer_context.plan.owner for layer in layers]
    job = Job.at_start(owners, layout.node_C, blueprint.cost_groups, blueprint.stacks)
    planning = Planning(
        strategy=blueprint.strategy,
        layers=layers,
        job=replace(job, accumulates=accumulates),
        costs=costs,
        checks=Checks(blueprint.strategy, layers),
        mover=mover,
        debug=blueprint.settings.debug,
        rank=layout.rank,
        log=line_logger(blueprint.settings, layout.place),
    )
    run = Run.start(
        blueprint, layers, planning, mover, host.carrier, device=host.device, block_hooks=hooks
    )
    for line in start.settled:
        planning.log(line)
    host.watch_steps(run)
    join_generate(model, run, host.device)
    return run


def _pipelines(
    host: Host, blueprint: Blueprint, layers: Sequence[AttachedLayer], gradients: DenseGradients
) -> Pipelines | None:
    """What measures them, where the strategy plans by it."""
    if not blueprint.strategy.intervals().measures:
        return None
    cost_groups, hardware = blueprint.cost_groups, blueprint.hardware
    pipelines = Pipelines(
        layers, cost_groups, hardware, gradients, host.num_micro_batches, host.device
    )
    try:
        pipelines.check(host.dtype)
    except ValueError as error:
        named = blueprint.settings.hardware
        raise ValueError(f"{BLOCK}.hardware is {named!r}, but {error}") from error
    return pipelines


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


@dataclass(eq=False)
class Schedules:
    """What the host's schedule is about to do; one for all layers."""

    num_micro_batches: int | None = None  # of the present step; None where no schedule runs
    latest: int = 1  # number of them in the latest step; it changes while batches grow
    steps: int = 0  # schedules with a backward so far
    # of the micro-batches of the present step, where this rank has any
    losses: list[Tensor] = field(default_factory=list)

    def begin(self, num_micro_batches: int, *, forward_only: bool) -> None:
        """A schedule begins."""
        if not forward_only:
            self.num_micro_batches = self.latest = num_micro_batches
            self.steps += 1

    def end(self) -> None:
        """It has ended: of passes outside of it, nobody knows which is the last."""
        self.num_micro_batches = None


@dataclass(eq=False)
class Passes:
    """Counts the passes of one layer."""

    schedules: Schedules  # of the model
    per_batch: int = 1  # passes of a micro-batch through the layer
    _step: int = 0
    _forward: int = 0
    _backward: int = 0

    def begins(self, *, is_training: bool) -> None:
        """Call it as a forward pass begins."""
        self._turn()
        if is_training and not in_backward():
            self._forward += 1

    def watch(self, output: Tensor) -> None:
        """Call it with what a pass gives: its gradient begins the backward pass."""
        if output.requires_grad:
            output.register_hook(self._returns)

    def is_last(self) -> bool:
        """Whether the pass that runs is the last of its direction; yes, where nobody knows."""
        self._turn()
        number = self._backward if in_backward() else self._forward
        batches = self.schedules.num_micro_batches
        return batches is None or number == batches * self.per_batch

    def _returns(self, grad: Tensor) -> None:
        self._turn()
        self._backward += 1

    def _turn(self) -> None:
        if self._step != self.schedules.steps:
            self._step, self._forward, self._backward = self.schedules.steps, 0, 0


@contextmanager
def joined(engine: Any) -> Iterator[None]:
    """Let every rank call the model as often as it wants, inside the block. Collective.

    For evaluation and generation: there are no gradients inside. A rank that leaves the block
    serves the others' experts until all have left it. Where ``ds_moe_ext`` is not enabled it does
    nothing but switch gradients off::

        with ds_moe_ext.joined(engine):
            if rank == 0:
                engine.module.generate(...)

    Args:
        engine: of DeepSpeed.

    Raises:
        ValueError: under strategy zebra, where ranks that have experts only cannot run the model,
            and where ZeRO shards weights.
    """
    run = run_of(engine)
    with torch.no_grad(), nullcontext() if run is None else _joined(run, engine.device):
        yield


@contextmanager
def _joined(run: Run, device: torch.device) -> Iterator[None]:
    if run.blueprint.strategy.roles is not None:
        raise ValueError(
            f"{BLOCK}.strategy is {run.blueprint.settings.strategy!r}, where ranks cannot run "
            "the model alone or generate; let all ranks evaluate together with labels, or "
            "save the model and generate from the saved one"
        )
    if run.blueprint.why_together:
        raise ValueError(
            f"ds_moe_ext.joined was called, but {run.blueprint.why_together}; let all ranks "
            "call the model the same number of times, generate with synced_gpus=True, or use "
            "stage 0, 1 or 2"
        )
    if run.blueprint.grid.size == 1:
        yield
        return
    joined_passes = _joined_passes_of(run.layers, device)
    joined_passes.depth += 1
    try:
        yield
        if joined_passes.depth == 1:
            joined_passes.serve_until_all_are_done()
    except BaseException as error:
        WATCH.failed(error, "a block of ds_moe_ext.joined")
        for layer in run.layers:  # ranks may have left it in different layers
            layer.routed.joined_passes = None
        raise
    finally:
        joined_passes.depth -= 1


def _joined_passes_of(layers: Sequence[AttachedLayer], device: torch.device) -> JoinedPasses:
    """Made when it is first needed: its communicator costs threads. Collective then."""
    first = layers[0].routed
    if first.joined_passes is None:
        layout = first.layer_context.layout
        WATCH.at(lambda: "the beginning of a block of ds_moe_ext.joined, or of generate")
        with Waiting(layout.group(GRID, INTER)):
            group = group_among(layout.lists_along(GRID), backend="gloo")
        servers = [_server(*pair, device) for pair in zip(layers, launches(layers))]
        joined_passes = JoinedPasses(group, servers)
        for layer in layers:
            layer.routed.joined_passes = joined_passes
    assert first.joined_passes is not None
    return first.joined_passes


def _server(layer: AttachedLayer, launch: Launch, device: torch.device) -> Serve:
    """Runs a layer without rows."""

    def serve(joined_passes: JoinedPasses) -> None:
        if layer.routed.replicas is not None:
            launch.begin(None)
        signature = joined_passes.agree_on_rows(None)
        with signature.autocast(device):
            layer.routed(*signature.nothing(device), layer.hosted.weights())

    return serve


def join_generate(model: nn.Module, run: Run, device: torch.device) -> None:
    """Let ``generate`` of a Hugging Face model be a joined block; not where the caller says by
    ``synced_gpus`` how ranks keep in step, nor where they must: there it is on."""
    loaded = sys.modules.get("transformers.generation.utils")
    if loaded is None:
        return
    for module in model.modules():
        if isinstance(module, loaded.GenerationMixin):
            module.generate = _generating(module.generate, run, device)


def _generating(original: Any, run: Run, device: torch.device) -> Any:
    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if run.blueprint.why_together:
            kwargs.setdefault("synced_gpus", True)
        if kwargs.get("synced_gpus") is not None:
            return original(*args, **kwargs)
        with torch.no_grad(), _joined(run, device):
            return original(*args, **kwargs)

    return generate


_REMEDY = "put them into one group"

# Of what ``_unlike`` says, where experts move.
UNLIKE = Refusal(
    "several parameter groups for corresponding expert weights, such as one learning rate per "
    "layer",
    str,
    "an expert that moves would get the settings of its new slot",
    _REMEDY,
)


def settle_alike(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Look at an optimizer before its first step: by its groups experts may have to keep their
    owners. Collective, over the ranks of the run. Raises as ``check_alike`` does."""
    if run.blueprint.moves_experts:
        own = _unlike(run, optimizer)
        everyone = run.layers[0].routed.layer_context.layout.everyone
        run.settle(OWNERS, (UNLIKE,), next(filter(None, gather_objects(own, everyone)), ""))
    check_alike(run, optimizer)


def check_alike(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Look at an optimizer on one rank. Where experts move, a slot of one layer comes to hold an
    expert of another; and where a layer's owners are uneven, a rank may have no expert of it,
    but must have all groups: raises ValueError where such experts are optimized differently."""
    blueprint = run.blueprint
    if not blueprint.strategy.has_uneven_owners:
        return
    stay = all(owner.is_everywhere for owner in blueprint.owners()) and not blueprint.moves_experts
    if not stay and (unlike := _unlike(run, optimizer)):
        raise ValueError(
            f"under strategy {blueprint.settings.placing} experts may move between layers, and a "
            f"rank may have none of a layer, but {unlike}; {_REMEDY}, or use ep in its place"
        )


def _unlike(run: Run, optimizer: torch.optim.Optimizer) -> str:
    """Which weights of this rank that are alike are optimized differently, for a person; else
    empty."""
    group_of = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    for cost_group in run.blueprint.cost_groups:
        own: list[AttachedLayer] = [run.layers[layer] for layer in cost_group.layers]
        names = own[0].hosted.weight_names
        for number, name in enumerate(names):
            held = (p for layer in own for p in layer.parameters[number :: len(names)])
            if len({group_of.get(parameter) for parameter in held}) > 1:
                return (
                    f"the weights {name!r} of {', '.join(layer.name for layer in own)} are in "
                    "several parameter groups of the optimizer"
                )
    return ""
