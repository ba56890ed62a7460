# SPDX-License-Identifier: Apache-2.0
"""Megatron's layer, by each way to compute experts that runs without a GPU, against ours; and the
exchanges of ``exchange_speed.py``."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import exchange_speed
import layer_megatron
import megatron_on_cpu
import pytest
import torch
from exchange_speed import copy_works, measure, row_works
from host_path_peers import grouped_gemm
from layer_contenders import Problem, Shape, ours
from layer_speed import errors, step

from ds_moe_ext.core.comm import connect
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.planning.bench import Bench, HostClock
from ds_moe_ext.schedule.task import INTER
from tests.ranks import pool_of, preload

preload("megatron.core")
CPU = torch.device("cpu")
SHAPE = Shape(width=16, expert_width=24, num_experts=4, top_k=2, num_tokens=32)


def difference(rank: int, world_size: int, name: str) -> float:
    """Of outputs and input gradients from ours, in float32."""
    problem = Problem.of(SHAPE, 32, skew=1.0, device=CPU, dtype=torch.float32)
    with mock.patch.object(layer_megatron, "find_spec", lambda name: SimpleNamespace()):
        try:
            theirs = layer_megatron.megatron_layer(name, problem)
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


def exchanged(rank: int, world_size: int) -> list[tuple[str, int, int]]:
    """Ways, bytes and repetitions."""
    layout = ParallelLayout.build(Grid(world_size, world_size), [("ep", INTER)])
    group = layout.group("ep", INTER)
    connect(group, CPU)
    works, reason = row_works(layout, CPU, mib=0.5, width=64)
    assert "DeepEP carries rows of CUDA devices" in reason
    works += copy_works(group, rank, CPU, mib=0.25)
    seconds = measure(works, Bench(HostClock(), CPU, 1, 1), 3)
    layout.close()
    assert all(each > 0 for own in seconds for each in own)
    return [(work.way, work.num_bytes, len(own)) for work, own in zip(works, seconds)]


def test_bytes_are_those_that_leave_a_rank() -> None:
    """Of half a MiB of rows one of two ranks keeps half; copies are the other rank's expert."""
    quarter = exchange_speed.MIB // 4
    for found in pool_of(2).run(exchanged):
        assert found == [
            ("all-to-all", quarter, 3),
            ("copies", quarter, 3),
            ("gradients", quarter, 3),
        ]
