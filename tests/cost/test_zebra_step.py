# SPDX-License-Identifier: Apache-2.0
"""The price of a zebra step: table 3, golden steps, what cards carry, and bounds at any shape.

Shape letters: C ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link, Product, Products
from ds_moe_ext.planning.zebra_costs import (
    MoeModel,
    RankClass,
    TwoClasses,
    ZebraShape,
    all_to_all_s,
    card_of,
    exchange_s,
    price_step,
    stripe_times,
)
from tests.planners.plainly import PROPERTY

FREE = Link(bytes_per_s=1e30)


def model_of(num_layers: int = 8, num_experts: int = 24, length: int = 1) -> MoeModel:
    return MoeModel(
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=2,
        width=4,
        expert_width=14,
        length=length,
    )


def ranks_of(
    model: MoeModel, *, link: Link = FREE, backward: float = 3, head_s: float = 0
) -> TwoClasses:
    """An attention rank for each expert rank at 8K tokens, by table 3."""
    return TwoClasses(
        model=model,
        new=RankClass(attention_s=0.62, expert_s=0.8, head_s=head_s),
        old=RankClass(attention_s=2, expert_s=1),
        link=link,
        backward=backward,
    )


def shape_of(attention: int, expert: int, stripes: int) -> ZebraShape:
    return ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=stripes)


# What cards carry.


def test_an_all_to_all_is_as_long_as_on_the_busiest_card() -> None:
    bytes_CC = np.array([[9, 4, 0], [2, 0, 1], [6, 0, 0]])
    assert all_to_all_s(bytes_CC, Link(bytes_per_s=2)) == 4  # into the first: 2 + 6
    assert all_to_all_s(bytes_CC, Link(bytes_per_s=2, latency_s=3)) == 10
    assert all_to_all_s(bytes_CC.T, Link(bytes_per_s=2)) == 4  # out of it
    assert all_to_all_s(np.diag([5, 5]), Link(bytes_per_s=1, latency_s=1)) == 0


@pytest.mark.parametrize(
    ("attention", "expert", "moved", "tokens"),
    [
        (6, 6, 0, 1),  # all that an attention rank has goes out of it
        (4, 8, 0, 1),
        (6, 3, 0, 2),  # an expert rank takes in that of two
        (6, 6, 1, 1 - 1 / 24),  # an expert of 24 is its own
        (2, 6, 2, 1 - 6 / 24),  # six are
    ],
)
def test_what_is_sent(attention: int, expert: int, moved: int, tokens: float) -> None:
    """In rows of a stripe, spec rule 4; one sample of one token a stripe."""
    ranks = ranks_of(model_of(), link=Link(bytes_per_s=model_of().sent_bytes))
    sent_s = exchange_s(ranks, shape_of(attention, expert, 1), attention, moved)
    assert sent_s == approx(tokens)


@pytest.mark.parametrize(
    ("attention", "expert", "moved", "near"),
    [(1, 4, 0, 1), (2, 4, 0, 2), (4, 2, 2, 1), (4, 4, 1, 2), (2, 4, 1, 4)],
)
def test_what_is_sent_once(attention: int, expert: int, moved: int, near: int) -> None:
    """By all sets of a token's experts: a row to each rank, or node of several, that has some. It
    comes to each rank of a node as often, and what a rank keeps is on no card."""
    model = replace(model_of(num_experts=8), top_k=3)
    link = Link(bytes_per_s=model.sent_bytes / model.top_k)
    own, left = moved * expert // attention, 8 // expert - moved
    ranks_E = np.repeat(np.arange(attention + expert), [own] * attention + [left] * expert)
    sizes = [min(near, attention)] * attention + [min(near, expert)] * expert
    nodes_C = [
        *(rank // near for rank in range(attention)),
        *(-1 - n // near for n in range(expert)),
    ]
    sets = list(combinations(range(8), 3))
    rows_C = np.zeros(len(sizes))
    for chosen in sets:
        hit = {nodes_C[ranks_E[each]] for each in chosen}
        rows_C += [node in hit for node in nodes_C] / np.array(sizes) / len(sets)
    busiest = max(attention * rows_C[-1], (attention - 1) * rows_C[0], rows_C[1:].sum())
    ranks = replace(ranks_of(model, link=link), once_to=near)
    sent_s = exchange_s(ranks, shape_of(attention, expert, 1), attention, moved)
    assert sent_s == approx(busiest)
    assert sent_s <= exchange_s(
        replace(ranks, once_to=0), shape_of(attention, expert, 1), attention, moved
    )


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.integers(2, 3))
def test_cards_carry_what_is_counted_rank_by_rank(attention: int, expert: int, each: int) -> None:
    """Rule 39 with a latency, no expert moved: out of a rank to each peer, or into one."""
    model = model_of(num_experts=expert * each)
    link = Link(bytes_per_s=3, latency_s=0.5)
    to_one_s = link.seconds(model.sent_bytes / expert)
    sent_s = exchange_s(
        ranks_of(model, link=link), shape_of(attention, expert, 1), attention, moved=0
    )
    assert sent_s == approx(max(attention, expert) * to_one_s)


# Steps.


@pytest.mark.parametrize(
    ("moved_L", "attention", "expert"),
    [(None, 0.59, 0.96), ((0, 1, 1, 1, 1, 1, 0, 1), 0.84, 0.89)],
)
def test_table_3(moved_L: Sequence[int] | None, attention: float, expert: float) -> None:
    """Spec 6.4, rule 4: D1 on O1 at 8K, 59 / 96 % and 84 / 89 %, of which 0.93 are the paper's
    55 / 89 and 83 / 78: with experts moved, the old side is 5 points busier here."""
    link = Link(bytes_per_s=model_of().sent_bytes / 0.155)
    price = price_step(ranks_of(model_of(), link=link), shape_of(6, 6, 2), 12, moved_L)
    if moved_L is None:
        assert price.attention_use == approx(attention, abs=0.005)
        assert price.expert_use == approx(expert, abs=0.005)
    else:  # an expert's rows that are the rank's own are not sent
        assert price.attention_use == approx(attention, abs=0.01)
        assert price.expert_use == approx(expert, abs=0.01)
    assert price.attention_bubble_s == approx(price.step_s * (1 - price.attention_use))
    assert price.expert_bubble_s == approx(price.step_s * (1 - price.expert_use))


def golden(head_s: float) -> TwoClasses:
    """G6: attention 3, experts 4, sending 1, backward twice that."""
    model = model_of(num_layers=2, num_experts=2)
    return TwoClasses(
        model=model,
        new=RankClass(attention_s=3, expert_s=4, head_s=head_s),
        old=RankClass(attention_s=9, expert_s=4),
        link=Link(bytes_per_s=model.sent_bytes),
        backward=2,
    )


def test_g6() -> None:
    price = price_step(golden(3), shape_of(1, 1, 2), 2)
    assert (price.step_s, price.attention_busy_s, price.expert_busy_s) == approx((68, 54, 48))
    assert price.tokens_per_s == approx(2 / 68)
    dist = price_step(golden(3), shape_of(1, 1, 1), 2, overlaps=False)
    assert dist.step_s == approx(118)
    assert (dist.attention_busy_s, dist.expert_busy_s) == approx((54, 48))


def test_stripes_are_as_long_as_the_longest() -> None:
    ranks = ranks_of(model_of(length=5))
    times = stripe_times(ranks, shape_of(2, 4, 2), 7)  # samples of four stripes: 2, 2, 2, 1
    assert times.attention_s == approx(0.62 * 10)
    assert times.expert_s == approx(10 * 2 / 4)
    assert times.expert_on_attention_s == approx(0.8 * 10 * 2 / 4)
    longer = price_step(ranks, shape_of(2, 4, 2), 7)
    full = price_step(ranks, shape_of(2, 4, 2), 8)
    assert longer.step_s == full.step_s
    assert longer.num_tokens == 35


def test_a_stripe_has_a_sample() -> None:
    with pytest.raises(ValueError, match="num_samples is 7, but 2 attention ranks with 4 stripes"):
        price_step(ranks_of(model_of()), shape_of(2, 4, 4), 7)


def test_a_shape_has_ranks_and_stripes() -> None:
    with pytest.raises(ValueError, match="expert_ranks is 0; it must be at least 1"):
        shape_of(1, 0, 1)


@PROPERTY
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.floats(0, 1),
)
def test_bounds_of_a_step(numbers: tuple[int, int, int], moved_L: list[int], head_s: float) -> None:
    shape = shape_of(*numbers)
    model = model_of(num_layers=3, num_experts=2 * shape.expert_ranks)
    ranks = ranks_of(model, link=Link(bytes_per_s=40), head_s=head_s)
    samples = shape.attention_ranks * shape.num_stripes
    price = price_step(ranks, shape, samples, moved_L)
    in_turn = price_step(ranks, shape, samples, moved_L, overlaps=False)
    assert max(price.attention_busy_s, price.expert_busy_s) <= price.step_s * (1 + 1e-9)
    assert price.step_s <= in_turn.step_s * (1 + 1e-9)
    kept = sum(1 - moved / 2 for moved in moved_L)
    of_one = ranks.old.expert_s * samples / shape.expert_ranks
    assert price.expert_busy_s == approx(kept * of_one * (1 + ranks.backward))
    gained = sum(moved / 2 for moved in moved_L) * samples / shape.attention_ranks
    dense_s = (3 * 0.62 * 4 + 3 * head_s) * shape.num_stripes
    assert price.attention_busy_s == approx(dense_s + gained * 0.8 * (1 + ranks.backward))


# Work and rates.


def test_work_of_a_token() -> None:
    model = replace(model_of(length=100), kv_share=0.25)
    assert model.attention_work == 2.5 * 16 + 100 * 4
    assert model.expert_weights == 3 * 4 * 14
    assert model.expert_work == 2 * model.expert_weights
    assert model.sent_bytes == 2 * 4 * 2


def test_seconds_from_a_device() -> None:
    model = model_of()
    device = Device(name="a", flops_per_s=Flops(fp16=200))
    of = RankClass.of(
        device, model, number_type="fp16", attention_efficiency=0.5, expert_efficiency=0.25
    )
    assert of.attention_s == approx(model.attention_work / 50)
    assert of.expert_s == approx(model.expert_work / 25)
    measured = replace(device, products=Products(fp16=Product(multiply_adds_per_s=50)))
    found = RankClass.of(
        measured, model, number_type="fp16", attention_efficiency=1, expert_efficiency=1
    )
    assert found.attention_s == approx(model.attention_work / 50)
    with pytest.raises(ValueError, match="device 'a' has no rate for number_type 'bf16'; add it"):
        RankClass.of(device, model, number_type="bf16", attention_efficiency=1, expert_efficiency=1)
    with pytest.raises(ValueError, match="expert_efficiency is 0; it must be above 0"):
        RankClass.of(device, model, number_type="fp16", attention_efficiency=1, expert_efficiency=0)


def test_a_card_is_a_share_of_the_node() -> None:
    hardware = Hardware(
        name="h",
        source="assumed",
        num_nodes=2,
        ranks_per_node=4,
        device=Device(name="a"),
        inter=Link(bytes_per_s=100, latency_s=2),
    )
    assert card_of(hardware) == Link(bytes_per_s=25, latency_s=2)
    with pytest.raises(ValueError, match="'h' does not say what a node sends to others; add"):
        card_of(replace(hardware, inter=None))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"width": 0}, "width is 0; it must be above 0"),
        ({"kv_share": float("inf")}, "kv_share is inf"),
        ({"top_k": 25}, "top_k is 25, but a layer has 24 experts"),
    ],
)
def test_models_that_cannot_be(values: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(model_of(), **values)


def test_classes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="expert_s is -1; it must be finite and at least 0"):
        RankClass(attention_s=1, expert_s=-1)
    with pytest.raises(ValueError, match="backward is 0; it must be above 0"):
        ranks_of(model_of(), backward=0)


def test_replicas_cost_what_does_not_hide() -> None:
    """A replica takes 0.1 s; attention and dispatch of a stripe 0.6 s. They travel there and
    back."""
    model = model_of(2)
    bytes_per_s = 10 * model.expert_weights * model.element_bytes
    ranks, shape = ranks_of(model, link=Link(bytes_per_s=bytes_per_s)), shape_of(2, 2, 2)

    def step_s(*copied: int) -> float:
        return price_step(ranks, shape, 4, copied_L=copied).step_s

    plain_s = price_step(ranks, shape, 4).step_s
    assert step_s(0, 0) == plain_s
    assert step_s(1, 3) == approx(plain_s)
    assert step_s(20, 0) > plain_s + 1.3
