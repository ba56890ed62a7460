# SPDX-License-Identifier: Apache-2.0
"""Run a script on ranks that may be more than the GPUs of their machine.

`torchrun --nproc_per_node 2 launch/shared_gpus.py SCRIPT ARGUMENT ...` (or `-m MODULE ...`)

NCCL refuses two ranks of one host on one GPU. Where ranks share GPUs, each gives NCCL a host name
of its own, and they exchange data over sockets. The results are those of separate GPUs; the times
are not. Where each rank has a GPU, and where there is none, the script runs as it is.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def share_gpus(rank: int, num_ranks: int) -> torch.device:
    """Choose this process's GPU, and let NCCL accept it. To be called before NCCL starts.

    Args:
        rank: this one's number on its machine.
        num_ranks: ranks on its machine.
    """
    num_devices = torch.cuda.device_count()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if num_ranks > num_devices:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    number = rank % num_devices
    os.environ["LOCAL_RANK"] = str(number)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def main(arguments: Sequence[str]) -> None:
    """Run the script or module as ``__main__``."""
    is_module = bool(arguments) and arguments[0] == "-m"
    if len(arguments) < 1 + is_module:
        raise SystemExit("usage: shared_gpus.py SCRIPT [ARGUMENT ...] | -m MODULE ...")
    target, *rest = arguments[is_module:]
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if 0 < torch.cuda.device_count() < num_ranks:
        share_gpus(int(os.environ["LOCAL_RANK"]), num_ranks)
    sys.argv = [target, *rest]
    sys.path[0] = str(Path.cwd() if is_module else Path(target).resolve().parent)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
