# SPDX-License-Identifier: Apache-2.0
"""A run as strategies and prices see it, from what describes its cluster and model. Pure.

In a run costs are measured (``steps.costs``); here they follow from rates. Shape letters: L MoE
layers, C cells, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_moe_ext.cost.block_costs import BACKWARD
from ds_moe_ext.cost.lines import Line
from ds_moe_ext.cost.pipeline_lines import LayerRows, PipelineLines, Usage, described_lines
from ds_moe_ext.cost.pipeline_lines import layer_costs as costs_of_layer
from ds_moe_ext.cost.prices import Prices
from ds_moe_ext.hardware import Hardware, Product
from ds_moe_ext.layout import Grid
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.layer_pipelines import Measured, MeasuredLayer
from ds_moe_ext.pricing.host_times import HOST_TIMES, issued
from ds_moe_ext.pricing.issue import HostTimes
from ds_moe_ext.pricing.layer_seconds import TaskCosts
from ds_moe_ext.pricing.memory import MemoryUse, memory_use
from ds_moe_ext.pricing.model_shape import ModelShape
from ds_moe_ext.pricing.step_price import Conditions
from ds_moe_ext.pricing.training_shape import MASTER_AND_STATES, Training
from ds_moe_ext.strategy import Job, Pool

STEP_BYTES = 2 * MASTER_AND_STATES + 6  # read and written of a weight when it is stepped
SHARE_OF_FREE = 0.7  # of free memory that copies may take, as in a run


@dataclass(frozen=True, kw_only=True)
class DescribedRun:
    """A model trained on a cluster by a grid of ranks.

    Attributes:
        hardware: as it is reckoned with (``reached``).
        shape: of the model.
        training: how.
        grid: of the ranks.
        passes: as of ``Reached``.
        host: what issuing takes; see ``HostTimes``.
        mixed: clusters that it was joined of, where their devices are unlike (``mixed_cluster``),
            reckoned with likewise: each computes experts at its own speed.

    Raises:
        ValueError: what the hardware file does not say.
    """

    hardware: Hardware
    shape: ModelShape
    training: Training
    grid: Grid
    passes: int = 16
    host: HostTimes = HOST_TIMES
    mixed: tuple[Hardware, ...] = ()

    @property
    def node_C(self) -> np.ndarray:
        """Node of each cell."""
        return self.hardware.node_of_cells(self.grid.num_cells, self.grid.cell_size)

    @cached_property
    def product(self) -> Product:
        """The line of matrix products, of the slowest device."""
        return self._product(self.hardware)

    def _product(self, hardware: Hardware) -> Product:
        kind = self.training.number_type
        line = hardware.device.product(kind)
        if line is None:
            raise ValueError(
                f"hardware {hardware.name!r} does not say how fast its device multiplies in "
                f"{kind}; add 'device.flops_per_s.{kind}' to its file, or measure it with "
                "ds-moe-ext profile"
            )
        return line

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second of a device's memory."""
        rate = self.hardware.device.memory_bytes_per_s
        if rate is None:
            raise ValueError(
                f"hardware {self.hardware.name!r} does not say how fast its device's memory is; "
                "add 'device.memory_bytes_per_s' to its file"
            )
        return rate

    # What ranks compute between the experts.

    def dense_s(self, layers: Sequence[int]) -> float:
        """Forward of the dense parts of some layers, one pass of one rank."""
        work = sum(self.shape.dense_work(layer, self.training.length) for layer in layers)
        touched = len(layers) * self.passes * self.shape.width * self.training.element_bytes
        tokens = self.training.tokens
        return tokens * (work / self.product.multiply_adds_per_s + touched / self.memory_rate)

    @cached_property
    def window_s(self) -> tuple[float, ...]:
        """Before each MoE layer, float ``[L]``."""
        numbers = range(len(self.shape.moe_layers))
        return tuple(self.dense_s(self.shape.layers_before(number)) for number in numbers)

    @property
    def backward_rounds(self) -> int:
        """Times of forward that backward takes: one more where forward is computed again."""
        return BACKWARD + self.training.recomputes

    @property
    def head_s(self) -> float:
        """Forward of what follows the last experts: layers without, head and loss."""
        shape, tokens = self.shape, self.training.tokens
        head = tokens * shape.vocab_size * shape.width / self.product.multiply_adds_per_s
        loss = tokens * shape.vocab_size * 4 * 2 / self.memory_rate
        return self.dense_s(shape.layers_after) + head + loss

    # What rows and copies cost.

    @property
    def row_bytes(self) -> int:
        return self.shape.width * self.training.element_bytes

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert that one rank has."""
        whole = self.shape.expert_weights * self.training.element_bytes
        return whole // self.grid.cell_size

    @cached_property
    def pool(self) -> Pool:
        """All MoE layers."""
        hardware, grid = self.hardware, self.grid
        copy = hardware.copy_link(grid.size)
        intra = hardware.intra or copy
        inter = hardware.inter or copy
        row_work = (1 + self.backward_rounds) * self.shape.expert_weights / grid.cell_size
        # A node takes all parts of an expert in at its cards, a rank its own at its link.
        parts = grid.cell_size if grid.size > hardware.ranks_per_node else 1
        row_s_C = self._row_s_C(row_work)
        return Pool(
            layers=tuple(range(len(self.shape.moe_layers))),
            prices=Prices(
                row_s=float(row_s_C.mean()),
                row_bytes=self.row_bytes,
                copy_s=parts * self.expert_bytes / copy.bytes_per_s,
                inter_bytes_per_s=inter.bytes_per_s,
                intra_bytes_per_s=grid.cell_size * intra.bytes_per_s,
            ),
            row_s_C=tuple(row_s_C.tolist()) if row_s_C.max() > row_s_C.min() else (),
            expert_bytes=self.expert_bytes,
            state_bytes=MASTER_AND_STATES * self.shape.expert_weights // grid.cell_size,
            copy_latency_s=copy.latency_s,
        )

    def _row_s_C(self, row_work: float) -> np.ndarray:
        """Seconds of a row in each cell: of the slowest grid, where there are several, and of a
        cell's slowest rank."""
        row_s_R = np.concatenate(
            [
                np.full(each.num_ranks, row_work / self._product(each).multiply_adds_per_s)
                for each in self.mixed or (self.hardware,)
            ]
        )[: self.grid.world_size]
        by_grid = row_s_R.reshape(-1, self.grid.num_cells, self.grid.cell_size).max(axis=2)
        slowest: np.ndarray = by_grid[int(by_grid.sum(axis=1).argmax())]
        return slowest

    @cached_property
    def lines(self) -> PipelineLines:
        """What pipelines are planned by."""
        grid = self.grid
        usage = Usage(
            num_ranks=grid.world_size,
            num_cells=grid.num_cells,
            cell_size=grid.cell_size,
            dense_ranks_per_node=min(self.hardware.ranks_per_node, grid.world_size),
            number_type=self.training.number_type,
            row_multiply_adds=self.shape.expert_weights / grid.cell_size,
            num_products=self.shape.products * self.slots,
            element_bytes=self.training.gradient_bytes,
        )
        lines = described_lines(self.hardware, usage)
        # Each call of the experts reads their weights, however few rows it has.
        read_s = self.slots * self.expert_bytes / self.memory_rate
        return replace(lines, expert=replace(lines.expert, alpha_s=lines.expert.alpha_s + read_s))

    @property
    def slots(self) -> int:
        """Experts of a layer that a cell is home to, at most."""
        return -(-self.shape.num_experts // self.grid.num_cells)

    def pipelines(self, rows: Sequence[np.ndarray]) -> Measured:
        """For planners of pipelines, by the rows of one pass, int64 ``[C, E]`` of each layer."""
        shape, grid = self.shape, self.grid
        layers = []
        for number, rows_CE in enumerate(rows):
            even = float(rows_CE.sum()) / grid.num_cells
            costs = costs_of_layer(
                self.lines,
                LayerRows(sent=even / grid.cell_size, gathered=even, row_bytes=self.row_bytes),
            )
            before = shape.layers_before(number)
            layers.append(
                MeasuredLayer(
                    costs,
                    self.backward_rounds * self.window_s[number],
                    sum(map(shape.dense_weights, before)),
                )
            )
        head = shape.vocab_size * shape.width + sum(map(shape.dense_weights, shape.layers_after))
        return Measured(
            tuple(layers),
            head,
            self.lines.gradients,
            self.training.element_bytes,
            issued(self.host, is_split=grid.cell_size > 1),
        )

    # What is asked for.

    def job(self, homes: Sequence[Placement], used: MemoryUse) -> Job:
        """What strategies plan by, without rows.

        Args:
            homes: of each layer's experts.
            used: memory of a rank.
        """
        free = (self.hardware.device.memory_bytes or 0) - used.total
        job = Job.at_start(homes, self.node_C, (self.pool,))
        return replace(
            job,
            window_s=self.window_s,
            back_window_s=tuple(self.backward_rounds * s for s in self.window_s),
            free_bytes=max(int(SHARE_OF_FREE * free), 0),
            accumulates=self.training.micro_batches > 1,
        )

    def memory(self, most_rows: float) -> MemoryUse:
        """Of the fullest rank, without copies.

        Args:
            most_rows: rows that a cell computes in one layer.
        """
        return memory_use(
            self.shape, self.training, self.grid, slots=self.slots, most_rows=most_rows
        )

    def conditions(self, sliced: int = 0) -> Conditions:
        """Of a step.

        Args:
            sliced: elements of dense gradients that layers reduce beside their rows.
        """
        link = self.hardware.copy_link(self.grid.size)
        tasks = TaskCosts(
            exchange_start_s=link.latency_s if self.grid.num_cells > 1 else 0.0,
            weight_s=self.expert_bytes / self.memory_rate,
            expert_start_s=self.shape.products * self.product.start_s,
            row_move_s=2 * self.row_bytes / self.memory_rate,
            cell_gather=self.lines.all_gather,
            cell_scatter=self.lines.reduce_scatter,
            all_reduce=self.lines.gradients,
            backward_rounds=self.backward_rounds,
        )
        return Conditions(
            grid=self.grid,
            tasks=tasks,
            host=self.host.with_forward_again() if self.training.recomputes else self.host,
            head_s=self.head_s,
            end_s=self.end_s(sliced),
            micro_batches=self.training.micro_batches,
        )

    def end_s(self, sliced: int) -> float:
        """Behind the last backward: gradients that nothing hid, and the optimizer."""
        return self.dense_end_s(sliced) + self.expert_end_s

    def dense_end_s(self, sliced: int) -> float:
        """Of what is not of experts."""
        elements = self.shape.all_dense_weights
        reduced_s = 0.0
        if not self.training.hides_gradients:
            reduced_s = self.lines.gradients.seconds(max(elements - sliced, 0))
        return reduced_s + self._stepped_s(elements, self.grid.world_size)

    @property
    def expert_end_s(self) -> float:
        """Of experts."""
        homes = self.grid.world_size // self.grid.size
        return self._expert_gradients_s() + self._stepped_s(self._held_experts, homes)

    def _stepped_s(self, elements: float, num_replicas: int) -> float:
        """The optimizer's step of weights that so many ranks have."""
        own = elements / (num_replicas if self.training.zero_stage >= 1 else 1)
        return STEP_BYTES * own / self.memory_rate

    @property
    def _held_experts(self) -> float:
        """Weights of experts that a rank has."""
        whole = len(self.shape.moe_layers) * self.slots * self.shape.expert_weights
        return whole / self.grid.cell_size

    def _expert_gradients_s(self) -> float:
        """Summed over the homes of each expert, which stand in different grids."""
        homes = self.grid.world_size // self.grid.size
        if homes == 1:
            return 0.0
        line = self._replica_line()
        sent = self._held_experts * self.training.gradient_bytes * 2 * (homes - 1) / homes
        return line.alpha_s + sent * line.beta_s

    def _replica_line(self) -> Line:
        """By bytes that one rank sends, in rings along the ranks: of those that hold the same on
        one node, one sends to another node."""
        hardware = self.hardware
        if self.grid.world_size <= hardware.ranks_per_node:
            link, sharers = hardware.intra or hardware.copy_link(self.grid.world_size), 1
        else:
            link = hardware.inter or hardware.copy_link(self.grid.world_size)
            sharers = min(hardware.ranks_per_node, self.grid.size)
        return Line(alpha_s=link.latency_s, beta_s=sharers / link.bytes_per_s)
