# SPDX-License-Identifier: Apache-2.0
"""What a launcher (torchrun, deepspeed, MPI, srun) tells a process, in the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """This process among those that were started together.

    Attributes:
        rank: among all.
        world_size: all.
        local_rank: among those of this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Launched:
        """Of a process that no launcher started: the only rank.

        Raises:
            ValueError: some of the variables are set and others not.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        found = [os.environ[name] for name in names if name in os.environ]
        if not found:
            return cls()
        if len(found) < len(names):
            missing = ", ".join(name for name in names if name not in os.environ)
            raise ValueError(
                f"the environment has no {missing}, which a launcher sets beside the rest of "
                f"{', '.join(names)}; start with torchrun or deepspeed, or unset them all"
            )
        return cls(*map(int, found))


def ranks_on_this_node() -> int | None:
    """As torchrun, DeepSpeed's launcher, an MPI or ``srun`` says; None where none does.

    Of SLURM's variables the step's count, where its tasks are the ranks: under ``srun torchrun`` a
    task is a launcher, and torchrun says more.
    """
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    tasks, per_node = os.environ.get("SLURM_STEP_NUM_TASKS"), "SLURM_STEP_TASKS_PER_NODE"
    if tasks is not None and tasks == os.environ.get("WORLD_SIZE"):
        even = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(per_node, ""))  # "8(x4)"
        return int(even[1]) if even else None
    return None


def is_first() -> bool:
    """Whether a launcher, or MPI's, calls this process rank 0; also where none says."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"
