# SPDX-License-Identifier: Apache-2.0
"""A router that gives no numbers, or a loss that is none, on one rank: its rows still go somewhere,
nobody waits in vain, and all ranks skip the step and train on, where the host does so."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.report.record import BadScores
from tests.hosts.jobs import Job, _float16_on_a_cpu, engine_of, loss_of, micro_batch
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

SOON_S = 30.0  # of a group that would wait for 120 s
BAD_STEP = 2
HALF = Job(micro_batches=2, dtype="float16")
MOVING = (("replicas_per_rank", 1), ("reshard_interval", 1), ("resharding", "paper"))
JOBS = {
    "ep": HALF,
    "fssdp": replace(HALF, strategy="fssdp", keys=MOVING),
    "prophet": replace(HALF, strategy="prophet"),
    "esp": replace(HALF, strategy="esp", keys=(("degree", 2),)),
    "zebra": zebra(HALF),
}


def _spoil(module: Any, given: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Logits and scores that are no numbers; the choices of experts are what came of them."""
    return tuple(each * torch.nan if each.is_floating_point() else each for each in found)


def _dense(engine: Any) -> list[Tensor]:
    """Weights that change by an optimizer's step alone: experts may have another owner behind
    it."""
    named = engine.module.named_parameters()
    return [parameter for name, parameter in named if ".experts." not in name]


def _experts(engine: Any) -> list[float]:
    """A number of each expert, or part of one, that lives here; the same wherever it does."""
    named = engine.module.named_parameters()
    stacks = [each.detach() for name, each in named if ".experts." in name]
    return [float(each.double().sum()) for stack in stacks for each in stack]


def _step(engine: Any, rank: int, step: int, what: str) -> Tensor:
    """Take a step; in the bad one this rank has no numbers where ``what`` says. Its loss."""
    begun_s, spoilt = time.monotonic(), what if step == BAD_STEP else ""
    hooks = []
    if spoilt == "logits":
        gate = engine.module.model.layers[1].mlp.gate
        hooks.append(gate.register_forward_hook(_spoil))
    loss = loss_of(engine, micro_batch(step, rank))
    for hook in hooks:
        hook.remove()
    engine.backward(loss * torch.inf if spoilt == "loss" else loss)
    engine.step()
    assert time.monotonic() - begun_s < SOON_S
    return loss


class Reported(NamedTuple):
    """By one rank."""

    changed: list[bool]
    experts: list[list[float]]
    num_skipped: int
    bad_scores: BadScores | None


def trained(rank: int, world_size: int, job: Job, what: str, bad: int) -> Reported:
    """Train past a step of bad numbers."""
    scaled = (("fp16", {"enabled": True, "initial_scale_power": 4}),)
    with _float16_on_a_cpu():
        engine = engine_of(replace(job, dtype="float32", extra=scaled), world_size)
        run = run_of(engine)
        assert run is not None
        ranks = run.recorder.ranks
        ranks.is_on = True
        for layer in run.layers:
            layer.routed.rows.keeps_scores = True
        changed, experts = [], []
        for step in range(BAD_STEP + 3):
            own = _dense(engine)
            before = [each.detach().clone() for each in own]
            loss = _step(engine, rank, step, what if rank == bad else "")
            assert all(p.isfinite().all() for p in engine.module.parameters()), step
            assert step == BAD_STEP or bool(loss.isfinite())
            changed.append(any(not torch.equal(p, old) for p, old in zip(own, before)))
            experts.append(_experts(engine))
        return Reported(
            changed, experts, int(engine.skipped_steps), ranks.own.reported(0.0).bad_scores
        )


@pytest.mark.parametrize("what", ["logits", slow("loss")])
@pytest.mark.parametrize("name", JOBS)
def test_all_ranks_skip_the_step(name: str, what: str) -> None:
    ranks = pool_of(2).run(trained, JOBS[name], what, 0)
    changed = [any(each) for each in zip(*(reported.changed for reported in ranks))]
    assert changed == [step != BAD_STEP for step in range(len(changed))]
    experts = [sorted(chain(*each)) for each in zip(*(reported.experts for reported in ranks))]
    same = [before == after for before, after in pairwise(experts)]
    assert same == [step == BAD_STEP for step in range(1, len(experts))]
    assert [reported.num_skipped for reported in ranks] == [1, 1]
    bad = BadScores(BAD_STEP, layer=1, rank=0) if what == "logits" else None
    assert [reported.bad_scores for reported in ranks] == [bad, None]


class Left(NamedTuple):
    """Of a step, by one rank."""

    changed: bool
    is_dense_finite: bool
    are_experts_finite: bool


def left_by_steps(rank: int, world_size: int, job: Job, what: str) -> tuple[tuple[Left, ...], int]:
    """Of each step, of which one is bad on rank 0; and how many the engine skipped."""
    engine = engine_of(job, world_size)
    found = []
    for step in range(BAD_STEP + 3):
        named = dict(engine.module.named_parameters())
        dense = _dense(engine)
        before = [each.detach().clone() for each in dense]
        _step(engine, rank, step, what if rank == 0 else "")
        experts = [each for name, each in named.items() if ".experts." in name]
        found.append(
            Left(
                any(not torch.equal(each, old) for each, old in zip(dense, before)),
                all(bool(each.isfinite().all()) for each in dense),
                all(bool(each.isfinite().all()) for each in experts),
            )
        )
    return tuple(found), int(engine.skipped_steps)


@cache
def left(job: Job, what: str) -> tuple[list[Left], set[int]]:
    """By all ranks together."""
    ranks = pool_of(2).run(left_by_steps, job, what)
    steps = [
        Left(any(changed), all(dense), all(experts))
        for changed, dense, experts in (
            zip(*each) for each in zip(*(reported for reported, _ in ranks))
        )
    ]
    return steps, {num_skipped for _, num_skipped in ranks}


KINDS = [
    (name, dtype, stage, what)
    for name in JOBS
    for dtype in ("float32", "bfloat16")
    for stage in (0, 1, 2)
    for what in ("logits", "loss")
]
QUICK = ("prophet", "bfloat16", 1, "logits")


@pytest.mark.parametrize(
    ("name", "dtype", "stage", "what"),
    [kind if kind == QUICK else slow(*kind) for kind in KINDS],
)
def test_without_a_scaler_it_is_as_without_us(name: str, dtype: str, stage: int, what: str) -> None:
    """Weights are lost in float32 at ZeRO 0 alone; under zebra the experts' are a step later, where
    the loss was none."""
    job = replace(JOBS[name], dtype=dtype, stage=stage)
    steps, skipped = left(job, what)
    expected, expected_skipped = left(
        Job(micro_batches=2, block=False, dtype=dtype, stage=stage), what
    )
    assert skipped == expected_skipped == ({0} if (dtype, stage) == ("float32", 0) else {1})
    assert [each[:2] for each in steps] == [each[:2] for each in expected]
    assert steps[-1] == expected[-1]
    assert expected[-1].is_dense_finite == (skipped == {1})
