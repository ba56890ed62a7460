# SPDX-License-Identifier: Apache-2.0
"""What plans are made for: the costs of a cluster that is described, not measured.

Shape letter: C cells (ranks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD, BlockPrices
from ds_moe_ext.planning.prices import Prices, RowPrices

A100 = Hardware(
    name="A100 nodes with 400 Gb/s",
    source="assumed",
    num_nodes=2,
    ranks_per_node=8,
    device=Device(name="NVIDIA A100", flops_per_s=Flops(bf16=312e12)),
    intra=Link(bytes_per_s=300e9),
    inter=Link(bytes_per_s=50e9),
)
EFFICIENCY = 0.35  # of the device's peak
SEQUENCE = 2048  # tokens that attention goes over: GPT-MoE's
TOP_K = 2  # rows of a token


@dataclass(frozen=True, eq=False)
class PricedCluster:
    """What plans are made for.

    Attributes:
        node_C: node of each rank.
        prices: as HECATE counts.
        row_prices: the same, by the row.
        block: as Pro-Prophet counts; whether copies are scheduled is the planner's to say.
        text: what was assumed, for a person.
    """

    node_C: np.ndarray
    prices: Prices
    row_prices: RowPrices
    block: BlockPrices
    text: str

    @classmethod
    def of(cls, hardware: Hardware, *, rows: float, width: int) -> PricedCluster:
        """Costs of a GPT all of whose layers are MoE layers, of experts twice as wide as it is.

        A rank receives rows as fast as its share of the node's link, and copies as
        ``Hardware.copy_link`` says. What a file does not say of the links within a node is taken
        to be as between nodes.

        Args:
            hardware: of exactly the nodes that the ranks lie on.
            rows: that a rank routes in a step and layer, on average.
            width: of the model.

        Raises:
            ValueError: the hardware does not say how nodes are linked, or how the device computes.
        """
        rates, inter = hardware.device.flops_per_s, hardware.inter
        half_rate = rates.bf16 or rates.fp16
        peak = half_rate or rates.fp32
        if inter is None or peak is None:
            raise ValueError(
                f"hardware {hardware.name!r} lacks 'inter' or a rate in 'flops_per_s'; add both to "
                "its file"
            )
        rate, item_bytes = EFFICIENCY * peak, 2 if half_rate else 4
        weights = 4 * width**2
        gap_s = rows / TOP_K * (2 * weights + 4 * SEQUENCE * width) / rate
        block = BlockPrices(
            row_s=2 * weights / rate,
            row_bytes=item_bytes * width,
            bytes_per_s=inter.bytes_per_s / hardware.ranks_per_node,
            weight_bytes=item_bytes * weights,
            gradient_bytes=item_bytes * weights,
            copy_bytes_per_s=hardware.copy_link(hardware.num_ranks).bytes_per_s,
            forward_gap_s=FORWARD * gap_s,
            backward_gap_s=BACKWARD * gap_s,
        )
        prices = Prices(
            row_s=(FORWARD + BACKWARD) * block.row_s,
            row_bytes=block.row_bytes,
            copy_s=block.weight_bytes / block.copy_bytes_per_s,
            inter_bytes_per_s=inter.bytes_per_s,
            intra_bytes_per_s=(hardware.intra or inter).bytes_per_s,
        )
        text = (
            f"Assumed: {hardware.name}, {hardware.num_nodes} nodes of {hardware.ranks_per_node} "
            f"ranks; {rate / 1e12:.3g} TFLOP/s a rank ({EFFICIENCY:.0%} of the peak), "
            f"{item_bytes} bytes a number; width {width}, {weights / 1e6:.2f} M weights an expert, "
            f"attention over {SEQUENCE:,} tokens, top-{TOP_K}, {rows:,.0f} rows a rank and layer. "
            f"Rows travel at {block.bytes_per_s / 1e9:.3g} GB/s a rank (its share of the node's "
            f"link), copies at {block.copy_bytes_per_s / 1e9:.3g} GB/s: {1e3 * prices.copy_s:.2g} "
            f"ms an expert, its gradients as long. 1/t is {1e9 * block.row_s:.3g} ns a row, T_FNEC "
            f"{1e3 * gap_s:.3g} ms (attention), T_BNEC twice that."
        )
        row_prices = RowPrices.of(prices, hardware.num_ranks)
        node_C = hardware.node_of_cells(hardware.num_ranks)
        return cls(node_C, prices, row_prices, block, text)
