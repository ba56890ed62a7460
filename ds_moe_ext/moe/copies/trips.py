# SPDX-License-Identifier: Apache-2.0
"""What this rank does so that a plan's copies come to be, and their gradients come home.

Worked out from plans alone, so that it can be done beforehand. Shape letters: C cells, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.copy_split import Split
from ds_moe_ext.strategy import Plan
from ds_moe_ext.transfer import SMALL, Cargo, Move, Part, part_of, star_of


@dataclass(frozen=True, eq=False)
class Place:
    """Where this rank stands among those that hold a layer's experts.

    Attributes:
        layer: number of the layer.
        cell: this rank's cell.
        node_C: node of each cell.
        group: the cells, in a communicator that only the parameter lane uses.
        in_float32: sums of gradients on their way home are kept so; the same in all cells.
        broadcasts: what goes to all cells travels by broadcasts.
        cargo: how large an expert is.
    """

    layer: int
    cell: int
    node_C: np.ndarray
    group: dist.ProcessGroup
    in_float32: bool = False
    broadcasts: bool = False
    cargo: Cargo = SMALL

    @property
    def has_stars(self) -> bool:
        """Whether what goes to all cells needs no trees. A star brings home all gradients at once,
        so that their sums could not be kept in 32 bits."""
        return self.broadcasts and not self.in_float32

    def part(self, held: Placement, wanted: Placement) -> Part:
        """What this cell does for the others to get their copies."""
        if self.has_stars:
            star = star_of(held, wanted, self.node_C, self.cell)
            if star is not None:
                return star
        return part_of(held, wanted, self.node_C, self.cell, self.cargo)

    def experts(self, placement: Placement) -> Sequence[int]:
        """Experts that a placement has in this cell, by slot."""
        experts: list[int] = placement.experts_of(self.cell).tolist()
        return experts


class Piece(NamedTuple):
    """Some of the transfers of a plan.

    Attributes:
        part: what this cell does of them.
        experts: whose copies these are.
        number: of the piece, for traces.
    """

    part: Part
    experts: Collection[int]
    number: int = 0


@dataclass(frozen=True, eq=False)
class Trips:
    """The transfers of one plan.

    Attributes:
        place: where this rank stands.
        plan: whose they are.
        whole: of all copies at once.
        gathers: the pieces in which they travel.
        reductions: the pieces in which their gradients do.
        slots: of the experts at home here.
        planned: experts that compute here, by slot.
        copied: those of them that are at home elsewhere.
        are_behind: the slots of copies come behind those of the experts at home.
    """

    place: Place
    plan: Plan
    whole: Part
    gathers: Sequence[Piece]
    reductions: Sequence[Piece]
    slots: Mapping[int, int]
    planned: Sequence[int]
    copied: Sequence[int]
    are_behind: bool

    @classmethod
    def of(cls, place: Place, plan: Plan, before: Trips | None = None) -> Trips:
        """Work them out; the costly part of taking a plan.

        Args:
            place: where this rank stands.
            plan: whose they are.
            before: of an earlier plan.
        """
        home, target = plan.home, plan.target
        whole = place.part(home, target)
        own = before.experts_here(home) if before is not None else place.experts(home)
        slots = {expert: slot for slot, expert in enumerate(own)}
        planned = place.experts(target)
        copied = [expert for expert in planned if expert not in slots]
        here = slots, planned, copied, [*planned] == [*own, *copied]
        if plan.carried is None:
            whole.prepare()
            all_ = [Piece(whole, range(home.num_experts))]
            return cls(place, plan, whole, all_, all_, *here)
        moved = frozenset(np.flatnonzero((target.holds_EC > home.holds_EC).any(axis=1)).tolist())
        parts = {moved: whole}  # splits have often the same pieces, or one with all
        gathers, reductions = (_pieces(place, plan, split, parts, whole) for split in plan.carried)
        for part in parts.values():
            part.prepare()
        return cls(place, plan, whole, gathers, reductions, *here)

    def experts_here(self, placement: Placement) -> Sequence[int]:
        """Experts that a placement has here, by slot."""
        if placement is self.plan.target:
            return self.planned
        return [*self.slots] if placement is self.plan.home else self.place.experts(placement)

    def serve(self, plan: Plan) -> bool:
        """Whether another plan asks for the same."""
        mine = self.plan
        return plan.carried == mine.carried and all(
            one.is_like(other)
            for one, other in ((plan.home, mine.home), (plan.target, mine.target))
        )

    def part_to(self, target: Placement) -> Part:
        """For copies to come from the homes, also where a target has more than the plan's."""
        if target is self.plan.target:
            return self.whole
        return self.place.part(self.plan.home, target)

    def pieces_home(self, target: Placement) -> Sequence[Piece]:
        """In which gradients of the copies go home."""
        if target is self.plan.target:
            return self.reductions
        return [Piece(self.part_to(target), range(target.num_experts))]


def _pieces(
    place: Place, plan: Plan, split: Split, parts: dict[frozenset[int], Part], whole: Part
) -> list[Piece]:
    """Args: parts: by the experts whose copies they bring; it gains those that it lacks. whole: of
    all copies."""
    home, target = plan.home, plan.target
    pieces = []
    for number, split_experts in enumerate(split):
        experts = frozenset(split_experts)
        if experts not in parts and place.has_stars and whole.everywhere:
            parts[experts] = _of_star(whole, experts)
        elif experts not in parts:
            some_EC = np.zeros_like(target.holds_EC)
            some_EC[list(experts)] = target.holds_EC[list(experts)]
            parts[experts] = place.part(home, home.with_copies(some_EC))
        pieces.append(Piece(parts[experts], experts, number))
    return pieces


def _of_star(star: Part, experts: frozenset[int]) -> Part:
    """What ``star_of`` says of some of its experts."""

    def of_these(moves: Sequence[Move]) -> tuple[Move, ...]:
        return tuple([move for move in moves if move.expert in experts])

    rounds = (
        replace(each, sends=of_these(each.sends), receives=of_these(each.receives))
        for each in star.rounds
    )
    everywhere = of_these(star.everywhere)
    return replace(star, rounds=tuple(rounds) if everywhere else (), everywhere=everywhere)
