# SPDX-License-Identifier: Apache-2.0
"""Ranks with roles in an unmodified Megatron run; see ``docs/strategies/zebra.md``.

Each role trains in a world of its own (``active_settings.Worlds``). Both build the whole model as
Megatron does. An attention rank drops the experts of each layer as soon as that is built
(``layers.leave_experts``), an expert rank all other weights just before the model is wrapped for
data parallelism (``keep_own``): so neither DDP nor the optimizer ever sees them. ``start`` then
puts ``striped_steps`` in the place of Megatron's schedule, and lets both roles know one norm of
gradients, skip and rerun steps, end, and write one checkpoint together.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_by_torch

from ds_moe_ext.core.comm import gather_objects, max_in_place, sum_in_place
from ds_moe_ext.core.layout import Grid, group_among
from ds_moe_ext.hosts.attachment import startup_check
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.notices import refuse
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.startup_check import start_of
from ds_moe_ext.hosts.megatron.active_settings import Chosen, Worlds, chosen
from ds_moe_ext.hosts.megatron.engine import (
    OPTIMIZER,
    Grids,
    MegatronHost,
    Reported,
    check_wrapped,
    offloads,
    watch_steps,
    whole,
)
from ds_moe_ext.hosts.megatron.layers import leave_experts
from ds_moe_ext.hosts.megatron.refusals import (
    ARGUMENTS,
    DIVIDED,
    STEPPING,
    Divided,
    script_variables,
)
from ds_moe_ext.hosts.megatron.rehearsal import moved_of
from ds_moe_ext.hosts.megatron.striped_steps import ModelRecord, StripedSteps
from ds_moe_ext.hosts.steps.host import Built, ModelGrids, of_stage, run_on
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.hosts.steps.training_run import RECORD, Run, Tracer
from ds_moe_ext.hosts.zebra.profile import wants_profile
from ds_moe_ext.hosts.zebra.stage_model import of_its_stage
from ds_moe_ext.hosts.zebra.stripe_model import (
    BothSides,
    Pausing,
    blocks_of,
    cut_at,
    keep_parameters,
    stack_of,
)
from ds_moe_ext.hosts.zebra.stripe_pass import Here, StripePass, swapped
from ds_moe_ext.planning.strategy import CostGroup, Strategy
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.strategies.settings import BLOCK, Settings


def start(asked: Chosen, chunks: Sequence[nn.Module], optimizer: Any) -> Run | None:
    """Stripe a model that is ready to be trained. Collective, over the ranks of both roles, in the
    world of all.

    Args:
        asked: the settings.
        chunks: the model, wrapped for data parallelism: one part.
        optimizer: Megatron's, of what this rank keeps.

    Raises:
        ValueError: the model does not suit the settings.
    """
    assert asked.worlds is not None
    with start_of(OPTIMIZER).together():
        check_wrapped(chunks)
        refuse(STEPPING, optimizer.config)
    host = RolesHost(chunks, optimizer, asked.worlds)
    return run_on(host, host.model, asked.settings, asked.strategy)


class RolesHost(MegatronHost):
    """A model of Megatron's whose ranks have two roles. Arguments as of ``start``."""

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, worlds: Worlds) -> None:
        super().__init__(chunks, optimizer, _grids(worlds))
        self.micro_batch = None  # Megatron's is not cut into stripes, which are its micro-batches
        self._worlds, self._here = worlds, Here(get_cuda_rng_tracker())
        stages = self._own_grids.beside or (self._own_grids.own,)
        groups = [ranks for stage in stages for ranks in stage.along("ep")]
        self._control = group_among(groups, backend="gloo")
        parts = [stage.ranks.flatten().tolist() for stage in stages]
        self._beside = group_among(parts, backend="gloo")  # the ranks with the same layers

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        """All has been refused by the arguments, or settled."""
        asked = chosen()
        start_of(OPTIMIZER).settled.extend([] if asked is None else asked.start.settled)
        own = self._own_grids
        num = sum(isinstance(module, MoELayer) for module in self.model.modules())
        strategy = of_its_stage(strategy, num, parallel_state.get_pipeline_model_parallel_group())
        return of_stage(settings, own.stage) if own.beside else settings, strategy

    def sharing(self, layer: Any) -> dist.ProcessGroup:
        """Those of a ZP group."""
        return self._control

    def of_expert_ranks(self, reported: Sequence[Reported]) -> Sequence[Reported]:
        """Attention ranks have left experts before anybody could freeze some."""
        return [reported[ep_rank] for ep_rank in self._worlds.roles.expert_ep_ranks]

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> ModelGrids:
        own = self._own_grids
        return ModelGrids(own.own, own.beside, startup_check.layers_of(found))

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        blueprint, _ = super().prepare(blueprint)
        return blueprint, Pausing(self._here, None)

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        super().mark(blueprint, built)
        strategy, worlds, (chunk,) = blueprint.strategy, self._worlds, self._chunks
        layers = [layer for layer, _ in built]
        blocks = blocks_of(self.model, layers)
        for block in blocks if worlds.is_attention else ():
            cut_at(block, self._here)
        config: Any = chunk.config
        if worlds.is_attention and config.recompute_granularity is not None:
            self._recompute_by_block(config)
        stack = stack_of(blueprint, layers, self.device, self._here)
        stripes, debug = strategy.striping.num_stripes, blueprint.settings.debug
        stages = parallel_state.get_pipeline_model_parallel_group()
        steps = StripedSteps(chunk, stack, self._control, stages, stripes, debug)
        setattr(chunk, RECORD, ModelRecord(steps=steps))
        self._everyone = group_among([list(range(worlds.size))], backend="gloo")
        _join_norm(self.carrier, worlds, self._everyone)
        _join_reruns(self._everyone)
        _join_exits(self._everyone)
        _of_both(self.carrier, chunk, worlds, self._everyone)

    def _recompute_by_block(self, config: Any) -> None:
        if config.recompute_method == "uniform" and config.recompute_num_layers != 1:
            start_of(OPTIMIZER).settled.append(
                f"--recompute-num-layers {config.recompute_num_layers} counts as 1: backward goes "
                "through one layer of all micro-batches, then through the layer before"
            )
            config.recompute_num_layers = 1
        for name, layer in self.model.named_modules():
            if isinstance(layer, MoELayer):
                _count_once(layer.router, self._here)
                _keep_through(layer, self.model.get_submodule(name.rpartition(".")[0]))

    def dense_gradients(
        self, blueprint: Blueprint, layers: Sequence[AttachedLayer]
    ) -> DenseGradients:
        return DenseGradients.of(self.model, layers, self.dtype, None)

    def watch_steps(self, run: Run) -> None:
        watch_steps(self.carrier, run)
        side = dist.get_rank(self._control)
        run.recorder.beside = BothSides(self._control, side, self._worlds.roles)
        # Steps are taken in the world of a role.
        gather, tracer = partial(gather_objects, group=self._beside), run.recorder.tracer
        assert run.recorder.ranks is not None
        run.recorder.ranks.gather = gather
        run.recorder.ranks.is_on = any(gather(run.recorder.ranks.is_on))
        if isinstance(tracer, Tracer):
            tracer.meet_by(gather)


def _grids(worlds: Worlds) -> Grids:
    """The ZP groups of each pipeline stage, a grid. Collective, in the world of all."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = gather_objects(stage, None)
    order, size = worlds.roles.order or range(worlds.size), worlds.roles.size
    ranks = [[rank for rank in order if stages[rank] == n] for n in range(max(stages) + 1)]
    groups = (order[first : first + size] for first in range(0, worlds.size, size))
    if any(len({stages[rank] for rank in group}) > 1 for group in groups):
        raise ValueError(
            "the ranks of a ZP group are in several pipeline stages; leave "
            "--use-tp-pp-dp-mapping out"
        )
    if len(ranks) == 1:
        return Grids(Grid(worlds.size, size, members=worlds.roles.order), (), 0)
    made = tuple(Grid(len(own), size, members=tuple(own)) for own in ranks)
    return Grids(made[stage], made, stage)


# The model and the sizes of a role.

SIZES = {
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "num_distributed_optimizer_instances": "--num-distributed-optimizer-instances",
}
"""Of Megatron's groups, and their flags: those that must be 1."""

OF_EXPERT_RANKS = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_tensor_parallel_size": 1,
}
"""Sizes that attention ranks take as given; Megatron's groups and arguments have these names."""

UNDIVIDED: dict[str, Any] = {
    "tp_comm_overlap": False,
    "distribute_saved_activations": False,
    "cp_comm_type": ["p2p"],
}
"""Arguments that are refused without tensor and context parallelism, or some ways of it."""


def settle_sizes(worlds: Worlds, sizes: dict[str, Any]) -> None:
    """Experts are whole where nobody has said otherwise: Megatron would divide them as the rest.
    ``sizes`` have Megatron's names. Raises ValueError where they do not suit roles."""
    divided = Divided(worlds.roles, sizes)
    refuse(DIVIDED, divided)
    if sizes.get("expert_tensor_parallel_size") is None and divided.tp > 1:
        _say("--expert-tensor-parallel-size is 1: an expert rank has whole experts")
    sizes["expert_tensor_parallel_size"] = 1


SETTLED = {
    "gradient_accumulation_fusion": (
        "gradient accumulation fusion is off: it counts on one backward pass through a layer, "
        "which comes in parts here"
    ),
    "async_save": (
        "--async-save is off: both roles write one checkpoint, together, and wait until it is there"
    ),
    "log_straggler": (
        "--log-straggler is off: it times one micro-batch at a time, but several run at once; the "
        "report has what each rank takes"
    ),
    "te_rng_tracker": (
        "--te-rng-tracker is off: it is for CUDA graphs; Megatron's own, by the same seeds, keeps "
        "random numbers of several micro-batches apart"
    ),
}
"""Arguments of Megatron-LM's scripts that are false with roles."""


def settle_arguments(worlds: Worlds, given: Any) -> None:
    """Let a script's arguments, not validated yet, be those of the rank's role. Raises ValueError
    where they do not suit roles."""
    refuse(ARGUMENTS, given)
    settle_sizes(worlds, vars(given))
    for name, line in SETTLED.items():
        if getattr(given, name, False):
            setattr(given, name, False)
            _say(line)
    if not worlds.is_attention:
        vars(given).update(OF_EXPERT_RANKS, **UNDIVIDED)


def settle_layer(worlds: Worlds, strategy: Strategy, config: Any) -> None:
    """The same for the config of an MoE layer that is about to be built."""
    if config.moe_shared_expert_overlap:
        config.moe_shared_expert_overlap = False
        _say("--moe-shared-expert-overlap is off: other micro-batches run beside what travels")
    num_experts, holders = config.num_moe_experts, {"expert": worlds.roles.expert_ep_ranks}
    if offloads(strategy):
        holders["attention"] = worlds.roles.attention_ep_ranks
    for role, ranks in holders.items():
        if num_experts % len(ranks):
            other = ", or leave moved and profile out" if role == "attention" else ""
            raise ValueError(
                f"{BLOCK}.strategy gives experts to {len(ranks)} {role} ranks of a ZP group, and "
                f"Megatron builds equally many on each, but a layer has {num_experts}; choose an "
                f"{role}_size that divides {num_experts}{other}"
            )


def _say(line: str) -> None:
    """Show a line when the run starts."""
    if (asked := chosen()) is not None:
        asked.start.settled.append(line)


def with_sizes(
    worlds: Worlds, strategy: Strategy, initialize: Callable[..., Any]
) -> Callable[..., Any]:
    """``initialize_model_parallel`` as it is to be called on this rank: attention ranks are
    tensor, context and data parallel, the expert ranks of a ZP group share its experts, as expert
    parallel ranks do; and so do its attention ranks where they have some. Raises ValueError where
    the sizes do not suit roles."""

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(initialize).bind(*args, **kwargs)
        for name, flag in SIZES.items():
            if bound.arguments.get(name) not in (None, 1):
                raise ValueError(
                    f"{BLOCK}.strategy gives ranks roles, but Megatron was given {flag} "
                    f"{bound.arguments[name]}; attention ranks are tensor, context and data "
                    "parallel only, and the strategy's keys set which ranks have which experts: "
                    "leave it out"
                )
        num_stages = bound.arguments.get("pipeline_model_parallel_size") or 1
        num_groups = worlds.size // worlds.roles.size
        if num_groups % num_stages:
            raise ValueError(
                f"Megatron was given --pipeline-model-parallel-size {num_stages}, but there are "
                f"{num_groups} ZP groups of {worlds.roles}, and each is in one stage; launch "
                f"{worlds.roles.size * num_stages} ranks or a multiple of that, or choose a divisor"
            )
        settle_sizes(worlds, bound.arguments)
        if not worlds.is_attention:
            taken = inspect.signature(initialize).parameters
            bound.arguments |= {n: size for n, size in OF_EXPERT_RANKS.items() if n in taken}
            bound.arguments["expert_model_parallel_size"] = len(worlds.roles.expert_ep_ranks)
        elif offloads(strategy):
            bound.arguments["expert_model_parallel_size"] = len(worlds.roles.attention_ep_ranks)
        return initialize(*bound.args, **bound.kwargs)

    return initialize_model_parallel


def measured(asked: Chosen, model: nn.Module, ddp_config: Any) -> Chosen:
    """The same, with the experts that move by what is measured of a model that is about to be
    wrapped, where that is asked for. Collective, over the ranks of both roles. Raises ValueError on
    all of them where it cannot be measured."""
    strategy, worlds = cast(Any, asked.strategy), asked.worlds
    if worlds is None or not wants_profile(strategy):
        return asked
    with worlds.together():
        grids = _grids(worlds)
        stages = grids.beside or (grids.own,)
        group = group_among([each.ranks.flatten().tolist() for each in stages], backend="gloo")
    found: list[int] | str
    try:
        found = moved_of(asked, whole([model]), ddp_config, grids.own, group)
    except ValueError as error:
        found = str(error)
    moved: dict[int, list[int]] = {}
    for stage, own in gather_objects((grids.stage, found), worlds.whole):
        if isinstance(own, str):
            raise ValueError(own)
        moved[stage] = own
    of_all = [number for stage in sorted(moved) for number in moved[stage]]
    return replace(asked, strategy=replace(strategy, moved=of_all, profile=None))


def keep_own(model: nn.Module, worlds: Worlds, strategy: Strategy) -> None:
    """Drop all of a model that is about to be wrapped, but what the rank's role has. Collective,
    over the ranks of a pipeline."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, MoELayer)]
    num_experts = [layer.config.num_moe_experts for layer in layers]
    alone = [CostGroup(layers=(layer,)) for layer in range(len(layers))]
    stages = parallel_state.get_pipeline_model_parallel_group()
    strategy = of_its_stage(strategy, len(layers), stages)
    owners = strategy.first_owners(num_experts, alone, worlds.roles.size)
    for layer, owner in zip(layers, owners):
        own = owner.experts_of(worlds.roles.place(worlds.rank) % worlds.roles.size).tolist()
        if own != list(layer.local_expert_indices):
            leave_experts(layer, own)
    if not worlds.is_attention:
        _keep_experts(model, layers)


def _keep_experts(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Drop all of a model but the experts."""
    kept = [p for layer in layers for p in layer.get_submodule("experts").parameters()]
    if not kept:
        raise ValueError(
            f"{BLOCK}.strategy gives ranks roles, but the model has no MoE layer, so expert "
            "ranks would be idle; give --num-experts, or leave ds_moe_ext out"
        )
    keep_parameters(model, kept)
    modules: Iterable[Any] = model.modules()
    for module in modules:
        is_empty = next(module.parameters(), None) is None
        if is_empty and not any(isinstance(inner, MoELayer) for inner in module.modules()):
            module.sharded_state_dict = lambda *args, **kwargs: {}
        elif isinstance(module, LanguageModule):  # its own looks for embeddings
            module.sharded_state_dict = partial(MegatronModule.sharded_state_dict, module)
    model.register_load_state_dict_post_hook(_only_experts)
    for wrapped in (m for name, m in model.named_modules() if set(name.split(".")) == {"module"}):
        wrapped.register_load_state_dict_post_hook(_only_experts)


def _only_experts(model: nn.Module, incompatible: Any) -> None:
    """Of what a checkpoint did not have, only weights that are here are missed."""
    here = {name for name, _ in model.named_parameters()}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in here]


# One mind of both roles. ``control`` are all ranks, over gloo.


def _join_norm(optimizer: Any, worlds: Worlds, control: dist.ProcessGroup) -> None:
    """Let both roles know one norm of gradients, by which Megatron clips and which it shows, and
    skip a step together, behind which both scale losses alike. Of its own role an optimizer knows
    all this already, the same on all of its ranks."""
    stock_norm, stock_prepare = optimizer.get_grad_norm, optimizer.prepare_grads
    scalers = [getattr(own, "grad_scaler", None) for own in optimizer.chained_optimizers]
    updates = [scaler.update for scaler in scalers if scaler is not None]

    @wraps(stock_norm)
    def get_grad_norm() -> float:
        own = float(stock_norm() or 0.0)  # None where a rank has nothing to train
        square = torch.tensor(own * own if worlds.is_first else 0.0, dtype=torch.float64)
        return math.sqrt(sum_in_place(square, control))

    @wraps(stock_prepare)
    def prepare_grads() -> bool:
        """A role that alone skipped a step would leave the other to wait for its norm."""
        is_skipped = bool(max_in_place(torch.tensor(int(stock_prepare())), control))
        for update in updates:
            update(is_skipped)
        return is_skipped

    optimizer.get_grad_norm = get_grad_norm
    if optimizer.config.fp16 or optimizer.config.loss_scale:  # else nothing is looked for
        optimizer.prepare_grads = prepare_grads
        for scaler in scalers:
            if scaler is not None:
                scaler.update = lambda found_inf: None  # whether both skip is not known yet


def _join_reruns(control: dist.ProcessGroup) -> None:
    """Where Megatron runs a step again, to see whether numbers that are none come again, both roles
    do, and both end for it. Nothing changes where nobody has made a machine that reruns steps."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None or machine.get_mode() is rerun_state_machine.RerunMode.DISABLED:
        return
    stock = machine._reduce_any

    @wraps(stock)
    def reduce_any(asked: Any) -> Any:
        found = max_in_place(torch.tensor(stock(asked), dtype=torch.int64), control)
        return tuple(map(bool, found.tolist())) if isinstance(asked, list) else bool(found)

    machine._reduce_any = reduce_any


class _Minutes(float):
    """``--exit-duration-in-mins``, which Megatron-LM's loop compares the time with, on all ranks
    together: it has passed where it has on any of either role."""

    control: dist.ProcessGroup

    def __lt__(self, passed: float) -> bool:
        return bool(max_in_place(torch.tensor(int(passed > float(self))), self.control))

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)  # a checkpoint has the script's arguments


def _join_exits(control: dist.ProcessGroup) -> None:
    """Where Megatron-LM's loop ends for a signal, or for the time, both roles end together."""
    handler, given = script_variables("_GLOBAL_SIGNAL_HANDLER", "_GLOBAL_ARGS")
    if handler is not None:
        stock = handler.signals_received
        handler.signals_received = lambda: [
            bool(max_in_place(torch.tensor(int(any(stock()))), control))
        ]
    if getattr(given, "exit_duration_in_mins", None):
        given.exit_duration_in_mins = _Minutes(given.exit_duration_in_mins)
        given.exit_duration_in_mins.control = control


# Activation recomputation. Megatron's checkpoints are reentrant: forward runs without a graph, and
# backward of a checkpoint is whole. Stripes pause within one and go back in parts, so that on
# attention ranks those of torch that are not reentrant take their place.


def checkpoint(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
    """Called as ``tensor_parallel.checkpoint`` is. What is computed again draws the same random
    numbers, of Megatron's named generators too."""
    tracker = get_cuda_rng_tracker()
    known = {**vars(tracker), "states_": tracker.get_states()}

    def computed(*args: Any) -> Any:
        if not in_backward():
            return function(*args)
        with swapped(tracker, {**known, "states_": dict(known["states_"])}):
            return function(*args)

    return checkpoint_by_torch(computed, *args, use_reentrant=False)


def _keep_through(layer: Any, block: Any) -> None:
    """Let a block know what it knew before its experts, while which other micro-batches ran."""
    name, stock = "pre_mlp_norm_checkpoint", layer.forward

    @wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = getattr(block, name, None)
        found = stock(*args, **kwargs)
        setattr(block, name, kept)
        return found

    layer.forward = forward


def _count_once(router: Any, here: Here) -> None:
    """Let a router that routes again in backward know what it knew in forward, and add nothing to
    its counts and to the losses that are shown."""
    known: weakref.WeakKeyDictionary[StripePass, list[Tensor]] = weakref.WeakKeyDictionary()
    stock = router.forward

    @wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        stripe_pass, buffers = here.stripe_pass, list(router.buffers())
        if stripe_pass is None:
            return stock(*args, **kwargs)
        now, number = [buffer.clone() for buffer in buffers], router.layer_number
        if not in_backward():
            known[stripe_pass] = now
            return stock(*args, **kwargs)
        _copy(known[stripe_pass], buffers)
        router.layer_number = None  # Megatron shows no losses of such a layer
        try:
            return stock(*args, **kwargs)
        finally:
            router.layer_number = number
            _copy(now, buffers)

    router.forward = forward


@torch.no_grad()
def _copy(values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values):
        buffer.copy_(value)


# One checkpoint of both roles, as stock Megatron would write it of attention ranks alone. Its
# distributed format knows weights by name and experts by number, so that each role says what it
# has. An attention rank lacks the optimizer of the experts, an expert rank that of all else; what
# these have beside tensors by name, as learning rates, is reported by the other role.


class _Absent:
    """In a chain of Megatron's optimizers, one whose weights are on the ranks of the other role."""

    is_stub_optimizer = True

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model_chunks: list[Any] = []
        self.param_groups: list[Any] = []
        self.optimizer = self

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """It has nothing to report."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """It is not here."""


def _of_both(optimizer: Any, chunk: Any, worlds: Worlds, control: dist.ProcessGroup) -> None:
    """Let a role's optimizer, a chain of Megatron's, save and load as one of all weights would."""
    chain, absent = optimizer.chained_optimizers, _Absent(optimizer.config)
    own = [each for each in chain if not each.is_stub_optimizer] or chain[-1:]
    if len(own) == 1:  # Megatron chains dense weights before experts
        own = [*own, absent] if worlds.is_attention else [absent, *own]
    both = ChainedOptimizer(own)

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[int, Any]:
        state: dict[int, Any] = both.sharded_state_dict(*args, **kwargs)
        mine = {n: state[n] for n, each in enumerate(own) if each is not absent}
        plain = {n: extract_matching_values(part, _is_sharded)[1] for n, part in mine.items()}
        gathered = gather_objects(plain if worlds.is_first else {}, control)
        theirs = {n: part for each in gathered for n, part in each.items()}
        return theirs | mine

    optimizer.sharded_state_dict = sharded_state_dict
    optimizer.load_state_dict = both.load_state_dict
    optimizer.state_dict = chunk.state_dict_for_save_checkpoint = _refuse


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedBase)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{BLOCK}.strategy gives ranks roles, each with a part of the model, which per-rank "
        "checkpoint files cannot describe; use --ckpt-format torch_dist"
    )


def save_together(
    save: Callable[..., Any], worlds: Worlds, state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call ``dist_checkpointing.save`` on the ranks of both roles. What both have, as states of
    generators, is reported by attention ranks. Raises ValueError where it is to go on in the
    background."""
    if kwargs.get("async_sharded_save"):
        raise ValueError(
            f"{BLOCK}.strategy gives ranks roles, which save together: leave --async-save out"
        )
    keys = {v.key for v in nested_values(state) if _is_sharded(v) and ".experts." not in v.key}
    gathered = gather_objects(keys if worlds.is_attention else set(), worlds.whole)
    if not worlds.is_attention:
        theirs: set[str] = set().union(*gathered)
        _, state = extract_matching_values(state, lambda v: _is_sharded(v) and v.key in theirs)
    with worlds.together():
        return save(state, *args, **kwargs)
