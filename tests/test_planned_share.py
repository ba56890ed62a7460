"""Shares by parts: whole rows, alike for senders and holders, as the parts say."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.cost.row_prices import RowPrices
from ds_moe_ext.placement import Placement
from ds_moe_ext.planned_share import PARTS, PlannedShare, as_told, from_told
from ds_moe_ext.planners.priced_share import planned_parts
from ds_moe_ext.share import received_by_slot, sent_by_pair
from tests.planners.test_priced_share import Case, cases, joint_optimum


def share_of(case: Case) -> PlannedShare:
    routed = case.routed
    parts = planned_parts(routed.rows_CE, routed.target, routed.node_C, case.prices)
    return from_told(parts, routed.target, routed.node_C)


@pytest.mark.parametrize("seed", range(6))
def test_senders_and_holders_count_alike(seed: int) -> None:
    """Other rows than those that the parts were made for, in chunks."""
    rng = np.random.default_rng(seed)
    for case in cases(4, most_cells=8, most_experts=24, seed=seed):
        share, (num_cells, num_experts) = share_of(case), case.rows_CE.shape
        rows_CFE = rng.integers(0, 300, (num_cells, 3, num_experts)) * rng.integers(0, 2)
        sent = np.stack([share.rows_from(cell, rows_CFE[cell]) for cell in range(num_cells)])
        assert sent.min() >= 0
        assert np.array_equal(sent.sum(axis=-1), rows_CFE)
        assert not sent[..., ~case.routed.target.holds_EC].any()
        for cell in range(num_cells):
            assert np.array_equal(share.rows_to(cell, rows_CFE), sent[..., cell])
            target = case.routed.target
            slots_CFS = received_by_slot(share, target, cell, rows_CFE)
            assert np.array_equal(slots_CFS, sent[..., cell][..., target.experts_of(cell)])
            by_pair = sent_by_pair(share, target, cell, rows_CFE[cell])
            assert np.array_equal(by_pair, sent[cell].reshape(3, -1)[:, target.flat_N])
        assert np.array_equal(share.rows_between(rows_CFE), sent.sum(axis=2).swapaxes(0, 1))
        computed_C = sent.sum(axis=(0, 1, 2))
        assert np.array_equal(share.computed_C(rows_CFE.sum(axis=1)).sum(), computed_C.sum())


def test_takes_hardly_longer_on_the_rows_it_was_made_for() -> None:
    """See the specification, section 5: within 3 %."""
    over = []
    for case in cases(40, most_cells=8, most_experts=24, seed=3):
        moved_CC = share_of(case).rows_between(case.rows_CE[:, None])[0]
        over.append(case.prices.seconds(moved_CC, case.routed.node_C) / joint_optimum(case))
    assert np.mean(over) < 1.01
    assert max(over) < 1.03


def test_by_hand() -> None:
    """Two of three cells hold the expert, one on each node; the third cell is on the first's."""
    target = Placement(np.array([[True, True, False]]))
    kept_N, ends_VN = np.array([PARTS // 2, PARTS]), np.array([[PARTS // 4, PARTS], [0, PARTS]])
    share = PlannedShare(target, np.array([0, 7, 0]), kept_N, ends_VN)
    rows = np.array([[[80]], [[40]], [[100]]])
    # 40 stay; of the other 40 a quarter comes back, as the parts say.
    assert share.rows_from(0, rows[0]).tolist() == [[[50, 30, 0]]]
    assert share.rows_from(1, rows[1]).tolist() == [[[0, 40, 0]]]
    assert share.rows_from(2, rows[2]).tolist() == [[[25, 75, 0]]]


def test_rows_that_nobody_predicted_go_to_near_copies() -> None:
    holds_EC = np.array([[True, False, True, False]])
    node_C = np.array([0, 0, 1, 1])
    none = np.zeros((4, 1), dtype=np.int64)
    prices = RowPrices(np.ones(4), 1.0, 5.0)
    parts = planned_parts(none, Placement(holds_EC), node_C, prices)
    share = from_told(parts, Placement(holds_EC), node_C)
    rows = np.full((4, 1, 1), 10)
    sent = np.stack([share.rows_from(cell, rows[cell])[0, 0] for cell in range(4)])
    assert sent.tolist() == [[10, 0, 0, 0], [10, 0, 0, 0], [0, 0, 10, 0], [0, 0, 10, 0]]


def test_remainders_even_out_over_senders() -> None:
    """Each of eight senders has a row, which half and half divide."""
    target = Placement(np.array([[True, True, *[False] * 8]]))
    kept_N, ends_VN = np.array([PARTS, PARTS]), np.array([[PARTS // 2, PARTS]])
    share = PlannedShare(target, np.zeros(10, dtype=np.int64), kept_N, ends_VN)
    rows_CE = np.array([[0], [0], *[[1]] * 8])
    assert sorted(share.computed_C(rows_CE).tolist()[:2]) == [3, 5]


@pytest.mark.parametrize(
    ("kept", "ends", "said"),
    [
        ([0], [[1, PARTS]], "shape"),
        ([0, 0], [[1, 2]], "no whole"),
        ([-1, 0], [[1, PARTS]], "below 0"),
        ([PARTS + 1, 0], [[1, PARTS]], "keeps 4097 parts"),
    ],
)
def test_parts_are_checked(kept: list[int], ends: list[list[int]], said: str) -> None:
    target = Placement(np.array([[True, True]]))
    with pytest.raises(ValueError, match=said):
        PlannedShare(target, np.array([0, 0]), np.array(kept), np.array(ends))


def test_what_is_told_makes_the_same_share() -> None:
    for case in cases(4, most_cells=8, most_experts=24, seed=9):
        share, routed = share_of(case), case.routed
        again = from_told(as_told(share.kept_N, share.ends_VN), routed.target, routed.node_C)
        assert again.describe() == share.describe()
