"""Which experts to copy where for the next step: Pro-Prophet's Algorithm 1. Pure.

Which expert is next depends on rows alone, so the order is found first, in integers; the model of
``block_costs`` then says how many of that order to copy. Shape letters: E experts, C cells (the
paper's devices, ``D`` of them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_moe_ext.cost.block_costs import (
    BlockPrices,
    BlockSeconds,
    CellRows,
    balanced_spread,
    block_seconds,
    cell_rows,
    seconds_of_rows,
    step_seconds_S,
    whole_rows,
)
from ds_moe_ext.placement import Placement


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Where the experts of one layer compute in the next step.

    Attributes:
        target: homes included; the home itself if nothing is copied.
        selected: experts that are copied, in the order of selection.
        seconds: of the block under the target, on the rows planned for.
        seconds_without: of the block without copies, on the same rows.
        computed_C: rows that each cell computes under the target, int64.
        received_C: rows that come to each cell from others under the target, int64.
    """

    target: Placement
    selected: tuple[int, ...]
    seconds: BlockSeconds
    seconds_without: BlockSeconds
    computed_C: np.ndarray
    received_C: np.ndarray

    @classmethod
    def of(
        cls,
        home: Placement,
        rows_CE: np.ndarray,
        *,
        selected: tuple[int, ...],
        holders_EC: np.ndarray,
        alone: CellRows,
        prices: BlockPrices,
    ) -> BlockPlan:
        """The plan that lets each selected expert compute where ``holders_EC`` says; ``alone`` are
        rows without copies."""
        target, rows = home, alone
        if selected:
            holds_EC, copied = home.holds_EC.copy(), list(selected)
            holds_EC[copied] |= holders_EC[copied]
            target = Placement(holds_EC)
            rows = cell_rows(home, target, rows_CE)
        return cls(
            target=target,
            selected=selected,
            seconds=seconds_of_rows(target, rows, prices=prices),
            seconds_without=seconds_of_rows(home, alone, prices=prices),
            computed_C=rows.computed_C,
            received_C=rows.received_C,
        )


def place_experts(
    home: Placement,
    rows_CE: np.ndarray,
    *,
    prices: BlockPrices,
    num_excluded: int | None = 0,
    balance: float = 1.0,
) -> BlockPlan:
    """Copy the experts of the busiest cells to the cells whose rows they compute.

    Until cells are balanced, the busiest cell's expert with most rows is next; where that cell has
    none left, the search ends. Of all these the first so many are copied that the step is fastest
    by the model. Among equals the lowest index, or the fewest copies, wins. Costs a sort of
    ``[E, C]`` and some passes over ``[C]`` for each expert.

    Args:
        home: where each expert lives, one cell an expert.
        rows_CE: rows that each cell is expected to route to each expert; integers.
        prices: of the block.
        num_excluded: ``n``, cells that get no copy of an expert: those with the fewest rows for it,
            never its home; None excludes the cells without any rows for it.
        balance: ``alpha`` of equation (7).

    Raises:
        ValueError: rows, ``num_excluded`` or ``balance`` that do not fit.
    """
    rows_CE = whole_rows(home, rows_CE)
    if num_excluded is not None and not 0 <= num_excluded < home.num_cells:
        raise ValueError(
            f"num_excluded is {num_excluded}, but an expert has {home.num_cells - 1} cells besides "
            f"its home; give a number from 0 to {home.num_cells - 1}, or null for automatic"
        )
    if not 0 <= balance < math.inf:
        raise ValueError(f"balance is {balance}; it must be finite and at least 0")
    choices = _Choices(home, rows_CE, num_excluded)
    alone = cell_rows(home, home, rows_CE)
    tried = _search(choices, alone, balance, prices)
    best = int(tried.step_seconds(prices).argmin())  # the first of the fastest
    return BlockPlan.of(
        home,
        rows_CE,
        selected=tried.experts[:best],
        holders_EC=choices.holders_EC,
        alone=alone,
        prices=prices,
    )


@dataclass(frozen=True, eq=False)
class _Choices:
    """What copying each expert would change, for all experts at once.

    Attributes:
        home: where each expert lives.
        rows_CE: rows that each cell routes to each expert, int64.
        num_excluded: as of ``place_experts``.
    """

    home: Placement
    rows_CE: np.ndarray
    num_excluded: int | None

    @cached_property
    def holders_EC(self) -> np.ndarray:
        """Where an expert computes if it is copied, its home included, bool."""
        rows_EC = self.rows_CE.T
        if self.num_excluded == 0:
            return np.ones(rows_EC.shape, dtype=bool)
        if self.num_excluded is None:
            return self.home.holds_EC | (rows_EC > 0)
        homes_last_EC = np.where(self.home.holds_EC, np.iinfo(np.int64).max, rows_EC)
        fewest_first_EC = np.argsort(homes_last_EC, axis=1, kind="stable")
        holders_EC = np.ones(rows_EC.shape, dtype=bool)
        np.put_along_axis(holders_EC, fewest_first_EC[:, : self.num_excluded], False, axis=1)
        return holders_EC

    @cached_property
    def stays_EC(self) -> np.ndarray:
        """Rows of each sender that a copy would keep from going to the expert's home, int64."""
        return np.where(self.holders_EC & ~self.home.holds_EC, self.rows_CE.T, 0)

    @cached_property
    def copies_E(self) -> np.ndarray:
        """``D - n`` of an expert; 0 if that is its home alone, int64."""
        holders_E = self.holders_EC.sum(axis=1)
        return np.where(holders_E > 1, holders_E, 0)

    def by_home(self) -> list[list[int]]:
        """Experts of each cell that can be copied, those with most rows last.

        The paper's loop also picks experts without a place for a copy, to which nothing happens.
        """
        experts: list[list[int]] = [[] for _ in range(self.home.num_cells)]
        owner_E = self.home.owner_E
        hottest_first_E = np.argsort(-self.rows_CE.sum(axis=0), kind="stable")
        for expert in hottest_first_E[self.copies_E[hottest_first_E] > 0][::-1].tolist():
            experts[owner_E[expert]].append(expert)
        return experts


class _Tried(NamedTuple):
    """The layer without copies, and with one more expert copied from place to place; S places.

    Attributes:
        experts: that were added, in order: one less than places.
        most_received_S: rows that the cell which receives most receives, int64.
        most_computed_S: rows that the busiest cell computes, int64.
        copied_S: experts that are copied, each counted as the share of cells that hold it.
    """

    experts: tuple[int, ...]
    most_received_S: np.ndarray
    most_computed_S: np.ndarray
    copied_S: np.ndarray

    def step_seconds(self, prices: BlockPrices) -> np.ndarray:
        """By the model, float ``[S]``."""
        return step_seconds_S(prices, *self[1:])


ROUNDING = 1e-9  # far more than what seconds lose in floats
LOOKED_AT = 16  # experts that the loop adds before it looks whether more can pay


def _search(choices: _Choices, alone: CellRows, balance: float, prices: BlockPrices) -> _Tried:
    """The loop of Algorithm 1: the experts it tries, in order, after a step with no copies; but for
    those at the end that cannot make the step faster, whatever they balance."""
    home = choices.home
    computed_C, received = alone.computed_C.copy(), alone.received_C.tolist()
    stays_EC, copies_E = choices.stays_EC, choices.copies_E
    stays: list[int] = stays_EC.sum(axis=1).tolist()
    waiting = choices.by_home()
    # Copies keep rows where they are: as many as before are computed.
    num_rows = int(computed_C.sum())
    spread = balanced_spread(num_rows, home.num_experts, balance)
    least_computed = -(-num_rows // home.num_cells)
    busiest = int(computed_C.argmax())
    experts: list[int] = []
    most_received, most_computed = [max(received)], [int(computed_C[busiest])]

    def tried() -> _Tried:
        copies = np.cumsum([0, *copies_E[experts].tolist()])
        figures = np.array(most_received), np.array(most_computed), copies / home.num_cells
        return _Tried(tuple(experts), *figures)

    while not most_computed[-1] - int(computed_C[computed_C.argmin()]) < spread:
        if not waiting[busiest]:
            break
        if len(experts) % LOOKED_AT == LOOKED_AT - 1 and _no_more_pay(
            tried(), least_computed, prices
        ):
            break
        expert = waiting[busiest].pop()
        computed_C += stays_EC[expert]
        computed_C[busiest] -= stays[expert]
        received[busiest] -= stays[expert]
        busiest = int(computed_C.argmax())
        experts.append(expert)
        most_received.append(max(received))
        most_computed.append(int(computed_C[busiest]))
    return tried()


def _no_more_pay(tried: _Tried, least_computed: int, prices: BlockPrices) -> bool:
    """Whether a step with yet more copies is slower than the fastest so far: even if no rows
    travelled, and all cells computed equally many.

    The model's time does not fall where more is copied; nor where more is computed, as a second of
    experts hides one of gathers in forward, and two of transfers in backward, where it takes three.
    """
    ideal_s = block_seconds(
        prices, most_received=0, most_computed=least_computed, copied=float(tried.copied_S[-1])
    ).step_s
    return ideal_s > (1 + ROUNDING) * float(tried.step_seconds(prices).min())
