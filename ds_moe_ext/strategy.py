"""What a strategy is, and how JSON names one.

A strategy is a frozen dataclass: its fields are its JSON keys. One of the user's own is named
``"package.module:Class"``. Shape letters: C cells, E experts.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from ds_moe_ext.cost.exchange import Way
from ds_moe_ext.cost.prices import Prices
from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.placement import Placement, even_homes
from ds_moe_ext.planners.copy_split import Split
from ds_moe_ext.planners.layer_pipelines import NOWHERE, Measured, Placed
from ds_moe_ext.roles import Roles
from ds_moe_ext.schedule.program import Stage
from ds_moe_ext.schedule.task import INTER, Lane, Op, Schedule, Span, refined
from ds_moe_ext.schedule.wires import ALONE, Beside, programs
from ds_moe_ext.share import LocalElseHome, Share
from ds_moe_ext.strict import found_at

ROWS_ALONE = Prices(
    row_s=1.0, row_bytes=0.0, copy_s=0.0, inter_bytes_per_s=1.0, intra_bytes_per_s=1.0
)
"""Only how even the rows fall counts: for what has not been measured."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Layers whose experts are alike, so that they may change places.

    Attributes:
        layers: their numbers.
        prices: of their rows and copies.
        expert_bytes: weights of one expert; 0 until costs have been measured.
        copy_latency_s: seconds until the first byte of a copy arrives.
        row_bytes_per_s: what a cell receives in an exchange of rows, as measured; 0 until then.
        copy_bytes_per_s: likewise of copies, in steps that had some.
    """

    layers: tuple[int, ...]
    prices: Prices = ROWS_ALONE
    expert_bytes: int = 0
    copy_latency_s: float = 0.0
    row_bytes_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Job:
    """All that a planner may know. The same on every rank.

    Attributes:
        rows: rows that each sender is predicted to route to each expert, of each layer, int64
            ``[C, E]``; all zero before the first step.
        homes: where the weights of each layer's experts live.
        node_C: node of each cell.
        pools: every layer is in one of them.
        window_s: seconds that the host computes before each layer in forward, which can hide
            copies; 0 until it has been measured.
        back_window_s: and behind each layer in backward.
        free_bytes: memory of a rank for copies, of all layers together.
        accumulates: several micro-batches make a step.
        pipelines: what pipelines cost; None until it has been measured.
        stacks: number of each layer's stack: layers of one run one after the other in a pass, those
            of two at different times; none where there is one stack.
    """

    rows: tuple[np.ndarray, ...]
    homes: tuple[Placement, ...]
    node_C: np.ndarray
    pools: tuple[Pool, ...]
    window_s: tuple[float, ...] = ()
    back_window_s: tuple[float, ...] = ()
    free_bytes: int = 0
    accumulates: bool = False
    pipelines: Measured | None = None
    stacks: tuple[int, ...] = ()

    @classmethod
    def at_start(
        cls,
        homes: Iterable[Placement],
        node_C: np.ndarray,
        pools: Iterable[Pool] | None = None,
        stacks: tuple[int, ...] = (),
    ) -> Job:
        """Before anything was seen; without pools all experts are alike."""
        homes = tuple(homes)
        layers = tuple(range(len(homes)))
        rows = tuple(np.zeros(home.holds_EC.T.shape, dtype=np.int64) for home in homes)
        given = (Pool(layers=layers),) if pools is None else tuple(pools)
        unknown_s = (0.0,) * len(homes)
        return cls(rows, homes, node_C, given, unknown_s, unknown_s, stacks=stacks)

    def follows(self, layer: int) -> bool:
        """Whether a layer runs after the one before it, in the same pass."""
        if not 0 < layer < len(self.homes):
            return False
        return not self.stacks or self.stacks[layer] == self.stacks[layer - 1]


T = TypeVar("T")


def followers(items: Sequence[T], stacks: Sequence[int]) -> tuple[T | None, ...]:
    """What follows each item in its stack; None after the last of a stack."""
    following = zip(stacks, (*stacks[1:], None), (*items[1:], None))
    return tuple(item if stack == own else None for own, stack, item in following)


class Destination(NamedTuple):
    """Where rows go: who holds copies, and how they divide the rows."""

    target: Placement
    share: Share


class Carried(NamedTuple):
    """How the block before a layer hides the transfers of its copies.

    Attributes:
        gathers: experts that are copied while the block before computes its experts, and those
            while it computes what follows them.
        reductions: experts whose gradients travel home before the backward of the block before
            comes to its experts, and those during it.
    """

    gathers: Split
    reductions: Split


@dataclass(frozen=True, eq=False)
class Plan:
    """What a strategy decided for one layer, until the next plan.

    Attributes:
        home: where an expert's weights and optimizer state live.
        target: where the expert computes this step.
        share: how the copies of an expert divide each sender's rows.
        forward_degree: spans that the tokens of a forward pass are cut into.
        backward_degree: and of a backward pass.
        rematerialize: free the copies after forward and gather them again for backward.
        revise: where copies may be added once the rows of a pass are known: from the rows, int64
            ``[C, E]``, to a target that holds what this one does and more, and its share. Pure.
        carried: the block before launches the copies; else the layer's own, as it begins.
        successor: the plan of the next step, from the rows of this one, int64 ``[C, E]``; None asks
            the strategy, for all layers together. Pure.
        reductions: of dense gradients, beside the layer's backward.
        way: of rows between the cells.
    """

    home: Placement
    target: Placement
    share: Share
    forward_degree: int = 1
    backward_degree: int = 1
    rematerialize: bool = False
    revise: Callable[[np.ndarray], Destination] | None = None
    carried: Carried | None = None
    successor: Callable[[np.ndarray], Plan] | None = None
    reductions: Placed = NOWHERE
    way: Way = Way.DIRECT

    @classmethod
    def at_home(cls, home: Placement) -> Plan:
        """Every expert computes where it lives."""
        return cls(home, home, LocalElseHome(home, home))

    @property
    def has_copies(self) -> bool:
        """Whether an expert may compute elsewhere than at home."""
        return self.target is not self.home or self.revise is not None

    @property
    def is_joined(self) -> bool:
        """Whether the weights are joined from homes and copies; also where a cell is home to none
        of the experts, so that its rank takes part in backward whatever has a gradient there."""
        return self.has_copies or not self.home.holds_EC.any(axis=0).all()

    @property
    def pieces(self) -> tuple[Span, ...]:
        """Spans that those of both directions are made of; none where they are cut alike."""
        if self.forward_degree == self.backward_degree:
            return ()
        return refined(self.num_chunks, self.forward_degree, self.backward_degree)

    @property
    def num_chunks(self) -> int:
        """Finest chunks: both degrees divide them."""
        return int(np.lcm(self.forward_degree, self.backward_degree))


@dataclass(frozen=True, eq=False)
class Site:
    """A layer and what it runs by.

    Attributes:
        plan: the present plan.
        layout: the ranks' grid and groups.
        layer: number of the layer.
        following: the present plan of the next layer; None after the last of a stack.
    """

    plan: Plan
    layout: ParallelLayout
    layer: int
    following: Plan | None = None


@dataclass(frozen=True)
class Forecast:
    """What a strategy expects of one layer in one step, forward and backward, in seconds.

    Attributes:
        exchange_s: all exchanges of rows.
        expert_s: experts, where most is computed.
        gather_s: copies, as often as they travel in one pass.
        reduce_s: their gradients.
    """

    exchange_s: float
    expert_s: float
    gather_s: float
    reduce_s: float


@dataclass(frozen=True)
class Rhythm:
    """When a strategy decides anew, in optimizer steps; 0 is never.

    Attributes:
        window: steps whose mean load predicts the next.
        plan_every: steps between plans.
        shard_every: steps between new homes.
        measures: what pipelines cost is measured in the first steps, and then planned for.
    """

    window: int = 1
    plan_every: int = 0
    shard_every: int = 0
    measures: bool = False


class Strategy(ABC):
    """One way to run MoE layers. A subclass is a frozen dataclass."""

    @property
    def has_uneven_homes(self) -> bool:
        """Whether a layer's experts need not divide over the cells."""
        return False

    @property
    def slices_gradients(self) -> bool:
        """Whether plans have reductions of dense gradients."""
        return False

    def with_homes_that_stay(self) -> Strategy:
        """The same, for grids where an expert has several homes: none moves, unless a key says so.
        Pure."""
        return self

    def without_slices(self) -> Strategy:
        """The same, leaving dense gradients to the host."""
        return self

    @property
    def splits_experts(self) -> bool:
        """Whether the ranks of a cell may split every expert."""
        return False

    @property
    def ways(self) -> tuple[Way, ...]:
        """Ways of rows between the cells that plans may say; the first until costs are known."""
        return (Way.DIRECT,)

    @property
    def roles(self) -> Roles | None:
        """What the ranks of each grid do, where they do not all do the same."""
        return None

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Strategy:
        """The same, by what is known when a run starts. Pure but for asking.

        Args:
            devices: asks for the names of all ranks' devices; collective.
            micro_batch: samples that each rank calls the model with; None where that is not known.

        Raises:
            ValueError: it cannot work so.
        """
        return self

    def first_homes(
        self, num_experts: Sequence[int], pools: Iterable[Pool], num_cells: int
    ) -> tuple[Placement, ...]:
        """Where the experts of each layer live at first. Pure.

        Args:
            num_experts: of each layer.
            pools: every layer is in one of them.
            num_cells: of the grid.

        Raises:
            ValueError: they cannot be divided as asked for.
        """
        homes: dict[int, Placement] = {}
        for pool in pools:
            counts = [num_experts[layer] for layer in pool.layers]
            homes.update(zip(pool.layers, even_homes(counts, num_cells)))
        return tuple(homes[layer] for layer in range(len(num_experts)))

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        """The (axis, lane) pairs that need a communicator. Pure."""
        return (("ep", INTER),)

    def rhythm(self) -> Rhythm:
        """When it decides anew. Pure."""
        return Rhythm()

    @abstractmethod
    def plan(self, job: Job) -> tuple[Plan, ...]:
        """One plan a layer. Pure: equal jobs give equal plans on every rank."""

    def homes(self, job: Job) -> tuple[Placement, ...]:
        """Where experts shall live from now on; asked every ``shard_every`` steps. Pure."""
        return job.homes

    def remarks(self, job: Job) -> tuple[str, ...]:
        """What its keys cannot do here, a line each, for a person as a run starts. Pure.

        Each names the key and what to set. Of what is measured later ``describe`` tells.
        """
        return ()

    def describe(self, job: Job) -> str:
        """What it makes of what was measured, for a person; empty if it has nothing to say."""
        return ""

    def forecast(self, job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
        """What its model says of rows by cell and expert under a plan; None if it has none. Pure.

        Costs must have been measured.
        """
        return None

    def beside(self, site: Site) -> Beside:
        """What goes on beside the rows of a layer. Pure."""
        return ALONE

    def schedules(self, site: Site, *, gated: bool) -> tuple[Schedule, Schedule]:
        """Forward and backward of one layer; ``gated`` as in ``wires.layer_schedule``. Pure.

        The rows travel all at once; or, where a pipeline is laid over the strategy, as that says.
        None can be laid over a strategy with schedules of its own.
        """
        return programs(site.layer, gated=gated, beside=self.beside(site))

    def stages(self, site: Site) -> Mapping[Op, Stage]:
        """Stages that differ from the common ones; usually none. Pure.

        What a stage makes of a span of tokens depends on that span alone, for a pipeline that is
        laid over the strategy cuts them, in backward otherwise than in forward. One for experts
        needs these whole.
        """
        return {}


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


def class_at(path: str, where: str) -> type:
    """The strategy class at ``"package.module:Class"``.

    Args:
        path: as JSON gives it.
        where: dotted name of the key, for errors.

    Raises:
        ValueError: there is none, or it is no strategy, or not a dataclass.
    """
    cls = found_at(path, where, "'my_package.my_module:MyStrategy'")
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(
            f"{where} is {path!r}, which is not a dataclass; make it one: its fields "
            "are its JSON keys"
        )
    if not issubclass(cls, Strategy) or inspect.isabstract(cls):
        raise ValueError(
            f"{where} is {path!r}, which is no strategy; derive it from "
            "ds_moe_ext.strategy.Strategy, and give it a plan(self, job)"
        )
    return cls
