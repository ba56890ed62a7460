# SPDX-License-Identifier: Apache-2.0
"""How a Megatron-core run is watched for ``ds-moe-ext verify``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import any_name
from ds_moe_ext.hosts.megatron import moe_layers
from ds_moe_ext.hosts.megatron.engine import whole
from ds_moe_ext.hosts.megatron.expert_modules import form_of, weight_names
from ds_moe_ext.hosts.verification.recording import ExpertPart, Parts, Recording
from ds_moe_ext.hosts.verification.this_run import trial_of_this_run
from ds_moe_ext.verification.trial import Precision

_RECORDINGS: list[Recording] = []  # of this process: one or none


def watch(optimizer: Any, config: Any, chunks: Sequence[nn.Module]) -> None:
    """Watch a model whose optimizer has been made.

    Args:
        optimizer: Megatron's.
        config: its ``OptimizerConfig``.
        chunks: the model's parts on this rank.

    Raises:
        ValueError: it computes in another type than was asked for.
    """
    trial, model = trial_of_this_run(), whole(chunks)
    found = list(moe_layers.find(model, any_name))
    if trial.precision is not Precision.AS_IS:
        _check_type(config, model, trial.precision)
    layers = {layer.name: model.get_submodule(layer.name) for layer in found}
    num_experts_of = {layer.name: layer.num_experts for layer in found}
    recording = Recording(trial, model, _parts(layers), num_experts_of)
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


def _parts(layers: Mapping[str, Any]) -> Parts:
    """Their experts, which are where Megatron put them when training begins, with us too."""
    parts: dict[nn.Parameter, list[ExpertPart]] = {}
    for name, layer in layers.items():
        weights = weight_names(layer.config)
        slots = form_of(name, layer.experts).slots(layer.experts, weights)
        for expert, slot in zip(layer.local_expert_indices, slots, strict=True):
            for weight, parameter in zip(weights, slot.parameters):
                parts[parameter] = [ExpertPart(f"{name}.{weight}.{expert}", None)]
    return parts


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
    told = torch.as_tensor(first).double().reshape(-1) if not isinstance(first, tuple) else None
    if told is None:
        told = torch.stack([torch.as_tensor(each).double().cpu() for each in first])
    values: Tensor = told
    return float(values[0] / values[1]) if len(values) == 2 else float(values[0])
