# SPDX-License-Identifier: Apache-2.0
"""Loads of a run, step by step: who sent how many rows to which expert.

Shape letters: I steps, L layers, C senders (ranks), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_ROWS = 2**31 - 1  # of a sender, in a layer and step: products of two fit into int64
MOST_ENTRIES = 2**28  # of a table: 2 GiB


@dataclass(frozen=True, eq=False)
class Loads:
    """Rows of every step.

    A token has ``top_k`` different experts, so a sender of ``T`` tokens has ``T * top_k`` rows and
    sends an expert ``T`` of them at most. Any counts that keep this are those of some tokens.

    Attributes:
        rows_ILCE: rows that each sender sent to each expert, int64 ``[I, L, C, E]``.
        steps_I: number of each step, rising, int64 ``[I]``.
        source: where they come from, for a person.
        top_k: choices a token; None if that is not known.

    Raises:
        ValueError: no such loads.
    """

    rows_ILCE: np.ndarray
    steps_I: np.ndarray
    source: str
    top_k: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows_ILCE", "steps_I"):
            object.__setattr__(self, name, _whole(vars(self)[name], f"{self.source}: {name}"))
        shape = self.rows_ILCE.shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(
                f"{self.source}: rows_ILCE has shape {list(shape)}; give rows by step, layer, "
                "sender and expert, one of each at least"
            )
        if self.steps_I.shape != shape[:1] or (np.diff(self.steps_I) <= 0).any():
            raise ValueError(
                f"{self.source}: steps_I is {self.steps_I.tolist()}; give one number for each of "
                f"the {shape[0]} steps, rising"
            )
        least, most = self.rows_ILCE.min(), self.rows_ILCE.max()
        rows_ILC = self.rows_ILCE.sum(axis=-1)
        if not 0 <= least <= most <= rows_ILC.max() <= MOST_ROWS:
            raise ValueError(
                f"{self.source}: experts have from {least} to {most} rows, senders up to "
                f"{rows_ILC.max()}; give counts from 0, and {MOST_ROWS} a sender at most"
            )
        if self.top_k is not None:
            self._check_top_k(rows_ILC, self.top_k)

    def _check_top_k(self, rows_ILC: np.ndarray, top_k: int) -> None:
        if not 1 <= top_k <= self.rows_ILCE.shape[-1]:
            raise ValueError(
                f"{self.source}: top_k is {top_k}, but there are {self.rows_ILCE.shape[-1]} "
                "experts; give 1 to that many"
            )
        if (rows_ILC % top_k).any():
            raise ValueError(
                f"{self.source}: a sender has {rows_ILC[rows_ILC % top_k > 0][0]} rows, which are "
                f"no whole tokens of {top_k} choices; give another top_k"
            )
        over_ILC = self.rows_ILCE.max(axis=-1) > rows_ILC // top_k
        if over_ILC.any():
            raise ValueError(
                f"{self.source}: a sender of {rows_ILC[over_ILC][0] // top_k} tokens sends an "
                f"expert {self.rows_ILCE.max(axis=-1)[over_ILC][0]} rows, but a token has {top_k} "
                "different experts; give another top_k"
            )

    def tokens_ILC(self) -> np.ndarray:
        """Tokens of each sender, int64 ``[I, L, C]``; rows, if ``top_k`` is not known."""
        tokens_ILC: np.ndarray = self.rows_ILCE.sum(axis=-1) // (self.top_k or 1)
        return tokens_ILC

    def runs(self) -> list[np.ndarray]:
        """Rows ``[I, L, C, E]`` of each run of evenly spaced steps."""
        gaps = np.diff(self.steps_I)
        if not gaps.size:
            return [self.rows_ILCE]
        return np.split(self.rows_ILCE, np.flatnonzero(gaps > np.median(gaps)) + 1)


def _whole(array: np.ndarray, where: str) -> np.ndarray:
    """The same as int64 that nobody writes to."""
    array = np.asarray(array)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where} is {array.dtype}, but rows are counted; give whole numbers")
    whole = array.astype(np.int64, copy=False).view()
    whole.setflags(write=False)
    return whole


def check_size(shape: tuple[int, ...], where: str) -> None:
    """Refuse tables past what memory is for.

    Raises:
        ValueError: it has more than ``MOST_ENTRIES``.
    """
    entries = 1
    for length in shape:
        entries *= length
    if entries > MOST_ENTRIES:
        raise ValueError(
            f"{where} has {' x '.join(map(str, shape))} = {entries} counts, but {MOST_ENTRIES} are "
            "read or made at most; take fewer steps or layers"
        )
