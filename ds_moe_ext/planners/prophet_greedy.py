"""Which experts to copy where for the next step: Pro-Prophet's Algorithm 1. Pure.

Which expert is next depends on rows alone, so the order is found first, in integers; the model of
``block_costs`` then says how many of that order to copy. Shape letters: E experts, C cells (the
paper's devices, ``D`` of them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_moe_ext.cost.block_costs import (
    BlockPrices,
    BlockSeconds,
    block_seconds,
    cell_rows,
    most_spread,
    seconds_of,
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
        prices: BlockPrices,
    ) -> BlockPlan:
        """The plan that lets each selected expert compute where ``holders_EC`` says."""
        target = home
        if selected:
            is_selected_E = np.zeros(home.num_experts, dtype=bool)
            is_selected_E[list(selected)] = True
            target = home.with_copies(holders_EC & is_selected_E[:, None])
        at_home = cell_rows(home, home, rows_CE)
        rows = cell_rows(home, target, rows_CE) if selected else at_home
        return cls(
            target=target,
            selected=selected,
            seconds=seconds_of(target, rows, prices),
            seconds_without=seconds_of(home, at_home, prices),
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
    steps = _search(choices, balance)
    seconds = [step.seconds(prices) for step in steps]
    best = min(range(len(steps)), key=lambda s: seconds[s].step_s)  # the first of the fastest
    return BlockPlan.of(
        home,
        rows_CE,
        selected=tuple(step.expert for step in steps[1 : best + 1]),
        holders_EC=choices.holders_EC,
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


@dataclass(frozen=True)
class _Step:
    """The layer with one more expert copied than in the step before.

    Attributes:
        expert: that was added; -1 where there is none.
        most_received: rows that the cell which receives most receives.
        most_computed: rows that the busiest cell computes.
        copied: experts that are copied, each counted as the share of cells that hold it.
    """

    expert: int
    most_received: int
    most_computed: int
    copied: float

    def seconds(self, prices: BlockPrices) -> BlockSeconds:
        return block_seconds(
            prices,
            most_received=self.most_received,
            most_computed=self.most_computed,
            copied=self.copied,
        )


def _search(choices: _Choices, balance: float) -> list[_Step]:
    """The loop of Algorithm 1: all experts it tries, in order, after a step with no copies."""
    home = choices.home
    rows = cell_rows(home, home, choices.rows_CE)
    computed_C, received_C = rows.computed_C, rows.received_C
    waiting, num_stay_E = choices.by_home(), choices.stays_EC.sum(axis=1)
    copies = 0

    def step(expert: int) -> _Step:
        most_received, most_computed = int(received_C.max()), int(computed_C.max())
        return _Step(expert, most_received, most_computed, copies / home.num_cells)

    steps = [step(-1)]
    most = most_spread(computed_C, home.num_experts, balance)  # no copy changes how many rows
    while steps[-1].most_computed - int(computed_C.min()) >= most:
        busiest = int(computed_C.argmax())
        if not waiting[busiest]:
            break
        expert = waiting[busiest].pop()
        stays_C = choices.stays_EC[expert]
        computed_C += stays_C
        computed_C[busiest] -= num_stay_E[expert]
        received_C[busiest] -= num_stay_E[expert]
        copies += int(choices.copies_E[expert])
        steps.append(step(expert))
    return steps
