# SPDX-License-Identifier: Apache-2.0
"""Which ranks share what under DeepSpeed: process groups of weights, stages and roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from torch import Tensor, nn

from ds_moe_ext.core.comm import gather_objects, max_in_place, sum_in_place
from ds_moe_ext.core.layout import GRID, Grid, Roles, group_among
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.steps.host import Passes, Schedules
from ds_moe_ext.strategies.settings import BLOCK

# Ranks that do not all have the same dense weights: which of them share what.


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The ranks that share the dense weights of one copy of the model."""

    size: int = 1  # their number; 1 without tensor parallelism
    rank: int = 0  # this one's place among them
    group: dist.ProcessGroup | None = None  # them; None where there is one

    @classmethod
    def of(cls, mpu: Any) -> TensorParallel:
        """From an mpu that ``refusals`` let through, or None. One of sequence parallel ranks, which
        have all dense weights, calls them model parallel too."""
        if mpu is None or is_of_sequences(mpu):
            return cls()
        size = bwc_tensor_model_parallel_world_size(mpu)
        if size == 1:
            return cls()
        return cls(size, bwc_tensor_model_parallel_rank(mpu), bwc_tensor_model_parallel_group(mpu))

    def check(self) -> None:
        """Collective."""
        if self.group is None:
            return
        ranks = [int(text) for text in gather_objects(str(dist.get_rank()), self.group)]
        first = ranks[0]
        if first % self.size or ranks != list(range(first, first + self.size)):
            raise ValueError(
                f"tensor parallel ranks {ranks} are not consecutive; ds_moe_ext needs mpu "
                f"groups of {self.size} consecutive ranks, as Megatron makes them"
            )


def is_of_sequences(mpu: Any) -> bool:
    """Whether an mpu knows of sequence parallel groups, as DeepSpeed asks it."""
    if isinstance(mpu, RoleUnit):
        return mpu.sequence_size > 1
    return hasattr(mpu, "initialize_sequence_parallel")


def make_groups(engine: Any) -> None:
    """Make AutoTP's groups, if the JSON asks for it, and give the engine their mpu: it would a
    moment later, but layers that share tokens are made before it divides dense weights. One with
    roles has its own. Collective."""
    if has_roles(engine):
        if engine.autotp_size() not in (0, 1, engine.mpu.tensor_size):
            raise ValueError(
                f"tp_model_init divides by {engine.autotp_size()}, of which {BLOCK} learns too "
                "late where ranks have roles; set tensor_parallel.autotp_size in the JSON, and "
                "leave tp_model_init out"
            )
    elif engine.autotp_size() > 1:
        groups._init_tp_mesh_device(tensor_model_parallel_size=engine.autotp_size())
        engine.mpu = groups


def make_expert_groups(grid: Grid, roles: Roles | None) -> None:
    """Let DeepSpeed have its groups of experts, of which it makes those of neighbours itself.
    Collective."""
    name = f"ep_size_{grid.size}"
    if roles is not None and roles.order and name not in groups._EXPERT_PARALLEL_GROUP:
        for axis, made, known in (
            (GRID, groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
            ("edp", groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
        ):
            lists = grid.along(axis)
            made[name] = group_among(lists)
            known[name] = next(ranks for ranks in lists if dist.get_rank() in ranks)
    groups._create_expert_and_data_parallel(grid.size)


# Stages of a pipeline.


@dataclass(frozen=True, eq=False)
class Stages:
    """Who runs which layers of a pipeline."""

    ranks: tuple[tuple[int, ...], ...]  # of each stage, in their order
    own: int  # number of this rank's stage
    grid: PipelineParallelGrid  # DeepSpeed's, which knows of no roles

    @classmethod
    def of(cls, model: nn.Module) -> Stages | None:
        """Of a model that ``refusals`` let through; None where it is no ``PipelineModule``."""
        if not isinstance(model, PipelineModule):
            return None
        ranks = tuple(tuple(each) for each in model.topology().get_axis_comm_lists("data"))
        return cls(ranks, model._grid.get_pipe_parallel_rank(), model._grid)

    @property
    def size(self) -> int:
        return len(self.ranks[self.own])

    def check(self, found: Iterable[Found]) -> None:
        """Whether this rank's stage can take part."""
        names = [layer.name for layer in found]
        if not names:
            raise ValueError(
                f"{BLOCK} is enabled, but stage {self.own} of {len(self.ranks)} of this "
                "PipelineModule has no MoE layer to replace, but stages reduce the norms of "
                "experts together; use fewer stages, or a partition_method (as 'type:NAME', "
                "with the class of the MoE blocks) so that each stage has some"
            )
        tied = [name for name in names if name.startswith("tied_modules.")]
        if tied:
            raise ValueError(
                f"{BLOCK} is enabled, but {', '.join(tied)} is of a TiedLayerSpec, whose experts "
                "several stages have; give it a LayerSpec, or leave it out with "
                f"{BLOCK}.moe_layer_pattern"
            )


def num_stages(model: nn.Module) -> int:
    """Of a ``PipelineModule``; 1 of any other model."""
    stages = Stages.of(model)
    return 1 if stages is None else len(stages.ranks)


def is_of_another_stage(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether this rank's stage has a copy of a weight that it shares with an earlier one."""
    return isinstance(model, PipelineModule) and bool(getattr(parameter, PIPE_REPLICATED, False))


def go_back_once(model: nn.Module, stages: Stages) -> None:
    """Let a stage's backward, which DeepSpeed starts from one output after the other, wait for the
    gradients of all: a layer's program, and what it sends, can be gone back through once."""
    if stages.own + 1 < len(stages.ranks):  # the last one has one loss
        model.register_forward_hook(lambda _, __, made: _apart(made))


def _apart(made: Any) -> Any:
    """What a stage hands on; where that is several tensors with gradients, cut off behind."""
    if not isinstance(made, tuple):
        return made
    floats = [x for x in made if isinstance(x, Tensor) and x.is_floating_point()]
    if len(floats) < 2 or not all(x.requires_grad for x in floats):
        return made
    leaves = [x.detach().requires_grad_() for x in floats]

    def go_back(_: Tensor) -> None:
        outputs, grads = tuple(floats), [leaf.grad for leaf in leaves]
        floats.clear()
        leaves.clear()  # which hold this hook, where no garbage collector looks
        torch.autograd.backward(outputs, grads)

    leaves[-1].register_post_accumulate_grad_hook(go_back)  # DeepSpeed takes them in order
    left = iter(leaves)
    return tuple(next(left) if any(x is each for each in floats) else x for x in made)


def counted(hosted: nn.Module, schedules: Schedules) -> Passes:
    """Count a layer's passes, of which several are under way at once."""
    passes = Passes(schedules)
    hosted.register_forward_pre_hook(lambda module, _: passes.begins(is_training=module.training))
    hosted.register_forward_hook(lambda _, __, output: passes.watch(output))
    return passes


# Roles.


LARGEST_SQUARE = 1e36
"""Of a norm that is not taken for an overflow. DeepSpeed squares in float32, which ends at 3e38; a
rank that found its own part beyond that would skip a step by itself."""


@dataclass(frozen=True, eq=False)
class RoleUnit:
    """The ``mpu`` of an engine with roles.

    All ranks read data: the batches of expert ranks are run by attention ranks. So what
    DeepSpeed's batch arithmetic and its data loader get to know is the whole world, whereas what it
    averages over is ``group``. Neighbours of one role that divide the model, or each sample's
    sequence, read one batch.
    """

    roles: Roles  # of the ranks of every ZP group
    rank: int  # this one
    world_size: int  # ranks, of both roles and all groups
    group: dist.ProcessGroup  # the ranks of the own role that reduce its dense weights
    group_ranks: list[int]  # they
    alike: dist.ProcessGroup  # the ranks that share its dense weights; without others this rank
    tensor_size: int = 1  # their number
    sequences: dist.ProcessGroup | None = None  # the ranks that share its sequences, if any

    @classmethod
    def build(
        cls,
        roles: Roles,
        tensor_size: int = 1,
        sequences: dist.ProcessGroup | None = None,
        stages: Stages | None = None,
    ) -> RoleUnit:
        """Make the communicators; groups of so many neighbours, or of those that share sequences,
        have one role. Collective."""
        rank, world = dist.get_rank(), range(dist.get_world_size())
        parts = (tuple(world),) if stages is None else stages.ranks
        own = next(ranks for ranks in parts if rank in ranks)
        of_roles = [
            [ranks[place] for place in roles.ranks_like(first, len(ranks))]
            for ranks in parts
            for first in roles.firsts
        ]
        reducing = [ranks[place::tensor_size] for ranks in of_roles for place in range(tensor_size)]
        group, group_ranks = group_among(reducing), next(r for r in reducing if rank in r)
        alike = group_among([[*world[n : n + tensor_size]] for n in world[::tensor_size]])
        given = (roles, own.index(rank), len(own), group, group_ranks, alike, tensor_size)
        if stages is None:
            return cls(*given, sequences)
        return StageUnit(*given, sequences, grid=stages.grid)

    @property
    def sequence_size(self) -> int:
        return 1 if self.sequences is None else self.sequences.size()

    @property
    def batch_size(self) -> int:
        """Neighbours that read one batch: all of it, or of each sample a part of the sequence."""
        return self.tensor_size * self.sequence_size

    # What DeepSpeed asks.

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.group_ranks

    def get_data_parallel_world_size(self) -> int:
        return self.world_size // self.batch_size

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.batch_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.alike

    def get_model_parallel_world_size(self) -> int:
        return self.tensor_size

    def get_model_parallel_rank(self) -> int:
        return self.rank % self.tensor_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self.rank - self.get_tensor_model_parallel_rank()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        return self.sequences

    def get_sequence_parallel_world_size(self) -> int:
        return self.sequence_size

    def get_sequence_parallel_rank(self) -> int:
        return self.rank % self.sequence_size

    # ZeRO shards over these, and divides sums over them by those that read a batch of their own.

    get_sequence_data_parallel_group = get_data_parallel_group

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.group.size()

    def get_sequence_data_parallel_rank(self) -> int:
        return self.group.rank()

    # What we ask.

    def stands_for(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's gradient stands for its replicas' where each has the whole: the first
        rank of the role for dense weights, or the first of each part of a divided one; the first
        ZP group for experts."""
        if is_moe_param(parameter):
            return self.roles.place(self.rank) < self.roles.size
        return self.group.rank() == 0 and self.counts(parameter)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether no other rank counts this weight in norms: a tensor parallel one, or one of a
        stage that shares it."""
        if getattr(parameter, PIPE_REPLICATED, False):
            return False
        return self.get_tensor_model_parallel_rank() == 0 or is_model_parallel_parameter(parameter)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Norm of the gradients of all weights of both roles, each counted once; float64 scalar,
        the same on all ranks, inf where any of them is not finite. Collective."""
        return joint_norm(
            parameter.grad
            for parameter in parameters
            if parameter.grad is not None and self.stands_for(parameter)
        )


@dataclass(frozen=True, eq=False)
class StageUnit(RoleUnit):
    """On a stage of a pipeline, whose ranks are the world of its roles. Ranks at one place of all
    stages have one role; so DeepSpeed's grid has the groups between stages."""

    grid: PipelineParallelGrid = field(kw_only=True)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.grid.get_model_parallel_group()
        return group

    def get_model_parallel_world_size(self) -> int:
        return int(self.grid.get_model_parallel_world_size())

    def get_model_parallel_rank(self) -> int:
        return int(self.grid.get_model_parallel_rank())

    def __getattr__(self, name: str) -> Any:
        """What DeepSpeed asks about pipelines."""
        return getattr(self.grid, name)


def leave_tied(model: Any) -> None:
    """Let a rank whose dense weights have left share none with other stages."""
    if isinstance(model, PipelineModule):
        model.tied_comms = {}


def whole_stage(engine: Any) -> Any:
    """Let an engine ask its grid about ranks: each has losses of a batch of its own, whatever its
    role."""
    return during(engine, mpu=engine.grid) if has_roles(engine) else nullcontext()


def experts_factor(roles: Roles, rank: int) -> float:
    """By what a rank has to multiply the gradients of its experts before DeepSpeed gets them.

    With M attention and N expert ranks in each of G groups, DeepSpeed sums an expert over the G
    ranks that hold it, and divides by the M G or N G ranks of the rank's role; so it does at ZeRO
    0, 1 and 2, with all of its optimizers. Wanted is the mean over the M G attention ranks of what
    their losses contribute. So, for gradients that are sums of the contributions of a group's M
    attention ranks: N / M on expert ranks, and 1 for experts on attention ranks, as for dense
    weights, to which an attention rank gives its own contribution only. Ranks that read one batch
    count for one: in both roles, so that the ratio stays.
    """
    num_attention = len(roles.attention_ep_ranks)
    return 1.0 if roles.is_attention(rank) else len(roles.expert_ep_ranks) / num_attention


def joint_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Norm of all ranks' gradients as of one vector; float64 scalar, inf where it is not finite.
    Collective."""
    device = get_accelerator().current_device_name()
    square = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        square += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    sum_in_place(square, None)
    is_sound = square < LARGEST_SQUARE  # false for NaN
    return torch.where(is_sound, square, torch.inf).sqrt()


def own_groups(engine: Any) -> Any:
    """Let DeepSpeed's module of groups answer for this engine. It keeps the last ``mpu`` for ever,
    by which an engine without roles would be built next to one that has them."""
    return during(groups, mpu=engine.mpu) if has_roles(engine) else nullcontext()


def has_roles(engine: Any) -> bool:
    """Whether its ranks do not all do the same."""
    return isinstance(engine.mpu, RoleUnit)


@contextmanager
def keeps_roles(engine: Any) -> Iterator[None]:
    """A block that may give the engine another mpu, as AutoTP does; one with roles comes back."""
    given = engine.mpu
    yield
    if isinstance(given, RoleUnit):
        engine.mpu = given


def clip_with_roles(engine: Any) -> bool:
    """Clip at ZeRO stage 0 in float32 by the norm over both roles.

    Returns:
        Whether the engine has roles, and was clipped.
    """
    if not has_roles(engine):
        return False
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    clip_gradients(engine, parameters, engine.mpu.norm(parameters))
    return True


def clip_gradients(engine: Any, parameters: Iterable[nn.Parameter], norm: Tensor) -> None:
    """Scale gradients by what the engine clips to, and report the norm to it."""
    factor = (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(factor.to(parameter.grad.dtype))
    engine._global_grad_norm = float(norm)


def join_roles(engine: Any) -> None:
    """Let both roles clip by one norm, skip a step together, and save in one way. Does nothing
    without roles."""
    if not has_roles(engine):
        return
    engine.has_moe_layers = True
    joins: tuple[tuple[type, Callable[[Any, RoleUnit], None]], ...] = (
        (DeepSpeedZeroOptimizer, _join_zero),
        (BF16_Optimizer, _join_bf16),
        (FP16_Optimizer, _join_fused),
        (FP16_UnfusedOptimizer, _join_unfused),
    )
    for kind, join_kind in joins:
        if isinstance(engine.optimizer, kind):
            join_kind(engine.optimizer, engine.mpu)


def _join_zero(optimizer: Any, unit: RoleUnit) -> None:
    """ZeRO 1 and 2: a gradient is partitioned over its replicas, so parts are counted once."""

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        assert norm_type == 2, "only L2 norm supported"
        parts = (
            part
            for number, parameters in enumerate(optimizer.params_in_partition)
            for part, parameter in zip(_gradients(optimizer, number), parameters)
            if unit.counts(parameter)
        )
        return joint_norm(parts).to(optimizer.device, torch.float32)

    optimizer.scaled_global_norm = scaled_global_norm
    optimizer.has_overflow = _of_any_rank(optimizer.has_overflow)


def _gradients(optimizer: Any, number: int) -> Iterator[Tensor]:
    """What ZeRO 1 or 2 is about to step by, of each weight in this rank's part of a group: in host
    memory where it is offloaded, flat."""
    if not optimizer.cpu_offload:
        for part in optimizer.averaged_gradients[number]:
            if not getattr(part, "_zero_padding", False):
                yield part
        return
    flat = optimizer.single_partition_of_fp32_groups[number].grad.view(-1)
    for parameter in optimizer.params_in_partition[number]:
        _, _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        yield flat[start : start + length]


def _join_bf16(optimizer: Any, unit: RoleUnit) -> None:
    """Bfloat16 with float32 gradients, ZeRO 1."""
    reduced = optimizer.get_grads_for_reduction()
    all_for_norm = optimizer.get_grads_for_norm
    optimizer.get_grads_for_reduction = lambda: reduced
    optimizer.has_moe_layers = False  # or it would add up norms over ranks of which some have none

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return all_for_norm(for_clipping=True)
        norm = joint_norm(
            gradient
            for group, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients)
            for parameter, gradient in zip(group, gradients)
            if unit.stands_for(parameter)
        )
        # DeepSpeed takes the norm of what model parallel ranks have together.
        return [norm.float().reshape(1) / unit.get_model_parallel_world_size() ** 0.5], {}

    optimizer.get_grads_for_norm = get_grads_for_norm


def _join_fused(optimizer: Any, unit: RoleUnit) -> None:
    """Float16 or bfloat16 at ZeRO 0, with an optimizer that takes flat weights."""
    clips = optimizer.unscale_and_clip_grads
    optimizer.has_moe_layers = False

    def unscale_and_clip_grads(flat_gradients: Any, total_norm: Any, **named: Any) -> Any:
        norm = joint_norm(
            gradient
            for flat, group in zip(flat_gradients, optimizer.fp16_groups)
            for gradient, parameter in zip(flat.split([p.numel() for p in group]), group)
            if unit.stands_for(parameter)
        )
        optimizer._global_grad_norm = float(norm) / optimizer.loss_scale_config.cur_scale
        return clips(flat_gradients, float(norm), **named)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads
    _join_checks(optimizer.overflow_checker)


def _join_unfused(optimizer: Any, unit: RoleUnit) -> None:
    """Float16 or bfloat16 at ZeRO 0, with any other optimizer. The norm that it reports is that of
    the scaled gradients."""
    clips = optimizer.unscale_and_clip_grads

    def unscale_and_clip_grads(total_norm: Any, **named: Any) -> Any:
        norm = unit.norm(parameter for group in optimizer.fp16_groups for parameter in group)
        optimizer._global_grad_norm = float(norm)
        return clips(float(norm), **named)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads
    _join_checks(optimizer.overflow_checker)


def _join_checks(checker: Any) -> None:
    """The vote before a float16 step at ZeRO 0."""
    checker.has_moe_params = False  # or ranks with experts would vote among those at one place

    def has_overflow(parameters: Iterable[nn.Parameter], **_: Any) -> bool:
        gradients = (p.grad for p in parameters if p.grad is not None)
        return bool(joint_norm(gradients).isinf())

    checker.has_overflow = has_overflow
    checker.check_using_norm = _of_any_rank(checker.check_using_norm)


def _of_any_rank(votes: Callable[..., bool]) -> Callable[..., bool]:
    """A vote of the own role, made one of all ranks."""

    def vote(*given: Any, **named: Any) -> bool:
        device = get_accelerator().current_device_name()
        return bool(max_in_place(torch.tensor(int(votes(*given, **named)), device=device), None))

    return vote
