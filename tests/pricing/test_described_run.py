# SPDX-License-Identifier: Apache-2.0
"""What a run costs by its cluster's file and its model's sizes, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link, Product, Products
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.steps.costs import Links
from ds_moe_ext.planning.candidates import Reached, copied_bytes
from ds_moe_ext.planning.described_run import RUNTIME, DescribedRun, MemoryUse
from ds_moe_ext.planning.model_shape import OnItsWay, Training
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.planning.zebra_price import joined
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet
from tests.pricing.models import cluster, tiny

# Of a layer: attention 4 x 4 x 4, router 4 x 4, norms 2 x 4; of an expert 3 x 4 x 8.
DENSE, EXPERT, EMBEDDINGS = 64 + 16 + 8, 96, 2 * 10 * 4
ALL_DENSE = 2 * DENSE + EMBEDDINGS
TOKENS = 6


def run_on(grid: Grid, hardware: Hardware | None = None, **given: Any) -> DescribedRun:
    training = Training(num_ranks=grid.world_size, length=TOKENS, **given)
    return DescribedRun(hardware=hardware or cluster(), shape=tiny(), training=training, grid=grid)


def test_what_lies_between_experts() -> None:
    run = run_on(Grid(4, 4))
    scores = TOKENS / 2 * (4 + 4)
    window_s = TOKENS * ((DENSE + scores) / 1000 + 16 * 4 * 2 / 1e4)
    assert run.window_s == pytest.approx((window_s, window_s))
    assert run.head_s == pytest.approx(TOKENS * (10 * 4 / 1000 + 10 * 4 * 2 / 1e4))
    job = run.job((), run.memory(0))
    assert job.back_window_s == pytest.approx((2 * window_s,) * 2)
    again = run_on(Grid(4, 4), recomputes=True)
    assert again.job((), run.memory(0)).back_window_s == pytest.approx((3 * window_s,) * 2)


def test_rows() -> None:
    prices = run_on(Grid(4, 4)).cost_group.prices
    assert prices.row_s == pytest.approx(3 * EXPERT / 1000)
    assert prices.row_bytes == 4 * 2
    assert (prices.intra_bytes_per_s, prices.inter_bytes_per_s) == (500, 200)
    split = run_on(Grid(4, 2, 2), recomputes=True).cost_group.prices
    assert split.row_s == pytest.approx(4 * EXPERT / 2 / 1000)
    assert split.intra_bytes_per_s == 2 * 500


PLAIN_ROWS, PLAIN_COPY = RowBytes(between=8.0, within=8.0), 2.0 * EXPERT


def planned(
    row_bytes: float, replica_bytes: float, speed: float
) -> tuple[DescribedRun, list[Plan]]:
    """Prophet's plans where rows and replicas weigh so much as they travel."""
    rows_CE = np.array([[12, 3, 3, 3], [240, 9, 12, 18], [6, 15, 6, 27], [9, 240, 27, 3]])
    way, owner = OnItsWay(RowBytes(row_bytes, 8.0), replica_bytes), Placement.block(4, 4)
    run = replace(run_on(Grid(4, 4), cluster(speed)), on_its_way=way)
    job = run.job([owner, owner], run.memory(0))
    job = replace(job, rows=(rows_CE, rows_CE), free_bytes=2**20)
    return run, list(ProProphet(rematerialize=True).plan(job))


def replicas_of(plan: Plan) -> int:
    return int((plan.target.holds_EC & ~plan.owner.holds_EC).sum())


def test_rows_that_travel_lighter_need_fewer_replicas() -> None:
    """Prophet copies experts where rows are dear to send, and not where they weigh a quarter."""
    plans = [planned(row_bytes, PLAIN_COPY, 1e5)[1] for row_bytes in (8.0, 8 / 4)]
    assert [replicas_of(first) for first, _ in plans] == [6, 0]


def test_replicas_that_travel_lighter_are_made_sooner_and_lie_in_memory_as_they_are() -> None:
    """Where rows weigh a quarter replicas pay again once they do too."""
    (_, plain), (run, coded) = (planned(2.0, size, 1e5) for size in (PLAIN_COPY, PLAIN_COPY / 4))
    assert [replicas_of(first) for first, _ in (plain, coded)] == [0, 6]
    most = [int((plan.target.holds_EC & ~plan.owner.holds_EC).sum(axis=0).max()) for plan in coded]
    assert copied_bytes(coded, run) == 2 * sum(most) * PLAIN_COPY  # gradients are as large


def test_new_owners_cost_the_same_however_replicas_travel() -> None:
    """What moves is not encoded: weights in 32 bits and two states of each, over a node's cards."""
    for replica_bytes in (PLAIN_COPY, PLAIN_COPY / 4):
        run = replace(run_on(Grid(4, 4)), on_its_way=OnItsWay(PLAIN_ROWS, replica_bytes))
        for cost_group in (run.cost_group, replace(run.cost_group, copy_bytes_per_s=200.0)):
            costs = FullySharded()._move_costs(cost_group)
            assert costs.expert_s == pytest.approx(12 * EXPERT / 200)


def test_rows_within_an_ep_rank_have_a_weight_of_their_own() -> None:
    plain = run_on(Grid(4, 2, 2))
    coded = replace(plain, on_its_way=OnItsWay(RowBytes(between=4.0, within=8.0), EXPERT))
    rows = [np.full((2, 4), 30)] * 2
    (was, *_), (now, *_) = (run.pipelines(rows).layers for run in (plain, coded))
    assert now.costs.all_to_all != was.costs.all_to_all
    assert now.costs.all_gather == was.costs.all_gather
    assert coded.cost_group.etp_row_bytes == plain.cost_group.etp_row_bytes == 8.0


@pytest.mark.parametrize(
    ("grid", "copy_s"),
    [
        (Grid(4, 4), 2 * EXPERT / 200),  # over a node's cards
        (Grid(4, 2), 2 * EXPERT / 500),  # within a node
        (Grid(4, 2, 2), 2 * EXPERT / 200),  # both halves over a node's cards
        (Grid(8, 2, 2), 2 * EXPERT / 2 / 500),  # within a node, each half over a link of its own
    ],
)
def test_replicas(grid: Grid, copy_s: float) -> None:
    hardware = cluster(ranks_per_node=4 if grid.world_size == 8 else 2)
    cost_group = run_on(grid, hardware).cost_group
    assert cost_group.prices.copy_s == pytest.approx(copy_s)
    # A run on a cluster that is described reckons likewise.
    assert cost_group.replica_bytes / Links.of(hardware, grid).copy.bytes_per_s == pytest.approx(
        copy_s
    )


def test_the_end_of_a_step() -> None:
    # A sum over two nodes crosses each card twice a byte, halved, and all ranks share it.
    dense_s = ALL_DENSE * 2 * 2 * 0.5 / 200
    stepped = ALL_DENSE / 4 + 2 * EXPERT
    assert run_on(Grid(4, 4)).end_s(0) == pytest.approx(dense_s + 30 * stepped / 1e4)
    assert run_on(Grid(4, 4)).end_s(ALL_DENSE) == pytest.approx(30 * stepped / 1e4)
    hidden = run_on(Grid(4, 4), hides_gradients=True)
    assert hidden.end_s(0) == pytest.approx(30 * stepped / 1e4)


def test_gradients_of_experts_that_have_several_owners() -> None:
    run = run_on(Grid(4, 2), hides_gradients=True)
    held = 2 * 2 * EXPERT
    # Two ranks of a node send at once, each a ring of two: its bytes once there and once back.
    rings_s = 2 * held * 2 * 2 * 0.5 / 200
    stepped = ALL_DENSE / 4 + held / 2
    # All but those of one of two layers are hidden.
    assert run.end_s(0) == pytest.approx(rings_s / 2 + 30 * stepped / 1e4)


def test_of_owners_on_one_node_one_sends_to_others() -> None:
    hardware = cluster(ranks_per_node=4)
    run = run_on(Grid(8, 2), hardware, hides_gradients=True)
    held = 2 * 2 * EXPERT
    rings_s = 2 * held * 2 * 2 * 0.75 / 200  # four owners each, two rings
    stepped = ALL_DENSE / 8 + held / 4
    assert run.end_s(0) == pytest.approx(rings_s / 2 + 30 * stepped / 1e4)


def test_memory() -> None:
    dense, rows = 16 * TOKENS * 8, 5 * (8 + 3 * 8) * 2 + TOKENS * 2 * 8
    logits = TOKENS * 10 * 6
    assert run_on(Grid(4, 4)).memory(5) == MemoryUse(
        weights=2 * (ALL_DENSE + 2 * EXPERT),
        gradients=2 * (ALL_DENSE + 2 * EXPERT),
        optimizer=12 * (ALL_DENSE / 4 + 2 * EXPERT),
        activations=2 * (dense + rows) + logits,
        replicas=0.0,
        runtime=RUNTIME,
    )
    again = run_on(Grid(4, 4), recomputes=True).memory(5)
    assert again.activations == 2 * TOKENS * 8 + dense + rows + logits


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)],
)
def test_zero_divides(stage: int, weights: int, gradients: int, optimizer: int) -> None:
    """Dense weights over all ranks, experts over their owners."""
    held = 4 * EXPERT  # two of each layer
    use = run_on(Grid(4, 2), zero_stage=stage).memory(0)
    owners = {1: 1, 4: 2}
    assert use.weights == 2 * (ALL_DENSE / weights + held)
    assert use.gradients == 2 * (ALL_DENSE / gradients + held / owners[gradients])
    assert use.optimizer == 12 * (ALL_DENSE / optimizer + held / owners[optimizer])


def test_states_in_host_memory_take_none_of_the_device() -> None:
    whole = run_on(Grid(4, 2), zero_stage=3).memory(0)
    in_part = run_on(Grid(4, 2), zero_stage=3, offloaded_states=0.75).memory(0)
    assert in_part.optimizer == whole.optimizer / 4
    assert in_part.total == whole.total - 0.75 * whole.optimizer


def test_zero_3_has_one_layer_whole_where_layers_run_again() -> None:
    use = run_on(Grid(4, 2), zero_stage=3, recomputes=True).memory(0)
    held = 2 * EXPERT + 2 * EXPERT / 2  # of two layers, each expert with two owners
    assert use.weights == 2 * (ALL_DENSE / 4 + held)


def test_unlike_devices() -> None:
    fast, slow = cluster(1000.0), cluster(250.0, inter=Link(bytes_per_s=100.0))
    both = joined([fast, slow])
    training = Training(num_ranks=8, length=TOKENS)
    grids = (Grid(8, 4), Grid(8, 8), Grid(8, 4, 2))
    runs = [
        DescribedRun(hardware=both, shape=tiny(), training=training, grid=grid, mixed=(fast, slow))
        for grid in grids
    ]
    one_row_s = 3 * EXPERT / 1000
    # Of two grids the one on slow devices; of one grid half of the EP ranks.
    assert runs[0].cost_group.row_s_C == ()
    assert runs[0].cost_group.prices.row_s == pytest.approx(4 * one_row_s)
    assert runs[1].cost_group.row_s_C == pytest.approx([one_row_s] * 4 + [4 * one_row_s] * 4)
    assert runs[2].cost_group.row_s_C == pytest.approx([one_row_s / 2] * 2 + [2 * one_row_s] * 2)
    assert runs[1].cost_group.prices.inter_bytes_per_s == 100
    assert np.array_equal(runs[1].node_C, [0, 0, 1, 1, 2, 2, 3, 3])
    assert runs[1].product.multiply_adds_per_s == 250
    with pytest.raises(ValueError, match="nodes of 2 and 4 ranks cannot be priced together"):
        joined([fast, cluster(ranks_per_node=4)])


def test_what_is_reached_of_a_datasheet() -> None:
    measured = Product(multiply_adds_per_s=7.0, start_s=1.0, r_squared=1.0)
    device = Device(
        name="it",
        memory_bytes_per_s=100.0,
        flops_per_s=Flops(bf16=2000.0, fp16=2000.0),
        products=Products(fp16=measured),
    )
    link = Link(bytes_per_s=10.0, latency_s=1.0, r_squared=0.999)
    hardware = replace(cluster(), device=device, intra=link)
    found = Reached(products=0.5, memory=0.25, links=0.1, start_s=2.0).of(hardware)
    assert found.device.product("bf16") == Product(multiply_adds_per_s=500.0)
    assert found.device.product("fp16") == measured
    assert found.device.product("fp32") is None
    assert found.device.memory_bytes_per_s == 25
    assert found.intra == link
    assert found.inter == Link(bytes_per_s=20.0, latency_s=2.0)
    with pytest.raises(ValueError, match=r"links is 1.5; a part is above 0, at most 1"):
        Reached(links=1.5)


def test_what_a_file_lacks_is_named() -> None:
    no_rate = replace(cluster(), device=Device(name="it", memory_bytes_per_s=1.0))
    with pytest.raises(ValueError, match=r"multiplies in bf16; add 'device.flops_per_s.bf16'"):
        _ = run_on(Grid(4, 4), no_rate).window_s
    no_memory = replace(cluster(), device=Device(name="it", flops_per_s=Flops(bf16=1.0)))
    with pytest.raises(ValueError, match=r"add 'device.memory_bytes_per_s'"):
        _ = run_on(Grid(4, 4), no_memory).window_s
