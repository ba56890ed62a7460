# SPDX-License-Identifier: Apache-2.0
"""What is refused under DeepSpeed before anything is built, by the name of the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size
from torch import nn

from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment import experts
from ds_moe_ext.hosts.attachment.notices import ENABLED, Refusal, refuse
from ds_moe_ext.hosts.deepspeed import native
from ds_moe_ext.hosts.deepspeed.role_engine import RoleUnit
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel, is_of_sequences
from ds_moe_ext.hosts.meta_model import ADAPTERS, META, is_on_meta
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings


@dataclass(frozen=True, eq=False)
class Given:
    """What ``deepspeed.initialize`` was given.

    Attributes:
        document: the whole configuration.
        model: the user's model.
        mpu: None without one.
        mesh: ``mesh_param``, or what came of it.
    """

    document: Mapping[str, Any]
    model: nn.Module
    mpu: Any
    mesh: Any

    def at(self, key: str) -> Any:
        """The value of a dotted key; None where there is none."""
        value: Any = self.document
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


Asked = Callable[[Given], str]


def told(key: str, value: Any) -> str:
    """A key and its value, as JSON has them."""
    is_plain = isinstance(value, bool | None)
    return f"{key} is {json.dumps(value) if is_plain else repr(value)}"


def is_in(key: str, *values: Any) -> Asked:
    """A key has one of these values."""
    return lambda given: told(key, given.at(key)) if given.at(key) in values else ""


def is_on(key: str) -> Asked:
    """A key is true, or as good as true."""
    return lambda given: told(key, given.at(key)) if given.at(key) else ""


def is_not_in(key: str, *values: Any) -> Asked:
    """A key is there, and has another value than these."""
    return lambda given: "" if given.at(key) in (None, *values) else told(key, given.at(key))


_ZERO = "zero_optimization."
_OPTIMIZER = f"{_ZERO}offload_optimizer"


def _offloads(key: str) -> Asked:
    """A key turns offloading on: a block may say it is off."""

    def asked(given: Given) -> str:
        value = given.at(key)
        is_asked = value.get("device", "none") != "none" if isinstance(value, Mapping) else value
        return f"{key} is set" if is_asked else ""

    return asked


def _has_buckets(given: Given) -> bool:
    return given.at(f"{_ZERO}stage") in (1, 2)


def _scattered_gradients(given: Given) -> str:
    key = f"{_ZERO}contiguous_gradients"
    is_asked = _has_buckets(given) and not _offloads(_OPTIMIZER)(given)
    return is_in(key, False)(given) if is_asked else ""


def _reduced_whole(given: Given) -> str:
    return is_in(f"{_ZERO}reduce_scatter", False)(given) if _has_buckets(given) else ""


def _offloads_unsharded(given: Given) -> str:
    stage = given.at(f"{_ZERO}stage") or 0
    return "" if stage else _offloads(_OPTIMIZER)(given)


def _is_there(key: str) -> Asked:
    return lambda given: "" if given.at(key) is None else f"{key} is set"


def _folded(given: Given) -> str:
    # By name, for older versions have no such class.
    is_folded = any(kind.__name__ == "DualPipeVModule" for kind in type(given.model).__mro__)
    return f"the model is a DualPipeVModule ({type(given.model).__name__})" if is_folded else ""


def _pipeline_in_float16(given: Given) -> str:
    is_pipeline = isinstance(given.model, PipelineModule)
    return is_on("fp16.enabled")(given) if is_pipeline else ""


def _pipeline_of_parts(given: Given) -> str:
    if not isinstance(given.model, PipelineModule):
        return ""
    topology = given.model.topology()
    others = [axis for axis in topology.get_axis_names() if axis not in ("pipe", "data")]
    parts = [f"{axis} {size}" for axis in others if (size := topology.get_dim(axis)) > 1]
    return f"the topology of the PipelineModule has {' and '.join(parts)}" if parts else ""


def _pipeline_of_strides(given: Given) -> str:
    if not isinstance(given.model, PipelineModule):
        return ""
    stages = given.model.topology().get_axis_comm_lists("data")
    are_neighbours = all(ranks == [*range(ranks[0], ranks[0] + len(ranks))] for ranks in stages)
    return "" if are_neighbours else f"the stages of the PipelineModule have ranks {stages}"


def _replaced(given: Given) -> str:
    ours = (experts.HostedExperts, native.HostedMoE)
    if not any(isinstance(module, ours) for module in given.model.modules()):
        return ""
    kind = type(given.model).__name__
    return f"the experts of this {kind} were replaced by an earlier deepspeed.initialize"


def _on_meta(given: Given) -> str:
    return f"this {type(given.model).__name__} {META}" if is_on_meta(given.model) else ""


def _native_on_meta(given: Given) -> str:
    layers = [module for module in given.model.modules() if isinstance(module, MoE)]
    return f"a deepspeed.moe.layer.MoE {META}" if any(map(is_on_meta, layers)) else ""


_INIT = "built under deepspeed.zero.Init"


def _is_sharded(given: Given) -> bool:
    return any(map(is_zero_param, given.model.parameters()))


def _sharded_for_others(given: Given) -> str:
    stage = given.at("zero_optimization.stage")
    if stage == 3 or not _is_sharded(given):
        return ""
    return f"the model was {_INIT}, and {told('zero_optimization.stage', stage)}"


def _native_sharded(given: Given) -> str:
    is_native = any(isinstance(module, MoE) for module in given.model.modules())
    return f"a deepspeed.moe.layer.MoE was {_INIT}" if is_native and _is_sharded(given) else ""


def _gate_sharded(given: Given) -> str:
    has_gate = bool(given.at(f"{BLOCK}.gate"))
    return (
        f"{BLOCK}.gate is set, and the model was {_INIT}" if has_gate and _is_sharded(given) else ""
    )


_MPU = "the mpu passed to deepspeed.initialize has"


def _stages(given: Given) -> str:
    is_own = given.mpu is None or isinstance(given.model, PipelineModule)
    num_stages = 1 if is_own else bwc_pipeline_parallel_world_size(given.mpu)
    return f"{_MPU} {num_stages} pipeline stages" if num_stages > 1 else ""


_AUTOTP = "tensor_parallel.autotp_size"
_is_autotp = is_not_in(_AUTOTP, 0, 1)


def _divided_twice(given: Given) -> str:
    has_groups = given.mpu not in (None, groups)  # AutoTP's own mpu is DeepSpeed's module
    return f"{_is_autotp(given)}, and an mpu was passed" if has_groups and _is_autotp(given) else ""


def _native_divided(given: Given) -> str:
    asked = _is_autotp(given)
    is_native = asked and any(isinstance(module, MoE) for module in given.model.modules())
    return f"{asked}, and the model has a deepspeed.moe.layer.MoE" if is_native else ""


def _divided_on_meta(given: Given) -> str:
    told, mpu = _on_meta(given), given.mpu
    if not told or mpu in (None, groups) or TensorParallel.of(mpu).group is None:
        return ""
    return f"{_MPU} tensor parallel groups, and {told}"


_SEQUENCES = "sequence_parallel_size"
_ULYSSES = "pass the mpu that UlyssesSPAttentionHF.register_with_transformers returns"


def _sequences_alone(given: Given) -> str:
    has_groups = given.mpu is not None and is_of_sequences(given.mpu)
    return "" if has_groups else is_not_in(_SEQUENCES, 1)(given)


def _meshed(given: Given) -> str:
    if given.mesh is not None:
        return "mesh_param was passed to deepspeed.initialize"
    is_asked = given.at("data_parallel_size") is not None and given.at(_SEQUENCES) is not None
    return f"data_parallel_size is set beside {_SEQUENCES}" if is_asked else ""


UNSUPPORTED = (
    Refusal(
        "expert_parallel.enabled true",
        is_on("expert_parallel.enabled"),
        "DeepSpeed's AutoEP replaces the same layers",
        f"set one of expert_parallel.enabled and {BLOCK}.enabled to false",
    ),
    Refusal(
        f"{_ZERO}offload_param",
        _offloads(f"{_ZERO}offload_param"),
        "experts that lie in host memory would be brought for every pass and every copy",
        "remove it; offload_optimizer may stay",
    ),
    Refusal(
        f"{_ZERO}cpu_offload_param true",
        is_on(f"{_ZERO}cpu_offload_param"),
        "it is an older name of offload_param",
        "remove it",
    ),
    Refusal(
        f"{_ZERO}cpu_offload true",
        is_on(f"{_ZERO}cpu_offload"),
        "it is an older name of offload_optimizer",
        'write "offload_optimizer": {"device": "cpu"}',
    ),
    Refusal(
        f"{_OPTIMIZER}.device nvme",
        is_in(f"{_OPTIMIZER}.device", "nvme"),
        "states in files of a rank's own can neither be saved by name nor move",
        "use cpu",
    ),
    Refusal(
        f"{_OPTIMIZER} at stage 0",
        _offloads_unsharded,
        "DeepSpeed offloads what ZeRO has parted",
        "use stage 1, 2 or 3, or remove it",
    ),
    Refusal(
        f"{_ZERO}contiguous_gradients false at stage 1 or 2",
        _scattered_gradients,
        "DeepSpeed averages experts by it as if all ranks had the same, or refuses them",
        "set it to true",
    ),
    Refusal(
        f"{_ZERO}reduce_scatter false at stage 1 or 2",
        _reduced_whole,
        "DeepSpeed refuses it with experts",
        "set it to true",
    ),
    Refusal(
        f"{_OPTIMIZER}.super_offload true",
        is_on(f"{_OPTIMIZER}.super_offload"),
        "another process steps the optimizer",
        "set it to false",
    ),
    Refusal(
        f"{_ZERO}zenflow",
        _is_there(f"{_ZERO}zenflow"),
        "it keeps gradients in an order of its own",
        "remove it",
    ),
    *(
        Refusal(
            f"{kind}.{kind}_master_weights_and_grads true",
            is_on(f"{kind}.{kind}_master_weights_and_grads"),
            "states of 32 bits beside masters of 16 would be rounded when they are loaded",
            "set it to false",
        )
        for kind in ("bf16", "fp16")
    ),
    Refusal(
        f"{_AUTOTP} above 1 with an mpu",
        _divided_twice,
        "AutoTP makes tensor parallel groups of its own",
        "leave out one of the two",
    ),
    Refusal(
        f"{_AUTOTP} above 1 with deepspeed.moe.layer.MoE",
        _native_divided,
        "gradients of its gate are not those of the undivided model",
        "set it to 1, or use a model of transformers",
    ),
    Refusal(
        f"mesh_param of deepspeed.initialize, or data_parallel_size with {_SEQUENCES}",
        _meshed,
        "DeepSpeed then reduces gradients over the data parallel ranks alone, and the weights of "
        "sequence parallel ones part ways",
        f"leave it out, and {_ULYSSES}",
    ),
    Refusal(
        f"{_SEQUENCES} above 1 without an mpu of sequence parallel groups",
        _sequences_alone,
        "DeepSpeed makes no groups of it",
        f"{_ULYSSES}, or set it to 1",
    ),
    Refusal(
        "hybrid_engine.enabled true",
        is_on("hybrid_engine.enabled"),
        "the hybrid engine is not supported with replaced experts",
        "set it to false",
    ),
    Refusal(
        "compile.deepcompile true",
        is_on("compile.deepcompile"),
        "DeepCompile cannot trace the exchange of rows",
        "set it to false",
    ),
    Refusal(
        "use_data_before_expert_parallelism true",
        is_on("use_data_before_expert_parallelism"),
        "expert-parallel ranks are neighbours here",
        "set it to false",
    ),
    Refusal(
        "checkpoint.use_node_local_storage true",
        is_on("checkpoint.use_node_local_storage"),
        "a checkpoint is one folder here, which all ranks write and read",
        "set it to false and save to a file system that they share",
    ),
    Refusal(
        "a DualPipeVModule",
        _folded,
        "a rank has two stages there",
        "use PipelineModule",
    ),
    Refusal(
        "fp16.enabled true with a PipelineModule",
        _pipeline_in_float16,
        "whether its stages skip steps together has not been tried",
        "use bf16",
    ),
    Refusal(
        "a PipelineModule with tensor or sequence parallel ranks in its topology",
        _pipeline_of_parts,
        "only pipelines of data parallel ranks are supported",
        "use PipeDataParallelTopology, or num_stages",
    ),
    Refusal(
        "a PipelineModule whose stages are not neighbouring ranks",
        _pipeline_of_strides,
        "DeepSpeed's groups of experts are of neighbours",
        "use PipeDataParallelTopology, or num_stages",
    ),
    Refusal(
        "an mpu with pipeline stages",
        _stages,
        "stages are known of a PipelineModule only",
        "use 1, or a PipelineModule without mpu",
    ),
    Refusal(
        "a model whose experts were replaced before",
        _replaced,
        "they belong to that engine",
        "build the model anew",
    ),
    ADAPTERS,
    Refusal(
        "deepspeed.moe.layer.MoE on the meta device",
        _native_on_meta,
        "its experts are modules that each rank would have to make first",
        "build it as it is, with an ep_size by which each rank has its own experts alone",
    ),
    Refusal(
        "an mpu with tensor parallel groups and a model on the meta device",
        _divided_on_meta,
        "all ranks make the same, and would start with the same values in unlike parts of a weight",
        "build it on the CPU, or use AutoTP",
    ),
    Refusal(
        f"a model {_INIT}, at another stage than 3",
        _sharded_for_others,
        "other stages know no shards of weights",
        "use stage 3, or build it without",
    ),
    Refusal(
        f"deepspeed.moe.layer.MoE {_INIT}",
        _native_sharded,
        "its experts stay the parameters that they were, sharded over all ranks",
        "build it without",
    ),
    Refusal(
        f"{BLOCK}.gate with a model {_INIT}",
        _gate_sharded,
        "the gate's weights take the place of shards",
        "build it without",
    ),
)


def refuse_unsupported(document: Mapping[str, Any], model: nn.Module, mpu: Any, mesh: Any) -> None:
    """Refuse what cannot work together, by the name of the key.

    Raises:
        ValueError: the key, its value, why, and what to do.
    """
    refuse(UNSUPPORTED, Given(document, model, mpu, mesh))


@dataclass(frozen=True, eq=False)
class GivenToShard(Given):
    """What ``deepspeed.initialize`` was given, where ZeRO shards weights.

    Attributes:
        strategy: that was asked for.
    """

    strategy: Strategy


def is_above(key: str, most: int) -> Asked:
    """A key is a number above this one."""
    return lambda given: told(key, given.at(key)) if (given.at(key) or 0) > most else ""


def _shards_over_all(_: GivenToShard) -> str:
    is_able = hasattr(DeepSpeedZeroOptimizer_Stage3, "_autoep_expert_parallel_group")
    return "" if is_able else f"DeepSpeed is {deepspeed.__version__}"


def _has_roles(given: GivenToShard) -> str:
    return "the strategy gives ranks roles" if given.strategy.roles is not None else ""


HOMES_AT_STAGE_3 = Refusal(
    "experts that move to new homes (reshard_interval above 0), at ZeRO 3",
    is_in(f"{_ZERO}stage", 3),
    "the states of experts that move lie in ZeRO's shards",
    "use stage 0, 1 or 2",
)

_WHOLE = "use stage 0, 1 or 2"

AT_STAGE_3 = (
    Refusal(
        "DeepSpeed before ZeRO 3 sharded experts of its own",
        _shards_over_all,
        "its ZeRO 3 shards all weights over the same ranks",
        f"use DeepSpeed 0.19.7 or newer, or {_WHOLE.removeprefix('use ')}",
    ),
    Refusal(
        "a strategy that gives ranks roles (zebra)",
        _has_roles,
        "ranks of one role would gather weights that those of the other do not have",
        _WHOLE,
    ),
    Refusal(
        f"{_ZERO}zero_hpz_partition_size above 1",
        is_above(f"{_ZERO}zero_hpz_partition_size", 1),
        "its second shards are of all ranks of a node, which have other experts",
        "set it to 1",
    ),
    Refusal(
        f"{_ZERO}zero_quantized_weights true",
        is_on(f"{_ZERO}zero_quantized_weights"),
        "experts that only one rank has would be rounded for nothing",
        "set it to false",
    ),
    Refusal(
        f"{_ZERO}zero_quantized_nontrainable_weights true",
        is_on(f"{_ZERO}zero_quantized_nontrainable_weights"),
        "experts that only one rank has would be rounded for nothing",
        "set it to false",
    ),
    Refusal(
        f"{_ZERO}zero_quantized_gradients true",
        is_on(f"{_ZERO}zero_quantized_gradients"),
        "it sums gradients over all ranks, which have other experts",
        "set it to false",
    ),
    Refusal(
        f"{_ZERO}stage3_module_granularity_threshold above 0",
        is_above(f"{_ZERO}stage3_module_granularity_threshold", 0),
        "it takes MoE layers for one module, behind whose end gradients of copies come",
        "leave it out",
    ),
)


def refuse_at_stage_3(
    document: Mapping[str, Any], model: nn.Module, mpu: Any, strategy: Strategy
) -> None:
    """Refuse what cannot work where ZeRO shards weights, by the name of the key.

    Raises:
        ValueError: the key, its value, why, and what to do.
    """
    given = GivenToShard(document, model, mpu, None, strategy)
    refuse(AT_STAGE_3, given, context=f"{ENABLED} and {_ZERO}stage is 3")


@dataclass(frozen=True, eq=False)
class GivenWithRoles(Given):
    """What ``deepspeed.initialize`` was given, where ranks have roles.

    Attributes:
        settings: of our block.
    """

    settings: Settings


def _pipelined(given: Given) -> str:
    kind = type(given.model).__name__
    is_pipeline = isinstance(given.model, PipelineModule)
    return f"the model is a PipelineModule ({kind})" if is_pipeline else ""


def _foreign_unit(given: Given) -> str:
    is_foreign = given.mpu is not None and not isinstance(given.mpu, RoleUnit)
    kind = type(given.mpu).__name__
    return f"an mpu ({kind}) was passed to deepspeed.initialize" if is_foreign else ""


def _compiled_in_place(given: Given) -> str:
    if given.model._compiled_call_impl is None:
        return ""
    kind = type(given.model).__name__
    return f"this {kind} was compiled in place, by its own compile(), before deepspeed.initialize"


def _adapts_experts(given: Given) -> str:
    layer = next(huggingface.adapted(given.model), None)
    return "" if layer is None else f"the experts of {layer} have adapters of peft"


def _autocast_to_float16(given: Given) -> str:
    is_on = given.at("torch_autocast.enabled")
    return is_in("torch_autocast.dtype", *FLOAT16)(given) if is_on else ""


FLOAT16 = ("float16", "fp16", "half", "torch.float16")  # as DeepSpeed lets it be written


def _optimizer_of_one_role(given: Given) -> str:
    kind = given.at("optimizer.type")
    return told("optimizer.type", kind) if str(kind).lower() in OPTIMIZERS_OF_ONE_ROLE else ""


OPTIMIZERS_OF_ONE_ROLE = ("onebitadam", "onebitlamb", "zerooneadam", "muon")


WITH_ROLES = (
    Refusal(
        "a model on the meta device, with roles",
        _on_meta,
        "each role would make what only the other keeps",
        "build it on the CPU",
    ),
    Refusal(
        "a PipelineModule",
        _pipelined,
        "its stages have other layers, and ranks of one role have all",
        "pass a plain nn.Module",
    ),
    Refusal(
        "an mpu",
        _foreign_unit,
        "tensor and sequence parallelism are not supported with roles",
        "leave mpu out",
    ),
    Refusal(
        f"{_AUTOTP} above 1",
        _is_autotp,
        "tensor parallelism is not supported with roles",
        "set it to 1",
    ),
    Refusal(
        "a model compiled in place (its own compile())",
        _compiled_in_place,
        "one role runs parts of it",
        "call engine.compile() behind deepspeed.initialize, or pass torch.compile(model)",
    ),
    Refusal(
        "adapters of experts (peft's target_parameters)",
        _adapts_experts,
        "the step of both roles takes weights as they are kept, without what adapters add",
        "leave experts out of target_parameters, or choose another strategy",
    ),
    Refusal(
        "torch_autocast.dtype float16",
        _autocast_to_float16,
        "its scaler lets each rank skip steps alone",
        "use bfloat16, or fp16.enabled",
    ),
    Refusal(
        f"{_OPTIMIZER} with roles",
        _offloads(_OPTIMIZER),
        "DeepSpeed takes norms of offloaded gradients over ranks of one role",
        "remove it",
    ),
    Refusal(
        "optimizer.legacy_fusion true",
        is_on("optimizer.legacy_fusion"),
        "it knows no norm over two roles",
        "set it to false",
    ),
    Refusal(
        f"optimizer.type {', '.join(OPTIMIZERS_OF_ONE_ROLE)}",
        _optimizer_of_one_role,
        "it communicates by itself, among ranks of one role",
        "use another, as AdamW",
    ),
    Refusal(
        "data_efficiency.enabled true",
        is_on("data_efficiency.enabled"),
        "its sampler takes the ranks of one role for all",
        "set it to false",
    ),
)


def refuse_with_roles(
    document: Mapping[str, Any], settings: Settings, model: nn.Module, mpu: Any
) -> None:
    """Refuse what cannot work where ranks have roles, by the name of the key.

    Raises:
        ValueError: the key, its value, why, and what to do.
    """
    given = GivenWithRoles(document, model, mpu, None, settings)
    refuse(WITH_ROLES, given, context=f"{BLOCK}.strategy is {settings.strategy!r}")
