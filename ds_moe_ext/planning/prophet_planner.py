# SPDX-License-Identifier: Apache-2.0
"""Which experts to copy where for the next step: Pro-Prophet's Algorithm 1, and FasterMoE's. Pure.

``place_experts`` finds the order in which experts would be copied first, in integers, as it depends
on rows alone; the model of ``layer_costs`` then says how many of that order to copy.
``shadow_experts`` is a baseline (spec section 5). ``split_forward`` and ``split_backward`` say
which replicas move beside which computation of the block before (spec 3.3). Shape letters: E
experts, C EP ranks (the paper's devices, ``D`` of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.layer_costs import (
    BACKWARD,
    FORWARD,
    BlockPrices,
    BlockSeconds,
    EpRankRows,
    balanced_spread,
    ep_rank_rows,
    seconds_of_rows,
    step_seconds,
    whole_rows,
)
from ds_moe_ext.planning.prices import NUM_EXCHANGES


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Where the experts of one layer compute in the next step, each part worked out when it is
    asked for: most plans are looked at for their seconds alone."""

    choices: Choices  # of which it is one
    selected: tuple[int, ...]  # experts that are copied, in the order of selection
    alone: EpRankRows  # rows by EP rank without replicas
    prices: BlockPrices  # of the block

    @cached_property
    def target(self) -> Placement:
        """Owners included; the owner itself if nothing is copied."""
        owner, copied = self.choices.owner, list(self.selected)
        if not copied:
            return owner
        holds_EC = owner.holds_EC.copy()
        holds_EC[copied] |= self.choices.holders_EC[copied]
        return owner.with_replicas(holds_EC)

    @cached_property
    def rows(self) -> EpRankRows:
        """By EP rank under the target."""
        if not self.selected:
            return self.alone
        return self.choices.rows_with(list(self.selected), self.alone)

    @cached_property
    def seconds(self) -> BlockSeconds:
        """Of the block under the target, on the rows planned for."""
        num_replicas = int(self.choices.replicas_E[list(self.selected)].sum())
        copied = num_replicas / self.choices.owner.num_ep_ranks
        return seconds_of_rows(self.rows, copied, prices=self.prices)

    @cached_property
    def seconds_without(self) -> BlockSeconds:
        """Of the block without replicas, on the same rows."""
        return seconds_of_rows(self.alone, 0.0, prices=self.prices)

    def first(self, num_copied: int) -> BlockPlan:
        """The same with the first so many of the copied experts."""
        return replace(self, selected=self.selected[:num_copied])


def place_experts(
    owner: Placement,
    rows_CE: np.ndarray,
    *,
    prices: BlockPrices,
    num_excluded: int | None = 0,
    balance: float = 1.0,
    max_copied: int | None = None,
) -> BlockPlan:
    """Copy the experts of the busiest EP ranks to the EP ranks whose rows they compute.

    Until EP ranks are balanced, the busiest EP rank's expert with most rows is next; where that EP
    rank has none left, the search ends. Of all these the first so many are copied that the step is
    fastest by the model. Among equals the lowest index, or the fewest replicas, wins. Costs a sort
    of ``[E, C]`` and some passes over ``[C]`` for each expert.

    Args:
        owner: where each expert lives, one EP rank an expert.
        rows_CE: rows that each EP rank is expected to route to each expert; integers.
        prices: of the block.
        num_excluded: ``n``, EP ranks that get no replica of an expert: those with the fewest rows
            for it, never its owner; None excludes the EP ranks without any rows for it.
        balance: ``alpha`` of equation (7).
        max_copied: experts of which an EP rank has memory for a replica; None: of all.
    """
    rows_CE = whole_rows(owner, rows_CE)
    if num_excluded is not None and not 0 <= num_excluded < owner.num_ep_ranks:
        raise ValueError(
            f"num_excluded is {num_excluded}, but an expert has {owner.num_ep_ranks - 1} EP ranks "
            f"besides its owner; give a number from 0 to {owner.num_ep_ranks - 1}, or null for "
            "automatic"
        )
    if not 0 <= balance < math.inf:
        raise ValueError(f"balance is {balance}; it must be finite and at least 0")
    choices = Choices(owner, rows_CE, num_excluded)
    alone = ep_rank_rows(owner, owner, rows_CE)
    selected = _fastest(choices, alone, balance, prices, max_copied)
    return BlockPlan(choices, selected, alone, prices)


@dataclass(frozen=True, eq=False)
class Choices:
    """What copying each expert would change, for all experts at once."""

    owner: Placement  # where each expert lives
    rows_CE: np.ndarray  # rows that each EP rank routes to each expert, int64
    num_excluded: int | None  # as of ``place_experts``

    @cached_property
    def holders_EC(self) -> np.ndarray:
        """Where an expert computes if it is copied, its owner included, bool."""
        rows_EC = self.rows_CE.T
        if self.num_excluded == 0:
            return np.ones(rows_EC.shape, dtype=bool)
        if self.num_excluded is None:
            return self.owner.holds_EC | (rows_EC > 0)
        owners_last_EC = np.where(self.owner.holds_EC, np.iinfo(np.int64).max, rows_EC)
        fewest_first_EC = np.argsort(owners_last_EC, axis=1, kind="stable")
        holders_EC = np.ones(rows_EC.shape, dtype=bool)
        np.put_along_axis(holders_EC, fewest_first_EC[:, : self.num_excluded], False, axis=1)
        return holders_EC

    @cached_property
    def stays_EC(self) -> np.ndarray:
        """Rows of each sender that a replica would keep from going to the expert's owner, int64."""
        stays_EC = self.rows_CE.T.copy()
        if self.num_excluded:
            stays_EC *= self.holders_EC
        stays_EC[np.arange(self.owner.num_experts), self.owner.owner_E] = 0
        return stays_EC

    @cached_property
    def stays_E(self) -> np.ndarray:
        """The same of all senders, int64."""
        stays_E: np.ndarray = self.stays_EC.sum(axis=1)
        return stays_E

    @cached_property
    def replicas_E(self) -> np.ndarray:
        """``D - n`` of an expert; 0 if that is its owner alone, int64."""
        if self.num_excluded is None:
            holders_E = self.holders_EC.sum(axis=1)
        else:
            holders_E = np.full(self.owner.num_experts, self.owner.num_ep_ranks - self.num_excluded)
        return np.where(holders_E > 1, holders_E, 0)

    def by_ep_rank(self) -> tuple[list[int], list[int]]:
        """Experts that can be copied, EP rank by EP rank, of each those with most rows last; and
        where each EP rank's begin, and the last one's end. (The paper's loop also picks experts
        without a place for a replica, to which nothing happens.)"""
        coldest_first_E = np.argsort(-self.rows_CE.sum(axis=0), kind="stable")[::-1]
        copied = coldest_first_E[self.replicas_E[coldest_first_E] > 0]
        owner = self.owner.owner_E[copied]
        by_ep_rank = np.argsort(owner, kind="stable")
        starts = np.searchsorted(owner[by_ep_rank], np.arange(self.owner.num_ep_ranks + 1))
        return copied[by_ep_rank].tolist(), starts.tolist()

    def rows_with(self, experts: list[int], alone: EpRankRows) -> EpRankRows:
        """Rows by EP rank if these experts are copied; ``alone`` are those without replicas."""
        owner, num_ep_ranks = self.owner.owner_E[experts], self.owner.num_ep_ranks
        stays_C = np.bincount(owner, self.stays_E[experts], num_ep_ranks).astype(np.int64)
        kept_C = self.stays_EC[experts].sum(axis=0)
        return EpRankRows(alone.computed_C + kept_C - stays_C, alone.received_C - stays_C)


ROUNDING = 1e-9  # far more than what seconds lose in floats
LOOKED_AT = 16  # experts that the loop adds before it looks whether more can pay


def _fastest(
    choices: Choices,
    alone: EpRankRows,
    balance: float,
    prices: BlockPrices,
    max_copied: int | None,
) -> tuple[int, ...]:
    """The experts that the loop of Algorithm 1 tries, in order, up to where the step is fastest:
    the first such place. Those at the end that cannot make it faster, whatever they balance, are
    not tried."""
    owner = choices.owner
    computed_C, received = alone.computed_C.copy(), alone.received_C.tolist()
    stays_EC, stays, replicas = (
        choices.stays_EC,
        choices.stays_E.tolist(),
        choices.replicas_E.tolist(),
    )
    by_ep_rank, starts = choices.by_ep_rank()
    ends = starts[1:]  # of those that wait
    # Copies keep rows where they are: as many as before are computed.
    num_rows = int(computed_C.sum())
    spread = balanced_spread(num_rows, owner.num_experts, balance)
    least_computed = -(-num_rows // owner.num_ep_ranks)
    busiest = int(computed_C.argmax())
    most_computed = int(computed_C[busiest])
    experts: list[int] = []
    num_fastest = num_replicas = 0
    fastest_s = step_seconds(prices, max(received), most_computed, 0.0)

    while not most_computed - int(computed_C[computed_C.argmin()]) < spread:
        if ends[busiest] == starts[busiest] or len(experts) == max_copied:
            break
        if len(experts) % LOOKED_AT == LOOKED_AT - 1:
            # Even if no rows travelled, and all EP ranks computed equally many. The model's time
            # does not fall where more is copied; nor where more is computed, as a second of experts
            # hides one of gathers in forward, and two of transfers in backward, where it takes
            # three.
            ideal_s = step_seconds(prices, 0, least_computed, num_replicas / owner.num_ep_ranks)
            if ideal_s > (1 + ROUNDING) * fastest_s:
                break
        ends[busiest] -= 1
        expert = by_ep_rank[ends[busiest]]
        computed_C += stays_EC[expert]
        computed_C[busiest] -= stays[expert]
        received[busiest] -= stays[expert]
        busiest = int(computed_C.argmax())
        most_computed = int(computed_C[busiest])
        experts.append(expert)
        num_replicas += replicas[expert]
        step_s = step_seconds(
            prices, max(received), most_computed, num_replicas / owner.num_ep_ranks
        )
        if step_s < fastest_s:
            fastest_s, num_fastest = step_s, len(experts)
    return tuple(experts[:num_fastest])


def shadow_seconds(prices: BlockPrices, *, most_rows: int, num_shadows: int) -> float:
    """FasterMoE's model of a block."""
    computed_s = (FORWARD + BACKWARD) * prices.row_s * most_rows
    exchanged_s = NUM_EXCHANGES * prices.row_bytes / prices.bytes_per_s * most_rows
    return computed_s + exchanged_s + num_shadows * prices.weight_bytes / prices.copy_bytes_per_s


def shadow_experts(
    owner: Placement, rows_CE: np.ndarray, *, prices: BlockPrices, max_copied: int | None = None
) -> BlockPlan:
    """Copy the hottest experts to all EP ranks, one more as long as that is faster by FasterMoE.

    The expert with the fewest rows is never copied. Among equals the lower index is hotter. The
    plan's seconds are those of Pro-Prophet's model. Arguments as of ``place_experts``.
    """
    rows_CE = whole_rows(owner, rows_CE)
    load_E = rows_CE.sum(axis=0)
    hottest_first_E = np.argsort(-load_E, kind="stable")
    seconds = [
        shadow_seconds(prices, most_rows=rows, num_shadows=shadows)
        for shadows, rows in enumerate(load_E[hottest_first_E].tolist())
    ]
    is_gain = [after < before for before, after in pairwise(seconds)]
    num_shadows = [*is_gain[:max_copied], False].index(False)
    selected = tuple(hottest_first_E[:num_shadows].tolist())
    choices = Choices(owner, rows_CE, num_excluded=0)
    return BlockPlan(choices, selected, ep_rank_rows(owner, owner, rows_CE), prices)


SplitRule = Callable[[int, float], int]
"""How many experts move beside the non-MoE layer: of the experts there are, and of those whose
moves fit into that layer's time (not rounded; infinity where moves take no time)."""


class Split(NamedTuple):
    """Experts that move beside each of two computations."""

    # beside the computation that comes first, in the order in which they move
    first: tuple[int, ...]
    second: tuple[int, ...]  # beside the one after it


def fill_static_first(num_experts: int, num_hidden: float) -> int:
    """As many as the non-MoE layer hides: its time is known beforehand, that of experts is not."""
    return math.floor(min(num_experts, num_hidden))


def by_halves(num_experts: int, num_hidden: float) -> int:
    """Half of them, the odd one too; as the authors' code does."""
    return num_experts - num_experts // 2


SPLITS: Mapping[str, SplitRule] = {"fnec_first": fill_static_first, "half": by_halves}


def split_forward(
    selected: Sequence[int], *, rule: SplitRule, layer_s: float, move_s: float
) -> Split:
    """Trans under the forward of the block before: first its experts, then its non-MoE layer, which
    takes ``layer_s`` (``T_FNEC``); one expert's move takes ``move_s``."""
    num_first = len(selected) - _beside_layer(len(selected), rule, layer_s, move_s)
    return Split(tuple(selected[:num_first]), tuple(selected[num_first:]))


def split_backward(
    selected: Sequence[int], *, rule: SplitRule, layer_s: float, move_s: float
) -> Split:
    """Agg under the backward of the block before: first its non-MoE layer (``T_BNEC``), then its
    experts."""
    num_first = _beside_layer(len(selected), rule, layer_s, move_s)
    return Split(tuple(selected[:num_first]), tuple(selected[num_first:]))


def _beside_layer(num_experts: int, rule: SplitRule, layer_s: float, move_s: float) -> int:
    if not (0 <= layer_s < math.inf and 0 <= move_s < math.inf):
        raise ValueError(
            f"the layer takes {layer_s} s and a move {move_s} s; give finite seconds from 0"
        )
    return rule(num_experts, layer_s / move_s if move_s else math.inf)
