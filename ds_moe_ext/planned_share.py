"""Rows in parts that a plan says: of each sender's rows for an expert, what goes to which holder.

Parts are whole 1/4096ths, and rows are divided by integers only, so that every rank counts alike. A
sender needs its own rows alone, a holder those of all senders; see ``planners/priced_share.py`` for
where parts come from. Pure. Shape letters: E experts, C cells, V nodes, F chunks, S experts of one
cell, X copied experts, N (copied expert, holder) pairs, by expert and then holder, P (expert,
holder) pairs of all experts, in the order of ``Placement.flat_N``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_moe_ext.placement import Holders, Placement

BITS = 12
PARTS = 1 << BITS
"""Of an expert's rows; the longest remainder is a row a holder."""


class _Dealt(NamedTuple):
    """What some senders deal to some holders; shapes that fit those of rows.

    Attributes:
        kept: parts of the sender's rows that it keeps, if it is a holder.
        starts: of the rest, in parts: where the holder's begins.
        ends: and ends.
        turn: parts added before rounding down, another for each sender of a node.
        is_own: 1 where the holder is the sender.
    """

    kept: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    turn: np.ndarray
    is_own: np.ndarray

    def quotas(self, rows: np.ndarray) -> np.ndarray:
        kept = (rows * self.kept + self.turn) >> BITS
        left = rows - kept
        dealt: np.ndarray = (left * self.ends + self.turn) >> BITS
        dealt -= (left * self.starts + self.turn) >> BITS
        dealt += kept * self.is_own
        return dealt


@dataclass(frozen=True, eq=False)
class PlannedShare:
    """A ``Share`` by parts.

    Attributes:
        target: where experts compute.
        node_C: node of each cell, int64.
        kept_N: parts of its own rows that each holder keeps, int64.
        ends_VN: of all other rows that a node's senders have for an expert, in parts: where those
            of each holder end, int64; those of the last holder at ``PARTS``.

    Raises:
        ValueError: shapes or parts are not so.
    """

    target: Placement
    node_C: np.ndarray
    kept_N: np.ndarray
    ends_VN: np.ndarray
    _leaving: dict[int, _Dealt] = field(default_factory=dict, init=False, repr=False)
    _coming: dict[int, _Dealt] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.node_C.setflags(write=False)
        num_pairs = len(self.target.holders.copied_N)
        shape = int(self._place_C.max()) + 1, num_pairs
        if self.kept_N.shape != (num_pairs,) or self.ends_VN.shape != shape:
            raise ValueError(
                f"parts of shape {self.kept_N.shape} and {self.ends_VN.shape} for {shape[0]} nodes "
                f"and {num_pairs} holders of copied experts; give {(num_pairs,)} and {shape}"
            )
        steps_VN = self.ends_VN - self._starts_VN
        is_whole = (self.ends_VN[:, self._last_X] == PARTS).all()
        if not is_whole or min(steps_VN.min(initial=0), self.kept_N.min(initial=0)) < 0:
            raise ValueError("parts below 0, or of an expert that are no whole; mend them")
        if self.kept_N.max(initial=0) > PARTS:
            raise ValueError(f"a holder keeps {self.kept_N.max()} parts of {PARTS}; mend them")

    @cached_property
    def _place_C(self) -> np.ndarray:
        """Each cell's node by its number among the nodes."""
        return np.unique(self.node_C, return_inverse=True)[1]

    @cached_property
    def _last_X(self) -> np.ndarray:
        return self.target.holders.num_holders_X.cumsum() - 1

    @cached_property
    def _starts_VN(self) -> np.ndarray:
        starts_VN = np.zeros_like(self.ends_VN)
        starts_VN[:, 1:] = self.ends_VN[:, :-1]
        starts_VN[:, self._last_X - self.target.holders.num_holders_X + 1] = 0
        return starts_VN

    @cached_property
    def _turn_C(self) -> np.ndarray:
        """Senders of a node round at unlike places, so that what is cut off evens out."""
        before_CC = np.tril(self._place_C[:, None] == self._place_C)
        nth_C, size_C = before_CC.sum(axis=1), np.bincount(self._place_C)[self._place_C]
        turn_C: np.ndarray = (2 * nth_C - 1) * PARTS // (2 * size_C)
        return turn_C

    @cached_property
    def _pair_P(self) -> np.ndarray:
        """Place of each pair among those of copied experts; -1 of an expert with one holder."""
        is_copied_P = (self.target.num_holders_E > 1)[self.target.expert_N]
        return np.where(is_copied_P, is_copied_P.cumsum() - 1, -1)

    @cached_property
    def _kept_CE(self) -> np.ndarray:
        """Parts of its rows that each sender keeps; none where it holds no copy."""
        holders = self.target.holders
        kept_CE = np.zeros((self.target.num_cells, self.target.num_experts), dtype=np.int64)
        kept_CE[holders.cell_N, holders.expert_X[holders.copied_N]] = self.kept_N
        return kept_CE

    def _dealt(self, sender: np.ndarray, pair: np.ndarray) -> _Dealt:
        """By senders and places among all pairs, of shapes that fit each other."""
        expert, holder = self.target.expert_N[pair], self.target.holder_N[pair]
        copied = self._pair_P[pair]
        node, is_alone = self._place_C[sender], copied < 0
        # All rows for an expert with one holder are its.
        starts = np.where(is_alone, 0, self._table(self._starts_VN, node, copied))
        ends = np.where(is_alone, PARTS, self._table(self.ends_VN, node, copied))
        is_own = (holder == sender).astype(np.int64)
        return _Dealt(self._kept_CE[sender, expert], starts, ends, self._turn_C[sender], is_own)

    @staticmethod
    def _table(table_VN: np.ndarray, node: np.ndarray, copied: np.ndarray) -> np.ndarray:
        found: np.ndarray = table_VN[node, copied] if table_VN.size else np.zeros_like(copied)
        return found

    def prepare(self, cell: int) -> None:
        self.target.prepare(cell)
        self._leaves(cell)
        self._comes(cell)

    def _leaves(self, sender: int) -> _Dealt:
        if sender not in self._leaving:
            pair_P = np.arange(self.target.flat_N.size)
            self._leaving[sender] = self._dealt(np.full_like(pair_P, sender), pair_P)
        return self._leaving[sender]

    def _comes(self, holder: int) -> _Dealt:
        """``[C, 1, S]``."""
        if holder not in self._coming:
            pair_S = np.flatnonzero(self.target.holder_N == holder)
            sender_C11 = np.arange(self.target.num_cells)[:, None, None]
            self._coming[holder] = self._dealt(sender_C11, pair_S)
        return self._coming[holder]

    def sent_by_pair(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        """See ``share.sent_by_pair``."""
        return self._leaves(sender).quotas(rows_FE[:, self.target.expert_N])

    def received_by_slot(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        """See ``share.received_by_slot``."""
        return self._comes(holder).quotas(rows_CFE[..., self.target.experts_of(holder)])

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        rows_FX = np.zeros((len(rows_FE), self.target.holds_EC.size), dtype=np.int64)
        rows_FX[:, self.target.flat_N] = self.sent_by_pair(sender, rows_FE)
        return rows_FX.reshape(len(rows_FE), *self.target.holds_EC.shape)

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        rows = np.zeros_like(rows_CFE)
        rows[..., self.target.experts_of(holder)] = self.received_by_slot(holder, rows_CFE)
        return rows

    def rows_between(self, rows_CFE: np.ndarray) -> np.ndarray:
        sent_CFP = self._all.quotas(rows_CFE[..., self.target.expert_N])
        # Sums of whole numbers below 2**53: exact.
        between_CFC = sent_CFP.astype(np.float64) @ self._is_at_PC
        return between_CFC.astype(np.int64).swapaxes(0, 1)

    @cached_property
    def _is_at_PC(self) -> np.ndarray:
        """1 where a cell is the holder of a pair, float64."""
        return (self.target.holder_N[:, None] == np.arange(self.target.num_cells)).astype(
            np.float64
        )

    @cached_property
    def _all(self) -> _Dealt:
        """``[C, 1, P]``."""
        pair_P = np.arange(self.target.flat_N.size)
        return self._dealt(np.arange(self.target.num_cells)[:, None, None], pair_P)

    def computed_C(self, rows_CE: np.ndarray) -> np.ndarray:
        computed_P = self._all.quotas(rows_CE[:, None, self.target.expert_N]).sum(axis=(0, 1))
        computed_C: np.ndarray = (computed_P @ self._is_at_PC).astype(np.int64)
        return computed_C

    def describe(self) -> str:
        parts = f"{self.kept_N.tolist()} {self.ends_VN.tolist()}"
        return f"parts {parts}\nnodes {self.node_C.tolist()}\n{self.target.describe()}"


def in_parts(kept_N: np.ndarray, own_N: np.ndarray) -> np.ndarray:
    """Of its own rows, float, what each holder keeps, in whole parts; all where there are none."""
    kept = np.rint(PARTS * kept_N / np.maximum(own_N, 1)).astype(np.int64)
    return np.where(own_N > 0, np.clip(kept, 0, PARTS), PARTS)


def ends_in_parts(sent_VN: np.ndarray, holders: Holders, place_C: np.ndarray) -> np.ndarray:
    """Where the holders' parts of each node's rows end, int64 ``[V, N]``, from these rows, float;
    where there are none even parts of the holders on the node, or else of all.

    Args:
        sent_VN: rows.
        holders: who holds what.
        place_C: each cell's node by its number among the nodes.
    """
    num_holders_X = holders.num_holders_X
    first_X, copied_N = num_holders_X.cumsum() - num_holders_X, holders.copied_N
    is_near_VN = (np.arange(len(sent_VN))[:, None] == place_C[holders.cell_N]).astype(np.float64)
    near_VX = np.add.reduceat(is_near_VN, first_X, axis=1) if len(first_X) else is_near_VN
    even_VN = np.where(near_VX[:, copied_N] > 0, is_near_VN, 1.0)
    total_VX = np.add.reduceat(sent_VN, first_X, axis=1) if len(first_X) else sent_VN
    weight_VN = np.where(total_VX[:, copied_N] > 0, np.maximum(sent_VN, 0), even_VN)
    through_VN = weight_VN.cumsum(axis=1)
    before_VX = through_VN[:, first_X] - weight_VN[:, first_X]
    last_X = first_X + num_holders_X - 1
    whole_VX = through_VN[:, last_X] - before_VX
    part_VN = (through_VN - before_VX[:, copied_N]) / whole_VX[:, copied_N]
    ends_VN = np.rint(PARTS * np.minimum(part_VN, 1.0)).astype(np.int64)
    ends_VN[:, last_X] = PARTS
    return ends_VN


def as_told(kept_N: np.ndarray, ends_VN: np.ndarray) -> np.ndarray:
    """Parts in a row, as one rank tells the others, int16."""
    return np.concatenate((kept_N, ends_VN.ravel())).astype(np.int16)


def from_told(parts: np.ndarray, target: Placement, node_C: np.ndarray) -> PlannedShare:
    """And the share that they make."""
    num_pairs = len(target.holders.copied_N)
    kept_N, ends = np.split(parts.astype(np.int64), [num_pairs])
    num_nodes = np.unique(node_C).size
    return PlannedShare(target, node_C, kept_N, ends.reshape(num_nodes, num_pairs))
