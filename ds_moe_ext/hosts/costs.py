"""What planners must know of a run's costs: measured in its first steps, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch

from ds_moe_ext.comm import sum_in_place
from ds_moe_ext.cost.bench import Bench, clock_of
from ds_moe_ext.cost.probe import Level, Sizes, least_free_bytes, measure_copies
from ds_moe_ext.hardware import Hardware, Link
from ds_moe_ext.hosts.attach import AttachedLayer, bytes_of
from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.moe.observe import Rows, TimedTask
from ds_moe_ext.moe.slab import Weights
from ds_moe_ext.planners.prices import Prices
from ds_moe_ext.schedule.task import ATTENTION, EXPERT, PARAM
from ds_moe_ext.strategies.base import Pool

STEPS = range(2, 5)  # the first ones are slow: libraries allocate and choose algorithms
SHARE_OF_FREE = 0.7  # that copies may take of a device's free memory
NUM_EXPERTS = (1, 4, 8)  # that a quick look copies at once


class Measured(TypedDict):
    """What changes in a job."""

    pools: tuple[Pool, ...]
    window_s: tuple[float, ...]
    free_bytes: int


@dataclass(frozen=True)
class Links:
    """What rows and copies travel over.

    Attributes:
        copy: what copies of weights wait for, in bytes that the busiest receiver takes in.
        inter: what one node sends to the others.
        intra: what one rank sends to the others.
    """

    copy: Link
    inter: Link
    intra: Link

    @classmethod
    def of(cls, hardware: Hardware, num_ranks: int) -> Links:
        """Those of a described cluster; rows go over the link of copies where it says no other."""
        copy = hardware.copy_link(num_ranks)
        return cls(copy, hardware.inter or copy, hardware.intra or copy)

    @classmethod
    def measured(cls, layout: ParallelLayout, expert: Weights) -> Links:
        """A quick look at this run's own communicator for copies. Collective.

        Rows are then priced by the link of copies.

        Args:
            layout: of the run.
            expert: weights of one expert.
        """
        group, device = layout.group("ep", PARAM), expert[0].device
        level = Level("of this run", group, layout.index("ep"), layout.node_C, num_sharers=1)
        bench = Bench(clock_of(device), device, num_warm_ups=1, num_repeats=5, group=group)
        link = measure_copies(level, bench, Sizes((), bytes_of(expert), NUM_EXPERTS))
        return cls(link, link, link)


@dataclass(eq=False)
class Costs:
    """Args:
    layers: in model order.
    pools: layers whose experts are alike.
    hardware: the cluster, if it was described; else its links are looked at.

    Attributes:
        are_new: they have been measured in the latest step.
    """

    layers: Sequence[AttachedLayer]
    pools: tuple[Pool, ...]
    hardware: Hardware | None
    are_new: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._num_steps = 0
        self._window_s = [0.0] * len(self.layers)
        self._expert_s = [0.0] * len(self.layers)
        self._rows = [0] * len(self.layers)
        self._num_passes = [0] * len(self.layers)
        self._measured = Measured(pools=self.pools, window_s=tuple(self._window_s), free_bytes=0)

    def after_step(self, rows: Sequence[Rows]) -> Measured:
        """What is known after a step; nothing more than before it of a strategy that copies no
        experts. Collective."""
        if self.layers[0].routed.copies is None:
            return self._measured
        step, self._num_steps = self._num_steps, self._num_steps + 1
        num_cells = self.layers[0].routed.site.layout.grid.num_cells
        self.are_new = step == STEPS[-1] and num_cells > 1  # alone, there is nothing to copy
        if step in STEPS:
            self._add(rows)
        for layer in self.layers:
            layer.routed.meter.is_on = step + 1 in STEPS
        if self.are_new:
            self._measured = self._agreed()
        return self._measured

    def _add(self, rows: Sequence[Rows]) -> None:
        for index, (layer, seen) in enumerate(zip(self.layers, rows)):
            routed = layer.routed
            self._rows[index] += int(seen.computed_C[routed.site.layout.index("ep")])
            for timed in routed.meter.take():
                if timed.task.op is EXPERT:
                    self._expert_s[index] += _seconds(timed)
                if timed.task.op is ATTENTION and not timed.task.adjoint_of:
                    self._window_s[index] += _seconds(timed)
                    self._num_passes[index] += 1

    def _agreed(self) -> Measured:
        sums = (self._window_s, self._num_passes, self._expert_s, self._rows)
        total = torch.tensor(sums, dtype=torch.float64, device=self._device)
        window_s, num_passes, expert_s, num_rows = sum_in_place(total, None).tolist()
        return Measured(
            pools=tuple(self._priced(pool, expert_s, num_rows) for pool in self.pools),
            window_s=tuple(s / max(n, 1) for s, n in zip(window_s, num_passes)),
            free_bytes=self._free_bytes(),
        )

    def _free_bytes(self) -> int:
        """Memory for copies on the rank that has least; where nothing tells, as much as its own
        experts and their gradients take."""
        bench = Bench(clock_of(self._device), self._device, num_warm_ups=0, num_repeats=1)
        free = least_free_bytes(bench)
        if free is not None:
            return int(SHARE_OF_FREE * free)
        return 2 * sum(self._bytes_at_home(pool) for pool in self.pools)

    def _bytes_at_home(self, pool: Pool) -> int:
        homes = [self.layers[layer].routed.site.plan.home for layer in pool.layers]
        num_experts = sum(home.num_experts for home in homes) // homes[0].num_cells
        return num_experts * bytes_of(self._expert(pool))

    @property
    def _device(self) -> torch.device:
        return self._expert(self.pools[0])[0].device

    def _expert(self, pool: Pool) -> Weights:
        """Weights of any one expert."""
        copies = self.layers[pool.layers[0]].routed.copies
        assert copies is not None
        return copies.like

    def _links(self, pool: Pool) -> Links:
        layout = self.layers[pool.layers[0]].routed.site.layout
        if self.hardware is not None:
            return Links.of(self.hardware, layout.grid.num_cells)
        return Links.measured(layout, self._expert(pool))

    def _priced(self, pool: Pool, expert_s: list[float], num_rows: list[float]) -> Pool:
        links = self._links(pool)
        expert_bytes = bytes_of(self._expert(pool))
        seconds = sum(expert_s[layer] for layer in pool.layers)
        rows = sum(num_rows[layer] for layer in pool.layers)
        prices = Prices(
            row_s=seconds / max(rows, 1),
            row_bytes=self.layers[pool.layers[0]].routed.row_bytes,
            copy_s=expert_bytes / links.copy.bytes_per_s,
            inter_bytes_per_s=links.inter.bytes_per_s,
            intra_bytes_per_s=links.intra.bytes_per_s,
        )
        return replace(
            pool,
            prices=prices,
            expert_bytes=expert_bytes,
            copy_latency_s=links.copy.latency_s,
        )


def _seconds(timed: TimedTask) -> float:
    start_s, end_s = timed.seconds_from(timed)
    return end_s - start_s
