# SPDX-License-Identifier: Apache-2.0
"""What a strategy is, what it is given and what it answers, and how JSON names one.

A ``Strategy`` is a frozen dataclass: its fields are its JSON keys. From a ``Job``, all that a
planner may know, it makes a ``Plan`` for each layer; at a ``LayerContext``, a layer and its plan,
it says by which schedules that runs. ``Overlay`` and ``Choosing`` are strategies made of others.
One of the user's own is named ``"package.module:Class"``. Shape letters: C EP ranks, E experts.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ds_moe_ext.core.layout import NODE_AXES, ParallelLayout, Roles, Striping
from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, Rule, Share
from ds_moe_ext.core.transfer import TransferSize, gather_rounds
from ds_moe_ext.older_names import accepts_older
from ds_moe_ext.planning.exchange_costs import BY_NODES, LinkPrices, Way
from ds_moe_ext.planning.layer_pipelines import NOWHERE, Measured, Placed
from ds_moe_ext.planning.prices import NUM_EXCHANGES, Prices, RoutedRows, busiest_link
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.schedule.orders import (
    PIPELINES,
    Beside,
    Cutting,
    LayerTasks,
    Pipeline,
    Slices,
    programs,
)
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.stripes import A2E, E2A
from ds_moe_ext.schedule.task import INTER, PARAM, ChunkRange, Op, Schedule, Stream, refined
from ds_moe_ext.strict import found_at

ROWS_ALONE = Prices(
    row_s=1.0, row_bytes=0.0, copy_s=0.0, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
)
"""Only how even the rows fall counts: for what has not been measured."""


@accepts_older
@dataclass(frozen=True, kw_only=True)
class CostGroup:
    """Layers whose experts are alike, so that they may change places."""

    layers: tuple[int, ...]  # their numbers
    prices: Prices = ROWS_ALONE  # of their rows and replicas
    # seconds that each EP rank's experts compute on a row, as ``prices.row_s``; none where EP ranks
    # are alike
    row_s_C: tuple[float, ...] = ()
    expert_bytes: int = 0  # weights of one expert; 0 until costs have been measured
    # what goes with one to a new owner: its weights as they are stepped, and two states of each, as
    # Adam has; likewise
    state_bytes: int = 0
    copy_latency_s: float = 0.0  # seconds until the first byte of a replica arrives
    # of a replica on its way, the mean of there and, as gradients, back; 0 where it is
    # ``expert_bytes``
    replica_bytes: float = 0.0
    etp_row_bytes: float = 0.0  # of a row within an ETP group; 0 where it is as between EP ranks
    # what an EP rank receives in an exchange of rows, as measured; 0 until then
    row_bytes_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0  # likewise of replicas, in steps that had some
    # what both wait for, by who sends; None until it has been measured
    links: LinkPrices | None = None
    top_k: int = 1  # rows of a token, of which ``Plan.sends_once`` sends fewer

    @property
    def travelling_bytes(self) -> float:
        """Of a replica on its way, encoded or as it is."""
        return self.replica_bytes or self.expert_bytes

    @property
    def linked_bytes_per_s(self) -> float:
        """What the links of replicas carry, by prices; ``copy_bytes_per_s`` is what was
        measured."""
        return self.travelling_bytes / self.prices.copy_s

    @property
    def copied_s(self) -> float:
        """Seconds that a replica travels, but for its latency: as measured, else by links."""
        if self.copy_bytes_per_s:
            return self.travelling_bytes / self.copy_bytes_per_s
        return self.prices.copy_s

    def replicas_s(self, owner: Placement, target: Placement, node_C: np.ndarray) -> float:
        """Seconds of the replicas that a target has beside owners: on the mean EP rank, by who
        sends, if that was measured; else by what the busiest EP rank or node sends or receives.
        Pure."""
        if target is owner:
            return 0.0
        if self.links is None:
            experts = busiest_link(owner, owner, target, node_C)
            return self.copy_latency_s + experts * self.copied_s if experts else 0.0
        transfers = gather_rounds(owner, target, node_C, TransferSize(self.expert_bytes))
        each_s = self.links.replicas_s_C(transfers, self.travelling_bytes).tolist()
        return math.fsum(each_s) / len(each_s)

    def added_s(self, plan: Plan, target: Placement, node_C: np.ndarray) -> float:
        """Seconds of the replicas that a pass adds to its plan's, there and as gradients back,
        which nothing hides. Pure."""
        experts = busiest_link(plan.owner, plan.target, target, node_C) if self.expert_bytes else 0
        each_s = self.copy_latency_s + self.copied_s if experts else 0.0
        return plan.added_transfers * experts * each_s


class Choice(NamedTuple):
    """Which of several strategies plans."""

    name: str  # of it
    expected_s: float  # seconds of a step by its price, when it was chosen
    reported: str  # why, for a person
    left_out: tuple[str, ...] = ()  # names of those that a rank has no memory for
    # seconds that a step was expected to take under each candidate, by what steps have taken so
    # far; with its name
    among_s: tuple[tuple[str, float], ...] = ()

    def is_like(self, other: Choice | None) -> bool:
        """Whether the other was as this is, for a person."""
        return other is not None and (self.name, self.left_out) == (other.name, other.left_out)


@dataclass(frozen=True, eq=False)
class Past:
    """What is known of the steps that have run, for who chooses between strategies."""

    step: int  # number of the one that is planned
    predicted: tuple[np.ndarray, ...]  # rows that were predicted for the latest, as ``Job.rows``
    came: tuple[np.ndarray, ...]  # rows that came in it
    choice: Choice | None = None  # by which it was planned; None before the first
    # seconds that steps took over those expected, by the name of a choice
    ratios: Mapping[str, float] = field(default_factory=dict)
    # bytes that a rank's memory was seen to be fuller by in steps under a choice than before any
    # was copied, by its name; of the rank where that is most
    taken: Mapping[str, int] = field(default_factory=dict)


@accepts_older
@dataclass(frozen=True, eq=False)
class Job:
    """All that a planner may know. The same on every rank."""

    # rows that each sender is predicted to route to each expert, of each layer, ``[C, E]``, int32
    # where they fit, else int64: they are held for all layers, and sums are int64; all zero before
    # the first step
    rows: tuple[np.ndarray, ...]
    owners: tuple[Placement, ...]  # where the weights of each layer's experts live
    node_C: np.ndarray  # node of each EP rank
    cost_groups: tuple[CostGroup, ...]  # every layer is in one of them
    # seconds that the host computes before each layer in forward, which can hide replicas, and
    # behind each layer in backward; 0 until they have been measured
    window_s: tuple[float, ...] = ()
    back_window_s: tuple[float, ...] = ()
    free_bytes: int = 0  # memory of a rank for replicas, of all layers of the run together
    accumulates: bool = False  # several micro-batches make a step
    pipelines: Measured | None = None  # what pipelines cost; None until it has been measured
    # number of each layer's stack: layers of one run one after the other in a pass, those of two at
    # different times; none where there is one stack
    stacks: tuple[int, ...] = ()
    # part of the latest step's rows that went to other experts than those before; 1 where it is not
    # known
    drift: float = 1.0
    past: Past | None = None  # of strategies that choose between others; else None
    # layers whose replicas are in memory together even where they are freed after forward; of the
    # stripes of ranks with roles those of a layer compute while the next one's come
    layers_at_once: int = 1
    of_layers: int = 0  # layers of the run, where these are some of them; 0: these are all
    # plans that the layers run by, made of the same owners and costs, for strategies whose plans
    # stay as long as they are good; none where all is to be planned anew
    present: tuple[Plan, ...] = ()

    @property
    def num_layers(self) -> int:
        """Of the run."""
        return self.of_layers or len(self.owners)

    def cost_group_of(self, layer: int) -> CostGroup:
        return next(cost_group for cost_group in self.cost_groups if layer in cost_group.layers)

    @property
    def measured_cost_groups(self) -> list[CostGroup]:
        """Those whose costs are known; of others nothing is copied."""
        return [cost_group for cost_group in self.cost_groups if cost_group.expert_bytes]

    @classmethod
    def at_start(
        cls,
        owners: Iterable[Placement],
        node_C: np.ndarray,
        cost_groups: Iterable[CostGroup] | None = None,
        stacks: tuple[int, ...] = (),
    ) -> Job:
        """Before anything was seen; without pools all experts are alike."""
        owners = tuple(owners)
        rows = tuple(np.zeros(owner.holds_EC.T.shape, dtype=np.int32) for owner in owners)
        alike = CostGroup(layers=tuple(range(len(owners))))
        given = (alike,) if cost_groups is None else tuple(cost_groups)
        unknown_s = (0.0,) * len(owners)
        return cls(rows, owners, node_C, given, unknown_s, unknown_s, stacks=stacks)

    @cached_property
    def routed(self) -> RoutedRows:
        """Its rows, of all layers together."""
        return RoutedRows.of(self.rows, self.node_C)

    def of(self, layers: Sequence[int]) -> Job:
        """The job of some of its layers, as if they followed each other, each cost group's among
        them."""
        place_of = {layer: place for place, layer in enumerate(layers)}
        cost_groups = (
            replace(
                cost_group,
                layers=tuple(place_of[each] for each in cost_group.layers if each in place_of),
            )
            for cost_group in self.cost_groups
        )
        past, pipelines = self.past, self.pipelines
        if past is not None:
            predicted, came = _of(past.predicted, layers), _of(past.came, layers)
            past = replace(past, predicted=predicted, came=came)
        if pipelines is not None:
            pipelines = replace(pipelines, layers=_of(pipelines.layers, layers))
        tables = ("rows", "owners", "window_s", "back_window_s", "stacks", "present")
        own: dict[str, Any] = {name: _of(vars(self)[name], layers) for name in tables}
        return replace(
            self,
            cost_groups=tuple(cost_group for cost_group in cost_groups if cost_group.layers),
            pipelines=pipelines,
            past=past,
            of_layers=self.num_layers,
            **own,
        )

    def follows(self, layer: int) -> bool:
        """Whether a layer runs after the one before it, in the same pass."""
        if not 0 < layer < len(self.owners):
            return False
        return not self.stacks or self.stacks[layer] == self.stacks[layer - 1]


T = TypeVar("T")


def _of(items: Sequence[T], layers: Sequence[int]) -> tuple[T, ...]:
    """Those of some layers; none where there are none."""
    return tuple(items[layer] for layer in layers) if items else ()


def followers(items: Sequence[T], stacks: Sequence[int]) -> tuple[T | None, ...]:
    """What follows each item in its stack; None after the last of a stack."""
    following = zip(stacks, (*stacks[1:], None), (*items[1:], None))
    return tuple(item if stack == own else None for own, stack, item in following)


class Destination(NamedTuple):
    """Where rows go: who holds replicas, and how they divide the rows."""

    target: Placement
    share: Rule

    @property
    def all_stay(self) -> bool:
        """Whether no row leaves its EP rank, whatever is routed: each holds every expert, and
        computes its own rows where it holds their expert."""
        return self.target.is_full and type(self.share) in (LocalElseOwner, NearestReplica)


class Carried(NamedTuple):
    """How the block before a layer hides the transfers of its replicas."""

    # experts that are copied while the block before computes its experts, and those while it
    # computes what follows them
    gathers: Split
    # experts whose gradients travel to the owner before the backward of the block before comes to
    # its experts, and those during it
    reductions: Split


@accepts_older
@dataclass(frozen=True, eq=False)
class Plan:
    """What a strategy decided for one layer, until the next plan."""

    owner: Placement  # where an expert's weights and optimizer state live
    target: Placement  # where the expert computes this step
    share: Rule  # how the replicas of an expert divide its rows
    forward_degree: int = 1  # chunk ranges that the tokens of a forward pass are cut into
    backward_degree: int = 1  # and of a backward pass
    # free the replicas after forward and gather them again for backward
    rematerialize: bool = False
    # where replicas may be added once the rows of a pass are known: from the rows, int64 ``[C,
    # E]``, to a target that holds what this one does and more, and its share. Pure.
    revise: Callable[[np.ndarray], Destination] | None = None
    # how the block before launches the replicas; else the layer's own does, as it begins
    carried: Carried | None = None
    # to the plan of the next step, from the rows of this one, int64 ``[C, E]``; None asks the
    # strategy, for all layers together. Pure.
    successor: Callable[[np.ndarray], Plan] | None = None
    reductions: Placed = NOWHERE  # of dense gradients, beside the layer's backward
    way: Way = Way.DIRECT  # of rows between the EP ranks
    # rows by sender and expert that it was made for, int64; None: of no use
    predicted_CE: np.ndarray | None = None
    # the share by the paper's own rule on any target, where ``share`` is another; for the report,
    # which shows what that one gains
    by_paper: Callable[[Placement], Share] | None = None
    # each token's row travels once to each EP rank that has some of its experts, and one row comes
    # back; else one for each choice. Not where experts have replicas.
    sends_once: bool = False
    choice: Choice | None = None  # of the strategy that made it, where there are several

    @classmethod
    def at_owner(cls, owner: Placement) -> Plan:
        """Every expert computes where it lives."""
        return cls(owner, owner, LocalElseOwner(owner, owner))

    @property
    def destination(self) -> Destination:
        """Where rows go, unless that is revised."""
        return Destination(self.target, self.share)

    def destination_of(self, rows_CE: np.ndarray) -> Destination:
        """Where these rows go, int64 ``[C, E]``, now that they are known. Pure."""
        return self.destination if self.revise is None else self.revise(rows_CE)

    def may_copy_to(self, ep_rank: int) -> bool:
        """Whether an EP rank may get replicas, by this plan or once rows are known."""
        return True

    @property
    def has_replicas(self) -> bool:
        """Whether an expert may compute elsewhere than at the owner."""
        return self.target is not self.owner or self.revise is not None

    @property
    def added_transfers(self) -> int:
        """Of a replica that is added once rows are known: there, back, and there again if
        freed."""
        return 3 if self.rematerialize else 2

    @property
    def is_joined(self) -> bool:
        """Whether the weights are joined from owners and replicas; also where an EP rank owns none
        of the experts, so that its rank takes part in backward whatever has a gradient there."""
        return self.has_replicas or not self.owner.is_everywhere

    @property
    def pieces(self) -> tuple[ChunkRange, ...]:
        """Chunk ranges that those of both directions are made of; none where they are cut alike."""
        if self.forward_degree == self.backward_degree:
            return ()
        return refined(self.num_chunks, self.forward_degree, self.backward_degree)

    def pieces_of(self, split: Split | None) -> list[Placement]:
        """Who holds what with each piece of the replicas alone; or with all, if nothing is
        split."""
        if split is None:
            return [self.target]
        pieces = []
        for experts in map(list, split):
            replicas_EC = np.zeros_like(self.target.holds_EC)
            replicas_EC[experts] = self.target.holds_EC[experts]
            pieces.append(self.owner.with_replicas(replicas_EC))
        return pieces

    @property
    def num_chunks(self) -> int:
        """Finest chunks: both degrees divide them."""
        return math.lcm(self.forward_degree, self.backward_degree)


@accepts_older
@dataclass(frozen=True, eq=False)
class LayerContext:
    """A layer and what it runs by."""

    plan: Plan  # the present plan
    layout: ParallelLayout  # the ranks' grid and groups
    layer: int  # number of the layer
    # the present plan of the next layer; None after the last of a stack
    following: Plan | None = None
    # the host has a thread of its own beside those that issue, as on a CPU; where it has none,
    # plans are made behind the pass
    has_host_stream: bool = True

    @property
    def frees_replicas(self) -> bool:
        """Whether the plan's replicas are freed between forward and backward: not those of the last
        layer, whose backward is next."""
        return self.plan.is_joined and self.plan.rematerialize and self.following is not None

    @property
    def sends_once(self) -> bool:
        """Whether rows travel, each once to an EP rank."""
        return self.plan.sends_once and self.layout.grid.num_ep_ranks > 1


@dataclass(frozen=True)
class Forecast:
    """What a strategy expects of one layer in one step, forward and backward, in seconds."""

    exchange_s: float  # all exchanges of rows
    expert_s: float  # experts, where most is computed
    gather_s: float  # replicas, as often as they travel in one pass
    reduce_s: float  # their gradients


@accepts_older
@dataclass(frozen=True)
class Intervals:
    """When a strategy decides anew, in optimizer steps; 0 is never.

    What rows and replicas cost is measured for a strategy that plans every so often, or says
    ``costs``; when it is known, and when that changes, plans are made anew in any case.
    """

    # steps whose mean load predicts the next; None: the last one or the mean of the last five,
    # whichever would have predicted the latest step better
    window: int | None = 1
    plan_every: int = 0  # steps between plans
    # and while loads have not moved since the last one; 0: as many
    steady_every: int = 0
    shard_every: int = 0  # steps between new owners
    costs: bool = False  # what rows and replicas cost is measured in the first steps
    measures: bool = False  # what pipelines cost is, too
    choose_every: int = 0  # steps between choices of who plans; ``Job.past`` is given then

    @property
    def weighs_replicas(self) -> bool:
        """Whether plans go by what rows and replicas cost."""
        return self.costs or self.plan_every > 0


class Keys(NamedTuple):
    """What a person sets to have a strategy do something otherwise, as errors name it."""

    ways: str = "the strategy's ways"  # the way of rows between EP ranks
    # whether dense gradients are reduced beside layers
    slices_gradients: str = "the strategy's slices_gradients"
    owners: str = "shard_every of the strategy's intervals"  # steps between new owners
    # rows that each rank sends to each expert
    static_capacity: str = "the strategy's static_capacity"
    # whether each token's row travels once to an EP rank
    sends_once: str = "sends_once of the strategy's plans"
    cuda_graphs: str = "the strategy's cuda_graphs"  # whether passes are recorded and replayed


@accepts_older
class Strategy(ABC):
    """One way to run MoE layers. A subclass is a frozen dataclass; only ``plan`` has no default."""

    @abstractmethod
    def plan(self, job: Job) -> tuple[Plan, ...]:
        """One plan a layer. Pure: equal jobs give equal plans on every rank. It may be called in
        another thread, while layers run."""

    def intervals(self) -> Intervals:
        """When it decides anew. Pure."""
        return Intervals()

    @property
    def expected(self) -> str:
        """What it does, by the keys that were chosen, and where a gain is expected: a phrase for a
        person at start; empty says nothing. Pure."""
        return ""

    # Owners.

    has_uneven_owners: bool = False
    """Whether a layer's experts need not divide over the EP ranks."""

    def first_owners(
        self, num_experts: Sequence[int], cost_groups: Iterable[CostGroup], num_ep_ranks: int
    ) -> tuple[Placement, ...]:
        """Where the experts live at first, of which there are ``num_experts`` in each layer; every
        layer is in one of the pools. What cannot be divided as asked for is a ``ValueError``.
        Pure."""
        owners: dict[int, Placement] = {}
        for cost_group in cost_groups:
            counts = [num_experts[layer] for layer in cost_group.layers]
            owners.update(zip(cost_group.layers, even_owners(counts, num_ep_ranks)))
        return tuple(owners[layer] for layer in range(len(num_experts)))

    def owners(self, job: Job) -> tuple[Placement, ...]:
        """Where experts shall live from now on; asked every ``shard_every`` steps. Pure."""
        return job.owners

    def with_owners_that_stay(self) -> Strategy:
        """The same, for hosts and grids where none can move: none does, unless a key says so.
        Pure."""
        return self

    # How rows travel.

    @property
    def ways(self) -> tuple[Way, ...]:
        """Ways of rows between the EP ranks that plans may say; the first until costs are known."""
        return (Way.DIRECT,)

    splits_experts: bool = False
    """Whether it may be chosen for it that the ranks of an ETP group split every expert."""

    @property
    def slices_gradients(self) -> bool:
        """Whether plans have reductions of dense gradients."""
        return False

    def without_slices(self) -> Strategy:
        """The same, leaving dense gradients to the host."""
        return self

    def with_gradients_left(self) -> Strategy:
        """The same, for hosts whose dense gradients cannot be sliced: they are left to the host,
        unless a key says otherwise. Pure."""
        return self

    @property
    def static_capacity(self) -> int | None:
        """Rows that each rank sends to each expert in every pass, padded; None: those there are.
        Plans may neither copy experts nor cut tokens then."""
        return None

    @property
    def orders_by_masks(self) -> bool:
        """Whether rows come to their places by products with a mask, as GShard has it, and not by
        an index; only where they are padded."""
        return False

    @property
    def cuda_graphs(self) -> bool:
        """Whether training passes are recorded as CUDA graphs, where one rank has all experts."""
        return False

    @property
    def sums_replicas_in_float32(self) -> bool:
        """Whether a rank keeps the sums of replicas' gradients so, where these are narrower."""
        return False

    def uses(self) -> tuple[tuple[str, Stream], ...]:
        """The (axis, stream) pairs that need a communicator: of rows by these ways or between
        roles, and of replicas, which one that never has any may leave out. Pure."""
        if self.has_roles:
            return (("ep", INTER), ("ep", PARAM), ("ep", A2E), ("ep", E2A))
        return (("ep", INTER), ("ep", PARAM), *along_nodes(self.ways))

    def beside(self, layer_context: LayerContext) -> Beside:
        """What goes on beside the rows of a layer: what its plan and the next layer's say. Pure."""
        following = layer_context.following
        is_copied = layer_context.plan.is_joined and replicates(self)
        return Beside(
            copied=is_copied,
            carried=layer_context.plan.carried is not None,
            carries=following is not None and following.carried is not None,
            plans=layer_context.plan.successor is not None and layer_context.has_host_stream,
            freed=is_copied and layer_context.frees_replicas,
        )

    def schedules(self, layer_context: LayerContext, *, gated: bool) -> tuple[Schedule, Schedule]:
        """Forward and backward of one layer; ``gated`` as in ``orders.programs``. Rows travel in as
        many chunks as the plan says, between EP ranks and within them at the same time. None can be
        laid over a strategy with schedules of its own. Pure."""
        cutting = cutting_of(layer_context, PIPELINES["fsmoe"])
        return programs(
            layer_context.layer, gated=gated, beside=self.beside(layer_context), cutting=cutting
        )

    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        """Stages that differ from the common ones; usually none. What one makes of a chunk range of
        tokens depends on that chunk range alone: a plan may cut them, in backward otherwise than in
        forward. One for experts needs these whole. Pure."""
        return {}

    # What the ranks are.

    @property
    def roles(self) -> Roles | None:
        """What the ranks of each grid do, where they do not all do the same."""
        return None

    @property
    def has_roles(self) -> bool:
        """Whether they do not; the roles may only be known when it has settled."""
        return type(self).roles is not Strategy.roles

    @property
    def striping(self) -> Striping:
        """How micro-batches run where ranks have roles."""
        return Striping()

    @property
    def by_share(self) -> Mapping[str, Strategy]:
        """The same by each way for replicas to divide rows, by what stands behind its name then;
        none where that is no key. Pure."""
        return {}

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Strategy:
        """The same, by what is known when a run starts. What cannot work so is a ``ValueError``.

        Args:
            devices: asks for the names of all ranks' devices; collective.
            micro_batch: samples that each rank calls the model with; None where that is not known.
        """
        return self

    # What a person reads.

    @property
    def keys(self) -> Keys:
        """What errors ask a person to set."""
        return Keys()

    def notices(self, job: Job) -> tuple[str, ...]:
        """What its keys cannot do here, a line each with the key and what to set, for a person as a
        run starts. ``describe`` has what is measured later. Pure."""
        return ()

    def describe(self, job: Job) -> str:
        """What it makes of what was measured, for a person; empty if it has nothing to say."""
        return ""

    def describe_owners(self, job: Job, owners: Sequence[Placement]) -> str:
        """What is expected of the owners that ``owners(job)`` gave, for a person; empty if it has
        nothing to say. Pure."""
        return ""

    def forecast(self, job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
        """What is expected of rows by EP rank and expert under a plan, by what links carry and who
        sends what to whom, also where plans are made by less; None where that is not known.
        Pure."""
        cost_group = job.cost_group_of(layer)
        if cost_group.links is None or plan.way is not Way.DIRECT:
            return None
        target, rule = plan.destination_of(rows_CE)
        sent_CC = rule.of_rows(rows_CE).rows_between(rows_CE[:, None])[0]
        bytes_CC = cost_group.prices.row_bytes * sent_CC
        row_s_C = np.array(cost_group.row_s_C or cost_group.prices.row_s)
        frees = plan.rematerialize and job.follows(layer + 1)
        gathers, reductions = (plan.pieces_of(split) for split in plan.carried or (None, None))
        again = [plan.target] if frees else []
        gather_s, reduce_s = _replicas_s(
            cost_group, job.node_C, plan.owner, ([*gathers, *again], reductions)
        )
        degrees = plan.forward_degree, plan.backward_degree
        return Forecast(
            exchange_s=sum(
                NUM_EXCHANGES / 2 * cost_group.links.exchange_s(bytes_CC, job.node_C, degree)
                for degree in (() if plan.destination.all_stay else degrees)
            ),
            expert_s=float((row_s_C * sent_CC.sum(axis=0)).max()),
            gather_s=gather_s + cost_group.added_s(plan, target, job.node_C),
            reduce_s=reduce_s,
        )


def _replicas_s(
    cost_group: CostGroup, node_C: np.ndarray, owner: Placement, ways: Iterable[Sequence[Placement]]
) -> list[float]:
    """Seconds of replicas that travel piece by piece; of each way, which often have the same
    pieces."""
    known: dict[bytes, float] = {}
    sums = []
    for pieces in ways:
        keys = [piece.holds_EC.tobytes() for piece in pieces]
        for key, piece in zip(keys, pieces):
            if key not in known:
                known[key] = cost_group.replicas_s(owner, piece, node_C)
        sums.append(sum(known[key] for key in keys))
    return sums


def replicates(strategy: Strategy) -> bool:
    """Whether plans may have replicas: it uses a communicator for them. Pure."""
    return ("ep", PARAM) in strategy.uses()


def layer_tasks(strategy: Strategy, layer_context: LayerContext, *, gated: bool) -> LayerTasks:
    """All that runs of a layer, as the layer and ``schedule.step.whole_step`` take it. Pure."""
    return LayerTasks(
        strategy.beside(layer_context), *strategy.schedules(layer_context, gated=gated)
    )


def along_nodes(ways: Iterable[Way]) -> tuple[tuple[str, Stream], ...]:
    """What ways that lead by the nodes need of ``Strategy.uses``."""
    return () if BY_NODES.isdisjoint(ways) else tuple((axis, INTER) for axis in NODE_AXES)


def cutting_of(layer_context: LayerContext, pipeline: Pipeline) -> Cutting:
    """How the rows of a layer travel by its plan, in a pipeline's order and streams."""
    plan = layer_context.plan
    return Cutting(
        pipeline,
        plan.forward_degree,
        plan.backward_degree,
        sharded=layer_context.layout.grid.etp_size > 1,
        slices=Slices(*map(len, plan.reductions)),
        once=layer_context.sends_once,
    )


class Overlay(Strategy):
    """A strategy that is laid over another one, to say some things in its place.

    What a subclass does not say itself that one is asked, whatever it is: a member that
    ``Strategy`` gains needs no line here, and none is answered by a default in silence. A subclass
    has a field ``placing``, which is no JSON key (``strict.NOT_A_KEY``).
    """

    placing: Strategy

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name not in vars(Strategy):
            return super().__getattribute__(name)
        own, default = (inspect.getattr_static(cls, name) for cls in (type(self), Strategy))
        if own is not default:
            return super().__getattribute__(name)
        return self.placing.__getattribute__(name)

    def over(self, placing: Strategy) -> Overlay:
        """This one over another; a ``ValueError`` where that one says what this one would."""
        return replace(self, placing=placing)  # type: ignore[type-var]

    @property
    def by_share(self) -> Mapping[str, Strategy]:
        return {name: self.over(placing) for name, placing in self.placing.by_share.items()}

    def with_owners_that_stay(self) -> Overlay:
        return self.over(self.placing.with_owners_that_stay())

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Overlay:
        return self.over(self.placing.settled(devices, micro_batch))


class Choosing(Strategy):
    """A strategy whose plans are those of others, one at a time."""

    @abstractmethod
    def among(self, blocks: Mapping[str, Strategy]) -> Choosing:
        """The same, whose others have the keys of their own blocks: all built-in strategies by
        name. One that it cannot choose is a ``ValueError``. Pure."""


StrategyT = TypeVar("StrategyT", bound=type)
_STRATEGIES: dict[str, type] = {}


def register(name: str) -> Callable[[StrategyT], StrategyT]:
    """Give a strategy its JSON name."""

    def add(cls: StrategyT) -> StrategyT:
        if name in _STRATEGIES:
            raise ValueError(f"strategy {name!r} is already {_STRATEGIES[name].__qualname__}")
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__qualname__} must be a dataclass: its fields are JSON keys")
        _STRATEGIES[name] = cls
        return cls

    return add


def registered() -> Mapping[str, type]:
    """Strategies by JSON name."""
    return _STRATEGIES


def names_with(member: str) -> str:
    """JSON names of the strategies that have a member of their own, for errors."""
    own = (name for name, cls in _STRATEGIES.items() if member in vars(cls))
    return " or ".join(map(repr, own)) or "one of your own"


def class_at(path: str, where: str) -> type:
    """The strategy class at ``"package.module:Class"``; ``where`` is the key, for errors."""
    cls = found_at(path, where, "'my_package.my_module:MyStrategy'")
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(
            f"{where} is {path!r}, which is not a dataclass; make it one: its fields "
            "are its JSON keys"
        )
    if not issubclass(cls, Strategy) or inspect.isabstract(cls):
        raise ValueError(
            f"{where} is {path!r}, which is not a strategy; derive it from "
            "ds_moe_ext.Strategy, and give it a plan(self, job)"
        )
    return cls
