# SPDX-License-Identifier: Apache-2.0
"""Pro-Prophet's model: its equations by hand, rows against the share and row by row. Pure.

Shape letters: E experts, C EP ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.layer_costs import (
    block_seconds,
    copied_experts,
    ep_rank_rows,
    is_balanced,
    placement_seconds,
    whole_rows,
)
from ds_moe_ext.planning.prices import overlap_degree, replicas_that_fit
from tests.planners.plainly import (
    BLOCK_PRICES,
    GATING_CE,
    ONE_EACH,
    PROPERTY,
    Block,
    block_time,
    blocks,
    owner_loads,
)


def test_rows_of_the_papers_figure() -> None:
    """Golden P5: expert 0 on EP ranks 0 and 1, expert 1 on all three."""
    owner, rows_CE = Placement.block(3, 3), np.array([[2, 1, 0], [3, 0, 0], [0, 1, 2]])
    before = ep_rank_rows(owner, owner, rows_CE)
    assert before.computed_C.tolist() == [5, 2, 2]
    assert before.received_C.tolist() == [3, 2, 0]
    replicas_EC = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1]], dtype=bool)
    after = ep_rank_rows(owner, owner.with_replicas(replicas_EC), rows_CE)
    assert after.computed_C.tolist() == [3, 3, 3]
    assert after.received_C.tolist() == [0, 0, 0]


def test_seconds_by_hand() -> None:
    """Golden P1 without replicas, and with experts 0 and 2 everywhere; golden P2 for the latter."""
    alone = placement_seconds(ONE_EACH, ONE_EACH, GATING_CE, prices=BLOCK_PRICES)
    assert (alone.exchange_s, alone.expert_s, alone.gather_s, alone.reduce_s) == (24, 17, 0, 0)
    assert alone.step_s == 4 * 24 + 3 * 17 == 147
    target = ONE_EACH.with_replicas(np.array([[1], [0], [1], [0]]) * np.ones(4) > 0)
    given = {"most_received": 6, "most_computed": 20, "copied": 2.0}
    copied = placement_seconds(ONE_EACH, target, GATING_CE, prices=BLOCK_PRICES)
    assert copied == block_seconds(BLOCK_PRICES, **given)
    assert (copied.exchange_s, copied.expert_s, copied.gather_s, copied.reduce_s) == (6, 10, 16, 16)
    assert copied.step_s == 24 + 30 + 16 + 16
    scheduled = replace(BLOCK_PRICES, is_scheduled=True)
    # 16 s behind 10 s of experts and 4 s of the layer; 16 s behind 20 s and 8 s.
    assert block_seconds(scheduled, **given).step_s == 24 + 30 + 2 + 0
    # A second gather beside the reduction: 32 s behind the same 28 s.
    again = replace(scheduled, gathers_again=True)
    assert block_seconds(again, **given).step_s == 24 + 30 + 2 + 4
    again = replace(BLOCK_PRICES, gathers_again=True)
    assert block_seconds(again, **given).step_s == copied.step_s + 16


def test_replicas_that_take_no_time_but_to_start() -> None:
    """Trans and Agg have a latency each where anything is copied; what hides them hides that."""
    free = replace(BLOCK_PRICES, weight_bytes=0.0, gradient_bytes=0.0, copy_latency_s=5.0)
    rows = {"most_received": 6, "most_computed": 20}
    assert block_seconds(free, **rows, copied=0.0).step_s == 24 + 30
    for copied in (0.25, 2.0):
        assert block_seconds(free, **rows, copied=copied).step_s == 24 + 30 + 5 + 5
        again = replace(free, gathers_again=True)
        assert block_seconds(again, **rows, copied=copied).step_s == 24 + 30 + 5 + 10
        scheduled = replace(free, is_scheduled=True)
        assert block_seconds(scheduled, **rows, copied=copied).step_s == 24 + 30


def test_a_copys_share_of_ep_ranks() -> None:
    """Golden P6: two experts on 3 of 4 EP ranks; an expert at the owner alone is not moved."""
    holds_EC = np.array([[1, 1, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=bool)
    copied = copied_experts(Placement(holds_EC))
    assert copied == 2 * 3 / 4
    assert (
        block_seconds(BLOCK_PRICES, most_received=0, most_computed=0, copied=copied).gather_s == 12
    )
    assert copied_experts(ONE_EACH) == 0


def test_balance() -> None:
    """Equation (7) is strict: with alpha 0.5, 64 rows and 4 experts, 8 rows are too many."""
    assert is_balanced(np.array([20, 13, 16, 15]), 4, 0.5)
    assert not is_balanced(np.array([20, 12, 16, 16]), 4, 0.5)
    assert not is_balanced(np.array([7, 7]), 2, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("row_s", -1.0),
        ("row_bytes", float("nan")),
        ("bytes_per_s", 0.0),
        ("copy_bytes_per_s", 0.0),
        ("copy_latency_s", -1e-6),
        ("weight_bytes", float("inf")),
        ("backward_gap_s", -0.5),
    ],
)
def test_costs_that_no_cluster_has(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; costs are finite"):
        replace(BLOCK_PRICES, **{field: value})


@pytest.mark.parametrize(
    ("rows_CE", "expected"),
    [
        (GATING_CE[:3], r"shape \(3, 4\), but the layer has 4 EP ranks and 4 experts"),
        (GATING_CE / 2, "rows are float64, but planners count whole rows; round them"),
        (GATING_CE - 2, "rows go from -1 to 8; give counts from 0 to "),
        (GATING_CE * 2**50, "give counts from 0 to "),
    ],
)
def test_rows_that_cannot_be(rows_CE: np.ndarray, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        whole_rows(ONE_EACH, rows_CE)


@PROPERTY
@given(blocks(), st.integers(0, 2**32 - 1))
def test_rows_and_seconds_are_those_counted_row_by_row(block: Block, seed: int) -> None:
    """And rows are those of the share; copies lose none, and never let an EP rank receive more."""
    owner, rows_CE, prices = block
    replicas_EC = np.random.default_rng(seed).random(owner.holds_EC.shape) < 0.3
    target = owner.with_replicas(replicas_EC)
    rows = ep_rank_rows(owner, target, rows_CE)
    holders = {e: np.flatnonzero(holds_C).tolist() for e, holds_C in enumerate(target.holds_EC)}
    own = owner.owner_E.tolist()
    counted = owner_loads(rows_CE.tolist(), own, holders)
    assert (rows.computed_C.tolist(), rows.received_C.tolist()) == counted
    assert rows.computed_C.tolist() == LocalElseOwner(owner, target).computed_C(rows_CE).tolist()
    assert rows.computed_C.sum() == rows_CE.sum()
    assert (rows.received_C <= ep_rank_rows(owner, owner, rows_CE).received_C).all()
    seconds = placement_seconds(owner, target, rows_CE, prices=prices).step_s
    assert seconds == block_time(prices, rows_CE.tolist(), own, holders)


@PROPERTY
@given(blocks(), st.integers(0, 5000), st.integers(0, 5000), st.lists(st.floats(0, 64), min_size=2))
def test_equation_8_hides_and_replicas_cost(
    block: Block, most_received: int, most_computed: int, copied: list[float]
) -> None:
    """Properties 11: (8) is at most (6); neither falls with more replicas and the same rows."""
    modes = [replace(block.prices, is_scheduled=is_scheduled) for is_scheduled in (True, False)]
    hidden, shown = (
        [
            block_seconds(
                prices, most_received=most_received, most_computed=most_computed, copied=number
            ).step_s
            for number in sorted(copied)
        ]
        for prices in modes
    )
    assert all(less <= more for less, more in zip(hidden, shown))
    assert hidden == sorted(hidden)
    assert shown == sorted(shown)


# Overlap degree, replicas that fit, memory: the spec's golden tests. Pure.


@pytest.mark.parametrize(
    ("window_s", "latency_s", "degree"),
    [
        (5e-3, 0.0, 13),  # H7: 13.245
        (5e-3, 94e-6, 12),  # 12.996: the latency takes the 13th
        (1.0, 0.0, 64),  # no more than there are
        (0.0, 0.0, 0),
        (50e-6, 94e-6, 0),
    ],
)
def test_h7_overlap_degree(window_s: float, latency_s: float, degree: int) -> None:
    found = overlap_degree(
        window_s,
        bytes_per_s=12.5e9,
        expert_bytes=4 * 768**2 * 2,
        num_experts=64,
        latency_s=latency_s,
    )
    assert found == degree


def test_replicas_that_fit() -> None:
    # 100 bytes free, experts of 3 bytes, 4 layers: 100 / 12.
    assert replicas_that_fit(100, expert_bytes=3, layers_held=4) == 8
    # With room for the gradients of one layer: 100 / 15.
    assert replicas_that_fit(100, expert_bytes=3, layers_held=4, layers_reduced=1) == 6
    # Released after forward: one layer's replicas and their gradients: 100 / 6.
    assert replicas_that_fit(100, expert_bytes=3, layers_held=1, layers_reduced=1) == 16
    assert replicas_that_fit(-5, expert_bytes=3, layers_held=1) == 0
