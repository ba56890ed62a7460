# SPDX-License-Identifier: Apache-2.0
"""Runs of ``ds-moe-ext verify`` in ranks that are there already, and errors that are planted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_moe_ext
from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
from ds_moe_ext._autoload import VERIFY
from ds_moe_ext.moe.gate import Choice, SoftmaxTopK
from ds_moe_ext.verification import Comparison, Precision, RankRecord, Trial, compare
from tests.hosts import megatron_jobs, toy
from tests.hosts.jobs import Job, micro_batch, model_of, train
from tests.hosts.megatron_toy import MegatronRun
from tests.ranks import pool_of

NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Louder(SoftmaxTopK):
    """A gate of a user's own that gives scores one percent too large."""

    def choose(self, logit_TE: Tensor) -> Choice:
        choice = super().choose(logit_TE)
        return choice._replace(score_TK=choice.score_TK * 1.01)


def _wrongly_gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


@contextmanager
def wrong_experts() -> Iterator[None]:
    """The toy's experts are described with an activation that is not theirs."""

    def describe(experts: Any) -> ExpertsDescription:
        names = ("up_EFD", "down_EDF")
        return ExpertsDescription(experts.num_experts, names, FeedForwardExperts(_wrongly_gated))

    register_experts(toy.Experts)(describe)
    try:
        yield
    finally:
        register_experts(toy.Experts)(toy._describe)


@contextmanager
def verifying(trial: Trial, *patches: ModuleType) -> Iterator[None]:
    """This process is a rank of a run; what ends it comes out."""
    os.environ[VERIFY] = trial.to_text()
    try:
        for module in patches:
            module.apply()
        yield
    finally:
        del os.environ[VERIFY]
        for module in patches:
            for patch in module.PATCHES:
                patch.undo()


def train_job(rank: int, world_size: int, trial: Trial, job: Job, is_wrong: bool = False) -> None:
    """Under DeepSpeed."""
    from ds_moe_ext.patches import verify_deepspeed

    planted = wrong_experts if is_wrong else suppress
    with planted(), verifying(trial, verify_deepspeed), suppress(SystemExit):
        train(rank, world_size, job)


def train_loop(rank: int, world_size: int, trial: Trial, family: str, is_wrong: bool) -> None:
    """In a loop of a user's own."""
    from ds_moe_ext.patches import verify_torch

    with verifying(trial, verify_torch), suppress(SystemExit):
        model = model_of(Job(family))
        block = {"enabled": True, "strategy": "fssdp", "fssdp": {"replicas_per_rank": 2}}
        moe = ds_moe_ext.attach(model, block, micro_batches=2)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        moe.watch(optimizer)
        for step in range(2 * trial.num_steps):
            for number in range(2):
                tokens = micro_batch(step, 2 * number + rank)
                loss = wrapped(input_ids=tokens, labels=tokens).loss / 2
                if is_wrong and trial.is_on and step == 0:
                    loss = loss * 2
                loss.backward()
            moe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()


def train_megatron(
    rank: int, world_size: int, trial: Trial, run: MegatronRun, is_wrong: bool
) -> None:
    """Under Megatron-core."""
    from ds_moe_ext.patches import verify_megatron

    block = {"enabled": True, "strategy": "fssdp", "fssdp": {"replicas_per_rank": 2}}
    with verifying(trial, verify_megatron), suppress(SystemExit):
        megatron_jobs.train(rank, world_size, replace(run, steps=2 * trial.num_steps), block)


def both(
    run: Callable[..., None],
    folder: Path,
    job: Any,
    *,
    is_wrong: bool = False,
    precision: Precision = Precision.FLOAT32,
) -> Comparison:
    """Both runs, compared."""
    records = []
    for is_on in (False, True):
        own = folder / str(is_on)
        own.mkdir(parents=True)
        trial = Trial(str(own), is_on, NUM_STEPS, precision, 1)
        pool_of(2).run(run, trial, job, is_wrong and is_on)
        records.append([RankRecord.read(trial.file_of(rank)) for rank in range(2)])
        assert all(record.num_steps == NUM_STEPS for record in records[-1])
    return compare(*records, precision.tolerances())
