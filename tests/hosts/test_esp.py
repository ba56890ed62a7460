# SPDX-License-Identifier: Apache-2.0
"""Strategy ``esp`` under a real DeepSpeed engine: what it takes from the strategy that it is over,
and sizes that ranks choose otherwise."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest

from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.esp import ExpertSharding
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import ROWS, Job, Result, engine_of, train
from tests.hosts.test_configurations import esp, float64, over
from tests.ranks import pool_of
from tests.strategies_for_tests import Sine

SINE = f"{Sine.__module__}:{Sine.__qualname__}"


def run(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


def balance_of(rank: int, world_size: int, job: Job) -> Strategy:
    """What a run goes by."""
    run = run_of(engine_of(job, world_size))
    assert run is not None and isinstance(run.planning.strategy, ExpertSharding)
    return run.planning.strategy.placing


def test_stages_of_a_balance_and_what_it_settles_train_alike() -> None:
    job = float64("mixtral", 3)
    alone, piped = replace(job, strategy=SINE), over(esp(job, 1), SINE)
    stages = run(2, alone)
    assert stages.losses != plain(2, job).losses
    check_equal(run(2, piped), stages, job)
    assert pool_of(2).run(balance_of, piped) == [Sine(micro_batch=ROWS, num_devices=2)] * 2


def on_unequal_nodes(rank: int, world_size: int) -> str:
    """A node of two ranks, and two of one."""
    here = {"LOCAL_WORLD_SIZE": "2" if rank < 2 else "1"}
    with mock.patch.dict(os.environ, here), pytest.raises(ValueError) as caught:
        engine_of(Job("toy", strategy="esp"), world_size)
    return str(caught.value)


def test_ranks_that_choose_other_sizes() -> None:
    for message in pool_of(4).run(on_unequal_nodes):
        assert "is 2 EP ranks of 2 ranks on rank 0 and 4 EP ranks of 1 ranks on rank" in message
        assert "set ds_moe_ext.expert_parallel_size and ds_moe_ext.expert_sharding_size" in message
