# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows go by way of the nodes: bit for bit as they go directly, and as dense experts.

Shape letters: W ranks, E experts, C EP ranks, P ranks that exchange rows, D model width, F expert
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.core.all_to_all import Relay
from ds_moe_ext.core.layout import BETWEEN_NODES, NODE_AXES, WITHIN_NODES, Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import RowSplits
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.moe.codecs import Coding
from ds_moe_ext.moe.dispatch import Wire, carrier_of
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import LayerOptions, MoELayer
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.moe.sharding import Along, Shard
from ds_moe_ext.planning.exchange_costs import BY_COST, WAYS, Way
from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.layer_pipelines import HostSeconds, Measured, MeasuredLayer
from ds_moe_ext.planning.prices import AllReduce, Line, LinearCost
from ds_moe_ext.planning.probe import Payload, measure_carrier, quick_bench
from ds_moe_ext.planning.strategy import Destination, Job, Plan, Strategy
from ds_moe_ext.schedule.task import INTER, ChunkRange, Cut
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding, TwoDegrees
from ds_moe_ext.testing import dense_experts, relative_error
from tests.marks import slow
from tests.ranks import pool_of
from tests.strategies_for_tests import Copied

D, F = 8, 6
BY_NODES = [Way.BY_LEADERS, Way.BY_PLACES]


@dataclass(frozen=True)
class Case:
    world_size: int = 4
    ranks_per_node: int = 2
    etp_size: int = 1
    num_ep_ranks: int | None = None
    num_experts: int = 8
    tokens_W: tuple[int, ...] = (24,) * 8  # tokens of each rank
    hot: float = 0.0  # added to the first expert's logits
    degrees: tuple[int, int] = (1, 1)
    capacity_factor: float | None = None
    copied: bool = False
    revised: bool = False  # more replicas once the rows are known
    send_once: bool = False
    top_k: int = 2

    @property
    def sums_on_the_way(self) -> bool:
        """Whether by places a row goes once to a node, so that there are no relays."""
        return self.send_once and self.ranks_per_node < self.world_size

    @property
    def grid(self) -> Grid:
        num_ep_ranks = self.num_ep_ranks or self.world_size // self.etp_size
        return Grid(self.world_size, num_ep_ranks, self.etp_size)


CASES = {
    "two nodes": Case(),
    "four nodes": Case(world_size=8),
    "two nodes of four": Case(world_size=8, ranks_per_node=4),
    "chunks": Case(degrees=(3, 2)),
    "more chunks than tokens": Case(degrees=(4, 3), tokens_W=(2, 0, 1, 3)),
    "ragged": Case(world_size=8, ranks_per_node=4, tokens_W=(24, 7, 1, 30, 3, 24, 0, 9)),
    "one hot expert": Case(hot=50.0),
    "no rows at all": Case(tokens_W=(0,) * 4),
    "capacity": Case(capacity_factor=0.7, degrees=(2, 3)),
    "ETP groups of two": Case(world_size=8, ranks_per_node=4, etp_size=2, degrees=(2, 3)),
    "two grids": Case(world_size=8, num_ep_ranks=4),
    "once": Case(world_size=8, ranks_per_node=4, send_once=True, top_k=5, degrees=(2, 3)),
    "once, ETP groups of two": Case(world_size=8, ranks_per_node=4, etp_size=2, send_once=True),
    "once on one node": Case(ranks_per_node=4, send_once=True),
    "once, ragged": Case(tokens_W=(9, 0, 30, 1), send_once=True, top_k=4),
    "replicas": Case(copied=True),
    "replicas in chunks": Case(copied=True, degrees=(3, 2)),
    "revised copies": Case(world_size=8, ranks_per_node=4, copied=True, revised=True, hot=3.0),
    "one node": Case(ranks_per_node=4),
    "an EP rank a node": Case(etp_size=2),
    "unlike nodes": Case(ranks_per_node=3),
}
FLAT = {"one node", "once on one node", "an EP rank a node", "unlike nodes"}


@dataclass(frozen=True, kw_only=True)
class CopiedBy(Copied):
    """Copies, and a way of the rows."""

    way: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return (self.way,)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(replace(plan, way=self.way) for plan in super().plan(job))


def revised(held: Placement, rows_CE: np.ndarray, node_C: np.ndarray) -> Destination:
    """The busiest expert everywhere."""
    holds_EC = held.holds_EC.copy()
    holds_EC[rows_CE.sum(axis=0).argmax()] = True
    target = Placement(holds_EC)
    return Destination(target, NearestReplica(target, node_C))


def strategy_of(case: Case, way: Way, layout: ParallelLayout | None = None) -> Strategy:
    forward, backward = case.degrees
    if not case.copied:
        degree = TwoDegrees(forward=forward, backward=backward)
        esp = ExpertSharding(degree=degree, slice_gradients=False, all_to_all=way.value)
        return esp.over(ExpertParallel(send_once=case.send_once))
    num_ep_ranks = case.grid.num_ep_ranks
    take_back = Placement.block(case.num_experts, num_ep_ranks)
    chance = np.random.default_rng(0).random(take_back.holds_EC.shape) < 0.4
    target = Placement(take_back.holds_EC | chance)
    revise = None
    if case.revised and layout is not None:
        revise = partial(revised, target, node_C=layout.node_C)
    return CopiedBy(target=target, forward=forward, backward=backward, revise=revise, way=way)


def weights_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.num_experts)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_ED = rand(case.num_experts, D)
    gate_ED[0, -1] += case.hot  # the last input is always one
    return gate_ED, rand(case.num_experts, 2 * F, D), rand(case.num_experts, D, F)


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (2, case.tokens_W[rank], D)
    x, grad = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x[:, -1] = 1.0
    return x, grad


@contextmanager
def relays_counted() -> Iterator[list[int]]:
    """The hops of each relay that is run inside the block."""
    hops: list[int] = []
    run = Relay.run

    def counted(relay: Relay, rows_N: Tensor, channels: object) -> Tensor:
        hops.append(len(relay.itinerary.hops))
        return run(relay, rows_N, channels)  # type: ignore[arg-type]

    with mock.patch.object(Relay, "run", counted):
        yield hops


def _one_way(rank: int, case: Case, way: Way) -> tuple[list[Tensor], list[int]]:
    """Output, gradients of x, gate and experts; and hops of relays."""
    uses = strategy_of(case, way).uses()
    layout = ParallelLayout.build(case.grid, uses, case.ranks_per_node)
    strategy = strategy_of(case, way, layout)
    take_back = Placement.block(case.num_experts, case.grid.num_ep_ranks)
    (plan,) = strategy.plan(Job.at_start([take_back], layout.node_C))
    gate_ED, up, down = weights_of(case)
    shard = Shard((Along(0, num_blocks=2), Along(1)), layout.index("esp"), case.etp_size)
    parts = [shard.of(number, weight, first_dim=1) for number, weight in enumerate((up, down))]
    mine = take_back.experts_of(layout.index("ep"))
    layer = MoELayer(
        nn.ParameterList([gate_ED]),
        nn.ParameterList([part[expert] for expert in mine for part in parts]),
        gate=SoftmaxTopK(top_k=case.top_k),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        options=LayerOptions(capacity_factor=case.capacity_factor),
    )
    assert f"way {way.value}" in layer.routed.describe()
    if case.copied:
        layer.routed.allow_replicas((up[0].requires_grad_(), down[0].requires_grad_()))
    x, grad = tokens_of(case, rank)
    with relays_counted() as hops:
        y = layer(x.requires_grad_()).y
        torch.sum(y * grad).backward()
    grads = [p.grad for p in (x, *layer.gate_weights, *layer.expert_weights)]
    return [y.detach(), *grads], hops


def _all_ways(rank: int, world_size: int, case: Case) -> tuple[list[Tensor], dict[Way, list[int]]]:
    results = {way: _one_way(rank, case, way) for way in (Way.DIRECT, *BY_NODES)}
    direct, _ = results[Way.DIRECT]
    for way in BY_NODES:
        pairs = list(zip(results[way][0], direct))
        if case.sums_on_the_way and way is Way.BY_PLACES:
            assert max(relative_error(*pair) for pair in pairs) <= 1e-12
        else:
            assert all(torch.equal(*pair) for pair in pairs), way
    return direct, {way: hops for way, (_, hops) in results.items()}


GUARDED = ("four nodes", "two nodes of four", "chunks", "replicas", "once", "ETP groups of two")
"""By ragged rows, replicas in chunks, and rows sent once in ETP groups of two."""


@pytest.mark.parametrize("name", [slow(name) if name in GUARDED else name for name in CASES])
def test_every_way_is_the_direct_one(name: str) -> None:
    case = CASES[name]
    ranks = pool_of(case.world_size).run(_all_ways, case)
    weights = weights_of(case)
    for rank, ((y, x_grad, *_), hops) in enumerate(ranks):
        if case.capacity_factor is None:
            x, grad = tokens_of(case, rank)
            choice = SoftmaxTopK(top_k=case.top_k)(x.requires_grad_(), (weights[0],))
            dense = dense_experts(x, choice.expert_TK, choice.score_TK, *weights[1:])
            torch.sum(dense * grad).backward()
            assert relative_error(y, dense) <= 1e-12
            assert relative_error(x_grad, x.grad) <= 1e-12
        # Two all-to-alls a chunk in each direction; a leader has one hop more than the others.
        count = 0 if name in FLAT else 2 * sum(case.degrees)
        leads = rank % case.ranks_per_node < case.etp_size
        assert hops == {
            Way.DIRECT: [],
            Way.BY_LEADERS: [2 + leads] * count,
            Way.BY_PLACES: [2] * (0 if case.sums_on_the_way else count),
        }


# The pieces.


def layout_of(grid: Grid, rank: int, ranks_per_node: int) -> ParallelLayout:
    return ParallelLayout(grid, rank, tuple(r // ranks_per_node for r in range(grid.world_size)))


def test_lists_of_the_nodes() -> None:
    layout = layout_of(Grid(8, 8), 5, 4)
    assert layout.lists_along(WITHIN_NODES) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.lists_along(BETWEEN_NODES) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # EP ranks 01, 23, 45, 67: one rank of each exchanges rows.
    layout = layout_of(Grid(8, 4, 2), 5, 4)
    assert layout.lists_along(WITHIN_NODES) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.lists_along(BETWEEN_NODES) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert layout.nodes.node_P.tolist() == [0, 0, 1, 1]
    # Two grids of four.
    assert layout_of(Grid(8, 4), 5, 2).lists_along(BETWEEN_NODES) == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]


@pytest.mark.parametrize(
    ("grid", "ranks_per_node", "why"),
    [
        (Grid(4, 4), 4, "all EP ranks are on one node"),
        (Grid(8, 4), 4, "all EP ranks are on one node"),
        (Grid(4, 2, 2), 2, "every node has an EP rank"),
        (Grid(4, 4), 3, "nodes have 3, 1 EP ranks: not equally many"),
        (Grid(8, 8), 4, ""),
    ],
)
def test_why_no_way_leads_by_the_nodes(grid: Grid, ranks_per_node: int, why: str) -> None:
    layout = layout_of(grid, 0, ranks_per_node)
    assert layout.why_flat == why
    assert bool(layout.lists_along(BETWEEN_NODES)) == (not why)
    if why:
        channel = mock.sentinel.channel
        assert all(carrier_of(layout, INTER, way, channel) is None for way in BY_COST)


def _encoded(rank: int, world_size: int) -> None:
    """Rows that travel as halves in float32 come back by the nodes as they do directly."""
    uses = [("ep", INTER), *((axis, INTER) for axis in NODE_AXES)]
    layout = ParallelLayout.build(Grid(world_size, world_size), uses, 2)
    counts_CC = np.arange(world_size**2).reshape(world_size, world_size)
    num_rows = int(counts_CC[rank].sum())
    coding = Coding(lambda rows: rows.float() / 2, lambda arrived, like: 2 * arrived.to(like.dtype))
    rows_ND = torch.randn(num_rows, 3, dtype=torch.float64)
    arrived = {}
    for way in BY_COST:
        route = LayerRoute(
            cut=Cut.equal(num_rows, 1),
            target=Placement.block(world_size, world_size),
            top_k=1,
            by_key_N=torch.arange(num_rows),
            rows=RowSplits(
                counts_CC[rank][None],
                counts_CC[:, rank][None],
                counts_CC[:, rank].reshape(1, world_size, 1, 1),
            ),
            count_between=lambda: counts_CC[None],
        )
        wire = Wire.between(layout, INTER, torch.device("cpu"), way).through(coding)
        assert (wire.carrier is None) == (way is Way.DIRECT)
        arrived[way] = wire.out(rows_ND, ChunkRange(0, 1), route)
        back_ND = wire.take_back(arrived[way], ChunkRange(0, 1), route)
        assert torch.equal(back_ND, rows_ND.float().double())
    assert all(torch.equal(rows, arrived[Way.DIRECT]) for rows in arrived.values())


def test_encoded_rows_go_every_way() -> None:
    pool_of(4).run(_encoded)


def _measured(rank: int, world_size: int) -> Line:
    uses = [("ep", INTER), *((axis, INTER) for axis in NODE_AXES)]
    layout = ParallelLayout.build(Grid(world_size, world_size), uses, 2)
    carrier = Wire.between(layout, INTER, torch.device("cpu"), Way.BY_PLACES).carrier
    assert carrier is not None
    payload = Payload(4096, 64, torch.float32, 1, torch.float32)
    with relays_counted() as hops:
        line = measure_carrier(carrier, world_size, payload, quick_bench(torch.device("cpu")))
    assert len(hops) >= 4, "each size was sent"
    return line


def test_a_way_is_timed_alike_on_all_ranks() -> None:
    lines = pool_of(4).run(_measured)
    assert lines == lines[:1] * 4
    # 1 MiB a rank on one host: more than a microsecond, less than a second.
    assert 1e-6 < lines[0].alpha_s + 4096 * 64 * 4 * lines[0].beta_s < 1


# The strategy.


def esp(**keys: Any) -> Strategy:
    return ExpertSharding(**keys)


def job_of(ways: Sequence[Mapping[Way, LinearCost]]) -> Job:
    """One layer for each, whose other operations cost nothing."""
    take_back = Placement.block(4, 4)
    nothing = LinearCost(alpha_s=0.0, beta_s=0.0, n=1)
    free = LayerCosts(
        all_to_all=nothing, all_gather=nothing, reduce_scatter=nothing, expert=nothing
    )
    layers = tuple(MeasuredLayer(free, 0.0, 0, exchanges) for exchanges in ways)
    measured = Measured(layers, 0, AllReduce(1.0, 1.0), 4)
    job = Job.at_start([take_back] * len(layers), np.array([0, 0, 1, 1]))
    return replace(job, pipelines=measured)


def costs(direct_s: float, leaders_s: float, places_s: float) -> dict[Way, LinearCost]:
    seconds = (direct_s, leaders_s, places_s)
    return {way: LinearCost(alpha_s=s, beta_s=0.0, n=1) for way, s in zip(BY_COST, seconds)}


def test_plans_say_the_fastest_way() -> None:
    job = job_of([costs(1, 2, 3), costs(3, 2, 1), costs(3, 1, 2)])
    plans = esp().plan(job)
    assert [plan.way for plan in plans] == [Way.DIRECT, Way.BY_PLACES, Way.BY_LEADERS]
    text = "tokens are sent in 1 chunk forward and 1 chunk backward, between EP ranks by "
    assert esp().describe(job) == f"{text}direct, 2dh, 1dh all-to-alls"
    same = job_of([costs(3, 2, 1)] * 2)
    assert esp().describe(same) == f"{text}2dh all-to-alls"
    assert "all-to-all" not in esp().describe(job_of([{}]))
    host = HostSeconds(layer_s=1e-3, chunk_s=1.25e-4), HostSeconds(layer_s=1e-3, chunk_s=2e-3)
    plain = job_of([{}])
    assert plain.pipelines is not None
    on_device = replace(plain, pipelines=replace(plain.pipelines, issued=host))
    text = "1 chunk forward and 1 chunk backward (the host issues one in 0.12 and 2 ms)"
    assert text in esp().describe(on_device)


def test_plans_before_costs_are_known() -> None:
    job = replace(job_of([{}]), pipelines=None)
    ways = {name: esp(all_to_all=name).plan(job)[0].way.value for name in (None, *WAYS)}
    assert ways == {None: "direct", **{name: name for name in WAYS}}


@pytest.mark.parametrize(
    ("name", "remedy"), [("2d", "did you mean '2dh'?"), ("nccl", "known: 1dh, 2dh, deepep, direct")]
)
def test_unknown_ways_are_refused(name: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        ExpertSharding(all_to_all=name)
    assert str(caught.value) == (
        f"ds_moe_ext.esp.all_to_all is {name!r}, which is unknown; {remedy}"
    )
