"""How the copies of an expert divide its rows: the whole difference between many papers. Pure.

Shares are counted in whole rows, from integers only: whoever knows a sender's rows computes the
quotas that the sender does. Shape letters: E experts, C cells, F chunks, S experts of one cell, N
(expert, holder) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from ds_moe_ext.placement import Placement


class Share(Protocol):
    """Who computes which rows. The first rows of an expert go to its lowest holder, and so on."""

    def prepare(self, cell: int) -> None:
        """Work out beforehand what does not depend on rows, for a cell that sends and receives."""
        ...

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        """Rows that one sender sends to each holder of each expert, int64 ``[F, E, C]``.

        Args:
            sender: cell that sends.
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
        """Rows that each cell computes, int64 ``[C]``, of what each sender routes, ``[C, E]``."""
        ...

    def describe(self) -> str:
        """The rule and what it rests on, as text: equal texts are equal shares."""
        ...


@dataclass(frozen=True, eq=False)
class LocalElseHome:
    """A sender with a copy keeps its rows; the others send to the expert's home (Pro-Prophet).

    Where the target is the home, this is plain expert parallelism.
    """

    home: Placement
    target: Placement

    @cached_property
    def _holder_CE(self) -> np.ndarray:
        cells_C1 = np.arange(self.target.num_cells)[:, None]
        return np.where(self.target.holds_EC.T, cells_C1, self.home.owner_E)

    @cached_property
    def _first_E(self) -> np.ndarray:
        """Where each expert's holders begin in a flattened ``[E, C]``."""
        return np.arange(self.target.num_experts) * self.target.num_cells

    def prepare(self, cell: int) -> None:
        _ = self._holder_CE, self._first_E

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, self._first_E + self._holder_CE[sender]] = rows_FE
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        rows: np.ndarray = rows_CFE * (self._holder_CE == holder)[:, None]
        return rows

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        return _by_holder(rows_CFE, self._holder_CE)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        computed_C = np.zeros(self.target.num_cells, dtype=np.int64)
        np.add.at(computed_C, self._holder_CE, rows_CE)
        return computed_C

    def describe(self) -> str:
        return f"local else home\n{self.home.describe()}\n{self.target.describe()}"


def _by_holder(rows_CFN: np.ndarray, holder: np.ndarray) -> np.ndarray:
    """Sums of rows by chunk, sender and holder, int64 ``[F, C, C]``.

    Args:
        rows_CFN: rows of each sender, ``[C, F, N]``.
        holder: cell that they go to, ``[C, N]`` or ``[N]``.
    """
    num_cells, num_chunks, _ = rows_CFN.shape
    sender_C11 = np.arange(num_cells)[:, None, None]
    chunk_F1 = np.arange(num_chunks)[:, None]
    holder_C1N = np.broadcast_to(holder, (num_cells, rows_CFN.shape[2]))[:, None]
    key_CFN = (chunk_F1 * num_cells + sender_C11) * num_cells + holder_C1N
    # Sums in float64: whole numbers, and exact.
    shape = (num_chunks, num_cells, num_cells)
    rows = np.bincount(key_CFN.ravel(), rows_CFN.ravel(), minlength=int(np.prod(shape)))
    return rows.astype(np.int64).reshape(shape)


NEVER = np.iinfo(np.int64).max
"""Divides any rows to none, and comes after every turn."""


@dataclass(frozen=True, eq=False)
class _Turns:
    """An even split in whole rows: all get the quotient, those whose turn is early one row more.

    Attributes:
        among: copies that the rows are split over; ``NEVER`` for who gets none of them.
        turn: place in the order in which the remainder is dealt, from 0; ``NEVER`` likewise.
    """

    among: np.ndarray
    turn: np.ndarray

    def quotas(self, rows: np.ndarray) -> np.ndarray:
        whole, rest = np.divmod(rows, self.among)
        quotas: np.ndarray = whole + (self.turn < rest)
        return quotas


@dataclass(frozen=True, eq=False)
class NearestCopy:
    """Rows go to the nearest copies, in even parts (HECATE section 4.5; spec rules 29 and 30).

    A sender with a copy keeps its rows; else the copies on its node get them; else all copies. Of
    copies ``h_0 .. h_(k-1)`` in ascending order, sender ``s`` gives the rows that do not divide to
    ``h_(s mod k)`` and those after it, cyclically.

    Attributes:
        target: where experts compute.
        node_C: node of each cell, int64.
    """

    target: Placement
    node_C: np.ndarray
    _from: dict[int, _Turns] = field(default_factory=dict, init=False, repr=False)
    _to: dict[int, _Turns] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.node_C.shape != (self.target.num_cells,):
            raise ValueError(
                f"node_C has shape {self.node_C.shape}, but the placement has "
                f"{self.target.num_cells} cells; name one node a cell"
            )
        self.node_C.setflags(write=False)

    def prepare(self, cell: int) -> None:
        nothing_E = np.zeros(self.target.num_experts, dtype=np.int64)
        self.rows_from(cell, nothing_E[None])
        self.rows_to(cell, np.zeros((self.target.num_cells, 1, nothing_E.size), dtype=np.int64))

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        expert_N, holder_N = self._pairs
        if sender not in self._from:
            self._from[sender] = self._turns(np.asarray(sender), expert_N, holder_N)
        quotas_FN = self._from[sender].quotas(rows_FE[:, expert_N])
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, self._flat_N] = quotas_FN
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        expert_S = self.target.experts_of(holder)
        if holder not in self._to:
            senders_C11 = np.arange(self.target.num_cells)[:, None, None]
            self._to[holder] = self._turns(senders_C11, expert_S, np.asarray(holder))
        rows = np.zeros_like(rows_CFE)
        rows[:, :, expert_S] = self._to[holder].quotas(rows_CFE[:, :, expert_S])
        return rows

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        expert_N, holder_N = self._pairs
        return _by_holder(self._all_turns.quotas(rows_CFE[:, :, expert_N]), holder_N)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        alone_E = self._up_to_EC[:, -1] == 1
        expert_N, holder_N = self._copied_pairs
        computed_C = np.zeros(self.target.num_cells, dtype=np.int64)
        np.add.at(computed_C, self.target.owner_E[alone_E], rows_CE[:, alone_E].sum(axis=0))
        quotas_CN = self._copied_turns.quotas(rows_CE[:, expert_N])
        np.add.at(computed_C, holder_N, quotas_CN.sum(axis=0))
        return computed_C

    def describe(self) -> str:
        return f"nearest copy\nnodes {self.node_C.tolist()}\n{self.target.describe()}"

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Expert and holder of each pair, by expert and then holder, int64 ``[N]`` each."""
        expert_N, holder_N = np.nonzero(self.target.holds_EC)
        return expert_N, holder_N

    @cached_property
    def _copied_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Those of experts with more holders than one."""
        expert_N, holder_N = self._pairs
        copied_N = self._up_to_EC[expert_N, -1] > 1
        return expert_N[copied_N], holder_N[copied_N]

    @cached_property
    def _copied_turns(self) -> _Turns:
        """Of all senders and the copied pairs, ``[C, N]``."""
        return self._turns(np.arange(self.target.num_cells)[:, None], *self._copied_pairs)

    @cached_property
    def _all_turns(self) -> _Turns:
        """Of all senders and pairs, ``[C, 1, N]``."""
        return self._turns(np.arange(self.target.num_cells)[:, None, None], *self._pairs)

    @cached_property
    def _flat_N(self) -> np.ndarray:
        """Place of each pair in a flattened ``[E, C]``."""
        return np.flatnonzero(self.target.holds_EC)

    @cached_property
    def _same_node_CC(self) -> np.ndarray:
        return self.node_C[:, None] == self.node_C

    @cached_property
    def _on_node_EC(self) -> np.ndarray:
        """Copies on each cell's node, int64."""
        held_EC = self.target.holds_EC.astype(np.float32)  # a matrix product of small integers
        return np.rint(held_EC @ self._same_node_CC).astype(np.int64)

    @cached_property
    def _before_on_node_EC(self) -> np.ndarray:
        """Copies on each cell's node in cells before it, int64."""
        held_EC = self.target.holds_EC.astype(np.float32)
        return np.rint(held_EC @ np.triu(self._same_node_CC, 1)).astype(np.int64)

    @cached_property
    def _up_to_EC(self) -> np.ndarray:
        """Copies in each cell and before it, int64."""
        return np.cumsum(self.target.holds_EC, axis=1)

    def _turns(self, sender: np.ndarray, expert: np.ndarray, holder: np.ndarray) -> _Turns:
        """Who splits which rows, for arrays of senders, experts and holders that broadcast."""
        keeps = self.target.holds_EC[expert, sender]
        near = self._on_node_EC[expert, sender]
        is_near = near > 0
        among = np.where(is_near, near, self._up_to_EC[expert, -1])
        place = np.where(
            is_near, self._before_on_node_EC[expert, holder], self._up_to_EC[expert, holder] - 1
        )
        gets = np.where(is_near, self._same_node_CC[sender, holder], True)
        gets = np.where(keeps, sender == holder, gets)
        return _Turns(
            among=np.where(gets, np.where(keeps, 1, among), NEVER),
            turn=np.where(gets, (place - sender) % among, NEVER),
        )
