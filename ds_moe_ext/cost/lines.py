# SPDX-License-Identifier: Apache-2.0
"""What an operation costs by its size: a start and a price a unit (FSMoE, eq. 1; spec 2.1). Pure.

Units are what the fit counted: elements or bytes of a message, rows or multiply-adds of an expert.
Nothing here depends on the unit of time: all costs of one plan in milliseconds give a plan in
milliseconds. Shape letters: R pipeline degrees, the numbers of chunks that a layer's tokens are cut
into; N slices of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

ROUNDING = 1e-9  # of a window's elements, so that a window as long as a slice takes that slice


def check_costs(costs: Mapping[str, float]) -> None:
    """Refuse costs by name that cannot be; bandwidths end in ``_per_s``.

    Raises:
        ValueError: one is below zero or not finite, or a bandwidth is zero.
    """
    for name, value in costs.items():
        if not 0 <= value < math.inf or (value == 0 and name.endswith("_per_s")):
            raise ValueError(
                f"{name} is {value}; costs are finite and not below zero, bandwidths above it"
            )


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """One operation on one layer: ``alpha_s + units * beta_s`` seconds for each call.

    Attributes:
        alpha_s: seconds to start a call.
        beta_s: seconds of one unit.
        n: units of the whole layer, which its chunks share equally.
        least_s: seconds of any call, however few units it has.

    Raises:
        ValueError: a number below zero or not finite.
    """

    alpha_s: float
    beta_s: float
    n: float
    least_s: float = 0.0

    def __post_init__(self) -> None:
        check_costs(vars(self))

    def chunk_seconds(self, degree_R: np.ndarray) -> np.ndarray:
        """Seconds of one of ``r`` chunks, float ``[R]``."""
        return np.maximum(self.alpha_s + self.n * self.beta_s / degree_R, self.least_s)

    def doubled(self) -> LinearCost:
        """Twice the seconds for the same units."""
        starts = self.started(2.0)
        return replace(starts, beta_s=2 * self.beta_s)

    def started(self, times: float) -> LinearCost:
        """With so many times the seconds that a call takes whatever its units."""
        return replace(self, alpha_s=times * self.alpha_s, least_s=times * self.least_s)


@dataclass(frozen=True, kw_only=True)
class Line:
    """``alpha_s + units * beta_s`` seconds for each call.

    Attributes:
        alpha_s: seconds to start a call.
        beta_s: seconds of one unit.
        r_squared: of the line through what was measured; None where nothing was.
        least_s: seconds of any call, however few units it has.

    Raises:
        ValueError: seconds below zero or not finite.
    """

    alpha_s: float = 0.0
    beta_s: float = 0.0
    r_squared: float | None = None
    least_s: float = 0.0

    def __post_init__(self) -> None:
        seconds = {"alpha_s": self.alpha_s, "beta_s": self.beta_s, "least_s": self.least_s}
        check_costs(seconds)

    def over(self, n: float) -> LinearCost:
        """The cost of ``n`` units, which chunks share."""
        return LinearCost(alpha_s=self.alpha_s, beta_s=self.beta_s, n=n, least_s=self.least_s)


FREE = Line()
"""Of a collective among one rank."""


@dataclass(frozen=True)
class AllReduce:
    """What a reduction of dense gradients costs.

    Attributes:
        alpha_s: seconds of any reduction.
        beta_s: seconds of one element more.

    Raises:
        ValueError: seconds below zero or not finite.
    """

    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        check_costs(vars(self))

    def seconds(self, elements: int) -> float:
        """Of one reduction; of none if there is nothing to reduce. There is none of less."""
        if elements < 0:
            return math.inf
        return self.alpha_s + self.beta_s * elements if elements else 0.0

    def seconds_of_each(self, elements_N: np.ndarray) -> np.ndarray:
        """Of many reductions, float ``[N]``; see ``seconds``."""
        seconds_N = np.where(elements_N > 0, self.alpha_s + self.beta_s * elements_N, 0.0)
        return np.where(elements_N < 0, np.inf, seconds_N)

    def hidden_elements(self, elements: int, window_s: float) -> int:
        """As many of ``elements`` as one reduction within the window reduces."""
        if self.seconds(elements) <= window_s:
            return elements
        if window_s <= self.alpha_s:
            return 0
        fitting = (window_s - self.alpha_s) / self.beta_s
        return min(elements, math.floor(fitting * (1 + ROUNDING)))
