# SPDX-License-Identifier: Apache-2.0
"""Which ways to run a job are priced, and what each comes to. Pure.

``grids_for`` says on which grids a strategy can run, ``price_way`` what a step takes there: stage
by stage it asks the strategy for plans by the steps before, and prices these on those that came.
``Reached`` says what a cluster reaches of its datasheet, where nobody has measured it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link, Products
from ds_moe_ext.core.layout import Grid, divisors
from ds_moe_ext.core.placement import Placement, most_replicas
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.described_run import DescribedRun, MemoryUse, copied_bytes_C, stage_memory
from ds_moe_ext.planning.loads import LoadWindow
from ds_moe_ext.planning.model_shape import Training
from ds_moe_ext.planning.step_price import (
    Passes,
    StepPrice,
    order_of,
    pipeline_step,
    price_passes,
)
from ds_moe_ext.planning.strategy import Job, Plan, Strategy


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Assumptions, to be stated with every price that rests on them: peaks of matrix products and
    links are never reached. Measured lines of a file stand as they are."""

    products: float = 0.6  # part of a device's peak that matrix products reach
    memory: float = 0.8  # part of the rate of its memory
    links: float = 0.8  # part of a link's rate
    start_s: float = 15e-6  # seconds until a transfer begins, where the file states none
    # how often a layer's dense part reads or writes a token's hidden state in memory, besides what
    # its matrix products do: norms, residuals, rotations, activations
    passes: int = 16

    def __post_init__(self) -> None:
        for name in ("products", "memory", "links"):
            if not 0 < vars(self)[name] <= 1:
                raise ValueError(f"{name} is {vars(self)[name]}; a part is above 0, at most 1")

    def of(self, hardware: Hardware) -> Hardware:
        """The cluster as it is reckoned with."""
        device = hardware.device
        rate = device.memory_bytes_per_s
        return replace(
            hardware,
            device=replace(
                device,
                memory_bytes_per_s=None if rate is None else self.memory * rate,
                products=self._products(device),
                flops_per_s=Flops(),
            ),
            intra=self._link(hardware.intra),
            inter=self._link(hardware.inter),
        )

    def _products(self, device: Device) -> Products:
        lines = {}
        for name, measured in vars(device.products).items():
            line = device.product(name)
            if line is not None and measured is None:
                rate = self.products * line.multiply_adds_per_s
                line = replace(line, multiply_adds_per_s=rate)
            lines[name] = line
        return Products(**lines)

    def _link(self, link: Link | None) -> Link | None:
        if link is None or link.r_squared is not None:
            return link
        return Link(
            bytes_per_s=self.links * link.bytes_per_s, latency_s=link.latency_s or self.start_s
        )


PRICED = 1  # steps of the loads whose price is taken; those before them are what plans go by


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run a job."""

    name: str  # of the strategy, for a person
    strategy: Strategy  # with its keys
    grid: Grid  # of the ranks
    training: Training | None = None  # other than the job's: its micro-batch, or recomputation
    trained: str = ""  # in what it is other, for a person; begins with a comma

    @property
    def shown(self) -> str:
        """Its name, and how it trains where that is not as the job says."""
        return self.name + self.trained


@dataclass(frozen=True, eq=False)
class Priced:
    """What a way comes to."""

    way: Way  # which
    steps: tuple[StepPrice, ...]  # each step that was priced
    plans: tuple[Plan, ...]  # of the last of these: what is placed, not where rows go
    memory: MemoryUse  # of the fullest rank, replicas with it
    reported: str  # by the strategy, of what it makes of the costs; empty if nothing
    tokens: int  # of a step, of all ranks
    fullest: int = 0  # pipeline stage of the fullest rank

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.mean("step_s")

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.step_s

    def mean(self, name: str) -> float:
        """Of one of ``StepPrice``'s numbers."""
        return fmean(vars(each)[name] for each in self.steps)

    @property
    def replicas(self) -> float:
        """Replicas of a layer on the EP rank that holds most, mean of the layers."""
        return fmean(most_replicas(plan.owner, plan.target) for plan in self.plans)


@dataclass(frozen=True)
class Refused:
    """A way that cannot be."""

    way: Way  # which
    why: str  # in one sentence


def price_way(
    way: Way, run: DescribedRun, rows_ILRE: np.ndarray, *, num_priced: int = PRICED
) -> Priced:
    """Price one way.

    Args:
        way: of the run's grid.
        run: the model on the cluster.
        rows_ILRE: rows of each rank of a pipeline stage in one pass, integers.
        num_priced: steps of them that are priced, the last ones; plans go by those before.

    Raises:
        ValueError: what the strategy, or the hardware file, refuses.
    """
    strategy, grid, training = way.strategy, way.grid, run.training
    parallel, micro_batches = training.parallel, training.micro_batches
    if grid.world_size > grid.size:
        strategy = strategy.with_owners_that_stay()
        if strategy.intervals().shard_every:
            raise ValueError(
                f"{strategy.keys.owners} moves experts to new owners, which needs one owner an "
                f"expert, but here each has {grid.world_size // grid.size}; set it to null or 0, "
                "or leave this grid out"
            )
    stages = [
        [
            _Chunk.of(replace(way, strategy=strategy), part, rows_ILRE[:, layers], num_priced)
            for layers, part in chunks
        ]
        for chunks in run.stages
    ]
    memory, priced = [], []
    for stage, chunks in enumerate(stages):
        used = stage_memory(
            [chunk.run.memory(chunk.most_rows) for chunk in chunks],
            [chunk.run.activations(chunk.most_rows) for chunk in chunks],
            order_of(stage, parallel, micro_batches),
        )
        priced.append([chunk.price(strategy, used) for chunk in chunks])
        memory.append(replace(used, replicas=sum(chunk.replicas for chunk in priced[-1])))
    steps = []
    for step in range(num_priced):
        of_stages = [[chunk.steps[step] for chunk in chunks] for chunks in priced]
        if parallel.pipeline == 1:
            steps.append(of_stages[0][0].step)
        else:
            steps.append(pipeline_step(of_stages, parallel, micro_batches, run.send_s))
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total)
    lines = [chunk.reported for chunks in priced[steps[-1].stage :] + priced for chunk in chunks]
    return Priced(
        way,
        tuple(steps),
        tuple(
            _without_rows(plan) for chunks in zip(*priced) for each in chunks for plan in each.plans
        ),
        memory[fullest],
        next(filter(None, lines), ""),
        training.tokens_of_step,
        fullest,
    )


class _PricedChunk(NamedTuple):
    """What a stage runs in one piece: each step that was priced, the plans of the last, bytes of
    their replicas, and what the strategy states."""

    steps: Sequence[Passes]
    plans: Sequence[Plan] = ()
    replicas: float = 0.0
    reported: str = ""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """What a stage runs in one piece, before it is priced."""

    run: DescribedRun  # it alone
    # rows of EP ranks in the steps that plans go by, int64 ``[C, E]`` of each layer
    before: Sequence[Sequence[np.ndarray]]
    after: Sequence[Sequence[np.ndarray]]  # those of the steps that are priced
    owners: Sequence[Placement]  # of each layer

    @classmethod
    def of(cls, way: Way, run: DescribedRun, rows_ILRE: np.ndarray, num_priced: int) -> _Chunk:
        if not run.shape.moe_layers:
            return cls(run, (), ((),) * num_priced, ())
        ep_ranks_ILCE = ep_ranks_of(rows_ILRE, way.grid)
        num_layers, num_experts = ep_ranks_ILCE.shape[1], ep_ranks_ILCE.shape[3]
        steps = [list(step_LCE) for step_LCE in ep_ranks_ILCE]
        owners = way.strategy.first_owners(
            [num_experts] * num_layers, (run.cost_group,), way.grid.num_ep_ranks
        )
        return cls(run, steps[:-num_priced], steps[-num_priced:], owners)

    @property
    def most_rows(self) -> float:
        """Rows of the busiest EP rank where nothing is copied, mean of the layers."""
        if not self.owners:
            return 0.0
        return fmean(
            float(np.bincount(owner.owner_E, rows_CE.sum(axis=0), owner.num_ep_ranks).max())
            for owner, rows_CE in zip(self.owners, self.before[-1])
        )

    def price(self, strategy: Strategy, used: MemoryUse) -> _PricedChunk:
        """Under one strategy, in a stage whose ranks use so much memory."""
        run = self.run
        if not self.owners:
            plain = Passes.without_experts(run.conditions())
            return _PricedChunk([plain] * len(self.after))
        passes = run.training.micro_batches  # plans go by the rows of a step, all passes together
        intervals = strategy.intervals()
        window = LoadWindow(intervals.window)
        for rows in self.before:
            window.push([passes * rows_CE for rows_CE in rows])
        job = replace(run.job(self.owners, used), pipelines=run.pipelines(self.before[-1]))
        if intervals.shard_every:
            job = replace(job, owners=strategy.owners(_seen(job, window)))
        steps, plans = list[Passes](), tuple[Plan, ...]()
        for rows in self.after:
            job = _seen(job, window)
            plans = strategy.plan(job)
            sliced = sum(sum(map(sum, plan.reductions)) for plan in plans)
            steps.append(price_passes(strategy, plans, job, rows, run.conditions(sliced)))
            window.push([passes * rows_CE for rows_CE in rows])
        return _PricedChunk(steps, plans, copied_bytes(plans, run), strategy.describe(job))


def _seen(job: Job, window: LoadWindow) -> Job:
    return replace(job, rows=window.predicted(), drift=window.drift)


def _without_rows(plan: Plan) -> Plan:
    """What it places, without the tables by which rows go there: hundreds of MiB of large jobs."""
    share = LocalElseOwner(plan.owner, plan.target)
    return replace(plan, share=share, revise=None, successor=None, predicted_CE=None, by_paper=None)


def copied_bytes(plans: Sequence[Plan], run: DescribedRun) -> float:
    """Of replicas and their gradients on the EP rank that holds most."""
    each, accumulates = [run.expert_bytes] * len(plans), run.training.micro_batches > 1
    return float(copied_bytes_C(plans, each, accumulates=accumulates).max())


def ep_ranks_of(rows_ILRE: np.ndarray, grid: Grid) -> np.ndarray:
    """Rows of the EP ranks of one grid, int64 ``[I, L, C, E]``: of the one whose busiest EP ranks
    are busiest, where there are several, for all wait for it at the end of a step."""
    num_steps, num_layers, num_ranks, num_experts = rows_ILRE.shape
    grids = rows_ILRE.reshape(num_steps, num_layers, -1, grid.size, num_experts)
    busiest = 0
    if num_ranks > grid.size:
        per_ep_rank = num_experts // grid.num_ep_ranks or 1
        whole = per_ep_rank * grid.num_ep_ranks
        at_owner = grids.sum(axis=3, dtype=np.int64)[..., : min(whole, num_experts)]
        if at_owner.shape[-1] == whole:
            at_owner = at_owner.reshape(*at_owner.shape[:-1], grid.num_ep_ranks, per_ep_rank).sum(
                axis=-1
            )
        busiest = int(at_owner.max(axis=-1).sum(axis=(0, 1)).argmax())
    of_grid = grids[:, :, busiest].astype(np.int64, copy=False)
    if grid.etp_size == 1:  # its ranks: nothing to add up, and no copy
        return of_grid
    shape = (num_steps, num_layers, grid.num_ep_ranks, grid.etp_size, num_experts)
    added: np.ndarray = of_grid.reshape(shape).sum(axis=3, dtype=np.int64)
    return added


def grids_for(
    strategy: Strategy, hardware: Hardware, num_ranks: int, num_experts: int
) -> Iterator[Grid]:
    """All that a strategy can run on, small ones first; experts within a node are always among
    them, where there are as many. EP ranks that split experts are parts of a node."""
    on_node = min(hardware.ranks_per_node, num_ranks)
    sizes = divisors(on_node) if strategy.splits_experts else [1]
    for etp_size in sizes:
        for num_ep_ranks in divisors(num_ranks // etp_size):
            divides = num_experts % num_ep_ranks == 0
            has_owner = num_ep_ranks <= num_experts
            if (
                has_owner
                and (divides or strategy.has_uneven_owners)
                and num_ep_ranks * etp_size > 1
            ):
                yield Grid(num_ranks, num_ep_ranks, etp_size)
