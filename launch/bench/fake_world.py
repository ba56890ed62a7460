# SPDX-License-Identifier: Apache-2.0
"""One process that stands for one rank of many: collectives return at once, and no row arrives.

Torch's fake process group takes every call and hands back what this rank has sent: gathered counts
are those of ranks that all route alike. What is left of a pass is what its host does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_moe_ext.core import comm, layout
from ds_moe_ext.moe import dispatch, layer
from ds_moe_ext.schedule import executor
from ds_moe_ext.schedule.executor import InlineLanes, Lanes

RANKS_PER_NODE = 8


@contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """The world of all ranks inside the block, of which this process is one."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    with ExitStack() as changed:

        def change(owner: object, name: str, new: object) -> None:
            changed.enter_context(mock.patch.object(owner, name, new))

        def hosts(thing: object, group: dist.ProcessGroup | None) -> list[str]:
            return [f"node {rank // RANKS_PER_NODE}" for rank in range(num_ranks)]

        for name in ("alltoall_base", "all_to_all_single"):  # the second since torch 2.13
            if name in vars(dist.ProcessGroup):
                change(dist.ProcessGroup, name, _all_to_all)
        change(dist.ProcessGroup, "_allgather_base", _all_gather)
        change(layout, "timeout_of", lambda group: timedelta(minutes=1))  # a fake group has none
        change(layout, "gather_objects", hosts)
        # As NCCL does: by pairs is for gloo between hosts.
        change(dispatch, "all_to_all_by_pairs", comm.all_to_all_rows)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _all_to_all(
    group: dist.ProcessGroup, arrived: Tensor, sent: Tensor, arrived_C: Sequence[int], *rest: object
) -> None:
    """In place of the fake group's own, which refuses to make rows of none: what comes in equal
    parts are counts, and ranks that route alike send what this one sends itself; else zeros
    arrive."""
    if len(arrived_C):  # a list or an array
        if arrived.is_cuda:  # products of zeros would take a device less time than others
            arrived.fill_(0.5)
        else:
            arrived.zero_()
    else:
        own = sent.unflatten(0, (group.size(), -1))[group.rank()]
        arrived.unflatten(0, (group.size(), -1)).copy_(own)


def _all_gather(group: dist.ProcessGroup, gathered: Tensor, given: Tensor, *rest: object) -> None:
    """In place of the fake group's own, which makes a copy for each rank: a device is told once."""
    gathered.view(group.size(), *given.shape).copy_(given)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Layers go the way of a GPU inside the block: grouped GEMMs, sums without the CPU's kernels,
    counts that must be fetched, broadcasts of what goes everywhere."""
    is_cpu = property(lambda tensor: False)
    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(torch.Tensor, "is_cpu", is_cpu, create=True))
        for module in (comm, layer):
            changed.enter_context(mock.patch.object(module, "can_broadcast", lambda device: True))
        yield


@contextmanager
def products_at_once() -> Iterator[None]:
    """A grouped GEMM returns at once inside the block, with zeros, as one launch does for the host
    of a GPU: torch's for CPUs computes slot by slot, which is most of what a tiny one takes."""
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_grouped_mm", _no_product, "CPU", allow_override=True)
        yield


def _no_product(
    one: Tensor, other: Tensor, offs: Tensor, bias: object = None, out_dtype: object = None
) -> Tensor:
    """Of rows by slots' matrices, ``[R, D] x [S, D, F]``, or of slots' rows, ``[D, R] x [R, F]``,
    as ``aten._grouped_mm`` takes them."""
    num_slots = () if other.dim() == 3 else (offs.shape[0],)
    return one.new_zeros(*num_slots, one.shape[0], other.shape[-1])


INLINE = InlineLanes()


@contextmanager
def on_lanes(lanes: Lanes) -> Iterator[None]:
    """Layers run there inside the block, where anything overlaps; programs must be made inside."""
    real = executor.lanes_for

    def chosen(device: torch.device, overlaps: bool) -> Lanes:
        return lanes if overlaps else INLINE

    _put(chosen, real)
    try:
        yield
    finally:
        _put(real, chosen)  # also where it was imported inside


def _put(chooses: Callable[..., Lanes], before: Callable[..., Lanes]) -> None:
    """In all modules that have the one before."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("ds_moe_ext.") and vars(module).get("lanes_for") is before:
            vars(module)["lanes_for"] = chooses


def inline() -> AbstractContextManager[None]:
    """One thread issues all lanes inside the block, as on CUDA; programs must be made inside."""
    return on_lanes(INLINE)
