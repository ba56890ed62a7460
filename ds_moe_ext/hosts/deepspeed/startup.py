"""What is checked before DeepSpeed builds anything: the JSON block, the model, the ranks."""

from __future__ import annotations

import base64
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_moe_ext.hosts import experts, huggingface
from ds_moe_ext.hosts.attach import Blueprint, draw
from ds_moe_ext.hosts.deepspeed import native
from ds_moe_ext.settings import BLOCK, read_settings

FINDERS = (huggingface.find, native.find, experts.find_registered)


def blueprint_of(document: Mapping[str, Any], model: nn.Module, mpu: Any) -> Blueprint | None:
    """What the block asks for on this model; None where it is absent or not enabled.

    Raises:
        ValueError: the block is malformed, or asks for what cannot be done.
    """
    settings, strategy = read_settings(document)
    if strategy is None:
        return None
    refuse_unsupported(document, model, mpu)
    return draw(settings, strategy, model, FINDERS, world_size())


def check_initialize(initialize: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    """Check the arguments of ``deepspeed.initialize`` before it makes any process group."""
    bound = inspect.signature(initialize).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    document = _document(given)
    if document is not None and given["model"] is not None:
        blueprint_of(document, given["model"], given["mpu"])


def _document(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration as DeepSpeed will find it; None where it will complain itself."""
    config = given.get("config") or given.get("config_params")
    if config is None:
        config = getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(config, Mapping) or config is None:
        return config
    if not isinstance(config, (str, os.PathLike)):
        return None
    if os.path.exists(config):
        text = Path(config).read_text()
    else:  # DeepSpeed also takes the JSON itself in base64
        try:
            text = base64.urlsafe_b64decode(str(config)).decode()
        except ValueError:
            return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return None
    return document if isinstance(document, Mapping) else None


def world_size() -> int:
    """Ranks of the run, before or after the process group is made."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def refuse_unsupported(document: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    """Refuse what cannot work together, by the name of the key.

    Raises:
        ValueError: the key, its value, why, and what to do.
    """
    zero = _section(document, "zero_optimization")
    tensor_parallel = _section(document, "tensor_parallel").get("autotp_size", 0) or 0
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
            any(_section(zero, key) for key in ("offload_param", "offload_optimizer"))
            or bool(zero.get("cpu_offload")),
            "zero_optimization.offload_optimizer or offload_param is set, which is not supported "
            "with replaced experts; remove it",
        ),
        (
            tensor_parallel > 1,
            f"tensor_parallel.autotp_size is {tensor_parallel}, which is not supported; set it to "
            "1",
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
            isinstance(model, PipelineModule),
            f"the model is a PipelineModule ({type(model).__name__}); pipeline parallelism is not "
            "supported: pass a plain nn.Module",
        ),
        (
            mpu is not None,
            "an mpu was passed to deepspeed.initialize: tensor, sequence and pipeline parallel "
            "groups of a model are not supported; leave mpu out",
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


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = document.get(key)
    return section if isinstance(section, Mapping) else {}
