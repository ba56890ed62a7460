# SPDX-License-Identifier: Apache-2.0
"""How much of the dense gradients was reduced where: the same for every host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reduced:
    """Elements of dense gradients by where they were reduced.

    Attributes:
        within_moe: in the window of an MoE part.
        beside_dense: beside what the host computes between two MoE layers.
        tail: at the end of backward.
        num_slices: pieces in which those that are not the tail travelled.
    """

    within_moe: int = 0
    beside_dense: int = 0
    tail: int = 0
    num_slices: int = 0

    def __add__(self, other: Reduced) -> Reduced:
        return Reduced(
            self.within_moe + other.within_moe,
            self.beside_dense + other.beside_dense,
            self.tail + other.tail,
            self.num_slices + other.num_slices,
        )

    @property
    def elements(self) -> int:
        return self.within_moe + self.beside_dense + self.tail


def check_slice(elements: int) -> None:
    """Raises ValueError where a plan asks for less than nothing: gradients would be taken twice."""
    if elements < 0:
        raise ValueError(
            f"a plan asks for a slice of {elements} dense gradients; slices (reductions of a Plan) "
            "have 0 elements or more: mend the strategy, or let its slices_gradients be False"
        )
