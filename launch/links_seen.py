"""What one step shows of a contender on one rank: where rows go, what hides its copies.

Shape letters: L layers, C ranks, E experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from links import SPEEDS
from paced import BACKWARD, Pace

from ds_moe_ext.load import balance_L
from ds_moe_ext.moe.observation import TimedTask
from ds_moe_ext.planners.prices import TRIPS, Prices, RowFlow, flow_seconds
from ds_moe_ext.schedule.task import ATTENTION, COMPUTE, PARAM
from ds_moe_ext.strategy import Plan

Moments = tuple[float, float]  # start and end


# Where rows go.


def rows_between(plans: Sequence[Plan], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows that each rank sends to each one, itself too, by each plan's own share, ``[L, C, C]``.

    Args:
        plans: of each layer; none is revised once rows are known.
        rows: of each layer, that each sender routes to each expert, int64 ``[C, E]``.
    """
    sent = [
        [plan.share.rows_from(sender, own_E[None])[0].sum(axis=0) for sender, own_E in each]
        for plan, each in zip(plans, map(enumerate, rows))
    ]
    return np.array(sent)


def flow_of(rows_LCC: np.ndarray, node_C: np.ndarray) -> RowFlow:
    """What enters and leaves ranks and nodes.

    Args:
        rows_LCC: as of ``rows_between``.
        node_C: node of each rank.
    """
    others_LCC = rows_LCC * ~np.eye(len(node_C), dtype=bool)
    is_on_NC = np.unique(node_C)[:, None] == node_C
    rows_LNN = is_on_NC @ rows_LCC @ is_on_NC.T
    abroad_LNN = rows_LNN * ~np.eye(len(is_on_NC), dtype=bool)
    return RowFlow(
        computed_LC=rows_LCC.sum(axis=1),
        sent_LC=others_LCC.sum(axis=2),
        received_LC=others_LCC.sum(axis=1),
        out_LN=abroad_LNN.sum(axis=2),
        in_LN=abroad_LNN.sum(axis=1),
    )


@dataclass(frozen=True)
class Cards:
    """What passes a rank's network card, in one direction.

    Attributes:
        row_bytes: of one row.
        inter_bytes_per_s: to or from other nodes.
        intra_bytes_per_s: to or from ranks of its node.
    """

    row_bytes: int
    inter_bytes_per_s: float
    intra_bytes_per_s: float

    @classmethod
    def told(cls, row_bytes: int) -> Cards:
        """As the launcher says; of any speed if it does not."""
        inter, intra = (float(os.environ.get(name, "inf")) for name in SPEEDS)
        return cls(row_bytes, inter * 1e6 / 8, intra * 1e6 / 8)

    def seconds(self, rows_LCC: np.ndarray, node_C: np.ndarray) -> np.ndarray:
        """Of each layer's all-to-all, by its busiest card, float ``[L]``; see ``rows_between``."""
        is_near_CC = node_C[:, None] == node_C
        own_CC = np.eye(len(node_C), dtype=bool)
        far_L, near_L = (_busiest(rows_LCC * on) for on in (~is_near_CC, is_near_CC & ~own_CC))
        link_L = np.maximum(far_L / self.inter_bytes_per_s, near_L / self.intra_bytes_per_s)
        seconds_L: np.ndarray = self.row_bytes * link_L
        return seconds_L


def _busiest(rows_LCC: np.ndarray) -> np.ndarray:
    """Rows of the busiest sender or receiver, ``[L]``."""
    most_L: np.ndarray = np.maximum(rows_LCC.sum(axis=1), rows_LCC.sum(axis=2)).max(axis=1)
    return most_L


@dataclass(frozen=True)
class Routed:
    """Where the rows of one step go.

    Attributes:
        remote: share of all ranks' rows that leave their rank.
        abroad: share that leave their node.
        balance: rows of the busiest rank over the mean, mean over layers.
        model_s: seconds of the step by HECATE's model.
        cards_s: by the speed of each rank's card, if copies took no time.
    """

    remote: float
    abroad: float
    balance: float
    model_s: float
    cards_s: float

    @classmethod
    def of(
        cls, rows_LCC: np.ndarray, node_C: np.ndarray, *, pace: Pace, prices: Prices, cards: Cards
    ) -> Routed:
        """As the rows are shared and what computing and links are said to take."""
        flow, passes = flow_of(rows_LCC, node_C), 1 + BACKWARD
        computed_L = pace.attention_s + pace.row_s * flow.computed_LC.max(axis=1)
        model_L = flow_seconds(flow, prices=prices) + passes * pace.attention_s
        cards_L = TRIPS * cards.seconds(rows_LCC, node_C) + passes * computed_L
        return cls(
            remote=float(flow.sent_LC.sum() / rows_LCC.sum()),
            abroad=float(flow.out_LN.sum() / rows_LCC.sum()),
            balance=float(balance_L(flow.computed_LC).mean()),
            model_s=float(model_L.sum()),
            cards_s=float(cards_L.sum()),
        )


# What hides copies.


@dataclass(frozen=True)
class Travel:
    """Seconds of one rank in one step, all layers.

    Attributes:
        gather_s: copies travelled.
        gather_bare_s: and the rank computed nothing.
        reduction_s: gradients of copies travelled.
        reduction_bare_s: and the rank computed nothing.
    """

    gather_s: float = 0.0
    gather_bare_s: float = 0.0
    reduction_s: float = 0.0
    reduction_bare_s: float = 0.0

    def __add__(self, other: Travel) -> Travel:
        pairs = zip(vars(self).values(), vars(other).values())
        return Travel(*(mine + its for mine, its in pairs))


def travel(timed: Iterable[TimedTask], held: Iterable[Moments]) -> Travel:
    """What the tasks of all layers in a step say of its copies.

    Args:
        timed: of a CPU, whose marks are seconds of one clock. What it says of attention is not
            used: in backward that ends where autograd passes the block's input, which may wait for
            copies before.
        held: when attention and experts computed.
    """
    tasks = list(timed)
    worked = [
        (each.start, each.end)
        for each in tasks
        if each.task.lane == COMPUTE and each.task.op.is_work and each.task.op is not ATTENTION
    ]
    busy = union([*held, *worked])
    total = Travel()
    for each in tasks:
        if each.task.lane == PARAM:
            seconds, bare_s = each.end - each.start, bare(each.start, each.end, busy)
            seen = (0.0, 0.0, seconds, bare_s) if each.task.adjoint_of else (seconds, bare_s)
            total += Travel(*seen)
    return total


def union(spans: Iterable[Moments]) -> list[Moments]:
    """Moments in any of the spans, as spans that are apart."""
    apart: list[Moments] = []
    for start, end in sorted(spans):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(apart[-1][1], end)
        else:
            apart.append((start, end))
    return apart


def bare(start: float, end: float, apart: Sequence[Moments]) -> float:
    """Seconds between two moments that none of the spans covers, which are apart."""
    covered = (max(min(end, its_end) - max(start, its_start), 0.0) for its_start, its_end in apart)
    return end - start - sum(covered)


@dataclass(frozen=True)
class Seen:
    """One step of one contender on one rank.

    Attributes:
        routed: the rows.
        travel: of copies.
        copy_bytes: weights and gradients of copies that this rank sent.
        late_s: by how much its paced waits lasted longer.
    """

    routed: Routed
    travel: Travel
    copy_bytes: int
    late_s: float
