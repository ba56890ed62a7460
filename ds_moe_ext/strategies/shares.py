# SPDX-License-Identifier: Apache-2.0
"""What strategies that copy experts have in common: above all how replicas divide rows.

``Copying`` has their JSON keys; ``shared_by_time`` finds the share under which a layer takes least
time and how many replicas that needs, ``swapped`` other replicas, ``saves`` whether any pay, and
``repaired`` adds replicas once rows are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import RowLevels, WholePrices, is_compiled
from ds_moe_ext.core.share import SWEEPS, LevelShare, Rule
from ds_moe_ext.planning.priced_plans import (
    TOLERANCE,
    Repair,
    cover_nodes,
    fewest,
    is_even,
    swap_replicas,
)
from ds_moe_ext.planning.prices import RowPrices
from ds_moe_ext.planning.strategy import CostGroup, Destination, Plan, Strategy
from ds_moe_ext.strict import all_at_least, one_of

PRICED, PLANNED, PAPER = "priced", "planned", "paper"  # shares, by their JSON names
SHARES = {", paper share": PAPER, ", priced share": PRICED}
"""Behind the name of a strategy: how replicas divide rows, whatever its block says."""
SWEEPS_OF = {PLANNED: 0, PRICED: SWEEPS}
REPAIR = 1  # replicas of a rank, where nobody says
STEADY = 0.05
"""Drift below which replicas are left out that the predicted rows can do without: where loads move
faster, those come in for rows that nobody predicted."""
WORTH_S = 1e-4
"""What dividing anew has to save: it takes about so long between gate and dispatch."""


@dataclass(frozen=True, kw_only=True)
class Copying(Strategy):
    """Keys of all strategies that copy experts."""

    # how replicas divide rows: "priced", so that the layer takes least time, by the rows as they
    # are, and replicas are chosen by that, too (docs/planners.md); "planned", in the parts that
    # are best for the rows that are predicted; "paper", the paper's rule, which has a name of its
    # own
    share: str = PRICED
    # replicas of a layer that a rank gets at most once the rows of a pass are known, beside those
    # of the forecast, where these are not enough and that pays; null: 1 where rows are priced
    repair: int | None = None
    # a rank adds gradients of replicas in 32 bits where they are narrower; they travel and come to
    # the owner as they are
    sum_replicas_in_float32: bool = False

    def _check_share(self, where: str, papers: str) -> None:
        """Refuse a share that is neither known nor the paper's by its own name."""
        one_of(f"{where}.share", self.share, (*SWEEPS_OF, PAPER, papers))
        all_at_least(where, self, repair=0)

    @property
    def is_papers(self) -> bool:
        """Whether replicas divide rows by the paper's rule."""
        return self.share not in SWEEPS_OF

    @property
    def by_share(self) -> Mapping[str, Strategy]:
        return {name: replace(self, share=share) for name, share in SHARES.items()}

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Strategy:
        """Compiles what divides rows as a run starts, and not in the step that needs it first; a
        warning says where nothing can be compiled."""
        if not self.is_papers:
            is_compiled()
        return self

    @property
    def sums_replicas_in_float32(self) -> bool:
        return self.sum_replicas_in_float32

    def repairs(self, usual: int = REPAIR) -> int:
        """Replicas of a rank that are left to be added once rows are known; none where rows are not
        priced."""
        return (usual if self.repair is None else self.repair) if self.share == PRICED else 0

    def idle_repair(self, where: str) -> tuple[str, ...]:
        """That ``repair`` was asked for where no rows are priced, for a person."""
        if not self.repair or self.share == PRICED:
            return ()
        return (
            f"{where}.repair is {self.repair}, but replicas can be added after the gate only "
            f'with the priced share; set {where}.share to "{PRICED}", or leave repair out',
        )


def _row_prices(cost_group: CostGroup, num_ep_ranks: int) -> RowPrices:
    """Of a cost group's layers; EP ranks may be unlike."""
    prices = RowPrices.of(cost_group.prices, num_ep_ranks)
    return replace(prices, row_s_C=np.array(cost_group.row_s_C)) if cost_group.row_s_C else prices


def levels_by(cost_group: CostGroup, node_C: np.ndarray) -> Callable[[Placement], RowLevels]:
    """What divides rows of a cost group's layers under a target, by what they cost."""
    each = _row_prices(cost_group, len(node_C))
    whole = WholePrices.of(
        each.row_s_C, each.local_row_s, each.cross_row_s, cards=each.cards, worth_s=WORTH_S
    )
    return partial(RowLevels, node_C=node_C, prices=whole)


def rule_seconds(
    rule: Rule, rows_CE: np.ndarray, node_C: np.ndarray, cost_group: CostGroup
) -> float:
    """Seconds of a layer whose rows, int64 ``[C, E]``, go by a rule."""
    sent_CC = rule.of_rows(rows_CE).rows_between(rows_CE[:, None])[0]
    return _row_prices(cost_group, len(node_C)).seconds(sent_CC, node_C)


def shared_by_time(
    targets: Iterable[Placement],
    rows_CE: np.ndarray,
    node_C: np.ndarray,
    cost_group: CostGroup,
    name: str,
    *,
    most_s: float = math.inf,
) -> LevelShare:
    """The share under which a layer takes least time, and which target it is of: the one with
    fewest replicas that is hardly slower than the widest."""
    levels_of = levels_by(cost_group, node_C)
    return fewest(targets, levels_of, rows_CE, sweeps=SWEEPS_OF[name], most_s=most_s)


def swapped(
    owner: Placement,
    share: LevelShare,
    rows_CE: np.ndarray,
    cost_group: CostGroup,
    *,
    halved: Callable[[], Placement],
    most_replicas: int,
    most_experts: int,
) -> LevelShare:
    """The share of other replicas than a planner chose, where that is better on the predicted rows.

    ``halved`` gives the planner's target with half as many replicas in an EP rank: where there
    are several nodes, the other half may cover these. At most m replicas in an EP rank, of t
    experts.
    """
    node_C = share.levels.node_C
    levels_of = levels_by(cost_group, node_C)
    most = {"most_replicas": most_replicas, "most_experts": most_experts}
    spans_nodes = share.levels.prices.cross and np.ptp(node_C)
    if spans_nodes and not is_even(share.levels, share.plan):
        covering = cover_nodes(owner, halved(), rows_CE, node_C, **most)
        covers = LevelShare.planned(levels_of(covering), rows_CE, sweeps=share.sweeps)
        if covers.plan.price < (1 - TOLERANCE) * share.plan.price:
            share = covers
    return swap_replicas(owner, share, rows_CE, levels_of, most_experts=most_experts)


def saves(share: LevelShare, owner: Placement, rows_CE: np.ndarray, *, or_s: float) -> bool:
    """Whether replicas save more than next to nothing on the rows that are predicted; ``or_s`` are
    seconds by another share, which counts where it takes less."""
    least_s = min(share.planned_s, or_s)
    return share.alone(owner, rows_CE).planned_s > (1 + TOLERANCE) * least_s


def repaired(plan: Plan, share: LevelShare, cost_group: CostGroup, num_slots: int) -> Plan:
    """The plan, to which replicas are added once rows are known, at most so many to an EP rank,
    where the forecast failed and that pays. Only where it has been measured what replicas cost."""
    if num_slots <= 0 or not cost_group.expert_bytes:
        return plan
    levels, copy_s = (
        share.levels,
        plan.added_transfers * (cost_group.copy_latency_s + cost_group.copied_s),
    )
    repair = Repair(
        owner=plan.owner,
        share=share,
        levels_of=levels_by(cost_group, levels.node_C),
        copy_price=round(copy_s / levels.prices.unit_s),
        num_slots=num_slots,
    )
    return replace(plan, revise=partial(_destination, repair))


def _destination(repair: Repair, rows_CE: np.ndarray) -> Destination:
    """A function of the module, since plans are pickled."""
    return Destination(*repair(rows_CE))
