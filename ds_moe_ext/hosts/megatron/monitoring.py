# SPDX-License-Identifier: Apache-2.0
"""Scalars for the TensorBoard and W&B writers of Megatron-LM's training loop.

Megatron-core has none. That loop keeps them in a module of its own, which is not imported here:
where nobody has loaded it, there is nobody to write.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ds_moe_ext.steps.monitor import Event
from ds_moe_ext.steps.training_run import Run

LOOP = "megatron.training.global_vars"


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
