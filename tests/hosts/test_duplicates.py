# SPDX-License-Identifier: Apache-2.0
"""A model with replaced layers is not copied, which is reported; one from before takes its
weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import ds_moe_ext
from tests.hosts import jobs
from tests.ranks import pool_of


def reported(rank: int, world_size: int, strategy: str) -> list[str]:
    """Errors of three ways to copy a model."""
    block = {"enabled": True, "strategy": strategy, "report": {"enabled": False}}
    model: Any = jobs.model_of(jobs.Job("toy"))
    before = copy.deepcopy(model)
    ds_moe_ext.attach(model, block)
    errors = []
    for call in (
        lambda: copy.deepcopy(model),
        lambda: AveragedModel(model),
        lambda: torch.save(model.blocks[0].experts, io.BytesIO()),
    ):
        with pytest.raises(TypeError) as error:
            call()
        errors.append(str(error.value))
    before.load_state_dict(ds_moe_ext.full_state_dict(model))  # as the remedy says
    return errors


@pytest.mark.parametrize("strategy", ["ep", "fssdp"])
def test_replicas_are_refused_with_what_to_do(strategy: str) -> None:
    for errors in pool_of(2).run(reported, strategy):
        for error in errors:
            assert error.startswith("blocks.0.experts is run by ds_moe_ext")
            assert "copy the model before its layers are replaced" in error
