# SPDX-License-Identifier: Apache-2.0
"""Runs of ``ds-moe-ext verify`` in ranks that are there already, and errors that are planted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
from ds_moe_ext._autoload import VERIFY
from ds_moe_ext.moe.gate import Choice, SoftmaxTopK
from ds_moe_ext.verification.comparison import Comparison, compare
from ds_moe_ext.verification.rank_record import RankRecord
from ds_moe_ext.verification.trial import Precision, Trial
from tests.hosts import toy
from tests.hosts.jobs import Job, train
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


def both(run: Callable[..., None], folder: Path, job: Any, *, is_wrong: bool = False) -> Comparison:
    """Both runs, compared."""
    records = []
    for is_on in (False, True):
        own = folder / str(is_on)
        own.mkdir(parents=True)
        trial = Trial(str(own), is_on, NUM_STEPS, Precision.FLOAT32, 1)
        pool_of(2).run(run, trial, job, is_wrong and is_on)
        records.append([RankRecord.read(trial.file_of(rank)) for rank in range(2)])
        assert all(record.num_steps == NUM_STEPS for record in records[-1])
    return compare(*records, Precision.FLOAT32.tolerance)
