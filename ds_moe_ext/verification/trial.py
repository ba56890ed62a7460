# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one run of ``ds-moe-ext verify`` are told, in an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Tolerances(NamedTuple):
    """Relative differences that rounding makes.

    Attributes:
        first_step: of all that a step computes from equal weights and batches.
        curve: of losses behind that, which part by flips of choices.
    """

    first_step: float
    curve: float


class Precision(Enum):
    """In which type both runs compute."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    AS_IS = "as-is"

    def tolerances(self, first_step: float | None = None) -> Tolerances:
        """By measurement; or around what a user lets pass in the first step."""
        known = _TOLERANCES[self]
        if first_step is None:
            return known
        return Tolerances(first_step, max(known.curve, 10 * first_step))


_TOLERANCES = {
    Precision.FLOAT32: Tolerances(1e-4, 1e-3),
    Precision.FLOAT64: Tolerances(1e-10, 1e-6),
    Precision.AS_IS: Tolerances(5e-2, 2e-2),
}


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
