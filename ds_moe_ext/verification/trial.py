# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one run of ``ds-moe-ext verify`` are told, in an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path


class Precision(Enum):
    """In which type both runs compute."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    AS_IS = "as-is"

    @property
    def tolerance(self) -> float:
        """Largest relative difference that rounding alone makes in the first step."""
        return _TOLERANCES[self]


_TOLERANCES = {Precision.FLOAT32: 1e-4, Precision.FLOAT64: 1e-10, Precision.AS_IS: 5e-2}


@dataclass(frozen=True)
class Trial:
    """One of the two runs.

    Attributes:
        folder: absolute, where each rank leaves its record.
        is_on: the block is as it is; else the host runs without us.
        num_steps: of the optimizer; all ranks leave behind the last.
        precision: of both runs.
        seed: of all generators, as the process starts and as training does.
    """

    folder: str
    is_on: bool
    num_steps: int
    precision: Precision
    seed: int

    def to_text(self) -> str:
        """For the variable."""
        return json.dumps({**asdict(self), "precision": self.precision.value})

    @classmethod
    def from_text(cls, text: str) -> Trial:
        """Of the variable."""
        told = json.loads(text)
        return cls(**{**told, "precision": Precision(told["precision"])})

    def file_of(self, rank: int) -> Path:
        """Where a rank leaves its record."""
        return Path(self.folder) / f"rank_{rank}.npz"
