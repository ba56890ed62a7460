# SPDX-License-Identifier: Apache-2.0
"""Loads that are made: with Zipf shares of experts, and the workloads of Megatron-LM's benchmark.

``zipf_rows`` has shares that wander from step to step; ``WORKLOADS`` are the eight of the benchmark
of uneven tokens (pull request 7488), as counts. Shape letters: I steps, L layers, C senders, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from ds_moe_ext.planning.loads import Sizes

MOST_SKEW = 10.0


@dataclass(frozen=True)
class Zipf:
    """How shares are, and how they move."""

    skew: float  # the expert of place k has a share as ``k ** -skew``; 0 is uniform
    # standard deviation by which the logarithm of a share moves for good in each step
    drift: float = 0.05
    jitter: float = 0.0  # and by which it is off in one step only
    cold: float = 0.0  # part of the experts that nobody chooses

    def __post_init__(self) -> None:
        bounds = {"skew": MOST_SKEW, "drift": 1.0, "jitter": 1.0, "cold": 1.0}
        for name, most in bounds.items():
            if not 0 <= vars(self)[name] <= most:
                raise ValueError(f"{name} is {vars(self)[name]}; give 0 to {most:g}")


TRAINED = Zipf(skew=1.3, drift=0.01, jitter=0.04, cold=0.25)
"""Fitted to a real pre-training run; docs/price.md says how near it is."""


def zipf_rows(sizes: Sizes, seed: int, zipf: Zipf) -> np.ndarray:
    """Loads of tokens that choose different experts, int64 ``[I, L, C, E]``.

    An expert that would be chosen by more than all tokens of a sender is chosen by all, and what is
    over by others, in proportion.
    """
    cold = min(int(zipf.cold * sizes.experts), sizes.experts - sizes.top_k)
    rows = sizes.tokens * sizes.top_k
    rows_ILCE = np.empty(sizes.shape, dtype=np.int64)
    for _ in _drawn(rows_ILCE, sizes.shape[1:], rows, zipf, seed, cold=cold, most=sizes.tokens):
        pass
    return rows_ILCE


def zipf_loads(
    shape: tuple[int, int, int, int], *, rows: int, skew: float, seed: int = 0
) -> np.ndarray:
    """The first ``I`` steps of ``zipf_steps``, int64 of shape ``[I, L, C, E]``."""
    return np.stack([*islice(zipf_steps(shape[1:], rows=rows, skew=skew, seed=seed), shape[0])])


def zipf_steps(
    shape: tuple[int, int, int], *, rows: int, skew: float, seed: int = 0
) -> Iterator[np.ndarray]:
    """Loads of one step after another without end, int64 of shape ``[L, C, E]``, of so many rows of
    each sender that choose each for itself: an expert may get them all."""
    tables = (np.empty(shape, dtype=np.int64) for _ in count())
    return _drawn(tables, shape, rows, Zipf(skew), seed, cold=0, most=rows)


def _drawn(
    tables: Iterable[np.ndarray],
    shape: tuple[int, int, int],
    rows: int,
    zipf: Zipf,
    seed: int,
    *,
    cold: int,
    most: int,
) -> Iterator[np.ndarray]:
    """Tables ``[L, C, E]``, filled step by step: Zipf shares of experts in an order of each layer's
    own."""
    num_layers, num_senders, num_experts = shape
    random = np.random.default_rng(seed)
    place_LE = np.stack([random.permutation(num_experts) for _ in range(num_layers)])
    is_cold_LE = place_LE >= num_experts - cold
    log_share_LE = np.where(is_cold_LE, -np.inf, -zipf.skew * np.log1p(place_LE))
    for step_LCE in tables:
        log_now_LE = log_share_LE
        if zipf.jitter:
            log_now_LE = log_share_LE + zipf.jitter * random.standard_normal(log_share_LE.shape)
        share_LE = np.exp(log_now_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        for rows_CE, share_E in zip(step_LCE, share_LE):
            rows_CE[:] = random.multinomial(rows, share_E, size=num_senders)
        for rows_CE, share_E in zip(step_LCE, share_LE):
            for sender in np.flatnonzero(rows_CE.max(axis=1) > most):
                rows_CE[sender] = _held_to(most, rows_CE[sender], share_E, random)
        yield step_LCE
        log_share_LE = log_share_LE + zipf.drift * random.standard_normal(log_share_LE.shape)


def _held_to(
    most: int, rows_E: np.ndarray, share_E: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """What an expert has over goes to those that have room, in proportion to their shares."""
    while (over := int(np.maximum(rows_E - most, 0).sum())) > 0:
        rows_E = np.minimum(rows_E, most)
        open_E = np.where(rows_E < most, share_E, 0.0)
        rows_E = rows_E + random.multinomial(over, open_E / open_E.sum())
    return rows_E


ROTATES_EVERY = 3  # steps
BURSTS_EVERY = 4  # steps, of which the last is the burst


@dataclass(frozen=True, eq=False)
class Place:
    """What a layer draws by the seed."""

    order_E: np.ndarray  # experts in the order in which rows that do not divide are dealt, int64
    order_C: np.ndarray  # senders, likewise
    first: int  # expert at which a hot block begins; its rank is the hot one


Workload = Callable[[Sizes, Place, int], np.ndarray]
"""Rows ``[C, E]`` of a layer, from what it drew and the step's index."""


def workload_rows(workload: Workload, sizes: Sizes, seed: int) -> np.ndarray:
    """Rows of every step, int64 ``[I, L, C, E]``."""
    random = np.random.default_rng(seed)
    experts, ranks = sizes.experts, sizes.ranks
    places = [
        Place(random.permutation(experts), random.permutation(ranks), int(random.integers(experts)))
        for _ in range(sizes.layers)
    ]
    rows_ILCE = np.empty(sizes.shape, dtype=np.int64)
    for step, rows_LCE in enumerate(rows_ILCE):
        for rows_CE, place in zip(rows_LCE, places):
            rows_CE[:] = workload(sizes, place, step)
    return rows_ILCE


def hot_tokens(sizes: Sizes) -> int:
    """Tokens of a sender that are hot."""
    return 3 * sizes.tokens // 4


def num_hot(sizes: Sizes) -> int:
    """Experts of a hot set that is not a rank's."""
    return max(sizes.top_k, sizes.experts // 4)


def balanced(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    return _dealt(sizes.tokens * sizes.top_k, place.order_E, sizes)


def hot_expert_set(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """Hot tokens choose from a quarter of the experts, wherever these lie."""
    hot_P = place.order_E[: num_hot(sizes)]
    return _heated(sizes, place, hot_P, hot_tokens(sizes), sizes.top_k)


def hot_rank(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """Hot tokens choose as many experts of one rank as they can."""
    per_rank = sizes.experts_per_rank
    hot_P = place.first // per_rank * per_rank + np.arange(per_rank)
    return _heated(sizes, place, hot_P, hot_tokens(sizes), min(sizes.top_k, per_rank))


def spread_hot_experts(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """As many hot experts as hot as in ``hot_rank``, dealt out to the ranks."""
    per_rank = sizes.experts_per_rank
    number_P = np.arange(per_rank)
    rank_P = (place.first // per_rank + number_P) % sizes.ranks
    hot_P = rank_P * per_rank + number_P // sizes.ranks
    return _heated(sizes, place, hot_P, hot_tokens(sizes), min(sizes.top_k, per_rank))


def source_ragged(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """Senders have from half the tokens to one and a half times as many; experts equally many."""
    upto = np.arange(sizes.ranks + 1)
    ends = sizes.tokens * upto * (sizes.ranks + upto) // (2 * sizes.ranks)
    rows_C = sizes.top_k * np.diff(ends)[place.order_C]
    return _dealt(rows_C, place.order_E, sizes)


def zero_expert_rank(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """The lower half of the experts, and so of the ranks, gets nothing."""
    live_P = place.order_E[place.order_E >= sizes.experts // 2]
    if len(live_P) < sizes.top_k:
        raise ValueError(
            f"top_k is {sizes.top_k}, but zero_expert_rank leaves {len(live_P)} of "
            f"{sizes.experts} experts; lower top_k or raise experts"
        )
    return _dealt(sizes.tokens * sizes.top_k, live_P, sizes)


def rotating_hotspot(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """The hot set is a block of experts that goes on by its length every three steps."""
    number = num_hot(sizes)
    hot_P = (place.first + step // ROTATES_EVERY * number + np.arange(number)) % sizes.experts
    return _heated(sizes, place, hot_P, hot_tokens(sizes), sizes.top_k)


def burst(sizes: Sizes, place: Place, step: int) -> np.ndarray:
    """Three balanced steps, then one in which half of the tokens choose from a hot set."""
    hot = sizes.tokens // 2 if step % BURSTS_EVERY == BURSTS_EVERY - 1 else 0
    return _heated(sizes, place, place.order_E[: num_hot(sizes)], hot, sizes.top_k)


def _heated(sizes: Sizes, place: Place, hot_P: np.ndarray, hot: int, choices: int) -> np.ndarray:
    """So many hot tokens of each sender choose so many experts of a pool, and the rest of their
    choices from the others; the other tokens choose from all."""
    is_hot_P = np.isin(place.order_E, hot_P)
    within, without = place.order_E[is_hot_P], place.order_E[~is_hot_P]
    rest = sizes.tokens - hot
    return (
        _dealt(hot * choices, within, sizes)
        + _dealt(hot * (sizes.top_k - choices), without, sizes)
        + _dealt(rest * sizes.top_k, place.order_E, sizes)
    )


def _dealt(rows_C: np.ndarray | int, pool_P: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Rows ``[C, E]`` of senders one after the other, dealt in turn to the experts of a pool: those
    of a sender, and those of all, are as even as whole rows can be."""
    rows_C = np.broadcast_to(rows_C, sizes.ranks)
    rows_CE = np.zeros((sizes.ranks, sizes.experts), dtype=np.int64)
    size = len(pool_P)
    if size:
        ends_C1 = rows_C.cumsum()[:, None]
        rounds_C1, over_C1 = np.divmod(ends_C1, size)
        rounds_before_C1, over_before_C1 = np.divmod(ends_C1 - rows_C[:, None], size)
        place_P = np.arange(size)
        # Of the rows up to a sender's last, the first ``over`` experts get one more than rounds.
        more_CP = np.subtract(place_P < over_C1, place_P < over_before_C1, dtype=np.int8)
        rows_CE[:, pool_P] = rounds_C1 - rounds_before_C1 + more_CP
    return rows_CE


WORKLOADS: dict[str, Workload] = {
    workload.__name__: workload
    for workload in (
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
"""By the names that they have there, without W0 to W7."""
