"""``ds_moe_ext.json`` in a checkpoint: how the run was laid out that wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LAYOUT_FILE = "ds_moe_ext.json"
FORMAT = 3  # of the checkpoint; 1 had a file an expert
READ = (2, FORMAT)  # 2 had experts flattened, as dense weights still are, and none was split


@dataclass(frozen=True)
class SavedLayout:
    """What the file says.

    Attributes:
        strategy: that the run had.
        expert_parallel_size: cells.
        expert_sharding_size: ranks of a cell, which split its experts between them.
        world_size: ranks.
        zero_stage: of DeepSpeed.
        num_experts: of each layer, in model order.
        homes: of each layer, the cell where each expert lives.
        slots: of each layer, the slot there that each expert lies in: the name that the slot's
            first weight had when the run started.
        optimizer: class that steps the weights; None without one.
        step: optimizer steps that were taken.
        tensor_parallel_size: ranks that share the dense weights of one copy of the model.
    """

    strategy: str
    expert_parallel_size: int
    expert_sharding_size: int
    world_size: int
    zero_stage: int
    num_experts: Mapping[str, int]
    homes: Mapping[str, Sequence[int]]
    slots: Mapping[str, Sequence[str]]
    optimizer: str | None
    step: int
    tensor_parallel_size: int = 1

    def write(self, folder: Path) -> None:
        """Write it; that it is there says that all else is."""
        document = {"format": FORMAT, **asdict(self)}
        (folder / LAYOUT_FILE).write_text(json.dumps(document, indent=1))

    @classmethod
    def read(cls, folder: Path) -> SavedLayout:
        """That of a checkpoint.

        Raises:
            ValueError: the checkpoint is not one of ours, or not complete.
        """
        path = folder / LAYOUT_FILE
        if not path.exists():
            raise ValueError(
                f"{folder} has no {LAYOUT_FILE}: it was written without ds_moe_ext or with it "
                "disabled, or writing did not end; load it with ds_moe_ext disabled, or choose "
                "another checkpoint"
            )
        document = json.loads(path.read_text())
        if document.pop("format", 1) not in READ:
            raise ValueError(
                f"{folder} was written by another version of ds_moe_ext, whose checkpoints have "
                f"another format than {' and '.join(map(str, READ))}; load it with that version"
            )
        return cls(**{"expert_sharding_size": 1, **document})
