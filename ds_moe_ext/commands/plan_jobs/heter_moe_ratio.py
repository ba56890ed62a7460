# SPDX-License-Identifier: Apache-2.0
"""HeterMoE's simulator as a job: a zebra group's shape, for a model and two kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_moe_ext.commands.plan_jobs.job_inputs import MOST_COST, check_number
from ds_moe_ext.core.hardware import Hardware, Link, read_hardware
from ds_moe_ext.planning.zebra_costs import MoeModel, RankClass, TwoClasses, ZebraShape, card_of
from ds_moe_ext.planning.zebra_planner import (
    PricedShape,
    RefusedShape,
    Stock,
    best_shape,
    price_shapes,
)

MOST_SIZE = 2**24  # of a model, and of samples
MOST_RANKS = 2**9  # of a group
MOST_STRIPES = 2**9  # times layers: of one simulated step
MOST_SHAPES = 2**8
LEAST = 1e-15  # seconds of a token, or share of a rate
WEIGHT_BYTES = 16.0  # half-precision weight and gradient, and the optimizer's three in fp32


@dataclass(frozen=True, kw_only=True)
class ClassInput:
    """Ranks of one kind: seconds as measured, or a hardware file and what is reached of its rate.

    Attributes:
        attention_s: forward of a token in one layer but for its experts.
        expert_s: forward of a token in its experts of one layer.
        head_s: forward of a token behind the last layer.
        room: experts, of all layers, that a rank can hold; null: by the file's memory, else any.
        hardware: path of the file.
        number_type: whose rate is taken: "fp16", "bf16", "tf32" or "fp32".
        attention_efficiency: share of the rate that attention reaches.
        expert_efficiency: and experts.
        reserved_bytes: of the device's memory, for all but experts' weights.
    """

    attention_s: float | None = None
    expert_s: float | None = None
    head_s: float = 0.0
    room: int | None = None
    hardware: str | None = None
    number_type: str = "fp16"
    attention_efficiency: float | None = None
    expert_efficiency: float | None = None
    reserved_bytes: float = 0.0

    def check(self, name: str) -> None:
        """Refuse numbers that cannot be, and both ways at once; ``name`` is the key."""
        seconds = ("attention_s", "expert_s")
        shares = ("attention_efficiency", "expert_efficiency")
        wanted, other = (seconds, shares) if self.hardware is None else (shares, seconds)
        for key in wanted:
            if vars(self)[key] is None:
                raise ValueError(
                    f"{name}.{key} is missing; give {' and '.join(seconds)} in seconds, or "
                    f"hardware with {' and '.join(shares)}"
                )
            check_number(f"{name}.{key}", vars(self)[key], float, least=LEAST, most=MOST_COST)
        for key in other:
            if vars(self)[key] is not None:
                raise ValueError(
                    f"{name}.{key} is {vars(self)[key]} beside {' and '.join(wanted)}; remove the "
                    "one or the others"
                )
        check_number(f"{name}.head_s", self.head_s, float, most=MOST_COST)
        check_number(f"{name}.reserved_bytes", self.reserved_bytes, float, most=MOST_COST)
        if self.room is not None:
            check_number(f"{name}.room", self.room, int, most=MOST_SIZE)

    @cached_property
    def file(self) -> Hardware | None:
        return None if self.hardware is None else read_hardware(self.hardware)

    def ranks(self, model: MoeModel, weight_bytes: float) -> RankClass:
        """What a token costs such a rank, and how many experts it holds."""
        if self.attention_s is not None and self.expert_s is not None:
            return RankClass(
                attention_s=self.attention_s,
                expert_s=self.expert_s,
                head_s=self.head_s,
                room=self.room,
            )
        assert self.file is not None
        assert self.attention_efficiency is not None and self.expert_efficiency is not None
        memory = self.file.device.memory_bytes
        room = self.room
        if room is None and memory is not None:
            free_bytes = max(0.0, memory - self.reserved_bytes)
            room = int(free_bytes // (model.expert_weights * weight_bytes))
        of = RankClass.of(
            self.file.device,
            model,
            number_type=self.number_type,
            attention_efficiency=self.attention_efficiency,
            expert_efficiency=self.expert_efficiency,
            room=room,
        )
        return replace(of, head_s=self.head_s)


@dataclass(frozen=True, kw_only=True)
class ZebraRatioJob:
    """Input of the search for a group's shape.

    Attributes:
        model: see ``MoeModel``.
        attention: ranks that attention is fast on.
        expert: the others.
        samples_per_attention_rank: of a step.
        ratios: pairs of attention ranks and expert ranks of a group.
        stripes: numbers that an attention rank's tokens may be cut into: powers of two.
        link: of a rank's network card, one direction; null: the slower of both files'.
        attention_devices: ranks of the cluster; null, as is ``expert_devices``: one group of each.
        expert_devices: likewise.
        backward: how many times as long as forward computing takes in backward.
        weight_bytes: of memory for each weight of an expert.
    """

    model: MoeModel
    attention: ClassInput
    expert: ClassInput
    samples_per_attention_rank: int
    ratios: list[Any]
    stripes: list[Any]
    link: Link | None
    attention_devices: int | None = None
    expert_devices: int | None = None
    backward: float = 3.0
    weight_bytes: float = WEIGHT_BYTES

    def __post_init__(self) -> None:
        for name, value in vars(self.model).items():
            check_number(f"model.{name}", value, float, most=MOST_SIZE)
        self.attention.check("attention")
        self.expert.check("expert")
        samples = self.samples_per_attention_rank
        check_number("samples_per_attention_rank", samples, int, least=1, most=MOST_SIZE)
        _check_stripes(self.stripes, self.model.num_layers, samples)
        _check_ratios(self.ratios, MOST_SHAPES // len(self.stripes))
        check_number("backward", self.backward, float, most=MOST_COST)
        check_number("weight_bytes", self.weight_bytes, float, least=1, most=MOST_COST)
        devices = (self.attention_devices, self.expert_devices)
        if (devices[0] is None) != (devices[1] is None):
            raise ValueError(
                f"attention_devices is {devices[0]} and expert_devices {devices[1]}; give both, or "
                "neither"
            )
        for name, count in zip(("attention_devices", "expert_devices"), devices):
            if count is not None:
                check_number(name, count, int, least=1, most=MOST_SIZE)

    @property
    def ranks(self) -> TwoClasses:
        return TwoClasses(
            model=self.model,
            new=self.attention.ranks(self.model, self.weight_bytes),
            old=self.expert.ranks(self.model, self.weight_bytes),
            link=self.card,
            backward=self.backward,
        )

    @property
    def card(self) -> Link:
        if self.link is not None:
            return self.link
        files = [file for file in (self.attention.file, self.expert.file) if file is not None]
        if len(files) < 2:
            raise ValueError(
                "link is null, but a class has no hardware file to take it from; give link with "
                "bytes_per_s"
            )
        return min(map(card_of, files), key=lambda card: card.bytes_per_s)

    @property
    def shapes(self) -> list[ZebraShape]:
        return [
            ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=stripes)
            for attention, expert in self.ratios
            for stripes in self.stripes
        ]

    @property
    def stock(self) -> Stock | None:
        if self.attention_devices is None or self.expert_devices is None:
            return None
        return Stock(new_ranks=self.attention_devices, old_ranks=self.expert_devices)


def _check_ratios(ratios: Sequence[Any], most: int) -> None:
    if not 1 <= len(ratios) <= most:
        raise ValueError(
            f"ratios has {len(ratios)} pairs; give from 1 to {most}, with so many stripes"
        )
    for index, ratio in enumerate(ratios):
        if not isinstance(ratio, list) or len(ratio) != 2:
            raise ValueError(
                f"ratios[{index}] is {ratio!r}; give a pair: attention ranks, expert ranks"
            )
        for place, count in enumerate(ratio):
            check_number(f"ratios[{index}][{place}]", count, int, least=1, most=MOST_RANKS)


def _check_stripes(stripes: Sequence[Any], num_layers: int, samples: int) -> None:
    if not 1 <= len(stripes) <= MOST_SHAPES:
        raise ValueError(
            f"stripes has {len(stripes)} numbers; give from 1 to {MOST_SHAPES}, such as [2, 4]"
        )
    for index, count in enumerate(stripes):
        most = min(samples, max(1, MOST_STRIPES // num_layers))
        check_number(f"stripes[{index}]", count, int, least=1, most=most)
        if count & (count - 1):
            raise ValueError(f"stripes[{index}] is {count}, which is no power of two; give one")


@dataclass(frozen=True, kw_only=True)
class ShapePrice:
    """What a group of a shape does.

    Attributes:
        tokens_per_s: of the group.
        step_s: seconds.
        attention_use: share of the step that an attention rank computes.
        expert_use: and an expert rank.
        attention_bubble_s: seconds that an attention rank idles.
        expert_bubble_s: and an expert rank.
        moved_per_expert_rank: experts that each expert rank gives up, layer by layer.
    """

    tokens_per_s: float
    step_s: float
    attention_use: float
    expert_use: float
    attention_bubble_s: float
    expert_bubble_s: float
    moved_per_expert_rank: list[int]

    @classmethod
    def of(cls, priced: PricedShape) -> ShapePrice:
        price = priced.price
        return cls(
            tokens_per_s=price.tokens_per_s,
            step_s=price.step_s,
            attention_use=price.attention_use,
            expert_use=price.expert_use,
            attention_bubble_s=price.attention_bubble_s,
            expert_bubble_s=price.expert_bubble_s,
            moved_per_expert_rank=list(priced.moved_L),
        )


@dataclass(frozen=True, kw_only=True)
class ShapePlan:
    """A shape, and its price if it can be.

    Attributes:
        attention_ranks: of a group.
        expert_ranks: of a group.
        stripes: of an attention rank's tokens.
        num_groups: that there are devices for.
        fits: ranks hold equally many experts, and memory is enough for all.
        why: if not, the rule and the remedy; else empty.
        price: null if it does not fit.
    """

    attention_ranks: int
    expert_ranks: int
    stripes: int
    num_groups: int
    fits: bool
    why: str
    price: ShapePrice | None

    @classmethod
    def of(cls, priced: PricedShape | RefusedShape, stock: Stock | None) -> ShapePlan:
        is_refused = isinstance(priced, RefusedShape)
        return cls(
            attention_ranks=priced.shape.attention_ranks,
            expert_ranks=priced.shape.expert_ranks,
            stripes=priced.shape.num_stripes,
            num_groups=1 if stock is None else stock.num_groups(priced.shape),
            fits=not is_refused,
            why=priced.why if isinstance(priced, RefusedShape) else "",
            price=None if isinstance(priced, RefusedShape) else ShapePrice.of(priced),
        )


@dataclass(frozen=True, kw_only=True)
class ZebraRatioPlan:
    """Output of the search for a group's shape.

    Attributes:
        best: the shape with most tokens in a second, over all groups; null: none fits.
        shapes: all of them, in the order of ``ratios`` and then ``stripes``.
    """

    best: ShapePlan | None
    shapes: list[ShapePlan]


def zebra_ratio(job: ZebraRatioJob) -> ZebraRatioPlan:
    """HeterMoE's simulator over shapes of a group."""
    priced = price_shapes(job.ranks, job.shapes, job.samples_per_attention_rank)
    best = best_shape(priced, job.stock)
    return ZebraRatioPlan(
        best=None if best is None else ShapePlan.of(best, job.stock),
        shapes=[ShapePlan.of(each, job.stock) for each in priced],
    )
