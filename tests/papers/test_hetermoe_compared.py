# SPDX-License-Identifier: Apache-2.0
"""HeterMoE's tables and figures by the simulator: what it meets, what it misses, by how much.

Means within 10 %, and the sign and order of extremes (spec 6.4, rules 5 and 6). Inputs are in
``launch/papers/hetermoe_setups.py``.

Missed, and why:

- EP (Ideal) is 3 to 6 % too close in the mean (1.14 for 1.18, 1.10 for 1.17 on AWS). Compute alone
  allows 1.3 at most (``zebra_bounds``), so the paper's EP loses to all-to-alls that nothing hides.
- The least over EP (Ideal) is -7 % for D1 on O2 at 32K; in the paper -3 % for W2 on O2 at 4K. Where
  attention is slower than experts, half of O2's V100s idle in zebra, and EP (Ideal) uses them.
- DistEP on AWS: 2.23 for 1.96, as up to half of the experts move.
- Table 3 with moved experts: 78 / 82 for 83 / 78 at 8K. Algorithm 1 moves 6 chunks with these
  times; the paper's pair implies 7.7.
- What moving gains at 4K (figure 12): 1.39 for 1.14 (D1), 1.32 for 1.20 (W1). The bound is 1.40.
- 4 V100s (figure 11): zebra is 1.88 times them for 1.66; 4 A40s beyond 20K are 1.09 to 1.19 of
  zebra, where attention alone bounds it.
- Figure 10: at 12K 4:4 and 4:5 are even (paper 4:5); at 4K 4:8 is better than 4:7.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from statistics import mean

import pytest
from papers import hetermoe_compared
from papers.hetermoe_compared import PAPER, Compared, Means, Way
from papers.hetermoe_setups import (
    FIGURE_7,
    FIGURE_8,
    FIGURE_9,
    KI,
    LENGTHS,
    LOST,
    MODELS,
    O1,
    T4,
    V100,
)
from pytest import approx

from ds_moe_ext.planning.zebra_costs import StepPrice

WAY = Way()
NEAR = 0.10


@cache
def premise() -> list[Compared]:
    return hetermoe_compared.compared(FIGURE_7, WAY)


@cache
def aws() -> list[Compared]:
    return hetermoe_compared.compared(FIGURE_8, WAY)


@cache
def means() -> Means:
    return Means.of(premise(), aws())


def of_setup(name: str, cluster: str) -> list[Compared]:
    return [of for of in premise() if (of.model, of.cluster.name) == (name, cluster)]


# Inputs.


def test_devices_are_as_figure_2_says() -> None:
    """Attention 3.7 times as slow at 64K on V100; 9.9 and 13.6 times on T4 against L40S."""

    def slowdown(length: int) -> float:
        ranks = O1.classes(MODELS["D1"].model(length))
        assert ranks.old.expert_s / ranks.new.expert_s == approx(1 / 0.8)
        return ranks.old.attention_s / ranks.new.attention_s

    assert slowdown(64 * KI) == approx(3.7, rel=0.01)
    assert all(slowdown(short) < slowdown(long) for short, long in pairwise(LENGTHS))
    assert V100.experts == 1.25
    assert T4.experts == 7
    for length, factor in ((4 * KI, 9.9), (64 * KI, 13.6)):
        ranks = FIGURE_8[0][1].classes(MODELS["D1"].model(length))
        assert ranks.old.attention_s / ranks.new.attention_s == approx(factor, rel=0.01)


def test_attention_meets_experts_where_figure_12_says() -> None:
    """D1 at 20K, W1 at 28K: from there on no expert moves."""
    for name, length in (("D1", 20 * KI), ("W1", 28 * KI)):
        ranks = O1.classes(MODELS[name].model(length))
        assert ranks.new.attention_s / ranks.old.expert_s == approx(1, abs=0.02)


# Figures 7 and 8.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("ep_4k", "ep_16k", "ep_32k", "dist", "ideal", "most_ideal"),
        *("aws_ep", "aws_ideal", "aws_most_ideal"),
    ],
)
def test_means_of_figures_7_and_8(name: str) -> None:
    assert vars(means())[name] == approx(vars(PAPER)[name], rel=NEAR)


@pytest.mark.slow
def test_dist_ep_on_aws_is_missed() -> None:
    """By 14 %: 2.23 for 1.96."""
    assert means().aws_dist == approx(2.23, abs=0.01)
    assert PAPER.aws_dist == 1.96


@pytest.mark.slow
def test_extremes_over_ep() -> None:
    """At 32K 2.05 for D1 (on O1) and 2.29 for D2 (O3)."""
    assert of_setup("D1", "O1")[-1].over_ep == approx(2.05, rel=NEAR)
    assert of_setup("D2", "O3")[-1].over_ep == approx(2.29, rel=NEAR)


@pytest.mark.slow
def test_the_most_over_ep_ideal_is_d1_on_o1_at_20k() -> None:
    best = max(premise(), key=lambda of: of.over_ideal)
    assert (best.model, best.cluster.name, best.length) == ("D1", "O1", 20 * KI)


@pytest.mark.slow
def test_the_least_over_ep_ideal_is_missed() -> None:
    """The paper has -3 % for W2 on O2 at 4K; here the least is D1 on O2 at 32K, -7 %, where old
    ranks are too many: EP (Ideal) has work for them, zebra has not."""
    worst = min(premise(), key=lambda of: of.over_ideal)
    assert (worst.model, worst.cluster.name, worst.length) == ("D1", "O2", 32 * KI)
    assert worst.over_ideal == approx(0.93, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cluster"), [("D1", "O1"), ("D2", "O3"), ("W1", "O1")])
def test_speed_over_ep_grows_with_length(name: str, cluster: str) -> None:
    """But for steps where whole chunks of experts stop moving, 4 % at most."""
    speeds = [of.over_ep for of in of_setup(name, cluster)]
    assert all(longer > 0.96 * shorter for shorter, longer in pairwise(speeds))
    assert speeds[-1] > 1.4 * speeds[0]


@pytest.mark.slow
def test_dist_ep_is_slower_than_ep_where_samples_are_short_and_not_where_long() -> None:
    """32 % slower at 4K (here 36 %), 8 % faster at 32K."""
    over_ep = {
        length: mean(of.over_ep / of.over_dist for of in premise() if of.length == length)
        for length in LENGTHS
    }
    assert over_ep[4 * KI] == approx(0.68, rel=NEAR)
    assert over_ep[32 * KI] == approx(1.08, rel=NEAR)
    assert all(short < long for short, long in pairwise(over_ep.values()))


# Figure 12 and table 3.


@pytest.mark.slow
def test_what_moving_experts_gains_shrinks_and_ends() -> None:
    for name in ("D1", "W1"):
        results = of_setup(name, "O1")
        gains = [of.over_itself for of in results]
        assert gains[0] == max(gains)
        assert gains[-1] == 1
        for of in results:
            ranks = O1.classes(MODELS[name].model(of.length))
            if ranks.new.attention_s >= ranks.old.expert_s:
                assert sum(of.zebra.moved_L) == 0


@pytest.mark.slow
def test_what_moving_experts_gains_at_4k_is_missed() -> None:
    """1.39 for D1 (paper 1.14), 1.32 for W1 (1.20): stripes are enough here to hide all else."""
    gains = [of_setup(name, "O1")[0].over_itself for name in ("D1", "W1")]
    assert gains == approx([1.39, 1.32], abs=0.01)


def test_table_3() -> None:
    """In shares of the whole step. Without moves within 3 points, DistEP within 5 and a half; with
    moves the sides are 5 points from the paper's 83 / 78 and 86 / 84, busier on the other side."""
    short, long = hetermoe_compared.table_3(8 * KI), hetermoe_compared.table_3(16 * KI)

    def use(price: StepPrice) -> tuple[float, float]:
        return LOST * price.attention_use, LOST * price.expert_use

    assert use(short.off) == approx((0.55, 0.89), abs=0.03)
    assert use(long.off) == approx((0.77, 0.89), abs=0.03)
    assert use(short.dist) == approx((0.33, 0.51), abs=0.055)
    assert use(long.dist) == approx((0.40, 0.45), abs=0.04)
    assert use(short.on) == approx((0.83, 0.78), abs=0.055)
    assert use(long.on) == approx((0.86, 0.84), abs=0.065)
    assert use(short.many)[0] > use(short.many)[1]  # as in the paper, which implies 7.7 chunks


# Figure 6.


def test_figure_6() -> None:
    plain, moved, more = (
        hetermoe_compared.figure_6(*of) for of in ((0, 0, 0), (0, 1, 1), (1, 1, 1))
    )
    assert (plain.seconds, moved.seconds, more.seconds) == approx((41, 37, 37))
    assert (plain.attention_s, plain.expert_open_s) == approx((27, 36))
    idle = [of.attention_open_s - of.attention_s for of in (plain, moved, more)]
    assert idle == approx([5, 2, 0], abs=1e-9)
    assert more.expert_s / more.expert_open_s == approx(1 - 0.0625)


# Figure 9.


@pytest.mark.slow
def test_figure_9() -> None:
    """Mean 1.28; the most 1.47. It hangs on the samples of a step."""
    speeds = [
        hetermoe_compared.over_pipelines(*setup, length, WAY)
        for setup in FIGURE_9
        for length in LENGTHS
    ]
    assert mean(speeds) == approx(1.28, rel=NEAR)
    assert min(speeds) > 1
    assert max(speeds) == approx(1.47, rel=NEAR)


# Figure 10.


@pytest.mark.parametrize(
    ("length", "best", "speed"),
    [(12 * KI, (4, 5), 1.22), (20 * KI, (4,), None), (32 * KI, (3,), None)],
)
def test_best_ratio(length: int, best: tuple[int, ...], speed: float | None) -> None:
    """At 12K the paper has 4:5; here 4:4 and 4:5 are even."""
    ratios = hetermoe_compared.figure_10(length, WAY)
    most = max(of.speed for of in ratios)
    assert tuple(of.old_ranks for of in ratios if of.speed > 0.99 * most) == best
    assert speed is None or most == approx(speed, rel=NEAR)


def test_ratios_at_4k() -> None:
    """Paper: 0.76 at 4:3, where no expert can move, 1.03 at 4:2, 1.10 at 4:7, its best. Here 4:8 is
    better yet, where experts move; without that 4:7 is the best."""
    speeds = {of.old_ranks: of.speed for of in hetermoe_compared.figure_10(4 * KI, WAY)}
    assert [speeds[old] for old in (2, 3, 7)] == approx([1.03, 0.76, 1.10], rel=NEAR)
    assert max(speeds, key=lambda old: speeds[old]) == 8
    cannot_move = {old: speeds[old] for old in (3, 5, 6, 7)}
    assert max(cannot_move, key=lambda old: cannot_move[old]) == 7


@pytest.mark.slow
def test_fewer_old_ranks_are_best_for_longer_samples() -> None:
    best = [
        max(hetermoe_compared.figure_10(length, WAY), key=lambda of: of.speed).old_ranks
        for length in LENGTHS
    ]
    assert all(longer <= shorter for shorter, longer in pairwise(best))


def test_half_of_the_old_ranks_do_what_ep_ideal_does() -> None:
    """4:4 against EP (Ideal) on 4:8, within 2 %: so at 20K; at 32K 7 % are missing."""
    for length, reached in ((20 * KI, 1.0), (32 * KI, 0.93)):
        ratios = hetermoe_compared.figure_10(length, WAY)
        assert ratios[2].zebra / ratios[-1].ideal == approx(reached, abs=0.01)


# Figure 11.


@pytest.mark.slow
def test_figure_11() -> None:
    """Zebra is 95 % of 4 A40s, within 2 % at 12K to 20K (here 3 %); 2 A100s are 1.14 times it."""
    figures = [hetermoe_compared.figure_11(length, WAY) for length in LENGTHS]
    assert mean(1 / of.four_a40 for of in figures) == approx(0.95, rel=NEAR)
    assert [1 / of.four_a40 for of in figures[2:5]] == approx([0.985] * 3, abs=0.03)
    assert mean(of.two_a100 for of in figures) == approx(1.14, rel=NEAR)
    assert max(of.two_a100 for of in figures) == approx(1.20, rel=NEAR)
    assert figures[-1].four_v100 == approx(0.52, rel=NEAR)


@pytest.mark.slow
def test_four_v100s_are_missed() -> None:
    """Zebra is 1.88 times 4 V100s in the mean (paper 1.66), which are 0.70 of it at 4K (0.84)."""
    figures = [hetermoe_compared.figure_11(length, WAY) for length in LENGTHS]
    assert mean(1 / of.four_v100 for of in figures) == approx(1.88, abs=0.01)
    assert figures[0].four_v100 == approx(0.70, abs=0.01)
