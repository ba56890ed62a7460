# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that any run of the model can go on from, however it is laid out.

DeepSpeed's own files keep what it says once: dense weights and buffers, the learning rate's
schedule, counters, the client's state. Experts and all that the optimizer keeps, of dense weights
too, go into a folder beside them, by name; see ``checkpoint_contents``. No ``zero_pp_rank`` file is
written or read, so nothing depends on ranks, stages or slots.

In order: writing (also while training goes on, where DeepSpeed's own writer is decoupled); going on
from what was written, which ``checkpoint_contents`` reads and checks before anything changes; and
the whole state, with all experts under the host's names, as the stock class loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine as Decoupled,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_moe_ext.core.comm import all_gather_slots, as_bytes, exchange, gather_objects
from ds_moe_ext.core.layout import group_among
from ds_moe_ext.files import whole_files
from ds_moe_ext.files.unpickle import TABLE, damaged
from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.host_layer import Hosted, Slot
from ds_moe_ext.hosts.attachment.modules import during, plain, without
from ds_moe_ext.hosts.deepspeed import checkpoint_contents, dcp_folder, parameter_groups, zero_3
from ds_moe_ext.hosts.deepspeed.checkpoint_contents import Asked, Loaded, agreed
from ds_moe_ext.hosts.deepspeed.dcp_folder import Part
from ds_moe_ext.hosts.deepspeed.gradients import record_of
from ds_moe_ext.hosts.deepspeed.layout_file import FOLDER, LAYOUT_FILE, SAVE, SavedLayout
from ds_moe_ext.hosts.deepspeed.native import HostedMoE
from ds_moe_ext.hosts.deepspeed.parameter_groups import (
    OptimizerStates,
    base_optimizer,
    has_dense_weights,
)
from ds_moe_ext.hosts.deepspeed.rank_groups import TensorParallel, num_stages, own_groups
from ds_moe_ext.hosts.steps.expert_moves import Expert
from ds_moe_ext.hosts.steps.training_run import Run, run_of
from ds_moe_ext.moe.sharding import whole_weights
from ds_moe_ext.schedule.task import INTER, INTRA
from ds_moe_ext.strategies.settings import BLOCK

Arguments = Mapping[str, Any]  # of a method of DeepSpeed's engine, ``self`` included


def is_replaced(model: nn.Module) -> bool:
    """Whether the model has experts that are loaded here."""
    return any(isinstance(module, (HostedExperts, HostedMoE)) for module in model.modules())


# Writing.


def save(engine: Any, arguments: Arguments, save_rest: Callable[..., Any]) -> Any:
    """Write a checkpoint, by DeepSpeed's ``_save_moe_checkpoint`` and ours. Collective."""
    run = run_of(engine)
    if run is None:
        return save_rest(**arguments)
    folder = Path(arguments["save_dir"]) / str(arguments["tag"])
    roles, rank = run.blueprint.strategy.roles, dist.get_rank()
    is_writer = rank == (0 if roles is None else roles.firsts[0])
    if is_writer:
        whole_files.remove(folder / LAYOUT_FILE)  # of one that is being overwritten
    gather_objects(None, None)  # nobody writes before
    slots = run.mover.slots(run.planning.job.owners)
    layout = _layout_of(engine, run, slots)
    named = checkpoint_contents.named_parameters(engine, run, slots)
    excludes_frozen = arguments["exclude_frozen_parameters"]
    parts, objects = checkpoint_contents.kept_of(engine, named, excludes_frozen=excludes_frozen)
    objects |= {
        checkpoint_contents.remembered_name(run): run.planning.remember(),
        SAVE: layout.save,
    }
    names_written = _begin_save(engine, folder / FOLDER, parts, objects)
    theirs, result = list[str](), None
    if has_dense_weights(run):
        client = {**arguments["client_state"], SAVE: layout.save}
        with (
            _experts_apart(engine, run),
            own_groups(engine),
            zero_3.one_file(engine),
            zero_3.whole_in_state(engine),
        ):
            result = save_rest(**{**arguments, "client_state": client})
            # Where another writer goes on when it has returned, sums would be of half a file.
            ends = isinstance(engine.checkpoint_engine, (TorchCheckpointEngine, Decoupled))
            if ends and groups._get_data_parallel_rank() == 0:
                path = engine._get_ckpt_name(arguments["save_dir"], arguments["tag"])
                theirs = [Path(path).name]

    def seal() -> None:
        # Each rank sums up some of our files, which may be others than it wrote.
        names = names_written()[rank :: dist.get_world_size()] + [TABLE] * (rank == 0)
        own = [f"{FOLDER}/{name}" for name in names] + theirs
        checksums = run.blueprint.settings.checkpoint.checksums
        sums = agreed(folder, lambda: whole_files.sums_of(folder, own, checksums=checksums))
        files = {name: each for given in gather_objects(sums, None) for name, each in given.items()}
        if is_writer:
            replace(layout, files=files).write(folder)

    _when_written(engine, seal)
    return result


def _layout_of(engine: Any, run: Run, slots: Mapping[Expert, Slot]) -> SavedLayout:
    """Collective."""
    own = {
        (run.layers[expert.layer].name, expert.number): checkpoint_contents.slot_name(engine, slot)
        for expert, slot in slots.items()
    }
    own_owners = {
        layer.name: owner.owner_E.tolist()
        for layer, owner in zip(run.layers, run.planning.job.owners)
    }
    gathered = gather_objects((uuid4().hex, own, own_owners, run.routing.facts()), None)
    names = {expert: name for _, theirs, _, _ in gathered for expert, name in theirs.items()}
    owners = {layer: owner for _, _, theirs, _ in gathered for layer, owner in theirs.items()}
    # The first ranks' last: those of a role may have seen no choices.
    routing = {layer: facts for *_, theirs in reversed(gathered) for layer, facts in theirs.items()}
    optimizer, grid = base_optimizer(engine), run.blueprint.grid
    return SavedLayout(
        strategy=run.blueprint.settings.strategy,
        expert_parallel_size=grid.num_ep_ranks,
        expert_sharding_size=grid.etp_size,
        world_size=dist.get_world_size(),
        zero_stage=int(engine.zero_optimization_stage()),
        num_experts={layer: len(owner) for layer, owner in owners.items()},
        owners=owners,
        slots={
            layer: [names[layer, number] for number in range(len(owner))]
            for layer, owner in owners.items()
        },
        optimizer=None if optimizer is None else optimizer.__class__.__name__,
        step=engine.global_steps,
        tensor_parallel_size=TensorParallel.of(engine.mpu).size,
        pipeline_stages=num_stages(engine.module),
        save=gathered[0][0],
        routing=routing,
    )


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
    try:
        with nullcontext() if optimizer is None else during(optimizer, state_dict=lambda: {}):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _begin_save(
    engine: Any, folder: Path, parts: Mapping[str, Part], objects: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """Begin to write what ``dcp_folder.save`` takes. Collective.

    DeepSpeed ends a decoupled save before the next optimizer step, on all ranks, and moves
    ``latest`` then (``engine._commit_decoupled_checkpoint``). Until there no weight and no state
    changes, so that none is copied: a thread writes them as they are.
    """
    if not engine.checkpoint_engine.is_decoupled():
        names = dcp_folder.save(folder, parts, objects)
        return lambda: names
    end_save(engine)
    record = record_of(engine)
    if record.save_group is None:
        # A thread's exchanges would come between others'. Of gloo, for what is written is on the
        # host.
        record.save_group = group_among([[*range(dist.get_world_size())]], "gloo")
    cost_group = ThreadPoolExecutor(1, "ds_moe_ext_save")
    writing = cost_group.submit(dcp_folder.save, folder, parts, objects, record.save_group)
    cost_group.shutdown(wait=False)
    return writing.result


def _when_written(engine: Any, seal: Callable[[], None]) -> None:
    """Call this when DeepSpeed's files are written: now, or before the next optimizer step.
    Collective there."""
    writer, record = engine.checkpoint_engine, record_of(engine)
    if not writer.is_decoupled():
        seal()
        return
    commit = writer.commit

    def commit_both(info: Any) -> Any:
        del writer.commit
        record.is_saving = False
        done = commit(info)
        seal()
        return done

    writer.commit = commit_both
    record.is_saving = True


def end_save(engine: Any) -> None:
    """Wait for a save that goes on, and move ``latest``. Collective."""
    if record_of(engine).is_saving:
        engine._commit_decoupled_checkpoint()


# Going on.


def load(engine: Any, arguments: Arguments, load_rest: Callable[..., Any]) -> Any:
    """Go on from a checkpoint, by DeepSpeed's ``_load_checkpoint`` and ours. Collective.

    Returns:
        What DeepSpeed's returns: path and the client's state.

    Raises:
        ValueError: what differs, and what to do; the engine is as it was.
    """
    run = run_of(engine)
    if run is None:
        _refuse_ours(engine, arguments)
        return load_rest(**arguments)
    end_save(engine)
    asked = Asked.of(engine, arguments)
    with zero_3.one_file(engine):
        loaded = checkpoint_contents.read(engine, run, asked)
    reader = engine.checkpoint_engine
    read_states = partial(_read_states, reader.load, loaded.layout, asked)
    load_module = partial(_load_module, engine, run, loaded, asked)
    with (
        zero_3.one_file(engine),
        during(reader, load=read_states),
        during(engine, load_module_state_dict=load_module),
    ):
        path, client = load_rest(**{**arguments, "load_optimizer_states": False})
    _apply(engine, run, loaded, asked)
    run.routing.compare(loaded.layout.routing, str(asked.folder))
    for name in ("optimizer", SAVE):  # DeepSpeed takes them for the client's
        client.pop(name, None)
    return path, client


def _refuse_ours(engine: Any, arguments: Arguments) -> None:
    """Refuse a checkpoint of ours that DeepSpeed is about to load by itself, where the block is
    off: its own file has dense weights only, so that a load that is not strict would leave all
    experts as they were drawn. Not where a user's function takes the weights, which sees what is
    there, nor where a later save without us has written over DeepSpeed's file."""
    folder = Path(arguments["load_dir"]) / str(arguments["tag"])
    if arguments["custom_load_fn"] is not None or not (folder / LAYOUT_FILE).exists():
        return
    sums = SavedLayout.read(folder).files or {}
    theirs = [Path(each) for each in engine._get_all_ckpt_names(folder.parent, folder.name)]
    knows_theirs = bool(theirs) and any("/" not in name for name in sums)
    if knows_theirs and all(
        path.stat().st_size != sums.get(path.name, (None,))[0] for path in theirs
    ):
        return
    raise ValueError(
        f"the checkpoint {folder} was written with ds_moe_ext ({LAYOUT_FILE} in it says so), "
        f"but {BLOCK} is not enabled here, and DeepSpeed alone cannot read its experts; set "
        f"{BLOCK}.enabled to true, or convert it with 'ds-moe-ext convert --to huggingface' "
        f"(if a run without ds_moe_ext overwrote it, remove {LAYOUT_FILE})"
    )


OF_DEEPSPEED = (
    *("module", "num_experts", "dp_world_size", "mp_world_size", "global_steps", "skipped_steps"),
)
"""What DeepSpeed takes from its own file, some of it when weights have been loaded."""


def _read_states(
    given: Callable[..., Any],
    layout: SavedLayout,
    asked: Asked,
    path: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What DeepSpeed reads of its own file; refused on all ranks if it is damaged, or of another
    save."""

    def checked() -> Any:
        try:
            states = given(path, *args, **kwargs)
        except Exception as error:  # a damaged file may raise anything
            raise damaged(Path(path), error) from error
        lacks = [k for k in OF_DEEPSPEED if not isinstance(states, Mapping) or k not in states]
        if lacks or not isinstance(states["module"], Mapping):
            raise ValueError(
                f"{path} has no {lacks or 'weights'}: it is damaged; copy the whole folder again, "
                "or choose another checkpoint"
            )
        layout.check_save(Path(path), states.get(SAVE))
        if states["global_steps"] != layout.step:
            raise ValueError(
                f"{path} is of step {states['global_steps']}, but {LAYOUT_FILE} beside it of "
                f"step {layout.step}: the folder mixes two checkpoints; copy one of them "
                "completely"
            )
        return states

    return agreed(asked.folder, checked)


def _load_module(
    engine: Any,
    run: Run,
    loaded: Loaded,
    asked: Asked,
    checkpoint: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In the place of the engine's own: this rank's experts with what DeepSpeed's file has."""
    module, schedule = engine.module, engine.lr_scheduler
    own = module.state_dict().keys()
    saved = checkpoint["module"]
    if loaded.layout.pipeline_stages != num_stages(module):
        # Dense weights of this stage's layers, from files of stages that had others.
        layers, saved = {name.partition(".")[0] for name in own}, {}
        for path in engine._get_all_ckpt_names(asked.folder.parent, asked.folder.name):
            theirs = engine.checkpoint_engine.load(path, map_location="cpu")["module"]
            saved |= {k: each for k, each in theirs.items() if k.partition(".")[0] in layers}
    plain_names = {plain(name): name for name in own}  # one of both runs may be compiled
    state = {plain_names.get(plain(name), name): value for name, value in saved.items()}
    names = {parameter: name for name, parameter in module.named_parameters()}
    state.update({names[p]: weight for p, weight in _of_model(loaded).items()})
    # Frozen weights again, by the names of rank 0's slots; they are in the module's state too.
    checkpoint["frozen_param_fragments"] = None
    if not has_dense_weights(run):
        state = {name: each for name, each in state.items() if name in own}
    checkpoint["module"] = state
    is_users = kwargs.get("custom_load_fn") is not None

    def check() -> None:
        if not is_users:
            checkpoint_contents.check_module(engine, state, asked)
        if asked.with_schedule and schedule is not None and checkpoint.get("lr_scheduler") is None:
            raise ValueError(
                f"the checkpoint {asked.folder} was saved without a schedule of the learning rate, "
                f"but this run has a {type(schedule).__name__}; load with "
                "load_lr_scheduler_states=False"
            )

    agreed(asked.folder, check)
    if asked.with_schedule and schedule is not None:
        fitting = parameter_groups.fitting_schedule(engine, run, checkpoint["lr_scheduler"])
        checkpoint["lr_scheduler"] = fitting
    if zero_3.shards_weights(engine):
        if not is_users:
            return zero_3.take_shards(module, state)
        kwargs = {**kwargs, "fetch_z3_params": True}
    return type(engine).load_module_state_dict(engine, checkpoint, *args, **kwargs)


def _of_model(loaded: Loaded) -> dict[nn.Parameter, Tensor]:
    """Weights of this rank's experts, by the parameters of the model."""
    weights, by_stack = dict(loaded.weights), dict[nn.Parameter, list[Tensor]]()
    for slot in loaded.expert_slots.slots.values():
        for stack, view in zip(slot.stacks, slot.parameters):
            if view in weights:  # a frozen one may have been left out, with all of its stack
                by_stack.setdefault(stack, []).append(weights.pop(view))
    return weights | {stack: torch.stack(own) for stack, own in by_stack.items()}


def _apply(engine: Any, run: Run, loaded: Loaded, asked: Asked) -> None:
    """What is left when DeepSpeed has loaded its part. Collective."""
    optimizer = engine.optimizer
    for layer in run.layers:
        layer.routed.start_anew()  # replicas are of the weights that were there
    if not asked.weights_alone:
        run.mover.hold(loaded.expert_slots.slots, loaded.expert_slots.owners)
        run.planning.resume(loaded.expert_slots.owners, loaded.remembered_ILCE)
    if not asked.with_optimizer:
        if hasattr(optimizer, "refresh_fp32_params"):
            optimizer.refresh_fp32_params()
        return
    states = OptimizerStates(engine)
    states.write(loaded.states)
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()  # brings the fragments of other ranks
    for parameter, saved in loaded.options.items():
        options = states.options(parameter)
        if options is not None:
            options.update(saved)
    settings = loaded.settings.get(checkpoint_contents.wrapper_name(engine))
    if settings is not None:
        _take_settings(optimizer, settings)
    elif checkpoint_contents.has_scale(engine):
        run.planning.log(
            "the loss scale starts from its initial value: it was saved by another wrapper"
        )
    parameter_groups.report_rates(engine)
    if engine.zero_optimization() and not engine.zero_load_from_fp32_weights():
        optimizer._restore_from_bit16_weights()


def _take_settings(optimizer: Any, settings: Mapping[str, Any]) -> None:
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer._load_global_state(settings)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
            setattr(optimizer, name, settings[name])
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.clip_grad = settings["clip_grad"]
    else:  # FP16_Optimizer and FP16_UnfusedOptimizer, with no master to copy
        no_masters: dict[str, Any] = {"fp32_groups": [], "fp32_groups_flat": []}
        optimizer.load_state_dict({**settings, **no_masters}, load_optimizer_states=False)


# The whole state.


CHECKPOINTED = "_checkpoint_wrapped_module"
"""Where torch's ``checkpoint_wrapper`` keeps the module that it wraps; not in names of a state."""


@contextmanager
def whole_state(engine: Any) -> Iterator[None]:
    """While it lasts, ``engine.module_state_dict`` gives all experts. Collective."""
    if run_of(engine) is None:
        yield
        return
    is_asked = not zero_3.shards_weights(engine) or engine.zero_gather_16bit_weights_on_model_save()
    with (
        during(engine, module_state_dict=lambda **_: full_state_dict(engine.module)),
        zero_3.one_file(engine) if is_asked else nullcontext(),
    ):
        yield


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all experts under the host's names, as the stock class loads it.

    Collective. Every rank gets all of it, one that has experts only too; experts, and what an
    expert rank gets from others, are in host memory, one weight at a time on the device.

    Args:
        model: ``engine.module``.
    """
    state, experts = zero_3.state_of(model), dict[str, Tensor]()
    for path, module in model.named_modules(remove_duplicate=False):  # some blocks share experts
        name = without(CHECKPOINTED, path)
        if isinstance(module, HostedExperts):
            for own, _ in module.named_parameters():
                del state[f"{name}.{own}"]
            with zero_3.whole(module.parameters()):
                outer = name.removesuffix(module.inside) if module.inside else f"{name}."
                for index, stored in enumerate(module.stored):
                    for weight, tensor in stored.exported(_joined(module, index)):
                        experts[f"{outer}{weight}"] = tensor
        elif isinstance(module, HostedMoE):
            prefix = f"{name}.experts.deepspeed_experts"
            for index, weight in enumerate(module.weight_names):
                for slot in range(len(module.slots())):
                    del state[f"{prefix}.{slot}.{weight}"]
                with zero_3.whole(module.experts.parameters()):
                    whole = _joined(module, index)
                for expert, tensor in enumerate(whole):
                    experts[f"{prefix}.{expert}.{weight}"] = tensor
    hosted = (m for m in model.modules() if isinstance(m, (HostedExperts, HostedMoE)))
    first = next(hosted, None)
    if first is None:
        return state
    return _completed(state, first.routed.layer_context.layout.group("ep", INTER)) | experts


class _Shape(NamedTuple):
    """What a tensor is like, for other ranks to make room for it."""

    dtype: torch.dtype
    shape: torch.Size

    def empty(self) -> Tensor:
        device = get_accelerator().current_device_name()
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _completed(state: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """A rank's state without experts. One that has fewer tensors than others, as it has no dense
    weights, gets all that the first of those with most has; its buffers too, for its own have seen
    no data. Collective."""
    own = {name: _Shape(t.dtype, t.shape) for name, t in state.items() if isinstance(t, Tensor)}
    reported_C = gather_objects(own, group)
    whole = max(reported_C, key=len)
    source = reported_C.index(whole)
    lacking = [place for place, reported in enumerate(reported_C) if len(reported) < len(whole)]
    if dist.get_rank(group) == source:
        for name in whole if lacking else ():
            flat = as_bytes(state[name].detach().to(get_accelerator().current_device_name()))
            exchange([], [(flat, place) for place in lacking], group)
    if dist.get_rank(group) in lacking:
        for name, shape in whole.items():
            state[name] = shape.empty()
            exchange([(as_bytes(state[name]), source)], [], group)
            state[name] = state[name].cpu()
    return state


def _joined(module: Hosted, index: int) -> Tensor:
    """A weight of all experts, ``[E, ...]``, from this rank's; ``index`` is that of the weight
    among those of an expert. Collective."""
    owner, layout = module.routed.layer_context.plan.owner, module.routed.layer_context.layout
    weights: list[Tensor] = [slot.parameters[index].detach() for slot in module.slots()]
    part_S = torch.stack(weights) if weights else None
    if owner.num_ep_ranks > 1:
        group = layout.group("ep", INTER)
        own = None if part_S is None else _Shape(part_S.dtype, part_S.shape)
        kinds = gather_objects(own, group)
        if part_S is None:  # no experts, of the shape and type of the others'
            dtype, (_, *shape) = next(filter(None, kinds))
            part_S = _Shape(dtype, torch.Size((0, *shape))).empty()
    assert part_S is not None
    if not module.shard.is_whole:  # of each rank of the ETP group
        part_S = whole_weights(part_S, module.shard, index, layout.group("esp", INTRA))
    if owner.num_ep_ranks == 1:
        return part_S
    held_C = [owner.experts_of(ep_rank) for ep_rank in range(owner.num_ep_ranks)]
    joined = all_gather_slots(part_S, [len(held) for held in held_C], group)
    order = torch.from_numpy(np.concatenate(held_C).argsort())
    return joined.cpu().index_select(0, order)  # all experts at once may not fit a device
