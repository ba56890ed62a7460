# SPDX-License-Identifier: Apache-2.0
"""The sweeps move what they say, and a cluster is what its times make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_moe_ext.core.comm import all_to_all_by_pairs, all_to_all_rows
from ds_moe_ext.core.hardware import Hardware, Link
from ds_moe_ext.planning.bench import Bench
from ds_moe_ext.planning.probe import (
    Sizes,
    all_gather_sweep,
    all_reduce_sweep,
    all_to_all_sweep,
    copy_sweep,
    expert_sweep,
    levels_of,
    matmul_sweep,
    measure_cluster,
    measure_memory,
    measure_pairs,
    reduce_scatter_sweep,
    spare_bytes,
)
from tests.ranks import pool_of

CPU = torch.device("cpu")
KIB = 1024
SIZES = Sizes((KIB, 2 * KIB, 3 * KIB), expert_bytes=5 * KIB, num_experts_N=(4, 8, 12))


class RisingClock:
    """Does the work; says 1, 2, 3 ms in turn, whatever it took."""

    def __init__(self) -> None:
        self.num_calls = 0

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        ready()
        work()
        self.num_calls += 1
        return ((self.num_calls - 1) % 3 + 1) * 1e-3


def measured(rank: int, world_size: int, ranks_per_node: int, by_pairs: bool) -> str:
    exchange = all_to_all_by_pairs if by_pairs else all_to_all_rows
    levels = levels_of(world_size, ranks_per_node, exchange)
    bench = Bench(RisingClock(), CPU, num_warm_ups=1, num_repeats=2)
    return measure_cluster(levels, bench, SIZES).to_json()


def cluster(num_ranks: int, ranks_per_node: int, *, by_pairs: bool = False) -> Hardware:
    texts = pool_of(num_ranks).run(measured, ranks_per_node, by_pairs)
    assert len(set(texts)) == 1, "all ranks must find the same cluster"
    return Hardware.from_json(texts[0])


def line(bytes_per_ms: float) -> Link:
    return Link(bytes_per_s=bytes_per_ms * 1e3, latency_s=0.0, r_squared=1.0)


def assert_links(found: Link | None, wanted: Link) -> None:
    assert found is not None
    assert found.bytes_per_s == pytest.approx(wanted.bytes_per_s, rel=1e-4)
    assert found.latency_s == pytest.approx(0, abs=1e-12)
    assert found.r_squared == pytest.approx(1)


@pytest.mark.parametrize("by_pairs", [False, True])
def test_two_nodes_of_two(by_pairs: bool) -> None:
    """Each millisecond a rank exchanges 2 KiB (1 to itself), gathers as many, gives as many to be
    summed by place, or 1 KiB by all, and takes in two experts of a pair's four, or three of all
    ranks' four; and two ranks of a node do it over one link."""
    found = cluster(4, 2, by_pairs=by_pairs)
    assert (found.num_nodes, found.ranks_per_node) == (2, 2)
    for level in (found.intra_collectives, found.inter_collectives):
        assert_links(level.all_to_all, line(2 * KIB))
        assert_links(level.all_reduce, line(KIB))
    assert_links(found.intra_collectives.all_gather, line(2 * KIB))
    assert_links(found.intra_collectives.reduce_scatter, line(2 * KIB))
    between = found.inter_collectives
    assert (between.all_gather, between.reduce_scatter) == (None, None), "EP ranks lie in nodes"
    assert_links(found.intra, line(KIB))
    assert_links(found.inter, line(2 * KIB))
    assert_links(found.intra_collectives.copy, line(2 * 5 * KIB))
    assert_links(found.inter_collectives.copy, line(2 * 2 * 5 * KIB))
    assert_links(found.copy, line(3 * 5 * KIB))
    assert found.copy_link(4) == found.copy


def rows_between(rank: int, world_size: int, num_sharers: int) -> list[Link | None]:
    """Far from a rank, near to it, and of nobody; of nodes of 3 and 1."""
    node_C = np.array([0, 0, 0, 1])
    whole = levels_of(world_size, 1, all_to_all_by_pairs).whole
    level = replace(whole, node_C=node_C, num_sharers=num_sharers)
    bench = Bench(RisingClock(), CPU, num_warm_ups=1, num_repeats=2)
    is_far_CC = node_C[:, None] != node_C
    is_near_CC = ~is_far_CC & ~np.eye(world_size, dtype=bool)
    sizes = (KIB, 2 * KIB, 3 * KIB)
    nobody_CC = np.zeros_like(is_far_CC)
    return [measure_pairs(level, bench, each, sizes) for each in (is_far_CC, is_near_CC, nobody_CC)]


@pytest.mark.parametrize("num_sharers", [1, 3])
def test_rows_of_some_pairs(num_sharers: int) -> None:
    """Each millisecond the lone rank sends a KiB to each of three, and those each to two others."""
    far, near, none = pool_of(4).run(rows_between, num_sharers)[0]
    assert_links(far, line(num_sharers * 3 * KIB))
    assert_links(near, line(num_sharers * 2 * KIB))
    assert none is None


def test_one_node() -> None:
    found = cluster(2, 2)
    assert (found.num_nodes, found.ranks_per_node) == (1, 2)
    assert_links(found.intra, line(KIB))
    assert found.inter is None
    assert found.inter_collectives.copy is None
    assert found.copy is None
    assert found.copy_link(2) == found.intra_collectives.copy


def test_one_rank_a_node() -> None:
    found = cluster(2, 1)
    assert found.intra is None
    assert_links(found.inter, line(KIB))
    assert_links(found.inter_collectives.copy, line(2 * 5 * KIB))
    assert found.copy_link(2) == found.inter_collectives.copy


def test_one_rank_knows_its_device_only() -> None:
    found = cluster(1, 1)
    assert (found.intra, found.inter) == (None, None)
    product = found.device.products.fp32
    assert product is not None
    assert product.multiply_adds_per_s == pytest.approx(2**19 * 512 / 1e-3, rel=1e-4)
    assert product.start_s == pytest.approx(0, abs=1e-12)
    assert product.r_squared == pytest.approx(1)
    assert found.device.flops_per_s.fp32 == 2 * product.multiply_adds_per_s
    assert found.device.memory_bytes is None


def refused(rank: int, world_size: int, ranks_per_node: int) -> str:
    with pytest.raises(ValueError) as raised:
        levels_of(world_size, ranks_per_node)
    return str(raised.value)


@pytest.mark.parametrize("ranks_per_node", [0, 2, 4])
def test_nodes_that_do_not_fill_the_ranks(ranks_per_node: int) -> None:
    for message in pool_of(3).run(refused, ranks_per_node):
        assert message.startswith(f"{ranks_per_node} rank(s) on a node do not divide 3 rank(s)")


def results(rank: int, world_size: int) -> list[list[float]]:
    """What came of gathering this rank's number, and of a sum by place of the ranks' numbers."""
    level = levels_of(world_size, world_size).within
    row = torch.full((), float(rank))
    with mock.patch.object(Tensor, "new_zeros", _repeated):
        sweeps = [sweep(level, (1, 2), row) for sweep in (all_gather_sweep, reduce_scatter_sweep)]
    return [sweep.works_N[1]().tolist() for sweep in sweeps]  # type: ignore[attr-defined]


def _repeated(number: Tensor, size: int) -> Tensor:
    return number.expand(size).clone()


def test_ep_ranks_are_measured_by_what_they_do() -> None:
    for gathered, scattered in pool_of(3).run(results):
        assert gathered == [0, 0, 1, 1, 2, 2]
        assert scattered == [3, 3]


def moved(rank: int, world_size: int) -> list[list[int]]:
    """Bytes that copies bring to this rank, by level and number of experts."""
    levels = levels_of(world_size, 2)
    received = []
    for level in (levels.within, levels.between, levels.whole):
        sweep = copy_sweep(level, SIZES, CPU)
        traffic = [work() for work in sweep.works_N]
        received.append([each.received_bytes for each in traffic])  # type: ignore[attr-defined]
        assert max(received[-1]) <= max(sweep.units_N)
    return received


def test_replicas_reach_every_member() -> None:
    """Six ranks: pairs within a node, threes between nodes; experts live on members in turn."""
    per_expert = SIZES.expert_bytes
    within, between, whole = zip(*pool_of(6).run(moved))
    for received in within:
        assert received == [2 * per_expert, 4 * per_expert, 6 * per_expert]
    for received, node in zip(between, (0, 0, 1, 1, 2, 2)):
        own = [2 if node == 0 else 1, 2 if node == 2 else 3, 4]
        assert received == [(n - o) * per_expert for n, o in zip((4, 8, 12), own)]
    for received, rank in zip(whole, range(6)):
        own = [1 if rank < 4 else 0, 2 if rank < 2 else 1, 2]
        assert received == [(n - o) * per_expert for n, o in zip((4, 8, 12), own)]


def units(rank: int, world_size: int) -> list[list[int]]:
    level = levels_of(world_size, world_size).within
    row = torch.zeros(64, dtype=torch.float64)  # half a KiB
    sweeps = (
        all_to_all_sweep(level, (2, 4, 6), row),
        all_gather_sweep(level, (2, 4, 6), row),
        reduce_scatter_sweep(level, (2, 4, 6), row),
        all_reduce_sweep(level, (2, 4, 6), row),
        copy_sweep(level, SIZES, CPU),
        matmul_sweep((2, 4), 8, torch.float32, CPU),
    )
    for sweep in sweeps:
        for work in sweep.works_N:
            work()
    return [list(sweep.units_N) for sweep in sweeps]


def test_units_of_the_sweeps() -> None:
    """Of three members; the busiest of them takes in all experts but its own."""
    found = pool_of(3).run(units)
    assert found == [found[0]] * 3
    exchanged, gathered, scattered, summed, copied, multiplied = found[0]
    assert exchanged == gathered == scattered == [3 * KIB, 6 * KIB, 9 * KIB]
    assert summed == [KIB, 2 * KIB, 3 * KIB]
    assert copied == [3 * 5 * KIB, 6 * 5 * KIB, 8 * 5 * KIB]
    assert multiplied == [2 * 8 * 8, 4 * 8 * 8]


def test_an_expert_is_run_forward_and_backward_and_left_as_it_was() -> None:
    expert = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    weights = tuple(expert.parameters())
    seen: list[int] = []

    def forward(rows_RD: torch.Tensor) -> torch.Tensor:
        assert rows_RD.requires_grad
        seen.append(rows_RD.shape[0])
        return expert(rows_RD)

    sweep = expert_sweep(forward, weights, torch.randn(100, 4))
    with torch.no_grad():
        for work in sweep.works_N:
            work()
    assert seen == list(sweep.units_N) == [25, 50, 75, 100]
    assert all(weight.grad is None for weight in weights)


def seconds_of_a_row(rank: int, world_size: int) -> float:
    weight = torch.randn(4, 4, requires_grad=True)
    sweep = expert_sweep(
        lambda rows_RD: rows_RD @ weight, (weight,), torch.randn(30, 4), num_steps=3
    )
    return Bench(RisingClock(), CPU, 0, 3).fit(sweep).beta_s


def test_seconds_of_a_row() -> None:
    """10, 20, 30 rows in 1, 2, 3 ms."""
    assert pool_of(2).run(seconds_of_a_row) == [pytest.approx(1e-4)] * 2


def test_free_memory_of_a_host_is_not_a_ranks_own() -> None:
    assert spare_bytes(CPU) is None


def test_experts_without_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="an expert has 0 bytes; give the bytes of its weights"):
        Sizes((KIB,), 0, (1,))


def memory_rate(rank: int, world_size: int) -> float:
    return measure_memory(Bench(RisingClock(), CPU, num_warm_ups=0, num_repeats=1))


def test_memory_is_read_and_written() -> None:
    """Each millisecond 32 MiB are read, and as many written."""

    (found,) = pool_of(1).run(memory_rate)
    assert found == pytest.approx(2 * 2**25 * 1e3, rel=1e-4)
