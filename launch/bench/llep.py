# SPDX-License-Identifier: Apache-2.0
"""LLEP: ranks with too many rows spill them to the least loaded ones, after the gate. Pure.

Source: Least-Loaded Expert Parallelism (Nguyen et al., Salesforce, arXiv 2601.17111, and
https://github.com/SalesforceAIResearch/LeastLoadedEP). Taken: experts from most rows to fewest; a
home keeps what brings it to ``alpha`` times the mean, counting its experts that are still to come;
what is left goes to the rank with fewest rows, counted likewise, up to the same level, but in no
piece below ``min_rows`` unless it is the last; nothing moves while ranks are within ``threshold``.
It plans on the rows of the step itself, always; its copies begin to move when rows are counted, so
that nothing hides them. Not taken: that a home gets an expert's first rows, by their order over all
ranks, and the others follow; here ranks keep rows of their own first, which is kinder to it. Shape
letters: E experts, C ranks.
"""

from __future__ import annotations

import numpy as np


def spilled(
    rows_E: np.ndarray,
    owner_E: np.ndarray,
    num_ranks: int,
    *,
    alpha: float = 1.1,
    min_rows: int = 1024,
    threshold: float = 1.3,
) -> np.ndarray:
    """Rows of each expert that each rank computes, int64 ``[E, C]``.

    Args:
        rows_E: of each expert in this step, int64.
        owner_E: the rank at which each is at home.
        num_ranks: of the grid.
        alpha: rows of the fullest rank over the mean, if that can be.
        min_rows: of a piece (``min_tokens_per_gemm``).
        threshold: of homes' rows over the mean, up to which they keep all (``lambda``).
    """
    quota_EC = np.zeros((len(rows_E), num_ranks), dtype=np.int64)
    rows_C = np.zeros(num_ranks, dtype=np.int64)  # placed, and those of homes that are to come
    np.add.at(rows_C, owner_E, rows_E)
    mean = int(rows_E.sum()) // num_ranks
    if rows_C.max() < threshold * mean:
        quota_EC[np.arange(len(rows_E)), owner_E] = rows_E
        return quota_EC
    most = max(int(alpha * mean), 1)
    for expert in np.argsort(-rows_E, kind="stable").tolist():
        home, left = owner_E[expert], int(rows_E[expert])
        over = int(np.clip(rows_C[home] - most, 0, left))
        quota_EC[expert, home] = left - over
        rows_C[home] -= over
        while over:
            rank, piece = _next_piece(rows_C, home, over, most, min_rows)
            quota_EC[expert, rank] += piece
            rows_C[rank] += piece
            over -= piece
    return quota_EC


def _next_piece(
    rows_C: np.ndarray, home: int, left: int, most: int, min_rows: int
) -> tuple[int, int]:
    """The least loaded rank but the home that takes a piece which is worth it, and the piece; where
    none does, the least loaded takes all."""
    order = np.argsort(rows_C, kind="stable")
    order = order[order != home]
    piece = np.minimum(left, most - rows_C[order])
    fits = np.flatnonzero((piece > 0) & ((piece >= min_rows) | (piece == left)))
    return (int(order[fits[0]]), int(piece[fits[0]])) if len(fits) else (int(order[0]), left)
