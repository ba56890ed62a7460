# SPDX-License-Identifier: Apache-2.0
"""The collectives, on gloo ranks: every member gives other sizes.

Shape letters: E experts, C EP ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core import comm
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import (
    SMALL,
    Part,
    Run,
    Segment,
    Transfers,
    TransferSize,
    gather_rounds,
    star_of,
)
from ds_moe_ext.schedule.executor import to_the_end
from tests.gpu.way import by_broadcasts
from tests.marks import slow
from tests.ranks import pool_of

SENT = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # rows from each rank to each; rank 2 sends nothing


def _exchange(rank: int, world_size: int, name: str) -> list[int]:
    exchange = {
        "rows": comm.all_to_all_rows,
        "pairs": comm.all_to_all_by_pairs,
    }[name]
    received = [row[rank] for row in SENT]
    # A row says where it comes from, where it goes and which of its kind it is: 012 is from rank 0
    # to rank 1, the third.
    sent = [100 * rank + 10 * to + n for to, count in enumerate(SENT[rank]) for n in range(count)]
    rows = torch.tensor(sent, dtype=torch.float64)[:, None].expand(-1, 3)
    arrived = exchange(rows, SENT[rank], received, dist.group.WORLD)
    assert arrived.shape == (sum(received), 3)
    return arrived[:, 0].int().tolist()


@pytest.mark.parametrize("name", ["rows", "pairs"])
def test_rows_arrive_in_the_order_of_their_senders(name: str) -> None:
    assert pool_of(3).run(_exchange, name) == [[0, 1, 100], [110, 111, 112, 113], [20, 21, 22]]


def _gather(rank: int, world_size: int) -> tuple[list[list[int]], list[int], list[str]]:
    group = dist.group.WORLD
    counts = comm.all_gather_counts(torch.tensor([[rank, 10 * rank]]), group)
    local = torch.arange(rank + 1)[:, None] + 10 * rank
    slots = comm.all_gather_slots(local, [1, 2, 3], group)
    return counts[:, 0].tolist(), slots[:, 0].tolist(), comm.gather_objects(f"rank {rank}", None)


def test_gathers() -> None:
    for counts, slots, texts in pool_of(3).run(_gather):
        assert counts == [[0, 0], [1, 10], [2, 20]]
        assert slots == [0, 10, 11, 20, 21, 22]
        assert texts == ["rank 0", "rank 1", "rank 2"]


def _gather_counts(rank: int, world_size: int, shape: tuple[int, ...]) -> list[Any]:
    own = torch.arange(math.prod(shape)).view(shape) + 100 * rank
    return comm.all_gather_counts(own.mT if len(shape) > 1 else own, dist.group.WORLD).tolist()


@pytest.mark.parametrize("shape", [(3,), (1, 2), (3, 2)])
def test_counts_of_any_shape(shape: tuple[int, ...]) -> None:
    first = torch.arange(math.prod(shape)).view(shape)
    first = first.mT if len(shape) > 1 else first
    want = torch.stack([first, first + 100, first + 200]).tolist()
    assert pool_of(3).run(_gather_counts, shape) == [want] * 3


# Inside an ETP group.


def _ep_rank_rows(world_size: int, seed: int) -> tuple[list[int], int]:
    """Rows of each rank, some of which have none, and their width; for the last seed no rows."""
    rng = np.random.default_rng([world_size, seed])
    num_rows_P = rng.integers(1, 6, world_size) * (rng.random(world_size) < 0.7)
    return (num_rows_P * (seed < NUM_EP_RANKS - 1)).tolist(), int(rng.integers(1, 5))


NUM_EP_RANKS = 12


def _gather_ep_rank(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for seed in range(NUM_EP_RANKS):
        num_rows_P, width = _ep_rank_rows(world_size, seed)
        rows_P = [
            torch.randn(width, n, generator=torch.Generator().manual_seed(place)).to(dtype).t()
            for place, n in enumerate(num_rows_P)
        ]
        gathered_G = comm.all_gather_rows(rows_P[rank], num_rows_P, dist.group.WORLD)
        assert torch.equal(gathered_G, torch.cat(rows_P))
        assert (gathered_G is rows_P[rank]) == (world_size == 1)


def _scatter_ep_rank(rank: int, world_size: int, dtype: torch.dtype, by_pairs: bool) -> None:
    all_to_all = comm.all_to_all_by_pairs if by_pairs else comm.all_to_all_rows
    for seed in range(NUM_EP_RANKS):
        num_rows_P, width = _ep_rank_rows(world_size, seed)
        shape = (world_size, sum(num_rows_P), 2, width)
        rows_PG = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        given_G = rows_PG[rank].clone()
        first_R, again_R = (
            comm.reduce_scatter_rows(given_G, num_rows_P, dist.group.WORLD, all_to_all)
            for _ in range(2)
        )
        wide = torch.promote_types(dtype, torch.float32)
        total_G = rows_PG[0].to(wide)
        for summand_G in rows_PG[1:]:
            total_G = total_G + summand_G.to(wide)
        mine_R = total_G.to(dtype).split(num_rows_P)[rank]
        assert first_R.dtype == dtype
        assert torch.equal(first_R, mine_R)
        assert torch.equal(again_R, mine_R)
        assert torch.equal(given_G, rows_PG[rank]), "what was given is as it was"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3, slow(4)])
def test_an_ep_rank_gathers_its_rows(world_size: int, dtype: torch.dtype) -> None:
    pool_of(world_size).run(_gather_ep_rank, dtype)


@pytest.mark.parametrize("by_pairs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3, slow(4)])
def test_an_ep_rank_sums_rows_in_the_order_of_its_ranks(
    world_size: int, dtype: torch.dtype, by_pairs: bool
) -> None:
    pool_of(world_size).run(_scatter_ep_rank, dtype, by_pairs)


def _adjoint(rank: int, world_size: int) -> tuple[float, float]:
    """This rank's shares of ``<gather(x), y>`` and of ``<x, scatter(y)>``."""
    num_rows_P = [2, 0, 3]
    draw = torch.Generator().manual_seed(rank)
    x_R = torch.randn(num_rows_P[rank], 4, generator=draw, dtype=torch.float64)
    y_G = torch.randn(sum(num_rows_P), 4, generator=draw, dtype=torch.float64)
    gathered_G = comm.all_gather_rows(x_R, num_rows_P, dist.group.WORLD)
    scattered_R = comm.reduce_scatter_rows(y_G, num_rows_P, dist.group.WORLD)
    return float((gathered_G * y_G).sum()), float((x_R * scattered_R).sum())


def test_gather_and_scatter_are_adjoint() -> None:
    left, right = np.array(pool_of(3).run(_adjoint)).sum(axis=0)
    assert left == pytest.approx(right, rel=1e-13)
    assert left != 0


# Sparse collectives.

SHAPES = (
    (5, 3),
    (3, 4),
    (1,),
)  # an expert's tensors: the second lies transposed, the last is a bias
EXPERT_NUMEL = 15 + 12 + 1
IN_SEGMENTS = TransferSize(
    expert_bytes=EXPERT_NUMEL, start_bytes=1
)  # where it has more than one hop
Expert = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Grids:
    """Random placements of one grid: owners, wider, wider yet."""

    owner: Placement
    first: Placement
    second: Placement
    node_C: np.ndarray

    @classmethod
    def of(cls, world_size: int, seed: int) -> Grids:
        """On 1, 2 or 4 nodes; sometimes nothing moves, and sometimes all goes everywhere."""
        rng = np.random.default_rng([world_size, seed])
        num_experts = int(rng.integers(1, 9))
        owner = Placement.owned_by(rng.integers(0, world_size, num_experts), world_size)
        density = rng.choice([0.0, 0.3, 1.0], (2, 1, 1))
        first, second = rng.random((2, num_experts, world_size)) < density
        first |= owner.holds_EC
        num_nodes = min(world_size, int(rng.choice([1, 2, 4])))
        node_C = np.arange(world_size) * num_nodes // world_size
        return cls(owner, Placement(first), Placement(first | second), node_C)

    def transfers(self, transfer_size: TransferSize = SMALL) -> Transfers:
        return gather_rounds(self.owner, self.first, self.node_C, transfer_size)


def drawn(dtype: torch.dtype, *seed: int) -> Expert:
    """An expert's tensors: small integers, whose sums are exact in any type and order."""
    rng = np.random.default_rng(seed)
    up, down, bias = (torch.from_numpy(rng.integers(-16, 17, shape)).to(dtype) for shape in SHAPES)
    return up, down.t().contiguous().t(), bias


def slabs(num_slots: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor ``[slots, ...]`` for each of an expert's, filled with what nobody sends."""
    up, down, bias = (torch.full((num_slots, *shape), -77.0, dtype=dtype) for shape in SHAPES)
    return [up, down.mT.contiguous().mT, bias]


def buffers_in(in_slabs: list[Tensor], experts: tuple[int, ...]) -> dict[int, Expert]:
    """Slot 1 for the first expert, and so on; slot 0 and the last are for nobody."""
    return {e: tuple(slab[slot] for slab in in_slabs) for slot, e in enumerate(experts, start=1)}


def all_equal(ours: Expert, theirs: Expert) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _gather_twice(
    rank: int, world_size: int, seed: int, dtype: torch.dtype, transfer_size: TransferSize
) -> None:
    """From the owners, then from all that hold a replica: every wanted copy has its owner's
    bits."""
    grids = Grids.of(world_size, seed)
    chunks = {
        int(e): tuple(w.requires_grad_() for w in drawn(dtype, seed, int(e)))
        for e in grids.owner.experts_of(rank)
    }
    expert_bytes = EXPERT_NUMEL * dtype.itemsize
    held = grids.owner
    for wanted in (grids.first, grids.second):
        transfers = gather_rounds(held, wanted, grids.node_C, transfer_size)
        part = transfers.part_of(rank)
        in_slabs = slabs(len(part.received) + 2, dtype)
        buffers = buffers_in(in_slabs, part.received)
        traffic = to_the_end(comm.sparse_all_gather(part, chunks, buffers, dist.group.WORLD))
        assert traffic.received_bytes == transfers.received_C[rank] * expert_bytes
        assert traffic.sent_bytes == transfers.sent_C[rank] * expert_bytes
        assert traffic.received_bytes <= transfers.num_moved * expert_bytes, "eq. (1)"
        assert all((slab[[0, -1]] == -77.0).all() for slab in in_slabs), "beyond the buffers"
        chunks |= buffers
        held = wanted
    assert set(chunks) == set(grids.second.experts_of(rank).tolist())
    for expert, tensors in chunks.items():
        assert all_equal(tensors, drawn(dtype, seed, expert))


def _reduce_owner(
    rank: int, world_size: int, seed: int, dtype: torch.dtype, transfer_size: TransferSize
) -> None:
    """The sum over the replicas, exact; what was given is as it was."""
    grids = Grids.of(world_size, seed)
    transfers = grids.transfers(transfer_size)
    held = [int(e) for e in grids.first.experts_of(rank)]
    grads = {e: drawn(dtype, seed, e, rank) for e in held}
    came = to_the_end(comm.sparse_reduce_scatter(transfers.part_of(rank), grads, dist.group.WORLD))
    assert all(all_equal(grads[e], drawn(dtype, seed, e, rank)) for e in held)
    copied = [int(e) for e in grids.owner.experts_of(rank) if grids.first.holds_EC[e].sum() > 1]
    assert set(came.grads) == set(copied)
    for expert in copied:
        replicas = [c for c in np.flatnonzero(grids.first.holds_EC[expert]).tolist() if c != rank]
        exact = [
            torch.stack([w.double() for w in same]).sum(dim=0)
            for same in zip(*(drawn(dtype, seed, expert, ep_rank) for ep_rank in replicas))
        ]
        assert all_equal(tuple(w.double() for w in came.grads[expert]), tuple(exact))
        assert all(w.dtype == dtype for w in came.grads[expert])
    expert_bytes = EXPERT_NUMEL * dtype.itemsize
    assert came.traffic.sent_bytes == transfers.received_C[rank] * expert_bytes
    assert came.traffic.received_bytes == transfers.sent_C[rank] * expert_bytes


def _many(
    rank: int,
    world_size: int,
    check: Callable[..., None],
    dtype: torch.dtype,
    transfer_size: TransferSize,
) -> tuple[int, int]:
    """Returns how many experts moved, so that a test cannot pass by moving none, and how many
    transfers were in segments."""
    seeds = range(24)
    for seed in seeds:
        check(rank, world_size, seed, dtype, transfer_size)
    transfers = [Grids.of(world_size, seed).transfers(transfer_size) for seed in seeds]
    in_segments = sum(int((each.num_segments_N > 1).sum()) for each in transfers)
    return sum(each.num_moved for each in transfers), in_segments


@pytest.mark.parametrize("dtype", [torch.float64, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("check", [_gather_twice, _reduce_owner])
@pytest.mark.parametrize(
    ("world_size", "transfer_size"),
    [
        *((1, SMALL), (4, SMALL), (4, IN_SEGMENTS)),
        *(slow(2, SMALL), slow(8, SMALL)),
        *(slow(3, IN_SEGMENTS), slow(7, IN_SEGMENTS), slow(8, IN_SEGMENTS)),
    ],
)
def test_random_placements(
    world_size: int, check: Callable[..., None], dtype: torch.dtype, transfer_size: TransferSize
) -> None:
    (num_moved, in_segments), *_ = pool_of(world_size).run(_many, check, dtype, transfer_size)
    assert num_moved > 10 or world_size == 1
    assert in_segments > 10 or transfer_size == SMALL


def normal(dtype: torch.dtype, *seed: int) -> Expert:
    rng = np.random.default_rng(seed)
    return tuple(torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in SHAPES)


def _reduce_everywhere(
    rank: int, world_size: int, dtype: torch.dtype, in_float32: bool, transfer_size: TransferSize
) -> tuple[float, float]:
    """The largest errors, of the sums of three experts and of a repetition."""
    owner = Placement.owned_by(np.arange(3), world_size)
    everywhere = Placement(np.ones((3, world_size), dtype=bool))
    part = gather_rounds(owner, everywhere, np.arange(world_size) // 4, transfer_size).part_of(rank)
    grads = {e: normal(dtype, e, rank) for e in range(3)}
    first, again = (
        to_the_end(
            comm.sparse_reduce_scatter(part, grads, dist.group.WORLD, in_float32=in_float32)
        ).grads
        for _ in range(2)
    )
    error = 0.0
    for expert, tensors in first.items():
        replicas = [
            normal(dtype, expert, ep_rank) for ep_rank in range(world_size) if ep_rank != rank
        ]
        for ours, *theirs in zip(tensors, *replicas):
            exact = torch.stack([w.double() for w in theirs]).sum(dim=0)
            error = max(error, float((ours.double() - exact).abs().max()))
    same = all(all_equal(first[e], again[e]) for e in first)
    return error, 0.0 if same else 1.0


@pytest.mark.parametrize(
    ("dtype", "in_float32", "bound"),
    [
        (torch.float64, False, 1e-14),
        (torch.float64, True, 1e-14),  # a wider type stays as it is
        (torch.float32, False, 1e-5),
        # Sums of 7 lie below 16, where a bfloat16 is off by 1/32 at most; 7 roundings in all.
        (torch.bfloat16, False, 7 / 32),
        (torch.bfloat16, True, 4 / 32),
    ],
)
@pytest.mark.parametrize("transfer_size", [SMALL, IN_SEGMENTS], ids=["trees", "chains"])
def test_sums_are_right_and_the_same_bits_every_time(
    dtype: torch.dtype, in_float32: bool, bound: float, transfer_size: TransferSize
) -> None:
    for error, change in pool_of(8).run(_reduce_everywhere, dtype, in_float32, transfer_size):
        assert error <= bound
        assert change == 0.0


def _small_after_large(rank: int, world_size: int, in_float32: bool) -> list[float]:
    owner = Placement.owned_by(np.array([0]), 8)
    part = gather_rounds(owner, Placement(np.ones((1, 8), dtype=bool)), np.zeros(8, int)).part_of(
        rank
    )
    value = {7: 256.0, 5: 1.0, 6: 1.0}.get(rank, 0.0)
    grads = {0: (torch.tensor([value], dtype=torch.bfloat16),)}
    came = to_the_end(
        comm.sparse_reduce_scatter(part, grads, dist.group.WORLD, in_float32=in_float32)
    )
    return [float(grad) for tensors in came.grads.values() for grad in tensors]


@pytest.mark.parametrize(("in_float32", "total"), [(False, 256.0), (True, 258.0)])
def test_float32_keeps_what_bfloat16_loses(in_float32: bool, total: float) -> None:
    # At the owner arrive 256 of EP rank 7, then 1 by way of EP rank 3 (from 5), then 1 by way of EP
    # rank 1 (from 6). The next bfloat16 after 256 is 258.
    answers = pool_of(8).run(_small_after_large, in_float32)
    assert answers == [[total], *([[]] * 7)]


def _fail(*_: Any, **__: Any) -> None:
    raise AssertionError("communicated")


def test_no_replicas_no_communication() -> None:
    owner = Placement.block(8, 4)
    part = gather_rounds(owner, owner, np.array([0, 0, 1, 1])).part_of(2)
    with mock.patch.object(comm.Pairs, "post", _fail):
        assert to_the_end(comm.sparse_all_gather(part, {}, {}, None)) == comm.Traffic(0, 0)
        came = to_the_end(comm.sparse_reduce_scatter(part, {}, None))
    assert (came.grads, came.traffic) == ({}, comm.Traffic(0, 0))


def _some_have_no_part(rank: int, world_size: int) -> bool:
    owner = Placement.owned_by(np.array([2]), 4)
    holds_EC = owner.holds_EC.copy()
    holds_EC[0, 3] = True
    part = gather_rounds(owner, Placement(holds_EC), np.array([0, 0, 1, 1])).part_of(rank)
    if rank < 2:  # need not even call
        return not part.rounds
    buffers = {0: (torch.zeros(3),)} if rank == 3 else {}
    ones = (torch.ones(3),)
    to_the_end(comm.sparse_all_gather(part, {0: ones}, buffers, dist.group.WORLD))
    return rank == 2 or bool((buffers[0][0] == 1.0).all())


def test_ranks_without_a_part_are_not_needed() -> None:
    assert all(pool_of(4).run(_some_have_no_part))


# Segments.


def _views(number: int, of: int) -> list[list[float]]:
    wide = torch.arange(6.0).reshape(2, 3)  # 24 bytes
    narrow = torch.arange(10, 15).to(torch.bfloat16)  # 10
    one = torch.tensor(20.0, dtype=torch.float64)  # 8
    found = comm.segment_of((wide, narrow, one), Segment(number, of))
    given = {tensor.untyped_storage().data_ptr() for tensor in (wide, narrow, one)}
    assert {view.untyped_storage().data_ptr() for view in found} <= given, "nothing is copied"
    return [view.tolist() for view in found]


def test_segments_have_even_parts_of_the_bytes() -> None:
    # Edges at 14 and 28 of 42 bytes: amid the fourth number, and behind two of the second tensor.
    assert [_views(number, 3) for number in range(3)] == [
        [[0.0, 1.0, 2.0]],
        [[3.0, 4.0, 5.0], [10.0, 11.0]],
        [[12.0, 13.0, 14.0], [20.0]],
    ]


@pytest.mark.parametrize("of", range(2, 17))
def test_segments_have_every_element_once(of: int) -> None:
    """Also where a segment is less than an element, and so may be empty."""
    found = [value for number in range(of) for view in _views(number, of) for value in view]
    assert found == [*range(6), *range(10, 15), 20]


def test_the_whole_is_what_was_given() -> None:
    weight = torch.ones(2, 3)
    (whole,) = comm.segment_of((weight,), Segment(0, 1))
    assert whole is weight


def _chain_of_types(rank: int, world_size: int, in_float32: bool) -> tuple[Expert, ...]:
    """Sums of an expert of several types, of which one lies transposed, by a tree and a chain."""
    owner = Placement.owned_by(np.array([0]), world_size)
    everywhere = Placement(np.ones((1, world_size), dtype=bool))
    grads = {0: tuple(map(Tensor.to, normal(torch.float64, rank), TYPES))}
    grads[0] = (grads[0][0].t().contiguous().t(), *grads[0][1:])
    kept = tuple(grad.clone() for grad in grads[0])
    found = []
    for transfer_size in (SMALL, IN_SEGMENTS):
        part = gather_rounds(owner, everywhere, np.arange(world_size) // 2, transfer_size).part_of(
            rank
        )
        came = to_the_end(
            comm.sparse_reduce_scatter(part, grads, dist.group.WORLD, in_float32=in_float32)
        )
        assert all_equal(grads[0], kept)
        found.append(came.grads.get(0, ()))
    return found[0], found[1]


TYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("in_float32", [slow(False), True])
@pytest.mark.parametrize(("world_size", "are_equal"), [slow(6, True), (8, False)])
def test_types_of_one_expert_may_differ(world_size: int, are_equal: bool, in_float32: bool) -> None:
    """On three nodes of two the tree is a chain, and sums have the same bits; on four it is not."""
    (tree, chain), *others = pool_of(world_size).run(_chain_of_types, in_float32)
    assert others == [((), ())] * (world_size - 1)
    replicas = [normal(torch.float64, ep_rank) for ep_rank in range(1, world_size)]
    for ours, theirs, dtype, *same in zip(tree, chain, TYPES, *replicas):
        assert ours.dtype == theirs.dtype == dtype
        exact = sum(same)
        for total in (ours, theirs):
            assert float((total - exact).abs().max()) <= 25 * torch.finfo(dtype).eps
    assert all_equal(tree, chain) == are_equal


# Broadcasts instead of trees: NCCL only, here by gloo's own, one after the other.


MOVED = (0, 1, 3)  # experts that go everywhere


def _by_trees_and_by_broadcasts(rank: int, world_size: int, together_bytes: int) -> tuple[int, int]:
    owner = Placement.owned_by(np.array([1, 1, 0, 1]), world_size)
    holds_EC = owner.holds_EC.copy()
    holds_EC[list(MOVED)] = True
    grid = owner, Placement(holds_EC), np.arange(world_size) // 2
    trees, star = gather_rounds(*grid).part_of(rank), star_of(*grid, rank)
    assert star is not None
    assert star.runs == (Run(1, (0, 1)), Run(1, (3,)))
    chunks = {int(e): drawn(torch.float64, 5, int(e)) for e in owner.experts_of(rank)}
    grads = {e: drawn(torch.float64, 6, e, rank) for e in MOVED}

    def both(part: Part) -> tuple[Mapping[int, Expert], comm.Traffic, comm.Arrived]:
        buffers = buffers_in(slabs(len(MOVED) + 2, torch.float64), part.received)
        traffic = to_the_end(comm.sparse_all_gather(part, chunks, buffers, dist.group.WORLD))
        # Gloo, unlike NCCL, reduces into what others than the root give.
        given = {e: tuple(w.clone() for w in tensors) for e, tensors in grads.items()}
        return (
            buffers,
            traffic,
            to_the_end(comm.sparse_reduce_scatter(part, given, dist.group.WORLD)),
        )

    buffers, traffic, came = both(trees)
    with (
        mock.patch.object(comm, "by_broadcast", lambda part, device: bool(part.everywhere)),
        by_broadcasts(),
        mock.patch.object(comm, "TOGETHER_BYTES", together_bytes),
        mock.patch.object(comm.Pairs, "post", _fail),
    ):
        buffers_2, traffic_2, came_2 = both(star)
    assert set(buffers) == {e for e in MOVED if rank != 1}
    assert all(all_equal(buffers[e], buffers_2[e]) for e in buffers)
    assert set(came.grads) == set(came_2.grads) == {e for e in MOVED if rank == 1}
    assert all(all_equal(came.grads[e], came_2.grads[e]) for e in came.grads)
    assert traffic_2.received_bytes == traffic.received_bytes == came_2.traffic.sent_bytes
    return traffic_2.sent_bytes, came_2.traffic.received_bytes


@pytest.mark.parametrize("together_bytes", [0, comm.TOGETHER_BYTES])
def test_broadcasts_equal_trees(together_bytes: int) -> None:
    num_bytes = len(MOVED) * EXPERT_NUMEL * 8
    rooted = pool_of(4).run(_by_trees_and_by_broadcasts, together_bytes)
    assert rooted == [(0, 0), (num_bytes, num_bytes), (0, 0), (0, 0)]


def test_experts_are_a_run_if_they_follow_each_other_at_one_owner() -> None:
    owner = Placement.owned_by(np.array([0, 0, 1, 1, 0, 0, 0, 1]), 2)
    moves_E = np.array([1, 1, 1, 0, 1, 0, 1, 1], dtype=bool)
    wanted = owner.with_replicas(np.stack((moves_E, moves_E), axis=1))
    star = star_of(owner, wanted, np.zeros(2, dtype=np.int64), 0)
    assert star is not None
    runs = [(0, (0, 1)), (1, (2,)), (0, (4,)), (0, (6,)), (1, (7,))]
    assert [(run.root, run.experts) for run in star.runs] == runs


def _by_a_star_in_float32(rank: int, world_size: int) -> list[float]:
    """The owner adds what comes from all others in one round, to each of its sums once a call."""
    owner = Placement.owned_by(np.array([0, 0]), world_size)
    everywhere = Placement(np.ones((2, world_size), dtype=bool))
    star = star_of(owner, everywhere, np.zeros(world_size, dtype=np.int64), rank)
    assert star is not None
    add_each = comm.add_each

    def add_once(totals: list[Tensor], more: list[Tensor]) -> None:
        assert len({total.data_ptr() for total in totals}) == len(totals)
        add_each(totals, more)

    grads = {e: (torch.full((3,), 10.0**e * rank, dtype=torch.bfloat16),) for e in range(2)}
    with mock.patch.object(comm, "add_each", add_once):
        came = to_the_end(
            comm.sparse_reduce_scatter(star, grads, dist.group.WORLD, in_float32=True)
        )
    return [float(total[0]) for total, *_ in came.grads.values()]


def test_a_star_adds_to_a_sum_once_a_call() -> None:
    assert pool_of(4).run(_by_a_star_in_float32) == [[6.0, 60.0], [], [], []]


def test_when_broadcasts_serve() -> None:
    owner = Placement.owned_by(np.array([0, 1]), 2)
    node_C = np.zeros(2, dtype=np.int64)
    all_E2 = gather_rounds(owner, Placement(np.ones((2, 2), dtype=bool)), node_C).part_of(0)
    cuda = torch.device("cuda", 0)
    assert comm.by_broadcast(all_E2, cuda)
    assert not comm.by_broadcast(all_E2, torch.device("cpu"))
    assert not comm.by_broadcast(Part(0, all_E2.rounds, ()), cuda)
    with mock.patch.object(comm, "_coalescing_manager", None):
        assert not comm.by_broadcast(all_E2, cuda)


def _mixed(sender: int, receiver: int) -> list[torch.Tensor]:
    """What a member sends to another: small and large ones, of several types and shapes."""
    number = 10 * sender + receiver
    return [
        torch.full((3,), number, dtype=torch.float32),
        torch.full((5, 7), number + 0.5, dtype=torch.float64),
        torch.tensor(number, dtype=torch.int64),
        torch.full((2, 9), number + 0.25, dtype=torch.bfloat16),
        torch.full((4, 0), 1.0),
        torch.full((3,), bool(number % 2)),
    ]


def _exchange_mixed(rank: int, world_size: int, small_bytes: int) -> bool:
    others = [other for other in range(world_size) if other != rank]
    wanted = [(sent, other) for other in others for sent in _mixed(other, rank)]
    rooms = [(torch.zeros_like(sent), other) for sent, other in wanted]
    sends = [(sent, other) for other in reversed(others) for sent in _mixed(rank, other)]
    with mock.patch.object(comm, "SMALL_BYTES", small_bytes):
        traffic = comm.exchange(rooms, sends, dist.group.WORLD)
    num_bytes = sum(sent.nbytes for sent, _ in sends)
    assert traffic == comm.Traffic(num_bytes, num_bytes)
    return all(torch.equal(room, sent) for (room, _), (sent, _) in zip(rooms, wanted))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("small_bytes", [-1, 36, 10**6])
def test_small_tensors_come_as_others_do(small_bytes: int, world_size: int) -> None:
    """One by one; two of six alone; all of a member in one message."""
    assert all(pool_of(world_size).run(_exchange_mixed, small_bytes))


def _send_to_the_second(rank: int, world_size: int) -> list[float]:
    room = torch.zeros(4)
    parcels = [([], [(torch.arange(4.0), 1)]), ([(room, 0)], [])][rank]
    with mock.patch.object(comm.Pairs, "post", _fail):
        comm.exchange(*parcels, dist.group.WORLD)
    return room.tolist()


def test_between_two_small_tensors_need_no_messages() -> None:
    """One of the two sends nothing."""
    assert pool_of(2).run(_send_to_the_second) == [[0.0] * 4, [0.0, 1.0, 2.0, 3.0]]


def test_the_private_manager_is_as_we_call_it() -> None:
    parameters = list(inspect.signature(comm._coalescing_manager).parameters)
    assert parameters == ["group", "device", "async_ops"]
