# SPDX-License-Identifier: Apache-2.0
"""Each token's row once to an EP rank: what travels, sums that are the same every time, and
refusals.

That results are those of dense experts is in ``test_layer.py``. Shape letters: T tokens, K choices
a token, C EP ranks, N rows, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core import comm
from ds_moe_ext.core.comm import all_to_all_rows
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.moe import dispatch
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.moe.deduplicated import Groups
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.hooks import Hooked
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.moe.route import Restore
from ds_moe_ext.planning.strategy import Job, LayerContext, Plan, Strategy
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.task import COMBINE, RESTORE, Op
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.testing import relative_error
from tests.ranks import pool_of
from tests.strategies_for_tests import Chunked

T, D, F, EXPERTS = 20, 8, 12, 8
FUNCTION = FeedForwardExperts(silu_gated)


@dataclass(frozen=True, kw_only=True)
class Travels(Codec):
    """Notes how many rows leave; not the one row that is weighed beforehand."""

    rows: list[int] = field(default_factory=list)
    gradients_of_rows: list[int] = field(default_factory=list)

    def encode(self, rows_ND: Tensor) -> Tensor:
        if rows_ND.shape[0] != 1:
            self.rows.append(rows_ND.shape[0])
        return rows_ND

    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return arrived_RB

    def encode_grad(self, rows_ND: Tensor) -> Tensor:
        if rows_ND.shape[0] != 1:
            self.gradients_of_rows.append(rows_ND.shape[0])
        return rows_ND


def choices(rank: int, top_k: int) -> Tensor:
    """Chosen experts ``[T, K]``, no one twice a token; a few were dropped."""
    generator = torch.Generator().manual_seed(rank)
    expert_TK = torch.rand(T, EXPERTS, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    expert_TK[rank, -1] = -1
    return expert_TK


def layer_of(
    strategy: Strategy, world_size: int, options: LayerOptions, etp_size: int = 1
) -> RoutedExperts:
    grid = Grid(world_size, world_size // etp_size, etp_size)
    built = ParallelLayout.build(grid, strategy.uses())
    owner = Placement.block(EXPERTS, grid.num_ep_ranks)
    (plan,) = strategy.plan(Job.at_start([owner], built.node_C))
    return RoutedExperts(strategy, LayerContext(plan, built, 0), FUNCTION, options=options)


@dataclass(frozen=True)
class Result:
    y_TD: Tensor
    gradients: tuple[Tensor, ...]
    codec: Travels


def trained(
    strategy: Strategy,
    rank: int,
    world_size: int,
    top_k: int,
    dtype: torch.dtype,
    *,
    codec: Travels | None = None,
) -> Result:
    """One pass, with scores in float32 at least."""
    hooks = Hooked() if codec is None else Hooked(codecs=(codec,))
    options = LayerOptions(gate_may_drop=True, hooks=hooks)
    routed = layer_of(strategy, world_size, options)
    generator = torch.Generator().manual_seed(50 + rank)
    x_TD, grad_TD = torch.randn(2, T, D, generator=generator, dtype=torch.float64).to(dtype)
    score_TK = torch.rand(T, top_k, generator=generator, dtype=torch.float64)
    score_TK = score_TK.to(torch.promote_types(dtype, torch.float32))
    generator.manual_seed(0)
    shapes = (EXPERTS, 2 * F, D), (EXPERTS, D, F)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mine = routed.layer_context.plan.owner.experts_of(rank)
    weights = [part[expert].to(dtype) for expert in mine for part in whole]
    leaves = [leaf.requires_grad_() for leaf in (x_TD, score_TK, *weights)]
    y_TD = routed(x_TD, choices(rank, top_k), score_TK, tuple(weights))
    y_TD.backward(grad_TD)
    gradients = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
    assert len(gradients) == len(leaves)
    return Result(y_TD.detach(), gradients, codec or Travels())


def both(
    rank: int, world_size: int, top_k: int, dtype: torch.dtype, over: Strategy | None = None
) -> tuple[Result, Result]:
    """Each row once, and a row a choice."""
    strategies = ExpertParallel(send_once=True), ExpertParallel()
    if isinstance(over, ExpertSharding):
        strategies = tuple(map(over.over, strategies))
    once, plain = (
        trained(each, rank, world_size, top_k, dtype, codec=Travels()) for each in strategies
    )
    again = trained(strategies[0], rank, world_size, top_k, dtype)
    assert torch.equal(once.y_TD, again.y_TD)
    assert all(map(torch.equal, once.gradients, again.gradients))
    return once, plain


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_a_row_travels_once_to_a_rank(top_k: int) -> None:
    results = pool_of(4).run(both, top_k, torch.float64)
    sent_CC = np.zeros((4, 4), dtype=int)
    for rank in range(4):
        ep_ranks = [set(row) for row in (choices(rank, top_k) // 2).tolist()]
        sent_CC[rank] = [sum(ep_rank in goes for goes in ep_ranks) for ep_rank in range(4)]
    for rank, (once, plain) in enumerate(results):
        sent, received = sent_CC[rank].sum(), sent_CC[:, rank].sum()
        assert once.codec.rows == [sent, received]
        assert once.codec.gradients_of_rows == [sent, received]
        assert plain.codec.rows[0] == T * top_k - 1 >= sent
        assert relative_error(once.y_TD, plain.y_TD) <= 1e-12
        for ours, theirs in zip(once.gradients, plain.gradients):
            assert relative_error(ours, theirs) <= 1e-12


def test_chunks_of_rows_that_travel_once() -> None:
    """Gradients, of scores too, where backward is cut otherwise and choices were dropped."""
    over = ExpertSharding(degree=3, slice_gradients=False)
    for once, plain in pool_of(2).run(both, 5, torch.float64, over):
        assert len(once.codec.rows) == 6
        assert relative_error(once.y_TD, plain.y_TD) <= 1e-12
        for ours, theirs in zip(once.gradients, plain.gradients):
            assert relative_error(ours, theirs) <= 1e-12


def test_halves_are_rounded_a_few_times_more() -> None:
    """Rows in bfloat16, scores in float32: the sum of a token's rows at a rank is rounded as it
    travels, and no score is."""
    for once, plain in pool_of(4).run(both, 5, torch.bfloat16):
        assert once.y_TD.dtype == plain.y_TD.dtype == torch.bfloat16
        for ours, theirs in zip((once.y_TD, *once.gradients), (plain.y_TD, *plain.gradients)):
            assert ours.dtype == theirs.dtype
            assert relative_error(ours.double(), theirs.double()) <= 2**-6


@contextmanager
def on_hosts(names: str) -> Iterator[None]:
    """Inside the block ranks are on hosts of these names, a letter each."""
    with mock.patch.object(comm, "gather_objects", lambda thing, group: list(names)):
        yield


def by_nodes(rank: int, world_size: int, hosts: str, top_k: int) -> list[int]:
    """Rows that leave this rank's node, once to a node, and once to a rank."""
    far: list[int] = []

    def counted(
        rows_N: Tensor, sent_C: Sequence[int], received_C: Sequence[int], group: Any
    ) -> Tensor:
        if rows_N.shape[1:] == (D,):
            peers = zip(dist.get_process_group_ranks(group), sent_C)
            far[-1] += sum(sent for peer, sent in peers if hosts[peer] != hosts[rank])
        return all_to_all_rows(rows_N, sent_C, received_C, group)

    by_places = ExpertSharding(degree=2, slice_gradients=False, all_to_all="2dh")
    once = ExpertParallel(send_once=True)
    results = []
    with on_hosts(hosts), mock.patch.object(dispatch, "all_to_all_by_pairs", counted):
        for strategy in (by_places.over(once), once, ExpertParallel()):
            far.append(0)
            results.append(trained(strategy, rank, world_size, top_k, torch.float64))
    for result in results[:2]:
        assert relative_error(result.y_TD, results[2].y_TD) <= 1e-12
        for ours, theirs in zip(result.gradients, results[2].gradients):
            assert relative_error(ours, theirs) <= 1e-12
    return far


@pytest.mark.parametrize("hosts", ["aabb", "abba", "abbaabab", "abcdbadc"])
def test_a_row_travels_once_to_a_node(hosts: str) -> None:
    """And is added up there before it comes back. Ranks of a node may be any."""
    world_size, top_k = len(hosts), 5
    once_to_nodes = once_to_ranks = all_rows = 0
    for rank in range(world_size):
        for row in choices(rank, top_k).tolist():
            ep_ranks = [expert * world_size // EXPERTS for expert in row if expert >= 0]
            other = [ep_rank for ep_rank in ep_ranks if hosts[ep_rank] != hosts[rank]]
            once_to_nodes += len({hosts[ep_rank] for ep_rank in other})
            once_to_ranks += len(set(other))
            all_rows += len(other)
    found = np.sum(pool_of(world_size).run(by_nodes, hosts, top_k), axis=0)
    # There and back, and so their gradients.
    assert found.tolist() == [4 * once_to_nodes, 4 * once_to_ranks, 4 * all_rows]
    assert once_to_nodes < once_to_ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_of_groups(dtype: torch.dtype) -> None:
    group_N = torch.tensor([2, 0, 2, 2, 1], dtype=torch.int32)
    groups = Groups.of(group_N, 3)
    assert groups.row_N.tolist() == [1, 4, 0, 2, 3] and groups.start_J.tolist() == [0, 1, 2]
    rows_ND = torch.tensor([[256.0], [3.0], [1.0], [-256.0], [5.0]], dtype=dtype)
    assert groups.sums(rows_ND).tolist() == [[3.0], [5.0], [1.0]]
    # 1 + 2**-10 is no number of bfloat16: weights of more digits are not rounded to it.
    weight_N = torch.tensor([1.0, 1.0, 8.0, 1 + 2**-10, 1.0])
    assert groups.sums(rows_ND, weight_N).tolist() == [[3.0], [5.0], [7.75]]
    assert Groups.of(group_N[:0], 0).sums(rows_ND[:0]).shape == (0, 1)
    assert Groups.of(group_N[:0], 2).sums(rows_ND[:0]).tolist() == [[0.0], [0.0]]


# What is refused.


@dataclass(frozen=True, kw_only=True)
class Copying(ExpertParallel):
    """A replica of each expert everywhere."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        target = Placement(np.ones_like(job.owners[0].holds_EC))
        share = NearestReplica(target, job.node_C)
        return tuple(replace(plan, target=target, share=share) for plan in super().plan(job))


@dataclass(frozen=True, kw_only=True)
class Restoring(ExpertParallel):
    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        return {RESTORE: Restore()}


@dataclass(frozen=True, kw_only=True)
class InChunks(Chunked):
    """With schedules of its own."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(replace(plan, sends_once=True) for plan in super().plan(job))


def begun(rank: int, world_size: int, strategy: Strategy) -> None:
    routed = layer_of(strategy, world_size, LayerOptions())
    routed.program(torch.device("cpu"))


@pytest.mark.parametrize(
    ("strategy", "stated"),
    [
        (
            ExpertParallel(send_once=True, static_capacity=3),
            r"ep\.send_once is true.*ep\.static_capacity is 3.*leave one of them out",
        ),
        (Copying(send_once=True), r"ep\.send_once is true.*leave it out, or the replicas"),
        (Restoring(send_once=True), r"stages of its own for restore.*leave it out, or those"),
        (InChunks(forward=2, backward=1), "schedules take no scores there; leave schedules to"),
    ],
)
def test_what_cannot_be_sent_once_is_refused(strategy: Strategy, stated: str) -> None:
    with pytest.raises(AssertionError, match=f"ValueError.*{stated}"):
        pool_of(2).run(begun, strategy)


def test_what_it_does_is_reported() -> None:
    _, strategy = read_settings({BLOCK: {"enabled": True, "ep": {"send_once": True}}})
    assert strategy == ExpertParallel(send_once=True)
    for num_ep_ranks, stated in ((2, "once to an EP rank"), (1, "has no effect")):
        job = Job.at_start(
            [Placement.block(4, num_ep_ranks)], np.zeros(num_ep_ranks, dtype=np.int64)
        )
        (notice,) = strategy.notices(job)
        assert stated in notice


def stages_of(rank: int, world_size: int, strategy: Strategy) -> Any:
    routed = layer_of(strategy, world_size, LayerOptions())
    return type(routed.program(torch.device("cpu")).layer_stages.stages[COMBINE]).__name__


def test_one_ep_rank_sends_nothing_once() -> None:
    assert pool_of(1).run(stages_of, ExpertParallel(send_once=True)) == ["Combine"]
    assert set(pool_of(2).run(stages_of, ExpertParallel(send_once=True))) == {"CombineOnce"}
