# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: the spec's golden tests, the paper's loop line by line, properties. Pure.

Shape letters: E experts, C EP ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning import prophet_planner
from ds_moe_ext.planning.layer_costs import is_balanced, placement_seconds
from ds_moe_ext.planning.prophet_planner import (
    SPLITS,
    BlockPlan,
    Split,
    SplitRule,
    place_experts,
    shadow_experts,
    shadow_seconds,
    split_backward,
    split_forward,
)
from tests.planners.plainly import (
    BLOCK_PRICES,
    GATING_CE,
    ONE_EACH,
    PROPERTY,
    Block,
    blocks,
    prophesied,
    shadowed,
)

SCHEDULED = replace(BLOCK_PRICES, is_scheduled=True)
OWN = [0, 1, 2, 3]


def holders(plan: BlockPlan) -> dict[int, list[int]]:
    """Of the selected experts, in the order of selection."""
    return {e: np.flatnonzero(plan.target.holds_EC[e]).tolist() for e in plan.selected}


@pytest.mark.parametrize(
    ("n", "turns", "count"),
    [
        (
            0,
            [
                (0, [0, 1, 2, 3], [10, 18, 21, 15], [0, 6, 8, 5], 79.5),
                (2, [0, 1, 2, 3], [13, 20, 13, 18], [0, 6, 0, 5], 86.0),
            ],
            1,
        ),
        (
            1,
            [
                (0, [0, 1, 2], [17, 18, 21, 8], [7, 6, 8, 5], 75.5),
                (2, [0, 2, 3], [20, 18, 15, 11], [7, 6, 2, 5], 82.0),
            ],
            1,
        ),
        (2, [(0, [0, 2], [25, 10, 21, 8], [15, 6, 8, 5], 105.5)], 1),
    ],
)
def test_golden_p1(n: int, turns: list[tuple[object, ...]], count: int) -> None:
    """Equation (6): every turn, and what is returned."""
    assert prophesied(GATING_CE.tolist(), OWN, BLOCK_PRICES, n=n, alpha=0.5) == (turns, count)
    plan = place_experts(ONE_EACH, GATING_CE, prices=BLOCK_PRICES, num_excluded=n, balance=0.5)
    expert, ep_ranks, computed, received, seconds = turns[0]
    assert holders(plan) == {expert: ep_ranks}
    assert plan.rows.computed_C.tolist() == computed
    assert plan.rows.received_C.tolist() == received
    assert plan.seconds.step_s == seconds
    assert plan.seconds_without.step_s == 147


@pytest.mark.parametrize(
    ("n", "seconds", "replicas"),
    [
        (0, [63.5, 56.0], {0: [0, 1, 2, 3], 2: [0, 1, 2, 3]}),
        (1, [63.5, 58.0], {0: [0, 1, 2], 2: [0, 2, 3]}),
        (2, [97.5], {0: [0, 2]}),
    ],
)
def test_golden_p2(n: int, seconds: list[float], replicas: dict[int, list[int]]) -> None:
    """Equation (8): what is hidden is free, so that more is copied."""
    turns, count = prophesied(GATING_CE.tolist(), OWN, SCHEDULED, n=n, alpha=0.5)
    assert [turn.seconds for turn in turns] == seconds
    assert count == len(turns)
    plan = place_experts(ONE_EACH, GATING_CE, prices=SCHEDULED, num_excluded=n, balance=0.5)
    assert holders(plan) == replicas
    assert plan.seconds.step_s == seconds[-1]


def test_golden_p3() -> None:
    """The best prefix, though two of its steps made things slower."""
    rows_CE = np.array([[6, 6, 0, 4], [8, 7, 6, 4], [7, 5, 9, 3], [8, 2, 4, 2]])
    prices = replace(BLOCK_PRICES, weight_bytes=4.0)
    turns, count = prophesied(rows_CE.tolist(), OWN, prices, alpha=0.25)
    assert [turn.seconds for turn in turns] == [106.0, 114.5, 120.5, 85.5]
    plan = place_experts(ONE_EACH, rows_CE, prices=prices, balance=0.25)
    assert plan.selected == (0, 1, 2, 3)
    assert count == 4
    assert (plan.seconds_without.step_s, plan.seconds.step_s) == (135.5, 85.5)
    # Where not all of them fit, the fastest of those that do.
    fitting = [
        place_experts(ONE_EACH, rows_CE, prices=prices, balance=0.25, max_copied=most).selected
        for most in range(6)
    ]
    assert fitting == [(), (0,), (0,), (0,), (0, 1, 2, 3), (0, 1, 2, 3)]


def test_nothing_is_copied_that_gains_less_than_it_takes_to_start() -> None:
    """Golden P3's four experts gain 98 s if they weigh nothing; Trans and Agg start for each."""
    rows_CE = np.array([[6, 6, 0, 4], [8, 7, 6, 4], [7, 5, 9, 3], [8, 2, 4, 2]])
    free = replace(BLOCK_PRICES, weight_bytes=0.0, gradient_bytes=0.0)
    for latency_s, selected in ((0.0, (0, 1, 2, 3)), (48.0, (0, 1, 2, 3)), (50.0, ())):
        prices = replace(free, copy_latency_s=latency_s)
        assert place_experts(ONE_EACH, rows_CE, prices=prices, balance=0.25).selected == selected


def test_more_experts_than_ep_ranks() -> None:
    """Choice 8: EP rank 0 owns experts 0 and 1, and 1 has more rows; an EP rank may own none."""
    owner = Placement.owned_by(np.array([0, 0, 1]), 3)
    rows_CE = np.array([[1, 9, 2], [5, 9, 2], [5, 9, 2]])
    prices = replace(BLOCK_PRICES, weight_bytes=0.0, gradient_bytes=0.0)
    plan = place_experts(owner, rows_CE, prices=prices, balance=0.0)
    # H: 38, 6, 0; then 20, 15, 9; then 10, 20, 14; then 12, 16, 16; then 1 owns no other.
    assert plan.selected == (1, 0, 2)
    assert plan.rows.computed_C.tolist() == [12, 16, 16]


def test_automatic_exclusion_is_per_expert() -> None:
    """Choices 2 and 4: those without rows get no replica; an expert of its owner alone is passed
    by."""
    owner = Placement.owned_by(np.array([0, 0, 1, 2]), 3)
    rows_CE = np.array([[50, 4, 0, 0], [0, 6, 0, 0], [0, 0, 0, 1]])
    prices = replace(BLOCK_PRICES, weight_bytes=3.0, gradient_bytes=0.0)
    plan = place_experts(owner, rows_CE, prices=prices, num_excluded=None)
    assert holders(plan) == {1: [0, 1]}
    assert plan.seconds.gather_s == 2 / 3 * 3
    assert plan.rows.computed_C.tolist() == [54, 6, 1]


@pytest.mark.parametrize("num_excluded", [0, None])
def test_one_ep_rank(num_excluded: int | None) -> None:
    owner = Placement.block(3, 1)
    plan = place_experts(
        owner, np.array([[5, 0, 7]]), prices=SCHEDULED, num_excluded=num_excluded, balance=0.0
    )
    assert plan.target is owner


def test_no_rows_no_replicas() -> None:
    nothing_CE = np.zeros((4, 4), dtype=np.int64)
    for prices in (BLOCK_PRICES, SCHEDULED, replace(SCHEDULED, weight_bytes=0.0)):
        plan = place_experts(ONE_EACH, nothing_CE, prices=prices, balance=0.0)
        assert plan.target is ONE_EACH
        assert plan.seconds.step_s == 0


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (
            "num_excluded",
            4,
            "num_excluded is 4, but an expert has 3 EP ranks .* from 0 to 3, or null",
        ),
        ("num_excluded", -1, "num_excluded is -1"),
        ("balance", -0.5, "balance is -0.5; it must be finite and at least 0"),
        ("balance", float("nan"), "balance is nan"),
        ("balance", float("inf"), "balance is inf"),
    ],
)
def test_what_is_refused(field: str, value: float, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        place_experts(ONE_EACH, GATING_CE, prices=BLOCK_PRICES, **{field: value})  # type: ignore[arg-type]


@st.composite
def searches(draw: st.DrawFn) -> tuple[Block, int | None, float]:
    """A block, ``num_excluded`` and ``balance``."""
    block = draw(blocks())
    num_excluded = draw(st.none() | st.integers(0, block.owner.num_ep_ranks - 1))
    return block, num_excluded, draw(st.sampled_from([0.0, 0.25, 1.0, 3.0]))


@pytest.mark.parametrize("looked_at", [1, 3, prophet_planner.LOOKED_AT])
@PROPERTY
@given(searches())
def test_the_plan_is_the_papers(looked_at: int, search: tuple[Block, int | None, float]) -> None:
    """Bit for bit, but for experts that the paper selects and copies nowhere; however often the
    search looks whether more can pay."""
    with mock.patch.object(prophet_planner, "LOOKED_AT", looked_at):
        check_against_paper(search)


def check_against_paper(search: tuple[Block, int | None, float]) -> None:
    (owner, rows_CE, prices), num_excluded, balance = search
    own = owner.owner_E.tolist()
    turns, count = prophesied(rows_CE.tolist(), own, prices, n=num_excluded, alpha=balance)
    plan = place_experts(owner, rows_CE, prices=prices, num_excluded=num_excluded, balance=balance)
    copied = [turn for turn in turns[:count] if len(turn.holders) > 1]
    assert holders(plan) == {turn.expert: turn.holders for turn in copied}
    assert plan.selected == tuple(turn.expert for turn in copied)
    if count:
        last = turns[count - 1]
        assert plan.seconds.step_s == last.seconds
        assert plan.rows.computed_C.tolist() == last.computed
        assert plan.rows.received_C.tolist() == last.received
    else:
        assert plan.target is owner
    assert len(turns) <= owner.num_experts


@PROPERTY
@given(searches())
def test_properties(search: tuple[Block, int | None, float]) -> None:
    """Properties 1 to 4 of the spec."""
    (owner, rows_CE, prices), num_excluded, balance = search
    plan = place_experts(owner, rows_CE, prices=prices, num_excluded=num_excluded, balance=balance)
    target, selected = plan.target, list(plan.selected)
    assert target.holds_EC[owner.holds_EC].all()
    others = np.setdiff1d(np.arange(owner.num_experts), selected)
    assert np.array_equal(target.holds_EC[others], owner.holds_EC[others])
    if num_excluded is not None:
        assert (target.holds_EC[selected].sum(axis=1) == owner.num_ep_ranks - num_excluded).all()
    assert plan.rows.computed_C.sum() == rows_CE.sum()

    assert plan.seconds == placement_seconds(owner, target, rows_CE, prices=prices)
    assert plan.seconds_without == placement_seconds(owner, owner, rows_CE, prices=prices)
    if selected:
        assert plan.seconds.step_s < plan.seconds_without.step_s
    else:
        assert target is owner
    alone_C = np.bincount(owner.owner_E, rows_CE.sum(axis=0), minlength=owner.num_ep_ranks)
    if is_balanced(alone_C, owner.num_experts, balance):
        assert target is owner


@PROPERTY
@given(st.integers(2, 8), st.integers(1, 12), st.integers(0, 2**32 - 1), st.booleans())
def test_a_permutation_of_ep_ranks_permutes_the_plan(
    num_ep_ranks: int, num_experts: int, seed: int, is_scheduled: bool
) -> None:
    """Property 5, on rows so many that none are equal; how they lie in memory does not matter."""
    rng = np.random.default_rng(seed)
    rows_CE = (1e9 * rng.random((num_ep_ranks, num_experts)) ** 4).astype(np.int64)
    owner = Placement.owned_by(rng.integers(0, num_ep_ranks, num_experts), num_ep_ranks)
    order_C = rng.permutation(num_ep_ranks)
    prices = replace(BLOCK_PRICES, weight_bytes=1e9, is_scheduled=is_scheduled)
    plan = place_experts(owner, rows_CE, prices=prices, num_excluded=1, balance=0.1)
    permuted = place_experts(
        Placement(owner.holds_EC[:, order_C]),
        np.asfortranarray(rows_CE[order_C].astype(np.uint32)),
        prices=prices,
        num_excluded=1,
        balance=0.1,
    )
    assert permuted.selected == plan.selected
    assert permuted.seconds == plan.seconds
    assert np.array_equal(permuted.target.holds_EC, plan.target.holds_EC[:, order_C])


# FasterMoE's policy: the golden test, and the policy line by line. Pure.


# Golden P7: one byte an element, d = 1 and alpha_h = 1, so that w = 4 / 8 s, feat = 1 s and an
# expert has 2 elements.
P7_PRICES = replace(BLOCK_PRICES, weight_bytes=2.0, gradient_bytes=2.0)


def test_golden_p7() -> None:
    """Expert rows are 34, 10, 12, 8."""
    assert shadowed(GATING_CE.tolist(), P7_PRICES) == ([0, 2, 1], [187, 68, 59, 50])
    costs = [
        shadow_seconds(P7_PRICES, most_rows=rows, num_shadows=shadows)
        for shadows, rows in enumerate([34, 12, 10, 8])
    ]
    assert costs == [187, 68, 59, 50]
    plan = shadow_experts(ONE_EACH, GATING_CE, prices=P7_PRICES)
    assert plan.selected == (0, 2, 1)
    assert plan.target.holds_EC.tolist() == [[True] * 4] * 3 + [[False, False, False, True]]
    # EP rank 3 gets the 5 rows of expert 3 beside its own 16; three experts go there and back.
    assert plan.rows.computed_C.tolist() == [15, 14, 14, 21]
    assert plan.seconds.step_s == 4 * 5 + 3 * 21 / 2 + 3 * 2 + 3 * 2
    assert plan.seconds_without.step_s == 147
    fitting = shadow_experts(ONE_EACH, GATING_CE, prices=P7_PRICES, max_copied=2)
    assert fitting.selected == plan.selected[:2]
    assert not shadow_experts(ONE_EACH, GATING_CE, prices=P7_PRICES, max_copied=0).selected


def test_it_stops_at_the_first_that_is_no_gain() -> None:
    """The third would pay for the second, but is never looked at."""
    rows_CE = np.array([[30, 20, 20, 1]])
    prices = replace(P7_PRICES, row_bytes=0.0, row_s=1 / 3)  # 30, 20 + 2, 20 + 4, 1 + 6
    plan = shadow_experts(Placement.block(4, 1), rows_CE, prices=prices)
    assert plan.selected == (0,)


def test_nothing_to_gain() -> None:
    dear = replace(P7_PRICES, weight_bytes=1000.0)
    plan = shadow_experts(ONE_EACH, GATING_CE, prices=dear)
    assert plan.target is ONE_EACH
    assert plan.seconds == plan.seconds_without
    with pytest.raises(ValueError, match="rows have shape"):
        shadow_experts(ONE_EACH, GATING_CE.T[:3], prices=dear)


@PROPERTY
@given(blocks())
def test_the_plan_is_fastermoes(block: Block) -> None:
    owner, rows_CE, prices = block
    plan = shadow_experts(owner, rows_CE, prices=prices)
    shadows, _ = shadowed(rows_CE.tolist(), prices)
    assert plan.selected == tuple(shadows)
    is_shadow_E = np.isin(np.arange(owner.num_experts), shadows)
    assert np.array_equal(plan.target.holds_EC, owner.holds_EC | is_shadow_E[:, None])
    assert plan.seconds == placement_seconds(owner, plan.target, rows_CE, prices=prices)


# Copies under two computations: the golden test, both rules both ways, properties. Pure.


FNEC_FIRST, HALF = SPLITS["fnec_first"], SPLITS["half"]


def test_golden_p6() -> None:
    """Two moves of 4 s fit into 9 s: the last two in forward, the first two in backward."""
    selected = (7, 5, 6)
    forward = split_forward(selected, rule=FNEC_FIRST, layer_s=9.0, move_s=4.0)
    assert forward == Split(first=(7,), second=(5, 6))
    backward = split_backward(selected, rule=FNEC_FIRST, layer_s=9.0, move_s=4.0)
    assert backward == Split(first=(7, 5), second=(6,))


@pytest.mark.parametrize(
    ("layer_s", "move_s", "beside_layer"),
    [(0.0, 4.0, 0), (3.9, 4.0, 0), (4.0, 4.0, 1), (1e300, 1e-300, 3), (0.0, 0.0, 3), (9.0, 0.0, 3)],
)
def test_how_many_the_layer_hides(layer_s: float, move_s: float, beside_layer: int) -> None:
    split = split_forward((0, 1, 2), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)
    assert len(split.second) == beside_layer
    split = split_backward((0, 1, 2), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)
    assert len(split.first) == beside_layer


def test_halves() -> None:
    """The odd expert goes beside the layer, whatever fits there."""
    for layer_s in (0.0, 99.0):
        forward = split_forward((4, 2, 0, 1, 3), rule=HALF, layer_s=layer_s, move_s=1.0)
        assert forward == Split(first=(4, 2), second=(0, 1, 3))
        backward = split_backward((4, 2, 0, 1, 3), rule=HALF, layer_s=layer_s, move_s=1.0)
        assert backward == Split(first=(4, 2, 0), second=(1, 3))


@pytest.mark.parametrize(("layer_s", "move_s"), [(-1.0, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_times_that_cannot_be(layer_s: float, move_s: float) -> None:
    for split in (split_forward, split_backward):
        with pytest.raises(ValueError, match=f"takes {layer_s} s and a move {move_s} s; give"):
            split((0,), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)


@PROPERTY
@given(
    st.lists(st.integers(0, 99), unique=True),
    st.sampled_from(sorted(SPLITS.values(), key=lambda rule: rule.__name__)),
    st.floats(0, 100),
    st.floats(0, 10),
    st.sampled_from([split_forward, split_backward]),
)
def test_all_experts_move_once_in_order(
    selected: list[int],
    rule: SplitRule,
    layer_s: float,
    move_s: float,
    split: Callable[..., Split],
) -> None:
    both = split(selected, rule=rule, layer_s=layer_s, move_s=move_s)
    assert list(both.first + both.second) == selected


@PROPERTY
@given(st.integers(0, 9), st.floats(0.25, 4), st.floats(0, 40), st.floats(0, 40))
def test_the_layer_first_exposes_least(
    num_experts: int, move_s: float, layer_s: float, expert_s: float
) -> None:
    """Of whole experts, no other number beside the layer exposes less than one move less."""
    split = split_forward(range(num_experts), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)

    def exposed(beside_layer: int) -> float:
        rest = num_experts - beside_layer
        return max(0.0, beside_layer * move_s - layer_s) + max(0.0, rest * move_s - expert_s)

    least = min(map(exposed, range(num_experts + 1)))
    assert exposed(len(split.second)) <= least + move_s + 1e-9
