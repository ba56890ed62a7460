# SPDX-License-Identifier: Apache-2.0
"""The priced share against the joint linear programme of every sender and holder.

Shape letters: C EP ranks, E experts, N (expert, holder) pairs, V nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_array

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.planning.priced_plans import (
    Routed,
    RoutedDivision,
    divide,
    in_whole_rows,
    sent_rows,
)
from ds_moe_ext.planning.prices import RowPrices

FREE = (1.0, 0.0, 0.0)
PRICES = (FREE, (30.0, 8.0, 80.0), (30.0, 4.0, 16.0), (30.0, 1.2, 8.0), (0.1, 1.0, 5.0))
"""Of a row: to compute, to leave its EP rank, to cross between nodes."""


@dataclass(frozen=True, eq=False)
class Case:
    """A random layer."""

    routed: Routed
    prices: RowPrices

    @property
    def rows_CE(self) -> np.ndarray:
        return self.routed.rows_CE


def cases(number: int, *, most_ep_ranks: int, most_experts: int, seed: int = 0) -> Iterator[Case]:
    """Zipf 0 to 2; owners, and replicas by chance, of the hot or a few of every EP rank."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        num_ep_ranks = int(rng.choice([c for c in (2, 3, 4, 8, 16, 32, 64) if c <= most_ep_ranks]))
        num_experts = int(np.exp2(rng.uniform(1, np.log2(most_experts))))
        weight_E = rng.permutation((1.0 + np.arange(num_experts)) ** -rng.uniform(0, 2))
        of_ep_ranks = (weight_E * rng.gamma(5, 0.2, num_experts) for _ in range(num_ep_ranks))
        num_rows = int(rng.choice([64, 256, 1024, 4096]))
        rows_CE = np.stack(
            [rng.multinomial(num_rows, own_E / own_E.sum()) for own_E in of_ep_ranks]
        )
        holds_EC = np.zeros((num_experts, num_ep_ranks), dtype=bool)
        holds_EC[np.arange(num_experts), rng.integers(0, num_ep_ranks, num_experts)] = True
        _copy(rng, holds_EC, rows_CE)
        sizes = [size for size in (1, 2, 4, 8) if num_ep_ranks % size == 0]
        node_C = rng.permutation(np.arange(num_ep_ranks) // rng.choice(sizes)) * 3 + 1
        row_s, local_s, cross_s = PRICES[rng.integers(len(PRICES))]
        row_s_C = np.full(num_ep_ranks, row_s) * rng.choice([1.0, 0.5], num_ep_ranks)
        prices = RowPrices(row_s_C, local_s, cross_s)
        yield Case(Routed(rows_CE, Placement(holds_EC), node_C), prices)


def _copy(rng: np.random.Generator, holds_EC: np.ndarray, rows_CE: np.ndarray) -> None:
    num_experts, num_ep_ranks = holds_EC.shape
    match int(rng.integers(3)):
        case 0:
            holds_EC |= rng.random(holds_EC.shape) < rng.uniform(0, 4 / num_ep_ranks)
        case 1:
            num_hot = max(1, int(num_experts * rng.uniform(0.05, 0.5)))
            for expert in np.argsort(-rows_CE.sum(axis=0))[:num_hot]:
                replicas = min(num_ep_ranks, int(rng.integers(1, 5)))
                holds_EC[expert, rng.choice(num_ep_ranks, replicas, replace=False)] = True
        case 2:
            for ep_rank in range(num_ep_ranks):
                replicas = min(num_experts, int(rng.integers(1, 4)))
                holds_EC[rng.choice(num_experts, replicas, replace=False), ep_rank] = True


def joint_optimum(case: Case) -> float:
    """Least seconds: one unknown for every sender and holder, rows in parts."""
    rows_CE, holds_EC = case.rows_CE, case.routed.target.holds_EC
    node_C, prices = case.routed.node_C, case.prices
    expert_N, holder_N = np.nonzero(holds_EC)
    num_ep_ranks, num_experts = rows_CE.shape
    sender = np.repeat(np.arange(num_ep_ranks), len(expert_N))
    expert, holder = np.tile(expert_N, num_ep_ranks), np.tile(holder_N, num_ep_ranks)
    unknown = np.arange(len(sender))
    ep_rank_s, link_s = len(sender), len(sender) + 1
    sums = coo_array(
        (np.ones(len(sender)), (sender * num_experts + expert, unknown)),
        shape=(rows_CE.size, len(sender) + 2),
    )
    rules, num_rules = [], 0

    def limit(place: np.ndarray, counts: np.ndarray, price: np.ndarray, busiest: int) -> None:
        nonlocal num_rules
        for own in np.unique(place):
            mine = counts & (place == own)
            row = np.full(mine.sum() + 1, num_rules)
            factors = np.append(price[mine], -1.0)
            rules.append((factors, row, np.append(unknown[mine], busiest)))
            num_rules += 1

    leaves, crosses = sender != holder, node_C[sender] != node_C[holder]
    everything = np.ones_like(leaves)
    local, cross = (np.full(len(sender), p) for p in (prices.local_row_s, prices.cross_row_s))
    limit(holder, everything, prices.row_s_C[holder], ep_rank_s)
    limit(holder, leaves, local, link_s)
    limit(sender, leaves, local, link_s)
    limit(node_C[holder], crosses, cross, link_s)
    limit(node_C[sender], crosses, cross, link_s)
    factors, rows, unknowns = (np.concatenate(parts) for parts in zip(*rules))
    found = linprog(
        np.append(np.zeros(len(sender)), [1.0, 1.0]),
        A_ub=coo_array((factors, (rows, unknowns)), shape=(num_rules, len(sender) + 2)),
        b_ub=np.zeros(num_rules),
        A_eq=sums,
        b_eq=rows_CE.ravel(),
        method="highs",
    )
    assert found.status == 0, found.message
    return float(found.fun)


def priced_CC(case: Case) -> np.ndarray:
    """Rows from each EP rank to each, once it is checked that all rows go to holders."""
    routed = case.routed
    whole = in_whole_rows(divide(routed, case.prices), routed)
    sent_CN = sent_rows(whole, routed)
    holders = routed.holders
    assert sent_CN.min(initial=0) >= 0
    total_CX = np.zeros((len(sent_CN), len(holders.expert_X)), dtype=np.int64)
    np.add.at(total_CX.T, holders.copied_N, sent_CN.T)
    assert np.array_equal(total_CX, case.rows_CE[:, holders.expert_X])
    moved_CC = routed.alone_CC.copy()
    np.add.at(moved_CC.T, holders.ep_rank_N, sent_CN.T)
    assert moved_CC.sum() == case.rows_CE.sum()
    return moved_CC


def nearest_CC(case: Case) -> np.ndarray:
    share = NearestReplica(case.routed.target, case.routed.node_C)
    return share.rows_between(case.rows_CE[:, None])[0]


def check_times(found: list[Case]) -> None:
    """See the golden tests of the specification, section 5."""
    over, over_nearest, rows_over = [], [], []
    for case in found:
        moved_CC, best_s = priced_CC(case), joint_optimum(case)
        time_s = case.prices.seconds(moved_CC, case.routed.node_C)
        nearest_s = case.prices.seconds(nearest_CC(case), case.routed.node_C)
        is_free = case.prices.local_row_s == case.prices.cross_row_s == 0
        over.append(time_s / best_s)
        over_nearest.append(time_s / nearest_s)
        if is_free:
            least_C = np.ceil(best_s / case.prices.row_s_C - 1e-6) * case.prices.row_s_C
            rows_over.append(time_s <= least_C.max() + 1e-9)
    assert np.mean(over) < 1.03
    assert np.quantile(over, 0.95) < 1.08
    assert max(over_nearest) <= 1 + 1e-9
    assert np.mean(rows_over) >= 0.9


def test_takes_hardly_longer_than_the_joint_programme() -> None:
    check_times(list(cases(40, most_ep_ranks=8, most_experts=24)))


@pytest.mark.slow
def test_takes_hardly_longer_than_the_joint_programme_of_large_layers() -> None:
    check_times(list(cases(500, most_ep_ranks=64, most_experts=256, seed=1)))


@pytest.mark.parametrize("seed", range(4))
def test_where_sending_is_free_few_rows_leave(seed: int) -> None:
    """Of all divisions as well balanced the one with fewest remote rows, by a second programme."""
    (case,) = cases(1, most_ep_ranks=8, most_experts=24, seed=seed)
    free = Case(case.routed, RowPrices(np.ones(len(case.rows_CE)), 0.0, 0.0))
    moved_CC = priced_CC(free)
    remote = 1 - np.trace(moved_CC) / moved_CC.sum()
    assert remote <= fewest_remote(free, moved_CC.sum(axis=0).max()) + 0.05


def fewest_remote(case: Case, most_rows: int) -> float:
    """Least part of the rows that leave their EP ranks, where no EP rank computes more."""
    rows_CE = case.rows_CE
    expert_N, holder_N = np.nonzero(case.routed.target.holds_EC)
    num_ep_ranks, num_experts = rows_CE.shape
    sender = np.repeat(np.arange(num_ep_ranks), len(expert_N))
    expert, holder = np.tile(expert_N, num_ep_ranks), np.tile(holder_N, num_ep_ranks)
    one, unknown = np.ones(len(sender)), np.arange(len(sender))
    shape = rows_CE.size, len(sender)
    found = linprog(
        (sender != holder).astype(float),
        A_ub=coo_array((one, (holder, unknown)), shape=(num_ep_ranks, len(sender))),
        b_ub=np.full(num_ep_ranks, most_rows),
        A_eq=coo_array((one, (sender * num_experts + expert, unknown)), shape=shape),
        b_eq=rows_CE.ravel(),
        method="highs",
    )
    assert found.status == 0, found.message
    return float(found.fun) / rows_CE.sum()


def test_permuted_ep_ranks_take_as_long() -> None:
    for case in cases(6, most_ep_ranks=8, most_experts=16, seed=2):
        order_C = np.random.default_rng(0).permutation(len(case.rows_CE))
        routed, prices = case.routed, case.prices
        other = Case(
            Routed(
                case.rows_CE[order_C],
                Placement(routed.target.holds_EC[:, order_C]),
                routed.node_C[order_C],
            ),
            RowPrices(prices.row_s_C[order_C], prices.local_row_s, prices.cross_row_s),
        )
        times = [each.prices.seconds(priced_CC(each), each.routed.node_C) for each in (case, other)]
        assert times[0] == pytest.approx(times[1], rel=0.02)


def test_one_holder_an_expert_leaves_nothing_to_divide() -> None:
    rows_CE = np.array([[3, 5], [7, 2]])
    routed = Routed(rows_CE, Placement.block(2, 2), np.array([0, 0]))
    case = Case(routed, RowPrices(np.ones(2), 1.0, 1.0))
    assert divide(routed, case.prices).kept_N.size == 0
    assert priced_CC(case).tolist() == [[3, 5], [7, 2]]


def test_a_hot_expert_by_hand() -> None:
    """Both EP ranks hold it; the first one has 6 rows for it, the second 18."""
    routed = Routed(np.array([[6], [18]]), Placement(np.array([[True, True]])), np.array([0, 0]))
    free = divide(routed, RowPrices(np.ones(2), 0.0, 0.0))
    assert free.kept_N.tolist() == pytest.approx([6, 12])
    # A row that moves spares the busiest EP rank one and costs one on the link: nothing is won.
    dear = divide(routed, RowPrices(np.ones(2), 1.5, 0.0))
    assert dear.kept_N.tolist() == pytest.approx([6, 18])
    # An EP rank twice as fast gets twice the rows.
    unlike = divide(routed, RowPrices(np.array([0.5, 1.0]), 0.0, 0.0))
    assert unlike.kept_N.tolist() == pytest.approx([6, 8])


def test_what_is_left_is_given_where_most_lacks() -> None:
    routed = Routed(np.array([[5], [4]]), Placement(np.array([[True, True]])), np.array([0, 0]))
    parts = RoutedDivision(np.array([3.6, 2.2]), np.array([[1.4, 1.8]]))
    whole = in_whole_rows(parts, routed)
    assert whole.kept_N.sum() + whole.sent_VN.sum() == 9
    assert whole.kept_N.tolist() == [4, 2]
    assert whole.sent_VN.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("prices", "stated"), [((-1.0, 0, 0), "row_s"), ((1.0, np.inf, 0), "local")]
)
def test_prices_are_checked(prices: tuple[float, float, float], stated: str) -> None:
    row_s, local_s, cross_s = prices
    with pytest.raises(ValueError, match=stated):
        RowPrices(np.array([row_s]), local_s, cross_s)
