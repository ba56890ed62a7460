# SPDX-License-Identifier: Apache-2.0
"""How many replicas a priced share needs, and which it lacks once rows are known.

Shape letters: C EP ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import Division, RowLevels, WholePrices
from ds_moe_ext.core.share import PLANNED_SWEEPS, SWEEPS, LevelShare
from ds_moe_ext.planning.fssdp_planner import materialize
from ds_moe_ext.planning.layer_costs import BlockPrices
from ds_moe_ext.planning.priced_plans import TOLERANCE, Repair, fewest, swap_replicas
from ds_moe_ext.planning.prices import busiest_link
from ds_moe_ext.planning.prophet_planner import place_experts

NODES = np.array([0, 0, 1, 1])
OWNER = Placement.block(8, 4)
HOT = np.array([400, 60, 50, 40, 30, 20, 10, 10])
LEVELS = partial(RowLevels, node_C=NODES, prices=WholePrices.of(np.ones(4), 0.0, 0.0))


def targets_of(rows_CE: np.ndarray, most: int) -> list[Placement]:
    """By Algorithm 1, the widest first, and the owner."""
    return [
        materialize(
            [OWNER], [rows_CE.sum(axis=0)], overlap_degree=4, replicas_per_ep_rank=m, node_C=NODES
        )[0]
        for m in range(most, -1, -1)
    ]


def test_no_more_replicas_than_it_takes() -> None:
    """One hot expert: a copy in each other EP rank is enough, and fewer are not."""
    rows_CE = np.tile(HOT, (4, 1))
    targets = targets_of(rows_CE, 4)
    share = fewest(targets, LEVELS, rows_CE, sweeps=SWEEPS)
    widest = LevelShare.planned(LEVELS(targets[0]), rows_CE, sweeps=SWEEPS)
    assert share.plan.price <= (1 + TOLERANCE) * widest.plan.price
    at = targets.index(share.levels.target)
    assert 0 < at < len(targets) - 1
    narrower = LevelShare.planned(LEVELS(targets[at + 1]), rows_CE, sweeps=SWEEPS)
    assert narrower.plan.price > (1 + TOLERANCE) * widest.plan.price


def test_even_rows_need_no_replicas() -> None:
    rows_CE = np.full((4, 8), 100)
    share = fewest(targets_of(rows_CE, 2), LEVELS, rows_CE, sweeps=SWEEPS)
    assert share.levels.target.is_single


def repair_of(share: LevelShare, copy_price: float, num_slots: int = 2) -> Repair:
    unit_s = share.levels.prices.unit_s
    return Repair(
        owner=OWNER,
        share=share,
        levels_of=LEVELS,
        copy_price=round(copy_price / unit_s),
        num_slots=num_slots,
    )


def test_replicas_are_added_only_for_what_dividing_leaves() -> None:
    replicas_EC = np.zeros((8, 4), dtype=bool)
    replicas_EC[0, 1:] = True
    target = OWNER.with_replicas(replicas_EC)
    rows_CE = np.tile(HOT, (4, 1))
    share = LevelShare.planned(LEVELS(target), rows_CE, sweeps=SWEEPS)
    repair = repair_of(share, 1.0)
    assert repair(rows_CE)[0] is target  # the replicas that stand are enough
    other_CE = np.tile(np.roll(HOT, 4), (4, 1))  # another expert is hot now
    added, rule = repair(other_CE)
    replicas = added.holds_EC & ~target.holds_EC
    assert replicas[4].any() and 1 <= replicas.sum(axis=0).max() <= 2
    assert (added.holds_EC >= target.holds_EC).all()
    least = other_CE.sum() / 4
    busiest = [each.of_rows(other_CE).computed_C(other_CE).max() for each in (rule, share)]
    assert busiest[0] < busiest[1] and busiest[0] < 1.1 * least
    assert repair_of(share, 1e6)(other_CE)[0] is target  # a replica costs more than it saves


def random_layer(seed: int) -> tuple[LevelShare, np.ndarray, Placement, RowLevels]:
    """Replicas that were chosen for some rows; others, quite unlike; and where experts live."""
    rng = np.random.default_rng(seed)
    num_ep_ranks, per_node = int(rng.integers(2, 17)), int(rng.integers(1, 5))
    num_experts = num_ep_ranks * int(rng.integers(1, 5))
    owner = Placement.block(num_experts, num_ep_ranks)
    replicas_EC = rng.random((num_experts, num_ep_ranks)) < rng.choice([0.0, 0.1, 0.3])
    speeds = rng.choice([1.0, 1.0, 1.5], num_ep_ranks)
    links = rng.choice([0.0, 0.3], 2)
    prices = WholePrices.of(speeds, *links.tolist())
    levels = RowLevels(
        owner.with_replicas(replicas_EC), np.arange(num_ep_ranks) // per_node, prices
    )
    planned_CE, came_CE = (
        rng.multinomial(2000, rng.dirichlet(np.full(num_experts, 0.3)), num_ep_ranks)
        for _ in range(2)
    )
    return LevelShare.planned(levels, planned_CE, sweeps=SWEEPS), came_CE, owner, levels


@pytest.mark.parametrize("copy_rows", [0.0, 5.0, 200.0])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_repairs_of_random_layers(copy_rows: float, num_slots: int) -> None:
    """None adds more replicas than there is room for, none costs more than it saves, and the layer
    computes all rows; most come close to what their busiest EP rank could have."""
    num_added = 0
    for seed in range(60):
        share, rows_CE, owner, levels = random_layer(seed)
        unit_s = levels.prices.unit_s
        repair = Repair(
            owner=owner,
            share=share,
            levels_of=lambda target, levels=levels: replace(levels, target=target),
            copy_price=round(copy_rows / unit_s),
            num_slots=num_slots,
        )
        target, rule = repair(rows_CE)
        before = levels.divided(rows_CE, share.plan, sweeps=SWEEPS)
        divided = rule.of_rows(rows_CE)
        assert divided.computed_C(rows_CE).sum() == rows_CE.sum()
        added_EC = target.holds_EC & ~levels.target.holds_EC
        if target is levels.target:
            assert np.array_equal(divided.rows_N, before.rows_N)
            continue
        num_added += 1
        assert isinstance(rule, LevelShare) and rule.plan.price < before.price
        assert added_EC.sum(axis=0).max() <= num_slots
        replicas = busiest_link(owner, levels.target, target, levels.node_C)
        assert rule.plan.price + replicas * repair.copy_price < before.price
        again, other = repair(rows_CE.copy())
        assert np.array_equal(again.holds_EC, target.holds_EC)
        assert isinstance(other, LevelShare) and np.array_equal(other.plan.rows_N, rule.plan.rows_N)
    if copy_rows < 100:
        assert num_added > 20


def test_the_first_of_the_experts_that_pro_prophet_replicas() -> None:
    prices = BlockPrices(
        row_s=1.0, row_bytes=1.0, bytes_per_s=10.0, weight_bytes=1, gradient_bytes=1,
        copy_bytes_per_s=1.0, forward_gap_s=0.0, backward_gap_s=0.0,
    )  # fmt: skip
    rows_CE = np.tile(HOT, (4, 1))
    found = place_experts(OWNER, rows_CE, prices=prices, balance=0.1)
    assert len(found.selected) > 1
    one = found.first(1)
    assert one.selected == found.selected[:1]
    assert (one.target.num_holders_E > 1).nonzero()[0].tolist() == list(one.selected)
    assert (
        one.rows.computed_C.sum() == rows_CE.sum() and one.seconds_without == found.seconds_without
    )
    none = found.first(0)
    assert np.array_equal(none.target.holds_EC, OWNER.holds_EC) and not none.selected


# Copies chosen by what a layer takes: never worse, within the planner's numbers, near the best.


PRICES = WholePrices.of(np.ones(4), 0.2, 1.0)
LEVELS_COPY_SWAPS = partial(RowLevels, node_C=NODES, prices=PRICES)


def skewed(rng: np.random.Generator) -> np.ndarray:
    """Rows ``[C, E]`` of a layer with some hot experts, which senders like unequally."""
    hot_E = rng.permutation((1.0 + np.arange(8)) ** -1.5) * np.exp(rng.normal(0, 0.5, (4, 8)))
    return np.stack([rng.multinomial(1000, each / each.sum()) for each in hot_E])


def by_load(rows_CE: np.ndarray, replicas: int, degree: int) -> LevelShare:
    """Of Algorithm 1's copies."""
    (target,) = materialize(
        [OWNER],
        [rows_CE.sum(axis=0)],
        overlap_degree=degree,
        replicas_per_ep_rank=replicas,
        node_C=NODES,
    )
    return LevelShare.planned(LEVELS_COPY_SWAPS(target), rows_CE, sweeps=SWEEPS)


def replicas_of(share: LevelShare) -> np.ndarray:
    return share.levels.target.holds_EC & ~OWNER.holds_EC


@pytest.mark.parametrize(("replicas", "degree"), [(1, 3), (1, 8), (2, 4)])
def test_never_worse_and_within_the_numbers_given(replicas: int, degree: int) -> None:
    rng = np.random.default_rng(replicas * degree)
    gains = []
    for _ in range(20):
        rows_CE = skewed(rng)
        share = by_load(rows_CE, replicas, degree)
        found = swap_replicas(OWNER, share, rows_CE, LEVELS_COPY_SWAPS, most_experts=degree)
        again = swap_replicas(OWNER, share, rows_CE, LEVELS_COPY_SWAPS, most_experts=degree)
        assert found.describe() == again.describe()
        assert found.plan.price <= share.plan.price and found.sweeps == SWEEPS
        own = found.levels.divided(rows_CE, None, sweeps=PLANNED_SWEEPS)
        assert own.price == found.plan.price
        assert (found.levels.target.holds_EC | ~OWNER.holds_EC).all()
        assert replicas_of(found).sum(axis=0).max() <= replicas_of(share).sum(axis=0).max()
        assert np.count_nonzero(replicas_of(found).any(axis=1)) <= degree
        gains.append(share.plan.price / found.plan.price)
    assert np.mean(gains) > 1.02


def test_near_the_best_of_all_replicas() -> None:
    """One replica an EP rank: all choices there are, divided and priced."""
    rng = np.random.default_rng(3)
    over_best, before = [], []
    for _ in range(8):
        rows_CE = skewed(rng)
        share = by_load(rows_CE, 1, 8)
        found = swap_replicas(OWNER, share, rows_CE, LEVELS_COPY_SWAPS, most_experts=8)
        prices = []
        for replicas_EC in all_replicas():
            levels = LEVELS_COPY_SWAPS(OWNER.with_replicas(replicas_EC))
            like = from_the_nearest(share.plan, levels)
            prices.append(levels.divided(rows_CE, like, sweeps=2).price)
        best = min(prices)
        over_best.append(found.plan.price / best)
        before.append(share.plan.price / best)
    assert np.mean(over_best) < 1.04
    assert np.mean(before) > 1.08


def from_the_nearest(division: Division, levels: RowLevels) -> Division:
    """A plan for other replicas, at the steps of a division."""
    nothing_N = np.zeros(len(levels.target.holders.ep_rank_N), dtype=np.int64)
    return replace(division, rows_N=nothing_N, part_N=nothing_N, price=0)


def test_the_first_that_is_better_is_found() -> None:
    """As each is divided for itself."""
    rng = np.random.default_rng(5)
    numbers = []
    for _ in range(30):
        rows_CE = skewed(rng)
        share = by_load(rows_CE, 2, 8)
        tried = [OWNER.with_replicas(rng.random((8, 4)) < 0.2) for _ in range(6)]
        divided = []
        for levels in map(LEVELS_COPY_SWAPS, tried):
            plan = from_the_nearest(share.plan, levels)
            divided.append(levels.divided(rows_CE, plan, sweeps=SWEEPS))
        plan = replace(share.plan, price=int(np.quantile([each.price for each in divided], 0.3)))
        better = [number for number, each in enumerate(divided) if each.price < plan.price]
        holds_KEC = np.stack([each.holds_EC for each in tried])
        found = share.levels.first_below(plan, holds_KEC, rows_CE, sweeps=SWEEPS)
        numbers.append(better[0] if better else None)
        if found is None:
            assert not better
            continue
        number, division = found
        assert number == better[0]
        assert [str(value) for value in vars(division).values()] == [
            str(value) for value in vars(divided[number]).values()
        ]
    assert len(set(numbers)) > 2


def all_replicas() -> Iterator[np.ndarray]:
    """One in each EP rank, of any expert but its own."""
    for experts in product(range(8), repeat=4):
        replicas_EC = np.zeros((8, 4), dtype=bool)
        replicas_EC[experts, range(4)] = True
        if not (replicas_EC & OWNER.holds_EC).any():
            yield replicas_EC


def test_a_copy_goes_where_its_rows_come_from() -> None:
    """Node 1 wants an expert of node 0; the planner gave it replicas of what nobody there wants."""
    rows_CE = np.full((4, 8), 100)
    rows_CE[2:, 0] = 600
    replicas_EC = np.zeros((8, 4), dtype=bool)
    replicas_EC[1, 2:] = True
    share = LevelShare.planned(
        LEVELS_COPY_SWAPS(OWNER.with_replicas(replicas_EC)), rows_CE, sweeps=SWEEPS
    )
    found = swap_replicas(OWNER, share, rows_CE, LEVELS_COPY_SWAPS, most_experts=1)
    assert np.array_equal(found.levels.target.holds_EC, share.levels.target.holds_EC)
    found = swap_replicas(OWNER, share, rows_CE, LEVELS_COPY_SWAPS, most_experts=2)
    assert replicas_of(found)[0, 2:].any()
    assert found.plan.price < 0.8 * share.plan.price


def test_what_is_even_and_what_has_no_replicas_stays() -> None:
    free = partial(RowLevels, node_C=NODES, prices=WholePrices.of(np.ones(4), 0.0, 0.0))
    rows_CE = np.full((4, 8), 100)
    replicas_EC = np.zeros((8, 4), dtype=bool)
    replicas_EC[0, 2:] = True
    share = LevelShare.planned(free(OWNER.with_replicas(replicas_EC)), rows_CE, sweeps=SWEEPS)
    assert swap_replicas(OWNER, share, rows_CE, free, most_experts=8) is share
    rows_CE[:, 0] = 900
    alone = LevelShare.planned(free(OWNER), rows_CE, sweeps=SWEEPS)
    assert swap_replicas(OWNER, alone, rows_CE, free, most_experts=8) is alone
