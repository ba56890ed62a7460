"""What is refused before anything is built, by the name of the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_moe_ext.hosts import experts
from ds_moe_ext.hosts.deepspeed import native
from ds_moe_ext.hosts.deepspeed.roles import RoleUnit
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.moe.hooks import NO_HOOKS
from ds_moe_ext.settings import BLOCK, Settings


def refuse_unsupported(document: Mapping[str, Any], model: nn.Module, mpu: Any, mesh: Any) -> None:
    """Refuse what cannot work together, by the name of the key.

    Raises:
        ValueError: the key, its value, why, and what to do.
    """
    zero = _section(document, "zero_optimization")
    tensor_parallel = _section(document, "tensor_parallel").get("autotp_size")
    sequence_parallel = document.get("sequence_parallel_size")
    offloads = [key for key in OFFLOADS if _offloads(zero.get(key))]
    refused = [
        (
            bool(_section(document, "expert_parallel").get("enabled")),
            "expert_parallel.enabled is true: DeepSpeed's AutoEP replaces the same layers; set one "
            f"of expert_parallel.enabled and {BLOCK}.enabled to false",
        ),
        (
            zero.get("stage") == 3,
            "zero_optimization.stage is 3, which shards expert weights a second time; use stage "
            "0, 1 or 2: experts are spread over the ranks already",
        ),
        (
            bool(offloads),
            f"zero_optimization.{' and '.join(offloads)} is set, which is not supported with "
            "replaced experts; remove it",
        ),
        (
            tensor_parallel not in (None, 0, 1),
            f"tensor_parallel.autotp_size is {tensor_parallel!r}, which is not supported; set it "
            "to 1",
        ),
        (
            sequence_parallel not in (None, 1),
            f"sequence_parallel_size is {sequence_parallel!r}, which is not supported; set it to 1",
        ),
        (
            bool(_section(document, "hybrid_engine").get("enabled")),
            "hybrid_engine.enabled is true, which is not supported with replaced experts; set it "
            "to false",
        ),
        (
            bool(_section(document, "compile").get("deepcompile")),
            "compile.deepcompile is true, which cannot trace the exchange of rows; set it to false",
        ),
        (
            bool(document.get("use_data_before_expert_parallelism")),
            "use_data_before_expert_parallelism is true, but expert-parallel ranks are neighbours "
            "here; set it to false",
        ),
        (
            bool(_section(document, "checkpoint").get("use_node_local_storage")),
            "checkpoint.use_node_local_storage is true, but a checkpoint is one folder here, which "
            "all ranks write and read; set it to false and save to a file system that they share",
        ),
        (
            isinstance(model, PipelineModule),
            f"the model is a PipelineModule ({type(model).__name__}); pipeline parallelism is not "
            "supported: pass a plain nn.Module",
        ),
        (
            mesh is not None,
            "a mesh_param was passed to deepspeed.initialize: sequence parallel groups are not "
            "supported; leave mesh_param out",
        ),
        (
            any(isinstance(m, (experts.HostedExperts, native.HostedMoE)) for m in model.modules()),
            f"the experts of this {type(model).__name__} were replaced by an earlier "
            "deepspeed.initialize; build the model anew",
        ),
        (
            any(hasattr(parameter, "ds_id") for parameter in model.parameters()),
            "the model was built under deepspeed.zero.Init, which shards weights at construction; "
            "build it without, at stage 0, 1 or 2",
        ),
    ]
    for is_set, reason in refused:
        if is_set:
            raise ValueError(f"{BLOCK} is enabled, but {reason}")
    TensorParallel.of(mpu)


def refuse_with_roles(document: Mapping[str, Any], settings: Settings, mpu: Any) -> None:
    """Refuse what cannot work where ranks have roles, by the name of the key.

    Raises:
        ValueError: the key, its value, why, and what to do.
    """
    zero, optimizer = _section(document, "zero_optimization"), _section(document, "optimizer")
    kind = str(optimizer.get("type", ""))
    autocast = _section(document, "torch_autocast")
    refused = [
        (
            mpu is not None and not isinstance(mpu, RoleUnit),
            f"an mpu ({type(mpu).__name__}) was passed to deepspeed.initialize: tensor and "
            "sequence parallelism are not supported with roles; leave mpu out",
        ),
        (
            settings.hooks != NO_HOOKS,
            f"{BLOCK}.hooks is set, which is not supported with roles; leave it out",
        ),
        (
            bool(autocast.get("enabled")) and autocast.get("dtype") in FLOAT16,
            f"torch_autocast.dtype is {autocast.get('dtype')}, whose scaler lets each rank skip "
            "steps alone; use bfloat16, or fp16.enabled",
        ),
        (
            zero.get("reduce_scatter") is False,
            "zero_optimization.reduce_scatter is false, which DeepSpeed refuses on the ranks that "
            "have experts only; set it to true",
        ),
        (
            zero.get("contiguous_gradients") is False and zero.get("stage") == 2,
            "zero_optimization.contiguous_gradients is false, which DeepSpeed refuses at stage 2 "
            "on the ranks that have experts only; set it to true",
        ),
        (
            bool(optimizer.get("legacy_fusion")),
            "optimizer.legacy_fusion is true, which knows no norm over two roles; set it to false",
        ),
        (
            kind.lower() in OPTIMIZERS_OF_ONE_ROLE,
            f"optimizer.type is {kind!r}, which communicates by itself, among ranks of one role; "
            "use another, as AdamW",
        ),
        (
            bool(_section(document, "data_efficiency").get("enabled")),
            "data_efficiency.enabled is true, whose sampler takes the ranks of one role for all; "
            "set it to false",
        ),
    ]
    for is_set, reason in refused:
        if is_set:
            raise ValueError(f"{BLOCK}.strategy is {settings.strategy!r}, but {reason}")


FLOAT16 = ("float16", "fp16", "half", "torch.float16")  # as DeepSpeed lets it be written

OPTIMIZERS_OF_ONE_ROLE = ("onebitadam", "onebitlamb", "zerooneadam", "muon")

OFFLOADS = ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param")


def _offloads(value: Any) -> bool:
    """Whether a key of ``zero_optimization`` turns offloading on: a block may say it is off."""
    return value.get("device", "none") != "none" if isinstance(value, Mapping) else bool(value)


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = document.get(key)
    return section if isinstance(section, Mapping) else {}
