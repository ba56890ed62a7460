# SPDX-License-Identifier: Apache-2.0
"""Megatron-core itself in the tests' harness: one model and one batch, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.hosts.megatron_jobs import Trained, merged, train
from tests.hosts.megatron_toy import MegatronRun
from tests.ranks import pool_of

ONE = MegatronRun(dtype="float64", num_microbatches=2)


@cache
def trained(world_size: int, run: MegatronRun) -> list[Trained]:
    return pool_of(world_size).run(train, run, keep=True)


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    torch.testing.assert_close(found[0].losses, expected[0].losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[0].norms, expected[0].norms, rtol=1e-12, atol=0)
    gradients = merged([one.gradients for one in found])
    assert gradients.keys() == expected[0].gradients.keys()
    for name, gradient in expected[0].gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.slow
def test_the_loss_falls() -> None:
    losses = trained(1, replace(ONE, dtype="float32", steps=30))[0].losses
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_grouped_experts_are_the_sequential_ones() -> None:
    assert_same(trained(1, replace(ONE, experts="te_grouped")), trained(1, ONE))


def test_expert_parallel_ranks_train_as_one() -> None:
    found = trained(2, replace(ONE, ep=2, num_microbatches=1))
    assert found[0].losses == found[1].losses
    assert_same(found, trained(1, ONE))


def test_every_feature_of_the_host_is_as_one_rank_without() -> None:
    features = MegatronRun(
        dtype="float64",
        ep=2,
        optimizer="distributed",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        recompute="full",
    )
    assert_same(trained(2, features), trained(1, ONE))


def test_interleaved_pipeline_stages_train_as_one() -> None:
    four = replace(ONE, num_layers=4, steps=1)
    assert_same(trained(2, replace(four, pp=2, vpp=2)), trained(1, four))
