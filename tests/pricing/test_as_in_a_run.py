# SPDX-License-Identifier: Apache-2.0
"""What ``price`` reckons rows and replicas with is what the planners of a run are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ds_moe_ext
from ds_moe_ext.commands.price.market import Case
from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.steps.costs import STEPS
from ds_moe_ext.moe.hooked import read_hooks
from ds_moe_ext.planning.model_shape import Training, of_config
from ds_moe_ext.planning.strategy import CostGroup, Job, Plan
from ds_moe_ext.strategies.fssdp import FullySharded
from tests.hosts import toy
from tests.ranks import pool_of

WIDTH = 12  # of an expert
EXPERT = 3 * WIDTH * toy.D
HOOKS = [
    {"type": "int8", "replicas": True},
    {"type": "bf16", "dispatch": False, "combine": False, "replica_gradients": True},
]
ONE_NODE = Hardware(
    name="one node",
    source="made up",
    num_nodes=1,
    ranks_per_node=2,
    device=Device(name="CPU", memory_bytes_per_s=1e9, flops_per_s=Flops(fp32=1e9)),
    intra=Link(bytes_per_s=1e9, latency_s=1e-5, r_squared=1.0),  # measured: it stands as it is
)


def _reported(rank: int, world_size: int, block: dict[str, Any]) -> tuple[CostGroup, CostGroup]:
    """Train until costs are known: what the planner was reported at first, and at last."""
    lines: list[Job] = []
    plan_by = FullySharded.plan

    def plan(strategy: FullySharded, job: Job) -> tuple[Plan, ...]:
        lines.append(job)
        return plan_by(strategy, job)

    torch.manual_seed(0)
    model = toy.build("toy, two experts a layer")
    with mock.patch.object(FullySharded, "plan", plan):
        moe = ds_moe_ext.attach(model, block)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        moe.watch(optimizer)
        for _ in range(STEPS.stop):
            ids = torch.randint(toy.VOCABULARY, (2, toy.LENGTH))
            model(ids, ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines[0].cost_groups[0], lines[-1].cost_groups[0]


def test_replicas_and_rows_weigh_what_they_do_in_a_run(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(ONE_NODE.to_json())
    block = {"enabled": True, "strategy": "fssdp", "hooks": HOOKS, "hardware": str(path)}
    found = pool_of(2).run(_reported, {**block, "report": {"enabled": False}})
    for unknown, measured in found:
        assert unknown.replica_bytes == 0
        assert measured.replica_bytes == measured.travelling_bytes == sum_by_hand()
    config = {"hidden_size": toy.D, "intermediate_size": WIDTH, "num_hidden_layers": 4}
    config |= {"num_attention_heads": toy.HEADS, "vocab_size": toy.VOCABULARY}
    shape = of_config({**config, "num_local_experts": 2, "num_experts_per_tok": 2}, "toy")
    training = Training(num_ranks=2, length=toy.LENGTH, micro_batch=2, number_type="fp32")
    case = Case((ONE_NODE,), shape, training, hooks=read_hooks(HOOKS, "hooks"))
    assert reported_of(case.run(Grid(2, 2)).cost_group) == pytest.approx(reported_of(found[0][1]))


def sum_by_hand() -> float:
    """Gate and up in rows of D, down in rows of F: there a byte a number and a scale a row, back
    two bytes a number."""
    there = EXPERT + 4 * (2 * WIDTH + toy.D)
    return (there + 2 * EXPERT) / 2


def reported_of(cost_group: CostGroup) -> list[float]:
    """All that does not depend on the speed of experts."""
    prices = cost_group.prices
    return [
        *(
            cost_group.expert_bytes,
            cost_group.state_bytes,
            cost_group.replica_bytes,
            cost_group.copy_latency_s,
        ),
        *(prices.row_bytes, cost_group.etp_row_bytes, prices.copy_s),
        *(prices.inter_bytes_per_s, prices.intra_bytes_per_s),
    ]
