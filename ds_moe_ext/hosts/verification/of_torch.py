# SPDX-License-Identifier: Apache-2.0
"""How a training loop of the user's own is watched for ``ds-moe-ext verify``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.replacement import found_in
from ds_moe_ext.hosts.plain.plain_host import FINDERS, NAME
from ds_moe_ext.hosts.plain.training_loop import Attachment, block_of
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.hosts.verification.recording import (
    Recording,
    cast,
    parts_of_run,
    parts_of_stacks,
    turned,
)
from ds_moe_ext.hosts.verification.this_run import trial_of_this_run, undrawn
from ds_moe_ext.strategies.settings import BLOCK, read_settings

_RECORDINGS: list[Recording] = []  # of this process: one or none


def attach(original: Callable[..., Any], model: nn.Module, config: Any, **given: Any) -> Attachment:
    """``ds_moe_ext.attach``, of a model that is watched."""
    document = turned({BLOCK: block_of(config)}, f"the configuration of {NAME}")
    cast(model, trial_of_this_run().precision)
    with undrawn():
        attached: Attachment = original(model, document, **given)
    run = run_of(model)
    if run is None:
        settings, _ = read_settings(document)
        found = found_in(model, FINDERS, settings)
        parts = parts_of_stacks(model, found)
        num_experts_of = {layer.name: layer.num_experts for layer in found}
    else:
        parts = parts_of_run(run)
        homes = run.planning.job.homes
        num_experts_of = {layer.name: home.num_experts for layer, home in zip(run.layers, homes)}
    divides = 1 if run is None else dist.get_world_size()
    recording = Recording(trial_of_this_run(), model, parts, num_experts_of, divides)
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
    """``Attachment.clip_grad_norm_``, which tells the norm."""
    norm = original(attached, max_norm)
    if _RECORDINGS:
        _RECORDINGS[0].norm(float(norm))
    return norm
