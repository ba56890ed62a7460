# SPDX-License-Identifier: Apache-2.0
"""What each table and figure of HeterMoE compares, priced by the simulator.

Inputs are those of ``hetermoe_setups``; ``hetermoe_figures`` puts what comes out beside the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean

from ds_moe_ext.planning.zebra_costs import (
    StepPrice,
    TwoClasses,
    ZebraShape,
    price_step,
    stripe_times,
)
from ds_moe_ext.planning.zebra_planner import (
    PricedShape,
    ZebraGroup,
    assign_experts,
    best_shape,
    price_shapes,
)
from ds_moe_ext.schedule.simulator import Timeline, simulate
from ds_moe_ext.schedule.stripes import (
    ATTENTION_SIDE,
    EXPERT_SIDE,
    HEAD,
    OFFLOADED,
    SIDES,
    picked,
    striped_step,
)
from ds_moe_ext.schedule.task import EXPERT, Schedule, Stream, Task
from papers.hetermoe_pipelines import Pipelines, best_pipelines
from papers.hetermoe_rivals import (
    EpGroup,
    ep_ideal_tokens_per_s,
    ep_tokens_per_s,
    price_dist_ep,
)
from papers.hetermoe_setups import (
    A100,
    KI,
    LENGTHS,
    MODELS,
    O1,
    PCIE,
    SHARED_BYTES,
    WEIGHT_BYTES,
    Cluster,
    on_premise,
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a step is run where the paper does not say.

    Attributes:
        samples: of a step, for each rank of either class; zebra has them on attention ranks.
        degrees: numbers of chunks that EP may cut a layer into.
        repeats_exchange: EP exchanges again what it computes again.
    """

    samples: int = 4
    degrees: tuple[int, ...] = (1,)
    repeats_exchange: bool = True

    def of_attention_rank(self, new_ranks: int, old_ranks: int) -> int:
        """Its samples."""
        return -(-self.samples * (new_ranks + old_ranks) // new_ranks)

    def zebra(
        self, ranks: TwoClasses, new_ranks: int, old_ranks: int, *, moves: bool = True
    ) -> PricedShape:
        """With the best number of equal stripes."""
        samples = self.of_attention_rank(new_ranks, old_ranks)
        shapes = [
            ZebraShape(attention_ranks=new_ranks, expert_ranks=old_ranks, num_stripes=stripes)
            for stripes in range(1, samples + 1)
            if samples % stripes == 0
        ]
        best = best_shape(price_shapes(ranks, shapes, samples, moves=moves))
        assert best is not None, f"{ranks.model} does not fit {new_ranks} + {old_ranks} ranks"
        return best

    def group(self, new_ranks: int, old_ranks: int) -> EpGroup:
        return EpGroup(
            new_ranks=new_ranks, old_ranks=old_ranks, repeats_exchange=self.repeats_exchange
        )


# Figures 7 to 9.


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A setup at one length: how many times as fast as its rivals zebra is.

    Attributes:
        model: by the paper's name.
        cluster: of the paper.
        length: tokens of a sample.
        zebra: the best.
        over_ep: as all ranks.
        over_ideal: EP of each class, added.
        over_dist: DistEP.
        over_itself: zebra with all experts at their owners.
    """

    model: str
    cluster: Cluster
    length: int
    zebra: PricedShape
    over_ep: float
    over_ideal: float
    over_dist: float
    over_itself: float


def compare(name: str, cluster: Cluster, length: int, way: Way) -> Compared:
    """Price all; the rivals have the tokens of zebra's attention ranks, on all ranks."""
    new, old = cluster.new_ranks, cluster.old_ranks
    ranks = cluster.classes(MODELS[name].model(length))
    zebra, at_owner = (way.zebra(ranks, new, old, moves=moves) for moves in (True, False))
    rate = zebra.price.tokens_per_s
    group, tokens = way.group(new, old), zebra.price.num_tokens / (new + old)
    dist = price_dist_ep(
        ranks,
        attention_ranks=new,
        expert_ranks=old,
        num_samples=way.of_attention_rank(new, old) * new,
    )
    return Compared(
        model=name,
        cluster=cluster,
        length=length,
        zebra=zebra,
        over_ep=rate / ep_tokens_per_s(ranks, group, tokens, degrees=way.degrees),
        over_ideal=rate / ep_ideal_tokens_per_s(ranks, group, tokens, degrees=way.degrees),
        over_dist=rate / dist.tokens_per_s,
        over_itself=rate / at_owner.price.tokens_per_s,
    )


def compared(setups: Iterable[tuple[str, Cluster]], way: Way) -> list[Compared]:
    """All setups at all lengths."""
    return [compare(*setup, length, way) for setup, length in product(setups, LENGTHS)]


@dataclass(frozen=True, kw_only=True)
class Means:
    """Of figures 7 and 8, as the paper puts them.

    Attributes:
        ep_4k: EP over zebra at 4K, on premise.
        ep_16k: zebra over EP at 16K.
        ep_32k: at 32K.
        dist: DistEP over zebra.
        ideal: zebra over EP (Ideal).
        most_ideal: the most of it.
        aws_ep: zebra over EP on AWS.
        aws_dist: over DistEP.
        aws_ideal: over EP (Ideal).
        aws_most_ideal: the most of it.
    """

    ep_4k: float
    ep_16k: float
    ep_32k: float
    dist: float
    ideal: float
    most_ideal: float
    aws_ep: float
    aws_dist: float
    aws_ideal: float
    aws_most_ideal: float

    @classmethod
    def of(cls, premise: Sequence[Compared], aws: Sequence[Compared]) -> Means:
        def over_ep(length: int) -> list[float]:
            return [of.over_ep for of in premise if of.length == length]

        return cls(
            ep_4k=mean(1 / speed for speed in over_ep(4 * KI)),
            ep_16k=mean(over_ep(16 * KI)),
            ep_32k=mean(over_ep(32 * KI)),
            dist=mean(1 / of.over_dist for of in premise),
            ideal=mean(of.over_ideal for of in premise),
            most_ideal=max(of.over_ideal for of in premise),
            aws_ep=mean(of.over_ep for of in aws),
            aws_dist=mean(of.over_dist for of in aws),
            aws_ideal=mean(of.over_ideal for of in aws),
            aws_most_ideal=max(of.over_ideal for of in aws),
        )


PAPER = Means(
    ep_4k=0.82,
    ep_16k=1.67,
    ep_32k=1.89,
    dist=0.55,
    ideal=1.18,
    most_ideal=1.38,
    aws_ep=2.89,
    aws_dist=1.96,
    aws_ideal=1.17,
    aws_most_ideal=1.25,
)


def over_pipelines(name: str, cluster: Cluster, length: int, way: Way) -> float:
    """Zebra over pipelines of one new rank each, or one old one where these are fewer."""
    new, old = cluster.new_ranks, cluster.old_ranks
    count = min(new, old)
    model = MODELS[name].model(length)
    shared = WEIGHT_BYTES - SHARED_BYTES + SHARED_BYTES / count
    plan = best_pipelines(
        cluster.classes(model, weight_bytes=shared),
        Pipelines(num_pipelines=count, new_ranks=new // count, old_ranks=old // count),
        way.of_attention_rank(new, old) * new,
    )
    zebra = way.zebra(cluster.classes(model), new, old)
    return zebra.price.tokens_per_s / plan.tokens_per_s


# Figure 10.


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """4 A40s with so many V100s, four experts of D1 for each: tokens in a second."""

    old_ranks: int
    zebra: float
    ideal: float

    @property
    def speed(self) -> float:
        return self.zebra / self.ideal


def figure_10(length: int, way: Way) -> list[Ratio]:
    """From 2 to 8 V100s."""
    return [_ratio(length, old_ranks, way) for old_ranks in range(2, 9)]


def _ratio(length: int, old: int, way: Way) -> Ratio:
    cluster = on_premise(f"4:{old}", 4, old)
    ranks = cluster.classes(MODELS["D1"].model(length, num_experts=4 * old))
    zebra = way.zebra(ranks, 4, old).price
    tokens = zebra.num_tokens / (4 + old)
    ideal = ep_ideal_tokens_per_s(ranks, way.group(4, old), tokens, degrees=way.degrees)
    return Ratio(old_ranks=old, zebra=zebra.tokens_per_s, ideal=ideal)


# Figure 11.


@dataclass(frozen=True, kw_only=True)
class Homogeneous:
    """EP on equal GPUs over zebra on 2 A40s and 2 V100s, D1 with 8 experts."""

    four_a40: float
    four_v100: float
    two_a100: float


def figure_11(length: int, way: Way) -> Homogeneous:
    """At one length; all have the same tokens."""
    model = MODELS["D1"].model(length, num_experts=8)
    mixed = on_premise("2:2", 2, 2).classes(model)
    zebra = way.zebra(mixed, 2, 2).price
    newest = replace(on_premise("2", 2, 0), new=A100, link=PCIE).classes(model)

    def over_zebra(ranks: TwoClasses, new_ranks: int, old_ranks: int) -> float:
        group = way.group(new_ranks, old_ranks)
        tokens = zebra.num_tokens / group.num_ranks
        return ep_tokens_per_s(ranks, group, tokens, degrees=way.degrees) / zebra.tokens_per_s

    return Homogeneous(
        four_a40=over_zebra(mixed, 4, 0),
        four_v100=over_zebra(mixed, 0, 4),
        two_a100=over_zebra(newest, 2, 0),
    )


# Table 3.


@dataclass(frozen=True, kw_only=True)
class Use:
    """D1 on O1 in two stripes: what zebra uses of either side, and DistEP.

    Attributes:
        off: experts at their owners.
        on: as Algorithm 1 moves them.
        many: a chunk of every layer moved, which the paper's figures suggest.
        dist: DistEP.
    """

    off: StepPrice
    on: StepPrice
    many: StepPrice
    dist: StepPrice


def table_3(length: int) -> Use:
    """By the inputs as the spec derives them from the table."""
    model = MODELS["D1"].model(length)
    ranks = O1.classes(model)
    shape = ZebraShape(attention_ranks=6, expert_ranks=6, num_stripes=2)
    group = ZebraGroup(
        num_experts=model.num_experts,
        num_layers=model.num_layers,
        attention_ranks=shape.attention_ranks,
        expert_ranks=shape.expert_ranks,
    )
    assigned = assign_experts(group, stripe_times(ranks, shape, 12))
    every = (1,) * model.num_layers
    return Use(
        off=price_step(ranks, shape, 12),
        on=price_step(ranks, shape, 12, assigned.moved_L),
        many=price_step(ranks, shape, 12, every),
        dist=price_dist_ep(ranks, attention_ranks=6, expert_ranks=6, num_samples=12),
    )


# Figure 6.


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Forward of 3 layers in 3 stripes.

    Attributes:
        seconds: from the first start to the last end.
        attention_s: that attention ranks compute.
        attention_open_s: from their first start to their last end.
        expert_s: that expert ranks compute.
        expert_open_s: likewise.
    """

    seconds: float
    attention_s: float
    attention_open_s: float
    expert_s: float
    expert_open_s: float


def figure_6(*moved: int) -> Forward:
    """Attention 3, experts 4, sending 1; 6 experts, of which so many moved, by layer (spec G7)."""
    step = striped_step(3, 3, offloaded=[layer for layer, count in enumerate(moved) if count])
    forward = picked(
        step, [i for i, t in enumerate(step.tasks) if not t.adjoint_of and t.op != HEAD]
    )

    def seconds_of(rank: int, task: Task) -> float:
        expert_s = 4 * moved[task.layer] / 6
        if task.op.name == EXPERT.name:
            return 4 - expert_s
        if task.op == OFFLOADED:
            return expert_s
        return 3 if task.stream in SIDES else 1

    timeline = simulate(forward, seconds_of)
    (attention, attention_open), (expert, expert_open) = (
        _window(forward, timeline, side) for side in (ATTENTION_SIDE, EXPERT_SIDE)
    )
    return Forward(
        seconds=timeline.makespan_s,
        attention_s=attention,
        attention_open_s=attention_open,
        expert_s=expert,
        expert_open_s=expert_open,
    )


def _window(schedule: Schedule, timeline: Timeline, stream: Stream) -> tuple[float, float]:
    at = [i for i, task in enumerate(schedule.tasks) if task.stream == stream]
    starts, ends = timeline.start_s[0], timeline.end_s[0]
    return sum(ends[i] - starts[i] for i in at), ends[at[-1]] - starts[at[0]]
