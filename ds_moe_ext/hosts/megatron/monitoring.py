# SPDX-License-Identifier: Apache-2.0
"""Scalars for the TensorBoard and W&B writers of Megatron-LM's training loop.

Megatron-core has none. That loop keeps them in a module of its own, which is not imported here:
where nobody has loaded it, there is nobody to write.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ds_moe_ext.hosts.steps.training_run import Event, Run

LOOP = "megatron.training.global_vars"
LOSS = "lm loss"  # as Megatron-LM's loss functions call it


def losses_of(stored: Any) -> list[Tensor]:
    """Of each micro-batch, 0-dim, from what Megatron's schedule returns: that of loss functions, on
    the last stage. Nothing is read, so the device is not waited for.

    A loss is told as its mean, or as a sum and the tokens it is of.
    """
    losses = []
    for told in stored or ():
        known = told if isinstance(told, dict) else {}
        loss = known.get(LOSS, *known.values()) if len(known) == 1 else known.get(LOSS)
        if isinstance(loss, Tensor) and loss.numel() in (1, 2):
            total, *tokens = loss.detach().reshape(-1)
            losses.append(total / tokens[0] if tokens else total)
    return losses


def show(run: Run) -> None:
    """Write behind an optimizer step where the loop is about to: on its last rank, in every
    iteration of its ``--tensorboard-log-interval``."""
    loop: Any = sys.modules.get(LOOP)
    if loop is None or not run.monitor.is_on:
        return
    board, wandb = loop.get_tensorboard_writer(), loop.get_wandb_writer()
    if board is None and wandb is None:
        return
    given = loop.get_args()
    latest = getattr(given, "curr_iteration", None)
    if latest is None:  # a loop of the user's own, which did not say
        return
    iteration = latest + 1

    def write(events: Sequence[Event]) -> None:
        for name, value, at in events if board is not None else ():
            board.add_scalar(name, value, at)
        if wandb is not None:
            wandb.log({name: value for name, value, _ in events}, iteration)

    if iteration % given.tensorboard_log_interval == 0:
        run.monitor.show(run.recorder, write, iteration)
