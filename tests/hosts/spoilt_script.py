# SPDX-License-Identifier: Apache-2.0
"""A script that trains under prophet, whose first rank fails, dies or comes late in its fourth
step."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist

from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch

GROUP_TIMEOUT = timedelta(seconds=200)


def fail(*args: Any, **kwargs: Any) -> None:
    raise ValueError("it broke")


def main(how: str) -> None:
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo", timeout=GROUP_TIMEOUT)
    engine = engine_of(Job(strategy="prophet", micro_batches=2), dist.get_world_size())
    for step in range(4):
        if step == 3 and rank == 0 and how == "late":
            time.sleep(13.0)
        if step == 3 and rank == 0 and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and rank == 0 and how == "fail":
            for layer in engine.ds_moe_ext.run.layers:
                layer.routed.function = fail
                layer.routed._program.clear()
        engine.backward(loss_of(engine, micro_batch(step, rank)))
        engine.step()
    print("answer:trained")


if __name__ == "__main__":
    main(sys.argv[1])
