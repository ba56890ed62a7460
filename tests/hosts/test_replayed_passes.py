# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine learns by passes that are replayed what it learns by others, bit by bit. A CPU
does again what a GPU would be reported again: ``tests/test_graphs.py``. With ``RANKS_ON=cuda`` they
are CUDA graphs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from ds_moe_ext.schedule.graphs import GraphUse
from tests import ranks
from tests.hosts.jobs import Job, Result, train
from tests.marks import slow
from tests.ranks import pool_of
from tests.test_graphs import OnCpu, recording, uses

ranks.preload("deepspeed", "tests.test_graphs", "tests.hosts.jobs")


def _train(rank: int, world_size: int, job: Job) -> tuple[Result | None, GraphUse]:
    """What rank 0 learns, and how many passes were replayed."""
    recorded = nullcontext() if ranks.ON_CUDA else recording(OnCpu())
    with recorded, uses() as made:
        result = train(rank, world_size, job)
    return result, GraphUse.of_all(made)


GRAPHS = (("cuda_graphs", True),)
PLAIN = Job("mixtral", ep_ranks=1, keys=GRAPHS, dtype="bfloat16", steps=8, micro_batches=4)
JOBS = {
    "ZeRO 1": (1, PLAIN),
    "two ranks, each with all experts": (2, PLAIN),
    "ZeRO 2": (2, replace(PLAIN, stage=2)),
    "ZeRO 0": (2, replace(PLAIN, stage=0)),
    "evaluated within": (1, replace(PLAIN, evaluate_within=True)),
    "padded": (1, replace(PLAIN, keys=(*GRAPHS, ("static_capacity", 24)))),
    "checkpointed with reentrance": (1, replace(PLAIN, use_reentrant=True)),
}


QUICK = ("two ranks, each with all experts",)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in JOBS])
def test_learns_the_same(name: str) -> None:
    world_size, job = JOBS[name]
    (result, use), *_ = pool_of(world_size).run(_train, job)
    keys = tuple(each for each in job.keys if each not in GRAPHS)
    (plain, unused), *_ = pool_of(world_size).run(_train, replace(job, keys=keys))
    assert result.losses == plain.losses and result.norms == plain.norms
    assert all(torch.equal(result.state[key], plain.state[key]) for key in plain.state)
    assert use.num_replayed > use.num_passes / 2 and not unused.num_passes


def test_checkpointed_passes_stay_as_they_are() -> None:
    (_, use), *_ = pool_of(1).run(_train, replace(PLAIN, use_reentrant=False))
    assert use.num_replayed == 0 and "activation checkpointing" in str(use)


def test_weights_that_are_gathered_anew_are_refused() -> None:
    """Under ZeRO 3 over ranks that have the same experts."""
    stated = pool_of(2).run(ranks.refusal, _train, replace(PLAIN, stage=3))
    for reported in stated:
        assert "cuda_graphs is true" in reported and "leave it out" in reported
