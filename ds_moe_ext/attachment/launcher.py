# SPDX-License-Identifier: Apache-2.0
"""What a launcher (torchrun, deepspeed) tells a process about its rank, in the environment."""

from __future__ import annotations

import os
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
    """As torchrun or DeepSpeed's launcher says; None where neither does."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def is_first() -> bool:
    """Whether a launcher, or MPI's, calls this process rank 0; also where none says."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"
