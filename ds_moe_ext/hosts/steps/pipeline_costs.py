# SPDX-License-Identifier: Apache-2.0
"""What a run's pipelines cost: measured on its own ranks once libraries have warmed up, or taken
from a hardware file. Shape letters: L layers, C EP ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ds_moe_ext.core.all_to_all import Channel
from ds_moe_ext.core.comm import max_in_place
from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.hosts.attachment.replacement import CPU, AttachedLayer, bytes_of
from ds_moe_ext.moe.dispatch import Wire
from ds_moe_ext.moe.expert import arrangement_for
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.planning.exchange_costs import (
    BY_NODES,
    LayerRows,
    PipelineLines,
    Usage,
    Way,
    described_lines,
    described_links,
    layer_costs,
    line_of_way,
)
from ds_moe_ext.planning.layer_pipelines import Measured, MeasuredLayer
from ds_moe_ext.planning.layer_seconds import GPU_HOST, issued
from ds_moe_ext.planning.prices import Line
from ds_moe_ext.planning.probe import Paths, Payload, measure_carrier, measure_pipeline, quick_bench
from ds_moe_ext.planning.strategy import CostGroup
from ds_moe_ext.schedule.task import INTER, INTRA


@dataclass(frozen=True, eq=False)
class DenseGradients:
    """What the host reduces beside the MoE layers."""

    elements_L: tuple[int, ...]  # that become ready in each layer's backward, behind its MoE part
    head_elements: int  # that are ready when the last layer's backward begins
    dtype: torch.dtype  # of a gradient as it travels
    # the ranks that reduce slices of it; None where it is not sliced
    group: dist.ProcessGroup | None = None
    scatters: bool = False  # slices are reduce-scattered over these, else all-reduced

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: Sequence[AttachedLayer],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        *,
        buckets: Iterable[Iterable[nn.Parameter]] | None = None,
        scatters: bool = False,
    ) -> DenseGradients:
        """By the order of the model's modules, which is about that in which they are used. The same
        on all ranks, also on those that have no expert of a layer. Parameters of a bucket are
        reduced together, and so are ready when the last of them is, and those of none are not
        counted; without buckets each is by itself."""
        inside = {
            module: number
            for number, layer in enumerate(layers)
            for module in model.get_submodule(layer.name).modules()
        }
        experts = {parameter for layer in layers for parameter in layer.parameters}
        number_of: dict[nn.Parameter, int] = {}
        following = 0
        for module in model.modules():
            number = inside.get(module, following)
            following = number + 1 if module in inside else following
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    number_of.setdefault(parameter, number)
        elements = [0] * (len(layers) + 1)
        alone = ([p] for p in number_of if p not in experts)
        for bucket in alone if buckets is None else map(list, buckets):
            ready = min(number_of[parameter] for parameter in bucket)  # backward is from the last
            elements[ready] += sum(parameter.numel() for parameter in bucket)
        return cls(tuple(elements[:-1]), elements[-1], dtype, group, scatters)


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Measures what pipelines are planned by."""

    layers: Sequence[AttachedLayer]  # in model order
    cost_groups: tuple[CostGroup, ...]  # layers whose experts are alike
    hardware: Hardware | None  # the cluster, if it was described
    gradients: DenseGradients  # dense ones
    micro_batches: int  # of a step
    device: torch.device  # of this rank

    def check(self, dtype: torch.dtype) -> None:
        """Raises ValueError where a hardware file lacks what pipelines are planned by, if experts
        compute in ``dtype``."""
        if self.hardware is None:
            return
        for cost_group in self.cost_groups:
            lines = described_lines(self.hardware, self._usage(cost_group, dtype))
            self._lines_by_way(self._held(cost_group), (), lines)

    def measured(
        self,
        rows: Sequence[Rows],
        dense_window_L: Sequence[float],
        chunk_s: tuple[float, float] | None,
    ) -> Measured:
        """By the rows of a step, of the grid of ranks that has most; seconds behind each layer in
        backward, and those to issue a chunk forward and backward, if they were seen, are the same
        on all ranks. Collective, over all ranks."""
        routed_L = np.array([each.routed_CE.sum() for each in rows])
        # Grids of EP ranks see their own rows only; all ranks must plan alike.
        everyone = self.layers[0].routed.layer_context.layout.everyone
        agreed_L = max_in_place(torch.from_numpy(routed_L).to(self.device), everyone).tolist()
        measured: dict[int, MeasuredLayer] = {}
        all_reduce = None
        for cost_group in self.cost_groups:
            of_layers = [self._rows(layer, agreed_L[layer]) for layer in cost_group.layers]
            lines = self._lines(cost_group, of_layers)
            lines_by_way = self._lines_by_way(self._held(cost_group), of_layers, lines)
            all_reduce = all_reduce or lines.gradients
            for layer, layer_rows in zip(cost_group.layers, of_layers):
                measured[layer] = MeasuredLayer(
                    layer_costs(lines, layer_rows),
                    dense_window_L[layer],
                    self.gradients.elements_L[layer],
                    {
                        way: line.over(layer_rows.sent * layer_rows.row_bytes)
                        for way, line in lines_by_way.items()
                    },
                )
        assert all_reduce is not None
        host_s = None
        if self.device.type != CPU.type:  # else the host is what computes
            is_split = self.layers[0].routed.layer_context.layout.grid.etp_size > 1
            host_s = issued(GPU_HOST, is_split=is_split, chunk_s=chunk_s)
        return Measured(
            tuple(measured[layer] for layer in range(len(self.layers))),
            self.gradients.head_elements,
            all_reduce,
            self.gradients.dtype.itemsize,
            host_s,
        )

    def _rows(self, layer: int, num_routed: int) -> LayerRows:
        routed = self.layers[layer].routed
        grid, row_bytes = routed.layer_context.layout.grid, routed.row_bytes
        return LayerRows(
            sent=num_routed / grid.size / self.micro_batches,
            gathered=num_routed / grid.num_ep_ranks / self.micro_batches,
            row_bytes=row_bytes.between,
            etp_row_bytes=row_bytes.within,
        )

    def _held(self, cost_group: CostGroup) -> AttachedLayer:
        """A layer of which this rank has experts."""
        layers = (self.layers[layer] for layer in cost_group.layers)
        return next(layer for layer in layers if layer.parameters)

    def _lines(self, cost_group: CostGroup, rows: Sequence[LayerRows]) -> PipelineLines:
        """Of layers like these, the same on all ranks."""
        layer = self._held(cost_group)
        if self.hardware is not None:
            return described_lines(self.hardware, self._usage(cost_group, layer.routed.row_dtype))
        layout, gradients = layer.routed.layer_context.layout, self.gradients
        wire = Wire.between(layout, INTER, self.device)
        is_split = layout.grid.etp_size > 1
        paths = Paths(
            ep_ranks=None if wire.group is None else Channel(wire.group, wire.all_to_all),
            ep_rank=Channel(layout.group("esp", INTRA), wire.all_to_all) if is_split else None,
            dense=gradients.group,
            scatters=gradients.scatters,
        )
        forward = partial(_forward, layer, self.device)
        bench = quick_bench(self.device, layout.everyone)
        return measure_pipeline(paths, self._payload(layer, rows), forward, bench)

    def _lines_by_way(
        self, layer: AttachedLayer, rows: Sequence[LayerRows], lines: PipelineLines
    ) -> dict[Way, Line]:
        """Of all-to-alls by each way; none where the direct one is the only one."""
        layout, ways = layer.routed.layer_context.layout, layer.routed.ways
        if ways == (Way.DIRECT,):
            return {}
        if self.hardware is not None:
            if BY_NODES.isdisjoint(ways):
                return dict.fromkeys(ways, lines.all_to_all)  # files know nothing of others
            num_nodes, node_size = layout.nodes.ranks_VG.shape
            links = described_links(self.hardware, num_nodes, node_size, layout.grid.etp_size)
            return {way: line_of_way(way, links) for way in ways}
        payload = self._payload(layer, rows)
        measured = {}
        for way in ways:
            carrier = Wire.between(layout, INTER, self.device, way).carrier
            measured[way] = lines.all_to_all
            if carrier is not None:
                bench = quick_bench(self.device, layout.everyone)
                measured[way] = measure_carrier(carrier, layout.grid.num_ep_ranks, payload, bench)
        return measured

    def _payload(self, layer: AttachedLayer, rows: Sequence[LayerRows]) -> Payload:
        return Payload(
            num_rows=max(1, round(max(each.sent for each in rows))),
            width=layer.routed.row_width,
            row_dtype=layer.routed.row_dtype,
            num_elements=max(1, *self.gradients.elements_L),
            gradient_dtype=self.gradients.dtype,
        )

    def _usage(self, cost_group: CostGroup, dtype: torch.dtype) -> Usage:
        held = self._held(cost_group)
        expert = held.computed(held.hosted.slots()[0])
        matrices = [weight for weight in expert if weight.dim() > 1]
        sites = [self.layers[layer].routed.layer_context for layer in cost_group.layers]
        # ranks may have fewer
        num_slots = max(layer_context.plan.owner.num_slots for layer_context in sites)
        grid = sites[0].layout.grid
        assert self.hardware is not None
        return Usage(
            num_ranks=grid.world_size,
            num_ep_ranks=grid.num_ep_ranks,
            etp_size=grid.etp_size,
            dense_ranks_per_node=min(self.hardware.ranks_per_node, grid.world_size),
            number_type=NUMBER_TYPES[dtype],
            row_multiply_adds=sum(weight.numel() for weight in matrices),
            num_products=len(matrices) * num_slots,
            element_bytes=self.gradients.dtype.itemsize,
            expert_bytes=num_slots * bytes_of(expert),
        )


NUMBER_TYPES = {
    torch.float64: "fp32",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def _forward(layer: AttachedLayer, device: torch.device, num_rows: int) -> object:
    """This rank's experts on rows that are spread evenly over them."""
    num_slots = max(1, len(layer.hosted.slots()))
    rows_S = np.full(num_slots, num_rows // num_slots)
    rows_S[: num_rows % num_slots] += 1
    routed = layer.routed
    rows = torch.zeros(num_rows, routed.row_width, dtype=routed.row_dtype, device=device)
    weights = layer.hosted.weights()
    order, _ = arrangement_for(routed.function, weights)
    weights = weights if order is None else order.weights(weights)
    is_narrow = rows.dtype in (torch.float16, torch.bfloat16)  # as autocast makes them
    is_mixed = is_narrow and any(w.dtype == torch.float32 for w in weights)
    with torch.autocast(device.type, rows.dtype if is_mixed else None, enabled=is_mixed):
        return routed.function(rows, SlotRows.of(rows_S, device), weights)
