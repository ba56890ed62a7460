# SPDX-License-Identifier: Apache-2.0
"""Experts that are frozen when a plain loop begins, and trained later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ds_moe_ext
from ds_moe_ext.testing import relative_error
from tests.hosts import jobs
from tests.marks import slow
from tests.ranks import pool_of

REPLICAS = {"replicas_per_rank": 2, "reshard_interval": 0}


def train_experts(model: Any, is_wanted: bool) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.requires_grad_(is_wanted)


def gradients(model: Any, moe: Any, ids: Tensor) -> list[Tensor]:
    """Of this rank's experts, in the order of the model."""
    model(input_ids=ids, labels=ids).loss.backward()
    moe.experts.average()
    return [p.grad.clone() for p in moe.experts.parameters]


def thawed(rank: int, world_size: int, strategy: str, ep_ranks: int) -> float:
    """How far gradients are from those of experts that were trained from the start."""
    block = {"enabled": True, "strategy": strategy, "report": {"enabled": False}, "fssdp": REPLICAS}
    found = []
    with jobs.float64_everywhere():
        for is_thawed in (False, True):
            torch.manual_seed(0)
            model = jobs.model_of(jobs.Job("toy", dtype="float64")).double()
            train_experts(model, not is_thawed)
            moe = ds_moe_ext.attach(model, {**block, "expert_parallel_size": ep_ranks})
            moe.watch(torch.optim.SGD(model.parameters(), lr=0.1))
            if is_thawed:
                ids = jobs.micro_batch(0, rank)
                model(input_ids=ids, labels=ids).loss.backward()
                assert all(p.grad is None for p in moe.experts.parameters)
                train_experts(model, True)
            found.append(gradients(model, moe, jobs.micro_batch(1, rank)))
    return max(relative_error(ours, theirs) for theirs, ours in zip(*found, strict=True))


@pytest.mark.parametrize(("strategy", "ep_ranks"), [("ep", 2), slow("ep", 1), ("fssdp", 2)])
def test_gradients_are_those_of_experts_trained_from_the_start(
    strategy: str, ep_ranks: int
) -> None:
    assert max(pool_of(2).run(thawed, strategy, ep_ranks)) <= 1e-12


def unstepped(rank: int, world_size: int) -> tuple[str, bool]:
    """What is reported thawed experts that the optimizer does not have, and whether it steps them
    where it does."""
    model = jobs.model_of(jobs.Job("toy"))
    train_experts(model, False)
    block = {"enabled": True, "strategy": "ep", "report": {"enabled": False}}
    moe = ds_moe_ext.attach(model, block)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    moe.watch(optimizer)
    train_experts(model, True)
    gradients(model, moe, jobs.micro_batch(0, rank))
    with pytest.raises(ValueError) as error:
        optimizer.step()
    before = [p.clone() for p in moe.experts.parameters]
    optimizer.add_param_group({"params": list(moe.experts.parameters)})
    optimizer.step()
    pairs = zip(before, moe.experts.parameters)
    return str(error.value), any(not torch.equal(old, new) for old, new in pairs)


def test_an_optimizer_without_them_is_reported() -> None:
    for reported, is_stepped in pool_of(2).run(unstepped):
        assert "expert weights of this rank that are trained are not in the optimizer" in reported
        assert "add_param_group" in reported and is_stepped
