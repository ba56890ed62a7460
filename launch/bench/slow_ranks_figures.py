# SPDX-License-Identifier: Apache-2.0
"""Steps of the contenders of slow_ranks.py: as the simulator says, and as the ranks show.

Pure. New ranks have attention under zebra, old ones experts; expert parallelism has both on all.
Moments are of one clock, for all ranks are on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pace import BACKWARD, Moments, bare, union
from slow_ranks_model import Shape

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.papers.hetermoe_rivals import EpGroup, ep_tokens_per_s, price_dist_ep
from ds_moe_ext.planning.zebra_costs import (
    MoeModel,
    RankClass,
    TwoClasses,
    ZebraShape,
    price_step,
    stripe_times,
)
from ds_moe_ext.planning.zebra_planner import ZebraGroup, assign_experts

ELEMENT_BYTES = 4  # float32 travels


@dataclass(frozen=True, kw_only=True)
class Durations:
    """How long computing takes, forward, for one token and layer.

    Attributes:
        attention_s: attention on a new rank.
        expert_s: all experts of the token on a new rank.
        attention_slower: so many times as long on an old rank.
        expert_slower: likewise.
    """

    attention_s: float
    expert_s: float
    attention_slower: float
    expert_slower: float

    @property
    def new(self) -> RankClass:
        return RankClass(attention_s=self.attention_s, expert_s=self.expert_s)

    @property
    def old(self) -> RankClass:
        return RankClass(
            attention_s=self.attention_slower * self.attention_s,
            expert_s=self.expert_slower * self.expert_s,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one ZP group.

    Attributes:
        attention_ranks: new ones.
        expert_ranks: old ones.
    """

    attention_ranks: int
    expert_ranks: int

    @property
    def size(self) -> int:
        return self.attention_ranks + self.expert_ranks

    def striped(self, num_stripes: int) -> ZebraShape:
        return ZebraShape(
            attention_ranks=self.attention_ranks,
            expert_ranks=self.expert_ranks,
            num_stripes=num_stripes,
        )


@dataclass(frozen=True)
class Simulator:
    """Seconds of a step.

    Attributes:
        shape: of the model.
        durations: of its computing.
        group: of the ranks.
        link: of each rank's card, as measured.
    """

    shape: Shape
    durations: Durations
    group: Group
    link: Link

    @property
    def ranks(self) -> TwoClasses:
        model = MoeModel(
            num_layers=self.shape.layers,
            num_experts=self.shape.experts,
            top_k=self.shape.top_k,
            width=self.shape.width,
            expert_width=self.shape.expert_width,
            length=self.shape.length,
            element_bytes=ELEMENT_BYTES,
        )
        old, new = self.durations.old, self.durations.new
        return TwoClasses(model=model, new=new, old=old, link=self.link, backward=BACKWARD)

    @property
    def num_samples(self) -> int:
        """Of a step, of all ranks."""
        return self.group.size * self.shape.samples

    def ep_s(self) -> float:
        """Expert parallelism on all ranks, every layer in one piece."""
        group = EpGroup(new_ranks=self.group.attention_ranks, old_ranks=self.group.expert_ranks)
        per_s = ep_tokens_per_s(self.ranks, group, self.shape.tokens, degrees=(1,))
        return self.group.size * self.shape.tokens / per_s

    def dist_ep_s(self) -> float:
        """The two sides in turn."""
        return price_dist_ep(
            self.ranks,
            attention_ranks=self.group.attention_ranks,
            expert_ranks=self.group.expert_ranks,
            num_samples=self.num_samples,
        ).step_s

    def zebra_s(self, num_stripes: int, moved_L: Sequence[int] | None = None) -> float:
        """Zebra, with so many experts of each layer moved from each expert rank."""
        striped = self.group.striped(num_stripes)
        return price_step(self.ranks, striped, self.num_samples, moved_L).step_s

    def moved(self, num_stripes: int) -> tuple[int, ...]:
        """Experts of each layer that Algorithm 1 moves from each expert rank."""
        group = ZebraGroup(
            num_experts=self.shape.experts,
            num_layers=self.shape.layers,
            attention_ranks=self.group.attention_ranks,
            expert_ranks=self.group.expert_ranks,
        )
        times = stripe_times(self.ranks, self.group.striped(num_stripes), self.num_samples)
        return assign_experts(group, times).moved_L


@dataclass(frozen=True)
class Step:
    """A step on one rank.

    Attributes:
        start_s: when it began.
        end_s: when it ended.
        computed: when attention or experts did, in order.
        late_s: by how much the machine let that last longer.
        loss: of the rank's own batch.
    """

    start_s: float
    end_s: float
    computed: tuple[Moments, ...]
    late_s: float
    loss: float


@dataclass(frozen=True)
class Shared:
    """A step on all ranks.

    Attributes:
        seconds: from the first rank's start to the last one's end.
        use_C: share of that in which each rank computed.
        idle_s: nobody computed: what travelled and what the host did was exposed.
        late_s: see ``Step``, mean over the ranks.
    """

    seconds: float
    use_C: tuple[float, ...]
    idle_s: float
    late_s: float

    @classmethod
    def of(cls, ranks: Sequence[Step]) -> Shared:
        """Args: ranks: the same step on each."""
        start_s = min(step.start_s for step in ranks)
        end_s = max(step.end_s for step in ranks)
        seconds = end_s - start_s
        return cls(
            seconds=seconds,
            use_C=tuple(_covered(step.computed) / seconds for step in ranks),
            idle_s=bare(start_s, end_s, union(span for step in ranks for span in step.computed)),
            late_s=sum(step.late_s for step in ranks) / len(ranks),
        )


def _covered(spans: Iterable[Moments]) -> float:
    return sum(end - start for start, end in union(spans))
