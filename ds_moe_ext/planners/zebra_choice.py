# SPDX-License-Identifier: Apache-2.0
"""From what was measured of a run to the experts that move: the end of HeterMoE's profiler. Pure.

Spec 2.8, and the assignment of ``planners.asym_ea``. Seconds are of forward and backward together,
where the paper takes those of forward and backward as proportional (rule 32): both sides then are
even over a whole step. Shape letter: L layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_moe_ext.cost.zebra_step import LayerTimes, ZebraShape, price_step
from ds_moe_ext.cost.zebra_work import MoeModel, RankClass, TwoClasses
from ds_moe_ext.hardware import Link
from ds_moe_ext.planners.asym_ea import Squeeze, ZebraGroup, assign_experts, squeeze_seconds

USABLE = 0.9  # share of free memory; the rest is for buffers of links, and lost in fragments
BACKWARD = 2.0  # how the simulator divides what was measured together
NO_TRAVEL = Link(bytes_per_s=1e30)


@dataclass(frozen=True)
class Timed:
    """Median and standard deviation of repetitions, in seconds."""

    median_s: float
    std_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timed:
        return cls(statistics.median(seconds), statistics.pstdev(seconds))


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a trained weight, as the host optimizes it.

    Attributes:
        weight: itself, and so every rank has it.
        gradient: of its gradient.
        optimizer: of the optimizer's state, with weights in float32 beside those of 16 bits.
        zero_stage: DeepSpeed's: from 1 replicas divide the state, at 2 gradients too.
    """

    weight: int
    gradient: int
    optimizer: int
    zero_stage: int

    def of(self, num_trained: int, num_frozen: int, num_replicas: int) -> float:
        """Bytes of a rank's weights, of which other ranks have replicas."""
        gradient = self.gradient / (num_replicas if self.zero_stage > 1 else 1)
        optimizer = self.optimizer / (num_replicas if self.zero_stage > 0 else 1)
        return num_trained * (self.weight + gradient + optimizer) + num_frozen * self.weight


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        expert_bytes: weights, gradients and optimizer state of one expert.
        rows_bytes: kept for backward of the rows that one expert rank computes in one layer of one
            stripe, however many experts they are of (rule 38).
        dense_bytes: all that an attention rank needs in a step but for experts.
        expert_free_bytes: of the expert rank that has least.
        attention_free_bytes: of the attention rank that has least.
    """

    expert_bytes: float
    rows_bytes: int
    dense_bytes: float
    expert_free_bytes: int
    attention_free_bytes: int


@dataclass(frozen=True)
class MovedBounds:
    """How many experts, of all layers, may move.

    Attributes:
        least: for which the expert ranks together have no memory, the paper's ``n_min``.
        most: for which each attention rank has, its ``n_max``.
    """

    least: int
    most: int


def moved_bounds(group: ZebraGroup, memory: Memory, num_stripes: int) -> MovedBounds:
    """What memory allows (rule 37).

    An expert rank keeps the rows of all layers and stripes until backward. An expert that an
    attention rank gains brings its rows with it, ``N/n`` of an expert rank's.

    Args:
        group: ranks and experts.
        memory: of the ranks.
        num_stripes: of an attention rank, ``R``.
    """
    rows_bytes = group.num_layers * num_stripes * memory.rows_bytes
    held = _that_fit(memory.expert_free_bytes, rows_bytes, memory.expert_bytes)
    gained_rows_bytes = num_stripes * memory.rows_bytes * group.expert_ranks / group.num_experts
    return MovedBounds(
        least=max(0, group.num_layers * group.num_experts - group.expert_ranks * held),
        most=_that_fit(
            memory.attention_free_bytes,
            memory.dense_bytes,
            memory.expert_bytes + gained_rows_bytes,
        ),
    )


def _that_fit(free_bytes: int, taken_bytes: float, one_bytes: float) -> int:
    """Experts that fit beside what is taken."""
    return max(0, int((USABLE * free_bytes - taken_bytes) // one_bytes))


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """What a step is cut into.

    Attributes:
        num_stripes: of an attention rank, ``R``.
        num_tokens: of a stripe, on one attention rank.
        head_s: of what is not in layers: embeddings, head and loss, of one stripe.
        top_k: rows of a token.
        row_bytes: of each on its way.
        link: of a rank's network card; None: rows take no time.
    """

    num_stripes: int
    num_tokens: int
    head_s: float
    top_k: int
    row_bytes: float
    link: Link | None = None


@dataclass(frozen=True)
class Choice:
    """Experts that move, and what that is good for by the simulator.

    Attributes:
        moved_L: experts that each expert rank leaves, layer by layer.
        proposed_L: by Algorithm 1; others than those that move where these make no step faster.
        bounds: of memory.
        before_s: seconds of a step if no expert moved.
        after_s: seconds by the proposal.
    """

    moved_L: tuple[int, ...]
    proposed_L: tuple[int, ...]
    bounds: MovedBounds
    before_s: float
    after_s: float


def choose_moved(
    group: ZebraGroup,
    times: LayerTimes,
    stripes: Stripes,
    memory: Memory,
    squeeze: Squeeze = squeeze_seconds,
) -> Choice:
    """Algorithm 1 within the bounds of memory, if it pays.

    It takes micro-batches to be many enough to hide what travels. Where they are few, experts on
    attention ranks can make a step longer (spec G8): then none move, unless memory wants it.

    Args:
        group: ranks and experts; all layers are alike.
        times: of one layer and stripe, forward and backward.
        stripes: of a step.
        memory: of the ranks.
        squeeze: one of ``asym_ea.VARIANTS``.

    Raises:
        ValueError: the model does not fit.
    """
    bounds = moved_bounds(group, memory, stripes.num_stripes)
    plan = assign_experts(
        group, times, min_moved=bounds.least, max_moved=bounds.most, squeeze=squeeze
    )
    none_L = (0,) * group.num_layers
    before_s, after_s = (step_seconds(group, times, stripes, o_L) for o_L in (none_L, plan.moved_L))
    pays = bounds.least > 0 or after_s < before_s
    return Choice(plan.moved_L if pays else none_L, plan.moved_L, bounds, before_s, after_s)


def step_seconds(
    group: ZebraGroup, times: LayerTimes, stripes: Stripes, moved_L: Sequence[int]
) -> float:
    """A step by the simulator, which takes embeddings for a part of the head.

    Args:
        group: ranks and experts.
        times: of one layer and stripe, forward and backward.
        stripes: of a step.
        moved_L: experts that each expert rank has lost.
    """
    attention, expert = group.attention_ranks, group.expert_ranks
    share = 1 / (1 + BACKWARD) / stripes.num_tokens  # of forward, and of one token
    arriving = attention / expert
    ranks = TwoClasses(
        model=MoeModel(
            num_layers=group.num_layers,
            num_experts=group.num_experts,
            top_k=stripes.top_k,
            width=1,  # what is computed is given in seconds, and rows in bytes
            expert_width=1,
            length=stripes.num_tokens,
            element_bytes=stripes.row_bytes,
        ),
        new=RankClass(
            attention_s=times.attention_s * share,
            expert_s=times.expert_on_attention_s * share / arriving,
            head_s=stripes.head_s * share,
        ),
        old=RankClass(attention_s=0.0, expert_s=times.expert_s * share / arriving),
        link=stripes.link or NO_TRAVEL,
        backward=BACKWARD,
    )
    shape = ZebraShape(
        attention_ranks=attention, expert_ranks=expert, num_stripes=stripes.num_stripes
    )
    num_stripes = attention * stripes.num_stripes
    return price_step(ranks, shape, num_samples=num_stripes, moved_L=moved_L).step_s
