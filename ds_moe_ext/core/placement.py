# SPDX-License-Identifier: Apache-2.0
"""Which EP ranks hold which experts.

An *EP rank* is a group of ranks that together hold whole experts; it is one rank when
``expert_sharding_size`` is 1. Pure: nothing here talks to another rank.

Shape letters: E experts, C EP ranks, S expert slots of an EP rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from ds_moe_ext.older_names import accepts_older


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@accepts_older
@dataclass(frozen=True, eq=False)
class Placement:
    """Experts of one layer on the EP ranks of one expert-parallel grid.

    Attributes:
        holds_EC: bool ``[E, C]``, true where the EP rank holds a replica of the expert.
        first_EC: which of these have the first slots of their EP ranks, as those at their owners
            have, so that what lies together in memory is computed together; others come behind.
            Either kind in the order of experts; None: all.

    Raises:
        ValueError: an expert is held by no EP rank.
    """

    holds_EC: np.ndarray
    first_EC: np.ndarray | None = None
    _experts: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _columns: dict[int, np.ndarray | slice] = field(default_factory=dict, init=False, repr=False)
    _num_firsts: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _alone: dict[int, Placement] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        is_held_E = self.holds_EC.any(axis=1)
        if not is_held_E.all():
            homeless = np.flatnonzero(~is_held_E)
            raise ValueError(
                f"no EP rank has expert(s) {homeless.tolist()}; every expert needs an EP rank"
            )
        _frozen(self.holds_EC)

    @classmethod
    def block(cls, num_experts: int, num_ep_ranks: int) -> Placement:
        """Experts in index order, the same number in every EP rank, each held once."""
        if num_experts % num_ep_ranks:
            raise ValueError(
                f"{num_experts} experts do not divide over {num_ep_ranks} EP ranks; choose a "
                f"number of EP ranks that divides {num_experts}"
            )
        return cls.owned_by(np.arange(num_experts) // (num_experts // num_ep_ranks), num_ep_ranks)

    @classmethod
    def owned_by(cls, owner_E: np.ndarray, num_ep_ranks: int) -> Placement:
        """Each expert held once, by the EP rank that ``owner_E`` names, int ``[E]``."""
        return cls(np.asarray(owner_E)[:, None] == np.arange(num_ep_ranks))

    def with_replicas(self, replicas_EC: np.ndarray) -> Placement:
        """This placement and the replicas that ``replicas_EC`` marks, bool ``[E, C]``, in slots
        behind those that are taken; more replicas come among these."""
        return Placement(self.holds_EC | replicas_EC, self._firsts_EC)

    def is_like(self, other: Placement) -> bool:
        """Whether another has the same experts in the same slots."""
        return self is other or (
            np.array_equal(self.holds_EC, other.holds_EC)
            and np.array_equal(self._firsts_EC, other._firsts_EC)
        )

    @property
    def _firsts_EC(self) -> np.ndarray:
        return self.holds_EC if self.first_EC is None else self.first_EC

    @property
    def num_experts(self) -> int:
        return int(self.holds_EC.shape[0])

    @property
    def num_ep_ranks(self) -> int:
        return int(self.holds_EC.shape[1])

    @cached_property
    def flat_N(self) -> np.ndarray:
        """Place of each (expert, holder) pair in a flattened ``[E, C]``, ascending, int64."""
        return _frozen(np.flatnonzero(self.holds_EC))

    @cached_property
    def expert_N(self) -> np.ndarray:
        """The expert of each pair, in the order of ``flat_N``, int64."""
        return _frozen(self.flat_N // self.num_ep_ranks)

    @cached_property
    def holder_N(self) -> np.ndarray:
        """The holder of each pair, in the order of ``flat_N``, int64."""
        return _frozen(self.flat_N % self.num_ep_ranks)

    @cached_property
    def num_holders_E(self) -> np.ndarray:
        """EP ranks that hold each expert, int64."""
        return _frozen(np.bincount(self.expert_N, minlength=self.num_experts))

    @cached_property
    def holders(self) -> Holders:
        """Who holds its experts; of this layer alone."""
        return Holders.found((self,))

    @cached_property
    def is_single(self) -> bool:
        """Whether each expert has one holder."""
        return self.flat_N.size == self.num_experts

    @cached_property
    def is_everywhere(self) -> bool:
        """Whether each EP rank holds an expert."""
        return bool((self.held_C1[1:] > self.held_C1[:-1]).all())

    @cached_property
    def is_full(self) -> bool:
        """Whether each EP rank holds every expert."""
        return self.flat_N.size == self.holds_EC.size

    @cached_property
    def num_slots(self) -> int:
        """Slots ``S`` of the fullest EP rank: the last axis of every per-slot table."""
        return int(self.holds_EC.sum(axis=0).max())

    @cached_property
    def owner_E(self) -> np.ndarray:
        """The first EP rank that holds each expert, int64 ``[E]``: its owner, if it has one
        holder."""
        return _frozen(self.holds_EC.argmax(axis=1))

    @cached_property
    def slot_EC(self) -> np.ndarray:
        """Slot of each expert in each EP rank that holds it, -1 elsewhere, int64 ``[E, C]``."""
        pair_N = np.arange(self.flat_N.size) if self.by_holder_N is None else self.by_holder_N
        slot_EC = np.full(self.holds_EC.shape, -1, dtype=np.int64)
        ep_rank_N = self.holder_N[pair_N]
        slot_EC[self.expert_N[pair_N], ep_rank_N] = np.arange(pair_N.size) - self.held_C1[ep_rank_N]
        return _frozen(slot_EC)

    @cached_property
    def expert_CS(self) -> np.ndarray:
        """Expert in each slot of each EP rank, -1 where the slot is empty, int64 ``[C, S]``."""
        table = np.full((self.num_ep_ranks, self.num_slots), -1, dtype=np.int64)
        expert, ep_rank = np.nonzero(self.holds_EC)
        table[ep_rank, self.slot_EC[expert, ep_rank]] = expert
        return _frozen(table)

    @cached_property
    def by_holder_N(self) -> np.ndarray | None:
        """Takes pairs, in the order of ``flat_N``, to that of holders and their slots, int64
        ``[N]``; None where it is theirs: one holder an expert, experts in the order of EP
        ranks."""
        key_N = self.holder_N
        if self.first_EC is not None:
            key_N = 2 * key_N + ~self.first_EC.ravel()[self.flat_N]
        order_N = np.argsort(key_N, kind="stable")
        in_order = np.array_equal(order_N, np.arange(order_N.size))
        return None if in_order else _frozen(order_N)

    @cached_property
    def held_C1(self) -> np.ndarray:
        """How many replicas the EP ranks before each hold, and all, int64 ``[C + 1]``."""
        held_C1 = np.zeros(self.num_ep_ranks + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.holder_N, minlength=self.num_ep_ranks), out=held_C1[1:])
        return _frozen(held_C1)

    def prepare(self, ep_rank: int) -> None:
        """Work out beforehand what rows are ordered by, for an EP rank that sends and receives."""
        _ = self.is_single, self.is_full, self.by_holder_N, self.held_C1, self.is_everywhere
        _ = self.columns_of(ep_rank), self.num_firsts_of(ep_rank)
        if self.is_full and self.num_ep_ranks > 1:
            self.alone(ep_rank).prepare(0)

    def alone(self, ep_rank: int) -> Placement:
        """That of an EP rank with every expert, as if there were no other: the same slots."""
        if ep_rank not in self._alone:
            own = slice(ep_rank, ep_rank + 1)
            first_E1 = None if self.first_EC is None else self.first_EC[:, own]
            self._alone[ep_rank] = Placement(self.holds_EC[:, own], first_E1)
        return self._alone[ep_rank]

    def experts_of(self, ep_rank: int) -> np.ndarray:
        """Expert ids of an EP rank in slot order, int64 ``[<= S]``."""
        if ep_rank not in self._experts:
            self._experts[ep_rank] = self._found_experts(ep_rank)
        return self._experts[ep_rank]

    def columns_of(self, ep_rank: int) -> np.ndarray | slice:
        """The same as an index: a slice where they follow one another, which copies nothing."""
        if ep_rank not in self._columns:
            expert_S = self.experts_of(ep_rank)
            size, first = len(expert_S), int(expert_S[0]) if len(expert_S) else 0
            follow = np.array_equal(expert_S, first + np.arange(size))
            self._columns[ep_rank] = slice(first, first + size) if follow else expert_S
        return self._columns[ep_rank]

    def num_firsts_of(self, ep_rank: int) -> int:
        """How many first slots an EP rank has that others stand behind; 0 where none does."""
        if ep_rank not in self._num_firsts:
            num, of_all = (int(own[:, ep_rank].sum()) for own in (self._firsts_EC, self.holds_EC))
            self._num_firsts[ep_rank] = num if num < of_all else 0
        return self._num_firsts[ep_rank]

    def _found_experts(self, ep_rank: int) -> np.ndarray:
        held = slice(*self.held_C1[ep_rank : ep_rank + 2])
        flat = self.flat_N[held if self.by_holder_N is None else self.by_holder_N[held]]
        return flat // self.num_ep_ranks

    def describe(self) -> str:
        """The experts of each EP rank as text: equal texts are equal placements."""
        return "|".join(" ".join(map(str, self.experts_of(c))) for c in range(self.num_ep_ranks))


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds the experts of some layers, apart by whether an expert has one holder or several.

    Copied experts are few, so that what is worked out for them alone is cheap. Shape letters: L
    layers, X copied experts and A others, by layer; N (copied expert, holder) pairs, by expert and
    then holder.
    """

    num_layers: int  # layers ``L``
    num_ep_ranks: int  # of their grid
    layer_X: np.ndarray  # layer of each copied expert, from 0, int64
    expert_X: np.ndarray  # and its number there
    copied_N: np.ndarray  # copied expert of each pair, 0 to X - 1, int64
    ep_rank_N: np.ndarray  # and its holder
    layer_A: np.ndarray  # layer of each other expert, int64
    expert_A: np.ndarray  # its number there
    ep_rank_A: np.ndarray  # its holder

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, placements: tuple[Placement, ...]) -> Holders:
        """Of layers on one grid; once for owners that stay, and for a plan's targets."""
        return cls.found(placements)

    @classmethod
    def found(cls, placements: tuple[Placement, ...]) -> Holders:
        """The same, worked out."""
        num_ep_ranks = placements[0].num_ep_ranks
        flat = [placement.flat_N for placement in placements]
        layer, pair = np.repeat(np.arange(len(flat)), list(map(len, flat))), np.concatenate(flat)
        expert, ep_rank = pair // num_ep_ranks, pair % num_ep_ranks
        is_first = np.ones(len(pair), dtype=bool)
        is_first[1:] = (expert[1:] != expert[:-1]) | (layer[1:] != layer[:-1])
        is_alone = is_first.copy()
        is_alone[:-1] &= is_first[1:]
        starts_X = np.flatnonzero(is_first & ~is_alone)
        return cls(
            num_layers=len(flat),
            num_ep_ranks=num_ep_ranks,
            layer_X=layer[starts_X],
            expert_X=expert[starts_X],
            copied_N=is_first[~is_alone].cumsum() - 1,
            ep_rank_N=ep_rank[~is_alone],
            layer_A=layer[is_alone],
            expert_A=expert[is_alone],
            ep_rank_A=ep_rank[is_alone],
        )

    @cached_property
    def num_holders_X(self) -> np.ndarray:
        """Of each copied expert, int64."""
        return np.bincount(self.copied_N, minlength=len(self.layer_X))

    @cached_property
    def holds_XC(self) -> np.ndarray:
        """Who holds each copied expert, bool."""
        holds_XC = np.zeros((len(self.layer_X), self.num_ep_ranks), dtype=bool)
        holds_XC[self.copied_N, self.ep_rank_N] = True
        return holds_XC

    def by_layer(self, layer: np.ndarray, *tables: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Cut what is listed by layer, along the last axis, into the parts of each layer."""
        bounds = np.searchsorted(layer, np.arange(self.num_layers + 1)).tolist()
        for start, stop in pairwise(bounds):
            yield tuple(table[..., start:stop] for table in tables)


def most_replicas(owner: Placement, target: Placement) -> int:
    """Replicas on the EP rank that holds most."""
    return int((target.holds_EC & ~owner.holds_EC).sum(axis=0).max())


def even_owners(num_experts: Sequence[int], num_ep_ranks: int) -> tuple[Placement, ...]:
    """First owners of the experts of all layers: HECATE's homogeneous sharding (spec rule 26).

    A layer whose experts divide over the EP ranks is cut into blocks, as in plain expert
    parallelism. The experts of the other layers are dealt out EP rank by EP rank, each such layer
    going on where the one before it ended: over all layers no EP rank owns more than one expert
    more than another."""
    owners = []
    dealt = 0
    for count in num_experts:
        if count % num_ep_ranks == 0:
            owners.append(Placement.block(count, num_ep_ranks))
        else:
            owner_E = (dealt + np.arange(count)) % num_ep_ranks
            owners.append(Placement.owned_by(owner_E, num_ep_ranks))
            dealt += count
    return tuple(owners)
