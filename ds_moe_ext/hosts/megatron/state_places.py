# SPDX-License-Identifier: Apache-2.0
"""Where Megatron's optimizers keep their states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.notices import ENABLED, Refusal, refuse
from ds_moe_ext.hosts.megatron.refusals import MOVING
from ds_moe_ext.hosts.steps.expert_moves import Group, States


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
        refuse(UNMOVABLE, optimizer, context=f"{ENABLED}, and experts move")
        parts = _parts_of(optimizer)
        super().__init__([(part.optimizer, _groups_of(part)) for part in parts])


def _parts_of(optimizer: Any) -> list[Any]:
    """Those that step something."""
    is_chain = isinstance(optimizer, ChainedOptimizer)
    parts = optimizer.chained_optimizers if is_chain else (optimizer,)
    return [part for part in parts if not part.is_stub_optimizer]


def _groups_of(optimizer: Any) -> Iterator[Group]:
    """The tensors that one of Megatron's optimizers steps."""
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


def _is_unknown(optimizer: Any) -> str:
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    unknown = [type(part).__name__ for part in _parts_of(optimizer) if type(part) not in known]
    return f"the optimizer is a {unknown[0]}" if unknown else ""


def _of_config(refusal: Refusal) -> Refusal:
    """A refusal of an optimizer, by its config."""
    return replace(refusal, asked=lambda optimizer: refusal.asked(optimizer.config))


UNMOVABLE = (
    *map(_of_config, MOVING),
    Refusal(
        "an optimizer that is not one of DistributedOptimizer, FP32Optimizer and "
        "Float16OptimizerWithFloat16Params",
        _is_unknown,
        "its states cannot be moved",
        "use --optimizer adam or sgd",
    ),
)
"""Of an optimizer, where experts move."""
