# SPDX-License-Identifier: Apache-2.0
"""How an engine under construction is going to train, for what is measured before it does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from ds_moe_ext.hosts.zebra.profile import Training
from ds_moe_ext.hosts.zebra.rehearsal import Scene
from ds_moe_ext.planning.zebra_planner import WeightBytes

STATES = {"sgd": 1, "lion": 1, "adagrad": 1}
"""Tensors of an optimizer's state; of any other two are counted, as Adam has."""


def training_of(engine: Any, device: torch.device) -> Training:
    """By the engine's settings. Its model has not been cast or moved yet."""
    is_cast = engine.fp16_enabled() or engine.bfloat16_enabled()
    dtype, gradient_dtype = engine.get_data_types()
    optimizer = engine.optimizer_name() or type(engine.client_optimizer).__name__
    num_states = STATES.get(optimizer.lower(), 2)
    return Training(
        scene=Scene(device, dtype if is_cast else None, partial(autocast_if_enabled, engine)),
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        weight_bytes=WeightBytes(
            weight=dtype.itemsize,
            gradient=gradient_dtype.itemsize,
            optimizer=4 * (num_states + is_cast),
            zero_stage=engine.zero_optimization_stage(),
        ),
    )
