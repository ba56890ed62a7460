# SPDX-License-Identifier: Apache-2.0
"""The shape of a zebra group: how many ranks of each class, and how many stripes. Pure.

HeterMoE's simulator (section 6.4.1, spec rule 39). For a length of samples the shape with the best
throughput is taken of those whose ranks have memory for the experts; a cluster is then made of as
many such groups as its ranks are enough for. Shape letter: L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_moe_ext.cost.zebra_step import LayerTimes, StepPrice, ZebraShape, price_step, stripe_times
from ds_moe_ext.cost.zebra_work import TwoClasses
from ds_moe_ext.planners.asym_ea import ZebraGroup, assign_experts


@dataclass(frozen=True, kw_only=True)
class PricedShape:
    """A shape that fits, with the experts that serve it best.

    Attributes:
        shape: of the group.
        moved_L: experts that each expert rank loses to attention ranks, by layer.
        price: of its step.
    """

    shape: ZebraShape
    moved_L: tuple[int, ...]
    price: StepPrice


@dataclass(frozen=True)
class RefusedShape:
    """A shape that cannot be.

    Attributes:
        shape: of the group.
        why: the rule and the remedy.
    """

    shape: ZebraShape
    why: str


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Ranks that a cluster has.

    Attributes:
        new_ranks: of the class that attention is fast on.
        old_ranks: of the other.
    """

    new_ranks: int
    old_ranks: int

    def num_groups(self, shape: ZebraShape) -> int:
        """Groups of a shape that there are ranks for."""
        return min(self.new_ranks // shape.attention_ranks, self.old_ranks // shape.expert_ranks)


def price_shape(
    ranks: TwoClasses, shape: ZebraShape, samples_per_rank: int, *, moves: bool = True
) -> PricedShape:
    """A shape with its experts as Algorithm 1 moves them, or all at home if that is faster.

    Algorithm 1 supposes many stripes, and with few what it moves may not pay (spec G8).

    Args:
        ranks: both classes.
        shape: of the group.
        samples_per_rank: of a step, on each attention rank; the group's by their number.
        moves: experts may move to attention ranks; where neither number of ranks divides the other
            they cannot anyway (spec rule 28).

    Raises:
        ValueError: samples are too few, expert ranks cannot hold equally many experts, or the
            experts do not fit.
    """
    num_samples = samples_per_rank * shape.attention_ranks
    times = stripe_times(ranks, shape, num_samples)
    assignments = sorted(_assignments(ranks, shape, times, moves=moves))
    priced = [
        PricedShape(
            shape=shape, moved_L=moved_L, price=price_step(ranks, shape, num_samples, moved_L)
        )
        for moved_L in assignments
    ]
    return min(priced, key=lambda each: each.price.step_s)


def price_shapes(
    ranks: TwoClasses, shapes: Iterable[ZebraShape], samples_per_rank: int, *, moves: bool = True
) -> list[PricedShape | RefusedShape]:
    """Each shape priced, or why it cannot be."""
    return [_priced_or_refused(ranks, shape, samples_per_rank, moves=moves) for shape in shapes]


def best_shape(
    priced: Sequence[PricedShape | RefusedShape], stock: Stock | None = None
) -> PricedShape | None:
    """The best throughput of as many groups as there are ranks for; None if no shape fits.

    Args:
        priced: shapes of one group.
        stock: ranks of the cluster; None: there is one group of each shape.
    """
    fitting = [each for each in priced if isinstance(each, PricedShape)]
    groups = [1 if stock is None else stock.num_groups(each.shape) for each in fitting]
    rates = [each.price.tokens_per_s * count for each, count in zip(fitting, groups)]
    best = max(rates, default=0.0)
    return fitting[rates.index(best)] if best else None


def _priced_or_refused(
    ranks: TwoClasses, shape: ZebraShape, samples_per_rank: int, *, moves: bool
) -> PricedShape | RefusedShape:
    try:
        return price_shape(ranks, shape, samples_per_rank, moves=moves)
    except ValueError as error:
        return RefusedShape(shape, str(error))


def _assignments(
    ranks: TwoClasses, shape: ZebraShape, times: LayerTimes, *, moves: bool
) -> set[tuple[int, ...]]:
    """Algorithm 1's, and all experts at home, of those that fit."""
    num_layers, num_experts = ranks.model.num_layers, ranks.model.num_experts
    if num_experts % shape.expert_ranks:
        raise ValueError(
            f"num_experts is {num_experts}, which {shape.expert_ranks} expert ranks do not divide; "
            "all must hold equally many: change one of them"
        )
    homeless = _homeless(ranks, shape)
    at_home = set() if homeless else {(0,) * num_layers}
    if moves and _is_even(shape):
        group = ZebraGroup(
            num_experts=num_experts,
            num_layers=num_layers,
            attention_ranks=shape.attention_ranks,
            expert_ranks=shape.expert_ranks,
        )
        plan = assign_experts(group, times, min_moved=homeless, max_moved=ranks.new.room)
        return at_home | {plan.moved_L}
    if homeless:
        raise ValueError(
            f"{shape.expert_ranks} expert ranks with room for {ranks.old.room} experts each lack "
            f"room for {homeless} of {num_layers * num_experts}, and none may move to "
            f"{shape.attention_ranks} attention ranks; give more expert ranks or memory, or "
            "numbers of ranks of which one divides the other"
        )
    return at_home


def _homeless(ranks: TwoClasses, shape: ZebraShape) -> int:
    """Experts, of all layers, that expert ranks have no memory for."""
    if ranks.old.room is None:
        return 0
    held = shape.expert_ranks * ranks.old.room
    return max(0, ranks.model.num_layers * ranks.model.num_experts - held)


def _is_even(shape: ZebraShape) -> bool:
    """Whether a chunk of experts can leave and reach all ranks alike (spec rule 28)."""
    return not (
        shape.attention_ranks % shape.expert_ranks and shape.expert_ranks % shape.attention_ranks
    )
