# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of the user's model, as the ``mpu`` that is passed to DeepSpeed tells it, or
as AutoTP makes it of a model that has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

from ds_moe_ext.core.comm import gather_objects


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The ranks that share the dense weights of one copy of the model.

    Attributes:
        size: their number; 1 without tensor parallelism.
        rank: this one's place among them.
        group: them; None where there is one.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mpu: Any) -> TensorParallel:
        """From an mpu that ``refusals`` let through, or None. One of sequence parallel ranks, which
        have all dense weights, calls them model parallel too."""
        if mpu is None or is_of_sequences(mpu):
            return cls()
        size = bwc_tensor_model_parallel_world_size(mpu)
        if size == 1:
            return cls()
        return cls(size, bwc_tensor_model_parallel_rank(mpu), bwc_tensor_model_parallel_group(mpu))

    def check(self) -> None:
        """Collective.

        Raises:
            ValueError: the ranks are not neighbours.
        """
        if self.group is None:
            return
        ranks = [int(text) for text in gather_objects(str(dist.get_rank()), self.group)]
        first = ranks[0]
        if first % self.size or ranks != list(range(first, first + self.size)):
            raise ValueError(
                f"tensor parallel ranks {ranks} are not neighbours; ds_moe_ext needs mpu groups of "
                f"{self.size} consecutive ranks, as Megatron makes them"
            )


def is_of_sequences(mpu: Any) -> bool:
    """Whether an mpu tells of sequence parallel groups, as DeepSpeed asks it."""
    return hasattr(mpu, "initialize_sequence_parallel")


def make_groups(engine: Any) -> None:
    """Make AutoTP's groups, if the JSON asks for it, and give the engine their mpu: it would a
    moment later, but layers that share tokens are made before it divides dense weights. Collective.

    Args:
        engine: DeepSpeed's, under construction.
    """
    if engine.autotp_size() > 1:
        groups._init_tp_mesh_device(tensor_model_parallel_size=engine.autotp_size())
        engine.mpu = groups
