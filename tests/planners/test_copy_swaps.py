# SPDX-License-Identifier: Apache-2.0
"""Copies chosen by what a layer takes: never worse, within the planner's numbers, near the best.

Shape letters: C cells, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import Division, RowLevels, WholePrices
from ds_moe_ext.core.share import PLANNED_SWEEPS, SWEEPS, LevelShare
from ds_moe_ext.planning import priced_plans
from ds_moe_ext.planning.fssdp_planner import materialize
from ds_moe_ext.planning.priced_plans import swap_copies

NODES = np.array([0, 0, 1, 1])
HOME = Placement.block(8, 4)
PRICES = WholePrices.of(np.ones(4), 0.2, 1.0)
LEVELS = partial(RowLevels, node_C=NODES, prices=PRICES)


def skewed(rng: np.random.Generator) -> np.ndarray:
    """Rows ``[C, E]`` of a layer with some hot experts, which senders like unequally."""
    hot_E = rng.permutation((1.0 + np.arange(8)) ** -1.5) * np.exp(rng.normal(0, 0.5, (4, 8)))
    return np.stack([rng.multinomial(1000, each / each.sum()) for each in hot_E])


def by_load(rows_CE: np.ndarray, copies: int, degree: int) -> LevelShare:
    """Of Algorithm 1's copies."""
    (target,) = materialize(
        [HOME],
        [rows_CE.sum(axis=0)],
        overlap_degree=degree,
        copies_per_cell=copies,
        node_C=NODES,
    )
    return LevelShare.planned(LEVELS(target), rows_CE, sweeps=SWEEPS)


def copies_of(share: LevelShare) -> np.ndarray:
    return share.levels.target.holds_EC & ~HOME.holds_EC


@pytest.mark.parametrize(("copies", "degree"), [(1, 3), (1, 8), (2, 4)])
def test_never_worse_and_within_the_numbers_given(copies: int, degree: int) -> None:
    rng = np.random.default_rng(copies * degree)
    gains = []
    for _ in range(20):
        rows_CE = skewed(rng)
        share = by_load(rows_CE, copies, degree)
        found = swap_copies(HOME, share, rows_CE, LEVELS, most_experts=degree)
        again = swap_copies(HOME, share, rows_CE, LEVELS, most_experts=degree)
        assert found.describe() == again.describe()
        assert found.plan.price <= share.plan.price and found.sweeps == SWEEPS
        own = found.levels.divided(rows_CE, None, sweeps=PLANNED_SWEEPS)
        assert own.price == found.plan.price
        assert (found.levels.target.holds_EC | ~HOME.holds_EC).all()
        assert copies_of(found).sum(axis=0).max() <= copies_of(share).sum(axis=0).max()
        assert np.count_nonzero(copies_of(found).any(axis=1)) <= degree
        gains.append(share.plan.price / found.plan.price)
    assert np.mean(gains) > 1.02


def test_near_the_best_of_all_copies() -> None:
    """One copy a cell: all choices there are, divided and priced."""
    rng = np.random.default_rng(3)
    over_best, before = [], []
    for _ in range(8):
        rows_CE = skewed(rng)
        share = by_load(rows_CE, 1, 8)
        found = swap_copies(HOME, share, rows_CE, LEVELS, most_experts=8)
        prices = []
        for copies_EC in all_copies():
            levels = LEVELS(HOME.with_copies(copies_EC))
            like = from_the_nearest(share.plan, levels)
            prices.append(levels.divided(rows_CE, like, sweeps=2).price)
        best = min(prices)
        over_best.append(found.plan.price / best)
        before.append(share.plan.price / best)
    assert np.mean(over_best) < 1.04
    assert np.mean(before) > 1.08


def from_the_nearest(division: Division, levels: RowLevels) -> Division:
    """A plan for other copies, at the steps of a division."""
    nothing_N = np.zeros(len(levels.target.holders.cell_N), dtype=np.int64)
    return replace(division, rows_N=nothing_N, part_N=nothing_N, price=0)


def test_the_first_that_is_better_is_found() -> None:
    """As each is divided for itself."""
    rng = np.random.default_rng(5)
    numbers = []
    for _ in range(30):
        rows_CE = skewed(rng)
        share = by_load(rows_CE, 2, 8)
        tried = [HOME.with_copies(rng.random((8, 4)) < 0.2) for _ in range(6)]
        divided = []
        for levels in map(LEVELS, tried):
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


def all_copies() -> Iterator[np.ndarray]:
    """One in each cell, of any expert but its own."""
    for experts in product(range(8), repeat=4):
        copies_EC = np.zeros((8, 4), dtype=bool)
        copies_EC[experts, range(4)] = True
        if not (copies_EC & HOME.holds_EC).any():
            yield copies_EC


def test_a_copy_goes_where_its_rows_come_from() -> None:
    """Node 1 wants an expert of node 0; the planner gave it copies of what nobody there wants."""
    rows_CE = np.full((4, 8), 100)
    rows_CE[2:, 0] = 600
    copies_EC = np.zeros((8, 4), dtype=bool)
    copies_EC[1, 2:] = True
    share = LevelShare.planned(LEVELS(HOME.with_copies(copies_EC)), rows_CE, sweeps=SWEEPS)
    found = swap_copies(HOME, share, rows_CE, LEVELS, most_experts=1)
    assert np.array_equal(found.levels.target.holds_EC, share.levels.target.holds_EC)
    found = swap_copies(HOME, share, rows_CE, LEVELS, most_experts=2)
    assert copies_of(found)[0, 2:].any()
    assert found.plan.price < 0.8 * share.plan.price


def test_what_is_even_and_what_has_no_copies_stays() -> None:
    free = partial(RowLevels, node_C=NODES, prices=WholePrices.of(np.ones(4), 0.0, 0.0))
    rows_CE = np.full((4, 8), 100)
    copies_EC = np.zeros((8, 4), dtype=bool)
    copies_EC[0, 2:] = True
    share = LevelShare.planned(free(HOME.with_copies(copies_EC)), rows_CE, sweeps=SWEEPS)
    assert swap_copies(HOME, share, rows_CE, free, most_experts=8) is share
    rows_CE[:, 0] = 900
    alone = LevelShare.planned(free(HOME), rows_CE, sweeps=SWEEPS)
    assert swap_copies(HOME, alone, rows_CE, free, most_experts=8) is alone


def test_trials_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer on many cells; a budget of time would let ranks decide unlike."""
    tried: list[int] = []
    first_below = RowLevels.first_below

    def counted(
        levels: RowLevels, division: Division, holds_KEC: np.ndarray, *rest: Any, **named: Any
    ) -> Any:
        found = first_below(levels, division, holds_KEC, *rest, **named)
        tried.append(len(holds_KEC) if found is None else found[0] + 1)
        return found

    monkeypatch.setattr(RowLevels, "first_below", counted)
    monkeypatch.setattr(priced_plans, "TRIALS", 8)
    for num_cells, most in ((4, 8), (32, 2)):
        rng, home = np.random.default_rng(0), Placement.block(64, num_cells)
        rows_CE = rng.multinomial(4000, rng.dirichlet(np.full(64, 0.2)), num_cells)
        copies_EC = np.zeros((64, num_cells), dtype=bool)
        copies_EC[63, 0] = True
        prices = WholePrices.of(np.ones(num_cells), 0.2, 1.0)
        of = partial(RowLevels, node_C=np.arange(num_cells) // 2, prices=prices)
        share = LevelShare.planned(of(home.with_copies(copies_EC)), rows_CE, sweeps=SWEEPS)
        tried.clear()
        swap_copies(home, share, rows_CE, of, most_experts=64)
        assert sum(tried) == most
