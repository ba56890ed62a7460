# SPDX-License-Identifier: Apache-2.0
"""Megatron's layer, by each way to compute experts that runs without a GPU, against ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import layer_speed
import megatron_on_cpu
import pytest
import torch
from layer_speed import Problem, Shape, errors, ours, step
from torch import Tensor

from tests.ranks import pool_of, preload

preload("megatron.core")
CPU = torch.device("cpu")
SHAPE = Shape(width=16, expert_width=24, num_experts=4, top_k=2, num_tokens=32)


def grouped_gemm(rows: Tensor, weights: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Any:
    """In the place of the wheel's."""
    weights = weights.mT if trans_b else weights
    ends = batch_sizes.cumsum(0, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


def difference(rank: int, world_size: int, name: str) -> float:
    """Of outputs and input gradients from ours, in float32."""
    problem = Problem.of(SHAPE, 32, device=CPU, dtype=torch.float32)
    with mock.patch.object(layer_speed, "find_spec", lambda name: SimpleNamespace()):
        try:
            theirs = layer_speed.megatron_layer(name, problem)
            from megatron.core.transformer.moe import grouped_gemm_util

            stand_in = SimpleNamespace(gmm=grouped_gemm)
            with mock.patch.object(grouped_gemm_util, "ops", stand_in):
                found = errors([ours(problem), theirs], problem)
            step(theirs, problem.x_TD, problem.grad_TD)
        finally:
            megatron_on_cpu.remove()
    return max(found[name])


@pytest.mark.parametrize("name", ["Megatron, expert by expert", "Megatron, grouped GEMM"])
def test_it_computes_what_ours_does(name: str) -> None:
    (found,) = pool_of(1).run(difference, name)
    assert found < 1e-5
