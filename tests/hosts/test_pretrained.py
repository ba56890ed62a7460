# SPDX-License-Identifier: Apache-2.0
"""Models that ``from_pretrained`` brings: their weights are there before ``initialize``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.hosts import families, jobs
from tests.hosts.jobs import Job, Result
from tests.marks import slow
from tests.ranks import pool_of


def train(rank: int, world_size: int, job: Job, folder: str) -> Result | None:
    from transformers import AutoModelForCausalLM

    def loaded(job: Job) -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(
            folder, low_cpu_mem_usage=True, experts_implementation="eager"
        )
        assert not any(parameter.is_meta for parameter in model.parameters())
        return model.train()

    with mock.patch.object(jobs, "model_of", loaded):
        return jobs.train(rank, world_size, job)


@pytest.mark.parametrize(
    ("family", "strategy"), [("dbrx", "ep"), slow("mixtral", "fssdp"), slow("longcat_flash", "ep")]
)
def test_a_saved_model_trains_as_in_stock(family: str, strategy: str, tmp_path: Path) -> None:
    families.build(family).save_pretrained(tmp_path)
    keys: dict[str, Any] = {"dtype": "float64", "stage": 0, "steps": 2}
    folder = str(tmp_path)
    stock = pool_of(1).run(train, Job(block=False, **keys), folder)[0]
    ours = pool_of(2).run(train, Job(strategy=strategy, **keys), folder)[0]
    for mine, theirs in zip(ours.losses, stock.losses, strict=True):
        assert abs(mine - theirs) <= 1e-10 * abs(theirs)
