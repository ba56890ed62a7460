# SPDX-License-Identifier: Apache-2.0
"""How batches are cut into stripes: examples by hand, and what holds for any batches. Pure.

Shape letter: C ranks of the group, those with attention first.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.schedule.stripes import GroupStripes, Samples, default_stripes, stripes_of

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)


def all_pieces(pieces: GroupStripes) -> list[Samples]:
    return [piece for stripes in pieces for stripe in stripes for piece in stripe]


def sizes(pieces: GroupStripes) -> list[list[int]]:
    """Samples of each stripe of each attention rank."""
    return [[sum(p.num_samples for p in stripe) for stripe in stripes] for stripes in pieces]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Samples of each rank, attention ranks, and stripes that there are samples for."""
    attention_size, expert_size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    size = attention_size + expert_size
    num_samples_C = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    return num_samples_C, attention_size, draw(st.integers(1, sum(num_samples_C) // attention_size))


# By hand.


def test_each_stripe_is_a_batch() -> None:
    (own, adopted), (own_too, adopted_too) = stripes_of([3, 3, 3, 3], 2, 2)
    assert own == (Samples(0, 0, 3),)
    assert adopted == (Samples(2, 0, 3),)
    assert own_too == (Samples(1, 0, 3),)
    assert adopted_too == (Samples(3, 0, 3),)


def test_a_batch_that_two_attention_ranks_adopt() -> None:
    first, second = stripes_of([4, 4, 4], 2, 3)
    assert first == ((Samples(0, 0, 2),), (Samples(0, 2, 4),), (Samples(2, 0, 2),))
    assert second == ((Samples(1, 0, 2),), (Samples(1, 2, 4),), (Samples(2, 2, 4),))


def test_a_stripe_of_two_batches() -> None:
    """Samples 0 to 2 are of rank 0, 3 to 7 of rank 1; each stripe has four."""
    ((first, second),) = stripes_of([3, 5], 1, 2)
    assert first == (Samples(0, 0, 3), Samples(1, 0, 1))
    assert second == (Samples(1, 1, 5),)


def test_what_an_attention_rank_has_no_room_for_goes_to_another() -> None:
    first, second = stripes_of([6, 1, 1], 2, 2)
    assert first == ((Samples(0, 0, 2),), (Samples(0, 2, 4),))
    assert second == ((Samples(1, 0, 1), Samples(0, 4, 5)), (Samples(0, 5, 6), Samples(2, 0, 1)))


def test_a_stripe_of_several_whole_batches() -> None:
    assert stripes_of([2, 2, 2, 2], 1, 2) == (
        ((Samples(0, 0, 2), Samples(1, 0, 2)), (Samples(2, 0, 2), Samples(3, 0, 2))),
    )


def test_weight() -> None:
    assert Samples(1, 2, 5).weight([4, 12]) == 0.25


@pytest.mark.parametrize(
    ("attention_size", "expert_size", "num_stripes"),
    [(1, 1, 2), (2, 2, 2), (1, 2, 3), (2, 1, 3), (2, 4, 3), (4, 2, 3), (3, 1, 4), (3, 2, 5)],
)
def test_default_stripes(attention_size: int, expert_size: int, num_stripes: int) -> None:
    assert default_stripes(attention_size, expert_size) == num_stripes


def test_fewer_stripes_where_there_are_few_samples() -> None:
    """Three attention ranks and one other would want four stripes each."""
    assert [default_stripes(3, 1, samples) for samples in (4, 8, 12, 16)] == [1, 2, 4, 4]


def test_too_many_stripes() -> None:
    with pytest.raises(
        ValueError, match=r"number of stripes is 4, .* 8 stripes, .* 6 samples; set it to 3 "
    ):
        stripes_of([2, 2, 2], 2, 4)


def test_a_rank_without_samples() -> None:
    with pytest.raises(ValueError, match="have 2, 0 samples; every rank needs one"):
        stripes_of([2, 0], 1, 2)


# For any batches.


@PROPERTY
@given(groups())
def test_every_sample_is_run_once(group: tuple[list[int], int, int]) -> None:
    num_samples_C, attention_size, num_stripes = group
    pieces = stripes_of(num_samples_C, attention_size, num_stripes)
    run = Counter((p.sender, i) for p in all_pieces(pieces) for i in range(p.start, p.stop))
    everything = [(c, i) for c, num_samples in enumerate(num_samples_C) for i in range(num_samples)]
    assert run == Counter(everything)


@PROPERTY
@given(groups())
def test_stripes_are_as_equal_as_can_be(group: tuple[list[int], int, int]) -> None:
    num_samples_C, attention_size, num_stripes = group
    found = sizes(stripes_of(num_samples_C, attention_size, num_stripes))
    assert [len(stripes) for stripes in found] == [num_stripes] * attention_size
    flat = [size for stripes in found for size in stripes]
    assert min(flat) >= 1
    assert max(flat) - min(flat) <= 1


@PROPERTY
@given(groups())
def test_weights_of_a_batch_add_up_to_one(group: tuple[list[int], int, int]) -> None:
    num_samples_C = group[0]
    totals_C = [0.0] * len(num_samples_C)
    for piece in all_pieces(stripes_of(*group)):
        totals_C[piece.sender] += piece.weight(num_samples_C)
    assert totals_C == pytest.approx([1.0] * len(num_samples_C))


@PROPERTY
@given(groups())
def test_attention_ranks_run_as_much_of_their_own_as_they_can(
    group: tuple[list[int], int, int],
) -> None:
    num_samples_C, attention_size, num_stripes = group
    for m, stripes in enumerate(stripes_of(num_samples_C, attention_size, num_stripes)):
        run = [piece for stripe in stripes for piece in stripe]
        own = sum(piece.num_samples for piece in run if piece.sender == m)
        assert own == min(num_samples_C[m], sum(piece.num_samples for piece in run))


@PROPERTY
@given(groups())
def test_what_travels_between_two_ranks_is_in_one(group: tuple[list[int], int, int]) -> None:
    for stripes in stripes_of(*group):
        stops: dict[int, int] = {}
        for piece in (piece for stripe in stripes for piece in stripe):
            assert piece.start == stops.get(piece.sender, piece.start)
            stops[piece.sender] = piece.stop


@PROPERTY
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 7))
def test_equal_batches_are_not_cut_across(
    attention_size: int, expert_size: int, multiple: int, num_samples: int
) -> None:
    """With the default number of stripes, or a multiple, each is a part of one batch."""
    size = attention_size + expert_size
    num_stripes = multiple * default_stripes(attention_size, expert_size)
    parts = attention_size * num_stripes // size
    pieces = stripes_of([num_samples * parts + 1] * size, attention_size, num_stripes)
    assert all(len(stripe) == 1 for stripes in pieces for stripe in stripes)
    assert num_stripes >= 2
    assert attention_size * num_stripes % size == 0
    assert Counter(piece.sender for piece in all_pieces(pieces)) == dict.fromkeys(
        range(size), parts
    )


@PROPERTY
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.integers(1, 5))
def test_equal_batches_are_whole_in_wide_stripes(
    attention_size: int, num_stripes: int, batches: int, num_samples: int
) -> None:
    """Where the number of stripes divides that of batches, no batch is cut."""
    size = attention_size * num_stripes * batches
    pieces = stripes_of([num_samples] * size, attention_size, num_stripes)
    assert len(all_pieces(pieces)) == size
    assert all(len(stripe) == batches for stripes in pieces for stripe in stripes)


@PROPERTY
@given(st.integers(1, 6), st.integers(1, 6))
def test_fewer_stripes_than_the_default_would_cut_across(
    attention_size: int, expert_size: int
) -> None:
    size, num_stripes = attention_size + expert_size, default_stripes(attention_size, expert_size)
    assert all(attention_size * fewer % size for fewer in range(2, num_stripes))
    assert num_stripes == max(2, math.lcm(attention_size, size) // attention_size)
