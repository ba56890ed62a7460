# SPDX-License-Identifier: Apache-2.0
"""The eight workloads, held against their oracles."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.load_models import WORKLOADS, workload_rows, zipf_loads
from ds_moe_ext.planning.loads import Sizes, figures_of
from tests.loads.oracles import ORACLES, broken

SIZES = Sizes(ranks=4, experts=16, layers=2, tokens=64, top_k=2, steps=9)  # all divides


def test_each_workload_has_an_oracle() -> None:
    assert list(WORKLOADS) == list(ORACLES)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_keep_what_their_oracles_say(name: str) -> None:
    """Of many shapes, most of which do not divide."""
    held = 0
    for ranks, experts, tokens, top_k in itertools.product(
        (1, 2, 3, 8), (8, 12, 24), (1, 2, 7, 129), (1, 2, 6)
    ):
        sizes = Sizes(ranks=ranks, experts=experts, layers=2, tokens=tokens, top_k=top_k, steps=7)
        if name in ("hot_rank", "spread_hot_experts") and experts % ranks:
            continue
        if name == "zero_expert_rank" and top_k > experts - experts // 2:
            continue
        for seed in (0, 5):
            rows_ILCE = workload_rows(WORKLOADS[name], sizes, seed)
            assert not broken(name, rows_ILCE, sizes), (sizes, seed)
            held += 1
    assert held > 100


@pytest.mark.parametrize("name", WORKLOADS)
def test_oracles_refuse_other_counts(name: str) -> None:
    rows_ILCE = workload_rows(WORKLOADS[name], SIZES, 0)
    kept = {other for other in ORACLES if not broken(other, rows_ILCE, SIZES)}
    # A hot rank of four has a quarter of the experts, of which a token has both its choices.
    also = {"hot_expert_set"} if name in ("hot_rank", "spread_hot_experts") else set()
    assert kept == {name} | also

    moved_ILCE = rows_ILCE.copy()
    rows_E = moved_ILCE[-1, 1, 2]
    hottest, coldest = rows_E.argmax(), len(rows_E) - 1 - rows_E[::-1].argmin()
    rows_E[hottest] -= 2
    rows_E[coldest] += 2
    assert any("layer 1" in statement for statement in broken(name, moved_ILCE, SIZES))
    assert broken(name, rows_ILCE[:, :, 1:], SIZES)


def by_rank(rows_ILCE: np.ndarray) -> Fraction:
    """The busiest rank over the mean, in the first layer of the last step but one."""
    rows_C = rows_ILCE[-2, 0].sum(axis=0).reshape(SIZES.ranks, -1).sum(axis=1)
    return Fraction(int(rows_C.max()) * SIZES.ranks, int(rows_C.sum()))


def by_expert(rows_ILCE: np.ndarray) -> Fraction:
    rows_E = rows_ILCE[-2, 0].sum(axis=0)
    return Fraction(int(rows_E.max()) * SIZES.experts, int(rows_E.sum()))


@pytest.mark.parametrize(
    ("name", "rank", "expert"),
    [
        ("balanced", Fraction(1), Fraction(1)),
        ("hot_rank", Fraction(13, 4), Fraction(13, 4)),  # 3/4 of the ranks, and a part of the rest
        ("spread_hot_experts", Fraction(1), Fraction(13, 4)),
        ("source_ragged", Fraction(1), Fraction(1)),
        ("zero_expert_rank", Fraction(2), Fraction(2)),
        ("burst", Fraction(1), Fraction(5, 2)),
    ],
)
def test_how_uneven_workloads_are(name: str, rank: Fraction, expert: Fraction) -> None:
    rows_ILCE = workload_rows(WORKLOADS[name], SIZES, 0)
    assert by_expert(rows_ILCE) == expert
    if name != "burst":  # where its hot experts lie is the seed's
        assert by_rank(rows_ILCE) == rank


def test_the_spot_rotates_and_the_burst_comes() -> None:
    rotating = workload_rows(WORKLOADS["rotating_hotspot"], SIZES, 0).sum(axis=2)[:, 0]
    first, second, third = rotating[::3]
    assert np.array_equal(np.roll(first, 4), second) and np.array_equal(np.roll(second, 4), third)
    assert all(np.array_equal(rotating[step], rotating[step // 3 * 3]) for step in range(9))
    burst = workload_rows(WORKLOADS["burst"], SIZES, 0).sum(axis=2)[:, 0]
    assert [row_E.max() > row_E.min() for row_E in burst] == [step in (3, 7) for step in range(9)]


def test_layers_and_seeds_differ_and_names_repeat() -> None:
    first = read_loads("hot_rank:seed=3", layers=8).rows_ILCE
    assert np.array_equal(first, read_loads("hot_rank", layers=8, seed=3).rows_ILCE)
    assert not np.array_equal(first, read_loads("hot_rank:seed=4", layers=8).rows_ILCE)
    assert len(np.unique(first[0], axis=0)) > 1


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("hot_rank", {"ranks": 5}, "64 experts do not divide over 5 ranks"),
        ("zero_expert_rank", {"experts": 4, "top_k": 3}, "leaves 2 of 4 experts; lower top_k"),
        ("balanced", {"top_k": 65}, "top_k is 65, but there are 64 experts"),
        ("balanced", {"tokens": 0}, "tokens is 0; it must be at least 1"),
        ("balanced", {"tokens": 2**30}, "give 536870911 at most"),
        ("balanced", {"steps": 10**6}, "= 2048000000 counts, but 268435456 are read or made"),
        ("hot_ranks", {}, "did you mean 'hot_rank'?"),
        ("hot_rank:seed=-1", {}, "the seed is -1; give 0 or more"),
        ("hot_rank:skew=1", {}, "after hot_rank: give seed, each once, as KEY=VALUE"),
        ("zipf:1,2", {}, "says '2'; after zipf: give skew, drift, jitter, cold, seed"),
        ("zipf:steep", {}, "give skew a number"),
        ("zipf:nan", {}, "skew is nan; give 0 to 10"),
    ],
)
def test_what_cannot_be_made(name: str, sizes: dict[str, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read_loads(name, **sizes)


# Loads with Zipf shares, and those fitted to a real run.


@pytest.mark.parametrize("name", ["zipf:0", "zipf:1.2", "zipf:3,drift=0.3", "trained", "zipf:10"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_tokens_choose_different_experts(name: str, top_k: int) -> None:
    loads = read_loads(name, ranks=4, experts=16, layers=2, tokens=50, top_k=top_k, steps=3)
    assert (loads.rows_ILCE.sum(axis=-1) == 50 * top_k).all()
    assert loads.rows_ILCE.max() <= 50  # which the record holds them to, too
    if name == "zipf:10":
        hottest_ILCE = np.sort(loads.rows_ILCE, axis=-1)[..., -top_k:]
        assert (hottest_ILCE[..., 1:] == 50).all() and (hottest_ILCE[..., 0] >= 25).all()


def test_trained_is_near_what_it_was_fitted_to() -> None:
    """A run of 16 ranks, 24 layers and 32 experts, two a token; docs/price.md has its figures."""
    loads = read_loads("trained", ranks=16, experts=32, layers=24, tokens=8192, top_k=2, steps=24)
    figures = figures_of(loads)
    assert figures.by_rank_IL.mean() == pytest.approx(6.36, abs=0.15)
    assert figures.hottest_IL.mean() == pytest.approx(12.1, abs=0.3)
    assert figures.unused_IL.mean() == pytest.approx(0.25, abs=0.01)
    assert figures.moved_L.mean() == pytest.approx(0.0213, abs=0.001)
    rows_ILE = loads.rows_ILCE.sum(axis=2)
    far = np.abs(rows_ILE[-1] - rows_ILE[0]).sum(axis=1) / rows_ILE[0].sum(axis=1) / 2
    assert far.mean() == pytest.approx(0.0265, abs=0.004)


def test_drift_goes_on_and_jitter_comes_back() -> None:
    def moved(name: str, apart: int) -> float:
        rows_ILE = read_loads(name, steps=40).rows_ILCE.sum(axis=2)
        return float(np.abs(rows_ILE[apart:] - rows_ILE[:-apart]).mean())

    assert moved("zipf:1.2,drift=0.1", 20) > 2.5 * moved("zipf:1.2,drift=0.1", 1)
    assert moved("zipf:1.2,drift=0,jitter=0.1", 20) < 1.1 * moved("zipf:1.2,drift=0,jitter=0.1", 1)


def test_skewed_rows_are_skewed_and_uniform_ones_are_not() -> None:
    """Those of benchmarks, where rows choose each for itself."""
    rows_E = [
        zipf_loads((1, 1, 8, 16), rows=1000, skew=skew).sum(axis=(0, 1, 2)) for skew in (0.0, 2.0)
    ]
    assert rows_E[0].max() < 1.2 * rows_E[0].mean()
    assert rows_E[1].max() > 5 * rows_E[1].mean()
