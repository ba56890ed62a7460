# SPDX-License-Identifier: Apache-2.0
"""A training that ends by a signal: ``endless_run.py DOCUMENT``. Says after each step how many.

With the argument ``stuck`` rank 1 stops after five steps, and rank 0 waits for it in a collective;
with ``waiting`` rank 0 waits then for what nobody brings to its store.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import deepspeed
from torch.distributed.distributed_c10d import _get_default_store as default_store

from tests.hosts.jobs import Job, loss_of, micro_batch, model_of


def main(document: Path, how: str = "running") -> None:
    model = model_of(Job("toy"))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=json.loads(document.read_text())
    )
    for step in count(1):
        engine.backward(loss_of(engine, micro_batch(step, engine.global_rank)))
        engine.step()
        print("answer:", step, flush=True)
        if how == "stuck" and engine.global_rank == 1 and step == 5:
            time.sleep(1000)
        if how == "waiting" and step == 5:
            default_store().wait(["what nobody brings"], timedelta(seconds=1000))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
