# SPDX-License-Identifier: Apache-2.0
"""What must hold of the counts of each workload, in integers, whoever made them.

An oracle knows neither the seed nor how rows are dealt: from the sizes alone it says how many rows
each sender and expert must have, and finds by itself which experts are hot. Where rows divide,
least and most are one number.

Shape letters: I steps, C senders (ranks), E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ds_moe_ext.planning.loads import Sizes

Statement = tuple[str, bool]
"""What must hold, and whether it does."""


def broken(name: str, rows_ILCE: np.ndarray, sizes: Sizes) -> list[str]:
    """What does not hold of a workload's counts; empty if all is well."""
    if rows_ILCE.shape != sizes.shape:
        return [f"the shape is {sizes.shape}"]
    found: list[str] = []
    for layer in range(sizes.layers):
        rows_ICE = rows_ILCE[:, layer]
        statements = (*_of_all(rows_ICE, sizes), *ORACLES[name](rows_ICE, sizes))
        found += [f"layer {layer}: {text}" for text, holds in statements if not holds]
    return found


def _of_all(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    tokens_IC = rows_ICE.sum(axis=2) // sizes.top_k
    yield "rows are whole tokens", (tokens_IC * sizes.top_k == rows_ICE.sum(axis=2)).all()
    yield (
        "no expert twice for a token",
        (rows_ICE >= 0).all() & (rows_ICE <= tokens_IC[:, :, None]).all(),
    )
    yield "tokens * ranks in all", (tokens_IC.sum(axis=1) == sizes.tokens * sizes.ranks).all()


def _same_tokens(rows_ICE: np.ndarray, sizes: Sizes) -> Statement:
    rows = sizes.tokens * sizes.top_k
    return "every sender has tokens * top_k rows", bool((rows_ICE.sum(axis=2) == rows).all())


def _even(rows: int, experts: int, rows_CE: np.ndarray, of_all_E: np.ndarray) -> bool:
    """Whether each expert has its part of a sender's rows, and of all; both to one row."""
    ranks = len(rows_CE)
    return _between(rows_CE, _part(rows, experts)) and _between(
        of_all_E, _part(rows * ranks, experts)
    )


class Bounds(NamedTuple):
    """Least and most rows."""

    least: int
    most: int

    def plus(self, other: Bounds) -> Bounds:
        return Bounds(self.least + other.least, self.most + other.most)


def _part(rows: int, experts: int) -> Bounds:
    """Of an expert, where rows are dealt evenly to so many."""
    return Bounds(rows // experts, -(-rows // experts)) if experts else Bounds(0, 0)


def _between(rows: np.ndarray, bounds: Bounds) -> bool:
    return bool(((bounds.least <= rows) & (rows <= bounds.most)).all())


class Heat(NamedTuple):
    """How hot experts must be: rows of one, of a sender and of all."""

    num_hot: int
    hot: Bounds
    other: Bounds
    hot_of_all: Bounds
    other_of_all: Bounds


def _heat(sizes: Sizes, num_hot: int, hot_tokens: int, choices: int) -> Heat:
    """Of a set of which so many tokens of each sender choose so many."""
    num_other = sizes.experts - num_hot

    def bounds(senders: int) -> tuple[Bounds, Bounds]:
        warm = _part(senders * (sizes.tokens - hot_tokens) * sizes.top_k, sizes.experts)
        hot = _part(senders * hot_tokens * choices, num_hot)
        other = _part(senders * hot_tokens * (sizes.top_k - choices), num_other)
        return hot.plus(warm), other.plus(warm)

    return Heat(num_hot, *bounds(1), *bounds(sizes.ranks))


def _hot_sets(rows_ICE: np.ndarray, heat: Heat) -> list[np.ndarray]:
    """Experts with most rows of each step, in index order."""
    order_IE = np.argsort(-rows_ICE.sum(axis=1), axis=1, kind="stable")
    return list(np.sort(order_IE[:, : heat.num_hot], axis=1))


def _so_hot(rows_ICE: np.ndarray, hot: list[np.ndarray], heat: Heat) -> Statement:
    return "so many experts are so hot", all(map(_is_heated, rows_ICE, hot, [heat] * len(hot)))


def _is_heated(rows_CE: np.ndarray, hot: np.ndarray, heat: Heat) -> bool:
    is_hot_E = np.zeros(rows_CE.shape[1], dtype=bool)
    is_hot_E[hot] = True
    all_E = rows_CE.sum(axis=0)
    return (
        _between(rows_CE[:, is_hot_E], heat.hot)
        and _between(rows_CE[:, ~is_hot_E], heat.other)
        and _between(all_E[is_hot_E], heat.hot_of_all)
        and _between(all_E[~is_hot_E], heat.other_of_all)
    )


def _quarter(sizes: Sizes) -> int:
    return max(sizes.top_k, sizes.experts // 4)


def _logs(heat: Heat) -> bool:
    """Whether the hot can be distinguished from the others; with few tokens or experts they
    cannot."""
    return heat.hot_of_all.least > heat.other_of_all.most


def _steadily_heated(rows_ICE: np.ndarray, sizes: Sizes, heat: Heat) -> Iterator[Statement]:
    yield _same_tokens(rows_ICE, sizes)
    hot = _hot_sets(rows_ICE, heat)
    yield _so_hot(rows_ICE, hot, heat)
    is_same = all(np.array_equal(hot_of_step, hot[0]) for hot_of_step in hot)
    yield "the same in every step", is_same or not _logs(heat)


def balanced(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """Rows over experts, each."""
    yield _same_tokens(rows_ICE, sizes)
    rows = sizes.tokens * sizes.top_k
    yield (
        "every expert has its part, to one row",
        all(_even(rows, sizes.experts, rows_CE, rows_CE.sum(axis=0)) for rows_CE in rows_ICE),
    )


def hot_expert_set(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """A quarter of the experts has three quarters of the rows, and its part of the rest."""
    heat = _heat(sizes, _quarter(sizes), 3 * sizes.tokens // 4, sizes.top_k)
    yield from _steadily_heated(rows_ICE, sizes, heat)


def _rank_heat(sizes: Sizes) -> Heat:
    per_rank = sizes.experts // sizes.ranks
    return _heat(sizes, per_rank, 3 * sizes.tokens // 4, min(sizes.top_k, per_rank))


def _hot_of_rank(rows_ICE: np.ndarray, sizes: Sizes) -> int:
    """Most hot experts that a rank has, in any step."""
    per_rank = sizes.experts // sizes.ranks
    hot = _hot_sets(rows_ICE, _rank_heat(sizes))
    return max(int(np.bincount(hot_of_step // per_rank).max()) for hot_of_step in hot)


def hot_rank(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """The experts of one rank have all choices of the hot tokens that they can have."""
    yield from _steadily_heated(rows_ICE, sizes, _rank_heat(sizes))
    hot_tokens = sizes.ranks * (3 * sizes.tokens // 4)
    per_rank = sizes.experts // sizes.ranks
    rest = (sizes.ranks * sizes.tokens - hot_tokens) * sizes.top_k
    warm = _part(rest, sizes.experts)
    chosen = hot_tokens * min(sizes.top_k, per_rank)
    of_rank = Bounds(chosen + per_rank * warm.least, chosen + per_rank * warm.most)
    by_rank_IR = rows_ICE.sum(axis=1).reshape(len(rows_ICE), sizes.ranks, per_rank).sum(axis=2)
    yield "the busiest rank has so many rows", _between(by_rank_IR.max(axis=1), of_rank)
    yield (
        "hot experts are on one rank",
        _hot_of_rank(rows_ICE, sizes) == per_rank or not _logs(_rank_heat(sizes)),
    )


def spread_hot_experts(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """As hot as in ``hot_rank``, on as many ranks as there are."""
    yield from _steadily_heated(rows_ICE, sizes, _rank_heat(sizes))
    most = -(-(sizes.experts // sizes.ranks) // sizes.ranks)
    yield (
        "hot experts are on different ranks",
        _hot_of_rank(rows_ICE, sizes) <= most or not _logs(_rank_heat(sizes)),
    )


def source_ragged(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """Senders' tokens rise evenly from half the mean; experts have equally many rows."""
    tokens_IC = np.sort(rows_ICE.sum(axis=2) // sizes.top_k, axis=1)
    ranks = sizes.ranks
    ideal_C = sizes.tokens * (ranks + 2 * np.arange(ranks) + 1)  # times 2 * ranks
    yield "tokens rise evenly", bool((np.abs(2 * ranks * tokens_IC - ideal_C) < 2 * ranks).all())
    part = _part(ranks * sizes.tokens * sizes.top_k, sizes.experts)
    yield "every expert has its part of all", _between(rows_ICE.sum(axis=1), part)
    least_IC = rows_ICE.sum(axis=2) // sizes.experts
    over_ICE = rows_ICE - least_IC[:, :, None]
    yield "and of each sender, to one row", bool(((over_ICE >= 0) & (over_ICE <= 1)).all())


def zero_expert_rank(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """Half of the experts has everything."""
    yield _same_tokens(rows_ICE, sizes)
    half = sizes.experts // 2
    yield "the lower half has nothing", not rows_ICE[:, :, :half].any()
    rows = sizes.tokens * sizes.top_k
    yield (
        "each of the others has its part, to one row",
        all(
            _even(rows, sizes.experts - half, rows_CE, rows_CE.sum(axis=0))
            for rows_CE in rows_ICE[:, :, half:]
        ),
    )


def rotating_hotspot(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """As ``hot_expert_set``; the set is a block, and the next one every three steps."""
    yield _same_tokens(rows_ICE, sizes)
    heat = _heat(sizes, _quarter(sizes), 3 * sizes.tokens // 4, sizes.top_k)
    hot = _hot_sets(rows_ICE, heat)
    yield _so_hot(rows_ICE, hot, heat)
    blocks = [
        np.sort((hot[0] + step // 3 * heat.num_hot) % sizes.experts) for step in range(len(hot))
    ]
    yield (
        "the next block every three steps",
        all(map(np.array_equal, hot, blocks)) or not _logs(heat),
    )
    gaps = np.diff(np.append(hot[0], hot[0][0] + sizes.experts))
    yield "a block, around the end too", bool((gaps > 1).sum() <= 1) or not _logs(heat)


def burst(rows_ICE: np.ndarray, sizes: Sizes) -> Iterator[Statement]:
    """Every fourth step has a hot set of half the tokens; others are balanced."""
    is_burst_I = np.arange(len(rows_ICE)) % 4 == 3
    yield from balanced(rows_ICE[~is_burst_I], sizes)
    heat = _heat(sizes, _quarter(sizes), sizes.tokens // 2, sizes.top_k)
    yield from _steadily_heated(rows_ICE[is_burst_I], sizes, heat)


Oracle = Callable[[np.ndarray, Sizes], Iterator[Statement]]

ORACLES: dict[str, Oracle] = {
    oracle.__name__: oracle
    for oracle in (
        balanced,
        hot_expert_set,
        hot_rank,
        spread_hot_experts,
        source_ragged,
        zero_expert_rank,
        rotating_hotspot,
        burst,
    )
}
