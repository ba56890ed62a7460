# SPDX-License-Identifier: Apache-2.0
"""As ``elastic_script.py``, under Megatron-core: ``elastic_megatron.py FOLDER STRATEGY``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.hosts import test_megatron_zebra as zebra
from tests.hosts.elastic_script import PAUSE_S, STEPS
from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_checkpoint import FULLY, block, load, save, skew, steps
from tests.hosts.test_megatron_move import RUN

SAMPLES = 4  # micro-batches of a step, of all ranks


def among_all(strategy: str, world_size: int) -> tuple[MegatronRun, Any]:
    """Run and block where all ranks do the same."""
    return replace(RUN, ep=world_size, num_microbatches=SAMPLES // world_size), block(strategy)


def by_roles(_: str, world_size: int) -> tuple[MegatronRun, Any]:
    """Likewise where half of them have attention."""
    size = world_size // 2
    run = replace(zebra.RUN, optimizer="distributed", num_microbatches=SAMPLES // size)
    return run, zebra.block(size, size)


BY_ROLES = {"zebra": by_roles}


def main(folder: Path, strategy: str) -> None:
    """Train to the last step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run, settings = BY_ROLES.get(strategy, among_all)(strategy, world_size)
    latest = folder / "latest"
    with megatron(run, settings):
        training, begun = Training(run), 0
        if latest.exists():
            begun = int(latest.read_text())
            load(training, str(folder / f"step{begun}"), FULLY)
        elif strategy not in BY_ROLES:
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
