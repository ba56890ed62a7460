# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves behind for people and for `ds-moe-ext compare`: `summary.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "summary.json"


@dataclass(frozen=True)
class Summary:
    """What `summary.json` holds."""

    strategy: str
    model: str
    text: str  # what was read
    seed: int
    dtype: str  # of weights in forward
    device: str  # "cpu", or the name of a GPU
    cores: int  # of this machine's CPU
    world_size: int
    tokens_per_step: int  # all ranks
    first_step: int  # steps that a resumed checkpoint had behind it
    losses: list[float]  # one a step, nats per byte
    held_out_losses: dict[int, float]  # by step
    tokens_per_s: float  # all ranks, without the first step
    seconds_per_step_s: float
    seconds_s: list[float]  # one a step
    peak_bytes: int  # of the fullest rank: allocated on its GPU, or resident on a CPU
    balance_by_layer: dict[str, float]
    versions: dict[str, str]

    def write(self, folder: Path) -> Path:
        """Write it into `folder`, and tell where."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path
