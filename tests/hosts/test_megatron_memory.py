# SPDX-License-Identifier: Apache-2.0
"""GEMMs that experts take where Megatron-core has laid their weights down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.hosts.megatron_jobs import Training, train
from tests.hosts.megatron_skewed import NEVER, assert_equal, num_replicas, stock, train_skewed
from tests.hosts.megatron_toy import MegatronRun
from tests.marks import slow
from tests.ranks import pool_of

EP = {"enabled": True, "strategy": "ep", "debug": True, "report": {"enabled": False}}
RUN = MegatronRun(
    dtype="float64", ep=2, num_experts=16, optimizer="distributed", swiglu=True, steps=1
)
NUM_SLOTS = 8


class Runs(NamedTuple):
    """Of the slots of each layer: in slot order, and as they are computed."""

    by_slot: list[int]
    computed: list[int]


def runs(training: Training) -> Runs:
    from ds_moe_ext.core.rows import runs_of
    from ds_moe_ext.hosts.steps.training_run import run_of
    from ds_moe_ext.moe.feed_forward import arranged

    run = run_of(training.optimizer)
    assert run is not None
    found = Runs([], [])
    for layer in run.layers:
        by_name = list(zip(*(slot.parameters for slot in layer.hosted.slots())))
        order = arranged(by_name).order
        ordered = by_name if order is None else [[own[s] for s in order.slots] for own in by_name]
        found.by_slot.append(len(runs_of(by_name)))
        found.computed.append(len(runs_of(ordered)))
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("experts", ["sequential", "te_grouped"])
def test_experts_in_the_buffers_of_megatron_take_one_gemm_a_weight(
    experts: Any, bias: bool
) -> None:
    run = replace(RUN, experts=experts, bias=bias)
    for rank in pool_of(2).run(train, run, EP, look=runs):
        assert rank.seen == Runs([NUM_SLOTS] * 2, [1] * 2)


SKEW = (2.0, 1.0, *([0.0] * (2 * NUM_SLOTS - 3)), NEVER)
REPLICAS = {"overlap_degree": 2, "replicas_per_rank": 2, "reshard_interval": 0}
MOVES = {
    **{"overlap_degree": 1, "replicas_per_rank": 0},
    **{"reshard_interval": 1, "resharding": "paper", "window": 5},
}


@pytest.mark.parametrize("experts", [slow("sequential"), "te_grouped"])
def test_experts_train_as_in_megatron_in_the_order_of_their_weights(experts: Any) -> None:
    """With biases, as slots are grouped on a CPU only then; with replicas, that lie elsewhere."""
    run = replace(RUN, experts=experts, bias=True, num_microbatches=2, steps=3)
    settings = {**EP, "strategy": "fssdp", "fssdp": REPLICAS}
    ours = pool_of(2).run(train_skewed, run, settings, SKEW)
    assert num_replicas(ours) > 0
    assert_equal(ours, stock(2, run, SKEW))


def test_experts_that_have_moved_take_fewer_gemms_than_slots() -> None:
    settings = {**EP, "strategy": "fssdp", "fssdp": MOVES}
    run = replace(RUN, steps=4)
    for rank in pool_of(2).run(train_skewed, run, settings, SKEW, look=runs):
        found = rank.trained.seen
        assert sum(found.computed) < sum(found.by_slot) and max(found.computed) <= 3
