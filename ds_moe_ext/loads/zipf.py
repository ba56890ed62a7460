# SPDX-License-Identifier: Apache-2.0
"""Loads with Zipf shares of experts, which wander from step to step.

Shape letters: I steps, L layers, C senders, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.loads.sizes import Sizes

MOST_SKEW = 10.0


@dataclass(frozen=True)
class Zipf:
    """How shares are, and how they move.

    Attributes:
        skew: the expert of place k has a share as ``k ** -skew``; 0 is uniform.
        drift: standard deviation by which the logarithm of a share moves for good in each step.
        jitter: and by which it is off in one step only.
        cold: part of the experts that nobody chooses.

    Raises:
        ValueError: a value out of its bounds.
    """

    skew: float
    drift: float = 0.05
    jitter: float = 0.0
    cold: float = 0.0

    def __post_init__(self) -> None:
        bounds = {"skew": MOST_SKEW, "drift": 1.0, "jitter": 1.0, "cold": 1.0}
        for name, most in bounds.items():
            if not 0 <= vars(self)[name] <= most:
                raise ValueError(f"{name} is {vars(self)[name]}; give 0 to {most:g}")


TRAINED = Zipf(skew=1.3, drift=0.01, jitter=0.04, cold=0.25)
"""Fitted to a real pre-training run; docs/loads.md says how near it comes."""


def zipf_rows(sizes: Sizes, seed: int, zipf: Zipf) -> np.ndarray:
    """Loads of tokens that choose different experts, int64 ``[I, L, C, E]``.

    An expert that would be chosen by more than all tokens of a sender is chosen by all, and what is
    over by others, in proportion.
    """
    cold = min(int(zipf.cold * sizes.experts), sizes.experts - sizes.top_k)
    rows = sizes.tokens * sizes.top_k
    steps = _steps(sizes.shape[1:], rows, zipf, seed, cold=cold, most=sizes.tokens)
    rows_ILCE = np.empty(sizes.shape, dtype=np.int64)
    for step_LCE, rows_LCE in zip(rows_ILCE, steps):
        step_LCE[:] = rows_LCE
    return rows_ILCE


def zipf_loads(
    shape: tuple[int, int, int, int], *, rows: int, skew: float, seed: int = 0
) -> np.ndarray:
    """The first steps of ``zipf_steps``, int64 ``[I, L, C, E]``, which takes the same arguments.

    Args:
        shape: ``(I, L, C, E)``.
    """
    loads = np.empty(shape, dtype=np.int64)
    for step_LCE, rows_LCE in zip(loads, zipf_steps(shape[1:], rows=rows, skew=skew, seed=seed)):
        step_LCE[:] = rows_LCE
    return loads


def zipf_steps(
    shape: tuple[int, int, int], *, rows: int, skew: float, seed: int = 0
) -> Iterator[np.ndarray]:
    """Loads of one step after another without end, int64 ``[L, C, E]``, of rows that choose each
    for itself: an expert may get them all.

    Args:
        shape: ``(L, C, E)``.
        rows: rows of each sender in each step and layer.
        skew: exponent; 0 is uniform.
        seed: of the generator.
    """
    return _steps(shape, rows, Zipf(skew), seed, cold=0, most=rows)


def _steps(
    shape: tuple[int, int, int], rows: int, zipf: Zipf, seed: int, *, cold: int, most: int
) -> Iterator[np.ndarray]:
    """Zipf shares of experts in an order of each layer's own.

    Args:
        shape: ``(L, C, E)``.
        rows: of each sender in each step and layer.
        zipf: the shares.
        seed: of the generator.
        cold: experts without any.
        most: rows of a sender that one expert may get.
    """
    num_layers, num_senders, num_experts = shape
    random = np.random.default_rng(seed)
    place_LE = np.stack([random.permutation(num_experts) for _ in range(num_layers)])
    is_cold_LE = place_LE >= num_experts - cold
    log_share_LE = np.where(is_cold_LE, -np.inf, -zipf.skew * np.log1p(place_LE))
    while True:
        log_now_LE = log_share_LE
        if zipf.jitter:
            log_now_LE = log_share_LE + zipf.jitter * random.standard_normal(log_share_LE.shape)
        share_LE = np.exp(log_now_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        drawn = [random.multinomial(rows, share_E, size=num_senders) for share_E in share_LE]
        for rows_CE, share_E in zip(drawn, share_LE):
            for sender in np.flatnonzero(rows_CE.max(axis=1) > most):
                rows_CE[sender] = _held_to(most, rows_CE[sender], share_E, random)
        yield np.stack(drawn)
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
