# SPDX-License-Identifier: Apache-2.0
"""Under every host what was planned beside a step is what the next one runs by."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

import ds_moe_ext
from ds_moe_ext.hosts.steps.planning import Planning
from ds_moe_ext.planning.strategy import Job as Known
from ds_moe_ext.planning.strategy import Plan
from tests.hosts import jobs, megatron_jobs
from tests.hosts.megatron_toy import MegatronRun
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers", "megatron.core")

STEPS = 9
KEYS = {"plan_interval": 1, "overlap_degree": 2, "replicas_per_rank": 2, "reshard_interval": 0}


def _plain(rank: int, world_size: int, block: dict[str, Any]) -> None:
    model = jobs.model_of(jobs.Job("toy"))
    moe = ds_moe_ext.attach(model, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moe.watch(optimizer)
    for step in range(STEPS):
        ids = jobs.micro_batch(step, rank)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def _deepspeed(rank: int, world_size: int, block: dict[str, Any]) -> None:
    keys = tuple(block["fssdp"].items())
    job = jobs.Job("toy", strategy="fssdp", keys=keys, steps=STEPS, micro_batches=world_size)
    jobs.train(rank, world_size, job)


def _megatron(rank: int, world_size: int, block: dict[str, Any]) -> None:
    run = MegatronRun(ep=world_size, num_layers=2, steps=STEPS, num_microbatches=1)
    block = {**block, "megatron": {"layer": "program"}}  # else the device alone knows the rows
    megatron_jobs.train(rank, world_size, run, block)


def planned(rank: int, world_size: int, host: Any) -> list[str]:
    """Names of the threads that made plans between steps, in the order of the steps."""
    threads: list[str] = []
    plan = Planning._planned

    def _planned(self: Planning, job: Known) -> tuple[Plan, ...]:
        threads.append(threading.current_thread().name)
        return plan(self, job)

    block = {"enabled": True, "strategy": "fssdp", "fssdp": KEYS, "report": {"enabled": False}}
    with mock.patch.object(Planning, "_planned", _planned):
        host(rank, world_size, block)
    return threads


@pytest.mark.parametrize(
    "host",
    [pytest.param(host, marks=pytest.mark.slow) for host in (_plain, _megatron)] + [_deepspeed],
)
def test_plans_are_made_beside_the_step(host: Any) -> None:
    """But for the first, of which nobody knows how many rows it will have."""
    for threads in pool_of(2).run(planned, host):
        assert [name.startswith("planning") for name in threads] == [False] + [True] * (STEPS - 1)
