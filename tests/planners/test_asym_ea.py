# SPDX-License-Identifier: Apache-2.0
"""HeterMoE's Asym-EA: golden tests, Algorithm 1 line by line, and all small assignments.

Shape letter: L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.planning.zebra_costs import LayerTimes
from ds_moe_ext.planning.zebra_planner import (
    VARIANTS,
    AsymmetricAssignment,
    Chunk,
    Squeeze,
    ZebraGroup,
    assign_experts,
    squeeze_seconds,
    squeeze_seconds_as_printed,
)
from tests.planners.plainly import PROPERTY


def group_of(num_experts: int, num_layers: int, attention: int, expert: int) -> ZebraGroup:
    return ZebraGroup(
        num_experts=num_experts,
        num_layers=num_layers,
        attention_ranks=attention,
        expert_ranks=expert,
    )


def times_of(attention_s: float, expert_s: float, expert_on_attention_s: float) -> LayerTimes:
    return LayerTimes(
        attention_s=attention_s, expert_s=expert_s, expert_on_attention_s=expert_on_attention_s
    )


G1, G1_TIMES = group_of(6, 8, 1, 1), times_of(3, 4, 4)
G2, G3, UNEQUAL_TIMES = group_of(24, 10, 4, 8), group_of(24, 8, 4, 2), times_of(6, 10, 8)


# Golden tests.


def gained_L(plan: AsymmetricAssignment) -> tuple[int, ...]:
    """Experts that each attention rank gains."""
    return tuple(plan.chunk.per_attention_rank * chunks for chunks in plan.chunks_L)


def test_g1_equally_many_ranks() -> None:
    plan = assign_experts(G1, G1_TIMES)
    assert (plan.chunk, squeeze_seconds(G1, G1_TIMES)) == (Chunk(1, 1), Fraction(4, 3))
    assert plan.moved_L == gained_L(plan) == (0, 1, 1, 1, 0, 1, 1, 1)
    assert bubbles(G1, G1_TIMES, plan.chunks_L) == [1, *two_thirds_down(), 1, *two_thirds_down()]
    assert assign_experts(replace(G1, num_layers=3), G1_TIMES).moved_L == (0, 1, 1)  # Fig. 6(b)


def two_thirds_down() -> list[Fraction]:
    return [Fraction(2, 3), Fraction(1, 3), Fraction(0)]


def bubbles(group: ZebraGroup, times: LayerTimes, chunks_L: Sequence[int]) -> list[Fraction]:
    """What is left of the bubble behind each layer."""
    squeeze_s = squeeze_seconds(group, times)
    return [
        layer * times.gather_s - moved * squeeze_s
        for layer, moved in enumerate(accumulate(chunks_L), start=1)
    ]


def test_g1_where_floats_fall_short() -> None:
    plan = assign_experts(replace(G1, num_layers=14), times_of(3, 4, 3))
    assert plan.moved_L == (0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1)


def test_g2_more_expert_ranks() -> None:
    plan = assign_experts(G2, UNEQUAL_TIMES)
    assert (plan.chunk, squeeze_seconds(G2, UNEQUAL_TIMES)) == (Chunk(2, 1), Fraction(26, 3))
    assert plan.moved_L == (0, 0, 1, 0, 1, 0, 1, 0, 1, 0)
    assert gained_L(plan) == (0, 0, 2, 0, 2, 0, 2, 0, 2, 0)
    printed = assign_experts(G2, UNEQUAL_TIMES, squeeze=VARIANTS["printed"])
    assert squeeze_seconds_as_printed(G2, UNEQUAL_TIMES) == Fraction(28, 3)
    assert printed.moved_L == (0, 0, 1, 0, 1, 0, 1, 0, 0, 1)


def test_g3_more_attention_ranks() -> None:
    plan = assign_experts(G3, UNEQUAL_TIMES)
    assert (plan.chunk, squeeze_seconds(G3, UNEQUAL_TIMES)) == (Chunk(1, 2), Fraction(7, 3))
    assert plan.moved_L == (2, 4, 4, 2, 4, 4, 4, 2)
    assert gained_L(plan) == (1, 2, 2, 1, 2, 2, 2, 1)
    printed = assign_experts(G3, UNEQUAL_TIMES, squeeze=VARIANTS["printed"])
    assert squeeze_seconds_as_printed(G3, UNEQUAL_TIMES) == Fraction(13, 6)
    assert printed.moved_L == (2, 4, 4, 4, 4, 4, 2, 4)


@pytest.mark.parametrize(
    ("attention", "expert", "chunk"),
    [(6, 6, Chunk(1, 1)), (6, 3, Chunk(1, 2)), (2, 6, Chunk(3, 1)), (2, 8, Chunk(4, 1))],
)
def test_chunks(attention: int, expert: int, chunk: Chunk) -> None:
    assert group_of(24, 1, attention, expert).chunk == chunk


@pytest.mark.parametrize(
    ("most", "alpha", "moved_L"),
    [
        (2, Fraction(1, 3), (0, 0, 0, 1, 0, 0, 0, 1)),
        (3, Fraction(1, 2), (0, 0, 1, 0, 0, 1, 0, 1)),
        (4, Fraction(2, 3), (0, 1, 0, 1, 0, 1, 0, 1)),
        (5, Fraction(5, 6), (0, 1, 0, 1, 1, 0, 1, 1)),
        (6, Fraction(1), (0, 1, 1, 1, 0, 1, 1, 1)),
    ],
)
def test_g4_upper_bounds(most: int, alpha: Fraction, moved_L: tuple[int, ...]) -> None:
    plan = assign_experts(G1, G1_TIMES, max_moved=most)
    assert plan.moved_L == moved_L
    assert plan.rate * squeeze_seconds(G1, G1_TIMES) == alpha * G1_TIMES.gather_s


@pytest.mark.parametrize(
    ("least", "beta", "moved_L"),
    [
        (6, Fraction(1), (0, 1, 1, 1, 0, 1, 1, 1)),
        (7, Fraction(7, 6), (0, 1, 1, 1, 1, 1, 1, 1)),
        (9, Fraction(3, 2), (1, 1, 1, 1, 1, 1, 1, 2)),
        (12, Fraction(2), (1, 2, 1, 2, 1, 2, 1, 2)),
    ],
)
def test_g5_lower_bounds(least: int, beta: Fraction, moved_L: tuple[int, ...]) -> None:
    plan = assign_experts(G1, G1_TIMES, min_moved=least)
    assert plan.moved_L == moved_L
    assert plan.rate * squeeze_seconds(G1, G1_TIMES) == beta * G1_TIMES.gather_s


def test_table_3() -> None:
    """Mixtral-D1 on O1 at 8K, by the ratio that the spec derives from it (6.4)."""
    plan = assign_experts(group_of(24, 8, 6, 6), times_of(0.62, 1, 0.8))
    assert plan.moved_L == (0, 1, 1, 1, 1, 1, 0, 1)


# Bounds and their units (A3 to A5).


def test_bounds_count_experts_of_the_group_and_of_a_rank() -> None:
    """Of G2 a chunk is 8 experts: one of each expert rank, two for each attention rank."""
    assert sum(assign_experts(G2, UNEQUAL_TIMES, min_moved=32).chunks_L) == 4
    assert sum(assign_experts(G2, UNEQUAL_TIMES, min_moved=33).chunks_L) == 5
    assert sum(assign_experts(G2, UNEQUAL_TIMES, max_moved=7).chunks_L) == 3
    assert sum(assign_experts(G2, UNEQUAL_TIMES, max_moved=8).chunks_L) == 4
    # And of G3 4: two of each expert rank, one for each attention rank.
    assert sum(assign_experts(G3, UNEQUAL_TIMES, min_moved=53).chunks_L) == 14
    assert sum(assign_experts(G3, UNEQUAL_TIMES, max_moved=7).chunks_L) == 7


@pytest.mark.parametrize("times", [times_of(4, 4, 4), times_of(5, 4, 4), times_of(0, 0, 0)])
def test_slow_attention_takes_only_what_it_must(times: LayerTimes) -> None:
    assert assign_experts(G1, times).moved_L == (0,) * 8
    assert assign_experts(G1, times, min_moved=4).moved_L == (0, 1) * 4


def test_expert_ranks_may_be_left_without_experts() -> None:
    assert assign_experts(G1, G1_TIMES, min_moved=48).moved_L == (6,) * 8
    assert assign_experts(G1, times_of(0, 4, 0)).moved_L == (6,) * 8


def test_a_chunk_that_no_layer_has_does_not_move() -> None:
    """Two experts on each of two ranks, and chunks of four."""
    group = group_of(4, 3, 8, 2)
    assert (group.chunk, group.layer_chunks) == (Chunk(1, 4), 0)
    assert assign_experts(group, times_of(1, 9, 1)).moved_L == (0, 0, 0)


def test_half_a_chunk_of_a_layer_stays() -> None:
    """Three experts a rank, chunks of two: the bubble would pay for three halves."""
    group = group_of(3, 4, 2, 1)
    assert assign_experts(group, times_of(0, 9, 0)).moved_L == (2,) * 4
    assert assign_experts(group, times_of(0, 9, 0), max_moved=99).moved_L == (2,) * 4


def test_measured_times_are_rounded() -> None:
    """Tenths are no binary fractions, yet three bubbles of 0.1 pay for one chunk of 0.3."""
    group, times = group_of(2, 6, 1, 1), times_of(0.2, 0.3, 0.3)
    assert 3 * times.gather_s < squeeze_seconds(group, times)
    assert assign_experts(group, times).moved_L == (0, 0, 1, 0, 0, 1)


@pytest.mark.parametrize(
    ("min_moved", "max_moved", "expected"),
    [
        (-1, None, "min_moved is -1; it must be at least 0"),
        (0, -1, "max_moved is -1; it must be at least 0"),
        (
            49,
            None,
            "min_moved is 49, but 8 layers can give 48 experts, 1 at a time; the model does",
        ),
        (4, 3, "min_moved is 4, for which 4 experts must move, 1 at a time, but max_moved, 3 on"),
        (1, 0, "has room for 0; the model does not fit: lower min_moved or raise max_moved"),
    ],
)
def test_bad_bounds(min_moved: int, max_moved: int | None, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        assign_experts(G1, G1_TIMES, min_moved=min_moved, max_moved=max_moved)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 8, 1, 1), "num_experts is 0; it must be at least 1"),
        ((6, 0, 1, 1), "num_layers is 0"),
        ((6, 8, 0, 1), "attention_ranks is 0"),
        ((6, 8, 1, 0), "expert_ranks is 0"),
        ((6, 8, 4, 4), "num_experts is 6, which expert_ranks, 4, does not divide; all expert"),
        ((6, 8, 4, 3), "attention_ranks is 4 and expert_ranks 3, of which neither divides"),
    ],
)
def test_bad_groups(numbers: tuple[int, int, int, int], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        group_of(*numbers)
    assert expected in str(caught.value)


@pytest.mark.parametrize("time_s", [-1.0, float("inf"), float("nan")])
def test_bad_times(time_s: float) -> None:
    with pytest.raises(ValueError, match=r"expert_s is .*; it must be a finite time of at least 0"):
        times_of(3, time_s, 4)


# Properties.


@st.composite
def groups(draw: st.DrawFn, max_layers: int = 12) -> ZebraGroup:
    fewer = draw(st.integers(1, 4))
    ranks = draw(st.permutations([fewer, fewer * draw(st.integers(1, 4))]))
    per_rank = draw(st.integers(1, 8))
    num_layers = draw(st.integers(1, max_layers))
    return group_of(per_rank * ranks[1], num_layers, ranks[0], ranks[1])


TIMES = st.builds(times_of, *[st.floats(0, 100, allow_subnormal=False)] * 3)
WHOLE_TIMES = st.builds(times_of, *[st.integers(0, 12)] * 3)
SQUEEZES = st.sampled_from(sorted(VARIANTS)).map(VARIANTS.__getitem__)


def algorithm_1(group: ZebraGroup, gather_s: Fraction, squeeze_s: Fraction) -> list[int]:
    """Chunks of each layer, by the listing; what a layer cannot give is carried (A4)."""
    bubble_s, chunks_L = Fraction(0), []
    for _ in range(group.num_layers):
        bubble_s += gather_s
        chunks = 0
        if bubble_s >= squeeze_s:
            chunks = min(bubble_s // squeeze_s, group.layer_chunks)
            bubble_s -= chunks * squeeze_s
        chunks_L.append(chunks)
    return chunks_L


@PROPERTY
@given(group=groups(), times=WHOLE_TIMES, variant=SQUEEZES, data=st.data())
def test_algorithm_1(
    group: ZebraGroup, times: LayerTimes, variant: Squeeze, data: st.DataObject
) -> None:
    """In fractions, with alpha and beta as rule 30 has them, in the units of A5."""
    room = group.num_layers * group.layer_chunks
    least = data.draw(st.integers(0, room))
    most = data.draw(st.integers(least, room))
    min_moved, max_moved = least * group.chunk_experts, most * group.chunk.per_attention_rank
    plan = assign_experts(group, times, min_moved=min_moved, max_moved=max_moved, squeeze=variant)
    if times.gather_s > 0:
        squeeze_s = variant(group, times)
        total_s = group.num_layers * times.gather_s
        alpha = min(most * squeeze_s / total_s, Fraction(1))
        beta = max(least * squeeze_s / total_s, Fraction(1))
        rate_s = alpha * beta * times.gather_s
        assert list(plan.chunks_L) == algorithm_1(group, rate_s, squeeze_s)
    assert least <= sum(plan.chunks_L) <= most


@PROPERTY
@given(group=groups(), times=TIMES, variant=SQUEEZES, data=st.data())
def test_bounds_hold_in_any_time(
    group: ZebraGroup, times: LayerTimes, variant: Squeeze, data: st.DataObject
) -> None:
    """Also a bound that is not whole chunks; and no layer gives what it does not have."""
    per_rank = group.num_experts // group.expert_ranks
    most = data.draw(st.integers(0, group.num_layers * group.num_experts))
    room = min(most // group.chunk.per_attention_rank, group.num_layers * group.layer_chunks)
    least = data.draw(st.integers(0, room * group.chunk_experts))
    plan = assign_experts(group, times, min_moved=least, max_moved=most, squeeze=variant)
    assert group.expert_ranks * sum(plan.moved_L) >= least
    assert sum(gained_L(plan)) <= most
    for moved, gained in zip(plan.moved_L, gained_L(plan)):
        assert 0 <= moved <= per_rank
        assert moved * group.expert_ranks == gained * group.attention_ranks


@PROPERTY
@given(group=groups(), times=TIMES)
def test_bubbles_stay_within_a_chunk(group: ZebraGroup, times: LayerTimes) -> None:
    """Where layers have enough to give; of rounded times but for a billionth of a chunk."""
    plan = assign_experts(group, times)
    if times.gather_s <= 0:
        assert plan.moved_L == (0,) * group.num_layers
        return
    squeeze_s = squeeze_seconds(group, times)
    tie_s = squeeze_s / 10**9
    left = bubbles(group, times, plan.chunks_L)
    assert all(bubble_s >= -tie_s for bubble_s in left)
    if times.gather_s <= group.layer_chunks * squeeze_s:
        assert all(bubble_s < squeeze_s for bubble_s in left)
        wanted = group.num_layers * times.gather_s / squeeze_s
        assert sum(plan.chunks_L) == (wanted + Fraction(1, 10**9)) // 1


@PROPERTY
@given(group=groups(), times=TIMES, slower=st.floats(0, 100))
def test_a_larger_bubble_never_moves_less(
    group: ZebraGroup, times: LayerTimes, slower: float
) -> None:
    """Up to any layer: attention is faster, so that a layer gathers more, and a chunk is alike."""
    more = assign_experts(group, times).chunks_L
    less = assign_experts(group, replace(times, attention_s=times.attention_s + slower)).chunks_L
    assert all(a >= b for a, b in zip(accumulate(more), accumulate(less)))


@PROPERTY
@given(group=groups(), times=TIMES, bounds=st.tuples(st.integers(0, 96), st.integers(0, 96)))
def test_more_room_never_moves_less(
    group: ZebraGroup, times: LayerTimes, bounds: tuple[int, int]
) -> None:
    tight, wide = (assign_experts(group, times, max_moved=b).chunks_L for b in sorted(bounds))
    assert all(a <= b for a, b in zip(accumulate(tight), accumulate(wide)))


@PROPERTY
@given(per_rank=st.integers(1, 8), ranks=st.integers(1, 4), times=TIMES)
def test_the_printed_listing_is_right_for_equally_many(
    per_rank: int, ranks: int, times: LayerTimes
) -> None:
    group = group_of(per_rank * ranks, 8, ranks, ranks)
    assert squeeze_seconds(group, times) == squeeze_seconds_as_printed(group, times)


@PROPERTY
@given(times=TIMES, factor=st.sampled_from([1e-9, 1e-3, 0.1, 3.0, 1e6]))
def test_the_unit_of_time_does_not_count(times: LayerTimes, factor: float) -> None:
    """But for what rounding does to a bubble that is itself a rounding error."""
    scaled = times_of(*(factor * value for value in vars(times).values()))
    difference = assign_experts(G1, times).rate - assign_experts(G1, scaled).rate
    assert abs(difference) < 1e-12


@PROPERTY
@given(per_rank=st.integers(1, 3), num_layers=st.integers(1, 4), times=WHOLE_TIMES)
def test_no_assignment_squeezes_more(per_rank: int, num_layers: int, times: LayerTimes) -> None:
    """Of all that never move more than the bubbles pay for, it has moved most behind each layer."""
    group = group_of(per_rank, num_layers, 1, 1)
    chunks_L = assign_experts(group, times).chunks_L
    if times.gather_s <= 0:
        return
    paid = [
        other
        for other in product(range(per_rank + 1), repeat=num_layers)
        if min(bubbles(group, times, other)) >= 0
    ]
    assert chunks_L in paid
    for other in paid:
        assert all(a >= b for a, b in zip(accumulate(chunks_L), accumulate(other)))


@PROPERTY
@given(per_rank=st.integers(1, 3), num_layers=st.integers(1, 4), data=st.data())
def test_a_bound_is_spread_evenly(per_rank: int, num_layers: int, data: st.DataObject) -> None:
    """Of all assignments of so many chunks, in none are the fullest and emptiest layer closer."""
    total = data.draw(st.integers(0, per_rank * num_layers))
    group = group_of(per_rank, num_layers, 1, 1)
    chunks_L = assign_experts(group, times_of(1, 1, 1), min_moved=total).chunks_L
    assert sum(chunks_L) == total
    assert max(chunks_L) - min(chunks_L) == min(
        max(other) - min(other)
        for other in product(range(per_rank + 1), repeat=num_layers)
        if sum(other) == total
    )
