# SPDX-License-Identifier: Apache-2.0
"""Zebra's rivals: EP with all-to-alls, by hand and against closed forms, and DistEP."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.hetermoe_rivals import (
    EpGroup,
    ep_ideal_tokens_per_s,
    ep_tokens_per_s,
    price_dist_ep,
)
from pytest import approx

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.planning.zebra_costs import MoeModel, RankClass, TwoClasses
from tests.planners.plainly import PROPERTY

MODEL = MoeModel(num_layers=4, num_experts=4, top_k=1, width=1, expert_width=1, length=1)
RANKS = TwoClasses(
    model=MODEL,
    new=RankClass(attention_s=1, expert_s=1),
    old=RankClass(attention_s=3, expert_s=2),
    link=Link(bytes_per_s=MODEL.sent_bytes),  # a token takes a second
    backward=3,
)


def group_of(new: int, old: int, *, repeats_exchange: bool = False) -> EpGroup:
    return EpGroup(new_ranks=new, old_ranks=old, repeats_exchange=repeats_exchange)


def step_s(group: EpGroup, tokens: float, degree: int, ranks: TwoClasses = RANKS) -> float:
    return group.num_ranks * tokens / ep_tokens_per_s(ranks, group, tokens, degrees=[degree])


def test_one_chunk_hides_nothing() -> None:
    """Two ranks send each other half of 8 tokens: 4 s, four times a layer, or six."""
    computing = (1 + 3) * 8 * (3 + 2)
    assert step_s(group_of(1, 1), 8, 1) == approx(4 * (computing + 4 * 4))
    again = group_of(1, 1, repeats_exchange=True)
    assert step_s(again, 8, 1) == approx(4 * (computing + 6 * 4))


def test_two_chunks_hide_half_of_what_is_sent() -> None:
    """Dispatch of the second and combine of the first run beside the experts, 8 s a chunk."""
    computing = (1 + 3) * 8 * (3 + 2)
    assert step_s(group_of(1, 1), 8, 2) == approx(4 * (computing + 4 * 2))
    # The new rank waits for the old: with it alone there is nobody to send to.
    assert step_s(group_of(1, 0), 8, 2) == approx(4 * (1 + 3) * 8 * 2)


def test_the_best_degree_is_taken() -> None:
    group = group_of(2, 2)
    rates = [ep_tokens_per_s(RANKS, group, 8, degrees=[degree]) for degree in (1, 2, 4)]
    assert ep_tokens_per_s(RANKS, group, 8, degrees=[1, 2, 4]) == max(rates) == rates[2]
    slow = replace(RANKS, link=Link(bytes_per_s=MODEL.sent_bytes, latency_s=50))
    rates = [ep_tokens_per_s(slow, group, 8, degrees=[degree]) for degree in (1, 2, 4)]
    assert ep_tokens_per_s(slow, group, 8, degrees=[1, 2, 4]) == max(rates) == rates[0]


def test_ep_ideal_adds_both_classes() -> None:
    new, old = group_of(2, 0), group_of(0, 3)
    apart = ep_tokens_per_s(RANKS, new, 8) + ep_tokens_per_s(RANKS, old, 8)
    assert ep_ideal_tokens_per_s(RANKS, group_of(2, 3), 8) == approx(apart)


def test_the_head_is_paid_once_more_in_backward_twice() -> None:
    headed = replace(RANKS, old=replace(RANKS.old, head_s=0.5))
    more = step_s(group_of(1, 1), 8, 1, headed) - step_s(group_of(1, 1), 8, 1)
    assert more == approx(3 * 8 * 0.5)


def test_dist_ep_is_the_sum_of_all_but_for_chunks() -> None:
    """Two attention ranks, one expert rank: 4 tokens of each, 8 s into its card."""
    whole, chunks = (
        price_dist_ep(RANKS, attention_ranks=2, expert_ranks=1, num_samples=8, degrees=degrees)
        for degrees in ((1,), (2,))
    )
    assert whole.step_s == approx(4 * ((1 + 3) * (4 * 1 + 8 * 2) + 4 * 8))
    # Forward, one dispatch of 4 s and one combine hide; backward, behind 24 s of experts, as much.
    assert chunks.step_s == approx(whole.step_s - 4 * (2 * 4 + 2 * 4))


def test_a_group_has_ranks() -> None:
    with pytest.raises(ValueError, match="new_ranks is 0 and old_ranks 0; give one rank"):
        group_of(0, 0)


@PROPERTY
@given(st.integers(0, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans())
def test_a_step_lies_between_computing_alone_and_nothing_hidden(
    new: int, old: int, degree: int, repeats: bool
) -> None:
    group = group_of(new, old, repeats_exchange=repeats)
    computing = 4 * (1 + 3) * 8 * (3 + 2)
    sent = 4 * (6 if repeats else 4) * 8 * (group.num_ranks - 1) / group.num_ranks
    taken = step_s(group, 8, degree)
    assert computing * (1 - 1e-9) <= taken <= (computing + sent) * (1 + 1e-9)
    assert step_s(group, 8, 2 * degree) <= taken * (1 + 1e-9)
