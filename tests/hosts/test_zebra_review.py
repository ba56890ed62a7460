# SPDX-License-Identifier: Apache-2.0
"""What striped models are called with, and what scripts do with what they return."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ds_moe_ext.core.layout import Roles
from tests.hosts import jobs
from tests.hosts.jobs import Job, Result, engine_of, loss_of, micro_batch, model_of, train
from tests.hosts.test_batches import exchange_of
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of


def transposed(rank: int) -> torch.Tensor:
    """A tensor without a dim for samples, not contiguous."""
    return (torch.arange(6.0).view(2, 3) + 100 * rank).t()


def tables_that_came(rank: int, world_size: int) -> dict[int, torch.Tensor]:
    batches = exchange_of(rank, world_size, Roles.first(1, 1), 2)
    batch = {"input_ids": torch.full((4, 2), rank), "table": transposed(rank)}
    shared = batches.share((), batch, "train")
    calls = (call for stripe in shared.calls for call in stripe)
    return {call.piece.sender: call.kwargs["table"] for call in calls}


def test_a_transposed_tensor_arrives() -> None:
    tables, none = pool_of(2).run(tables_that_came)
    assert not none
    assert tables.keys() == {0, 1}
    assert all(torch.equal(table, transposed(sender)) for sender, table in tables.items())


def with_an_unused_layer(rank: int, world_size: int, job: Job) -> Result | None:
    build = jobs.model_of

    def built(job: Job) -> nn.Module:
        model = build(job)
        model.unused = nn.Linear(4, 4)
        return model

    with mock.patch.object(jobs, "model_of", built):
        return train(rank, world_size, job)


@pytest.mark.parametrize("stage", [slow(1), 2])
def test_weights_that_forward_does_not_use(stage: int) -> None:
    """ZeRO's hooks stay silent for them, as they do without roles."""
    job = Job("mixtral", stage, steps=3, clip=0.5)
    ours = pool_of(2).run(with_an_unused_layer, zebra(job))[0]
    theirs = pool_of(2).run(with_an_unused_layer, job)[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


def backward_of_a_sum(rank: int, world_size: int, job: Job) -> tuple[bool, str]:
    """Of the loss and another scalar that the model returned beside it."""
    engine = jobs.engine_of(job, world_size)
    tokens = jobs.micro_batch(0, rank)
    output: Any = engine(input_ids=tokens, labels=tokens)
    try:
        engine.backward(output.loss + output.aux_loss)
    except RuntimeError as error:
        return bool(output.aux_loss > 0), str(error)
    return False, ""


def test_other_scalars_than_the_loss_have_no_gradient() -> None:
    """They would be left out of the gradients silently."""
    for is_there, reported in pool_of(2).run(backward_of_a_sum, zebra(Job())):
        assert is_there
        assert "the loss alone has a gradient" in reported


def _half_frozen(rank: int, world_size: int) -> str:
    """All but the experts is frozen."""
    job = Job("mixtral", 1, strategy="zebra", keys=(("attention_size", 1), ("expert_size", 1)))

    def frozen(job: Job) -> nn.Module:
        model = model_of(job)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." in name)
        return model

    with mock.patch("tests.hosts.jobs.model_of", frozen), pytest.raises(ValueError) as caught:
        engine_of(job, world_size)
    return str(caught.value)


def test_a_role_with_nothing_to_train_is_refused_on_all_ranks() -> None:
    first, second = pool_of(2).run(_half_frozen)
    assert first == second
    assert "stage is 1, but on ranks [0] all weights are frozen" in first


def _drawn_after_a_step(rank: int, world_size: int) -> float:
    job = Job("mixtral", 0, strategy="zebra", keys=(("attention_size", 1), ("expert_size", 1)))
    engine = engine_of(job, world_size)
    torch.manual_seed(7)
    engine.backward(loss_of(engine, micro_batch(0, rank)))
    engine.step()
    return float(torch.rand(()))


def test_ranks_of_both_roles_draw_alike_behind_a_step() -> None:
    first, second = pool_of(2).run(_drawn_after_a_step)
    assert first == second
