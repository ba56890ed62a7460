# SPDX-License-Identifier: Apache-2.0
"""The price of a step, against seconds that were added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.exchange_costs import LinkPrices
from ds_moe_ext.planning.layer_pipelines import Placed
from ds_moe_ext.planning.layer_seconds import HostTimes, TaskCosts
from ds_moe_ext.planning.prices import AllReduce, Line, Prices
from ds_moe_ext.planning.step_price import Conditions, StepPrice, price_step
from ds_moe_ext.planning.strategy import CostGroup, Job, Plan, Strategy
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet

ROW_S, ROW_BYTES, COPY_S = 3.0, 10.0, 5.0
PRICES = Prices(
    row_s=ROW_S, row_bytes=ROW_BYTES, copy_s=COPY_S, inter_bytes_per_s=20.0, intra_bytes_per_s=5.0
)
SKEWED_CE = np.array([[4, 2], [6, 0]])  # EP rank 0 computes 10 rows, of which 6 come to it


def job_of(num_layers: int, num_ep_ranks: int = 2, *, node_size: int = 8, **given: Any) -> Job:
    owners = even_owners([num_ep_ranks] * num_layers, num_ep_ranks)
    cost_group = CostGroup(layers=tuple(range(num_layers)), prices=PRICES, expert_bytes=100)
    job = Job.at_start(owners, np.arange(num_ep_ranks) // node_size, (cost_group,))
    job = replace(
        job, window_s=(7.0,) * num_layers, back_window_s=(14.0,) * num_layers, free_bytes=10**9
    )
    return replace(job, **given)


def priced(
    strategy: Strategy, plans: list[Plan], job: Job, rows_CE: np.ndarray, **conditions: Any
) -> StepPrice:
    conditions = {"grid": Grid(len(job.node_C), len(job.node_C)), **conditions}
    rows = [rows_CE] * len(plans)
    return price_step(strategy, plans, job, rows, Conditions(**conditions))


def parts(price: StepPrice) -> float:
    return price.computed_s + price.imbalance_s + price.exposed_s + price.host_s + price.end_s


def test_expert_parallelism_is_a_sum() -> None:
    job = job_of(2)
    plans = [Plan.at_owner(owner) for owner in job.owners]
    price = priced(ExpertParallel(), plans, job, SKEWED_CE, head_s=1.0, end_s=2.0)
    between = 2 * (7 + 14) + 1 * (1 + 2)
    exchange = 6 * ROW_BYTES / 5.0
    assert price.step_s == pytest.approx(between + 2 * (10 * ROW_S + 4 * exchange) + 2)
    assert price.computed_s == pytest.approx(between + 2 * 6 * ROW_S)
    assert price.imbalance_s == pytest.approx(2 * 4 * ROW_S)
    assert price.exposed_s == pytest.approx(2 * 4 * exchange)
    assert price.host_s == 0
    assert price.balance == pytest.approx(10 / 6)
    assert parts(price) == pytest.approx(price.step_s)


def test_a_node_s_card_carries_what_leaves_the_node() -> None:
    job = job_of(1, node_size=1)
    prices = replace(PRICES, inter_bytes_per_s=1.0)
    job = replace(job, cost_groups=(replace(job.cost_groups[0], prices=prices),))
    price = priced(ExpertParallel(), [Plan.at_owner(job.owners[0])], job, SKEWED_CE)
    assert price.exposed_s == pytest.approx(4 * 6 * ROW_BYTES / 1.0)


@pytest.mark.parametrize(("num_experts", "top_k", "of_each"), [(64, 8, 5.43), (4, 2, 5 / 3)])
def test_tokens_sent_once_are_fewer(num_experts: int, top_k: int, of_each: float) -> None:
    """Rows of a token, over all EP ranks, one that stays included; balanced, so that all travel
    alike. Of two among 4 experts on 2 ranks both are on one in a third of all cases."""
    num_ep_ranks = num_experts // (8 if top_k == 8 else 2)
    cost_group = CostGroup(layers=(0,), prices=PRICES, expert_bytes=100, top_k=top_k)
    job = job_of(1, num_ep_ranks)
    job = replace(
        Job.at_start(even_owners([num_experts], num_ep_ranks), job.node_C, (cost_group,)),
        window_s=(7.0,),
        back_window_s=(14.0,),
    )
    rows_CE = np.full((num_ep_ranks, num_experts), 3 * top_k)
    all_rows, once = (
        priced(own, list(own.plan(job)), job, rows_CE)
        for own in (ExpertParallel(), ExpertParallel(send_once=True))
    )
    assert top_k * once.exposed_s / all_rows.exposed_s == pytest.approx(of_each, rel=1e-3)
    assert once.computed_s == all_rows.computed_s


def copied(job: Job, layer: int) -> Plan:
    """Expert 0 on both EP ranks: each keeps its own rows."""
    owner = job.owners[layer]
    target = owner.with_replicas(np.array([[False, True], [False, False]]))
    return Plan(owner, target, LocalElseOwner(owner, target))


def test_replicas_are_hidden_by_what_the_host_computes_before() -> None:
    job = job_of(1)
    price = priced(FullySharded(), [copied(job, 0)], job, SKEWED_CE)
    # EP rank 0 keeps 4 rows and is sent none of expert 0; expert 1 has 2 rows of EP rank 0 for EP
    # rank 1.
    exchange = 2 * ROW_BYTES / 5.0
    assert price.step_s == pytest.approx(7 + 14 + 8 * ROW_S + 4 * exchange)
    slow = replace(job, cost_groups=(replace(job.cost_groups[0], copy_latency_s=7.0),))
    # 12 seconds of copy behind 7 and an exchange of 4, of which the link they share is halved.
    late = priced(FullySharded(), [copied(slow, 0)], slow, SKEWED_CE)
    assert late.step_s > price.step_s


def everywhere(job: Job, layer: int) -> Plan:
    """Each EP rank has both experts: none has a row to send."""
    owner = job.owners[layer]
    target = owner.with_replicas(np.ones_like(owner.holds_EC))
    return Plan(owner, target, LocalElseOwner(owner, target))


def test_nothing_is_exchanged_where_all_have_all() -> None:
    """But for the counts."""
    job = job_of(1)
    tasks, plans = TaskCosts(exchange_start_s=1.0), [everywhere(job, 0)]
    price = priced(FullySharded(), plans, job, SKEWED_CE, tasks=tasks)
    assert price.step_s == pytest.approx(7 + 14 + 6 * ROW_S + 1.0)
    links = LinkPrices(
        near_bytes_per_s=100.0, far_bytes_per_s=100.0, node_bytes_per_s=100.0, start_s=2.0
    )
    known = replace(job, cost_groups=(replace(job.cost_groups[0], links=links),))
    price = priced(FullySharded(), plans, known, SKEWED_CE, tasks=tasks)
    assert price.step_s == pytest.approx(7 + 14 + 6 * ROW_S + 2.0)
    forecast = FullySharded().forecast(known, 0, plans[0], SKEWED_CE)
    assert forecast is not None and forecast.exchange_s == 0
    none_CE = np.array([[4, 0], [0, 6]])  # by chance none travels, but EP ranks exchange
    forecast = FullySharded().forecast(known, 0, copied(job, 0), none_CE)
    assert forecast is not None and forecast.exchange_s == pytest.approx(4 * 2.0)


def test_later_micro_batches_move_no_replicas() -> None:
    job = job_of(1, cost_groups=(replace(job_of(1).cost_groups[0], copy_latency_s=100.0),))
    one, three = (
        priced(FullySharded(), [copied(job, 0)], job, SKEWED_CE, micro_batches=number)
        for number in (1, 3)
    )
    alone = 7 + 14 + 8 * ROW_S + 4 * 2 * ROW_BYTES / 5.0
    assert three.step_s == pytest.approx(one.step_s + 2 * alone)
    assert parts(three) == pytest.approx(three.step_s)


def test_a_host_that_is_slower_than_devices_is_what_a_step_takes() -> None:
    job = job_of(3)
    plans = [Plan.at_owner(owner) for owner in job.owners]
    names = ("attention", "order", "dispatch", "expert", "combine", "restore")
    host = HostTimes(forward=dict.fromkeys(names, 100.0), backward=dict.fromkeys(names, 50.0))
    price = priced(ExpertParallel(), plans, job, SKEWED_CE, host=host)
    # ORDER has no adjoint; what leads to the first layer is one ATTENTION more.
    issued = 100 * (3 * 6 + 1) + 50 * (3 * 5 + 1)
    assert price.step_s == pytest.approx(issued, rel=0.05)
    assert parts(price) == pytest.approx(price.step_s)
    quick = replace(host, forward={}, backward={})
    assert priced(ExpertParallel(), plans, job, SKEWED_CE, host=quick).host_s == 0


def test_the_host_waits_for_counts() -> None:
    """What it issues behind them comes too late where the exchange of counts is slow."""
    job = job_of(1)
    plans = [Plan.at_owner(job.owners[0])]
    tasks = TaskCosts(exchange_start_s=1.0)
    host = HostTimes(forward={"dispatch": 4.0}, backward={})
    price = priced(ExpertParallel(), plans, job, SKEWED_CE, tasks=tasks, host=host)
    without = priced(ExpertParallel(), plans, job, SKEWED_CE, tasks=tasks)
    assert price.step_s == pytest.approx(without.step_s + 4)


def test_chunks_hide_rows_behind_experts_and_cost_a_start_each() -> None:
    job = job_of(1)
    whole = Plan.at_owner(job.owners[0])
    cut = replace(whole, forward_degree=2, backward_degree=2)
    esp = ExpertSharding().over(ExpertParallel())
    one, two = (priced(esp, [plan], job, SKEWED_CE) for plan in (whole, cut))
    # Rows take 12 s a way, experts 10 and 20: 34 and 44 s become 4 x 6, and 6 + 20 + 6.
    assert one.step_s - two.step_s == pytest.approx((34 - 24) + (44 - 32))
    starts = TaskCosts(exchange_start_s=50.0)
    one, two = (priced(esp, [plan], job, SKEWED_CE, tasks=starts) for plan in (whole, cut))
    assert two.step_s > one.step_s


def test_split_ep_ranks_gather_rows_and_scatter_sums() -> None:
    job = job_of(1)
    tasks = TaskCosts(etp_gather=Line(alpha_s=1.0), etp_scatter=Line(alpha_s=2.0))
    plan = Plan.at_owner(job.owners[0])
    esp = ExpertSharding().over(ExpertParallel())
    whole, split = (
        priced(esp, [plan], job, SKEWED_CE, tasks=tasks, grid=Grid(2 * size, 2, size))
        for size in (1, 2)
    )
    assert split.step_s == pytest.approx(whole.step_s + 2 * (1 + 2))


def test_reductions_beside_a_layer_take_time_where_nothing_hides_them() -> None:
    job = job_of(1)
    tasks = TaskCosts(all_reduce=AllReduce(0.0, 1.0))
    plan = Plan.at_owner(job.owners[0])
    sliced = replace(plan, reductions=Placed(within_moe=(3,)))
    esp = ExpertSharding().over(ExpertParallel())
    short, long = (priced(esp, [each], job, SKEWED_CE, tasks=tasks) for each in (plan, sliced))
    assert short.step_s <= long.step_s <= short.step_s + 3


def test_experts_take_no_less_than_their_weights_take_to_read() -> None:
    job = job_of(1)
    plans = [Plan.at_owner(job.owners[0])]
    price = priced(ExpertParallel(), plans, job, SKEWED_CE, tasks=TaskCosts(weight_s=1000.0))
    assert price.step_s == pytest.approx(7 + 14 + 3 * 1000 + 4 * 6 * ROW_BYTES / 5.0)
    assert price.imbalance_s == 0


def test_unlike_ep_ranks_take_their_own_seconds_for_a_row() -> None:
    job = job_of(1)
    cost_group = replace(job.cost_groups[0], row_s_C=(1.0, 30.0))
    job = replace(job, cost_groups=(cost_group,))
    price = priced(ExpertParallel(), [Plan.at_owner(job.owners[0])], job, SKEWED_CE)
    assert price.step_s == pytest.approx(7 + 14 + 2 * 30 + 4 * 6 * ROW_BYTES / 5.0)


@pytest.mark.parametrize("strategy", [ExpertParallel(), FullySharded(), ProProphet()])
def test_classes_stand_for_many_ep_ranks(strategy: Strategy) -> None:
    """Where a few stand for all, the price is hardly another: the busiest is among them."""
    random = np.random.default_rng(0)
    job = job_of(3, 32, window_s=(0.01,) * 3, back_window_s=(0.02,) * 3)
    prices = replace(PRICES, row_s=1e-4, copy_s=1e-3, inter_bytes_per_s=1e6, intra_bytes_per_s=1e6)
    share_E = random.dirichlet(np.full(32, 0.3))
    rows_CE = random.multinomial(400, share_E, size=32)
    job = replace(
        job, cost_groups=(replace(job.cost_groups[0], prices=prices),), rows=(rows_CE,) * 3
    )
    plans = list(strategy.plan(job))
    four, eight, all_of_them = (
        priced(strategy, plans, job, rows_CE, classes=classes) for classes in (4, 8, 32)
    )
    assert four.step_s == pytest.approx(all_of_them.step_s, rel=0.02)
    assert eight.step_s == pytest.approx(all_of_them.step_s, rel=0.02)


def test_a_plan_of_its_own_owners() -> None:
    """Owners need not be even: the EP rank without experts only sends."""
    job = job_of(1)
    owner = Placement.owned_by(np.array([0, 0]), 2)
    price = priced(ExpertParallel(), [Plan.at_owner(owner)], job, SKEWED_CE)
    assert price.balance == pytest.approx(2)
    assert price.exposed_s == pytest.approx(4 * 6 * ROW_BYTES / 5.0)


def test_where_layers_run_again_rows_travel_again() -> None:
    job = job_of(1, back_window_s=(21.0,))
    job = replace(
        job, cost_groups=(replace(job.cost_groups[0], prices=replace(PRICES, row_s=4.0)),)
    )
    plans = [Plan.at_owner(job.owners[0])]
    price = priced(ExpertParallel(), plans, job, SKEWED_CE, tasks=TaskCosts(backward_rounds=3))
    assert price.step_s == pytest.approx(7 + 21 + 10 * 4 + 6 * 6 * ROW_BYTES / 5.0)
    host = HostTimes(
        forward={"attention": 1.0, "order": 2.0, "dispatch": 4.0, "join": 8.0},
        backward={"dispatch": 16.0, "send_to_owner": 32.0},
    )
    again = {"attention": 3.0, "dispatch": 20.0, "send_to_owner": 32.0}
    assert host.with_forward_again().backward == again
    assert host.with_forward_again().forward == host.forward
