# SPDX-License-Identifier: Apache-2.0
"""What zebra is compared with: expert parallelism of all ranks or of each class, and DistEP. Pure.

HeterMoE, section 6.1 (spec rule 40). Pipelines of both classes: ``hetermoe_pipelines``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ds_moe_ext.planning.zebra_costs import (
    HEAD_BACKWARD,
    RankClass,
    StepPrice,
    TwoClasses,
    ZebraShape,
    all_to_all_s,
    exchange_s,
    price_step,
    stripe_times,
)
from ds_moe_ext.schedule.orders import (
    PIPELINES,
    RETURNED,
    ROUTE,
    WEIGHTS,
    X,
    combine,
    dispatch,
    expert,
)
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.task import (
    ATTENTION,
    EXPERT,
    INTER,
    ChunkRange,
    Schedule,
    Task,
    Value,
    chunk_ranges,
)

DEGREES = (1, 2, 4)  # chunks of a layer, of which the best is taken (section 6.1)


@dataclass(frozen=True, kw_only=True)
class EpGroup:
    """Ranks that run expert parallelism, each with as many tokens and rows as any other.

    Attributes:
        new_ranks: their number.
        old_ranks: their number.
        repeats_exchange: backward begins with forward again, all-to-alls among it: a layer is
            checkpointed as a whole. Else only computing is repeated.
    """

    new_ranks: int
    old_ranks: int
    repeats_exchange: bool = False

    def __post_init__(self) -> None:
        if min(self.new_ranks, self.old_ranks) < 0 or self.num_ranks < 1:
            raise ValueError(
                f"new_ranks is {self.new_ranks} and old_ranks {self.old_ranks}; give one rank at "
                "least"
            )

    @property
    def num_ranks(self) -> int:
        return self.new_ranks + self.old_ranks

    def classes(self, ranks: TwoClasses) -> tuple[RankClass, ...]:
        """Those that it has ranks of."""
        both = ((ranks.new, self.new_ranks), (ranks.old, self.old_ranks))
        return tuple(of for of, count in both if count)


def ep_tokens_per_s(
    ranks: TwoClasses,
    group: EpGroup,
    tokens_per_rank: float,
    *,
    degrees: Sequence[int] = DEGREES,
) -> float:
    """Expert parallelism, the all-to-alls in chunks beside the experts (Tutel's order).

    Layers are equal, and all ranks meet at the end of each: a step is that of one layer as often.

    Args:
        ranks: both classes.
        group: how many of each.
        tokens_per_rank: of a step.
        degrees: numbers of chunks to choose the best from.
    """
    size = group.num_ranks
    sent_bytes = tokens_per_rank * ranks.model.sent_bytes / size
    times = [
        (tokens_per_rank * of.attention_s, tokens_per_rank * of.expert_s)
        for of in group.classes(ranks)
    ]
    layer_s = min(
        _layer_s(
            times,
            all_to_all_s(np.full((size, size), sent_bytes / degree), ranks.link),
            degree,
            backward=ranks.backward,
            repeated=1 if group.repeats_exchange else 0,
        )
        for degree in degrees
    )
    head_s = tokens_per_rank * max(of.head_s for of in group.classes(ranks))
    step_s = ranks.model.num_layers * layer_s + (1 + HEAD_BACKWARD) * head_s
    return group.num_ranks * tokens_per_rank / step_s


def ep_ideal_tokens_per_s(
    ranks: TwoClasses,
    group: EpGroup,
    tokens_per_rank: float,
    *,
    degrees: Sequence[int] = DEGREES,
) -> float:
    """EP (Ideal): each class by itself, the two throughputs added."""
    alone = (
        EpGroup(new_ranks=group.new_ranks, old_ranks=0, repeats_exchange=group.repeats_exchange),
        EpGroup(new_ranks=0, old_ranks=group.old_ranks, repeats_exchange=group.repeats_exchange),
    )
    return sum(ep_tokens_per_s(ranks, each, tokens_per_rank, degrees=degrees) for each in alone)


def price_dist_ep(
    ranks: TwoClasses,
    *,
    attention_ranks: int,
    expert_ranks: int,
    num_samples: int,
    degrees: Sequence[int] = DEGREES,
    loads_LN: Sequence[Sequence[float]] | None = None,
) -> StepPrice:
    """DistEP: the two sides take turns, one stripe, no expert moved. It is built on the same
    DeepSpeed MoE as EP, all-to-alls in chunks beside the experts (section 6.1).

    Args:
        ranks: both classes.
        attention_ranks: their number.
        expert_ranks: their number.
        num_samples: of a step, of all attention ranks.
        degrees: numbers of chunks to choose the best from.
        loads_LN: of each layer, rows of each expert rank over their mean; None: equal.
    """
    shape = ZebraShape(attention_ranks=attention_ranks, expert_ranks=expert_ranks, num_stripes=1)
    price = price_step(ranks, shape, num_samples, loads_LN=loads_LN, overlaps=False)
    times = stripe_times(ranks, shape, num_samples)

    def layer_s(degree: int) -> float:
        smaller = replace(ranks.model, element_bytes=ranks.model.element_bytes / degree)
        sent_s = exchange_s(replace(ranks, model=smaller), shape, num_samples, 0)
        both = [(times.attention_s, times.expert_s)]
        return _layer_s(both, sent_s, degree, backward=ranks.backward, repeated=0)

    gained_s = layer_s(1) - min(layer_s(degree) for degree in degrees)
    return replace(price, step_s=price.step_s - ranks.model.num_layers * gained_s)


def _layer_s(
    times: Sequence[tuple[float, float]],
    sent_s: float,
    degree: int,
    *,
    backward: float,
    repeated: int,
) -> float:
    """Forward and backward of one layer, in so many chunks.

    Args:
        times: seconds of attention and of experts, forward, of each class that computes.
        sent_s: of an all-to-all of one chunk.
        degree: number of chunks.
        backward: how many times as long computing takes there.
        repeated: passes of forward that backward begins with, all-to-alls among them.
    """
    forward_pass, backward_pass = _layer(degree)

    def seconds_of(rank: int, task: Task) -> float:
        if task.stream == INTER:
            return sent_s
        attention_s, expert_s = times[rank]
        computes_s = expert_s / degree if task.op == EXPERT else attention_s
        return computes_s * (backward - repeated if task.adjoint_of else 1)

    def makespan_s(schedule: Schedule) -> float:
        return simulate(
            schedule,
            seconds_of,
            num_ranks=len(times),
            peers_of=lambda rank, task: range(len(times)) if task.stream == INTER else (rank,),
        ).makespan_s

    return (1 + repeated) * makespan_s(forward_pass) + makespan_s(backward_pass)


@cache
def _layer(degree: int) -> tuple[Schedule, Schedule]:
    """Attention and the experts behind it, forward and backward."""
    whole = ChunkRange(0, degree)
    attends = Task(ATTENTION, 0, whole, (), (Value(X, 0, whole), Value(ROUTE, 0, whole)))
    chunks = chunk_ranges(degree, degree)
    routed = [
        task(0, chunk_range) for task in (dispatch, expert, combine) for chunk_range in chunks
    ]
    returned = tuple(Value(RETURNED, 0, chunk_range) for chunk_range in chunks)
    forward = Schedule((attends, *routed), (Value(WEIGHTS, 0),), returned)
    return forward, PIPELINES["tutel"].arranged(forward.reversed())
