# SPDX-License-Identifier: Apache-2.0
"""Dense gradients at ZeRO 0, where DeepSpeed averages all of them after backward.

Where an engine has ``GradientSlices``, a hook shows them each gradient as it becomes ready; what is
averaged is written where it was, and DeepSpeed averages the others. Shape letters: N elements.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_moe_ext.core.comm import max_in_place, sum_in_place
from ds_moe_ext.hosts.deepspeed.engine_record import record_of
from ds_moe_ext.hosts.deepspeed.slices import Gradient, GradientSlices


def slice_gradients(engine: Any, slices: GradientSlices) -> None:
    """Reduce its dense gradients in slices from now on."""
    for number, parameter in enumerate(engine.module.parameters()):
        if parameter.requires_grad:
            show = partial(_show, weakref.ref(engine), slices, number)
            parameter.register_post_accumulate_grad_hook(show)


def unaveraged(engine: Any, gradients: list[Any]) -> list[Any]:
    """Those of the gradients that slices have not averaged. Collective.

    Raises:
        RuntimeError: on all ranks; see ``_check_alike``.
    """
    record = record_of(engine)
    if record.slices is None:
        return gradients
    _check_alike(engine, record.slices.key)
    record.slices.finish()
    # DeepSpeed's own class of sparse ones is no tensor.
    left = [g for g in gradients if not (torch.is_tensor(g) and g.data_ptr() in record.averaged)]
    record.averaged.clear()
    return left


def average_experts(
    engine: Any, gradients: Mapping[str, list[Tensor]], average: Callable[[], None]
) -> None:
    """Let DeepSpeed average experts' gradients. What it divides them by is not what it divides
    dense ones by, where sequence parallel ranks count for one: this is made up for.

    Args:
        engine: DeepSpeed's.
        gradients: of experts, by the name of their group; changed in place.
        average: does it. Collective.
    """
    by = dist.get_world_size(groups._get_data_parallel_group())
    dense_by = dist.get_world_size(engine.seq_data_parallel_group) / engine.sequence_parallel_size
    if by != dense_by and engine.gradient_average:
        for own in filter(None, gradients.values()):
            torch._foreach_mul_(own, by / dense_by)
    average()
    divided_by = dense_by if engine.gradient_average else 1
    record_of(engine).averaged_experts = [
        (own, divided_by / dist.get_world_size(groups._get_expert_data_parallel_group(name)))
        for name, own in gradients.items()
        if own
    ]


def begin_backward(engine: Any) -> None:
    """Another backward pass of the same step comes behind the one that was the last: DeepSpeed will
    average what that left once more. Of dense gradients, which all ranks have alike by then, this
    leaves what they are; those of experts are multiplied by what would be missing."""
    for own, factor in record_of(engine).take_averaged():
        torch._foreach_mul_(own, factor)


def _check_alike(engine: Any, key: str) -> None:
    """DeepSpeed takes zeros for a gradient that a rank does not have; slices cannot. Collective.

    Raises:
        RuntimeError: the ranks' gradients were not of the same weights in the same order.
    """
    order = record_of(engine).order
    digest = zlib.crc32(repr(order).encode())
    order.clear()
    ends = torch.tensor([digest, -digest], device=engine.device)
    most, negative_least = max_in_place(ends, engine.seq_data_parallel_group).tolist()
    if most != -negative_least:
        raise RuntimeError(
            "ranks have gradients of other dense weights, as where a model leaves out a layer on "
            "one of them, so that their slices were of different weights; let all ranks use the "
            f"same weights, or set {key} to false"
        )


def _show(engine: weakref.ref[Any], slices: GradientSlices, number: int, parameter: Tensor) -> None:
    alive = engine()
    if alive is None or not alive.is_gradient_accumulation_boundary():
        return
    assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
    if parameter.grad.is_sparse or not slices.is_awaited(parameter):
        return
    flat_N = parameter.grad.data.view(-1)
    num_ranks = dist.get_world_size(slices.group) / alive.sequence_parallel_size
    averaging = _Averaging.of(alive, num_ranks)
    record = record_of(alive)
    keep = partial(_keep, flat_N, record.averaged)
    record.order.append(number)
    slices.add(Gradient(parameter, flat_N, averaging, keep, leave=_leave))


def _keep(flat_N: Tensor, averaged: set[int], mean_N: Tensor) -> None:
    flat_N.copy_(mean_N)
    averaged.add(flat_N.data_ptr())


def _leave() -> None:
    """DeepSpeed finds it by itself."""


@dataclass(frozen=True)
class _Averaging:
    """As the engine does it: it scales what travels, before and after."""

    summed_in: torch.dtype
    before: float
    after: float

    @classmethod
    def of(cls, engine: Any, num_ranks: float) -> _Averaging:
        summed_in = engine.communication_data_type
        if not engine.gradient_average:
            return cls(summed_in, 1.0, 1.0)
        if not engine.postscale_gradients():
            return cls(summed_in, 1.0 / num_ranks, 1.0)
        divided = engine.gradient_predivide_factor()
        return cls(summed_in, 1.0 / divided, divided / num_ranks)

    def mean(self, flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_in_place(flat_N.to(self.summed_in).mul_(self.before), group).mul_(self.after)
