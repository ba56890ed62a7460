# SPDX-License-Identifier: Apache-2.0
"""Counts of many ranks: what is held of them, that 32 bits are as good as 64, and that planners add
up by nodes in one pass. Nothing here is timed. Shape letters: C ranks, E experts, V nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planning_time import (
    EXPERT_BYTES,
    PRICES,
    WINDOW_S,
    OneRank,
    Parts,
    Sizes,
    held_bytes,
    strategy_of,
)

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.moe.observation import RowsSeen
from ds_moe_ext.moe.order import counted, keys_of
from ds_moe_ext.planning.loads import LoadWindow
from ds_moe_ext.planning.prices import RowPrices, busiest, by_node
from ds_moe_ext.planning.strategy import CostGroup, Destination, Job
from ds_moe_ext.schedule.task import Cut

SIZES = Sizes(ranks=32, ranks_per_node=4, layers=2, experts=16, rows=4096, skew=1.0)
NODES = [np.repeat([0, 1, 2], 4), np.array([7, 2, 7, 2, 2, 9, 9, 2, 7, 2, 2, 9])]
FSSDP = {"fssdp": {"overlap_degree": 4, "replicas_per_rank": 2, "reshard_interval": 0}}


@pytest.mark.parametrize("node_C", NODES, ids=["even", "uneven"])
def test_sums_by_node_are_products_with_who_is_on_which(node_C: np.ndarray) -> None:
    table_CX = np.random.default_rng(0).integers(2**30, 2**31 - 1, (12, 5))
    is_on_VC = np.unique(node_C)[:, None] == node_C
    for dtype in (np.int64, np.int32):
        sums_VX = by_node(table_CX.astype(dtype), node_C)
        assert sums_VX.dtype == np.int64
        assert (sums_VX == is_on_VC @ table_CX).all()


@pytest.mark.parametrize("node_C", NODES, ids=["even", "uneven"])
def test_seconds_of_rows_are_those_of_whole_tables(node_C: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    is_on_CV = (node_C[:, None] == np.unique(node_C)).astype(np.int64)
    for cards, local_s, cross_s in ((1.0, 1e-7, 3e-7), (4.0, 1e-9, 1e-7), (2.0, 1e-6, 1e-9)):
        sent_CC = rng.integers(0, 1000, (12, 12))
        prices = RowPrices(rng.random(12), local_s, cross_s, cards)
        crossing_VV = is_on_CV.T @ sent_CC @ is_on_CV
        links = (
            local_s * busiest(sent_CC - np.diag(np.diag(sent_CC))),
            cross_s * busiest(crossing_VV - np.diag(np.diag(crossing_VV))),
            cards * cross_s * busiest(sent_CC * (node_C[:, None] != node_C)),
        )
        computed_s = (prices.row_s_C * sent_CC.sum(axis=0)).max()
        assert prices.seconds(sent_CC, node_C) == float(computed_s) + max(links)


def test_a_window_holds_18_bytes_a_count() -> None:
    """Five steps in 16 bits, their sum and their mean in 32."""
    window = LoadWindow(5)
    steps = np.random.default_rng(2).integers(0, 2**16, (7, 64, 32), dtype=np.int32)
    for rows_CE in steps:
        window.push([rows_CE])
    (mean_CE,) = window.predicted()
    tables = (*(step[0] for step in window._steps), *window._totals, mean_CE)
    assert sum(table.nbytes for table in tables) == (5 * 2 + 4 + 4) * mean_CE.size
    assert (mean_CE == np.rint(steps[-5:].sum(axis=0) / 5)).all()


@pytest.mark.parametrize("large", [2**16, 2**31 - 1, 2**40])
def test_a_window_widens_for_counts_that_do_not_fit(large: int) -> None:
    window, steps = LoadWindow(3), [3, large, 7, 9, 11]
    for count in steps:
        window.push([np.full((2, 2), count)])
        last = steps[max(0, steps.index(count) - 2) : steps.index(count) + 1]
        assert (window.predicted()[0] == round(sum(last) / len(last))).all()


def test_counts_travel_in_32_bits_and_are_added_up_in_64() -> None:
    expert_TK = torch.tensor([[0, 1], [1, 3]])
    cut = Cut.equal(2, 1)
    key_N = keys_of(expert_TK, cut, 5, may_drop=False)
    rows_FW = counted(key_N, cut, 4, (7,), may_drop=False)
    assert rows_FW.dtype == torch.int32 and rows_FW.tolist() == [[1, 2, 0, 1, 7]]
    seen = RowsSeen(num_experts=2, num_ep_ranks=2)
    owner = Placement.owned_by(np.arange(2), 2)
    destination = Destination(owner, LocalElseOwner(owner, owner))
    for micro_batches, dtype in ((1, np.int32), (3, np.int64)):
        for _ in range(micro_batches):
            seen.add(np.full((2, 2), 2**30, dtype=np.int32), 1, destination)
        routed_CE = seen.take().routed_CE
        assert routed_CE.dtype == dtype and (routed_CE == micro_batches * 2**30).all()


def _job(strategy: Any, rows: tuple[np.ndarray, ...]) -> Job:
    """With rows whose sums do not fit into 32 bits."""
    cost_group = CostGroup(layers=tuple(range(SIZES.layers)))
    owners = strategy.first_owners([SIZES.experts] * SIZES.layers, (cost_group,), SIZES.ranks)
    job = Job.at_start(owners, SIZES.layout().node_C)
    known = replace(cost_group, prices=PRICES, expert_bytes=EXPERT_BYTES, state_bytes=EXPERT_BYTES)
    windows_s = (WINDOW_S,) * SIZES.layers
    return replace(
        job,
        rows=rows,
        cost_groups=(known,),
        window_s=windows_s,
        back_window_s=windows_s,
        free_bytes=1 << 40,
    )


@pytest.mark.parametrize("name", ["fssdp", "prophet"])
@pytest.mark.parametrize("share", ["priced", "paper"])
def test_plans_by_counts_of_32_bits_are_those_by_64(name: str, share: str) -> None:
    strategy = replace(strategy_of(name, FSSDP if name == "fssdp" else {}), share=share)
    rng = np.random.default_rng(3)
    shape = SIZES.layers, SIZES.ranks, SIZES.experts
    rows_LCE = (rng.random(shape) ** 4 * (2**31 - 1)).astype(np.int64)
    found = []
    for dtype in (np.int64, np.int32):
        rows = tuple(rows_LCE.astype(dtype))
        plans = strategy.plan(_job(strategy, rows))
        plans += tuple(
            plan if plan.successor is None else plan.successor(rows_CE)
            for plan, rows_CE in zip(plans, rows)
        )
        computed = [
            plan.destination_of(rows_CE).share.of_rows(rows_CE).computed_C(rows_CE).tolist()
            for plan, rows_CE in zip(plans, rows * 2)
        ]
        assert any(plan.target is not plan.owner for plan in plans)
        found.append(([plan.share.describe() for plan in plans], computed))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["fssdp", "prophet"])
def test_what_a_rank_holds_of_a_step_is_bounded(name: str) -> None:
    """Of each count 4 bytes as it came, 18 in the window, 4 of sums for planners, and 8 more while
    the window before and the present plans are there."""
    rank = OneRank(strategy_of(name, FSSDP), SIZES, Parts())
    for step, rows_LCE in enumerate(SIZES.loads(12)):
        rank.route(rows_LCE.astype(np.int32))
        counts = SIZES.layers * SIZES.ranks * SIZES.experts
        assert held_bytes(rank) <= (4 + 18 + 4 + 4 + 4) * counts
        rank.after_step(step)
