# SPDX-License-Identifier: Apache-2.0
"""How the rows of an expert are divided over its replicas: the rules of the papers, and the
division by price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np

from ds_moe_ext.core.placement import Holders, Placement
from ds_moe_ext.core.row_levels import Division, RowLevels
from ds_moe_ext.older_names import accepts_older

SWEEPS = 6
"""Over the copied experts of a layer, once its rows are known."""
PLANNED_SWEEPS = 16  # more, when there is time


@dataclass(frozen=True, eq=False)
class LevelShare:
    """A ``Rule``: the parts that were planned, or a division anew where rows are not as
    predicted."""

    levels: RowLevels  # what divides
    plan: Division  # of the rows that were predicted
    sweeps: int  # of a division anew; with 0 the plan's parts hold

    @classmethod
    def planned(cls, levels: RowLevels, rows_CE: np.ndarray, *, sweeps: int) -> LevelShare:
        """For the rows that are predicted, int64 ``[C, E]``."""
        return cls(levels, levels.divided(rows_CE, None, sweeps=PLANNED_SWEEPS), sweeps)

    def alone(self, owner: Placement, rows_CE: np.ndarray) -> LevelShare:
        """Of the same rows where nothing is copied."""
        return LevelShare.planned(replace(self.levels, target=owner), rows_CE, sweeps=self.sweeps)

    @property
    def planned_s(self) -> float:
        """Seconds of the layer by the plan, as ``planning/prices.py`` counts them."""
        return self.plan.price * self.levels.prices.unit_s

    def prepare(self, ep_rank: int) -> None:
        self.levels.target.prepare(ep_rank)
        self.levels.prepare()

    def of_rows(self, rows_CE: np.ndarray) -> DividedRows:
        rows_CE = np.ascontiguousarray(rows_CE, dtype=np.int64)
        rows_N = self.levels.divided(rows_CE, self.plan, sweeps=self.sweeps).rows_N
        return DividedRows(self.levels, rows_CE, rows_N)

    def describe(self) -> str:
        plan, levels = self.plan, self.levels
        steps = plan.leave, plan.cross, plan.toll, self.sweeps
        known = f"{plan.part_N.tolist()} {steps} {plan.mean} {plan.price}"
        return f"levels {known}\n{levels.prices}\n{levels.node_C}\n{levels.target.describe()}"


@dataclass(frozen=True, eq=False)
class DividedRows:
    """The ``Share`` of one pass."""

    levels: RowLevels  # what has divided
    rows_CE: np.ndarray  # of all chunks and of each EP rank, int64
    rows_N: np.ndarray  # that each holder computes, int64

    @property
    def target(self) -> Placement:
        return self.levels.target

    def prepare(self, ep_rank: int) -> None:
        self.target.prepare(ep_rank)

    def of_rows(self, rows_CE: np.ndarray) -> DividedRows:
        return self

    def sent_by_pair(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        return self.levels.sent(self.rows_CE, self.rows_N, sender, rows_FE)

    def received_by_slot(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        return self.levels.received(self.rows_CE, self.rows_N, holder, rows_CFE)

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, self.target.flat_N] = self.sent_by_pair(sender, rows_FE)
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        rows = np.zeros_like(rows_CFE)
        rows[..., self.target.experts_of(holder)] = self.received_by_slot(holder, rows_CFE)
        return rows

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        num_ep_ranks, num_chunks, _ = rows_CFE.shape
        key_FP = np.arange(num_chunks)[:, None] * num_ep_ranks + self.target.holder_N
        between_FCC = np.empty((num_chunks, num_ep_ranks, num_ep_ranks), dtype=np.int64)
        for sender, rows_FE in enumerate(rows_CFE):
            sums = _sums(key_FP, self.sent_by_pair(sender, rows_FE), num_chunks * num_ep_ranks)
            between_FCC[:, sender] = sums.reshape(num_chunks, num_ep_ranks)
        return between_FCC

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        computed_C: np.ndarray = self.levels.computed_EC(self.rows_CE, self.rows_N).sum(axis=0)
        return computed_C

    def describe(self) -> str:
        return f"rows {self.rows_N.tolist()}\n{self.target.describe()}"


# How the replicas of an expert divide its rows: the whole difference between many papers. Pure.


class Rule(Protocol):
    """What says who computes which rows, once the rows of a pass are known."""

    def prepare(self, ep_rank: int) -> None:
        """Work out beforehand what does not depend on rows, for an EP rank that sends and
        receives."""
        ...

    def of_rows(self, rows_CE: np.ndarray) -> Share:
        """The share of a pass, by the rows of every sender and all chunks, int64 ``[C, E]``; a rule
        that looks at each sender's rows alone is its own. Pure, and the same on every rank."""
        ...

    def describe(self) -> str:
        """The rule and what it rests on, as text: equal texts are equal rules."""
        ...


class Share(Rule, Protocol):
    """Who computes which rows. The first rows of an expert go to its lowest holder, and so on."""

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        """Rows that one sender sends to each holder of each expert, int64 ``[F, E, C]``.

        Args:
            sender: EP rank that sends.
            rows_FE: its rows of each chunk for each expert, int64.
        """
        ...

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        """Rows that each sender sends to one holder, int64 ``[C, F, E]``; see ``rows_from``."""
        ...

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        """Rows of each chunk from each sender to each holder, int64 ``[F, C, C]``."""
        ...

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        """Rows that each EP rank computes, int64 ``[C]``, of what each sender routes, ``[C,
        E]``."""
        ...


@accepts_older
@dataclass(frozen=True, eq=False)
class LocalElseOwner:
    """A sender with a replica keeps its rows; the others send to the expert's owner (Pro-Prophet).

    Where the target is the owner, this is plain expert parallelism.
    """

    owner: Placement
    target: Placement
    _pairs: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _keeps: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _holder_CE(self) -> np.ndarray:
        ep_ranks_C1 = np.arange(self.target.num_ep_ranks)[:, None]
        return np.where(self.target.holds_EC.T, ep_ranks_C1, self.owner.owner_E)

    @cached_property
    def _first_E(self) -> np.ndarray:
        """Where each expert's holders begin in a flattened ``[E, C]``."""
        return np.arange(self.target.num_experts) * self.target.num_ep_ranks

    def prepare(self, ep_rank: int) -> None:
        self.target.prepare(ep_rank)
        if not self.target.is_single:
            _ = self.pair_E(ep_rank), self._kept_C1S(ep_rank)

    def of_rows(self, rows_CE: np.ndarray) -> LocalElseOwner:
        return self

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, self._first_E + self._holder_CE[sender]] = rows_FE
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        rows: np.ndarray = rows_CFE * (self._holder_CE == holder)[:, None]
        return rows

    def sent_by_pair(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        rows_FN = np.zeros((len(rows_FE), self.target.flat_N.size), dtype=np.int64)
        rows_FN[:, self.pair_E(sender)] = rows_FE
        return rows_FN

    def pair_E(self, sender: int) -> np.ndarray:
        if sender not in self._pairs:
            holder_E = np.where(self.target.holds_EC[:, sender], sender, self.owner.owner_E)
            self._pairs[sender] = np.searchsorted(self.target.flat_N, self._first_E + holder_E)
        return self._pairs[sender]

    def received_by_slot(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        rows: np.ndarray = rows_CFE[..., self.target.experts_of(holder)] * self._kept_C1S(holder)
        return rows

    def _kept_C1S(self, holder: int) -> np.ndarray:
        """Whose rows of each of its experts a holder gets."""
        if holder not in self._keeps:
            expert_S = self.target.experts_of(holder)
            lacks_CS = ~self.target.holds_EC[expert_S].T
            kept_CS = lacks_CS & (self.owner.owner_E[expert_S] == holder)
            kept_CS[holder] = True
            self._keeps[holder] = kept_CS[:, None]
        return self._keeps[holder]

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        return _by_holder(rows_CFE, self._holder_CE)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        owner_E, copied = self.owner.owner_E, np.flatnonzero(self.target.num_holders_E > 1)
        kept_CX = rows_CE[:, copied] * self.target.holds_EC[copied].T
        left_E = rows_CE.sum(axis=0)
        left_E[copied] -= kept_CX.sum(axis=0)
        computed_C: np.ndarray = kept_CX.sum(axis=1) + _sums(
            owner_E, left_E, self.target.num_ep_ranks
        )
        return computed_C

    def describe(self) -> str:
        return f"local else owner\n{self.owner.describe()}\n{self.target.describe()}"


def _by_holder(rows_CFN: np.ndarray, holder: np.ndarray) -> np.ndarray:
    """Sums of rows by chunk, sender and holder, int64 ``[F, C, C]``."""
    num_ep_ranks, num_chunks, _ = rows_CFN.shape
    sender_C11 = np.arange(num_ep_ranks)[:, None, None]
    chunk_F1 = np.arange(num_chunks)[:, None]
    holder_C1N = np.broadcast_to(holder, (num_ep_ranks, rows_CFN.shape[2]))[:, None]
    key_CFN = (chunk_F1 * num_ep_ranks + sender_C11) * num_ep_ranks + holder_C1N
    shape = (num_chunks, num_ep_ranks, num_ep_ranks)
    return _sums(key_CFN, rows_CFN, int(np.prod(shape))).reshape(shape)


def _sums(key: np.ndarray, rows: np.ndarray, num_keys: int) -> np.ndarray:
    """Sums of rows by key, int64; in between in float64: whole numbers, and exact."""
    return np.bincount(key.ravel(), rows.ravel(), num_keys).astype(np.int64)


NEVER = np.iinfo(np.int64).max
"""Divides any rows to none."""


class _RoundRobin(NamedTuple):
    """An even split in whole rows: all get the quotient, those whose turn is early one row more."""

    among: np.ndarray  # replicas that the rows are split over; ``NEVER`` for who gets none of them
    # with so many rows more all would get what this one gets: ``among - 1``, less its place in the
    # order in which the remainder is dealt; 0 for who gets none
    more: np.ndarray

    @classmethod
    def of(cls, among: np.ndarray, turn: np.ndarray) -> _RoundRobin:
        """Args: turn: place in that order, from 0."""
        return cls(among, among - 1 - turn)

    def quotas(self, rows: np.ndarray) -> np.ndarray:
        quotas: np.ndarray = (rows + self.more) // self.among
        return quotas


class _Leaving(NamedTuple):
    """Where one sender's rows of one layer go, M (expert, holder) pairs."""

    expert_M: np.ndarray  # expert of each pair
    flat_M: np.ndarray  # its place in a flattened ``[E, C]``
    pair_M: np.ndarray  # its place among the target's pairs
    round_robin_M: _RoundRobin  # the holder's part of the expert's rows


class _Coming(NamedTuple):
    """What one holder gets of the rows of its ``S`` experts in one layer."""

    expert_S: np.ndarray  # they, by slot
    round_robin_C1S: _RoundRobin  # its part of each sender's


@dataclass(frozen=True, eq=False)
class _NearestReplicas:
    """``NearestReplica`` of several layers that were planned together, worked out together.

    A *group* is some holders of one expert that divide rows: all of them, or those on one node. A
    *slot* is a place in a group. Shape letters: L layers, X copied experts, A others, N (copied
    expert, holder) pairs, V nodes, J groups, I (sender, copied expert) pairs, M of these by
    receiver.
    """

    targets: tuple[Placement, ...]  # of the layers
    node_C: np.ndarray  # node of each EP rank
    _leaving: dict[int, list[_Leaving]] = field(default_factory=dict, init=False)
    _coming: dict[int, list[_Coming]] = field(default_factory=dict, init=False)

    def is_of(self, shares: Sequence[Rule]) -> bool:
        """Whether these are the shares of the layers, in their order."""
        pairs = enumerate(shares)
        return len(shares) == len(self.targets) and all(
            isinstance(s, NearestReplica) and s._together is self and s._layer == n
            for n, s in pairs
        )

    @cached_property
    def holders(self) -> Holders:
        return Holders.of(self.targets)

    @cached_property
    def _place_C(self) -> np.ndarray:
        """Each EP rank's node by its number among the nodes, 0 to V - 1."""
        return np.unique(self.node_C, return_inverse=True)[1]

    @cached_property
    def _near_XV(self) -> np.ndarray:
        """Replicas of each expert on each node, int64."""
        shape = len(self.holders.layer_X), int(self._place_C.max()) + 1
        return np.bincount(self._near_N, minlength=int(np.prod(shape))).reshape(shape)

    @cached_property
    def _near_N(self) -> np.ndarray:
        """Place of each pair's node in a flattened ``[X, V]``."""
        num_nodes = int(self._place_C.max()) + 1
        return self.holders.copied_N * num_nodes + self._place_C[self.holders.ep_rank_N]

    @cached_property
    def _group_XV(self) -> np.ndarray:
        """The group that senders on a node divide rows over: on the node, or everywhere."""
        group_XV = np.repeat(np.arange(len(self._near_XV))[:, None], self._near_XV.shape[1], axis=1)
        is_near_XV = self._near_XV > 0
        group_XV[is_near_XV] = len(group_XV) + np.arange(np.count_nonzero(is_near_XV))
        return group_XV

    @cached_property
    def _size_J(self) -> np.ndarray:
        """Holders of each group."""
        return np.concatenate([self.holders.num_holders_X, self._near_XV[self._near_XV > 0]])

    @cached_property
    def _first_J(self) -> np.ndarray:
        """The first slot of each group; slots of a group are in the order of EP ranks."""
        return np.cumsum(self._size_J) - self._size_J

    @cached_property
    def _near_first_N(self) -> np.ndarray:
        """Pairs by expert, node and then holder."""
        return np.argsort(self._near_N, kind="stable")

    @cached_property
    def _ep_rank_of_slot(self) -> np.ndarray:
        ep_rank_N = self.holders.ep_rank_N
        return np.concatenate([ep_rank_N, ep_rank_N[self._near_first_N]])

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each layer where its pairs begin in a row of all, and its places in a row of all
        flattened ``[E, C]``; and the places of these pairs in that row, ascending."""
        num_pairs = [target.flat_N.size for target in self.targets]
        sizes = [target.holds_EC.size for target in self.targets]
        first_L1, place_L1 = (np.concatenate(([0], np.cumsum(own))) for own in (num_pairs, sizes))
        flat_N = np.concatenate([target.flat_N for target in self.targets])
        return first_L1, place_L1, flat_N + np.repeat(place_L1[:-1], num_pairs)

    def leaving(self, sender: int) -> list[_Leaving]:
        if sender not in self._leaving:
            holders, num_ep_ranks = self.holders, self.holders.num_ep_ranks
            x_X = np.arange(len(holders.layer_X))
            x_M, ep_rank_M, round_robin_M = self.receivers(np.full_like(x_X, sender), x_X)
            layer = np.concatenate([holders.layer_A, holders.layer_X[x_M]])
            order = np.argsort(layer, kind="stable")
            layer = layer[order]
            expert = np.concatenate([holders.expert_A, holders.expert_X[x_M]])[order]
            flat = expert * num_ep_ranks + np.concatenate([holders.ep_rank_A, ep_rank_M])[order]
            first_L1, place_L1, flat_N = self._flat
            pair = np.searchsorted(flat_N, flat + place_L1[layer]) - first_L1[layer]
            among, more = (
                np.concatenate([np.full_like(holders.layer_A, alone), table])[order]
                for alone, table in zip((1, 0), round_robin_M)
            )
            parts = holders.by_layer(layer, expert, flat, pair, among, more)
            self._leaving[sender] = [
                _Leaving(e, f, p, _RoundRobin(a, m)) for e, f, p, a, m in parts
            ]
        return self._leaving[sender]

    def receivers(
        self, sender_I: np.ndarray, x_I: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, _RoundRobin]:
        """Who gets some of which rows: the pair, the holder and its part, each ``[M]``."""
        keeps_I = self.holders.holds_XC[x_I, sender_I]
        group_I = self._group_XV[x_I, self._place_C[sender_I]]
        length_I = np.where(keeps_I, 1, self._size_J[group_I])
        pair_M = np.repeat(np.arange(len(x_I)), length_I)
        place_M = np.arange(len(pair_M)) - np.repeat(np.cumsum(length_I) - length_I, length_I)
        sender_M = sender_I[pair_M]
        ep_rank_M = self._ep_rank_of_slot[self._first_J[group_I][pair_M] + place_M]
        ep_rank_M = np.where(keeps_I[pair_M], sender_M, ep_rank_M)
        among_M = length_I[pair_M]
        return pair_M, ep_rank_M, _RoundRobin.of(among_M, (place_M - sender_M) % among_M)

    def coming(self, holder: int) -> list[_Coming]:
        if holder not in self._coming:
            holders = self.holders
            alone = np.flatnonzero(holders.ep_rank_A == holder)
            copied = np.flatnonzero(holders.ep_rank_N == holder)
            layer = np.concatenate(
                [holders.layer_A[alone], holders.layer_X[holders.copied_N[copied]]]
            )
            expert = np.concatenate(
                [holders.expert_A[alone], holders.expert_X[holders.copied_N[copied]]]
            )
            in_slots = [target.experts_of(holder) for target in self.targets]
            of_slots = np.repeat(np.arange(len(in_slots)), list(map(len, in_slots)))
            order = np.empty(len(layer), dtype=np.int64)  # of slots
            order[np.lexsort((np.concatenate(in_slots), of_slots))] = np.lexsort((expert, layer))
            shape_CA = holders.num_ep_ranks, len(alone)
            among, more = (
                np.concatenate([np.full(shape_CA, value), table], axis=1)[:, None, order]
                for value, table in zip((1, 0), self._coming_of_replicas(holder, copied))
            )
            parts = holders.by_layer(layer[order], expert[order], among, more)
            self._coming[holder] = [_Coming(e, _RoundRobin(a, m)) for e, a, m in parts]
        return self._coming[holder]

    def _coming_of_replicas(self, holder: int, pair_S: np.ndarray) -> _RoundRobin:
        """One holder's parts, ``[C, S]``; ``pair_S`` are its places among ``N``."""
        x_S, node = self.holders.copied_N[pair_S], self._place_C[holder]
        sender_C1 = np.arange(self.holders.num_ep_ranks)[:, None]
        near_S = self._group_XV[x_S, node]
        slot_N = np.empty_like(self._near_first_N)
        slot_N[self._near_first_N] = np.arange(len(slot_N))
        place_near_S = slot_N[pair_S] + len(slot_N) - self._first_J[near_S]
        is_near_C1 = (self._place_C == node)[:, None]
        is_far_CS = x_S == self._group_XV[x_S][:, self._place_C].T
        keeps_CS = self.holders.holds_XC[x_S].T
        gets_CS = np.where(keeps_CS, sender_C1 == holder, is_near_C1 | is_far_CS)
        among_CS = np.where(is_near_C1, self._size_J[near_S], self._size_J[x_S])
        among_CS = np.where(keeps_CS, 1, among_CS)
        place_CS = np.where(is_near_C1, place_near_S, pair_S - self._first_J[x_S])
        round_robin = _RoundRobin.of(among_CS, (place_CS - sender_C1) % among_CS)
        return _RoundRobin(
            *(np.where(gets_CS, own, none) for own, none in zip(round_robin, (NEVER, 0)))
        )

    def computed_LC(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Rows that each EP rank computes, int64, of the ``[C, E]`` of each layer.

        Remainders are counted by where each begins and ends in its group, so that nothing is listed
        by receiver.
        """
        holders, shape_LC = self.holders, (self.holders.num_layers, self.holders.num_ep_ranks)
        rows_CX, total_A = _columns(rows, holders)
        computed = _sums(
            holders.layer_A * shape_LC[1] + holders.ep_rank_A, total_A, int(np.prod(shape_LC))
        )
        first_X = holders.layer_X * shape_LC[1]
        sender_C1 = np.arange(shape_LC[1])[:, None]
        kept_CX = np.where(holders.holds_XC.T, rows_CX, 0)
        computed += _sums(first_X + sender_C1, kept_CX, len(computed))

        group_CX = self._group_XV.T[self._place_C]
        whole_CX, rest_CX = np.divmod(rows_CX - kept_CX, self._size_J[group_CX])
        whole_J = _sums(group_CX, whole_CX, len(self._size_J))
        in_I = np.flatnonzero(rest_CX)
        group_I, rest_I = group_CX.ravel()[in_I], rest_CX.ravel()[in_I]
        first_I, size_I = self._first_J[group_I], self._size_J[group_I]
        start_I = in_I // len(first_X) % size_I
        over_I = start_I + rest_I - size_I  # past the last slot: dealt from the first one on
        wraps = over_I > 0
        begun = np.concatenate([first_I + start_I, first_I[wraps]])
        ended = np.concatenate([first_I + np.minimum(start_I + rest_I, size_I), over_I[wraps]])
        ended[len(first_I) :] += first_I[wraps]
        num_slots = len(self._ep_rank_of_slot) + 1
        dealt = np.bincount(begun, minlength=num_slots) - np.bincount(ended, minlength=num_slots)
        slot_rows = np.repeat(whole_J, self._size_J) + dealt.cumsum()[:-1]
        layer_N = first_X[holders.copied_N]
        first = np.concatenate([layer_N, layer_N[self._near_first_N]])
        computed += _sums(first + self._ep_rank_of_slot, slot_rows, len(computed))
        return computed.reshape(shape_LC)


def _columns(rows: Sequence[np.ndarray], holders: Holders) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each sender for the copied experts, ``[C, X]``; of all for the others, ``[A]``."""
    columns, totals = [], []
    alone = holders.by_layer(holders.layer_A, holders.expert_A)
    copied = holders.by_layer(holders.layer_X, holders.expert_X)
    for rows_CE, (alone_E,), (copied_E,) in zip(rows, alone, copied):
        totals.append(rows_CE.sum(axis=0).take(alone_E))
        columns.append(rows_CE.take(copied_E, axis=1))
    return np.concatenate(columns, axis=1), np.concatenate(totals)


@accepts_older
@dataclass(frozen=True, eq=False)
class NearestReplica:
    """Rows go to the nearest replicas, in even parts (HECATE section 4.5; spec rules 29 and 30).

    A sender with a replica keeps its rows; else the replicas on its node get them; else all
    replicas. Of replicas ``h_0 .. h_(k-1)`` in ascending order, sender ``s`` gives the rows that do
    not divide to ``h_(s mod k)`` and those after it, cyclically.

    Attributes:
        target: where experts compute.
        node_C: node of each EP rank, int64.
    """

    target: Placement
    node_C: np.ndarray
    _together: _NearestReplicas | None = field(default=None, init=False, repr=False)
    _layer: int = field(default=0, init=False, repr=False)
    _packed: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.node_C.shape != (self.target.num_ep_ranks,):
            raise ValueError(
                f"node_C has shape {self.node_C.shape}, but the placement has "
                f"{self.target.num_ep_ranks} EP ranks; name one node an EP rank"
            )
        self.node_C.setflags(write=False)

    @classmethod
    def of_layers(cls, targets: Sequence[Placement], node_C: np.ndarray) -> list[NearestReplica]:
        """One a layer; what they prepare is worked out for all of them at once."""
        together = _NearestReplicas(tuple(targets), node_C)
        shares = [cls(target, node_C) for target in targets]
        for layer, share in enumerate(shares):
            vars(share).update(_together=together, _layer=layer)
        return shares

    @cached_property
    def _alone(self) -> _NearestReplicas:
        return _NearestReplicas((self.target,), self.node_C)

    @property
    def _tables(self) -> _NearestReplicas:
        return self._together or self._alone

    def prepare(self, ep_rank: int) -> None:
        self.target.prepare(ep_rank)
        if self.pair_E(ep_rank) is None:
            self.packed(ep_rank)
        else:
            self._tables.coming(ep_rank)

    def packed(self, ep_rank: int) -> np.ndarray:
        """What an EP rank sends and gets, in one table as ``row_splits.c`` reads it, int64: how
        many EP ranks, parts, pairs and slots there are; of each part its expert, pair and turns;
        pairs by holder, and how many the EP ranks before each hold; experts by slot, and their
        turns."""
        if ep_rank not in self._packed:
            target = self.target
            expert_M, _, pair_M, round_robin_M = self._tables.leaving(ep_rank)[self._layer]
            expert_S, round_robin_C1S = self._tables.coming(ep_rank)[self._layer]
            order_N = target.by_holder_N
            tables = (
                (target.num_ep_ranks, len(expert_M), target.flat_N.size, len(expert_S)),
                *(expert_M, pair_M, *round_robin_M),
                *(np.arange(target.flat_N.size) if order_N is None else order_N, target.held_C1),
                *(expert_S, *(table.ravel() for table in round_robin_C1S)),
            )
            self._packed[ep_rank] = np.concatenate(tables)
        return self._packed[ep_rank]

    def of_rows(self, rows_CE: np.ndarray) -> NearestReplica:
        return self

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        expert_M, flat_M, _, round_robin_M = self._tables.leaving(sender)[self._layer]
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, flat_M] = round_robin_M.quotas(rows_FE[:, expert_M])
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        expert_S, round_robin_C1S = self._tables.coming(holder)[self._layer]
        rows = np.zeros_like(rows_CFE)
        rows[:, :, expert_S] = round_robin_C1S.quotas(rows_CFE[:, :, expert_S])
        return rows

    def sent_by_pair(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        expert_M, _, pair_M, round_robin_M = self._tables.leaving(sender)[self._layer]
        rows_FN = np.zeros((len(rows_FE), self.target.flat_N.size), dtype=np.int64)
        rows_FN[:, pair_M] = round_robin_M.quotas(rows_FE.take(expert_M, axis=1))
        return rows_FN

    def pair_E(self, sender: int) -> np.ndarray | None:
        expert_M, _, pair_M, _ = self._tables.leaving(sender)[self._layer]
        if len(expert_M) != self.target.num_experts:
            return None
        pair_E = np.empty_like(pair_M)
        pair_E[expert_M] = pair_M
        return pair_E

    def received_by_slot(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        expert_S, round_robin_C1S = self._tables.coming(holder)[self._layer]
        return round_robin_C1S.quotas(rows_CFE.take(expert_S, axis=-1))

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        sender_M, expert_M, holder_M, round_robin_M = self._all_receivers
        quotas_MF = _RoundRobin(*(table[:, None] for table in round_robin_M)).quotas(
            rows_CFE[sender_M, :, expert_M]
        )
        num_ep_ranks, num_chunks, _ = rows_CFE.shape
        key_MF = (np.arange(num_chunks) * num_ep_ranks + sender_M[:, None]) * num_ep_ranks
        shape = (num_chunks, num_ep_ranks, num_ep_ranks)
        return _sums(key_MF + holder_M[:, None], quotas_MF, int(np.prod(shape))).reshape(shape)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        computed_C: np.ndarray = self._alone.computed_LC((rows_CE,))[0]
        return computed_C

    def describe(self) -> str:
        return f"nearest replica\nnodes {self.node_C.tolist()}\n{self.target.describe()}"

    @cached_property
    def _all_receivers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, _RoundRobin]:
        """Sender, expert, holder and part of all that travels, ``[M]`` each."""
        holders, sender_C = self._alone.holders, np.arange(self.target.num_ep_ranks)
        num_copied, num_alone = len(holders.expert_X), len(holders.expert_A)
        sender_I = np.repeat(sender_C, num_copied)
        x_I = np.tile(np.arange(num_copied), len(sender_C))
        pair_M, ep_rank_M, round_robin_M = self._alone.receivers(sender_I, x_I)
        expert_M = holders.expert_X[x_I[pair_M]]
        none = np.zeros(len(sender_C) * num_alone, dtype=np.int64)
        return (
            np.concatenate([np.repeat(sender_C, num_alone), sender_I[pair_M]]),
            np.concatenate([np.tile(holders.expert_A, len(sender_C)), expert_M]),
            np.concatenate([np.tile(holders.ep_rank_A, len(sender_C)), ep_rank_M]),
            _RoundRobin(*(np.concatenate([none + n, t]) for n, t in zip((1, 0), round_robin_M))),
        )


@dataclass(frozen=True, eq=False)
class PlannedParts:
    """Fixed parts of every sender's rows for each replica, so that a sender divides its rows
    without knowing those of others, as a host's own dispatcher does. A ``Share``.

    Of ``r`` rows of an expert the holders up to the ``h``-th compute ``floor(u[h] * r + 1/2)``.
    Shape letters: C senders or holders, X experts with several holders, H holders of one.
    """

    target: Placement
    copied_X: np.ndarray  # experts with several holders, int64
    holder_XH: np.ndarray  # their holders, ascending; the last is repeated, int64
    until_CXH: np.ndarray  # ``u`` of each sender: ascending, 1 from its last holder on, float64

    @classmethod
    def of(cls, target: Placement, rule: Rule, predicted_CE: np.ndarray | None) -> PlannedParts:
        """Parts of a rule, by the rows that it was planned for, or by any where it needs none."""
        num_E = target.num_holders_E
        copied_X = np.flatnonzero(num_E > 1)
        # Pairs of an expert follow each other; the last one of those that have fewer is repeated.
        place_H, last_X1 = np.arange(num_E.max()), num_E[copied_X, None] - 1
        pair_XH = (num_E.cumsum() - num_E)[copied_X, None] + np.minimum(place_H, last_X1)
        holder_XH = target.holder_N[pair_XH]
        if isinstance(rule, LocalElseOwner | NearestReplica) or predicted_CE is None:
            predicted_CE = np.full(target.holds_EC.T.shape, EVENLY)
        predicted_CE = np.maximum(predicted_CE, 1)
        share = rule.of_rows(predicted_CE)
        sent_CN = np.concatenate(
            [
                sent_by_pair(share, target, sender, rows_E[None])
                for sender, rows_E in enumerate(predicted_CE)
            ]
        )
        sent_CXH = sent_CN[:, pair_XH] * (place_H <= last_X1)
        until_CXH = sent_CXH.cumsum(axis=2) / predicted_CE[:, copied_X, None]
        return cls(target, copied_X, holder_XH, until_CXH)

    def prepare(self, ep_rank: int) -> None:
        self.target.prepare(ep_rank)

    def of_rows(self, rows_CE: np.ndarray) -> PlannedParts:
        return self

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        return self._divided(rows_FE[None], slice(sender, sender + 1))[0]

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        return self._divided(rows_CFE)[..., holder]

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        return self._divided(rows_CFE).sum(axis=2).swapaxes(0, 1)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        target, alone_E = self.target, self.target.num_holders_E == 1
        alone_A, total_E = np.flatnonzero(alone_E), rows_CE.sum(axis=0)
        holder_A = target.holder_N[alone_E[target.expert_N]]
        computed_C = _sums(holder_A, total_E[alone_A], target.num_ep_ranks)
        parts_XH = self._parts(rows_CE[:, None], slice(None)).sum(axis=(0, 1))
        return computed_C + _sums(self.holder_XH, parts_XH, target.num_ep_ranks)

    def _parts(self, rows_CFE: np.ndarray, senders: slice) -> np.ndarray:
        """Of experts with several holders, int64 ``[C, F, X, H]``."""
        rows_CFX1 = rows_CFE[..., self.copied_X, None]
        ends = np.floor(self.until_CXH[senders, None] * rows_CFX1 + 0.5)
        return np.diff(ends.astype(np.int64), axis=-1, prepend=0)

    def _divided(self, rows_CFE: np.ndarray, senders: slice = slice(None)) -> np.ndarray:
        """Rows by sender, chunk, expert and holder, int64 ``[C, F, E, C]``."""
        divided = rows_CFE[..., None] * self.target.holds_EC  # of experts with one holder
        parts = self._parts(rows_CFE, senders)
        own = np.zeros((*parts.shape[:3], self.target.num_ep_ranks), np.int64)
        for number, holder_X in enumerate(self.holder_XH.T):  # repeated ones have no more rows
            own[..., np.arange(len(holder_X)), holder_X] += parts[..., number]
        divided[..., self.copied_X, :] = own
        return divided

    def describe(self) -> str:
        return f"parts {self.until_CXH.tolist()}\n{self.target.describe()}"


EVENLY = 2520
"""Rows that any number of holders up to ten divides evenly."""


def sent_by_pair(share: Share, target: Placement, sender: int, rows_FE: np.ndarray) -> np.ndarray:
    """Rows that one sender sends for each of the target's (expert, holder) pairs, int64 ``[F, N]``,
    in the order of ``flat_N``: what ``rows_from`` says of them, without a table of all EP ranks."""
    if target.is_single:  # nothing is shared
        return rows_FE
    if _has_pairs(share, target):
        return share.sent_by_pair(sender, rows_FE)
    return share.rows_from(sender, rows_FE).reshape(len(rows_FE), -1)[:, target.flat_N]


def pair_of(rule: Rule, target: Placement, sender: int) -> np.ndarray | None:
    """To which of the target's pairs all rows of each expert go from one sender, int64 ``[E]``;
    None where the rule is another, or divides a sender's rows of some expert."""
    if not isinstance(rule, LocalElseOwner | NearestReplica) or type(rule) not in _OURS:
        return None
    return rule.pair_E(sender) if rule.target is target else None


def received_by_slot(
    share: Share, target: Placement, holder: int, rows_CFE: np.ndarray
) -> np.ndarray:
    """Rows that each sender sends to one holder for each of its slots, int64 ``[C, F, S]``: what
    ``rows_to`` says of them."""
    if target.is_single:
        received_CFS: np.ndarray = rows_CFE[..., target.columns_of(holder)]
        return received_CFS
    if _has_pairs(share, target):
        return share.received_by_slot(holder, rows_CFE)
    return share.rows_to(holder, rows_CFE)[..., target.experts_of(holder)]


def _has_pairs(
    share: Share, target: Placement
) -> TypeGuard[LocalElseOwner | NearestReplica | DividedRows]:
    known = isinstance(share, _OURS) and share.target is target
    return known and type(share) in _OURS  # others may share otherwise


_OURS = (LocalElseOwner, NearestReplica, DividedRows)


@lru_cache(maxsize=2)
def _owner_keys(owners: tuple[Placement, ...]) -> np.ndarray | None:
    """Place of each expert's owner in a flattened ``[L, C]``, once for owners that stay; None where
    an expert has several."""
    num_ep_ranks = owners[0].num_ep_ranks
    if not all(owner.is_single for owner in owners):
        return None
    return np.concatenate([owner.owner_E + n * num_ep_ranks for n, owner in enumerate(owners)])


def _computed_at_owner(
    key: np.ndarray, rows: Sequence[np.ndarray], num_ep_ranks: int
) -> np.ndarray:
    """Rows that each EP rank computes of each layer's experts, int64 ``[L, C]``, by their
    ``_owner_keys``."""
    total = np.concatenate([np.add.reduce(rows_CE) for rows_CE in rows])
    return _sums(key, total, len(rows) * num_ep_ranks).reshape(-1, num_ep_ranks)


def computed_by(shares: Sequence[Rule], rows: Sequence[np.ndarray]) -> np.ndarray:
    """``computed_C`` of each layer, int64 ``[L, C]``; at once of all that were planned together.

    Args:
        shares: of each layer.
        rows: likewise, int64 ``[C, E]``.
    """
    first = shares[0]
    if isinstance(first, LocalElseOwner):
        owners = tuple(
            s.owner for s in shares if isinstance(s, LocalElseOwner) and s.owner is s.target
        )
        key = _owner_keys(owners) if len(owners) == len(shares) else None
        if key is not None:
            return _computed_at_owner(key, rows, owners[0].num_ep_ranks)
    together = first._together if isinstance(first, NearestReplica) else None
    if together is not None and together.is_of(shares):
        return together.computed_LC(rows)
    each = zip(shares, rows)
    return np.stack([rule.of_rows(rows_CE).computed_C(rows_CE) for rule, rows_CE in each])
