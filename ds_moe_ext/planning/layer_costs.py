# SPDX-License-Identifier: Apache-2.0
"""What an MoE layer takes by the models of two papers: chunks in three streams, and replicas. Pure.

FSMoE's model, exact (spec 2.2, 2.3), is ``makespans`` of a layer's ``Chunks``; Pro-Prophet's,
equations (1) to (8), is ``placement_seconds`` of a block. In the first ``r`` chunks pass through
three streams, each in its own order; one all-reduce of gradients may stand between the dispatches
and the combines::

    inter    D_1 ... D_r, [all-reduce], C_1 ... C_r      all-to-alls, over the slow links
    intra    AG_1 ... AG_r, RS_1 ... RS_r                inside an ETP group, over the fast links
    compute  E_1 ... E_r

Letters of the formulas are the paper's: ``a``, ``g``, ``s``, ``e`` are the seconds of one chunk's
all-to-all, all-gather, reduce-scatter and expert. The unit of time is that of the costs. Shape
letters: R degrees, P paths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.prices import NUM_EXCHANGES, LinearCost, check_costs

TIE = 1e-12  # of the least time: what rounding makes of equal times


class Chunks(NamedTuple):
    """Seconds of one of ``r`` chunks, each float ``[R]``: ``r``, ``a``, ``g``, ``s``, ``e``."""

    degree_R: np.ndarray
    all_to_all_R: np.ndarray
    all_gather_R: np.ndarray
    reduce_scatter_R: np.ndarray
    expert_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The operations of one MoE layer, in one direction."""

    all_to_all: LinearCost  # dispatch, or combine; both are of one size
    all_gather: LinearCost  # of a dispatched chunk inside an ETP group
    reduce_scatter: LinearCost  # of what the ETP group's ranks computed
    expert: LinearCost  # the experts' computation

    def in_backward(self) -> LayerCosts:
        """The costs of backward, from forward's: experts compute two gradients of each row.

        The units stay as they are; the paper's text doubles these too, its code does not.
        """
        return replace(self, expert=self.expert.doubled())

    def cut(self, degree_R: np.ndarray) -> Chunks:
        """Seconds of a chunk at each degree; a solver may ask between whole degrees."""
        return Chunks(
            degree_R,
            self.all_to_all.chunk_seconds(degree_R),
            self.all_gather.chunk_seconds(degree_R),
            self.reduce_scatter.chunk_seconds(degree_R),
            self.expert.chunk_seconds(degree_R),
        )


def link_seconds(chunks: Chunks) -> np.ndarray:
    """Seconds that all-to-alls take on the slow links, float ``[R]``."""
    return 2 * chunks.degree_R * chunks.all_to_all_R


def path_seconds(chunks: Chunks) -> np.ndarray:
    """Seconds of the paths through a layer that no all-reduce is on, float ``[P, R]``.

    The first three are the paper's ``t2`` to ``t4``. The others exceed all of these and
    ``t1`` only if all-gather and reduce-scatter take unequally long.
    """
    r, a, g, s, e = chunks
    return np.stack(
        [
            2 * a + g + s + r * e,
            2 * r * a + g + s,
            2 * a + r * g + r * s,
            (r + 1) * a + g + r * s,
            (r + 1) * a + r * g + s,
            2 * a + g + e + r * s,
            2 * a + r * g + e + s,
        ]
    )


def makespans(chunks: Chunks, gradient_s: float | np.ndarray) -> np.ndarray:
    """Seconds from the first dispatch to the last combine, exactly, float ``[R]``."""
    return np.maximum(link_seconds(chunks) + gradient_s, path_seconds(chunks).max(axis=0))


def windows(chunks: Chunks) -> np.ndarray:
    """How long an all-reduce the layer hides in full, float ``[R]``: the paper's ``t_olp,moe``,
    where its formulas, which take the time of the case for the makespan, are exact."""
    return path_seconds(chunks).max(axis=0) - link_seconds(chunks)


FORWARD, BACKWARD = 1, 2  # expert computations: equations (2) and (3)


@dataclass(frozen=True, kw_only=True)
class BlockPrices:
    """The costs of one block, the same on every rank."""

    row_s: float  # seconds an expert computes on one row in forward: ``1 / t``
    row_bytes: float  # bytes of one row in one transfer
    bytes_per_s: float  # bandwidth of the all-to-all
    weight_bytes: float  # bytes of one expert's parameters
    gradient_bytes: float  # bytes of one expert's gradients
    copy_bytes_per_s: float  # bandwidth of Trans and Agg
    # what an all-to-all takes besides, however few rows travel; 0 is the paper's formula
    exchange_start_s: float = 0.0
    # what Trans and Agg each take besides, however little is copied; 0 is the paper's formula
    copy_latency_s: float = 0.0
    forward_gap_s: float = 0.0  # forward of the non-MoE layer, ``T_FNEC``
    backward_gap_s: float = 0.0  # its backward, ``T_BNEC``
    # replicas move beside the computations: equation (8) in place of (6)
    is_scheduled: bool = False
    # replicas are freed after forward and gathered a second time, beside Agg
    gathers_again: bool = False

    def __post_init__(self) -> None:
        check_costs(vars(self))


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block under one placement."""

    exchange_s: float  # one all-to-all, ``T_A2A``
    expert_s: float  # the experts' forward, ``T_FEC``
    gather_s: float  # the replicas' way to their EP ranks, once, ``T_Trans``
    reduce_s: float  # the way of their gradients back, ``T_Agg``
    # forward and backward: equation (6), or (8) where replicas are scheduled. The non-MoE layer is
    # not in it.
    step_s: float


def block_seconds(
    prices: BlockPrices, *, most_received: float, most_computed: float, copied: float
) -> BlockSeconds:
    """The model on a placement's figures: equations (1) to (6) and (8)."""
    return BlockSeconds(*_seconds(prices, most_received, most_computed, copied))


def step_seconds(
    prices: BlockPrices, most_received: float, most_computed: float, copied: float
) -> float:
    """``step_s`` alone. Arguments as of ``block_seconds``."""
    return _seconds(prices, most_received, most_computed, copied)[-1]


def _seconds(
    prices: BlockPrices, most_received: float, most_computed: float, copied: float
) -> tuple[float, float, float, float, float]:
    sent_s = most_received * prices.row_bytes / prices.bytes_per_s
    exchange_s = prices.exchange_start_s + sent_s
    expert_s = most_computed * prices.row_s
    latency_s = prices.copy_latency_s if copied else 0.0
    gather_s = latency_s + copied * prices.weight_bytes / prices.copy_bytes_per_s
    reduce_s = latency_s + copied * prices.gradient_bytes / prices.copy_bytes_per_s
    before_s, after_s = gather_s, reduce_s + gather_s * prices.gathers_again
    if prices.is_scheduled:
        before_s = max(0.0, before_s - FORWARD * expert_s - prices.forward_gap_s)
        after_s = max(0.0, after_s - BACKWARD * expert_s - prices.backward_gap_s)
    computed_s = (FORWARD + BACKWARD) * expert_s
    step_s = NUM_EXCHANGES * exchange_s + computed_s + before_s + after_s
    return exchange_s, expert_s, gather_s, reduce_s, step_s


@dataclass(frozen=True, eq=False)
class EpRankRows:
    """Rows of one layer by EP rank."""

    computed_C: np.ndarray  # rows that each EP rank computes, ``H``, int64
    received_C: np.ndarray  # rows that come to each EP rank from others, ``R``, int64


def ep_rank_rows(owner: Placement, target: Placement, rows_CE: np.ndarray) -> EpRankRows:
    """Where rows go if a sender with a replica keeps its own and the others send to the owner (spec
    2.2).

    Args:
        owner: where each expert lives, one EP rank an expert.
        target: where experts compute, owners included.
        rows_CE: rows that each sender routes to each expert, int64.
    """
    owner_E, num_ep_ranks = owner.owner_E, owner.num_ep_ranks
    kept_E = rows_CE[owner_E, np.arange(owner.num_experts)]
    left_E = rows_CE.sum(axis=0) - kept_E
    kept_C = np.zeros(num_ep_ranks, dtype=np.int64)
    if not target.is_single:
        copied = np.flatnonzero(target.num_holders_E > 1)
        kept_CX = rows_CE[:, copied] * target.holds_EC[copied].T
        left_E[copied] += kept_E[copied] - kept_CX.sum(axis=0)
        kept_E[copied] = 0
        kept_C = kept_CX.sum(axis=1)
    # Sums in float64: whole numbers, and exact.
    received_C = np.bincount(owner_E, left_E, num_ep_ranks).astype(np.int64)
    kept_C = kept_C + np.bincount(owner_E, kept_E, num_ep_ranks).astype(np.int64)
    return EpRankRows(computed_C=kept_C + received_C, received_C=received_C)


def copied_experts(target: Placement) -> float:
    """Experts with replicas, each counted as the share of EP ranks that hold it: ``s (D - n) / D``.

    An expert in its owner alone is not copied, whatever the formula says (spec choices 3 and 4).
    """
    holders_E = target.num_holders_E
    return int(holders_E[holders_E > 1].sum()) / target.num_ep_ranks


def placement_seconds(
    owner: Placement, target: Placement, rows_CE: np.ndarray, *, prices: BlockPrices
) -> BlockSeconds:
    """The model on a placement. Arguments as of ``ep_rank_rows``."""
    rows = ep_rank_rows(owner, target, rows_CE)
    return seconds_of_rows(rows, copied_experts(target), prices=prices)


def seconds_of_rows(rows: EpRankRows, copied: float, *, prices: BlockPrices) -> BlockSeconds:
    """The same, where it is known where rows go, and how many experts are copied: as
    ``copied_experts`` counts them."""
    most = int(rows.received_C.max()), int(rows.computed_C.max())
    return BlockSeconds(*_seconds(prices, *most, copied))


def is_balanced(computed_C: np.ndarray, num_experts: int, balance: float) -> bool:
    """Whether EP ranks compute about equally many rows: equation (7), with ``balance`` its
    ``alpha``, the spread allowed in mean rows of an expert."""
    spread = int(computed_C.max()) - int(computed_C.min())
    return spread < balanced_spread(int(computed_C.sum()), num_experts, balance)


def balanced_spread(num_rows: int, num_experts: int, balance: float) -> float:
    """Rows between the busiest EP rank and the idlest, below which a layer is balanced."""
    return balance * num_rows / num_experts


MOST_ROWS = 2**53  # of a layer: seconds are computed in floats, which count no further


def whole_rows(owner: Placement, rows_CE: np.ndarray) -> np.ndarray:
    """Rows as planners count them: int64 ``[C, E]``."""
    if rows_CE.shape != (owner.num_ep_ranks, owner.num_experts):
        raise ValueError(
            f"rows have shape {rows_CE.shape}, but the layer has {owner.num_ep_ranks} EP ranks and "
            f"{owner.num_experts} experts; give each EP rank a count for each expert"
        )
    if rows_CE.dtype.kind not in "iu":
        raise ValueError(f"rows are {rows_CE.dtype}, but planners count whole rows; round them")
    most = MOST_ROWS // rows_CE.size
    if not 0 <= rows_CE.min() <= rows_CE.max() <= most:
        raise ValueError(
            f"rows go from {rows_CE.min()} to {rows_CE.max()}; give counts from 0 to {most}"
        )
    return rows_CE.astype(np.int64, copy=False)
