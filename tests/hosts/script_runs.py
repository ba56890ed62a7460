# SPDX-License-Identifier: Apache-2.0
"""Several runs of a script in the same ranks, one after the other: hosts take seconds to import.
Called as ``torchrun ... script_runs.py SCRIPT '[["--model", ...], ...]'``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from torch.distributed import TCPStore


def main(script: str, runs: list[list[str]]) -> None:
    sys.path.insert(0, str(Path(script).parent))
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    reported = TCPStore(address, int(os.environ["MASTER_PORT"]))
    stores = []
    for number, arguments in enumerate(runs):
        # A store of its own for each run: what the groups of the last one left would mislead them.
        if rank == 0:
            stores.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))
            reported.set(f"port of run {number}", str(stores[-1].port))
        os.environ["MASTER_PORT"] = reported.get(f"port of run {number}").decode()
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":  # not in the process that Megatron spawns for saving
    main(sys.argv[1], json.loads(sys.argv[2]))
