"""Replays a trace of real loads under a planner: its plans, the way of the rows, the figures, by
the costs of a cluster that is described, not measured.

Shape letters: I logged steps, L layers, C cells (ranks), E experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.cost.block_costs import (
    BACKWARD,
    FORWARD,
    BlockPrices,
    block_seconds,
    cell_rows,
    copied_experts,
)
from ds_moe_ext.cost.prices import Prices, nearest_copy_flow
from ds_moe_ext.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.load import LoadWindow, balance_L
from ds_moe_ext.placement import Placement, even_homes
from ds_moe_ext.planners.homes import shard
from ds_moe_ext.share import NearestCopy

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
    """What plans are made for. Shape letter: C cells (ranks).

    Attributes:
        node_C: node of each rank.
        prices: as HECATE counts.
        block: as Pro-Prophet counts; whether copies are scheduled is the planner's to say.
        text: what was assumed, for a person.
    """

    node_C: np.ndarray
    prices: Prices
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
        return cls(hardware.node_of_cells(hardware.num_ranks), prices, block, text)


@dataclass(frozen=True, eq=False)
class Flow:
    """Where the rows of a step go.

    Attributes:
        computed_LC: rows that each rank computes, int64.
        received_LC: rows that come to each rank from others.
        num_abroad: rows that leave their node.
    """

    computed_LC: np.ndarray
    received_LC: np.ndarray
    num_abroad: float


Targets = Callable[
    [Sequence[Placement], np.ndarray, np.ndarray, PricedCluster], tuple[Placement, ...]
]
"""Where experts compute in a step: from homes, rows planned on and rows to come ``[L, C, E]``."""

Way = Callable[[Sequence[Placement], Sequence[Placement], np.ndarray, PricedCluster], Flow]
"""Where rows ``[L, C, E]`` go, from homes and targets."""


def to_nearest(
    homes: Sequence[Placement],
    targets: Sequence[Placement],
    rows_LCE: np.ndarray,
    cluster: PricedCluster,
) -> Flow:
    """HECATE's way: rows without a copy at hand go to the nearest ones."""
    node_C = cluster.node_C
    computed = [NearestCopy(t, node_C).computed_C(r) for t, r in zip(targets, rows_LCE)]
    flow = nearest_copy_flow(targets, list(rows_LCE), node_C)
    return Flow(np.stack(computed), flow.received_LC, float(flow.out_LN.sum()))


def to_home(
    homes: Sequence[Placement],
    targets: Sequence[Placement],
    rows_LCE: np.ndarray,
    cluster: PricedCluster,
) -> Flow:
    """Pro-Prophet's way: rows without a copy at hand go home."""
    layers = list(zip(homes, targets, rows_LCE))
    cells = [cell_rows(home, target, rows_CE) for home, target, rows_CE in layers]
    is_far_CC = cluster.node_C[:, None] != cluster.node_C
    num_abroad = sum(
        rows_CE[~target.holds_EC.T & is_far_CC[:, home.owner_E]].sum()
        for home, target, rows_CE in layers
    )
    return Flow(
        np.stack([each.computed_C for each in cells]),
        np.stack([each.received_C for each in cells]),
        float(num_abroad),
    )


@dataclass(frozen=True)
class Planner:
    """One row of the table.

    Attributes:
        name: as printed.
        targets: plans a step.
        way: of the rows.
        shard_degree: ``t`` of the choice of homes; None never chooses.
    """

    name: str
    targets: Targets
    way: Way = to_home
    shard_degree: int | None = None


@dataclass(frozen=True)
class Score:
    """Means over steps and layers.

    Attributes:
        balance: rows of the busiest rank over the mean.
        spread: standard deviation of the ranks' rows.
        remote: share of rows that leave their rank.
        abroad: share of rows that leave their node.
        copies: copies that a rank holds in a layer.
        plain_s: seconds of a layer by equation (6).
        hidden_s: by equation (8).
        plan_s: processor seconds of planning a layer.
    """

    balance: float
    spread: float
    remote: float
    abroad: float
    copies: float
    plain_s: float
    hidden_s: float
    plan_s: float


def planned_steps(
    runs: Sequence[np.ndarray], window: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Number in its run, rows planned on and rows to come of every step, ``[L, C, E]``.

    The first step of a run, of which nothing can be predicted, is left out.

    Args:
        runs: of evenly spaced steps, rows ``[I, L, C, E]`` of each.
        window: logged steps whose mean is planned on; 0 plans on the rows to come.
    """
    for rows_ILCE in runs:
        seen = LoadWindow(max(window, 1))
        for step, rows_LCE in enumerate(rows_ILCE):
            if step:
                predicted_LCE = np.stack(seen.predicted())
                yield step, predicted_LCE if window else rows_LCE, rows_LCE
            seen.push(rows_LCE)


def score(
    planner: Planner,
    runs: Sequence[np.ndarray],
    cluster: PricedCluster,
    *,
    window: int,
    shard_every: int,
) -> Score:
    """Plan every step of the trace, and route its rows by the plan.

    Args:
        planner: one row of the table.
        runs: as of ``planned_steps``.
        cluster: that plans are made for.
        window: as of ``planned_steps``.
        shard_every: logged steps from one choice of homes to the next.
    """
    scores = []
    _, num_layers, num_ranks, num_experts = runs[0].shape
    homes = first = even_homes([num_experts] * num_layers, num_ranks)
    for step, planned_LCE, rows_LCE in planned_steps(runs, window):
        started = time.process_time()
        if step == 1:
            homes = first
        degree = planner.shard_degree
        if degree is not None and (step - 1) % shard_every == 0:
            loads = list(planned_LCE.sum(axis=1))
            homes = shard(loads, overlap_degree=degree, node_C=cluster.node_C, homes=homes)
        targets = planner.targets(homes, planned_LCE, rows_LCE, cluster)
        plan_s = (time.process_time() - started) / num_layers
        flow = planner.way(homes, targets, rows_LCE, cluster)
        scores.append(_score_of_step(targets, flow, cluster.block, plan_s))
    return Score(*np.mean([list(vars(each).values()) for each in scores], axis=0).tolist())


def _score_of_step(
    targets: Sequence[Placement], flow: Flow, prices: BlockPrices, plan_s: float
) -> Score:
    num_rows = int(flow.computed_LC.sum())
    num_copies = sum(int(t.holds_EC.sum()) - t.num_experts for t in targets)
    return Score(
        balance=float(balance_L(flow.computed_LC).mean()),
        spread=float(flow.computed_LC.std(axis=1).mean()),
        remote=float(flow.received_LC.sum()) / num_rows,
        abroad=flow.num_abroad / num_rows,
        copies=num_copies / flow.computed_LC.size,
        plain_s=mean_seconds(targets, flow, replace(prices, is_scheduled=False)),
        hidden_s=mean_seconds(targets, flow, replace(prices, is_scheduled=True)),
        plan_s=plan_s,
    )


def mean_seconds(targets: Sequence[Placement], flow: Flow, prices: BlockPrices) -> float:
    """Of a layer by Pro-Prophet's model, whichever way its rows go."""
    seconds = [
        block_seconds(
            prices,
            most_received=most_received,
            most_computed=most_computed,
            copied=copied_experts(target),
        ).step_s
        for target, most_received, most_computed in zip(
            targets, flow.received_LC.max(axis=1).tolist(), flow.computed_LC.max(axis=1).tolist()
        )
    ]
    return sum(seconds) / len(seconds)
