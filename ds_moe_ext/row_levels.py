# SPDX-License-Identifier: Apache-2.0
"""How the copies of a layer's experts divide its rows, by the rows as they are; in whole numbers.

Binds ``row_levels.c``, which says how. Pure. Shape letters: C cells, E experts, V nodes, X copied
experts, G (copied expert, node) groups, N (copied expert, holder) pairs by group and then cell, P
pairs of all experts in the order of ``Placement.flat_N``, F chunks, S slots of one cell.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_moe_ext.compiled import library
from ds_moe_ext.placement import Placement

PARTS = 1 << 20
"""Of an expert's rows, and of the speed of the fastest cell."""
SLOWEST = PARTS >> 6  # a cell's speed counts as so much at least
HIGHEST = 1 << 20  # price
MIDDLE = 4  # of eleven steps


@dataclass(frozen=True, eq=False)
class WholePrices:
    """What rows cost, in whole numbers of one unit.

    Attributes:
        row_C: to compute one in each cell, int64.
        local: of a row on its cell's own link.
        cross: and on its node's card.
        card: and on its cell's part of that; 0 where a cell may use all of it.
        speed_C: of each cell, in ``PARTS`` of the fastest, int64.
        unit_s: seconds of one.
        worth: what dividing anew has to save.
    """

    row_C: np.ndarray
    local: int
    cross: int
    card: int
    speed_C: np.ndarray
    unit_s: float
    worth: int

    @classmethod
    def of(
        cls,
        row_s_C: np.ndarray,
        local_row_s: float,
        cross_row_s: float,
        *,
        cards: float = 1.0,
        worth_s: float = 0.0,
    ) -> WholePrices:
        """From seconds. Each is rounded by itself, so that every processor does it alike."""
        card_row_s = cards * cross_row_s if cards > 1 else 0.0
        unit = max(float(row_s_C.max()), local_row_s, cross_row_s, card_row_s) / HIGHEST
        if not unit:
            row_s_C, unit = np.ones(len(row_s_C)), 1 / HIGHEST
        speed_C = np.full(len(row_s_C), PARTS, dtype=np.int64)
        if row_s_C.all():
            speed = np.rint(PARTS * row_s_C.min() / row_s_C)
            speed_C = np.maximum(speed, SLOWEST).astype(np.int64)
        local, cross, card, worth = (
            round(s / unit) for s in (local_row_s, cross_row_s, card_row_s, worth_s)
        )
        row_C = np.rint(row_s_C / unit).astype(np.int64)
        return cls(row_C, local, cross, card, speed_C, unit, worth)


@dataclass(frozen=True, eq=False)
class Division:
    """How rows are divided, and where the division of other rows like these begins.

    Attributes:
        rows_N: of each holder, int64.
        part_N: of each expert's rows what each holder gets, in ``PARTS``, int64.
        leave: step of what a level is lower at which a row leaves its cell, 0 to 11.
        cross: and of what it is lower, besides, at which it leaves its node.
        toll: and of what it is lower for each row that the links on its way carry, 0 to 5.
        mean: level of all cells, if their levels were equal.
        price: of the busiest cell and link, together, by the prices in whole numbers.
    """

    rows_N: np.ndarray
    part_N: np.ndarray
    leave: int
    cross: int
    toll: int
    mean: int
    price: int

    def for_others(self, num_pairs: int) -> Division:
        """Where the division over other copies begins: with the nearest, at its steps."""
        nothing_N = np.zeros(num_pairs, dtype=np.int64)
        return replace(self, rows_N=nothing_N, part_N=nothing_N, price=0)


class _Tables(ctypes.Structure):
    """``Layer`` of the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in "CEVXGN"),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("node_C", "holder_E", "expert_X", "group_X1", "node_G", "pair_G1", "cell_N"),
                *("place_N", "first_E1", "speed_C", "slowness_C", "price_C"),
            )
        ),
        ("local_price", ctypes.c_int64),
        ("cross_price", ctypes.c_int64),
        ("card_price", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class RowLevels:
    """Divides rows over a layer's copies; the same for the same rows, on every processor.

    Attributes:
        target: where experts compute.
        node_C: node of each cell, int64.
        prices: of rows.
    """

    target: Placement
    node_C: np.ndarray
    prices: WholePrices

    def __reduce__(self) -> tuple[type[RowLevels], tuple[Placement, np.ndarray, WholePrices]]:
        """Copied without its tables, which point into this process's memory."""
        return RowLevels, (self.target, self.node_C, self.prices)

    @cached_property
    def _place_C(self) -> np.ndarray:
        """Each cell's node by its number among the nodes, 0 to V - 1."""
        return np.unique(self.node_C, return_inverse=True)[1]

    @cached_property
    def _num_nodes(self) -> int:
        return int(self._place_C.max()) + 1

    @cached_property
    def _order_N(self) -> np.ndarray:
        """Takes pairs by copied expert and then holder to those by group and then cell."""
        holders = self.target.holders
        return np.lexsort((holders.cell_N, self._place_C[holders.cell_N], holders.copied_N))

    @property
    def num_pairs(self) -> int:
        """Copied experts and holders ``N``."""
        return len(self.target.holders.cell_N)

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """What ``_Tables`` points at: they must live as long."""
        target, holders, num_nodes = self.target, self.target.holders, self._num_nodes
        num_copied, cell_N = len(holders.expert_X), holders.cell_N[self._order_N]
        group_N = holders.copied_N[self._order_N] * num_nodes + self._place_C[cell_N]
        group_G, pair_G = np.unique(group_N, return_index=True)
        holder_E = np.empty(target.num_experts, dtype=np.int64)
        holder_E[holders.expert_A] = holders.cell_A
        holder_E[holders.expert_X] = -1 - np.arange(num_copied)
        is_copied_P = target.num_holders_E[target.expert_N] > 1
        arrays = {
            "node_C": self._place_C,
            "holder_E": holder_E,
            "expert_X": holders.expert_X,
            "group_X1": np.searchsorted(group_G // num_nodes, np.arange(num_copied + 1)),
            "node_G": group_G % num_nodes,
            "pair_G1": np.append(pair_G, len(cell_N)),
            "cell_N": cell_N,
            "place_N": np.flatnonzero(is_copied_P)[self._order_N],
            "first_E1": np.append(0, target.num_holders_E.cumsum()),
            "speed_C": self.prices.speed_C,
            "slowness_C": PARTS * PARTS // self.prices.speed_C,
            "price_C": self.prices.row_C,
        }
        return {name: np.ascontiguousarray(a, dtype=np.int64) for name, a in arrays.items()}

    @cached_property
    def _tables(self) -> _Tables:
        arrays = self._arrays
        return _Tables(
            C=self.target.num_cells,
            E=self.target.num_experts,
            V=self._num_nodes,
            X=len(arrays["expert_X"]),
            G=len(arrays["node_G"]),
            N=len(arrays["cell_N"]),
            local_price=self.prices.local,
            cross_price=self.prices.cross if self._num_nodes > 1 else 0,
            card_price=self.prices.card if self._num_nodes > 1 else 0,
            **{name: _at(array) for name, array in arrays.items()},
        )

    @cached_property
    def _memory_size(self) -> int:
        memory_size = code().memory_size
        memory_size.restype = ctypes.c_int64
        size: int = memory_size(ctypes.byref(self._tables))
        return size

    def prepare(self) -> None:
        """Work out beforehand what does not depend on rows."""
        _ = self._memory_size

    def divided(self, rows_CE: np.ndarray, plan: Division | None, *, sweeps: int) -> Division:
        """Rows of each holder, so that the layer takes least time; no more than by the nearest
        copies, where sweeps are made or the plan's parts are not as good as was planned.

        Args:
            rows_CE: of each cell for each expert, int64.
            plan: of rows like these, where it begins; None: with the nearest copies.
            sweeps: over all copied experts, at most; fewer where copies are many.
        """
        rows_CE, size = _whole(rows_CE), len(self._order_N)
        steps = np.array((0, MIDDLE, 0) if plan is None else (plan.leave, plan.cross, plan.toll))
        known = np.array((1, 0, 0) if plan is None else (plan.mean, plan.price, self.prices.worth))
        rows_N, part_N, found = (np.empty(n, dtype=np.int64) for n in (size, size, 2))
        memory = np.empty(self._memory_size, dtype=np.int64)
        code().divide(
            ctypes.byref(self._tables),
            *map(_at, (rows_CE, memory)),
            None if plan is None else _at(plan.part_N),
            *map(_at, (known, steps)),
            ctypes.c_int64(sweeps),
            *map(_at, (rows_N, part_N, found)),
        )
        return Division(rows_N, part_N, *steps.tolist(), *found.tolist())

    def computed_EC(self, rows_CE: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
        """Rows of each expert that each cell computes, int64 ``[E, C]``."""
        holders = self.target.holders
        computed_EC = self.target.holds_EC * rows_CE.sum(axis=0)[:, None]
        order_N = self._order_N
        computed_EC[holders.expert_X[holders.copied_N[order_N]], holders.cell_N[order_N]] = rows_N
        return computed_EC

    def sent(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, sender: int, rows_FE: np.ndarray
    ) -> np.ndarray:
        """Rows that a sender sends for each pair, int64 ``[F, P]``.

        Args:
            rows_CE: of each cell for each expert.
            rows_N: of each holder.
            sender: a cell.
            rows_FE: its rows of each chunk; or those of one of its ranks.
        """
        sent_FP = np.empty((len(rows_FE), self.target.flat_N.size), dtype=np.int64)
        memory, rows_FE = np.empty(self._memory_size, dtype=np.int64), _whole(rows_FE)
        numbers = (ctypes.c_int64(sender), ctypes.c_int64(len(rows_FE)))
        arrays = (_at(rows_CE), _at(rows_N), _at(memory))
        code().send(ctypes.byref(self._tables), *arrays, *numbers, _at(rows_FE), _at(sent_FP))
        return sent_FP

    def received(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, holder: int, rows_CFE: np.ndarray
    ) -> np.ndarray:
        """Rows that a holder gets from each sender, int64 ``[C, F, S]``; takes what ``sent`` does,
        rows of all cells."""
        expert_S, (num_cells, num_chunks, _) = self.target.experts_of(holder), rows_CFE.shape
        received_CFS = np.empty((num_cells, num_chunks, len(expert_S)), dtype=np.int64)
        memory, rows_CFE = np.empty(self._memory_size, dtype=np.int64), _whole(rows_CFE)
        numbers = (ctypes.c_int64(holder), ctypes.c_int64(len(expert_S)), _at(expert_S))
        chunks = (ctypes.c_int64(num_chunks), _at(rows_CFE), _at(received_CFS))
        arrays = (_at(rows_CE), _at(rows_N), _at(memory))
        code().receive(ctypes.byref(self._tables), *arrays, *numbers, *chunks)
        return received_CFS


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _whole(rows: np.ndarray) -> np.ndarray:
    """As C reads them."""
    return np.ascontiguousarray(rows, dtype=np.int64)


def code() -> ctypes.CDLL:
    """What divides. Raises RuntimeError where it can be neither found nor compiled."""
    return library("row_levels")
