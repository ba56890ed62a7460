# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of real loads under a planner: its plans, the way of the rows, the figures, by
the costs of a cluster that is described, not measured.

Shape letters: I logged steps, L layers, C cells (ranks), E experts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from priced_cluster import PricedCluster
from row_ways import Layout, Way, to_home

from ds_moe_ext.core.placement import Placement, even_homes
from ds_moe_ext.planning.fssdp_planner import shard
from ds_moe_ext.planning.layer_costs import BlockPrices, block_seconds, copied_experts
from ds_moe_ext.planning.loads import LoadWindow, balance_L
from ds_moe_ext.planning.prices import between_nodes, busiest_link

COPY_TRIPS = 2  # weights to a copy, gradients back

Layouts = Callable[[Sequence[Placement], np.ndarray, np.ndarray, PricedCluster], Sequence[Layout]]
"""Plans a step: from homes, rows planned on and rows to come ``[L, C, E]``."""


@dataclass(frozen=True)
class Planner:
    """One row of the table.

    Attributes:
        name: as printed.
        layouts: plans a step.
        way: of the rows.
        shard_degree: ``t`` of the choice of homes; None never chooses.
    """

    name: str
    layouts: Layouts
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
        late: copies of these that are made after the gate.
        plain_s: seconds of a layer by equation (6).
        hidden_s: by equation (8).
        priced_s: of its experts and exchanges, by what rows cost.
        open_s: and of the way of copies that are made after the gate, weights there and gradients
            back, on the busiest link.
        plan_s: processor seconds of planning a layer.
    """

    balance: float
    spread: float
    remote: float
    abroad: float
    copies: float
    late: float
    plain_s: float
    hidden_s: float
    priced_s: float
    open_s: float
    plan_s: float


def planned_steps(
    runs: Sequence[np.ndarray], window: int, age: int = 1
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Number in its run, rows planned on and rows to come of every step, ``[L, C, E]``.

    The first steps of a run, of which nothing can be predicted, are left out.

    Args:
        runs: of evenly spaced steps, rows ``[I, L, C, E]`` of each.
        window: logged steps whose mean is planned on; 0 plans on the rows to come.
        age: logged steps since the newest of them, when the plan's rows come.
    """
    for rows_ILCE in runs:
        seen = LoadWindow(max(window, 1))
        predicted: deque[np.ndarray] = deque(maxlen=age)
        for step, rows_LCE in enumerate(rows_ILCE):
            if step >= age:
                yield step, predicted[0] if window else rows_LCE, rows_LCE
            seen.push(rows_LCE)
            predicted.append(np.stack(seen.predicted()))


def score(
    planner: Planner,
    runs: Sequence[np.ndarray],
    cluster: PricedCluster,
    *,
    window: int,
    shard_every: int,
    age: int = 1,
) -> Score:
    """Plan every step of the trace, and route its rows by the plan.

    Args:
        planner: one row of the table.
        runs: as of ``planned_steps``.
        cluster: that plans are made for.
        window: as of ``planned_steps``.
        shard_every: logged steps from one choice of homes to the next.
        age: as of ``planned_steps``.
    """
    scores = []
    _, num_layers, num_ranks, num_experts = runs[0].shape
    homes = first = even_homes([num_experts] * num_layers, num_ranks)
    for step, planned_LCE, rows_LCE in planned_steps(runs, window, age):
        started = time.process_time()
        if step == age:
            homes = first
        degree = planner.shard_degree
        if degree is not None and (step - age) % shard_every == 0:
            loads = list(planned_LCE.sum(axis=1))
            homes = shard(loads, overlap_degree=degree, node_C=cluster.node_C, homes=homes)
        layouts = planner.layouts(homes, planned_LCE, rows_LCE, cluster)
        sendings = [
            planner.way(home, layout, planned_CE, cluster)
            for home, layout, planned_CE in zip(homes, layouts, planned_LCE)
        ]
        plan_s = (time.process_time() - started) / num_layers
        sent = [send(rows_CE).sum(axis=1) for send, rows_CE in zip(sendings, rows_LCE)]
        scores.append(_score_of_step(homes, layouts, np.stack(sent), cluster, plan_s))
    return Score(*np.mean([list(vars(each).values()) for each in scores], axis=0).tolist())


def _score_of_step(
    homes: Sequence[Placement],
    layouts: Sequence[Layout],
    sent_LCC: np.ndarray,
    cluster: PricedCluster,
    plan_s: float,
) -> Score:
    targets = [layout.target for layout in layouts]
    at_gate = [layout.at_gate for layout in layouts]
    computed_LC, node_C = sent_LCC.sum(axis=1), cluster.node_C
    received_LC = computed_LC - sent_LCC.diagonal(axis1=1, axis2=2)
    num_rows = int(computed_LC.sum())
    num_abroad = sum(int(between_nodes(sent_CC, node_C).sum()) for sent_CC in sent_LCC)
    plain, hidden = (replace(cluster.block, is_scheduled=each) for each in (False, True))
    priced_s = float(np.mean([cluster.row_prices.seconds(sent_CC, node_C) for sent_CC in sent_LCC]))
    links = [busiest_link(*placements, node_C) for placements in zip(homes, at_gate, targets)]
    return Score(
        balance=float(balance_L(computed_LC).mean()),
        spread=float(computed_LC.std(axis=1).mean()),
        remote=float(received_LC.sum()) / num_rows,
        abroad=num_abroad / num_rows,
        copies=_added(homes, targets) / computed_LC.size,
        late=_added(at_gate, targets) / computed_LC.size,
        plain_s=mean_seconds(targets, computed_LC, received_LC, plain),
        hidden_s=mean_seconds(targets, computed_LC, received_LC, hidden),
        priced_s=priced_s,
        open_s=priced_s + COPY_TRIPS * cluster.prices.copy_s * float(np.mean(links)),
        plan_s=plan_s,
    )


def _added(before: Sequence[Placement], after: Sequence[Placement]) -> int:
    """Copies that the ranks hold more."""
    return sum(int((b.holds_EC & ~a.holds_EC).sum()) for a, b in zip(before, after))


def mean_seconds(
    targets: Sequence[Placement],
    computed_LC: np.ndarray,
    received_LC: np.ndarray,
    prices: BlockPrices,
) -> float:
    """Of a layer by Pro-Prophet's model, whichever way its rows go."""
    seconds = [
        block_seconds(
            prices,
            most_received=most_received,
            most_computed=most_computed,
            copied=copied_experts(target),
        ).step_s
        for target, most_received, most_computed in zip(
            targets, received_LC.max(axis=1).tolist(), computed_LC.max(axis=1).tolist()
        )
    ]
    return sum(seconds) / len(seconds)
