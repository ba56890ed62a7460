# SPDX-License-Identifier: Apache-2.0
"""Scripts in processes of their own, as a person runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.ranks import key_value_store

ROOT = Path(__file__).parents[2]
SWITCHES = ("DS_MOE_EXT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH")
TIMEOUT_S = 240.0


class Failed(AssertionError):
    """A process did not end as it should; the message has its output."""


@contextmanager
def started(
    script: Path,
    *arguments: str,
    world_size: int = 1,
    python: tuple[str, ...] = (),
    path: tuple[Path, ...] = (),
    **environment: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a script, which end with the block."""
    common = {key: value for key, value in os.environ.items() if key not in SWITCHES} | {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(world_size),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **environment,
    }
    with key_value_store() as address, ExitStack() as ended:
        ranks = []
        for rank in range(world_size):
            process = subprocess.Popen(
                [sys.executable, *python, str(script), *arguments],
                env=common | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ended.callback(process.kill)
            ranks.append(process)
        yield ranks


def run_script(script: Path, *arguments: str, good: bool = True, **how: Any) -> list[str]:
    """What each rank of a script printed, on stdout and stderr together."""
    with started(script, *arguments, **how) as ranks:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in ranks]
    if any((process.returncode == 0) != good for process in ranks):
        raise Failed("\n".join(printed))
    return printed


def answers(printed: str) -> list[str]:
    """What a script printed after ``answer:``, among what hosts log. Ranks that share an output may
    print on one line."""
    return re.findall(r"answer:(.*?)(?=answer:|$)", printed, flags=re.MULTILINE)
