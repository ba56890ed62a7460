# SPDX-License-Identifier: Apache-2.0
"""The shape of a zebra group: which experts move, what fits, and which shape is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.planning.zebra_costs import (
    MoeModel,
    RankClass,
    TwoClasses,
    ZebraShape,
    price_step,
    stripe_times,
)
from ds_moe_ext.planning.zebra_planner import (
    PricedShape,
    RefusedShape,
    Stock,
    ZebraGroup,
    assign_experts,
    best_shape,
    price_shape,
    price_shapes,
)
from tests.planners.plainly import PROPERTY

RANKS = TwoClasses(
    model=MoeModel(num_layers=4, num_experts=12, top_k=2, width=4, expert_width=8, length=1),
    new=RankClass(attention_s=0.5, expert_s=0.8),
    old=RankClass(attention_s=1.5, expert_s=1),
    link=Link(bytes_per_s=160),
)


def shape_of(attention: int, expert: int, stripes: int = 4) -> ZebraShape:
    return ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=stripes)


def with_rooms(new: int | None, old: int | None) -> TwoClasses:
    return replace(RANKS, new=replace(RANKS.new, room=new), old=replace(RANKS.old, room=old))


def test_experts_move_as_algorithm_1_says() -> None:
    shape = shape_of(3, 3, stripes=8)
    group = ZebraGroup(num_experts=12, num_layers=4, attention_ranks=3, expert_ranks=3)
    assigned = assign_experts(group, stripe_times(RANKS, shape, 24))
    priced = price_shape(RANKS, shape, 8)
    assert priced.moved_L == assigned.moved_L == (1, 1, 1, 1)
    assert priced.price == price_step(RANKS, shape, 24, assigned.moved_L)
    at_home = price_shape(RANKS, shape, 8, moves=False)
    assert at_home.moved_L == (0, 0, 0, 0)
    assert at_home.price.step_s > priced.price.step_s


def test_experts_stay_where_moving_them_does_not_pay() -> None:
    """G8: two layers, two stripes. Algorithm 1 would move experts of the second layer."""
    model = MoeModel(num_layers=2, num_experts=6, top_k=1, width=1, expert_width=1, length=1)
    ranks = TwoClasses(
        model=model,
        new=RankClass(attention_s=3, expert_s=4, head_s=3),
        old=RankClass(attention_s=9, expert_s=4),
        link=Link(bytes_per_s=model.sent_bytes),
        backward=2,
    )
    priced = price_shape(ranks, shape_of(1, 1, stripes=2), 2)
    group = ZebraGroup(num_experts=6, num_layers=2, attention_ranks=1, expert_ranks=1)
    assert assign_experts(group, stripe_times(ranks, priced.shape, 2)).moved_L == (0, 1)
    assert priced.moved_L == (0, 0)
    assert priced.price.step_s == approx(68)


@pytest.mark.parametrize(("attention", "expert"), [(2, 3), (3, 2), (4, 6)])
def test_no_expert_moves_between_numbers_that_do_not_divide(attention: int, expert: int) -> None:
    assert sum(price_shape(RANKS, shape_of(attention, expert), 4).moved_L) == 0


def test_what_does_not_fit_moves_or_is_refused() -> None:
    """48 experts; 3 expert ranks with room for 14 each lack 6, which is 2 of each rank."""
    must = price_shape(with_rooms(None, 14), shape_of(3, 3), 4)
    assert sum(must.moved_L) >= 2
    with pytest.raises(ValueError, match="the model does not fit"):
        price_shape(with_rooms(1, 14), shape_of(3, 3), 4)
    match = "3 expert ranks with room for 14 experts each lack room for 6 of 48"
    with pytest.raises(ValueError, match=match):
        price_shape(with_rooms(None, 14), shape_of(2, 3), 4)
    with pytest.raises(ValueError, match=match):
        price_shape(with_rooms(None, 14), shape_of(3, 3), 4, moves=False)
    few = price_shape(with_rooms(2, None), shape_of(3, 3), 4)
    assert sum(few.moved_L) <= 2


def test_expert_ranks_hold_equally_many() -> None:
    with pytest.raises(ValueError, match="num_experts is 12, which 5 expert ranks do not divide"):
        price_shape(RANKS, shape_of(1, 5), 4)


def test_shapes_are_priced_or_refused_in_their_order() -> None:
    shapes = [shape_of(1, 5), shape_of(2, 2), shape_of(2, 2, stripes=8)]
    refused, priced, too_many = price_shapes(RANKS, shapes, 4)
    assert isinstance(refused, RefusedShape) and "do not divide" in refused.why
    assert isinstance(priced, PricedShape) and priced == price_shape(RANKS, shapes[1], 4)
    assert isinstance(too_many, RefusedShape) and "need one for each" in too_many.why
    assert best_shape([refused, priced, too_many]) == priced
    assert best_shape([refused]) is None


def test_a_cluster_is_made_of_groups() -> None:
    stock = Stock(new_ranks=6, old_ranks=12)
    assert stock.num_groups(shape_of(1, 2)) == 6
    assert stock.num_groups(shape_of(4, 2)) == 1
    assert stock.num_groups(shape_of(7, 2)) == 0
    large, small = price_shapes(RANKS, [shape_of(4, 4), shape_of(2, 4)], 8)
    assert isinstance(large, PricedShape) and isinstance(small, PricedShape)
    assert large.price.tokens_per_s > small.price.tokens_per_s
    assert best_shape([large, small]) == large
    assert best_shape([large, small], stock) == small  # three groups of it
    assert best_shape([large], Stock(new_ranks=3, old_ranks=9)) is None


@PROPERTY
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.integers(1, 4),
    st.none() | st.integers(0, 30),
    st.none() | st.integers(0, 30),
)
def test_what_is_priced_fits_and_is_no_slower_than_at_home(
    attention: int, expert: int, stripes: int, new_room: int | None, old_room: int | None
) -> None:
    ranks, shape = with_rooms(new_room, old_room), shape_of(attention, expert, stripes)
    (priced,) = price_shapes(ranks, [shape], 4)
    (at_home,) = price_shapes(ranks, [shape], 4, moves=False)
    if isinstance(priced, RefusedShape):
        assert isinstance(at_home, RefusedShape)
        return
    moved = sum(priced.moved_L)
    gained = moved * expert / attention
    assert gained == int(gained)
    assert new_room is None or gained <= new_room
    assert old_room is None or 4 * 12 / expert - moved <= old_room
    if isinstance(at_home, PricedShape):
        assert priced.price.step_s <= at_home.price.step_s
