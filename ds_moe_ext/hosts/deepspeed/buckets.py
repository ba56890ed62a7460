# SPDX-License-Identifier: Apache-2.0
"""Gradients in the buckets of ZeRO 1 and 2, and those that do not go through them as they come.

*Experts last*: DeepSpeed puts gradients of dense weights and of experts into one bucket and reduces
it when it is full. With unequal experts it would be full at other moments on other ranks, and they
would wait for each other's dense gradients for ever. So experts wait until the others have been
reduced.

*Slices*: where an engine has ``GradientSlices``, dense gradients wait for them. An averaged one
goes through ZeRO's own code in a bucket of its own, where its mean takes the place of what ZeRO
would have received: so ZeRO keeps what this rank needs, in the form that it needs. The arithmetic
is ZeRO's too. But slices are all-reduced even where ``use_multi_rank_bucket_allreduce`` is false,
by which ZeRO reduces its own buckets to the ranks that keep them.

Shape letters: N elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket
from torch import Tensor, nn

from ds_moe_ext.core.comm import sum_in_place
from ds_moe_ext.hosts.deepspeed.engine_record import record_of
from ds_moe_ext.hosts.deepspeed.slices import Gradient, GradientSlices


def waits(optimizer: Any, parameter: nn.Parameter, group: int) -> bool:
    """Whether a gradient that ZeRO is about to put into its bucket has to wait; it is remembered
    then.

    Args:
        optimizer: DeepSpeed's, of ZeRO 1 or 2.
        group: number of the parameter's group.
    """
    record = record_of(optimizer)
    if parameter in record.last:
        record.waiting.append((parameter, group))
        return True
    slices = record.slices
    if slices is None or not _is_awaited(slices, parameter):
        return False
    if not slices.knows(parameter) or _reduces_as_ready(optimizer):
        slices.add(_gradient(optimizer, parameter, group))
    return True


def saw_ready(optimizer: Any, parameter: nn.Parameter, group: int) -> None:
    """Slice a gradient that ZeRO 1 without ``overlap_comm`` would look at after backward only."""
    slices = record_of(optimizer).slices
    if slices is None or _reduces_as_ready(optimizer):
        return
    if optimizer.is_gradient_accumulation_boundary() and _is_awaited(slices, parameter):
        slices.add(_gradient(optimizer, parameter, group))


def reduce_waiting(optimizer: Any) -> None:
    """Reduce what no slice took, then what is left of the others, then experts."""
    record = record_of(optimizer)
    if record.slices is not None:
        record.slices.finish()
    waiting = record.take_waiting()
    if not waiting:
        return
    optimizer.reduce_ipg_grads()
    for parameter, group in waiting:
        _reduce(optimizer, parameter, group)


def means_of(optimizer: Any, bucket: list[Tensor]) -> Tensor | None:
    """The means of what ZeRO is about to sum, if slices have averaged it: flat, and in the type
    that travels. ZeRO asks for them in order."""
    record = record_of(optimizer)
    left_N = record.means
    if left_N is None:
        return None
    size = sum(tensor.numel() for tensor in bucket)
    record.means = left_N[size:]
    return left_N[:size]


@dataclass(frozen=True)
class _Averaging:
    """As ZeRO does it: it divides in one type, and sums in another."""

    divisor: float
    divided_in: torch.dtype
    summed_in: torch.dtype

    def mean(self, flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        share_N = flat_N.to(self.divided_in).div_(self.divisor)
        return sum_in_place(share_N.to(self.summed_in), group)


def _gradient(optimizer: Any, parameter: nn.Parameter, group: int) -> Gradient:
    num_ranks = dist.get_world_size(optimizer.dp_process_group) / optimizer.sequence_parallel_size
    summed_in = optimizer.get_param_comm_dtype(parameter)
    averaging = _Averaging(
        divisor=num_ranks if optimizer.gradient_average else 1.0,
        divided_in=optimizer.ipg_buckets[summed_in].buffer[0].dtype,
        summed_in=summed_in,
    )
    return Gradient(
        parameter,
        optimizer.get_gradient_for_reduction(parameter).view(-1),
        averaging,
        keep=partial(_keep, optimizer, parameter, group, averaging),
        leave=partial(_reduce, optimizer, parameter, group),
    )


def _keep(
    optimizer: Any, parameter: nn.Parameter, group: int, averaging: _Averaging, mean_N: Tensor
) -> None:
    with _averaged(optimizer, averaging, mean_N):
        _reduce(optimizer, parameter, group)
        optimizer.reduce_ipg_grads(comm_dtype=averaging.summed_in)


@contextmanager
def _averaged(optimizer: Any, averaging: _Averaging, mean_N: Tensor) -> Iterator[None]:
    """Let ZeRO reduce one gradient, whose mean is known, in a bucket of its own."""
    buffer_N = torch.empty_like(mean_N, dtype=averaging.divided_in)
    if mean_N.is_cuda:  # what is freed in Python stays until ZeRO has read it
        stream = get_accelerator().current_stream()
        if optimizer.overlap_comm:
            stream = optimizer.reduction_stream
        mean_N.record_stream(stream)
        buffer_N.record_stream(stream)
    buckets, large = optimizer.ipg_buckets, optimizer.extra_large_param_to_reduce
    optimizer.ipg_buckets = {averaging.summed_in: IPGBucket([buffer_N, buffer_N])}
    optimizer.extra_large_param_to_reduce = {}
    record = record_of(optimizer)
    record.means = mean_N
    try:
        yield
    finally:
        optimizer.ipg_buckets, optimizer.extra_large_param_to_reduce = buckets, large
        record.means = None


def _reduce(optimizer: Any, parameter: nn.Parameter, group: int) -> None:
    """DeepSpeed's own, under our patch."""
    patched = type(optimizer).reduce_independent_p_g_buckets_and_remove_grads
    patched.__wrapped__(optimizer, parameter, group)


def _is_awaited(slices: GradientSlices, parameter: nn.Parameter) -> bool:
    """Whether slices wait for a gradient, and it is ready."""
    # A tiled computation makes a gradient in parts and says which is the last.
    return getattr(parameter, "ds_grad_is_ready", True) and slices.is_awaited(parameter)


def _reduces_as_ready(optimizer: Any) -> bool:
    return bool(optimizer.partition_gradients or optimizer.overlap_comm)
