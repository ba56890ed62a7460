# SPDX-License-Identifier: Apache-2.0
"""Loads of one grid as those of another: what is conserved."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ds_moe_ext.planning.load_files import read_loads, redivided
from ds_moe_ext.planning.loads import Loads


def loads_of(rows_ILCE: np.ndarray, top_k: int | None = None) -> Loads:
    return Loads(rows_ILCE, np.arange(len(rows_ILCE)), "a test", top_k)


@settings(max_examples=40)
@given(
    ranks=st.integers(1, 7),
    wanted=st.integers(1, 20),
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 4),
    name=st.sampled_from(["zipf:1.2", "source_ragged", "balanced", "trained", "zipf:5"]),
)
def test_other_ranks_keep_every_experts_rows(
    ranks: int, wanted: int, tokens: int, top_k: int, name: str
) -> None:
    loads = read_loads(name, ranks=ranks, experts=8, layers=2, tokens=tokens, top_k=top_k, steps=2)
    divided = redivided(loads, ranks=wanted)  # that no expert is twice a token's, Loads holds
    assert divided.rows_ILCE.shape == (2, 2, wanted, 8)
    assert np.array_equal(divided.rows_ILCE.sum(axis=2), loads.rows_ILCE.sum(axis=2))
    if name != "source_ragged":
        mean = tokens * ranks / wanted
        assert np.abs(divided.tokens_ILC() - mean).max() < 1
    begins_D1 = np.arange(wanted)[:, None] * ranks
    begins_C = np.arange(ranks) * wanted
    ends_DC = np.minimum(begins_D1 + ranks, begins_C + wanted)
    part_DC = np.maximum(ends_DC - np.maximum(begins_D1, begins_C), 0) / wanted
    ideal_ILDE = np.einsum("dc,ilce->ilde", part_DC, loads.rows_ILCE)
    assert np.abs(divided.rows_ILCE - ideal_ILDE).max() < 3


def test_whole_senders_are_joined_and_divided() -> None:
    rows_CE = np.arange(1, 13).reshape(4, 3)
    loads = loads_of(rows_CE[None, None])
    joined = redivided(loads, ranks=2)
    assert joined.rows_ILCE.tolist() == [[[[5, 7, 9], [17, 19, 21]]]]
    uneven = redivided(loads, ranks=3).rows_ILCE[0, 0]
    assert uneven.sum(axis=0).tolist() == rows_CE.sum(axis=0).tolist()
    # Of 6, 15, 24 and 33 rows: the second sender divided 1 to 2, the third 2 to 1.
    assert uneven.sum(axis=1).tolist() == [6 + 5, 10 + 16, 8 + 33]
    again = redivided(redivided(loads_of(rows_CE[None, None] * 5), ranks=20), ranks=4)
    assert np.array_equal(again.rows_ILCE[0, 0], rows_CE * 5)


def test_senders_are_divided_evenly() -> None:
    """Each half of a sender has half of each expert's rows, to one."""
    loads = read_loads("zipf:1.2", ranks=3, tokens=100, top_k=3, experts=12)
    halves_ILCE = redivided(loads, ranks=6).rows_ILCE
    assert (halves_ILCE.sum(axis=-1) == 150).all()
    assert np.abs(halves_ILCE[:, :, ::2] - halves_ILCE[:, :, 1::2]).max() <= 1


@pytest.mark.parametrize("name", ["zipf:1.2", "source_ragged", "hot_rank"])
def test_other_tokens_scale_rows_to_one(name: str) -> None:
    loads = read_loads(name, ranks=4, tokens=96, top_k=3, experts=12)
    scaled = redivided(loads, tokens=40)
    assert (scaled.rows_ILCE.sum(axis=(2, 3)) == 4 * 40 * 3).all()
    tokens_ILC = loads.tokens_ILC() * 40 / 96
    assert np.abs(scaled.tokens_ILC() - tokens_ILC).max() < 1
    ideal_ILCE = loads.rows_ILCE * (scaled.tokens_ILC() / loads.tokens_ILC())[..., None]
    assert np.abs(scaled.rows_ILCE - ideal_ILCE).max() < 1
    assert np.array_equal(redivided(loads, tokens=96).rows_ILCE, loads.rows_ILCE)


def test_largest_remainders_are_rounded_up_the_first_among_equals() -> None:
    loads = loads_of(np.array([[[[3, 3, 3, 1]]]]))  # times 0.6: 1.8, 1.8, 1.8, 0.6
    assert redivided(loads, tokens=6).rows_ILCE.tolist() == [[[[2, 2, 2, 0]]]]
    loads = loads_of(np.array([[[[1, 1, 1, 1]]]]))
    assert redivided(loads, tokens=6).rows_ILCE.tolist() == [[[[2, 2, 1, 1]]]]


def test_layers_begin_again_and_steps_end() -> None:
    loads = read_loads("trained", layers=3, steps=5)
    found = redivided(loads, layers=7, steps=2)
    assert np.array_equal(found.rows_ILCE, loads.rows_ILCE[-2:, [0, 1, 2, 0, 1, 2, 0]])
    assert found.steps_I.tolist() == [3, 4] and found.top_k == 2
    assert np.array_equal(redivided(loads, layers=2).rows_ILCE, loads.rows_ILCE[:, :2])


def test_a_single_step_stands_for_all() -> None:
    found = redivided(loads_of(np.array([[[[3, 1]]]])), steps=3)
    assert found.rows_ILCE.tolist() == [[[[3, 1]]]] * 3
    assert np.diff(found.steps_I).tolist() == [1, 1]


def test_a_layer_without_rows_stays_one() -> None:
    rows_ILCE = np.zeros((1, 1, 3, 2), dtype=np.int64)
    assert not redivided(loads_of(rows_ILCE), ranks=5).rows_ILCE.any()
    rows_ILCE[0, 0, 0] = 2, 4
    assert redivided(loads_of(rows_ILCE), tokens=4).rows_ILCE.tolist() == [
        [[[4, 8], [0, 0], [0, 0]]]
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"steps": 13}, "steps is 13, but balanced has 12; give that many or fewer"),
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"tokens": 2**30}, "tokens is 1073741824, on 8 ranks with 2 choices each too many"),
        ({"layers": 10**6}, "but 268435456 are read or made at most"),
    ],
)
def test_what_cannot_be_divided(sizes: dict[str, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        redivided(read_loads("balanced"), **sizes)
    with pytest.raises(ValueError, match="tokens is 3, but in some layer and step nobody has any"):
        redivided(loads_of(np.zeros((1, 1, 2, 2), dtype=np.int64)), tokens=3)
