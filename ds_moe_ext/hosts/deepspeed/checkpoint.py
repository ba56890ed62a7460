# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that any run of the model can go on from, however it is laid out.

DeepSpeed's own files keep what it says once: dense weights and buffers, the learning rate's
schedule, counters, the client's state. Experts and all that the optimizer keeps, of dense weights
too, go into a folder beside them, by name; see ``checkpoint_contents``. No ``zero_pp_rank`` file is
written or read, so nothing depends on ranks, stages or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.files import file_sums
from ds_moe_ext.files.dcp_reader import TABLE
from ds_moe_ext.files.file_sums import FileSum
from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.host_layer import Slot
from ds_moe_ext.hosts.attachment.modules import plain
from ds_moe_ext.hosts.deepspeed import decoupled_saves, host_file, rates, shards
from ds_moe_ext.hosts.deepspeed.checkpoint_contents import (
    base_optimizer,
    has_dense_weights,
    kept_of,
    named_parameters,
    remembered_name,
    wrapper_name,
)
from ds_moe_ext.hosts.deepspeed.checkpoint_reader import (
    Asked,
    Loaded,
    agreed,
    check_module,
    read,
    slot_name,
)
from ds_moe_ext.hosts.deepspeed.layout_file import (
    FOLDER,
    LAYOUT_FILE,
    SAVE,
    SavedLayout,
)
from ds_moe_ext.hosts.deepspeed.native import HostedMoE
from ds_moe_ext.hosts.deepspeed.pipeline import num_stages
from ds_moe_ext.hosts.deepspeed.role_engine import own_groups
from ds_moe_ext.hosts.deepspeed.state_places import OptimizerStates
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.hosts.deepspeed.unread_checkpoint import refuse_ours
from ds_moe_ext.hosts.steps.expert_moves import Expert
from ds_moe_ext.hosts.steps.training_run import Run, run_of

Arguments = Mapping[str, Any]  # of a method of DeepSpeed's engine, ``self`` included


def save(engine: Any, arguments: Arguments, save_rest: Callable[..., Any]) -> Any:
    """Write a checkpoint. Collective.

    Args:
        engine: DeepSpeed's.
        arguments: of ``save_rest``.
        save_rest: DeepSpeed's ``_save_moe_checkpoint``.
    """
    run = run_of(engine)
    if run is None:
        return save_rest(**arguments)
    folder = Path(arguments["save_dir"]) / str(arguments["tag"])
    roles = run.blueprint.strategy.roles
    is_writer = dist.get_rank() == (0 if roles is None else roles.attention_cells[0])
    if is_writer:
        file_sums.remove(folder / LAYOUT_FILE)  # of one that is being overwritten
    gather_objects(None, None)  # nobody writes before
    slots = run.mover.slots(run.planning.job.homes)
    layout = _layout_of(engine, run, slots)
    parts, objects = kept_of(
        engine,
        named_parameters(engine, run, slots),
        excludes_frozen=arguments["exclude_frozen_parameters"],
    )
    objects |= {remembered_name(run): run.planning.remember(), SAVE: layout.save}
    ours = decoupled_saves.begun(engine, folder / FOLDER, parts, objects)
    theirs, result = list[str](), None
    if has_dense_weights(run):
        client = {**arguments["client_state"], SAVE: layout.save}
        with (
            _experts_apart(engine, run),
            own_groups(engine),
            shards.one_file(engine),
            shards.whole_in_state(engine),
        ):
            result = save_rest(**{**arguments, "client_state": client})
            theirs = host_file.written(engine, arguments["save_dir"], arguments["tag"])

    def seal() -> None:
        own = [*_own(ours()), *theirs]
        files = _sums(folder, own, run.blueprint.settings.checkpoint.checksums)
        if is_writer:
            replace(layout, files=files).write(folder)

    decoupled_saves.when_written(engine, seal)
    return result


def load(engine: Any, arguments: Arguments, load_rest: Callable[..., Any]) -> Any:
    """Go on from a checkpoint. Collective.

    Args:
        engine: DeepSpeed's.
        arguments: of ``load_rest``.
        load_rest: DeepSpeed's ``_load_checkpoint``.

    Returns:
        What it returns: path and the client's state.

    Raises:
        ValueError: what differs, and what to do; the engine is as it was.
    """
    run = run_of(engine)
    if run is None:
        refuse_ours(engine, arguments)
        return load_rest(**arguments)
    decoupled_saves.end(engine)
    asked = Asked.of(engine, arguments)
    with shards.one_file(engine):
        loaded = read(engine, run, asked)
    with (
        shards.one_file(engine),
        host_file.checked(engine, asked, loaded.layout),
        _weights_given(engine, run, loaded, asked, arguments["load_lr_scheduler_states"]),
    ):
        path, client = load_rest(**{**arguments, "load_optimizer_states": False})
    _apply(engine, run, loaded, asked)
    run.routing.compare(loaded.layout.routing, str(asked.folder))
    for name in ("optimizer", SAVE):  # DeepSpeed takes them for the client's
        client.pop(name, None)
    return path, client


def is_replaced(model: nn.Module) -> bool:
    """Whether the model has experts that are loaded here."""
    return any(isinstance(module, (HostedExperts, HostedMoE)) for module in model.modules())


# Saving.


def _layout_of(engine: Any, run: Run, slots: Mapping[Expert, Slot]) -> SavedLayout:
    """Collective."""
    own = {
        (run.layers[expert.layer].name, expert.number): slot_name(engine, slot)
        for expert, slot in slots.items()
    }
    own_homes = {
        layer.name: home.owner_E.tolist() for layer, home in zip(run.layers, run.planning.job.homes)
    }
    told = gather_objects((uuid4().hex, own, own_homes, run.routing.facts()), None)
    names = {expert: name for _, theirs, _, _ in told for expert, name in theirs.items()}
    homes = {layer: home for _, _, theirs, _ in told for layer, home in theirs.items()}
    # The first ranks' last: those of a role may have seen no choices.
    routing = {layer: facts for *_, theirs in reversed(told) for layer, facts in theirs.items()}
    optimizer, grid = base_optimizer(engine), run.blueprint.grid
    return SavedLayout(
        strategy=run.blueprint.settings.strategy,
        expert_parallel_size=grid.num_cells,
        expert_sharding_size=grid.cell_size,
        world_size=dist.get_world_size(),
        zero_stage=int(engine.zero_optimization_stage()),
        num_experts={layer: len(home) for layer, home in homes.items()},
        homes=homes,
        slots={
            layer: [names[layer, number] for number in range(len(home))]
            for layer, home in homes.items()
        },
        optimizer=None if optimizer is None else optimizer.__class__.__name__,
        step=engine.global_steps,
        tensor_parallel_size=TensorParallel.of(engine.mpu).size,
        pipeline_stages=num_stages(engine.module),
        save=told[0][0],
        routing=routing,
    )


def _own(names: list[str]) -> list[str]:
    """Of our files those that this rank sums up, which may be others than it wrote."""
    here = dist.get_rank()
    own = [*names[here :: dist.get_world_size()], *([TABLE] if here == 0 else [])]
    return [f"{FOLDER}/{name}" for name in own]


def _sums(folder: Path, own: list[str], checksums: bool) -> dict[str, FileSum]:
    """Of the files that all ranks have written, each of its own. Collective."""
    sums = agreed(folder, lambda: file_sums.sums_of(folder, own, checksums=checksums))
    return {name: each for theirs in gather_objects(sums, None) for name, each in theirs.items()}


@contextmanager
def _experts_apart(engine: Any, run: Run) -> Iterator[None]:
    """While it lasts, the states of module and optimizer have nothing that is saved here."""
    ours = {parameter for layer in run.layers for parameter in layer.parameters}

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module.named_parameters():
            if parameter in ours:
                state.pop(prefix + name, None)

    hooks = [layer.hosted.register_state_dict_post_hook(drop) for layer in run.layers]  # type: ignore[attr-defined]
    optimizer = engine.optimizer
    if optimizer is not None:
        optimizer.state_dict = lambda: {}
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if optimizer is not None:
            del optimizer.state_dict


# Loading.


@contextmanager
def _weights_given(
    engine: Any, run: Run, loaded: Loaded, asked: Asked, with_scheduler: bool
) -> Iterator[None]:
    """While it lasts, the engine loads this rank's experts with what DeepSpeed's file has."""

    def load_module_state_dict(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = engine.module.state_dict().keys()
        if loaded.layout.pipeline_stages != num_stages(engine.module):
            checkpoint["module"] = _of_own_layers(engine, asked, own)
        checkpoint["module"] = _renamed(checkpoint["module"], own)
        names = {parameter: name for name, parameter in engine.module.named_parameters()}
        checkpoint["module"].update({names[p]: weight for p, weight in _of_model(loaded).items()})
        # Frozen weights again, by the names of rank 0's slots; they are in the module's state too.
        checkpoint["frozen_param_fragments"] = None
        if not has_dense_weights(run):
            checkpoint["module"] = {k: v for k, v in checkpoint["module"].items() if k in own}
        wants_schedule = with_scheduler and not asked.weights_alone

        def check() -> None:
            if kwargs.get("custom_load_fn") is None:
                check_module(engine, checkpoint["module"], asked)
            if wants_schedule:
                _check_scheduler(engine, checkpoint, asked)

        agreed(asked.folder, check)
        if wants_schedule and engine.lr_scheduler is not None:
            checkpoint["lr_scheduler"] = rates.fitting(engine, run, checkpoint["lr_scheduler"])
        if not shards.are_of(engine):
            return type(engine).load_module_state_dict(engine, checkpoint, *args, **kwargs)
        if kwargs.get("custom_load_fn") is None:
            return shards.take(engine.module, checkpoint["module"])
        gathered = {**kwargs, "fetch_z3_params": True}
        return type(engine).load_module_state_dict(engine, checkpoint, *args, **gathered)

    engine.load_module_state_dict = load_module_state_dict
    try:
        yield
    finally:
        del engine.load_module_state_dict


def _of_own_layers(engine: Any, asked: Asked, own: Iterable[str]) -> dict[str, Any]:
    """Dense weights of this stage's layers, from files of stages that had others. Collective."""
    layers, state = {name.partition(".")[0] for name in own}, dict[str, Any]()
    for path in engine._get_all_ckpt_names(asked.folder.parent, asked.folder.name):
        saved = engine.checkpoint_engine.load(path, map_location="cpu")["module"]
        state |= {name: each for name, each in saved.items() if name.partition(".")[0] in layers}
    return state


def _of_model(loaded: Loaded) -> dict[nn.Parameter, Tensor]:
    """Weights of this rank's experts, by the parameters of the model."""
    weights, by_stack = dict(loaded.weights), dict[nn.Parameter, list[Tensor]]()
    for slot in loaded.seats.slots.values():
        for stack, view in zip(slot.stacks, slot.parameters):
            if view in weights:  # a frozen one may have been left out, with all of its stack
                by_stack.setdefault(stack, []).append(weights.pop(view))
    return weights | {stack: torch.stack(own) for stack, own in by_stack.items()}


def _renamed(saved: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """A model's state by the names of this run's, of which one may be compiled."""
    names = {plain(name): name for name in own}
    return {names.get(plain(name), name): value for name, value in saved.items()}


def _check_scheduler(engine: Any, checkpoint: Mapping[str, Any], asked: Asked) -> None:
    if engine.lr_scheduler is not None and checkpoint.get("lr_scheduler") is None:
        raise ValueError(
            f"the checkpoint {asked.folder} was saved without a schedule of the learning rate, but "
            f"this run has a {type(engine.lr_scheduler).__name__}; load with "
            "load_lr_scheduler_states=False"
        )


def _apply(engine: Any, run: Run, loaded: Loaded, asked: Asked) -> None:
    """What is left when DeepSpeed has loaded its part. Collective."""
    for layer in run.layers:
        layer.routed.start_anew()  # copies are of the weights that were there
    if not asked.weights_alone:
        run.mover.hold(loaded.seats.slots, loaded.seats.homes)
        run.planning.resume(loaded.seats.homes, loaded.remembered_ILCE)
    if asked.with_optimizer:
        _apply_states(engine, run, loaded)
    elif hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()


def _apply_states(engine: Any, run: Run, loaded: Loaded) -> None:
    states, optimizer = OptimizerStates(engine), engine.optimizer
    states.write(loaded.states)
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()  # brings the fragments of other ranks
    for parameter, saved in loaded.options.items():
        options = states.options(parameter)
        if options is not None:
            options.update(saved)
    settings = loaded.settings.get(wrapper_name(engine))
    if settings is not None:
        _take_settings(optimizer, settings)
    elif engine.fp16_enabled():
        run.planning.tell("the loss scale starts anew: it was saved by another wrapper")
    rates.tell(engine)
    if engine.zero_optimization() and not engine.zero_load_from_fp32_weights():
        optimizer._restore_from_bit16_weights()


def _take_settings(optimizer: Any, settings: Mapping[str, Any]) -> None:
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer._load_global_state(settings)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.loss_scaler = settings["loss_scaler"]
        optimizer.dynamic_loss_scale = settings["dynamic_loss_scale"]
        optimizer.overflow = settings["overflow"]
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.clip_grad = settings["clip_grad"]
    else:  # FP16_Optimizer and FP16_UnfusedOptimizer, with no master to copy
        no_masters: dict[str, Any] = {"fp32_groups": [], "fp32_groups_flat": []}
        optimizer.load_state_dict({**settings, **no_masters}, load_optimizer_states=False)
