# SPDX-License-Identifier: Apache-2.0
"""What the operations of an MoE layer's pipeline cost: straight lines (FSMoE, eq. 1). Pure.

``measure.pipeline_probe`` measures them on a run's own ranks; ``described_lines`` takes them from a
hardware file. Either way all ranks have the same, and plan by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from ds_moe_ext.cost.layer_costs import LayerCosts
from ds_moe_ext.cost.lines import FREE, AllReduce, Line
from ds_moe_ext.hardware import Hardware, Link


@dataclass(frozen=True, kw_only=True)
class PipelineLines:
    """The lines of one MoE layer, of one call on every rank at once.

    Attributes:
        all_to_all: between cells; by bytes of the rows that one rank gives, its own part among
            them.
        all_gather: inside a cell; by bytes of the rows that one rank ends up with.
        reduce_scatter: inside a cell; by bytes of the rows that one rank gives.
        expert: forward of the part of the experts that one rank has; by rows.
        all_reduce: of dense gradients, or what the host has in its place; by elements.
    """

    all_to_all: Line
    all_gather: Line
    reduce_scatter: Line
    expert: Line
    all_reduce: Line

    @property
    def gradients(self) -> AllReduce:
        """What the partition of dense gradients reckons with."""
        return AllReduce(self.all_reduce.alpha_s, self.all_reduce.beta_s)


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """The rows of one MoE layer in one pass, of the mean rank.

    Attributes:
        sent: that a rank sends to the cells of their experts, and that return to it.
        gathered: that a rank computes: those that arrived at all ranks of its cell.
        row_bytes: of one row as it travels between cells.
        cell_row_bytes: and within one.
    """

    sent: float
    gathered: float
    row_bytes: float
    cell_row_bytes: float


def layer_costs(lines: PipelineLines, rows: LayerRows) -> LayerCosts:
    """The costs of a layer's forward pass; backward's are ``in_backward()`` of these."""
    gathered_bytes = rows.gathered * rows.cell_row_bytes
    return LayerCosts(
        all_to_all=lines.all_to_all.over(rows.sent * rows.row_bytes),
        all_gather=lines.all_gather.over(gathered_bytes),
        reduce_scatter=lines.reduce_scatter.over(gathered_bytes),
        expert=lines.expert.over(rows.gathered),
    )


# From a hardware file.


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How a run uses a cluster.

    Attributes:
        num_ranks: all.
        num_cells: cells that exchange rows.
        cell_size: ranks of a cell, neighbours that split every expert.
        dense_ranks_per_node: ranks of one node that sum the same dense gradients: all of them, or
            1 where each has another part of the dense weights.
        number_type: of the experts' products: ``fp32``, ``tf32``, ``fp16`` or ``bf16``.
        row_multiply_adds: of one row through the part of an expert that one rank has.
        num_products: matrix products in one call of a rank's experts; each has its start.
        element_bytes: of a dense gradient.
        expert_bytes: weights of a rank's experts, which each call reads.
    """

    num_ranks: int
    num_cells: int
    cell_size: int
    dense_ranks_per_node: int
    number_type: str
    row_multiply_adds: float
    num_products: int
    element_bytes: int
    expert_bytes: int


def described_lines(hardware: Hardware, usage: Usage) -> PipelineLines:
    """The lines by a hardware file: of what was measured there, else of the links' rates.

    Measured sums of gradients are those of one rank from each node, all at once; where more ranks
    of a node share one sum it is taken to be as many times as fast.

    Raises:
        ValueError: what the file lacks; or cells that do not fit into a node.
    """
    num_ranks, num_cells, cell_size = usage.num_ranks, usage.num_cells, usage.cell_size
    if cell_size > hardware.ranks_per_node:
        raise ValueError(
            f"cells of {cell_size} ranks do not fit into the nodes of hardware {hardware.name!r}, "
            f"which have {hardware.ranks_per_node}; choose cells of at most that"
        )
    line = partial(described_line, hardware)
    spans_nodes = num_ranks > hardware.ranks_per_node
    num_members = num_ranks if spans_nodes else usage.dense_ranks_per_node
    all_reduce = line("all_reduce", num_ranks, num_members=num_members, trips=2)  # as in a ring
    speed = usage.dense_ranks_per_node if spans_nodes else 1
    return PipelineLines(
        all_to_all=line("all_to_all", num_cells * cell_size, num_members=num_cells),
        all_gather=line("all_gather", cell_size, num_members=cell_size),
        reduce_scatter=line("reduce_scatter", cell_size, num_members=cell_size),
        expert=_expert(hardware, usage),
        all_reduce=replace(all_reduce, beta_s=all_reduce.beta_s * usage.element_bytes / speed),
    )


def described_line(
    hardware: Hardware, what: str, num_ranks: int, *, num_members: int, trips: int = 1
) -> Line:
    """The line of one collective by a hardware file, by bytes of one rank.

    Args:
        hardware: the cluster.
        what: a name of ``Collectives``.
        num_ranks: neighbours that its groups share; beyond a node they meet the slow links.
        num_members: ranks of one group.
        trips: how often each byte that is not at home moves.
    """
    if num_members == 1:
        return FREE
    if num_ranks > hardware.ranks_per_node:
        level, wire, collectives = "inter", hardware.inter, hardware.inter_collectives
        num_sharers = hardware.ranks_per_node
        num_parties = math.ceil(num_ranks / hardware.ranks_per_node)
    else:
        level, wire, collectives = "intra", hardware.intra, hardware.intra_collectives
        num_sharers, num_parties = 1, num_members
    measured: Link | None = vars(collectives)[what]
    link = measured or wire
    if link is None:
        raise ValueError(
            f"hardware {hardware.name!r} does not say what {what} costs; measure it with "
            f"ds-moe-ext profile, or add the key '{level}_collectives.{what}' or {level!r} to its "
            "file"
        )
    crossing = 1.0 if measured else trips * num_sharers * (num_parties - 1) / num_parties
    return Line(
        alpha_s=link.latency_s, beta_s=crossing / link.bytes_per_s, r_squared=link.r_squared
    )


def _expert(hardware: Hardware, usage: Usage) -> Line:
    product = hardware.device.product(usage.number_type)
    if product is None:
        raise ValueError(
            f"hardware {hardware.name!r} does not say how fast its device multiplies; measure it "
            f"with ds-moe-ext profile, or add the key 'device.products.{usage.number_type}' or "
            f"'device.flops_per_s.{usage.number_type}' to its file"
        )
    memory_rate = hardware.device.memory_bytes_per_s
    return Line(
        alpha_s=usage.num_products * product.start_s,
        beta_s=usage.row_multiply_adds / product.multiply_adds_per_s,
        r_squared=product.r_squared,
        least_s=usage.expert_bytes / memory_rate if memory_rate else 0.0,
    )
