# SPDX-License-Identifier: Apache-2.0
"""Where an engine's optimizer keeps its states.

At every ZeRO stage and precision that we support, before the first step too. DeepSpeed's own
``safe_get_full_optimizer_state`` and its kin find states after the first step only, and then only
those of the first parameter group; so parameters are found here from the flat groups themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed import shards
from ds_moe_ext.hosts.steps.expert_moves import Group, Scalar, Shard, States, Views
from ds_moe_ext.hosts.steps.training_run import Run, run_of


def _groups_of(optimizer: Any) -> Iterator[Group]:
    """The tensors that an engine's optimizer steps.

    Raises:
        ValueError: a wrapper of DeepSpeed's that we do not know.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):  # ZeRO 1 and 2
        for index, held in enumerate(optimizer.single_partition_of_fp32_groups):
            begin = dist.get_rank(optimizer.real_dp_process_group[index]) * held.numel()
            parameters = optimizer.round_robin_bit16_groups[index]
            yield Group(held, begin, parameters, optimizer.round_robin_bit16_offsets[index])
    elif isinstance(optimizer, BF16_Optimizer):  # ZeRO 1, bf16 with gradients accumulated in fp32
        for index, held in enumerate(optimizer.fp32_groups_flat_partition):
            begin = dist.get_rank(optimizer.real_dp_process_group[index]) * held.numel()
            parameters = optimizer.bf16_groups[index]
            yield Group(held, begin, parameters, _back_to_back(parameters))
    elif isinstance(optimizer, FP16_Optimizer):  # ZeRO 0, half precision, FusedAdam
        for held, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups):
            yield Group(held, 0, parameters, _back_to_back(parameters))
    elif isinstance(optimizer, FP16_UnfusedOptimizer):  # ZeRO 0, half precision, any other
        for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups):
            yield from map(Group.of_one, masters, parameters)
    elif isinstance(optimizer, DeepSpeedOptimizer):
        raise ValueError(
            f"the states of a {type(optimizer).__name__} cannot be moved; use ZeRO stage 0 to 3"
        )
    elif optimizer is not None:  # ZeRO 0, full precision: the user's or a plain one
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield Group.of_one(parameter, parameter)


def _back_to_back(parameters: Iterable[nn.Parameter]) -> Iterator[int]:
    return accumulate((parameter.numel() for parameter in parameters), initial=0)


ADAMS = {"FusedAdam", "DeepSpeedCPUAdam"}
"""DeepSpeed's own, which keep the same; it takes the second where states are offloaded. Their steps
are numbers, and those of torch's, which steps what ``ratio`` leaves on the device, tensors."""


class OptimizerStates(States):
    """Access to the states of every parameter of an engine.

    Args:
        engine: a DeepSpeed engine, at any time after ``deepspeed.initialize``.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        groups: Sequence[Group | Shard] = list(
            shards.all_of(optimizer, engine.module)
            if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
            else _groups_of(optimizer)
        )
        is_wrapped = isinstance(optimizer, DeepSpeedOptimizer)
        stepper = optimizer.optimizer if is_wrapped else optimizer
        with shards.groups_filled(optimizer):
            super().__init__([(stepper, groups)], _views_of(run_of(engine)))
        for held in shards.stepped_on_device(optimizer):
            own = self._stepper[held]
            self._stepper[held] = own._replace(optimizer=optimizer.backup_optimizer)

    def _like(self, old: Scalar | None, new: Scalar, held: Tensor) -> Any:
        if old is None:
            stepper = self._stepper[held].optimizer
            if stepper.__class__.__name__ in ADAMS:
                new = int(new)
            elif isinstance(stepper, torch.optim.AdamW):
                new = torch.as_tensor(float(new))
        return super()._like(old, new, held)


def _views_of(run: Run | None) -> Views:
    """Of the stacks that a run's experts lie in."""
    views: dict[nn.Parameter, list[nn.Parameter]] = {}
    for layer in () if run is None else run.layers:
        for slot in layer.hosted.slots():
            for stack, view in zip(slot.stacks, slot.parameters):
                views.setdefault(stack, []).append(view)
    return views
