# SPDX-License-Identifier: Apache-2.0
"""What is refused under DeepSpeed before anything is built: a row each, with the value that asks
for it, why it does not go, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size
from torch import nn

from ds_moe_ext.hosts.attachment import experts
from ds_moe_ext.hosts.attachment.notices import Refusal
from ds_moe_ext.hosts.deepspeed import native
from ds_moe_ext.hosts.deepspeed.rank_groups import RoleUnit, TensorParallel, is_of_sequences
from ds_moe_ext.hosts.meta_model import ADAPTERS, META, is_on_meta
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK

ZERO = "zero_optimization."
OPTIMIZER = f"{ZERO}offload_optimizer"
AUTOTP = "tensor_parallel.autotp_size"
SEQUENCES = "sequence_parallel_size"
ULYSSES = "pass the mpu that UlyssesSPAttentionHF.register_with_transformers returns"
INIT = "built under deepspeed.zero.Init"
ON_META = f"this {{given.kind}} {META}"


@dataclass(frozen=True, eq=False)
class Given:
    """What ``deepspeed.initialize`` was given."""

    document: Mapping[str, Any]
    model: nn.Module
    mpu: Any  # None without one
    mesh: Any = None  # ``mesh_param``, or what came of it
    strategy: Strategy | None = None  # that was asked for, once it is settled

    def at(self, key: str) -> Any:
        """The value of a dotted key; None where there is none."""
        value: Any = self.document
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def kind(self) -> str:
        return type(self.model).__name__

    @property
    def stage(self) -> str:
        return key_value_text(f"{ZERO}stage", self.at(f"{ZERO}stage"))

    @property
    def is_pipeline(self) -> bool:
        return isinstance(self.model, PipelineModule)

    def has(self, *kinds: type, such: Callable[[nn.Module], bool] = lambda _: True) -> bool:
        """Whether the model has such a module of these classes."""
        return any(isinstance(module, kinds) and such(module) for module in self.model.modules())

    @property
    def is_sharded(self) -> bool:
        return any(map(is_zero_param, self.model.parameters()))

    @property
    def has_own_groups(self) -> bool:
        # AutoTP's own mpu is DeepSpeed's module, or has roles.
        return self.mpu not in (None, groups) and not isinstance(self.mpu, RoleUnit)

    @property
    def is_divided(self) -> bool:
        """Whether ranks that an mpu knows have parts of dense weights."""
        return self.has_own_groups and TensorParallel.of(self.mpu).group is not None

    @property
    def autotp(self) -> str:
        """How AutoTP is asked for."""
        size = self.at(AUTOTP)
        return "" if size in (None, 0, 1) else key_value_text(AUTOTP, size)

    @property
    def tensor_size(self) -> int:
        """Ranks that share the dense weights of one copy of the model."""
        size = self.at(AUTOTP)
        return size if self.autotp and type(size) is int else TensorParallel.of(self.mpu).size

    @property
    def batch_size(self) -> int:
        """Ranks that share a batch: all of it, or of each sample a part of the sequence."""
        has_parts = self.mpu is not None and is_of_sequences(self.mpu)
        return self.tensor_size * (self.mpu.get_sequence_parallel_world_size() if has_parts else 1)

    @property
    def mixed(self) -> list[int]:
        """The first ranks of a ZP group that share a batch and have different roles; none where all
        are of one role."""
        size, roles = self.batch_size, None if self.strategy is None else self.strategy.roles
        if roles is None:
            return []
        order = roles.order or range(roles.size)
        units = ([*order[first : first + size]] for first in range(0, len(order), size))
        return next((ranks for ranks in units if len({*map(roles.is_attention, ranks)}) > 1), [])

    @property
    def num_stages(self) -> int:
        """Of a pipeline that only the mpu knows of."""
        is_own = self.mpu is None or self.is_pipeline
        return 1 if is_own else bwc_pipeline_parallel_world_size(self.mpu)


# Rows of one key.


class When(NamedTuple):
    """Which values of a key are refused."""

    words: str  # of the page of known limits, behind the key
    holds: Callable[[Any], Any]
    shows_value: bool = True


def _is_offloaded(value: Any) -> Any:
    """A block may say that it is off."""
    return value.get("device", "none") != "none" if isinstance(value, Mapping) else value


ON = When(" true", bool)
OFF = When(" false", lambda value: value in (False,))
SET = When("", lambda value: value is not None, shows_value=False)
OFFLOADED = When("", _is_offloaded, shows_value=False)


def above(most: int) -> When:
    return When(f" above {most}", lambda value: (value or 0) > most)


def one_of(*values: Any) -> When:
    return When(f" {values[0]}", lambda value: value in values)


def key_value_text(key: str, value: Any) -> str:
    """A key and its value, as JSON has them."""
    is_plain = isinstance(value, bool | None)
    return f"{key} is {json.dumps(value) if is_plain else repr(value)}"


def _key(
    key: str,
    when: When,
    text: str,
    *,
    what: str = "",
    beside: Callable[[Given], Any] = lambda _: True,
) -> Refusal:
    """A row of one key, which may ask for something else beside. ``text`` is the rule and, behind
    a semicolon, the remedy."""

    def asked(given: Given) -> str:
        value = given.at(key)
        if not when.holds(value) or not beside(given):
            return ""
        return key_value_text(key, value) if when.shows_value else f"{key} is set"

    reason, _, remedy = text.partition("; ")
    return Refusal(what or f"{key}{when.words}", asked, reason, remedy)


def _row(what: str, holds: Callable[[Any], Any], value: str, text: str) -> Refusal:
    """A row of what is no key alone; ``value`` is how an error says what was given, and what was
    found."""

    def asked(given: Any) -> str:
        found = holds(given)
        return value.format(given=given, found=found) if found else ""

    reason, _, remedy = text.partition("; ")
    return Refusal(what, asked, reason, remedy)


def _has_buckets(given: Given) -> bool:
    return given.at(f"{ZERO}stage") in (1, 2)


def _parts_of_stages(given: Given) -> str:
    if not isinstance(given.model, PipelineModule):
        return ""
    topology = given.model.topology()
    others = [axis for axis in topology.get_axis_names() if axis not in ("pipe", "data")]
    sizes = {axis: topology.get_dim(axis) for axis in others}
    return " and ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _scattered_stages(given: Given) -> list[list[int]]:
    if not isinstance(given.model, PipelineModule):
        return []
    stages: list[list[int]] = given.model.topology().get_axis_comm_lists("data")
    are_neighbours = all(ranks == [*range(ranks[0], ranks[0] + len(ranks))] for ranks in stages)
    return [] if are_neighbours else stages


MESHED = (
    "DeepSpeed then reduces gradients over data parallel ranks only, so weights of sequence "
    f"parallel ranks diverge; leave it out, and {ULYSSES}"
)

UNSUPPORTED = (
    _key(
        f"{BLOCK}.megatron.layer",
        SET,
        "it applies to Megatron-core only; leave it out",
    ),
    _key(
        "expert_parallel.enabled",
        ON,
        "DeepSpeed's AutoEP replaces the same layers; set one of expert_parallel.enabled and "
        f"{BLOCK}.enabled to false",
    ),
    _key(
        f"{ZERO}offload_param",
        OFFLOADED,
        "experts in host memory would be copied to the device for every pass and replica; "
        "remove it; offload_optimizer may stay",
    ),
    _key(f"{ZERO}cpu_offload_param", ON, "it is the older name of offload_param; remove it"),
    _key(
        f"{ZERO}cpu_offload",
        ON,
        'it is the older name of offload_optimizer; write "offload_optimizer": {"device": "cpu"}',
    ),
    _key(
        f"{OPTIMIZER}.device",
        one_of("nvme"),
        "states in per-rank files cannot be saved by name or moved; use cpu",
    ),
    _key(
        OPTIMIZER,
        OFFLOADED,
        "DeepSpeed offloads ZeRO's partitions only; use stage 1, 2 or 3, or remove it",
        what=f"{OPTIMIZER} at stage 0",
        beside=lambda given: not given.at(f"{ZERO}stage"),
    ),
    _key(
        f"{ZERO}contiguous_gradients",
        OFF,
        "without it DeepSpeed averages experts as if all ranks had the same, or refuses them; "
        "set it to true",
        what=f"{ZERO}contiguous_gradients false at stage 1 or 2",
        beside=lambda given: _has_buckets(given) and not _is_offloaded(given.at(OPTIMIZER)),
    ),
    _key(
        f"{ZERO}reduce_scatter",
        OFF,
        "DeepSpeed refuses it with experts; set it to true",
        what=f"{ZERO}reduce_scatter false at stage 1 or 2",
        beside=_has_buckets,
    ),
    _key(f"{OPTIMIZER}.super_offload", ON, "another process steps the optimizer; set it to false"),
    _key(f"{ZERO}zenflow", SET, "it keeps gradients in its own order; remove it"),
    *(
        _key(
            f"{kind}.{kind}_master_weights_and_grads",
            ON,
            "32-bit states with 16-bit master weights would be rounded when they are loaded; "
            "set it to false",
        )
        for kind in ("bf16", "fp16")
    ),
    _row(
        f"{AUTOTP} above 1 with an mpu",
        lambda given: given.autotp and given.has_own_groups,
        "{given.autotp}, and an mpu was passed",
        "AutoTP makes its own tensor parallel groups; leave out one of the two",
    ),
    _row(
        f"{AUTOTP} above 1 with deepspeed.moe.layer.MoE",
        lambda given: given.autotp and given.has(MoE),
        "{given.autotp}, and the model has a deepspeed.moe.layer.MoE",
        "gradients of its gate are not those of the undivided model; set it to 1, or use a "
        "model of transformers",
    ),
    _row(
        f"{AUTOTP} above 1 with a PipelineModule",
        lambda given: given.autotp and given.is_pipeline,
        "{given.autotp}, and the model is a PipelineModule ({given.kind})",
        "DeepSpeed alone hangs at the end of its first train_batch then, for AutoTP's groups have "
        "ranks of other stages; set it to 1",
    ),
    _row(
        "mesh_param of deepspeed.initialize",
        lambda given: given.mesh is not None,
        "mesh_param was passed to deepspeed.initialize",
        MESHED,
    ),
    _row(
        f"data_parallel_size with {SEQUENCES}",
        lambda given: None not in (given.at("data_parallel_size"), given.at(SEQUENCES)),
        f"data_parallel_size is set beside {SEQUENCES}",
        MESHED,
    ),
    _key(
        SEQUENCES,
        above(1),
        f"DeepSpeed makes no groups for it; {ULYSSES}, or set it to 1",
        what=f"{SEQUENCES} above 1 without an mpu of sequence parallel groups",
        beside=lambda given: given.mpu is None or not is_of_sequences(given.mpu),
    ),
    _key(
        "hybrid_engine.enabled",
        ON,
        "the hybrid engine is not supported with replaced experts; set it to false",
    ),
    _key("compile.deepcompile", ON, "DeepCompile cannot trace the all-to-all; set it to false"),
    _key(
        "use_data_before_expert_parallelism",
        ON,
        "expert-parallel ranks are consecutive here; set it to false",
    ),
    _key(
        "checkpoint.use_node_local_storage",
        ON,
        "all ranks write and read one checkpoint folder; set it to false and save to a shared "
        "file system",
    ),
    _row(
        "a DualPipeVModule",
        # By name, for older versions have no such class.
        lambda given: "DualPipeVModule" in [kind.__name__ for kind in type(given.model).__mro__],
        "the model is a DualPipeVModule ({given.kind})",
        "it has two stages per rank; use PipelineModule",
    ),
    _key(
        "fp16.enabled",
        ON,
        "it was never tested that its stages skip steps together; use bf16",
        what="fp16.enabled true with a PipelineModule",
        beside=lambda given: given.is_pipeline,
    ),
    _row(
        "a PipelineModule with tensor or sequence parallel ranks in its topology",
        _parts_of_stages,
        "the topology of the PipelineModule has {found}",
        "only pipeline and data parallelism are supported together; use "
        "PipeDataParallelTopology, or num_stages",
    ),
    _row(
        "a PipelineModule whose stages are not neighbouring ranks",
        _scattered_stages,
        "the stages of the PipelineModule have ranks {found}",
        "DeepSpeed's expert groups are consecutive ranks; use PipeDataParallelTopology, or "
        "num_stages",
    ),
    _row(
        "an mpu with pipeline stages",
        lambda given: given.num_stages > 1,
        "the mpu passed to deepspeed.initialize has {given.num_stages} pipeline stages",
        "pipeline stages are supported with PipelineModule only; use 1 stage, or a "
        "PipelineModule without mpu",
    ),
    _row(
        "a model whose experts were replaced before",
        lambda given: given.has(experts.HostedExperts, native.HostedMoE),
        "the experts of this {given.kind} were replaced by an earlier deepspeed.initialize",
        "they belong to that engine; build a new model",
    ),
    ADAPTERS,
    _row(
        "deepspeed.moe.layer.MoE on the meta device",
        lambda given: given.has(MoE, such=is_on_meta),
        f"a deepspeed.moe.layer.MoE {META}",
        "its experts are modules that each rank would have to create first; build it on the "
        "CPU, with an ep_size that gives each rank its own experts only",
    ),
    _row(
        "an mpu with tensor parallel groups and a model on the meta device",
        lambda given: given.is_divided and is_on_meta(given.model),
        f"the mpu passed to deepspeed.initialize has tensor parallel groups, and {ON_META}",
        "all ranks draw the same values, so different parts of a weight would start equal; "
        "build it on the CPU, or use AutoTP",
    ),
    _row(
        f"a model {INIT}, at another stage than 3",
        lambda given: given.at(f"{ZERO}stage") != 3 and given.is_sharded,
        f"the model was {INIT}, and {{given.stage}}",
        "other stages do not shard weights; use stage 3, or build it without",
    ),
    _row(
        f"deepspeed.moe.layer.MoE {INIT}",
        lambda given: given.has(MoE) and given.is_sharded,
        f"a deepspeed.moe.layer.MoE was {INIT}",
        "its experts would stay sharded over all ranks; build it without",
    ),
    _row(
        f"{BLOCK}.gate with a model {INIT}",
        lambda given: given.at(f"{BLOCK}.gate") and given.is_sharded,
        f"{BLOCK}.gate is set, and the model was {INIT}",
        "the gate's weights would replace shards; build it without",
    ),
)


# Where ZeRO shards weights.


OWNERS_AT_STAGE_3 = _key(
    f"{ZERO}stage",
    one_of(3),
    "states of experts that move are in ZeRO's shards; use stage 0, 1 or 2",
    what="experts that move to new owners (reshard_interval above 0), at ZeRO 3",
)

AT_STAGE_3 = (
    _row(
        "DeepSpeed before ZeRO 3 sharded experts of its own",
        lambda _: not hasattr(DeepSpeedZeroOptimizer_Stage3, "_autoep_expert_parallel_group"),
        f"DeepSpeed is {deepspeed.__version__}",
        "its ZeRO 3 shards all weights over the same ranks; use DeepSpeed 0.19.7 or newer, or "
        "stage 0, 1 or 2",
    ),
    _row(
        "a strategy that gives ranks roles (zebra)",
        lambda given: given.strategy.roles,
        "the strategy gives ranks roles",
        "ranks of one role would gather weights that the other role does not have; use stage "
        "0, 1 or 2",
    ),
    _key(
        f"{ZERO}zero_hpz_partition_size",
        above(1),
        "its secondary shards span a node, whose ranks have different experts; set it to 1",
    ),
    *(
        _key(
            f"{ZERO}zero_quantized_{weights}",
            ON,
            "it would round experts that are never sent; set it to false",
        )
        for weights in ("weights", "nontrainable_weights")
    ),
    _key(
        f"{ZERO}zero_quantized_gradients",
        ON,
        "it sums gradients over all ranks, which have different experts; set it to false",
    ),
    _key(
        f"{ZERO}stage3_module_granularity_threshold",
        above(0),
        "it treats an MoE layer as one module, but gradients of replicas arrive after its "
        "backward; leave it out",
    ),
)


# Where ranks have roles.


OF_ONE = "it sees the ranks of one role only; leave it out, or use a plain AdamW"
OF_ONE_ROLE = ("onebitadam", "onebitlamb", "zerooneadam", "muon")

WITH_ROLES = (
    _row(
        "tensor or sequence parallel ranks of different roles",
        lambda given: given.mixed,
        "the model or its sequences are divided among {given.batch_size} neighbouring ranks each, "
        "of which ranks {found} have different roles",
        "a rank of experts has no part of the model's dense weights; choose attention_size and "
        "expert_size that their number divides, and neighbouring attention_ep_ranks",
    ),
    _row(
        f"{BLOCK}.zebra.profile with a PipelineModule",
        lambda given: given.is_pipeline and getattr(given.strategy, "profile", None),
        f"{BLOCK}.zebra.profile is set, and the model is a PipelineModule ({{given.kind}})",
        "a stage is not called with tokens alone; leave it out, and set zebra.moved yourself",
    ),
    _row(
        "a model compiled in place (its own compile())",
        lambda given: given.model._compiled_call_impl is not None,
        "this {given.kind} was compiled in place, by its own compile(), before "
        "deepspeed.initialize",
        "each role runs parts of the model; call engine.compile() after deepspeed.initialize, "
        "or pass torch.compile(model)",
    ),
    _key("optimizer.legacy_fusion", ON, OF_ONE),
    _key(
        "optimizer.type",
        When(f" {', '.join(OF_ONE_ROLE)}", lambda value: str(value).lower() in OF_ONE_ROLE),
        OF_ONE,
    ),
    _key("data_efficiency.enabled", ON, OF_ONE),
)


# Where dense gradients are averaged in slices: of an engine, for DeepSpeed does not show each
# gradient as it becomes ready.


def _sums_after_backward(engine: Any) -> bool:
    types = engine.get_data_types()
    is_late = engine.zero_optimization_stage() == 1 and types == (torch.bfloat16, torch.float32)
    return is_late and not engine.zero_cpu_offload()  # by another wrapper


UNSLICED = (
    _row(
        "a PipelineModule",
        lambda engine: engine.pipeline_parallelism,
        "the model is a PipelineModule",
        "its engine reduces all gradients after the last backward; pass a plain nn.Module",
    ),
    _row(
        f"{ZERO}stage 3",
        lambda engine: engine.zero_optimization_stage() not in (0, 1, 2),
        f"{ZERO}stage is 3",
        "it shards weights; use stage 0, 1 or 2",
    ),
    _row(
        "bfloat16 with data_types.grad_accum_dtype fp32 at stage 1",
        _sums_after_backward,
        "bfloat16 weights have float32 sums at stage 1",
        "DeepSpeed's BF16_Optimizer makes the gradients it reduces after backward; use stage 2, "
        "or leave out data_types.grad_accum_dtype",
    ),
    _row(
        f"{ZERO}contiguous_gradients false",
        lambda engine: engine.zero_optimization_stage() and not engine.zero_contiguous_gradients(),
        f"{ZERO}contiguous_gradients is false",
        "ZeRO then has no buckets for the averaged gradients; set it to true",
    ),
    _row(
        f"{ZERO}reduce_scatter false",
        lambda engine: engine.zero_optimization_stage() and not engine.zero_reduce_scatter(),
        f"{ZERO}reduce_scatter is false",
        "DeepSpeed refuses it with experts; set it to true",
    ),
)
