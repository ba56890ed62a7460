# SPDX-License-Identifier: Apache-2.0
"""How a DeepSpeed run is watched for ``ds-moe-ext verify``."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.replacement import found_in
from ds_moe_ext.hosts.deepspeed.startup import FINDERS, INITIALIZE, document_of
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.hosts.verification.recording import (
    ExpertPart,
    Parts,
    Recording,
    cast,
    parts_of_run,
    parts_of_stacks,
    turned,
)
from ds_moe_ext.hosts.verification.this_run import trial_of_this_run, undrawn
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.verification.trial import Precision

NARROW = ("bf16", "bfloat16", "fp16", "amp", "torch_autocast")
"""Keys of a configuration that make a run compute in another type than its weights have."""
TYPES = ("communication_data_type", "data_types")


def initialize(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``deepspeed.initialize``, for an engine that is watched."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    document = document_of(given)
    if document is None or given["model"] is None:
        return original(*args, **kwargs)  # which complains
    given["config"], given["config_params"] = _prepared(document), None
    given["args"] = _without_config(given["args"])
    cast(given["model"], trial_of_this_run().precision)
    with undrawn():
        engine, *others = original(*bound.args, **bound.kwargs)
    _watch(engine, document)
    return (engine, *others)


def _prepared(document: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for this run.

    Raises:
        ValueError: there is nothing to compare, or this cannot be compared.
    """
    precision = trial_of_this_run().precision
    settings, strategy = read_settings(document)
    if strategy is not None and strategy.has_roles:
        raise ValueError(
            f"{BLOCK}.strategy is {settings.strategy!r}, under which ranks run the batches of "
            "others, so that ds-moe-ext verify cannot compare them rank by rank; verify the job "
            "with another strategy, and compare curves by hand"
        )
    if precision is Precision.FLOAT64:
        raise ValueError(
            "--dtype is float64, in which DeepSpeed reduces no gradients; leave it out"
        )
    if (document.get("zero_optimization") or {}).get("stage") == 3:
        raise ValueError(
            "zero_optimization.stage is 3, at which weights are shards between passes, so that "
            "ds-moe-ext verify cannot compare them; verify the job at stage 2, on fewer layers if "
            "they do not fit"
        )
    prepared = turned(document, f"the configuration of {INITIALIZE}")
    if precision is Precision.AS_IS:
        return prepared
    off = {key: {"enabled": False} for key in NARROW if key in prepared}
    return {key: value for key, value in prepared.items() if key not in TYPES} | off


def _without_config(args: Any) -> Any:
    """The script's arguments, which DeepSpeed is not to read the configuration from again."""
    names = [f"{name}_config" for name in ("deepspeed", "deepscale")]
    found = [name for name in names if getattr(args, name, None) is not None]
    without = copy.copy(args) if found else args
    for name in found:
        setattr(without, name, None)
    return without


def _watch(engine: Any, document: Mapping[str, Any]) -> None:
    model, run = engine.module, run_of(engine)
    if run is None:
        settings, _ = read_settings(document)
        found = found_in(model, FINDERS, settings)
        stacked = [layer for layer in found if not _is_native(model, layer.name)]
        parts: Parts = {**parts_of_stacks(model, stacked), **_parts_of_modules(model, found)}
        num_experts_of = {layer.name: layer.num_experts for layer in found}
    else:
        parts = parts_of_run(run)
        homes = run.planning.job.homes
        num_experts_of = {layer.name: home.num_experts for layer, home in zip(run.layers, homes)}
    recording = Recording(trial_of_this_run(), model, parts, num_experts_of)
    for name in num_experts_of:
        if _is_native(model, name):
            recording.watch_layer(name, model.get_submodule(name))
        else:
            recording.watch_in_block(model, name)
    _watch_steps(engine, recording)


def _is_native(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), MoE)


def _parts_of_modules(model: nn.Module, found: Iterable[Found]) -> Parts:
    """The experts of DeepSpeed's own layers, of which a rank may have some only."""
    parts: dict[nn.Parameter, list[ExpertPart]] = {}
    for layer in found:
        moe: Any = model.get_submodule(layer.name)
        if not isinstance(moe, MoE):
            continue
        own = list(moe.deepspeed_moe.experts.deepspeed_experts)
        first = dist.get_rank(moe.deepspeed_moe.ep_group) * len(own)
        for expert, module in enumerate(own, first):
            for weight, parameter in module.named_parameters():
                parts[parameter] = [ExpertPart(f"{layer.name}.{weight}.{expert}", None)]
    return parts


def _watch_steps(engine: Any, recording: Recording) -> None:
    """The engine's own two methods are wrapped, outside of what may tell others of an error."""
    backward, step = engine.backward, engine.step

    @functools.wraps(backward)
    def backward_seen(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        recording.loss(float(loss.detach().mean()))
        return backward(loss, *args, **kwargs)

    @functools.wraps(step)
    def step_seen(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > before:
            recording.norm(engine.get_global_grad_norm())
            recording.step()
        return result

    engine.backward, engine.step = backward_seen, step_seen
