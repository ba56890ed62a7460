# SPDX-License-Identifier: Apache-2.0
"""Adopted layers inside an unmodified Megatron run: groups, plans, steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.hosts.attachment import replacement, startup_check
from ds_moe_ext.hosts.attachment.host_layer import ExpertShape, Found
from ds_moe_ext.hosts.attachment.notices import HOMES, refuse, settle
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.startup_check import start_of
from ds_moe_ext.hosts.megatron import checkpoint, moe_layers, monitoring, start_remarks
from ds_moe_ext.hosts.megatron.active_settings import Chosen
from ds_moe_ext.hosts.megatron.expert_modules import HostedExperts, Ready
from ds_moe_ext.hosts.megatron.ranks import Grids, check_sizes, grids
from ds_moe_ext.hosts.megatron.refusals import STEPPING, SUMMED
from ds_moe_ext.hosts.megatron.slices import dense_gradients, slice_gradients, why_unsliced
from ds_moe_ext.hosts.megatron.state_places import UNMOVABLE, OptimizerStates
from ds_moe_ext.hosts.steps.expert_moves import States
from ds_moe_ext.hosts.steps.host import (
    Built,
    Passes,
    Schedules,
    Seats,
    device_names,
    of_stage,
    run_on,
)
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.hosts.steps.training_run import RECORD, Record, Run
from ds_moe_ext.moe.copy_memory import Accumulation, KeptMeanwhile
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.schedule.watch import ALIKE, WATCH
from ds_moe_ext.strategies.settings import BLOCK, Settings

OPTIMIZER = "get_megatron_optimizer"

Told = Sequence[ExpertShape]
"""What an expert of each layer of a rank is like."""

SCHEDULES = Schedules()
"""What Megatron's schedule does; of this process, as its parallel state is."""

FLAG_OF_CELLS = "--expert-model-parallel-size"


def start(asked: Chosen, chunks: Sequence[nn.Module], optimizer: Any) -> Run | None:
    """Adopt the MoE layers of a model that is ready to be trained. Collective, over the world.

    Args:
        asked: the settings.
        chunks: the model's parts on this rank, wrapped for data parallelism.
        optimizer: Megatron's, of these.

    Returns:
        The run; None on a pipeline stage without MoE layers.

    Raises:
        ValueError: the model or the ranks do not suit the settings.
    """
    asked.agree()
    with start_of(OPTIMIZER).together():
        check_wrapped(chunks)
        check_optimizer(optimizer)
    host = MegatronHost(chunks, optimizer, grids(whole(chunks)))
    return run_on(host, host.model, asked.settings, asked.strategy)


class MegatronHost:
    """A model of Megatron's with its optimizer; a ``steps.host.Host``.

    Args:
        chunks: see ``start``.
        optimizer: likewise.
        seats: of the ranks.
    """

    name = OPTIMIZER
    remedy = ALIKE

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, seats: Grids) -> None:
        self.model = whole(chunks)
        self.device = next(self.model.parameters()).device
        self.dtype = dtype_of(self.model)
        self.micro_batch = _micro_batch()
        self.num_micro_batches = _micro_batches()
        self.carrier = optimizer
        self._chunks, self._seats = chunks, seats

    def devices(self) -> list[str]:
        return device_names(self.device)

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        """Sizes are Megatron's, and so are some ways to reduce dense gradients, which differ
        between pipeline stages: there is no slice where a key asks for some, either."""
        seats, tell = self._seats, start_of(OPTIMIZER).settled.append
        check_sizes(settings, seats.own)
        if strategy.slices_gradients:
            unsliced = why_unsliced(self._chunks, strategy.keys.slices_gradients)
            strategy = strategy if unsliced is None else strategy.without_slices()
            tell(unsliced or "")
        if seats.own.num_cells > 1:
            strategy = settle(HOMES, strategy, SUMMED, config_of(self.model), tell)
        strategy = settle(HOMES, strategy, UNMOVABLE, self.carrier, tell)
        return of_stage(settings, seats.stage) if seats.beside else settings, strategy

    def find(self, settings: Settings) -> list[Found]:
        """Collective over the ranks that share experts, of which each has others."""
        with start_of(OPTIMIZER).together():
            found = list(moe_layers.find(self.model, replacement.wanted(settings)))
        if not found:
            return []
        group = self.sharing(self.model.get_submodule(found[0].name))
        told = gather_objects([each.expert for each in found], group)
        return moe_layers.trained_on_any(found, self.told_by_experts(told))

    def sharing(self, layer: Any) -> dist.ProcessGroup:
        """The ranks that share a layer's experts."""
        group: dist.ProcessGroup = layer.ep_group
        return group

    def told_by_experts(self, told: Sequence[Told]) -> Sequence[Told]:
        """Of what these ranks said, in their order, what those with experts said."""
        return told

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> Seats:
        return Seats(self._seats.own, self._seats.beside, startup_check.layers_of(found))

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        check_found(blueprint.found, blueprint.settings, self._chunks)
        for line in start_remarks.of(self.model, blueprint.found, config_of(self.model)):
            warnings.warn(f"{BLOCK}: {line}", stacklevel=2)
        moe_layers.check_made_ready(self.model, blueprint.found)
        moe_layers.started(self._chunks)
        return blueprint, None

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        """Weights are marked when a layer is built, before the model is wrapped."""
        for layer, _ in built:
            hosted = layer.hosted
            assert isinstance(hosted, HostedExperts)
            hosted.passes = Passes(SCHEDULES)
            (chunk,) = (c for c in self._chunks if any(m is hosted.experts for m in c.modules()))
            hosted.ready = _ready(chunk, hosted)
        if blueprint.moves_experts:
            OptimizerStates(self.carrier)  # which refuses those whose states cannot be moved

    def last_pass(self, layer: AttachedLayer) -> Callable[[], bool]:
        assert isinstance(layer.hosted, HostedExperts)
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
        resize = f"give {FLAG_OF_CELLS} {{}}".format
        run.planning.tell(replacement.told_homes(run.blueprint, FLAG_OF_CELLS, resize))
        checkpoint.watch(run, self.carrier)


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError where its steps do not come by here."""
    refuse(STEPPING, optimizer.config)


def check_wrapped(chunks: Sequence[nn.Module]) -> None:
    """Raises ValueError where the model is not in Megatron's DDP."""
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise ValueError(
                f"{BLOCK} is enabled, but the model is wrapped in {type(chunk).__name__}; expert "
                "weights must lie in Megatron's DistributedDataParallel: leave "
                "--use-megatron-fsdp and --use-torch-fsdp2 out"
            )


def check_found(found: Sequence[Found], settings: Settings, chunks: Sequence[Any]) -> None:
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
                    f"{BLOCK} is enabled, but {name} was trained when the model was wrapped, and "
                    "is not as its optimizer is made: ds_moe_ext does not work with optimizers "
                    "that are made for some of the weights at a time, as --optimizer muon; use "
                    "adam or sgd, and freeze weights before the model is wrapped"
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


def config_of(model: nn.Module) -> Any:
    """Its ``TransformerConfig``."""
    part: Any = model[0] if isinstance(model, nn.ModuleList) else model
    return part.config


def dtype_of(model: nn.Module) -> torch.dtype:
    """In which it computes."""
    dtype: torch.dtype = config_of(model).params_dtype
    return dtype


def _micro_batches() -> int:
    """Of a step, as Megatron-LM's arguments say; 1 where nobody said."""
    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return 1
    return int(calculator.get_num_microbatches())


def _micro_batch() -> int | None:
    """Samples of one, as Megatron-LM's arguments say; None where nobody said."""
    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return None
    return int(calculator.get_micro_batch_size())


def _ready(chunk: Any, hosted: HostedExperts) -> Ready:
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


def watch_steps(optimizer: Any, run: Run) -> None:
    """Let an optimizer carry a run, and tell it when weights have changed."""
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
        monitoring.show(run)
        return outcome

    optimizer.step = watched
