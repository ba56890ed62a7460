# SPDX-License-Identifier: Apache-2.0
"""Sparse collectives over NCCL: trees against broadcasts. On a CPU the trees alone, over gloo.

Shape letters: E experts, C EP ranks.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shared_gpus import share_gpus
from torch import Tensor

from ds_moe_ext.core import comm
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import SMALL, Move, Part, Round, TransferSize, gather_rounds
from ds_moe_ext.schedule.executor import to_the_end
from ds_moe_ext.schedule.task import INTER
from tests.ranks import pool_of

SHAPE = (64, 48)
NUM_EXPERTS = 3
IN_SEGMENTS = TransferSize(expert_bytes=2 * 64 * 48, start_bytes=1)  # where it has two hops


def expert(number: int, ep_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight, transposed, and a bias: integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * number + ep_rank)
    drawn = torch.randint(-8, 9, SHAPE, generator=generator).to(device, torch.bfloat16)
    return drawn.t(), drawn[0, :1]


def check_there_and_back(
    rank: int, world_size: int, device: torch.device, transfer_size: TransferSize = SMALL
) -> None:
    """Experts go everywhere and gradients come to the owner, twice without the host's waiting."""
    # Of two ranks the first has two experts, which go as one where they are broadcast.
    take_back = Placement.owned_by(np.sort(np.arange(NUM_EXPERTS) % world_size), world_size)
    everywhere = Placement(np.ones((NUM_EXPERTS, world_size), dtype=bool))
    part = gather_rounds(take_back, everywhere, np.arange(world_size) // 2, transfer_size).part_of(
        rank
    )
    chunks = {int(e): expert(int(e), 0, device) for e in take_back.experts_of(rank)}
    slabs = [torch.zeros(NUM_EXPERTS, *SHAPE[::-1]), torch.zeros(NUM_EXPERTS, 1)]
    slabs = [slab.to(device, torch.bfloat16) for slab in slabs]
    buffers = {e: tuple(slab[slot] for slab in slabs) for slot, e in enumerate(part.received)}
    grads = {e: expert(e, 1 + rank, device) for e in range(NUM_EXPERTS)}
    comm.connect(dist.group.WORLD, device)
    for is_checked in (False, True):  # the first call makes the connections, and may wait
        if is_checked and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        to_the_end(comm.sparse_all_gather(part, chunks, buffers, dist.group.WORLD))
        came = to_the_end(comm.sparse_reduce_scatter(part, grads, dist.group.WORLD))
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    for e, tensors in buffers.items():
        assert all(map(torch.equal, tensors, expert(e, 0, device)))
    assert set(came.grads) == set(chunks)
    for e, tensors in came.grads.items():
        replicas = [
            expert(e, 1 + ep_rank, device) for ep_rank in range(world_size) if ep_rank != rank
        ]
        assert all(map(torch.equal, tensors, (sum(same) for same in zip(*replicas))))
    for e, tensors in grads.items():
        assert all(map(torch.equal, tensors, expert(e, 1 + rank, device)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_trees_on_a_cpu(world_size: int) -> None:
    pool_of(world_size).run(check_there_and_back, torch.device("cpu"))


def test_chains_on_a_cpu() -> None:
    assert IN_SEGMENTS.num_segments(1, 1) == 16
    pool_of(4).run(check_there_and_back, torch.device("cpu"), IN_SEGMENTS)


def _on_nccl(rank: int, world_size: int, folder: Path) -> None:
    device = share_gpus(rank, world_size)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    check_goes_first(world_size, device)
    if world_size == 1:
        check_alone(device)
    else:
        check_there_and_back(rank, world_size, device)  # by broadcasts
        with mock.patch.object(comm, "_coalescing_manager", None):
            check_there_and_back(rank, world_size, device)  # by trees
            check_there_and_back(rank, world_size, device, IN_SEGMENTS)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def check_goes_first(world_size: int, device: torch.device) -> None:
    """Communicators of streams have streams of high priority, and the world's timeout."""
    built = ParallelLayout.build(Grid(world_size, world_size), [("ep", INTER)])
    group = built.group("ep", INTER)
    comm.connect(group, device)
    assert group._get_backend(device).options.is_high_priority_stream
    assert not dist.group.WORLD._get_backend(device).options.is_high_priority_stream
    assert comm.timeout_of(group) == comm.timeout_of(None)
    rows = torch.arange(world_size, device=device)
    ones = [1] * world_size
    arrived = comm.all_to_all_rows(rows, ones, ones, group)
    assert arrived.tolist() == [dist.get_rank()] * world_size
    built.close()


def check_alone(device: torch.device) -> None:
    """Broadcasts and reduces of one member, to itself: that the grouped calls are accepted."""
    part = Part(0, (Round((Move(0, 0),), ()),), (Move(0, 0),))
    chunks = {0: expert(0, 0, device)}
    traffic = to_the_end(comm.sparse_all_gather(part, chunks, {}, dist.group.WORLD))
    assert traffic.sent_bytes == sum(tensor.nbytes for tensor in chunks[0])
    assert all(map(torch.equal, chunks[0], expert(0, 0, device)))
    came = to_the_end(comm.sparse_reduce_scatter(part, chunks, dist.group.WORLD))
    assert all((grad == 0.0).all() for grad in came.grads[0])


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nccl(world_size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_on_nccl, (world_size, tmp_path), nprocs=world_size)


# Counts.


@pytest.mark.gpu
def test_counts_come_while_the_host_goes_on() -> None:
    """Nobody waits before they are asked for, and several may be on their way."""
    device = torch.device("cuda", 0)
    cuda_stream = torch.cuda.Stream(device)
    expected = [torch.arange(5) + 10 * number for number in range(4)]
    given = [counts.to(device) for counts in expected]
    for is_checked in (False, True):  # the first time memory is allocated, which may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
        with torch.cuda.stream(cuda_stream):
            torch.cuda._sleep(50_000_000)  # tens of milliseconds
            coming = [comm.counts_to_host(counts + 0, None) for counts in given]
        torch.cuda.set_sync_debug_mode("default")
        if is_checked:  # the host is ahead of the device
            assert [one.has_landed for one in coming] == [False] * 4
        for one, counts in zip(coming, expected):
            assert one.ready().is_pinned()
            assert torch.equal(one.ready(), counts)
            assert one.has_landed
        del coming, one


@pytest.mark.gpu
def test_a_default_device_does_not_keep_counts_there() -> None:
    counts = torch.arange(5, device="cuda")
    with torch.device("cuda"):
        assert comm.counts_to_host(counts, None).ready().is_cpu
