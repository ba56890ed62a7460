# SPDX-License-Identifier: Apache-2.0
"""The functions of ``row_levels.c`` in Python, for a machine that cannot compile them; slower.

Both give the same integers for the same input, so ranks with and without a compiler agree. The C
file explains each step; names are the same. The search fills one expert after another, whose few
holders are Python's integers; the rest is numpy. Pure.

Three facts make the integers equal. Where C divides, no operand is negative, so ``//`` gives what C
gives. ``>>`` rounds negative numbers down in both. ``bisect_left`` looks at the levels that C looks
at, in the same order: filled rows may fall by one as a level rises, since slownesses are rounded,
so another search could end elsewhere.

Shape letters: C EP ranks, E experts, V nodes, X copied experts, G (copied expert, node) groups, N
(copied expert, holder) pairs by group and then EP rank, P pairs of all experts, F chunks, S slots
of an EP rank or some senders. ``_by_node`` behind a letter C: EP ranks in the order of their nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import NamedTuple

import numpy as np

PARTS_BITS = 20
LAST_STEP = 11
LAST_TOLL = 5
DEAREST = 1 << 28
FURTHEST = 1 << 40
MANY = 512
HALVINGS = 10

Steps = tuple[int, int, int]
"""Of leave, cross and tolls."""
WAYS: Sequence[Steps] = (
    (0, 0, 0),
    *((0, 1, 0), (0, -1, 0)),
    *((0, 0, 1), (0, 0, -1)),
    *((1, 0, 0), (-1, 0, 0)),
)
Divided = tuple[np.ndarray, np.ndarray, Sequence[int]]
"""Rows of each holder, these in parts, and five numbers: the steps, the mean level, the time."""


class _Group(NamedTuple):
    """The holders of a copied expert on one node: its number, its node and its pairs."""

    number: int
    node: int
    pairs: range


class _Copied(NamedTuple):
    """A copied expert: its number among them, its pairs and its groups."""

    number: int
    pairs: range
    groups: Sequence[_Group]


class _Tables(NamedTuple):
    """What does not depend on rows."""

    expert_X: np.ndarray  # the copied experts
    ep_rank_N: np.ndarray  # the holder of each pair
    group_N: np.ndarray  # its group
    start_G: np.ndarray  # the first pair of each group
    node_G: np.ndarray  # its node
    number_G: np.ndarray  # the copied expert of each group, by its number
    copied: Sequence[_Copied]  # the same, to be looped over
    is_alone_EC: np.ndarray  # 1 where an EP rank holds an expert that no other EP rank holds
    is_on_VC: np.ndarray  # 1 where an EP rank is on a node
    by_node_C: np.ndarray  # EP ranks in the order of their nodes


@dataclass(frozen=True, eq=False)
class TwinLayer:
    """A layer, and what the C file does with one."""

    holds_EC: np.ndarray  # which EP ranks hold which experts, bool
    node_C: np.ndarray  # of each EP rank, 0 to V - 1, int64
    speed_C: np.ndarray  # of each EP rank, in parts of the fastest, int64
    price_C: np.ndarray  # of a row in each EP rank, int64
    local_price: int  # of a row on its EP rank's link
    cross_price: int  # of a row on its node's card
    # of a row on its EP rank's part of that card; 0 where an EP rank may use all of it
    card_price: int

    def prepare(self) -> None:
        _ = self.tables

    @cached_property
    def tables(self) -> _Tables:
        num_holders_E = self.holds_EC.sum(axis=1)
        by_node_C = np.argsort(self.node_C, kind="stable")
        expert_X = np.flatnonzero(num_holders_E > 1)
        number_N, place_N = np.nonzero(self.holds_EC[expert_X][:, by_node_C])
        ep_rank_N = by_node_C[place_N]
        node_N, num_nodes = self.node_C[ep_rank_N], int(self.node_C.max()) + 1
        is_first_N = np.diff(number_N * num_nodes + node_N, prepend=-1) != 0
        start_G = np.flatnonzero(is_first_N)
        node_G, number_G = node_N[start_G], number_N[start_G]
        groups_X: list[list[_Group]] = [[] for _ in expert_X]
        ends_G = (*start_G[1:].tolist(), len(ep_rank_N))
        each_G = zip(number_G.tolist(), node_G.tolist(), start_G.tolist(), ends_G)
        for number, (expert, node, start, end) in enumerate(each_G):
            groups_X[expert].append(_Group(number, node, range(start, end)))
        return _Tables(
            expert_X=expert_X,
            ep_rank_N=ep_rank_N,
            group_N=is_first_N.cumsum() - 1,
            start_G=start_G,
            node_G=node_G,
            number_G=number_G,
            copied=[
                _Copied(x, range(groups[0].pairs.start, groups[-1].pairs.stop), groups)
                for x, groups in enumerate(groups_X)
            ],
            is_alone_EC=(self.holds_EC & (num_holders_E == 1)[:, None]).astype(np.int64),
            is_on_VC=(self.node_C == np.arange(num_nodes)[:, None]).astype(np.int64),
            by_node_C=by_node_C,
        )

    def divide(
        self,
        rows_CE: np.ndarray,
        part_N: np.ndarray | None,
        plan_3: Sequence[int],
        step_3: Sequence[int],
        *,
        num_sweeps: int,
    ) -> Divided:
        rows = _Rows(self, rows_CE)
        leave, cross, toll = step_3
        at = leave if self.local_price else 0, cross if self.cross_price else 0, toll
        search = _Search(self, rows, rows.begun(part_N), at)
        planned_mean, planned_s, worth = plan_3
        as_planned_s = planned_s * rows.mean // planned_mean
        is_known = part_N is not None and search.best_s - as_planned_s <= worth
        if part_N is None:
            search.look_around()
        elif num_sweeps or not is_known:
            near_s = rows.begun(None)
            if near_s < search.best_s:
                search.keep(near_s, at)
            elif not is_known:
                rows.begun(part_N)
        if not is_known:
            search.run(-(-num_sweeps // search.how_many))
        rows_N = np.array(search.best_N, dtype=np.int64)
        found_N = (rows_N << PARTS_BITS) // np.maximum(rows.total_N, 1)
        return rows_N, found_N, (*search.best, rows.mean, search.best_s)

    def first_below(
        self,
        holds_KEC: np.ndarray,
        rows_CE: np.ndarray,
        below_s: int,
        plan_3: Sequence[int],
        step_3: Sequence[int],
        *,
        num_sweeps: int,
    ) -> tuple[int, Divided] | None:
        for number, holds_EC in enumerate(holds_KEC):
            layer = replace(self, holds_EC=holds_EC)
            nothing_N = np.zeros(len(layer.tables.ep_rank_N), dtype=np.int64)
            found = layer.divide(rows_CE, nothing_N, plan_3, step_3, num_sweeps=num_sweeps)
            if found[2][-1] < below_s:
                return number, found
        return None

    def busiest_ep_rank(self, rows_CE: np.ndarray, rows_N: np.ndarray) -> int:
        return int((self.compute(rows_CE, rows_N).sum(axis=0) * self.price_C).max())

    def repair(
        self,
        owner_E: np.ndarray,
        rows_CE: np.ndarray,
        rows_N: np.ndarray,
        now_s: int,
        step_3: Sequence[int],
        *,
        copy_price: int,
        num_slots: int,
        num_sweeps: int,
    ) -> tuple[np.ndarray, Divided] | None:
        computed_EC = self.compute(rows_CE, rows_N)
        quotas = _Quotas(self, computed_EC, owner_E, num_slots)
        rest_s, best_s = now_s - self.busiest_ep_rank(rows_CE, rows_N), now_s
        best, replicas_s = list[_Grant](), 0
        total = int(quotas.load_C.sum())
        below = max((total << PARTS_BITS) // int(self.speed_C.sum()), 1)
        above = max(quotas.level_C)
        for _ in range(HALVINGS):
            if below >= above:
                break
            level = below + ((above - below) >> 1)
            if not quotas.come_down(level):
                below = level + 1
                continue
            above = level
            loads_C = ((level * self.speed_C) >> PARTS_BITS) - np.maximum(quotas.room_C, 0)
            ep_rank_s, sent_s = (
                int((loads_C * self.price_C).max()),
                copy_price * quotas.on_busiest_link,
            )
            if ep_rank_s + rest_s + sent_s < best_s:
                best_s, replicas_s = ep_rank_s + rest_s + sent_s, sent_s
                best = quotas.grants
        if not best:
            return None
        found_EC = self.holds_EC.copy()
        for grant in best:
            found_EC[grant.expert, grant.to] = True
            computed_EC[grant.expert, grant.source] -= grant.rows
            computed_EC[grant.expert, grant.to] += grant.rows
        layer = replace(self, holds_EC=found_EC)
        tables = layer.tables
        quota_N = computed_EC[tables.expert_X[tables.number_G[tables.group_N]], tables.ep_rank_N]
        total_N = computed_EC.sum(axis=1)[tables.expert_X[tables.number_G[tables.group_N]]]
        part_N = (quota_N << PARTS_BITS) // np.maximum(total_N, 1)
        found = layer.divide(rows_CE, part_N, (1, 0, 0), step_3, num_sweeps=num_sweeps)
        return (found_EC, found) if found[2][-1] + replicas_s < now_s else None

    def compute(self, rows_CE: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
        """``compute`` of the C file, int64 ``[E, C]``."""
        tables = self.tables
        computed_EC = tables.is_alone_EC * rows_CE.sum(axis=0)[:, None]
        expert_N = tables.expert_X[tables.number_G][tables.group_N]
        computed_EC[expert_N, tables.ep_rank_N] = rows_N
        return computed_EC

    def send(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, ep_rank: int, rows_FE: np.ndarray
    ) -> np.ndarray:
        """``send`` of the C file, int64 ``[F, P]``."""
        expert_X, (num_chunks, _) = self.tables.expert_X, rows_FE.shape
        sent_FEC = np.repeat(rows_FE[:, :, None], len(self.node_C), axis=2)
        sent_XSC = self._sent_XSC(rows_CE, rows_N, expert_X, np.array([ep_rank]))
        turn_F1 = (np.arange(num_chunks) + ep_rank)[:, None] % num_chunks
        through_FXC = _ends(
            rows_FE[:, expert_X, None],
            sent_XSC[:, 0].cumsum(axis=1),
            rows_CE[ep_rank, expert_X, None],
            turn_F1[..., None],
            num_chunks,
        )
        sent_FEC[:, expert_X] = np.diff(through_FXC, axis=2, prepend=0)
        return sent_FEC[:, self.holds_EC]

    def receive(
        self,
        rows_CE: np.ndarray,
        rows_N: np.ndarray,
        ep_rank: int,
        expert_S: np.ndarray,
        rows_CFE: np.ndarray,
    ) -> np.ndarray:
        """``receive`` of the C file, int64 ``[C, F, S]``."""
        num_ep_ranks, num_chunks, _ = rows_CFE.shape
        received_CFS = rows_CFE[..., expert_S]
        is_copied_S = np.isin(expert_S, self.tables.expert_X)
        expert_X = expert_S[is_copied_S]
        all_ep_ranks = np.arange(num_ep_ranks)
        sent_XCC = self._sent_XSC(rows_CE, rows_N, expert_X, all_ep_ranks)
        end_C1X = sent_XCC.cumsum(axis=2)[..., ep_rank].T[:, None]
        start_C1X = end_C1X - sent_XCC[..., ep_rank].T[:, None]
        turn_CF1 = (all_ep_ranks[:, None] + np.arange(num_chunks))[..., None] % num_chunks
        rows_CFX, total_C1X = received_CFS[..., is_copied_S], rows_CE[:, None, expert_X]
        through, before = (
            _ends(rows_CFX, end, total_C1X, turn_CF1, num_chunks) for end in (end_C1X, start_C1X)
        )
        received_CFS[..., is_copied_S] = through - before
        return received_CFS

    def _sent_XSC(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, expert_X: np.ndarray, ep_rank_S: np.ndarray
    ) -> np.ndarray:
        """Rows of some copied experts that some senders send to each EP rank: ``send_rows`` of the
        C file. Where C walks along senders and holders, intervals are met here: rows of senders
        lie end to end, and so do those that holders take."""
        by_node_C, is_on_VC = self.tables.by_node_C, self.tables.is_on_VC
        place_C = by_node_C.argsort()  # of each EP rank, in the order of nodes
        rows_XC, held_XC = rows_CE.T[expert_X], self.compute(rows_CE, rows_N)[expert_X]
        kept_XC = np.minimum(rows_XC, held_XC)
        left_XC, lacking_XC = rows_XC - kept_XC, held_XC - kept_XC
        left_XV, lacking_XV = left_XC @ is_on_VC.T, lacking_XC @ is_on_VC.T
        near_XV = np.minimum(left_XV, lacking_XV)
        node_C = self.node_C[by_node_C]
        near_left_XC = _parts(left_XC[:, by_node_C], left_XV, near_XV, node_C)
        near_lacking_XC = _parts(lacking_XC[:, by_node_C], lacking_XV, near_XV, node_C)
        far_left_XC = left_XC - near_left_XC[:, place_C]
        far_lacking_XC = lacking_XC[:, by_node_C] - near_lacking_XC
        met_XSC = _met(near_left_XC, near_lacking_XC, place_C[ep_rank_S])
        met_XSC += _met(far_left_XC, far_lacking_XC, ep_rank_S)
        sent_XSC = met_XSC[..., place_C]
        sent_XSC[:, np.arange(len(ep_rank_S)), ep_rank_S] += kept_XC[:, ep_rank_S]
        return sent_XSC


def _parts(
    rows_XC: np.ndarray, sum_XV: np.ndarray, part_XV: np.ndarray, node_C: np.ndarray
) -> np.ndarray:
    """Like parts of the rows of each node's EP ranks: so many of all of them. By node."""
    before_XV = sum_XV.cumsum(axis=1) - sum_XV
    so_far_XC = rows_XC.cumsum(axis=1) - before_XV[:, node_C]
    part_XC, whole_XC = part_XV[:, node_C], np.maximum(sum_XV, 1)[:, node_C]
    before_XC = (so_far_XC - rows_XC) * part_XC // whole_XC
    return so_far_XC * part_XC // whole_XC - before_XC


def _met(first_XC: np.ndarray, second_XC: np.ndarray, place_S: np.ndarray) -> np.ndarray:
    """Overlaps of intervals that lie end to end with others that do: of some of the first ones with
    each of the second, ``[X, S, C]``."""
    end_XS1, end_X1C = first_XC.cumsum(axis=1)[:, place_S, None], second_XC.cumsum(axis=1)[:, None]
    start_XS1, start_X1C = end_XS1 - first_XC[:, place_S, None], end_X1C - second_XC[:, None]
    return np.maximum(np.minimum(end_XS1, end_X1C) - np.maximum(start_XS1, start_X1C), 0)


def _ends(
    rows: np.ndarray, end: np.ndarray, total: np.ndarray, turn: np.ndarray, num_chunks: int
) -> np.ndarray:
    """``ends`` of the C file, of arrays; turn: the sum of chunk and sender, of ``num_chunks``."""
    rounding = (2 * turn + 1) * total // (2 * num_chunks)
    return (rows * end + rounding) // np.maximum(total, 1)


class _Holder(NamedTuple):
    """A holder of the expert that is filled, all other experts as they are."""

    low: int  # of a level from which its own level follows
    high: int  # likewise, below
    even: int  # level at which it computes its own rows
    own: int  # these
    base: int  # rows of other experts
    speed: int  # of its EP rank


def _filled(holder: _Holder, level: int) -> int:
    low, high, even, own, base, speed = holder
    if level - low > even:
        level -= low
    elif level + high < even:
        level += high
    else:
        return own
    rows = (level * speed >> PARTS_BITS) - base
    return rows if rows > 0 else 0


def _filled_on_node(holders: Sequence[_Holder], level: int) -> int:
    return sum([_filled(holder, level) for holder in holders])


def _level_on_node(even: int, low: int, high: int, level: int) -> int:
    """The node's own level, where that of all leaves it."""
    if level - low > even:
        return level - low
    return level + high if level + high < even else even


class _Rows:
    """Rows of one pass, and where they go: ``Rows`` of the C file, and what changes them."""

    def __init__(self, layer: TwinLayer, rows_CE: np.ndarray) -> None:
        tables, node_C = layer.tables, layer.node_C
        sent_VE, rows_E = tables.is_on_VC @ rows_CE, rows_CE.sum(axis=0)
        is_alone_VE = tables.is_on_VC @ tables.is_alone_EC.T
        stays_C = (rows_CE * tables.is_alone_EC.T).sum(axis=1)
        stays_V = (sent_VE * is_alone_VE).sum(axis=1)
        alone_C = rows_E @ tables.is_alone_EC
        self.layer, self.rows_CE = layer, rows_CE
        self.mean = max((int(rows_E.sum()) << PARTS_BITS) // int(layer.speed_C.sum()), 1)
        self.alone_C = alone_C.tolist()
        self.alone_in_C = (alone_C - stays_C).tolist()
        self.alone_out_C = (rows_CE.sum(axis=1) - stays_C).tolist()
        self.alone_in_V = (is_alone_VE @ rows_E - stays_V).tolist()
        self.alone_out_V = (sent_VE.sum(axis=1) - stays_V).tolist()
        # All rows of an expert leave the nodes where nobody holds it.
        is_away_VE = tables.is_on_VC @ layer.holds_EC.T.astype(np.int64) == 0
        self.alone_far_out_C = (rows_CE * is_away_VE[node_C]).sum(axis=1)
        far_CE = (rows_E - sent_VE)[node_C]
        self.alone_far_in_C = (far_CE * tables.is_alone_EC.T).sum(axis=1)
        expert_G = tables.expert_X[tables.number_G]
        self.supply_G: list[int] = sent_VE[tables.node_G, expert_G].tolist()
        self.own_N: list[int] = rows_CE[tables.ep_rank_N, expert_G[tables.group_N]].tolist()
        self.total_X: list[int] = rows_E[tables.expert_X].tolist()
        self.total_N = rows_E[expert_G[tables.group_N]]
        self.ep_rank_N: list[int] = tables.ep_rank_N.tolist()
        self.price_C: list[int] = layer.price_C.tolist()
        self.speed_C: list[int] = layer.speed_C.tolist()
        self.slowness_C = [(1 << 2 * PARTS_BITS) // speed for speed in self.speed_C]

    def begun(self, part_N: np.ndarray | None) -> int:
        """How long the layer takes with such a division to begin with; None: the nearest
        replicas."""
        self.load_C, self.in_C, self.out_C = (
            [*self.alone_C],
            [*self.alone_in_C],
            [*self.alone_out_C],
        )
        self.in_V, self.out_V = [*self.alone_in_V], [*self.alone_out_V]
        self.held_N = [0] * len(self.ep_rank_N)
        parts_N = None if part_N is None else part_N.tolist()
        for copied in self.layer.tables.copied:
            if parts_N is None or not any(parts_N[n] for n in copied.pairs):
                self._nearest(copied)
            else:
                self._deal(copied, parts_N)
            self._carry(copied, 1)
        return self.time()

    def _nearest(self, copied: _Copied) -> None:
        left, num_holders = self.total_X[copied.number], len(copied.pairs)
        for number, _, pairs in copied.groups:
            left -= self.supply_G[number]
            others = self.supply_G[number] - sum(self.own_N[n] for n in pairs)
            each, over = divmod(others, len(pairs))
            for place, n in enumerate(pairs):
                self.held_N[n] = self.own_N[n] + each + (place < over)
        each, over = divmod(left, num_holders)
        for place, n in enumerate(copied.pairs):
            self.held_N[n] += each + (place < over)

    def _deal(self, copied: _Copied, parts_N: Sequence[int]) -> None:
        total = left = self.total_X[copied.number]
        for n in copied.pairs:
            self.held_N[n] = total * parts_N[n] >> PARTS_BITS
            left -= self.held_N[n]
        self.held_N[copied.pairs.start] += left

    def _carry(self, copied: _Copied, times: int) -> None:
        """What EP ranks compute and links carry of one copied expert: add it; with -1 subtract
        it."""
        for number, node, pairs in copied.groups:
            held_here, supply = 0, self.supply_G[number]
            for n in pairs:
                c, held = self.ep_rank_N[n], self.held_N[n]
                kept = min(self.own_N[n], held)
                self.load_C[c] += times * held
                self.in_C[c] += times * (held - kept)
                self.out_C[c] -= times * kept
                held_here += held
            self.in_V[node] += times * max(held_here - supply, 0)
            self.out_V[node] -= times * min(held_here, supply)

    def time(self) -> int:
        """How long the layer takes, by the prices: the busiest EP rank and the busiest link."""
        layer = self.layer
        link_s = max(
            max(*self.in_C, *self.out_C, 0) * layer.local_price,
            max(*self.in_V, *self.out_V, 0) * layer.cross_price,
        )
        if layer.card_price:
            link_s = max(link_s, self._busiest_card() * layer.card_price)
        return max(0, *map(mul, self.load_C, self.price_C)) + link_s

    def _busiest_card(self) -> int:
        tables = self.layer.tables
        held_N, own_N, supply_G = map(np.array, (self.held_N, self.own_N, self.supply_G))
        far_in_C, far_out_C = self.alone_far_in_C.copy(), self.alone_far_out_C.copy()
        if len(held_N):
            kept_N = np.minimum(own_N, held_N)
            pool_G = supply_G - np.add.reduceat(kept_N, tables.start_G)
            lacking_G = np.add.reduceat(held_N - kept_N, tables.start_G)
            left_G = np.maximum(pool_G - lacking_G, 0)  # of what its EP ranks do not keep
            into_G = np.maximum(lacking_G - pool_G, 0)
            group_N, node_C = tables.group_N, self.layer.node_C
            in_N = (held_N - kept_N) * into_G[group_N] // np.maximum(lacking_G, 1)[group_N]
            kept_left_N = kept_N * left_G[group_N] // np.maximum(pool_G, 1)[group_N]
            np.add.at(far_in_C, tables.ep_rank_N, in_N)
            np.add.at(far_out_C, tables.ep_rank_N, -kept_left_N)
            left_VX = np.zeros((len(tables.is_on_VC), len(tables.expert_X)), dtype=np.int64)
            pool_VX = np.ones_like(left_VX)
            left_VX[tables.node_G, tables.number_G] = left_G
            pool_VX[tables.node_G, tables.number_G] = np.maximum(pool_G, 1)
            rows_CX = self.rows_CE[:, tables.expert_X]
            far_out_C += (rows_CX * left_VX[node_C] // pool_VX[node_C]).sum(axis=1)
        return max(0, int(far_in_C.max()), int(far_out_C.max()))

    def fill(self, copied: _Copied, leave: int, cross: int, toll_2: Sequence[int]) -> None:
        """One copied expert's rows over its holders, all others as they are."""
        total = self.total_X[copied.number]
        if not total:
            return
        local_toll, cross_toll = toll_2
        # Tolls by what links carry, this expert's rows too: it must not find them empty.
        lows, highs = {}, {}
        for n in copied.pairs:
            c = self.ep_rank_N[n]
            lows[n] = self.in_C[c] * local_toll >> PARTS_BITS
            highs[n] = leave + (self.out_C[c] * local_toll >> PARTS_BITS)
        nodes = [node for _, node, _ in copied.groups]
        low_G = [self.in_V[v] * cross_toll >> PARTS_BITS for v in nodes]
        high_G = [cross + (self.out_V[v] * cross_toll >> PARTS_BITS) for v in nodes]
        self._carry(copied, -1)
        below, above = FURTHEST, 0
        holders_G: list[list[_Holder]] = []
        for group in copied.groups:
            holders_G.append([])
            for n in group.pairs:
                c, own, low, high = self.ep_rank_N[n], self.own_N[n], lows[n], highs[n]
                base = self.load_C[c]
                even = self._level_of(c, base + own)
                holders_G[-1].append(_Holder(low, high, even, own, base, self.speed_C[c]))
                below = min(below, self._level_of(c, base) - high - 1)
                above = max(above, self._level_of(c, base + total) + low + 1)
        # The level at which each node computes what it sends.
        even_G = [
            self._even_level(group, holders, below, above)
            for group, holders in zip(copied.groups, holders_G)
        ]
        lowest = min(even - high for even, high in zip(even_G, high_G))
        highest = max(*(even + low for even, low in zip(even_G, low_G)), -FURTHEST)
        sent = sum(self.supply_G[number] for number, _, _ in copied.groups)

        # And the one of all: nodes with a higher level send, those with a lower one receive.
        filled_G = [_filled_on_node(*each) for each in zip(holders_G, even_G)]
        nodes_G = list(zip(holders_G, even_G, low_G, high_G, filled_G))

        def is_enough(level: int) -> bool:
            rows = 0
            for holders, even, low, high, filled in nodes_G:
                own = _level_on_node(even, low, high, level)
                rows += filled if own == even else _filled_on_node(holders, own)
                if rows >= total:
                    return True
            return False

        below = min(lowest, FURTHEST)
        above = highest if sent == total else max(above, highest) + max(low_G)
        level = _first_level(below, above, is_enough)
        held = [
            _filled(holder, _level_on_node(even, low, high, level))
            for holders, even, low, high, _ in nodes_G
            for holder in holders
        ]
        over = sum(held) - total
        # Slownesses are rounded, so that the highest level may be rows short: they are the first's.
        if over < 0:
            held[0] -= over
        # A level is a whole row of each: the last holders give back what is too much.
        while over > 0:
            for place in reversed(range(len(held))):
                if over > 0 and held[place] > 0:
                    held[place] -= 1
                    over -= 1
        self.held_N[copied.pairs.start : copied.pairs.stop] = held
        self._carry(copied, 1)

    def _level_of(self, ep_rank: int, load: int) -> int:
        return load * self.slowness_C[ep_rank] >> PARTS_BITS

    def _even_level(self, group: _Group, holders: Sequence[_Holder], below: int, above: int) -> int:
        """The level at which a node computes as many rows as it sends, from a range of levels."""
        supply = self.supply_G[group.number]
        if len(holders) == 1:
            (holder,) = holders
            if supply == holder.own:
                return holder.even - holder.high
            ep_rank = self.ep_rank_N[group.pairs.start]
            below = self._level_of(ep_rank, holder.base + supply) + holder.low
            above = below + 1
        return _first_level(below, above, lambda level: _filled_on_node(holders, level) >= supply)


def _first_level(below: int, above: int, is_enough: Callable[[int], bool]) -> int:
    return below + bisect_left(range(below, above), True, key=is_enough)


class _Grant(NamedTuple):
    """A replica in another EP rank, for some of the rows that an EP rank computes of an expert."""

    expert: int
    source: int
    to: int
    rows: int


class _Quotas:
    """A search for a level that all EP ranks of a layer can come down to."""

    def __init__(
        self, layer: TwinLayer, computed_EC: np.ndarray, owner_E: np.ndarray, num_slots: int
    ) -> None:
        self._layer, self._owner_E, self._num_slots = layer, owner_E, num_slots
        self.load_C = computed_EC.sum(axis=0)
        slowness_C = (1 << 2 * PARTS_BITS) // layer.speed_C
        self.level_C = ((self.load_C * slowness_C) >> PARTS_BITS).tolist()
        self._order_C = np.argsort(-np.array(self.level_C), kind="stable").tolist()
        self._held = [
            [(int(e), int(rows_E[e])) for e in np.argsort(-rows_E, kind="stable") if rows_E[e]]
            for rows_E in computed_EC.T
        ]
        self.room_C = np.zeros_like(self.load_C)
        self.grants: list[_Grant] = []

    def come_down(self, level: int) -> bool:
        """``comes_down`` of the C file."""
        layer = self._layer
        self.room_C = ((level * layer.speed_C) >> PARTS_BITS) - self.load_C
        self.grants = []
        slots_C = np.full(len(self.load_C), self._num_slots)
        can_hold_EC = ~layer.holds_EC
        for source in self._order_C:
            over = -int(self.room_C[source])
            for expert, rows in self._held[source]:
                left = rows
                while over > 0 and left > 0:
                    is_open_C = can_hold_EC[expert] & (slots_C > 0)
                    to = int(np.where(is_open_C, self.room_C, 0).argmax())
                    if not is_open_C[to] or self.room_C[to] <= 0:
                        break
                    grant = _Grant(expert, source, to, min(over, left, int(self.room_C[to])))
                    self.grants.append(grant)
                    can_hold_EC[expert, to] = False
                    slots_C[to] -= 1
                    self.room_C[to] -= grant.rows
                    over, left = over - grant.rows, left - grant.rows
                if over <= 0:
                    break
            if over > 0:
                return False
        return True

    @property
    def on_busiest_link(self) -> int:
        """``replicas_on_busiest_link`` of the C file."""
        layer, is_on_CV = self._layer, self._layer.tables.is_on_VC.T
        added_EC = np.zeros_like(layer.holds_EC)
        for grant in self.grants:
            added_EC[grant.expert, grant.to] = True
        held_EV, comes_EV = layer.holds_EC @ is_on_CV > 0, added_EC @ is_on_CV > 0
        enters_EV = comes_EV & ~held_EV
        sent_C = np.bincount(self._owner_E[added_EC.any(axis=1)], minlength=len(self.load_C))
        out_C = np.bincount(self._owner_E[enters_EV.any(axis=1)], minlength=len(self.load_C))
        links = added_EC.sum(axis=0), enters_EV.sum(axis=0), sent_C, out_C @ is_on_CV
        return max(int(link.max()) for link in links)


class _Search:
    """For the steps under which the layer takes least time: ``Search`` of the C file."""

    def __init__(self, layer: TwinLayer, rows: _Rows, begun_s: int, at: Steps) -> None:
        self.layer, self.rows = layer, rows
        self.how_many = 1 + len(rows.ep_rank_N) // MANY
        self.keep(begun_s, at)

    def keep(self, found_s: int, at: Steps) -> None:
        self.best_s, self.best, self.best_N = found_s, at, [*self.rows.held_N]

    def try_at(self, at: Steps) -> bool:
        """One more sweep over all experts, at these steps; keeps what is best."""
        leave, cross, toll = at
        toll_2 = [self._toll(toll, p) for p in (self.layer.local_price, self.layer.cross_price)]
        for copied in self.layer.tables.copied:
            self.rows.fill(copied, self._level(leave), self._level(cross), toll_2)
        found_s = self.rows.time()
        if found_s >= self.best_s:
            return False
        self.keep(found_s, at)
        return True

    def _level(self, step: int) -> int:
        if step == LAST_STEP:
            return FURTHEST >> 2
        return (self.rows.mean << step) >> 9 if step else 0

    def _toll(self, step: int, price: int) -> int:
        cheapest = max(min(self.rows.price_C), 1)
        return min((price << (PARTS_BITS + step)) // (8 * cheapest), DEAREST) if step else 0

    def run(self, num_sweeps: int) -> None:
        """Sweeps at the best steps and at those beside them, in turn."""
        layer = self.layer
        is_priced = layer.local_price, layer.cross_price, layer.local_price or layer.cross_price
        ways = [way for way in WAYS if all(priced or not to for priced, to in zip(is_priced, way))]
        while num_sweeps > 0:
            for way in ways:
                while num_sweeps > 0:
                    leave, cross, toll = (best + to for best, to in zip(self.best, way))
                    if min(leave, cross, toll) < 0 or max(leave, cross) > LAST_STEP:
                        break
                    if toll > LAST_TOLL:
                        break
                    num_sweeps -= 1
                    if not self.try_at((leave, cross, toll)):
                        break

    def look_around(self) -> None:
        """Sweeps at steps all over; fewer where there are many pairs."""
        stride = 1 + self.how_many
        last_leave = LAST_STEP if self.layer.local_price else 0
        last_cross = LAST_STEP if self.layer.cross_price else 0
        last_toll = LAST_TOLL if last_leave + last_cross else 0
        for toll in range(0, last_toll + 1, 2):
            for leave in range(0, last_leave + 1, 2 * stride):
                for cross in range(0, last_cross + 1, stride + (toll > 0)):
                    self.try_at((leave, cross, toll))
