# SPDX-License-Identifier: Apache-2.0
"""What one rank saw of a run of ``ds-moe-ext verify``, and the file in which it leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

SIZE = 64
"""Numbers of a sketch."""

Sketches = Mapping[str, np.ndarray]
"""By name, float64 ``[64]`` each, as ``sketch`` makes them."""


class Kind(Enum):
    """What a parameter is of."""

    DENSE = "dense"
    GATE = "gates"
    EXPERT = "experts"


@dataclass(frozen=True, eq=False)
class LayerSeen:
    """The first pass through an MoE layer; None where the host does not show it.

    Shape letters: T tokens, K choices, E experts, D model width.

    Attributes:
        input: sketch of the rows ``[T, D]``.
        choices: of the map of chosen experts ``[T, E]``, ones and zeros.
        score_sizes: of the scores ``[T, K]``, largest first, whoever they are of.
        scores: of the scores ``[T, E]``, zero where not chosen.
        output: of the rows ``[T, D]``.
        num_choices: ``T x K``, 0-dim.
    """

    input: np.ndarray | None = None
    choices: np.ndarray | None = None
    score_sizes: np.ndarray | None = None
    scores: np.ndarray | None = None
    output: np.ndarray | None = None
    num_choices: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class RankRecord:
    """Of one rank.

    Attributes:
        losses_I: mean over the micro-batches of each step; none on a rank that sees no loss.
        norms_I: of all reduced gradients, as the host tells; of the first step alone, or none.
        num_steps: of the optimizer.
        num_ranks: of the run.
        weights: dense weights before the first step.
        layers: MoE layers, in the order in which they ran.
        gradients: of the first step, of this rank's rows, by kind.
    """

    losses_I: np.ndarray
    norms_I: np.ndarray
    num_steps: int
    num_ranks: int
    weights: Sketches
    layers: Mapping[str, LayerSeen]
    gradients: Mapping[Kind, Sketches]

    def write(self, path: Path) -> None:
        """Leave it in a file; the folder is there."""
        arrays = {"losses": self.losses_I, "norms": self.norms_I}
        arrays |= {"num_steps": np.array(self.num_steps), "num_ranks": np.array(self.num_ranks)}
        arrays |= {f"weight|{name}": array for name, array in self.weights.items()}
        for name, seen in self.layers.items():
            found = {field: array for field, array in vars(seen).items() if array is not None}
            arrays |= {f"layer|{name}|{field}": array for field, array in found.items()}
        for kind, sketches in self.gradients.items():
            arrays |= {f"{kind.value}|{name}": array for name, array in sketches.items()}
        with path.open("wb") as file:  # of names with any character
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """As ``write`` left it."""
        with np.load(path) as stored:
            arrays = {tuple(key.split("|")): stored[key] for key in stored.files}
        seen: dict[str, dict[str, np.ndarray]] = {}
        for key, array in arrays.items():
            if len(key) > 2:
                seen.setdefault(key[1], {})[key[2]] = array
        return cls(
            losses_I=arrays["losses",],
            norms_I=arrays["norms",],
            num_steps=int(arrays["num_steps",]),
            num_ranks=int(arrays["num_ranks",]),
            weights=_of("weight", arrays),
            layers={name: LayerSeen(**fields) for name, fields in seen.items()},
            gradients={kind: _of(kind.value, arrays) for kind in Kind},
        )


def _of(word: str, arrays: Mapping[tuple[str, ...], np.ndarray]) -> Sketches:
    return {key[1]: array for key, array in arrays.items() if key[0] == word and len(key) == 2}
