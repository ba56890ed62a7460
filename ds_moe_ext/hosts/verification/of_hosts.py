# SPDX-License-Identifier: Apache-2.0
"""How a run of each host is watched for ``ds-moe-ext verify``: DeepSpeed, Megatron-core, torch.

Modules of a host, and ours that need it, are imported where that host runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import Found, any_name
from ds_moe_ext.hosts.attachment.replacement import Finder, found_in
from ds_moe_ext.hosts.steps.training_run import Run, run_of
from ds_moe_ext.hosts.verification.recording import (
    ExpertPart,
    Parts,
    Recording,
    cast,
    parts_of_run,
    parts_of_stacks,
    trial_of_this_run,
    turned,
    undrawn,
)
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.verification import Precision

_RECORDINGS: list[Recording] = []  # of this process: one or none


def _experts_of(
    run: Run | None,
    model: nn.Module,
    document: Mapping[str, Any],
    finders: Sequence[Finder],
    stock_parts: Callable[[nn.Module, Sequence[Found]], Parts],
) -> tuple[Parts, dict[str, int]]:
    """What parameters have of experts, with us or without; and by name, the MoE layers' experts."""
    if run is not None:
        pairs = zip(run.layers, run.planning.job.owners)
        return parts_of_run(run), {layer.name: owner.num_experts for layer, owner in pairs}
    found = found_in(model, finders, read_settings(document)[0])
    return stock_parts(model, found), {layer.name: layer.num_experts for layer in found}


# DeepSpeed.

NARROW = ("bf16", "bfloat16", "fp16", "amp", "torch_autocast")
"""Keys of a configuration that make a run compute in another type than its weights have."""
TYPES = ("communication_data_type", "data_types")


def initialize(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``deepspeed.initialize``, for an engine that is watched."""
    from ds_moe_ext.hosts.deepspeed.startup import FINDERS, INITIALIZE, document_of

    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    document = document_of(given)
    if document is None or given["model"] is None:
        return original(*args, **kwargs)  # which complains
    given["config_params"] = None
    given["config"] = _prepared(document, f"the configuration of {INITIALIZE}")
    for name in ("deepspeed_config", "deepscale_config"):  # from which it is not to read it again
        if getattr(given["args"], name, None) is not None:
            given["args"] = copy.copy(given["args"])
            setattr(given["args"], name, None)
    cast(given["model"], trial_of_this_run().precision)
    with undrawn():
        engine, *others = original(*bound.args, **bound.kwargs)
    model, run = engine.module, run_of(engine)
    parts, num_experts_of = _experts_of(run, model, document, FINDERS, _parts_under_deepspeed)
    recording = Recording(model, parts, num_experts_of)
    for name in num_experts_of:
        if _is_deepspeeds(module := model.get_submodule(name)):
            recording.watch_layer(name, module)
        else:
            recording.watch_in_block(model, name)
    _watch_steps(engine, recording)
    return (engine, *others)


def _prepared(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The configuration for this run. Raises ValueError where there is nothing to compare, or this
    cannot be compared."""
    precision = trial_of_this_run().precision
    settings, strategy = read_settings(document)
    if strategy is not None and strategy.has_roles:
        raise ValueError(
            f"{BLOCK}.strategy is {settings.strategy!r}, where ranks run batches of other "
            "ranks, so ds-moe-ext verify cannot compare rank by rank; verify the job with "
            "another strategy, and compare loss curves by hand"
        )
    if precision is Precision.FLOAT64:
        raise ValueError(
            "--dtype is float64, in which DeepSpeed reduces no gradients; leave it out"
        )
    if (document.get("zero_optimization") or {}).get("stage") == 3:
        raise ValueError(
            "zero_optimization.stage is 3, where weights are sharded between passes, so "
            "ds-moe-ext verify cannot compare them; verify the job at stage 2, on fewer "
            "layers if they do not fit"
        )
    prepared = turned(document, where)
    if precision is Precision.AS_IS:
        return prepared
    off = {key: {"enabled": False} for key in NARROW if key in prepared}
    return {key: value for key, value in prepared.items() if key not in TYPES} | off


def _is_deepspeeds(module: nn.Module) -> bool:
    from deepspeed.moe.layer import MoE

    return isinstance(module, MoE)


def _parts_under_deepspeed(model: nn.Module, found: Sequence[Found]) -> Parts:
    """Of DeepSpeed's own layers a rank may have some experts only."""
    native = {layer.name: model.get_submodule(layer.name) for layer in found}
    native = {name: module for name, module in native.items() if _is_deepspeeds(module)}
    parts = dict(parts_of_stacks(model, [layer for layer in found if layer.name not in native]))
    for name, module in native.items():
        moe: Any = module.deepspeed_moe
        own = list(moe.experts.deepspeed_experts)
        for expert, one in enumerate(own, dist.get_rank(moe.ep_group) * len(own)):
            for weight, parameter in one.named_parameters():
                parts[parameter] = [ExpertPart(f"{name}.{weight}.{expert}")]
    return parts


def _watch_steps(engine: Any, recording: Recording) -> None:
    """The engine's own two methods are wrapped, outside of what may notify others of an error."""
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


# Megatron-core.


def watch_model(optimizer: Any, config: Any, chunks: Sequence[nn.Module]) -> None:
    """Watch a model, in its parts on this rank, whose optimizer has been made, by an
    ``OptimizerConfig``. Raises ValueError where it computes in another type than was asked for."""
    from ds_moe_ext.hosts.megatron.engine import whole
    from ds_moe_ext.hosts.megatron.layers import find_layers, form_of, weight_names

    trial, model = trial_of_this_run(), whole(chunks)
    found = list(find_layers(model, any_name))
    if trial.precision is not Precision.AS_IS:
        _check_type(config, model, trial.precision)
    layers: dict[str, Any] = {layer.name: model.get_submodule(layer.name) for layer in found}
    # Experts are where Megatron put them when training begins, with us too.
    parts: dict[nn.Parameter, list[ExpertPart]] = {}
    for name, layer in layers.items():
        weights = weight_names(layer.config)
        slots = form_of(name, layer.experts).slots(layer.experts, weights)
        for expert, slot in zip(layer.local_expert_indices, slots, strict=True):
            for weight, parameter in zip(weights, slot.parameters):
                parts[parameter] = [ExpertPart(f"{name}.{weight}.{expert}")]
    recording = Recording(model, parts, {layer.name: layer.num_experts for layer in found})
    for name, layer in layers.items():
        recording.watch_layer(name, layer)
        recording.watch_router(name, layer.get_submodule("router"))
    _RECORDINGS[:] = [recording]
    step = optimizer.step

    @functools.wraps(step)
    def step_seen(*args: Any, **kwargs: Any) -> Any:
        is_taken, norm, *others = step(*args, **kwargs)
        recording.norm(norm)
        return (is_taken, norm, *others)

    optimizer.step = step_seen


def _check_type(config: Any, model: nn.Module, precision: Precision) -> None:
    narrow = [flag for flag in ("bf16", "fp16") if getattr(config, flag)]
    if narrow or precision is Precision.FLOAT64:
        raise ValueError(
            f"--dtype is {precision.value}, but Megatron trains in {', '.join(narrow) or 'float32'}"
            " as its flags say; leave --bf16 and --fp16 out of the command"
            + (", and --dtype too" if precision is Precision.FLOAT64 else ", or give --dtype as-is")
        )
    if any(getattr(module, "gradient_accumulation_fusion", False) for module in model.modules()):
        raise ValueError(
            "gradient_accumulation_fusion is on, by which gradients of weights are added where "
            "autograd does not see them; add --no-gradient-accumulation-fusion to the command"
        )


def watched(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """One of Megatron's schedules; behind it the gradients of a step are there."""

    def run(*args: Any, **given: Any) -> Any:
        reports = schedule(*args, **given)
        if _RECORDINGS and not given.get("forward_only"):
            for report in reports:
                _RECORDINGS[0].loss(_loss_of(report))
            _RECORDINGS[0].step()
        return reports

    return run


def _loss_of(report: Any) -> float:
    """The first that a loss function reports: a mean, or a sum and what it is over."""
    first = next(iter(report.values())) if isinstance(report, Mapping) else report
    parts = first if isinstance(first, tuple) else torch.as_tensor(first).reshape(-1)
    total, *others = (float(torch.as_tensor(part)) for part in parts)
    return total / others[0] if len(others) == 1 else total


# A training loop of the user's own.


def attach(original: Callable[..., Any], model: nn.Module, config: Any, **given: Any) -> Any:
    """``ds_moe_ext.attach``, of a model that is watched."""
    from ds_moe_ext.hosts.plain.plain_host import FINDERS, NAME
    from ds_moe_ext.hosts.plain.training_loop import block_of

    document = turned({BLOCK: block_of(config)}, f"the configuration of {NAME}")
    cast(model, trial_of_this_run().precision)
    with undrawn():
        attached = original(model, document, **given)
    run = run_of(model)
    parts, num_experts_of = _experts_of(run, model, document, FINDERS, parts_of_stacks)
    divides = 1 if run is None else dist.get_world_size()
    recording = Recording(model, parts, num_experts_of, divides)
    for name in num_experts_of:
        recording.watch_in_block(model, name)
    _RECORDINGS[:] = [recording]
    return attached


def backward(original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.backward``: what it is called of is a loss."""
    if _RECORDINGS and loss.numel() == 1:
        _RECORDINGS[0].loss(float(loss.detach()))
    return original(loss, *args, **kwargs)


def watch(original: Callable[..., Any], attached: Any, optimizer: torch.optim.Optimizer) -> None:
    """``Attachment.watch``: steps are heard of."""
    original(attached, optimizer)
    if _RECORDINGS:
        optimizer.register_step_post_hook(lambda *_: _RECORDINGS[0].step())


def clip(original: Callable[..., Tensor], attached: Any, max_norm: float) -> Tensor:
    """``Attachment.clip_grad_norm_``, which reports the norm."""
    norm = original(attached, max_norm)
    if _RECORDINGS:
        _RECORDINGS[0].norm(float(norm))
    return norm
