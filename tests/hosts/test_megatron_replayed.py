# SPDX-License-Identifier: Apache-2.0
"""Under Megatron-core passes that are replayed learn what others do, bit by bit; in pipelines, too,
where several batches are under way. A CPU does again what a GPU would be reported again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_moe_ext.schedule.graphs import GraphUse
from tests.hosts.megatron_jobs import Trained, train
from tests.hosts.megatron_toy import MegatronRun
from tests.marks import slow
from tests.ranks import pool_of, preload
from tests.test_graphs import OnCpu, recording, uses

preload("tests.test_graphs")

RUN = MegatronRun(dtype="float32", num_microbatches=4, clip=0.1, bucket_size=4096, steps=4)
FULL = {"optimizer": "distributed", "overlap_grad_reduce": True, "overlap_param_gather": True}
RUNS = {
    "1 rank": (1, RUN),
    "DP2, distributed, overlapped": (2, replace(RUN, **FULL)),
    "PP2": (2, replace(RUN, pp=2, num_layers=4)),
    "PP2 VPP2": (2, replace(RUN, pp=2, vpp=2, num_layers=8)),
    "recompute full": (1, replace(RUN, recompute="full")),
}


def _train(rank: int, world_size: int, run: MegatronRun, has_graphs: bool) -> Trained:
    block = {"enabled": True, "strategy": "ep", "ep": {"cuda_graphs": has_graphs}}
    block["megatron"] = {"layer": "program"}
    with recording(OnCpu()), uses() as made:
        return train(
            rank, world_size, run, block, keep=True, look=lambda training: GraphUse.of_all(made)
        )


@pytest.mark.parametrize("name", [name if name.startswith("DP2") else slow(name) for name in RUNS])
def test_learns_the_same(name: str) -> None:
    world_size, run = RUNS[name]
    ours = pool_of(world_size).run(_train, run, True)
    plain = pool_of(world_size).run(_train, run, False)
    for own, its in zip(ours, plain):
        assert own.losses == its.losses and own.norms == its.norms
        assert all(torch.equal(own.weights[key], its.weights[key]) for key in its.weights)
        assert own.seen.num_replayed > own.seen.num_passes / 2 and not its.seen.num_passes
