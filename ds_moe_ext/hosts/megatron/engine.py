"""Adopted layers inside an unmodified Megatron run: groups, plans, steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from ds_moe_ext.attach import agreement, block_hooks, replacement
from ds_moe_ext.attach.host_layer import Found
from ds_moe_ext.attach.meeting import start_of
from ds_moe_ext.attach.refusal import refuse
from ds_moe_ext.attach.replacement import AttachedLayer, Blueprint
from ds_moe_ext.comm import gather_texts
from ds_moe_ext.hosts.megatron import checkpoint, moe_layers
from ds_moe_ext.hosts.megatron.active_settings import Chosen
from ds_moe_ext.hosts.megatron.expert_modules import HostedExperts, Ready
from ds_moe_ext.hosts.megatron.mover import mover_of
from ds_moe_ext.hosts.megatron.passes import Passes, Schedules
from ds_moe_ext.hosts.megatron.ranks import Grids, check_sizes, grids
from ds_moe_ext.hosts.megatron.refusals import STEPPING
from ds_moe_ext.hosts.megatron.slices import dense_gradients, slice_gradients, why_unsliced
from ds_moe_ext.layout import Grid
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.steps.expert_moves import ExpertMover
from ds_moe_ext.steps.pipeline_costs import DenseGradients
from ds_moe_ext.steps.step_setup import Steps, planning_of
from ds_moe_ext.steps.training_run import RECORD, Record, Run
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategy import Strategy

OPTIMIZER = "get_megatron_optimizer"

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
    start = start_of(OPTIMIZER)
    asked.agree()
    with start.together():
        check_wrapped(chunks)
        check_optimizer(optimizer)
    seats = grids(whole(chunks))
    strategy = asked.strategy.settled(lambda: _devices(chunks), _micro_batch())
    with start.together():
        settings = _of_stage(asked.settings, seats)
        check_sizes(settings, seats.own)
        strategy = _split(strategy, seats.own)
        unsliced = why_unsliced(chunks) if strategy.slices_gradients else ""
        strategy = strategy if unsliced is None else strategy.without_slices()
        model = whole(chunks)
        found = list(moe_layers.find(model, replacement.wanted(settings)))
    start.agree(agreement.layers_of(found), first=int(seats.own.ranks.min()))
    with start.together():
        check_found(found, settings, chunks)
        moe_layers.started(chunks)
        blueprint = replacement.on_grid(settings, strategy, found, seats.own)
    strategy = blueprint.strategy
    device = next(model.parameters()).device
    layers = [layer for layer, _ in replacement.build(blueprint, device, beside=seats.beside)]
    with start.together():
        if layers:
            for layer in layers:
                connect(layer, chunks)
            block_hooks.launch_with_blocks(model, layers, measures=strategy.rhythm().measures)
            if strategy.slices_gradients:
                slice_gradients(chunks, layers)
            is_sliced = strategy.slices_gradients
            gradients = dense_gradients(model, chunks, layers, is_sliced=is_sliced)
            mover = mover_of(optimizer, layers, blueprint)
    if not layers:
        with start.together():  # where the others plan
            return None
    run = begin(blueprint, layers, gradients, mover, model=model, optimizer=optimizer)
    homes = replacement.told_homes(blueprint, FLAG_OF_CELLS, f"give {FLAG_OF_CELLS} {{}}".format)
    for line in (unsliced or "", _told(blueprint, asked.strategy), homes):
        run.planning.tell(line)
    checkpoint.watch(run, mover, optimizer)
    return run


def begin(
    blueprint: Blueprint,
    layers: list[AttachedLayer],
    gradients: DenseGradients,
    mover: ExpertMover,
    *,
    model: nn.Module,
    optimizer: Any,
) -> Run:
    """Plan and record the steps of a model's optimizer from now on. Collective."""
    device = next(model.parameters()).device
    steps = Steps(_micro_batches(), dtype_of(model), device)
    planning = planning_of(blueprint, layers, gradients, mover, steps)
    run = Run.start(blueprint, layers, planning, optimizer)
    setattr(optimizer, RECORD, Record(run))
    _watch_steps(optimizer, run)
    return run


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
    if not any(map(int, gather_texts(str(len(found)), None))):
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


def _of_stage(settings: Settings, seats: Grids) -> Settings:
    """Every pipeline stage leaves a report and a trace of its own."""
    report, trace, stage = settings.report, settings.trace, f"stage_{seats.stage}"
    if not seats.beside:
        return settings
    if report.path is not None:
        report = replace(report, path=str(Path(report.path) / stage))
    if trace.path is not None:
        path = Path(trace.path)
        trace = replace(trace, path=str(path.parent / stage / path.name))
    return replace(settings, report=report, trace=trace)


def _told(blueprint: Blueprint, asked: Strategy) -> str:
    """What a person may have wanted otherwise, of sizes that Megatron has; empty if nothing."""
    grid, strategy = blueprint.grid, blueprint.strategy
    if grid.num_cells > 1 and asked.rhythm().shard_every and not strategy.rhythm().shard_every:
        return f"experts keep their homes: each has {grid.world_size // grid.size} of them"
    return ""


def _split(strategy: Strategy, grid: Grid) -> Strategy:
    """With expert tensor parallelism every strategy runs on split experts: under a pipeline of one
    chunk, where it has none of its own."""
    if grid.cell_size == 1 or strategy.splits_experts:
        return strategy
    return ExpertSharding(degree=1, slice_gradients=False, all_to_all="direct").over(strategy)


def whole(chunks: Sequence[nn.Module]) -> nn.Module:
    """The model without what is wrapped around it; of several parts, a list."""
    parts = []
    for chunk in chunks:
        part = chunk
        while isinstance(inner := part._modules.get("module"), nn.Module):
            part = inner
        parts.append(part)
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def dtype_of(model: nn.Module) -> torch.dtype:
    """In which it computes."""
    part: Any = model[0] if isinstance(model, nn.ModuleList) else model
    dtype: torch.dtype = part.config.params_dtype
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


def _devices(chunks: Sequence[nn.Module]) -> list[str]:
    """Name of each rank's device. Collective, over the world."""
    device = next(chunks[0].parameters()).device
    has_name = device.type == "cuda"
    return gather_texts(torch.cuda.get_device_name(device) if has_name else device.type, None)


def connect(layer: AttachedLayer, chunks: Sequence[Any]) -> None:
    """Let a layer know of the host's passes, and of weights that are still being gathered."""
    hosted = layer.hosted
    assert isinstance(hosted, HostedExperts)
    hosted.passes = Passes(SCHEDULES)
    if layer.routed.copies is not None:
        layer.routed.copies.is_last_pass = hosted.passes.is_last
    (chunk,) = (c for c in chunks if any(m is hosted.experts for m in c.modules()))
    hosted.ready = _ready(chunk, hosted)


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


def _watch_steps(optimizer: Any, run: Run) -> None:
    """Have the run told when weights have changed."""
    step: Callable[..., Any] = optimizer.step
    num_steps = 0

    @wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        outcome = step(*args, **kwargs)
        planning = run.planning
        planning.job = replace(planning.job, accumulates=SCHEDULES.latest > 1)
        run.after_step(num_steps)
        num_steps += 1
        return outcome

    optimizer.step = watched
