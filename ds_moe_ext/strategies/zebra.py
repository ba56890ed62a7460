# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism: attention and experts on ranks of their own, striped by micro-batches.

HeterMoE (spec hetermoe.md). New GPUs are much faster than old ones in attention and little faster
in experts, so each does what it is good at. Shape letters: E experts, C EP ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ds_moe_ext.core.layout import NODE_AXES, Roles, Striping
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.exchange_costs import Way
from ds_moe_ext.planning.strategy import (
    CostGroup,
    Forecast,
    Job,
    Overlay,
    Plan,
    Strategy,
    register,
    registered,
    replicates,
)
from ds_moe_ext.schedule.stripes import A2E, E2A, check_stripes, default_stripes
from ds_moe_ext.schedule.task import INTER, PARAM, Stream
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.expert_side import plans_by, side_job
from ds_moe_ext.strategies.prophet import ProProphet
from ds_moe_ext.strategies.shares import Copying
from ds_moe_ext.strict import NOT_A_KEY, all_at_least

WHERE = "ds_moe_ext.zebra"
MOST = 2**20  # ranks, and stripes


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What is measured at the start of a run, to choose the experts that move (rules 34 to 38)."""

    sequence_length: int | None = None  # tokens of a sample; null: Megatron's --seq-length
    # of a stripe; null: those of train_micro_batch_size_per_gpu, as stripes cut them
    samples: int | None = None
    # measurements, of which the median is taken; 20 or more for a run that matters
    num_repeats: int = 20
    # "corrected", or "printed" for the paper's listing of Algorithm 1 as it stands
    variant: Literal["corrected", "printed"] = "corrected"

    def __post_init__(self) -> None:
        all_at_least(f"{WHERE}.profile", self, sequence_length=1, samples=1, num_repeats=1)


@register("zebra")
@dataclass(frozen=True, kw_only=True)
class Zebra(Overlay):
    """Roles for the ranks of each ZP group, laid over what copies experts among expert ranks."""

    # ranks of a group that have attention, ``M``; null counts devices
    attention_size: int | None = None
    expert_size: int | None = None  # ranks that have experts only, ``N``; likewise
    # part of the device name of attention ranks, as "A40"; null: the first ranks of a group are
    # attention ranks
    attention_device: str | None = None
    # stripes that the samples of an attention rank are cut into, ``R``; null takes the fewest that
    # overlap and are each of one rank's batch, or as many as there are samples for
    num_micro_batches: int | None = None
    # experts that each expert rank leaves to the attention ranks, layer by layer (Asym-EA); null
    # leaves none, or as many as the profile says
    moved: list[int] | None = None
    # choose the experts that move by what is measured as the run starts; null measures nothing
    profile: Profile | None = None
    # expert ranks keep the rows that came in, and compute the rest again in backward
    recompute_experts: bool = False
    # places of the attention ranks in a group; null: as stated above
    attention_ep_ranks: list[int] | None = None
    # ranks of the run, group by group, where devices pair ranks that are no neighbours
    order: tuple[int, ...] = field(default=(), metadata=NOT_A_KEY)
    # which experts get replicas, and on which expert ranks
    placing: Strategy = field(default=ExpertParallel(), hash=False, metadata=NOT_A_KEY)

    has_uneven_owners = True

    def __post_init__(self) -> None:
        all_at_least(WHERE, self, attention_size=1, expert_size=1, num_micro_batches=1)
        for name in ("attention_size", "expert_size", "num_micro_batches"):
            if (vars(self)[name] or 0) > MOST:
                raise ValueError(
                    f"{WHERE}.{name} is {vars(self)[name]}, which is too large; give at most {MOST}"
                )
        for name in ("moved", "attention_ep_ranks"):
            numbers = vars(self)[name]
            if any(number < 0 for number in numbers or ()):
                raise ValueError(
                    f"{WHERE}.{name} is {numbers}, but must be a list of integers from 0; mend it, "
                    "or leave it out"
                )
        if self.attention_ep_ranks is not None:
            self._check_ep_ranks(self.attention_ep_ranks)
        if self.moved is not None and self.profile is not None:
            raise ValueError(
                f"{WHERE}.moved is {self.moved}, but {WHERE}.profile would choose it; set one of "
                "them to null"
            )
        self._check_placing()

    def _check_placing(self) -> None:
        placing, where = self.placing, f"ds_moe_ext.{_name_of(self.placing)}"
        if not isinstance(placing, (Copying, ExpertParallel)):
            raise ValueError(
                f"ds_moe_ext.balance is {type(placing).__qualname__}, but strategy 'zebra' lays "
                "itself over 'fssdp' and 'prophet' alone; derive it from one of their classes, or "
                "give it roles of its own and make it the strategy"
            )
        refused = (
            (
                isinstance(placing, ProProphet) and placing.is_papers,
                f'{where}.share is "paper" or "local", by which replicas serve the tokens of '
                "their own rank, but under strategy 'zebra' all tokens come from attention ranks; "
                'set share to "priced" or "planned"',
            ),
            (
                placing.with_owners_that_stay().intervals().shard_every,
                f"{placing.keys.owners} is {placing.intervals().shard_every}, but under strategy "
                "'zebra' roles and moved say where experts live; leave it out",
            ),
            (
                isinstance(placing, Copying) and self.expert_size == 1,
                f"{WHERE}.expert_size is 1, so that no other expert rank could hold replicas for "
                f"balance {_name_of(placing)!r}; leave balance out",
            ),
        )
        for is_asked, why in refused:
            if is_asked:
                raise ValueError(why)

    def over(self, placing: Strategy) -> Zebra:
        return replace(self, placing=placing.with_owners_that_stay())

    def _check_ep_ranks(self, ep_ranks: Sequence[int]) -> None:
        if self.attention_device is not None:
            raise ValueError(
                f"{WHERE}.attention_ep_ranks is {ep_ranks}, but {WHERE}.attention_device "
                f"{self.attention_device!r} sets the places too; set one of them to null"
            )
        if self.attention_size is None or self.expert_size is None:
            raise ValueError(
                f"{WHERE}.attention_ep_ranks is {ep_ranks}, but attention_size or expert_size is "
                "null; set both"
            )
        size = self.attention_size + self.expert_size
        if len(set(ep_ranks)) != self.attention_size or max(ep_ranks) >= size:
            raise ValueError(
                f"{WHERE}.attention_ep_ranks is {ep_ranks}, which are not {self.attention_size} of "
                f"the {size} places of a group, 0 to {size - 1}; mend it, or leave it out"
            )

    @property
    def has_roles(self) -> bool:
        return True

    @property
    def roles(self) -> Roles:
        if self.attention_size is None or self.expert_size is None:
            raise ValueError(
                f"{WHERE}.attention_size is {self.attention_size} and expert_size "
                f"{self.expert_size}; set both, or name the attention ranks' attention_device"
            )
        if self.attention_ep_ranks is None:
            return Roles.first(self.attention_size, self.expert_size)
        ep_ranks = range(self.attention_size + self.expert_size)
        own = tuple(sorted(self.attention_ep_ranks))
        others = tuple(ep_rank for ep_rank in ep_ranks if ep_rank not in own)
        return Roles(own, others, self.order)

    def uses(self) -> tuple[tuple[str, Stream], ...]:
        rows = (("ep", INTER), ("ep", A2E), ("ep", E2A))
        if isinstance(self.placing, ExpertParallel) and self.placing.send_once:
            return (*rows, *((axis, stream) for axis in NODE_AXES for stream in (A2E, E2A)))
        return (*rows, ("ep", PARAM)) if replicates(self.placing) else rows

    @property
    def striping(self) -> Striping:
        return Striping(self.num_micro_batches, self.recompute_experts)

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Zebra:
        settled = self if self.attention_device is None else self._by_device(devices())
        settled = settled.over(self.placing.settled(devices, micro_batch))
        return settled if micro_batch is None else settled._for_batches_of(micro_batch)

    def _by_device(self, devices: Sequence[str]) -> Zebra:
        assert self.attention_device is not None
        sizes = (self.attention_size, self.expert_size)
        roles = roles_by_device(devices, self.attention_device, sizes)
        found = (len(roles.attention_ep_ranks), len(roles.expert_ep_ranks))
        for name, asked, counted in zip(("attention_size", "expert_size"), sizes, found):
            if asked not in (None, counted):
                raise ValueError(
                    f"{WHERE}.{name} is {asked}, but {counted} ranks of a group are so by "
                    f"attention_device {self.attention_device!r}; set it to null"
                )
        return replace(
            self,
            attention_size=found[0],
            expert_size=found[1],
            attention_ep_ranks=list(roles.attention_ep_ranks),
            order=roles.order,
            attention_device=None,
        )

    def _for_batches_of(self, micro_batch: int) -> Zebra:
        """With a number of stripes that so many samples of each rank can be cut into."""
        attention, expert = len(self.roles.attention_ep_ranks), len(self.roles.expert_ep_ranks)
        num_samples = micro_batch * (attention + expert)
        if self.num_micro_batches is None:
            num_stripes = default_stripes(attention, expert, num_samples)
            return replace(self, num_micro_batches=num_stripes)
        key = f"{WHERE}.num_micro_batches"
        check_stripes(num_samples, attention, self.num_micro_batches, key=key)
        return self

    def first_owners(
        self, num_experts: Sequence[int], cost_groups: Iterable[CostGroup], num_ep_ranks: int
    ) -> tuple[Placement, ...]:
        moved = [0] * len(num_experts) if self.moved is None else self.moved
        if len(moved) != len(num_experts):
            raise ValueError(
                f"{WHERE}.moved has {len(moved)} numbers, but there are {len(num_experts)} MoE "
                "layers; give one a layer"
            )
        roles = self.roles
        owners = tuple(asymmetric_owner(n, roles, o) for n, o in zip(num_experts, moved))
        if not any(owner.holds_EC[:, list(roles.expert_ep_ranks)].any() for owner in owners):
            raise ValueError(
                f"{WHERE}.moved is {moved}, which leaves the expert ranks without experts; "
                "move fewer, or use strategy 'ep'"
            )
        return owners

    def notices(self, job: Job) -> tuple[str, ...]:
        stated = self.placing.notices(self._side_job(job))
        if self.moved is not None or self.profile is not None:
            return stated
        return (
            *stated,
            f"expert ranks have all experts, because {WHERE}.moved and {WHERE}.profile are "
            "null (no Asym-EA); if attention ranks wait for experts, set moved, or set "
            'profile to {"sequence_length": tokens of a sample}, which measures it at start; '
            "ds-moe-ext plan mixed-cluster predicts both",
        )

    @property
    def expected(self) -> str:
        own = "attention and experts run on separate ranks; expect a gain when their devices differ"
        return f"{own}; {self.placing.expected}" if replicates(self.placing) else own

    def plan(self, job: Job) -> tuple[Plan, ...]:
        if not replicates(self.placing):
            # Where a token's row goes once, it does to a node: the slow link is between roles.
            plans = self.placing.plan(job)
            return tuple(replace(p, way=Way.BY_PLACES) if p.sends_once else p for p in plans)
        return plans_by(self.placing.plan, job, self.roles.expert_ep_ranks)

    def describe(self, job: Job) -> str:
        return self.placing.describe(self._side_job(job))

    def _side_job(self, job: Job) -> Job:
        return side_job(job, self.roles.expert_ep_ranks) if replicates(self.placing) else job

    def forecast(self, job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
        return Strategy.forecast(self, job, layer, plan, rows_CE)  # of all ranks, who sends with it


def _name_of(placing: Strategy) -> str:
    """The block of what places experts, or where the keys of the user's own stand."""
    names = (name for name, cls in registered().items() if type(placing) is cls)
    return next(names, "options")


def roles_by_device(
    devices: Sequence[str], attention_device: str, sizes: tuple[int | None, int | None]
) -> Roles:
    """The roles that follow from the devices, in groups of these attention and expert ranks or of
    all: neighbours make a group where all such groups are alike, else the next attention ranks and
    the next expert ranks of the run."""
    attention, expert = sizes
    size = len(devices) if attention is None or expert is None else attention + expert
    if len(devices) % size:
        raise ValueError(
            f"{WHERE} makes groups of {size} ranks, which do not divide the "
            f"{len(devices)} ranks of the run; choose attention_size and expert_size whose sum "
            f"divides {len(devices)}, or leave them out"
        )
    found = [attention_device.lower() in device.lower() for device in devices]
    if all(found) or not any(found):
        raise ValueError(
            f"{WHERE}.attention_device is {attention_device!r}, which "
            f"{'all' if all(found) else 'no'} ranks have: "
            f"{', '.join(sorted(set(devices)))}; name one of two kinds of device, or leave "
            "attention_device out and give attention_size and expert_size"
        )
    order = tuple(range(len(devices)))
    if (pattern := _pattern(found, order, size)) is None:
        num_groups = len(devices) // size
        new, old = ([r for r in order if found[r] == has] for has in (True, False))
        if len(new) != num_groups * (attention or 0):
            raise ValueError(
                f"{WHERE}.attention_device is {attention_device!r}, which {len(new)} of the "
                f"{len(devices)} ranks have, but {num_groups} groups of {attention} attention and "
                f"{expert} expert ranks need {num_groups * (attention or 0)}: the ranks have "
                f"{', '.join(devices)}; choose sizes that divide each kind"
            )
        sizes_of = (len(new) // num_groups, new), (len(old) // num_groups, old)
        order = tuple(
            rank
            for g in range(num_groups)
            for rank in sorted(r for m, ranks in sizes_of for r in ranks[g * m : g * m + m])
        )
        pattern = _pattern(found, order, size)
    else:
        order = ()
    if pattern is None:
        raise ValueError(
            f"{WHERE}.attention_device is {attention_device!r}, but these devices are at "
            f"different places in the groups of {size} ranks: the ranks have "
            f"{', '.join(devices)}; order the hostfile so that all groups have the same device "
            "order, or one kind comes first"
        )
    ep_ranks = range(size)
    return Roles(
        tuple(ep_rank for ep_rank in ep_ranks if pattern[ep_rank]),
        tuple(ep_rank for ep_rank in ep_ranks if not pattern[ep_rank]),
        order,
    )


def _pattern(found: Sequence[bool], order: Sequence[int], size: int) -> tuple[bool, ...] | None:
    """Which ranks of each group have attention; None where groups differ."""
    patterns = {
        tuple(found[rank] for rank in order[first : first + size])
        for first in range(0, len(order), size)
    }
    return patterns.pop() if len(patterns) == 1 else None


def asymmetric_owner(num_experts: int, roles: Roles, moved: int) -> Placement:
    """Where the experts of a layer live: Asym-EA's rule 33.

    The expert ranks hold equally many, in the order of their places. Of each the last ones move;
    these, in the same order, are cut into equal blocks for the attention ranks.
    """
    attention, expert = np.array(roles.attention_ep_ranks), np.array(roles.expert_ep_ranks)
    if num_experts % expert.size:
        raise ValueError(
            f"{WHERE}.expert_size is {expert.size}, which does not divide the {num_experts} "
            "experts of a layer; choose a divisor"
        )
    per_rank = num_experts // expert.size
    if moved > per_rank or moved * expert.size % attention.size:
        raise ValueError(
            f"{WHERE}.moved has {moved}, but each of {expert.size} expert ranks has {per_rank} "
            "experts of a layer, and the experts they give up must divide over "
            f"{attention.size} attention ranks; choose fewer, or another multiple"
        )
    owner_E = np.repeat(expert, per_rank)
    leaving = np.arange(num_experts) % per_rank >= per_rank - moved
    owner_E[leaving] = np.repeat(attention, moved * expert.size // attention.size)
    return Placement.owned_by(owner_E, roles.size)
