# SPDX-License-Identifier: Apache-2.0
"""Replaced layers inside an unmodified DeepSpeed engine.

Patches call what is here in the order in which an engine is made and used: ``replace_layers`` puts
ours in the place of the model's (``DeepSpeedHost`` is what ``steps.host`` asks of it),
``count_experts`` and ``check_optimizer`` let the engine know of them, ``clip_by_global_norm`` and
its like clip by the norm over all experts, and ``begin_forward`` to ``after_step`` are called at
each pass and step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.core.comm import gather_objects, max_in_place, sum_in_place
from ds_moe_ext.core.layout import GRID, Grid
from ds_moe_ext.hosts.attachment import replacement
from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.grid import grid_of
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, Hosted
from ds_moe_ext.hosts.attachment.modules import during, named_modules
from ds_moe_ext.hosts.attachment.notices import SLICES, settle
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.startup_check import cluster_of, start_of
from ds_moe_ext.hosts.deepspeed import gradients, parameter_groups, rank_groups, startup, zero_3
from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates, link_states
from ds_moe_ext.hosts.deepspeed.rank_groups import Stages, TensorParallel
from ds_moe_ext.hosts.deepspeed.refusals import UNSLICED, Given
from ds_moe_ext.hosts.deepspeed.startup import FINDERS, INITIALIZE, off_by
from ds_moe_ext.hosts.meta_model import MetaModel
from ds_moe_ext.hosts.steps.expert_moves import States
from ds_moe_ext.hosts.steps.host import Built, ModelGrids, of_stage, run_on, settle_alike
from ds_moe_ext.hosts.steps.optimizers import ELEMENT_BY_ELEMENT, Stepping, check_kind, split_by
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.hosts.steps.training_run import MONITORED, Run, run_of
from ds_moe_ext.hosts.zebra.profile import Training, profiled
from ds_moe_ext.hosts.zebra.rehearsal import Scene
from ds_moe_ext.hosts.zebra.stage_model import StripedStage, moved_by, of_its_stage
from ds_moe_ext.hosts.zebra.stripe_model import (
    Gradients,
    Pausing,
    Role,
    StripedModel,
    stripe,
)
from ds_moe_ext.hosts.zebra.stripe_pass import Here
from ds_moe_ext.moe.gate import TokenParts
from ds_moe_ext.moe.replica_memory import Accumulation
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.planning.zebra_planner import WeightBytes
from ds_moe_ext.schedule.watch import JOINED, WATCH
from ds_moe_ext.strategies.settings import BLOCK, Settings, read_settings


def replace_layers(engine: Any, model: nn.Module, sources: ReplacementSourceMap) -> None:
    """Replace the model's MoE layers, if the JSON asks for it. Collective.

    Args:
        engine: an engine under construction, before it has looked at the parameters.
        model: the user's model, changed in place.
        sources: notified which new parameter stands for which old ones, so that the engine can mend
            optimizers and parameter lists that the user made before.
    """
    micro_batch = {"train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu()}
    document = {**engine._config._param_dict, **micro_batch}
    settings, strategy = read_settings(document)
    if strategy is None:
        start_of(INITIALIZE).stand_aside(off_by(document) or "off")
        return
    with zero_3.described(model):
        run_on(DeepSpeedHost(engine, model, document, sources), model, settings, strategy)


class DeepSpeedHost:
    """A DeepSpeed engine under construction; a ``steps.host.Host``."""

    name = INITIALIZE
    remedy = JOINED

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        document: Mapping[str, Any],
        sources: ReplacementSourceMap,
    ) -> None:
        self.carrier = engine
        self.device = torch.device(get_accelerator().device_name(engine.local_rank))
        self.dtype: torch.dtype = engine.get_data_types()[0]
        self.micro_batch = startup.micro_batch_of(document)
        self.num_micro_batches: int = engine.gradient_accumulation_steps()
        self._model, self._sources = model, sources
        self._given = Given(document, model, engine.mpu, engine.mesh_device)
        self._here = Here()
        self._role: Role | None = None
        self._shards_weights: bool = engine.zero_optimization_partition_weights()
        self._stages = Stages.of(model)
        self._meta = MetaModel(model)

    def devices(self) -> Sequence[str]:
        return startup.devices_of(self._given)

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        engine = self.carrier
        strategy = startup.checked(self._given, settings, strategy)
        stages = self._stages
        if strategy.roles is not None and stages is not None:
            checkpoint_by_torch(engine, self._model)
        if (dist.get_world_size() if stages is None else stages.size) > 1:
            log = start_of(INITIALIZE).settled.append
            strategy = settle(SLICES, strategy, UNSLICED, engine, log)
        if stages is None or len(stages.ranks) == 1:
            return settings, strategy
        if moved_by(strategy) is not None:
            num_layers = len(replacement.found_in(self._model, FINDERS, settings))
            strategy = of_its_stage(strategy, num_layers, stages.grid.get_pipe_parallel_group())
        return of_stage(settings, stages.own), strategy

    def find(self, settings: Settings) -> list[Found]:
        found = replacement.found_in(self._model, FINDERS, settings)
        return [zero_3.gathering(self._model, self._meta.drawing(layer)) for layer in found]

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> ModelGrids:
        startup.agree(self._given)
        cluster = cluster_of(settings, self.device, start_of(INITIALIZE))
        stages = self._stages
        size = dist.get_world_size() if stages is None else stages.size
        needs = startup.needs_of(self._given.document, optimizer_of(self.carrier))
        grid, why = grid_of(settings, strategy, found, size, cluster, needs=needs)
        alike = startup.description(self._given, grid)
        if stages is None or len(stages.ranks) == 1:
            return ModelGrids(grid, (), alike, why)
        start_of(INITIALIZE).agree({startup.GRID: alike[startup.GRID]})  # as DeepSpeed has groups
        grids = tuple(replace(grid, members=ranks) for ranks in stages.ranks)
        return ModelGrids(grids[stages.own], grids, alike, why)

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        if self._shards_weights:
            zero_3.check_owners(blueprint)
            blueprint = replace(blueprint, why_together=zero_3.WHY_TOGETHER)
        replacement.warn_of_what_stays(self._model, blueprint)
        blueprint = replace(blueprint, made=self._made(blueprint))
        training = training_of(self.carrier, self.device)
        blueprint = profiled(blueprint, self._model, FINDERS, training)
        mpu = groups.mpu if self._stages is None else self.carrier.mpu
        with during(groups, mpu=mpu):  # by which they lie within stages
            rank_groups.make_expert_groups(blueprint.grid, blueprint.strategy.roles)
        _check_groups(blueprint.grid)
        # DeepSpeed does so with all weights, but only when each rank has none but its own experts
        # left.
        if not self._given.is_sharded:  # which gave all ranks the first one's weights
            stages = self._stages
            stage = None if stages is None else stages.grid.get_data_parallel_group()
            replacement.take_first_ranks_experts(self._model, blueprint, self.device, stage)
        rank_groups.make_groups(self.carrier)
        TensorParallel.of(self.carrier.mpu).check()
        # What layers call in the place of their experts alone.
        settings, shares_tokens = blueprint.settings, TensorParallel.of(self.carrier.mpu).group
        around: Around | None = None
        if blueprint.strategy.roles is not None:
            around = Pausing(self._here, settings.capacity_factor)
        if shares_tokens is None or settings.sequence_parallel:
            return blueprint, around

        def in_parts(layer: int, hosted: Hosted) -> TokenParts:
            run = hosted.run if around is None else around(layer, hosted)
            return TokenParts(run, shares_tokens)

        return blueprint, in_parts

    def _made(self, blueprint: Blueprint) -> str:
        """See ``Blueprint.made``. Collective."""
        before = {id(parameter) for parameter in self._model.parameters()}
        roles = blueprint.strategy.roles
        has_dense = roles is None or roles.is_attention(dist.get_rank())
        made = self._meta.make_real(blueprint.found, self.device, has_dense=has_dense)
        self._sources.sources.update({id(n): [old] for n, old in self._meta.sources.items()})
        # Those, and of what has been tied again the weights that an optimizer may have beside.
        self._sources.discarded.update(before.difference(map(id, self._model.parameters())))
        return made

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        sources, strategy = self._sources, blueprint.strategy
        record = gradients.begin_record(self.carrier)
        if replacement.stays_in_slots(blueprint) and takes_each_number_alone(self.carrier):
            users = self.carrier.client_optimizer
            built = [(layer, stacked(layer, adopted, users)) for layer, adopted in built]
        for layer, adopted in built:
            _make_known(layer, adopted, blueprint.grid, sources)
            if self._shards_weights:
                zero_3.shard_over_replicas(layer, blueprint.grid, self.device, self.dtype)
            if strategy.has_uneven_owners or blueprint.replicas_by_grid:
                record.last.update(layer.parameters)
        if strategy.roles is not None:
            self._role = self._role_of(blueprint, [layer for layer, _ in built])
            sources.discarded.update(map(id, self._role.left))
        if self._stages is not None:
            rank_groups.go_back_once(self._model, self._stages)
        if not sources.sources:  # a rank without experts; of an empty map nothing is dropped
            kept = next(self._model.parameters())
            sources.sources[id(kept)] = [kept]

    def _role_of(self, blueprint: Blueprint, layers: list[AttachedLayer]) -> Role:
        """Make the model do what this rank's role is. Collective."""
        roles = blueprint.strategy.roles
        assert roles is not None
        factor = rank_groups.experts_factor(roles, dist.get_rank())
        engine = weakref.ref(self.carrier)  # which layers must not keep alive

        def scale() -> float:
            """Of losses, which optimizers of float16 change, or autocast's scaler."""
            alive: Any = engine()
            scaler = getattr(alive, "torch_autocast_z0_gradscaler", None)
            if scaler is not None:
                return float(scaler.get_scale())
            return float(getattr(getattr(alive, "optimizer", None), "loss_scale", 1.0))

        role_gradients = Gradients(self.device, factor, scale)
        role = stripe(
            self._model,
            blueprint,
            layers,
            role_gradients,
            self._here,
            striped=StripedModel if self._stages is None else StripedStage,
            batch_size=self.carrier.mpu.batch_size,
        )
        if not roles.is_attention(dist.get_rank()):
            self._model.ds_autotp_parsed = True  # type: ignore[assignment]  # nothing to divide
            rank_groups.leave_tied(self._model)
        # ZeRO's optimizers cannot bear to have nothing to train.
        learns = any(p.requires_grad for p in self._model.parameters())
        gathered, stage = gather_objects(str(learns), None), self.carrier.zero_optimization_stage()
        if stage and len(set(gathered)) > 1:
            idle = [rank for rank, learns in enumerate(gathered) if learns != str(True)]
            raise ValueError(
                f"{BLOCK}: zero_optimization.stage is {stage}, but on ranks {idle} all weights "
                "are frozen (they have one role only); set the stage to 0, or train some of "
                "them"
            )
        return role

    def last_pass(self, layer: AttachedLayer) -> Callable[[], bool]:
        if self._stages is not None:
            assert isinstance(layer.hosted, nn.Module)
            schedules = gradients.record_of(self.carrier).schedules
            return rank_groups.counted(layer.hosted, schedules).is_last
        engine = weakref.ref(self.carrier)

        def is_boundary() -> bool:
            alive = engine()
            if alive is None or not alive.managed_gradient_accumulation():
                return True  # nobody knows before ``step``
            return bool(alive.is_gradient_accumulation_boundary())

        return is_boundary

    def accumulation(self, layer: AttachedLayer) -> Accumulation:
        return gradients.EngineAccumulation(self.carrier, layer)

    def optimizer_states(self) -> Callable[[], States]:
        engine = weakref.ref(self.carrier)
        return lambda: OptimizerStates(engine())

    def dense_gradients(
        self, blueprint: Blueprint, layers: Sequence[AttachedLayer]
    ) -> DenseGradients:
        engine, group = self.carrier, None
        if blueprint.strategy.slices_gradients and blueprint.grid.world_size > 1:
            key = blueprint.strategy.keys.slices_gradients
            slices = gradients.record_of(engine).slices = gradients.GradientSlices.of(
                engine, key=key
            )
            group = slices.group
            for layer in layers:
                layer.routed.slices = slices
        return DenseGradients.of(self._model, layers, engine.communication_data_type, group)

    def watch_steps(self, run: Run) -> None:
        gradients.record_of(self.carrier).run = run
        run.planning.log(replacement.owners_line(run.blueprint))
        run.recorder.beside = None if self._role is None else self._role.both_sides


def checkpoint_by_torch(engine: Any, model: PipelineModule) -> None:
    """Let a stage with roles, of an engine under construction, checkpoint activations as DeepSpeed
    would, but so that blocks go back one by one."""
    own = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint)
    pipeline, is_deepspeeds = engine._config.pipeline, model.activation_checkpoint_func in own
    if not is_deepspeeds and pipeline.get("use_reentrant") is not False:
        return  # a function of the user's stays
    pipeline["use_reentrant"] = True  # else DeepSpeed would put its own there
    model.activation_checkpoint_func = _checkpointed
    if pipeline["activation_checkpoint_interval"] or model.activation_checkpoint_interval:
        start_of(INITIALIZE).settled.append(
            "zebra: activations are checkpointed by torch.utils.checkpoint with use_reentrant "
            "false in place of deepspeed.checkpointing, which would compute a stage's blocks again "
            "all at once; cpu_checkpointing is kept, and partitioned or contiguous memory is not"
        )


def _checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    with save_on_cpu() if checkpointing.CPU_CHECKPOINT else nullcontext():
        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _Named())
        )


class _Named:
    """A context in which DeepSpeed's generators with names are as they were when it was made; a
    part of a stage with several blocks enters it for each."""

    def __init__(self) -> None:
        self._tracker = checkpointing.get_cuda_rng_tracker()
        self._states = self._tracker.get_states()

    def __enter__(self) -> None:
        self._before = self._tracker.get_states()
        self._tracker.set_states(dict(self._states))

    def __exit__(self, *_: Any) -> None:
        self._tracker.set_states(self._before)


def _check_groups(grid: Grid) -> None:
    """DeepSpeed has one set of groups of a size, for all engines of a process."""
    name, rank = f"ep_size_{grid.size}", dist.get_rank()
    own = next(ranks for ranks in grid.along(GRID) if rank in ranks)
    made = list(groups._get_expert_parallel_group_ranks(name))
    if made != own:
        raise ValueError(
            f"DeepSpeed's groups {name} are of ranks {made} here, as an earlier engine of this "
            f"process made them, but this engine's experts lie on ranks {own}: an engine with "
            "other pipeline stages or roles needs a new process"
        )


def takes_each_number_alone(engine: Any) -> bool:
    """Whether the engine's optimizer is one of these. Others, as LAMB, look at whole weights, for
    which an expert's are to be its own."""
    known = {name.lower() for name in ELEMENT_BY_ELEMENT}
    return optimizer_of(engine).lower() in known


def optimizer_of(engine: Any) -> str:
    """Name of the engine's optimizer: of its class, or in DeepSpeed's JSON."""
    given = engine.client_optimizer
    return engine.optimizer_name() or "" if given is None else type(given).__name__


def stacked(layer: AttachedLayer, adopted: Adopted, users: Any) -> Adopted:
    """With one parameter for a weight of all experts of a rank, so that what the engine does for
    each parameter it does once; where the experts are no modules of their own, and all of them are
    trained or none, by one group of the user's optimizer."""
    if not isinstance(layer.hosted, HostedExperts):
        return adopted
    # DeepSpeed refuses one parameter from several groups by itself.
    made_groups = users.param_groups if isinstance(users, torch.optim.Optimizer) else ()
    group_of = {id(p): n for n, group in enumerate(made_groups) for p in group["params"]}
    columns = list(zip(*(slot.parameters for slot in layer.hosted.slots())))
    for column in columns:
        kinds = {(p.requires_grad, group_of.get(id(q))) for p in column for q in adopted.sources[p]}
        if len(kinds) > 1:
            return adopted
    of_first = {
        column[0]: chain.from_iterable(adopted.sources[p] for p in column) for column in columns
    }
    apart = set(layer.parameters)
    made = {
        stack: tuple(dict.fromkeys(of_first[one])) for stack, one in layer.hosted.stack().items()
    }
    others = {new: old for new, old in adopted.sources.items() if new not in apart}
    return replace(adopted, sources=others | made)


NUM_STATES = {"sgd": 1, "lion": 1, "adagrad": 1}
"""Tensors of an optimizer's state; of any other two are counted, as Adam has."""


def training_of(engine: Any, device: torch.device) -> Training:
    """How an engine under construction is going to train, for what is measured before it does. Its
    model has not been cast, moved or divided yet. Collective, where AutoTP divides it."""
    is_cast = engine.fp16_enabled() or engine.bfloat16_enabled()
    dtype, gradient_dtype = engine.get_data_types()
    num_states = NUM_STATES.get(optimizer_of(engine).lower(), 2)

    def divide(model: nn.Module) -> None:
        engine._apply_autotp_partitioning(model, engine.tensor_parallel_config())

    scene = Scene(device, dtype if is_cast else None, partial(autocast_if_enabled, engine))
    has_roles = rank_groups.has_roles(engine)
    if has_roles and engine.autotp_size() > 1:
        groups._init_tp_mesh_device(tensor_model_parallel_size=engine.autotp_size())
        scene = replace(scene, divide=divide)
    return Training(
        scene=scene,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        weight_bytes=WeightBytes(
            weight=dtype.itemsize,
            gradient=gradient_dtype.itemsize,
            optimizer=4 * (num_states + is_cast),
            zero_stage=engine.zero_optimization_stage(),
        ),
        tensor_size=engine.mpu.tensor_size if has_roles else 1,
        sequence_size=engine.mpu.sequence_size if has_roles else 1,
    )


def _make_known(
    layer: AttachedLayer, adopted: Adopted, grid: Grid, sources: ReplacementSourceMap
) -> None:
    """Report to the engine which parameters are experts', and what became of the model's."""
    layer.hosted._is_autoep_layer = True  # type: ignore[attr-defined]  # AutoTP leaves it alone
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


def count_experts(engine: Any) -> None:
    """Report to the engine the experts that it did not recognise: its own MoE class it counts
    itself."""
    run = run_of(engine)
    if run is None:
        return
    engine.has_moe_layers = True
    if engine.zero_optimization_partition_weights():
        zero_3.gather_with_blocks(engine.module, run.layers)
    native = {name for name, module in named_modules(engine.module) if isinstance(module, MoE)}
    engine.num_experts += [
        layer.routed.layer_context.plan.owner.num_experts
        for layer in run.layers
        if layer.name not in native
    ]


def check_optimizer(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Look at the optimizer that an engine is about to wrap, and give it back the user's groups."""
    run = run_of(engine)
    if run is not None:
        stage, etp_size = engine.zero_optimization_stage(), run.blueprint.grid.etp_size
        sharding = f"zero_optimization.stage is {stage}" if stage else ""
        stepping = Stepping(
            optimizer,
            sharding=sharding,
            splitting=split_by(etp_size),
            by_elements="checkpoints hold optimizer states per element",
            in_turns=sharding if stage == 3 else "",
            has_masters=getattr(optimizer, "master_weights", False),
        )
        check_kind(stepping)
        parameter_groups.restore_groups(engine, optimizer)
        parameter_groups.pair_with_weights(optimizer)
        settle_alike(run, optimizer)


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
    rank_groups.clip_gradients(engine, parameters, _global_norm(engine, run, parameters))
    return True


def clip_halves_by_global_norm(engine: Any) -> None:
    """Let half precision at ZeRO stage 0 clip by that norm, too.

    DeepSpeed's wrapper of an optimizer that takes no flat weights leaves all experts out. What it
    reports is the norm of scaled gradients, as before.
    """
    run, optimizer = run_of(engine), engine.optimizer
    if run is None or not isinstance(optimizer, FP16_UnfusedOptimizer):
        return
    clips = optimizer.unscale_and_clip_grads

    def unscale_and_clip_grads(total_norm: Any, **named: Any) -> Any:
        parameters = (p for group in optimizer.fp16_groups for p in group if p.grad is not None)
        optimizer._global_grad_norm = float(_global_norm(engine, run, parameters))
        return clips(optimizer._global_grad_norm, **named)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def skip_together(engine: Any) -> None:
    """Let torch_autocast in float16 skip a step on all ranks where any rank, which has other
    experts, has found an overflow.

    Its scaler at ZeRO stage 0 looks at the gradients of one rank. At stages 1 and 2 DeepSpeed steps
    one a parameter group, whose scale changes between the groups of a step, and clips gradients
    that are scaled; what ``fp16.enabled`` uses there comes in its place, from the same scale on.
    """
    run, optimizer = run_of(engine), engine.optimizer
    if run is None:
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.torch_autocast_gradscaler:
        scaler, optimizer.torch_autocast_gradscaler = optimizer.torch_autocast_gradscaler, None
        # With no least scale, and changed at the first overflow, as the other.
        optimizer.loss_scaler = DynamicLossScaler(
            scaler.get_scale(), scaler.get_growth_interval(), 0.0, 1, False, False
        )
        optimizer.dynamic_loss_scale = optimizer.check_grad_overflow = True
        run.planning.log(
            "torch_autocast.dtype is float16: all ranks have one loss scale, changed once a step "
            "(DeepSpeed's own changes once a parameter group of a rank)"
        )
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if scaler is None:
        return
    unscale = scaler._unscale_grads_

    def unscale_grads(*given: Any) -> dict[torch.device, Tensor]:
        found = unscale(*given).values()
        worst = torch.stack([torch.zeros((), device=engine.device), *found]).amax()
        return {engine.device: max_in_place(worst, None)}

    scaler._unscale_grads_ = unscale_grads


def _global_norm(engine: Any, run: Run, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of gradients of all ranks, each expert and each part of a divided weight counted once.
    Collective."""
    of_experts, of_parts, of_wholes = torch.zeros(3, dtype=torch.float64, device=engine.device)
    for parameter in parameters:
        if rank_groups.is_of_another_stage(engine.module, parameter):  # which counts it
            continue
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
    total = of_experts + of_parts + of_wholes
    if engine.pipeline_parallelism:
        sum_in_place(total, engine.mpu.get_pipe_parallel_group())
    return total.sqrt()


def after_step(engine: Any, *_: Any, **__: Any) -> None:
    """Record the optimizer step that has just been taken."""
    run = run_of(engine)
    if run is not None:
        record = gradients.record_of(engine)
        record.take_averaged()  # which the optimizer has used
        link_states(engine.optimizer, record)
        with zero_3.at_hand(engine, run):
            run.after_step(engine.global_steps - 1)
        # DeepSpeed's monitor has scalars on the rank and the axis of its own.
        every = engine.steps_per_print() or MONITORED
        is_writer = engine.global_rank == 0 and engine.monitor.enabled
        if is_writer and run.monitor.is_on and engine.global_steps % every == 0:
            run.monitor.show(run.recorder, engine.monitor.write_events, engine.global_samples)


def begin_forward(engine: Any, *_: Any, **__: Any) -> None:
    """No backward pass is under way, so that what slices have of one is of one that failed."""
    record = gradients.record_of(engine)
    if record.slices is not None:
        record.slices.drop()
        record.averaged.clear()
        record.order.clear()


def begin_backward(engine: Any, loss: Any, *_: Any, **__: Any) -> None:
    """Make ready for a backward pass, and keep the loss that it is given for the report, which
    reads it later.

    Where it comes behind the one that was the last of the step, DeepSpeed will average what that
    left once more. Of dense gradients, which all ranks have alike by then, this leaves what they
    are; those of experts are multiplied by what would be missing.
    """
    for own, factor in gradients.record_of(engine).take_averaged():
        torch._foreach_mul_(own, factor)
    run = run_of(engine)
    is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if run is not None and run.recorder.ranks is not None and is_one:
        run.recorder.ranks.own.saw_loss(loss.reshape(()))


def train_batch(engine: Any, arguments: Mapping[str, Any], train: Callable[..., Any]) -> Any:
    """All passes of a step."""
    if run_of(engine) is None:
        return train(**arguments)
    schedules = gradients.record_of(engine).schedules
    schedules.begin(engine.micro_batches, forward_only=False)
    try:
        with WATCH.host_pass("engine.train_batch"):
            return train(**arguments)
    finally:
        schedules.end()
