# SPDX-License-Identifier: Apache-2.0
"""Which cells hold which experts.

A *cell* is a group of ranks that together hold whole experts; it is one rank when
``expert_sharding_size`` is 1. Pure: nothing here talks to another rank.

Shape letters: E experts, C cells, S expert slots of one cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class Placement:
    """Experts of one layer on the cells of one expert-parallel grid.

    Attributes:
        holds_EC: bool ``[E, C]``, true where the cell holds a copy of the expert.
        first_EC: which of these have the first slots of their cells, as those at home have, so that
            what lies together in memory is computed together; others come behind. Either kind in
            the order of experts; None: all.

    Raises:
        ValueError: an expert is held by no cell.
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
                f"no cell holds expert(s) {homeless.tolist()}; every expert needs a holder"
            )
        _frozen(self.holds_EC)

    @classmethod
    def block(cls, num_experts: int, num_cells: int) -> Placement:
        """Experts in index order, the same number in every cell, one copy of each."""
        if num_experts % num_cells:
            raise ValueError(
                f"{num_experts} experts do not divide over {num_cells} cells; choose a number of "
                f"cells that divides {num_experts}"
            )
        return cls.owned_by(np.arange(num_experts) // (num_experts // num_cells), num_cells)

    @classmethod
    def owned_by(cls, owner_E: np.ndarray, num_cells: int) -> Placement:
        """One copy of each expert, in the cell ``owner_E`` names, int ``[E]``."""
        return cls(np.asarray(owner_E)[:, None] == np.arange(num_cells))

    def with_copies(self, copies_EC: np.ndarray) -> Placement:
        """This placement and the copies that ``copies_EC`` marks, bool ``[E, C]``, in slots behind
        those that are taken; more copies come among these."""
        return Placement(self.holds_EC | copies_EC, self._firsts_EC)

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
    def num_cells(self) -> int:
        return int(self.holds_EC.shape[1])

    @cached_property
    def flat_N(self) -> np.ndarray:
        """Place of each (expert, holder) pair in a flattened ``[E, C]``, ascending, int64."""
        return _frozen(np.flatnonzero(self.holds_EC))

    @cached_property
    def expert_N(self) -> np.ndarray:
        """The expert of each pair, in the order of ``flat_N``, int64."""
        return _frozen(self.flat_N // self.num_cells)

    @cached_property
    def holder_N(self) -> np.ndarray:
        """The holder of each pair, in the order of ``flat_N``, int64."""
        return _frozen(self.flat_N % self.num_cells)

    @cached_property
    def num_holders_E(self) -> np.ndarray:
        """Cells that hold each expert, int64."""
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
        """Whether each cell holds an expert."""
        return bool((self.held_C1[1:] > self.held_C1[:-1]).all())

    @cached_property
    def is_full(self) -> bool:
        """Whether each cell holds every expert."""
        return self.flat_N.size == self.holds_EC.size

    @cached_property
    def num_slots(self) -> int:
        """Slots ``S`` of the fullest cell: the last axis of every per-slot table."""
        return int(self.holds_EC.sum(axis=0).max())

    @cached_property
    def owner_E(self) -> np.ndarray:
        """The first cell that holds each expert, int64 ``[E]``: its home, if it has one copy."""
        return _frozen(self.holds_EC.argmax(axis=1))

    @cached_property
    def slot_EC(self) -> np.ndarray:
        """Slot of each expert in each cell that holds it, -1 elsewhere, int64 ``[E, C]``."""
        pair_N = np.arange(self.flat_N.size) if self.by_holder_N is None else self.by_holder_N
        slot_EC = np.full(self.holds_EC.shape, -1, dtype=np.int64)
        cell_N = self.holder_N[pair_N]
        slot_EC[self.expert_N[pair_N], cell_N] = np.arange(pair_N.size) - self.held_C1[cell_N]
        return _frozen(slot_EC)

    @cached_property
    def expert_CS(self) -> np.ndarray:
        """Expert in each slot of each cell, -1 where the slot is empty, int64 ``[C, S]``."""
        table = np.full((self.num_cells, self.num_slots), -1, dtype=np.int64)
        expert, cell = np.nonzero(self.holds_EC)
        table[cell, self.slot_EC[expert, cell]] = expert
        return _frozen(table)

    @cached_property
    def by_holder_N(self) -> np.ndarray | None:
        """Takes pairs, in the order of ``flat_N``, to that of holders and their slots, int64
        ``[N]``; None where it is theirs: one copy an expert, experts in the order of cells."""
        key_N = self.holder_N
        if self.first_EC is not None:
            key_N = 2 * key_N + ~self.first_EC.ravel()[self.flat_N]
        order_N = np.argsort(key_N, kind="stable")
        in_order = np.array_equal(order_N, np.arange(order_N.size))
        return None if in_order else _frozen(order_N)

    @cached_property
    def held_C1(self) -> np.ndarray:
        """How many copies the cells before each hold, and all, int64 ``[C + 1]``."""
        held_C1 = np.zeros(self.num_cells + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.holder_N, minlength=self.num_cells), out=held_C1[1:])
        return _frozen(held_C1)

    def prepare(self, cell: int) -> None:
        """Work out beforehand what rows are ordered by, for a cell that sends and receives."""
        _ = self.is_single, self.is_full, self.by_holder_N, self.held_C1, self.is_everywhere
        _ = self.columns_of(cell), self.num_firsts_of(cell)
        if self.is_full and self.num_cells > 1:
            self.alone(cell).prepare(0)

    def alone(self, cell: int) -> Placement:
        """That of a cell with every expert, as if there were no other: the same slots."""
        if cell not in self._alone:
            own = slice(cell, cell + 1)
            first_E1 = None if self.first_EC is None else self.first_EC[:, own]
            self._alone[cell] = Placement(self.holds_EC[:, own], first_E1)
        return self._alone[cell]

    def experts_of(self, cell: int) -> np.ndarray:
        """Expert ids of one cell in slot order, int64 ``[<= S]``."""
        if cell not in self._experts:
            self._experts[cell] = self._found_experts(cell)
        return self._experts[cell]

    def columns_of(self, cell: int) -> np.ndarray | slice:
        """The same as an index: a slice where they follow one another, which copies nothing."""
        if cell not in self._columns:
            expert_S = self.experts_of(cell)
            size, first = len(expert_S), int(expert_S[0]) if len(expert_S) else 0
            follow = np.array_equal(expert_S, first + np.arange(size))
            self._columns[cell] = slice(first, first + size) if follow else expert_S
        return self._columns[cell]

    def num_firsts_of(self, cell: int) -> int:
        """How many first slots a cell has that others stand behind; 0 where none does."""
        if cell not in self._num_firsts:
            num, of_all = (int(own[:, cell].sum()) for own in (self._firsts_EC, self.holds_EC))
            self._num_firsts[cell] = num if num < of_all else 0
        return self._num_firsts[cell]

    def _found_experts(self, cell: int) -> np.ndarray:
        held = slice(*self.held_C1[cell : cell + 2])
        flat = self.flat_N[held if self.by_holder_N is None else self.by_holder_N[held]]
        return flat // self.num_cells

    def describe(self) -> str:
        """The experts of each cell as text: equal texts are equal placements."""
        return "|".join(" ".join(map(str, self.experts_of(c))) for c in range(self.num_cells))


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds the experts of some layers, apart by whether an expert has one holder or several.

    Copied experts are few, so that what is worked out for them alone is cheap. Shape letters: L
    layers, X copied experts and A others, by layer; N (copied expert, holder) pairs, by expert and
    then holder.
    """

    num_layers: int  # layers ``L``
    num_cells: int  # of their grid
    layer_X: np.ndarray  # layer of each copied expert, from 0, int64
    expert_X: np.ndarray  # and its number there
    copied_N: np.ndarray  # copied expert of each pair, 0 to X - 1, int64
    cell_N: np.ndarray  # and its holder
    layer_A: np.ndarray  # layer of each other expert, int64
    expert_A: np.ndarray  # its number there
    cell_A: np.ndarray  # its holder

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, placements: tuple[Placement, ...]) -> Holders:
        """Of layers on one grid; once for homes that stay, and for a plan's targets."""
        return cls.found(placements)

    @classmethod
    def found(cls, placements: tuple[Placement, ...]) -> Holders:
        """The same, worked out."""
        num_cells = placements[0].num_cells
        flat = [placement.flat_N for placement in placements]
        layer, pair = np.repeat(np.arange(len(flat)), list(map(len, flat))), np.concatenate(flat)
        expert, cell = pair // num_cells, pair % num_cells
        is_first = np.ones(len(pair), dtype=bool)
        is_first[1:] = (expert[1:] != expert[:-1]) | (layer[1:] != layer[:-1])
        is_alone = is_first.copy()
        is_alone[:-1] &= is_first[1:]
        starts_X = np.flatnonzero(is_first & ~is_alone)
        return cls(
            num_layers=len(flat),
            num_cells=num_cells,
            layer_X=layer[starts_X],
            expert_X=expert[starts_X],
            copied_N=is_first[~is_alone].cumsum() - 1,
            cell_N=cell[~is_alone],
            layer_A=layer[is_alone],
            expert_A=expert[is_alone],
            cell_A=cell[is_alone],
        )

    @cached_property
    def num_holders_X(self) -> np.ndarray:
        """Of each copied expert, int64."""
        return np.bincount(self.copied_N, minlength=len(self.layer_X))

    @cached_property
    def holds_XC(self) -> np.ndarray:
        """Who holds each copied expert, bool."""
        holds_XC = np.zeros((len(self.layer_X), self.num_cells), dtype=bool)
        holds_XC[self.copied_N, self.cell_N] = True
        return holds_XC

    def by_layer(self, layer: np.ndarray, *tables: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Cut what is listed by layer, along the last axis, into the parts of each layer."""
        bounds = np.searchsorted(layer, np.arange(self.num_layers + 1)).tolist()
        for start, stop in pairwise(bounds):
            yield tuple(table[..., start:stop] for table in tables)


def even_homes(num_experts: Sequence[int], num_cells: int) -> tuple[Placement, ...]:
    """First homes of the experts of all layers: HECATE's homogeneous sharding (spec rule 26).

    A layer whose experts divide over the cells is cut into blocks, as in plain expert parallelism.
    The experts of the other layers are dealt out cell by cell, each such layer going on where the
    one before it ended: over all layers no cell owns more than one expert more than another.

    Args:
        num_experts: of each layer.
        num_cells: cells ``C``.
    """
    homes = []
    dealt = 0
    for count in num_experts:
        if count % num_cells == 0:
            homes.append(Placement.block(count, num_cells))
        else:
            owner_E = (dealt + np.arange(count)) % num_cells
            homes.append(Placement.owned_by(owner_E, num_cells))
            dealt += count
    return tuple(homes)
