# SPDX-License-Identifier: Apache-2.0
"""The strategy ``prophet`` without ranks: its plans, how they follow each other, its schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.described_run import copied_bytes_C
from ds_moe_ext.planning.exchange_costs import ExchangeFit, LinkPrices, Way
from ds_moe_ext.planning.layer_costs import BlockPrices, placement_seconds
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.prices import Prices
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, CostGroup, Job, LayerContext, Plan
from ds_moe_ext.schedule import orders
from ds_moe_ext.schedule.task import (
    COMBINE,
    DISPATCH,
    EXPERT,
    HAVE_AGAIN,
    JOIN,
    LAUNCH,
    ORDER,
    PLAN,
    RECALL,
    RESTORE,
    SEND_TO_OWNER,
    Op,
    Schedule,
)
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet
from ds_moe_ext.strategies.settings import read_settings

NUM_LAYERS, NUM_EP_RANKS, NUM_EXPERTS = 3, 4, 8
OWNERS = (Placement.block(NUM_EXPERTS, NUM_EP_RANKS),) * NUM_LAYERS
ROWS_ILCE = zipf_loads((12, NUM_LAYERS, NUM_EP_RANKS, NUM_EXPERTS), rows=200, skew=1.2, seed=1)


def job_of(rows_LCE: np.ndarray, *, window_s: float = 0.02) -> Job:
    """After costs were measured: replicas are cheap enough to pay, and dear enough to be cut."""
    prices = Prices(
        row_s=1e-4, row_bytes=100.0, copy_s=1e-2, inter_bytes_per_s=1e6, intra_bytes_per_s=1e6
    )
    cost_group = CostGroup(layers=tuple(range(NUM_LAYERS)), prices=prices, expert_bytes=10_000)
    windows_s = (window_s,) * NUM_LAYERS
    job = Job.at_start(OWNERS, np.zeros(NUM_EP_RANKS, dtype=np.int64), [cost_group])
    return replace(
        job,
        rows=tuple(rows_LCE),
        window_s=windows_s,
        back_window_s=windows_s,
        free_bytes=10**9,
    )


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    ("keys", "layers_in_memory"),
    [
        ({}, (2, 2)),  # too little to keep them
        ({"scheduler": False}, (1, 1)),
        ({"rematerialize": False}, (NUM_LAYERS, 2)),
        ({"planner": "shadow"}, (2, 2)),
        ({"share": "priced"}, (2, 2)),
    ],
)
def test_no_more_is_copied_than_fits(
    keys: dict[str, Any], layers_in_memory: tuple[int, int], accumulates: bool
) -> None:
    """Of all plans that follow each other, too."""
    held, reduced = layers_in_memory
    each = (held + (held if accumulates else reduced)) * 10_000
    plenty = job_of(ROWS_ILCE[0])
    for num_replicas in range(3):
        job = replace(plenty, free_bytes=(num_replicas + 1) * each - 1, accumulates=accumulates)
        strategy = ProProphet(**keys)
        assert f"a rank has memory for {num_replicas} replicas of a layer" in strategy.describe(job)
        plans = strategy.plan(job)
        for rows_LCE in ROWS_ILCE[1:4]:
            most = [int((p.target.holds_EC & ~OWNERS[0].holds_EC).sum(axis=0).max()) for p in plans]
            assert max(most) <= num_replicas
            assert max(most) > 0 or num_replicas == 0
            expert_bytes = [10_000] * NUM_LAYERS
            taken_C = copied_bytes_C(plans, expert_bytes, accumulates=accumulates)
            assert taken_C.max() <= job.free_bytes
            assert all(p.successor is not None for p in plans)
            plans = tuple(p.successor(rows_CE) for p, rows_CE in zip(plans, rows_LCE))


def test_replicas_are_kept_where_there_is_room_for_twice_as_many() -> None:
    job = job_of(ROWS_ILCE[0])
    wanted = ProProphet(rematerialize=False, repair=0).plan(job)
    twice = 2 * max(int((p.target.holds_EC > p.owner.holds_EC).any(axis=1).sum()) for p in wanted)
    assert 0 < twice < NUM_EXPERTS
    all_kept = twice * (NUM_LAYERS + 2) * 10_000  # with the gradients of two layers
    for spare, frees in ((0, False), (-1, True)):
        here = replace(job, free_bytes=all_kept + spare)
        strategies = ProProphet(repair=0), ProProphet(rematerialize=frees, repair=0)
        own, given = (strategy.plan(here) for strategy in strategies)
        assert all(map(same, own, given)) and any(plan.has_replicas for plan in own)
        assert {plan.rematerialize for plan in own if plan.has_replicas} == {frees}
        after = [p.successor(rows_CE) for p, rows_CE in zip(own, ROWS_ILCE[1]) if p.successor]
        assert {plan.rematerialize for plan in after if plan.has_replicas} == {frees}
        text = "freed after forward" if frees else "kept until backward"
        assert ProProphet(repair=0).describe(here).endswith(text)


def same(ours: Plan, theirs: Plan) -> bool:
    return (
        np.array_equal(ours.target.holds_EC, theirs.target.holds_EC)
        and ours.carried == theirs.carried
        and ours.rematerialize == theirs.rematerialize
    )


# One plan after another.


def test_nothing_is_copied_before_costs_are_known() -> None:
    job = Job.at_start(OWNERS, np.zeros(NUM_EP_RANKS, dtype=np.int64))
    plans = ProProphet().plan(replace(job, rows=tuple(ROWS_ILCE[0])))
    assert not any(plan.has_replicas or plan.successor for plan in plans)


def test_who_has_room_for_all_that_is_elsewhere_sets_no_limit() -> None:
    """An EP rank has two experts of eight at the owner, so that six replicas are all there can
    be."""
    job = job_of(ROWS_ILCE[0])
    cheap = replace(job.cost_groups[0], prices=replace(job.cost_groups[0].prices, copy_s=1e-9))
    strategy = ProProphet(rematerialize=True, planner="shadow", repair=0)  # copies all but one
    for num_fitting, num_copied in ((5, 5), (6, NUM_EXPERTS - 1)):
        free_bytes = num_fitting * 4 * 10_000  # with gradients, of two layers
        plans = strategy.plan(replace(job, cost_groups=(cheap,), free_bytes=free_bytes))
        moved = [(p.target.holds_EC > p.owner.holds_EC).any(axis=1).sum() for p in plans]
        assert max(moved) == num_copied


def test_a_plan_that_frees_does_not_stay_where_replicas_are_kept() -> None:
    job = job_of(ROWS_ILCE[0])
    freed, kept = (ProProphet(rematerialize=frees).plan(job) for frees in (True, False))
    for present, frees in ((freed, True), (kept, False)):
        strategy = ProProphet(rematerialize=frees)
        assert all(map(same, strategy.plan(replace(job, present=present)), present))
        anew = ProProphet(rematerialize=not frees).plan(replace(job, present=present))
        assert {plan.rematerialize for plan in anew if plan.has_replicas} == {not frees}


def test_a_successor_is_the_plan_by_the_rows_of_the_step() -> None:
    """Property 13: with frequency 1 each step is planned by the step before; and nothing but the
    rows counts (12), not what was planned before."""
    strategy = ProProphet(frequency=1)
    plans = strategy.plan(job_of(ROWS_ILCE[0]))
    assert all(plan.has_replicas for plan in plans)
    for rows_LCE in ROWS_ILCE[1:]:
        plans = tuple(followed(plan, rows_CE) for plan, rows_CE in zip(plans, rows_LCE))
        assert all(map(same, plans, strategy.plan(job_of(rows_LCE))))


def test_a_plan_stays_until_another_is_faster_by_the_model() -> None:
    """With the scheduler, where nobody says how long: searches end where EP ranks are balanced,
    which may be before a layer is as fast as with the replicas that it has."""
    keys = {"balance": 3.0, "share": "paper"}
    each_step, stays = ProProphet(frequency=1, **keys), ProProphet(**keys)
    num_stayed = 0
    for layer in range(NUM_LAYERS):
        anew, plan = (each.plan(job_of(ROWS_ILCE[0]))[layer] for each in (each_step, stays))
        for rows_LCE in ROWS_ILCE[1:]:
            rows_CE, before = rows_LCE[layer], plan
            anew, plan = followed(anew, rows_CE), followed(plan, rows_CE)
            then, now = (modelled_s(each, rows_CE) for each in (before, anew))
            wanted = before if then <= now and before.has_replicas else anew
            assert np.array_equal(plan.target.holds_EC, wanted.target.holds_EC)
            assert plan.predicted_CE is rows_CE
            num_stayed += then < now and wanted is before
    assert num_stayed


def modelled_s(plan: Plan, rows_CE: np.ndarray) -> float:
    prices = BlockPrices(
        row_s=1e-4 / 3,
        row_bytes=100.0,
        bytes_per_s=1e6,
        weight_bytes=10_000,
        gradient_bytes=10_000,
        copy_bytes_per_s=1e6,
        forward_gap_s=0.02,
        backward_gap_s=0.02,
        is_scheduled=True,
        gathers_again=True,
    )
    return placement_seconds(plan.owner, plan.target, rows_CE, prices=prices).step_s


def test_a_plan_that_stayed_is_known_to_a_job() -> None:
    """Where all layers are planned together, as under ``auto``."""
    plans = ProProphet().plan(job_of(ROWS_ILCE[0]))
    for rows_LCE in ROWS_ILCE[1:]:
        one_by_one = [followed(plan, rows_CE) for plan, rows_CE in zip(plans, rows_LCE)]
        plans = ProProphet().plan(replace(job_of(rows_LCE), present=plans))
        assert all(map(same, plans, one_by_one))


def followed(plan: Plan, rows_CE: np.ndarray) -> Plan:
    assert plan.successor is not None
    return plan.successor(rows_CE)


@pytest.mark.parametrize("frequency", [2, 3, 5])
def test_a_plan_is_kept_for_so_many_steps(frequency: int) -> None:
    """Property 13: as long as EP ranks stay balanced under it, which is reported of any rows
    here."""
    strategy = ProProphet(frequency=frequency, planner="shadow", balance=1e9)
    (plan, *_) = strategy.plan(job_of(ROWS_ILCE[0]))
    targets = [plan.target]
    for rows_LCE in ROWS_ILCE[1:]:
        plan = followed(plan, rows_LCE[0])
        targets.append(plan.target)
    changes = [step for step in range(1, 12) if targets[step] is not targets[step - 1]]
    assert changes == list(range(frequency, 12, frequency))


def test_an_unbalanced_plan_is_not_kept() -> None:
    strategy = ProProphet(frequency=100, planner="shadow", balance=3.0)
    (plan, *_) = strategy.plan(job_of(ROWS_ILCE[0]))
    assert followed(plan, np.full((NUM_EP_RANKS, NUM_EXPERTS), 25)).target is plan.target
    skewed_CE = np.zeros((NUM_EP_RANKS, NUM_EXPERTS), dtype=np.int64)
    skewed_CE[:, 7] = 200  # all to an expert that has no copy
    assert not plan.target.holds_EC[7].all()
    replanned = followed(plan, skewed_CE)
    assert replanned.target.holds_EC[7].all()


def test_balanced_rows_need_no_replicas() -> None:
    """Property 3: nor anything that would move or wait for one."""
    even_LCE = np.full((NUM_LAYERS, NUM_EP_RANKS, NUM_EXPERTS), 25)
    for plan in ProProphet().plan(job_of(even_LCE)):
        assert plan.target is plan.owner
        assert not plan.is_joined
        assert plan.carried is None


# How replicas travel.


def test_the_block_before_carries_replicas() -> None:
    """What fits between two layers goes there; the first layer has nobody before it."""
    for window_s in (0.0, 0.021, 10.0):
        first, *others = ProProphet().plan(job_of(ROWS_ILCE[0], window_s=window_s))
        assert first.carried is None
        for plan in others:
            assert plan.carried is not None
            copied_E = (plan.target.holds_EC & ~plan.owner.holds_EC).any(axis=1)
            for split in plan.carried:
                assert sorted((*split.first, *split.second)) == np.flatnonzero(copied_E).tolist()
            beside_layer = len(plan.carried.gathers.second), len(plan.carried.reductions.first)
            fit = min(int(copied_E.sum()), int(window_s / 1e-2))  # a move takes 10 ms
            assert beside_layer == (fit, fit)


def test_without_the_scheduler_nobody_carries_them() -> None:
    plans = ProProphet(scheduler=False).plan(job_of(ROWS_ILCE[0]))
    assert any(plan.has_replicas for plan in plans)
    assert not any(plan.carried for plan in plans)


def test_hidden_replicas_are_cheaper_so_more_are_made() -> None:
    """Golden test P2: equation (8) selects more experts than (6)."""

    def replicas(**keys: Any) -> int:
        plans = ProProphet(balance=0.1, **keys).plan(job_of(ROWS_ILCE[0], window_s=1.0))
        return sum(int((plan.target.holds_EC & ~plan.owner.holds_EC).sum()) for plan in plans)

    assert replicas() > replicas(scheduler=False) > 0


def test_replicas_that_were_seen_to_be_slow_are_not_made() -> None:
    """What running steps say of their speed counts more than what a quick look stated."""
    job = job_of(ROWS_ILCE[0])
    (cost_group,) = job.cost_groups
    for speed, pays in ((1e6, True), (1e3, False)):
        cost_groups = (replace(cost_group, copy_bytes_per_s=speed),)
        plans = ProProphet().plan(replace(job, cost_groups=cost_groups))
        assert all(plan.has_replicas == pays for plan in plans)


def test_replicas_that_take_long_to_start_are_not_made() -> None:
    """The measured latency counts as it does for ``fssdp``."""
    job = job_of(ROWS_ILCE[0])
    (cost_group,) = job.cost_groups
    for latency_s, pays in ((0.0, True), (1e6, False)):
        cost_groups = (replace(cost_group, copy_latency_s=latency_s),)
        plans = ProProphet().plan(replace(job, cost_groups=cost_groups))
        assert all(plan.has_replicas == pays for plan in plans)


def test_a_layer_is_foretold_by_who_sends_what_over_which_link() -> None:
    """Two nodes of two EP ranks, which own two experts each; rows of 100 bytes."""
    node_C = np.array([0, 0, 1, 1])
    owner = Placement.block(8, 4)
    replicas_EC = np.zeros_like(owner.holds_EC)
    replicas_EC[0] = True
    target = owner.with_replicas(replicas_EC)
    rows_CE = np.zeros((4, 8), dtype=np.int64)
    rows_CE[:, 0] = 50  # stay
    rows_CE[0, 4], rows_CE[0, 6], rows_CE[0, 2] = 7, 3, 4  # to either far EP rank, and the near one
    links = LinkPrices(near_bytes_per_s=1e3, far_bytes_per_s=100.0, node_bytes_per_s=1e3)
    links = replace(links, start_s=1.0, exchange_fit=ExchangeFit(2.0, 3.0), copy_factor=2.0)
    prices = replace(job_of(ROWS_ILCE[0]).cost_groups[0].prices, row_s=0.5)
    cost_group = CostGroup(layers=(0, 1), prices=prices, expert_bytes=400, links=links)
    job = Job.at_start([owner, owner], node_C, [cost_group])
    plan = Plan(owner, target, LocalElseOwner(owner, target))
    stated = ProProphet().forecast(job, 0, plan, rows_CE)
    assert stated is not None
    assert stated.exchange_s == pytest.approx(4 * (2 + 3 * (1 + 10)))
    assert stated.expert_s == pytest.approx(0.5 * 57)
    # 4 s out of a node, 0.4 s within at once and behind it in the other node, and a second to start
    # each, twice as long in layers; of the mean EP rank.
    there_s, within_s = 4 + 1, 0.4 + 1
    mean_s = (there_s + within_s + 2 * (there_s + within_s)) / 4
    assert stated.gather_s == stated.reduce_s == pytest.approx(2 * mean_s)
    freed = ProProphet().forecast(job, 0, replace(plan, rematerialize=True), rows_CE)
    assert freed == replace(stated, gather_s=2 * stated.gather_s)
    halves = Carried(Split((0,), ()), Split((), (0,)))
    carried = ProProphet().forecast(job, 0, replace(plan, carried=halves), rows_CE)
    assert carried == stated
    cut = ProProphet().forecast(job, 0, replace(plan, forward_degree=3), rows_CE)
    assert cut == replace(stated, exchange_s=stated.exchange_s + 2 * 3 * 2)
    assert FullySharded().forecast(job, 0, plan, rows_CE) == stated
    papers = ProProphet(prices="paper").forecast(job, 0, plan, rows_CE)
    assert papers is not None
    assert papers.exchange_s == pytest.approx(4 * 700 / 1e6)


def test_what_is_not_known_is_not_foretold() -> None:
    job = job_of(ROWS_ILCE[0])
    links = LinkPrices(near_bytes_per_s=1.0, far_bytes_per_s=1.0, node_bytes_per_s=1.0)
    known = replace(job, cost_groups=(replace(job.cost_groups[0], links=links),))
    plan = ProProphet().plan(job)[0]
    assert ProProphet().forecast(known, 0, plan, ROWS_ILCE[0][0]) is not None
    assert ProProphet().forecast(job, 0, plan, ROWS_ILCE[0][0]) is None
    by_places = replace(plan, way=Way.BY_PLACES)
    assert ProProphet().forecast(known, 0, by_places, ROWS_ILCE[0][0]) is None


def test_the_papers_prices_know_no_starts() -> None:
    job = job_of(ROWS_ILCE[0])
    cost_groups = (replace(job.cost_groups[0], copy_latency_s=1e6),)
    plans = ProProphet(prices="paper").plan(replace(job, cost_groups=cost_groups))
    assert all(plan.has_replicas for plan in plans)
    with pytest.raises(ValueError, match=r"prophet.prices is 'link', .*did you mean 'links'"):
        ProProphet(prices="link")


COPIED = OWNERS[0].with_replicas(np.ones_like(OWNERS[0].holds_EC))
ALONE = ProProphet().plan(Job.at_start(OWNERS, np.zeros(NUM_EP_RANKS, dtype=np.int64)))[0]
JOINED = replace(ALONE, target=COPIED)
CARRIED = replace(JOINED, carried=Carried(Split((0,), (1,)), Split((0,), (1,))))
PLAIN = [ORDER, DISPATCH, EXPERT, COMBINE, RESTORE]


def ops(schedule: Schedule) -> list[Op]:
    return [task.op for task in schedule.tasks]


def schedules(plan: Plan, following: Plan | None) -> list[list[Op]]:
    layer_context = LayerContext(plan, layout=None, layer=1, following=following)  # type: ignore[arg-type]
    beside = ProProphet().beside(layer_context)
    return [ops(each) for each in orders.programs(layer_context.layer, gated=False, beside=beside)]


def test_a_layer_without_replicas_runs_as_in_expert_parallelism() -> None:
    for following in (None, ALONE, JOINED):
        assert schedules(ALONE, following) == [PLAIN, PLAIN[:0:-1]]


def test_order_of_a_layer_that_is_carried_and_carries() -> None:
    """Algorithm 2, spec 3.4; JOIN in backward has the gradients of replicas ready."""
    plan = replace(CARRIED, successor=Plan.at_owner)
    assert not ProProphet(scheduler=False).beside(LayerContext(plan, None, 1)).plans  # type: ignore[arg-type]
    forward, backward = schedules(plan, CARRIED)
    assert forward == [ORDER, DISPATCH, PLAN, JOIN, LAUNCH, EXPERT, COMBINE, LAUNCH, RESTORE]
    assert backward == [
        RESTORE,
        COMBINE,
        SEND_TO_OWNER,
        EXPERT,
        DISPATCH,
        JOIN,
        RECALL,
        SEND_TO_OWNER,
    ]


def test_experts_have_freed_replicas_again() -> None:
    """After the gradients of the rows are there and those of the next layer's replicas are on their
    way; the last layer's replicas are not freed."""
    plan = replace(CARRIED, rematerialize=True)
    _, backward = schedules(plan, CARRIED)
    assert backward == [
        *(RESTORE, COMBINE, SEND_TO_OWNER, HAVE_AGAIN, EXPERT, DISPATCH),
        *(JOIN, RECALL, SEND_TO_OWNER),
    ]
    assert HAVE_AGAIN not in schedules(plan, None)[1]


# Keys.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "frequency": ({"frequency": 0}, "prophet.frequency is 0; it must be at least 1"),
    "num_excluded": ({"num_excluded": -1}, "prophet.num_excluded is -1"),
    "balance": ({"balance": -0.5}, "prophet.balance is -0.5; it must be at least 0"),
    "endless balance": ({"balance": 1e400}, "prophet.balance is inf; it must be at least 0"),
    "split": ({"split": "halves"}, "'halves', which is unknown; did you mean 'half'"),
    "planner": ({"planner": "profet"}, "'profet', which is unknown; did you mean 'prophet'"),
    "another": ({"alpha": 1.0}, "prophet has no key 'alpha'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(ValueError, match=r"ds_moe_ext\.prophet") as error:
        read_settings({"ds_moe_ext": {"enabled": True, "strategy": "prophet", "prophet": keys}})
    assert message in str(error.value)


def test_more_ep_ranks_cannot_be_excluded_than_there_are() -> None:
    with pytest.raises(
        ValueError, match="num_excluded is 4, but an expert has 3 EP ranks besides its owner"
    ):
        ProProphet(num_excluded=4).plan(job_of(ROWS_ILCE[0]))
