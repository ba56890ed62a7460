# SPDX-License-Identifier: Apache-2.0
"""Seconds of a zebra group's step, by the schedule that it runs. Pure.

Ranks of a side are alike, and so one rank of each stands for all: what they meet on, an all-to-all,
is as long as on the busiest card of the group (spec rule 4). Dispatch and combine have their lanes;
rows between attention ranks, which they both carry where experts were moved, do not slow each other
here. Shape letters: C ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from ds_moe_ext.cost.zebra_work import TwoClasses, all_to_all_s
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.stripes import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERT,
    HEAD,
    JOIN,
    OFFLOADED,
    OFFLOADED_JOIN,
    one_at_a_time,
    striped_step,
)
from ds_moe_ext.schedule.task import GATHER, Op, Schedule, Task

HEAD_BACKWARD = 2.0  # its activations are there still


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Forward of one layer and one micro-batch, in seconds or any other unit of time.

    Attributes:
        attention_s: of all but the experts, on an attention rank.
        expert_s: of what one expert rank computes if nothing moves.
        expert_on_attention_s: of the same rows on an attention rank.
    """

    attention_s: float
    expert_s: float
    expert_on_attention_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a finite time of at least 0")

    @property
    def gather_s(self) -> Fraction:
        """By how much the bubble grows with each layer; below 0 where attention is slower."""
        return Fraction(self.expert_s) - Fraction(self.attention_s)


@dataclass(frozen=True, kw_only=True)
class ZebraShape:
    """Ranks of a zebra group, and how their tokens are cut.

    Attributes:
        attention_ranks: ``M``.
        expert_ranks: ``N``.
        num_stripes: of an attention rank's tokens, ``R``.
    """

    attention_ranks: int
    expert_ranks: int
    num_stripes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def stripe_samples(self, num_samples: int) -> int:
        """Of the longest stripe, when samples are cut as equally as can be.

        Raises:
            ValueError: there are fewer samples than stripes.
        """
        num_stripes = self.attention_ranks * self.num_stripes
        if num_samples < num_stripes:
            raise ValueError(
                f"num_samples is {num_samples}, but {self.attention_ranks} attention ranks with "
                f"{self.num_stripes} stripes each need one for each of {num_stripes} stripes; "
                "give more samples or fewer stripes"
            )
        return -(-num_samples // num_stripes)


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """What a step takes.

    Attributes:
        num_tokens: of the step, of all ranks.
        step_s: seconds.
        attention_busy_s: that an attention rank computes.
        expert_busy_s: that an expert rank computes.
    """

    num_tokens: int
    step_s: float
    attention_busy_s: float
    expert_busy_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def attention_bubble_s(self) -> float:
        """Seconds that an attention rank idles."""
        return self.step_s - self.attention_busy_s

    @property
    def expert_bubble_s(self) -> float:
        return self.step_s - self.expert_busy_s

    @property
    def attention_use(self) -> float:
        """Share of the step that attention ranks compute."""
        return self.attention_busy_s / self.step_s

    @property
    def expert_use(self) -> float:
        return self.expert_busy_s / self.step_s


def stripe_times(ranks: TwoClasses, shape: ZebraShape, num_samples: int) -> LayerTimes:
    """Forward of a layer and a stripe, no expert moved.

    Raises:
        ValueError: as of ``ZebraShape.stripe_samples``.
    """
    tokens = shape.stripe_samples(num_samples) * ranks.model.length
    arriving = tokens * shape.attention_ranks / shape.expert_ranks
    return LayerTimes(
        attention_s=tokens * ranks.new.attention_s,
        expert_s=arriving * ranks.old.expert_s,
        expert_on_attention_s=arriving * ranks.new.expert_s,
    )


def exchange_s(ranks: TwoClasses, shape: ZebraShape, num_samples: int, moved: int) -> float:
    """Dispatch, or combine, of a layer and a stripe; every expert has equally many rows.

    Args:
        ranks: for the model and the link.
        shape: of the group.
        num_samples: of a step.
        moved: experts that each expert rank has lost.
    """
    attention, expert = shape.attention_ranks, shape.expert_ranks
    num_experts = ranks.model.num_experts
    held_C = np.empty(attention + expert)
    held_C[:attention] = moved * expert / attention
    held_C[attention:] = num_experts / expert - moved
    sent_bytes = shape.stripe_samples(num_samples) * ranks.model.length * ranks.model.sent_bytes
    bytes_CC = np.zeros((len(held_C), len(held_C)))
    bytes_CC[:attention] = sent_bytes * held_C / num_experts
    return all_to_all_s(bytes_CC, ranks.link)


def price_step(
    ranks: TwoClasses,
    shape: ZebraShape,
    num_samples: int,
    moved_L: Sequence[int] | None = None,
    *,
    copied_L: Sequence[int] | None = None,
    overlaps: bool = True,
) -> StepPrice:
    """Simulate Theorem 1's order. Stripes are all as long as the longest.

    Args:
        ranks: that the group is made of.
        shape: of the group.
        num_samples: of a step, of all attention ranks.
        moved_L: experts that each expert rank has lost, by layer; None: none anywhere.
        copied_L: copies that each expert rank gets of other expert ranks' experts, by layer; every
            expert has equally many rows, so that none gains by them. None: none anywhere.
        overlaps: both sides work at once; else it is DistEP.

    Raises:
        ValueError: there are fewer samples than stripes.
    """
    moved_L = (0,) * ranks.model.num_layers if moved_L is None else tuple(moved_L)
    offloaded = tuple(layer for layer, moved in enumerate(moved_L) if moved)
    copied_L = (0,) * len(moved_L) if copied_L is None else tuple(copied_L)
    copied = tuple(layer for layer, count in enumerate(copied_L) if count)
    step = _step(ranks.model.num_layers, shape.num_stripes, offloaded, copied, overlaps)
    seconds_of = _task_seconds(ranks, shape, num_samples, moved_L, copied_L)
    timeline = simulate(step, lambda rank, task: seconds_of(task))

    def busy_s(*ops: Op) -> float:
        names = {op.name for op in ops}
        return sum(seconds_of(task) for task in step.tasks if task.op.name in names)

    return StepPrice(
        num_tokens=num_samples * ranks.model.length,
        step_s=timeline.makespan_s,
        attention_busy_s=busy_s(ATTENTION, OFFLOADED, HEAD),
        expert_busy_s=busy_s(EXPERT),
    )


@lru_cache(maxsize=64)
def _step(
    num_layers: int,
    num_stripes: int,
    offloaded: tuple[int, ...],
    copied: tuple[int, ...],
    overlaps: bool,
) -> Schedule:
    step = striped_step(num_layers, num_stripes, offloaded=offloaded, copied=copied)
    return step if overlaps else one_at_a_time(step)


def _task_seconds(
    ranks: TwoClasses,
    shape: ZebraShape,
    num_samples: int,
    moved_L: Sequence[int],
    copied_L: Sequence[int],
) -> Callable[[Task], float]:
    """Seconds of a task, alone; an op is known by its name, whatever its lane."""
    times = stripe_times(ranks, shape, num_samples)
    head_s = shape.stripe_samples(num_samples) * ranks.model.length * ranks.new.head_s
    of_one = shape.expert_ranks / ranks.model.num_experts  # an expert's part of an expert rank's
    gained = of_one * shape.expert_ranks / shape.attention_ranks
    sent_s = {moved: exchange_s(ranks, shape, num_samples, moved) for moved in set(moved_L)}

    expert_bytes = ranks.model.expert_weights * ranks.model.element_bytes
    link = ranks.link

    def layer_seconds(moved: int, copied: int) -> Mapping[str, float]:
        return {
            GATHER.name: copied * expert_bytes / link.bytes_per_s + link.latency_s,
            JOIN.name: 0.0,
            OFFLOADED_JOIN.name: 0.0,
            ATTENTION.name: times.attention_s,
            EXPERT.name: times.expert_s * (1 - moved * of_one),
            OFFLOADED.name: times.expert_on_attention_s * moved * gained,
            DISPATCH.name: sent_s[moved],
            COMBINE.name: sent_s[moved],
        }

    forward_s = [*map(layer_seconds, moved_L, copied_L), {HEAD.name: head_s}]
    sent = dict.fromkeys((DISPATCH.name, COMBINE.name, GATHER.name), 1.0)
    backward = {HEAD.name: HEAD_BACKWARD, **sent}

    def seconds_of(task: Task) -> float:
        name = task.op.name
        longer = backward.get(name, ranks.backward) if task.adjoint_of else 1.0
        return forward_s[task.layer][name] * longer

    return seconds_of
