# SPDX-License-Identifier: Apache-2.0
"""How replicas divide rows by what rows cost, and which replicas a priced share needs. Ours. Pure.

``divide`` is exact: a linear programme over all copied experts of a layer, the seconds of the
busiest EP rank and of the busiest link together. Runs divide by ``core.row_levels``; ``fewest``
finds how few replicas that needs, ``cover_nodes`` and ``swap_replicas`` other ones than a planner
chose by load, and ``Repair`` adds some once rows are known.

In the programme senders of one node are alike but for the rows that a sender can keep, so
that the unknowns are how many rows of its own each holder keeps, and how many of all others each
node sends to each holder; docs/planners.md has the idea. Shape letters: C EP ranks, E
experts, V nodes, X copied experts, N (copied expert, holder) pairs, by expert and then holder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ds_moe_ext.core.placement import Holders, Placement
from ds_moe_ext.core.row_levels import Division, RowLevels
from ds_moe_ext.core.share import SWEEPS, DividedRows, LevelShare, Rule
from ds_moe_ext.planning.prices import RowPrices, between_nodes, by_node

LEAVING = 1e-4
"""What a row costs besides that leaves its EP rank, where all EP ranks compute one row in 1: of
divisions that take equally long the one with fewest such rows."""
CROSSING = 2 * LEAVING  # and one that leaves its node, besides
ROUNDING = 1e-6  # of a row: what the solver's numbers are off


@dataclass(frozen=True, eq=False)
class RoutedDivision:
    """Rows of copied experts over the holders."""

    kept_N: np.ndarray  # of its own rows those that each holder keeps
    sent_VN: np.ndarray  # of all other rows those that each node's senders send to each holder


@dataclass(frozen=True, eq=False)
class Routed:
    """Rows of one layer, to be divided."""

    rows_CE: np.ndarray  # of each sender for each expert, int64
    target: Placement  # who holds what
    node_C: np.ndarray  # node of each EP rank; any numbers

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
        return self.rows_CE[holders.ep_rank_N, holders.expert_X[holders.copied_N]]

    @cached_property
    def rows_VX(self) -> np.ndarray:
        """Rows of each node's senders, int64."""
        num_nodes = int(self.numbered_C.max()) + 1
        rows_VX = np.zeros((num_nodes, len(self.holders.expert_X)), dtype=np.int64)
        np.add.at(rows_VX, self.numbered_C, self.rows_CE[:, self.holders.expert_X])
        return rows_VX

    @cached_property
    def alone_CC(self) -> np.ndarray:
        """Rows from each EP rank to each for the experts with one holder, int64."""
        alone_CC = np.zeros((self.target.num_ep_ranks,) * 2, dtype=np.int64)
        np.add.at(alone_CC.T, self.holders.ep_rank_A, self.rows_CE[:, self.holders.expert_A].T)
        return alone_CC


def divide(routed: Routed, prices: RowPrices) -> RoutedDivision:
    """The division, in parts of rows, with which a layer takes least time; of equals one with few
    rows that leave their EP rank, and fewest that leave their node. Needs SciPy."""
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ImportError(
            "a priced share needs SciPy, which is not installed; pip install scipy"
        ) from error

    programme = _Programme(routed, prices)
    if not programme.kept_N.size:  # every expert has one holder
        return RoutedDivision(np.zeros(0), np.zeros(programme.sent_VN.shape))
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
    return RoutedDivision(found.x[programme.kept_N], found.x[programme.sent_VN])


class _Rules(NamedTuple):
    """Sums of unknowns."""

    factor: np.ndarray  # of each term
    rule: np.ndarray  # that it is in
    unknown: np.ndarray  # its
    most: np.ndarray  # what each rule's sum is, or is at most

    def matrix(self, num_unknowns: int) -> Any:
        """As SciPy takes them."""
        from scipy.sparse import coo_array

        shape = len(self.most), num_unknowns
        return coo_array((self.factor, (self.rule, self.unknown)), shape=shape)


class _Programme:
    """Unknowns Z: rows kept, a pair; rows sent, a node and pair; seconds of the busiest EP rank and
    of the busiest link, in units of the highest price."""

    def __init__(self, routed: Routed, prices: RowPrices) -> None:
        self._routed = routed
        self._ep_rank_N = routed.holders.ep_rank_N
        self._node_N = routed.numbered_C[self._ep_rank_N]
        (num_nodes, _), num_pairs = routed.rows_VX.shape, len(self._ep_rank_N)
        self.kept_N = np.arange(num_pairs)
        self.sent_VN = num_pairs + np.arange(num_nodes * num_pairs).reshape(num_nodes, num_pairs)
        self.num_unknowns = num_pairs * (1 + num_nodes) + 2
        self._ep_rank_s, self._link_s = self.num_unknowns - 2, self.num_unknowns - 1
        self._crosses_VN = np.arange(num_nodes)[:, None] != self._node_N
        unit = max(*prices.row_s_C, prices.local_row_s, prices.cross_row_s) or 1.0
        self._row_C = prices.row_s_C / unit
        self._local, self._cross = prices.local_row_s / unit, prices.cross_row_s / unit

    @property
    def price_Z(self) -> np.ndarray:
        price_Z = np.zeros(self.num_unknowns)
        price_Z[self.sent_VN] = np.where(self._crosses_VN, LEAVING + CROSSING, LEAVING)
        price_Z /= len(self._row_C)
        price_Z[[self._ep_rank_s, self._link_s]] = 1
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
        """No EP rank and no link takes longer than the busiest one."""
        routed, alone_CC = self._routed, self._routed.alone_CC
        num_ep_ranks, num_nodes = len(alone_CC), len(routed.rows_VX)
        own_C, come_C = alone_CC.diagonal(), alone_CC.sum(axis=0)
        rules = [
            self._limit(self._ep_rank_s, self._row_C, come_C, kept=1, place_VN=self._ep_rank_N)
        ]
        if self._local:
            local_C, leave_C = np.full(num_ep_ranks, self._local), routed.rows_CE.sum(axis=1)
            rules += [
                self._limit(self._link_s, local_C, come_C - own_C, place_VN=self._ep_rank_N),
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
        firsts = np.cumsum([0, *(len(each.most) for each in rules)])
        behind = [each._replace(rule=first + each.rule) for first, each in zip(firsts, rules)]
        return _Rules(*map(np.concatenate, zip(*behind)))

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
        """Of each place: its rows times their price are at most the busiest one's seconds."""
        factor, rule = [-np.ones(len(price_P))], [np.arange(len(price_P))]
        unknown = [np.full(len(price_P), busiest)]
        if kept:
            rule.append(self._ep_rank_N)
            unknown.append(self.kept_N)
            factor.append(kept * price_P[self._ep_rank_N])
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


def in_whole_rows(division: RoutedDivision, routed: Routed) -> RoutedDivision:
    """The same in whole rows, int64: rounded down; what a node has left of an expert goes to the
    parts that lack most, with what their EP ranks lack of experts before."""
    holders = routed.holders
    node_N = routed.numbered_C[holders.ep_rank_N]
    parts = np.vstack([division.kept_N, division.sent_VN])
    whole = np.floor(parts + ROUNDING).astype(np.int64)
    lacks = parts - whole
    missing_VX = routed.rows_VX.copy()
    np.subtract.at(missing_VX, (node_N, holders.copied_N), whole[0])
    np.subtract.at(missing_VX.T, holders.copied_N, whole[1:].T)
    first_X1 = np.concatenate([[0], holders.num_holders_X.cumsum()])
    owed_C = np.zeros(routed.target.num_ep_ranks)
    for node, copied in zip(*map(np.ndarray.tolist, np.nonzero(missing_VX))):
        pairs = np.arange(first_X1[copied], first_X1[copied + 1])
        near = pairs[node_N[pairs] == node]
        row = np.concatenate([np.zeros_like(near), np.full_like(pairs, 1 + node)])
        pair = np.concatenate([near, pairs])
        lack, ep_rank = lacks[row, pair], holders.ep_rank_N[pair]
        wanted = np.argsort(-(lack + owed_C[ep_rank]) + 2.0 * (lack <= ROUNDING), kind="stable")
        given = wanted[: missing_VX[node, copied]]
        np.add.at(owed_C, ep_rank, lack)
        np.subtract.at(owed_C, ep_rank[given], 1)
        whole[row[given], pair[given]] += 1
    return RoutedDivision(whole[0], whole[1:])


def sent_rows(division: RoutedDivision, routed: Routed) -> np.ndarray:
    """Rows that each sender sends to each holder, int64 ``[C, N]``: senders of a node, in order,
    meet its quotas in order; of a division in whole rows."""
    holders, node_C = routed.holders, routed.numbered_C
    copied_N = holders.copied_N
    left_CX = routed.rows_CE[:, holders.expert_X]
    left_CX[holders.ep_rank_N, copied_N] -= division.kept_N
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
    sent_CN[holders.ep_rank_N, np.arange(len(copied_N))] += division.kept_N
    return sent_CN


TOLERANCE = 0.01
"""By so much a layer may take longer with fewer replicas; and than if all rows were local and even,
before replicas are added to it; and longer or less long than planned, before it is planned anew."""


def even_price(levels: RowLevels, division: Division) -> float:
    """Of a layer that takes hardly longer than if all rows were local and even."""
    even = division.mean * int(levels.prices.row_C.min())
    return (1 + TOLERANCE) * even + levels.prices.worth


def is_even(levels: RowLevels, division: Division) -> bool:
    """Whether a layer takes hardly longer than that."""
    return division.price <= even_price(levels, division)


def is_as_planned(share: LevelShare, rows_CE: np.ndarray) -> bool:
    """Whether a layer takes as long by other rows as by those that its share was planned for, in
    proportion to how many they are, hardly more or less."""
    plan = share.plan
    found = share.levels.divided(rows_CE, plan, sweeps=share.sweeps)
    planned = plan.price * found.mean
    return abs(found.price * plan.mean - planned) <= TOLERANCE * planned


def fewest(
    targets: Iterable[Placement],
    levels_of: Callable[[Placement], RowLevels],
    rows_CE: np.ndarray,
    *,
    sweeps: int,
    most_s: float = math.inf,
) -> LevelShare:
    """The share of the narrowest target under which the layer takes hardly longer than under the
    widest, which comes first, and no longer than ``most_s``. Targets are asked for, and tried on
    the predicted rows, until one is too narrow."""
    shares = (LevelShare.planned(levels_of(each), rows_CE, sweeps=sweeps) for each in targets)
    found = next(shares)
    most_s = min((1 + TOLERANCE) * found.planned_s, most_s)
    for narrower in shares:
        if narrower.planned_s > most_s:
            break
        found = narrower
    return found


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Adds replicas once rows are known, where the forecast failed; docs/planners.md."""

    owner: Placement  # where the experts live
    share: LevelShare  # of the replicas that stand
    levels_of: Callable[[Placement], RowLevels]  # what divides rows under a target
    # of an expert that the busiest link carries, its weights there and its gradients back, in the
    # whole units of the prices. Nothing hides them.
    copy_price: int
    num_slots: int  # further replicas that an EP rank has room for

    def __call__(self, rows_CE: np.ndarray) -> tuple[Placement, Rule]:
        """Who holds what, and how rows are divided, int64 ``[C, E]``: over the replicas that stand,
        where the busiest EP rank has hardly more to do than the mean; else over further ones, too,
        where they pay. Pure."""
        share, rows_CE = self.share, np.ascontiguousarray(rows_CE, dtype=np.int64)
        levels = share.levels
        division = levels.divided(rows_CE, share.plan, sweeps=share.sweeps)
        found = None
        if (
            levels.busiest_ep_rank(division, rows_CE)
            > even_price(levels, division) + self.copy_price
        ):
            found = levels.repaired(
                division,
                rows_CE,
                self.owner.owner_E,
                copy_price=self.copy_price,
                num_slots=self.num_slots,
                sweeps=share.sweeps,
            )
        if found is None:
            return levels.target, DividedRows(levels, rows_CE, division.rows_N)
        holds_EC, division = found
        levels = self.levels_of(self.owner.with_replicas(holds_EC))
        return levels.target, LevelShare(levels, division, share.sweeps)


TRIALS = 24
"""Of a layer, at most: what planning has time for, in counts, so that all ranks decide alike."""
MISSES = 8  # in a row, at most
EP_RANKS = 16
"""On more EP ranks trials are fewer, by the square: each takes longer, and one replica changes
less."""


def cover_nodes(
    owner: Placement,
    target: Placement,
    rows_CE: np.ndarray,
    node_C: np.ndarray,
    *,
    most_replicas: int,
    most_experts: int,
) -> Placement:
    """Fill a target's free room with a replica of an expert for each node that sends it rows and
    has none: the nodes' links are what many replicas of few hot experts do not relieve.

    Most rows first, each on the EP rank of its node that has fewest rows and room for a replica, of
    ``most_replicas`` (m). Of at most ``most_experts`` (t): first those that the target copies, then
    those of which most rows cross.
    """
    node_C = np.unique(node_C, return_inverse=True)[1]
    is_on_VC = node_C == np.arange(int(node_C.max()) + 1)[:, None]
    is_there_VE = by_node(target.holds_EC.T, node_C) > 0
    rows_VE = np.where(is_there_VE, 0, by_node(rows_CE, node_C))
    replicas_EC = target.holds_EC & ~owner.holds_EC
    is_copied_E, crossing_E = replicas_EC.any(axis=1), rows_VE.sum(axis=0)
    wanted_E = np.lexsort((-crossing_E, ~is_copied_E))
    rows_VE[:, wanted_E[most_experts:]] = 0
    room_C = most_replicas - replicas_EC.sum(axis=0)
    busy_C = np.bincount(owner.owner_E, rows_CE.sum(axis=0), owner.num_ep_ranks)
    for place in np.argsort(-rows_VE, axis=None, kind="stable")[: np.count_nonzero(rows_VE)]:
        node, expert = divmod(int(place), owner.num_experts)
        free = np.flatnonzero(is_on_VC[node] & (room_C > 0))
        if free.size:
            ep_rank = free[busy_C[free].argmin()]
            replicas_EC[expert, ep_rank] = True
            room_C[ep_rank] -= 1
            busy_C[ep_rank] += rows_VE[node, expert]
            busy_C[owner.owner_E[expert]] -= rows_VE[node, expert]
            if not room_C.any():
                break
    return owner.with_replicas(replicas_EC)


def swap_replicas(
    owner: Placement,
    share: LevelShare,
    rows_CE: np.ndarray,
    levels_of: Callable[[Placement], RowLevels],
    *,
    most_experts: int,
) -> LevelShare:
    """Let EP ranks hold replicas of other experts, one after the other, as long as that saves time.

    Most promising first: replicas that would take most off the busiest EP rank and off the links.
    Where an EP rank is full, its replica with fewest rows makes room. Each is priced by rows
    divided anew, from where the division stands; the first that is better is kept, and others are
    looked for. No EP rank gets more replicas than its fullest has, and at most ``most_experts`` (t)
    are copied. The given share stays if no other saves time.
    """
    levels, division = share.levels, share.plan
    left = TRIALS * EP_RANKS**2 // max(EP_RANKS, owner.num_ep_ranks) ** 2
    replicas_C = (levels.target.holds_EC & ~owner.holds_EC).sum(axis=0)
    swaps_of = partial(
        _swaps, owner, rows_CE, most_replicas=int(replicas_C.max()), most_experts=most_experts
    )
    while replicas_C.any() and not is_even(levels, division):
        tried = list(islice(swaps_of(levels, division), min(left, MISSES)))
        if not tried:
            break
        found = levels.first_below(division, np.stack(tried), rows_CE, sweeps=SWEEPS)
        if found is None:
            break
        number, division = found
        left -= number + 1
        levels = levels_of(owner.with_replicas(tried[number]))
    if levels is share.levels:
        return share
    swapped = LevelShare.planned(levels, rows_CE, sweeps=share.sweeps)
    return min(share, swapped, key=lambda each: each.plan.price)


def _swaps(
    owner: Placement,
    rows_CE: np.ndarray,
    levels: RowLevels,
    division: Division,
    *,
    most_replicas: int,
    most_experts: int,
) -> Iterator[np.ndarray]:
    """Who holds what with one replica more, or another one, bool ``[E, C]``; most promising
    first."""
    holds_EC = levels.target.holds_EC
    replicas_EC = holds_EC & ~owner.holds_EC
    computed_EC = levels.computed_EC(rows_CE, division.rows_N)
    fewest_C = np.where(replicas_EC, computed_EC, np.iinfo(np.int64).max).argmin(axis=0)
    is_full_C = replicas_EC.sum(axis=0) >= most_replicas
    promise_EC = np.where(holds_EC, 0, _promise_EC(levels, rows_CE, computed_EC))
    for place in np.argsort(-promise_EC, axis=None, kind="stable")[: np.count_nonzero(promise_EC)]:
        expert, ep_rank = divmod(int(place), levels.target.num_ep_ranks)
        others_EC = replicas_EC.copy()
        others_EC[fewest_C[ep_rank], ep_rank] &= not is_full_C[ep_rank]
        others_EC[expert, ep_rank] = True
        if np.count_nonzero(others_EC.any(axis=1)) <= most_experts:
            yield owner.holds_EC | others_EC


def _promise_EC(levels: RowLevels, rows_CE: np.ndarray, computed_EC: np.ndarray) -> np.ndarray:
    """What a replica could take, by the prices: off the busiest EP rank until its own does as much,
    off its node's card what senders there send elsewhere, and off its own link."""
    prices, node_C = levels.prices, levels.node_C
    busy_EC = computed_EC * prices.row_C
    busy_C = busy_EC.sum(axis=0)
    busiest = int(busy_C.argmax())
    away_VE = by_node(rows_CE - computed_EC.T, node_C)
    away_EC = np.maximum(away_VE[np.unique(node_C, return_inverse=True)[1]].T, 0)
    own_EC = np.maximum(rows_CE.T - computed_EC, 0)
    taken_EC = np.minimum(busy_EC[:, [busiest]], (busy_C[busiest] - busy_C) // 2)
    promise_EC: np.ndarray = taken_EC + prices.cross * away_EC + prices.local * own_EC
    return promise_EC
