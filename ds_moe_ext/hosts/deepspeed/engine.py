"""Replaced layers inside an unmodified DeepSpeed engine: surgery, groups, optimizer, clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import nn

from ds_moe_ext.attach import block_hooks, replacement
from ds_moe_ext.attach.dynamo import named_modules
from ds_moe_ext.attach.host_layer import Adopted
from ds_moe_ext.attach.meeting import start_of
from ds_moe_ext.attach.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.attach.router_gates import warn_if_causal
from ds_moe_ext.attach.unknown_experts import unknown_experts, warn_of_unknown
from ds_moe_ext.comm import gather_texts, sum_in_place, take_first
from ds_moe_ext.hosts.deepspeed import engine_record, parameter_groups
from ds_moe_ext.hosts.deepspeed.mover import mover_of
from ds_moe_ext.hosts.deepspeed.role_engine import clip_gradients, experts_factor
from ds_moe_ext.hosts.deepspeed.slices import GradientSlices
from ds_moe_ext.hosts.deepspeed.startup import FINDERS, INITIALIZE, agree, blueprint_of, off_by
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.hosts.deepspeed.training import training_of
from ds_moe_ext.layout import Grid
from ds_moe_ext.moe.token_parts import TokenParts
from ds_moe_ext.settings import BLOCK
from ds_moe_ext.steps.pipeline_costs import DenseGradients
from ds_moe_ext.steps.step_setup import Steps, planning_of
from ds_moe_ext.steps.training_run import Run, run_of
from ds_moe_ext.steps.unequal_passes import join_generate
from ds_moe_ext.strict import in_json
from ds_moe_ext.zebra.passage import Here
from ds_moe_ext.zebra.profile import profiled
from ds_moe_ext.zebra.striped_model import Gradients, Pausing, Role, stripe


def replace_layers(engine: Any, model: nn.Module, sources: ReplacementSourceMap) -> None:
    """Replace the model's MoE layers, if the JSON asks for it. Collective.

    Args:
        engine: an engine under construction, before it has looked at the parameters.
        model: the user's model, changed in place.
        sources: told which new parameter stands for which old ones, so that the engine can mend
            optimizers and parameter lists that the user made before.
    """
    micro_batch = {"train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu()}
    config = {**engine._config._param_dict, **micro_batch}
    start = start_of(INITIALIZE)
    blueprint = blueprint_of(config, model, engine.mpu, engine.mesh_device)
    if blueprint is None:
        start.stand_aside(off_by(config) or "off")
        return
    grid = blueprint.grid
    agree(config, model, engine.mpu, grid)
    if dist.get_rank() == 0:
        warn_if_causal(blueprint.settings.gate, model)
        names = [found.name for found in blueprint.found]
        warn_of_unknown(unknown_experts(model, names, replacement.wanted(blueprint.settings)))
    device = torch.device(get_accelerator().device_name(engine.local_rank))
    blueprint = profiled(blueprint, model, FINDERS, training_of(engine, device))
    groups._create_expert_and_data_parallel(grid.size)
    if blueprint.grid.world_size > 1:
        _take_first_ranks_weights(model, blueprint, engine.local_rank)
    TensorParallel.of(engine.mpu).check()
    here = Here()
    built = replacement.build(blueprint, device, _around(engine, blueprint, here))
    for layer, adopted in built:
        _make_known(layer, adopted, grid, sources)
    layers = [layer for layer, _ in built]
    record = engine_record.begin(engine)
    if blueprint.strategy.has_uneven_homes:
        for layer in layers:
            record.last.update(layer.parameters)
    strategy = blueprint.strategy
    role = None if strategy.roles is None else _role_of(engine, model, blueprint, layers, here)
    if role is not None:
        sources.discarded.update(map(id, role.left))
    if not sources.sources:  # a rank without experts; of an empty map nothing is dropped
        kept = next(model.parameters())
        sources.sources[id(kept)] = [kept]
    slices = None
    if strategy.slices_gradients and grid.world_size > 1:
        slices = record.slices = GradientSlices.of(engine)
    with start.together():
        block_hooks.launch_with_blocks(model, layers, measures=strategy.rhythm().measures)
        for layer in layers:
            layer.routed.slices = slices
            if layer.routed.copies is not None:
                layer.routed.copies.is_last_pass = _boundary_of(weakref.ref(engine))
        gradients = DenseGradients.of(
            model, layers, engine.communication_data_type, None if slices is None else slices.group
        )
        mover = mover_of(engine, layers, blueprint.pools)
        steps = Steps(engine.gradient_accumulation_steps(), engine.get_data_types()[0], device)
    planning = planning_of(blueprint, layers, gradients, mover, steps)
    run = record.run = Run.start(blueprint, layers, planning, engine)
    _tell_of_sizes(run)
    run.recorder.beside = None if role is None else role.both_sides
    join_generate(model, run, device)


def _tell_of_sizes(run: Run) -> None:
    """Which sizes were chosen, and what they leave a strategy to do."""
    key = f"{BLOCK}.expert_parallel_size"
    homes = replacement.told_homes(run.blueprint, key, lambda size: f"set {in_json(key, size)}")
    for line in (run.blueprint.why_grid, homes):
        run.planning.tell(line)


def _make_known(
    layer: AttachedLayer, adopted: Adopted, grid: Grid, sources: ReplacementSourceMap
) -> None:
    """Tell the engine which parameters are experts', and what became of the model's."""
    for parameter in layer.parameters:
        # DeepSpeed reduces these over the ranks that hold the same experts.
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # counted in norms
        parameter.group_name = f"ep_size_{grid.size}"  # type: ignore[attr-defined]
    sources.sources.update({id(new): list(old) for new, old in adopted.sources.items()})
    sources.discarded.update(
        id(parameter)
        for parameter in adopted.discarded
        if all(parameter is not new for new in layer.parameters)
    )


def _role_of(
    engine: Any, model: nn.Module, blueprint: Blueprint, layers: list[AttachedLayer], here: Here
) -> Role:
    """Make the model do what this rank's role is. Collective."""
    roles = blueprint.strategy.roles
    assert roles is not None
    factor = experts_factor(roles, dist.get_rank())
    device = torch.device(get_accelerator().device_name(engine.local_rank))
    role = stripe(model, blueprint, layers, Gradients(device, factor, _scale_of(engine)), here)
    _check_both_learn(engine, model)
    return role


def _check_both_learn(engine: Any, model: nn.Module) -> None:
    """Collective. Raises ValueError on all ranks where those of one role have nothing to train,
    which ZeRO's optimizers cannot bear."""
    told = gather_texts(str(any(p.requires_grad for p in model.parameters())), None)
    stage = engine.zero_optimization_stage()
    if stage and len(set(told)) > 1:
        idle = [rank for rank, learns in enumerate(told) if learns != str(True)]
        raise ValueError(
            f"{BLOCK}: zero_optimization.stage is {stage}, but ranks {idle} have the weights of "
            "one role only, all of which are frozen; set the stage to 0, or train some of them"
        )


def _around(engine: Any, blueprint: Blueprint, here: Here) -> Around | None:
    """What layers call in the place of their experts alone."""
    settings, shares_tokens = blueprint.settings, TensorParallel.of(engine.mpu).group
    if blueprint.strategy.roles is not None:
        return Pausing(here, settings.capacity_factor)
    if shares_tokens is None or settings.sequence_parallel:
        return None
    return lambda layer, hosted: TokenParts(hosted.run, shares_tokens)


def _scale_of(engine: Any) -> Callable[[], float]:
    """Scale of losses, which optimizers of float16 change; layers must not keep their engine
    alive."""
    alive = weakref.ref(engine)

    def scale() -> float:
        optimizer = getattr(alive(), "optimizer", None)
        return float(getattr(optimizer, "loss_scale", 1.0))

    return scale


def _boundary_of(engine: weakref.ref[Any]) -> Callable[[], bool]:
    """Layers must not keep their engine alive."""

    def is_boundary() -> bool:
        alive = engine()
        return alive is None or bool(alive.is_gradient_accumulation_boundary())

    return is_boundary


def _take_first_ranks_weights(model: nn.Module, blueprint: Blueprint, local_rank: int) -> None:
    """Give all ranks rank 0's experts, for ranks may have drawn or loaded their own. Collective.

    DeepSpeed does so with all weights, but only when each rank has none but its own experts left.
    """
    device = get_accelerator().device_name(local_rank)
    for found in blueprint.found:
        if found.num_cells > 1:
            continue  # the model was built with other experts on each rank
        for parameter in model.get_submodule(found.name).parameters():
            parameter.data.copy_(take_first(parameter.data.to(device).contiguous(), None))


def count_experts(engine: Any) -> None:
    """Tell the engine of experts that it did not recognise: its own MoE class it counts itself."""
    run = run_of(engine)
    if run is None:
        return
    engine.has_moe_layers = True
    native = {name for name, module in named_modules(engine.module) if isinstance(module, MoE)}
    engine.num_experts += [
        layer.routed.site.plan.home.num_experts for layer in run.layers if layer.name not in native
    ]


def check_optimizer(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Look at the optimizer that an engine is about to wrap, and give it back the user's groups.

    Raises:
        ValueError: experts that may change places are optimized differently.
    """
    run = run_of(engine)
    if run is not None:
        parameter_groups.restore(engine, optimizer)
        _check_alike(run, optimizer)


def _check_alike(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Where experts move, a slot of one layer comes to hold an expert of another; and where a layer
    is at home unevenly, a rank may have no expert of it, but must have all groups."""
    if not run.blueprint.strategy.has_uneven_homes:
        return
    group_of = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    for pool in run.blueprint.pools:
        layers = [run.layers[layer] for layer in pool.layers]
        columns = zip(*(slot.parameters for layer in layers for slot in layer.hosted.slots()))
        for name, parameters in zip(layers[0].hosted.weight_names, columns):
            if len({group_of.get(parameter) for parameter in parameters}) > 1:
                raise ValueError(
                    f"under strategy {run.blueprint.settings.placing} experts may move between "
                    "layers, and a rank may have none of a layer, but "
                    f"the weights {name!r} of {', '.join(layer.name for layer in layers)} are in "
                    "several parameter groups of the optimizer; put them into one group, or use "
                    "ep in its place"
                )


def clip_by_global_norm(engine: Any) -> bool:
    """Clip at ZeRO stage 0 by the norm over all experts, each counted once.

    DeepSpeed takes the mean of the ranks' norms there, which is the norm of nothing.

    Returns:
        Whether the gradients were clipped here.
    """
    run = run_of(engine)
    if run is None:
        return False
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    of_experts, of_parts, of_wholes = torch.zeros(3, dtype=torch.float64, device=engine.device)
    for parameter in parameters:
        square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
        if is_moe_param(parameter):
            of_experts += square
        elif is_model_parallel_parameter(parameter):
            of_parts += square
        else:
            of_wholes += square
    name = f"ep_size_{run.blueprint.grid.size}"
    sum_in_place(of_experts, groups._get_expert_parallel_group(name))
    tensor_parallel = TensorParallel.of(engine.mpu)
    if tensor_parallel.group is not None:
        sum_in_place(of_parts, tensor_parallel.group)
    total = (of_experts + of_parts + of_wholes).sqrt()
    clip_gradients(engine, parameters, total)
    return True


def after_step(engine: Any) -> None:
    """Record the optimizer step that has just been taken."""
    run = run_of(engine)
    if run is not None:
        run.after_step(engine.global_steps - 1)
