# SPDX-License-Identifier: Apache-2.0
"""What planners must know of a run's costs, the same on all ranks: measured in its first steps
(``Costs``), and again where steps have come to take otherwise (``StepTimes``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from ds_moe_ext.core.comm import max_in_place, sum_in_place
from ds_moe_ext.core.hardware import Hardware, Link
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, bytes_of
from ds_moe_ext.hosts.steps.pipeline_costs import Pipelines
from ds_moe_ext.moe.dispatch import Wire
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.moe.replica_memory import Weights
from ds_moe_ext.moe.replicas import Replicas
from ds_moe_ext.planning import layer_pipelines
from ds_moe_ext.planning.bench import Bench, clock_of
from ds_moe_ext.planning.described_run import copied_bytes_C
from ds_moe_ext.planning.exchange_costs import ExchangeFit, LinkPrices
from ds_moe_ext.planning.layer_costs import BACKWARD, ep_rank_rows
from ds_moe_ext.planning.layer_seconds import OF_CHUNKS
from ds_moe_ext.planning.prices import NUM_EXCHANGES, Prices
from ds_moe_ext.planning.probe import (
    Level,
    Sizes,
    least_exchange_s,
    measure_pairs,
    measure_replicas,
    spare_bytes,
)
from ds_moe_ext.planning.strategy import Choice, CostGroup, Intervals
from ds_moe_ext.schedule.stripes import OFFLOADED
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERT,
    GATHER,
    INTER,
    PARAM,
    Op,
    Task,
)

STEPS = range(2, 5)  # the first ones are slow: libraries allocate and choose algorithms
TRIED = range(6, 9)  # by then layers run by plans that were made from what was measured
CHECKED = range(10, 13)  # and by then from what replicas took, too
WATCHED = (STEPS, TRIED, CHECKED)
SHARE_OF_FREE = 0.7  # that replicas may take of a device's free memory
NUM_EXPERTS = (1, 4, 8)  # that a quick look copies at once
# times longer that a row takes in some EP ranks, or on some cards, where they are unlike
UNLIKE = 1.3
PARTS = (4, 2, 1)  # of a peer's rows, that a quick look sends
ANY_BYTES = 1 << 62  # free memory of a rank that gets no replicas
KEPT = 3  # numbers of a weight that move with it: the one that is stepped, and two states


class Measured(TypedDict):
    """What changes in a job."""

    cost_groups: tuple[CostGroup, ...]
    window_s: tuple[float, ...]
    back_window_s: tuple[float, ...]
    free_bytes: int
    pipelines: layer_pipelines.Measured | None


@dataclass(eq=False)
class Costs:
    """Measures them in the first steps, and again where steps have come to take otherwise."""

    layers: Sequence[AttachedLayer]
    cost_groups: tuple[CostGroup, ...]
    hardware: Hardware | None
    intervals: Intervals
    pipelines: Pipelines | None = None
    accumulates: bool = False
    are_new: bool = field(default=False, init=False)  # they have been measured in the latest step
    # what this rank saw in the latest step, of each layer, if it was to be checked
    seen: Sequence[Seen] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._num_steps = 0
        self._seen = [Seen() for _ in self.layers]
        self._issued: list[tuple[Task, float]] = []
        unknown_s = (0.0,) * len(self.layers)
        self._measured = Measured(
            cost_groups=self.cost_groups,
            window_s=unknown_s,
            back_window_s=unknown_s,
            free_bytes=0,
            pipelines=None,
        )

    @cached_property
    def times(self) -> StepTimes:
        """Of steps; where these change much, costs are measured again."""
        return StepTimes.of(self.intervals, self.device, self._layout.everyone)

    @cached_property
    def memory(self) -> MemoryTaken:
        return MemoryTaken(lambda: spare_bytes(self.device), self._most)

    def _most(self, number: int) -> int:
        """Of all ranks' numbers. Collective."""
        own = torch.tensor([number], device=self.device)
        return int(max_in_place(own, self._layout.everyone))

    def after_step(self, number: int, rows: Sequence[Rows], choice: Choice | None) -> Measured:
        """What is known after a step, which ran by that choice; nothing more than before it of a
        strategy that wants to know nothing. Collective."""
        if not self._replicas and self.pipelines is None:
            return self._measured
        self.times.after_step(number, choice)
        if choice is not None:
            self.memory.after_step(choice.name, is_due=self.times.is_due(number))
        if self.times.has_drifted:
            # Links, or what steps bring, are others than when costs were measured: begin anew, and
            # keep what is known until then. The step that has just ended was not looked at.
            self._num_steps, self._seen = STEPS.start - 1, [Seen() for _ in self.layers]
            self._issued.clear()
        step, self._num_steps = self._num_steps, self._num_steps + 1
        # Alone, there is nothing to send.
        self.are_new = step == STEPS[-1] and self._layout.grid.size > 1
        self.seen = ()
        if any(step in watched for watched in WATCHED):
            new = [Seen.of(layer.routed, seen) for layer, seen in zip(self.layers, rows)]
            issued = [each for layer in self.layers for each in layer.routed.meter.take_issued()]
            if step in STEPS:
                self._issued += issued
                self._seen = [before + seen for before, seen in zip(self._seen, new)]
            else:
                self.seen = new
        for layer in self.layers:
            layer.routed.meter.is_wanted = any(step + 1 in watched for watched in WATCHED)
        if self.are_new:
            self._measured = self._agreed(rows)
        return self._measured

    @property
    def is_due(self) -> bool:
        """Whether they are measured behind the step that is about to end."""
        return self._num_steps == STEPS[-1]

    def corrected(self, found: Correction) -> Measured:
        """What is known now that rows and replicas have been seen to travel."""
        cost_groups = tuple(
            _corrected(cost_group, found) for cost_group in self._measured["cost_groups"]
        )
        self._measured = {**self._measured, "cost_groups": cost_groups}
        self.are_new = True
        return self._measured

    @property
    def _replicas(self) -> bool:
        """Whether experts are copied: from EP rank to EP rank, of which there may be one."""
        routed = self.layers[0].routed
        return routed.replicas is not None and routed.layer_context.layout.grid.num_ep_ranks > 1

    def _agreed(self, rows: Sequence[Rows]) -> Measured:
        seen_RL = of_all_ranks(self._seen, self._layout, self.device)
        sums = [sum(column, Seen()) for column in zip(*seen_RL)]
        exchanged_s = [exchange_s(column) for column in zip(*seen_RL)]
        window_s = [seen.window_s / max(seen.num_windows, 1) for seen in sums]
        back_s = [seen.back_window_s / max(seen.num_back_windows, 1) for seen in sums]
        behind_s = tuple(back or BACKWARD * s for back, s in zip(back_s, window_s))
        cost_groups, free_bytes, pipelined = self.cost_groups, 0, None
        if self._replicas:
            cost_groups = tuple(
                self._priced(p, rows, seen_RL, sums, exchanged_s) for p in self.cost_groups
            )
            free_bytes = self._free_bytes()
        if self.pipelines is not None:
            issued, self._issued = self._issued, []
            per_chunk_s = chunk_s(issued, self._layout, self.device)
            pipelined = self.pipelines.measured(rows, behind_s, per_chunk_s)
        return Measured(
            cost_groups=cost_groups,
            window_s=tuple(window_s),
            back_window_s=behind_s,
            free_bytes=free_bytes,
            pipelines=pipelined,
        )

    def _free_bytes(self) -> int:
        """Memory for replicas on the rank that has least, those that are there among it; where
        nothing shows it, as much as its own experts and their gradients take."""
        spare = spare_bytes(self.device)
        if spare is None:
            return 2 * sum(self._bytes_at_owner(cost_group) for cost_group in self.cost_groups)
        plans = [layer.routed.layer_context.plan for layer in self.layers]
        cost_groups = {
            layer: cost_group for cost_group in self.cost_groups for layer in cost_group.layers
        }
        each = [bytes_of(self._replicas_of(cost_groups[layer]).like) for layer in range(len(plans))]
        copied_C = copied_bytes_C(plans, each, accumulates=self.accumulates)
        ep_rank = self._layout.index("ep")
        spare += int(copied_C[ep_rank])
        self.memory.begin(spare)
        may_copy = any(plan.may_copy_to(ep_rank) for plan in plans)
        return int(SHARE_OF_FREE * -self._most(-spare if may_copy else -ANY_BYTES))

    def _bytes_at_owner(self, cost_group: CostGroup) -> int:
        """Of a rank with as many experts as the mean, and one of each layer at least: where experts
        are few there is room for a replica all the same."""
        owners = [self.layers[layer].routed.layer_context.plan.owner for layer in cost_group.layers]
        with_experts = np.any([owner.holds_EC.any(axis=0) for owner in owners], axis=0)
        num_experts = sum(owner.num_experts for owner in owners) // np.count_nonzero(with_experts)
        return max(num_experts, len(owners)) * bytes_of(self._replicas_of(cost_group).like)

    @property
    def _layout(self) -> ParallelLayout:
        return self.layers[0].routed.layer_context.layout

    @property
    def device(self) -> torch.device:
        replicas = self.layers[0].routed.replicas
        held = (parameter for layer in self.layers for parameter in layer.parameters)
        return next(held).device if replicas is None else replicas.like[0].device

    def _replicas_of(self, cost_group: CostGroup) -> Replicas:
        replicas = self.layers[cost_group.layers[0]].routed.replicas
        assert replicas is not None
        return replicas

    def _links(self, cost_group: CostGroup, rows: Sequence[Rows]) -> Links:
        grid = self._layout.grid
        if self.hardware is not None:
            return Links.of(self.hardware, grid)
        layer = cost_group.layers[0]
        num_rows = int(rows[layer].routed_CE.sum()) // max(len(rows[layer].passes), 1)
        row_bytes = self.layers[layer].routed.row_bytes.between
        peer_bytes = int(num_rows * row_bytes) // (grid.size * grid.num_ep_ranks)
        return Links.measured(self._layout, self._replicas_of(cost_group).like, peer_bytes)

    def _row_s_C(
        self, cost_group: CostGroup, seen_RL: Sequence[Sequence[Seen]]
    ) -> tuple[float, ...]:
        """Seconds a row of each EP rank; none where they are alike, or some have computed
        nothing."""
        grid = self._layout.grid
        # In Python, in order: every processor adds up the same.
        by_ep_rank: list[Seen] = [Seen()] * grid.num_ep_ranks
        for place, seen_L in enumerate(seen_RL):
            ep_rank = place // grid.etp_size % grid.num_ep_ranks
            by_ep_rank[ep_rank] = sum(
                (seen_L[layer] for layer in cost_group.layers), by_ep_rank[ep_rank]
            )
        if not all(seen.rows and seen.expert_s for seen in by_ep_rank):
            return ()
        row_s_C = tuple(seen.expert_s / seen.rows for seen in by_ep_rank)
        return row_s_C if max(row_s_C) > UNLIKE * min(row_s_C) else ()

    def _priced(
        self,
        cost_group: CostGroup,
        rows: Sequence[Rows],
        seen_RL: Sequence[Sequence[Seen]],
        sums: Sequence[Seen],
        exchanged_s: Sequence[float],
    ) -> CostGroup:
        links, replicas = self._links(cost_group, rows), self._replicas_of(cost_group)
        expert, replica_bytes = replicas.like, replicas.replica_bytes
        seen = sum((sums[layer] for layer in cost_group.layers), Seen())
        row_bytes, etp_row_bytes = self.layers[cost_group.layers[0]].routed.row_bytes
        num_ranks = self._layout.grid.world_size
        # all know all rows
        received_bytes = NUM_EXCHANGES * row_bytes * seen.most_received / num_ranks
        waited_s = sum(exchanged_s[layer] for layer in cost_group.layers)
        return replace(
            cost_group,
            row_s_C=self._row_s_C(cost_group, seen_RL),
            prices=Prices(
                row_s=seen.expert_s / max(seen.rows, 1),
                row_bytes=row_bytes,
                copy_s=replica_bytes / links.copy.bytes_per_s,
                inter_bytes_per_s=links.inter.bytes_per_s,
                intra_bytes_per_s=links.intra.bytes_per_s,
                cards=links.cards,
            ),
            expert_bytes=bytes_of(expert),
            # Optimizers step narrow weights in 32 bits.
            state_bytes=KEPT * sum(w.numel() * max(w.element_size(), 4) for w in expert),
            copy_latency_s=links.copy.latency_s,
            replica_bytes=replica_bytes,
            etp_row_bytes=etp_row_bytes,
            row_bytes_per_s=received_bytes / waited_s if waited_s else 0.0,
            links=links.prices,
        )


class Correction(NamedTuple):
    """What layers made of what links were measured to carry."""

    # of replicas, as a multiple of what they were thought to have; None where there were none
    copy_speed: float | None
    exchange_fit: ExchangeFit  # of exchanges


def _corrected(cost_group: CostGroup, found: Correction) -> CostGroup:
    speed, links = found.copy_speed or 1.0, cost_group.links
    if links is not None:
        copy_factor = links.copy_factor / speed
        links = replace(links, exchange_fit=found.exchange_fit, copy_factor=copy_factor)
    if found.copy_speed is None:
        return replace(cost_group, links=links)
    return replace(
        cost_group,
        copy_bytes_per_s=speed * cost_group.linked_bytes_per_s,
        copy_latency_s=cost_group.copy_latency_s / speed,
        links=links,
    )


@dataclass(frozen=True)
class Links:
    """What rows and replicas travel over."""

    copy: Link  # what replicas of weights wait for, in bytes that the busiest receiver takes in
    inter: Link  # what one node sends to the others
    intra: Link  # what an EP rank sends to the others of its node
    alone: Link  # what an EP rank sends to other nodes while no other of its node does
    start_s: float  # seconds of an exchange of next to nothing

    @property
    def cards(self) -> float:
        """By how much more a node sends than one of its EP ranks alone; 1 where that is not
        much."""
        cards = self.inter.bytes_per_s / self.alone.bytes_per_s
        return cards if cards > UNLIKE else 1.0

    @classmethod
    def of(cls, hardware: Hardware, grid: Grid) -> Links:
        """Those of a described cluster, which does not say whether EP ranks share a card."""
        copy, inter, intra = hardware.ep_rank_links(grid.size, grid.etp_size)
        return cls(copy, inter, intra, inter, inter.latency_s)

    @classmethod
    def measured(cls, layout: ParallelLayout, expert: Weights, peer_bytes: int) -> Links:
        """A quick look at this run's own communicators for replicas and for rows, of which a rank
        sends ``peer_bytes`` to a peer if they are even. Rows within nodes and rows between them are
        sent apart, each by all ranks at once; and rows between nodes by an EP rank of each.
        Collective."""
        device, node_C = expert[0].device, layout.node_C
        group, wire = layout.group("ep", PARAM), Wire.between(layout, INTER, device)
        assert wire.group is not None
        bench = Bench(clock_of(device), device, num_warm_ups=1, num_repeats=5, group=group)
        replicas = Level("of this run", group, layout.index("ep"), node_C, num_sharers=1)
        of_ep_ranks = replace(
            replicas,
            group=wire.group,
            num_sharers=layout.grid.etp_size,
            exchange=wire.all_to_all,
        )
        ep_ranks_of_node = int(np.bincount(node_C).max())
        of_nodes = replace(of_ep_ranks, num_sharers=ep_ranks_of_node * of_ep_ranks.num_sharers)
        is_far_CC = node_C[:, None] != node_C
        is_near_CC = ~is_far_CC & ~np.eye(len(node_C), dtype=bool)
        bytes_N = [max(peer_bytes, *PARTS) // part for part in PARTS]
        copy = measure_replicas(replicas, bench, Sizes((), bytes_of(expert), NUM_EXPERTS))
        inter = measure_pairs(of_nodes, bench, is_far_CC, bytes_N)
        intra = measure_pairs(of_ep_ranks, bench, is_near_CC, bytes_N)
        is_first_C = np.unique(node_C, return_index=True)[1]
        is_lone_CC = np.zeros_like(is_far_CC)
        is_lone_CC[np.ix_(is_first_C, is_first_C)] = is_far_CC[np.ix_(is_first_C, is_first_C)]
        alone = (
            measure_pairs(of_ep_ranks, bench, is_lone_CC, bytes_N)
            if ep_ranks_of_node > 1
            else inter
        )
        # An EP rank alone on its node has one link for all; on one node nothing goes to others.
        far, near = inter or intra or copy, intra or inter or copy
        found = copy, far, near, alone or far
        start = Link(bytes_per_s=1.0, latency_s=least_exchange_s(of_ep_ranks, bench))
        copy, far, near, lone, least = (
            slowest(link, device, layout.everyone) for link in (*found, start)
        )
        return cls(copy, far, near, lone, least.latency_s)

    @property
    def prices(self) -> LinkPrices:
        """Of rows and replicas, by who sends."""
        return LinkPrices(
            near_bytes_per_s=self.intra.bytes_per_s,
            far_bytes_per_s=self.alone.bytes_per_s,
            node_bytes_per_s=self.inter.bytes_per_s,
            start_s=self.start_s,
        )


def slowest(link: Link, device: torch.device, group: dist.ProcessGroup | None = None) -> Link:
    """The slowest of what all ranks of a group, or of the world, have measured. Collective.

    The ranks of an ETP group copy their parts of an expert each over a communicator of its own, and
    must plan alike.
    """
    seconds = torch.tensor([link.latency_s, 1 / link.bytes_per_s], dtype=torch.float64)
    latency_s, byte_s = max_in_place(seconds.to(device), group).tolist()
    return Link(bytes_per_s=1 / byte_s, latency_s=latency_s)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one layer, summed over passes."""

    window_s: float = 0.0  # what the host computed before the layer in forward
    num_windows: float = 0.0  # how often
    back_window_s: float = 0.0  # and behind it in backward
    num_back_windows: float = 0.0  # how often
    expert_s: float = 0.0  # experts, forward and backward
    rows: float = 0.0  # that they computed
    # exchanges of rows on their way to the experts, the wait for others with them
    dispatch_s: float = 0.0
    combine_s: float = 0.0  # and back
    combine_back_s: float = 0.0  # of gradients to the experts
    dispatch_back_s: float = 0.0  # and back
    most_received: float = 0.0  # rows that the EP rank which received most received, in one of them
    gather_s: float = 0.0  # replicas on their way
    reduce_s: float = 0.0  # their gradients

    def __add__(self, other: Seen) -> Seen:
        pairs = zip(vars(self).values(), vars(other).values())
        return Seen(*(mine + its for mine, its in pairs))

    @classmethod
    def of(cls, routed: RoutedExperts, rows: Rows) -> Seen:
        """Since its meter was asked last."""
        taken = [(timed.task, timed.seconds_from(timed)) for timed in routed.meter.take()]
        seen = [(task, end_s - start_s) for task, (start_s, end_s) in taken]
        plan, layout = routed.layer_context.plan, routed.layer_context.layout

        def times(op: Op, *, is_adjoint: bool) -> list[float]:
            return [s for task, s in seen if _is(task, op) and bool(task.adjoint_of) == is_adjoint]

        def num_passes(*, is_adjoint: bool) -> int:
            """Of all stripes together: replicas travel once for them."""
            first = [t for t, _ in seen if _is(t, ATTENTION) and t.chunk_range.start == 0]
            return sum(bool(task.adjoint_of) == is_adjoint for task in first)

        ahead, behind = (times(ATTENTION, is_adjoint=back) for back in (False, True))
        received_C = ep_rank_rows(plan.owner, plan.target, rows.routed_CE).received_C
        return cls(
            window_s=sum(ahead),
            num_windows=num_passes(is_adjoint=False),
            back_window_s=sum(behind),
            num_back_windows=num_passes(is_adjoint=True),
            expert_s=sum(s for task, s in seen if _is(task, EXPERT, OFFLOADED)),
            rows=int(rows.computed_C[layout.index("ep")]),
            dispatch_s=sum(times(DISPATCH, is_adjoint=False)),
            combine_s=sum(times(COMBINE, is_adjoint=False)),
            combine_back_s=sum(times(COMBINE, is_adjoint=True)),
            dispatch_back_s=sum(times(DISPATCH, is_adjoint=True)),
            most_received=int(received_C.max()),
            gather_s=sum(times(GATHER, is_adjoint=False)),
            reduce_s=sum(times(GATHER, is_adjoint=True)),
        )


def chunk_s(
    issued: Iterable[tuple[Task, float]], layout: ParallelLayout, device: torch.device
) -> tuple[float, float] | None:
    """Seconds that hosts took to issue the tasks of one chunk of tokens, forward and backward, the
    mean of all ranks; None where no device runs what is issued. Collective."""
    own = [[0.0, 0.0], [0.0, 0.0]]  # forward and backward: seconds, and of how many chunks
    for task, seconds in issued:
        if task.op.name in OF_CHUNKS:
            side = own[bool(task.adjoint_of)]
            side[0] += seconds
            side[1] += _is(task, EXPERT)
    reported = torch.tensor(own, dtype=torch.float64, device=device)
    (forward_s, num), (backward_s, num_back) = sum_in_place(reported, layout.everyone).tolist()
    return (forward_s / num, backward_s / num_back) if num and num_back else None


def exchange_s(ranks: Iterable[Seen]) -> float:
    """Of one layer: who comes late to an exchange makes the others wait, and itself takes as long
    as that takes; another one may be late for the next."""
    exchanges = zip(
        *(
            (seen.dispatch_s, seen.combine_s, seen.combine_back_s, seen.dispatch_back_s)
            for seen in ranks
        )
    )
    return sum(min(exchange_fit) for exchange_fit in exchanges)


def _is(task: Task, *ops: Op) -> bool:
    """Whether a task is of one of these kinds, in whichever stream."""
    return any(task.op.name == op.name for op in ops)


def of_all_ranks(
    seen: Sequence[Seen], layout: ParallelLayout, device: torch.device
) -> list[list[Seen]]:
    """What each rank that runs the same layers saw of each. Collective among them."""
    own_LX = torch.tensor([list(vars(each).values()) for each in seen], dtype=torch.float64)
    all_RLX = own_LX.new_zeros(layout.grid.world_size, *own_LX.shape, device=device)
    all_RLX[layout.place] = own_LX
    reported = sum_in_place(all_RLX, layout.everyone).tolist()
    return [[Seen(*layer) for layer in rank] for rank in reported]


LOOKED_AT = 100  # steps, where nobody chooses anything
SETTLING = 2  # steps after a change that do not count: programs are made, libraries warm up
DRIFTED = 1.3  # times what steps took before, or were expected to: costs have changed
NO_CHOICE = Choice("", 1.0, "")


@dataclass(eq=False)
class StepTimes:
    """Median seconds of some steps, agreed upon by all ranks: of the slowest. Between some of them
    a run evaluates, or saves."""

    every: int  # steps between two looks; 0 for none
    slowest: Callable[[float], float]  # of all ranks' seconds. Collective.
    clock: Callable[[], float] = time.perf_counter  # seconds now
    # seconds that steps took over those expected, by the name of a choice; the same on all ranks
    ratios: Mapping[str, float] = field(default_factory=dict, init=False)
    # they are others, by the latest step, than when its choice was last looked at
    has_drifted: bool = field(default=False, init=False)
    _choice: Choice = field(default=NO_CHOICE, init=False)
    _ends_s: list[float] = field(default_factory=list, init=False)

    @classmethod
    def of(
        cls, intervals: Intervals, device: torch.device, everyone: dist.ProcessGroup | None
    ) -> StepTimes:
        """For a strategy of such intervals, over the ranks that run the same layers."""

        def slowest(seconds: float) -> float:
            own = torch.tensor([seconds], dtype=torch.float64, device=device)
            return float(max_in_place(own, everyone))

        plans = intervals.weighs_replicas or intervals.measures
        return cls(intervals.choose_every or (LOOKED_AT if plans else 0), slowest)

    def after_step(self, step: int, choice: Choice | None) -> None:
        """Take the time. Collective in the last step but one before a look."""
        self.has_drifted = False
        if not self.every:
            return
        choice = choice or NO_CHOICE
        if choice.name != self._choice.name:
            self._ends_s.clear()
        self._choice = choice
        self._ends_s.append(self.clock())
        if self.is_due(step):
            if len(self._ends_s) > SETTLING + 1:
                self._look(choice)
            self._ends_s.clear()

    def is_due(self, step: int) -> bool:
        """Whether ranks report to each other behind a step: what is made beside the next knows of
        it."""
        return self.every > 0 and (step + 2) % self.every == 0

    def _look(self, choice: Choice) -> None:
        own_s = median(after - before for before, after in pairwise(self._ends_s[SETTLING:]))
        ratio = self.slowest(own_s) / choice.expected_s
        before = self.ratios.get(choice.name, ratio)
        self.has_drifted = not before / DRIFTED < ratio < before * DRIFTED
        self.ratios = {**self.ratios, choice.name: ratio}


@dataclass(eq=False)
class MemoryTaken:
    """By how much fuller the device was at its fullest moment. That is known of a choice under
    which it became fuller than it had ever been; nobody's peaks are reset."""

    # bytes that this rank had left at the fullest moment so far; None where nothing shows it
    spare: Callable[[], int | None]
    most: Callable[[int], int]  # of all ranks' numbers. Collective.
    # bytes more than before anything was copied, by the name of a choice, of the rank where that is
    # most; the same on all ranks
    taken: Mapping[str, int] = field(default_factory=dict, init=False)
    _free: int = field(default=0, init=False)  # where nothing is copied
    _latest: int | None = field(default=None, init=False)  # spare behind the step before
    _since: int = field(default=0, init=False)  # spare as the present choice began
    _name: str = field(default="", init=False)

    def begin(self, free: int) -> None:
        """Forget what was seen: this rank has so many bytes where nothing is copied."""
        self._free, self._latest, self._name = free, self.spare(), ""
        self.taken = {}

    def after_step(self, name: str, *, is_due: bool) -> None:
        """Look, behind a step that ran by the choice of this name, empty for none; where it is due,
        ranks report to each other. Collective then."""
        before, now = self._latest, self.spare()
        if before is None or now is None:  # nothing shows it, or nothing was measured yet
            return
        if name != self._name:
            self._name, self._since = name, before
        self._latest = now
        if is_due and name:
            took = self.most(self._free - now if now < self._since else 0)
            if took > 0:
                self.taken = {**self.taken, name: took}
