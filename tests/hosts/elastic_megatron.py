# SPDX-License-Identifier: Apache-2.0
"""As ``elastic_script.py``, under Megatron-core: ``elastic_megatron.py FOLDER STRATEGY``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tests.hosts.elastic_script import PAUSE_S, STEPS
from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.test_megatron_checkpoint import FULLY, block, load, save, skew, steps
from tests.hosts.test_megatron_move import RUN

SAMPLES = 4  # micro-batches of a step, of all ranks


def main(folder: Path, strategy: str) -> None:
    """Train to the last step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = replace(RUN, ep=world_size, num_microbatches=SAMPLES // world_size)
    latest = folder / "latest"
    with megatron(run, block(strategy)):
        training, begun = Training(run), 0
        if latest.exists():
            begun = int(latest.read_text())
            load(training, str(folder / f"step{begun}"), FULLY)
        else:
            skew(training)
        for step in range(begun, STEPS):
            (loss,), _ = steps(training, step, step + 1)
            saved = folder / f"step{step + 1}"
            saved.mkdir(exist_ok=True)
            save(training, str(saved), FULLY)
            dist.barrier()
            if rank == 0:
                (folder / "new").write_text(str(step + 1))
                os.replace(folder / "new", latest)
                with (folder / "losses.txt").open("a") as lines:
                    print(world_size, step, loss, file=lines)
            time.sleep(PAUSE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "launch")]
    main(Path(sys.argv[1]), sys.argv[2])
