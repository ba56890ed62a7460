# SPDX-License-Identifier: Apache-2.0
"""Seconds of a zebra group's step, by the schedule that it runs: HeterMoE's simulator. Pure.

``TwoClasses`` has a model, ranks of two classes and the cards between them; ``price_step`` runs the
step of a ``ZebraShape`` of them (section 6.4.1, spec 2.9). Work is counted a token and layer, in
forward, so that seconds of any cut of the tokens follow by multiplication. Shape letter: C ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from ds_moe_ext.core.hardware import Device, Hardware, Link
from ds_moe_ext.planning.prices import met_share
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

MOST_STRIPES = 2**9  # times layers: of one simulated step
EXPERT_PRODUCTS = 3  # matrix products of an expert: Mixtral's


@dataclass(frozen=True, kw_only=True)
class MoeModel:
    """A stack of equal layers, all of them with experts."""

    num_layers: int  # their number
    num_experts: int  # of a layer
    top_k: int  # experts of a token
    width: int  # of the model
    expert_width: int  # of an expert's hidden layer
    length: int  # tokens of a sample
    kv_share: float = 1.0  # key and value heads, as a share of the query heads
    element_bytes: float = 2  # of a number that travels

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k is {self.top_k}, but a layer has {self.num_experts} experts; a token takes "
                "each once at most: lower top_k"
            )

    @property
    def attention_work(self) -> float:
        """Multiply-adds of a token: four matrices, and scores and sums over what came before it."""
        matrices = (2 + 2 * self.kv_share) * self.width**2
        return matrices + self.length * self.width

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return EXPERT_PRODUCTS * self.width * self.expert_width

    @property
    def expert_work(self) -> float:
        """Multiply-adds of a token, in all its experts."""
        return self.top_k * self.expert_weights

    @property
    def sent_bytes(self) -> float:
        """Of a token's rows, one way."""
        return self.top_k * self.width * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """Ranks with one kind of device, by what a token costs them in forward."""

    attention_s: float  # seconds of one layer but for its experts
    expert_s: float  # seconds of its experts in one layer
    # seconds of what follows the last layer; it is not computed again for backward
    head_s: float = 0.0
    room: int | None = None  # experts, of all layers, that a rank has memory for; None: any number

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and at least 0")

    @classmethod
    def of(
        cls,
        device: Device,
        model: MoeModel,
        *,
        number_type: str,
        attention_efficiency: float,
        expert_efficiency: float,
        room: int | None = None,
    ) -> RankClass:
        """What a device's matrix products make of the model's work.

        Args:
            device: of a hardware file.
            model: whose work it is.
            number_type: a name of ``hardware.Flops``.
            attention_efficiency: the share of the device's rate that attention reaches.
            expert_efficiency: and experts.
            room: as the attribute.
        """
        product = device.product(number_type)
        if product is None:
            raise ValueError(
                f"device {device.name!r} has no rate for number_type {number_type!r}; add it to "
                "flops_per_s of its file, or give attention_s and expert_s"
            )
        for name, share in (("attention", attention_efficiency), ("expert", expert_efficiency)):
            if not 0 < share < math.inf:
                raise ValueError(f"{name}_efficiency is {share}; it must be above 0")
        rate = product.multiply_adds_per_s
        return cls(
            attention_s=model.attention_work / (rate * attention_efficiency),
            expert_s=model.expert_work / (rate * expert_efficiency),
            room=room,
        )


@dataclass(frozen=True, kw_only=True)
class TwoClasses:
    """What a shape of a zebra group, or a rival, is priced on."""

    model: MoeModel  # that is trained
    new: RankClass  # ranks that attention is fast on
    old: RankClass  # the others
    link: Link  # of one rank's network card, one direction
    # how many times as long as forward computing takes in backward: 3 where activations are
    # computed again, else 2
    backward: float = 3.0
    # ranks, as those of a node, that one row of a token reaches together, however many of its
    # experts they have (``ep.send_once``); 0: a row for each of its experts
    once_to: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.backward < math.inf:
            raise ValueError(f"backward is {self.backward}; it must be above 0, such as 2 or 3")


def card_of(hardware: Hardware) -> Link:
    """A rank's share of what its node sends to others."""
    if hardware.inter is None:
        raise ValueError(
            f"hardware {hardware.name!r} does not say what a node sends to others; add the key "
            "'inter' to its file, or give the link"
        )
    return Link(
        bytes_per_s=hardware.inter.bytes_per_s / hardware.ranks_per_node,
        latency_s=hardware.inter.latency_s,
    )


def all_to_all_s(bytes_CC: np.ndarray, link: Link) -> float:
    """An all-to-all as sends and receives, one after the other on each card (spec rule 39).

    A card sends and receives at once; the busiest card counts. What a rank keeps is on no card, and
    nothing is sent where there are no bytes. ``bytes_CC`` go from each rank to each other.
    """
    travels_CC = (bytes_CC > 0) & ~np.eye(len(bytes_CC), dtype=bool)
    seconds_CC = np.where(travels_CC, link.latency_s + bytes_CC / link.bytes_per_s, 0.0)
    return float(max(seconds_CC.sum(axis=0).max(), seconds_CC.sum(axis=1).max()))


def once_to(ranks_per_node: int, attention: int, expert: int) -> int:
    """Ranks that a row reaches together where it travels once: those of a node, if roles have
    whole ones."""
    return ranks_per_node if attention % ranks_per_node == expert % ranks_per_node == 0 else 1


HEAD_BACKWARD = 2.0  # its activations are there still


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Forward of one layer and one micro-batch, in seconds or any other unit of time."""

    attention_s: float  # of all but the experts, on an attention rank
    expert_s: float  # of what one expert rank computes if nothing moves
    expert_on_attention_s: float  # of the same rows on an attention rank

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
    """Ranks of a zebra group, and how their tokens are cut."""

    attention_ranks: int  # ``M``
    expert_ranks: int  # ``N``
    num_stripes: int  # of an attention rank's tokens, ``R``

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def stripe_samples(self, num_samples: int) -> int:
        """Of the longest stripe, when samples are cut as equally as can be."""
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
    """What a step takes."""

    num_tokens: int  # of the step, of all ranks
    step_s: float  # seconds
    attention_busy_s: float  # that an attention rank computes
    expert_busy_s: float  # that an expert rank computes

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
    """Forward of a layer and a stripe, no expert moved."""
    tokens = shape.stripe_samples(num_samples) * ranks.model.length
    arriving = tokens * shape.attention_ranks / shape.expert_ranks
    return LayerTimes(
        attention_s=tokens * ranks.new.attention_s,
        expert_s=arriving * ranks.old.expert_s,
        expert_on_attention_s=arriving * ranks.new.expert_s,
    )


def exchange_s(ranks: TwoClasses, shape: ZebraShape, num_samples: int, moved: int) -> float:
    """Dispatch, or combine, of a layer and a stripe, each expert rank having lost so many experts;
    every expert has equally many rows, and with ``once_to`` all sets of a token's are as likely."""
    attention, expert = shape.attention_ranks, shape.expert_ranks
    num_experts = ranks.model.num_experts
    held_C = np.empty(attention + expert)
    held_C[:attention] = moved * expert / attention
    held_C[attention:] = num_experts / expert - moved
    share_C = held_C / num_experts
    if ranks.once_to:
        near_C = np.repeat(np.minimum(ranks.once_to, (attention, expert)), (attention, expert))
        top_k = ranks.model.top_k
        share_C = met_share(near_C * share_C, num_experts, top_k) / (near_C * top_k)
    sent_bytes = shape.stripe_samples(num_samples) * ranks.model.length * ranks.model.sent_bytes
    bytes_CC = np.zeros((len(held_C), len(held_C)))
    bytes_CC[:attention] = sent_bytes * share_C
    return all_to_all_s(bytes_CC, ranks.link)


_MET = frozenset((DISPATCH.name, COMBINE.name))  # where all ranks wait for each other


def price_step(
    ranks: TwoClasses,
    shape: ZebraShape,
    num_samples: int,
    moved_L: Sequence[int] | None = None,
    *,
    copied_L: Sequence[int] | None = None,
    loads_LN: Sequence[Sequence[float]] | None = None,
    overlaps: bool = True,
) -> StepPrice:
    """Simulate Theorem 1's order. Stripes are all as long as the longest.

    Args:
        ranks: that the group is made of.
        shape: of the group.
        num_samples: of a step, of all attention ranks.
        moved_L: experts that each expert rank has lost, by layer; None: none anywhere.
        copied_L: replicas that each expert rank gets of other expert ranks' experts, by layer.
            None: none anywhere.
        loads_LN: rows of each expert rank over the mean, by layer; exchanges are priced as if all
            had equally many. None: 1 everywhere.
        overlaps: both sides work at once; else it is DistEP.
    """
    moved_L = (0,) * ranks.model.num_layers if moved_L is None else tuple(moved_L)
    copied_L = (0,) * len(moved_L) if copied_L is None else tuple(copied_L)
    loads_LN = ((1.0,),) * len(moved_L) if loads_LN is None else loads_LN
    places = range(len(loads_LN[0]))  # expert ranks that differ
    offloaded, copied = (
        tuple(layer for layer, count in enumerate(count_L) if count)
        for count_L in (moved_L, copied_L)
    )
    step = _step(ranks.model.num_layers, shape.num_stripes, offloaded, copied, overlaps)
    seconds_of = _task_seconds(ranks, shape, num_samples, moved_L, copied_L)

    def on_rank(place: int, task: Task) -> float:
        is_uneven = task.op.name == EXPERT.name
        return seconds_of(task) * (loads_LN[task.layer][place] if is_uneven else 1.0)

    timeline = simulate(
        step,
        on_rank,
        num_ranks=len(places),
        peers_of=lambda place, task: places if task.op.name in _MET else (place,),
    )

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
    """Seconds of a task, alone; an op is known by its name, whatever its stream."""
    times = stripe_times(ranks, shape, num_samples)
    head_s = shape.stripe_samples(num_samples) * ranks.model.length * ranks.new.head_s
    of_one = shape.expert_ranks / ranks.model.num_experts  # an expert's part of an expert rank's
    gained = of_one * shape.expert_ranks / shape.attention_ranks
    sent_s = {moved: exchange_s(ranks, shape, num_samples, moved) for moved in set(moved_L)}
    expert_bytes = ranks.model.expert_weights * ranks.model.element_bytes

    def layer_seconds(moved: int, copied: int) -> Mapping[str, float]:
        return {
            GATHER.name: copied * expert_bytes / ranks.link.bytes_per_s + ranks.link.latency_s,
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
