"""How much the sparse collectives move: HECATE section 3, equations (1) and (2). Pure.

Shape letters: E experts, C cells, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_moe_ext.placement import Placement


def sparsity(before: Placement, after: Placement) -> float:
    """Share ``lambda`` of a layer's experts that must cross between cells (spec section 1)."""
    return float((after.holds_EC & ~before.holds_EC).any(axis=1).mean())


def gather_bytes(before: Placement, after: Placement, expert_bytes: float) -> float:
    """Bytes that one cell sends or receives at most, in a gather or in a reduction of its adjoint.

    Equation (1): ``lambda`` times the bytes of all experts of the layer, however many copies there
    are, since an expert passes each link once.
    """
    return sparsity(before, after) * before.num_experts * expert_bytes


def step_bytes(
    before: Placement, after: Placement, expert_bytes: float, *, rematerializes: bool
) -> float:
    """Bytes of a layer's collectives in one step: a gather and a reduction; where copies are
    released after forward, a second gather (spec rule 10)."""
    return (3 if rematerializes else 2) * gather_bytes(before, after, expert_bytes)


def all_reduce_bytes(group_sizes: Sequence[int], expert_bytes: float) -> float:
    """Bytes of the same placement kept in step by all-reduces instead: equation (2).

    Each expert's gradient is reduced among its ``n`` holders by a ring, which moves
    ``2 (n - 1) / n`` of it. (The paper's print has the number of moved experts in place of the 2:
    spec rule 9.)

    Args:
        group_sizes: holders ``n`` of each expert that has copies.
        expert_bytes: bytes of one expert.
    """
    return sum(2 * (size - 1) / size * expert_bytes for size in group_sizes)


def busiest_link(home: Placement, before: Placement, after: Placement, node_C: np.ndarray) -> int:
    """Experts that the busiest cell or node sends or receives when ``before`` becomes ``after``.

    Counts as the sparse gather moves them: an expert leaves its home, or its home's node, once, and
    enters each node that had no copy of it once (spec rules 22 and 38, choice B7).
    """
    is_on_CN = node_C[:, None] == np.unique(node_C)
    new_EC = after.holds_EC & ~before.holds_EC
    new_EN = (after.holds_EC @ is_on_CN) & ~(before.holds_EC @ is_on_CN)
    owner_E = home.owner_E
    sent_C = np.bincount(owner_E[new_EC.any(axis=1)], minlength=home.num_cells)
    out_C = np.bincount(owner_E[new_EN.any(axis=1)], minlength=home.num_cells)
    links = (new_EC.sum(axis=0), new_EN.sum(axis=0), sent_C, out_C @ is_on_CN)
    return max(int(link.max()) for link in links)
