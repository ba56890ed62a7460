# SPDX-License-Identifier: Apache-2.0
"""How copies divide rows so that a layer takes least time, by what rows cost. Pure.

A linear programme over all copied experts of a layer: the seconds of the busiest cell and of the
busiest link, together. Senders of one node are alike but for the rows that a sender can keep, so
that the unknowns are how many rows of its own each holder keeps, and how many of all others each
node sends to each holder. Ours; docs/priced_share.md has the idea. Shape letters: C cells, E
experts, V nodes, X copied experts, N (copied expert, holder) pairs, by expert and then holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ds_moe_ext.cost.row_prices import RowPrices, between_nodes
from ds_moe_ext.placement import Holders, Placement

LEAVING = 1e-4
"""What a row costs besides that leaves its cell, where all cells compute one row in 1: of divisions
that take equally long the one with fewest such rows."""
CROSSING = 2 * LEAVING  # and one that leaves its node, besides
ROUNDING = 1e-6  # of a row: what the solver's numbers are off


@dataclass(frozen=True, eq=False)
class Division:
    """Rows of copied experts over the holders.

    Attributes:
        kept_N: of its own rows those that each holder keeps.
        sent_VN: of all other rows those that each node's senders send to each holder.
    """

    kept_N: np.ndarray
    sent_VN: np.ndarray


@dataclass(frozen=True, eq=False)
class Routed:
    """Rows of one layer, to be divided.

    Attributes:
        rows_CE: of each sender for each expert, int64.
        target: who holds what.
        node_C: node of each cell; any numbers.
    """

    rows_CE: np.ndarray
    target: Placement
    node_C: np.ndarray

    @property
    def holders(self) -> Holders:
        return self.target.holders

    @cached_property
    def numbered_C(self) -> np.ndarray:
        """Nodes as 0 to V - 1."""
        return np.unique(self.node_C, return_inverse=True)[1]

    @cached_property
    def own_N(self) -> np.ndarray:
        """Rows that each holder has itself for the expert."""
        holders = self.holders
        return self.rows_CE[holders.cell_N, holders.expert_X[holders.copied_N]]

    @cached_property
    def rows_VX(self) -> np.ndarray:
        """Rows of each node's senders, int64."""
        num_nodes = int(self.numbered_C.max()) + 1
        rows_VX = np.zeros((num_nodes, len(self.holders.expert_X)), dtype=np.int64)
        np.add.at(rows_VX, self.numbered_C, self.rows_CE[:, self.holders.expert_X])
        return rows_VX

    @cached_property
    def alone_CC(self) -> np.ndarray:
        """Rows from each cell to each for the experts with one holder, int64."""
        alone_CC = np.zeros((self.target.num_cells,) * 2, dtype=np.int64)
        np.add.at(alone_CC.T, self.holders.cell_A, self.rows_CE[:, self.holders.expert_A].T)
        return alone_CC


def divide(routed: Routed, prices: RowPrices) -> Division:
    """The division, in parts of rows, with which a layer takes least time; of equals one with few
    rows that leave their cell, and fewest that leave their node.

    Raises:
        ImportError: SciPy is not installed.
        RuntimeError: the solver finds none.
    """
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ImportError(
            "a priced share needs SciPy, which is not installed; pip install scipy"
        ) from error

    programme = _Programme(routed, prices)
    if not programme.kept_N.size:  # every expert has one holder
        return Division(np.zeros(0), np.zeros(programme.sent_VN.shape))
    found = linprog(
        programme.price_Z,
        A_ub=programme.limits.matrix(programme.num_unknowns),
        b_ub=programme.limits.most,
        A_eq=programme.sums.matrix(programme.num_unknowns),
        b_eq=routed.rows_VX.ravel(),
        bounds=programme.bounds_Z2,
        method="highs",
    )
    if found.status:
        raise RuntimeError(f"no division of rows was found: {found.message}")
    return Division(found.x[programme.kept_N], found.x[programme.sent_VN])


@dataclass(frozen=True, eq=False)
class _Rules:
    """Sums of unknowns.

    Attributes:
        factor: of each term.
        rule: that it is in.
        unknown: its.
        most: what each rule's sum is, or is at most.
    """

    factor: np.ndarray
    rule: np.ndarray
    unknown: np.ndarray
    most: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[_Rules]) -> _Rules:
        """The rules of all, one behind the other."""
        firsts = np.cumsum([0, *(len(part.most) for part in parts)])
        return cls(
            np.concatenate([part.factor for part in parts]),
            np.concatenate([first + part.rule for first, part in zip(firsts, parts)]),
            np.concatenate([part.unknown for part in parts]),
            np.concatenate([part.most for part in parts]),
        )

    def matrix(self, num_unknowns: int) -> Any:
        """As SciPy takes them."""
        from scipy.sparse import coo_array

        shape = len(self.most), num_unknowns
        return coo_array((self.factor, (self.rule, self.unknown)), shape=shape)


class _Programme:
    """Unknowns Z: rows kept, a pair; rows sent, a node and pair; seconds of the busiest cell and of
    the busiest link, in units of the highest price."""

    def __init__(self, routed: Routed, prices: RowPrices) -> None:
        self._routed = routed
        self._cell_N = routed.holders.cell_N
        self._node_N = routed.numbered_C[self._cell_N]
        (num_nodes, _), num_pairs = routed.rows_VX.shape, len(self._cell_N)
        self.kept_N = np.arange(num_pairs)
        self.sent_VN = num_pairs + np.arange(num_nodes * num_pairs).reshape(num_nodes, num_pairs)
        self.num_unknowns = num_pairs * (1 + num_nodes) + 2
        self._cell_s, self._link_s = self.num_unknowns - 2, self.num_unknowns - 1
        self._crosses_VN = np.arange(num_nodes)[:, None] != self._node_N
        unit = max(*prices.row_s_C, prices.local_row_s, prices.cross_row_s) or 1.0
        self._row_C = prices.row_s_C / unit
        self._local, self._cross = prices.local_row_s / unit, prices.cross_row_s / unit

    @property
    def price_Z(self) -> np.ndarray:
        price_Z = np.zeros(self.num_unknowns)
        price_Z[self.sent_VN] = np.where(self._crosses_VN, LEAVING + CROSSING, LEAVING)
        price_Z /= len(self._row_C)
        price_Z[[self._cell_s, self._link_s]] = 1
        return price_Z

    @property
    def bounds_Z2(self) -> np.ndarray:
        bounds_Z2 = np.zeros((self.num_unknowns, 2))
        bounds_Z2[:, 1] = np.inf
        bounds_Z2[self.kept_N, 1] = self._routed.own_N
        return bounds_Z2

    @property
    def sums(self) -> _Rules:
        """Every row is kept or sent: one a node and copied expert."""
        num_nodes, num_copied = self._routed.rows_VX.shape
        copied_N = self._routed.holders.copied_N
        sent_VN = np.arange(num_nodes)[:, None] * num_copied + copied_N
        rule = np.concatenate([self._node_N * num_copied + copied_N, sent_VN.ravel()])
        unknown = np.concatenate([self.kept_N, self.sent_VN.ravel()])
        return _Rules(np.ones(len(rule)), rule, unknown, self._routed.rows_VX.ravel())

    @property
    def limits(self) -> _Rules:
        """No cell and no link takes longer than the busiest one."""
        routed, alone_CC = self._routed, self._routed.alone_CC
        num_cells, num_nodes = len(alone_CC), len(routed.rows_VX)
        own_C, come_C = alone_CC.diagonal(), alone_CC.sum(axis=0)
        rules = [self._limit(self._cell_s, self._row_C, come_C, kept=1, place_VN=self._cell_N)]
        if self._local:
            local_C, leave_C = np.full(num_cells, self._local), routed.rows_CE.sum(axis=1)
            rules += [
                self._limit(self._link_s, local_C, come_C - own_C, place_VN=self._cell_N),
                self._limit(self._link_s, local_C, leave_C - own_C, kept=-1),
            ]
        if self._cross:
            alone_VV = between_nodes(alone_CC, routed.node_C)
            cross_V, sender_V1 = np.full(num_nodes, self._cross), np.arange(num_nodes)[:, None]
            rules += [
                self._limit(self._link_s, cross_V, fixed_V, place_VN=place, crosses=True)
                for fixed_V, place in (
                    (alone_VV.sum(axis=0), self._node_N),
                    (alone_VV.sum(axis=1), sender_V1),
                )
            ]
        return _Rules.joined(rules)

    def _limit(
        self,
        busiest: int,
        price_P: np.ndarray,
        fixed_P: np.ndarray,
        *,
        kept: int = 0,
        place_VN: np.ndarray | None = None,
        crosses: bool = False,
    ) -> _Rules:
        """Of each place: its rows times their price are at most the busiest one's seconds.

        Args:
            busiest: the unknown.
            price_P: of a row.
            fixed_P: rows of experts that have one holder.
            kept: how rows kept in a cell count there.
            place_VN: where rows that are sent count; None: nowhere.
            crosses: of these only those that leave their node.
        """
        factor, rule = [-np.ones(len(price_P))], [np.arange(len(price_P))]
        unknown = [np.full(len(price_P), busiest)]
        if kept:
            rule.append(self._cell_N)
            unknown.append(self.kept_N)
            factor.append(kept * price_P[self._cell_N])
        if place_VN is not None:
            counts = self._crosses_VN if crosses else np.ones_like(self._crosses_VN)
            rule.append(np.broadcast_to(place_VN, counts.shape)[counts])
            unknown.append(self.sent_VN[counts])
            factor.append(price_P[rule[-1]])
        return _Rules(
            np.concatenate(factor),
            np.concatenate(rule),
            np.concatenate(unknown),
            -price_P * fixed_P,
        )


def in_whole_rows(division: Division, routed: Routed) -> Division:
    """The same in whole rows, int64: rounded down; what a node has left of an expert goes to the
    parts that lack most, with what their cells lack of experts before."""
    holders = routed.holders
    node_N = routed.numbered_C[holders.cell_N]
    parts = np.vstack([division.kept_N, division.sent_VN])
    whole = np.floor(parts + ROUNDING).astype(np.int64)
    lacks = parts - whole
    missing_VX = routed.rows_VX.copy()
    np.subtract.at(missing_VX, (node_N, holders.copied_N), whole[0])
    np.subtract.at(missing_VX.T, holders.copied_N, whole[1:].T)
    first_X1 = np.concatenate([[0], holders.num_holders_X.cumsum()])
    owed_C = np.zeros(routed.target.num_cells)
    for node, copied in zip(*map(np.ndarray.tolist, np.nonzero(missing_VX))):
        pairs = np.arange(first_X1[copied], first_X1[copied + 1])
        near = pairs[node_N[pairs] == node]
        row = np.concatenate([np.zeros_like(near), np.full_like(pairs, 1 + node)])
        pair = np.concatenate([near, pairs])
        lack, cell = lacks[row, pair], holders.cell_N[pair]
        wanted = np.argsort(-(lack + owed_C[cell]) + 2.0 * (lack <= ROUNDING), kind="stable")
        given = wanted[: missing_VX[node, copied]]
        np.add.at(owed_C, cell, lack)
        np.subtract.at(owed_C, cell[given], 1)
        whole[row[given], pair[given]] += 1
    return Division(whole[0], whole[1:])


def sent_rows(division: Division, routed: Routed) -> np.ndarray:
    """Rows that each sender sends to each holder, int64 ``[C, N]``: senders of a node, in order,
    meet its quotas in order.

    Args:
        division: in whole rows.
    """
    holders, node_C = routed.holders, routed.numbered_C
    copied_N = holders.copied_N
    left_CX = routed.rows_CE[:, holders.expert_X]
    left_CX[holders.cell_N, copied_N] -= division.kept_N
    ends_CX = np.empty_like(left_CX)
    for node in range(len(routed.rows_VX)):
        ends_CX[node_C == node] = left_CX[node_C == node].cumsum(axis=0)
    before_X = holders.num_holders_X.cumsum() - holders.num_holders_X
    through_VN = division.sent_VN.cumsum(axis=1)
    starts_VN = through_VN - division.sent_VN
    starts_VX = starts_VN[:, before_X]
    first_VN, last_VN = (table - starts_VX[:, copied_N] for table in (starts_VN, through_VN))
    begin_CN, end_CN = (ends_CX - left_CX)[:, copied_N], ends_CX[:, copied_N]
    sent_CN = np.minimum(end_CN, last_VN[node_C]) - np.maximum(begin_CN, first_VN[node_C])
    sent_CN = np.maximum(sent_CN, 0)
    sent_CN[holders.cell_N, np.arange(len(copied_N))] += division.kept_N
    return sent_CN
