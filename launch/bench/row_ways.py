# SPDX-License-Identifier: Apache-2.0
"""How the copies of a layer divide its rows: the papers' ways and ours, of one shape.

Shape letters: C cells (ranks), E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from priced_cluster import PricedCluster

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import RowLevels, WholePrices
from ds_moe_ext.core.share import SWEEPS, LevelShare, LocalElseHome, NearestCopy, Rule
from ds_moe_ext.planning.priced_plans import Routed, divide, in_whole_rows, sent_rows


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the experts of a layer compute in a step.

    Attributes:
        target: who holds what.
        weight_EC: of an expert's rows what each rank shall get, in any unit, int64: what some
            policies plan with the copies.
        planned: who holds what by what was planned before the gate; the target's other copies are
            made after it, and nothing hides their way. None: it is the target.
        rule: how copies divide rows, where a plan says it.
    """

    target: Placement
    weight_EC: np.ndarray
    planned: Placement | None = None
    rule: Rule | None = None

    @classmethod
    def of(cls, target: Placement, planned: Placement | None = None) -> Layout:
        """Copies alone: how they divide rows is another's to say."""
        return cls(target, target.holds_EC.astype(np.int64), planned)

    @classmethod
    def of_quotas(cls, home: Placement, quota_EC: np.ndarray) -> Layout:
        """By the rows of each expert that each rank computes, int64, known after the gate; homes
        of experts without rows count as if they had one."""
        is_idle_E1 = ~quota_EC.any(axis=1, keepdims=True)
        weight_EC = quota_EC + (home.holds_EC & is_idle_E1)
        return cls(home.with_copies(quota_EC > 0), weight_EC, planned=home)

    @classmethod
    def of_slots(cls, slots_EC: np.ndarray) -> Layout:
        """By the slots that each rank gives to each expert, int64."""
        return cls(Placement(slots_EC > 0), slots_EC)

    @property
    def at_gate(self) -> Placement:
        """Who holds what before copies are made after the gate."""
        return self.target if self.planned is None else self.planned


Sending = Callable[[np.ndarray], np.ndarray]
"""Rows that each sender sends of each expert to each rank, int64 ``[C, E, C]``, of its rows ``[C,
E]``."""

Way = Callable[[Placement, Layout, np.ndarray, PricedCluster], Sending]
"""How the copies of a layer divide rows, said before these are known: from its home, its layout and
the rows planned on ``[C, E]``."""


def by_rule(rule: Rule) -> Sending:
    """As a rule says."""

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        share = rule.of_rows(rows_CE)
        senders = enumerate(rows_CE[:, None])
        return np.stack([share.rows_from(cell, rows_1E)[0] for cell, rows_1E in senders])

    return sent


def by_own_rule(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """As the plan says."""
    assert layout.rule is not None
    return by_rule(layout.rule)


def to_nearest(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """HECATE's way: rows without a copy at hand go to the nearest ones."""
    return by_rule(NearestCopy(layout.target, cluster.node_C))


def to_home(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """Pro-Prophet's way: rows without a copy at hand go home."""
    return by_rule(LocalElseHome(home, layout.target))


def by_planned_parts(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """In the parts that would have been best for the rows planned on."""
    return by_rule(_by_levels(layout, planned_CE, cluster, sweeps=0))


def by_priced(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """Divided anew when rows are known, as the product does it, where these are others."""
    return by_rule(_by_levels(layout, planned_CE, cluster, sweeps=SWEEPS))


def _by_levels(
    layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster, *, sweeps: int
) -> LevelShare:
    return LevelShare.planned(levels_by(cluster)(layout.target), planned_CE, sweeps=sweeps)


def levels_by(cluster: PricedCluster) -> Callable[[Placement], RowLevels]:
    """What divides rows under a target."""
    each = cluster.row_prices
    prices = WholePrices.of(each.row_s_C, each.local_row_s, each.cross_row_s, cards=each.cards)
    return partial(RowLevels, node_C=cluster.node_C, prices=prices)


def by_optimum(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """As is best for the rows that come; by a solver, after the gate."""

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        routed = Routed(rows_CE, layout.target, cluster.node_C)
        whole = in_whole_rows(divide(routed, cluster.row_prices), routed)
        holders = routed.holders
        sent_CEC = np.zeros((*rows_CE.shape, len(rows_CE)), dtype=np.int64)
        sent_CEC[:, holders.expert_A, holders.cell_A] = rows_CE[:, holders.expert_A]
        copied = holders.expert_X[holders.copied_N], holders.cell_N
        sent_CEC[:, copied[0], copied[1]] = sent_rows(whole, routed)
        return sent_CEC

    return sent


def evenly(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """By the layout's weights, wherever rows come from."""
    return partial(_in_parts, weight_CEC=layout.weight_EC[None])


def evenly_on_node(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """By the layout's weights over the ranks of the sender's node, or over all if none has any."""

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        is_near_CC = cluster.node_C[:, None] == cluster.node_C
        near_CEC = layout.weight_EC * is_near_CC[:, None]
        has_near_CE1 = near_CEC.any(axis=2, keepdims=True)
        return _in_parts(rows_CE, np.where(has_near_CE1, near_CEC, layout.weight_EC))

    return sent


def _in_parts(rows_CE: np.ndarray, weight_CEC: np.ndarray) -> np.ndarray:
    """In whole rows; senders round at unlike places."""
    through_CEC = weight_CEC.cumsum(axis=2)
    total_CE1 = through_CEC[..., -1:]
    turn_CE1 = np.arange(len(rows_CE))[:, None, None] % total_CE1
    ends_CEC = (rows_CE[..., None] * through_CEC + turn_CE1) // total_CE1
    return np.diff(ends_CEC, axis=2, prepend=0)


def in_turn(
    home: Placement, layout: Layout, planned_CE: np.ndarray, cluster: PricedCluster
) -> Sending:
    """By the layout's weights, which are all rows of an expert: ranks keep of their own what they
    can, of the rest senders in order meet ranks in order."""

    def sent(rows_CE: np.ndarray) -> np.ndarray:
        kept_CE = np.minimum(rows_CE, layout.weight_EC.T)
        last_CE1 = (rows_CE - kept_CE).cumsum(axis=0)[..., None]
        end_EC = (layout.weight_EC - kept_CE.T).cumsum(axis=1)
        first_CE1 = np.concatenate([np.zeros_like(last_CE1[:1]), last_CE1[:-1]])
        start_EC = np.concatenate([np.zeros_like(end_EC[:, :1]), end_EC[:, :-1]], axis=1)
        sent_CEC = np.minimum(last_CE1, end_EC) - np.maximum(first_CE1, start_EC)
        sent_CEC = np.maximum(sent_CEC, 0)
        cells = np.arange(len(rows_CE))
        sent_CEC[cells, :, cells] += kept_CE
        return sent_CEC

    return sent
