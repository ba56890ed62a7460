# SPDX-License-Identifier: Apache-2.0
"""Closed forms of zebra and its rivals: golden G13, the spec's optima, and bounds of simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

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
from ds_moe_ext.planning.zebra_costs import MoeModel, RankClass, TwoClasses, ZebraShape
from ds_moe_ext.planning.zebra_planner import price_shape
from tests.planners.plainly import PROPERTY


def bounds_of(
    attention_s: float = 1, *, ranks: tuple[int, int] = (1, 1), s: float = 2, q: float = 1.25
) -> Bounds:
    return Bounds(
        new_ranks=ranks[0],
        old_ranks=ranks[1],
        attention_s=attention_s,
        expert_s=1,
        attention_slowdown=s,
        expert_slowdown=q,
    )


def test_g13() -> None:
    golden = bounds_of()
    assert golden.ep_ideal == approx(1 / 2 + 1 / 3.25)
    assert golden.ep == approx(2 / 3.25)
    assert golden.dist_ep == approx(1 / 2.25)
    assert golden.zebra == approx(0.9)
    rivals = (golden.ep_ideal, golden.ep, golden.dist_ep)
    assert [golden.zebra / rival for rival in rivals] == approx([1.114, 1.4625, 2.025], abs=5e-4)


@pytest.mark.parametrize(
    ("slowdown", "most"), [(1.6, 1.06), (2, 1.13), (2.5, 1.19), (3, 1.24), (3.7, 1.30)]
)
def test_the_most_over_ep_ideal(slowdown: float, most: float) -> None:
    """Where attention takes as long as experts on the other side: the spec's list."""
    best = bounds_of(1.25, s=slowdown)
    assert best.zebra / best.ep_ideal == approx(most, abs=0.005)
    for other in (1, 1.5):
        aside = bounds_of(other, s=slowdown)
        assert aside.zebra / aside.ep_ideal < best.zebra / best.ep_ideal


def test_zebra_is_bound_by_attention_where_that_is_slower() -> None:
    assert bounds_of(2, ranks=(3, 4)).zebra == approx(3 / 2)


def test_numbers_are_above_zero() -> None:
    with pytest.raises(ValueError, match="attention_s is 0; it must be finite and above 0"):
        bounds_of(0)


seconds = st.floats(0.1, 10)


@PROPERTY
@given(seconds, seconds, st.floats(1, 5), st.floats(1, 5), st.integers(0, 3))
def test_bounds_are_reached_where_nothing_is_sent_or_waits(
    attention_s: float, expert_s: float, s: float, q: float, power: int
) -> None:
    """Rivals exactly; zebra never more, and the closer the more stripes."""
    model = MoeModel(num_layers=2, num_experts=4, top_k=1, width=8, expert_width=8, length=1)
    ranks = TwoClasses(
        model=model,
        new=RankClass(attention_s=attention_s, expert_s=expert_s),
        old=RankClass(attention_s=s * attention_s, expert_s=q * expert_s),
        link=Link(bytes_per_s=1e30),
        backward=2,
    )
    bounds = Bounds(
        new_ranks=2,
        old_ranks=2,
        attention_s=attention_s,
        expert_s=expert_s,
        attention_slowdown=s,
        expert_slowdown=q,
    )
    passes = 2 * (1 + 2)  # layers, forward and backward
    group = EpGroup(new_ranks=2, old_ranks=2)
    # Each class waits for the other, attention for attention and experts for experts.
    assert passes * ep_tokens_per_s(ranks, group, 8) == approx(bounds.ep)
    assert passes * ep_ideal_tokens_per_s(ranks, group, 8) == approx(bounds.ep_ideal)
    dist = price_dist_ep(ranks, attention_ranks=2, expert_ranks=2, num_samples=16)
    assert passes * dist.tokens_per_s == approx(bounds.dist_ep)
    rates = [
        price_shape(
            ranks, ZebraShape(attention_ranks=2, expert_ranks=2, num_stripes=2**each), 8
        ).price.tokens_per_s
        for each in range(power + 1)
    ]
    assert all(passes * rate <= bounds.zebra * (1 + 1e-9) for rate in rates)
    assert all(few <= many * (1 + 1e-9) for few, many in pairwise(rates))


# Closed forms of zebra and its rivals where nothing travels and nothing idles. Pure.


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Units in a second, from what a unit costs one rank."""

    new_ranks: int
    old_ranks: int
    attention_s: float
    expert_s: float
    attention_slowdown: float
    expert_slowdown: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and above 0")

    @property
    def _new_s(self) -> float:
        return self.attention_s + self.expert_s

    @property
    def _old_s(self) -> float:
        return self.attention_slowdown * self.attention_s + self.expert_slowdown * self.expert_s

    @property
    def ep(self) -> float:
        """Expert parallelism over all ranks alike: they wait for the old ones."""
        return (self.new_ranks + self.old_ranks) / self._old_s

    @property
    def ep_ideal(self) -> float:
        """Each class by itself, added."""
        return self.new_ranks / self._new_s + self.old_ranks / self._old_s

    @property
    def dist_ep(self) -> float:
        """Attention here and experts there, one side at a time."""
        expert_s = self.expert_slowdown * self.expert_s
        return 1 / (self.attention_s / self.new_ranks + expert_s / self.old_ranks)

    @property
    def zebra(self) -> float:
        """Both sides at once; where experts are slower, any fraction of them moves back."""
        attention = self.new_ranks / self.attention_s
        experts = self.old_ranks / (self.expert_slowdown * self.expert_s)
        if experts >= attention:
            return attention
        return (self.new_ranks + self.old_ranks / self.expert_slowdown) / self._new_s
