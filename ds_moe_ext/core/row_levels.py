# SPDX-License-Identifier: Apache-2.0
"""How the replicas of a layer's experts divide its rows, by the rows as they are; in whole numbers.

Binds ``row_levels.c``, which says how; where it cannot be compiled, its twin in Python finds the
same. Pure. Shape letters: C EP ranks, E experts, V nodes, X copied experts, G (copied expert, node)
groups, N (copied expert, holder) pairs by group and then EP rank, P pairs of all experts in the
order of ``Placement.flat_N``, F chunks, S slots of an EP rank.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from ds_moe_ext.core.compiled import library
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels_twin import Divided, TwinLayer

PARTS = 1 << 20
"""Of an expert's rows, and of the speed of the fastest EP rank."""
SLOWEST = PARTS >> 6  # an EP rank's speed counts as so much at least
HIGHEST = 1 << 20  # price
MIDDLE = 4  # of eleven steps
SLOWER = 100
"""Times that the twin takes over those of the C code, about (docs/planners.md)."""


@dataclass(frozen=True, eq=False)
class WholePrices:
    """What rows cost, in whole numbers of one unit."""

    row_C: np.ndarray  # to compute one in each EP rank, int64
    local: int  # of a row on its EP rank's own link
    cross: int  # and on its node's card
    card: int  # and on its EP rank's part of that; 0 where an EP rank may use all of it
    speed_C: np.ndarray  # of each EP rank, in ``PARTS`` of the fastest, int64
    unit_s: float  # seconds of one
    worth: int  # what dividing anew has to save

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
    """How rows are divided, and where the division of other rows like these begins."""

    rows_N: np.ndarray  # of each holder, int64
    part_N: np.ndarray  # of each expert's rows what each holder gets, in ``PARTS``, int64
    leave: int  # step of what a level is lower at which a row leaves its EP rank, 0 to 11
    cross: int  # and of what it is lower, besides, at which it leaves its node
    toll: int  # and of what it is lower for each row that the links on its way carry, 0 to 5
    mean: int  # level of all EP ranks, if their levels were equal
    price: int  # of the busiest EP rank and link, together, by the prices in whole numbers

    @classmethod
    def of(cls, divided: Divided) -> Division:
        rows_N, part_N, numbers = divided
        return cls(rows_N, part_N, *numbers)

    @property
    def steps(self) -> tuple[int, int, int]:
        """Where the search for another one begins."""
        return self.leave, self.cross, self.toll


class _Tables(ctypes.Structure):
    """``Layer`` of the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in "CEVP"),
        *((name, ctypes.c_void_p) for name in ("node_C", "speed_C", "price_C")),
        *((name, ctypes.c_int64) for name in ("local_price", "cross_price", "card_price")),
        *((name, ctypes.c_int64) for name in (*"XGN", "memory_size")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *(
                    "slowness_C",
                    "holder_E",
                    "expert_X",
                    "group_X1",
                    "node_G",
                    "pair_G1",
                    "ep_rank_N",
                ),
                *("place_N", "first_E1"),
            )
        ),
    )


@dataclass(frozen=True, eq=False)
class CompiledLayer:
    """A layer, and what the C file does with one; ``TwinLayer`` has the same fields and methods.

    The C file describes the arguments of its functions. Arrays are contiguous, int64 but for bool.
    """

    holds_EC: np.ndarray
    node_C: np.ndarray
    speed_C: np.ndarray
    price_C: np.ndarray
    local_price: int
    cross_price: int
    card_price: int

    def prepare(self) -> None:
        _ = self._laid

    @cached_property
    def _laid(self) -> tuple[_Tables, np.ndarray]:
        """What the C code reads, and the memory of its tables, which must live as long."""
        num_experts, num_ep_ranks = self.holds_EC.shape
        tables = _Tables(
            C=num_ep_ranks,
            E=num_experts,
            V=int(self.node_C.max()) + 1,
            P=int(self.holds_EC.sum()),
            node_C=_at(self.node_C),
            speed_C=_at(self.speed_C),
            price_C=_at(self.price_C),
            local_price=self.local_price,
            cross_price=self.cross_price,
            card_price=self.card_price,
        )
        at_tables, tables_size = ctypes.byref(tables), _whole_number(_code().tables_size)
        memory = np.empty(tables_size(at_tables), dtype=np.int64)
        _code().lay_out(at_tables, _at(self.holds_EC), _at(memory))
        return tables, memory

    @property
    def _tables(self) -> _Tables:
        return self._laid[0]

    def divide(
        self,
        rows_CE: np.ndarray,
        part_N: np.ndarray | None,
        plan_3: Sequence[int],
        step_3: Sequence[int],
        *,
        num_sweeps: int,
    ) -> Divided:
        tables, reported = self._tables, np.array((*plan_3, *step_3, 0, 0), dtype=np.int64)
        rows_N, found_N = np.empty((2, tables.N), dtype=np.int64)
        memory = np.empty(tables.memory_size, dtype=np.int64)
        _code().divide(
            ctypes.byref(tables),
            *map(_at, (rows_CE, memory)),
            None if part_N is None else _at(part_N),
            *map(_at, (reported, reported[3:])),
            ctypes.c_int64(num_sweeps),
            *map(_at, (rows_N, found_N, reported[6:])),
        )
        return rows_N, found_N, reported[3:].tolist()

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
        tables = _Tables.from_buffer_copy(self._tables)
        tables.P = int(holds_KEC.sum(axis=(1, 2)).max())
        reported = np.array((*plan_3, *step_3, 0, 0), dtype=np.int64)
        rows_N, found_N = np.empty((2, tables.P), dtype=np.int64)
        at_tables, room_for_any, first_below = (
            ctypes.byref(tables),
            _whole_number(_code().room_for_any),
            _whole_number(_code().first_below),
        )
        memory = np.empty(room_for_any(at_tables), dtype=np.int64)
        number = first_below(
            at_tables,
            ctypes.c_int64(len(holds_KEC)),
            *map(_at, (holds_KEC, rows_CE)),
            ctypes.c_int64(below_s),
            *map(_at, (memory, reported, reported[3:])),
            ctypes.c_int64(num_sweeps),
            *map(_at, (rows_N, found_N, reported[6:])),
        )
        if number < 0:
            return None
        num_holders_E = holds_KEC[number].sum(axis=1)
        num_pairs = int(num_holders_E[num_holders_E > 1].sum())
        return number, (rows_N[:num_pairs], found_N[:num_pairs], reported[3:].tolist())

    def busiest_ep_rank(self, rows_CE: np.ndarray, rows_N: np.ndarray) -> int:
        load_C = np.empty(len(self.node_C), dtype=np.int64)
        arrays = map(_at, (rows_CE, rows_N, load_C))
        busiest: int = _whole_number(_code().busiest_ep_rank)(ctypes.byref(self._tables), *arrays)
        return busiest

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
        tables, slots = self._tables, ctypes.c_int64(num_slots)
        room = _whole_number(_code().room_for_repair)(ctypes.byref(tables), slots)
        memory, found_EC = np.empty(room, dtype=np.int64), np.empty_like(self.holds_EC)
        rows_P, parts_P = np.empty((2, tables.P + num_slots * tables.C), dtype=np.int64)
        reported = np.array((*step_3, 0, 0), dtype=np.int64)
        taken_s = _whole_number(_code().repair)(
            ctypes.byref(tables),
            *map(_at, (self.holds_EC, owner_E, rows_CE, rows_N)),
            *map(ctypes.c_int64, (now_s, copy_price)),
            slots,
            *map(_at, (memory, reported)),
            ctypes.c_int64(num_sweeps),
            *map(_at, (found_EC, rows_P, parts_P, reported[3:])),
        )
        if taken_s < 0:
            return None
        num_holders_E = found_EC.sum(axis=1)
        num_pairs = int(num_holders_E[num_holders_E > 1].sum())
        return found_EC, (rows_P[:num_pairs], parts_P[:num_pairs], reported.tolist())

    def compute(self, rows_CE: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
        computed_EC = np.empty(self.holds_EC.shape, dtype=np.int64)
        arrays = map(_at, (rows_CE, rows_N, computed_EC))
        _code().compute(ctypes.byref(self._tables), *arrays)
        return computed_EC

    def send(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, ep_rank: int, rows_FE: np.ndarray
    ) -> np.ndarray:
        tables = self._tables
        sent_FP = np.empty((len(rows_FE), tables.P), dtype=np.int64)
        memory = np.empty(tables.memory_size, dtype=np.int64)
        numbers = (ctypes.c_int64(ep_rank), ctypes.c_int64(len(rows_FE)))
        arrays = (_at(rows_CE), _at(rows_N), _at(memory))
        _code().send(ctypes.byref(tables), *arrays, *numbers, _at(rows_FE), _at(sent_FP))
        return sent_FP

    def receive(
        self,
        rows_CE: np.ndarray,
        rows_N: np.ndarray,
        ep_rank: int,
        expert_S: np.ndarray,
        rows_CFE: np.ndarray,
    ) -> np.ndarray:
        num_ep_ranks, num_chunks, _ = rows_CFE.shape
        received_CFS = np.empty((num_ep_ranks, num_chunks, len(expert_S)), dtype=np.int64)
        memory = np.empty(self._tables.memory_size, dtype=np.int64)
        numbers = (ctypes.c_int64(ep_rank), ctypes.c_int64(len(expert_S)), _at(expert_S))
        chunks = (ctypes.c_int64(num_chunks), _at(rows_CFE), _at(received_CFS))
        arrays = (_at(rows_CE), _at(rows_N), _at(memory))
        _code().receive(ctypes.byref(self._tables), *arrays, *numbers, *chunks)
        return received_CFS


@dataclass(frozen=True, eq=False)
class RowLevels:
    """Divides rows over a layer's replicas; the same for the same rows, on every processor."""

    target: Placement  # where experts compute
    node_C: np.ndarray  # node of each EP rank, int64
    prices: WholePrices  # of rows

    def __reduce__(self) -> tuple[type[RowLevels], tuple[Placement, np.ndarray, WholePrices]]:
        """Copied without its tables, which point into this process's memory."""
        return RowLevels, (self.target, self.node_C, self.prices)

    @cached_property
    def _layer(self) -> CompiledLayer | TwinLayer:
        kind: type[CompiledLayer | TwinLayer] = CompiledLayer if is_compiled() else TwinLayer
        prices, node_C = self.prices, _numbered(_whole(self.node_C).tobytes())
        has_cards = bool(node_C.any())
        return kind(
            holds_EC=np.ascontiguousarray(self.target.holds_EC),
            node_C=node_C,
            speed_C=prices.speed_C,
            price_C=prices.row_C,
            local_price=prices.local,
            cross_price=prices.cross if has_cards else 0,
            card_price=prices.card if has_cards else 0,
        )

    def prepare(self) -> None:
        """Work out beforehand what does not depend on rows."""
        self._layer.prepare()

    def divided(self, rows_CE: np.ndarray, plan: Division | None, *, sweeps: int) -> Division:
        """Rows of each holder, so that the layer takes least time; no more than by the nearest
        replicas, where sweeps are made or the plan's parts are not as good as was planned.

        Args:
            rows_CE: of each EP rank for each expert, int64.
            plan: of rows like these, where it begins; None: with the nearest replicas.
            sweeps: over all copied experts, at most; fewer where replicas are many.
        """
        part_N, plan_3, step_3 = None, (1, 0, 0), (0, MIDDLE, 0)
        if plan is not None:
            part_N, plan_3 = plan.part_N, (plan.mean, plan.price, self.prices.worth)
            step_3 = plan.steps
        found = self._layer.divide(_whole(rows_CE), part_N, plan_3, step_3, num_sweeps=sweeps)
        return Division.of(found)

    def first_below(
        self, division: Division, holds_KEC: np.ndarray, rows_CE: np.ndarray, *, sweeps: int
    ) -> tuple[int, Division] | None:
        """The first of other placements of the layer's experts under which it takes less time:
        which one, and its division. None where it never does.

        Args:
            division: less than by it. Others begin at its steps, with the nearest replicas.
            holds_KEC: bool.
            rows_CE: as ``divided`` takes them.
            sweeps: likewise.
        """
        holds_KEC, rows_CE = np.ascontiguousarray(holds_KEC), _whole(rows_CE)
        plan_3 = division.mean, 0, self.prices.worth
        found = self._layer.first_below(
            holds_KEC, rows_CE, division.price, plan_3, division.steps, num_sweeps=sweeps
        )
        return found and (found[0], Division.of(found[1]))

    def busiest_ep_rank(self, division: Division, rows_CE: np.ndarray) -> int:
        """The time of the EP rank that takes longest to compute, by the prices in whole numbers."""
        return self._layer.busiest_ep_rank(_whole(rows_CE), division.rows_N)

    def repaired(
        self,
        division: Division,
        rows_CE: np.ndarray,
        owner_E: np.ndarray,
        *,
        copy_price: int,
        num_slots: int,
        sweeps: int,
    ) -> tuple[np.ndarray, Division] | None:
        """Further replicas under which the layer takes less time, their own included, and the
        division then; None where none pay. ``repair`` of the C code says how they are found.

        Args:
            division: of these rows over the replicas that stand.
            rows_CE: as ``divided`` takes them.
            owner_E: the EP rank that owns each expert, int64.
            copy_price: of an expert that the busiest link carries, both ways, in whole units.
            num_slots: further replicas that an EP rank has room for.
            sweeps: as ``divided`` takes them.

        Returns:
            Who holds what, bool ``[E, C]``, and the division.
        """
        found = self._layer.repair(
            _whole(owner_E),
            _whole(rows_CE),
            division.rows_N,
            division.price,
            division.steps,
            copy_price=copy_price,
            num_slots=num_slots,
            num_sweeps=sweeps,
        )
        return found and (found[0], Division.of(found[1]))

    def computed_EC(self, rows_CE: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
        """Rows of each expert that each EP rank computes, int64 ``[E, C]``."""
        return self._layer.compute(_whole(rows_CE), rows_N)

    def sent(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, sender: int, rows_FE: np.ndarray
    ) -> np.ndarray:
        """Rows that a sender sends for each pair, int64 ``[F, P]``.

        Args:
            rows_CE: of each EP rank for each expert.
            rows_N: of each holder.
            sender: an EP rank.
            rows_FE: its rows of each chunk; or those of one of its ranks.
        """
        return self._layer.send(rows_CE, rows_N, sender, _whole(rows_FE))

    def received(
        self, rows_CE: np.ndarray, rows_N: np.ndarray, holder: int, rows_CFE: np.ndarray
    ) -> np.ndarray:
        """Rows that a holder gets from each sender, int64 ``[C, F, S]``; takes what ``sent`` does,
        rows of all EP ranks."""
        expert_S = self.target.experts_of(holder)
        return self._layer.receive(rows_CE, rows_N, holder, expert_S, _whole(rows_CFE))


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@lru_cache(maxsize=16)
def _numbered(nodes: bytes) -> np.ndarray:
    """Each EP rank's node by its number among the nodes, 0 to V - 1, from an int64 array's
    bytes."""
    return np.unique(np.frombuffer(nodes, dtype=np.int64), return_inverse=True)[1]


def _whole_number(function: Any) -> Any:
    """A function of the C code that gives an ``i64``."""
    function.restype = ctypes.c_int64
    return function


def _whole(rows: np.ndarray) -> np.ndarray:
    """As C reads them."""
    return np.ascontiguousarray(rows, dtype=np.int64)


def _code() -> ctypes.CDLL:
    return library("row_levels")


@cache
def is_compiled() -> bool:
    """Whether the C code divides. Warns, once a process, where it can be neither found nor compiled
    and its twin divides."""
    try:
        _code()
    except RuntimeError as error:
        warnings.warn(
            f"ds_moe_ext: tokens are divided over replicas in Python, about {SLOWER} times "
            f"slower than in C, with the same result, because {error}. For C, install gcc or "
            "set CC to a C compiler.",
            stacklevel=2,
        )
        return False
    return True
