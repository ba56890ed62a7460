# SPDX-License-Identifier: Apache-2.0
"""What ranks begin with: weights of their own, of which DeepSpeed trains rank 0's, and so do we;
and layers that nobody knows."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

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
    ("family", "world_size", "ep_ranks"),
    [slow("mixtral", 4, 2), ("gpt_moe", 2, None), slow("mixtral", 2, None), slow("gpt_moe", 4, 2)],
)
def test_ranks_that_drew_their_own_weights(
    family: str, world_size: int, ep_ranks: int | None
) -> None:
    ours = pool_of(world_size).run(train_unseeded, Job(family, steps=2, ep_ranks=ep_ranks))[0]
    seeded = pool_of(world_size).run(jobs.train, Job(family, steps=2, ep_ranks=ep_ranks))[0]
    plain = pool_of(world_size).run(train_unseeded, Job(family, steps=2, block=False))[0]
    assert ours.losses == seeded.losses
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert all(torch.equal(ours.state[name], weight) for name, weight in seeded.state.items())


def reported_of_unknown(rank: int, world_size: int) -> list[str]:
    """Start on a model of which we know a part; what is warned of."""
    import deepspeed

    job = Job("toy")
    model = jobs.model_of(job)
    model.others = nn.ModuleList(
        nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        for _ in range(3)
    )
    model.shared_experts = nn.Linear(4, 4)
    document = jobs.document_of(job, world_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
    return [str(each.message) for each in caught if "look like experts" in str(each.message)]


def test_layers_that_nobody_knows_are_named() -> None:
    """Once, by rank 0; not those that are replaced, nor shared ones."""
    (results,), others = pool_of(2).run(reported_of_unknown)
    assert "stay unchanged: others.*.experts (ModuleList, 3); register" in results
    assert "register_experts" in results
    assert "moe_layer_pattern" in results
    assert others == []
