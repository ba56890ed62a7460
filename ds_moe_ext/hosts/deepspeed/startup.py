"""What is checked before DeepSpeed builds anything: the JSON block, the model, the ranks."""

from __future__ import annotations

import base64
import inspect
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hjson
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import init_distributed
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_moe_ext.comm import gather_texts
from ds_moe_ext.hosts import experts, huggingface
from ds_moe_ext.hosts.attach import Blueprint, draw
from ds_moe_ext.hosts.deepspeed import native
from ds_moe_ext.hosts.deepspeed.roles import RoleUnit
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.settings import BLOCK, read_settings

FINDERS = (huggingface.find, native.find, experts.find_registered)


def blueprint_of(
    document: Mapping[str, Any], model: nn.Module, mpu: Any, mesh: Any = None
) -> Blueprint | None:
    """What the block asks for on this model; None where it is absent or not enabled, and before
    the number of ranks is known.

    Args:
        document: the whole configuration.
        model: the user's model.
        mpu: that the user passed to ``deepspeed.initialize``.
        mesh: ``mesh_param`` that the user passed, or what came of it.

    Raises:
        ValueError: the block is malformed, or asks for what cannot be done.
    """
    settings, strategy = read_settings(document)
    if strategy is None:
        return None
    strategy = strategy.settled(_devices)
    refuse_unsupported(document, model, mpu, mesh)
    if settings.sequence_parallel and TensorParallel.of(mpu).group is None:
        raise ValueError(
            f"{BLOCK}.sequence_parallel is true, but no mpu with tensor parallel groups was passed "
            "to deepspeed.initialize; pass it, or leave sequence_parallel out"
        )
    size = world_size()
    return None if size is None else draw(settings, strategy, model, FINDERS, size)


def check_initialize(
    initialize: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> inspect.BoundArguments:
    """Check the arguments of ``deepspeed.initialize`` before it makes any process group.

    Returns:
        The arguments; where ranks have roles, with an mpu that says so.
    """
    bound = inspect.signature(initialize).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    document = _document(given)
    if document is not None and given["model"] is not None:
        blueprint = blueprint_of(document, given["model"], given["mpu"], given["mesh_param"])
        if blueprint is not None and blueprint.strategy.roles is not None:
            _begin()
            given["mpu"] = RoleUnit.build(blueprint.strategy.roles)
    return bound


def _begin() -> None:
    """Make the world of all ranks, as ``deepspeed.initialize`` would."""
    if not dist.is_initialized():
        backend = get_accelerator().communication_backend_name()
        init_distributed(dist_backend=backend, dist_init_required=True)


def _devices() -> list[str]:
    """Name of each rank's device. Collective."""
    _begin()
    device = torch.device(get_accelerator().current_device_name())
    has_name = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if has_name else platform.processor()
    return gather_texts(name or device.type, None)


def _document(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration as DeepSpeed will find it; None where it will complain itself."""
    args = given.get("args")
    named = (getattr(args, f"{name}_config", None) for name in ("deepspeed", "deepscale"))
    configs = (given.get("config"), given.get("config_params"), *named)
    config = next((config for config in configs if config is not None), None)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str):
        return None
    try:
        if os.path.exists(config):
            text = Path(config).read_text()
        else:  # DeepSpeed also takes the JSON itself in base64
            text = base64.urlsafe_b64decode(config).decode()
        document = hjson.loads(text)  # as DeepSpeed reads it: with comments
    except (OSError, ValueError):
        return None
    return document if isinstance(document, Mapping) else None


def world_size() -> int | None:
    """Ranks of the run; None where, as under MPI, they are known once the process group is made."""
    if dist.is_initialized():
        return dist.get_world_size()
    given = os.environ.get("WORLD_SIZE")
    return None if given is None else int(given)


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


OFFLOADS = ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param")


def _offloads(value: Any) -> bool:
    """Whether a key of ``zero_optimization`` turns offloading on: a block may say it is off."""
    return value.get("device", "none") != "none" if isinstance(value, Mapping) else bool(value)


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = document.get(key)
    return section if isinstance(section, Mapping) else {}
