"""Ranks that begin with other weights: DeepSpeed trains rank 0's model, and so do we."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.hosts import jobs
from tests.hosts.jobs import Job, Result
from tests.marks import slow
from tests.ranks import pool_of


def train_unseeded(rank: int, world_size: int, job: Job) -> Result | None:
    """The job, with weights that each rank has drawn for itself."""

    def draw(job: Job) -> Any:
        torch.manual_seed(rank)
        return jobs._MODELS[job.family](job)

    with mock.patch.object(jobs, "model_of", draw):
        return jobs.train(rank, world_size, job)


@pytest.mark.parametrize(
    ("family", "world_size", "cells"),
    [("mixtral", 4, 2), ("gpt_moe", 2, None), slow("mixtral", 2, None), slow("gpt_moe", 4, 2)],
)
def test_ranks_that_drew_their_own_weights(family: str, world_size: int, cells: int | None) -> None:
    ours = pool_of(world_size).run(train_unseeded, Job(family, steps=2, cells=cells))[0]
    seeded = pool_of(world_size).run(jobs.train, Job(family, steps=2, cells=cells))[0]
    plain = pool_of(world_size).run(train_unseeded, Job(family, steps=2, block=False))[0]
    assert ours.losses == seeded.losses
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert all(torch.equal(ours.state[name], weight) for name, weight in seeded.state.items())
