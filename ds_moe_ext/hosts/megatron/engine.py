# SPDX-License-Identifier: Apache-2.0
"""Adopted layers inside an unmodified Megatron run: groups, plans, steps.

In the order of a run: ``constructed`` makes each layer ready as Megatron builds it; ``start``
adopts the layers when ``get_megatron_optimizer`` returns, by a ``MegatronHost`` on the ``grids`` of
Megatron's groups; ``watch_steps`` plans behind every step of the optimizer and writes scalars.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.attachment import replacement, startup_check
from ds_moe_ext.hosts.attachment.host_layer import ExpertShape, Found
from ds_moe_ext.hosts.attachment.modules import hooks_of
from ds_moe_ext.hosts.attachment.notices import OWNERS, refuse, settle
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.startup_check import start_of
from ds_moe_ext.hosts.megatron import checkpoint
from ds_moe_ext.hosts.megatron.active_settings import Chosen, chosen, worlds
from ds_moe_ext.hosts.megatron.checkpoint import UNMOVABLE, OptimizerStates
from ds_moe_ext.hosts.megatron.guests import ByHost, GuestExperts, Owners
from ds_moe_ext.hosts.megatron.layers import (
    MegatronExperts,
    find_layers,
    forgets_clamp,
    leave_experts,
    trained_on_any,
)
from ds_moe_ext.hosts.megatron.refusals import STEPPING, SUMMED, WITH_ROLES, refuse_flags, way_of
from ds_moe_ext.hosts.megatron.slices import dense_gradients, slice_gradients, why_unsliced
from ds_moe_ext.hosts.steps.expert_moves import States
from ds_moe_ext.hosts.steps.host import (
    Built,
    ModelGrids,
    Passes,
    Schedules,
    device_names,
    of_stage,
    run_on,
)
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.hosts.steps.training_run import RECORD, Event, Record, Run
from ds_moe_ext.hosts.zebra.profile import wants_profile
from ds_moe_ext.hosts.zebra.stage_model import moved_by
from ds_moe_ext.moe.replica_memory import Accumulation, KeptMeanwhile
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.schedule.watch import ALIKE, WATCH
from ds_moe_ext.strategies.settings import BLOCK, Settings

OPTIMIZER = "get_megatron_optimizer"

Reported = Sequence[ExpertShape]
"""What an expert of each layer of a rank is like."""

SCHEDULES = Schedules()
"""What Megatron's schedule does; of this process, as its parallel state is."""

# Layers as Megatron builds them.

_WAITING: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""To be started."""
_MADE_READY: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def constructed(layer: Any, collection: Any) -> None:
    """Make ready a layer that Megatron has just built, before it is wrapped for data parallelism.

    Gradients of experts are summed over the ranks that hold the same ones. Up to version 0.18
    Megatron says so only where expert parallelism is above 1; where experts are split otherwise
    than the rest, as with --expert-tensor-parallel-size 1, replicas of an expert then drift apart
    (HOSTS_MEGATRON.md, section 1).

    Args:
        layer: a ``MoELayer``. Raises ValueError where it was asked for what ds_moe_ext cannot do.
        collection: the process groups that it was given; None for those of ``parallel_state``.
    """
    parted, asked = worlds(), chosen()
    assert asked is not None
    refuse_flags(asked.settings, asked.strategy, layer.config)
    if parted is not None:
        refuse(WITH_ROLES, layer.config)
        if parted.is_attention and not offloads(asked.strategy):
            leave_experts(layer)
    # Elsewhere Megatron is right, and its optimizer's states stay in the form of a run without us.
    if parted or place_in(collection, "expt_tp").size != place_in(collection, "tp").size:
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
    _MADE_READY.add(layer)
    _WAITING[layer] = layer.register_forward_pre_hook(_refuse_unstarted)


def offloads(strategy: Strategy) -> bool:
    """Whether attention ranks keep experts (Asym-EA), or may, once that has been measured."""
    return any(moved_by(strategy) or ()) or wants_profile(strategy)


def _refuse_unstarted(layer: nn.Module, given: tuple[Any, ...]) -> None:
    weights = layer.get_submodule("experts").parameters()
    if layer.training and torch.is_grad_enabled() and any(p.requires_grad for p in weights):
        raise ValueError(
            f"{BLOCK} is enabled, but Megatron runs this MoE layer itself: ds_moe_ext starts "
            "in megatron.core.optimizer.get_megatron_optimizer, which was not called; call it "
            "before the first step, or leave ds_moe_ext out"
        )


def _check_made_ready(model: nn.Module, found: Iterable[Found]) -> None:
    """Raises ValueError where layers were built when settings were not in use."""
    for layer in found:
        if model.get_submodule(layer.name) not in _MADE_READY:
            raise ValueError(
                f"{BLOCK} is enabled, but {layer.name} was built before ds_moe_ext.use was "
                "called, so Megatron's flags were not checked and its expert weights not "
                "marked; call use before the model is built"
            )


# Model and optimizer.


def start(asked: Chosen, chunks: Sequence[nn.Module], optimizer: Any) -> Run | None:
    """Adopt the MoE layers of a model that is ready to be trained. Collective, over the world.

    Returns:
        The run; None on a pipeline stage without MoE layers.

    Raises:
        ValueError: the model or the ranks do not suit the settings.
    """
    asked.agree()
    with start_of(OPTIMIZER).together():
        check_wrapped(chunks)
        refuse(STEPPING, optimizer.config)
    host = MegatronHost(chunks, optimizer, grids(whole(chunks)))
    return run_on(host, host.model, asked.settings, asked.strategy)


def check_wrapped(chunks: Sequence[nn.Module]) -> None:
    """Raises ValueError where the model is not in Megatron's DDP."""
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise ValueError(
                f"{BLOCK} is enabled, but the model is wrapped in {type(chunk).__name__}; "
                "expert weights must be in Megatron's DistributedDataParallel: leave "
                "--use-megatron-fsdp and --use-torch-fsdp2 out"
            )


def whole(chunks: Sequence[nn.Module]) -> nn.Module:
    """The model without what is wrapped around it; of several parts, a list."""
    parts = []
    for chunk in chunks:
        part = chunk
        while isinstance(inner := part._modules.get("module"), nn.Module):
            part = inner
        parts.append(part)
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


class MegatronHost:
    """A model of Megatron's with its optimizer; a ``steps.host.Host``. Arguments as of
    ``start``."""

    name = OPTIMIZER
    remedy = ALIKE
    _by_host = False  # Megatron runs its MoE layers itself

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, own_grids: Grids) -> None:
        self.model = whole(chunks)
        part: Any = self.model[0] if isinstance(self.model, nn.ModuleList) else self.model
        self._config = part.config  # a ``TransformerConfig``
        self.device = next(self.model.parameters()).device
        self.dtype: torch.dtype = self._config.params_dtype
        # As Megatron-LM's arguments say; where nobody has, one micro-batch of unknown size a step.
        is_stated = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None
        self.micro_batch = int(calculator.get_micro_batch_size()) if is_stated else None
        self.num_micro_batches = int(calculator.get_num_microbatches()) if is_stated else 1
        self.carrier = optimizer
        self._chunks, self._own_grids = chunks, own_grids

    def devices(self) -> list[str]:
        return device_names(self.device)

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        """Sizes are Megatron's, and so are some ways to reduce dense gradients, which differ
        between pipeline stages: there is no slice where a key asks for some, either."""
        own_grids, log = self._own_grids, start_of(OPTIMIZER).settled.append
        _check_sizes(settings, own_grids.own)
        self._by_host, why = way_of(settings, strategy, self._config)
        runs = "Megatron runs its MoE layers itself" if self._by_host else "the MoE layers run here"
        log(f"{runs}: {why}")
        if strategy.slices_gradients:
            unsliced = why_unsliced(self._chunks, strategy.keys.slices_gradients)
            strategy = strategy if unsliced is None else strategy.without_slices()
            log(unsliced or "")
        if own_grids.own.num_ep_ranks > 1:
            strategy = settle(OWNERS, strategy, SUMMED, self._config, log)
        strategy = settle(OWNERS, strategy, UNMOVABLE, self.carrier, log)
        if self._by_host:
            strategy = ByHost.of(strategy)
        return of_stage(settings, own_grids.stage) if own_grids.beside else settings, strategy

    def find(self, settings: Settings) -> list[Found]:
        """Collective over the ranks that share experts, of which each has others."""
        with start_of(OPTIMIZER).together():
            guests = GuestExperts if self._by_host else None
            found = list(find_layers(self.model, replacement.wanted(settings), guests))
        if not found:
            return []
        group = self.sharing(self.model.get_submodule(found[0].name))
        gathered = gather_objects([each.expert for each in found], group)
        return trained_on_any(found, self.of_expert_ranks(gathered))

    def sharing(self, layer: Any) -> dist.ProcessGroup:
        """The ranks that share a layer's experts."""
        group: dist.ProcessGroup = layer.ep_group
        return group

    def of_expert_ranks(self, reported: Sequence[Reported]) -> Sequence[Reported]:
        """Of what these ranks stated, in their order, what those with experts stated."""
        return reported

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> ModelGrids:
        return ModelGrids(
            self._own_grids.own, self._own_grids.beside, startup_check.layers_of(found)
        )

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        """Layers of this model may be trained from here: also those that are left to Megatron."""
        _check_found(blueprint.found, blueprint.settings, self._chunks)
        own = () if self._by_host else blueprint.found  # layers that we run
        for line in _notices(self.model, own, self._config):
            warnings.warn(f"{BLOCK}: {line}", stacklevel=2)
        _check_made_ready(self.model, blueprint.found)
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if module in _WAITING:
                _WAITING.pop(module).remove()
        return blueprint, None

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        """Weights are marked when a layer is built, before the model is wrapped."""
        guests: dict[Any, list[GuestExperts]] = {}
        for layer, _ in built:
            hosted = layer.hosted
            assert isinstance(hosted, MegatronExperts)
            hosted.passes = Passes(SCHEDULES, _passes_of(layer.name, self._config))
            (chunk,) = (c for c in self._chunks if any(m is hosted.experts for m in c.modules()))
            hosted.ready = _ready(chunk, hosted)
            if isinstance(hosted, GuestExperts):
                guests.setdefault(chunk, []).append(hosted)
        for chunk, own in guests.items():
            Owners(chunk, own)
        if blueprint.moves_experts:
            OptimizerStates(self.carrier)  # which refuses those whose states cannot be moved

    def last_pass(self, layer: AttachedLayer) -> Callable[[], bool]:
        assert isinstance(layer.hosted, MegatronExperts)
        return layer.hosted.passes.is_last

    def accumulation(self, layer: AttachedLayer) -> Accumulation:
        return KeptMeanwhile(lambda: SCHEDULES.steps)  # behind one that failed it begins anew

    def optimizer_states(self) -> Callable[[], States]:
        optimizer = weakref.ref(self.carrier)
        return lambda: OptimizerStates(optimizer())

    def dense_gradients(
        self, blueprint: Blueprint, layers: Sequence[AttachedLayer]
    ) -> DenseGradients:
        is_sliced = blueprint.strategy.slices_gradients
        if is_sliced:
            slice_gradients(self._chunks, layers)
        return dense_gradients(self.model, self._chunks, layers, is_sliced=is_sliced)

    def watch_steps(self, run: Run) -> None:
        watch_steps(self.carrier, run)
        flag = "--expert-model-parallel-size"
        reported = replacement.owners_line(run.blueprint, flag, f"give {flag} {{}}".format)
        run.planning.log(reported)
        checkpoint.watch(run, self.carrier)


def _passes_of(layer: str, config: Any) -> int:
    """Passes of a micro-batch through a layer of this name: several where one layer predicts all of
    several tokens more."""
    is_repeated = getattr(config, "mtp_use_repeated_layer", False) and "mtp" in layer.split(".")
    return int(config.mtp_num_layers or 1) if is_repeated else 1


def _check_found(found: Sequence[Found], settings: Settings, chunks: Sequence[Any]) -> None:
    """Collective, over the world: a pipeline stage may be without MoE layers, the model not."""
    if not any(gather_objects(len(found), None)):
        pattern = settings.moe_layer_pattern
        raise ValueError(
            f"{BLOCK} is enabled, but no rank has an MoE layer"
            + (f" whose name matches {BLOCK}.moe_layer_pattern {pattern!r}" if pattern else "")
            + "; give --num-experts, or leave ds_moe_ext out (in a script, ds_moe_ext.forget() "
            "before the optimizers of other models are made)"
        )
    bucketed = {parameter for chunk in chunks for parameter in chunk.param_to_bucket_group}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter in bucketed and not parameter.requires_grad:
                raise ValueError(
                    f"{BLOCK} is enabled, but {name} was trained when the model was wrapped, "
                    "but is not when its optimizer is made: ds_moe_ext does not support "
                    "optimizers made for some weights at a time, such as --optimizer muon; "
                    "use adam or sgd, and freeze weights before the model is wrapped"
                )


NOT_OF_USERS = ("megatron", "transformer_engine", "ds_moe_ext")
"""Packages whose hooks do what our program does as well."""


def _notices(model: nn.Module, found: Sequence[Found], config: Any) -> Iterator[str]:
    """What goes on otherwise than flags or hooks may let one think, a line for each."""
    if found and forgets_clamp(config):
        yield (
            f"activation_func_clamp_value is {config.activation_func_clamp_value}, but Megatron's "
            "fused SwiGLU has no clamp, and so neither have experts here; use "
            "--no-bias-swiglu-fusion to have it, or leave it out"
        )
    hooked = []
    for experts in (f"{layer.name}.experts" for layer in found):
        for name, module in model.get_submodule(experts).named_modules(prefix=experts):
            packages = {
                (getattr(h, "__module__", None) or "").split(".")[0] for h in hooks_of(module)
            }
            if name != experts and packages.difference(NOT_OF_USERS):
                hooked.append(name)
    if hooked:
        others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        yield (
            f"hooks of {hooked[0]}{others} are never called: the strategy's program uses the "
            "weights of experts, not their modules; hook the MoE layer or its experts as a "
            "whole, or leave the layer out with ds_moe_ext.moe_layer_pattern"
        )


def _ready(chunk: Any, hosted: MegatronExperts) -> Callable[[], None]:
    """What Megatron's own hooks do before a module's forward, which our program does not call."""

    def ready() -> None:
        if not chunk.remove_forward_pre_hook_handles or in_backward():
            return
        known = chunk.param_to_bucket_group
        parameters = (p for slot in hosted.slots() for p in slot.parameters if p in known)
        is_dispatched = (
            chunk.ddp_config.align_param_gather or chunk.overlap_param_gather_with_optimizer_step
        )
        for group in dict.fromkeys(known[parameter] for parameter in parameters):
            group.finish_param_sync(skip_next_bucket_dispatch=is_dispatched)

    return ready


# Megatron's ranks as grids of EP ranks, one for each pipeline stage. Expert model parallelism is
# the axis of EP ranks, expert tensor parallelism the ranks of an ETP group, expert data parallelism
# the replicas of the grid. Other dims (tensor, context, data) say which ranks have which tokens;
# rows may come from anywhere.


class Grids(NamedTuple):
    """Of all ranks."""

    own: Grid  # this rank's
    beside: tuple[Grid, ...]  # of all stages, in their order; none where there is one
    stage: int  # number of this rank's


class Place(NamedTuple):
    """This rank in one of its groups."""

    rank: int
    size: int


_STATED = {
    "pp": "pipeline_model",
    "tp": "tensor_model",
    "ep": "expert_model",
    "expt_tp": "expert_tensor",
    "expt_dp": "expert_data",
}
"""Groups by their names in a ``ProcessGroupCollection``, as ``parallel_state`` calls them."""


def place_in(collection: Any, name: str) -> Place:
    """Where this rank is in a group: by the ``ProcessGroupCollection`` that was given to Megatron,
    if it has the group; else by ``parallel_state``. Raises ValueError where neither knows it."""
    group = getattr(collection, name, None)
    if group is not None:
        return Place(group.rank(), group.size())
    if parallel_state.is_initialized():
        sizes = (f"get_{_STATED[name]}_parallel_{what}" for what in ("rank", "world_size"))
        return Place(*(getattr(parallel_state, size)() for size in sizes))
    if name == "pp":  # who has no pipeline need not say so
        return Place(0, 1)
    raise ValueError(
        f"{BLOCK} is enabled, but the model's ProcessGroupCollection has no group {name!r}, and "
        "megatron.core.parallel_state is not initialized; give the collection that group, or call "
        "initialize_model_parallel"
    )


def grids(model: nn.Module) -> Grids:
    """Of the groups that a model was built with. Collective, over the world."""
    reported = (getattr(module, "pg_collection", None) for module in model.modules())
    collection = next((groups for groups in reported if groups is not None), None)
    pp, edp, ep, esp = (place_in(collection, name) for name in ("pp", "expt_dp", "ep", "expt_tp"))
    own = (pp.rank, edp.rank, ep.rank, esp.rank, dist.get_rank())
    ranks = sorted(gather_objects(own, None))  # by stage, copy of the grid, EP rank, and rank there
    stages = [tuple(rank for *_, rank in of) for _, of in groupby(ranks, key=lambda each: each[0])]
    made = tuple(Grid(len(stage), ep.size, esp.size, stage) for stage in stages)
    return Grids(made[pp.rank], made, pp.rank) if len(made) > 1 else Grids(made[0], (), 0)


def _check_sizes(settings: Settings, grid: Grid) -> None:
    """Raises ValueError where the block's sizes are not Megatron's."""
    for key, size, flag in (
        ("expert_parallel_size", grid.num_ep_ranks, "--expert-model-parallel-size"),
        ("expert_sharding_size", grid.etp_size, "--expert-tensor-parallel-size"),
    ):
        asked = getattr(settings, key)
        if asked not in (None, size):
            raise ValueError(
                f"{BLOCK}.{key} is {asked}, but Megatron was given {flag} {size}; make them equal, "
                f"or leave {key} out"
            )


# Steps.


def watch_steps(optimizer: Any, run: Run) -> None:
    """Let an optimizer carry a run, and notify it when weights have changed."""
    setattr(optimizer, RECORD, Record(run))
    step: Callable[..., Any] = optimizer.step
    num_steps = 0

    @wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        with WATCH.host_pass("the optimizer's step"):
            outcome = step(*args, **kwargs)
        planning = run.planning
        accumulates = SCHEDULES.latest > 1
        if planning.job.accumulates != accumulates:  # else what was planned beside the step holds
            planning.job = replace(planning.job, accumulates=accumulates)
        if (ranks := run.recorder.ranks) is not None:
            for loss in SCHEDULES.losses:
                ranks.own.saw_loss(loss)
        SCHEDULES.losses = []
        run.after_step(num_steps)
        num_steps += 1
        _show_scalars(run)
        return outcome

    optimizer.step = watched


LOOP = "megatron.training.global_vars"
"""Has the TensorBoard and W&B writers of Megatron-LM's training loop, of which Megatron-core has
none. It is not imported here: where nobody has loaded it, there is nobody to write."""
LOSS = "lm loss"  # as Megatron-LM's loss functions call it


def losses_of(stored: Any) -> list[Tensor]:
    """Of each micro-batch, 0-dim, from what Megatron's schedule returns: that of loss functions, on
    the last stage, each a mean, or a sum and the tokens it is of. Nothing is read, so the device is
    not waited for."""
    losses = []
    for reported in stored or ():
        known = reported if isinstance(reported, dict) else {}
        loss = known.get(LOSS, *known.values()) if len(known) == 1 else known.get(LOSS)
        if isinstance(loss, Tensor) and loss.numel() in (1, 2):
            total, *tokens = loss.detach().reshape(-1)
            losses.append(total / tokens[0] if tokens else total)
    return losses


def _show_scalars(run: Run) -> None:
    """Write behind an optimizer step where the loop is about to: on its last rank, in every
    iteration of its ``--tensorboard-log-interval``."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None or not run.monitor.is_on:
        return
    board, wandb = loop.get_tensorboard_writer(), loop.get_wandb_writer()
    if board is None and wandb is None:
        return
    given = loop.get_args()
    latest = getattr(given, "curr_iteration", None)
    if latest is None:  # a loop of the user's own, which did not say
        return
    iteration = latest + 1

    def write(events: Sequence[Event]) -> None:
        for name, value, at in events if board is not None else ():
            board.add_scalar(name, value, at)
        if wandb is not None:
            wandb.log({name: value for name, value, _ in events}, iteration)

    if iteration % given.tensorboard_log_interval == 0:
        run.monitor.show(run.recorder, write, iteration)
