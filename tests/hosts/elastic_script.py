# SPDX-License-Identifier: Apache-2.0
"""A training under an elastic agent: ``elastic_script.py FOLDER STRATEGY``.

Saves after each step, and begins at the folder's latest checkpoint, on as many ranks as it is
started with; the batch of a step is the same whatever their number. Rank 0 writes the number of
ranks, the step and its loss to ``losses.txt`` of the folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from tests.hosts.jobs import (
    Job,
    engine_of,
    float64_everywhere,
    loss_of,
    micro_batch,
    reduce_in_float64,
)

KEYS = {
    "fssdp": (("overlap_degree", 2), ("replicas_per_rank", 2), ("reshard_interval", 2)),
    "esp": (("slice_gradients", False),),
    "zebra": (("attention_size", 1), ("expert_size", 1)),
}
STEPS = 12
PAUSE_S = 0.5  # between steps: somebody has to be killed meanwhile


def main(folder: Path, strategy: str) -> None:
    """Train to the last step."""
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = Job("mixtral", 0, dtype="float64", strategy=strategy, keys=KEYS.get(strategy, ()))
    with float64_everywhere():
        engine = engine_of(job, world_size)
        engine.enable_backward_allreduce = False
        if (folder / "latest").exists():
            engine.load_checkpoint(str(folder))
        for step in range(engine.global_steps, STEPS):
            total = torch.zeros((), dtype=torch.float64)
            for number in range(rank, job.micro_batches, world_size):
                loss = loss_of(engine, micro_batch(step, number))
                engine.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    reduce_in_float64(engine)
                engine.step()
                total += loss.detach().double()
            dist.all_reduce(total)
            engine.save_checkpoint(str(folder))
            if rank == 0:
                with (folder / "losses.txt").open("a") as lines:
                    print(world_size, step, float(total) / job.micro_batches, file=lines)
            time.sleep(PAUSE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
