# SPDX-License-Identifier: Apache-2.0
"""Where Megatron's optimizers keep their states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn

from ds_moe_ext.attachment.refusal import refuse
from ds_moe_ext.hosts.megatron.refusals import MOVING
from ds_moe_ext.steps.optimizer_states import Group, States


def main_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What Megatron accumulates of a parameter; None where it is not trained."""
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return gradient


class OptimizerStates(States):
    """Access to the states of every parameter that Megatron's optimizer steps on this rank.

    Args:
        optimizer: as ``get_megatron_optimizer`` returns it.

    Raises:
        ValueError: it is of a kind whose states cannot be moved.
    """

    def __init__(self, optimizer: Any) -> None:
        is_chain = isinstance(optimizer, ChainedOptimizer)
        parts = optimizer.chained_optimizers if is_chain else (optimizer,)
        super().__init__(
            [(part.optimizer, _groups_of(part)) for part in parts if not part.is_stub_optimizer]
        )


def _groups_of(optimizer: Any) -> Iterator[Group]:
    """The tensors that one of Megatron's optimizers steps."""
    check_kind(optimizer)
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            held = optimizer.optimizer.param_groups[group]["params"][order]
            begin = optimizer._get_model_param_range_map(parameter)["param"].start
            yield Group(held, begin, (parameter,), (0,))
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups
        ):
            yield from map(Group.of_one, masters, parameters)
        for parameters in optimizer.fp32_from_fp32_groups:
            yield from map(Group.of_one, parameters, parameters)
    else:
        for options in optimizer.param_groups:
            yield from map(Group.of_one, options["params"], options["params"])


def check_kind(optimizer: Any) -> None:
    """Whether states of one of Megatron's optimizers can be moved.

    Raises:
        ValueError: they cannot.
    """
    refuse(MOVING, optimizer.config)
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if type(optimizer) not in known:
        raise ValueError(
            f"the strategy moves experts to new homes, but the states of a "
            f"{type(optimizer).__name__} cannot be moved; use --optimizer adam or sgd, or set "
            "reshard_interval to 0"
        )
