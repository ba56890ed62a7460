# SPDX-License-Identifier: Apache-2.0
"""Ranks that evaluate and generate otherwise than each other, and what they are notified where they
do so without a joined block."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_moe_ext
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

SOON_S = 30.0  # of a group that would wait for 120 s
JOBS = [
    Job(micro_batches=2),
    Job(strategy="esp", keys=(("degree", 2),), micro_batches=2),
    Job(strategy="fssdp", micro_batches=2),
    Job(strategy="prophet", micro_batches=2),
]
ZEBRA = Job(strategy="zebra", keys=(("attention_size", 1), ("expert_size", 1)), micro_batches=2)


def _generated(model: Any, number: int, length: int = 4) -> list[int]:
    tokens: Tensor = model.generate(
        micro_batch(7, number)[:1, : 4 + number],
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tokens[0].tolist()


def _train(engine: Any, rank: int, steps: range) -> list[float]:
    engine.train()
    losses = []
    for step in steps:
        loss = loss_of(engine, micro_batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.eval()
    return losses


def _losses(engine: Any, number: int) -> list[float]:
    with torch.no_grad():
        return [float(loss_of(engine, micro_batch(7, n))) for n in range(number)]


def evaluate_apart(rank: int, world_size: int, job: Job) -> None:
    """Rank 0 alone generates, then both do at other lengths, then they evaluate unlike numbers of
    batches: the same comes of it as where both do the same, and training goes on as without."""
    engine, other = engine_of(job, world_size), engine_of(job, world_size)
    before = _train(engine, rank, range(2))
    assert before == _train(other, rank, range(2))
    found = []
    with ds_moe_ext.joined(engine):
        if rank == 0:
            found = [_generated(engine.module, number) for number in range(2)]
    at_length = _generated(engine.module, 0, 2 + 3 * rank)
    with ds_moe_ext.joined(engine):
        losses = _losses(engine, 2 - rank)
    together = [_generated(engine.module, number) for number in range(2)]
    assert found == (together if rank == 0 else [])
    assert at_length[:6] == together[0][:6] and len(at_length) == 6 + 3 * rank
    assert losses == pytest.approx(_losses(engine, 2)[: 2 - rank], rel=1e-6)
    after = _train(engine, rank, range(2, 4))
    assert after == pytest.approx(_train(other, rank, range(2, 4)), rel=1e-4)


QUICK = ("fssdp",)


@pytest.mark.parametrize(
    "job",
    [job if job.strategy in QUICK else slow(job) for job in JOBS],
    ids=lambda job: job.strategy,
)
def test_ranks_evaluate_as_they_like(job: Job) -> None:
    pool_of(2).run(evaluate_apart, job)


def refused(rank: int, world_size: int, job: Job) -> str:
    engine = engine_of(job, world_size)
    with pytest.raises(ValueError, match="zebra") as caught:
        _generated(engine.module, 0)
    return str(caught.value)


def test_zebra_does_not_generate() -> None:
    assert len(set(pool_of(2).run(refused, ZEBRA))) == 1


def train_and_evaluate(rank: int, world_size: int, job: Job) -> tuple[float, str]:
    """Rank 0 evaluates while rank 1 trains."""
    engine = engine_of(job, world_size)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        if rank == 0:
            engine.eval()
            _losses(engine, 1)
        _train(engine, rank, range(1))
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_passes_that_do_not_belong_together_are_reported(stage: int) -> None:
    """A joined block is named where there may be one: not at stage 3."""
    for seconds, reported in pool_of(2).run(train_and_evaluate, Job(stage=stage, micro_batches=2)):
        assert seconds < SOON_S
        assert "place 0: layer 0, evaluation; place 1: layer 0, training" in reported
        assert ("ds_moe_ext.joined(engine)" in reported) == (stage < 3)
        assert ("give it batches with a masked loss" in reported) == (stage == 3)


def fail_in_a_block(rank: int, world_size: int, job: Job) -> tuple[float, str]:
    """Rank 1 serves; rank 0 fails, and both go on."""
    engine = engine_of(job, world_size)
    engine.eval()
    start = time.monotonic()
    with pytest.raises((RuntimeError, KeyError)) as caught, ds_moe_ext.joined(engine):
        if rank == 0:
            _losses(engine, 1)
            raise KeyError("no such prompt")
    seconds = time.monotonic() - start
    with ds_moe_ext.joined(engine):
        assert len(_losses(engine, 1 + rank)) == 1 + rank
    return seconds, str(caught.value)


def test_who_serves_learns_of_a_failure() -> None:
    (_, own), (seconds, results) = pool_of(2).run(fail_in_a_block, JOBS[3])
    assert own == "'no such prompt'"
    assert seconds < SOON_S
    assert results.startswith("rank 0 failed in a block of ds_moe_ext.joined"), results
    assert "no such prompt" in results
