# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own functions report of the optimizer's states of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_moe_ext.hosts.steps.training_run import run_of
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed")

JOB = Job("mixtral", 1, steps=1, micro_batches=2)


def moments(rank: int, world_size: int, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of the experts of this rank, behind Adam's first step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine: Any = engine_of(job, world_size)
    engine.backward(loss_of(engine, micro_batch(0, rank)))
    engine.step()
    weights = [weight for layer in run_of(engine).layers for weight in layer.parameters]
    keys = "exp_avg", "exp_avg_sq"
    found: Any = [tuple(safe_get_full_optimizer_state(w, key) for key in keys) for w in weights]
    return found


@pytest.mark.parametrize(
    "job", [JOB, slow(replace(JOB, stage=2, strategy="fssdp")), slow(replace(JOB, ep_ranks=1))]
)
def test_states_of_experts_are_found(job: Job) -> None:
    """The first moment is a tenth of the gradient, the second a thousandth of its square."""
    for rank in pool_of(2).run(moments, job):
        assert any(first.any() for first, _ in rank)
        for first, second in rank:
            torch.testing.assert_close(first**2, 10 * second, rtol=1e-4, atol=1e-12)
