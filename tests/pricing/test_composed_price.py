# SPDX-License-Identifier: Apache-2.0
"""A pipeline over replicas is planned for the rows and the replicas that there are, not for experts
at owner."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ds_moe_ext.commands.price.inputs import read_clusters
from ds_moe_ext.commands.price.market import Case
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Priced, Way, price_way
from ds_moe_ext.planning.layer_seconds import CPU_HOST
from ds_moe_ext.planning.model_shape import ModelParallel, Training, of_config
from ds_moe_ext.planning.prices import LinearCost
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.prophet import ProProphet
from tests.pricing.test_model_shape import DEEPSEEK

PIPELINE = ExpertSharding(slice_gradients=False)


def v3_layers() -> Case:
    """Three MoE layers of DeepSeek-V3 on two nodes of 8 H100."""
    training = Training(
        num_ranks=16,
        length=4096,
        micro_batches=8,
        recomputes=True,
        parallel=ModelParallel(tensor=2),
    )
    clusters = tuple(read_clusters(["dgx_h100"], [2]))
    return Case(clusters, of_config({**DEEPSEEK, "num_hidden_layers": 6}, "six"), training)


@cache
def priced(strategy: Strategy) -> Priced:
    """On EP ranks that chunk range the nodes."""
    case, grid = v3_layers(), Grid(16, 16)
    run = replace(case.run(grid), own_host=CPU_HOST)  # so that cutting is cheap
    return price_way(Way("it", strategy, grid), run, case.rows("zipf:0.6").rows_ILCE)


def test_over_replicas_it_is_no_slower_than_these_alone() -> None:
    """Each call reads the weights of all replicas, so that tokens are cut less than without them;
    by degrees for experts at their owners the two together took 1.11 times as long as replicas
    alone."""
    alone, replicas = priced(PIPELINE.over(ExpertParallel())), priced(ProProphet())
    both = priced(PIPELINE.over(ProProphet()))
    assert replicas.replicas > 16  # more than are at the owner
    assert both.step_s <= replicas.step_s * (1 + 1e-12)
    degrees = [sum(plan.forward_degree for plan in each.plans) for each in (both, alone)]
    assert degrees[0] < degrees[1]
    # Replicas were chosen as if nothing hid rows, and so may not pay; the plan says what they cost.
    assert both.step_s > alone.step_s
    assert "3 of 3 layers get fewer chunks than without replicas" in both.reported


def test_a_call_takes_its_least_however_small() -> None:
    cost = LinearCost(alpha_s=1.0, beta_s=2.0, n=6.0, least_s=5.0)
    degree_R = np.array([1, 2, 6])
    assert cost.chunk_seconds(degree_R).tolist() == [13.0, 7.0, 5.0]
    assert cost.doubled().chunk_seconds(degree_R).tolist() == [26.0, 14.0, 10.0]
    assert cost.started(3.0).chunk_seconds(degree_R).tolist() == [15.0, 15.0, 15.0]
